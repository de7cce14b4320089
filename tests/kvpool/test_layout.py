from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool import BlockGeometry, layout

SMALL_MODEL = BlockGeometry(30, 3, 64, 16, "bfloat16")


@given(st.integers(1, 5000), st.integers(1, 64))
def test_parts_are_aligned_ordered_and_apart(capacity: int, block_tokens: int) -> None:
    geometry = BlockGeometry(1, 1, 3, block_tokens, "float16")
    plan = layout.plan(geometry, capacity)
    sizes = {name: width * capacity for name, width in layout.ARRAYS}
    sizes |= {"tokens": 4 * block_tokens * capacity, "free": 8 * plan.bitmap_words, "dirty": 8 * plan.bitmap_words}
    sizes["index"] = 8 * plan.index_entries
    end = layout.ARRAYS_OFFSET
    for name, offset in plan.offsets.items():
        assert offset % 64 == 0
        assert end <= offset < end + 64
        end = offset + sizes[name]
    assert end <= plan.control_bytes <= plan.kv_offset
    assert plan.kv_offset % 4096 == 0
    assert plan.kv_offset >= layout.HEADER_BYTES
    assert plan.kv_offset + capacity * geometry.block_bytes <= plan.file_bytes
    assert plan.index_entries >= 4 * capacity
    assert plan.index_entries & (plan.index_entries - 1) == 0
    assert 64 * plan.bitmap_words >= capacity


@pytest.mark.parametrize("capacity", [256, 4096, 100_000])
def test_control_part_is_small(capacity: int) -> None:
    plan = layout.plan(SMALL_MODEL, capacity)
    assert plan.control_bytes <= 0.003 * capacity * SMALL_MODEL.block_bytes


def test_large_regions_start_on_a_huge_page() -> None:
    assert layout.plan(SMALL_MODEL, 4096).kv_offset % (2 << 20) == 0


@pytest.mark.parametrize("capacity", [0, -1, 2**31 + 1])
def test_capacity_out_of_range(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"got {capacity}"):
        layout.plan(SMALL_MODEL, capacity)


def test_words_do_not_overlap() -> None:
    header = sorted(layout.HEADER_WORDS.values())
    assert len(set(header)) == len(header)
    assert layout.HEADER_WORDS["owner"] >= layout.HEADER_WORDS["fingerprint"] + layout.FINGERPRINT_BYTES // 8
    assert layout.HEADER_WORDS["check"] >= layout.HEADER_WORDS["owner"] + layout.OWNER_BYTES // 8
    assert max(header) < layout.HEADER_BYTES // 8
    assert layout.SLOT_WORDS["local_cache"] + layout.LOCAL_CACHE_BLOCKS <= layout.COUNTERS_WORD
    assert max(layout.SLOT_WORDS.values()) + layout.REPLICA_ID_BYTES // 8 <= layout.COUNTERS_WORD
    assert max(layout.COUNTERS.values()) < layout.HISTOGRAMS_WORD
    assert max(layout.HISTOGRAMS.values()) + layout.HISTOGRAM_BUCKETS < layout.SLOT_WORD_COUNT
    assert {value % 8 for name, value in layout.HEADER_WORDS.items() if value >= 24} == {0}


def test_digest_is_stable_and_notices_a_changed_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    before = layout.digest()
    assert before == layout.digest()
    monkeypatch.setattr(layout, "SLOT_BYTES", 1024)
    assert layout.digest() != before
