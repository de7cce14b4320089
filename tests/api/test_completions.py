"""POST /v1/completions: the four forms of a prompt, and several choices at once."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from actors.errors import ReplicaFailed, RequestRefused
from actors.request import Admitted
from tests.api.asgi_call import eventually
from tests.api.calls import COMPLETIONS, completion_body, error_of
from tests.api.sse_oracle import read_stream
from tests.fakes.engine import FakeEngine, Script

WRONG_TYPES: tuple[Any, ...] = (None, 5, True, {}, [1, "a"], [1.0], [None], [["a"]], [[[1]]], [True], [[False]])
EMPTY: tuple[Any, ...] = ("", [], [""], [[]], ["a", ""], [[1], []])
OUTSIDE_THE_VOCABULARY = ([-1], [[-1]], [257], [999999], [2**64], [10**400])
NOT_TEXT = ("\ud800", ["\udc00"])
BAD_PROMPTS = (*WRONG_TYPES, *EMPTY, *OUTSIDE_THE_VOCABULARY, *NOT_TEXT, ["x"] * 257)


async def test_whole_reply(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = Script(stop_reason=2)
    body = (await client.post(COMPLETIONS, json=completion_body())).json()
    assert body["id"] == f"cmpl-{engine.requests[0].request_id}"
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop", "stop_reason": 2}
    ]
    assert engine.requests[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "b"], [(97,), (98,)]),
        ([1, 2], [(1, 2)]),
        ([[1], [2, 3]], [(1,), (2, 3)]),
        ("\x00", [(0,)]),
        (["x"], [(120,)]),
        ([256], [(256,)]),
    ],
)
async def test_prompt_forms(
    client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, expected: list[tuple[int, ...]]
) -> None:
    body = (await client.post(COMPLETIONS, json=completion_body(prompt=prompt))).json()
    assert [request.prompt_token_ids for request in engine.requests] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_prompts(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, stream: bool) -> None:
    content = json.dumps(completion_body(prompt=prompt, stream=stream))
    response = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert error_of(response, 400)["param"] == "prompt"
    assert engine.requests == []


async def test_several_prompts_sum_usage_and_differ_in_choice(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: Script.of(f"<{request.choice}>").but(replica_id=f"r{request.choice % 2}")
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["a", "bb", "ccc"]))
    body = response.json()
    assert [choice["text"] for choice in body["choices"]] == ["<0>", "<1>", "<2>"]
    assert body["usage"]["prompt_tokens"] == 6
    assert body["usage"]["completion_tokens"] == 3
    assert response.headers["x-kvatlas-replica"] == "r0,r1"
    assert len({request.request_id for request in engine.requests}) == 3
    assert len({request.sampling.seed for request in engine.requests}) == 1
    assert [request.choice for request in engine.requests] == [0, 1, 2]


async def test_several_prompts_stream_interleaved(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: Script.of(*f"{request.choice}" * 3).but(
        delay_s=0.002 * (request.choice + 1), cached_tokens=1
    )
    body = completion_body(prompt=["a", "b", "c"], stream=True, stream_options={"include_usage": True})
    response = await client.post(COMPLETIONS, json=body)
    transcript = read_stream(response.content, chat=False, choices=3, include_usage=True)
    assert transcript.texts == {0: "000", 1: "111", 2: "222"}
    assert transcript.usage is not None
    assert transcript.usage["prompt_tokens_details"]["cached_tokens"] == 3
    order = [chunk["choices"][0]["index"] for chunk in transcript.chunks if chunk["choices"]]
    assert order != sorted(order), "the fast choice must not wait for the slow one, nor the other way round"


@pytest.mark.parametrize("stream", [False, True])
async def test_routes_of_all_choices(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    routes = ["policy=cost; predicted=16", "policy=cost; predicted=0", "policy=cost; predicted=16"]
    engine.script = lambda request: Script(route=routes[request.choice])
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b", "c"], stream=stream))
    assert response.headers["x-kvatlas-route"] == "policy=cost; predicted=16, policy=cost; predicted=0"


async def test_a_choice_that_moved_counts_where_it_was_answered(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    moved = Admitted("r9", 1, 1, "retry")
    engine.script = lambda request: Script(
        route="first", cached_tokens=3, readmissions=(moved,) if request.choice else ()
    )
    body = completion_body(prompt=["aaaa", "b"])
    whole = await client.post(COMPLETIONS, json=body)
    assert whole.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    assert whole.json()["usage"]["prompt_tokens"] == 5
    assert whole.headers["x-kvatlas-replica"] == "r0,r9"
    assert whole.headers["x-kvatlas-cached-tokens"] == "4"
    assert whole.headers["x-kvatlas-route"] == "first, retry"

    streamed = await client.post(COMPLETIONS, json=body | {"stream": True, "stream_options": {"include_usage": True}})
    transcript = read_stream(streamed.content, chat=False, choices=2, include_usage=True)
    assert transcript.usage == whole.json()["usage"]
    assert transcript.texts == {0: "Hello world", 1: "Hello world"}


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_starts_before_every_choice_is_admitted(
    client: httpx.AsyncClient, engine: FakeEngine, stream: bool
) -> None:
    engine.script = lambda request: Script.of("a", "b", "c").but(admit_delay_s=0.03 * request.choice)
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["x", "y", "z"], stream=stream))
    if stream:
        assert read_stream(response.content, chat=False, choices=3).texts == dict.fromkeys(range(3), "abc")
    else:
        assert [choice["text"] for choice in response.json()["choices"]] == ["abc"] * 3


async def test_one_refused_prompt_refuses_the_request(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    refusal = RequestRefused("no", "prompt", "nope")
    engine.script = lambda request: Script(refusal=refusal) if request.choice == 1 else Script(endless=True)
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"], stream=True))
    assert error_of(response, 400) == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "nope",
    }
    await eventually(lambda: engine.open_streams == 0)


async def test_one_failing_choice_ends_the_stream_for_all(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = lambda request: (
        Script(fail_after=1, failure=ReplicaFailed("x"), delay_s=0.02)
        if request.choice
        else Script(endless=True, delay_s=0.005)
    )
    response = await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"], stream=True))
    transcript = read_stream(response.content, chat=False, choices=2)
    assert transcript.error is not None
    assert transcript.error["code"] == "replica_failed"
    assert engine.finished == []


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, 7), ({"max_tokens": 3}, 7), ({"max_completion_tokens": None}, 16)]
)
async def test_the_newer_name_of_the_limit_holds_here_too(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: int
) -> None:
    await client.post(COMPLETIONS, json=completion_body(**({"max_completion_tokens": 7} | fields)))
    assert engine.requests[0].sampling.max_tokens == expected
