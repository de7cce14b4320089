"""From what is known of the candidates to a decision.

By policy: `roster.py` has the candidates as columns, from the heartbeats of their pools. To their load come the bookings that
the heartbeats cannot contain; what each has cached of the prompt is the longer of what the directory says of its pool and
what prompts booked at the candidate itself promise. The policy ranks; candidates that no live pool speaks for come last.

Replicas that share a pool have the same blocks cached, so among them load decides. A prompt on its way to one of them promises
nothing to the others: a replica waits for a block that it computes itself, but what another computes it has only once that is
sealed, and then the directory says so.

By load, the fallback: least booked work first, a request counting as one token; chance among equals.

Limits: what several replicas share counts as free for each of them.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from router.booking_table import Roll
from router.calibration import Rates
from router.decision import RouteDecision
from router.ledger import Ledger
from router.mirror import Mirror
from router.policy import decide
from router.roster import Roster
from router.route_config import RouteConfig
from router.view import FloatColumn, IntColumn, RouteRequest, View

_log = logging.getLogger(__name__)

AskRates = Callable[[tuple[str, ...], FloatColumn], tuple[Rates, float]]
"""(replicas, what each has measured) -> rates of each, and how much of the prompts was found cached lately."""


class Choice(NamedTuple):
    """A decision, and of each of its candidates what the directory lists of the prompt, in tokens."""

    decision: RouteDecision
    listed_tokens: IntColumn


class Chooser:
    """See above. `mirror` None: there is no directory. Draws from `rng`."""

    def __init__(
        self,
        mirror: Mirror | None,
        config: RouteConfig,
        block_tokens: int,
        rng: random.Random,
        bookings: Ledger,
        rates: AskRates,
    ) -> None:
        self._mirror = mirror
        self._roster = Roster(mirror, block_tokens) if mirror is not None else None
        self._config = config
        self._block_tokens = block_tokens
        self._rng = rng
        self._bookings = bookings
        self._rates = rates
        self._last = Roll(())  # the candidates of the last fallback

    def by_policy(self, request: RouteRequest, keys: bytes, replica_ids: Sequence[str], now: float) -> Choice | None:
        """Returns the policy's decision; None when no candidate has a live pool. Raises what the policy raises."""
        if self._mirror is None or self._roster is None:
            return None
        columns = self._roster.columns(replica_ids, now)
        candidates = columns.candidates
        if not candidates.replica_ids:
            return None
        depths = self._mirror.depths(keys)
        # The last prompt token is computed in any case, because its logits are needed: no replica finds a whole prompt.
        most = max(0, request.prompt_tokens - 1)
        seen = self._bookings.see(columns.reported, depths, keys, self._block_tokens, most)
        rates, reuse_share = self._rates(candidates.replica_ids, columns.prefill_tokens_per_s)
        view = View(
            candidates.replica_ids,
            cached_tokens=seen[0],
            queued_tokens=seen[1],
            running=seen[2],
            free_tokens=columns.free_tokens,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_interference_s=rates.decode_interference_s,
            waiting=seen[4],
            held_tokens=columns.held_tokens,
            reuse_share=reuse_share,
        )
        decision = decide(request, view, self._config, self._rng)
        if candidates.unheard:
            decision = self._with_last(decision, candidates.unheard)
        return Choice(decision, seen[3])

    def by_load(self, replica_ids: Sequence[str], reason: str) -> RouteDecision:
        """Returns the fallback decision. `reason` says why it is one."""
        asked = tuple(replica_ids)
        roll = self._last
        if roll.replica_ids != asked:
            roll = self._last = Roll(asked)
        count = len(asked)
        zeros = np.zeros(count, np.int64)
        _, tokens, requests = self._bookings.survey(roll, np.full(count, -np.inf), b"", zeros)
        load = tokens + requests
        try:
            chance = np.frombuffer(self._rng.getrandbits(64 * count + 1).to_bytes(8 * count + 1, "little")[:-1], "<u8")
        except Exception:
            _log.debug("no random numbers: equals come in the order given", exc_info=True)
            chance = np.zeros(count, np.uint64)
        order = tuple(np.lexsort((chance, load)).tolist())
        view = View(asked, zeros, tokens, requests, zeros, np.zeros(count))
        return RouteDecision("least_load", "fallback", reason, view, order, load.astype(np.float64), {})

    def listed_blocks(self, keys: bytes, now: float) -> int:
        """Returns how many leading blocks of these (packed) some live pool holds."""
        if self._mirror is None or self._roster is None:
            return 0
        slots = self._roster.everyone(now).candidates.slots
        # Clipped: a pool that has come since has a slot of its own, which is not among these.
        return int(self._mirror.depths(keys).take(slots, mode="clip").max(initial=0))

    def _with_last(self, decision: RouteDecision, replica_ids: tuple[str, ...]) -> RouteDecision:
        """Returns the decision with these candidates, of which nothing is known but bookings, behind all others."""
        last = self.by_load(replica_ids, "")
        unknown = np.full(len(replica_ids), np.nan)
        before = len(decision.view)
        return replace(
            decision,
            view=decision.view.joined(last.view),
            order=(*decision.order, *(before + index for index in last.order)),
            score=np.concatenate([decision.score, unknown]),
            terms={name: np.concatenate([column, unknown]) for name, column in decision.terms.items()},
        )


def as_they_come(replica_ids: Sequence[str], reason: str) -> RouteDecision:
    """Returns a fallback decision that asks nobody: the candidates in the order given."""
    zeros, order = np.zeros(len(replica_ids), np.int64), tuple(range(len(replica_ids)))
    view = View(list(replica_ids), zeros, zeros, zeros, zeros, zeros.astype(np.float64))
    return RouteDecision("least_load", "fallback", reason, view, order, zeros.astype(np.float64), {})
