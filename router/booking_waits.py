"""Waiting until some router has booked a request: for whoever must not send a sibling before the first one has a place.

A waiter is a future of the event loop that it waits in; bookings are made in other threads, which wake it there.

Limits: a waiter whose loop has ended is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class BookingWaits:
    """See above. Thread-safe."""

    def __init__(self, is_known: Callable[[str], bool]) -> None:
        """`is_known` says whether a request is booked; it is called in the waiter's thread."""
        self._is_known = is_known
        self._lock = threading.Lock()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: str, timeout_s: float) -> bool:
        """Returns True as soon as the request is booked, False when it is not after `timeout_s`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.setdefault(request_id, []).append(future)
        try:
            # Asked after it stands in the list, so that a booking made meanwhile is seen here or wakes it.
            if self._is_known(request_id):
                return True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(future, timeout_s)
                return True
            return self._is_known(request_id)
        finally:
            with self._lock:
                waiting = self._waiting.get(request_id, [])
                if future in waiting:
                    waiting.remove(future)
                if not waiting:
                    self._waiting.pop(request_id, None)

    def booked(self, request_id: str) -> None:
        """The request has been booked, here or elsewhere. May be called in any thread; never waits."""
        if request_id not in self._waiting:  # one look-up where nobody waits, which is nearly always
            return
        with self._lock:
            woken = self._waiting.pop(request_id, [])
        for future in woken:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_wake, future)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
