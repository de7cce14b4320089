"""A small pool on a file in a temporary directory, with a clock and a secret of its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from kvpool import BlockGeometry, BlockTable, KeyRoot, KeySpace, Pool, Region

FINGERPRINT = bytes(range(32))


class Rig:
    """A pool and what a request needs. Time stands still except when `tick` is called."""

    def __init__(self, directory: Path, capacity_blocks: int, block_tokens: int) -> None:
        self.geometry = BlockGeometry(1, 1, 4, block_tokens, "float32")
        self.now = 1000
        self.region = Region.create(
            directory, f"rig-{capacity_blocks}", self.geometry, capacity_blocks, FINGERPRINT, random.Random(7)
        )
        self.pool = Pool.create(self.region, clock=lambda: self.now)
        self.key_space = KeySpace(b"0123456789abcdef" * 2)
        self.root = self.key_space.root(KeyRoot("model", block_tokens, "float32"))
        self.damaged = False

    def tick(self) -> None:
        """One nanosecond goes by."""
        self.now += 1

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the full blocks of `tokens`."""
        return self.key_space.block_keys(self.root, tokens, self.geometry.block_tokens)

    def run(self, request_id: str, tokens: Sequence[int]) -> BlockTable:
        """A request with this prompt: matched, allocated, all full blocks sealed; the table is still open."""
        table = self.pool.table(request_id)
        keys = self.keys(tokens)
        matched = self.pool.match(table, keys, tokens)
        size = self.geometry.block_tokens
        assert self.pool.allocate(table, -(-len(tokens) // size) - matched)
        for position in range(matched, len(keys)):
            self.pool.seal(table, position, keys[position], tokens[position * size : position * size + size])
        return table

    def cache(self, tokens: Sequence[int]) -> list[int]:
        """Leaves the full blocks of `tokens` cached and idle; returns their numbers. A tick later."""
        table = self.run("cache", tokens)
        blocks = table.blocks[: len(table.keys)]
        self.pool.release(table)
        self.tick()
        return blocks

    def close(self) -> None:
        """Ends it, and fails if the pool is not what it claims to be."""
        if not self.region.closed:
            violation = "" if self.damaged else self.pool.check_integrity()
            if not self.damaged:
                self.pool.close()
            self.region.close()
            assert violation == ""


class MakeRig(Protocol):
    """What the `make_rig` fixture is."""

    def __call__(self, capacity_blocks: int = 8, block_tokens: int = 2) -> Rig: ...


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs; each must pass the integrity check at the end of its test, unless it was `damaged` on purpose."""
    rigs: list[Rig] = []

    def make(capacity_blocks: int = 8, block_tokens: int = 2) -> Rig:
        directory = tmp_path / f"pool{len(rigs)}"
        directory.mkdir()
        rigs.append(Rig(directory, capacity_blocks, block_tokens))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(make_rig: MakeRig) -> Rig:
    """Eight blocks of two tokens."""
    return make_rig()
