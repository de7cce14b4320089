"""The whole configuration as one frozen value. `cluster.config_sources` fills it; every field is an option.

A field's docstring is its documentation: `kvatlas config --example` prints it, and `deploy/config.example.yaml` is that
output. The path of an option (`pool.tokens`) is also its place in the YAML file and, as `KVATLAS_POOL__TOKENS`, its
environment variable.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from actors.config import EngineConfig, ModelConfig, PoolConfig, ReplicaConfig


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Where and how clients reach the server."""

    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` opens the server to the network: there is no authentication of clients yet."""
    port: int = 8000
    """TCP port of the API."""
    admin_key: str = field(default="", repr=False, metadata={"secret": True})
    """Key for the admin endpoints, sent as `Authorization: Bearer KEY`. Empty: the admin endpoints are off."""
    admin_key_file: str = ""
    """File that holds the admin key, so that it appears in no process list. Give this or `admin_key`, not both."""
    max_body_bytes: int = 8_388_608
    """Larger request bodies are answered 413."""


@dataclass(frozen=True, slots=True)
class RayConfig:
    """The Ray cluster underneath."""

    address: str = ""
    """Address of a running Ray cluster to join (`auto` finds one on this machine). Empty: a private one is started here."""
    object_store_bytes: int = 268_435_456
    """Shared memory for Ray's object store in a private cluster. The pools need the rest of /dev/shm."""
    metrics_port: int = 0
    """Port of the Prometheus endpoint of a private cluster. 0: 8080 where free, else any free port."""
    start_timeout_s: float = 600.0
    """Give up when the server is not ready after this many seconds."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything kvatlas can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def replica(self, served_name: str) -> ReplicaConfig:
        """The part that a replica needs, with the model's name decided."""
        return ReplicaConfig(replace(self.model, served_name=served_name), self.engine, self.pool)
