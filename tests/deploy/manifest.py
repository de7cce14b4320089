"""What `deploy/` says, read the way its readers read it: Kubernetes documents, the Serve config inside, the environment of pods.

Secrets get made-up values of the length that the README's command makes.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
SECRET_VALUE = "0123456789abcdef" * 3

_UNITS = {"": 1, "m": 0.001, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@functools.cache
def documents() -> list[dict[str, Any]]:
    """Every Kubernetes document in `deploy/`, in the order of the files. Shared by all callers: change only copies."""
    found = []
    for file in sorted(DEPLOY.glob("*.yaml")):
        found += [document for document in yaml.safe_load_all(file.read_text()) if "kind" in document]
    return found


def of_kind(kind: str) -> list[dict[str, Any]]:
    """The documents of one kind."""
    return [document for document in documents() if document["kind"] == kind]


def ray_service() -> dict[str, Any]:
    """The one RayService."""
    (found,) = of_kind("RayService")
    return found


def serve_config() -> dict[str, Any]:
    """The Serve config inside the RayService."""
    config: dict[str, Any] = yaml.safe_load(ray_service()["spec"]["serveConfigV2"])
    return config


def application() -> dict[str, Any]:
    """The one application of the Serve config."""
    (found,) = serve_config()["applications"]
    return dict(found)


def head_group() -> dict[str, Any]:
    """The group of the head pod."""
    group: dict[str, Any] = ray_service()["spec"]["rayClusterConfig"]["headGroupSpec"]
    return group


def worker_groups() -> list[dict[str, Any]]:
    """The groups of worker pods."""
    groups: list[dict[str, Any]] = ray_service()["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return groups


def ray_groups() -> list[dict[str, Any]]:
    """Head and workers."""
    return [head_group(), *worker_groups()]


def pod_specs() -> list[dict[str, Any]]:
    """The pod specs of every document: Ray's and Redis's."""
    ours = [document["spec"]["template"]["spec"] for document in of_kind("Deployment")]
    return [*(group["template"]["spec"] for group in ray_groups()), *ours]


def container(group: dict[str, Any]) -> dict[str, Any]:
    """The only container of a Ray group."""
    (found,) = group["template"]["spec"]["containers"]
    return dict(found)


def environment(entries: list[dict[str, Any]]) -> dict[str, str]:
    """The variables that a process of a container with these `env` entries sees.

    As Kubernetes does it: `$(NAME)` stands for an entry further up, and stays as it is where there is none.
    """
    seen: dict[str, str] = {}

    def known(match: re.Match[str]) -> str:
        return seen.get(match[1], match[0])

    for entry in entries:
        seen[entry["name"]] = re.sub(r"\$\((\w+)\)", known, entry.get("value", SECRET_VALUE))
    return seen


def secret_refs() -> set[tuple[str, str]]:
    """(Secret, key) of everything that containers take from Secrets."""
    found = set()
    for spec in pod_specs():
        for item in spec["containers"]:
            for entry in item.get("env", []):
                if "valueFrom" in entry:
                    ref = entry["valueFrom"]["secretKeyRef"]
                    found.add((ref["name"], ref["key"]))
    return found


def quantity(text: str) -> float:
    """A Kubernetes quantity (`250m`, `2Gi`) as a number. Raises ValueError for what is none."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _UNITS[match[2]]
