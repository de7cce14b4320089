from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.directory.digest import EMPTY, changed, digest_of

sets = st.sets(st.binary(min_size=16, max_size=16), max_size=20)


@given(sets, st.randoms())
def test_order_does_not_matter(keys: set[bytes], rng: random.Random) -> None:
    shuffled = sorted(keys)
    rng.shuffle(shuffled)
    assert digest_of(b"".join(shuffled)) == digest_of(b"".join(sorted(keys)))


@given(sets, sets)
def test_it_can_be_kept_up_to_date(before: set[bytes], after: set[bytes]) -> None:
    removed, added = b"".join(before - after), b"".join(after - before)
    assert changed(digest_of(b"".join(before)), removed, added) == digest_of(b"".join(after))


def test_the_values_are_these() -> None:
    """Two programs must agree for ever."""
    assert digest_of(b"") == EMPTY == 0
    assert digest_of(bytes(range(16))) == 0xBD4A18666BF3D7D7
    assert digest_of(bytes(range(16)) + bytes(range(16, 32))) == 0xC9CFA46E213C82B1


def test_small_differences_show() -> None:
    rng = random.Random(3)
    keys = [rng.randbytes(16) for _ in range(200)]
    seen = {digest_of(b"".join(keys))}
    for key in keys:
        for bit in (0, 63, 64, 127):
            other = (int.from_bytes(key, "little") ^ 1 << bit).to_bytes(16, "little")
            seen.add(digest_of(b"".join(keys)[:-16] + other))
    assert len(seen) == 801
    structured = {digest_of(number.to_bytes(16, "little")) for number in range(1000)}
    assert len(structured) == 1000
    halves = {
        digest_of(low.to_bytes(8, "little") + high.to_bytes(8, "little")) for low in range(30) for high in range(30)
    }
    assert len(halves) == 900


def test_a_torn_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        digest_of(bytes(17))
