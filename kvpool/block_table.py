"""The blocks of one request, in order, and the promise that they are given back exactly once.

A table is made by `Pool.table` and changed only by the pool. `blocks[i]` holds tokens i * block_tokens and following.
The first `len(keys)` of them are sealed; the rest are being filled. `close()` (or leaving a `with`) gives everything
back; doing so again is harmless and counted.

Limits: one thread at a time uses a table.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import TracebackType


class BlockTable:
    """A request's blocks. Read `request_id`, `blocks`, `keys`, `closed`; everything else belongs to the pool.

    `blocks`: physical block numbers in logical order. `keys`: keys of the sealed prefix, `len(keys) <= len(blocks)`.
    Both are empty once `closed`. `copy_sources`: target block of a copy-on-write -> the block it replaced, held until
    its bytes are copied. `tag`: a 64-bit digest of the request id, left in the region's blocks so that a dump can
    name their last writer.
    """

    __slots__ = ("_release", "blocks", "closed", "copy_sources", "keys", "request_id", "tag")

    def __init__(self, request_id: str, release: Callable[[BlockTable], int]) -> None:
        """`release` is what gives the blocks back to the pool they came from."""
        self.request_id = request_id
        self.blocks: list[int] = []
        self.keys: list[bytes] = []
        self.closed = False
        self.copy_sources: dict[int, int] = {}
        self.tag = request_tag(request_id)
        self._release = release

    def held(self) -> list[int]:
        """Returns every block this table holds, a copy's source included, in an order in which children come first."""
        return [*self.copy_sources.values(), *reversed(self.blocks)]

    def close(self) -> int:
        """Gives everything back to the pool; the same as `Pool.release`."""
        return self._release(self)

    def __enter__(self) -> BlockTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.closed:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.blocks)} blocks, {len(self.keys)} sealed"
        return f"<BlockTable {self.request_id!r}: {state}>"


def request_tag(request_id: str) -> int:
    """Returns the 64-bit tag of a request id."""
    data = request_id.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
