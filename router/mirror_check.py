"""Comparing what a mirror believes with what a pool has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.mirror import Mirror


@dataclass(frozen=True, slots=True)
class Difference:
    """Keys that the pool has and the mirror lacks, and keys that only the mirror believes in; both sorted."""

    pool: str
    missing: tuple[bytes, ...]
    phantom: tuple[bytes, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.phantom)

    def describe(self) -> str:
        """Returns the difference in one sentence, naming a few keys."""
        some = [key.hex() for key in (*self.missing, *self.phantom)[:3]]
        return f"pool {self.pool!r}: {len(self.missing)} keys missing, {len(self.phantom)} phantom {some}"


def check(mirror: Mirror, pool: str, keys: Iterable[bytes]) -> Difference:
    """Returns how the mirror's picture of `pool` differs from `keys`, the pool's indexed keys."""
    truth, picture = set(keys), mirror.keys(pool)
    return Difference(pool, tuple(sorted(truth - picture)), tuple(sorted(picture - truth)))
