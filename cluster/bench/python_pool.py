"""A block pool in plain Python, to measure ours against: the shape that other servers use, inside one process.

Every block is an object, made once. Free ones hang in a doubly linked list, so that a block somebody wants back leaves its
middle in constant time. A block that is given back keeps its key and goes to the tail; taking blocks from the head forgets
their keys, so what is cached and unused the longest goes first. Blocks of a request come back in reverse, tails before heads.

It offers what ours offers on the two hot paths: a request's blocks under its id, all or nothing, block numbers for the
engine, blocks taken and the peak counted. For each block it does what such a pool must (link, count, forget the key) and no
more.

Limits: one thread of one process; one block per key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Block:
    """One block: its number, how many requests hold it, its key (None: no content), its neighbours while it is free."""

    __slots__ = ("key", "next", "number", "previous", "refs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.refs = 0
        self.key: bytes | None = None
        self.previous: Block | None = None
        self.next: Block | None = None


class FreeList:
    """Blocks that nobody holds, in the order in which they are taken. Its two ends are blocks of no pool."""

    __slots__ = ("_head", "_tail", "count")

    def __init__(self) -> None:
        self.count = 0
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next, self._tail.previous = self._tail, self._head

    def take(self, count: int) -> list[Block]:
        """Removes and returns the first `count` blocks. There must be so many (AssertionError)."""
        assert count <= self.count, f"{count} blocks wanted, {self.count} are free"
        taken = []
        block = self._head.next
        for _ in range(count):
            assert block is not None, "the tail ends the list"
            taken.append(block)
            after = block.next
            block.previous = block.next = None
            block = after
        assert block is not None, "the tail ends the list"
        self._head.next, block.previous = block, self._head
        self.count -= count
        return taken

    def append(self, blocks: Sequence[Block]) -> None:
        """Adds `blocks`, in this order, behind all others. None of them may be in the list."""
        last = self._tail.previous
        assert last is not None, "the head begins the list"
        for block in blocks:
            last.next, block.previous = block, last
            last = block
        last.next, self._tail.previous = self._tail, last
        self.count += len(blocks)

    def remove(self, block: Block) -> None:
        """Removes `block`, wherever it is. It must be in the list (AssertionError)."""
        before, after = block.previous, block.next
        assert before is not None, f"block {block.number} is not in the list"
        assert after is not None, f"block {block.number} is not in the list"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self.count -= 1

    def numbers(self) -> list[int]:
        """The numbers of its blocks, first to last."""
        found = []
        block = self._head.next
        while block is not None and block is not self._tail:
            found.append(block.number)
            block = block.next
        return found


class PythonPool:
    """A pool of `capacity_blocks` blocks, all free, and the blocks of each request."""

    __slots__ = ("_by_key", "_tables", "allocated_blocks", "capacity_blocks", "free_list", "peak_used_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.allocated_blocks = 0
        self.peak_used_blocks = 0
        self.free_list = FreeList()
        self.free_list.append([Block(number) for number in range(capacity_blocks)])
        self._by_key: dict[bytes, Block] = {}
        self._tables: dict[str, list[Block]] = {}

    def allocate(self, request_id: str, count: int) -> list[int] | None:
        """Gives the request `count` more blocks, without keys; returns their numbers, or None, with nothing changed."""
        if count > self.free_list.count:
            return None
        taken = self.free_list.take(count)
        for block in taken:
            self._begin(block)
        self._tables.setdefault(request_id, []).extend(taken)
        self.allocated_blocks += count
        self.peak_used_blocks = max(self.peak_used_blocks, self.capacity_blocks - self.free_list.count)
        return [block.number for block in taken]

    def _begin(self, block: Block) -> None:
        assert block.refs == 0, f"block {block.number} is free and {block.refs} requests hold it"
        key = block.key
        if key is not None:
            del self._by_key[key]
            block.key = None
        block.refs = 1

    def match(self, request_id: str, keys: Iterable[bytes]) -> int:
        """Gives the request the blocks of the longest known chain of `keys`; returns how many."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            if block.refs == 0:
                self.free_list.remove(block)
            block.refs += 1
            found.append(block)
        self._tables.setdefault(request_id, []).extend(found)
        return len(found)

    def seal(self, request_id: str, position: int, key: bytes) -> None:
        """Names the content of one of the request's blocks. A key that another block has stays with that one."""
        block = self._tables[request_id][position]
        if block.key is None and key not in self._by_key:
            self._by_key[key] = block
            block.key = key

    def free(self, request_id: str) -> int:
        """Takes the request's blocks from it, tails first; returns how many. Those that nobody holds then are free."""
        blocks = self._tables.pop(request_id, [])
        idle = []
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs == 0:
                idle.append(block)
        self.free_list.append(idle)
        return len(blocks)
