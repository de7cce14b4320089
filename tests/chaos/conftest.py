"""One zygote for the session, and arenas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.chaos.arena import Arena, Zygote


class MakeArena(Protocol):
    """What the `make_arena` fixture is."""

    def __call__(self, seed: int, capacity_blocks: int = 64, *, create: bool = True) -> Arena: ...


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Compiling takes it tens of seconds on a busy machine, once."""
    one = Zygote(tmp_path_factory.mktemp("zygote") / "errors.log")
    try:
        one.wait_until_ready()
        yield one
    finally:
        one.close()


@pytest.fixture
def make_arena(zygote: Zygote, tmp_path: Path) -> Iterator[MakeArena]:
    """Makes arenas; afterwards all their workers are dead and their regions gone."""
    arenas: list[Arena] = []

    def make(seed: int, capacity_blocks: int = 64, *, create: bool = True) -> Arena:
        home = tmp_path / f"arena{len(arenas)}"
        home.mkdir()
        print(f"seed {seed}")
        arenas.append(Arena(zygote, home, seed, capacity_blocks))
        if create:
            arenas[-1].create()
        return arenas[-1]

    yield make
    for arena in arenas:
        arena.close()
