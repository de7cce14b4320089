"""Free memory goes back while the thread runs, and no longer."""

from __future__ import annotations

import threading

from cluster.heap_trim import HeapTrim, malloc_trim


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
