"""Decides which replica gets a request, from the mirror's picture of the directory and this process's own bookings.

Serve's router (`serve_router.py`) asks `route` for each request, in its own thread; whoever took the request from the client
holds a ticket for it, in another; a follower writes the mirror in a third. One lock covers tickets, bookings and totals; it is
held for microseconds and never while a policy computes or a metric is written.

`chooser.py` says how a decision is made. The first choice is booked at once.

Without a picture of the directory (none configured, silent for longer than its lease, no candidate in it) or after any error, the
decision is a fallback, with the reason in it. Nothing here raises into its callers: an error is logged, at most once a
minute, and answered by a fallback.

Requests and tokens are counted once per request, when its first token is there or when it ends without one, by the decision
and the admission that stood.

Limits: other processes' bookings are unknown until a heartbeat tells.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, ParamSpec

from router.bookings import Bookings
from router.chooser import Booked, Chooser, as_they_come
from router.decision import RouteDecision
from router.directory_state import DirectoryWatch
from router.mirror import Mirror
from router.route_config import RouteConfig
from router.tally import Tally
from router.ticket import Ticket
from router.view import RouteRequest

if TYPE_CHECKING:
    from router.metrics import RouterMetrics  # needs Ray, which deciding does not

P = ParamSpec("P")
LOG_EVERY_S: Final = 60.0
_log = logging.getLogger(__name__)


class RouteService:
    """See above. Thread-safe."""

    def __init__(
        self,
        mirror: Mirror | None,
        config: RouteConfig,
        *,
        block_tokens: int,
        clock: Callable[[], float],
        rng: random.Random,
        metrics: RouterMetrics,
        fresh_s: float,
        connected: Callable[[], bool],
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        """`mirror` None: no directory is configured. `clock` is the one the mirror's follower uses, in monotonic seconds.

        `fresh_s`: how old the mirror's picture may be, which is the lease. `connected`: whether its follower is, and if not,
        with what `problem`.
        """
        self._mirror = mirror
        self._watch = DirectoryWatch(mirror, connected, fresh_s, problem)
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._began_at = clock()
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._bookings = Bookings()
        self._tally = Tally()
        self._turns = itertools.count()
        self._chooser = Chooser(mirror, config, block_tokens, rng, self._booked)
        self._complained_at = -math.inf

    # For whoever takes requests

    def ticket(self, request_id: str, keys: Sequence[bytes], prompt_tokens: int, output_tokens: int) -> Ticket:
        """Returns the ticket of a request that begins; close it when the request ends. `keys`: of the prompt's full blocks."""
        ticket = Ticket(self, request_id, keys, prompt_tokens, output_tokens)
        with self._lock:
            self._tickets[request_id] = ticket
        return ticket

    def note_admitted(self, ticket: Ticket, replica_id: str, cached_tokens: int) -> None:
        """See `Ticket.admitted`."""
        self._try("a replica's answer could not be noted", self._accept, ticket, replica_id, cached_tokens)

    def note_started(self, ticket: Ticket) -> None:
        """See `Ticket.started`."""
        self._try("a first token could not be noted", self._start, ticket)
        self._try("a request could not be counted", self._count, ticket)

    def note_retry(self, ticket: Ticket) -> None:
        """See `Ticket.retry`."""
        self._try("a retry could not be noted", self._retry, ticket)
        self._try("a metric could not be written", self._metrics.retried)

    def note_closed(self, ticket: Ticket) -> None:
        """See `Ticket.close`."""
        self._try("the end of a request could not be noted", self._close, ticket)
        self._try("a request could not be counted", self._count, ticket)

    # For Serve's router

    def route(self, request_id: str, replica_ids: Sequence[str]) -> RouteDecision:
        """Returns a ranking of all of `replica_ids`; books the first one for the request, in place of an earlier booking.

        A request without a ticket gets a fallback decision and no booking.
        """
        began_at = self._now()
        try:
            decision = self._route(request_id, replica_ids, began_at)
        except Exception:
            self._complain("routing failed, so the candidates are taken as they come")
            decision = as_they_come(replica_ids, "error in the router")
        self._try("a metric could not be written", self._metrics.decided, max(0.0, self._now() - began_at))
        return decision

    def route_failed(self, request_id: str) -> None:
        """Whoever asked could not use the answer and leaves the choice to Serve: a fallback."""
        self._try("a failure could not be noted", self._leave_to_serve, request_id)

    def routed(self, request_id: str, replica_id: str) -> None:
        """The replica has accepted the request."""
        ticket = self._tickets.get(request_id)
        if ticket is not None:
            self._try("an accepted request could not be noted", self._accept, ticket, replica_id, None)

    def died(self, replica_id: str) -> None:
        """The replica is dead: what was booked there is void."""
        with self._lock:
            self._bookings.drop_replica(replica_id)

    def members(self, replica_ids: Sequence[str]) -> None:
        """These replicas, and no others, may be chosen from now on. Ids never come back."""
        with self._lock:
            self._bookings.keep_replicas(replica_ids)

    def requests(self, replica_id: str) -> int:
        """Returns how many requests of this process are booked at the replica."""
        with self._lock:
            return self._bookings.requests(replica_id)

    # For whoever looks

    def report(self) -> dict[str, Any]:
        """Policy, directory, totals, ready for JSON."""
        try:
            directory = self._watch.report(self._now())
        except Exception:
            self._complain("the directory's state could not be reported")
            directory = {"state": "silent", "lag_s": None, "lag_entries": 0, "resyncs": 0, "gaps": 0}
            directory |= {"digest_mismatches": 0, "problem": "", "pools": []}
        with self._lock:
            bookings = len(self._bookings)
            totals = self._tally.report()
        return {"policy": self._config.policy, "directory": directory, "bookings": bookings, **totals}

    def report_levels(self) -> None:
        """Writes the metrics that are levels; call it about once a second, from one thread.

        The lag of a mirror that never caught up counts from the start of this process.
        """
        try:
            now = self._now()
            state = self._watch.state(now)
            lag_s = 0.0
            if self._mirror is not None:
                lag_s = min(self._mirror.lag_s(now), max(0.0, now - self._began_at))
            resyncs, gaps, _ = self._watch.counts()
            with self._lock:
                bookings = len(self._bookings)
            self._metrics.levels(bookings, state, lag_s, resyncs, gaps)
        except Exception:
            self._complain("the router's levels could not be reported")

    # Deciding

    def _route(self, request_id: str, replica_ids: Sequence[str], now: float) -> RouteDecision:
        with self._lock:
            ticket = self._tickets.get(request_id)
            self._bookings.release(request_id)
        reason = "the request has no ticket"
        decision = None
        if ticket is not None:
            try:
                reason = self._watch.silence(now)
                if not reason:
                    reason = "no replica is in the directory"
                    if ticket.turn is None:
                        ticket.turn = next(self._turns)
                    request = RouteRequest(ticket.prompt_tokens, ticket.output_tokens, ticket.turn)
                    decision = self._chooser.by_policy(request, ticket.keys, replica_ids, now)
            except Exception:
                reason = "error in the policy"
                self._complain("a routing decision failed, so the least loaded replica is taken")
        if decision is None:
            decision = self._chooser.by_load(replica_ids, reason)
        if ticket is None:
            self._count_outcome(decision)
        else:
            self._keep(ticket, decision, now)
        return decision

    def _booked(
        self, replica_ids: Sequence[str], reported_at: Sequence[float | None], keys: Sequence[bytes]
    ) -> list[Booked]:
        """Returns what the chooser asks of the bookings, all of one moment."""
        with self._lock:
            load = self._bookings.load(replica_ids, reported_at)
            promised = self._bookings.promised_blocks(replica_ids, keys)
        return [Booked(tokens, requests, blocks) for (tokens, requests), blocks in zip(load, promised, strict=True)]

    # Keeping account

    def _keep(self, ticket: Ticket, decision: RouteDecision, now: float) -> None:
        """Leaves the decision with the ticket, and books the first choice if the request is still there."""
        with self._lock:
            ticket.decision = decision
            if decision.order and self._tickets.get(ticket.request_id) is ticket:
                self._book(ticket, decision.replica_id, decision.predicted_tokens, now)

    def _book(self, ticket: Ticket, replica_id: str, cached_tokens: int, now: float) -> None:
        self._bookings.book(ticket.request_id, replica_id, ticket.prompt_tokens, cached_tokens, ticket.keys, now)

    def _accept(self, ticket: Ticket, replica_id: str, cached_tokens: int | None) -> None:
        """Notes where the request really went. `cached_tokens`: measured there; None while nobody has said."""
        now = self._now()
        with self._lock:
            decision = ticket.decision
            predicted_tokens = 0
            if decision is not None and replica_id in decision.view.replica_ids:
                ticket.decision = decision = decision.accepted_by(replica_id)
                predicted_tokens = decision.predicted_tokens
            if cached_tokens is not None:
                ticket.admission = (predicted_tokens, cached_tokens)
            if self._tickets.get(ticket.request_id) is ticket:
                known = predicted_tokens if cached_tokens is None else cached_tokens
                if ticket.request_id not in self._bookings:
                    self._book(ticket, replica_id, known, now)
                self._bookings.move(ticket.request_id, replica_id, known, now)

    def _start(self, ticket: Ticket) -> None:
        with self._lock:
            if self._tickets.get(ticket.request_id) is ticket:
                self._bookings.start(ticket.request_id)

    def _retry(self, ticket: Ticket) -> None:
        with self._lock:
            self._tally.retries += 1
            if self._tickets.get(ticket.request_id) is ticket:
                self._bookings.release(ticket.request_id)

    def _close(self, ticket: Ticket) -> None:
        with self._lock:
            if self._tickets.get(ticket.request_id) is ticket:
                del self._tickets[ticket.request_id]
                self._bookings.release(ticket.request_id)

    def _leave_to_serve(self, request_id: str) -> None:
        decision = self._chooser.by_load((), "error in the router")
        with self._lock:
            ticket = self._tickets.get(request_id)
            self._bookings.release(request_id)
            if ticket is not None:
                ticket.decision = decision
        if ticket is None:
            self._count_outcome(decision)

    def _count(self, ticket: Ticket) -> None:
        """Counts a request, once."""
        with self._lock:
            if ticket.is_counted:
                return
            ticket.is_counted = True
            admission = ticket.admission
            if admission is not None:
                predicted_tokens, measured_tokens = admission
                phantom_tokens = max(0, predicted_tokens - measured_tokens)
                tokens = (ticket.prompt_tokens, predicted_tokens, measured_tokens, phantom_tokens)
                self._tally.look_up(*tokens)
        if admission is not None:
            self._try("a metric could not be written", self._metrics.looked_up, *tokens)
        if ticket.decision is not None:
            self._count_outcome(ticket.decision)

    def _count_outcome(self, decision: RouteDecision) -> None:
        with self._lock:
            self._tally.outcomes[decision.outcome] += 1
        self._try("a metric could not be written", self._metrics.routed, decision.outcome)

    def _try(self, what: str, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Takes a step of the account; should it fail, says `what`."""
        try:
            step(*args, **kwargs)
        except Exception:
            self._complain(what)

    def _now(self) -> float:
        """The time; should the clock fail, the beginning, so that everything looks old and nothing is decided by it."""
        try:
            return self._clock()
        except Exception:
            self._complain("the clock failed")
            return self._began_at

    def _complain(self, what: str) -> None:
        """Logs the exception in progress, at most once a minute."""
        try:
            now = self._clock()
        except Exception:
            now = self._complained_at
        if now - self._complained_at >= LOG_EVERY_S or self._complained_at == -math.inf:
            self._complained_at = now
            _log.warning("%s; this is said once a minute at most", what, exc_info=True)
