"""Telling the directory what this replica's pool holds, and how busy the replica is: a publisher in a thread of its own.

The thread has its own window on the region and never waits for the step thread. When it ends, for whatever reason, the pool
is missing from the directory once its lease is over, and the replica goes on serving.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvpool import Region
from kvpool.directory.backend import DirectoryWriter
from kvpool.directory.messages import Load
from kvpool.directory.publisher import Publisher, PublisherSettings
from kvpool.directory.publisher_thread import PublisherThread


class Publication:
    """Publishes `region` as the pool named `replica_id` from now on. Close it before the pool and the region."""

    def __init__(
        self,
        region: Region,
        replica_id: str,
        writer: DirectoryWriter,
        *,
        load: Callable[[], Load],
        lease_s: float,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Owns `writer`. `load` is called in the publisher's thread; `clock` gives monotonic seconds, `rng` nonces."""
        control = region.control()
        publisher = Publisher(
            control,
            replica_id,
            region.incarnation,
            writer,
            load=load,
            replica_ids=lambda: (replica_id,),
            clock=clock,
            rng=rng,
            settings=PublisherSettings(lease_s=lease_s, heartbeat_s=min(0.2, lease_s / 5)),
        )
        self._thread = PublisherThread(publisher, writer, control)

    def report(self) -> dict[str, Any]:
        """`PublisherStats` as a mapping; `state` is "ended" when the thread is no more."""
        stats = asdict(self._thread.stats())
        return stats if self._thread.alive else stats | {"state": "ended"}

    def close(self) -> None:
        """The pool leaves the directory now. Waits for the step in progress. Idempotent."""
        self._thread.close()
