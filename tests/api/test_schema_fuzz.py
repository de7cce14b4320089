"""Generated requests, valid and not, from /openapi.json: never a 5xx, and every error in the envelope."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.api.app import ApiSettings, build_app
from cluster.api.schemas import ChatRequest, CompletionRequest
from tests.api.calls import CHAT, COMPLETIONS, MODEL, chat_body, completion_body, error_of
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
SCHEMA = schemathesis.openapi.from_dict(build_app(ApiSettings(MODEL, 500), FakeEngine(), ByteCodec()).openapi())
FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "tools", "logprobs", "echo", "logit_bias"})


def _send(path: str, body: Any) -> None:
    engine = FakeEngine()
    app = build_app(ApiSettings(MODEL, 500), engine, ByteCodec())

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.post(path, json=body)

    response = asyncio.run(post())
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        error_of(response, response.status_code)
    assert engine.open_streams == 0


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bodies_that_follow_the_schema(path: str, data: st.DataObject) -> None:
    body = data.draw(SCHEMA[path]["POST"].as_strategy()).body
    if isinstance(body, dict):
        body["model"] = MODEL
    _send(path, body)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@settings(max_examples=50, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3))
def test_bodies_with_anything_in_some_fields(path: str, fields: dict[str, Any]) -> None:
    base = chat_body() if path == CHAT else completion_body()
    _send(path, base | fields)
