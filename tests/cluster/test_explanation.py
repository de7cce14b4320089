"""The JSON object of an explanation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.explanation import explanation
from tests.router.scene import Scene, keys

NAMES = ("r0", "r1", "r9")


def told(scene: Scene, *numbers: int, prompt_tokens: int = 100) -> dict[str, Any]:
    decision = scene.service.explain(keys(*numbers), prompt_tokens, 16, NAMES)
    found = explanation(decision, prompt_tokens, 16, scene.service.report()["directory"])
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    return found


def test_everything_that_decided_is_in_it() -> None:
    scene = Scene()
    scene.hear("r0", held=[1, 2, 3])
    scene.hear("r1", queued_prefill_tokens=700)
    with scene.service.ticket("on its way", keys(1, 2, 3, 4), 70, 10):
        assert scene.route("on its way") == "r0"
        found = told(scene, 1, 2, 3, 4, 5)
    assert (found["replica_id"], found["policy"], found["outcome"]) == ("r0", "cost", "prefix_hit")
    assert (found["predicted_tokens"], found["prompt_tokens"], found["output_tokens"]) == (64, 100, 16)
    assert found["reason"]
    best, second, last = found["candidates"]
    assert [one["replica_id"] for one in found["candidates"]] == ["r0", "r1", "r9"]
    assert (best["pool"], best["matched_tokens"], best["promised_tokens"], best["cached_tokens"]) == (
        "p-r0",
        48,
        16,
        64,
    )
    assert best["pool_seq"] == scene.speakers["p-r0"].seq
    assert (second["pool"], second["matched_tokens"], second["queued_tokens"]) == ("p-r1", 0, 700)
    seconds = [name for name in best if name.endswith("_s") and not name.endswith("_per_s")]
    assert {"queue_s", "prefill_s", "decode_s"} <= set(seconds)
    assert best["score"] < second["score"]
    assert (last["pool"], last["pool_seq"], last["matched_tokens"], last["score"]) == (None, None, None, None)
    assert found["not_in_directory"] == ["r9"]
    assert found["directory"]["state"] == "live"
    assert found["directory"]["lag_s"] == 0.0


def test_what_is_known_of_the_prompt_comes_before_the_terms() -> None:
    scene = Scene()
    scene.hear("r0")
    names = list(told(scene, 1)["candidates"][0])
    assert names[:6] == ["replica_id", "pool", "pool_seq", "matched_tokens", "promised_tokens", "cached_tokens"]
    assert names[-1] == "score"


def test_a_fallback_knows_no_pool() -> None:
    found = told(Scene(directory=False), 1)
    assert (found["outcome"], found["reason"]) == ("fallback", "no directory")
    assert found["directory"]["state"] == "off"
    assert found["not_in_directory"] == sorted(NAMES)
    assert all(one["matched_tokens"] is None for one in found["candidates"])


def test_a_lone_candidate_and_no_key() -> None:
    scene = Scene()
    scene.hear("r0")
    found = told(scene, prompt_tokens=3)
    assert found["candidates"][0]["matched_tokens"] == 0
    assert found["outcome"] == "no_prefix"


UNKNOWN = {
    "cached_tokens",
    "free_tokens",
    "prefill_tokens_per_s",
    "waiting_requests",
    "held_tokens",
    "decode_interference_s",
}


def test_what_is_not_known_of_a_candidate_is_null_and_not_nothing() -> None:
    scene = Scene()
    scene.hear("r0")
    known, *others = told(scene, 1)["candidates"]
    assert None not in {known[name] for name in UNKNOWN}
    for one in others:
        assert {name for name in UNKNOWN if one[name] is None} == UNKNOWN
        assert (one["queued_tokens"], one["running_requests"]) == (0, 0)


@pytest.mark.parametrize("silent", [True, False])
def test_a_fallback_knows_what_is_booked_and_no_more(silent: bool) -> None:
    """Whether there never was a directory, or it is silent and its pools are still listed."""
    scene = Scene(directory=silent)
    if silent:
        scene.hear("r0", held=[1], queued_prefill_tokens=700)
        scene.now += 60.0
    with scene.service.ticket("booked", keys(1, 2), 70, 10):
        booked = scene.route("booked")
        found = told(scene, 1)
    assert found["outcome"] == "fallback"
    for one in found["candidates"]:
        assert {name for name in UNKNOWN if one[name] is None} == UNKNOWN
        assert one["queued_tokens"] == (70 if one["replica_id"] == booked else 0)
