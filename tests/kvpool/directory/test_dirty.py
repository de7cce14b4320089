from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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


def test_no_bit_is_lost_while_it_is_being_set() -> None:
    """A setter as in the pool: state first, then a read and a store of the bitmap word that are not one step."""
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
