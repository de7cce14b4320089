"""Matrix tiles, where the CPU has them. What they compute is tested with the products they are for (`test_panels.py`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors import tiles
from kvpool.compiled import inner

needs_tiles = pytest.mark.skipif(not tiles.supported(), reason="this CPU, or its system, has no tiles of bfloat16")


@inner
def _three(first: int, second: int, third: int) -> None:
    """Whoever comes second finds the tiles of the first set, and leaves them so."""
    tiles.begin_tiles(3, first)
    tiles.begin_tiles(7, second)
    tiles.end_tiles(second)
    tiles.begin_tiles(5, third)
    tiles.end_tiles(third)
    tiles.end_tiles(first)


@inner
def _look(space: int) -> None:
    tiles.begin_tiles(1, space)
    tiles.end_tiles(space)


@needs_tiles
def test_what_another_library_has_set_is_put_back() -> None:
    first, second, third, after = (np.zeros(128, np.uint8) for _ in range(4))
    _three(first.ctypes.data, second.ctypes.data, third.ctypes.data)
    assert first[64:].tolist() == [0] * 64
    assert second[64:].tolist() == third[64:].tolist() == first[:64].tolist()
    assert [int(first[48 + register]) for register in range(5)] == [3, 3, 3, 16, 16]
    _look(after.ctypes.data)
    assert after[64:].tolist() == [0] * 64  # and nothing where nothing was


@pytest.mark.parametrize(
    ("system", "features"),
    [("Darwin", {"amx-tile": True, "amx-bf16": True}), ("Linux", {"amx-tile": True}), ("Linux", {})],
)
def test_without_them_they_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, system: str, features: dict[str, bool]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a system call")

    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert not tiles.supported.__wrapped__()


def test_a_system_that_gives_none_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    class System:
        def syscall(self, *_: Any) -> int:
            return -1

    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"amx-tile": True, "amx-bf16": True})
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: System())
    assert not tiles.supported.__wrapped__()
