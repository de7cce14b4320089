"""The pool in plain Python that ours is measured against: it must be a right one, or the comparison says nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.python_pool import Block, FreeList, PythonPool

KEYS = [bytes([number]) * 16 for number in range(4)]


def test_blocks_are_taken_in_the_order_in_which_they_came_back() -> None:
    pool = PythonPool(6)
    assert pool.allocate("a", 2) == [0, 1]
    assert pool.allocate("b", 2) == [2, 3]
    assert pool.free("b") == 2
    assert pool.free("a") == 2
    assert pool.allocate("c", 6) == [4, 5, 3, 2, 1, 0]  # tails before heads
    assert (pool.allocated_blocks, pool.peak_used_blocks) == (10, 6)


def test_all_or_nothing() -> None:
    pool = PythonPool(3)
    assert pool.allocate("a", 2) == [0, 1]
    assert pool.allocate("b", 2) is None
    assert (pool.free_list.numbers(), pool.free("b"), pool.allocated_blocks) == ([2], 0, 2)


def test_content_outlives_its_request_until_the_block_is_taken() -> None:
    pool = PythonPool(3)
    pool.allocate("a", 2)
    for position in range(2):
        pool.seal("a", position, KEYS[position])
    pool.free("a")
    assert pool.match("b", KEYS) == 2
    assert pool.match("c", KEYS) == 2  # shared
    pool.free("b")
    assert pool.allocate("d", 2) is None  # c holds them still
    pool.free("c")
    assert pool.allocate("d", 2) == [2, 1]  # the one never used, then the tail of a
    assert pool.match("e", KEYS) == 1
    pool.free("e")
    assert pool.allocate("f", 1) == [0]
    assert pool.match("g", KEYS) == 0


def test_a_key_stays_with_the_block_that_had_it_first() -> None:
    pool = PythonPool(2)
    pool.allocate("a", 1)
    pool.seal("a", 0, KEYS[0])
    pool.allocate("b", 1)
    pool.seal("b", 0, KEYS[0])
    pool.free("a")
    pool.allocate("c", 1)
    assert pool.match("d", KEYS) == 0


@given(st.lists(st.integers(0, 5), max_size=40))
def test_the_list_is_a_list(operations: list[int]) -> None:
    blocks = [Block(number) for number in range(5)]
    inside: list[int] = []
    real = FreeList()
    for number in operations:
        if number == 5:
            taken = real.take(len(inside) // 2)
            assert [block.number for block in taken] == inside[: len(taken)]
            del inside[: len(taken)]
        elif number in inside:
            real.remove(blocks[number])
            inside.remove(number)
        else:
            real.append([blocks[number]])
            inside.append(number)
        assert (real.numbers(), real.count) == (inside, len(inside))


@given(st.lists(st.tuples(st.sampled_from("amsf"), st.sampled_from("xyz"), st.integers(0, 3)), max_size=60))
def test_nothing_is_lost_and_nothing_is_given_twice(operations: list[tuple[str, str, int]]) -> None:
    """Against a model that knows only who asked for what: every block is free, or held by whoever the model says."""
    pool = PythonPool(5)
    held: dict[str, list[int]] = {"x": [], "y": [], "z": []}
    sealed: dict[bytes, int] = {}
    for what, request, number in operations:
        free = set(range(5)).difference(*held.values())
        if what == "a":
            taken = pool.allocate(request, number)
            assert (taken is None) == (number > len(free))
            assert set(taken or []) <= free
            sealed = {key: block for key, block in sealed.items() if block not in (taken or [])}
            held[request] += taken or []
        elif what == "m" and not held[request]:
            known = [sealed[key] for key in KEYS[:number] if key in sealed]
            if KEYS[0] not in sealed:
                known = []
            elif any(key not in sealed for key in KEYS[:number]):
                known = known[: next(place for place, key in enumerate(KEYS) if key not in sealed)]
            assert pool.match(request, KEYS[:number]) == len(known)
            held[request] += known
        elif what == "s" and number < len(held[request]):
            block = held[request][number]
            pool.seal(request, number, KEYS[number])
            if KEYS[number] not in sealed and block not in sealed.values():
                sealed[KEYS[number]] = block
        elif what == "f":
            assert pool.free(request) == len(held[request])
            held[request] = []
        free = set(range(5)).difference(*held.values())
        assert sorted(pool.free_list.numbers()) == sorted(free)
