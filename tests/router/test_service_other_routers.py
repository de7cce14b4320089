"""What the service tells other routers, and what it makes of what they tell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.booking_event import BookingEvent, ladder_of
from router.bookings import LINGER_S, REMOTE_LIFE_S
from router.ticket import Ticket
from tests.fakes.speaker import packed
from tests.router.scene import BLOCK_TOKENS, BOTH, FRESH_S, Scene, keys, scene_with_prefix


def test_every_change_of_a_booking_is_announced_in_order() -> None:
    told: list[BookingEvent] = []
    scene = Scene(announce=told.append)
    scene.hear("r0")
    scene.hear("r1", held=[1, 2])
    ladder = ladder_of(packed([1, 2, 9]))
    with scene.service.ticket("q", keys(1, 2, 9), 100, 16) as ticket:
        scene.route("q")
        scene.route("q")  # again: one booking takes the place of the other
        scene.service.routed("q", "r1")  # as booked
        scene.service.routed("q", "r0")
        ticket.admitted("r0", 0)
        ticket.admitted("r0", 16)
        ticket.started()
        ticket.started()
    assert told == [
        BookingEvent("book", "q", "r1", 68, ladder),
        BookingEvent("book", "q", "r1", 68, ladder),
        BookingEvent("book", "q", "r0", 100, ladder),
        BookingEvent("book", "q", "r0", 84, ladder),
        BookingEvent("start", "q"),
        BookingEvent("release", "q"),
    ]


@pytest.mark.parametrize(
    "end",
    [
        lambda scene, ticket: scene.service.died("r1"),
        lambda scene, ticket: scene.service.members(["r0"]),
        lambda scene, ticket: scene.service.route("q", ()),
        lambda scene, ticket: scene.service.route_failed("q"),
        lambda scene, ticket: ticket.retry(),
        lambda scene, ticket: ticket.close(),
    ],
    ids=["died", "left", "no candidates", "left to Serve", "retry", "closed"],
)
def test_the_end_of_a_booking_is_announced_whatever_ends_it(end: Callable[[Scene, Ticket], Any]) -> None:
    told: list[BookingEvent] = []
    scene = Scene(announce=told.append)
    scene.hear("r1", held=[1])
    with scene.service.ticket("q", keys(1), 100, 16) as ticket:
        scene.route("q")
        end(scene, ticket)
        assert [event.kind for event in told] == ["book", "release"]
    assert len(told) == 2


def test_what_other_routers_booked_is_load_and_a_promise() -> None:
    scene = scene_with_prefix()
    book = BookingEvent("book", "theirs", "r0", 400, ladder_of(packed([50, 51, 52])))
    scene.service.apply_remote("there", book)
    with scene.service.ticket("q", keys(50, 51, 9), 60, 16):
        view = scene.service.route("q", BOTH).view
        assert (view.queued_tokens.tolist(), view.waiting.tolist()) == ([400, 0], [1, 0])
        assert view.cached_tokens.tolist() == [2 * BLOCK_TOKENS, 0]
        scene.service.apply_remote("there", BookingEvent("start", "theirs"))
        view = scene.service.route("q", BOTH).view
        assert (view.queued_tokens.tolist(), view.running.tolist()) == ([0, 0], [1, 0])
        assert scene.service.report()["remote_bookings"] == 1
        scene.service.apply_remote("there", BookingEvent("release", "theirs"))
        view = scene.service.route("q", BOTH).view
        assert (view.cached_tokens.tolist(), view.running.tolist()) == ([2 * BLOCK_TOKENS, 0], [0, 0])
        assert scene.service.report()["remote_bookings"] == 0
        scene.now += LINGER_S
        scene.service.report_levels()
        assert scene.service.route("q", BOTH).view.cached_tokens.tolist() == [0, 0]
    scene.service.apply_remote("there", book)
    scene.service.drop_origin("there")
    assert scene.service.report()["remote_bookings"] == 0


def test_remote_bookings_that_nobody_ends_are_forgotten() -> None:
    scene = scene_with_prefix()
    scene.service.apply_remote("there", BookingEvent("book", "theirs", "r0", 400))
    scene.now += REMOTE_LIFE_S + 1
    scene.service.report_levels()
    assert scene.service.report()["remote_bookings"] == 0


async def test_a_booking_is_waited_for_whoever_makes_it() -> None:
    scene = scene_with_prefix()
    assert not await scene.service.wait_booked("ours", 0.0)
    ours = asyncio.create_task(scene.service.wait_booked("ours", 60.0))
    theirs = asyncio.create_task(scene.service.wait_booked("theirs", 60.0))
    await asyncio.sleep(0)
    with scene.service.ticket("ours", keys(1), 100, 16):
        scene.route("ours")
        scene.service.apply_remote("there", BookingEvent("book", "theirs", "r0", 1))
        assert [await ours, await theirs] == [True, True]
        assert await scene.service.wait_booked("ours", 0.0)


def test_known_blocks_are_those_of_any_live_pool_or_booking() -> None:
    scene = scene_with_prefix()
    asked = packed([1, 2, 3, 9])
    assert scene.service.known_blocks(asked) == 3
    assert scene.service.known_blocks(b"") == 0
    scene.service.apply_remote("there", BookingEvent("book", "theirs", "unheard", 1, ladder_of(packed([50, 51]))))
    assert scene.service.known_blocks(packed([50, 51, 52])) == 2
    scene.now += FRESH_S + 1
    assert scene.service.known_blocks(asked) == 0  # the directory is silent
    assert scene.service.known_blocks(packed([50, 51, 52])) == 2
