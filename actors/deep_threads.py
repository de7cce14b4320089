"""Threads with much stack, for native code that recurses as deep as its input nests.

A stack that overflows takes the process along. The memory is only reserved: what is never reached takes none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

STACK_BYTES = 512 * 1024 * 1024
_Result = TypeVar("_Result")
_Job = tuple[Future[Any], Callable[[], Any]]
# The size for new threads is one of the whole process.
_SIZE_LOCK = threading.Lock()


class DeepThreads:
    """`count` threads that do jobs in the order in which they come."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        # Daemons: what they are in can take long and be interrupted by nothing.
        self._threads = [
            threading.Thread(target=_work, args=(self._jobs,), name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        with _SIZE_LOCK:
            before = threading.stack_size(STACK_BYTES)
            try:
                for thread in self._threads:
                    thread.start()
            finally:
                threading.stack_size(before)

    @property
    def waiting(self) -> int:
        """Jobs that no thread has begun. A hint."""
        return self._jobs.qsize()

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Do `job`; cancelled at once if closed. Never waits; any thread."""
        future: Future[_Result] = Future()
        if self._closed:
            future.cancel()
        else:
            self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float = 5.0) -> None:
        """Do what has been submitted, then end; waits `timeout_s` for each thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout_s)


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (entry := jobs.get()) is not None:
        future, job = entry
        del entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(job())
        except BaseException as error:  # a panic of native code is no Exception
            future.set_exception(error)
        # Not held while waiting for the next: it may be all that keeps much memory.
        del future, job
