"""The two applications that the HTTP benchmark compares, side by side on a private Ray cluster of its own.

kvatlas is what `kvatlas serve` deploys, with a private Redis, but for the class behind the engine deployment; the echo is
another application of the same Serve instance, so both are behind one proxy. Cluster, Redis, regions and the model directory
are gone when the body is over, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from actors.config import DirectoryConfig
from actors.loader import ModelFiles
from actors.region_home import owner_tag
from cluster import http_client, membership, ports
from cluster.bench import http_model
from cluster.bench.http_plan import Plan
from cluster.bench.server import signals_as_interrupts
from cluster.config import ClusterConfig, Config, HttpConfig, RayConfig
from cluster.embedded_redis import EmbeddedRedis
from cluster.errors import ServeFailed
from cluster.ray_cluster import RayCluster, connect, disconnect, prepare_environment, quiet
from cluster.serving import HTTP_OPTIONS, LOGGING, PROXY_LOCATION, wait_ready
from kvpool import DEFAULT_DIRECTORY, REGION_PREFIX, sweep

if TYPE_CHECKING:
    pass

HOST: Final = "127.0.0.1"
_STORE_BYTES: Final = 100_000_000
_ECHO_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Both:
    """Where they listen; `admin_key` opens kvatlas's debug routes."""

    port: int
    admin_key: str


@contextlib.contextmanager
def serving_both(plan: Plan) -> Iterator[Both]:
    """Both applications, ready, for the body's time. Raises `ServeFailed`.

    Mutates this process's environment, which Ray reads.
    """
    with contextlib.ExitStack() as parts:
        parts.enter_context(signals_as_interrupts())
        home = Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-bench-")))
        prepare_environment(os.environ)
        redis = parts.enter_context(EmbeddedRedis(home, HOST))
        config = _config(plan, redis.url)
        files = http_model.write(_made(home / "model"))
        owner = owner_tag(membership.of(config.cluster).secret)
        parts.callback(
            sweep, DEFAULT_DIRECTORY, REGION_PREFIX, owner=owner
        )  # of replicas that did not end by themselves
        private = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        parts.callback(_take_down, connect(config.ray, private, plan.replicas))
        _deploy(config, files, plan)
        wait_ready(config, f"http://{HOST}:{config.http.port}")
        _wait_for_echo(config.http.port)
        yield Both(config.http.port, config.http.admin_key)


def _config(plan: Plan, redis_url: str) -> Config:
    return replace(
        Config(),
        cluster=ClusterConfig(plan.replicas, f"bench-{secrets.token_hex(4)}", secrets.token_hex(16)),
        directory=DirectoryConfig(redis_url=redis_url),
        http=HttpConfig(host=HOST, port=ports.choose(HOST, 0), admin_key=secrets.token_urlsafe(32)),
        ray=RayConfig(object_store_bytes=_STORE_BYTES),
    )


def _made(path: Path) -> Path:
    path.mkdir()
    return path


def _deploy(config: Config, files: ModelFiles, plan: Plan) -> None:
    quiet("ray.serve")
    from ray import serve

    from cluster.app import APP_NAME, build
    from cluster.bench import http_echo
    from cluster.bench.http_engine import ScriptedEngine

    serve.start(
        proxy_location=PROXY_LOCATION,
        http_options={"host": config.http.host, "port": config.http.port, **HTTP_OPTIONS},
        logging_config=LOGGING,
    )
    kvatlas = build(config, files, ScriptedEngine, (plan.cadence_s,))
    ours = serve.RunTarget(kvatlas, name=APP_NAME, route_prefix="/")
    echo = http_echo.echo_application(plan.replicas, plan.cadence_s)
    targets = [ours, serve.RunTarget(echo, name=http_echo.APP, route_prefix=http_echo.PREFIX)]
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _take_down(cluster: RayCluster) -> None:
    """Ends it. Ray reports every actor that is ended as one that died, which is dropped."""
    with (
        open(os.devnull, "w", encoding="utf-8") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        disconnect(cluster, "")


def _wait_for_echo(port: int) -> None:
    from cluster.bench import http_echo

    deadline = time.monotonic() + _ECHO_S
    url = f"http://{HOST}:{port}{http_echo.PREFIX}/"
    while time.monotonic() < deadline:
        with contextlib.suppress(ServeFailed):
            if http_client.post(url, {"max_tokens": 1}, _ECHO_S).status == 200:
                return
        time.sleep(0.1)
    raise ServeFailed(f"The echo to compare with was not ready after {_ECHO_S:g} s: see Ray's logs, and try again.")
