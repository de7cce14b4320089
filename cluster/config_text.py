"""A configuration as text: the table and the JSON of `kvatlas config`, and the commented example file."""

from __future__ import annotations

import json
import textwrap
from typing import Any

from cluster.config_options import RANGES, options, sections
from cluster.config_sources import OTHER_ENVIRONMENT, Loaded

MASK = "********"


def rows(loaded: Loaded) -> list[dict[str, Any]]:
    """One record per option: path, value (secrets masked), origin, default, env, doc."""
    found = []
    for option in options():
        section, name = option.path.split(".")
        value = getattr(getattr(loaded.config, section), name)
        if option.secret and value:
            value = MASK
        origin = loaded.origins[option.path]
        found.append(
            {"path": option.path, "value": value, "origin": origin, "default": option.default, "env": option.env,
             "doc": option.doc}
        )  # fmt: skip
    return found


def example() -> str:
    """The documented example file: every option in place, at its default."""
    lines = [
        "# kvatlas configuration. Every option is here, at its default; delete what you do not change.",
        "# Use it with `kvatlas serve --config FILE`. A flag beats an environment variable, which beats this file:",
        "# the option pool.tokens below is also KVATLAS_POOL__TOKENS and `--set pool.tokens=N`.",
        "# `kvatlas config --config FILE` prints what results, and where each value came from.",
        "#",
        "# Environment variables that are no option:",
    ]
    for name, meaning in OTHER_ENVIRONMENT.items():
        lines += _comment(f"{name}: {meaning}", "")
    by_section = {name: cls for name, cls in sections()}
    shown = ""
    for option in options():
        section, name = option.path.split(".")
        if section != shown:
            shown = section
            lines += ["", *_comment((by_section[section].__doc__ or "").strip(), ""), f"{section}:"]
        else:
            lines.append("")
        lines += _comment(option.doc + _limits(option.path, option.kind), "  ")
        lines.append(f"  {name}: {json.dumps(option.default)}")
    return "\n".join(lines) + "\n"


def _limits(path: str, kind: Any) -> str:
    if path in RANGES:
        return f" Allowed: {RANGES[path]}."
    choices = getattr(kind, "__args__", ())
    return f" Allowed: {', '.join(choices)}." if choices else ""


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
