"""Timing the start of a region, on one of a few blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.bench import pool_startup
from kvpool import PoolError, layout


def test_a_region_is_made_and_joined(tmp_path: Path) -> None:
    made = pool_startup.create(tmp_path, "large", 8)
    assert made["create_s"] > 0
    assert made["bytes"] == (tmp_path / "large").stat().st_size
    plan = layout.plan(pool_startup.GEOMETRY, 8)
    assert made["control_share"] == plan.control_bytes / (8 * pool_startup.GEOMETRY.block_bytes)
    assert pool_startup.attach(tmp_path / "large")["attach_s"] > 0
    with pytest.raises(PoolError):
        pool_startup.create(tmp_path, "large", 8)


@pytest.mark.parametrize(
    ("text", "blocks", "lacking"),
    [
        ("MemFree: 1 kB\nMemAvailable:   1048576 kB\n", 64, ""),
        ("MemFree: 9999999 kB\nMemAvailable:   1024 kB\n", 64, "memory has 1 MiB"),
        ("MemAvailable:   104857600000 kB\n", 1 << 28, "MiB free"),
        ("nothing known", 64, ""),
    ],
)
def test_no_room_is_said(tmp_path: Path, text: str, blocks: int, lacking: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(text)
    said = pool_startup.room_for(tmp_path, blocks, meminfo)
    assert lacking in said
    assert bool(said) is bool(lacking)


def test_a_machine_that_does_not_tell_its_memory(tmp_path: Path) -> None:
    assert pool_startup.room_for(tmp_path, 64, tmp_path / "none") == ""
