"""A child process of the pool benchmark: started on a core of its own, asked, and ended on every path.

Commands and answers are one JSON object a line, over its stdin and stdout; what it writes to stderr is kept and shown when
it fails. It is in a session of its own, so that a Ctrl-C on the terminal reaches only us, and dies with us however we die
(`cluster/die_with_parent.py`).

`start_together` gives two children one moment to begin at, on the clock that all processes of a machine share; a child that
heard of it too late begins late, which the figures made of their times contain.

Limits: Linux; one command at a time for each child.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from cluster.die_with_parent import bound
from kvpool.errors import KvatlasError

ANSWER_S = 120.0
"""How long a command may take beyond its own time; the first one waits for imports and, once per machine, compilation."""
LEAD_S = 0.05
"""How far in the future a common start lies, so that every child has heard of it."""
QUIT_S = 2.0


class BenchFailed(KvatlasError):
    """The benchmark could not be run to its end; the message says why and what to do (exit code 1)."""


def cores(count: int, allowed: set[int]) -> list[int | None]:
    """A core for each of `count` processes, different ones as far as there are any; Nones when there is but one."""
    if len(allowed) < 2:
        return [None] * count
    order = sorted(allowed)
    return [order[number % len(order)] for number in range(count)]


class Worker:
    """One child, on `core` (None: wherever the kernel likes). As a context manager it ends the child."""

    def __init__(self, core: int | None, module: str = "cluster.bench.pool_worker") -> None:
        """Starts `module`; returns at once. Raises BenchFailed when the machine starts no process."""
        command = [sys.executable, "-m", module, *([] if core is None else [str(core)])]
        self._errors = os.memfd_create("stderr")  # in memory; gone with us
        try:
            self._process = subprocess.Popen(
                bound(command, signal.SIGKILL, os.getpid()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            os.close(self._errors)
            raise BenchFailed(
                f"Cannot start a process to measure with ({error}): check the machine's limits."
            ) from error
        self.pid = self._process.pid
        self._unread = b""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns its answer. Raises BenchFailed when it fails, and when the child died or hangs."""
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        """Sends a command. Its `answer` has to be read before the next one. Raises BenchFailed when the child is gone."""
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        except BrokenPipeError as error:
            raise self._died() from error

    def answer(self, limit_s: float = ANSWER_S) -> dict[str, Any]:
        """Waits for the answer to the last command. Raises BenchFailed as `ask` does."""
        deadline = time.monotonic() + limit_s
        line = self._line(deadline)
        if line is None:
            raise BenchFailed(
                f"A process of the benchmark did not answer within {limit_s:g} s: try again on an idle machine."
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchFailed(f"The measurement is impossible: {answer['error']}")
        return answer

    def _line(self, deadline: float) -> bytes | None:
        assert self._process.stdout is not None, "a pipe"
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            more = os.read(pipe, 1 << 16)
            if not more:
                raise self._died()
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> BenchFailed:
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        text = os.pread(self._errors, 1 << 20, 0).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        last = f" Its last words: {lines[-1]}" if lines else ""
        return BenchFailed(f"A process of the benchmark ended early ({how}): run it again.{last}")

    def kill(self) -> None:
        """SIGKILL, as a crash would; returns once the kernel has dropped everything the child had."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the child: kindly when nothing went wrong, else at once."""
        assert self._process.stdin is not None, "a pipe"
        assert self._process.stdout is not None, "a pipe"
        self._process.stdin.close()
        try:
            if kind is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(QUIT_S)
        finally:
            self.kill()
            self._process.stdout.close()
            os.close(self._errors)


@contextlib.contextmanager
def workers(count: int) -> Iterator[list[Worker]]:
    """`count` children, each on a core of its own as far as possible, for the body's time."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Worker(core)) for core in cores(count, os.sched_getaffinity(0))]


def start_together(children: Sequence[Worker], seconds: float, do: str, **arguments: Any) -> list[Mapping[str, Any]]:
    """Has all `children` do the same from one moment on for `seconds`; returns their answers."""
    start_ns = time.monotonic_ns() + int(LEAD_S * 1e9)
    stop_ns = start_ns + int(seconds * 1e9)
    for child in children:
        child.send(do, start_ns=start_ns, stop_ns=stop_ns, **arguments)
    return [child.answer(seconds + ANSWER_S) for child in children]
