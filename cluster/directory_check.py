"""Is the directory right? Three pictures of every pool, compared: the pool itself, the directory read afresh, and our mirror.

The pictures are taken one after the other while requests go on, so a difference may be a change on its way. One that is
still there a second later is a fault. A replica's pool is the one whose heartbeats name the replica; several replicas may have
the same one. Pools of others that share the directory get no requests from us and are not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvpool.directory import DirectoryReader, DirectoryUnavailable
from kvpool.directory.messages import split_keys
from router.follower import Follower
from router.mirror import Mirror
from router.mirror_check import Difference, check

_EXAMPLES = 5
_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolCheck:
    """One replica's pool: how many blocks it has indexed, and the keys that the directory and the mirror lack or make up.

    `pool` is empty where neither the directory nor the mirror knows of a pool with this replica.
    """

    pool: str
    replica_id: str
    pool_blocks: int
    directory_missing: int
    directory_phantom: int
    mirror_missing: int
    mirror_phantom: int
    examples: tuple[str, ...]


def compare(truth: Mapping[str, bytes], mirror: Mirror, open_reader: Callable[[], DirectoryReader]) -> list[PoolCheck]:
    """Compares the packed keys of each replica's pool in `truth`, by replica, with the directory and with `mirror`.

    Blocks; call it in a thread. Raises `DirectoryUnavailable`.
    """
    reader = open_reader()
    try:
        fresh = _read_afresh(reader)
    finally:
        reader.close()
    now = time.monotonic()
    found = []
    for replica_id, packed in sorted(truth.items()):
        keys = split_keys(packed)
        pool = _pool_of(replica_id, now, fresh, mirror)
        stored, mirrored = check(fresh, pool, keys), check(mirror, pool, keys)
        found.append(
            PoolCheck(
                pool=pool,
                replica_id=replica_id,
                pool_blocks=len(keys),
                directory_missing=len(stored.missing),
                directory_phantom=len(stored.phantom),
                mirror_missing=len(mirrored.missing),
                mirror_phantom=len(mirrored.phantom),
                examples=_examples(stored, mirrored),
            )
        )
    return found


def _pool_of(replica_id: str, now: float, *mirrors: Mirror) -> str:
    """The name of the replica's pool, from the first mirror that knows it; '' where none does."""
    for mirror in mirrors:
        for view in mirror.pools(now):
            if replica_id in view.replica_ids:
                return view.pool
    return ""


def _read_afresh(reader: DirectoryReader) -> Mirror:
    """A mirror of what the directory says now, from its snapshots and its log."""
    mirror = Mirror()
    follower = Follower(reader, mirror, time.monotonic)
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        if not follower.step(0.0) and not follower.connected:
            raise DirectoryUnavailable(follower.problem or "the directory does not answer")
        if mirror.lag_s(time.monotonic()) < _LONGEST_S and mirror.lag_entries() == 0:
            return mirror
    raise DirectoryUnavailable(f"the directory could not be read to its end within {_LONGEST_S:g} s: try again")


def _examples(*differences: Difference) -> tuple[str, ...]:
    keys = [key.hex() for difference in differences for key in (*difference.missing, *difference.phantom)]
    return tuple(dict.fromkeys(keys))[:_EXAMPLES]
