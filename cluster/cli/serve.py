"""`kvatlas serve`: a model behind the API, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from cluster.cli.flags import load_config
from cluster.cli.output import say
from cluster.errors import UsageError
from router.route_config import PolicyName

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="YAML file; see `kvatlas config --example`.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Any option, e.g. engine.max_running=8.")
]


def serve(
    model: Annotated[str | None, typer.Argument(help="`demo`, a directory, or a hub id. Default: demo.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port of the API. Default: 8000.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    config: ConfigFile = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients use for the model.")] = None,
    replicas: Annotated[int | None, typer.Option(help="How many replicas. Default: 2.")] = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="Redis of the directory. Default: a private one.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help=f"{', '.join(get_args(PolicyName))}. Default: cost.")] = None,
    mode: Annotated[str | None, typer.Option(help="`fast` (bfloat16) or `exact` (float32).")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")] = None,
    pool_tokens: Annotated[int | None, typer.Option(help="Size of each replica's block pool, in tokens.")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens per block.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of each replica.")] = None,
    admin_key_file: Annotated[str | None, typer.Option(help="File with the key of the admin endpoints.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster; `auto` finds one here.")] = None,
    settings: Settings = None,
) -> None:
    """Serve MODEL over HTTP until Ctrl-C."""
    loaded = load_config(
        config,
        {
            "model.model": ("MODEL", model),
            "model.served_name": ("--served-model-name", served_model_name),
            "model.max_model_len": ("--max-model-len", max_model_len),
            "cluster.replicas": ("--replicas", replicas),
            "directory.redis_url": ("--redis", redis),
            "router.policy": ("--policy", policy),
            "engine.mode": ("--mode", mode),
            "engine.threads": ("--threads", threads),
            "pool.tokens": ("--pool-tokens", pool_tokens),
            "pool.block_tokens": ("--block-tokens", block_tokens),
            "http.host": ("--host", host),
            "http.port": ("--port", port),
            "http.admin_key_file": ("--admin-key-file", admin_key_file),
            "ray.address": ("--ray-address", ray_address),
        },
        settings or [],
    )
    if not loaded.config.ray.address:  # else the log is on the disk of another machine
        _check_log(loaded.config.router.decision_log)
    from actors.progress import TerminalProgress
    from cluster.serving import serve_forever

    serve_forever(loaded.config, TerminalProgress(), say)


def _check_log(path: str) -> None:
    """Raises `UsageError` where no decision log can be written: nobody would notice until it is needed."""
    from router.decision_log import DecisionLogRefused, check

    try:
        check(path)
    except DecisionLogRefused as error:
        raise UsageError(f"{error}.") from error
