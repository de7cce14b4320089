"""Routers of a replay tell each other of their bookings, after a while."""

from __future__ import annotations

from router.mirror import Mirror
from router.replay.routers import Routers
from router.replay.simulated_time import SimulatedTime
from router.route_config import RouteConfig


def test_what_one_books_the_others_know_after_the_lag() -> None:
    clock = SimulatedTime()
    routers = Routers(3, Mirror(), RouteConfig(), block_tokens=8, lag_s=0.5, clock=clock, seed=0)
    first, *others = routers.services
    ticket = first.ticket("one", b"k" * 32, 20, 4)
    first.route("one", ("r0", "r1"))
    routers.hear()
    assert [service.report()["remote_bookings"] for service in others] == [0, 0]
    clock.move_to(0.5)
    routers.hear()
    assert [service.report()["remote_bookings"] for service in routers.services] == [0, 1, 1]
    ticket.close()
    clock.move_to(1.0)
    routers.hear()
    assert [service.report()["remote_bookings"] for service in routers.services] == [0, 0, 0]
