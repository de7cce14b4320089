"""A route service over a mirror that the test feeds by hand, in the test's own time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from kvpool.directory import LogEntry, Message, ReplicaLoad, Snapshot, StoredSnapshot
from router.booking_event import BookingEvent
from router.mirror import Mirror
from router.route_config import PolicyName, RouteConfig
from router.service import RouteService
from tests.fakes.speaker import Speaker, key

BLOCK_TOKENS = 16
FRESH_S = 3.0
CLOCK_S = 1234.5
"""The publishers' clocks are ahead by that much."""


class NoEnd:
    """The end of a speaker whose words are handed over by the test."""

    def open(self, snapshot: Snapshot) -> int:
        return 0

    def write(self, message: Message) -> int:
        return 0

    def replace_snapshot(self, snapshot: Snapshot) -> int:
        return 0

    def close(self) -> None: ...


class Recorder:
    """Metrics that keep what they were told, by name."""

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[Any, ...]]] = {
            name: [] for name in ("decided", "routed", "looked_up", "retried", "levels")
        }

    def decided(self, seconds: float) -> None:
        self.told["decided"].append((seconds,))

    def routed(self, outcome: str) -> None:
        self.told["routed"].append((outcome,))

    def looked_up(self, *tokens: int) -> None:
        self.told["looked_up"].append(tokens)

    def retried(self) -> None:
        self.told["retried"].append(())

    def levels(self, *levels: Any) -> None:
        self.told["levels"].append(levels)


class Scene:
    """Pools `p-r0`, `p-r1`, ..., one for each replica of which was heard, and those that replicas share."""

    def __init__(
        self,
        policy: PolicyName = "cost",
        directory: bool = True,
        seed: int = 1,
        announce: Callable[[BookingEvent], None] | None = None,
    ) -> None:
        self.now = 100.0
        self.mirror = Mirror()
        self.is_connected = True
        self.metrics = Recorder()
        self.position = 0
        self.speakers: dict[str, Speaker] = {}
        self.service = RouteService(
            self.mirror if directory else None,
            RouteConfig(policy, prefill_tokens_per_s=1000.0, tie_s=0.001),
            block_tokens=BLOCK_TOKENS,
            clock=lambda: self.now,
            rng=random.Random(seed),
            metrics=self.metrics,
            fresh_s=FRESH_S,
            connected=lambda: self.is_connected,
            announce=announce,
        )

    def hear(
        self,
        replica_id: str,
        held: Sequence[int] = (),
        pool: str = "",
        queued_prefill_tokens: int = 0,
        running: int = 0,
        late_s: float = 0.0,
    ) -> None:
        """The replica's own pool sends a heartbeat; it holds the keys with these numbers from its first one on.

        It looked at its load `late_s` ago.
        """
        load = ReplicaLoad(replica_id, queued_prefill_tokens, running)
        self.hear_shared(pool or f"p-{replica_id}", load, held=held, late_s=late_s)

    def hear_shared(
        self,
        pool: str,
        *replicas: ReplicaLoad,
        held: Sequence[int] = (),
        free_blocks: int = 1000,
        late_s: float = 0.0,
    ) -> None:
        """The same for a pool that these replicas share."""
        speaker = self.speakers.get(pool)
        if speaker is None:
            speaker = Speaker(NoEnd(), pool, len(self.speakers) + 1, 1)
            speaker.held = list(held)
            self.speakers[pool] = speaker
            self.mirror.load(StoredSnapshot(speaker.snapshot(), self.position), self.now)
        self.position += 1
        told_at = self.now - late_s + CLOCK_S
        beat = speaker.heartbeat(*replicas, free_blocks=free_blocks, lease_s=FRESH_S, told_at=told_at)
        self.mirror.apply(LogEntry(self.position, beat), self.now)
        self.mirror.note_progress(self.now, 0)

    def route(self, request_id: str, replica_ids: Sequence[str] = ("r0", "r1")) -> str:
        """The replica chosen."""
        return self.service.route(request_id, replica_ids).replica_id


def keys(*numbers: int) -> list[bytes]:
    """The keys with these numbers."""
    return [key(number) for number in numbers]


BOTH = ("r0", "r1")


def scene_with_prefix(policy: Any = "cost") -> Scene:
    """Both replicas are idle; r1 holds the keys 1 to 4."""
    return heard(Scene(policy))


def heard(scene: Scene) -> Scene:
    """The scene after the heartbeats of both."""
    scene.hear("r0")
    scene.hear("r1", held=[1, 2, 3, 4])
    return scene


def outcomes(scene: Scene) -> dict[str, int]:
    return {name: count for name, count in scene.service.report()["decisions"].items() if count}
