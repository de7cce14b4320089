"""Simulated replicas in machine code: queue, continuous batching, paged pool.

A replica works in steps, as the engine does: one token for every request that decodes, then chunks of prompts, oldest first,
then admissions, within `step_tokens` and `max_running`. Admission holds what is cached and takes room for all the rest of
prompt and answer, evicting idle leaves, the longest unused first. A request whose next block is being computed by a running
one is passed over until that is sealed (single flight; up to `_LOOK_AHEAD` are looked at); one without room keeps those
behind it waiting. Blocks are indexed at the end of the step that fills them, and released when the request is done. How long
a step takes, `service_times.py` says.

`advance` brings all replicas to a time: every step that ends until then is done and the next one planned. A step that is
under way is not interrupted. `submit` gives a request to a replica; an idle one begins at once.

Room for the whole answer is taken at admission, so nobody is preempted; an engine that takes it block by block runs a few more
requests at a time.

All functions are in one file, because numba's cache looks at the file of the function that is called and at no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
from numba import njit

from kvpool.words import DEPTH_SHIFT, FREE, GENERATION_SHIFT, INDEXED
from router.replay.service_times import ServiceTimes
from router.replay.state import ADMITTED, FINISHED, FIRST_TOKEN, Events, Fleet, Pools, Requests

Function = TypeVar("Function", bound=Callable[..., Any])
_LOOK_AHEAD = 64
_HALF_LIFE_S = 10.0  # of the rate's evidence, as in the engine
_LEAST_RATE_TOKENS = 2

# Handed over with each call, because numba's cache outlives a change of constants in another file.
Form = tuple[np.uint64, np.uint64, np.uint64, np.uint64]
Kinds = tuple[int, int, int]
FORM: Final[Form] = (np.uint64(FREE), np.uint64(INDEXED), np.uint64(GENERATION_SHIFT), np.uint64(DEPTH_SHIFT))
KINDS: Final[Kinds] = (ADMITTED, FIRST_TOKEN, FINISHED)
Times = tuple[float, float, float, float, float, int, int]


def times_of(times: ServiceTimes) -> Times:
    """Returns the service times as the kernel takes them."""
    return (
        float(times.token_s),
        float(times.pair_s),
        float(times.weights_s),
        float(times.context_token_s),
        float(times.overhead_s),
        times.step_tokens,
        times.max_running,
    )


def _compiled(function: Function) -> Function:
    made: Function = njit(cache=True, nogil=True)(function)
    return made


# The pool


@_compiled
def _mark(pools: Pools, r: int, slot: int) -> None:
    pools.dirty[r, slot >> 6] |= np.uint64(1) << np.uint64(slot & 63)
    pools.any_dirty[r] = 1


@_compiled
def _match(requests: Requests, pools: Pools, r: int, request: int, indexed: np.uint64) -> tuple[int, bool]:
    """Returns how many leading blocks are in the index, and whether the next one is being computed."""
    start, end = requests.first[request], requests.first[request + 1]
    for at in range(start, end):
        slot = pools.slot_of[r, requests.nodes[at]] - 1
        if slot < 0:
            return at - start, False
        if pools.state[r, slot] & np.uint64(0xFF) != indexed:
            return at - start, True
    return end - start, False


@_compiled
def _hold(requests: Requests, pools: Pools, r: int, request: int, blocks: int) -> None:
    start = requests.first[request]
    for at in range(start, start + blocks):
        slot = pools.slot_of[r, requests.nodes[at]] - 1
        requests.slots[at] = slot
        if pools.holders[r, slot] == 0:
            pools.idle[r] -= 1
        pools.holders[r, slot] += 1


@_compiled
def _let_go(requests: Requests, pools: Pools, r: int, request: int, blocks: int, now: float) -> None:
    start = requests.first[request]
    for at in range(start, start + blocks):
        slot = requests.slots[at]
        pools.holders[r, slot] -= 1
        if pools.holders[r, slot] == 0:
            pools.idle[r] += 1
            pools.last_use[r, slot] = max(now, pools.last_use[r, slot])


@_compiled
def _oldest_leaf(pools: Pools, r: int, indexed: np.uint64) -> int:
    found, oldest = -1, np.inf
    for slot in range(pools.used_slots[r]):
        if (
            pools.last_use[r, slot] < oldest
            and pools.holders[r, slot] == 0
            and pools.children[r, slot] == 0
            and pools.state[r, slot] & np.uint64(0xFF) == indexed
        ):
            found, oldest = slot, pools.last_use[r, slot]
    return found


@_compiled
def _evict(pools: Pools, r: int, wanted: int, form: Form) -> None:
    """Makes room for `wanted` blocks, of which enough are idle: leaves first, and a parent right after its last child if it was
    not used later.
    """
    free, indexed, generation_shift, _ = form
    while pools.room[r] < wanted:
        slot = _oldest_leaf(pools, r, indexed)
        assert slot >= 0
        age = pools.last_use[r, slot]
        while True:
            parent = int(np.int64(pools.parent[r, slot] & np.uint64(0xFFFFFFFF))) - 1
            generation = (pools.state[r, slot] >> generation_shift) + np.uint64(1)
            pools.state[r, slot] = generation << generation_shift | free
            _mark(pools, r, slot)
            pools.slot_of[r, pools.node_of[r, slot]] = 0
            pools.spare[r, pools.spare_count[r]] = slot
            pools.spare_count[r] += 1
            pools.room[r] += 1
            pools.idle[r] -= 1
            pools.evicted[r] += 1
            if parent < 0:
                break
            pools.children[r, parent] -= 1
            if (
                pools.room[r] >= wanted
                or pools.children[r, parent] > 0
                or pools.holders[r, parent] > 0
                or pools.last_use[r, parent] > age
            ):
                break
            slot = parent


@_compiled
def _take(requests: Requests, pools: Pools, r: int, request: int, cached_blocks: int, now: float) -> None:
    """Gives a request slots for the full blocks that it has to compute; there is room for them."""
    start, end = requests.first[request] + cached_blocks, requests.first[request + 1]
    for at in range(start, end):
        if pools.spare_count[r] > 0:
            pools.spare_count[r] -= 1
            slot = pools.spare[r, pools.spare_count[r]]
        else:
            slot = np.int32(pools.used_slots[r])
            pools.used_slots[r] += 1
        node = requests.nodes[at]
        requests.slots[at] = slot
        pools.node_of[r, slot] = node
        pools.slot_of[r, node] = slot + 1
        pools.holders[r, slot] = 1
        pools.children[r, slot] = 0
        pools.last_use[r, slot] = now


@_compiled
def _seal(requests: Requests, pools: Pools, r: int, request: int, form: Form) -> None:
    """Indexes the blocks that have become full."""
    _, indexed, generation_shift, depth_shift = form
    start = requests.first[request]
    blocks = min(requests.first[request + 1] - start, requests.computed[request] // requests.block_tokens)
    for number in range(requests.sealed[request], blocks):
        slot = requests.slots[start + number]
        parent = 0
        if number > 0:
            parent = requests.slots[start + number - 1] + 1
            pools.children[r, parent - 1] += 1
        pools.parent[r, slot] = np.uint64(number) << depth_shift | np.uint64(parent)
        pools.state[r, slot] = pools.state[r, slot] >> generation_shift << generation_shift | indexed
        _mark(pools, r, slot)
    requests.sealed[request] = max(requests.sealed[request], blocks)


# The step loop


@_compiled
def _blocks_of(requests: Requests, request: int) -> int:
    """Blocks of prompt and answer."""
    tokens = requests.input_tokens[request] + requests.output_tokens[request]
    return int((tokens + requests.block_tokens - 1) // requests.block_tokens)


@_compiled
def _say(events: Events, count: int, time: float, kind: int, request: int, value: int) -> int:
    events.time[count] = time
    events.kind[count] = kind
    events.request[count] = request
    events.value[count] = value
    return count + 1


@_compiled
def _admit(
    fleet: Fleet,
    r: int,
    budget: int,
    max_running: int,
    now: float,
    form: Form,
    kinds: Kinds,
    events: Events,
    count: int,
) -> int:
    """Takes waiting requests in while there is budget and room, and gives each a chunk; returns the new number of events."""
    requests, replicas, pools = fleet
    place = replicas.waiting_from[r]
    looked = 0
    while place < replicas.waiting_to[r] and looked < _LOOK_AHEAD and budget > 0:
        if replicas.prefilling_count[r] + replicas.decoding_count[r] >= max_running:
            break
        request = replicas.waiting[r, place]
        looked += 1
        cached_blocks, is_coming = _match(requests, pools, r, request, form[1])
        if is_coming:
            place += 1
            continue
        _hold(requests, pools, r, request, cached_blocks)
        wanted = _blocks_of(requests, request) - cached_blocks
        if wanted > pools.room[r] + pools.idle[r]:
            _let_go(requests, pools, r, request, cached_blocks, 0.0)
            break
        _evict(pools, r, wanted, form)
        pools.room[r] -= wanted
        _take(requests, pools, r, request, cached_blocks, now)
        given = requests.input_tokens[request]
        cached = min(cached_blocks * requests.block_tokens, given - 1)
        requests.sealed[request] = cached_blocks
        requests.computed[request] = cached
        replicas.owed[r] += given - cached - _owed_waiting(requests, request)
        count = _say(events, count, now, kinds[0], request, cached)
        for other in range(place, replicas.waiting_from[r], -1):
            replicas.waiting[r, other] = replicas.waiting[r, other - 1]
        replicas.waiting_from[r] += 1
        place += 1
        chunk = min(given - cached, budget)
        replicas.prefilling[r, replicas.prefilling_count[r]] = request
        replicas.chunk[r, replicas.prefilling_count[r]] = chunk
        replicas.prefilling_count[r] += 1
        budget -= chunk
    replicas.look[r] = 0
    return count


@_compiled
def _owed_waiting(requests: Requests, request: int) -> int:
    return int(max(1, requests.input_tokens[request] - requests.predicted[request]))


@_compiled
def _plan(fleet: Fleet, r: int, now: float, times: Times, form: Form, kinds: Kinds, events: Events, count: int) -> int:
    """Begins the next step at `now`, or leaves the replica idle; returns the new number of events."""
    requests, replicas, _ = fleet
    token_s, pair_s, weights_s, context_token_s, overhead_s, step_tokens, max_running = times
    decodes = replicas.decoding_count[r]
    budget = step_tokens - decodes
    for place in range(replicas.prefilling_count[r]):
        request = replicas.prefilling[r, place]
        chunk = min(requests.input_tokens[request] - requests.computed[request], budget)
        replicas.chunk[r, place] = chunk
        budget -= chunk
    if replicas.look[r] and budget > 0 and replicas.waiting_from[r] < replicas.waiting_to[r]:
        count = _admit(fleet, r, budget, max_running, now, form, kinds, events, count)
    tokens = 0
    pairs = 0.0
    for place in range(replicas.prefilling_count[r]):
        chunk = replicas.chunk[r, place]
        tokens += chunk
        pairs += chunk * (requests.computed[replicas.prefilling[r, place]] + (chunk + 1) / 2)
    replicas.step_began[r] = now
    if tokens + decodes == 0:
        replicas.step_end[r] = np.inf
        return count
    took = overhead_s + max(weights_s, (tokens + decodes) * token_s)
    replicas.step_end[r] = now + took + pairs * pair_s + replicas.context[r] * context_token_s
    return count


@_compiled
def _finish(fleet: Fleet, r: int, request: int, now: float) -> None:
    """Gives the blocks of a request back."""
    requests, replicas, pools = fleet
    full = requests.first[request + 1] - requests.first[request]
    _let_go(requests, pools, r, request, full, now)
    pools.room[r] += _blocks_of(requests, request) - full
    replicas.look[r] = 1


@_compiled
def _commit(fleet: Fleet, r: int, form: Form, kinds: Kinds, events: Events, count: int) -> int:
    """Ends the step that is under way; returns the new number of events."""
    requests, replicas, pools = fleet
    now = replicas.step_end[r]
    replicas.decode_steps[r] += 1
    replicas.context[r] += replicas.decoding_count[r]
    if replicas.decoding_count[r] > 0 and replicas.decode_steps[r] >= replicas.next_done[r]:
        count = _end_decodes(fleet, r, now, kinds, events, count)
    if replicas.prefilling_count[r] == 0:
        return count
    kept = 0
    tokens = 0
    for place in range(replicas.prefilling_count[r]):
        request = replicas.prefilling[r, place]
        chunk = replicas.chunk[r, place]
        tokens += chunk
        requests.computed[request] += chunk
        _seal(requests, pools, r, request, form)
        if requests.computed[request] < requests.input_tokens[request]:
            replicas.prefilling[r, kept] = request
            kept += 1
            continue
        count = _say(events, count, now, kinds[1], request, 0)
        if requests.output_tokens[request] <= 1:
            _finish(fleet, r, request, now)
            count = _say(events, count, now, kinds[2], request, 0)
            continue
        done = replicas.decode_steps[r] + requests.output_tokens[request] - 1
        requests.last_step[request] = done
        if replicas.decoding_count[r] == 0 or done < replicas.next_done[r]:
            replicas.next_done[r] = done
        replicas.decoding[r, replicas.decoding_count[r]] = request
        replicas.decoding_count[r] += 1
        replicas.context[r] += requests.input_tokens[request] + 1
    replicas.prefilling_count[r] = kept
    replicas.look[r] = 1
    replicas.owed[r] -= tokens
    replicas.computed[r] += tokens
    if tokens >= _LEAST_RATE_TOKENS:
        left = 0.5 ** ((now - replicas.rate_at[r]) / _HALF_LIFE_S)
        replicas.rate_tokens[r] = replicas.rate_tokens[r] * left + tokens
        replicas.rate_seconds[r] = replicas.rate_seconds[r] * left + (now - replicas.step_began[r])
        replicas.rate_at[r] = now
    return count


@_compiled
def _end_decodes(fleet: Fleet, r: int, now: float, kinds: Kinds, events: Events, count: int) -> int:
    """Takes out those whose last token has come."""
    requests, replicas, _ = fleet
    kept = 0
    soonest = np.int64(1) << np.int64(62)
    for place in range(replicas.decoding_count[r]):
        request = replicas.decoding[r, place]
        if requests.last_step[request] <= replicas.decode_steps[r]:
            replicas.context[r] -= requests.input_tokens[request] + requests.output_tokens[request]
            _finish(fleet, r, request, now)
            count = _say(events, count, now, kinds[2], request, 0)
        else:
            soonest = min(soonest, requests.last_step[request])
            replicas.decoding[r, kept] = request
            kept += 1
    replicas.decoding_count[r] = kept
    replicas.next_done[r] = soonest
    return count


@_compiled
def advance(fleet: Fleet, until: float, times: Times, form: Form, kinds: Kinds, events: Events) -> int:
    """Brings every replica to `until`; returns how many events were written to `events`."""
    count = 0
    for r in range(len(fleet.replicas.step_end)):
        while fleet.replicas.step_end[r] <= until:
            now = fleet.replicas.step_end[r]
            count = _commit(fleet, r, form, kinds, events, count)
            count = _plan(fleet, r, now, times, form, kinds, events, count)
    return count


@_compiled
def submit(
    fleet: Fleet,
    r: int,
    request: int,
    predicted: int,
    now: float,
    times: Times,
    form: Form,
    kinds: Kinds,
    events: Events,
) -> int:
    """Gives a request to replica `r`, which has been brought to `now`; returns how many events were written to `events`.

    -1: refused, because it is larger than the pool.
    """
    requests, replicas, pools = fleet
    if _blocks_of(requests, request) > pools.capacity:
        return -1
    requests.predicted[request] = predicted
    replicas.waiting[r, replicas.waiting_to[r]] = request
    replicas.waiting_to[r] += 1
    replicas.owed[r] += _owed_waiting(requests, request)
    replicas.look[r] = 1
    if replicas.step_end[r] == np.inf:
        return _plan(fleet, r, now, times, form, kinds, events, 0)
    return 0
