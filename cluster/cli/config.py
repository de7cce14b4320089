"""`kvatlas config`: every option, its value, and where the value came from."""

from __future__ import annotations

from typing import Annotated

import typer

from cluster.cli.flags import load_config
from cluster.cli.output import print_json, print_table
from cluster.cli.serve import ConfigFile, Settings
from cluster.config_text import example, rows


def config(
    config: ConfigFile = None,
    settings: Settings = None,
    show_example: Annotated[bool, typer.Option("--example", help="Print the documented example file instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Print the configuration that `kvatlas serve` would use. Secrets are masked."""
    if show_example:
        print(example(), end="")
        return
    found = rows(load_config(config, {}, settings or []))
    if as_json:
        print_json({"options": found})
        return
    print_table(["OPTION", "VALUE", "ORIGIN"], [(row["path"], row["value"], row["origin"]) for row in found])
