"""A decision about three candidates, and the ticket of its request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from router.decision import RouteDecision
from router.policy import decide
from router.route_config import PolicyName, RouteConfig
from router.ticket import Ticket
from router.view import RouteRequest, View
from tests.fakes.speaker import packed

PROMPT_TOKENS = 200


class NoOffice:
    """Stands behind a ticket that nobody uses."""

    def note_admitted(self, ticket: Ticket, replica_id: str, cached_tokens: int) -> None: ...

    def note_started(self, ticket: Ticket) -> None: ...

    def note_retry(self, ticket: Ticket) -> None: ...

    def note_closed(self, ticket: Ticket) -> None: ...


def a_ticket(request_id: str = "r", session: str = "") -> Ticket:
    """The ticket of a request of `PROMPT_TOKENS` tokens."""
    return Ticket(NoOffice(), request_id, packed(range(12)), PROMPT_TOKENS, 20, session)


def a_view(
    names: Sequence[str] = ("a", "b", "c"),
    cached: Sequence[int] = (0, 160, 32),
    queued: Sequence[int] = (0, 40, 10),
) -> View:
    """`b` holds most of the prompt and has most to do; rates differ by fractions."""
    count = len(names)
    return View(
        list(names),
        np.array(cached[:count], np.int64),
        np.array(queued[:count], np.int64),
        np.arange(count, dtype=np.int64),
        np.full(count, 10_000, np.int64),
        np.array([1000.25, 1234.5, 987.0][:count], np.float64),
    )


def a_decision(policy: PolicyName = "cost", view: View | None = None) -> RouteDecision:
    """What `policy` makes of `view`."""
    config = RouteConfig(policy)
    return decide(RouteRequest(PROMPT_TOKENS, 20), view if view is not None else a_view(), config, random.Random(1))


def unheard_added(decision: RouteDecision, *names: str) -> RouteDecision:
    """The decision with these candidates, of which nothing is known, behind all others."""
    count, more = len(decision.view), len(names)
    unknown = np.full(more, np.nan)
    none = np.zeros(more, np.int64)
    zeros = View(list(names), none, none, none, none, np.zeros(more, np.float64))
    return replace(
        decision,
        view=decision.view.joined(zeros),
        order=(*decision.order, *range(count, count + more)),
        score=np.concatenate([decision.score, unknown]),
        terms={name: np.concatenate([column, unknown]) for name, column in decision.terms.items()},
    )
