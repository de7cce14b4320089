"""Requests over several processes, done to every side at once, with a model of what each block's bytes stand for.

Every call goes to all sides, and must answer the same on each; after every step the sides must agree in all that does
not depend on block numbers. Where the order of evictions is free, the twin is told which keys the real pool took and
must be able to take the same. Time goes on with every call, so no two calls use blocks at the same moment.

The content model is kept per side: a block's bytes stand for the whole token history up to the end of the block. A
block is written only while nobody else holds it, dead processes that were not reclaimed included; and whatever a
request holds, or finds, must stand for its own tokens. So a block that was reused too early, shared while mutable, given
to two, or found under a wrong key shows as a wrong history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeVar

from kvpool import KeyRoot, KeySpace
from tests.kvpool.twin.sides import Clock, PoolLike, Side

History = tuple[int, ...]
T = TypeVar("T")
COMPARED: Final = (
    "blocks",
    "open_tables",
    "allocation_failures",
    "evictions",
    "evicted_while_held",
    "cow_copies",
    "dedups",
    "hash_collisions",
    "second_releases",
    "forced_releases",
)
"""Fields of a pool's stats that all sides must agree in."""


class Client:
    """One process: a pool on each side, and its open requests."""

    def __init__(self, pools: list[PoolLike]) -> None:
        self.pools = pools
        self.requests: list[Request] = []
        self.alive = True


class Request:
    """One table on each side, and the tokens that their blocks stand for.

    `sources`: on each side, target of an unfinished copy -> (its source, what the source stands for).
    """

    def __init__(self, client: Client, tables: list[Any], tokens: list[int]) -> None:
        self.client = client
        self.tables = tables
        self.tokens = tokens
        self.sources: list[dict[int, tuple[int, History]]] = [{} for _ in tables]

    @property
    def open(self) -> bool:
        """Whether it may be worked on: not released, its process alive."""
        return self in self.client.requests

    @property
    def sealed(self) -> int:
        """Number of sealed blocks."""
        return len(self.tables[0].keys)

    def held(self, side: int) -> set[int]:
        """Block numbers that it holds on a side."""
        return {*self.tables[side].blocks, *(source for source, _ in self.sources[side].values())}


