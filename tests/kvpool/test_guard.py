"""Guard mode on a real region: every kind of stray write is found and named, and nothing else is.

Blocks have bytes here: a block's bytes are written by its request before it is sealed, as the engine does.
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvpool import BlockGeometry, BlockTable, GuardViolation, KeyRoot, KeySpace, Pool, Region, SlotLoad, guard, layout
from kvpool import region as region_module
from kvpool.guard import POISON, POISONED, SUMMED
from kvpool.history import events
from kvpool.words import EVICTING, FREE, LOCAL, MUTABLE, STATE_MASK, pack

GEOMETRY = BlockGeometry(1, 1, 4, 2, "float32")
SIZE = GEOMETRY.block_tokens
SPACE = KeySpace(bytes(32))
ROOT = SPACE.root(KeyRoot("m", SIZE, "float32"))


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    return SPACE.block_keys(ROOT, tokens, SIZE)


class House:
    """One region, and processes that use it: each a pool over an attachment of its own."""

    def __init__(self, directory: Path, capacity_blocks: int) -> None:
        self.now = 1_000_000
        self.region = Region.create(directory, "house", GEOMETRY, capacity_blocks, bytes(32), random.Random(3))
        self.control = self.region.control()
        self.pools: list[Pool] = []

    def join(self, guarded: bool = True) -> Pool:
        pool = Pool.create(Region.attach(self.region.path), clock=self.tick, guard=guarded)
        self.pools.append(pool)
        return pool

    def tick(self) -> int:
        self.now += 50_000
        return self.now

    def kill(self, pool: Pool) -> None:
        """The process is gone, its words stay."""
        self.pools.remove(pool)
        region = pool.region
        region_module._open_regions.discard(region)
        pool._forget_after_fork()
        region._forget_after_fork()

    def leave(self, pool: Pool) -> None:
        self.pools.remove(pool)
        pool.close()
        pool.region.close()

    def bytes_of(self, block: int) -> memoryview:
        size = GEOMETRY.block_bytes
        return self.region.kv_memory[block * size : (block + 1) * size]

    def write(self, block: int, value: int) -> None:
        self.bytes_of(block)[:] = bytes([value % 256]) * GEOMETRY.block_bytes

    def state(self, block: int) -> int:
        return int(self.control.state[block]) & STATE_MASK

    def mark(self, block: int) -> int:
        return guard.mark_of(self.control, block)[0]

    def start(self, pool: Pool, request: str, tokens: Sequence[int]) -> BlockTable | None:
        """Matched, allocated, written; nothing sealed. None when there is no room."""
        table = pool.table(request)
        keys = keys_of(tokens)
        matched = pool.match(table, keys, tokens)
        if not pool.allocate(table, -(-len(tokens) // SIZE) - matched):
            pool.release(table)
            return None
        for position in range(matched, len(table)):
            self.write(table.block(position), 1 + sum(tokens[: (position + 1) * SIZE]))
        return table

    def seal(self, pool: Pool, table: BlockTable, tokens: Sequence[int]) -> None:
        keys = keys_of(tokens)
        for position in range(len(table.keys), len(keys)):
            pool.seal(table, position, keys[position], tokens[position * SIZE : (position + 1) * SIZE])

    def run(self, pool: Pool, request: str, tokens: Sequence[int]) -> BlockTable:
        table = self.start(pool, request, tokens)
        assert table is not None
        self.seal(pool, table, tokens)
        return table

    def cache(self, pool: Pool, tokens: Sequence[int]) -> list[int]:
        table = self.run(pool, "cached", tokens)
        blocks = table.blocks
        pool.release(table)
        return blocks

    def close(self) -> None:
        for pool in list(self.pools):
            self.leave(pool)
        self.control.release()
        self.region.close()


MakeHouse = Callable[..., House]


@pytest.fixture
def make_house(tmp_path: Path) -> Iterator[MakeHouse]:
    houses: list[House] = []

    def make(capacity_blocks: int = 16) -> House:
        directory = tmp_path / f"house{len(houses)}"
        directory.mkdir()
        houses.append(House(directory, capacity_blocks))
        return houses[-1]

    yield make
    for house in houses:
        house.close()


@pytest.fixture
def house(make_house: MakeHouse) -> House:
    """Sixteen blocks of two tokens."""
    return make_house()


# Stray writes: into free blocks


def test_poison_fills_what_is_given_back(house: House) -> None:
    pool = house.join()
    table = house.run(pool, "r", [1, 2, 3])
    indexed, tail = table.blocks
    pool.release(table)
    assert bytes(house.bytes_of(tail)) == bytes([POISON]) * GEOMETRY.block_bytes
    assert house.bytes_of(indexed)[0] == 1 + 3
    assert (house.mark(tail), house.mark(indexed)) == (POISONED, SUMMED)


@pytest.mark.parametrize("parked", [True, False])
def test_a_write_into_a_block_that_was_given_back(house: House, parked: bool) -> None:
    """Also names the request that had it: the first suspect of a use after free."""
    pool = house.join()
    pool.report_load(SlotLoad("replica-7", 0, 0, 0, 0.0))
    table = pool.table("the-first-request")
    assert pool.allocate(table, 8)
    blocks = table.blocks
    pool.release(table)
    block = next(b for b in blocks if (house.state(b) == LOCAL) == parked)
    house.bytes_of(block)[5] = 0
    other = pool.table("the-second-request")
    with pytest.raises(GuardViolation, match=rf"^1 bytes of block {block} were written while it was free") as raised:
        pool.allocate(other, 8)
    text = str(raised.value)
    assert "from byte 5 on" in text
    assert f"process {os.getpid()} (replica-7) in slot {pool.slot}" in text
    assert "'the-second-request', before that of request 'the-first-request'" in text
    assert "given back by process" in text
    assert "taken by process" in text
    # Told once, and nothing is lost.
    assert len(other) == 8
    pool.release(other)
    assert pool.available() == 16
    assert pool.check_integrity() == ""


@pytest.mark.parametrize("way", ["orderly", "killed"])
def test_poison_outlives_the_process_that_left_it(house: House, way: str) -> None:
    """Also that of the blocks in its local cache, which go through one more life on their way out."""
    first = house.join()
    table = first.table("r")
    assert first.allocate(table, 3)
    blocks = table.blocks
    first.release(table)
    assert {house.state(block) for block in blocks} == {LOCAL}
    if way == "orderly":
        house.leave(first)
    else:
        house.kill(first)
    second = house.join()
    house.bytes_of(blocks[1])[0] ^= 1
    with pytest.raises(GuardViolation, match=f"block {blocks[1]} .*given back by slot 0, whose process has left"):
        second.allocate(second.table("s"), 16)


def test_what_a_dead_process_had_is_poisoned(house: House) -> None:
    """Its blocks in every state: being filled, sealed, in its cache."""
    first = house.join()
    house.cache(first, [9, 9])
    table = house.run(first, "r", [1, 2, 3])
    house.control.state[table.blocks[0]] = pack(4, first.slot, 3)  # SEALED, not indexed
    for place in range(len(house.control.index)):
        if house.control.index[place] & 0xFFFFFFFF == table.blocks[0] + 1:
            house.control.index[place] = 0
    house.control.holders[table.blocks[0]] = 0
    blocks = table.blocks
    house.kill(first)
    second = house.join()
    assert [house.mark(block) for block in blocks] == [POISONED, POISONED]
    assert [event.what for event in events(house.control, blocks[1])] == ["reclaimed", "taken"]
    house.bytes_of(blocks[0])[0] = 1
    with pytest.raises(GuardViolation, match=rf"block {blocks[0]} .*reclaimed by process \d+ in slot {second.slot}"):
        second.allocate(second.table("s"), 15)


def test_a_failed_allocation_takes_no_mark_away(house: House) -> None:
    """It takes what there is and gives it back, in new lives, untouched."""
    pool = house.join()
    table = pool.table("r")
    assert pool.allocate(table, 12)
    blocks = table.blocks
    pool.release(table)
    kept = pool.table("kept")
    assert pool.allocate(kept, 4)
    rest = [block for block in blocks if block not in kept.blocks]
    lives = [int(house.control.state[block]) >> 16 for block in rest]
    assert not pool.allocate(pool.table("too large"), 13)
    assert [int(house.control.state[block]) >> 16 for block in rest] == [life + 1 for life in lives]
    for block in rest:
        house.bytes_of(block)[3] = 0
        with pytest.raises(GuardViolation, match=f"block {block} "):
            pool.allocate(pool.table("s"), 12)
        for other in [table for table in pool._tables if table is not kept]:
            pool.release(other)
    pool.release(kept)
    assert pool.check_integrity() == ""


@pytest.mark.parametrize("way", ["demand", "catch_up"])
def test_a_local_cache_that_is_given_up_for_others_keeps_its_marks(house: House, way: str) -> None:
    pool, waiting = house.join(), house.join()
    table = pool.table("r")
    assert pool.allocate(table, 3)
    blocks = table.blocks
    pool.release(table)
    waiting.wait_in_line(16)
    getattr(pool, way)()
    assert [house.state(block) for block in blocks] == [FREE] * 3
    house.bytes_of(blocks[2])[0] = 0
    table = waiting.table("s")
    with pytest.raises(GuardViolation, match=f"block {blocks[2]} "):
        waiting.allocate(table, 16)


# Stray writes: into sealed blocks


@pytest.mark.parametrize("at", [0, GEOMETRY.block_bytes - 1])
def test_a_write_into_a_sealed_block_is_found_by_the_next_reader(house: House, at: int) -> None:
    writer, reader = house.join(), house.join()
    writer.report_load(SlotLoad("writer", 0, 0, 0, 0.0))
    blocks = house.cache(writer, [1, 2, 3, 4])
    house.bytes_of(blocks[1])[at] ^= 0x10
    table = reader.table("reading")
    with pytest.raises(GuardViolation, match=f"^block {blocks[1]} was written to after it had been sealed") as raised:
        reader.match(table, keys_of([1, 2, 3, 4]), [1, 2, 3, 4])
    assert "of request 'cached'" in str(raised.value)
    assert f"sealed by process {os.getpid()} (writer) in slot {writer.slot}" in str(raised.value)
    assert reader.release(table) == 2  # raised once: letting go of it finds the same again
    assert reader.held_blocks() == 0


def test_nobody_is_served_from_a_damaged_block(house: House) -> None:
    pool = house.join()
    blocks = house.cache(pool, [1, 2])
    house.bytes_of(blocks[0])[0] ^= 1
    for _ in range(3):
        with pytest.raises(GuardViolation):
            pool.match(pool.table("r"), keys_of([1, 2]))


def test_a_write_into_a_sealed_block_is_found_when_it_is_let_go(house: House) -> None:
    pool = house.join()
    table = house.run(pool, "r", [1, 2, 3, 4])
    house.bytes_of(table.block(0))[7] ^= 1
    with pytest.raises(GuardViolation, match=f"^block {table.block(0)} was written to after"):
        pool.release(table)
    assert pool.release(table) == 2
    assert pool.check_integrity() == ""


@pytest.mark.parametrize("keep", [True, False])
def test_a_write_into_a_cached_block_is_found_when_it_is_evicted(make_house: MakeHouse, keep: bool) -> None:
    """Straight into a request's hands, or by way of FREE."""
    house = make_house(2)
    pool = house.join()
    blocks = house.cache(pool, [1, 2, 3, 4])
    house.bytes_of(blocks[1])[7] ^= 1
    if not keep:
        assert pool.reset() == 2
    with pytest.raises(GuardViolation, match=f"^block {blocks[1]} was written to after it had been sealed"):
        pool.allocate(pool.table("r"), 2)


