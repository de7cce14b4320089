"""The Kubernetes documents against the schema that KubeRay's API server would hold them to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy import crd, manifest

pytestmark = pytest.mark.usefixtures("_definition")

Change = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def _definition() -> None:
    crd.require_crd()


def test_ray_services_are_valid() -> None:
    assert crd.problems(manifest.ray_service(), crd.ray_service_schema()) == []


def test_other_pods_and_services_are_valid() -> None:
    deployments, services = manifest.of_kind("Deployment"), manifest.of_kind("Service")
    assert deployments
    assert services
    for deployment in deployments:
        assert crd.problems(deployment["spec"]["template"], crd.pod_template_schema()) == []
    for service in services:
        assert crd.problems(service["spec"], crd.service_spec_schema()) == []


def _spec(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["spec"]
    return found


def _head(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _spec(document)["rayClusterConfig"]["headGroupSpec"]
    return found


def _group(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _spec(document)["rayClusterConfig"]["workerGroupSpecs"][0]
    return found


def _pod(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _group(document)["template"]["spec"]
    return found


def _container(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = _pod(document)["containers"][0]
    return found


def _from_secret(document: dict[str, Any]) -> dict[str, Any]:
    entries = _container(document)["env"]
    found: dict[str, Any] = next(entry["valueFrom"] for entry in entries if "valueFrom" in entry)
    return found


TYPOS: dict[str, Change] = {
    "spec": lambda d: _spec(d).update(rayClusterDeletionDelay=180),
    "cluster": lambda d: _spec(d)["rayClusterConfig"].update(rayversion="2.60.0"),
    "head group": lambda d: _head(d).update(rayStartParam={}),
    "worker group": lambda d: _group(d).update(minReplica=2),
    "pod": lambda d: _pod(d).update(terminationGracePeriod=150),
    "container": lambda d: _container(d).update(volumeMount=[]),
    "port": lambda d: _container(d)["ports"][0].update(port=8000),
    "variable": lambda d: _container(d)["env"][0].update(val="1"),
    "secret": lambda d: _from_secret(d).update(secretRef={}),
    "volume": lambda d: _pod(d)["volumes"][0]["emptyDir"].update(size="2Gi"),
    "security": lambda d: _pod(d)["securityContext"].update(runAsNonroot=True),
    "hook": lambda d: _container(d)["lifecycle"].update(prestop={}),
}

WRONG_TYPES: dict[str, Change] = {
    "delay": lambda d: _spec(d).update(rayClusterDeletionDelaySeconds="180"),
    "start parameter": lambda d: _group(d)["rayStartParams"].update({"num-cpus": 2}),
    "replicas": lambda d: _group(d).update(replicas="2"),
    "port": lambda d: _container(d)["ports"][0].update(containerPort="8000"),
    "value": lambda d: _container(d)["env"][0].update(value=1),
    "serve config": lambda d: _spec(d).update(serveConfigV2={}),
    "authentication": lambda d: _spec(d)["rayClusterConfig"]["authOptions"].update(mode="tokens"),
    "missing group name": lambda d: _group(d).pop("groupName"),
}


@pytest.mark.parametrize(
    "change", [*TYPOS.values(), *WRONG_TYPES.values()], ids=[*TYPOS, *(f"{n} type" for n in WRONG_TYPES)]
)
def test_a_mistake_is_found(change: Change) -> None:
    broken = copy.deepcopy(manifest.ray_service())
    change(broken)
    assert crd.problems(broken, crd.ray_service_schema())


def test_defaults_are_filled_in_before_anything_is_required() -> None:
    document = copy.deepcopy(manifest.ray_service())
    del _group(document)["minReplicas"], _group(document)["maxReplicas"]
    assert crd.problems(document, crd.ray_service_schema()) == []
