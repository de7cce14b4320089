"""What processes owe each other when one region serves several.

Floor. Each process may always hold its floor: what others still lack of theirs is owed to them.
Line. A process that found no room releases what it held for the request, draws a ticket and says how many blocks it
waits for. What older tickets want is owed to them; the oldest may take all that is there. The line is the tickets in the slots
themselves, so nobody has to advance it, and one who dies leaves it with his slot.

Demand. While somebody with an older ticket lacks blocks, the others give up what they hold beyond their floors, a request at
a time. If older tickets want more than the floors leave, the floors do not count: else nobody would ever yield enough.

A process that is stopped, or hangs, has no claim: whoever has not shown himself for `SILENT_NS` is passed over until he does.
(He is not dead, and nothing is taken from him.)

Everything here is a look at words that change meanwhile: two processes may both take what only one should have. Then the one
that comes out short waits in line, and is served in turn.
"""

from __future__ import annotations

from kvpool import layout
from kvpool.compiled import inner
from kvpool.kernels.atomics import count_bits, fetch_add, fetch_and, fetch_or, get, load, lowest_bit, store
from kvpool.kernels.context import (
    BIT,
    BITMAP_WORDS,
    CAPACITY,
    FREE_BITS,
    HEADER,
    HELD,
    LOCAL_COUNT,
    SLOT,
    SLOTS,
)
from kvpool.kernels.eviction import count_idle
from kvpool.kernels.free_blocks import flush_local, others_wait
from kvpool.kernels.pause import IN_LINE, pause
from kvpool.layout import LOCAL_CACHE_BLOCKS

_SLOTS_USED = 8 * layout.HEADER_WORDS["slots_used"]
_DEMAND = 8 * layout.HEADER_WORDS["demand"]
_TICKET_NEXT = 8 * layout.HEADER_WORDS["ticket_next"]
_FLOOR = 8 * layout.SLOT_WORDS["floor_blocks"]
_TICKET = 8 * layout.SLOT_WORDS["ticket"]
_WANTED = 8 * layout.SLOT_WORDS["wanted_blocks"]
_USED = 8 * layout.SLOT_WORDS["used_blocks"]
_LOCAL_CACHE = 8 * layout.SLOT_WORDS["local_cache"]
_HEARTBEAT = 8 * layout.SLOT_WORDS["heartbeat"]
SILENT_NS = 2_000_000_000
_SLOT_BYTES = layout.SLOT_BYTES


@inner
def note_held(ctx: int) -> None:
    """Shows to the others how many blocks we hold."""
    store(get(ctx + SLOT) + _USED, get(ctx + HELD))


@inner
def announce(ctx: int) -> int:
    """Our slot is in use from now on."""
    fetch_or(get(ctx + HEADER) + _SLOTS_USED, get(ctx + BIT))
    return 0


@inner
def withdraw(ctx: int, slot: int) -> int:
    """Slot `slot` is not in use any more, and waits for nothing."""
    fetch_and(get(ctx + HEADER) + _DEMAND, ~(1 << slot))
    fetch_and(get(ctx + HEADER) + _SLOTS_USED, ~(1 << slot))
    return 0


@inner
def others(ctx: int) -> int:
    """The slots that other processes have, as bits."""
    return load(get(ctx + HEADER) + _SLOTS_USED) & ~get(ctx + BIT)


@inner
def count_free(ctx: int) -> int:
    """How many free bits are set: about as many blocks are free."""
    bitmap = get(ctx + FREE_BITS)
    free = 0
    for word in range(get(ctx + BITMAP_WORDS)):
        free += count_bits(load(bitmap + 8 * word))
    return free


@inner
def _is_silent(slot: int, now: int) -> bool:
    """Whether the process of this slot's record has not shown itself for long."""
    return now - load(slot + _HEARTBEAT) > SILENT_NS


@inner
def _wanted(ctx: int, slot: int, now: int) -> int:
    """Blocks that the process of this slot's record waits for with an older ticket than ours (any is older than none)."""
    ticket, ours = load(slot + _TICKET), load(get(ctx + SLOT) + _TICKET)
    if ticket == 0 or (ours != 0 and ours < ticket) or _is_silent(slot, now):
        return 0
    return load(slot + _WANTED)


