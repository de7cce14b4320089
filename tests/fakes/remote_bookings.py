"""What other routers told, kept plainly: the place of a `RouteService`."""

from __future__ import annotations

from router.booking_event import BookingEvent, Ladder

Known = tuple[str, int, Ladder, bool]
"""Replica, owed tokens, ladder, whether it has started."""


class RemoteBookingsFake:
    """By origin, the bookings that are known, by request."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, Known]] = {}

    def apply_remote(self, origin: str, event: BookingEvent) -> None:
        known = self.known.setdefault(origin, {})
        change(known, event)

    def drop_origin(self, origin: str) -> None:
        self.known.pop(origin, None)

    def of(self, origin: str) -> dict[str, Known]:
        """Those of one origin."""
        return dict(self.known.get(origin, {}))


def change(known: dict[str, Known], event: BookingEvent) -> None:
    """Does to `known` what `event` says."""
    if event.kind == "book":
        known[event.request_id] = (event.replica_id, event.owed_tokens, event.ladder, False)
    elif event.kind == "release":
        known.pop(event.request_id, None)
    elif event.request_id in known:
        known[event.request_id] = (*known[event.request_id][:3], True)
