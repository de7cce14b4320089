from __future__ import annotations

import numpy as np
from numba import njit

from router.kernels.words import get_short, prefetch, put_short


def swap_shorts(address: int) -> int:
    prefetch(address)
    prefetch(0)  # nobody's memory
    first, second = get_short(address), get_short(address + 2)
    put_short(address, second)
    put_short(address + 2, first + (1 << 16))
    return first + second


def test_shorts_are_read_and_written_alone_and_have_no_sign() -> None:
    compiled = njit(swap_shorts)
    words = np.array([1, 65535, 7, 8], np.uint16)
    assert compiled(words.ctypes.data) == 65536
    assert words.tolist() == [65535, 1, 7, 8]