def test_a_duplicate_that_was_given_back_is_watched(house: House) -> None:
    """Its bytes are poisoned in the local cache, and stay what they were when that is full."""
    pool = house.join()
    tables = [house.start(pool, name, list(range(12))) for name in ("one", "two")]
    assert tables[0] is not None
    assert tables[1] is not None
    own = tables[1].blocks
    house.seal(pool, tables[0], list(range(12)))
    house.seal(pool, tables[1], list(range(12)))
    assert tables[0].blocks == tables[1].blocks
    assert [house.mark(block) for block in own] == [POISONED] * 4 + [SUMMED] * 2
    assert house.bytes_of(own[0])[0] == POISON
    for block in (own[0], own[5]):
        house.bytes_of(block)[1] ^= 1
        with pytest.raises(GuardViolation, match=f"block {block} "):
            pool.allocate(pool.table("s"), 6)
        for table in [table for table in pool._tables if table not in tables]:
            pool.release(table)


def test_a_duplicate_found_late_is_watched(house: House) -> None:
    pool = house.join()
    table = house.start(pool, "r", [1, 2, 3, 4])
    other = house.start(pool, "s", [1, 2])
    assert table is not None
    assert other is not None
    home = int.from_bytes(keys_of([1, 2])[0][:8], "little")
    places = [(home + step) % len(house.control.index) for step in range(layout.WINDOW)]
    for place in places:  # nobody finds room
        house.control.index[place] = 1
    key, following = keys_of([1, 2, 3, 4])
    pool.seal(table, 0, key, [1, 2])
    for place in places:
        house.control.index[place] = 0
    house.seal(pool, other, [1, 2])
    own = table.block(0)
    assert own != other.block(0)
    assert pool.catch_up() == 0
    pool.seal(table, 1, following, [3, 4])
    assert table.block(0) == other.block(0)
    assert house.mark(own) == POISONED
    assert house.bytes_of(own)[0] == POISON


