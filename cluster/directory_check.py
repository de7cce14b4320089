"""Is the directory right? Each pool's own blocks against the directory, read afresh, and against the mirror of every router.

The pictures are taken one after the other while requests go on, so a difference may be a change on its way. One that is
still there a second later is a fault. A replica's pool is the one whose heartbeats name the replica. Replicas that share
a pool have each told what is in it, a moment apart: a key is missing somewhere only if all of them told of it, phantom
only if none did. Pools of others that share the directory get no requests from us and are not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.mirror_picture import MirrorPicture
from kvpool.directory import DirectoryReader, DirectoryUnavailable
from kvpool.directory.digest import digest_of
from kvpool.directory.messages import split_keys
from kvpool.keys import KEY_BYTES
from router.follower import Follower
from router.mirror import Mirror

DIRECTORY = "directory"
_EXAMPLES = 5
_LONGEST_S = 10.0


@dataclass(frozen=True, slots=True)
class PlaceCheck:
    """How one place differs from a pool: how many keys it lacks and makes up, and some of them.

    `place` is "directory", or the id of the router whose mirror it is.
    """

    place: str
    missing: int
    phantom: int
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolCheck:
    """One pool: who shares it, how many blocks it has indexed, and how each place differs, the directory first.

    `pool` is empty where neither the directory nor a mirror knows of a pool with this replica.
    """

    pool: str
    replica_ids: tuple[str, ...]
    pool_blocks: int
    places: tuple[PlaceCheck, ...]


def compare(
    truth: Mapping[str, bytes], pictures: Sequence[MirrorPicture], open_reader: Callable[[], DirectoryReader]
) -> list[PoolCheck]:
    """Compares the packed keys of each replica's pool in `truth`, by replica, with the directory and with `pictures`.

    Blocks; call it in a thread. Raises `DirectoryUnavailable`.
    """
    reader = open_reader()
    try:
        fresh = _read_afresh(reader)
    finally:
        reader.close()
    homes = _homes(fresh, pictures)
    by_pool: dict[tuple[str, str], list[str]] = {}
    for replica_id in sorted(truth):
        pool = homes.get(replica_id, "")
        by_pool.setdefault((pool, "" if pool else replica_id), []).append(replica_id)
    return [
        _pool_check(pool, replica_ids, [truth[name] for name in replica_ids], fresh, pictures)
        for (pool, _), replica_ids in sorted(by_pool.items())
    ]


def _homes(fresh: Mirror, pictures: Sequence[MirrorPicture]) -> dict[str, str]:
    """The pool of each replica that one of them knows; the directory's word counts first, then the pictures' in order."""
    homes: dict[str, str] = {}
    for view in fresh.pools(time.monotonic()):
        for replica_id in view.replica_ids:
            homes.setdefault(replica_id, view.pool)
    for picture in pictures:
        for pool, seen in picture.pools.items():
            for replica_id in seen.replica_ids:
                homes.setdefault(replica_id, pool)
    return homes


def _pool_check(
    pool: str, replica_ids: list[str], told: list[bytes], fresh: Mirror, pictures: Sequence[MirrorPicture]
) -> PoolCheck:
    places = [_compared(DIRECTORY, told, b"".join(fresh.keys(pool)))]
    for picture in pictures:
        seen = picture.pools.get(pool)
        places.append(_compared(picture.router, told, seen.keys if seen is not None else b""))
    return PoolCheck(pool, tuple(replica_ids), max(map(len, told)) // KEY_BYTES, tuple(places))


def _compared(place: str, told: list[bytes], seen: bytes) -> PlaceCheck:
    """How the packed keys of a place differ from what the replicas told."""
    if all(len(keys) == len(seen) and digest_of(keys) == digest_of(seen) for keys in told):
        return PlaceCheck(place, 0, 0)  # the usual case, without a set of millions of keys
    picture = set(split_keys(seen))
    told_by_all, told_by_any = set(split_keys(told[0])), set(split_keys(told[0]))
    for keys in told[1:]:
        told_by_all &= set(split_keys(keys))
        told_by_any |= set(split_keys(keys))
    missing, phantom = told_by_all - picture, picture - told_by_any
    return PlaceCheck(place, len(missing), len(phantom), _examples((*sorted(missing), *sorted(phantom))))


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


def _examples(keys: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(key.hex() for key in keys)[:_EXAMPLES]
