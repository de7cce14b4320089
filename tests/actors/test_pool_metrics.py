"""What is exported of a pool, with meters that only note."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

from actors import meters
from actors.meters import Meters
from actors.pool_metrics import PoolMetrics
from kvpool import BlockGeometry, Pool, Region

Exported = dict[tuple[str, ...], float]


class Noted:
    """A metric of any kind."""

    values: ClassVar[Exported] = {}

    def __init__(self, name: str, text: str, tag_keys: tuple[str, ...], **rest: Any) -> None:
        self.name, self.keys = name, tag_keys

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.default = tags

    def _at(self, tags: dict[str, str] | None) -> tuple[str, ...]:
        assert set(self.default) | set(tags or {}) == set(self.keys)
        return (self.name, *(tags or {}).values())

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[self._at(tags)] = value

    def inc(self, value: float = 1, tags: dict[str, str] | None = None) -> None:
        assert value > 0
        self.values[self._at(tags)] = self.values.get(self._at(tags), 0) + value


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Exported:
    """What has been exported, by name and tag values."""
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(meters, kind, Noted)
    monkeypatch.setattr(Noted, "values", {})
    return Noted.values


def test_a_pool_at_work(exported: Exported, tmp_path: Path) -> None:
    now = 0
    geometry = BlockGeometry(1, 1, 4, 2, "float32")
    with Region.create(tmp_path, "r", geometry, 8, bytes(32), random.Random(0)) as region:
        pool = Pool.create(region, clock=lambda: now)
        metrics = PoolMetrics(Meters({"model": "m", "replica_id": "r0"}))
        keys = [bytes([number]) * 16 for number in range(3)]
        table = pool.table("one")
        assert pool.allocate(table, 3)
        for position, key in enumerate(keys):
            pool.seal(table, position, key, [position, position])
        pool.release(table)
        now = 3_000_000_000
        again = pool.table("two")
        assert pool.match(again, keys) == 3
        for _ in range(2):
            metrics.report("home", pool.stats())  # a second report of the same totals adds nothing
        blocks = {tags[0]: value for (name, *tags), value in exported.items() if name == "kvatlas_kv_blocks"}
        assert blocks == {"free": 5, "local": 0, "mutable": 0, "sealed": 0, "held": 3, "cached": 0}
        assert exported["kvatlas_kv_allocated_blocks", "free"] == 3
        assert exported["kvatlas_kv_allocation_peak_blocks",] == 3
        assert exported["kvatlas_kv_block_reuse_gap_seconds_count",] == 3
        assert exported["kvatlas_kv_block_reuse_gap_seconds_bucket", "+Inf"] == 3
        assert exported["kvatlas_kv_block_reuse_gap_seconds_bucket", "4.29497"] == 3
        assert ("kvatlas_kv_block_reuse_gap_seconds_bucket", "2.14748") not in exported
        pool.give_up(again)
        now = 9_000_000_000
        pool.evict(2)
        metrics.report("home", pool.stats())
        assert exported["kvatlas_kv_evicted_blocks", "idle"] == 2
        assert exported["kvatlas_kv_evicted_blocks", "waiting"] == 3
        assert exported["kvatlas_kv_block_lifetime_seconds_count",] == 2
        assert exported["kvatlas_kv_block_lifetime_seconds_bucket", "17.1799"] == 2
        assert exported["kvatlas_kv_block_idle_before_evict_seconds_bucket", "8.58993"] == 2
        assert ("kvatlas_kv_evicted_while_held",) not in exported
        pool.close()


def test_a_sample_that_comes_late_takes_nothing_back(exported: Exported, tmp_path: Path) -> None:
    """Totals never fall and nothing is counted twice, whatever the order of the samples; levels are those of the last."""
    geometry = BlockGeometry(1, 1, 4, 2, "float32")
    with (
        Region.create(tmp_path, "r", geometry, 8, bytes(32), random.Random(0)) as region,
        Pool.create(region) as pool,
    ):
        metrics = PoolMetrics(Meters({"model": "m", "replica_id": "r0"}))
        samples = [pool.stats()]
        for _ in range(2):
            with pool.table("r") as table:
                assert pool.allocate(table, 3)
                samples.append(pool.stats())
        for number in (1, 0, 2, 1, 2, 0):
            metrics.report("home", samples[number])
            levels = [value for (name, *_), value in exported.items() if name == "kvatlas_kv_blocks"]
            assert sum(levels) == 8
            assert min(levels) >= 0
        assert exported["kvatlas_kv_allocated_blocks", "free"] == 3
        assert exported["kvatlas_kv_allocated_blocks", "local"] == 3
        assert exported["kvatlas_kv_blocks", "free", "home"] == 8