def test_moving_over_to_a_damaged_block_is_refused(house: House) -> None:
    pool = house.join()
    blocks = house.cache(pool, [1, 2])
    late = pool.table("late")
    assert pool.allocate(late, 1)
    house.write(late.block(0), 4)
    house.bytes_of(blocks[0])[0] ^= 1
    with pytest.raises(GuardViolation, match=f"^block {blocks[0]} "):
        house.seal(pool, late, [1, 2])
    assert late.blocks == blocks
    assert len(late.keys) == 1


def test_the_source_of_a_copy_is_watched(house: House) -> None:
    """A sealed block that is not in the index goes for good when its copy is complete."""
    pool = house.join()
    table = pool.table("r")
    assert pool.allocate(table, 1)
    house.write(table.block(0), 9)
    clash = house.run(pool, "other", [1, 2])
    pool.seal(table, 0, clash.keys[0], [7, 7])  # a collision: it stays private
    copied = pool.copy_on_write(table, 0)
    assert copied is not None
    source, target = copied
    house.bytes_of(target)[:] = house.bytes_of(source)
    pool.finish_copy(table)
    assert house.mark(source) == POISONED
    assert house.bytes_of(source)[0] == POISON
    assert house.bytes_of(target)[0] == 9
    house.seal(pool, table, [5, 6])
    assert house.mark(target) == SUMMED


