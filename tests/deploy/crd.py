"""KubeRay's own schema of a RayService, made strict, as a validator.

The schema says what the API server enforces; three things differ from plain JSON schema. `int-or-string` has no JSON type and
becomes a choice of two. A key that no `properties` list names is dropped by the server without a word, so here it is an error.
Defaults are filled in before anything is required, as the server does.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.deploy.manifest import ROOT

CRD = ROOT.parent / "shared" / "kuberay" / "ray.io_rayservices.v1.7.0.yaml"
VERSION = "v1"

Schema = dict[str, Any]


def require_crd() -> None:
    """Skip the test where the definition, which is KubeRay's and not in this repository, is not at hand."""
    if not CRD.is_file():
        pytest.skip(f"KubeRay's resource definition is not at {CRD}")


@functools.cache
def ray_service_schema() -> Schema:
    """The strict schema of a whole RayService document."""
    definition = yaml.load(CRD.read_text(), yaml.CSafeLoader)
    (version,) = [item for item in definition["spec"]["versions"] if item["name"] == VERSION]
    schema: Schema = strict(version["schema"]["openAPIV3Schema"])
    # `metadata` is an object without properties in every resource definition: the server knows it by itself.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def pod_template_schema() -> Schema:
    """The schema of any pod template: a RayService holds several."""
    found: Schema = _inside("rayClusterConfig", "headGroupSpec", "template")
    return found


def service_spec_schema() -> Schema:
    """The schema of a Service's spec: a RayService can hold one."""
    found: Schema = _inside("serveService", "spec")
    return found


def problems(document: Any, schema: Schema) -> list[str]:
    """What is wrong with `document`, each as `path: message`."""
    filled = with_defaults(document, schema)
    errors = Draft202012Validator(schema).iter_errors(filled)
    return sorted(f"{'/'.join(str(part) for part in error.absolute_path)}: {error.message}" for error in errors)


def strict(schema: Any) -> Any:
    """A copy of `schema` without int-or-string, and closed against unknown keys."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    out = {key: strict(value) for key, value in schema.items()}
    if isinstance(out.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


def with_defaults(document: Any, schema: Schema) -> Any:
    """A copy of `document` with the defaults of `schema` where it says nothing."""
    if isinstance(document, dict):
        known: dict[str, Schema] = schema.get("properties", {})
        filled = {key: copy.deepcopy(item["default"]) for key, item in known.items() if "default" in item}
        filled |= document
        extra = schema.get("additionalProperties")
        return {
            key: with_defaults(value, known.get(key) or (extra if isinstance(extra, dict) else {}))
            for key, value in filled.items()
        }
    if isinstance(document, list):
        return [with_defaults(item, schema.get("items", {})) for item in document]
    return document


def _inside(*path: str) -> Schema:
    schema = ray_service_schema()["properties"]["spec"]
    for name in path:
        schema = schema["properties"][name]
    return dict(schema)
