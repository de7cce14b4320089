"""A `RouteService` that tells a decision log of every request: what was decided, at once; what came of it, at its first token.

It adds nothing to a decision but an entry in a queue. A request without a ticket is not in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from router.decision import RouteDecision
from router.decision_log import DecisionLog
from router.decision_record import Measured, decided
from router.service import RouteService
from router.ticket import Ticket

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    """A request in progress. `cached_tokens` is None until a replica has taken it."""

    ticket: Ticket
    began_at: float
    replica_id: str = ""
    cached_tokens: int | None = None
    is_measured: bool = False


class LoggedRouteService(RouteService):
    """See above; otherwise as its base."""

    def __init__(
        self, *args: Any, log: DecisionLog, clock: Callable[[], float], unix_clock: Callable[[], float], **kwargs: Any
    ) -> None:
        """`clock` in monotonic seconds, `unix_clock` in those since 1970; the rest is for the base."""
        super().__init__(*args, clock=clock, **kwargs)
        self._decision_log = log
        self._monotonic = clock
        self._unix_clock = unix_clock
        self._entries: dict[str, _Entry] = {}

    def ticket(
        self,
        request_id: str,
        keys: bytes | Sequence[bytes],
        prompt_tokens: int,
        output_tokens: int,
        *,
        session: str = "",
    ) -> Ticket:
        """See `RouteService.ticket`."""
        ticket = super().ticket(request_id, keys, prompt_tokens, output_tokens, session=session)
        self._entries[request_id] = _Entry(ticket, self._monotonic())
        return ticket

    def route(self, request_id: str, replica_ids: Sequence[str]) -> RouteDecision:
        """See `RouteService.route`."""
        decision = super().route(request_id, replica_ids)
        entry = self._entries.get(request_id)
        if entry is not None:
            self._note(self._decided, entry, decision)
        return decision

    def note_admitted(self, ticket: Ticket, replica_id: str, cached_tokens: int) -> None:
        """See `RouteService.note_admitted`."""
        super().note_admitted(ticket, replica_id, cached_tokens)
        entry = self._entry(ticket)
        if entry is not None:
            entry.replica_id, entry.cached_tokens = replica_id, cached_tokens

    def note_started(self, ticket: Ticket) -> None:
        """See `RouteService.note_started`."""
        super().note_started(ticket)
        entry = self._entry(ticket)
        if entry is not None:
            self._note(self._measured, entry, self._monotonic() - entry.began_at)

    def note_closed(self, ticket: Ticket) -> None:
        """See `RouteService.note_closed`."""
        super().note_closed(ticket)
        entry = self._entry(ticket)
        if entry is not None:
            del self._entries[ticket.request_id]
            self._note(self._measured, entry, None)

    def report(self) -> dict[str, Any]:
        """See `RouteService.report`; with the log's own."""
        return {**super().report(), "decision_log": self._decision_log.report()}

    def _entry(self, ticket: Ticket) -> _Entry | None:
        """The request's entry; None for a ticket that is closed, or whose id another one has taken."""
        entry = self._entries.get(ticket.request_id)
        return entry if entry is not None and entry.ticket is ticket else None

    def _decided(self, entry: _Entry, decision: RouteDecision) -> None:
        self._decision_log.put(partial(decided, self._unix_clock(), entry.ticket, decision))

    def _measured(self, entry: _Entry, ttft_s: float | None) -> None:
        if entry.is_measured or entry.cached_tokens is None:
            return
        entry.is_measured = True
        name, tokens = entry.replica_id, entry.cached_tokens
        self._decision_log.put(Measured(self._unix_clock(), entry.ticket.request_id, name, tokens, ttft_s))

    def _note(self, step: Callable[..., None], *args: Any) -> None:
        try:
            step(*args)
        except Exception:
            _log.debug("a decision could not be logged", exc_info=True)
