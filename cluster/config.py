"""The whole configuration as one frozen value. `cluster.config_sources` fills it; every field is an option.

A field's docstring is its documentation: `kvatlas config --example` prints it, and `deploy/config.example.yaml` is that
output. The path of an option (`pool.tokens`) is also its place in the YAML file and, as `KVATLAS_POOL__TOKENS`, its
environment variable.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from actors.config import DirectoryConfig, EngineConfig, Membership, ModelConfig, PoolConfig, ReplicaConfig
from router.route_config import RouteConfig


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many replicas, and what makes them one cluster."""

    replicas: int = 2
    """Replicas behind the endpoint, each with a pool of its own."""
    id: str = ""
    """Names this cluster in a Redis that several share. Empty: the id of the Ray session."""
    secret: str = field(default="", repr=False, metadata={"secret": True})
    """Secret of the block keys, at least 16 characters, the same at every start. Empty: a random one, kept in the cache."""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Where and how clients reach the server."""

    host: str = "127.0.0.1"
    """Address to listen on. `0.0.0.0` opens the server to the network: give `api_keys` first, and read SECURITY.md."""
    port: int = 8000
    """TCP port of the API."""
    admin_key: str = field(default="", repr=False, metadata={"secret": True})
    """Key for the admin endpoints, sent as `Authorization: Bearer KEY`. Empty: the admin endpoints are off."""
    admin_key_file: str = ""
    """File that holds the admin key, so that it appears in no process list. Give this or `admin_key`, not both."""
    api_keys: str = field(default="", repr=False, metadata={"secret": True})
    """Who may use the API: NAME:KEY or NAME:sha256:HEX for each client, separated by blanks or newlines. Clients send
    `Authorization: Bearer KEY`. Empty, and no `api_keys_file`: everybody may."""
    api_keys_file: str = ""
    """File with such a list, which the ingress reads again when it changes. Give this or `api_keys`, not both."""
    salt_per_key: bool = False
    """Nothing that one NAME computes is found cached by another, and replies tell nothing of caches. Needs API keys."""
    queue_tokens: int = 16_777_216
    """Tokens (prompts and the longest answers) of all requests that no replica has admitted yet; what exceeds it is answered
    503. 0: no limit."""
    key_queue_tokens: int = 4_194_304
    """The share of that which one NAME of `api_keys` may have; what exceeds it is answered 429. 0: no limit."""
    inflight_tokens: int = 1_048_576
    """So many of those tokens are passed to the replicas' own waiting lines; the rest waits in front, where NAMES take turns.
    0: no limit, and whoever comes first is served first."""
    request_timeout_s: float = 0.0
    """A request that is not finished after so many seconds is ended. 0: it may take as long as it takes."""
    keep_alive_s: float = 15.0
    """A stream that has nothing to send for so many seconds sends a comment, for proxies that close silent ones. 0: never."""
    allow_priority: bool = False
    """Requests may set `priority`. Only where all clients are trusted not to put themselves first."""
    cors_origins: str = ""
    """Origins of web pages that may use the API, such as https://chat.example.com, separated by blanks."""
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
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    directory: DirectoryConfig = field(default_factory=DirectoryConfig)
    router: RouteConfig = field(default_factory=RouteConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    def replica(self, served_name: str, membership: Membership) -> ReplicaConfig:
        """The part that a replica needs, with the model's name and the cluster decided."""
        model = replace(self.model, served_name=served_name)
        return ReplicaConfig(model, self.engine, self.pool, self.directory, membership)
