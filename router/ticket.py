"""A request's place at the router, held by whoever took the request from the client, for as long as the request lives.

    with service.ticket(...) as ticket:     # known to the router from here
        ...send it...                       # Serve asks the router, which decides and books
        ticket.admitted(replica_id, ...)    # the replica says what it found cached
        ticket.started()                    # the first token is here
                                            # left on whatever path: bookings released, request forgotten

Nothing here raises, whatever the order of the calls and however often they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from router.decision import RouteDecision
from router.tally import Found
from router.view import IntColumn


class TicketOffice(Protocol):
    """What stands behind a ticket."""

    def note_admitted(self, ticket: Ticket, replica_id: str, cached_tokens: int) -> None:
        """See `Ticket.admitted`."""

    def note_started(self, ticket: Ticket) -> None:
        """See `Ticket.started`."""

    def note_retry(self, ticket: Ticket) -> None:
        """See `Ticket.retry`."""

    def note_closed(self, ticket: Ticket) -> None:
        """See `Ticket.close`."""


class Ticket:
    """One request: its id (unique among those alive), the packed keys of its prompt's full blocks, its sizes, its session.

    The fields below belong to the office, which changes them under its lock.
    """

    __slots__ = (
        "_office",
        "admission",
        "decided_at",
        "decision",
        "is_counted",
        "keys",
        "listed_tokens",
        "output_tokens",
        "prompt_tokens",
        "request_id",
        "session",
        "turn",
    )

    def __init__(
        self,
        office: TicketOffice,
        request_id: str,
        keys: bytes | Sequence[bytes],
        prompt_tokens: int,
        output_tokens: int,
        session: str = "",
    ) -> None:
        self._office = office
        self.request_id = request_id
        self.keys = keys if isinstance(keys, bytes) else b"".join(keys)
        self.session = session
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.turn: int | None = None
        self.decision: RouteDecision | None = None
        """The newest decision, the replica that took the request first; None before there is one."""
        self.decided_at = 0.0
        """When it was made, in monotonic seconds."""
        self.listed_tokens: IntColumn | None = None
        """Of each of its candidates, what the directory lists of the prompt; None for a fallback."""
        self.admission: Found | None = None
        """What was predicted and found, of the newest admission."""
        self.is_counted = False

    def admitted(self, replica_id: str, cached_tokens: int) -> None:
        """The replica has taken the request and found `cached_tokens` of its prompt cached."""
        self._office.note_admitted(self, replica_id, cached_tokens)

    def started(self) -> None:
        """Its first token has come: it stays where it is. Now it is counted."""
        self._office.note_started(self)

    def retry(self) -> None:
        """Its replica died before the first token: it is sent once more, and decided anew."""
        self._office.note_retry(self)

    def close(self) -> None:
        """The request has ended: it owes nothing, and nobody asks for it again. Counts it if it never started."""
        self._office.note_closed(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
