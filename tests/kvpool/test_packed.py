from __future__ import annotations

import ctypes

import pytest

from kvpool.packed import address_of


@pytest.mark.parametrize("content", [b"", b"a", bytes(range(256)), b"key" * 10_000])
def test_the_bytes_are_there(content: bytes) -> None:
    assert ctypes.string_at(address_of(content), len(content)) == content


def test_a_slice_is_an_object_of_its_own() -> None:
    whole = bytes(range(64))
    part = whole[16:32]
    assert ctypes.string_at(address_of(part), 16) == part
