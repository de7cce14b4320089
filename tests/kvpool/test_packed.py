from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvpool.packed import address_of, address_of_array


@pytest.mark.parametrize("content", [b"", b"a", bytes(range(256)), b"key" * 10_000])
def test_the_bytes_are_there(content: bytes) -> None:
    assert ctypes.string_at(address_of(content), len(content)) == content


def test_a_slice_is_an_object_of_its_own() -> None:
    whole = bytes(range(64))
    part = whole[16:32]
    assert ctypes.string_at(address_of(part), 16) == part


@pytest.mark.parametrize("shape", [0, 1, 1000, (8, 0), (8, 64)])
def test_an_array_is_where_numpy_says(shape: int | tuple[int, int]) -> None:
    array = np.zeros(shape, np.int64)
    assert address_of_array(array) == array.ctypes.data


def test_an_array_that_no_entry_may_write_to_has_no_address() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    with pytest.raises(TypeError):
        address_of_array(array)


def test_an_array_with_gaps_has_no_address() -> None:
    with pytest.raises((BufferError, ValueError, TypeError)):
        address_of_array(np.zeros((4, 4))[:, 1])
