"""Telling the directory what this replica's pool holds, and how busy its replicas are: a publisher in a thread of its own.

Where several processes share a region, one of them publishes it, the one that has the region's role for that; the others
stand by and take over when it leaves or dies. The thread has its own window on the region and never waits for the step
thread. When it ends, for whatever reason, it gives the role up; without another process the pool is missing from the
directory once its lease is over, and the replica goes on serving.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvpool import Region
from kvpool.directory.backend import DirectoryWriter
from kvpool.directory.messages import PoolLoad
from kvpool.directory.publisher import Publisher, PublisherSettings
from kvpool.directory.publisher_thread import PublisherThread


class Publication:
    """Publishes `region` as the pool named `pool` from now on, or stands by. Close it before the pool and the region."""

    def __init__(
        self,
        region: Region,
        pool: str,
        writer: DirectoryWriter,
        *,
        load: Callable[[], PoolLoad],
        stand_by: Callable[[], None] = lambda: None,
        lease_s: float,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        """Owns `writer`. In the publisher's thread `load` is called while this process publishes, and `stand_by` several times a
        second while another does. `clock` gives monotonic seconds, `rng` nonces.
        """
        self._region = region

        def may_open() -> bool:
            if region.try_lead("publisher"):
                return True
            stand_by()
            return False

        control = region.control()
        publisher = Publisher(
            control,
            pool,
            region.incarnation,
            writer,
            load=load,
            clock=clock,
            rng=rng,
            settings=PublisherSettings(lease_s=lease_s, heartbeat_s=min(0.2, lease_s / 5)),
            may_open=may_open,
        )
        self._thread = PublisherThread(publisher, writer, control, on_failure=lambda error: region.resign("publisher"))

    def report(self) -> dict[str, Any]:
        """`PublisherStats` as a mapping; `state` is "ended" when the thread is no more."""
        stats = asdict(self._thread.stats())
        return stats if self._thread.alive else stats | {"state": "ended"}

    def close(self) -> None:
        """Ends this process's part: the pool leaves the directory now, unless others share the region, of whom one goes on.

        Waits for the step in progress. Idempotent.
        """
        if not self._region.closed:
            self._thread.close(goodbye=self._region.alone())
            self._region.resign("publisher")
