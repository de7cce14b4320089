"""The small pool of tests/kvpool, for the tests that go all the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvpool.conftest import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Eight blocks of two tokens."""
    made = Rig(tmp_path, 8, 2)
    yield made
    made.close()
