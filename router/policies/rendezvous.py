"""Hashes that give every router the same preference among replicas, without state: the highest weight wins (rendezvous).

When a replica goes, only what it had moves; when one comes, it takes an even share from all.

Hashes of replica ids are remembered per list of candidates, which changes seldom; the memory is bounded by its number of lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
_LISTS: Final = 16
_ODD: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


def hash_of(data: bytes) -> int:
    """Returns a 64-bit hash that is the same in every process."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def mixed(words: Hashes) -> Hashes:
    """Returns each word with its bits mixed (the finalizer of splitmix64): one to one, neighbours end far apart."""
    words = (words ^ (words >> _SHIFTS[0])) * _ODD[0]
    words = (words ^ (words >> _SHIFTS[1])) * _ODD[1]
    return words ^ (words >> _SHIFTS[2])


@lru_cache(maxsize=_LISTS)
def replica_hashes(replica_ids: tuple[str, ...]) -> Hashes:
    """Returns a hash of each id; the array must not be changed."""
    hashes = np.array([hash_of(replica_id.encode()) for replica_id in replica_ids], np.uint64)
    hashes.setflags(write=False)
    return hashes


def preferred(name: str, replica_ids: Sequence[str], among: npt.NDArray[np.bool_]) -> int:
    """Returns the index of the candidate that `name` prefers of those marked in `among`, of which there is at least one."""
    marked = np.flatnonzero(among)
    if len(marked) == 1:
        return int(marked[0])
    hashes = replica_hashes(tuple(replica_ids))[marked] ^ np.uint64(hash_of(name.encode("utf-8", "replace")))
    return int(marked[mixed(hashes).argmax()])
