"""`kvatlas serve`, from a valid configuration to a clean stop.

Order: what can fail at once (port, model name) before what takes long (conversion) before what must be undone (Ray). A stop
signal becomes the exception `StopRequested` in the main thread, so the same `finally` undoes a half-made start and a running
server alike.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any, Final

from actors.loader import ModelFiles, resolve_model
from actors.progress import Progress
from actors.region_home import owner_tag
from cluster import http_client, membership, ports, server_state
from cluster.config import Config
from cluster.embedded_redis import EmbeddedRedis
from cluster.errors import ServeFailed, UsageError
from cluster.failure import refusal
from cluster.ray_cluster import HAPROXY, RayCluster, connect, disconnect, prepare_environment, quiet
from cluster.ready import ready_block
from kvpool.directory.address import without_password

# A stop waits this long for requests in progress, then ends them.
STOP_S = 10.0
# A replica is done a moment before the last bytes of its answers have left the proxy.
DRAIN_TAIL_S = 0.3
# Killed processes are gone within moments, and their regions may then be removed.
SWEEPS = 6
SWEEP_PAUSE_S = 0.5
# A start waits this long for the directory, then serves without.
DIRECTORY_S = 5.0
# How Serve itself is started; a Serve config that starts it says the same.
PROXY_LOCATION: Final = "EveryNode"
HTTP_OPTIONS: Final = {"keep_alive_timeout_s": 90}
LOGGING: Final = {"enable_access_log": False}


class StopRequested(BaseException):
    """SIGINT or SIGTERM came. Not an `Exception`: nothing on the way may take it for a failure."""


def serve_forever(config: Config, progress: Progress, say: Callable[[str], None]) -> None:
    """Serve until a stop signal; returns when everything is down again.

    `say` gets lines for the person. Raises `UsageError`, `ModelNotFound`, `ModelRefused`, `PoolError` or `ServeFailed`.
    """
    started = time.monotonic()
    ports.require_free(config.http.host, config.http.port)
    with _stop_signals():
        try:
            files = resolve_model(config.model.model, progress)
            if not config.http.admin_key:  # for `kvatlas status` of this user only; it is in no list and no log
                config = replace(config, http=replace(config.http, admin_key=secrets.token_urlsafe(32)))
            _run(config, files, progress, say, started)
        except (StopRequested, KeyboardInterrupt):
            say("Stopped.")


def _run(config: Config, files: ModelFiles, progress: Progress, say: Callable[[str], None], started: float) -> None:
    owner = owner_tag(membership.of(config.cluster).secret)
    prepare_environment(os.environ)
    directory = server_state.runtime_dir(os.environ)
    url = f"http://{_reachable(config.http.host)}:{config.http.port}"
    model = config.model.served_name or files.name
    state = server_state.here(config.http.host, config.http.port, url, model, config.http.admin_key)
    server_state.write(directory, state)  # from here on `kvatlas stop` finds us
    cluster: RayCluster | None = None
    redis: EmbeddedRedis | None = None
    try:
        with progress.phase("ray", config.ray.address or "private cluster"):
            cluster = connect(config.ray, os.environ, config.cluster.replicas)
        _catch_signals()  # Ray has put handlers of its own in place
        if cluster.missing_haproxy:
            say(_haproxy_advice(cluster.missing_haproxy))
        if not config.directory.redis_url:
            redis = EmbeddedRedis(directory, cluster.shared_host)
            redis.start()
            config = replace(config, directory=replace(config.directory, redis_url=redis.url))
        with progress.phase("start", f"{config.cluster.replicas} replicas and the ingress"):
            deploy(config, files)
            found = wait_ready(config, url)
        state = replace(state, metrics_url=cluster.metrics_url)
        server_state.write(directory, state)
        where = "private Redis" if redis is not None else without_password(config.directory.redis_url)
        seconds, asks = time.monotonic() - started, bool(config.http.api_keys or config.http.api_keys_file)
        tells = not config.http.salt_per_key
        what = (url, cluster.metrics_url, model, found["replicas"], where, seconds)
        say(ready_block(*what, asks_for_keys=asks, tells_cached=tells))
        if not _is_known(found):
            problem = found["routing"]["directory"].get("problem") or f"{where} does not tell of all pools yet"
            say(f"Note: requests are routed by load only until the directory works: {problem}.")
        while True:
            signal.pause()
    except (StopRequested, KeyboardInterrupt):
        say("Stopping ...")
        raise
    finally:
        if cluster is not None:
            _take_down(cluster, url, state.admin_key, owner)
        if redis is not None:
            redis.close()
        server_state.remove(directory, state)


def deploy(config: Config, files: ModelFiles) -> None:
    """Hand the application to Serve without waiting for it."""
    quiet("ray.serve")
    from ray import serve

    from cluster.app import APP_NAME, build

    try:
        serve.start(
            proxy_location=PROXY_LOCATION,
            http_options={"host": config.http.host, "port": config.http.port, **HTTP_OPTIONS},
            logging_config=LOGGING,
        )
    except Exception as error:  # of Ray's own kinds: a proxy that cannot bind its ports, a controller that died
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise ServeFailed(f"Ray Serve did not start ({reason}): try again, or see Ray's logs.") from error
    _require_our_port(config)
    target = serve.RunTarget(build(config, files), name=APP_NAME, route_prefix="/")
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def _require_our_port(config: Config) -> None:
    """Raise `UsageError` where Serve runs on the cluster already and listens elsewhere: it keeps the address of its start."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve was started a moment ago"
    actual = client.http_config
    if (actual.host, actual.port) != (config.http.host, config.http.port):
        raise UsageError(
            f"Ray Serve runs on this cluster already and listens on {actual.host}:{actual.port}: use --host {actual.host} "
            f"--port {actual.port}, or shut it down with `serve shutdown`."
        )


