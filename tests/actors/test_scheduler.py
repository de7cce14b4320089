"""The scheduler over a real pool of its own, and several of them over one pool that follows the rules between processes."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.request import GenerateRequest, Sampling
from actors.scheduler import Scheduler, Work
from actors.sequence import Sequence
from kvpool import BlockGeometry, KeyRoot, KeySpace, Pool, Region
from tests.fakes.shared_pool import PoolView, SharedPool

BLOCK_TOKENS = 4
KEYS = KeySpace(bytes(range(32)))
ROOT = KEYS.root(KeyRoot("toy", BLOCK_TOKENS, "float32"))
GEOMETRY = BlockGeometry(1, 1, 1, BLOCK_TOKENS, "float32")


class Process:
    """A scheduler whose sequences get token after token until they are done. `plan` and `commit` make a step."""

    def __init__(self, pool: Pool, *, step_tokens: int = 64, max_running: int = 8) -> None:
        self.pool = pool
        self.copies: list[tuple[int, int]] = []
        self.scheduler = Scheduler(
            pool, lambda *blocks: self.copies.append(blocks), step_tokens=step_tokens, max_running=max_running
        )
        self.live: list[Sequence] = []
        self.planned: list[Work] = []

    def add(self, name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> Sequence:
        request = GenerateRequest(name, tuple(prompt), Sampling(max_tokens, temperature=0.0), priority=priority)
        sequence = Sequence.of(request, ROOT, KEYS, BLOCK_TOKENS, len(self.live) + 1)
        self.live.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def plan(self) -> list[Work]:
        self.planned, _ = self.scheduler.plan()
        for work in self.planned:
            table = work.sequence.table
            assert table is not None
            assert len(table) * BLOCK_TOKENS >= work.start + work.count
        return self.planned

    def commit(self) -> None:
        sampling = [work.sequence if work.samples else None for work in self.planned]
        tokens = {index: len(s.tokens) % 7 for index, s in enumerate(sampling) if s is not None}
        self.scheduler.commit(self.planned, tokens)
        for sequence in sampling:
            if sequence is not None and sequence.generated >= sequence.request.sampling.max_tokens:
                self.end(sequence)
        self.planned = []

    def step(self) -> list[Work]:
        planned = self.plan()
        self.commit()
        return planned

    def end(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.live.remove(sequence)

    @property
    def running(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.running]

    @property
    def waiting(self) -> list[str]:
        return [sequence.request_id for sequence in self.scheduler.waiting]


@contextmanager
def opened(blocks: int) -> Iterator[Pool]:
    """A real pool that must come back whole."""
    with (
        tempfile.TemporaryDirectory() as directory,
        Region.create(Path(directory), "scheduler", GEOMETRY, blocks, bytes(32), random.Random(1)) as region,
        Pool.create(region) as pool,
    ):
        yield pool
        assert pool.held_blocks() == 0
        assert pool.check_integrity() == ""


@contextmanager
def scripted(blocks: int, processes: int) -> Iterator[list[Pool]]:
    with opened(blocks) as pool:
        shared = SharedPool(pool)
        yield [shared.view().as_pool() for _ in range(processes)]
        assert not any(view.ticket for view in shared.views), "nobody waits any more"


@contextmanager
def attached(blocks: int, processes: int) -> Iterator[list[Pool]]:
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        first = Region.create(Path(directory), "scheduler", GEOMETRY, blocks, bytes(32), random.Random(1))
        regions = [first, *(Region.attach(first.path) for _ in range(processes - 1))]
        pools = [stack.enter_context(Pool.create(stack.enter_context(region))) for region in regions]
        yield pools
        assert all(pool.held_blocks() == 0 and pool.demand() == 0 for pool in pools)
        assert pools[0].check_integrity() == ""


shared = pytest.mark.parametrize("shared", [scripted, attached])


@pytest.fixture
def pair() -> Iterator[tuple[PoolView, PoolView]]:
    with opened(10) as pool:
        both = SharedPool(pool)
        yield both.view(), both.view()


def prompt(length: int, first: int = 0) -> list[int]:
    return [first, *range(100, 99 + length)]


# ------------------------------------------------------------------------------------------------- one process


def test_one_process_preempts_its_youngest_and_finishes_all_in_order_of_age() -> None:
    with opened(7) as pool:
        process = Process(pool)
        for number in range(3):
            process.add(f"r{number}", prompt(9, number), 15)
        ended: list[str] = []
        for _ in range(200):
            before = [sequence.request_id for sequence in process.live]
            process.step()
            ended += [name for name in before if name not in [s.request_id for s in process.live]]
        assert ended == ["r0", "r1", "r2"]
        assert process.scheduler.preemptions > 0


def test_an_admission_leaves_a_spare_block_for_each_that_runs() -> None:
    with opened(7) as pool:
        process = Process(pool)
        process.add("a", prompt(12, 1), 3)
        process.step()
        process.add("b", prompt(12, 2), 1)
        process.step()
        assert process.running == ["a"], "3 blocks are free, b needs 3, and a may need one more"
        process.step()
        process.plan()
        assert process.running == ["b"]
        process.commit()
        while process.live:
            process.step()
        assert process.scheduler.preemptions == 0


def test_a_prompt_that_a_running_one_computes_is_passed_over_and_then_hits() -> None:
    with opened(16) as pool:
        process = Process(pool, step_tokens=4)
        first, second = process.add("a", prompt(16), 1), process.add("b", prompt(16), 1)
        while first in process.live:
            process.step()
            assert "b" not in process.running
        process.step()
        assert second.cached_tokens == 15
        assert len(process.copies) == 1


def test_without_room_a_prefix_is_not_matched_again_in_every_step() -> None:
    with opened(10) as pool:
        view = SharedPool(pool).view()
        process = Process(view.as_pool())
        process.add("a", prompt(17, 1), 15)
        process.step()
        process.add("b", prompt(24, 2), 1)
        process.step()
        tried = view.calls["match"]
        for _ in range(10):
            process.step()
        assert view.calls["match"] == tried, "nothing was released"
        while process.live:
            process.step()


def test_a_copied_tail_is_let_go_before_the_request_decodes() -> None:
    """What a request needs for its admission only is not kept for as long as it runs."""
    with opened(16) as pool:
        process = Process(pool)
        process.add("first", prompt(8), 1)
        process.step()
        again = process.add("again", prompt(8), 20)
        while process.live:
            process.plan()
            assert again.table is not None
            assert pool.held_blocks() == len(set(again.table.blocks))
            process.commit()
        assert len(process.copies) == 1


def test_who_waits_is_admitted_by_priority_then_arrival_and_nobody_who_runs_makes_room() -> None:
    with opened(20) as pool:
        process = Process(pool, max_running=1)
        process.add("runs", prompt(4, 9), 5, priority=7)
        process.step()
        for number, priority in enumerate([0, 3, -2, 3, 0]):
            process.add(f"{priority}/{number}", prompt(4, number), 1, priority=priority)
        began: list[str] = []
        while process.live:
            process.plan()
            began += [name for name in process.running if name not in began]
            process.commit()
        assert began == ["runs", "-2/2", "0/0", "0/4", "3/1", "3/3"]
        assert process.scheduler.preemptions == 0


def test_the_last_by_priority_then_arrival_makes_room() -> None:
    """So the first always ends without having been preempted, whoever came before it."""
    with opened(7) as pool:
        process = Process(pool)
        for number, priority in enumerate([1, 1, 0]):
            process.add(f"r{number}", prompt(9, number), 15, priority=priority)
        ended: list[str] = []
        lost: set[str] = set()
        while process.live:
            before, running = list(process.live), set(process.running)
            process.step()
            ended += [sequence.request_id for sequence in before if sequence not in process.live]
            lost |= running & set(process.waiting)
        assert ended == ["r2", "r0", "r1"]
        assert lost
        assert "r2" not in lost


def test_one_of_a_lower_priority_is_tried_though_an_older_one_finds_no_room() -> None:
    with opened(10) as pool:
        process = Process(pool)
        process.add("runs", prompt(17, 1), 12)
        process.step()
        process.add("large", prompt(24, 2), 1, priority=1)
        process.step()
        process.step()
        assert process.waiting == ["large"]
        process.add("small", prompt(4, 3), 1, priority=0)
        process.plan()
        assert process.running == ["runs", "small"]
        process.commit()
        while process.live:
            process.step()


@pytest.mark.parametrize("preempted", [False, True])
def test_who_has_logits_and_no_token_yet_keeps_its_place_and_computes_nothing(preempted: bool) -> None:
    with opened(10) as pool:
        process = Process(pool)
        other = process.add("other", prompt(6, 1), 27)
        waits = process.add("waits", prompt(8, 2), 2)
        for _ in range(2):
            planned = process.plan()
            late = [work for work in planned if work.sequence is waits]
            process.scheduler.commit(planned, {i: 5 for i, work in enumerate(planned) if work.sequence is other})
            waits.logits = torch.zeros(1) if late else waits.logits
        assert not late
        assert (waits.pending, waits.computed, process.running) == (0, 8, ["other", "waits"])
        assert waits.uncached == 0
        while preempted and process.scheduler.running != [other]:
            planned = process.plan()
            process.scheduler.commit(planned, dict.fromkeys(range(len(planned)), 5))
        assert (waits.logits is None) == preempted, "what was computed in blocks that are gone is computed again"
        assert waits.pending == (8 if preempted else 0)
        process.end(other)
        if not preempted:
            process.scheduler.commit([Work(waits, waits.computed, 0)], {0: 5})
            waits.logits = None
        while process.live:
            process.step()
        assert waits.generated == 2


def reach(process: Process, state: str) -> Sequence:
    """A request in that state, in a pool of 10 blocks and steps of 4 tokens; most have another one beside them."""
    steps = 0
    if state == "without room":
        process.add("other", prompt(30, 1), 9)
        leaver = process.add("leaver", prompt(32, 2), 1)
        steps = 9
    elif state == "passed over":
        process.add("other", prompt(16), 1)
        leaver = process.add("leaver", prompt(16), 1)
        steps = 1
    elif state == "prefilling":
        leaver = process.add("leaver", prompt(16), 1)
        process.add("waits for it", prompt(16), 1)
        steps = 1
    elif state == "decoding":
        leaver = process.add("leaver", prompt(9), 9)
        process.add("other", prompt(9), 9)
        steps = 5
    else:
        process.add("other", prompt(16, 1), 24)
        leaver = process.add("leaver", prompt(8, 2), 32)
        while not process.scheduler.preemptions:
            process.step()
    for _ in range(steps):
        process.step()
    return leaver


@pytest.mark.parametrize(
    ("state", "runs", "generates"),
    [
        ("without room", False, False),
        ("passed over", False, False),
        ("prefilling", True, False),
        ("decoding", True, True),
        ("preempted", False, True),
    ],
)
def test_a_request_may_leave_in_any_state(state: str, runs: bool, generates: bool) -> None:
    """It leaves nothing behind, and whoever waited for it goes on."""
    with opened(10) as pool:
        process = Process(pool, step_tokens=4)
        leaver = reach(process, state)
        assert ("leaver" in process.running, "leaver" in process.waiting) == (runs, not runs)
        assert (leaver.generated > 0) == generates
        process.end(leaver)
        assert "leaver" not in [*process.running, *process.waiting]
        running = [sequence.table for sequence in process.scheduler.running]
        assert pool.held_blocks() == len({block for table in running if table for block in table.blocks})
        process.scheduler.finish(leaver)  # who was told twice
        steps = 0
        while process.live:
            process.step()
            steps += 1
            assert steps < 60, process.waiting
        assert pool.stats().second_releases == 0


@pytest.mark.parametrize("guard", [False, True])
def test_token_ids_are_compared_in_guard_mode_only(pair: tuple[PoolView, PoolView], guard: bool) -> None:
    view, _ = pair
    view.guard = guard
    process = Process(view.as_pool())
    process.add("a", prompt(8), 2)
    process.step()
    process.step()
    assert view.matched_with_tokens == [guard]


def test_a_block_that_is_sealed_but_not_found_is_computed_again_by_the_next() -> None:
    with opened(16) as pool:
        view = SharedPool(pool).view()
        view.indexes = False
        process = Process(view.as_pool(), step_tokens=8)
        names = [process.add(name, prompt(16), 6) for name in "abc"]
        for _ in range(40):
            process.step()
        assert not process.live
        assert {len(sequence.tokens) for sequence in names} == {22}
        assert {sequence.cached_tokens for sequence in names} == {0}


def test_processes_that_compute_the_same_prompt_end_up_with_the_same_blocks(
    pair: tuple[PoolView, PoolView],
) -> None:
    processes = [Process(view.as_pool()) for view in pair]
    sequences = [process.add("same", prompt(8), 2) for process in processes]
    for process in processes:
        process.plan()
    tables = [sequence.table for sequence in sequences]
    assert tables[0] is not None
    assert tables[1] is not None
    assert not set(tables[0].blocks) & set(tables[1].blocks)
    for process in processes:
        process.commit()
    assert tables[0].blocks == tables[1].blocks
    for process in processes:
        process.step()
    assert not processes[0].live


# ------------------------------------------------------------------------------------------------- the line


def test_demand_preempts_the_youngest_until_it_is_met_and_admits_nobody(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    process = Process(ours.as_pool())
    for number in range(3):
        process.add(f"r{number}", prompt(5, number), 3)
    process.step()
    assert process.running == ["r0", "r1", "r2"]
    assert ours.calls["demand"] == 1
    theirs.wait_in_line(7)  # 4 are free
    process.add("late", prompt(2, 9), 1)
    planned = process.step()
    assert [work.sequence.request_id for work in planned] == ["r0"]
    assert process.waiting == ["r1", "r2", "late"], "at their old places"
    assert process.scheduler.preemptions == 2
    assert (ours.ticket, ours.wanted) == (2, 3), "r1: one cached block, one to compute, one spare for r0"
    theirs.leave_line()
    for _ in range(12):
        process.step()
    assert not process.live


def test_while_others_wait_nobody_is_admitted_but_takes_a_place(
    pair: tuple[PoolView, PoolView], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _ = pair
    process = Process(ours.as_pool())
    process.add("a", prompt(7), 1)
    with monkeypatch.context() as patch:
        patch.setattr(ours, "demand", lambda: 1)
        for _ in range(3):
            assert process.step() == []
            assert (ours.ticket, ours.wanted) == (1, 2)
        assert ours.calls["wait_in_line"] == 1
    process.step()
    assert not process.live


def test_driven_out_by_an_older_place_a_sequence_keeps_its_own(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    other = theirs.table("other")
    assert theirs.allocate(other, 10)
    theirs.wait_in_line(3)
    process = Process(ours.as_pool())
    process.add("a", prompt(12), 4)
    process.step()
    theirs.release(other)
    process.step()
    assert (process.running, ours.ticket, ours.wanted) == (["a"], 2, 1)
    theirs.wait_in_line(9)
    process.step()
    assert (process.waiting, ours.ticket) == (["a"], 2)
    theirs.wait_in_line(3)
    process.step()
    assert (process.running, ours.ticket, ours.wanted) == (["a"], 2, 1)
    while process.live:
        process.step()
    assert ours.ticket == 0


def test_blocks_that_others_here_hold_too_do_not_count_as_given(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    process = Process(ours.as_pool())
    process.add("first", prompt(8), 9)
    process.step()
    process.step()
    for name in ("second", "third"):
        process.add(name, [*prompt(8), ord(name[0])], 3)
    process.step()
    assert ours.held_blocks() == 2 + 3, "the prompt once, a block of its own for each"
    theirs.wait_in_line(6)
    process.step()
    assert process.running == ["first", "second"], "one block was short, and one is what the youngest had alone"
    theirs.leave_line()
    while process.live:
        process.step()


def test_an_admission_without_room_waits_in_line_and_keeps_its_place_until_it_ends(
    pair: tuple[PoolView, PoolView],
) -> None:
    ours, theirs = pair
    other = theirs.table("other")
    assert theirs.allocate(other, 8)
    process = Process(ours.as_pool())
    process.add("a", prompt(15), 2)
    assert process.step() == []
    assert (ours.ticket, ours.wanted, ours.held_blocks()) == (1, 4, 0)
    process.step()
    assert ours.ticket == 1, "the same place"
    theirs.release(other)
    process.step()
    assert process.running == ["a"]
    assert (ours.ticket, ours.wanted) == (1, 1), "nobody asks it to give up what it waited for"
    process.step()
    assert not process.live
    assert ours.ticket == 0


def test_what_is_cached_counts_as_wanted_unless_somebody_holds_it(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    process = Process(ours.as_pool())
    process.add("warm", prompt(12), 1)
    process.step()
    other = theirs.table("other")
    assert theirs.allocate(other, 7)
    process.add("again", prompt(20), 1)
    process.step()
    assert (theirs.available(), ours.wanted) == (3, 5), "3 are free only as long as nobody uses the cached prefix"
    reader = theirs.table("reader")
    keys = KEYS.block_keys(ROOT, prompt(12), BLOCK_TOKENS)
    assert theirs.match(reader, keys) == 3
    process.step()
    assert ours.wanted == 2
    for table in (other, reader):
        theirs.release(table)
    process.step()
    assert not process.live


@pytest.mark.parametrize("how", ["finish", "force"])
def test_the_line_is_left_when_nothing_waits_any_more(pair: tuple[PoolView, PoolView], how: str) -> None:
    ours, theirs = pair
    other = theirs.table("other")
    assert theirs.allocate(other, 10)
    process = Process(ours.as_pool())
    first, second = process.add("a", prompt(8, 1), 1), process.add("b", prompt(16, 2), 1)
    process.step()
    assert ours.wanted == 2
    end = process.scheduler.finish if how == "finish" else lambda s: process.scheduler.force_out(s, "test")
    end(first)
    process.step()
    assert (ours.ticket, ours.wanted) == (1, 4), "the process keeps its place for the next of its own"
    end(second)
    assert ours.ticket == 0
    theirs.release(other)


def test_a_sequence_in_line_that_ends_while_it_runs_gives_the_place_to_nobody(
    pair: tuple[PoolView, PoolView],
) -> None:
    ours, theirs = pair
    other = theirs.table("other")
    assert theirs.allocate(other, 8)
    process = Process(ours.as_pool())
    first = process.add("a", prompt(12, 1), 9)
    process.add("b", prompt(28, 2), 1)
    process.step()
    theirs.release(other)
    process.step()
    assert (process.running, process.waiting) == (["a"], ["b"])
    assert (ours.ticket, ours.wanted) == (1, 1), "a's place, not b's"
    process.end(first)
    theirs.wait_in_line(1)
    other = theirs.table("other")
    assert theirs.allocate(other, 6)
    process.step()
    assert ours.ticket == 3, "b begins at the end of the line"
    theirs.leave_line()
    theirs.release(other)
    process.step()
    assert not process.live


def test_a_sequence_admitted_without_a_place_does_not_inherit_one(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    other, more = theirs.table("other"), theirs.table("more")
    assert theirs.allocate(other, 5)
    assert theirs.allocate(more, 5)
    process = Process(ours.as_pool())
    first = process.add("a", prompt(12, 1), 20)
    second = process.add("b", prompt(12, 2), 20)
    process.step()
    theirs.release(other)
    process.step()
    assert (process.running, process.waiting, ours.ticket) == (["a"], ["b"], 1)
    theirs.release(more)
    process.step()
    assert process.running == ["a", "b"]
    process.end(first)
    assert ours.ticket == 0
    process.end(second)


def test_a_place_whose_sequence_is_gone_is_left_when_the_next_finds_room(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    other = theirs.table("other")
    assert theirs.allocate(other, 5)
    process = Process(ours.as_pool())
    first, second = process.add("a", prompt(32, 1), 1), process.add("b", prompt(8, 2), 9)
    process.step()
    assert (process.running, ours.ticket) == ([], 1)
    process.end(first)
    process.step()
    assert (process.running, ours.ticket) == (["b"], 0)
    process.end(second)
    theirs.release(other)


def test_nobody_gets_in_line_for_room_that_only_its_own_work_can_give(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    process = Process(ours.as_pool())
    process.add("a", prompt(20, 1), 6)
    process.step()
    process.add("b", prompt(30, 2), 1)
    process.step()
    assert process.waiting == ["b"]
    assert ours.ticket == 0
    assert theirs.demand() == 0
    while process.live:
        process.step()


def test_a_change_of_what_is_free_is_a_reason_to_try_again(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    process = Process(ours.as_pool())
    process.add("a", prompt(5, 1), 30)
    process.step()
    other = theirs.table("other")
    assert theirs.allocate(other, 6)
    process.add("b", prompt(12, 2), 1)
    process.step()
    assert process.waiting == ["b"]
    tried = ours.calls["match"]
    process.step()
    assert ours.calls["match"] == tried
    theirs.release(other)
    process.step()
    assert process.waiting == []
    while process.live:
        process.step()


def test_an_end_here_is_a_reason_to_try_again_with_one_spare_block_less() -> None:
    with opened(10) as pool:
        process = Process(pool)
        process.add("a", prompt(13, 1), 3)
        shorter = process.add("b", prompt(2, 2), 2)
        process.step()
        process.add("c", prompt(20, 3), 1)
        process.step()
        assert (process.running, process.waiting, shorter in process.live) == (["a"], ["c"], False)
        process.plan()
        assert process.running == ["a", "c"], "6 blocks are free for its 5 and a spare one"
        process.commit()
        assert not process.live


def test_what_is_free_but_owed_to_others_is_tried_now_and_then(
    pair: tuple[PoolView, PoolView], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    process = Process(ours.as_pool())
    process.add("a", prompt(4, 1), 4 * 7)
    process.step()
    process.step()
    theirs.wait_in_line(7)
    process.add("b", prompt(8, 2), 1)
    process.step()
    assert process.waiting == ["b"]
    theirs.leave_line()
    steps = 0
    with monkeypatch.context() as patch:
        patch.setattr(ours, "available", lambda: 8)  # what is free stays the same
        while "b" in process.waiting:
            tried = ours.calls["match"]
            process.step()
            steps += 1
    assert 10 < steps <= 16
    assert ours.calls["match"] == tried + 1
    while process.live:
        process.step()


def test_an_idle_wait_tells_whether_others_go_on(pair: tuple[PoolView, PoolView]) -> None:
    ours, theirs = pair
    other = theirs.table("other")
    more = theirs.table("more")
    assert theirs.allocate(other, 7)
    assert theirs.allocate(more, 1)
    process = Process(ours.as_pool())
    sequence = process.add("a", prompt(16), 1)
    process.step()
    process.step()
    moved = [process.scheduler.room_moved]
    theirs.release(more)
    for _ in range(2):
        process.step()
        moved.append(process.scheduler.room_moved)
    assert moved == [False, True, False]
    process.end(sequence)
    theirs.release(other)


# ------------------------------------------------------------------------------------------------- several processes


@shared
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("start", [3, 20, 39])
def test_all_grow_into_a_full_pool_that_each_alone_just_fits(
    shared: Callable[[int, int], AbstractContextManager[list[Pool]]], processes: int, start: int
) -> None:
    with shared(10, processes) as pools:
        growing = [Process(pool) for pool in pools]
        for number, process in enumerate(growing):
            process.add(f"r{number}", prompt(start, number), 40 - start)
        steps = 0
        while any(process.live for process in growing):
            for process in growing:
                process.step()
            steps += 1
            assert steps < 60 * processes
        preemptions = sum(process.scheduler.preemptions for process in growing)
        assert preemptions <= processes * (processes - 1), "each once for each other's place in the line"


@shared
def test_nobody_is_preempted_for_ever_however_the_processes_interleave(
    shared: Callable[[int, int], AbstractContextManager[list[Pool]]],
) -> None:
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        blocks = data.draw(st.integers(4, 24), "blocks")
        processes = data.draw(st.integers(1, 3), "processes")
        order = random.Random(data.draw(st.integers(0, 2**32), "order"))
        room = blocks * BLOCK_TOKENS
        with shared(blocks, processes) as pools:
            working = [
                Process(pool, step_tokens=data.draw(st.sampled_from([4, 16, 64])), max_running=4) for pool in pools
            ]
            bound = 0
            for number in range(data.draw(st.integers(1, 10), "requests")):
                length = data.draw(st.integers(1, room - 1))
                count = data.draw(st.integers(1, min(30, room - length)))
                # Some share a prefix, so that blocks are held by several and given up by one.
                working[number % processes].add(f"r{number}", prompt(length, number % 3), count)
                bound += 4 * (length + count) + 40
            turns = 0
            while any(process.live for process in working):
                process = order.choice(working)
                if process.planned:
                    process.commit()
                else:
                    process.plan()
                turns += 1
                assert turns < 2 * processes * bound, [(p.running, p.waiting) for p in working]

    run()


def test_a_process_with_the_oldest_place_is_never_asked_and_the_others_wait_their_turn() -> None:
    with opened(10) as pool:
        both = SharedPool(pool)
        views = [both.view(), both.view()]
        processes = [Process(view.as_pool()) for view in views]
        for number, process in enumerate(processes):
            process.add(f"r{number}", prompt(4, number), 36)
        served: list[int] = []
        for _ in range(100):
            for number, process in enumerate(processes):
                oldest = views[number].ticket and all(not v.ticket or v.ticket >= views[number].ticket for v in views)
                before = process.scheduler.preemptions
                if process.step() and not process.live:
                    served.append(number)
                assert not oldest or process.scheduler.preemptions == before
        assert sorted(served) == [0, 1]


def test_a_waiting_request_goes_on_when_the_one_it_waits_for_is_forced_out() -> None:
    with opened(10) as pool:
        process = Process(pool, step_tokens=4)
        first = process.add("first", prompt(16), 1)
        process.add("waits for it", prompt(16), 1)
        process.step()
        process.scheduler.force_out(first, "test")
        process.live.remove(first)
        for _ in range(20):
            process.step()
        assert not process.live, process.waiting
