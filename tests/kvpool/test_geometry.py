from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from kvpool import BlockGeometry

SMALL_MODEL = BlockGeometry(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")


def test_bytes() -> None:
    assert SMALL_MODEL.token_bytes == 30 * 2 * 3 * 64 * 2 == 23040
    assert SMALL_MODEL.block_bytes == 16 * 23040
    assert replace(SMALL_MODEL, dtype="float32").block_bytes == 2 * SMALL_MODEL.block_bytes


def test_article_numbers() -> None:
    # 32 layers, hidden 4096, fp16: 512 KiB a token.
    assert BlockGeometry(32, 32, 128, 16, "float16").token_bytes == 512 * 1024


def test_shape_is_head_major() -> None:
    assert SMALL_MODEL.shape == (30, 2, 3, 16, 64)


@pytest.mark.parametrize("zero", range(4))
def test_counts_must_be_positive(zero: int) -> None:
    counts = [0 if position == zero else 2 for position in range(4)]
    name = ("layers", "kv_heads", "head_dim", "block_tokens")[zero]
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        BlockGeometry(counts[0], counts[1], counts[2], counts[3], "float32")


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        replace(SMALL_MODEL, dtype="int8")


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        SMALL_MODEL.layers = 2  # type: ignore[misc]


def test_describe_has_the_numbers() -> None:
    assert SMALL_MODEL.describe() == "30 layers x 3 KV heads x 64 bfloat16, 16 tokens = 368640 bytes a block"
