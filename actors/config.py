"""Settings of one replica. `cluster.config` fills them from YAML, environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["exact", "fast"]
Scope = Literal["replica", "node"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and under what name clients ask for it."""

    model: str = "demo"
    """`demo` (SmolLM2-135M-Instruct from a PyPI wheel), a local directory, or a hub id."""
    served_name: str = ""
    """Name in /v1/models and in requests. Empty: the hub id, the directory's last part, or the demo model's name."""
    max_model_len: int = 0
    """Longest prompt + output, in tokens. 0: what the model's config allows, bounded by the pool."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The step loop of one replica."""

    mode: Mode = "fast"
    """`fast`: bfloat16 weights and KV. `exact`: float32 everywhere, token for token what `model.generate` gives."""
    deterministic: bool = False
    """A request's tokens depend on the request alone: not on its company, how its prompt is cut, what of it is cached, or which
    replica answers. Slower; mode `fast` only."""
    threads: int = 0
    """Threads of each replica's kernels. 0: an even share of all cores but one, at least one; the HTTP side needs the rest."""
    step_tokens: int = 256
    """Most tokens (decodes + prompt chunks) computed in one step. Larger: faster prefill, longer pauses between tokens."""
    max_running: int = 32
    """Most requests computed together."""
    max_waiting: int = 1024
    """Requests that may wait for a place; one more is answered 503."""
    stall_s: float = 60.0
    """Health fails when the step thread has work but finishes no step for this long."""
    stream_interval_s: float = 0.0
    """A request's tokens leave the replica at most this often, the first and the last at once. 0: each as it comes. Where
    replicas and ingress share few cores, 0.04 leaves more of them to the replicas."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The replica's block pool."""

    block_tokens: int = 16
    """Tokens per block. Prefixes are shared in whole blocks."""
    tokens: int = 0
    """Size of each replica's pool, in tokens. 0: an even share of half the free shared memory, at most 65,536 tokens."""
    scope: Scope = "replica"
    """Who shares a pool: `replica` gives each its own, `node` one to all replicas of a machine, as large as theirs together."""
    orphan_ttl_s: float = 600.0
    """A pool whose processes all died waits this long in shared memory for a replica that takes it over warm."""
    tidy_s: float = 0.3
    """Seconds between two passes that give back what dead processes held and repair what they left half done."""
    guard: bool = False
    """Verify blocks on their way; a stray write ends the replica, with block and request named. Slower; to find faults."""


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """The directory: which pool holds which blocks. Without it requests are routed by load only."""

    redis_url: str = field(default="", repr=False, metadata={"secret": True})
    """Redis 6.2 or newer, as redis://, rediss:// or unix://. Empty: `kvatlas serve` starts a private one."""
    lease_s: float = 3.0
    """A pool that has not been heard of for this long gets no requests, and a directory no trust."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The cluster that a replica belongs to. `replicas` share its machine. `secret`: of the block keys, 16 to 64 bytes."""

    cluster_id: str = "local"
    secret: bytes = field(default=b"", repr=False)
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """Everything a replica needs to start."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    pool: PoolConfig = PoolConfig()
    directory: DirectoryConfig = DirectoryConfig()
    membership: Membership = Membership()