@pytest.mark.parametrize("way", ["finish_copy", "seal", "release"])
def test_a_damaged_source_of_a_copy_is_found(house: House, way: str) -> None:
    pool = house.join()
    table = house.run(pool, "r", [1, 2])
    copied = pool.copy_on_write(table, 0)
    assert copied is not None
    source, target = copied
    house.bytes_of(source)[0] ^= 1
    house.write(target, 3)
    act: dict[str, Callable[[], object]] = {
        "finish_copy": lambda: pool.finish_copy(table),
        "seal": lambda: house.seal(pool, table, [1, 3]),
        "release": lambda: pool.release(table),
    }
    with pytest.raises(GuardViolation, match=f"^block {source} "):
        act[way]()
    assert pool.release(table) == 2
    assert pool.check_integrity() == ""


# Stray writes: into the control part


def test_a_write_into_the_header(house: House) -> None:
    pool = house.join()
    pool.check_guard()
    for name, place in layout.HEADER_WORDS.items():
        if place <= layout.HEADER_WORDS["check"]:
            kept = house.control.header[place]
            house.control.header[place] = kept ^ 1
            with pytest.raises(GuardViolation, match=f"header was overwritten: {name} .*process {os.getpid()}"):
                pool.check_guard()
            house.control.header[place] = kept
    house.control.header[layout.HEADER_WORDS["fingerprint"] + 2] ^= 1
    with pytest.raises(GuardViolation, match="fingerprint"):
        pool.check_guard()


