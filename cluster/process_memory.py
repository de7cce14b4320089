"""What keeps a process of ours from growing under load: garbage is found soon, and free memory goes back.

A stream that its client leaves is garbage in cycles, tens of kilobytes of it. Python looks for cycles among all old objects only
when a quarter as many new ones have grown old, and an ingress that has imported everything has a great many old objects.
`forget_start` takes what is there at the start out of that count and out of the search, so that it happens often and is soon
over.

Thousands of streams a minute leave holes all over the heaps of a process: Ray allocates in many threads, and free memory goes
back by itself only at a heap's end. So a process under load would go on growing for a quarter of an hour though it holds no
more than in its first minute. `malloc_trim` gives back whole free pages anywhere in any heap.

While a heap is looked at, other threads that allocate from it wait.

Limits: the GNU C library; with another one nothing is done.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable

PERIOD_S = 5.0


def forget_start() -> None:
    """To be called once, when everything that stays has been made: garbage collection leaves it alone from now on."""
    gc.collect()
    gc.freeze()
    gc.collect()  # which also counts anew what is old


def malloc_trim() -> Callable[[], object] | None:
    """The C library's function; None where it has none."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if function is None else lambda: function(ctypes.c_size_t(0))


class HeapTrim:
    """Calls `trim` every `period_s` seconds until `close`, which is idempotent. One is enough for a process."""

    def __init__(self, period_s: float = PERIOD_S, trim: Callable[[], object] | None = None) -> None:
        self._trim = trim or malloc_trim()
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-heap-trim", daemon=True)
        if self._trim is not None:
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops after the pass in progress."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._trim is not None
        while not self._stop.wait(self._period_s):
            self._trim()
