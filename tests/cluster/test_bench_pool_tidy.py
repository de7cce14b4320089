"""What each part of the tidy pass buys: nothing is usable before, everything after."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.bench.pool_tidy import DAMAGED_BLOCKS, PARTS, show


@pytest.mark.parametrize("part", PARTS)
def test_the_pass_makes_all_of_it_usable(part: str, tmp_path: Path) -> None:
    found = show(part, tmp_path, "region")
    assert found.pop("pass_ms") > 0
    assert found == {"damaged_blocks": DAMAGED_BLOCKS, "unusable_before": DAMAGED_BLOCKS, "unusable_after": 0}
    assert list(tmp_path.iterdir()) == []
