"""Decides which replica gets a request, from the mirror's picture of the directory and the bookings of all routers.

Serve's router (`serve_router.py`) asks `route` for each request, in its own thread; whoever took the request from the client
holds a ticket for it, in another; a follower writes the mirror in a third. One lock covers tickets, bookings and totals; it is
held for microseconds and never while a policy computes or a metric is written.

`chooser.py` says how a decision is made. The first choice is booked at once.

Without a picture of the directory (none configured, silent for longer than its lease, no candidate in it) or after any error,
the decision is a fallback, with the reason in it. Nothing here raises into its callers: an error is logged, at most once a
minute, and answered by a fallback.

Requests and tokens are counted once per request, when its first token is there or when it ends without one, by the decision
and the admission that stood. The time to that token, with what was known when the request was decided, goes to the calibration.

Bookings of other routers count like our own: `apply_remote` takes what they tell, `announce` is told what they should know.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, ParamSpec

import numpy as np

from kvpool.keys import KEY_BYTES
from router.booking_event import BookingEvent
from router.calibration import Calibration, Rates
from router.chooser import Choice, Chooser, as_they_come
from router.decision import RouteDecision
from router.directory_state import DirectoryWatch
from router.ledger import Ledger
from router.mirror import Mirror
from router.route_config import RouteConfig
from router.tally import Found, Tally
from router.ticket import Ticket
from router.view import FloatColumn, RouteRequest

if TYPE_CHECKING:
    from router.metrics import RouterMetrics  # needs Ray, which deciding does not

P = ParamSpec("P")
LOG_EVERY_S: Final = 60.0
RATES_S: Final = 0.01
"""How long rates are taken to be what they were: they move slowly, and of many decisions in a row one looks them up."""
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
        calibration: Calibration | None = None,
        announce: Callable[[BookingEvent], None] | None = None,
    ) -> None:
        """`mirror` None: no directory is configured. `clock` is the one the mirror's follower uses, in monotonic seconds.

        `fresh_s`: how old the mirror's picture may be, which is the lease. `connected`: whether its follower is, and if not,
        with what `problem`. `calibration` (a new one by default) belongs to the service from here on. `announce` is told of
        every change of a booking, in order, under a lock: it must neither wait nor call back.
        """
        self._mirror = mirror
        self._watch = DirectoryWatch(mirror, connected, fresh_s, problem)
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._began_at = clock()
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._ledger = Ledger(announce, self._complain)
        self._calibration = calibration or Calibration(config)
        nothing = Rates(np.empty(0), np.empty(0))
        self._told_rates: tuple[tuple[str, ...] | None, float, tuple[Rates, float]] = (None, -math.inf, (nothing, 0.0))
        self._tally = Tally()
        self._turns = itertools.count()
        self._chooser = Chooser(mirror, config, block_tokens, rng, self._ledger, self._rates)
        self._complained_at = -math.inf

    # For whoever takes requests

    def ticket(
        self,
        request_id: str,
        keys: bytes | Sequence[bytes],
        prompt_tokens: int,
        output_tokens: int,
        *,
        session: str = "",
    ) -> Ticket:
        """Returns the ticket of a request that begins; close it when the request ends.

        `keys`: of the prompt's full blocks, packed or one by one. `session`: a hint, requests with the same one belong
        together.
        """
        ticket = Ticket(self, request_id, keys, prompt_tokens, output_tokens, session)
        with self._lock:
            self._tickets[request_id] = ticket
        return ticket

    def note_admitted(self, ticket: Ticket, replica_id: str, cached_tokens: int) -> None:
        """See `Ticket.admitted`."""
        self._try("a replica's answer could not be noted", self._accept, ticket, replica_id, cached_tokens)

    def note_started(self, ticket: Ticket) -> None:
        """See `Ticket.started`."""
        self._try("a first token could not be noted", self._start, ticket)
        self._try("a first token could not be learned from", self._learn, ticket)
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
        self._ledger.drop_replica(replica_id)

    def members(self, replica_ids: Sequence[str]) -> None:
        """These replicas, and no others, may be chosen from now on. Ids never come back."""
        self._ledger.keep_replicas(replica_ids)
        with self._lock:
            self._calibration.keep_replicas(set(replica_ids))

    def requests(self, replica_id: str) -> int:
        """Returns how many requests of this process are booked at the replica."""
        return self._ledger.requests(replica_id)

    # For whoever hears of other routers

    def apply_remote(self, origin: str, event: BookingEvent) -> None:
        """The router named `origin` has told this of one of its bookings; its events come in order. Repeating is harmless."""
        self._ledger.apply_remote(origin, event, self._now())

    def drop_origin(self, origin: str) -> None:
        """The router named `origin` is gone, or some of what it told was missed: its bookings are forgotten."""
        self._ledger.drop_origin(origin)

    async def wait_booked(self, request_id: str, timeout_s: float) -> bool:
        """Returns True as soon as any router's booking of the request is known here, False after `timeout_s` seconds without."""
        return await self._ledger.wait_booked(request_id, timeout_s)

    def known_blocks(self, keys: bytes) -> int:
        """Returns how many leading blocks of these (packed keys) any live pool holds or any booking promises."""
        now = self._now()
        return self._ledger.reach(keys, 0 if self._watch.silence(now) else self._chooser.listed_blocks(keys, now))

    # For whoever looks

    def report(self) -> dict[str, Any]:
        """Policy, directory, totals, ready for JSON."""
        try:
            directory = self._watch.report(self._now())
        except Exception:
            self._complain("the directory's state could not be reported")
            directory = {"state": "silent", "lag_s": None, "lag_entries": 0, "resyncs": 0, "gaps": 0}
            directory |= {"digest_mismatches": 0, "problem": "", "pools": []}
        own, remote = self._ledger.counts()
        with self._lock:
            totals = self._tally.report()
            calibration = self._calibration.report()
        head = {"policy": self._config.policy, "directory": directory, "bookings": own, "remote_bookings": remote}
        return {**head, **totals, "calibration": calibration}

    def report_levels(self) -> None:
        """Writes the metrics that are levels, and forgets what is too old; call it about once a second, from one thread.

        The lag of a mirror that never caught up counts from the start of this process.
        """
        try:
            now = self._now()
            state = self._watch.state(now)
            lag_s = 0.0
            if self._mirror is not None:
                lag_s = min(self._mirror.lag_s(now), max(0.0, now - self._began_at))
            resyncs, gaps, _ = self._watch.counts()
            self._ledger.tidy(now)
            bookings, _ = self._ledger.counts()
            self._metrics.levels(bookings, state, lag_s, resyncs, gaps)
        except Exception:
            self._complain("the router's levels could not be reported")

    def explain(
        self,
        keys: bytes | Sequence[bytes],
        prompt_tokens: int,
        output_tokens: int,
        replica_ids: Sequence[str],
        session: str = "",
    ) -> RouteDecision:
        """Returns what `route` would decide now for such a request; nothing is booked, counted or learned.

        It has two more terms: `matched_tokens`, what the directory lists of the prompt, and `promised_tokens`, expected beyond
        that, because a prompt that begins alike is on its way to the replica. A fallback has neither.
        """
        ticket = Ticket(self, "", keys, prompt_tokens, output_tokens, session)
        ticket.turn = 0
        choice, reason = self._choose(ticket, replica_ids, self._now())
        if choice is None:
            return self._chooser.by_load(replica_ids, reason)
        cached = choice.decision.view.cached_tokens.astype(np.float64)
        matched = np.full(len(cached), np.nan)  # which stays for the candidates that no pool speaks for
        matched[: len(choice.listed_tokens)] = np.minimum(choice.listed_tokens, cached[: len(choice.listed_tokens)])
        terms = {"matched_tokens": matched, "promised_tokens": cached - matched, **choice.decision.terms}
        return replace(choice.decision, terms=terms)

    # Deciding

    def _route(self, request_id: str, replica_ids: Sequence[str], now: float) -> RouteDecision:
        ticket = self._tickets.get(request_id)
        was_booked = self._ledger.withdraw(request_id)
        choice, reason = None, "the request has no ticket"
        try:
            if ticket is not None:
                choice, reason = self._choose(ticket, replica_ids, now)
            decision = choice.decision if choice is not None else self._chooser.by_load(replica_ids, reason)
            if ticket is None:
                self._count_outcome(decision)
            else:
                self._keep(ticket, decision, choice, now)
        finally:
            if was_booked:
                self._ledger.confirm_withdrawn(request_id)
        return decision

    def _choose(self, ticket: Ticket, replica_ids: Sequence[str], now: float) -> tuple[Choice | None, str]:
        """Returns the policy's choice, or None and why there is none."""
        try:
            reason = self._watch.silence(now)
            if reason:
                return None, reason
            if ticket.turn is None:
                ticket.turn = next(self._turns)
            head = ticket.keys[:KEY_BYTES]
            request = RouteRequest(ticket.prompt_tokens, ticket.output_tokens, ticket.turn, ticket.session, head)
            return self._chooser.by_policy(request, ticket.keys, replica_ids, now), "no replica is in the directory"
        except Exception:
            self._complain("a routing decision failed, so the least loaded replica is taken")
            return None, "error in the policy"

    # Keeping account

    def _keep(self, ticket: Ticket, decision: RouteDecision, choice: Choice | None, now: float) -> None:
        """Leaves the decision with the ticket, and books the first choice if the request is still there."""
        with self._lock:
            ticket.decision, ticket.decided_at = decision, now
            ticket.listed_tokens = choice.listed_tokens if choice is not None else None
            if decision.order and self._tickets.get(ticket.request_id) is ticket:
                cached_tokens = decision.predicted_tokens
                prompt = (ticket.prompt_tokens, cached_tokens, ticket.keys)
                self._ledger.book(ticket.request_id, decision.replica_id, *prompt, now)

    def _accept(self, ticket: Ticket, replica_id: str, cached_tokens: int | None) -> None:
        """Notes where the request really went. `cached_tokens`: measured there; None while nobody has said."""
        now = self._now()
        with self._lock:
            decision = ticket.decision
            predicted_tokens = listed_tokens = 0
            if decision is not None and replica_id in decision.view.replica_ids:
                ticket.decision = decision = decision.accepted_by(replica_id)
                predicted_tokens = decision.predicted_tokens
                listed = ticket.listed_tokens
                place = decision.order[0]
                if listed is not None and place < len(listed):
                    listed_tokens = min(predicted_tokens, int(listed[place]))
            if cached_tokens is not None:
                ticket.admission = Found(ticket.prompt_tokens, predicted_tokens, listed_tokens, cached_tokens)
            if self._tickets.get(ticket.request_id) is ticket:
                known = predicted_tokens if cached_tokens is None else cached_tokens
                self._ledger.accept(ticket.request_id, replica_id, ticket.prompt_tokens, known, ticket.keys, now)

    def _start(self, ticket: Ticket) -> None:
        with self._lock:
            if self._tickets.get(ticket.request_id) is ticket:
                self._ledger.start(ticket.request_id, self._now())

    def _learn(self, ticket: Ticket) -> None:
        """Gives the calibration the time to the first token; once a request, and only of a decision that saw the load."""
        decision, found = ticket.decision, ticket.admission
        if ticket.is_counted or found is None or decision is None or decision.outcome == "fallback":
            return
        view, place = decision.view, decision.order[0]
        queued_tokens, running = int(view.queued_tokens[place]), int(view.running[place])
        uncached_tokens = max(0, ticket.prompt_tokens - found.measured_tokens)
        ttft_s = self._now() - ticket.decided_at
        with self._lock:
            self._calibration.note(decision.replica_id, queued_tokens, uncached_tokens, running, ttft_s)
            self._calibration.note_reuse(ticket.prompt_tokens, found.measured_tokens)

    def _rates(self, replica_ids: tuple[str, ...], measured: FloatColumn) -> tuple[Rates, float]:
        """Returns what the chooser asks of the calibration; of the same candidates, what it was told up to `RATES_S` ago."""
        now = self._now()
        with self._lock:
            asked, until, told = self._told_rates
            if asked is not replica_ids or not now < until:
                told = self._calibration.rates(replica_ids, measured), self._calibration.reuse_share
                self._told_rates = replica_ids, now + RATES_S, told
            return told

    def _retry(self, ticket: Ticket) -> None:
        with self._lock:
            self._tally.retries += 1
            if self._tickets.get(ticket.request_id) is ticket:
                self._ledger.release(ticket.request_id)

    def _close(self, ticket: Ticket) -> None:
        with self._lock:
            if self._tickets.get(ticket.request_id) is ticket:
                del self._tickets[ticket.request_id]
                self._ledger.finish(ticket.request_id, self._now())

    def _leave_to_serve(self, request_id: str) -> None:
        decision = self._chooser.by_load((), "error in the router")
        with self._lock:
            ticket = self._tickets.get(request_id)
            self._ledger.release(request_id)
            if ticket is not None:
                ticket.decision, ticket.listed_tokens = decision, None
        if ticket is None:
            self._count_outcome(decision)

    def _count(self, ticket: Ticket) -> None:
        """Counts a request, once."""
        with self._lock:
            if ticket.is_counted:
                return
            ticket.is_counted = True
            found = ticket.admission
            if found is not None:
                self._tally.look_up(found)
        if found is not None:
            tokens = (found.queried_tokens, found.predicted_tokens, found.measured_tokens, found.phantom_tokens)
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
