"""The Serve config in the manifest: Ray understands all of it, and it is what `kvatlas serve` hands to Serve."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import ray.serve
from ray.serve import Application, RunTarget
from ray.serve.schema import ServeDeploySchema

import cluster.app
from cluster import serving
from cluster.config import Config
from cluster.config_options import options
from cluster.config_sources import ENV_PREFIX, OTHER_ENVIRONMENT, load
from cluster.errors import UsageError
from tests.deploy import manifest
from tests.deploy.conftest import FILES
from tests.deploy.serve_schema import unknown_keys


def test_ray_accepts_it_and_knows_every_key() -> None:
    config = manifest.serve_config()
    ServeDeploySchema.model_validate(config)
    assert unknown_keys(config) == []


MISTAKES: dict[str, Callable[[dict[str, Any]], object]] = {
    "proxy_locations": lambda c: c.update(proxy_locations="EveryNode"),
    "http_options.keep_alive_s": lambda c: c["http_options"].update(keep_alive_s=90),
    "logging_config.access_log": lambda c: c["logging_config"].update(access_log=False),
    "applications[0].route": lambda c: c["applications"][0].update(route="/"),
    "applications[0].deployments[0].max_ongoing_request": lambda c: c["applications"][0].update(
        deployments=[{"name": "engine", "max_ongoing_request": 1}]
    ),
    "applications[0].deployments[0].ray_actor_options.cpus": lambda c: c["applications"][0].update(
        deployments=[{"name": "engine", "ray_actor_options": {"cpus": 1}}]
    ),
    "applications[0].deployments[0].autoscaling_config.min": lambda c: c["applications"][0].update(
        deployments=[{"name": "engine", "autoscaling_config": {"min": 1}}]
    ),
}


@pytest.mark.parametrize("path", MISTAKES)
def test_an_unknown_key_is_found(path: str) -> None:
    broken = copy.deepcopy(manifest.serve_config())
    MISTAKES[path](broken)
    assert unknown_keys(broken) == [path]


def test_every_variable_of_ours_is_an_option(pod_environment: dict[str, str]) -> None:
    known = {option.env for option in options()} | OTHER_ENVIRONMENT.keys()
    ours = {name for name in pod_environment if name.startswith(ENV_PREFIX)}
    assert ours
    assert ours <= known
    assert not [value for value in pod_environment.values() if "$(" in value]


def test_the_import_path_is_the_builder() -> None:
    module, name = manifest.application()["import_path"].split(":")
    assert getattr(importlib.import_module(module), name) is cluster.app.app_from_env


def test_it_is_what_kvatlas_serve_builds(pod_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _served(_configuration(), monkeypatch)
    config = manifest.serve_config()
    assert {key: value for key, value in config.items() if key != "applications"} == expected.started_with
    app = manifest.application()
    assert (app["name"], app["route_prefix"]) == (expected.target.name, expected.target.route_prefix)
    assert app.keys() == {"name", "route_prefix", "import_path", "args"}
    assert isinstance(expected.target.target, Application)
    assert _described(_built(app["args"], monkeypatch)) == _described(expected.target.target)


def test_the_environment_and_the_arguments_arrive(
    pod_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = _described(_built(manifest.application()["args"], monkeypatch))
    config = _configuration()
    assert config.directory.redis_url == f"redis://:{manifest.SECRET_VALUE}@kvatlas-redis:6379/0"
    assert config.cluster.secret == config.http.admin_key == manifest.SECRET_VALUE
    assert not config.cluster.id  # the id of the Ray session, which keeps two clusters apart during an upgrade
    assert app["engine"]["num_replicas"] == manifest.application()["args"]["cluster.replicas"]
    replica = app["engine"]["init_args"][0]
    assert (replica.directory, replica.pool, replica.engine) == (config.directory, config.pool, config.engine)
    assert app["ingress"]["init_args"][0].routing.directory == config.directory


def test_another_configuration_builds_something_else(
    pod_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = manifest.application()["args"]
    same = _described(_built(args, monkeypatch))
    changes = {"cluster.replicas": args["cluster.replicas"] + 1, "pool.tokens": 16, "router.policy": "round_robin"}
    for path, value in changes.items():
        assert _described(_built({**args, path: value}, monkeypatch)) != same, path


@pytest.mark.parametrize(("path", "value"), [("pool.token", 1), ("cluster.replicas", 0), ("engine.threads", "two")])
def test_a_wrong_argument_is_refused(
    pod_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, path: str, value: object
) -> None:
    with pytest.raises(UsageError, match=path):
        _built({**manifest.application()["args"], path: value}, monkeypatch)


def _configuration() -> Config:
    """The configuration of the manifest, as `kvatlas serve --set ... --host ... --port ...` would have it in such a pod."""
    flags = {path: (f"--set {path}", value) for path, value in manifest.application()["args"].items()}
    http = manifest.serve_config()["http_options"]
    flags |= {f"http.{name}": (f"--{name}", http[name]) for name in ("host", "port")}
    return load(None, os.environ, flags).config


def _built(args: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Application:
    """What Serve gets from the builder for these arguments, without looking for the model."""
    monkeypatch.setattr(cluster.app, "resolve_model", lambda name, progress: FILES)
    return cluster.app.app_from_env(args)


class _Served:
    """What `kvatlas serve` asks of Serve."""

    def __init__(self) -> None:
        self.started_with: dict[str, Any] = {}
        self.targets: list[RunTarget] = []

    @property
    def target(self) -> RunTarget:
        (found,) = self.targets
        return found


def _served(config: Config, monkeypatch: pytest.MonkeyPatch) -> _Served:
    """Run the deployment step of `kvatlas serve` with a Serve that only listens."""
    seen = _Served()
    monkeypatch.setattr(ray.serve, "start", lambda **options: seen.started_with.update(options))
    monkeypatch.setattr(ray.serve, "run_many", lambda targets, **options: seen.targets.extend(targets))
    monkeypatch.setattr(serving, "_require_our_port", lambda config: None)
    serving.deploy(config, FILES)
    return seen


def _described(app: Application) -> dict[str, dict[str, Any]]:
    """All that Serve is told about each deployment of `app`, by name."""
    found: dict[str, dict[str, Any]] = {}

    def visit(item: object) -> object:
        if not isinstance(item, Application):
            return item
        bound: Any = item._bound_deployment
        assert not bound.init_kwargs
        found[bound.name] = {
            "class": bound.func_or_class,
            "init_args": [visit(argument) for argument in bound.init_args],
            "ray_actor_options": bound.ray_actor_options,
            **bound._deployment_config.model_dump(),
        }
        return bound.name

    visit(app)
    return found
