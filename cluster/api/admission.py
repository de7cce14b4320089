"""Which requests may go to the replicas now, which wait here, and which are refused: in tokens, fairly by client.

    enter -> (refused: 429 or 503) | waits here -> on its way to a replica -> admitted there | left

A request counts with the tokens it may come to, prompt and answer of all its choices. From `enter` until its replica has
admitted it, it is *queued*; that is what `queue_tokens` and `key_queue_tokens` bound. At most `inflight_tokens` of the
queued are on their way to replicas at a time; the rest waits here, because a replica's line is first come, first served,
and one client's thousand requests would stand there before the next client's first.

Those that wait are let go by start-time fair queueing: each client has a clock that its requests push forward by their
tokens, the client whose clock is furthest behind is next, and within a client the order is that of arrival. Of two
clients that both always have something waiting, neither gets ahead of the other by more than the largest request of each.
A client that was away starts at the present, so nobody saves up turns.

A request larger than a limit is not refused for ever: it counts as fitting where nothing else is queued.

Everything happens in the event loop's thread and between two awaits, so there is no lock. A ticket that is left, for
whatever reason and in whatever state, gives back exactly what it holds.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Self

from cluster.api.errors import slow_down, unavailable
from cluster.api.identity import ANONYMOUS, Identity


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """All in tokens; 0 means no limit. `key_queue_tokens` is a client's share, for clients that have a name."""

    queue_tokens: int = 0
    key_queue_tokens: int = 0
    inflight_tokens: int = 0


class _State(Enum):
    OUTSIDE = auto()
    WAITING = auto()
    ON_ITS_WAY = auto()


@dataclass(slots=True)
class _Client:
    """One name's part: what it has queued, and those of it that wait, in order of arrival. `clock` is in tokens."""

    clock: int
    queued_tokens: int = 0
    waiting: OrderedDict[Ticket, None] = field(default_factory=OrderedDict)


class Ticket:
    """A request's place: an async context that is entered when the request may go. See `Admission.enter`."""

    def __init__(self, admission: Admission, identity: Identity, tokens: int) -> None:
        self._admission = admission
        self.name = identity.name
        self.tokens = tokens
        self.state = _State.OUTSIDE
        self.turn: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Self:
        """Return when the request may go. Raises `ApiError` 429 or 503 at once when there is no place for it."""
        await self._admission._join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission._leave(self)

    def admitted(self) -> None:
        """The replicas have admitted all of it: its place is free for the next. A second call does nothing."""
        self._admission._leave(self)


class Admission:
    """The queue of one ingress process."""

    def __init__(self, limits: AdmissionLimits | None = None) -> None:
        self._limits = limits or AdmissionLimits()
        self._clients: dict[str, _Client] = {}
        self._ahead: dict[str, int] = {}  # clocks of clients that left while others wait
        self._now = 0
        self._queued_tokens = 0
        self._inflight_tokens = 0
        self._waiting = 0

    @property
    def queued_tokens(self) -> int:
        """Tokens of all requests that no replica has admitted yet."""
        return self._queued_tokens

    @property
    def inflight_tokens(self) -> int:
        """Those of them that are on their way to a replica, or in its line."""
        return self._inflight_tokens

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return self._waiting

    def report(self) -> dict[str, int]:
        """The three figures, and the clients that are in them, for the operator."""
        return {
            "queued_tokens": self._queued_tokens,
            "inflight_tokens": self._inflight_tokens,
            "waiting_requests": self._waiting,
            "clients": len(self._clients),
        }

    def enter(self, identity: Identity, tokens: int) -> Ticket:
        """A ticket for a request of `tokens`, to be entered with `async with` and told `admitted()` when it is."""
        return Ticket(self, identity, max(1, tokens))

    async def _join(self, ticket: Ticket) -> None:
        self._check(ticket)
        client = self._clients.get(ticket.name)
        if client is None:
            client = self._clients[ticket.name] = _Client(self._ahead.pop(ticket.name, 0))
        client.queued_tokens += ticket.tokens
        self._queued_tokens += ticket.tokens
        if not self._waiting and self._has_room(ticket):
            self._let_go(client, ticket)
            return
        if not client.waiting:
            client.clock = max(client.clock, self._now)
        client.waiting[ticket] = None
        ticket.state = _State.WAITING
        ticket.turn = asyncio.get_running_loop().create_future()
        self._waiting += 1
        self._serve()
        try:
            await ticket.turn
        except BaseException:
            self._leave(ticket)
            raise

    def _check(self, ticket: Ticket) -> None:
        limits = self._limits
        client = self._clients.get(ticket.name)
        of_client = client.queued_tokens if client is not None else 0
        if ticket.name != ANONYMOUS.name and _exceeds(limits.key_queue_tokens, of_client, ticket.tokens):
            raise slow_down(
                f"This API key has {of_client} tokens waiting, and {ticket.tokens} more would exceed its share of "
                f"{limits.key_queue_tokens}. Retry when some of its requests have been answered."
            )
        if _exceeds(limits.queue_tokens, self._queued_tokens, ticket.tokens):
            raise unavailable("The server is overloaded. Retry in a moment.", "server_is_overloaded")

    def _has_room(self, ticket: Ticket) -> bool:
        return not _exceeds(self._limits.inflight_tokens, self._inflight_tokens, ticket.tokens)

    def _serve(self) -> None:
        """Let go whoever is next, as long as there is room. Whoever is next is waited for: small ones do not overtake."""
        while self._waiting:
            client = min((each for each in self._clients.values() if each.waiting), key=lambda each: each.clock)
            ticket = next(iter(client.waiting))
            if not self._has_room(ticket):
                return
            del client.waiting[ticket]
            self._waiting -= 1
            self._let_go(client, ticket)
            assert ticket.turn is not None, "who waits has a future"
            if not ticket.turn.done():  # done: cancelled a moment ago, and about to leave
                ticket.turn.set_result(None)

    def _let_go(self, client: _Client, ticket: Ticket) -> None:
        client.clock = max(client.clock, self._now)
        self._now = client.clock
        client.clock += ticket.tokens
        ticket.state = _State.ON_ITS_WAY
        self._inflight_tokens += ticket.tokens

    def _leave(self, ticket: Ticket) -> None:
        """Give back what `ticket` holds; nothing when it holds nothing (any more)."""
        if ticket.state is _State.OUTSIDE:
            return
        client = self._clients[ticket.name]
        if ticket.state is _State.WAITING:
            del client.waiting[ticket]
            self._waiting -= 1
        else:
            self._inflight_tokens -= ticket.tokens
        ticket.state = _State.OUTSIDE
        client.queued_tokens -= ticket.tokens
        self._queued_tokens -= ticket.tokens
        if not client.queued_tokens:
            del self._clients[ticket.name]
            self._ahead[ticket.name] = client.clock
        self._serve()
        if not self._waiting:
            self._ahead.clear()  # nobody to be fair to: whoever comes next starts at the present


def _exceeds(limit: int, present: int, more: int) -> bool:
    """Whether `more` is too much on top of `present`. Whatever is alone fits."""
    return limit > 0 and present > 0 and present + more > limit
