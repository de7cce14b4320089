"""Typed windows on the control part of one mapped region, and the two ways to look through them.

`Control` holds memoryviews of 64-bit (or smaller) words: reading or writing one element is a plain Python integer
operation, several times faster than through a numpy scalar. `array()` gives the same memory as numpy, for whole-array
work only.

Limits: the windows keep the mapping from being closed; call `release()` when done. A numpy array from `array()` must
not outlive the call that asked for it, for the same reason.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool import layout as lay
from kvpool.keys import KEY_BYTES
from kvpool.layout import Layout

# On every platform we serve, 'Q' is 8 bytes and 'I' is 4; memoryview.cast refuses explicit byte orders.
Words = memoryview
_WORDS_A_BLOCK: Final = {"key": KEY_BYTES // 8, "label": lay.LABEL_BYTES // 8}


class Control:
    """The control part of a mapped region as words. Mutable through and through; it guards nothing.

    `header` [512], `slots` [65 x 256], `state`, `holders`, `last_use`, `born`, `children`, `parent`, `filled`, `magic`,
    `checksum` [capacity], `history` [capacity x 4], `free`, `dirty` [bitmap words], `index` [entries]: u64. Keys, labels
    and token ids are read and written through methods. `address`: of the mapping's first byte, for the kernels.
    """

    __slots__ = (
        "_key_offset",
        "_label_offset",
        "_memory",
        "_token_bytes",
        "_tokens_offset",
        "_view",
        "address",
        "block_tokens",
        "born",
        "checksum",
        "children",
        "dirty",
        "filled",
        "free",
        "header",
        "history",
        "holders",
        "index",
        "last_use",
        "layout",
        "magic",
        "parent",
        "slots",
        "state",
    )

    def __init__(self, memory: mmap.mmap, layout: Layout, block_tokens: int) -> None:
        """`memory` is the whole region; `block_tokens` the tokens of a block."""
        self.layout = layout
        self.block_tokens = block_tokens
        self._memory = memory
        self._view = memoryview(memory)
        self.address: int = np.frombuffer(self._view, dtype=np.uint8).ctypes.data
        self._token_bytes = 4 * block_tokens
        self._key_offset = layout.offsets["key"]
        self._label_offset = layout.offsets["label"]
        self._tokens_offset = layout.offsets["tokens"]
        blocks = layout.capacity_blocks
        self.header = self._words(0, lay.HEADER_BYTES // 8)
        self.slots = self._words(lay.SLOTS_OFFSET, (lay.SLOTS + 1) * lay.SLOT_BYTES // 8)
        self.state = self._words(layout.offsets["state"], blocks)
        self.holders = self._words(layout.offsets["holders"], blocks)
        self.last_use = self._words(layout.offsets["last_use"], blocks)
        self.born = self._words(layout.offsets["born"], blocks)
        self.children = self._words(layout.offsets["children"], blocks)
        self.parent = self._words(layout.offsets["parent"], blocks)
        self.filled = self._words(layout.offsets["filled"], blocks)
        self.magic = self._words(layout.offsets["magic"], blocks)
        self.checksum = self._words(layout.offsets["checksum"], blocks)
        self.history = self._words(layout.offsets["history"], 4 * blocks)
        self.free = self._words(layout.offsets["free"], layout.bitmap_words)
        self.dirty = self._words(layout.offsets["dirty"], layout.bitmap_words)
        self.index = self._words(layout.offsets["index"], layout.index_entries)

    def _words(self, offset: int, count: int) -> Words:
        return self._view[offset : offset + 8 * count].cast("Q")

    def key(self, block: int) -> bytes:
        """Returns the 16-byte key last written for `block`; meaningful while it is SEALED or INDEXED."""
        start = self._key_offset + KEY_BYTES * block
        return self._memory[start : start + KEY_BYTES]

    def set_key(self, block: int, key: bytes) -> None:
        """Writes the 16-byte key of `block`."""
        start = self._key_offset + KEY_BYTES * block
        self._memory[start : start + KEY_BYTES] = key

    def label(self, block: int) -> str:
        """Returns the end of the id of the request that wrote `block` last; empty when nobody has."""
        start = self._label_offset + lay.LABEL_BYTES * block
        return self._memory[start : start + lay.LABEL_BYTES].rstrip(b"\0").decode("utf-8", "replace")

    def tokens(self, block: int) -> bytes:
        """Returns the token ids last written for `block` as u32 words."""
        start = self._tokens_offset + self._token_bytes * block
        return self._memory[start : start + self._token_bytes]

    def set_tokens(self, block: int, data: bytes) -> None:
        """Writes the token ids of `block`: block_tokens u32 words."""
        start = self._tokens_offset + self._token_bytes * block
        self._memory[start : start + self._token_bytes] = data

    def array(self, name: str) -> npt.NDArray[Any]:
        """Returns a u64 array over a field (`key` has shape [capacity, 2], `label` [capacity, 4]). Shares memory; drop it
        before `release()`.
        """
        if name in _WORDS_A_BLOCK:
            wide, offset = _WORDS_A_BLOCK[name], self.layout.offsets[name]
            count = wide * self.layout.capacity_blocks
            return np.frombuffer(self._view, dtype=np.uint64, count=count, offset=offset).reshape(-1, wide)
        return np.frombuffer(getattr(self, name), dtype=np.uint64)

    def set_all_bits(self, name: str) -> None:
        """Sets the bit of every block, and no bit beyond the last block, in the bitmap `name`."""
        bitmap = self.array(name)
        bitmap[:] = np.uint64(2**64 - 1)
        rest = self.layout.capacity_blocks % 64
        if rest:
            bitmap[-1] = np.uint64((1 << rest) - 1)

    def release(self) -> None:
        """Lets go of the mapping. Idempotent; nothing else may be called afterwards."""
        for name in self.__slots__:
            view = getattr(self, name)
            if isinstance(view, memoryview) and name != "_view":
                view.release()
        self._view.release()


def header_word(header: Words, name: str) -> int:
    """Returns the header field `name`."""
    value: int = header[lay.HEADER_WORDS[name]]
    return value
