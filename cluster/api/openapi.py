"""/openapi.json for routes that read their body themselves: the body schemas have to be put in by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from cluster.api.schemas import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose JSON body is a `kind`."""
    schema = {"$ref": _REF.format(model=kind.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Make `app.openapi()` include the schemas that `json_body` refers to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            document.setdefault("components", {}).setdefault("schemas", {}).update(_schemas())
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    for kind in (ChatRequest, CompletionRequest):
        schema = kind.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return schemas
