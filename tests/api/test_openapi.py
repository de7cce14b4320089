"""/openapi.json says what is served: every path, every reply, every error."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest

from cluster.api.app import build_app
from cluster.api.key_list import parse_keys
from cluster.api.keys import KeyRing
from cluster.api.settings import ApiSettings
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

REQUESTS: list[tuple[str, str, Any]] = [
    ("post", CHAT, chat_body()),
    ("post", CHAT, chat_body(n=2, logprobs=True, top_logprobs=2, return_token_ids=True)),
    ("post", CHAT, chat_body(messages=[])),
    ("post", COMPLETIONS, completion_body()),
    ("post", COMPLETIONS, completion_body(n=2, logprobs=2, return_token_ids=True)),
    ("post", COMPLETIONS, completion_body(prompt="")),
    ("post", "/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("post", "/tokenize", {}),
    ("post", "/detokenize", {"tokens": [1]}),
    ("post", "/detokenize", {}),
    ("get", "/v1/models", None),
    ("get", "/v1/models/org/tiny", None),
    ("get", "/v1/models/other", None),
    ("get", "/health", None),
    ("get", "/health/live", None),
    ("get", "/health/ready", None),
    ("get", "/version", None),
]


def described(document: dict[str, Any], method: str, path: str, status: int) -> dict[str, Any]:
    """The schema of a reply, with the document's components beside it."""
    known = "/v1/models/{model_id}" if path.startswith("/v1/models/") else path
    responses = document["paths"][known][method]["responses"]
    schema = responses.get(str(status), responses["default"])["content"]["application/json"]["schema"]
    return {**schema, "components": document["components"]}


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_replies_are_as_described(client: httpx.AsyncClient, method: str, path: str, body: Any) -> None:
    document = (await client.get("/openapi.json")).json()
    response = await client.request(method, path, json=body)
    jsonschema.validate(response.json(), described(document, method, path, response.status_code))


@pytest.mark.parametrize("keys", [None, KeyRing(parse_keys("alice:" + "k" * 32))])
def test_a_route_says_that_it_asks_for_a_key_where_it_does(
    settings: ApiSettings, engine: FakeEngine, codec: ByteCodec, keys: KeyRing | None
) -> None:
    document = build_app(settings, engine, codec, keys=keys).openapi()
    asking = {
        path for path, operations in document["paths"].items() for one in operations.values() if "security" in one
    }
    closed = {path for path in document["paths"] if not path.startswith("/health")}
    assert asking == (closed if keys is not None else set())
    assert ("securitySchemes" in document["components"]) == (keys is not None)


async def test_the_document_is_complete(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    asked = {"/v1/models/{model_id}" if path.startswith("/v1/models/") else path for _, path, _ in REQUESTS}
    assert set(document["paths"]) == asked
    for operations in document["paths"].values():
        for operation in operations.values():
            assert set(operation["responses"]) == {"200", "default"}, "no status that is never sent"
    text = str(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}'" in text, "nothing is described that is not referred to"


async def test_streams_are_described(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for path in (CHAT, COMPLETIONS):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}


async def test_every_schema_is_one(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
