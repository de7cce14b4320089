"""The log of the routers and their claims inside one process, on a `MemoryServer`: the reference, and the one for tests.

Limits: as `exchange.py` says; the log keeps exactly `log_entries`. Nothing survives the process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvpool.directory.backend import Cursor, Space, Tip
from kvpool.directory.errors import LogGap
from kvpool.directory.exchange import Claim, ExchangeBounds, Heard
from kvpool.directory.memory import READ_ENTRIES, ExchangeState, MemoryServer


class MemoryExchange:
    """An `Exchange` of one space of a server."""

    def __init__(self, server: MemoryServer, space: Space, bounds: ExchangeBounds | None = None) -> None:
        self._server = server
        self._space = space
        self._bounds = bounds or ExchangeBounds()

    def append(self, entries: Sequence[bytes]) -> None:
        """See `Exchange`."""
        with self._server.changed:
            state = self._state()
            if not state.life:
                state.life = self._server.nonce()
            for data in entries:
                state.newest += 1
                state.log.append((state.newest, data))
            while len(state.log) > self._bounds.log_entries:
                state.log.popleft()
            state.heard = self._server.clock()
            self._server.changed.notify_all()

    def tip(self) -> Tip:
        """See `Exchange`."""
        with self._server.changed:
            state = self._state()
            return Tip(state.life, state.log[0][0] if state.log else 0, state.newest)

    def read(self, cursor: Cursor, timeout_s: float) -> Heard:
        """See `Exchange`."""
        deadline = time.monotonic() + timeout_s
        with self._server.changed:
            while True:
                state = self._state()
                if state.life != cursor.life or state.newest < cursor.position:
                    raise LogGap(f"the routers' log is not the one of position {cursor.position}")
                left = deadline - time.monotonic()
                if state.newest > cursor.position or left <= 0:
                    break
                self._server.changed.wait(left)
            found = [one for one in state.log if one[0] > cursor.position][:READ_ENTRIES]
        if found and found[0][0] != cursor.position + 1:
            raise LogGap(f"the routers' log begins at {found[0][0]}, the cursor is at {cursor.position}")
        position = found[-1][0] if found else cursor.position
        return Heard(tuple(data for _, data in found), Cursor(cursor.life, position))

    def close(self) -> None:
        """See `Exchange`."""

    def _state(self) -> ExchangeState:
        """Returns the state, emptied of a log that is too old. The caller has the lock."""
        state = self._server.state(self._space).exchange
        if state.life and state.heard + self._bounds.retention_s < self._server.clock():
            state.life, state.newest = "", 0
            state.log.clear()
        return state


class MemoryClaimStore:
    """A `ClaimStore` of one space of a server."""

    def __init__(self, server: MemoryServer, space: Space) -> None:
        self._server = server
        self._space = space

    def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
        """See `ClaimStore`."""
        with self._server.changed:
            held = self._held()
            for claim in claims:
                held.setdefault(claim.key, (claim.holder, self._server.clock() + life_s))
            return [held[claim.key][0] for claim in claims]

    def renew(self, claims: Sequence[Claim], life_s: float) -> None:
        """See `ClaimStore`."""
        with self._server.changed:
            held = self._held()
            for claim in claims:
                if claim.key in held and held[claim.key][0] == claim.holder:
                    held[claim.key] = (claim.holder, self._server.clock() + life_s)

    def release(self, claims: Sequence[Claim]) -> None:
        """See `ClaimStore`."""
        with self._server.changed:
            held = self._held()
            for claim in claims:
                if claim.key in held and held[claim.key][0] == claim.holder:
                    del held[claim.key]

    def close(self) -> None:
        """See `ClaimStore`."""

    def _held(self) -> dict[bytes, tuple[str, float]]:
        """Returns the claims that live. The caller has the lock."""
        claims, now = self._server.state(self._space).exchange.claims, self._server.clock()
        for key in [key for key, (_, until) in claims.items() if until <= now]:
            del claims[key]
        return claims
