"""What a decision asks of all bookings at once, in machine code: one pass over the columns of `booking_table.py`.

For each candidate: the prompt tokens owed and the requests that its report does not contain, and how many leading blocks of a
prompt are promised. A booking promises the blocks that its prompt has in common with the one asked about. Keys are chained,
so two prompts with an equal key agree in all keys before it: the length of what they share is a binary search, and whether a
booking promises more than is known already is one comparison, of the key just behind that. So of many bookings with one
prefix all but the first cost one comparison each.

A request that has ended keeps its row a little while. It counts for nothing, promises what it computed, and what a report from
before its end says of it is taken off that report.

A booking of this process has all its keys (`RUNGS` 0), one of another router a ladder: some of its keys, each with its number
of blocks. What a ladder promises is its highest rung that agrees: never too much, at worst half of what is shared.

Times are compared as the bits of doubles that are not negative, which are ordered as integers.

Limits: the time is that of one pass, about two nanoseconds a booking and a cache miss for each that shares the first block.
"""

from __future__ import annotations

from kvpool.compiled import entry, inner
from kvpool.kernels.atomics import get, get_half, put

(
    COUNT,  # rows in use
    FIRST,  # addresses of columns, one word a row: low half of the first key
    BLOCKS,  # blocks of the prompt; of a ladder, those of its last rung
    KEYS,  # address of packed keys; of a ladder, of its rungs: number of blocks, then the two halves of the key
    RUNGS,  # 0, or the number of rungs
    REPLICA,  # number of the replica
    OWED,  # prompt tokens; once it has ended, those it owed before its first token
    ACCEPTED,  # bits of the time, of infinity before it is accepted
    STARTED,  # bits of the time of the first token, of infinity before it
    ENDED,  # bits of the time, of infinity before it ends
    PLACES,  # by replica number: -1; while a question is answered, the candidate's place
    WORDS,
) = range(0, 8 * 12, 8)
RUNG_BYTES = 24
NEVER = 0x7FF0 << 48
"""The bits of infinity."""


