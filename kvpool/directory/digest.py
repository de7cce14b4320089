"""One 64-bit number for a set of keys, whatever their order.

Each 16-byte key is mixed to 64 bits (two rounds of the splitmix64 finaliser, low half first, then the high half added);
the digest is their sum modulo 2^64. So adding or removing keys costs only those keys, and two holders of the same set
have the same number, on every machine.

Limits: it detects accidents, not attacks; two different sets agree by chance once in 2^64. It knows no set: adding a key
that is in already, or removing one that is not, gives the digest of a multiset, so its user must not do that.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

EMPTY: Final = 0
"""The digest of no keys."""

_MASK: Final = (1 << 64) - 1


def digest_of(packed: bytes) -> int:
    """Returns the digest of the keys in `packed` (16 bytes each, all different). Raises ValueError for a torn key."""
    return int(_mixed(packed).sum(dtype=np.uint64))


def changed(digest: int, removed: bytes, added: bytes) -> int:
    """Returns the digest after the packed keys `removed` left the set and `added` came in."""
    mixed = _mixed(removed + added)  # one call, because for a few keys the calls are what costs
    out = len(removed) // 16
    return (digest - int(mixed[:out].sum(dtype=np.uint64)) + int(mixed[out:].sum(dtype=np.uint64))) & _MASK


def _mixed(packed: bytes) -> npt.NDArray[np.uint64]:
    """Returns 64 bits for each key."""
    if len(packed) % 16:
        raise ValueError(f"packed keys have 16 bytes each, got {len(packed)} bytes")
    halves = np.frombuffer(packed, dtype="<u8").astype(np.uint64, copy=False).reshape(-1, 2)
    return _mix(_mix(halves[:, 0] + np.uint64(0x9E3779B97F4A7C15)) + halves[:, 1])


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