def test_words_of_the_header_that_change_are_no_violation(house: House) -> None:
    pool = house.join()
    for name in ("slots_used", "demand", "ticket_next", "recount"):
        house.control.header[layout.HEADER_WORDS[name]] ^= 1 << 5
    pool.check_guard()


@pytest.mark.parametrize("moment", ["take", "seal", "match", "release"])
def test_a_write_into_the_record_of_a_block(house: House, moment: str) -> None:
    pool = house.join()
    cached = house.cache(pool, [1, 2])
    table = house.start(pool, "r", [5, 6, 7])
    assert table is not None
    block = {"take": 15, "match": cached[0]}.get(moment, table.block(0))
    act: dict[str, Callable[[], object]] = {
        "take": lambda: pool.allocate(pool.table("s"), 13),
        "match": lambda: pool.match(pool.table("s"), keys_of([1, 2])),
        "seal": lambda: house.seal(pool, table, [5, 6, 7]),
        "release": lambda: pool.release(table),
    }
    house.control.magic[block] ^= 1 << 40
    with pytest.raises(GuardViolation, match=f"^the record of block {block} was overwritten, its magic is 0x"):
        act[moment]()


@pytest.mark.parametrize("what", ["key", "tokens", "parent", "no such parent", "depth"])
def test_a_write_into_what_is_known_of_a_block_is_no_mere_miss(house: House, what: str) -> None:
    pool = house.join()
    blocks = house.cache(pool, [1, 2, 3, 4])
    damaged, control = blocks[1], house.control
    if what == "key":
        control.set_key(damaged, b"?" * 16)
    elif what == "tokens":
        control.set_tokens(damaged, bytes(8))
    else:
        control.parent[damaged] = {"parent": 1 << 32 | 16, "no such parent": 1 << 32 | 9999, "depth": 5 << 32 | 1}[what]
    with pytest.raises(GuardViolation, match=rf"^(the parent of )?block {damaged} was"):
        pool.match(pool.table("r"), keys_of([1, 2, 3, 4]), [1, 2, 3, 4])


def test_an_index_entry_that_points_nowhere(house: House) -> None:
    pool = house.join()
    key = keys_of([1, 2])[0]
    home, tag = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:12], "little")
    house.control.index[home % len(house.control.index)] = tag << 32 | 12
    pool.match(pool.table("r"), [key])  # block 11 is no business of the index, but nothing was read
    watch = pool._watch
    assert watch is not None
    house.control.index[home % len(house.control.index)] = tag << 32 | 99
    with pytest.raises(GuardViolation, match="an entry points to block 98 of 16"):
        watch.matched([], [key])


def test_a_true_collision_is_a_miss_and_no_violation(house: House) -> None:
    """Equal keys, other tokens or another parent: the checksums are right."""
    pool = house.join()
    first = house.run(pool, "one", [1, 2])
    key = first.keys[0]
    table = pool.table("two")
    assert pool.match(table, [key], [7, 7]) == 0
    assert pool.allocate(table, 1)
    house.write(table.block(0), 3)
    pool.seal(table, 0, key, [7, 7])
    assert pool.stats().hash_collisions == 2
    pool.release(table)
    pool.release(first)


