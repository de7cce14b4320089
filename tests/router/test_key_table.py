from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvpool.directory.digest import changed, digest_of
from router.kernels.context import MAX_SLOTS
from router.key_table import NO_SLOT, SLICE_KEYS, KeyTable
from tests.router.table_check import holders_of

LENGTH = 260
SHARED = (0, 40, 40, 130)  # with how many leading keys each prompt goes together with the one before


def chain(count: int, name: str = "", shared: list[bytes] | None = None) -> list[bytes]:
    keys = list(shared or ())
    for number in range(len(keys), count):
        keys.append(hashlib.blake2b(f"{name} {number}".encode(), digest_size=16).digest())
    return keys


def prompts() -> list[list[bytes]]:
    made: list[list[bytes]] = []
    for number, shared in enumerate(SHARED):
        made.append(chain(LENGTH, str(number), made[-1][:shared] if made else None))
    return made


def table(give_way: list[int] | None = None) -> KeyTable:
    return KeyTable(lambda: give_way.append(1) if give_way is not None else None)


def fill(one: KeyTable, keys: list[bytes], shown: bool = True) -> int:
    slot = one.take()
    _, expected = one.change(slot, b"", b"".join(keys), 0)
    assert expected
    if shown:
        one.show(slot)
    return slot


def clean(one: KeyTable) -> None:
    while one.unclean:
        one.clean()


def depth_of(keys: set[bytes], prompt: list[bytes]) -> int:
    return next((number for number, key in enumerate(prompt) if key not in keys), len(prompt))


class Machine(RuleBasedStateMachine):
    """The table against a dictionary of sets."""

    pools = Bundle("pools")

    def __init__(self) -> None:
        super().__init__()
        self.table = table()
        self.prompts = prompts()
        self.sets: dict[int, set[bytes]] = {}
        self.digests: dict[int, int] = {}
        self.shown: set[int] = set()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("router.key_table.CLEAN_ROWS", 50)  # cleaning takes many steps, and others come between

    def teardown(self) -> None:
        self.patch.undo()

    @rule(target=pools)
    def take(self) -> int:
        return self._take()

    def _take(self) -> int:
        slot = self.table.take()
        assert slot not in self.sets
        self.sets[slot], self.digests[slot] = set(), 0
        return slot

    @initialize(target=pools, number=st.integers(0, 12))
    def take_some(self, number: int) -> int:
        for _ in range(number):
            self._show(self._take())
        return self._take()

    @rule(slot=pools, prompt=st.integers(0, len(SHARED) - 1), depth=st.integers(1, LENGTH))
    def add(self, slot: int, prompt: int, depth: int) -> None:
        self._add(slot, prompt, depth)

    @rule(prompt=st.integers(0, len(SHARED) - 1), depth=st.integers(1, LENGTH))
    def add_to_all(self, prompt: int, depth: int) -> None:
        for slot in self.sets:
            self._add(slot, prompt, depth)

    def _add(self, slot: int, prompt: int, depth: int) -> None:
        fresh = [key for key in self.prompts[prompt][:depth] if key not in self.sets[slot]]
        self._change(slot, [], fresh)

    @rule(slot=pools, prompt=st.integers(0, len(SHARED) - 1), depth=st.integers(0, LENGTH - 1))
    def remove(self, slot: int, prompt: int, depth: int) -> None:
        self._remove(slot, prompt, depth)

    @rule(prompt=st.integers(0, len(SHARED) - 1), depth=st.integers(0, LENGTH - 1), keep=st.integers(0, 3))
    def remove_from_most(self, prompt: int, depth: int, keep: int) -> None:
        for slot in list(self.sets)[keep:]:
            self._remove(slot, prompt, depth)

    def _remove(self, slot: int, prompt: int, depth: int) -> None:
        """Takes out what is below the key at `depth`, of all prompts that share it."""
        root = self.prompts[prompt][depth]
        below = {
            key: at
            for other in self.prompts
            if other[depth] == root
            for at, key in enumerate(other)
            if at >= depth and key in self.sets[slot]
        }
        self._change(slot, sorted(below, key=lambda key: -below[key]), [])

    @rule(slot=pools, add=st.booleans(), number=st.integers(0, LENGTH - 1))
    def change_what_is_not_so(self, slot: int, add: bool, number: int) -> None:
        key = self.prompts[0][number]
        wrong = key if (key in self.sets[slot]) == add else None
        if wrong is not None:
            digest, expected = self.table.change(slot, b"" if add else wrong, wrong if add else b"", self.digests[slot])
            assert not expected
            assert digest == changed(self.digests[slot], b"" if add else wrong, wrong if add else b"")

    def _change(self, slot: int, removed: list[bytes], added: list[bytes]) -> None:
        digest, expected = self.table.change(slot, b"".join(removed), b"".join(added), self.digests[slot])
        self.sets[slot] = self.sets[slot] - set(removed) | set(added)
        assert expected
        assert digest == digest_of(b"".join(self.sets[slot]))
        self.digests[slot] = digest

    @rule(slot=pools)
    def show(self, slot: int) -> None:
        self._show(slot)

    def _show(self, slot: int) -> None:
        if slot not in self.shown:
            self.table.show(slot)
            self.shown.add(slot)

    @rule(slot=consumes(pools))
    def drop(self, slot: int) -> None:
        self.table.drop(slot, slot in self.shown)
        self.shown.discard(slot)
        del self.sets[slot], self.digests[slot]

    @rule()
    def clean(self) -> None:
        self.table.clean()

    @rule(prompt=st.integers(0, len(SHARED) - 1), length=st.integers(0, LENGTH))
    def look_up(self, prompt: int, length: int) -> None:
        asked = self.prompts[prompt][:length]
        depths = self.table.depths(b"".join(asked))
        assert len(depths) == self.table.slots + 1
        assert {slot: int(depth) for slot, depth in enumerate(depths) if depth} == {
            slot: depth for slot in self.shown if (depth := depth_of(self.sets[slot], asked))
        }

    @invariant()
    def agrees(self) -> None:
        held = holders_of(self.table)
        for slot, keys in self.sets.items():
            assert self.table.held(slot) == len(keys)
            assert {key for key, slots in held.items() if slot in slots} == keys
        if not self.table.unclean:
            assert held.keys() == set().union(*self.sets.values())

    @rule(slot=pools)
    def list_keys(self, slot: int) -> None:
        packed = self.table.keys(slot)
        keys = [packed[at : at + 16] for at in range(0, len(packed), 16)]
        assert len(set(keys)) == len(keys)
        assert set(keys) == self.sets[slot]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_prompts_end_at_every_depth_of_very_many_pools() -> None:
    one, keys = table(), chain(700)
    slots = {fill(one, keys[:depth]): depth for depth in random.Random(1).choices(range(701), k=1300)}
    depths = one.depths(b"".join(keys))
    assert {slot: int(depths[slot]) for slot in slots} == slots
    assert one.depths(b"").sum() == 0
    assert one.depths(b"".join(chain(900, "other"))).sum() == 0


