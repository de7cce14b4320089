"""Free memory goes back while the thread runs, and no longer; garbage is found soon."""

from __future__ import annotations

import subprocess
import sys
import threading

from cluster.process_memory import HeapTrim, malloc_trim


def test_it_trims_again_and_again_until_closed() -> None:
    passes = threading.Semaphore(0)
    trim = HeapTrim(0.001, passes.release)
    for _ in range(3):
        assert passes.acquire(timeout=5)
    assert trim.alive
    for _ in range(2):
        trim.close()
    while passes.acquire(blocking=False):
        pass
    assert not passes.acquire(timeout=0.02)


def test_closing_does_not_wait_for_the_period() -> None:
    trim = HeapTrim(3600.0)
    trim.close()
    assert not trim.alive


def test_this_c_library_gives_pages_back() -> None:
    """One piece in eight keeps the heap from shrinking at its end; the pages between go back all the same."""
    function = malloc_trim()
    assert function is not None
    pieces = [bytearray(60_000) for _ in range(1000)]
    kept = pieces[::8]
    del pieces
    before = resident_bytes()
    function()
    assert before - resident_bytes() > 20_000_000
    assert len(kept) == 125


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


_CYCLES = """
import weakref
from collections import deque
from cluster.process_memory import forget_start

class Node:
    pass

old = [[n] for n in range(1_000_000)]  # what a process has after its imports
{forget}
alive, streams, most = weakref.WeakSet(), deque(maxlen=5_000), 0  # a stream lives long enough to grow old
for number in range(200_000):
    node = Node()
    node.itself = [node]
    alive.add(node)
    streams.append(node)
    most = max(most, len(alive))
print(most, len(old))
"""


def test_garbage_in_cycles_does_not_wait_for_a_quarter_of_what_was_there_at_the_start() -> None:
    def most(forget: str) -> int:
        run = subprocess.run([sys.executable, "-c", _CYCLES.format(forget=forget)], capture_output=True, check=True)
        return int(run.stdout.split()[0])

    assert most("forget_start()") < most("") / 2