class Traffic:
    """Everything that happens to one region, on all sides. `keys` says how good the keys are:

    "true"      as the product makes them; token 2 is token 1, so that there are two
    "alike"     token 2 gets the keys of token 1: keys that stand for several contents; matches then compare tokens always
    "rootless"  a key names its block's tokens only, not what is before: only the parent tells blocks apart
    """

    def __init__(
        self,
        sides: Sequence[Side],
        clock: Clock,
        block_tokens: int,
        keys: Literal["true", "alike", "rootless"] = "true",
    ) -> None:
        self.sides = sides
        self._clock = clock
        self.size = block_tokens
        self._kind = keys
        self.clients: list[Client] = []
        self._key_space = KeySpace(bytes(16))
        self._root = self._key_space.root(KeyRoot("m", block_tokens, "float16"))
        self._content: list[dict[int, History]] = [{} for _ in sides]
        self._left_by_dead: list[set[int]] = [set() for _ in sides]
        self._sealed: set[History] = set()
        self._requests = 0

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the full blocks of `tokens`."""
        tokens = [min(token, 1) for token in tokens]
        if self._kind == "rootless":
            ends = range(self.size, len(tokens) + 1, self.size)
            return [self._key_space.extend(self._root, tokens[end - self.size : end]) for end in ends]
        return self._key_space.block_keys(self._root, tokens, self.size)

    def _spell(self, tokens: Sequence[int]) -> list[int]:
        return list(tokens) if self._kind == "alike" else [min(token, 1) for token in tokens]

    # What processes do.

    def attach(self) -> Client:
        """A process comes; whoever was dead is reclaimed by that."""
        self._clock.tick()
        client = Client([side.attach() for side in self.sides])
        self.clients.append(client)
        self._forget_the_dead()
        return client

    def detach(self, client: Client) -> None:
        """A process ends in order; open requests are closed by force."""
        self._clock.tick()
        self.clients.remove(client)
        client.alive = False
        for side, pool in enumerate(client.pools):
            pool.close()
            assert all(request.tables[side].closed for request in client.requests if request.held(side))
        client.requests.clear()

    def kill(self, client: Client) -> None:
        """A process is gone."""
        self.clients.remove(client)
        client.alive = False
        for side, pool in enumerate(client.pools):
            self._left_by_dead[side].update(*(request.held(side) for request in client.requests))
            self.sides[side].kill(pool)
        client.requests.clear()

    def reclaim(self, client: Client) -> None:
        """A living process gives back what the dead left."""
        self._each(lambda side: _counts(client.pools[side].reclaim()))
        self._forget_the_dead()

    def tidy(self, client: Client) -> None:
        """A pass of the tidy thread. Nothing is contended here and no window full, so all it finds are the dead."""

        def tidy(side: int) -> list[tuple[str, int]]:
            report = client.pools[side].tidy()
            assert (report.restored_bits, report.recounted, report.late_indexed) == (0, 0, 0)
            return _counts(report.reclaimed)

        self._each(tidy)
        self._forget_the_dead()

    def _forget_the_dead(self) -> None:
        for blocks in self._left_by_dead:
            blocks.clear()

    # What requests do.

    def arrive(self, client: Client, tokens: Sequence[int], check_tokens: bool, sealed: int) -> Request:
        """A prompt is matched, gets its blocks, is computed, and has up to `sealed` of its blocks sealed.

        Returns a request that is not open when there is no room.
        """
        self._requests += 1
        name = f"r{self._requests}"
        request = Request(client, [pool.table(name) for pool in client.pools], self._spell(tokens))
        tokens, keys = request.tokens, self.keys(tokens)
        given = tokens if check_tokens or self._kind == "alike" else None
        reachable = self._each(lambda side: client.pools[side].peek(keys))
        matched = self._each(lambda side: client.pools[side].match(request.tables[side], keys, given))
        assert matched == reachable or (self._kind == "alike" and matched < reachable)
        client.requests.append(request)
        self._check_content(request, matched * self.size)
        if not self._allocate(request, -(-len(tokens) // self.size) - matched):
            self.leave(request, "release")
            return request
        self._check_content(request, matched * self.size)  # the allocation evicted none of it
        self._write(request, matched * self.size)
        self.seal(request, sealed)
        return request

    def press(self, client: Client, tokens: Sequence[int], sealed: int) -> None:
        """A prompt for which older requests of the same process are preempted until there is room."""
        while not self.arrive(client, tokens, True, sealed).open and client.requests:
            self.leave(client.requests[0], "release")

    def branch(self, request: Request, client: Client, tokens: int, tail: Sequence[int], sealed: int) -> Request:
        """A request in any process goes on from the first `tokens` tokens of another; what that one sealed is found."""
        history = request.tokens[:tokens]
        known = min(request.sealed, len(history) // self.size) if request.open else 0
        other = self.arrive(client, [*history, *tail], True, sealed)
        if other.open and self._kind == "true":
            assert other.sealed >= known
            for side in range(len(self.sides)):
                assert other.tables[side].blocks[:known] == request.tables[side].blocks[:known]
        return other

    def race(self, one: Client, other: Client, tokens: Sequence[int], swap: bool) -> None:
        """Two requests compute the same prompt at once, and seal it in turn; with `swap`, one with the keys of the other."""
        first = self.arrive(one, tokens, True, 0)
        second = self.arrive(other, [(0, 2, 1)[token] for token in tokens] if swap else tokens, True, 0)
        for position in range(len(tokens) // self.size):
            for request in (first, second):
                if request.open:
                    self.seal(request, position + 1)

    def grow(self, request: Request, more: Sequence[int]) -> None:
        """Decoding: a token at a time, a block when the last one is full, sealed when full."""
        if request.sealed < len(request.tokens) // self.size:
            return
        for token in self._spell(more):
            if len(request.tokens) % self.size == 0 and not self._allocate(request, 1):
                return
            request.tokens = [*request.tokens, token]
            self._write(request, len(request.tokens) - 1)
            self.seal(request, len(request.tokens))

    def seal(self, request: Request, upto: int) -> None:
        """Seals full blocks up to position `upto`."""
        for position in range(request.sealed, min(upto, len(request.tokens) // self.size)):
            self._seal_block(request, position)

    def _seal_block(self, request: Request, position: int) -> None:
        history = request.tokens[: (position + 1) * self.size]
        key = self.keys(history)[-1]

        def seal(side: int) -> bool:
            table = request.tables[side]
            own: int = table.blocks[position]
            now = request.client.pools[side].seal(table, position, key, history[position * self.size :])
            assert table.blocks[position] == now
            request.sources[side].pop(own, None)  # complete, so its source was read
            return own != now

        self._each(seal)
        self._sealed.add(tuple(history))

    def rewrite_the_tail(self, request: Request, token: int, finish: bool, sealed: bool) -> None:
        """The last token of a request that is sealed whole is computed again, or another one takes its place."""
        position = request.sealed - 1
        if position < 0 or len(request.tokens) != request.sealed * self.size:
            return
        assert all(len(table.blocks) == request.sealed for table in request.tables)
        if not self._each(lambda side: self._copy(request, side, position), evicts=True):
            return
        request.tokens = [*request.tokens[:-1], *self._spell([token])]
        self._write(request, len(request.tokens) - 1)
        if finish:
            self.finish_copy(request)
        if sealed:
            self.seal(request, position + 1)

    def _copy(self, request: Request, side: int, position: int) -> bool:
        table, content = request.tables[side], self._content[side]
        blocks, keys = list(table.blocks), list(table.keys)
        pair = request.client.pools[side].copy_on_write(table, position)
        if pair is None:
            assert (table.blocks, table.keys) == (blocks, keys)
            return False
        source, target = pair
        assert source == blocks[position] != target == table.blocks[position]
        assert table.keys == keys[:position]
        content[target] = content[source]
        request.sources[side][target] = (source, content[source])
        return True

    def finish_copy(self, request: Request) -> None:
        """The bytes of all copies are copied."""
        self._clock.tick()
        for side, pool in enumerate(request.client.pools):
            pool.finish_copy(request.tables[side])
            request.sources[side].clear()

    def leave(self, request: Request, how: str) -> None:
        """Ends by "release", release "twice", "force" or "close"."""

        def end(side: int) -> int:
            pool, table = request.client.pools[side], request.tables[side]
            if how == "force":
                return pool.force_release(table, "test")
            given: int = table.close() if how == "close" else pool.release(table)
            assert how != "twice" or pool.release(table) == 0
            return given

        held = self._each(lambda side: len(request.held(side)))
        assert self._each(end) == held
        assert all(table.closed and not table.blocks for table in request.tables)
        request.client.requests.remove(request)

    def evict(self, client: Client, count: int) -> None:
        """An administrator makes room."""
        idle = client.pools[0].stats().blocks["cached"]
        assert self._each(lambda side: client.pools[side].evict(count), evicts=True) == min(count, idle)

    def reset(self, client: Client) -> None:
        """An administrator drops all that is idle."""
        idle = client.pools[0].stats().blocks["cached"]
        assert self._each(lambda side: client.pools[side].reset(), evicts=True) == idle

    def _allocate(self, request: Request, count: int) -> bool:
        def allocate(side: int) -> bool:
            pool, table = request.client.pools[side], request.tables[side]
            could, before = pool.available() >= count, list(table.blocks)
            assert pool.allocate(table, count) == could
            assert table.blocks[: len(before)] == before
            assert len(table.blocks) == len(before) + could * count
            return could

        return self._each(allocate, evicts=True)

    # What must hold.

    def _each(self, call: Callable[[int], T], evicts: bool = False) -> T:
        """Does `call` to each side and returns its answer, which is the same on all."""
        self._clock.tick()
        answers: list[T] = []
        for side in range(len(self.sides)):
            before = self._indexed(side) if evicts and side + 1 < len(self.sides) else frozenset()
            answers.append(call(side))
            if before:
                self.sides[side + 1].prefer(before - self._indexed(side))
        assert all(answer == answers[0] for answer in answers), f"the sides differ: {answers}"
        return answers[0]

    def _indexed(self, side: int) -> frozenset[bytes]:
        packed = self.clients[0].pools[side].indexed_keys()
        keys = [packed[start : start + 16] for start in range(0, len(packed), 16)]
        assert len(set(keys)) == len(keys), "a key is indexed twice"
        return frozenset(keys)

    def _write(self, request: Request, start: int) -> None:
        """The engine writes the KV of the tokens from `start` on; each block must be the request's own."""
        for side, content in enumerate(self._content):
            for position in range(start // self.size, -(-len(request.tokens) // self.size)):
                block = request.tables[side].blocks[position]
                assert block not in self._left_by_dead[side], f"block {block} is written, a dead process had it"
                assert block not in {source for source, _ in request.sources[side].values()}
                for other in self.open_requests():
                    assert other is request or block not in other.held(side), (
                        f"block {block} is written, another holds it"
                    )
                content[block] = tuple(request.tokens[: (position + 1) * self.size])

    def open_requests(self) -> list[Request]:
        """All that hold something or may."""
        return [request for client in self.clients for request in client.requests]

    def _check_content(self, request: Request, tokens: int) -> None:
        """The blocks of the first `tokens` tokens stand for those."""
        for content, table, sources in zip(self._content, request.tables, request.sources, strict=True):
            blocks = table.blocks
            for position in range(-(-tokens // self.size)):
                assert content[blocks[position]] == tuple(request.tokens[: (position + 1) * self.size])
            for source, history in sources.values():
                assert content[source] == history

    def audit(self, client: Client) -> None:
        """Everything that is indexed is found by its tokens, whole, and its bytes stand for them."""
        indexed = self._indexed(0)
        for history in sorted(self._sealed):
            if self.keys(history)[-1] in indexed:
                self._audit_chain(client, list(history))

    def _audit_chain(self, client: Client, tokens: list[int]) -> None:
        keys = self.keys(tokens)
        request = Request(client, [pool.table("audit") for pool in client.pools], tokens)
        matched = self._each(lambda side: client.pools[side].match(request.tables[side], keys, tokens))
        assert matched == len(keys) or self._kind != "true"
        self._check_content(request, matched * self.size)
        client.requests.append(request)
        self.leave(request, "release")

    def check(self) -> None:
        """The sides agree, each is whole, and every block stands for what its request thinks."""
        if not self.clients:
            return
        assert self._each(self._indexed) <= {self.keys(history)[-1] for history in self._sealed}
        for client in self.clients:
            self._check_client(client)
        for request in self.open_requests():
            self._check_request(request)

    def _check_client(self, client: Client) -> None:
        pools = client.pools
        assert self._each(lambda side: pools[side].check_integrity()) == ""
        self._each(lambda side: (pools[side].available(), pools[side].unused()))
        for side, pool in enumerate(pools):
            assert pool.held_blocks() == len(set().union(*(request.held(side) for request in client.requests)))
        snapshots = [pool.stats() for pool in pools]
        self._each(lambda side: {name: getattr(snapshots[side], name) for name in COMPARED})
        assert snapshots[0].evicted_while_held == 0
        assert snapshots[0].hash_collisions == 0 or self._kind != "true"

    def _check_request(self, request: Request) -> None:
        self._each(lambda side: (request.tables[side].keys, len(request.tables[side].blocks)))
        self._check_content(request, len(request.tokens))


def _counts(reclaimed: Sequence[Any]) -> list[tuple[str, int]]:
    """How many blocks of which request every dead process had; a process that had none counts too."""
    return sorted(
        (label, len(blocks)) for gone in reclaimed for label, blocks in (*gone.blocks.items(), ("process", ()))
    )
