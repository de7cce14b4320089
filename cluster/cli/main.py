"""The `kvatlas` command: verbs, and how failures leave it.

Exit code 0: done. 1: it failed, for a reason outside the command. 2: the command, the configuration or the model can be put
right by whoever gave it. In both cases stderr has one sentence with the fix, never a traceback.
"""

from __future__ import annotations

import sys

import typer

from actors.errors import ModelNotFound, ModelRefused
from cluster.cli.bench import bench
from cluster.cli.config import config
from cluster.cli.directory import directory
from cluster.cli.explain import explain
from cluster.cli.output import complain
from cluster.cli.pool import pool
from cluster.cli.replay import replay
from cluster.cli.serve import serve
from cluster.cli.status import status
from cluster.cli.stop import stop
from cluster.errors import UsageError
from kvpool.errors import KvatlasError, PoolError

app = typer.Typer(
    name="kvatlas",
    help="Serve language models from a paged KV pool, with prefixes computed once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(serve)
app.command()(stop)
app.command()(status)
app.command()(explain)
app.command()(replay)
app.command()(config)
app.add_typer(bench)
app.add_typer(directory)
app.add_typer(pool)

_USAGE = (UsageError, ModelNotFound, ModelRefused, PoolError)


def main() -> None:
    """Entry point of the command."""
    try:
        app()
    except _USAGE as error:
        complain(f"kvatlas: {error}")
        sys.exit(2)
    except KvatlasError as error:
        complain(f"kvatlas: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