def wait_ready(config: Config, url: str) -> dict[str, Any]:
    """Wait until the API is ready with every replica. Returns the state of the ingress, as /debug/state gives it.

    The router gets `DIRECTORY_S` to hear of them all; without a directory it serves as well, by load.

    Raises the replica's own refusal as soon as it is known, `ServeFailed` when Serve gives up or time runs out.
    """
    from ray import serve

    from cluster.app import APP_NAME

    deadline = time.monotonic() + config.ray.start_timeout_s
    served_at = float("inf")
    next_look = 0.0
    while time.monotonic() < deadline:
        with contextlib.suppress(ServeFailed):  # until HAProxy listens and has learned of the ingress
            answer = http_client.get(f"{url}/debug/state", 5.0, config.http.admin_key)
            if answer.status == 200 and len(answer.body.get("replicas", ())) >= config.cluster.replicas:
                served_at = min(served_at, time.monotonic())
                if _is_known(answer.body) or time.monotonic() - served_at > DIRECTORY_S:
                    return answer.body
        if time.monotonic() >= next_look:  # dear: tens of milliseconds of the driver and of the controller
            next_look = time.monotonic() + 1.0
            application = serve.status().applications.get(APP_NAME)
            if application is not None:
                messages = [application.message, *(item.message for item in application.deployments.values())]
                error = refusal(messages, final=application.status == "DEPLOY_FAILED")
                if error is not None:
                    raise error
        time.sleep(0.2)
    raise ServeFailed(
        f"Not ready after {config.ray.start_timeout_s:g} s: raise ray.start_timeout_s for a large model, or see Ray's logs."
    )


def _is_known(state: dict[str, Any]) -> bool:
    """Whether the router has heard of every pool, or has no directory to hear of them from. `state` is the ingress's."""
    directory = state.get("routing", {}).get("directory", {})
    known = {name for pool in directory.get("pools", ()) for name in pool["replica_ids"]}
    ours = {replica["replica_id"] for replica in state["replicas"]}
    return directory.get("state") == "off" or ours <= known


def _drain(url: str, admin_key: str) -> None:
    """Wait until no replica has a request, at most `STOP_S`. Serve would close the proxy before their streams end."""
    deadline = time.monotonic() + STOP_S
    with contextlib.suppress(ServeFailed):  # nothing answers any more: nothing to wait for
        while time.monotonic() < deadline:
            answer = http_client.get(f"{url}/debug/state", 2.0, admin_key)
            replicas = answer.body.get("replicas") or []
            if not any(status["running"] or status["waiting"] for status in replicas):
                break
            time.sleep(0.2)
    time.sleep(DRAIN_TAIL_S)


def _take_down(cluster: RayCluster, url: str, admin_key: str, owner: bytes) -> None:
    """Let requests in progress finish, then stop, each within about `STOP_S`. A second signal ends the wait.

    Regions on this machine that carry the tag `owner` and that nobody has open go then.
    """
    from cluster.app import APP_NAME

    with contextlib.suppress(StopRequested, KeyboardInterrupt):
        _drain(url, admin_key)
    worker = threading.Thread(target=disconnect, args=(cluster, APP_NAME), name="kvatlas-stop", daemon=True)
    worker.start()
    with _hush():  # Ray reports every actor that we end as one that died
        with contextlib.suppress(StopRequested, KeyboardInterrupt):
            worker.join(STOP_S)
        if worker.is_alive():
            import ray

            ray.shutdown()  # ends the processes of a private cluster, whatever they are doing
            for _ in range(SWEEPS):
                _sweep(owner)
                time.sleep(SWEEP_PAUSE_S)
        else:
            _sweep(owner)


def _sweep(owner: bytes) -> None:
    """Remove the regions that killed replicas of ours left, which nobody will adopt any more."""
    from kvpool import DEFAULT_DIRECTORY, REGION_PREFIX, sweep

    sweep(DEFAULT_DIRECTORY, REGION_PREFIX, owner=owner)


@contextlib.contextmanager
def _hush() -> Iterator[None]:
    """While the body runs, what any thread of this process prints is dropped."""
    with (
        open(os.devnull, "w", encoding="utf-8") as sink,
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
    ):
        yield


@contextlib.contextmanager
def _stop_signals() -> Iterator[None]:
    """While the body runs, SIGINT and SIGTERM raise `StopRequested` in the main thread."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _catch_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _catch_signals() -> None:
    """Put our handlers for SIGINT and SIGTERM in place."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)


def _on_signal(_number: int, _frame: FrameType | None) -> None:
    raise StopRequested


def _reachable(host: str) -> str:
    """An address under which this machine reaches a server that listens on `host`."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _haproxy_advice(nodes: tuple[str, ...]) -> str:
    return (
        f"Note: {', '.join(nodes)} started Ray without HAProxy, so requests go through Ray's own proxy, which costs more "
        f"time per token. To change that, restart Ray there with `{HAPROXY}=1 ray start ...`, on the head and every worker."
    )
