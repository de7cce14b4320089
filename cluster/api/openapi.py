"""/openapi.json for routes that read their body themselves: the schemas of bodies and replies have to be put in by hand."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from cluster.api.keys import is_open
from cluster.api.reply_schemas import REPLY_SCHEMAS
from cluster.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_REF = "#/components/schemas/{model}"
_BODIES = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
_JSON, _EVENTS = "application/json", "text/event-stream"

# Path -> the schema of what a 200 says.
_REPLIES = {
    "/v1/chat/completions": "ChatReply",
    "/v1/completions": "CompletionReply",
    "/v1/models": "ModelList",
    "/v1/models/{model_id}": "ModelCard",
    "/tokenize": "TokenizeReply",
    "/detokenize": "DetokenizeReply",
    "/health": "Health",
    "/health/live": "Health",
    "/health/ready": "Health",
    "/version": "Version",
}
_KEY = "api_key"
_STREAMED = {"/v1/chat/completions", "/v1/completions"}


def json_body(kind: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route whose JSON body is a `kind`."""
    return {"requestBody": {"required": True, "content": _content(kind.__name__)}}


def install_openapi(app: FastAPI, *, asks_for_keys: bool = False) -> None:
    """Make `app.openapi()` include the schemas that `json_body` refers to, what the routes reply, and which ask for a key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            # The framework adds its own answer to a body that does not fit; there is none here.
            document["components"] = {"schemas": _schemas()}
            if asks_for_keys:
                document["components"]["securitySchemes"] = {_KEY: {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["responses"] = _responses(path)
                    if asks_for_keys and not is_open(path):
                        operation["security"] = [{_KEY: []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _responses(path: str) -> dict[str, Any]:
    reply = _REPLIES.get(path)
    content: dict[str, Any] = _content(reply) if reply is not None else {_JSON: {}}
    if path in _STREAMED:
        content |= {_EVENTS: {"schema": {"type": "string"}}}
    error = {"description": "An error, whatever its status.", "content": _content("ErrorReply")}
    return {"200": {"description": "Done.", "content": content}, "default": error}


def _content(model: str) -> dict[str, Any]:
    return {_JSON: {"schema": {"$ref": _REF.format(model=model)}}}


def _schemas() -> dict[str, Any]:
    schemas: dict[str, Any] = dict(REPLY_SCHEMAS)
    for kind in _BODIES:
        schema = kind.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    return schemas
