"""The step loop over a real pool, with a model that shows any wrong block in its output."""

from __future__ import annotations

import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.config import EngineConfig
from actors.engine import Engine, StepOutput
from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from actors.request import GenerateRequest, Sampling
from actors.step import Piece
from kvpool import BlockGeometry, KeyRoot, KeySpace, Pool, Region
from kvpool.errors import GuardViolation
from tests.fakes.engine_rig import SECRET, EngineRig
from tests.fakes.scripted_constraint import ScriptedConstraint
from tests.fakes.shared_pool import PoolView, SharedPool
from tests.fakes.toy_model import ToyModel, continuation, next_token


class Replicas:
    """Engines over one pool of 4-token blocks and one memory, each with its own view. Read `tokens`, `ended`."""

    def __init__(self, pool: Pool, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        shared = SharedPool(pool)
        memory = ToyModel(pool.capacity_blocks, 4, 50)
        self.views = [shared.view() for _ in range(count)]
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, str] = {}
        self.engines = [self._engine(view, memory, clock) for view in self.views]

    def _engine(self, view: PoolView, memory: ToyModel, clock: Callable[[], float]) -> Engine:
        model = ToyModel(0, 4, 50)
        model.memory = memory.memory
        return Engine(
            model,
            view.as_pool(),
            KeySpace(SECRET),
            lambda salt: KeyRoot("toy", 4, "float32", salt=salt),
            EngineConfig(stall_s=5.0),
            context_tokens=10_000,
            copy_block=model.copy_block,
            on_outputs=self._collect,
            clock=clock,
        )

    def _collect(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if output.token is not None:
                self.tokens[output.request_id].append(output.token)
            if output.finish_reason is not None or output.failure is not None:
                self.ended[output.request_id] = str(output.failure or output.finish_reason)

    def submit(self, engine: int, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = Sampling(max_tokens, temperature=0.0)
        self.engines[engine].submit(GenerateRequest(request_id, tuple(prompt), sampling))


@contextmanager
def replicas(
    directory: Path, count: int, blocks: int = 10, clock: Callable[[], float] = time.monotonic
) -> Iterator[Replicas]:
    geometry = BlockGeometry(1, 1, 1, 4, "float32")
    with (
        Region.create(directory, "replicas", geometry, blocks, bytes(32), random.Random(1)) as region,
        Pool.create(region) as pool,
    ):
        several = Replicas(pool, count, clock)
        for engine in several.engines:
            engine.start()
        try:
            yield several
        finally:
            assert all([engine.stop() for engine in several.engines])
        assert not any(view.ticket for view in several.views)
        assert pool.held_blocks() == 0
        assert pool.check_integrity() == ""


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_for(gate: threading.Event) -> None:
    assert gate.wait(10)


def test_one_request_gives_the_models_tokens(tmp_path: Path) -> None:
    with EngineRig(tmp_path) as rig:
        rig.submit("a", [0, 1, 1], max_tokens=9)
        rig.wait("a")
        assert rig.tokens["a"] == continuation([0, 1, 1], 9, 2)
        assert rig.finished["a"] == "length"
        assert rig.cached["a"] == 0


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_a_repeated_prompt_hits_and_gives_the_same_tokens(tmp_path: Path, length: int) -> None:
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1][:length]
    with EngineRig(tmp_path) as rig:
        rig.submit("a", prompt)
        rig.wait("a")
        rig.submit("b", prompt)
        rig.wait("b")
        assert rig.tokens["a"] == rig.tokens["b"] == continuation(prompt, 4, 2)
        # Whole blocks hit; of a prompt that is all hit the last token is computed again.
        assert rig.cached["b"] == min(length // 4 * 4, length - 1)


def test_block_size_one(tmp_path: Path) -> None:
    with EngineRig(tmp_path, block_tokens=1, blocks=32) as rig:
        for name in "ab":
            rig.submit(name, [1, 0, 0, 1, 1])
            rig.wait(name)
        assert rig.tokens["a"] == rig.tokens["b"] == continuation([1, 0, 0, 1, 1], 4, 2)
        assert rig.cached["b"] == 4


def test_salts_share_nothing(tmp_path: Path) -> None:
    with EngineRig(tmp_path) as rig:
        for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
            rig.submit(name, [1] * 9, salt=salt)
            rig.wait(name)
        assert (rig.cached["a"], rig.cached["b"], rig.cached["c"]) == (0, 0, 8)


def test_single_flight_computes_a_shared_prefix_once(tmp_path: Path) -> None:
    gate = threading.Event()
    with EngineRig(tmp_path, blocks=64, step_tokens=4, max_running=4) as rig:
        rig.model.before_step = lambda pieces: wait_for(gate)
        prompt = [0, 1] * 8
        names = [f"r{index}" for index in range(4)]
        for name in names:
            rig.submit(name, prompt, max_tokens=1)
        gate.set()
        rig.wait(*names)
        assert all(rig.tokens[name] == continuation(prompt, 1, 2) for name in names)
        # 16 tokens once, then one recomputed token for each of the three that hit.
        assert rig.model.computed_tokens == 16 + 3
        assert sorted(rig.cached.values()) == [0, 15, 15, 15]


def test_a_full_pool_preempts_and_everyone_finishes(tmp_path: Path) -> None:
    with EngineRig(tmp_path, blocks=7, block_tokens=4, vocab_size=50) as rig:
        prompts = {name: [10 + index] * 9 for index, name in enumerate("abc")}
        for name, prompt in prompts.items():
            rig.submit(name, prompt, max_tokens=15)
        rig.wait(*prompts)
        for name, prompt in prompts.items():
            assert rig.tokens[name] == continuation(prompt, 15, 50), name
        assert rig.engine.preemptions > 0


def test_a_request_as_large_as_the_pool_finishes_also_when_repeated(tmp_path: Path) -> None:
    with EngineRig(tmp_path, blocks=4, block_tokens=4) as rig:
        for name in "abc":
            rig.submit(name, [1, 0] * 7, max_tokens=2)
            rig.wait(name)
        rig.submit("full", [0, 1] * 7 + [1], max_tokens=1)
        rig.wait("full")
        assert rig.tokens["full"] == continuation([0, 1] * 7 + [1], 1, 2)


def test_a_full_prompt_hit_without_a_spare_block_recomputes_the_tail(tmp_path: Path) -> None:
    with EngineRig(tmp_path, blocks=4, block_tokens=4, context_tokens=17) as rig:
        prompt = [1, 0, 0, 1] * 4
        for name in "ab":
            rig.engine._check = lambda request: None  # type: ignore[method-assign]
            rig.submit(name, prompt, max_tokens=1)
            rig.wait(name)
        assert rig.tokens["a"] == rig.tokens["b"] == continuation(prompt, 1, 2)
        assert rig.cached["b"] == 12


def test_larger_than_the_pool_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with EngineRig(tmp_path, blocks=4, block_tokens=4) as rig:
        with pytest.raises(RequestRefused, match=r"need 5 blocks.*has 4 \(16 tokens\)"):
            rig.submit("a", [1] * 8, max_tokens=9)
        rig.submit("b", [1] * 8, max_tokens=8)
        rig.wait("b")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "sampling", "words"),
    [
        ([], 1, {}, "empty"),
        ([2], 1, {}, r"\[0, 2\)"),
        ([-1], 1, {}, r"\[0, 2\)"),
        ([1], 0, {}, "max_tokens"),
        ([1] * 30, 1, {}, "30 tokens.*30 tokens"),
        ([1], 1, {"logit_bias": ((191_222, -100.0),)}, r"\[0, 2\)"),
        ([1], 1, {"allowed_token_ids": (2,)}, r"\[0, 2\)"),
        ([1], 1, {"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_bad_requests_are_refused_and_harm_nobody(
    tmp_path: Path, prompt: list[int], max_tokens: int, sampling: dict[str, Any], words: str
) -> None:
    with EngineRig(tmp_path, context_tokens=30) as rig:
        with pytest.raises(RequestRefused, match=words):
            rig.submit("bad", prompt, max_tokens, **sampling)
        rig.submit("good", [1])
        rig.wait("good")


def test_a_full_waiting_line_is_overload(tmp_path: Path) -> None:
    gate = threading.Event()
    with EngineRig(tmp_path, max_running=1, max_waiting=2) as rig:
        rig.model.before_step = lambda pieces: wait_for(gate)
        rig.submit("a", [1])
        while not rig.engine.running:
            pass
        rig.submit("b", [1])
        rig.submit("c", [1])
        with pytest.raises(ReplicaOverloaded, match="2 requests wait"):
            rig.submit("d", [1])
        gate.set()
        rig.wait("a", "b", "c")


def test_stop_tokens_end_a_request_and_min_tokens_delays_them(tmp_path: Path) -> None:
    with EngineRig(tmp_path, vocab_size=3, eos=(2,)) as rig:
        free = continuation([0, 0, 0], 40, 3)
        rig.submit("eos", [0, 0, 0], max_tokens=40)
        rig.submit("ignored", [0, 0, 0], max_tokens=40, ignore_eos=True)
        rig.submit("delayed", [0, 0, 0], max_tokens=40, min_tokens=40)
        rig.wait("eos", "ignored", "delayed")
        assert rig.tokens["eos"] == free[: free.index(2) + 1]
        assert rig.finished["eos"] == "stop"
        assert rig.is_text["eos"] == [True] * (len(rig.tokens["eos"]) - 1) + [False]
        assert all(rig.is_text["ignored"] + rig.is_text["delayed"])
        assert rig.tokens["ignored"] == free
        assert 2 not in rig.tokens["delayed"]
        assert len(rig.tokens["delayed"]) == 40


def penalised(prompt: list[int], count: int, presence: float, frequency: float, repetition: float) -> list[int]:
    """What the toy model says under penalties, greedily, by the book."""
    tokens = list(prompt)
    for _ in range(count):
        logits = [0.0] * 50
        logits[next_token(tokens, 50)] = 1.0
        answer = tokens[len(prompt) :]
        for token in set(tokens):
            logits[token] /= repetition  # none is negative
            logits[token] -= answer.count(token) * frequency + (token in answer) * presence
        tokens.append(logits.index(max(logits)))
    return tokens[len(prompt) :]


def test_penalties_know_the_whole_answer_also_after_a_preemption(tmp_path: Path) -> None:
    with EngineRig(tmp_path, blocks=7, block_tokens=4, vocab_size=50) as rig:
        wanted = {"a": (0.5, 0.25, 1.0), "b": (-0.125, 0.5, 2.0), "c": (0.0, 0.0, 4.0), "d": (0.0, 0.0, 1.0)}
        prompts = {name: [index, *range(8)] for index, name in enumerate(wanted)}
        for name, (presence, frequency, repetition) in wanted.items():
            penalties: dict[str, Any] = {
                "presence_penalty": presence,
                "frequency_penalty": frequency,
                "repetition_penalty": repetition,
            }
            rig.submit(name, prompts[name], 15, **penalties)
        rig.wait(*wanted)
        for name, penalties_of in wanted.items():
            assert rig.tokens[name] == penalised(prompts[name], 15, *penalties_of), name
        assert rig.engine.preemptions > 0


def test_biases_and_allowed_tokens_are_of_one_request_only(tmp_path: Path) -> None:
    with EngineRig(tmp_path, vocab_size=50) as rig:
        rig.submit("biased", [1, 2], 5, logit_bias=((7, 50.0),))
        rig.submit("allowed", [1, 2], 5, allowed_token_ids=(30, 20), temperature=1.0)
        rig.submit("plain", [1, 2], 5)
        rig.wait("biased", "allowed", "plain")
        assert rig.tokens["biased"] == [7] * 5
        assert set(rig.tokens["allowed"]) <= {20, 30}
        assert rig.tokens["plain"] == continuation([1, 2], 5, 50)


def test_logprobs_are_the_models_own_whatever_the_request_changes(tmp_path: Path) -> None:
    with EngineRig(tmp_path, vocab_size=10, eos=(9,)) as rig:
        constraint = ScriptedConstraint([{4}, {9}], ready=False)
        rig.submit("plain", [1], 3, ignore_eos=True)
        rig.submit("told", [1], 3, ignore_eos=True, logprobs=0)
        rig.submit("biased", [1], 2, logit_bias=((8, 99.0),), logprobs=2, temperature=0.5)
        rig.submit("late", [1], 2, constraint=constraint, logprobs=1, min_tokens=2)
        rig.wait("plain", "told", "biased")
        constraint.ready = True
        rig.wait("late")
        likely, other = math.log(math.e / (math.e + 9)), math.log(1 / (math.e + 9))
        for name, count in (("told", 0), ("biased", 2), ("late", 1)):
            tokens = list(rig.tokens[name])
            assert len(rig.logprobs[name]) == len(tokens)
            for index, told in enumerate(rig.logprobs[name]):
                says = next_token([1, *tokens[:index]], 10)
                assert told.logprob == pytest.approx(likely if tokens[index] == says else other)
                runner_up = 1 if says == 0 else 0
                assert [token for token, _ in told.top] == [says, runner_up][:count]
                assert [value for _, value in told.top] == pytest.approx([likely, other][:count])
        assert rig.tokens["late"] == [4, 9]
        assert rig.logprobs["plain"] == []


def test_those_who_wait_begin_by_priority_then_arrival(tmp_path: Path) -> None:
    gate = threading.Event()
    with EngineRig(tmp_path, max_running=1) as rig:
        rig.model.before_step = lambda pieces: wait_for(gate)
        rig.submit("first", [1], priority=5)
        while not rig.engine.running:
            pass
        for name, priority in (("d", 3), ("b", 0), ("e", 3), ("a", -1), ("c", 0)):
            rig.submit(name, [1], priority=priority)
        gate.set()
        rig.wait(*"abcde")
        assert list(rig.cached) == ["first", *"abcde"]


def test_the_context_ends_a_request(tmp_path: Path) -> None:
    with EngineRig(tmp_path, context_tokens=12) as rig:
        rig.submit("a", [1] * 9, max_tokens=2**31)
        rig.wait("a")
        assert len(rig.tokens["a"]) == 3
        assert rig.finished["a"] == "length"


def test_a_failing_step_fails_every_request_and_leaks_nothing(tmp_path: Path) -> None:
    def explode(pieces: list[Piece]) -> None:
        raise RuntimeError("device lost")

    with EngineRig(tmp_path, max_running=1) as rig:
        rig.model.before_step = explode
        rig.submit("a", [1] * 9)
        rig.submit("b", [1] * 9)
        rig.wait("a", "b")
        assert "device lost" in rig.finished["a"]
        assert "device lost" in rig.finished["b"]
        with pytest.raises(ReplicaFailed, match="device lost"):
            rig.submit("c", [1])


@pytest.mark.parametrize("place", ["demand", "peek", "seal"])
def test_a_pool_that_fails_in_a_step_gets_every_block_back(tmp_path: Path, place: str) -> None:
    """As one does whose guard finds a damaged block: after the call has done its work."""
    entered, gate = threading.Event(), threading.Event()
    with EngineRig(tmp_path) as rig:
        real = getattr(rig.pool, place)

        def fail(*arguments: object) -> object:
            result = real(*arguments)
            if rig.model.steps > 3:
                raise GuardViolation("block 3 was written to after it had been sealed")
            return result

        def hold(_: list[Piece]) -> None:
            if rig.model.steps == 3:
                entered.set()
                wait_for(gate)

        setattr(rig.pool, place, fail)
        rig.model.before_step = hold
        rig.submit("a", [1] * 9, max_tokens=50)
        wait_for(entered)
        rig.submit("b", [0] * 9, max_tokens=50)
        gate.set()
        rig.wait("a", "b")
        setattr(rig.pool, place, real)
        assert all("GuardViolation: block 3" in rig.finished[name] for name in "ab")
        rig.wait_idle()
        assert rig.pool.stats().open_tables == 0
        assert rig.pool.stats().blocks["mutable"] == 0


@pytest.mark.parametrize("place", ["match", "copy_on_write", "copy_block", "finish_copy", "allocate"])
def test_an_admission_that_fails_gets_every_block_back(tmp_path: Path, place: str) -> None:
    """Whatever it had matched by then is the request's already."""
    prompt = [1, 0, 0, 1] * 2
    with EngineRig(tmp_path) as rig:
        rig.submit("before", prompt)
        rig.wait("before")
        rig.wait_idle()
        owner: Any = rig.engine._scheduler if place == "copy_block" else rig.pool
        name = "_copy_block" if place == "copy_block" else place
        real = getattr(owner, name)

        def fail(*arguments: object) -> None:
            real(*arguments)
            raise RuntimeError("device lost")

        setattr(owner, name, fail)
        rig.submit("a", prompt, 9)
        rig.wait("a")
        setattr(owner, name, real)
        assert "device lost" in rig.finished["a"]
        assert rig.pool.held_blocks() == 0
        assert rig.pool.stats().forced_releases == {"failed step": 1}


@pytest.mark.parametrize("after", range(1, 6))
def test_an_abort_during_a_step_ends_the_request_with_that_step(tmp_path: Path, after: int) -> None:
    """Three steps of a prompt, then two that decode: in the last one the request ends by itself and is aborted. Another
    one, which waits for the same prompt, gets its tokens whatever became of the first.
    """
    prompt = [1, 0, 0, 1, 1, 1, 0, 1, 0]
    with EngineRig(tmp_path, step_tokens=4) as rig:

        def abort(_: list[Piece]) -> None:
            if rig.model.steps == after - 1:
                rig.engine.abort("a")
                rig.engine.abort("a")

        rig.model.before_step = abort
        rig.submit("a", prompt, max_tokens=3)
        rig.submit("b", prompt, max_tokens=6)
        rig.wait("b")
        rig.wait_idle()
        assert rig.tokens["a"] == continuation(prompt, max(0, after - 2), 2)
        assert rig.finished.get("a") == ("length" if after == 5 else None)
        assert rig.tokens["b"] == continuation(prompt, 6, 2)
        stats = rig.pool.stats()
        assert (stats.second_releases, stats.open_tables, stats.blocks["mutable"]) == (0, 0, 0)


@pytest.mark.parametrize("how", ["fails", "is aborted"])
def test_what_a_step_did_not_finish_is_not_found(tmp_path: Path, how: str) -> None:
    """A block is found when its bytes are there: not when it is planned, not while it is computed."""
    prompt = [1, 0, 0, 1] * 4
    with EngineRig(tmp_path, step_tokens=4) as rig:
        keys = KeySpace(SECRET).block_keys(KeySpace(SECRET).root(KeyRoot("toy", 4, "float32")), prompt, 4)
        found: list[int] = []

        def look(_: list[Piece]) -> None:
            found.append(rig.pool.peek(keys))
            if len(found) == 3:
                if how == "fails":
                    raise RuntimeError("device lost")
                rig.engine.abort("a")

        rig.model.before_step = look
        rig.submit("a", prompt)
        if how == "fails":
            rig.wait("a")
        else:
            while len(found) < 3:
                time.sleep(0.001)
        rig.wait_idle()
        assert found == [0, 1, 2]
        assert rig.pool.peek(keys) == (2 if how == "fails" else 3)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_request_has_the_blocks_of_its_tokens_and_no_more(tmp_path: Path, size: int, more: int) -> None:
    """Around the ends of blocks, in the prompt and while it decodes: the block of a token is there before it is written."""
    prompt = [1, 0, 0, 1, 1, 1, 0, 1, 0][: 2 * size + more]
    with EngineRig(tmp_path, block_tokens=size, step_tokens=64) as rig:
        pieces: list[Piece] = []
        rig.model.before_step = pieces.extend
        rig.submit("a", prompt, max_tokens=2 * size + 2)
        rig.wait("a")
        ends = [piece.start + len(piece.tokens) for piece in pieces]
        assert ends == list(range(len(prompt), len(prompt) + 2 * size + 2))
        assert [len(piece.blocks) for piece in pieces] == [-(-end // size) for end in ends]
        assert rig.tokens["a"] == continuation(prompt, 2 * size + 2, 2)


def test_a_hanging_step_shows_as_a_stall_and_idling_does_not(tmp_path: Path) -> None:
    gate, entered = threading.Event(), threading.Event()

    def hang(pieces: list[Piece]) -> None:
        entered.set()
        gate.wait(10)

    with EngineRig(tmp_path, stall_s=0.05) as rig:
        for _ in range(5):
            assert not entered.wait(0.1)
            rig.engine.abort("nobody")
            assert rig.engine.stalled_s == 0.0
        rig.model.before_step = hang
        rig.submit("a", [1])
        entered.wait(10)
        threading.Event().wait(0.1)
        assert rig.engine.stalled_s > 0.05
        gate.set()
        rig.wait("a")
        rig.wait_idle()
        assert rig.engine.stalled_s == 0.0


def test_the_inbox_of_a_dead_engine_stays_empty(tmp_path: Path) -> None:
    with EngineRig(tmp_path) as rig:
        rig.engine.stop()
        for _ in range(100):
            rig.engine.abort("late")
        assert not rig.engine._inbox


def test_an_orderly_stop_raises_no_alarm(tmp_path: Path) -> None:
    gate = threading.Event()
    with EngineRig(tmp_path) as rig:
        rig.model.before_step = lambda pieces: wait_for(gate)
        rig.submit("a", [1] * 9)
        while not rig.engine.running:
            pass
        threading.Timer(0.1, gate.set).start()
        assert rig.engine.stop()
        assert rig.finished["a"] == "failed: the replica is stopping"
        assert rig.pool.stats().forced_releases == {}


def test_ends_outside_the_vocabulary_change_nothing(tmp_path: Path) -> None:
    with EngineRig(tmp_path, eos=(-1, 500)) as rig:
        rig.submit("a", [0, 1, 1], max_tokens=6, min_tokens=6)
        rig.wait("a")
        assert rig.tokens["a"] == continuation([0, 1, 1], 6, 2)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mixture_gives_the_right_tokens_and_comes_to_rest(tmp_path: Path, data: st.DataObject) -> None:
    block_tokens = data.draw(st.integers(1, 4), "block_tokens")
    blocks = data.draw(st.integers(6, 20), "blocks")
    rig = EngineRig(
        tmp_path,
        blocks=blocks,
        block_tokens=block_tokens,
        step_tokens=data.draw(st.integers(4, 12), "step_tokens"),
        max_running=data.draw(st.integers(1, 4), "max_running"),
    )
    with rig:
        expected: dict[str, list[int]] = {}
        aborted: set[str] = set()
        for index in range(data.draw(st.integers(1, 12), "requests")):
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=blocks * block_tokens - 2))
            count = data.draw(st.integers(1, max(1, min(8, blocks * block_tokens - len(prompt)))))
            name = f"r{index}"
            expected[name] = continuation(prompt, count, 2)
            rig.submit(name, prompt, count)
            if data.draw(st.booleans(), "abort"):
                victim = data.draw(st.sampled_from(sorted(expected)))
                aborted.add(victim)
                rig.engine.abort(victim)
        rig.wait(*(expected.keys() - aborted))
        rig.wait_idle()
        for name, tokens in expected.items():
            got = rig.tokens[name]
            assert got == (tokens[: len(got)] if name in aborted else tokens)
        assert rig.pool.stats().blocks["mutable"] == 0


def test_queued_tokens_count_what_is_left_to_compute(tmp_path: Path) -> None:
    gate = threading.Event()
    with EngineRig(tmp_path, blocks=64) as rig:
        forward = rig.model.forward

        def slow(pieces: list[Piece]) -> object:
            wait_for(gate)
            return forward(pieces)

        rig.model.forward = slow  # type: ignore[assignment, method-assign]
        assert rig.engine.queued_prefill_tokens == 0
        rig.submit("a", [1] * 20)
        rig.submit("b", [0] * 30, predicted_tokens=24)
        rig.submit("c", [0] * 10, predicted_tokens=50)
        # Whether the step thread has seen them or not.
        assert 1 <= rig.engine.queued_prefill_tokens <= 20 + 6 + 1 + 24
        deadline = time.monotonic() + 10
        while rig.engine.running < 1 and time.monotonic() < deadline:
            time.sleep(0.001)
        assert rig.engine.queued_prefill_tokens >= 20
        gate.set()
        rig.wait("a", "b", "c")
        rig.wait_idle()
        assert rig.engine.queued_prefill_tokens == 0
        assert rig.engine.prefill_tokens_per_s == 0.0, "60 tokens are too few to tell"
        for number in range(40):
            rig.submit(f"more {number}", [number % 2, *[1, 0] * 20])
            rig.wait(f"more {number}")
            rig.pool.reset()
        assert rig.engine.prefill_tokens_per_s > 0


@pytest.mark.parametrize("prompt_tokens", [2, 19])
def test_replicas_that_grow_into_one_full_pool_all_finish(tmp_path: Path, prompt_tokens: int) -> None:
    with replicas(tmp_path, 2) as several:
        prompts = {f"r{number}": [number] * prompt_tokens for number in range(6)}
        for number, (name, prompt) in enumerate(prompts.items()):
            several.submit(number % 2, name, prompt, 40 - prompt_tokens)
        wait_until(lambda: several.ended.keys() == prompts.keys())
        for name, prompt in prompts.items():
            assert several.tokens[name] == continuation(prompt, 40 - prompt_tokens, 50), name


def test_a_replica_continues_what_another_computed(tmp_path: Path) -> None:
    with replicas(tmp_path, 2) as several:
        several.submit(0, "a", [7] * 17, 3)
        wait_until(lambda: "a" in several.ended)
        several.submit(1, "b", [7] * 17, 9)
        wait_until(lambda: "b" in several.ended)
        assert several.tokens["b"] == continuation([7] * 17, 9, 50)
        assert several.engines[1]._model.computed_tokens == 1 + 8  # type: ignore[attr-defined]


def test_waiting_for_other_processes_is_a_stall_only_when_they_stand_still(tmp_path: Path) -> None:
    now = [0.0]
    with replicas(tmp_path, 2, clock=lambda: now[0]) as several:
        engine, (ours, theirs) = several.engines[0], several.views
        tables = [theirs.table("held"), theirs.table("other")]
        assert all([theirs.allocate(table, 5) for table in tables])
        several.submit(0, "a", [1] * 30, 1)
        wait_until(lambda: ours.ticket)
        now[0] = 100.0
        assert engine.stalled_s > 5.0
        theirs.release(tables[0])
        wait_until(lambda: engine.stalled_s == 0.0)
        assert ours.wanted == 8
        now[0] = 200.0
        polled = ours.calls["demand"]
        wait_until(lambda: ours.calls["demand"] > polled + 2)
        assert engine.stalled_s > 5.0
        theirs.release(tables[1])
        wait_until(lambda: "a" in several.ended)


def test_a_replica_that_stops_leaves_the_line(tmp_path: Path) -> None:
    with replicas(tmp_path, 2) as several:
        ours, theirs = several.views
        table = theirs.table("held")
        assert theirs.allocate(table, 10)
        several.submit(0, "a", [1] * 30, 1)
        wait_until(lambda: ours.ticket)
        assert several.engines[0].stop()
        assert ours.ticket == 0
        assert several.ended["a"] == "the replica is stopping"
        theirs.release(table)


def test_the_guard_is_asked_in_every_step_and_its_word_ends_the_engine(tmp_path: Path) -> None:
    with replicas(tmp_path, 2) as several:
        ours, unguarded = several.views
        ours.guard = True
        for engine, name in enumerate("ab"):
            several.submit(engine, name, [1] * 5, 6)
        wait_until(lambda: {"a", "b"} == several.ended.keys())
        assert ours.calls["check_guard"] == 6
        assert unguarded.calls["check_guard"] == 0
        ours.guard_error = GuardViolation("the header of the region has been overwritten")
        several.submit(0, "c", [1] * 5, 6)
        wait_until(lambda: "c" in several.ended)
        assert "GuardViolation: the header of the region" in several.ended["c"]
        assert several.tokens["c"] == []
        with pytest.raises(ReplicaFailed, match="GuardViolation"):
            several.submit(0, "d", [1], 1)