def test_a_state_that_its_holder_cannot_have_brought_about(house: House) -> None:
    pool = house.join()
    table = house.start(pool, "r", [1, 2, 3])
    assert table is not None
    block = table.block(1)
    kept = house.control.state[block]
    house.control.state[block] = pack(MUTABLE, 9, 1)
    with pytest.raises(GuardViolation, match=rf"^the state of block {block} was overwritten.*owner slot 9"):
        pool.release(table)
    house.control.state[block] = kept
    assert pool.release(table) == 2


def test_a_held_block_that_another_process_would_evict_is_not_poisoned(house: House) -> None:
    """Its state says EVICTING in the other's name until that one sees our bit."""
    pool = house.join()
    table = house.run(pool, "r", [1, 2])
    block = table.block(0)
    kept = int(house.control.state[block])
    house.control.state[block] = kept & ~0xFFFF | 10 << 8 | EVICTING
    pool.release(table)
    house.control.state[block] = kept
    assert house.bytes_of(block)[0] == 1 + 3
    assert house.mark(block) == SUMMED
    assert pool.match(pool.table("s"), keys_of([1, 2]), [1, 2]) == 1


# After a violation


def test_a_pool_with_damaged_blocks_closes(house: House, caplog: pytest.LogCaptureFixture) -> None:
    pool = house.join()
    for name, tokens in (("r", [1, 2, 3]), ("s", [4, 5])):
        table = house.run(pool, name, tokens)
        house.bytes_of(table.block(0))[0] ^= 1
    house.leave(pool)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 2
    assert all("was written to after it had been sealed" in text for text in told)
    with house.join(guarded=False) as after:
        assert after.stats().blocks["free"] == 14
        assert after.check_integrity() == ""
    house.pools.clear()


def test_a_forced_release_goes_through(house: House, caplog: pytest.LogCaptureFixture) -> None:
    pool = house.join()
    table = house.run(pool, "r", [1, 2, 3])
    house.bytes_of(table.block(0))[0] ^= 1
    assert pool.force_release(table, "step failed") == 2
    assert "was written to after" in caplog.text
    assert pool.held_blocks() == 0


def test_what_a_block_went_through(house: House) -> None:
    pool = house.join()
    for tokens in ([1, 2], [3, 4]):
        block = house.cache(pool, tokens)[0]
    table = house.run(pool, "r", [5])
    found = events(house.control, table.block(0))
    pool.release(table)
    assert [event.what for event in events(house.control, table.block(0))][:1] == ["given back"] or found
    kept = events(house.control, block)
    assert [event.what for event in kept] == ["sealed", "taken"]
    assert [event.slot for event in kept] == [pool.slot] * 2
    assert kept[0].at_s > kept[1].at_s > 0
    for _ in range(4):
        with pool.table("again") as again:
            assert pool.allocate(again, 1)
            last = again.block(0)
    assert [event.what for event in events(house.control, last)] == ["given back", "taken"] * 2


# No false alarms


def test_off_it_marks_and_verifies_nothing(house: House) -> None:
    pool = house.join(guarded=False)
    assert pool._watch is None
    blocks = house.cache(pool, [1, 2])
    table = house.start(pool, "r", [8, 8, 8])
    assert table is not None
    pool.release(table)
    assert not any(house.control.checksum)
    assert not any(house.control.history)
    house.bytes_of(blocks[0])[0] ^= 1
    house.control.header[0] ^= 1
    pool.check_guard()
    assert pool.match(pool.table("s"), keys_of([1, 2])) == 1
    house.control.header[0] ^= 1


