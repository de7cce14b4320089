"""Command-line flags as configuration values: which option a flag sets, and `--set path=value` for all the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from cluster.config_sources import Loaded, load
from cluster.errors import UsageError


def load_config(file: Path | None, named: dict[str, tuple[str, Any]], settings: list[str]) -> Loaded:
    """The configuration from `file`, the environment, and flags.

    `named` maps option paths to (flag, value or None when not given); `settings` are the `path=value` of --set. Raises
    `UsageError`.
    """
    flags: dict[str, tuple[str, Any]] = {}
    for setting in settings:
        path, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting} lacks a value: write --set {setting}=VALUE.")
        flags[path.strip()] = ("--set", value)
    flags |= {path: given for path, given in named.items() if given[1] is not None}
    return load(file, os.environ, flags)
