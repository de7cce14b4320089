from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence

import pytest

from kvpool.directory import DirectoryUnavailable, Space
from kvpool.directory.exchange import Claim
from kvpool.directory.memory import MemoryServer
from kvpool.directory.memory_exchange import MemoryClaimStore
from router.claim_keeper import LIFE_S, PAUSE_S, ClaimKeeper, KeeperThread

SPACE = Space("c", "ab" * 8, 2)
KEY = bytes(16)
MINE, THEIRS = Claim(KEY, "me/1"), Claim(KEY, "them/1")


class Rig:
    """A keeper in the test's time, and a store of somebody else."""

    def __init__(self) -> None:
        self.now = 10.0
        self.server = MemoryServer(random.Random(1), clock=lambda: self.now)
        self.calls: list[str] = []
        rig = self

        class Noting(MemoryClaimStore):
            def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
                rig.calls.append(f"take {len(claims)}")
                return super().take(claims, life_s)

            def renew(self, claims: Sequence[Claim], life_s: float) -> None:
                rig.calls.append(f"renew {len(claims)}")
                super().renew(claims, life_s)

            def release(self, claims: Sequence[Claim]) -> None:
                rig.calls.append(f"release {len(claims)}")
                super().release(claims)

        self.store = Noting(self.server, SPACE)
        self.other = MemoryClaimStore(self.server, SPACE)
        self.keeper = ClaimKeeper(self.store, lambda: self.now)

    async def answer(self, claim: Claim = MINE) -> str | None:
        answer = self.keeper.take(claim)
        self.keeper.step()
        return await answer

    def holder(self) -> str:
        """Who has the key; takes it if nobody has."""
        return self.other.take([THEIRS], LIFE_S)[0]


async def test_a_claim_is_held_until_it_is_released() -> None:
    rig = Rig()
    assert await rig.answer() == MINE.holder
    assert (rig.keeper.held, rig.holder()) == (1, MINE.holder)
    rig.keeper.release(MINE)
    rig.keeper.step()
    assert (rig.keeper.held, rig.holder()) == (0, THEIRS.holder)
    assert rig.keeper.due_s() is None


async def test_who_is_late_hears_who_has_it_and_holds_nothing() -> None:
    rig = Rig()
    rig.holder()
    assert await rig.answer() == THEIRS.holder
    assert rig.keeper.held == 0
    assert rig.keeper.due_s() is None


async def test_what_is_held_outlives_its_life() -> None:
    rig = Rig()
    await rig.answer()
    for _ in range(10):
        due_s = rig.keeper.due_s()
        assert due_s is not None
        assert due_s <= LIFE_S / 2
        rig.now += due_s + 0.001
        rig.keeper.step()
    assert rig.now > 10.0 + 2 * LIFE_S
    assert rig.holder() == MINE.holder


async def test_a_claim_dies_with_its_process() -> None:
    rig = Rig()
    await rig.answer()
    rig.now += LIFE_S + 0.001
    assert rig.holder() == THEIRS.holder


async def test_a_claim_that_another_got_meanwhile_is_neither_renewed_nor_released() -> None:
    rig = Rig()
    await rig.answer()
    rig.now += LIFE_S + 0.001
    rig.holder()
    rig.keeper.step()
    rig.keeper.release(MINE)
    rig.keeper.step()
    assert rig.holder() == THEIRS.holder


async def test_many_go_over_together() -> None:
    rig = Rig()
    claims = [Claim(bytes([index]) * 16, f"me/{index}") for index in range(20)]
    answers = [rig.keeper.take(claim) for claim in claims]
    rig.keeper.step()
    assert await asyncio.gather(*answers) == [claim.holder for claim in claims]
    for claim in claims:
        rig.keeper.release(claim)
    rig.keeper.step()
    assert rig.calls == ["take 20", "release 20"]


async def test_one_that_is_given_up_before_it_is_taken_is_released() -> None:
    rig = Rig()
    rig.keeper.take(MINE)
    rig.keeper.release(MINE)
    rig.keeper.step()
    assert rig.keeper.held == 0
    assert rig.holder() == THEIRS.holder