@inner
def _common(keys: int, asked: int, low: int, high: int) -> int:
    """How many leading keys agree, where at least `low` do and at most `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        at = 16 * (middle - 1)
        if get(keys + at) == get(asked + at) and get(keys + at + 8) == get(asked + at + 8):
            low = middle
        else:
            high = middle - 1
    return low


@inner
def _climbed(ladder: int, rungs: int, asked: int, asked_blocks: int, known: int) -> int:
    """The blocks of the highest rung that agrees, at least `known`."""
    best = known
    for rung in range(rungs):
        at = ladder + RUNG_BYTES * rung
        blocks = get(at)
        if blocks > asked_blocks:
            break
        if blocks > known:
            key = asked + 16 * (blocks - 1)
            if get(at + 8) != get(key) or get(at + 16) != get(key + 8):
                break
            best = blocks
    return best


@inner
def _promised(record: int, row: int, asked: int, asked_blocks: int, known: int) -> int:
    """How many leading keys of those asked about the booking in `row` promises; `known` when not more than that."""
    keys = get(get(record + KEYS) + row)
    rungs = get(get(record + RUNGS) + row)
    if rungs:
        return _climbed(keys, rungs, asked, asked_blocks, known)
    next_key = 16 * known
    if get(keys + next_key) != get(asked + next_key) or get(keys + next_key + 8) != get(asked + next_key + 8):
        return known
    return _common(keys, asked, known + 1, min(get(get(record + BLOCKS) + row), asked_blocks))


@inner
def _sum(
    record: int,
    numbers: int,
    candidates: int,
    since: int,
    asked: int,
    asked_blocks: int,
    blocks: int,
    tokens: int,
    requests: int,
    waiting: int,
    reported: int,
    doubtful: int,
) -> int:
    """Adds to the `tokens` and `requests` of candidates, and raises their `blocks`. Returns the number of rows looked at.

    `waiting` 0: all requests count as such. Else those that owe prompt tokens count there. `reported` 0: no doubt. Else what was
    accepted up to that time is added to three columns at `doubtful` instead: tokens, requests that wait, requests that run. And
    of what has ended since, what the report may contain, to the three columns behind those.
    """
    places = get(record + PLACES)
    for place in range(candidates):
        put(places + 8 * get(numbers + 8 * place), place)
    rows = get(record + COUNT)
    replica, accepted, owed = get(record + REPLICA), get(record + ACCEPTED), get(record + OWED)
    started, ended = get(record + STARTED), get(record + ENDED)
    first, length = get(record + FIRST), get(record + BLOCKS)
    asked_first = get(asked) if asked_blocks else 0
    for row in range(0, 8 * rows, 8):
        place = get(places + 8 * get(replica + row))
        if place < 0:
            continue
        if get(ended + row) < NEVER:
            if reported != 0 and get(accepted + row) <= get(reported + 8 * place) < get(ended + row):
                at = doubtful + 8 * (3 * candidates + place)
                if get(started + row) <= get(reported + 8 * place):
                    at += 16 * candidates
                else:
                    put(at, get(at) + get(owed + row))
                    at += 8 * candidates
                put(at, get(at) + 1)
        elif reported != 0 and get(since + 8 * place) < get(accepted + row) <= get(reported + 8 * place):
            at = doubtful + 8 * place
            put(at, get(at) + get(owed + row))
            at += 8 * candidates * (1 if get(owed + row) > 0 else 2)
            put(at, get(at) + 1)
        elif get(accepted + row) > get(since + 8 * place):
            put(tokens + 8 * place, get(tokens + 8 * place) + get(owed + row))
            kind = waiting if waiting != 0 and get(owed + row) > 0 else requests
            put(kind + 8 * place, get(kind + 8 * place) + 1)
        if asked_blocks and get(first + row) == asked_first:
            known = get(blocks + 8 * place)
            if known < asked_blocks and known < get(length + row):
                put(blocks + 8 * place, _promised(record, row, asked, asked_blocks, known))
    for place in range(candidates):
        put(places + 8 * get(numbers + 8 * place), -1)
    return rows


@entry
def sum_bookings(
    record: int,
    numbers: int,
    candidates: int,
    since: int,
    asked: int,
    asked_blocks: int,
    blocks: int,
    tokens: int,
    requests: int,
) -> int:
    """Answers for the `candidates` replicas whose `numbers` are given, each once, from the columns of `record`.

    `since`: for each the bits of a time; bookings accepted later, or not yet, are those that its report does not contain.
    `asked`: the prompt's packed keys. Writes `tokens` and `requests`; raises `blocks`, known so far, to what is promised.
    Returns the number of rows looked at.
    """
    for place in range(0, 8 * candidates, 8):
        put(tokens + place, 0)
        put(requests + place, 0)
    return _sum(record, numbers, candidates, since, asked, asked_blocks, blocks, tokens, requests, 0, 0, 0)


@entry
def see_candidates(
    record: int,
    numbers: int,
    candidates: int,
    since: int,
    loads: int,
    slots: int,
    depths: int,
    depth_count: int,
    asked: int,
    asked_blocks: int,
    block_tokens: int,
    most: int,
    out: int,
) -> int:
    """Writes what a decision sees of the candidates to five columns behind each other at `out`.

    They are: tokens cached of the prompt, listed or promised; tokens queued, and requests that run, both with what the
    report does not contain; tokens listed of the prompt; requests that wait, with those that are booked and owe prompt tokens.
    Cached and listed are at `most` so many.

    `loads`: eight columns, as reported: tokens queued, requests that run, one that is not looked at, requests that wait, and last
    the bits of the time of the report. Of what was accepted since `since` and up to then the report may contain everything or
    nothing: the larger of the report and that counts, not their sum. What has ended since the report is no longer in it.
    Behind the five columns are six of zeros, which are written to as well.
    `slots`: where the candidates' pools stand in `depths`, `depth_count` 32-bit numbers of blocks; what stands outside has
    none. The rest as in `sum_bookings`.
    """
    column = 8 * candidates
    for place in range(candidates):
        at = out + 8 * place
        slot = get(slots + 8 * place)
        blocks = get_half(depths + 4 * slot) if 0 <= slot < depth_count else 0
        put(at, blocks)
        put(at + column, get(loads + 8 * place))
        put(at + 2 * column, get(loads + column + 8 * place))
        put(at + 3 * column, min(most, block_tokens * blocks))
        put(at + 4 * column, get(loads + 3 * column + 8 * place))
    running, waiting, doubtful, reported = out + 2 * column, out + 4 * column, out + 5 * column, loads + 7 * column
    tokens = out + column
    rows = _sum(
        record, numbers, candidates, since, asked, asked_blocks, out, tokens, running, waiting, reported, doubtful
    )
    for place in range(0, column, 8):
        over = doubtful + 3 * column + place
        queued = max(0, get(loads + place) - get(over))
        more = max(queued, get(doubtful + place)) - get(loads + place)
        put(tokens + place, get(tokens + place) + more)
        # Who had no first token may have waited or been computed: a report says that of a request whose prompt is in hand.
        waits = get(loads + 3 * column + place) - get(over + column)
        runs = max(0, get(loads + column + place) - get(over + 2 * column) + min(0, waits))
        waits = max(0, waits)
        more = waits - get(loads + 3 * column + place) + max(0, get(doubtful + column + place) - runs - waits)
        put(waiting + place, get(waiting + place) + more)
        more = max(runs, get(doubtful + 2 * column + place)) - get(loads + column + place)
        put(running + place, get(running + place) + more)
        put(out + place, min(most, block_tokens * get(out + place)))
    return rows