@inner
def _unmet_floor(slot: int, now: int) -> int:
    """What the process of this slot's record lacks of its floor."""
    if _is_silent(slot, now):
        return 0
    has = load(slot + _USED)
    for place in range(LOCAL_CACHE_BLOCKS):
        has += load(slot + _LOCAL_CACHE + 8 * place) != 0
    return max(0, load(slot + _FLOOR) - has)


@inner
def wanted_before_us(ctx: int, now: int) -> int:
    """Blocks that processes with older tickets wait for."""
    waiting = load(get(ctx + HEADER) + _DEMAND) & ~get(ctx + BIT)
    wanted = 0
    while waiting != 0:
        wanted += _wanted(ctx, get(ctx + SLOTS) + _SLOT_BYTES * lowest_bit(waiting), now)
        waiting &= waiting - 1
    return wanted


@inner
def _owed(ctx: int, floors: bool, now: int) -> int:
    """What others may claim: what older tickets want, with `floors` at least what is lacking of the floor."""
    slots = others(ctx)
    owed = 0
    while slots != 0:
        slot = get(ctx + SLOTS) + _SLOT_BYTES * lowest_bit(slots)
        slots &= slots - 1
        claim = _wanted(ctx, slot, now)
        if floors:
            claim = max(claim, _unmet_floor(slot, now))
        owed += claim
    return owed


@inner
def _floors_count(ctx: int, now: int) -> bool:
    """Whether what older tickets want leaves everybody else his floor."""
    slots = others(ctx)
    total = load(get(ctx + SLOT) + _FLOOR)
    while slots != 0:
        slot = get(ctx + SLOTS) + _SLOT_BYTES * lowest_bit(slots)
        slots &= slots - 1
        total += max(_wanted(ctx, slot, now), load(slot + _FLOOR))
    return total <= get(ctx + CAPACITY)


@inner
def may_take(ctx: int, count: int, now: int) -> bool:
    """Whether we may take `count` blocks more, as far as others have a claim."""
    if others(ctx) == 0:
        return True
    wanted = wanted_before_us(ctx, now)
    floors = wanted == 0 or _floors_count(ctx, now)
    if floors and get(ctx + HELD) + count <= load(get(ctx + SLOT) + _FLOOR):
        return True
    is_first = wanted == 0 and load(get(ctx + SLOT) + _TICKET) != 0
    owed = _owed(ctx, floors and not is_first, now)
    if owed == 0:
        return True
    there = get(ctx + LOCAL_COUNT) + count_free(ctx)
    if there - count >= owed:
        return True
    return there + count_idle(ctx) - count >= owed


@inner
def demanded(ctx: int, now: int) -> int:
    """How many blocks we should give up now for those who wait before us."""
    if not others_wait(ctx):
        return 0
    flush_local(ctx)
    wanted = wanted_before_us(ctx, now)
    if wanted == 0:
        return 0
    beyond = get(ctx + HELD)
    if _floors_count(ctx, now):
        beyond -= load(get(ctx + SLOT) + _FLOOR)
    if beyond <= 0:
        return 0
    lacking = wanted - count_free(ctx) - count_idle(ctx)
    return max(0, min(beyond, lacking))


@inner
def wait_in_line(ctx: int, wanted: int, now: int) -> int:
    """Says that we wait for `wanted` blocks, with the ticket we have or a new one; the ticket."""
    slot = get(ctx + SLOT)
    store(slot + _HEARTBEAT, now)
    store(slot + _WANTED, wanted)
    ticket = load(slot + _TICKET)
    if ticket == 0:
        ticket = fetch_add(get(ctx + HEADER) + _TICKET_NEXT, 1) + 1
        store(slot + _TICKET, ticket)
    pause(ctx, IN_LINE)
    fetch_or(get(ctx + HEADER) + _DEMAND, get(ctx + BIT))
    return ticket


@inner
def leave_line(ctx: int) -> int:
    """We do not wait any more."""
    slot = get(ctx + SLOT)
    if load(slot + _TICKET) != 0:
        fetch_and(get(ctx + HEADER) + _DEMAND, ~get(ctx + BIT))
        store(slot + _WANTED, 0)
        store(slot + _TICKET, 0)
    return 0