async def test_when_the_store_does_not_answer_all_are_told_and_it_is_left_alone_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig()
    await rig.answer(Claim(bytes([7]) * 16, "me/7"))
    rig.server.up = False
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await rig.answer() is None
    assert len(caplog.records) == 1
    assert rig.calls.count("take 1") == 2
    assert rig.keeper.is_silent
    rig.keeper.release(Claim(bytes([7]) * 16, "me/7"))
    rig.keeper.step()
    assert rig.keeper.held == 0
    rig.server.up = True
    assert await rig.answer() is None
    rig.now += PAUSE_S + 0.001
    assert await rig.answer() == MINE.holder


async def test_what_is_held_is_renewed_after_a_short_failure() -> None:
    rig = Rig()
    await rig.answer()
    rig.server.up = False
    rig.now += rig.keeper.due_s() or 0.0
    rig.now += 0.001
    rig.keeper.step()
    rig.server.up = True
    due_s = rig.keeper.due_s()
    assert due_s is not None
    rig.now += due_s + 0.001
    rig.keeper.step()
    assert rig.calls[-1] == "renew 1"
    rig.now += LIFE_S / 2
    assert rig.holder() == MINE.holder


async def test_it_tells_for_how_long_the_store_has_been_asked() -> None:
    rig = Rig()
    seen: list[float] = []

    class Slow(MemoryClaimStore):
        def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
            rig.now += 0.7
            seen.append(keeper.asking_s)
            return super().take(claims, life_s)

        def renew(self, claims: Sequence[Claim], life_s: float) -> None:
            rig.now += 0.3
            seen.append(keeper.asking_s)
            raise DirectoryUnavailable("gone")

    keeper = ClaimKeeper(Slow(rig.server, SPACE), lambda: rig.now)
    keeper.take(MINE)
    rig.now += 5.0  # nobody has asked it yet
    assert keeper.asking_s == 0.0
    keeper.step()
    assert keeper.asking_s == 0.0
    rig.now += LIFE_S / 2
    keeper.step()
    assert keeper.asking_s == 0.0
    assert seen == pytest.approx([0.7, 0.3])


@pytest.mark.parametrize("up", [True, False])
async def test_its_first_request_finds_a_store_that_was_called_before(up: bool) -> None:
    rig = Rig()
    rig.server.up = up
    rig.keeper.warm_up()
    assert rig.calls == ["take 0", "renew 0", "release 0"][: 3 if up else 1]
    assert (rig.keeper.held, rig.keeper.is_silent) == (0, False)
    rig.server.up = True
    assert await rig.answer() == MINE.holder


async def test_after_its_end_nothing_is_claimed() -> None:
    rig = Rig()
    thread = KeeperThread(rig.keeper, rig.store)
    assert await rig.keeper.take(MINE) == MINE.holder
    thread.close()
    thread.close()
    assert thread.failure is None
    assert rig.holder() == THEIRS.holder
    assert await rig.keeper.take(MINE) is None
    rig.keeper.release(MINE)
    assert rig.keeper.is_silent


async def test_a_bug_answers_those_who_wait_and_shows(caplog: pytest.LogCaptureFixture) -> None:
    class Buggy(MemoryClaimStore):
        def take(self, claims: Sequence[Claim], life_s: float) -> list[str]:
            raise KeyError("a bug")

    server = MemoryServer(random.Random(1))
    store = Buggy(server, SPACE)
    keeper = ClaimKeeper(store, lambda: 1.0)
    with caplog.at_level(logging.ERROR):
        thread = KeeperThread(keeper, store)
        assert await keeper.take(MINE) is None
        thread.close()
    assert isinstance(thread.failure, KeyError)
    assert await keeper.take(MINE) is None


async def test_a_directory_that_is_down_at_the_end_is_no_error() -> None:
    rig = Rig()
    await rig.answer()
    rig.server.up = False
    with pytest.raises(DirectoryUnavailable):
        rig.keeper.close()
    rig.keeper.close()
