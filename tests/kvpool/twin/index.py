"""From a key to the block that has it: a home entry and a fixed window behind it, no tombstones.

The key's first 8 bytes name its home, the next 4 are a tag. An entry lies anywhere in the window that begins at the
home (and wraps around); it never moves. Finding looks at the whole window, so an entry removed before another one
hides nothing. Inserting takes the first empty entry of the window, or fails when there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

WINDOW_ENTRIES: Final = 32
NOT_FOUND: Final = -1


class WindowIndex:
    """The prefix index of one region. `key_of(block)` is the key stored at a block."""

    def __init__(self, entries: int, key_of: Callable[[int], bytes], window: int = WINDOW_ENTRIES) -> None:
        self.entries: list[tuple[bytes, int] | None] = [None] * entries
        self._key_of = key_of
        self._window = min(window, entries)

    def _positions(self, key: bytes) -> Iterator[int]:
        home = int.from_bytes(key[:8], "little")
        return ((home + step) % len(self.entries) for step in range(self._window))

    def find(self, key: bytes) -> int:
        """Returns the block whose stored key is `key`, or NOT_FOUND."""
        for position in self._positions(key):
            entry = self.entries[position]
            if entry is not None and entry[0] == key[8:12] and self._key_of(entry[1]) == key:
                return entry[1]
        return NOT_FOUND

    def insert(self, key: bytes, block: int) -> bool:
        """Adds (key, block), whose key must be stored at the block already; False when the window is full."""
        assert self.find(key) == NOT_FOUND, f"{key.hex()} is indexed already"
        for position in self._positions(key):
            if self.entries[position] is None:
                self.entries[position] = (key[8:12], block)
                return True
        return False

    def remove(self, key: bytes, block: int) -> bool:
        """Removes (key, block); False when it is not there."""
        for position in self._positions(key):
            if self.entries[position] == (key[8:12], block):
                self.entries[position] = None
                return True
        return False

    def listed(self) -> list[int]:
        """Returns the blocks that entries name, once for each entry."""
        return [entry[1] for entry in self.entries if entry is not None]
