"""Waiting for a booking that is made in another thread, before, meanwhile or never."""

from __future__ import annotations

import asyncio
import threading

from router.booking_waits import BookingWaits


async def test_what_is_known_is_not_waited_for() -> None:
    waits = BookingWaits(lambda request_id: request_id == "known")
    assert await waits.wait("known", 0.0)
    assert not await waits.wait("unknown", 0.0)
    assert len(waits) == 0


async def test_a_booking_in_another_thread_wakes_all_who_wait() -> None:
    waits = BookingWaits(lambda request_id: False)
    waiting = [asyncio.create_task(waits.wait("q", 60.0)) for _ in range(3)]
    other = asyncio.create_task(waits.wait("other", 60.0))
    await asyncio.sleep(0)  # they sign up
    assert len(waits) == 2
    waits.booked("nobody waits for this")
    thread = threading.Thread(target=waits.booked, args=("q",))
    thread.start()
    assert await asyncio.gather(*waiting) == [True] * 3
    thread.join()
    assert not other.done()
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert len(waits) == 0


async def test_a_booking_made_while_the_waiter_signs_up_is_seen() -> None:
    """It is made after the waiter stands in the list and before it has asked: whichever of the two tells, it is told."""
    waits: BookingWaits

    def booked_just_now(request_id: str) -> bool:
        waits.booked(request_id)
        return False

    waits = BookingWaits(booked_just_now)
    assert await waits.wait("q", 60.0)


async def test_one_that_gave_up_is_not_woken() -> None:
    waits = BookingWaits(lambda request_id: False)
    quick = asyncio.create_task(waits.wait("q", 0.001))
    slow = asyncio.create_task(waits.wait("q", 60.0))
    assert not await quick
    waits.booked("q")
    assert await slow
    assert len(waits) == 0


def test_a_loop_that_has_ended_is_no_trouble() -> None:
    waits = BookingWaits(lambda request_id: False)
    loop = asyncio.new_event_loop()
    task = loop.create_task(waits.wait("q", 60.0))
    loop.run_until_complete(asyncio.sleep(0))
    stuck = waits._waiting["q"]
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    waits._waiting["q"] = stuck
    waits.booked("q")
    assert len(waits) == 0
