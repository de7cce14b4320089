"""The thread that puts a region right every few hundred milliseconds.

One process a region does it at a time: whoever holds the region's `tidy` lock. All others try for the lock each period, so
when that process dies another one goes on within a period. What is each process's own affair (`Pool.catch_up`), every thread
does.

Costs, per pass over a pool of 4,096 blocks: see `kvatlas bench pool`, `tidy`.

Limits: one thread a pool; close it before the pool.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvpool.errors import PoolError
from kvpool.pool import Pool
from kvpool.reclaimed import TidyReport

_log = logging.getLogger(__name__)


class TidyThread:
    """Tidies `pool` every `period_s` seconds until `close()`. `on_report` is called, in the thread, after each pass."""

    def __init__(
        self, pool: Pool, period_s: float = 0.3, *, on_report: Callable[[TidyReport], None] = lambda report: None
    ) -> None:
        if period_s <= 0:
            raise ValueError(f"a period is longer than 0 s, got {period_s}")
        self._pool = pool
        self._period_s = period_s
        self._on_report = on_report
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-tidy", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stops after the pass in progress, and lets another process take over. Idempotent."""
        self._stop.set()
        self._thread.join()
        if not self._pool.region.closed:
            self._pool.region.resign("tidy")

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                self._pass()
            except PoolError:
                if self._pool.closed:
                    return
                _log.exception("a tidy pass failed; trying again")
            except Exception:
                _log.exception("a tidy pass failed; trying again")

    def _pass(self) -> None:
        if self._pool.region.try_lead("tidy"):
            self._on_report(self._pool.tidy())
        else:
            self._pool.reclaim()  # whoever leads may be stopped
            self._pool.catch_up()
