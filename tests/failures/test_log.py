"""The log loses, repeats and exchanges batches, on the way to Redis and inside it, and is trimmed past a reader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.failures.log_damage import DAMAGES, Damage, damage_before, newest
from tests.failures.rig import SPACE
from tests.failures.tap import FAULTS, Fault, Tap

if TYPE_CHECKING:
    from tests.failures.rig import Field

pytestmark = [pytest.mark.redis, pytest.mark.slow]

SESSIONS: dict[Fault, int] = {"lost": 1, "unanswered": 1, "twice": 0, "late": 1}
"""How many new sessions each costs the publisher."""


@pytest.fixture
def tap(field: Field, tmp_path: Path) -> Iterator[Tap]:
    """In front of the field's Redis."""
    one = Tap(Path(field.redis.url.removeprefix("unix://")), tmp_path / "tap.sock")
    yield one
    one.close()


def test_batches_are_lost_repeated_and_late_on_their_way(field: Field, tap: Tap) -> None:
    field.pool("pool-0")
    tapped = field.pool("tapped", url=tap.url)
    field.router()
    field.recovered()
    field.run(0.3)
    for number, fault in enumerate(FAULTS):
        before = tapped.state()["publisher"]
        tap.make(fault)
        field.wait_for(lambda number=number: tap.done > number, f"a batch to be {fault}")  # type: ignore[misc]
        made = time.monotonic()
        wanted = before["sessions"] + SESSIONS[fault]
        field.wait_for(
            lambda wanted=wanted: tapped.state()["publisher"]["sessions"] == wanted,  # type: ignore[misc]
            "the session after it",
        )
        field.note(f"{fault}_whole_s", field.recovered(made))
        if fault in ("twice", "late"):
            field.wait_for(lambda fault=fault: len(tap.answers) == 1 + (fault == "late"), "what Redis says")  # type: ignore[misc]
        field.settle()
        assert tapped.state()["publisher"]["sessions"] == wanted
    repeated, late = tap.answers
    assert b"$3\r\nseq\r\n" in repeated  # refused
    assert b"$5\r\nepoch\r\n" in late
    assert tapped.state()["publisher"]["refused"] == {}  # of its own sessions nothing was
    field.finish("batches lost, unanswered, repeated and late on their way")


@pytest.mark.parametrize("kind", DAMAGES)
def test_batches_are_lost_repeated_and_exchanged_in_the_log(field: Field, kind: Damage) -> None:
    first, _ = field.begin(2, per_s=100.0)
    (router,) = field.routers
    before = router.ask("look")["mirror"]
    damage_before(field, router, first.pool, kind)
    went_on = time.monotonic()

    def noticed() -> int:
        after = router.ask("look")["mirror"]
        return sum(
            after.get(name, 0) - before.get(name, 0)
            for name in (("duplicates",) if kind == "repeated" else ("gaps", "digest_mismatches"))
        )

    field.wait_for(noticed, "the mirror to notice")
    field.note("whole_s", field.recovered(went_on))
    field.finish(f"batch {kind} in the log")


def test_the_log_is_trimmed_past_a_reader(field: Field) -> None:
    field.begin(2, routers=2, per_s=100.0, log_entries=60)
    slow = field.routers[0]
    slow.stop()
    position = newest(field.redis.url, SPACE)
    field.wait_for(lambda: newest(field.redis.url, SPACE) > position + 300, "the log to go on")
    slow.go_on()
    field.note("whole_s", field.recovered())
    assert slow.ask("look")["follower"]["gaps"] >= 1
    field.finish("log trimmed past a reader")
