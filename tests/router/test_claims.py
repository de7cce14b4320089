from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence

import pytest

from kvpool.directory import Space
from kvpool.directory.exchange import Claim
from kvpool.directory.memory import MemoryServer
from kvpool.directory.memory_exchange import MemoryClaimStore
from router.claim_keeper import ClaimKeeper, KeeperThread
from router.claims import ClaimOutcome, Claims
from tests.fakes.speaker import packed

SPACE = Space("c", "ab" * 8, 16)
PROMPT = packed(range(40))
LEAST_TOKENS = 256
ANSWER_S = 0.02


class Known:
    """What is known of prompts: so many blocks of any, and bookings that the test makes."""

    def __init__(self) -> None:
        self.blocks = 0
        self.booked: dict[str, asyncio.Event] = {}
        self.waits: list[float] = []

    def known_blocks(self, keys: bytes) -> int:
        return min(self.blocks, len(keys) // 16)

    def book(self, request_id: str) -> None:
        self.booked.setdefault(request_id, asyncio.Event()).set()

    async def wait_booked(self, request_id: str, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        event = self.booked.setdefault(request_id, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        return True


class Router:
    """Claims over a keeper that is stepped as soon as it is asked, unless the test holds it up."""

    def __init__(self, server: MemoryServer, origin: str, known: Known, least_tokens: int = LEAST_TOKENS) -> None:
        self.known = known
        self.store = MemoryClaimStore(server, SPACE)
        self.keeper = ClaimKeeper(self.store, lambda: 1.0)
        self.noted: list[ClaimOutcome] = []
        self.is_slow = False
        self.asked = 0
        take = self.keeper.take

        def take_and_step(claim: Claim) -> asyncio.Future[str | None]:
            self.asked += 1
            answer = take(claim)
            if not self.is_slow:
                self.keeper.step()
            return answer

        self.keeper.take = take_and_step  # type: ignore[method-assign]
        self.claims = Claims(
            self.keeper,
            known,
            clock=asyncio.get_running_loop().time,
            origin=origin,
            block_tokens=16,
            least_tokens=least_tokens,
            noted=lambda outcome, seconds: self.noted.append(outcome),
            wait_s=0.25,
            answer_s=ANSWER_S,
        )

    def holder(self) -> str:
        """Who has the first block of the prompt; "nobody/0" if nobody has."""
        self.keeper.step()
        holder = self.store.take([Claim(PROMPT[:16], "nobody/0")], 1.0)[0]
        self.store.release([Claim(PROMPT[:16], "nobody/0")])
        return holder


@pytest.fixture
async def routers() -> list[Router]:
    """Two, of one space, that know the same."""
    server, known = MemoryServer(random.Random(1), clock=lambda: 1.0), Known()
    return [Router(server, f"{index:016x}", known) for index in range(2)]


async def test_a_cold_prefix_is_claimed_until_the_first_token(routers: list[Router]) -> None:
    one, _ = routers
    with one.claims.place("r", PROMPT) as place:
        await place.settle()
        assert one.holder() == f"{0:016x}/r"
        assert one.claims.report() == {"held": 1, "won": 1, "lost": 0, "timed_out": 0, "unavailable": 0}
        place.end()
        assert one.holder() == "nobody/0"
    assert one.noted == ["won"]
    assert one.claims.report()["held"] == 0


@pytest.mark.parametrize("known_blocks", [40, 25, 24, 0])
async def test_only_a_long_cold_part_is_claimed_by_its_first_block(routers: list[Router], known_blocks: int) -> None:
    one, _ = routers
    one.known.blocks = known_blocks
    with one.claims.place("r", PROMPT) as place:
        await place.settle()
        is_cold = (40 - known_blocks) * 16 >= LEAST_TOKENS
        assert one.noted == (["won"] if is_cold else [])
        if is_cold:
            key = PROMPT[16 * known_blocks :][:16]
            assert one.store.take([Claim(key, "x")], 1.0) == [f"{0:016x}/r"]
    assert one.asked == int(is_cold)


@pytest.mark.parametrize("keys", [b"", packed(range(15))])
async def test_short_prompts_are_not_looked_at(routers: list[Router], keys: bytes) -> None:
    one, _ = routers
    one.known.known_blocks = None  # type: ignore[assignment]
    with one.claims.place("r", keys) as place:
        await place.settle()
    assert one.noted == []


async def test_claiming_can_be_switched_off() -> None:
    router = Router(MemoryServer(random.Random(1)), "0" * 16, Known(), least_tokens=0)
    with router.claims.place("r", PROMPT) as place:
        await place.settle()
    assert router.asked == 0


async def test_who_loses_waits_for_the_winners_booking(routers: list[Router]) -> None:
    one, two = routers
    with one.claims.place("r1", PROMPT) as first, two.claims.place("r2", PROMPT) as second:
        await first.settle()
        waiting = asyncio.create_task(second.settle())
        await asyncio.sleep(0.02)
        assert not waiting.done()
        two.known.book("r1")
        await waiting
        assert two.noted == ["lost"]
    assert one.holder() == "nobody/0"


async def test_a_wait_is_bounded(routers: list[Router]) -> None:
    one, two = routers
    with one.claims.place("r1", PROMPT) as first, two.claims.place("r2", PROMPT) as second:
        await first.settle()
        await second.settle()
        assert two.noted == ["timed_out"]
        assert 0.0 < two.known.waits[0] <= 0.25


async def test_requests_of_one_process_agree_without_the_store(routers: list[Router]) -> None:
    one, _ = routers
    places = [one.claims.place(f"r{index}", PROMPT) for index in range(8)]
    settling = [asyncio.create_task(place.settle()) for place in places]
    await asyncio.sleep(0.01)
    assert [task.done() for task in settling] == [True] + [False] * 7
    one.known.book("r0")
    await asyncio.gather(*settling)
    assert sorted(one.noted) == ["lost"] * 7 + ["won"]
    assert one.asked == 1
    for place in places[1:]:
        place.end()
    assert one.holder() == f"{0:016x}/r0"
    places[0].end()
    assert one.holder() == "nobody/0"


async def test_those_who_follow_one_that_lost_wait_for_the_winner(routers: list[Router]) -> None:
    one, two = routers
    first = one.claims.place("r1", PROMPT)
    await first.settle()
    places = [two.claims.place(f"q{index}", PROMPT) for index in range(3)]
    settling = [asyncio.create_task(place.settle()) for place in places]
    await asyncio.sleep(0.01)
    two.known.book("r1")
    await asyncio.gather(*settling)
    assert two.noted == ["lost"] * 3
    assert two.asked == 1


async def test_a_store_that_is_slow_is_not_waited_for(routers: list[Router]) -> None:
    one, _ = routers
    one.is_slow = True
    with one.claims.place("r1", PROMPT) as place:
        await place.settle()
        assert one.noted == ["unavailable"]
        assert one.holder() == f"{0:016x}/r1"  # it came late, and counts
    assert one.holder() == "nobody/0"


async def test_a_store_that_nobody_got_round_to_asking_is_not_called_slow(routers: list[Router]) -> None:
    """Its time runs from when it is asked: until then it is this process that is busy."""
    one, _ = routers
    one.is_slow = True
    with one.claims.place("r1", PROMPT) as place:
        settling = asyncio.create_task(place.settle())
        await asyncio.sleep(3 * ANSWER_S)
        assert not settling.done()
        one.keeper.step()
        await settling
    assert one.noted == ["won"]


async def test_a_store_that_is_asked_and_hangs_is_given_up() -> None:
    go_on = threading.Event()

    class Hanging(MemoryClaimStore):
        def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
            if claims:
                go_on.wait(20.0)
            return super().take(claims, life_s)

    clock = asyncio.get_running_loop().time
    store = Hanging(MemoryServer(random.Random(1)), SPACE)
    keeper = ClaimKeeper(store, clock)
    thread = KeeperThread(keeper, store)
    claims = Claims(keeper, Known(), clock=clock, block_tokens=16, least_tokens=LEAST_TOKENS, wait_s=20.0)
    with claims.place("r1", PROMPT) as place:
        began_at = clock()
        await place.settle()
        assert clock() - began_at < 10.0  # of 20 that it may wait in all
        go_on.set()
    thread.close()
    assert claims.report()["unavailable"] == 1


async def test_while_an_answer_is_late_nobody_else_waits_for_one(routers: list[Router]) -> None:
    one, _ = routers
    one.is_slow = True
    late, other = packed(range(100, 140)), packed(range(200, 240))
    await one.claims.place("r1", late).settle()
    for index in range(3):
        with one.claims.place(f"q{index}", other) as place:
            await place.settle()
    assert one.asked == 1
    assert one.noted == ["unavailable"] * 4
    one.keeper.step()
    await asyncio.sleep(0)
    one.is_slow = False
    with one.claims.place("r2", PROMPT) as place:
        await place.settle()
    assert one.noted[-1] == "won"


async def test_a_store_that_is_down_is_not_waited_for() -> None:
    server = MemoryServer(random.Random(1))
    server.up = False
    router = Router(server, "0" * 16, Known())
    for _ in range(3):
        with router.claims.place("r", PROMPT) as place:
            await place.settle()
    assert router.noted == ["unavailable"] * 3
    assert router.claims.report()["held"] == 0


async def test_without_a_store_the_requests_of_a_process_agree() -> None:
    known = Known()
    claims = Claims(None, known, clock=asyncio.get_running_loop().time, block_tokens=16, least_tokens=256)
    first, second = claims.place("a", PROMPT), claims.place("b", PROMPT)
    await first.settle()
    known.book("a")
    await second.settle()
    assert (claims.report()["unavailable"], claims.report()["lost"]) == (1, 1)


@pytest.mark.parametrize("moment", ["asking", "waiting"])
async def test_a_request_that_is_cancelled_leaves_nothing(routers: list[Router], moment: str) -> None:
    one, two = routers
    if moment == "waiting":
        await two.claims.place("other", PROMPT).settle()
    one.is_slow = moment == "asking"

    async def run() -> None:
        with one.claims.place("r", PROMPT) as place:
            await place.settle()
            await asyncio.Event().wait()

    task = asyncio.create_task(run())
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    one.keeper.step()
    assert one.claims.report()["held"] == 0
    assert one.holder() == ("nobody/0" if moment == "asking" else f"{1:016x}/other")
    one.is_slow = False
    with one.claims.place("again", PROMPT) as place:  # nobody follows the one that is gone
        one.known.book("other")
        await place.settle()
    assert one.noted[-1:] == (["won"] if moment == "asking" else ["lost"])


async def test_nothing_raises(routers: list[Router], caplog: pytest.LogCaptureFixture) -> None:
    one, _ = routers

    def broken(keys: bytes) -> int:
        raise KeyError("a bug")

    one.known.known_blocks = broken  # type: ignore[method-assign]
    with one.claims.place("r", PROMPT) as place:
        await place.settle()
        place.end()
    assert "could not be looked up" in caplog.text

    def refuse(outcome: ClaimOutcome, seconds: float) -> None:
        raise KeyError("a bug")

    claims = Claims(
        None, Known(), clock=asyncio.get_running_loop().time, block_tokens=16, least_tokens=16, noted=refuse
    )
    await claims.place("r", PROMPT).settle()
    assert claims.report()["unavailable"] == 1
