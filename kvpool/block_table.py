"""The blocks of one request, in order, and the promise that they are given back exactly once.

A table is made by `Pool.table` and changed only by the pool. `blocks[i]` holds tokens i * block_tokens and following. The
first `len(keys)` of them are sealed; the rest are being filled. `close()` (or leaving a `with`) gives everything back;
doing so again is harmless and counted.

The block numbers are kept where the kernels can reach them, in a record of 64-bit words (`kernels/context.py`, `TABLE_*`);
`blocks` is a copy of them.

Limits: one thread at a time uses a table.
"""

from __future__ import annotations

from array import array
from struct import Struct
from types import TracebackType
from typing import Final, Protocol

from kvpool.kernels.context import TABLE_BLOCKS, TABLE_COUNT, TABLE_LABEL, TABLE_ROOM, TABLE_UNINDEXED
from kvpool.layout import LABEL_BYTES

_FIRST_ROOM: Final = 56
_HEAD_WORDS: Final = TABLE_BLOCKS // 8
_COUNT: Final = TABLE_COUNT // 8
_UNINDEXED: Final = TABLE_UNINDEXED // 8
_ROOM: Final = TABLE_ROOM // 8
_put_label = Struct(f"{LABEL_BYTES}s").pack_into


class Record:
    """The words of a table. The pool uses them again when a table is closed."""

    __slots__ = ("address", "words")

    def __init__(self) -> None:
        self.words = array("q", bytes(8 * (_HEAD_WORDS + _FIRST_ROOM)))
        self.words[_ROOM] = _FIRST_ROOM
        self.address = self.words.buffer_info()[0]

    def reserve(self, blocks: int) -> None:
        """Makes room for `blocks` blocks in all. May move the record: read `address` again."""
        room = self.words[_ROOM]
        if blocks > room:
            more = max(blocks, 2 * room) - room
            self.words.extend(array("q", bytes(8 * more)))
            self.words[_ROOM] = room + more
            self.address = self.words.buffer_info()[0]


class Owner(Protocol):
    """What a table knows of its pool."""

    def release(self, table: BlockTable) -> int:
        """Gives back everything `table` holds; returns how many blocks."""


class BlockTable:
    """A request's blocks. Read `request_id`, `blocks`, `keys`, `closed`; everything else belongs to the pool.

    `keys`: keys of the sealed prefix, `len(keys) <= len(blocks)`. Both are empty once `closed`. `copy_sources`: target
    block of a copy-on-write -> the block it replaced, held until its bytes are copied.
    """

    __slots__ = ("_owner", "_words", "closed", "copy_sources", "keys", "record", "request_id")

    def __init__(self, request_id: str, owner: Owner, record: Record) -> None:
        """`owner` is the pool that the blocks come from and go back to. `record` is an empty one."""
        self.request_id = request_id
        self.keys: list[bytes] = []
        self.closed = False
        self.copy_sources: dict[int, int] = {}
        self.record = record
        self._words = record.words
        self._owner = owner
        label = request_id.encode() if request_id.isascii() else request_id.encode("utf-8", "surrogatepass")
        # What a block keeps of the id of the request that writes it: the end, because that is what differs.
        _put_label(record.words, TABLE_LABEL, label if len(label) <= LABEL_BYTES else label[-LABEL_BYTES:])

    def __len__(self) -> int:
        """Number of blocks; 0 once closed."""
        return 0 if self.closed else self._words[_COUNT]

    def __bool__(self) -> bool:
        return True

    @property
    def blocks(self) -> list[int]:
        """Physical block numbers in logical order, as a new list."""
        return [] if self.closed else self._words[_HEAD_WORDS : _HEAD_WORDS + self._words[_COUNT]].tolist()

    @property
    def unindexed(self) -> bool:
        """Whether a sealed block is still to be indexed."""
        return self._words[_UNINDEXED] != 0

    def block(self, position: int) -> int:
        """Returns the block at `position`, which must be in the table."""
        return self._words[_HEAD_WORDS + position]

    def held(self) -> list[int]:
        """Returns every block this table holds, a copy's source included, in an order in which children come first."""
        return [*self.copy_sources.values(), *reversed(self.blocks)]

    def close(self) -> int:
        """Gives everything back to the pool; the same as `Pool.release`."""
        return self._owner.release(self)

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.closed:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self)} blocks, {len(self.keys)} sealed"
        return f"<BlockTable {self.request_id!r}: {state}>"