@pytest.mark.parametrize("length", [*range(1, 40), 63, 64, 65, 127, 128, 129, 1000, 4097])
def test_every_length_of_prompt(length: int) -> None:
    one, keys = table(), chain(length)
    slots = {fill(one, keys[:depth]): depth for depth in sorted({1, length // 2, length - 1, length} - {0})}
    depths = one.depths(b"".join(keys))
    assert {slot: int(depths[slot]) for slot in slots} == slots


def test_the_longest_prompt_may_grow() -> None:
    one, keys = table(), chain(20_000)
    slot = fill(one, keys)
    for length in (10, 20_000, 10):
        assert one.depths(b"".join(keys[:length]))[slot] == length


def test_holders_come_back_from_a_set_into_the_row() -> None:
    one, keys = table(), chain(3)
    slots = [fill(one, keys) for _ in range(20)]
    for left in range(20, 0, -1):
        assert {key: len(holders) for key, holders in holders_of(one).items()} == dict.fromkeys(keys, left)
        one.change(slots[left - 1], b"".join(reversed(keys)), b"", 0)
    assert len(one) == 0
    assert holders_of(one) == {}


def test_a_dropped_slot_is_out_of_sight_at_once_and_not_taken_again_before_it_is_clean() -> None:
    one, keys = table(), chain(50)
    old = fill(one, keys)
    one.drop(old, shown=True)
    assert one.depths(b"".join(keys)).sum() == 0
    assert {one.take() for _ in range(200)}.isdisjoint({old})
    clean(one)
    assert len(one) == 0


def test_half_cleaned_slots_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a dropped slot has gaps, so numbers of holders say nothing while it is there."""
    monkeypatch.setattr("router.key_table.CLEAN_ROWS", 20)
    one, keys = table(), chain(600)
    packed = b"".join(keys)
    slots = {fill(one, keys[:depth]): depth for depth in (0, 1, 99, 100, 301, 302, 600, *range(400, 430))}
    for _ in range(3):
        one.drop(fill(one, keys), shown=True)
    looks = 0
    while one.unclean:
        one.clean()
        looks += 1
        depths = one.depths(packed)
        assert {slot: int(depths[slot]) for slot in slots} == slots
    assert looks > 20


def test_slots_go_round() -> None:
    """A number that somebody has just read does not mean another pool a moment later."""
    one, keys = table(), chain(5)
    taken = []
    for _ in range(500):
        slot = fill(one, keys)
        taken.append(slot)
        one.drop(slot, shown=True)
        one.clean()
    assert one.slots == 64
    assert all(len(set(taken[at : at + 60])) == 60 for at in range(0, 440))


def test_slots_are_found_however_many_are_dropped_between_two_cleanings() -> None:
    one, keys = table(), chain(5)
    for _ in range(1000):
        one.drop(fill(one, keys), shown=True)
    assert one.slots <= 192
    assert len(one) <= 5


def test_there_is_an_end_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.key_table.MAX_SLOTS", 128)
    one = table()
    slots = [one.take() for _ in range(128)]
    assert NO_SLOT not in slots
    assert one.take() == NO_SLOT
    one.drop(slots[5], shown=False)
    assert one.take() == slots[5]
    assert MAX_SLOTS % 64 == 0


def test_rows_that_move_while_cleaning_are_cleaned() -> None:
    """Between the slices of cleaning, keys go in and out before and after the place that it has come to."""
    rng = random.Random(4)
    one = table()
    dead = fill(one, chain(30_000, "dead"))
    fill(one, chain(30_000, "dead")[:10_000])
    busy = fill(one, [])
    keys = chain(6000, "busy")
    one.drop(dead, shown=True)
    slices = 0
    held: list[bytes] = []
    while one.unclean:
        one.clean()
        slices += 1
        gone = [held.pop() for _ in range(rng.randrange(len(held) + 1))]
        come = keys[: rng.randrange(1000)]
        one.change(busy, b"".join(gone), b"", 0)
        come = [key for key in come if key not in set(held)]
        one.change(busy, b"", b"".join(come), 0)
        held += come
    assert slices > 5
    assert all(slots.isdisjoint({dead}) for slots in holders_of(one).values())
    assert len(one) == 10_000 + len(held)


def test_a_table_that_was_large_becomes_small() -> None:
    one = table()
    small = one.memory_bytes()
    slots = [fill(one, chain(40_000, "a")) for _ in range(9)]
    assert one.memory_bytes() < 75 * 40_000
    for slot in slots:
        one.drop(slot, shown=True)
    clean(one)
    assert one.memory_bytes() <= small + 8192
    slot = fill(one, chain(100))
    assert one.depths(b"".join(chain(100)))[slot] == 100


def test_a_key_takes_at_most_64_bytes() -> None:
    one = table()
    slots = [one.take() for _ in range(64)]
    sizes = []
    for start in range(0, 60_000, 1000):
        packed = b"".join(chain(1000, str(start)))
        for slot in slots:
            one.change(slot, b"", packed, 0)
        sizes.append(one.memory_bytes() / len(one))
    assert max(sizes[20:]) <= 64


def test_others_run_between_slices_and_see_nothing_half_done() -> None:
    keys = chain(3 * SLICE_KEYS + 5)
    packed = b"".join(keys)
    seen: list[tuple[int, int]] = []
    one = KeyTable(lambda: seen.append((int(one.depths(packed)[old]), int(one.depths(packed)[new]))))
    old = fill(one, keys[:10])
    new = one.take()
    one.change(new, b"", packed, 0)
    assert seen == [(10, 0)] * 3
    one.show(new)
    seen.clear()
    digest, expected = one.change(new, b"".join(reversed(keys)), b"", digest_of(packed))
    assert (digest, expected) == (0, True)
    assert [depth for depth, _ in seen] == [10] * 3
    assert len(one) == 10


@pytest.mark.parametrize("slice_keys", [1, 7, SLICE_KEYS])
def test_keys_are_listed_in_pieces(monkeypatch: pytest.MonkeyPatch, slice_keys: int) -> None:
    monkeypatch.setattr("router.key_table.SLICE_KEYS", slice_keys)
    one, keys = table(), chain(300)
    slot = fill(one, keys)
    fill(one, chain(200, "other"))
    packed = one.keys(slot)
    assert len(packed) == 16 * 300
    assert {packed[at : at + 16] for at in range(0, len(packed), 16)} == set(keys)


def test_very_many_keys_are_listed() -> None:
    one, keys = table(), chain(50_000)
    slot = fill(one, keys)
    fill(one, chain(20_000, "other"))
    packed = one.keys(slot)
    assert len(packed) == 16 * 50_000
    assert {packed[at : at + 16] for at in range(0, len(packed), 16)} == set(keys)
    assert one.keys(NO_SLOT) == b""


def test_torn_keys_are_refused() -> None:
    one = table()
    slot = one.take()
    for call in (
        lambda: one.depths(bytes(17)),
        lambda: one.change(slot, bytes(15), b"", 0),
        lambda: one.change(slot, b"", bytes(1), 0),
    ):
        with pytest.raises(ValueError, match="16 bytes"):
            call()


def test_numbers_as_keys_do_not_crowd() -> None:
    """Tests and tools use such keys."""
    for order in ("big", "little"):
        one = table()
        keys = [number.to_bytes(16, order) for number in range(20_000)]
        slot = fill(one, keys)
        assert one.depths(b"".join(keys))[slot] == 20_000
        assert one.memory_bytes() < 60 * 20_000


def test_keys_that_crowd_are_not_taken_and_that_is_said() -> None:
    """4,000 keys that all want to be the last row."""
    from router.kernels.rows import unscrambled

    one = table()
    slot = one.take()
    words = [(0xFFFFFFFF << 32 | number) - (1 << 64) for number in range(4000)]
    keys = [
        (unscrambled.py_func(word, 0) & (1 << 64) - 1).to_bytes(8, "little") + bytes(8)  # type: ignore[attr-defined]
        for word in words
    ]
    _, expected = one.change(slot, b"", b"".join(keys), 0)
    assert not expected
    held = holders_of(one)
    assert one.held(slot) == len(held) < 4000
    one.drop(slot, shown=False)
    clean(one)
    assert len(one) == 0


@pytest.fixture
def _eager_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_eager_threads")
def test_readers_see_whole_steps_while_everything_moves() -> None:
    """Pools grow, shrink, are dropped and filled anew, the table and its sets grow and become smaller; readers only ever see
    depths that were there between two steps.
    """
    step, steps = 50, 20
    prompt = chain(step * steps)
    packed = b"".join(prompt)
    one = KeyTable(lambda: None)
    steady = fill(one, prompt[:777])
    stop = threading.Event()
    problems: list[str] = []
    looks = [0, 0]

    def read(number: int) -> None:
        while not stop.is_set():
            depths = one.depths(packed)
            looks[number] += 1
            if depths[steady] != 777:
                problems.append(f"steady {depths[steady]}")
            others = np.delete(depths, steady)
            if (others % step).any() or others[0]:
                problems.append(f"torn {others[others % step != 0]}")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        rng = random.Random(5)
        depth_of: dict[int, int] = {}
        for round_ in range(1500):
            if len(depth_of) < 70 and rng.random() < 0.5:
                depth = rng.randrange(steps + 1)
                depth_of[fill(one, prompt[: step * depth])] = depth
            if depth_of:
                slot = rng.choice(list(depth_of))
                new = rng.randrange(steps + 1)
                gone, come = prompt[step * new : step * depth_of[slot]], prompt[step * depth_of[slot] : step * new]
                _, expected = one.change(slot, b"".join(reversed(gone)), b"".join(come), 0)
                assert expected
                depth_of[slot] = new
            if depth_of and rng.random() < 0.45:
                slot = rng.choice(list(depth_of))
                one.drop(slot, shown=True)
                del depth_of[slot]
            if round_ % 100 == 0:
                depth = rng.randrange(2, 20)
                one.drop(fill(one, chain(1000 * depth, str(round_))), shown=True)
            one.clean()
            if problems:
                break
    finally:
        stop.set()
        for thread in threads:
            thread.join(10.0)
    assert problems == []
    assert min(looks) > 0
    holders_of(one)
