"""Differences between two looks at a server, and which look counts."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import http_client
from cluster.bench.counters import NOTHING, TRIES, difference, look, parse
from cluster.errors import ServeFailed
from cluster.http_client import Answer


def body(*replicas: tuple[str, int, int], **routing: Any) -> dict[str, Any]:
    """/debug/state with (id, queried, hit) of each replica."""
    statuses = [
        {
            "replica_id": name,
            "capacity_blocks": 10,
            "block_tokens": 16,
            "blocks": {"free": 5, "held": 2, "cached": 3},
            "prefix_queried_tokens": queried,
            "prefix_hit_tokens": hit,
        }
        for name, queried, hit in replicas
    ]
    return {"replicas": statuses} | ({"routing": routing} if routing else {})


def test_replicas_and_router_are_differences() -> None:
    before = body(
        ("a", 100, 10),
        ("b", 0, 0),
        policy="cost",
        queried_tokens=100,
        predicted_tokens=10,
        decisions={"hit": 3, "cold": 1},
    )
    after = body(
        ("a", 300, 110),
        ("b", 200, 100),
        policy="cost",
        queried_tokens=500,
        predicted_tokens=250,
        decisions={"hit": 8, "cold": 1},
    )
    found = difference(parse(before), parse(after))
    assert (found["replica_queried_tokens"], found["replica_hit_tokens"], found["replica_hit"]) == (400, 200, 0.5)
    assert (found["queried_tokens"], found["predicted_tokens"]) == (400, 240)
    assert found["phantom_tokens"] is None
    assert found["decisions"] == {"hit": 5}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, body(("a", 5, 1))),
        (body(("a", 5, 1)), {"replicas": None}),
        (body(("a", 5, 1)), body(("b", 5, 1))),
        (body(("a", 5, 1)), body(("a", 9, 1), ("b", 5, 1))),
        (body(("a", 5, 1)), body(("a", 3, 0))),
        (body(("a", 5, 1), queried_tokens=9), body(("a", 3, 0), queried_tokens=2)),
    ],
    ids=["no look before", "none after", "another", "one more", "another life", "another life of both"],
)
def test_what_cannot_be_known_is_none(before: dict[str, Any], after: dict[str, Any]) -> None:
    found = difference(parse(before), parse(after))
    assert found.pop("decisions") == {}
    assert set(found.values()) == {None}


def test_nothing_asked_is_no_rate() -> None:
    same = parse(body(("a", 5, 1)))
    found = difference(same, same)
    assert (found["replica_queried_tokens"], found["replica_hit"]) == (0, None)


def test_a_snapshot_sums_up() -> None:
    found = parse(body(("a", 0, 0), ("b", 0, 0), policy="affinity"))
    assert (found.policy, found.pool_tokens, found.cached_blocks) == ("affinity", 160, 10)
    assert (NOTHING.policy, NOTHING.pool_tokens, NOTHING.cached_blocks) == ("unknown", None, None)


@pytest.mark.parametrize(
    ("directory", "heard"),
    [
        (None, True),
        ({"state": "off", "pools": []}, True),
        ({"state": "silent", "pools": []}, False),
        ({"state": "live", "pools": [{"state": "live", "replica_ids": ["a"]}]}, False),
        ({"state": "live", "pools": [{"state": "live", "replica_ids": ["a", "b"]}]}, True),
        ({"state": "stale", "pools": [{"state": "live", "replica_ids": ["a", "b"]}]}, False),
        (
            {
                "state": "live",
                "pools": [{"state": "live", "replica_ids": ["a"]}, {"state": "suspect", "replica_ids": ["b"]}],
            },
            False,
        ),
    ],
)
def test_whether_the_router_hears_of_the_replicas(directory: dict[str, Any] | None, heard: bool) -> None:
    routing = {} if directory is None else {"directory": directory}
    assert parse(body(("a", 0, 0), ("b", 0, 0)) | {"routing": routing}).routes_to(2) is heard


def scripted(monkeypatch: pytest.MonkeyPatch, *answers: Answer | ServeFailed) -> list[str]:
    """Makes the server give `answers`, the last one for ever. Returns the keys that were sent."""
    left, keys = list(answers), []

    def get(url: str, timeout_s: float, admin_key: str = "") -> Answer:
        keys.append(admin_key)
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, ServeFailed):
            raise answer
        return answer

    monkeypatch.setattr(http_client, "get", get)
    return keys


def test_a_look_waits_for_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Answer(200, body(("a", 1, 0), ("b", 1, 0)))
    one = Answer(200, body(("b", 1, 0)))
    keys = scripted(monkeypatch, ServeFailed("busy"), Answer(503, {}), one, both)
    pauses: list[float] = []
    assert set(look("u", "key", 2, sleep=pauses.append).replicas) == {"a", "b"}
    assert (len(keys), len(pauses)) == (4, 3)

    keys = scripted(monkeypatch, one, both)
    assert set(look("u", "key", 1, frozenset("a"), sleep=pauses.append).replicas) == {"a", "b"}
    assert len(keys) == 2


def test_a_look_gives_up_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = scripted(monkeypatch, Answer(200, body(("b", 1, 0))))
    assert set(look("u", "key", 2, sleep=lambda _: None).replicas) == {"b"}
    assert len(keys) == TRIES


@pytest.mark.parametrize(("key", "status", "asked"), [("", 200, 0), ("wrong", 401, 1), ("any", 404, 1)])
def test_without_the_key_there_is_nothing_to_see(
    monkeypatch: pytest.MonkeyPatch, key: str, status: int, asked: int
) -> None:
    keys = scripted(monkeypatch, Answer(status, body(("a", 1, 0)) if status == 200 else {}))
    assert look("u", key, sleep=lambda _: None) == NOTHING
    assert len(keys) == asked
