"""Where the bytes of a `bytes` object or an array are, for entries that take addresses.

CPython lays the content of a `bytes` object out inside the object, after a header of known size, and never moves it: the
address is that of the object and the header. Asking numpy or ctypes for it costs microseconds, more than a whole look-up.

Limits: CPython only, as numba is; checked when this module is imported. The caller keeps the object alive until the entry has
returned, and an entry only reads there.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, cast

import numpy.typing as npt

_HEADER_BYTES: Final = bytes.__basicsize__ - 1  # the type counts the zero byte at the end


def address_of(packed: bytes) -> int:
    """Returns the address of the first byte of `packed`, valid while somebody has a reference to it."""
    return id(packed) + _HEADER_BYTES


def address_of_array(array: npt.NDArray[Any]) -> int:
    """Returns the address of the first element of a writable array, valid while somebody has a reference to it.

    It is `array.ctypes.data` in a third of the time. Raises TypeError for an array that may not be written to, and BufferError
    for one whose elements do not lie side by side.
    """
    return ctypes.addressof(_Bytes.from_buffer(cast(Any, array)))  # numpy's types hide that it is a buffer


_Bytes: Final = ctypes.c_char * 0  # of no length, because an array may be empty
_probe: Final = b"kvatlas"
if ctypes.string_at(address_of(_probe), len(_probe)) != _probe:
    raise ImportError(
        "this Python does not keep the content of bytes objects where kvatlas looks for it: use CPython 3.11"
    )
