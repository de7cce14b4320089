"""A replica that computes nothing: what the HTTP benchmark puts in the place of the engine.

To the ingress and the router it is one of the product's: it answers `status`, has a pool in shared memory, publishes it in the
directory with its load, and sends one `Admitted`, then a `Delta` per token. Tokens come at a fixed pace, counted from the
arrival of the request, so that a late one does not delay the rest.

A prompt's blocks are sealed when it is first seen, and are cached from then on. What a request generates is not.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from ray import serve

from actors.config import ReplicaConfig
from actors.publication import Publication
from actors.region_home import owner_tag
from actors.request import Admitted, Delta, GenerateRequest
from actors.status import ReplicaStatus
from cluster import membership
from cluster.bench.http_plan import MARK
from cluster.event_wire import pack
from kvpool import DEFAULT_DIRECTORY, REGION_PREFIX, BlockGeometry, KeyRoot, KeySpace, Pool, Region
from kvpool.directory import PoolLoad, ReplicaLoad, Space
from kvpool.directory.redis_backend import RedisWriter

FINGERPRINT: Final = bytes(range(32))
CONTEXT_TOKENS: Final = 4096
_BLOCKS: Final = 4096
_RATE: Final = 10_000.0
"""Prefill tokens a second that it claims to do, for the router to reckon with."""
_TOKEN: Final = 1
_REMEMBERED: Final = 1024
"""Prompts that are not looked up again; of clients that never repeat one, all would be kept."""


class ScriptedEngine:
    """The deployment. `cadence_s` is the time between two tokens."""

    def __init__(self, config: ReplicaConfig, model_path: str, cadence_s: float) -> None:
        """As `EngineDeployment`, which loads the model at `model_path`; tokens come every `cadence_s`."""
        del model_path
        member = membership.joined(config.membership)
        rng = random.SystemRandom()
        self._cadence_s = cadence_s
        self._geometry = BlockGeometry(1, 1, 1, config.pool.block_tokens, "float32")
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._running = 0
        self._seen: set[tuple[int, ...]] = set()
        self._keys = KeySpace(member.secret)
        name = f"{REGION_PREFIX}bench-{secrets.token_hex(6)}"
        self._region = Region.create(
            DEFAULT_DIRECTORY, name, self._geometry, _BLOCKS, FINGERPRINT, rng, owner_tag(member.secret)
        )
        self._pool = Pool.create(self._region)
        space = Space(member.cluster_id, FINGERPRINT.hex(), config.pool.block_tokens)
        self._publication = Publication(
            self._region,
            name.removeprefix(REGION_PREFIX),
            RedisWriter(config.directory.redis_url, space, rng),
            load=self._load,
            lease_s=config.directory.lease_s,
            clock=time.monotonic,
            rng=rng,
        )

    def _load(self) -> PoolLoad:
        """Called by the publisher's thread."""
        mine = ReplicaLoad(self._replica_id, 0, self._running, 0, _RATE)
        return PoolLoad(self._pool.unused(), (mine,))

    async def generate(self, request: GenerateRequest, predicted_tokens: int = 0) -> AsyncGenerator[bytes]:
        """One `Admitted`, then a `Delta` each `cadence_s` seconds until there are as many tokens as the request may have."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        prompt, limit = request.prompt_token_ids, request.sampling.max_tokens
        self._running += 1
        try:
            yield pack(Admitted(self._replica_id, len(prompt), self._cached_tokens(request)))
            for number in range(1, limit + 1):
                await asyncio.sleep(begun + number * self._cadence_s - loop.time())
                yield pack(Delta(MARK, (_TOKEN,), "length" if number == limit else None))
        finally:
            self._running -= 1

    def _cached_tokens(self, request: GenerateRequest) -> int:
        """Whole blocks of the prompt that were there when it came, the last token's not among them; now they are."""
        size, prompt = self._geometry.block_tokens, request.prompt_token_ids
        if prompt in self._seen:
            return (len(prompt) - 1) // size * size
        root = self._keys.root(KeyRoot(FINGERPRINT.hex(), size, self._geometry.dtype, salt=request.salt))
        keys = self._keys.block_keys(root, prompt, size)
        with self._pool.table(request.request_id) as table:
            matched = self._pool.match(table, keys, prompt)
            if self._pool.allocate(table, len(keys) - matched):
                for at in range(matched, len(keys)):
                    self._pool.seal(table, at, keys[at], prompt[at * size : (at + 1) * size])
                if len(self._seen) < _REMEMBERED:
                    self._seen.add(prompt)
        return min(matched, (len(prompt) - 1) // size) * size

    async def status(self) -> ReplicaStatus:
        """As a replica would answer."""
        stats = self._pool.stats()
        return ReplicaStatus(
            replica_id=self._replica_id,
            pid=os.getpid(),
            model="",
            mode="fast",
            fingerprint=FINGERPRINT.hex(),
            kv_dtype=self._geometry.dtype,
            block_tokens=self._geometry.block_tokens,
            capacity_blocks=self._pool.capacity_blocks,
            blocks=dict(stats.blocks),
            held_blocks=self._pool.held_blocks(),
            running=self._running,
            waiting=0,
            prefix_queried_tokens=stats.prefix_queried_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            max_model_len=CONTEXT_TOKENS,
            asyncio_tasks=len(asyncio.all_tasks()),
            integrity="",
            stalled_s=0.0,
            load_s={},
            load_bytes={},
            publisher=self._publication.report(),
            pool=self._region.path.name.removeprefix(REGION_PREFIX),
        )

    def __del__(self) -> None:
        """Serve calls this when the requests in progress are done."""
        publication: Any = getattr(self, "_publication", None)  # the constructor may have failed
        if publication is not None:
            publication.close()
            self._pool.close()
            self._region.leave()
