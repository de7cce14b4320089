"""Five minutes of five hundred streams on two replicas: memory stays, health stays, and everything is given back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cluster import ports
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint
from tests.loads.crowd import Crowd, run_crowd
from tests.loads.memory import MemoryLog
from tests.loads.storm import debug_state, settled
from tests.raycluster.server_process import Server, clean_environment, regions

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(1200)]

ADMIN_KEY = "soak-admin-key"
MODEL = "tiny"
CLIENTS = 500
SECONDS = 300.0
WARM_S = 120.0
MIB = 1 << 20
OPTIONS = ("--threads", "1", "--pool-tokens", "65536", "--set", "engine.max_running=256")


@dataclass(frozen=True, slots=True)
class Running:
    """A server of the tiny model."""

    url: str
    pid: int


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Two replicas with room for all the streams; nothing of it is left afterwards."""
    before = regions()
    model = save_tiny_checkpoint(tmp_path / MODEL, context_tokens=2048)
    port = ports.choose("127.0.0.1", 0)
    env = clean_environment(tmp_path) | {"KVATLAS_HTTP__ADMIN_KEY": ADMIN_KEY}
    server = Server(env, str(model), "--port", str(port), *OPTIONS)
    try:
        server.wait_for("Stop with Ctrl-C")
        yield Running(f"http://127.0.0.1:{port}", server.process.pid)
    finally:
        server.close()
    assert regions() <= before


def fill_what_is_bounded(url: str) -> None:
    """A tokenizer remembers the first 10,000 words that it sees, 7 MB of them, and no more.

    The crowd's prompts would fill that in six minutes; what grows after this grows for ever.
    """
    rng = random.Random(2)
    for _ in range(60):
        text = " ".join(str(rng.random()) for _ in range(200))
        httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=60).raise_for_status()


def test_five_hundred_streams(running: Running, capsys: pytest.CaptureFixture[str]) -> None:
    fill_what_is_bounded(running.url)
    asyncio.run(run_crowd(Crowd(running.url, MODEL, clients=8, seconds=3, seed=1)))
    before = settled(running.url, ADMIN_KEY, debug_state(running.url, ADMIN_KEY), within_s=30)
    with MemoryLog(running.pid).running() as memory:
        outcomes = asyncio.run(run_crowd(Crowd(running.url, MODEL, CLIENTS, SECONDS)))
    growth = {name: found / MIB for name, found in memory.growth_per_min(WARM_S).items()}
    with capsys.disabled():
        print(f"\n{dict(outcomes.results)}, at most {outcomes.most_at_once} at once, {outcomes.checks} health checks")
        for name, found in sorted(growth.items(), key=lambda item: -item[1]):
            print(f"{found:8.3f} MiB/min  {name}")
    settled(running.url, ADMIN_KEY, before, within_s=60)
    assert outcomes.ill == []
    assert set(outcomes.results) == {"answered", "answered slowly", "left", "refused"}
    assert outcomes.results["refused"] >= 0.05 * outcomes.results.total()
    assert outcomes.most_at_once >= CLIENTS / 2
    assert any(name.startswith("ray::ServeReplica") for name in growth)
    assert {name: found for name, found in growth.items() if found > 1.0} == {}
