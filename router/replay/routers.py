"""The routers of a replay: a `RouteService` of the product for each, with bookings told to each other after a while.

Every router sees the directory with the same lag, so all mirrors would be equal at every moment; one mirror serves them all.
Bookings, calibration, random numbers and turns are each router's own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

from router.booking_event import BookingEvent
from router.mirror import Mirror
from router.route_config import RouteConfig
from router.service import RouteService

LEASE_S = 3.0


class NoMetrics:
    """`RouterMetrics` that nobody looks at: a replay has its own account."""

    def decided(self, seconds: float) -> None: ...

    def routed(self, outcome: str) -> None: ...

    def looked_up(self, *tokens: object) -> None: ...

    def retried(self) -> None: ...

    def levels(self, *levels: object) -> None: ...


class Routers:
    """`count` routers over `mirror`; each is told `lag_s` later what the others announce."""

    def __init__(
        self, count: int, mirror: Mirror, config: RouteConfig, *, block_tokens: int, lag_s: float, clock: Callable[[], float],
        seed: int
    ) -> None:  # fmt: skip
        self._lag_s = lag_s
        self._clock = clock
        self._told: deque[tuple[float, int, BookingEvent]] = deque()
        self.services = [
            RouteService(
                mirror,
                config,
                block_tokens=block_tokens,
                clock=clock,
                rng=random.Random(f"{seed}/{number}"),
                metrics=NoMetrics(),
                fresh_s=LEASE_S,
                connected=lambda: True,
                announce=partial(self._announce, number) if count > 1 else None,
            )
            for number in range(count)
        ]

    def hear(self) -> None:
        """Gives every router what the others announced up to `lag_s` ago."""
        latest = self._clock() - self._lag_s
        while self._told and self._told[0][0] <= latest:
            _, origin, event = self._told.popleft()
            for number, service in enumerate(self.services):
                if number != origin:
                    service.apply_remote(f"router-{origin}", event)

    def _announce(self, origin: int, event: BookingEvent) -> None:
        self._told.append((self._clock(), origin, event))
