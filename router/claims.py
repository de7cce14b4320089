"""Single flight for cold prefixes, through all routers of a space: what nobody has is computed once.

    with claims.place(request_id, keys) as place:   # ends on whatever path
        await place.settle()                        # claims, or waits for whoever has the claim
        ...send it...
        place.end()                                 # the first token is here: others find the prefix without a claim

A request is cold when a long part of its prompt is in no pool and in no booking. It claims the first block of that part. Who
gets the claim goes on at once. Everybody else waits until the winner's booking is known here, which is a matter of
milliseconds, and then goes on too: now the prefix is promised by the replica that the winner was sent to, and the policy weighs
that like everything else. So nobody waits for a prefill here, and nobody is told where to go.

Requests of one process agree among themselves: the first of them asks the store, the others follow it. A warm request costs one
look at the mirror and the bookings; a cold one one round trip in `claim_keeper.py`, off the event loop.

Every wait is bounded: `ANSWER_S` for the store, then the request goes on without a claim; `WAIT_S` in all for the winner's
booking. The store's time runs while it is being asked: what this process needs to get round to that is not a sign that the
store hangs, and it is longest when many requests come at once, which is when claims are for. It is part of `WAIT_S`. Nothing here
raises but the cancellation of the request.

Limits: two prompts with a cold prefix in common claim the same block only where both see the same blocks as the first cold one;
in the milliseconds in which they do not, the prefix may be computed twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Protocol, get_args

from kvpool.directory.exchange import Claim
from kvpool.keys import KEY_BYTES
from router.claim_keeper import ClaimKeeper

ClaimOutcome = Literal["won", "lost", "timed_out", "unavailable"]
"""Of a cold request; a warm one has none. `lost`: another request has the claim, and its booking became known. `timed_out`: it
did not in time. `unavailable`: the store did not answer in time."""

CLAIM_OUTCOMES: Final[tuple[ClaimOutcome, ...]] = get_args(ClaimOutcome)
WAIT_S: Final = 0.25
ANSWER_S: Final = 0.1
"""Many times a round trip. On an overloaded machine an answer takes tens of milliseconds to come through, and to go on without a
claim then costs a prompt computed twice; a store that hangs costs this wait at most once a second (`claim_keeper.py`)."""
_log = logging.getLogger(__name__)


class Prefixes(Protocol):
    """What is known of prompts: `RouteService`."""

    def known_blocks(self, keys: bytes) -> int:
        """Returns how many leading blocks of these (packed keys) a pool holds or a booking promises."""
        ...

    async def wait_booked(self, request_id: str, timeout_s: float) -> bool:
        """Returns True as soon as any router's booking of the request is known here, False after `timeout_s`."""
        ...


@dataclass(slots=True, eq=False)
class _Flight:
    """A claim that a request of this process asks for or has: who is to be followed, once that is settled."""

    leader: str
    settled: asyncio.Event


