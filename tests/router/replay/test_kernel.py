"""Simulated replicas by themselves: how long steps take, what is reused, what is evicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvpool.words import FREE, INDEXED, STATE_MASK
from router.replay import kernel, state
from router.replay.service_times import ServiceTimes
from router.replay.state import ADMITTED, FINISHED, FIRST_TOKEN, Fleet
from router.replay.trace import Trace
from tests.router.replay.traces import BLOCK, QUICK, mixed, trace_of

Told = list[tuple[float, int, int, int]]


class Rig:
    """One replica, requests given to it by hand."""

    def __init__(self, trace: Trace, blocks: int = state.UNBOUNDED, times: ServiceTimes = QUICK) -> None:
        self.fleet: Fleet = state.made(trace, 1, blocks, times.max_running)
        self.told: Told = []
        self._events = state.events_for(trace)
        self._times = kernel.times_of(times)

    def submit(self, request: int, now: float, predicted: int = 0) -> bool:
        count = kernel.submit(
            self.fleet, 0, request, predicted, now, self._times, kernel.FORM, kernel.KINDS, self._events
        )
        self._note(max(0, count))
        return count >= 0

    def advance(self, until: float) -> None:
        self._note(kernel.advance(self.fleet, until, self._times, kernel.FORM, kernel.KINDS, self._events))

    def when(self, kind: int, request: int) -> float:
        (found,) = [at for at, what, who, _ in self.told if (what, who) == (kind, request)]
        return found

    def cached(self, request: int) -> int:
        (found,) = [value for _, what, who, value in self.told if (what, who) == (ADMITTED, request)]
        return found

    def indexed(self) -> set[int]:
        pools = self.fleet.pools
        slots = np.flatnonzero(pools.state[0] & np.uint64(STATE_MASK) == INDEXED)
        return set(pools.node_of[0][slots].tolist())

    def _note(self, count: int) -> None:
        columns = [column[:count].tolist() for column in self._events]
        self.told += list(zip(*columns, strict=True))


def _step_s(tokens: int, *, decodes: int = 0, start: int = 0, context: int = 0) -> float:
    pairs = tokens * (start + (tokens + 1) / 2)
    return (
        QUICK.overhead_s
        + max(QUICK.weights_s, (tokens + decodes) * QUICK.token_s)
        + pairs * QUICK.pair_s
        + context * QUICK.context_token_s
    )


def test_a_request_alone_takes_its_prompt_and_one_step_for_each_further_token() -> None:
    rig = Rig(trace_of([[1, 2]], tail=3, output_tokens=3))
    assert rig.submit(0, 1.0)
    rig.advance(100.0)
    first = 1.0 + _step_s(19)
    assert rig.when(FIRST_TOKEN, 0) == pytest.approx(first)
    done = first + _step_s(0, decodes=1, context=20) + _step_s(0, decodes=1, context=21)
    assert rig.when(FINISHED, 0) == pytest.approx(done)
    assert rig.fleet.replicas.step_end[0] == np.inf


def test_a_long_prompt_goes_in_chunks_of_the_budget() -> None:
    rig = Rig(trace_of([[1, 2, 3, 4, 5]], tail=0, output_tokens=1))
    rig.submit(0, 0.0)
    assert rig.fleet.replicas.owed[0] == 40
    rig.advance(_step_s(32))
    assert rig.fleet.replicas.owed[0] == 8
    assert len(rig.indexed()) == 4
    rig.advance(10.0)
    assert rig.when(FIRST_TOKEN, 0) == pytest.approx(_step_s(32) + _step_s(8, start=32))
    assert rig.when(FINISHED, 0) == rig.when(FIRST_TOKEN, 0)
    assert rig.fleet.replicas.owed[0] == 0


def test_a_step_under_way_is_not_interrupted() -> None:
    rig = Rig(trace_of([[1, 2], [3, 4]], output_tokens=1))
    rig.submit(0, 0.0)
    rig.advance(0.001)
    rig.submit(1, 0.001)
    rig.advance(10.0)
    assert rig.when(ADMITTED, 1) == pytest.approx(_step_s(19))


def test_what_a_running_request_computes_is_waited_for_and_then_a_hit() -> None:
    rig = Rig(trace_of([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9], [7]], output_tokens=1))
    for request in range(3):
        rig.submit(request, 0.0)
    rig.advance(10.0)
    assert rig.cached(1) == 5 * BLOCK
    assert rig.when(ADMITTED, 1) >= rig.when(FIRST_TOKEN, 0)
    assert rig.when(ADMITTED, 2) < rig.when(ADMITTED, 1)
    assert rig.fleet.replicas.computed[0] == (6 * BLOCK + 3) + (BLOCK + 3) + (BLOCK + 3)


def test_what_is_predicted_is_not_owed_while_it_waits() -> None:
    rig = Rig(trace_of([[1, 2], [1, 2]], output_tokens=1))
    rig.submit(0, 0.0)
    rig.submit(1, 0.0, predicted=2 * BLOCK)
    assert rig.fleet.replicas.owed[0] == 19 + 3
    rig.advance(10.0)
    assert rig.fleet.replicas.owed[0] == 0


def test_no_more_run_at_once_than_may() -> None:
    rig = Rig(trace_of([[number] for number in range(7)], output_tokens=50))
    for request in range(7):
        rig.submit(request, 0.0)
    rig.advance(0.1)
    replicas = rig.fleet.replicas
    assert replicas.prefilling_count[0] + replicas.decoding_count[0] == QUICK.max_running
    rig.advance(1000.0)
    assert len([one for one in rig.told if one[1] == FINISHED]) == 7


def _nodes(trace: Trace, requests: Sequence[int]) -> set[int]:
    return {node for one in requests for node in trace.nodes[trace.first[one] : trace.first[one + 1]].tolist()}


def test_idle_leaves_go_first_the_longest_unused_one_before_others() -> None:
    # Four blocks a request: three of the prompt, one for tail and answer.
    trace = trace_of([[1, 2, 3], [4, 5, 6], [1, 2, 7], [8, 9, 10]], output_tokens=2)
    rig = Rig(trace, blocks=8)
    for request, now in ((0, 0.0), (1, 1.0), (2, 2.0)):
        rig.submit(request, now)
        rig.advance(now + 0.9)
    assert rig.cached(2) == 2 * BLOCK
    assert rig.indexed() == _nodes(trace, [0, 1, 2])
    rig.submit(3, 3.0)  # four blocks, one is free: block 3 is the oldest, then 6, 5, 4
    rig.advance(4.0)
    left = _nodes(trace, [0, 1, 2, 3]) - rig.indexed()
    assert left <= _nodes(trace, [0, 1])
    assert rig.indexed() >= _nodes(trace, [2, 3])
    assert rig.fleet.pools.evicted[0] == 3


def test_a_request_larger_than_the_pool_is_refused() -> None:
    rig = Rig(trace_of([[1, 2, 3], [4]], output_tokens=2), blocks=3)
    assert not rig.submit(0, 0.0)
    assert rig.submit(1, 0.0)


def test_one_that_needs_room_waits_for_those_that_run() -> None:
    rig = Rig(trace_of([[1, 2], [3, 4]], output_tokens=5), blocks=4)
    rig.submit(0, 0.0)
    rig.submit(1, 0.0)
    rig.advance(10.0)
    assert rig.when(ADMITTED, 1) == pytest.approx(rig.when(FINISHED, 0))


@pytest.mark.parametrize("blocks", [state.UNBOUNDED, 40, 24])
def test_words_and_counts_agree_after_any_work(blocks: int) -> None:
    trace = mixed(11, requests=80)
    rig = Rig(trace, blocks)
    refused = 0
    for request in range(len(trace)):
        rig.advance(float(trace.arrival_s[request]))
        refused += not rig.submit(request, float(trace.arrival_s[request]))
        _check(rig.fleet, trace)
    rig.advance(1e6)
    _check(rig.fleet, trace)
    pools = rig.fleet.pools
    assert not pools.holders.any()
    assert pools.room[0] + pools.idle[0] == pools.capacity
    for kind in (ADMITTED, FIRST_TOKEN, FINISHED):
        assert len({one[2] for one in rig.told if one[1] == kind}) == len(trace) - refused
    assert len(rig.told) == 3 * (len(trace) - refused)


def _check(fleet: Fleet, trace: Trace) -> None:
    """Every indexed block has an indexed parent; children, idle blocks and room are what the words say."""
    pools = fleet.pools
    states = pools.state[0] & np.uint64(STATE_MASK)
    indexed = np.flatnonzero(states == INDEXED)
    assert set(np.unique(states).tolist()) <= {0, FREE, INDEXED}
    parents = (pools.parent[0][indexed] & np.uint64(0xFFFFFFFF)).astype(np.int64) - 1
    assert set(parents[parents >= 0].tolist()) <= set(indexed.tolist())
    children = np.bincount(parents[parents >= 0], minlength=len(states))
    assert (children[indexed] == pools.children[0][indexed]).all()
    assert int((pools.holders[0][indexed] == 0).sum()) == pools.idle[0]
    assert 0 <= pools.room[0] <= pools.capacity
    assert (pools.slot_of[0][pools.node_of[0][indexed]] - 1 == indexed).all()
