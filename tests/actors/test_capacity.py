"""Pool size and context length."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from actors.capacity import context_tokens, pool_blocks
from actors.config import PoolConfig
from kvpool import BlockGeometry, PoolError

_GEOMETRY = BlockGeometry(2, 2, 64, 16, "float32")  # 2,048 bytes a token


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free_bytes, f_frsize=1))


def test_an_explicit_size_is_rounded_up_to_blocks() -> None:
    assert pool_blocks(PoolConfig(tokens=100), _GEOMETRY, Path("/"), 2) == 7


def test_the_default_is_an_even_share_of_half_of_what_is_free_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 4 * 2048 * 1600)
    assert pool_blocks(PoolConfig(), _GEOMETRY, Path("/"), 2) == 100
    free(monkeypatch, 2**50)
    assert pool_blocks(PoolConfig(), _GEOMETRY, Path("/"), 2) == 65_536 // 16


def test_what_can_be_taken_back_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2048 * 1600)
    assert pool_blocks(PoolConfig(), _GEOMETRY, Path("/"), 2, 3 * 2048 * 1600) == 100


def test_too_little_memory_names_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 64 * 2**10)
    with pytest.raises(PoolError, match=r"pool\.tokens.*2048 bytes.*shm-size"):
        pool_blocks(PoolConfig(), _GEOMETRY, Path("/"), 2)


@pytest.mark.parametrize(
    ("model", "asked", "blocks", "wanted"),
    [(2048, 0, 1000, 2048), (2048, 512, 1000, 512), (0, 0, 10, 160), (99, 0, 5, 80)],
)
def test_the_context_is_the_least_of_the_limits(model: int, asked: int, blocks: int, wanted: int) -> None:
    assert context_tokens(model, asked, blocks, 16) == wanted
