"""The router benchmark's way through Redis: a child with a pool, a mirror here, and nothing left behind."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cluster.bench import router_visible
from cluster.bench.pool_process import BenchFailed, Worker
from cluster.bench.router_plan import Plan
from cluster.bench.router_visible import SPACE, measure, redis_stats
from cluster.embedded_redis import EmbeddedRedis
from kvpool.directory.redis_backend import RedisReader

pytestmark = pytest.mark.redis
FIGURES = {
    "visible_p50_ms",
    "visible_p99_ms",
    "visible_batches",
    "redis_ops_per_request",
    "redis_bytes_per_request",
    "blind_ms",
}


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Regions lie in the directory that this returns."""
    directory = tmp_path / "shm"
    directory.mkdir()
    monkeypatch.setattr(router_visible, "DEFAULT_DIRECTORY", directory)
    return directory


def test_every_figure_and_nothing_left(shm: Path) -> None:
    told = measure(Plan(visible_s=0.3, batches_per_s=50.0, blind_keys=2000), lambda text: None)
    assert set(told) == FIGURES
    assert all(told[name] > 0 for name in FIGURES)
    assert told["visible_p50_ms"] <= told["visible_p99_ms"]
    assert told["visible_batches"] == 15
    assert told["redis_ops_per_request"] >= 1
    assert list(shm.iterdir()) == []


def test_a_child_publishes_seals_and_leaves(shm: Path, tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, "127.0.0.1") as server, Worker(None, "cluster.bench.router_worker") as child:
        where: dict[str, Any] = {"cluster_id": SPACE.cluster_id, "fingerprint": SPACE.model_fingerprint}
        where |= {"directory": str(shm), "name": "region", "blocks": 16}
        child.ask("publish", url=server.url, **where)
        reader = RedisReader(server.url, SPACE)
        assert [info.writer.pool for info in reader.pools()] == ["region"]
        start_ns = time.monotonic_ns()
        sealed = child.ask("seal", start_ns=start_ns, stop_ns=start_ns + 1, per_s=100.0, blocks=3)["sealed"]
        ((key, at_ns),) = sealed
        assert (len(bytes.fromhex(key)), at_ns >= start_ns) == (16, True)
        with pytest.raises(BenchFailed, match="did not give 17"):
            child.ask("seal", start_ns=0, stop_ns=1, per_s=1.0, blocks=17)
        child.ask("close")
        assert reader.pools() == []
        reader.close()


def test_a_redis_that_is_not_there() -> None:
    with pytest.raises(BenchFailed, match="does not tell its counters"):
        redis_stats("redis://:secret@127.0.0.1:1/0")
