"""A region, its workers, and the hand that stops, kills and replaces them.

Every wait has an end, and every process is ended by its own id, on every path.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvpool import Region, layout
from kvpool.kernels.pause import STEPS
from tests.chaos import board as rows
from tests.chaos import journal
from tests.chaos.audit import audit
from tests.chaos.board import Board
from tests.chaos.content import FINGERPRINT, GEOMETRY
from tests.chaos.stopwatch import KINDS, spread_us
from tests.chaos.worker import Order

_ROOT: Final = Path(__file__).resolve().parents[2]
_START_S: Final = 240.0
WAIT_S: Final = 20.0
"""How long anything may take that is a matter of milliseconds on an idle machine."""


class Zygote:
    """The process that forks workers."""

    def __init__(self, log: Path) -> None:
        environment = os.environ | {"KVATLAS_PAUSE_POINTS": "1", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.zygote"],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._log = log
        self._ready = False

    def wait_until_ready(self) -> None:
        """Returns when it has compiled everything."""
        if not self._ready:
            assert self._answer(_START_S) == "ready"
            self._ready = True

    def fork(self, order: Order) -> int:
        """Forks a worker; its pid."""
        self.wait_until_ready()
        return int(self._ask(f"fork {order.encode()}"))

    def reap(self, pid: int) -> int:
        """Waits for a worker that was killed, or ends; its exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(int(self._ask(f"reap {pid}")))

    def close(self) -> None:
        """Ends it and all its workers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(WAIT_S)

    def _answer(self, timeout_s: float) -> str:
        pipe = self._process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], timeout_s)
        line = pipe.readline().decode().strip() if ready else ""
        assert line, f"the zygote says nothing: {self._log.read_text()[-2000:]}"
        return line


@dataclass
class Hand:
    """One worker as the test sees it."""

    row: int
    pid: int
    order: Order


@dataclass
class Arena:
    """See the module. `meddles`: workers that come from now on do. `reclaim_s`: times from death to reclaim by
    a tidy thread; `kills`: how many, by where.
    """

    zygote: Zygote
    home: Path
    seed: int
    capacity_blocks: int = 64
    meddles: bool = False
    reclaim_s: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.path = self.home / f"chaos-{self.seed}-{self.capacity_blocks}"
        self.board = Board(self.home / "board")
        self.hands: list[Hand] = []
        self.journals: list[Path] = []
        self.disturbed: set[Path] = set()
        self._region: Region | None = None
        self._next_row = 0

    # The region

    def create(self) -> None:
        """Makes the region in this process."""
        Region.create(
            self.home, self.path.name, GEOMETRY, self.capacity_blocks, FINGERPRINT, random.Random(self.seed)
        ).close()
        self.open()

    def open(self) -> None:
        """Opens the region that is there, to look at it."""
        self._region = Region.attach(self.path)
        self.geometry, self.fingerprint = self._region.geometry, self._region.fingerprint
        self.control = self._region.control()

    def let_go(self) -> None:
        """Closes it here."""
        if self._region is not None:
            self.control.release()
            self._region.close()
            self._region = None

    def want_recount(self) -> None:
        """As if somebody had died where child counts may be too high."""
        self.control.header[layout.HEADER_WORDS["recount"]] = 1

    def word(self, hand: Hand, name: str) -> int:
        """A word of the slot of `hand`."""
        value: int = self.control.slots[self._place(hand, name)]
        return value

    def put(self, hand: Hand, name: str, value: int) -> None:
        """Writes a word of the slot of `hand`."""
        self.control.slots[self._place(hand, name)] = value

    def _place(self, hand: Hand, name: str) -> int:
        return self.slot(hand) * layout.SLOT_WORD_COUNT + layout.SLOT_WORDS[name]

    def slot(self, hand: Hand) -> int:
        """Its slot."""
        return self.board.get(hand.row, rows.SLOT) - 1

    # Workers

    def spawn(self, *, wait: bool = True, **what: Any) -> Hand:
        """Forks a worker that makes random requests, or performs `script`."""
        row, self._next_row = self._next_row, self._next_row + 1
        path = self.home / f"worker-{row}.jsonl"
        order = Order(row, f"{self.seed}-{row}", str(self.path), str(self.board.path), str(path), **what)
        self.board.put(row, rows.COMMAND, rows.RUN)
        hand = Hand(row, self.zygote.fork(order), order)
        self.hands.append(hand)
        self.journals.append(path)
        if wait:
            self.wait_for(lambda: self.board.get(row, rows.STATE) == rows.RUN, f"worker {row} to start")
        return hand

    def tell(self, hand: Hand, command: int) -> None:
        """Gives a command, and does not wait."""
        self.board.put(hand.row, rows.COMMAND, command)

    def state(self, hand: Hand) -> int:
        """Where it is."""
        return self.board.get(hand.row, rows.STATE)

    def bring(self, hands: Iterable[Hand], command: int) -> None:
        """Gives a command to all and waits until they have followed it."""
        chosen = list(hands)
        for hand in chosen:
            self.tell(hand, command)
        for hand in chosen:
            self.wait_for(
                lambda hand=hand: self.state(hand) == command,  # type: ignore[misc]
                f"worker {hand.row} to follow command {command}",
            )

    def perform(self, hand: Hand, line: int, *, wait: bool = True) -> None:
        """Lets a scripted worker go on up to line number `line` (from 0)."""
        number = rows.STOP + 1 + line
        self.tell(hand, number)
        if wait:
            self.wait_for(lambda: self.state(hand) == number, f"line {line} of worker {hand.row}")

    def said(self, hand: Hand) -> list[dict[str, Any]]:
        """Its journal."""
        return journal.read(Path(hand.order.journal))

    def counts(self, hands: Iterable[Hand]) -> dict[int, int]:
        """Operations done so far, by row."""
        return {hand.row: self.board.get(hand.row, rows.COUNT) for hand in hands}

    def wait_for(self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> float:
        """Returns after how many seconds `condition` holds. Fails when a worker does, or when it takes too long."""
        begun = time.monotonic()
        pause = 0.0005
        while not condition():
            self.check_workers()
            waited = time.monotonic() - begun
            assert waited < timeout_s, f"seed {self.seed}: waited {waited:.1f} s for {what}"
            time.sleep(pause)
            pause = min(0.005, 2 * pause)
        return time.monotonic() - begun

    def check_workers(self) -> None:
        """Fails when a worker found something wrong."""
        for hand in self.hands:
            if self.board.get(hand.row, rows.STATE) == rows.FAILED:
                errors = [record for record in self.said(hand) if "error" in record]
                raise AssertionError(f"seed {self.seed}, worker {hand.row}: {errors[0] if errors else ''}")

    # Stopping and killing

    def stop(self, hand: Hand) -> None:
        """SIGSTOP."""
        self.disturbed.add(Path(hand.order.journal))
        os.kill(hand.pid, signal.SIGSTOP)

    def go_on(self, hand: Hand) -> None:
        """SIGCONT."""
        os.kill(hand.pid, signal.SIGCONT)

    def catch(self, step: str, among: Iterable[Hand]) -> Hand:
        """Waits until one of the workers stands at a step; the others go on."""
        chosen, number = list(among), STEPS[step]
        for hand in chosen:
            self.put(hand, "pause_at", number)

        def standing() -> list[Hand]:
            return [hand for hand in chosen if self.word(hand, "step") == number]

        self.wait_for(lambda: bool(standing()), f"somebody to come to step {step!r}")
        caught = standing()[0]
        for hand in chosen:
            if hand is not caught:
                self.put(hand, "pause_at", 0)
        self.disturbed.update(Path(hand.order.journal) for hand in standing())
        return caught

    def kill(self, hand: Hand, where: str) -> float:
        """SIGKILL; returns the time of death on the monotonic clock."""
        os.kill(hand.pid, signal.SIGKILL)
        died = time.monotonic()
        assert self.zygote.reap(hand.pid) == -signal.SIGKILL
        self.hands.remove(hand)
        self.kills[where] = self.kills.get(where, 0) + 1
        return died

    def is_signed_by(self, hand: Hand) -> bool:
        """Whether the slot still has that worker's name."""
        return self.word(hand, "pid") == hand.pid

    def wait_until_reclaimed(self, hand: Hand, died: float, *, by_threads: bool = True) -> None:
        """Waits until a survivor has given back what `hand` had. The time counts when only tidy threads do so."""
        self.wait_for(lambda: not self.is_signed_by(hand), f"worker {hand.row} to be reclaimed")
        if by_threads:
            self.reclaim_s.append(time.monotonic() - died)

    def audit(self) -> dict[str, int]:
        """All workers let go of everything and stand still; then the region must be right, and they find it so too."""
        self.bring(self.hands, rows.QUIET)
        counts = audit(self.path, {self.slot(hand) for hand in self.hands})
        self.bring(self.hands, rows.AUDIT)
        self.bring(self.hands, rows.RUN)
        return counts

    def end(self) -> dict[str, int]:
        """All workers leave properly; then the region must be right, and whole."""
        self.bring(self.hands, rows.STOP)
        for hand in self.hands:
            assert self.zygote.reap(hand.pid) == 0
        self.hands.clear()
        return audit(self.path, set())

    def times_us(self) -> dict[str, tuple[float, float, float]]:
        """p50, p99 and maximum of all calls of workers that never were stopped themselves; on the clock and of processor time."""
        reports = [
            record["times"]
            for path in self.journals
            if path not in self.disturbed
            for record in journal.read(path)
            if "times" in record
        ]
        return {kind: spread_us(report[kind] for report in reports) for kind in KINDS}

    def close(self) -> None:
        """Kills what is left, and removes the region."""
        for hand in list(self.hands):
            os.kill(hand.pid, signal.SIGKILL)
            self.zygote.reap(hand.pid)
        self.hands.clear()
        self.let_go()
        self.path.unlink(missing_ok=True)
        self.board.close()
