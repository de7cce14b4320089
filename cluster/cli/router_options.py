"""Options of the router from --policy and --set, for commands that route without a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cluster.cli.flags import load_config
from cluster.errors import UsageError
from router.route_config import RouteConfig

if TYPE_CHECKING:
    from router.route_config import PolicyName

ALL: Final = "all"
RouterSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Option of the router, e.g. balance_weight=0.")
]
_ELSEWHERE: Final = {
    "policy": "name policies with --policy",
    "decision_log": "nothing is logged here",
}


def router_options(
    settings: Sequence[str], policy: str | None = None, elsewhere: dict[str, str] | None = None
) -> RouteConfig:
    """Returns the router's options: of `settings` (NAME=VALUE, `router.` before the name or not), else of the environment.

    `elsewhere`: options that have no effect in this command, and what to do in their place. Raises `UsageError`.
    """
    paths = []
    for setting in settings:
        name = setting.partition("=")[0].strip().removeprefix("router.")
        if "." in name:
            raise UsageError(
                f"--set {name} is no option of the router: give one of those, such as --set balance_weight=0."
            )
        instead = (_ELSEWHERE | (elsewhere or {})).get(name)
        if instead is not None:
            raise UsageError(f"--set {name} has no effect on a replay: {instead}.")
        paths.append(setting if setting.startswith("router.") else f"router.{setting}")
    return load_config(None, {"router.policy": ("--policy", policy)}, paths).config.router


def policies(text: str) -> list[PolicyName]:
    """Returns the policies in a comma-separated list, each once; `all` stands for all. Raises `UsageError`."""
    from router.policy import POLICIES

    names: dict[str, None] = {}
    for name in (part.strip() for part in text.split(",")):
        if name == ALL:
            names |= dict.fromkeys(POLICIES)
        elif name in POLICIES:
            names[name] = None
        elif name:
            raise UsageError(f"--policy {name} is no routing policy: choose from {ALL}, {', '.join(POLICIES)}.")
    if not names:
        raise UsageError(f"--policy is empty: give one or more of {ALL}, {', '.join(POLICIES)}.")
    return list(names)  # type: ignore[arg-type]  # each was looked up
