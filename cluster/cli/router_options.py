"""Options of the router from --set, for commands that route without a server."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.cli.flags import load_config
from router.route_config import RouteConfig


def router_options(settings: Sequence[str], policy: str | None = None) -> RouteConfig:
    """Returns the router's options: of `settings` (NAME=VALUE, `router.` before the name or not), else of the environment.

    Raises `UsageError`.
    """
    paths = [setting if setting.startswith("router.") else f"router.{setting}" for setting in settings]
    return load_config(None, {"router.policy": ("--policy", policy)}, paths).config.router
