"""The Ray cluster underneath: a private one that lives and dies with this process, or one that was there before.

Ray reads most of its settings from the environment of each process, at import. So `prepare_environment` comes before the first
import of ray, and this module imports it inside its functions.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from actors.loader import cache_root
from cluster import haproxy, ports
from cluster.config import RayConfig
from cluster.errors import ServeFailed, UsageError

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"

# Each may be set otherwise by the person who starts us; these are the values that fit long token streams.
SETTINGS = {
    HAPROXY: "1",
    # Default 30 s: every shutdown and redeploy would wait that long, streams or not. Replicas wait for their own requests.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # Default 120 s: a reload of HAProxy would cut every stream that takes longer.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "86400",
    # Default 15: anything else that runs on the machine would come before the model.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Default 8 for each core: memory that one of Ray's many threads freed is then of no use to the others.
    "MALLOC_ARENA_MAX": "2",
}
SIDE_PORTS = (
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
DEFAULT_METRICS_PORT = 8080
START_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A cluster we are connected to.

    `missing_haproxy` names nodes of a joined cluster that were started without it. `shared_host` is the address under which the
    cluster's nodes reach this machine; empty when there are no others.
    """

    private: bool
    metrics_url: str
    missing_haproxy: tuple[str, ...] = ()
    shared_host: str = ""


def prepare_environment(env: MutableMapping[str, str]) -> None:
    """Set what Ray must find in the environment of this process and its children. Mutates `env`."""
    for name, value in SETTINGS.items():
        env.setdefault(name, value)
    # Two servers on one machine must never share one of Serve's side ports: they are opened for reuse, so a client of one
    # server would at times be answered by the other. They are opened long after this, so defaults are not safe to take.
    for name in SIDE_PORTS:
        env.setdefault(name, str(ports.pick("0.0.0.0")))
    binary = haproxy.bundled_binary()
    if binary is not None and haproxy.BINARY_PATH not in env:
        env[haproxy.BINARY_PATH] = str(haproxy.write_launcher(binary, cache_root() / "bin"))


def connect(config: RayConfig, env: MutableMapping[str, str], replicas: int) -> RayCluster:
    """Join the cluster that `config` or RAY_ADDRESS names, else start a private one with room for `replicas` on this machine.

    Raises `UsageError` when there is none at that address, `ServeFailed` when a private one does not start.
    """
    quiet("ray")
    address = config.address or env.get("RAY_ADDRESS", "")
    return _join(address, env) if address else _start(config, replicas)


def quiet(package: str) -> None:
    """Import `package` of Ray and keep its notices off the terminal: what matters is said by us, the rest is in its logs."""
    importlib.import_module(package)  # which sets the level itself, so ours comes after
    logging.getLogger(package).setLevel(logging.ERROR)


def disconnect(cluster: RayCluster, app_name: str) -> None:
    """Take the application down: all of a private cluster, only our application of a joined one."""
    import ray
    from ray import serve

    if not ray.is_initialized():
        return
    with contextlib.suppress(Exception):  # whatever is left of Serve goes with the cluster's processes
        if cluster.private:
            serve.shutdown()
        else:
            serve.delete(app_name)
    ray.shutdown()


def _start(config: RayConfig, replicas: int) -> RayCluster:
    import ray

    store = config.object_store_bytes
    metrics_port = config.metrics_port or ports.choose("0.0.0.0", DEFAULT_METRICS_PORT)
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",
                # Logical: how many actors fit, not how many cores they use. Ours need one for each replica and little more.
                num_cpus=max(os.cpu_count() or 1, replicas + 3),
                object_store_memory=store,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                _metrics_export_port=metrics_port,
            )
            break
        except Exception as error:
            # Ray gives its processes half a minute to come up, which a busy machine may exceed.
            ray.shutdown()
            if attempt + 1 == START_ATTEMPTS:
                where = os.path.join(tempfile.gettempdir(), "ray", "session_latest", "logs")
                raise ServeFailed(
                    f"Ray did not start ({_first_line(error)}): the machine may be overloaded, so try again; Ray's logs are "
                    f"in {where}."
                ) from error
    return RayCluster(private=True, metrics_url=f"http://127.0.0.1:{metrics_port}/metrics")


def _join(address: str, env: MutableMapping[str, str]) -> RayCluster:
    import ray
    from ray._private.authentication import authentication_token_setup as auth

    # `ray start` guards a new cluster by a token; joining does not look for it by itself.
    auth.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except Exception as error:
        raise UsageError(
            f"No Ray cluster answers at {address} ({_first_line(error)}): start one with `ray start --head`, or leave "
            f"ray.address and RAY_ADDRESS empty for a private one."
        ) from error
    nodes = [node for node in ray.nodes() if node["Alive"]]
    missing = _without_haproxy(nodes)
    if missing:  # the driver must assume the same as the cluster: Ray's own proxy
        env[HAPROXY] = "0"
    head = nodes[0]
    metrics_url = f"http://{head['NodeManagerAddress']}:{head['MetricsExportPort']}/metrics"
    here = ray.util.get_node_ip_address()
    alone = all(node["NodeManagerAddress"] == here for node in nodes)
    return RayCluster(False, metrics_url, missing, "" if alone else here)


def _without_haproxy(nodes: list[dict[str, Any]]) -> tuple[str, ...]:
    """Addresses of nodes whose processes do not have HAProxy switched on."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def has_it(name: str) -> bool:
        return os.environ.get(name) == "1"

    ask = ray.remote(num_cpus=0)(has_it)
    asked = {
        node["NodeManagerAddress"]: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(HAPROXY)
        for node in nodes
    }
    return tuple(host for host, answer in asked.items() if not ray.get(answer, timeout=60))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
