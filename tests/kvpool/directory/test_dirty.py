from __future__ import annotations

import threading
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kvpool.directory import dirty


@given(st.sets(st.integers(0, 199)))
def test_every_bit_is_taken_once(blocks: set[int]) -> None:
    bits = np.zeros(4, dtype=np.uint64)
    room = np.empty(200, dtype=np.int64)
    for block in blocks:
        bits[block >> 6] |= np.uint64(1 << (block & 63))
    assert dirty.take(bits, room) == sorted(blocks)
    assert not bits.any()
    assert dirty.take(bits, room) == []


def test_bits_beyond_the_last_block_are_dropped() -> None:
    bits = np.full(1, 2**64 - 1, dtype=np.uint64)
    assert dirty.take(bits, np.empty(3, dtype=np.int64)) == [0, 1, 2]
    assert bits[0] == 0


@intrinsic  # type: ignore[untyped-decorator]
def set_bits(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """An atomic `or`, as the pool's."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = cgutils.get_item_pointer(
            context, builder, signature.args[0], view, [arguments[1]], wraparound=False, boundscheck=False
        )
        return builder.atomic_rmw("or", pointer, arguments[2], "seq_cst")

    return types.uint64(array, types.intp, types.uint64), generate


@njit(nogil=True)  # type: ignore[untyped-decorator]
def change(states: Any, bits: Any, first: int, rounds: int) -> None:
    """Changes every other block from `first` on, over and over: its state first, its bit afterwards."""
    for _ in range(rounds):
        for block in range(first, 64, 2):
            states[block] += 1
            set_bits(bits, 0, np.uint64(1) << np.uint64(block))


def test_no_bit_is_lost_while_two_set_and_one_takes() -> None:
    """Without the interpreter's lock, and all in one word of the bitmap."""
    states, bits = np.zeros(64, dtype=np.int64), np.zeros(1, dtype=np.uint64)
    seen = np.zeros(64, dtype=np.int64)
    room = np.empty(64, dtype=np.int64)
    change(states, bits, 64, 1)  # compiles
    setters = [threading.Thread(target=change, args=(states, bits, first, 20_000)) for first in (0, 1)]
    for setter in setters:
        setter.start()
    going = True
    while going:
        going = any(setter.is_alive() for setter in setters)
        for block in dirty.take(bits, room):
            seen[block] = states[block]
    assert states.tolist() == [20_000] * 64
    assert seen.tolist() == states.tolist()


def test_a_setter_that_is_not_one_step_makes_a_block_be_looked_at_twice_at_worst() -> None:
    """One alone that reads and then stores the word of the bitmap: it brings bits back, and loses none."""
    words = bytearray(8)
    bits = np.frombuffer(words, dtype=np.uint64)
    room = np.empty(64, dtype=np.int64)
    view = memoryview(words).cast("Q")
    state = [0] * 64
    seen = [0] * 64
    done = threading.Event()

    def read() -> int:  # a call, so that another thread may run between the read and the store
        return int(view[0])

    def setter() -> None:
        for number in range(30_000):
            block = number % 64
            state[block] += 1
            view[0] = read() | 1 << block
        done.set()

    thread = threading.Thread(target=setter)
    thread.start()
    while True:
        last = done.is_set()
        for block in dirty.take(bits, room):
            seen[block] = state[block]
        if last:
            break
    thread.join()
    assert seen == state
    view.release()
