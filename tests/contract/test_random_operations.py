"""Any order of requests, outages, restarts and takeovers: in the end the mirror has exactly the pool's indexed keys."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvpool import Pool
from kvpool.directory.publisher import PublisherSettings
from tests.contract.conftest import BOUNDS, Backend, MemoryBackend, RedisBackend
from tests.fakes.listener import Listener
from tests.fakes.published_pool import PublishedPool

SETTINGS = PublisherSettings(batch_keys=3, tail_keys=8)
tokens = st.lists(st.integers(0, 1), min_size=2, max_size=12)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("cache"), tokens),
        st.tuples(st.just("cache"), tokens),
        st.tuples(st.just("evict"), st.integers(1, 5)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("follow"), st.integers(1, 2)),
        st.tuples(st.just("lose a bit"), st.integers(0, 15)),
        st.tuples(st.just("cut"), st.sampled_from(["before", "after", ""])),
        st.tuples(st.just("directory"), st.sampled_from(["off", "on", "save"])),
        st.tuples(st.just("publisher"), st.booleans()),
        st.tuples(st.just("takeover"), st.none()),
        st.tuples(st.just("late writes"), st.none()),
        st.tuples(st.just("pool"), st.none()),
        st.tuples(st.just("wait"), st.floats(0.01, 5.0)),
    ),
    min_size=5,
    max_size=60,
)


BACK_WITH_AN_OLD_EPOCH: list[tuple[str, Any]] = [
    ("step", 2),
    ("directory", "save"),
    ("publisher", False),
    ("step", 4),
    ("directory", "off"),
    ("directory", "on"),
    ("step", 4),
]


class World:
    """A pool, its publisher, a directory with its switch, and a mirror."""

    def __init__(self, directory: Path, backend: Backend) -> None:
        self.backend = backend
        self.pool = PublishedPool(directory, backend.writer(), settings=SETTINGS, bounds=BOUNDS)
        self.listener = Listener(backend.reader())
        self.up = True

    def do(self, what: str, how: Any) -> None:
        pool = self.pool
        if what == "cache":
            pool.rig.cache(how)
        elif what == "evict":
            pool.rig.pool.evict(how)
        elif what == "step":
            pool.steps(how, 0.02)
        elif what == "follow":
            self.listener.follow(how)
        elif what == "lose a bit":
            pool.control.dirty[0] &= ~(1 << how)
        elif what == "cut":
            pool.writer.cut = how
        elif what == "publisher":
            pool.end(how)
            pool.begin()
        elif what == "takeover":
            pool.replace()
        elif what == "late writes":
            pool.step_replaced()
        elif what == "pool":
            self.restart_pool()
        elif what == "wait":
            pool.now += how
            self.listener.now += how
        else:
            self.switch(how)

    def restart_pool(self) -> None:
        """The process dies and another one adopts the region."""
        self.pool.end(goodbye=False)
        rig = self.pool.rig
        rig.pool.close()
        rig.pool = Pool.create(rig.region, clock=lambda: rig.now)
        self.pool.begin()

    def switch(self, how: str) -> None:
        if how == "save":
            if self.up:
                self.backend.save()
        elif how == "off":
            if self.up:
                self.backend.stop()
            self.up = False
        elif not self.up:
            self.backend.start()
            self.up = True

    def quiesce(self) -> None:
        self.switch("on")
        self.pool.writer.cut = ""
        self.pool.steps(40, 0.1)
        for _ in range(4):
            self.listener.catch_up()
            self.listener.now += 1.0
            self.pool.steps(3, 0.25)
        self.listener.follow()

    def close(self) -> None:
        self.pool.close()
        self.backend.close()


def run(world: World, todo: list[tuple[str, Any]]) -> None:
    try:
        for what, how in todo:
            world.do(what, how)
        world.quiesce()
        assert world.listener.difference(world.pool.indexed()) == ""
        view = world.listener.view()
        assert view is not None
        assert view.whole
        assert world.pool.publisher.stats().published_blocks == len(world.pool.indexed())
    finally:
        world.close()


def run_in(make: Callable[[Path], Backend], todo: list[tuple[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run(World(Path(directory), make(Path(directory))), todo)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(operations)
@example(BACK_WITH_AN_OLD_EPOCH)
def test_the_mirror_ends_up_with_the_truth(todo: list[tuple[str, Any]]) -> None:
    run_in(lambda directory: MemoryBackend(), todo)


@pytest.mark.redis
@settings(max_examples=12, deadline=None)
@given(operations)
@example(BACK_WITH_AN_OLD_EPOCH)
def test_the_mirror_ends_up_with_the_truth_through_redis(todo: list[tuple[str, Any]]) -> None:
    run_in(RedisBackend, todo)