class Claims:
    """See above. Belongs to one event loop; `report` may be called from anywhere."""

    def __init__(
        self,
        keeper: ClaimKeeper | None,
        prefixes: Prefixes,
        *,
        clock: Callable[[], float],
        origin: str = "",
        block_tokens: int = 1,
        least_tokens: int = 0,
        noted: Callable[[ClaimOutcome, float], None] = lambda outcome, seconds: None,
        wait_s: float = WAIT_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """`keeper` None: only requests of this process agree. `origin` names this router among all.

        A cold part of fewer than `least_tokens` is not claimed; 0 claims nothing.

        `noted` is told the outcome of each cold request and how long it was held up, in seconds.
        """
        self._keeper = keeper
        self._prefixes = prefixes
        self._origin = origin
        self._block_tokens = block_tokens
        self._least_tokens = least_tokens
        self._clock = clock
        self._noted = noted
        self._wait_s = wait_s
        self._answer_s = answer_s
        self._flights: dict[bytes, _Flight] = {}
        self._late: asyncio.Future[str | None] | None = None
        self._counts: Counter[ClaimOutcome] = Counter()

    def place(self, request_id: str, keys: bytes) -> Place:
        """Returns the place of a request (id unique in this process) whose prompt has these packed keys."""
        return Place(self, request_id, keys)

    def report(self) -> dict[str, Any]:
        """Claims held now, and how cold requests came out so far, ready for JSON."""
        held = self._keeper.held if self._keeper is not None else 0
        return {"held": held, **{outcome: self._counts[outcome] for outcome in CLAIM_OUTCOMES}}

    async def settle(self, place: Place) -> None:
        """See `Place.settle`."""
        key = self._cold_key(place.keys)
        if key is None:
            return
        began_at = self._clock()
        flight = self._flights.get(key)
        if flight is None:
            outcome = await self._lead(place, key, began_at)
        else:
            outcome = await self._follow(flight, began_at)
        self._counts[outcome] += 1
        try:
            self._noted(outcome, max(0.0, self._clock() - began_at))
        except Exception:
            _log.debug("a claim could not be noted", exc_info=True)

    def end(self, place: Place) -> None:
        """See `Place.end`."""
        flight, claim = place.flight, place.claim
        place.flight = place.claim = None
        if claim is not None and self._keeper is not None:
            self._keeper.release(claim)
        if flight is not None:
            self._land(place.key, flight)

    def _cold_key(self, keys: bytes) -> bytes | None:
        """Returns the key to claim; None for a prompt that is not cold."""
        blocks = len(keys) // KEY_BYTES
        if not self._least_tokens or blocks * self._block_tokens < self._least_tokens:
            return None
        try:
            known = self._prefixes.known_blocks(keys)
        except Exception:
            _log.warning("what is known of a prompt could not be looked up: no claim", exc_info=True)
            return None
        if known >= blocks or (blocks - known) * self._block_tokens < self._least_tokens:
            return None
        return keys[known * KEY_BYTES : (known + 1) * KEY_BYTES]

    async def _lead(self, place: Place, key: bytes, began_at: float) -> ClaimOutcome:
        """Asks for the claim, for this request and those of this process that follow it."""
        flight = self._flights[key] = _Flight(place.request_id, asyncio.Event())
        claim = Claim(key, f"{self._origin}/{place.request_id}")
        place.key, place.flight, place.claim = key, flight, claim  # from here on `end` undoes it
        holder = await self._holder_of(claim)
        if holder is None or holder == claim.holder:
            flight.settled.set()
            return "won" if holder else "unavailable"
        place.claim = None
        flight.leader = holder.partition("/")[2]
        flight.settled.set()
        outcome = await self._follow(flight, began_at)
        self.end(place)
        return outcome

    async def _holder_of(self, claim: Claim) -> str | None:
        """Returns who has what `claim` asks for; None where that is not known soon enough.

        While an answer is late, nobody else waits for one: a store that hangs holds up those who ask at the same time, once.
        """
        if self._keeper is None or (self._late is not None and not self._late.done()):
            return None
        answer = self._keeper.take(claim)
        give_up_at = self._clock() + self._wait_s
        left_s = min(self._answer_s, self._wait_s)
        while left_s > 0.0:
            await asyncio.wait((answer,), timeout=left_s)
            if answer.done():
                return answer.result()
            left_s = min(self._answer_s - self._keeper.asking_s, give_up_at - self._clock())
        self._late = answer
        return None

    async def _follow(self, flight: _Flight, began_at: float) -> ClaimOutcome:
        """Waits until the leader's booking is known."""
        try:
            async with asyncio.timeout(max(0.0, began_at + self._wait_s - self._clock())):
                await flight.settled.wait()
        except TimeoutError:
            return "timed_out"
        left_s = max(0.0, began_at + self._wait_s - self._clock())
        return "lost" if await self._prefixes.wait_booked(flight.leader, left_s) else "timed_out"

    def _land(self, key: bytes, flight: _Flight) -> None:
        flight.settled.set()
        if self._flights.get(key) is flight:
            del self._flights[key]


class Place:
    """One request among those that want cold prefixes. The fields belong to `Claims`."""

    __slots__ = ("_claims", "claim", "flight", "key", "keys", "request_id")

    def __init__(self, claims: Claims, request_id: str, keys: bytes) -> None:
        self._claims = claims
        self.request_id = request_id
        self.keys = keys
        self.key = b""
        self.flight: _Flight | None = None
        self.claim: Claim | None = None
        """Held by this request, as far as is known."""

    async def settle(self) -> None:
        """Claims what is cold of the prompt, or waits for whoever has it. Call it once, before the request is sent."""
        await self._claims.settle(self)

    def end(self) -> None:
        """The first token is here, or the request has ended: nobody need wait for it any more. Idempotent."""
        self._claims.end(self)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
