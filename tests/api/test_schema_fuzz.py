"""Generated requests, valid and not, from /openapi.json: never a 5xx, every error in the envelope, every reply as described."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.api.app import ApiSettings, build_app
from cluster.api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.api.calls import CHAT, COMPLETIONS, MODEL, chat_body, completion_body, error_of
from tests.api.sse_oracle import read_stream
from tests.api.test_openapi import described
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CODEC = ByteCodec()  # shared: grammars are checked by a process that belongs to it
DOCUMENT = build_app(ApiSettings(MODEL, 500), FakeEngine(), CODEC).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
KINDS = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
FIELDS = sorted({name for kind in KINDS for name in kind.model_fields} | {"suffix", "chat_template", "guided_x"})
BASES: dict[str, dict[str, Any]] = {
    CHAT: chat_body(),
    COMPLETIONS: completion_body(),
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
# Cases a path, by what they come from.
FEW, MANY = {"schema": 10, "fields": 40}, {"schema": 200, "fields": 300}


def send(path: str, body: Any) -> None:
    engine = FakeEngine()
    app = build_app(ApiSettings(MODEL, 500), engine, CODEC)

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, json=body)

    response = asyncio.run(post())
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        error_of(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        options = body.get("stream_options") or {}
        read_stream(
            response.content,
            chat=path == CHAT,
            choices=len(engine.requests),
            include_usage=bool(options.get("include_usage")),
            usage_always=bool(options.get("continuous_usage_stats")),
        )
    else:
        jsonschema.validate(response.json(), described(DOCUMENT, "post", path, 200))
    assert engine.open_streams == 0


def from_the_schema(path: str, data: st.DataObject) -> None:
    body = data.draw(SCHEMA[path]["POST"].as_strategy()).body
    if isinstance(body, dict) and "model" in body:
        body["model"] = MODEL
    send(path, body)


CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3)


@pytest.mark.slow
@pytest.mark.parametrize("path", BASES)
@settings(max_examples=FEW["schema"], deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bodies_that_follow_the_schema(path: str, data: st.DataObject) -> None:
    from_the_schema(path, data)


@pytest.mark.parametrize("path", BASES)
@settings(max_examples=FEW["fields"], deadline=None)
@given(fields=CHANGES)
def test_bodies_with_anything_in_some_fields(path: str, fields: dict[str, Any]) -> None:
    send(path, BASES[path] | fields)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", BASES)
@settings(max_examples=MANY["schema"], deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_bodies_that_follow_the_schema(path: str, data: st.DataObject) -> None:
    from_the_schema(path, data)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", BASES)
@settings(max_examples=MANY["fields"], deadline=None)
@given(fields=CHANGES)
def test_many_bodies_with_anything_in_some_fields(path: str, fields: dict[str, Any]) -> None:
    send(path, BASES[path] | fields)
