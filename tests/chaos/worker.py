"""One process of the chaos tests, from its fork off the zygote to its end.

It attaches to the region with a pool and a tidy thread of its own, signs its row of the board, and either makes random
requests (`traffic.py`) as the board commands, or performs a script (`script.py`), one line at each command. Whatever goes
wrong is written to its journal with seed and number of operations, and its row says FAILED.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from kvpool import Pool, Reclaimed, Region, TidyReport, TidyThread
from tests.chaos import board as rows
from tests.chaos.board import Board
from tests.chaos.content import FINGERPRINT, GEOMETRY
from tests.chaos.journal import Journal
from tests.chaos.script import Script
from tests.chaos.stopwatch import Stopwatch
from tests.chaos.traffic import Traffic

_IDLE_S = 0.001
_REPORT_EVERY = 200
"""Operations between two reports of how long calls took."""


@dataclass(frozen=True)
class Order:
    """What a worker is to do. `create_blocks` not 0: it makes the region first. `tidy_s` 0: no tidy thread. `script`: lines
    for `script.py`; without, random requests. `publishes`: it tries to be the publisher. `calm_s`: mean pause after each
    operation. `meddles`: see `Traffic`.
    """

    row: int
    seed: str
    region: str
    board: str
    journal: str
    create_blocks: int = 0
    floor_blocks: int = 0
    guard: bool = False
    publishes: bool = True
    meddles: bool = False
    tidy_s: float = 0.3
    calm_s: float = 0.0003
    script: tuple[str, ...] = ()

    def encode(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str) -> Order:
        """The opposite."""
        values = json.loads(line)
        return cls(**values | {"script": tuple(values["script"])})


def main(order: Order) -> int:
    """Lives that life; the exit status, 0 when nothing was wrong."""
    logging.disable(logging.CRITICAL)
    worker = Worker(order)
    try:
        worker.live()
    except BaseException:
        worker.fail(traceback.format_exc())
        return 1
    return 0


class Worker:
    """See the module."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._board = Board(Path(order.board))
        self._journal = Journal(Path(order.journal))
        self._rng = random.Random(order.seed)
        self._call = Stopwatch()
        self._traffic: Traffic | None = None

    def fail(self, what: str) -> None:
        """Writes down what was wrong."""
        done = self._traffic.count if self._traffic else 0
        doing = self._traffic.did if self._traffic else ""
        self._journal.note(error=what, seed=self._order.seed, operations=done, doing=doing, pid=os.getpid())
        self._put(rows.STATE, rows.FAILED)

    def live(self) -> None:
        """Attaches, works until told to stop, and leaves properly."""
        order = self._order
        path = Path(order.region)
        if order.create_blocks:
            region = Region.create(
                path.parent, path.name, GEOMETRY, order.create_blocks, FINGERPRINT, random.SystemRandom()
            )
        else:
            region = Region.attach(path)
        pool = Pool.create(region, floor_blocks=order.floor_blocks, guard=order.guard)
        self._put(rows.SLOT, pool.slot + 1)
        tidy = TidyThread(pool, order.tidy_s, on_report=self._tidied) if order.tidy_s else None
        if order.script:
            self._perform(pool)
        else:
            self._serve(region, pool)
        if tidy is not None:
            tidy.close()
        pool.close()
        region.close()
        self._put(rows.STATE, rows.STOP)

    def _perform(self, pool: Pool) -> None:
        """The lines of the script, each at its number, which is then the state."""
        script = Script(pool, self._journal)
        self._put(rows.STATE, rows.RUN)
        for number, line in enumerate(self._order.script, rows.STOP + 1):
            while self._get(rows.COMMAND) < number:
                if self._get(rows.COMMAND) == rows.STOP:
                    return
                time.sleep(_IDLE_S)
            script.perform(line)
            self._put(rows.STATE, number)
        while self._get(rows.COMMAND) != rows.STOP:
            time.sleep(_IDLE_S)

    def _serve(self, region: Region, pool: Pool) -> None:
        traffic = self._traffic = Traffic(
            pool, self._rng, f"w{self._order.row}", self._call, self._note_reclaimed, self._order.meddles
        )
        while True:
            command = self._get(rows.COMMAND)
            if command == rows.RUN:
                self._put(rows.STATE, rows.RUN)
                traffic.step()
                self._put(rows.COUNT, traffic.count)
                if traffic.count % _REPORT_EVERY == 0:
                    self._journal.note(times=self._call.report())
                if self._order.publishes and region.try_lead("publisher"):
                    self._put(rows.ROLES, self._get(rows.ROLES) | rows.LEADS_PUBLISHER)
                time.sleep(self._rng.random() * 2 * self._order.calm_s)
            elif self._get(rows.STATE) == command:
                time.sleep(_IDLE_S)
            elif command == rows.AUDIT:
                violation = pool.check_integrity()
                assert violation == "", violation
                self._put(rows.STATE, rows.AUDIT)
            else:
                traffic.finish()
                assert pool.held_blocks() == 0, f"{pool.held_blocks()} blocks are held by no request"
                self._journal.note(times=self._call.report())
                if command == rows.STOP:
                    return
                self._put(rows.STATE, rows.QUIET)

    def _tidied(self, report: TidyReport) -> None:
        self._put(rows.ROLES, self._get(rows.ROLES) | rows.LEADS_TIDY)
        self._put(rows.PASSES, self._get(rows.PASSES) + 1)
        self._note_reclaimed(list(report.reclaimed))

    def _note_reclaimed(self, reclaimed: list[Reclaimed]) -> None:
        for record in reclaimed:
            self._journal.note(reclaimed=record.pid, slot=record.slot, blocks=record.count)

    def _get(self, word: int) -> int:
        return self._board.get(self._order.row, word)

    def _put(self, word: int, value: int) -> None:
        self._board.put(self._order.row, word, value)
