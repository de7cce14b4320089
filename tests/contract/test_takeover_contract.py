"""What every directory must do for a region that several processes share: one publishes, another takes over."""

from __future__ import annotations

from pathlib import Path

from kvpool.directory import PoolLoad, ReplicaLoad
from kvpool.directory.publisher import PublisherSettings
from tests.contract.conftest import BOUNDS, Backend
from tests.fakes.listener import Listener
from tests.fakes.published_pool import CutWriter, PublishedPool

SETTINGS = PublisherSettings(batch_keys=3, tail_keys=8)
BOTH = (ReplicaLoad("r0", running=3), ReplicaLoad("r1", queued_prefill_tokens=90))


def test_the_directory_survives_the_death_of_the_one_that_publishes(backend: Backend, tmp_path: Path) -> None:
    pool = PublishedPool(tmp_path, backend.writer(), settings=SETTINGS, bounds=BOUNDS)
    writer = CutWriter(backend.writer())
    second = pool.rival(writer)
    listener = Listener(backend.reader())
    try:
        pool.load = PoolLoad(7, BOTH)
        pool.rig.cache([1, 2, 3, 4, 5, 6])
        pool.steps(3)
        second.step()
        assert second.stands_by
        listener.follow()
        pool.steps(1, 0.3)
        view = listener.follow().view()
        assert view is not None
        assert (view.replicas, view.free_blocks) == (BOTH, 7)

        # It dies: what it has taken and not said is known to nobody, and it frees what it held.
        pool.rig.cache([1, 2, 9, 9])
        pool.control.array("dirty")[:] = 0
        pool.rig.pool.evict(1)
        pool.role.free()
        pool.load = PoolLoad(8, BOTH[1:])
        for _ in range(3):
            pool.now += 0.1
            second.step()
        assert listener.catch_up().difference(pool.indexed()) == ""
        view = listener.view()
        assert view is not None
        assert (view.epoch, view.incarnation) == (second.stats().epoch, pool.rig.region.incarnation)
        assert (view.state, view.whole, view.replicas, view.free_blocks) == ("live", True, BOTH[1:], 8)
        assert listener.mirror.counts["replaced_writers"] == 1

        # It was only stopped: its late writes are refused, and it never writes again.
        said = len(pool.writer.written)
        for number in range(20):
            pool.rig.cache([1, 2, number % 4, 0])
            pool.steps(1, 0.05)
            second.step()
        assert len(pool.writer.written) == said
        assert (pool.publisher.stats().state, pool.publisher.stats().refused) == ("lost", {"epoch": 1})
        pool.publisher.close()
        for _ in range(3):
            pool.now += 0.3
            second.step()
        assert listener.catch_up().difference(pool.indexed()) == ""
        assert listener.mirror.counts["replaced_writers"] == 1
        assert listener.mirror.counts["digest_mismatches"] == 0
    finally:
        pool.close()
