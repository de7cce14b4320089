"""The chain in machine code: byte for byte what hashlib computes."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.kernels.key_chain import chained, keyed_state

PERSON = b"kvatlas-block"


def expected(secret: bytes, parent: bytes, ids: list[int], block_tokens: int) -> bytes:
    keys = b""
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        data = parent + struct.pack(f"<{block_tokens}I", *ids[start : start + block_tokens])
        parent = hashlib.blake2b(data, key=secret, digest_size=16, person=PERSON).digest()
        keys += parent
    return keys


# A message is the parent's 16 bytes and 4 for each id; it is hashed in pieces of 128: one ends behind 28 ids, the next behind 60.
@pytest.mark.parametrize("block_tokens", [1, 2, 3, 16, 27, 28, 29, 30, 59, 60, 61, 64, 92, 93, 256])
def test_blocks_of_every_size_around_the_pieces_that_are_hashed(block_tokens: int) -> None:
    secret, parent = bytes(range(1, 33)), bytes(range(16))
    ids = [(number * 2654435761) % (1 << 32) for number in range(3 * block_tokens + block_tokens // 2)]
    packed = struct.pack(f"<{len(ids)}I", *ids)
    assert chained(keyed_state(secret, PERSON), parent, packed, block_tokens) == expected(
        secret, parent, ids, block_tokens
    )


@settings(max_examples=60, deadline=None)
@given(
    secret=st.binary(min_size=1, max_size=64),
    parent=st.binary(min_size=16, max_size=16),
    ids=st.lists(st.integers(0, (1 << 32) - 1), max_size=40),
    block_tokens=st.integers(1, 40),
)
def test_it_is_hashlibs_chain(secret: bytes, parent: bytes, ids: list[int], block_tokens: int) -> None:
    packed = struct.pack(f"<{len(ids)}I", *ids)
    found = chained(keyed_state(secret, PERSON), parent, packed, block_tokens)
    assert found == expected(secret, parent, ids, block_tokens)
