"""The engine as a Serve deployment: the thin class between Ray and `actors.replica.Replica`.

Whoever only deploys it (the command line, the builder of a Serve config) imports neither torch nor transformers: the replica
and everything heavy is imported where it is built.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from ray import serve

from actors.config import ReplicaConfig
from actors.progress import SilentProgress
from actors.request import GenerateRequest
from actors.status import ReplicaStatus
from cluster import membership
from cluster.event_wire import pack
from cluster.process_memory import HeapTrim, forget_start
from kvpool.directory import DirectoryWriter, Space


class EngineDeployment:
    """One `Replica` under the id that Serve gave this actor."""

    def __init__(self, config: ReplicaConfig, model_dir: str) -> None:
        progress = SilentProgress()
        with progress.phase("import"):
            from actors.metrics import RayMetrics
            from actors.replica import Replica
        self._trim = HeapTrim()
        replica_id = serve.get_replica_context().replica_id.unique_id
        self._replica = Replica(
            replace(config, membership=membership.joined(config.membership)),
            model_dir,
            replica_id=replica_id,
            metrics=RayMetrics(config.model.served_name, replica_id),
            progress=progress,
            directory=_writer(config.directory.redis_url),
        )
        forget_start()

    async def generate(self, request: GenerateRequest, predicted_tokens: int = 0) -> AsyncGenerator[bytes]:
        """See `Replica.generate`; its events are packed (`event_wire.py`).

        Closing this generator, as Serve does when a caller leaves, closes the replica's at once.
        """
        async with contextlib.aclosing(self._replica.generate(request, predicted_tokens)) as events:
            async for event in events:
                yield pack(event)

    async def indexed_keys(self) -> tuple[str, bytes]:
        """The replica's id, and `Replica.indexed_keys`."""
        return self._replica.replica_id, await self._replica.indexed_keys()

    async def status(self) -> ReplicaStatus:
        """See `Replica.status`."""
        return await self._replica.status()

    async def check_health(self) -> None:
        """See `Replica.check_health`; Serve calls this name."""
        await self._replica.check_health()

    def __del__(self) -> None:
        """Serve calls this when the requests in progress are done: the last moment to give the region back."""
        for name in ("_replica", "_trim"):  # the constructor may have failed
            part = getattr(self, name, None)
            if part is not None:
                part.close()


def _writer(redis_url: str) -> Callable[[Space], DirectoryWriter] | None:
    """What opens the directory at `redis_url` for writing; None where there is none."""
    if not redis_url:
        return None
    from kvpool.directory.redis_backend import RedisWriter

    return lambda space: RedisWriter(redis_url, space, random.SystemRandom())
