"""The Serve application: the engine deployment with its replicas, and the ingress deployment with the router to them.

`kvatlas serve` uses `build`; `serve run cluster.app:app_from_env` and KubeRay use `app_from_env`, which reads the same
configuration sources except flags.
"""

from __future__ import annotations

import os
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from actors.loader import ModelFiles, resolve_model
from actors.progress import TerminalProgress
from cluster import membership
from cluster.config import Config
from cluster.config_sources import load
from cluster.engine_deployment import EngineDeployment
from cluster.errors import UsageError
from cluster.ingress import Ingress, IngressSettings
from cluster.routing import RoutingSettings

APP_NAME = "kvatlas"
ENGINE_NAME = "engine"
INGRESS_NAME = "ingress"
ROUTER = "router.serve_router.PrefixRouter"

# Logical: what Ray counts when it places actors. Together no more than the replicas' number, so that two replicas and the
# ingress have room on a machine with two cores.
ENGINE_CPUS = 0.9
INGRESS_CPUS = 0.1

# The replica keeps its own waiting line and refuses what exceeds it with a reason; Serve must not queue in front of it.
MAX_ONGOING = 4096

# More than the proxy lets in, so that it is our own limits that refuse a request, in our own words.
MAX_CONNECTIONS = 16_384

NOT_OURS = ("http.host", "http.port")


def served_name(config: Config, files: ModelFiles) -> str:
    """What clients call the model."""
    return config.model.served_name or files.name


def build(
    config: Config, files: ModelFiles, engine_class: type[Any] = EngineDeployment, engine_args: tuple[Any, ...] = ()
) -> Application:
    """The application for `config`, serving the model at `files` (a path that every node can read).

    A replica is an `engine_class` of the replica's configuration, the model's path and `engine_args`.
    """
    name = served_name(config, files)
    member = membership.of(config.cluster)
    engine = serve.deployment(
        name=ENGINE_NAME,
        num_replicas=config.cluster.replicas,
        max_ongoing_requests=MAX_ONGOING,
        request_router_config=RequestRouterConfig(request_router_class=cast("Any", ROUTER)),
        ray_actor_options={"num_cpus": ENGINE_CPUS},
        graceful_shutdown_timeout_s=120,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5,
        health_check_timeout_s=30,
        max_constructor_retry_count=3,
    )(engine_class)
    ingress = serve.deployment(
        name=INGRESS_NAME,
        num_replicas=1,
        max_ongoing_requests=MAX_CONNECTIONS,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        graceful_shutdown_timeout_s=120,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
    )(Ingress)
    routing = RoutingSettings(member, config.directory, config.router)
    settings = IngressSettings.of(config.http, name, str(files.path), routing)
    return ingress.bind(settings, engine.bind(config.replica(name, member), str(files.path), *engine_args))


def app_from_env(options: dict[str, Any] | None = None) -> Application:
    """Builder for `serve run cluster.app:app_from_env pool.tokens=65536` and for `import_path` in a Serve config.

    `options` maps option paths to values and beats the environment. Raises `UsageError`, also for options that are Serve's and
    Ray's to know here, and `ModelNotFound`.
    """
    for path in options or {}:
        if path in NOT_OURS or path.startswith("ray."):
            raise UsageError(
                f"{path} has no effect where Serve and Ray are started by somebody else: set it there (http_options of the "
                f"Serve config, `ray start`), and leave it out here."
            )
    flags = {path: (f"args {path}", value) for path, value in (options or {}).items()}
    config = load(None, os.environ, flags).config
    return build(config, resolve_model(config.model.model, TerminalProgress()))
