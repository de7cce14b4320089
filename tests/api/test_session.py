"""What says which requests belong together travels with them, as a hint, and is never an error by its length."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.api.edge import Edge
from cluster.api.grammar_check import GrammarCheck
from cluster.api.plan import SESSION_CHARS, Caller, plan
from cluster.api.schemas import CompletionRequest
from cluster.api.settings import ApiSettings
from tests.api.calls import CHAT, COMPLETIONS, chat_body, completion_body, error_of
from tests.fakes.engine import FakeEngine

BODIES = [(CHAT, chat_body), (COMPLETIONS, completion_body)]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("given", "session"), [({}, ""), ({"prompt_cache_key": None}, ""), ({"prompt_cache_key": "é1"}, "é1")]
)
async def test_the_cache_key_of_a_prompt_names_its_session(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any, given: dict[str, Any], session: str
) -> None:
    response = await client.post(path, json=body(**given))
    assert response.status_code == 200
    assert engine.requests[0].session == session


async def test_a_long_one_is_cut_and_a_wrong_one_is_refused(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await client.post(COMPLETIONS, json=completion_body(prompt_cache_key="x" * 1000, prompt=["a", "b"]))
    assert [request.session for request in engine.requests] == ["x" * SESSION_CHARS] * 2
    error = error_of(await client.post(COMPLETIONS, json=completion_body(prompt_cache_key=5)), 400)
    assert error["param"] == "prompt_cache_key"


@pytest.mark.parametrize(
    ("key", "expected"), [(None, "of the header"), ("of the body", "of the body"), ("", "of the header")]
)
def test_the_body_overrides_the_header(key: str | None, expected: str) -> None:
    class Codec:
        vocab_size = 300

    settings = ApiSettings(model_name="tiny", max_model_len=100)
    codec: Any = Codec()
    edge = Edge(settings, FakeEngine(), codec, lambda: "id", lambda: 1.0, lambda: 1, GrammarCheck(codec))
    fields = CompletionRequest.model_validate({"model": "tiny", "prompt": "x", "prompt_cache_key": key})
    planned = plan(edge, fields, [[1]], param="prompt", default_max_tokens=5, caller=Caller(session="of the header"))
    assert [request.session for request in planned.requests] == [expected]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_session_header_names_the_session_unless_the_body_does(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: Any
) -> None:
    headers = {"x-session-id": "from the header"}
    assert (await client.post(path, json=body(), headers=headers)).status_code == 200
    given = {"prompt_cache_key": "from the body"}
    assert (await client.post(path, json=body(**given), headers=headers)).status_code == 200
    assert [request.session for request in engine.requests] == ["from the header", "from the body"]