class GuardedTraffic(RuleBasedStateMachine):
    """Ordinary requests of several processes, some in guard mode and some not, in any order, with deaths and restarts.

    Every block is written by its holder only, and after every step some reader sees what was written. Whatever is found is a
    false alarm.
    """

    @initialize(capacity=st.integers(4, 14), modes=st.lists(st.booleans(), min_size=1, max_size=3))
    def begin(self, capacity: int, modes: list[bool]) -> None:
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.house = House(Path(self.directory.name), capacity)
        self.modes = [True, *modes]
        for mode in self.modes:
            self.house.join(mode)
        self.open: list[tuple[Pool, BlockTable, list[int]]] = []

    def pool(self, number: int) -> Pool:
        return self.house.pools[number % len(self.house.pools)]

    @rule(number=st.integers(0, 5), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), sealed=st.booleans())
    def arrive(self, number: int, tokens: list[int], sealed: bool) -> None:
        pool = self.pool(number)
        table = self.house.start(pool, f"request-{self.house.now}", tokens)
        if table is None:
            return
        if sealed:
            self.house.seal(pool, table, tokens)
        self.open.append((pool, table, tokens))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 20))
    def seal(self, number: int) -> None:
        pool, table, tokens = self.open[number % len(self.open)]
        self.house.seal(pool, table, tokens)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 20), token=st.integers(0, 1))
    def decode(self, number: int, token: int) -> None:
        """The engine writes into the last block, which is mutable, and seals it when it is full."""
        pool, table, tokens = self.open[number % len(self.open)]
        self.house.seal(pool, table, tokens)
        if len(tokens) % SIZE == 0 and not pool.allocate(table, 1):
            return
        tokens.append(token)
        self.house.write(table.block(len(table) - 1), 1 + sum(tokens))
        self.house.seal(pool, table, tokens)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 20), token=st.integers(0, 1), finish=st.booleans())
    def rewrite(self, number: int, token: int, finish: bool) -> None:
        """The last token is computed again, into a copy of its block."""
        pool, table, tokens = self.open[number % len(self.open)]
        self.house.seal(pool, table, tokens)
        if len(tokens) % SIZE or not tokens:
            return
        copied = pool.copy_on_write(table, len(table) - 1)
        if copied is None:
            return
        source, target = copied
        if source != target:
            self.house.bytes_of(target)[:] = self.house.bytes_of(source)
        if finish:
            pool.finish_copy(table)
        tokens[-1] = token
        self.house.write(target, 1 + sum(tokens))
        self.house.seal(pool, table, tokens)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 20), forced=st.booleans())
    def leave(self, number: int, forced: bool) -> None:
        pool, table, _ = self.open.pop(number % len(self.open))
        if forced:
            pool.force_release(table, "test")
        else:
            pool.release(table)

    @rule(number=st.integers(0, 5), count=st.integers(1, 6), what=st.sampled_from(["evict", "tidy", "grab"]))
    def tend(self, number: int, count: int, what: str) -> None:
        pool = self.pool(number)
        if what == "evict":
            pool.evict(count)
        elif what == "tidy":
            pool.tidy()
        else:  # more than there is
            table = pool.table("greedy")
            assert not pool.allocate(table, pool.available() + 1) or pool.release(table)

    @rule(number=st.integers(0, 5), killed=st.booleans(), mode=st.booleans())
    def restart(self, number: int, killed: bool, mode: bool) -> None:
        pool = self.pool(number)
        if not killed:
            for other, table, _ in self.open:
                if other is pool:
                    pool.release(table)
        self.open = [entry for entry in self.open if entry[0] is not pool]
        if killed:
            self.house.kill(pool)
        else:
            self.house.leave(pool)
        self.house.join(mode)

    @rule(mode=st.booleans())
    def adopt(self, mode: bool) -> None:
        """All die at once, and the next one takes over what is complete."""
        for pool in list(self.house.pools):
            self.house.kill(pool)
        self.open.clear()
        control, region = self.house.control, self.house.region
        control.release()
        region.close()
        adopted = Region.adopt(region.path, geometry=GEOMETRY, fingerprint=bytes(32), owner=bytes(16))
        assert adopted is not None
        self.house.region, self.house.control = adopted, adopted.control()
        for each in [mode, *self.modes[1:]]:
            self.house.join(each)

    @precondition(lambda self: hasattr(self, "house"))
    @rule(number=st.integers(0, 20))
    def check(self, number: int) -> None:
        for pool in self.house.pools:
            pool.check_guard()
            assert pool.check_integrity() == ""

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            with self.directory:
                for pool, table, _ in self.open:
                    pool.release(table)
                last = self.house.join()
                for pool in list(self.house.pools):
                    if pool is not last:
                        self.house.leave(pool)
                last.reset()
                table = last.table("all")
                assert last.allocate(table, last.capacity_blocks)  # takes, and so verifies, every block
                last.release(table)
                self.house.close()


