"""One 64-bit number for a set of keys, whatever their order.

Each 16-byte key is mixed to 64 bits (two rounds of the splitmix64 finaliser, low half first, then the high half added);
the digest is their sum modulo 2^64. So adding or removing keys costs only those keys, and two holders of the same set
have the same number, on every machine.

Limits: it detects accidents, not attacks; two different sets agree by chance once in 2^64. It knows no set: adding a key
that is in already, or removing one that is not, gives the digest of a multiset, so its user must not do that.
"""

from __future__ import annotations

from typing import Final

from kvpool.kernels.key_digest import sum_of_keys, sum_of_many_keys
from kvpool.packed import address_of

EMPTY: Final = 0
"""The digest of no keys."""

_MASK: Final = (1 << 64) - 1
_MANY: Final = 4096
"""From so many keys on, other threads may run meanwhile. For fewer, waiting for the interpreter again would take longer."""


def digest_of(packed: bytes) -> int:
    """Returns the digest of the keys in `packed` (16 bytes each, all different). Raises ValueError for a torn key."""
    return _sum(packed) & _MASK


def changed(digest: int, removed: bytes, added: bytes) -> int:
    """Returns the digest after the packed keys `removed` left the set and `added` came in. Raises ValueError for a torn key."""
    return (digest - _sum(removed) + _sum(added)) & _MASK


def _sum(packed: bytes) -> int:
    if len(packed) % 16:
        raise ValueError(f"packed keys have 16 bytes each, got {len(packed)} bytes")
    number = len(packed) // 16
    return (sum_of_keys if number < _MANY else sum_of_many_keys)(address_of(packed), number)
