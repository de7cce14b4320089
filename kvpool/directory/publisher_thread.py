"""The thread that steps a publisher: every few milliseconds while the pool changes, less often while it does not.

After a step that changed something it waits `shortest_s`; each idle step doubles the wait, up to `longest_s`, so an idle
pool costs about a hundred short wake-ups a second and a first change waits that long at most. While another process
publishes the region it waits `standby_s`, which is then how long the pool has no publisher after that process died.

An exception that is nobody's (a bug, a closed region) ends the thread; it is logged, kept in `failure`, and told to
`on_failure`. The pool is then missing from the directory as soon as its lease ends, and serving goes on without.

Limits: one publisher, one thread. `close()` waits for the step in progress, so at most for the backend's time-outs; close
it before the pool and the region.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from kvpool.control import Control
from kvpool.directory.backend import DirectoryWriter
from kvpool.directory.publisher import Publisher, PublisherStats

_log = logging.getLogger(__name__)
_JOIN_S: Final = 10.0


class PublisherThread:
    """Runs `publisher` until `close()`; owns it, its `writer` and its `control`, and closes them."""

    def __init__(
        self,
        publisher: Publisher,
        writer: DirectoryWriter,
        control: Control,
        *,
        shortest_s: float = 0.003,
        longest_s: float = 0.010,
        standby_s: float = 0.03,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.failure: BaseException | None = None
        self._publisher = publisher
        self._writer = writer
        self._control = control
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._standby_s = standby_s
        self._on_failure = on_failure
        self._stop = threading.Event()
        self._goodbye = True
        self._thread = threading.Thread(target=self._run, name="kvatlas-publisher", daemon=True)
        self._thread.start()

    def stats(self) -> PublisherStats:
        """Returns the publisher's counters."""
        return self._publisher.stats()

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self, goodbye: bool = True) -> None:
        """Stops; with `goodbye` the pool leaves the directory at once. Idempotent."""
        self._goodbye = goodbye
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            wait_s = self._shortest_s
            while not self._stop.wait(wait_s):
                wait_s = self._shortest_s if self._publisher.step() else min(2 * wait_s, self._longest_s)
                if self._publisher.stands_by:
                    wait_s = self._standby_s
            self._publisher.close(self._goodbye)
        except BaseException as error:
            self.failure = error
            _log.exception("the publisher has ended")
            self._on_failure(error)
        finally:
            self._writer.close()
            self._control.release()