def test_ordinary_requests_raise_no_alarm() -> None:
    loggers = [logging.getLogger(name) for name in ("kvpool", "kvpool.pool", "kvpool.orphans")]
    for logger in loggers:
        logger.disabled = True
    try:
        run_state_machine_as_test(
            GuardedTraffic, settings=settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
        )
    finally:
        for logger in loggers:
            logger.disabled = False


DYING = """
import os, signal, sys
from pathlib import Path
from kvpool import Pool, Region
from tests.kvpool.test_guard import House, keys_of
region = Region.attach(sys.argv[1])
pool = Pool.create(region, guard=sys.argv[2] == "True")
house = House.__new__(House)
house.region = region
table = house.start(pool, "doomed", [1, 2, 3, 4, 5])
house.seal(pool, table, [1, 2, 3, 4, 5])
house.write(table.block(2), 77)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_real_death_in_the_middle_of_a_block(house: House, guarded: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    command = [sys.executable, "-c", DYING, str(house.region.path), str(guarded)]
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    pool = house.join()
    table = pool.table("next")
    assert pool.match(table, keys_of([1, 2, 3, 4]), [1, 2, 3, 4]) == 2
    assert pool.allocate(table, 14)
    pool.release(table)
    assert pool.check_integrity() == ""


WORKER = """
import random, sys
from kvpool import Pool, Region
from tests.kvpool.test_guard import SIZE, House, keys_of
region = Region.attach(sys.argv[1])
pool = Pool.create(region, guard=sys.argv[2] == "True")
house = House.__new__(House)
house.region = region
rng = random.Random(int(sys.argv[3]))
open_tables = []
for request in range(int(sys.argv[4])):
    tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 13))]
    table = house.start(pool, f"request-{request}", tokens)
    if table is not None:
        open_tables.append(table)
        house.seal(pool, table, tokens)
        for position in range(len(table.keys)):
            assert house.bytes_of(table.block(position))[0] == 1 + sum(tokens[: (position + 1) * SIZE])
    while len(open_tables) > 2 or (open_tables and table is None):
        pool.release(open_tables.pop(rng.randrange(len(open_tables))))
    pool.check_guard()
    if request % 50 == 0:
        pool.tidy()
print("done", flush=True)
"""


def test_processes_that_really_run_side_by_side_raise_no_alarm(make_house: MakeHouse) -> None:
    """Two in guard mode, one not, in a pool that is always short, and a fourth that is killed on its way."""
    house = make_house(40)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(house.region.path), str(guarded), str(seed), str(requests)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed, (guarded, requests) in enumerate([(True, 800), (False, 800), (True, 800), (True, 10**9)])
    ]
    try:
        told = [child.communicate(timeout=90) for child in children[:3]]
        assert children[3].poll() is None, children[3].communicate()
    finally:
        for child in children:
            child.kill()
            child.communicate()
    for out, errors in told:
        assert out == "done\n", errors
    pool = house.join()
    assert pool.check_integrity() == ""
    pool.reset()
    assert pool.allocate(pool.table("everything"), 40)
