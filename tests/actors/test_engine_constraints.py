"""Sequences with constraints in the step loop: they hold up nobody, end in every way there is, and are closed on each."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from actors.request import GenerateRequest, Grammar, Sampling
from actors.step import Piece
from tests.fakes.engine_rig import EngineRig
from tests.fakes.scripted_constraint import ScriptedConstraint
from tests.fakes.toy_model import continuation

EOS = 9


def rig_of(tmp_path: Path, **options: Any) -> EngineRig:
    return EngineRig(tmp_path, **{"vocab_size": 10, "eos": (EOS,), "blocks": 32, **options})


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def waits(rig: EngineRig, request_id: str) -> bool:
    """Whether the request has the logits of its next token and no mask for them."""
    sequence = rig.engine._sequences.get(request_id)
    return sequence is not None and sequence.logits is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_is_allowed_comes_and_the_answer_ends_when_it_is_complete(tmp_path: Path, temperature: float) -> None:
    constraint = ScriptedConstraint([{3}, {1, 2}, {7}])
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0, 0], max_tokens=50, constraint=constraint, temperature=temperature)
        rig.wait("a")
        rig.wait_idle()
    assert rig.finished["a"] == "stop"
    assert rig.tokens["a"] == constraint.accepted
    assert rig.tokens["a"] in ([3, 1, 7], [3, 2, 7])
    assert constraint.closed == 1


def test_complete_with_the_last_token_there_may_be_is_a_stop(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], max_tokens=2, constraint=ScriptedConstraint([{3}, {4}]))
        rig.submit("b", [1], max_tokens=2, constraint=ScriptedConstraint([{3}, {4}, {5}]))
        rig.wait("a", "b")
    assert rig.finished == {"a": "stop", "b": "length"}


@pytest.mark.parametrize(
    ("allowed", "sampling", "text"),
    [
        ([{3}, {4}], {}, [True, True]),
        ([{3}, {EOS}], {}, [True, False]),
        ([{3}, {EOS}], {"ignore_eos": True}, [True, False]),
        ([{3}, {4}], {"stop_token_ids": (4,)}, [True, False]),
        ([{EOS}, {4}], {"ignore_eos": True}, [True, True]),
    ],
)
def test_the_last_token_of_a_complete_answer_is_text_unless_it_only_says_so(
    tmp_path: Path, allowed: list[set[int]], sampling: dict[str, Any], text: list[bool]
) -> None:
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], max_tokens=9, constraint=ScriptedConstraint(allowed), **sampling)
        rig.wait("a")
    assert (rig.finished["a"], rig.is_text["a"]) == ("stop", text)


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 30])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_where_only_the_end_may_come_it_comes(tmp_path: Path, min_tokens: int, ignore_eos: bool) -> None:
    constraint = ScriptedConstraint([{3}, {EOS}])
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], 40, min_tokens=min_tokens, ignore_eos=ignore_eos, constraint=constraint)
        rig.wait("a")
    assert (rig.finished["a"], rig.tokens["a"]) == ("stop", [3, EOS])


def test_where_more_may_come_than_the_end_min_tokens_delays_it(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], 40, min_tokens=2, constraint=ScriptedConstraint([{4, EOS}] * 2 + [{EOS}]))
        rig.wait("a")
    assert rig.tokens["a"] == [4, 4, EOS]


def test_a_constraint_that_is_not_ready_holds_up_only_itself(tmp_path: Path) -> None:
    prompt = [1, 2, 3, 4] * 2
    slow = ScriptedConstraint([{3}, {4}], ready=False, pauses=True)
    with rig_of(tmp_path) as rig:
        rig.submit("slow", prompt, constraint=slow)
        rig.submit("same prompt", prompt, max_tokens=12)
        rig.wait("same prompt")
        assert rig.tokens["same prompt"] == continuation(prompt, 12, 10)
        assert rig.cached["same prompt"] == 7, "what it has computed is there for others while it waits"
        assert rig.tokens["slow"] == []
        steps = rig.model.steps
        slow.ready = True
        rig.engine.wake()
        # Its logits were there; then it computes the token that came, while the next mask is made.
        until(lambda: slow.accepted and waits(rig, "slow"))
        assert rig.model.steps == steps + 1
        slow.ready = True
        rig.engine.wake()
        rig.wait("slow")
        assert rig.model.steps == steps + 1
    assert rig.tokens["slow"] == [3, 4]
    assert rig.model.computed_tokens == 8 + (1 + 11) + 1


def test_a_mask_made_during_the_forward_pass_costs_no_step(tmp_path: Path) -> None:
    constraint = ScriptedConstraint([{3}] * 6, ready=False, pauses=True)

    def make_mask(_: list[Piece]) -> None:
        constraint.ready = True

    with rig_of(tmp_path) as rig:
        rig.model.before_step = make_mask
        rig.submit("a", [0], max_tokens=9, constraint=constraint)
        rig.wait("a")
        assert rig.model.steps == 6
        assert rig.model.computed_tokens == 6


def test_nothing_is_computed_and_little_done_while_all_wait(tmp_path: Path) -> None:
    constraint = ScriptedConstraint([{3}], ready=False)
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], constraint=constraint)
        until(lambda: waits(rig, "a"))
        polls = 0
        demand = rig.pool.demand

        def count() -> int:
            nonlocal polls
            polls += 1
            return demand()

        rig.pool.demand = count  # type: ignore[method-assign]
        began = time.monotonic()
        threading.Event().wait(0.2)
        assert polls <= (time.monotonic() - began) / 0.01 + 2, "it sleeps between two looks"
        assert rig.model.steps == 1
        constraint.ready = True  # without a word: it looks by itself
        rig.wait("a")


def test_a_word_in_the_middle_of_looking_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.engine._RETRY_S", 60.0)
    constraint = ScriptedConstraint([{3}] * 30, ready=False, pauses=True)
    with rig_of(tmp_path) as rig:
        demand = rig.pool.demand

        def ready_after_the_look() -> int:
            # Between the look at constraints and the sleep of a step that finds nothing to do.
            if not constraint.ready and waits(rig, "a"):
                constraint.ready = True
                rig.engine.wake()
            return demand()

        rig.pool.demand = ready_after_the_look  # type: ignore[method-assign]
        rig.submit("a", [0], max_tokens=40, constraint=constraint)
        rig.wait("a")
        assert len(rig.tokens["a"]) == 30
        slept = ScriptedConstraint([{3}], ready=False)
        rig.pool.demand = demand  # type: ignore[method-assign]
        rig.submit("b", [1], constraint=slept)
        until(lambda: waits(rig, "b"))
        slept.ready = True
        rig.engine.wake()
        rig.wait("b")
        rig.submit("c", [2], constraint=ScriptedConstraint([{3}], ready=False))
        until(lambda: waits(rig, "c"))
        rig.submit("d", [2])
        rig.wait("d")
        rig.engine.abort("c")
        until(lambda: not rig.engine._sequences)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_constraint_says_against_a_request_is_refused_and_harms_nobody(tmp_path: Path, late: bool) -> None:
    constraint = ScriptedConstraint([{3}] * 9, ready=not late)
    constraint.on_accept = lambda token: setattr(constraint, "failure", "the grammar is too deep")
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0, 1], max_tokens=9, constraint=constraint)
        rig.submit("other", [1, 2], max_tokens=9, ignore_eos=True)
        if late:
            until(lambda: rig.model.steps > 0)
            constraint.failure, constraint.ready = "the grammar is too deep", True
        rig.wait("a", "other")
        assert isinstance(rig.failures["a"], RequestRefused)
        assert rig.finished["a"] == "failed: the grammar is too deep"
        assert rig.tokens["a"] == ([] if late else [3])
        assert rig.tokens["other"] == continuation([1, 2], 9, 10)
    assert constraint.closed == 1


@pytest.mark.parametrize("place", ["apply", "accept"])
def test_a_constraint_that_raises_ends_its_own_request(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    constraint = ScriptedConstraint([{3}] * 9)

    def fail(_: object) -> None:
        raise KeyError("lost")

    setattr(constraint, place, fail)
    with caplog.at_level(logging.CRITICAL), rig_of(tmp_path) as rig:
        rig.submit("a", [0, 1], max_tokens=9, constraint=constraint)
        rig.submit("other", [1, 2], max_tokens=9, ignore_eos=True)
        rig.wait("a", "other")
        assert isinstance(rig.failures["a"], ReplicaFailed)
        assert "KeyError" in rig.finished["a"]
        assert rig.tokens["other"] == continuation([1, 2], 9, 10)
        assert rig.engine.failure is None
    assert constraint.closed == 1


def test_complete_without_another_token_is_a_stop(tmp_path: Path) -> None:
    """Where a constraint learns only with the next mask that there is none."""
    constraint = ScriptedConstraint([{3}] * 9)

    def finish() -> None:
        constraint.done = constraint.ready = True

    def finds_out(token: int) -> None:
        constraint.ready = False
        threading.Timer(0.02, finish).start()

    constraint.on_accept = finds_out
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], max_tokens=9, constraint=constraint)
        rig.wait("a")
    assert (rig.finished["a"], rig.tokens["a"], constraint.closed) == ("stop", [3], 1)


@pytest.mark.parametrize("sampling", [{}, {"allowed_token_ids": (1, 2)}])
def test_where_no_token_is_left_the_request_is_at_fault(tmp_path: Path, sampling: dict[str, Any]) -> None:
    constraint = ScriptedConstraint([{3} if sampling else set()])
    with rig_of(tmp_path) as rig:
        rig.submit("a", [0], constraint=constraint, **sampling)
        rig.submit("other", [1])
        rig.wait("a", "other")
        assert isinstance(rig.failures["a"], RequestRefused)
        assert "rules out every token" in rig.finished["a"]


def test_a_model_that_gives_no_number_is_not_the_requests_fault(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig:
        forward = rig.model.forward

        def broken(pieces: list[Piece]) -> tuple[torch.Tensor, list[int]]:
            logits, order = forward(pieces)
            return torch.full_like(logits, float("nan")), order

        rig.model.forward = broken  # type: ignore[method-assign]
        rig.submit("a", [0])
        rig.wait("a")
        assert isinstance(rig.failures["a"], ReplicaFailed)


WAYS = [
    "ends",
    "aborted while it waits",
    "aborted in the line",
    "engine stops",
    "engine stops before it starts",
    "step fails",
]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_closed_on_every_way_out(tmp_path: Path, way: str) -> None:
    constraint = ScriptedConstraint([{3}] * 3, ready=way in {"ends", "step fails"})
    queued = ScriptedConstraint([{3}] * 3)
    with rig_of(tmp_path, max_running=1) as rig:
        if way == "step fails":
            rig.model.before_step = lambda pieces: 1 / 0 if rig.model.steps else None  # type: ignore[assignment]
        if way == "engine stops before it starts":
            rig.engine._wake.acquire()
        rig.submit("a", [0] * 5, constraint=constraint)
        rig.submit("queued", [1] * 5, constraint=queued)
        if way == "engine stops before it starts":
            rig.engine._stopping = True
            rig.engine._wake.release()
        elif way == "aborted in the line":
            until(lambda: rig.engine._sequences.get("queued"))
            rig.engine.abort("queued")
            until(lambda: queued.closed)
            assert not constraint.closed
            rig.engine.abort("a")
        elif way.startswith("aborted"):
            until(lambda: waits(rig, "a"))
            rig.engine.abort("a")
            until(lambda: constraint.closed)
        elif way == "engine stops":
            until(lambda: rig.engine._sequences)
            assert rig.engine.stop()
        else:
            rig.wait("a", "queued")
        if way.startswith("aborted while"):
            rig.wait("queued")
        until(lambda: constraint.closed and queued.closed)
    assert (constraint.closed, queued.closed) == (1, 1)


def test_who_is_not_queued_keeps_the_constraint(tmp_path: Path) -> None:
    constraint = ScriptedConstraint([{3}])
    gate = threading.Event()

    def hold(_: list[Piece]) -> None:
        assert gate.wait(10)

    with rig_of(tmp_path, max_running=1, max_waiting=1) as rig:
        rig.model.before_step = hold
        with pytest.raises(RequestRefused):
            rig.submit("a", [99], constraint=constraint)
        rig.submit("runs", [1])
        until(lambda: rig.engine.running)
        rig.submit("waits", [1])
        with pytest.raises(ReplicaOverloaded):
            rig.submit("a", [1], constraint=constraint)
        gate.set()
        rig.wait("runs", "waits")
        rig.engine.stop()
        with pytest.raises(ReplicaFailed):
            rig.submit("a", [1], constraint=constraint)
    assert constraint.closed == 0


def test_a_grammar_is_never_ignored(tmp_path: Path) -> None:
    with rig_of(tmp_path) as rig, pytest.raises(ReplicaFailed, match="grammar"):
        rig.engine.submit(GenerateRequest("a", (1,), Sampling(1), grammar=Grammar("regex", "a*")))


def test_a_mask_that_never_comes_is_a_stall_unless_others_go_on(tmp_path: Path) -> None:
    now = [0.0]
    with rig_of(tmp_path, stall_s=5.0) as rig:
        rig.engine._clock = lambda: now[0]
        rig.submit("a", [0], constraint=ScriptedConstraint([{3}], ready=False))
        until(lambda: waits(rig, "a"))
        now[0] = 4.0
        assert rig.engine.stalled_s == 0.0
        now[0] = 6.0
        assert rig.engine.stalled_s == 6.0
        rig.submit("b", [1])
        rig.wait("b")
        assert rig.engine.stalled_s == 0.0
        now[0] = 12.0
        assert rig.engine.stalled_s == 6.0
        other = ScriptedConstraint([{3}], ready=False)
        rig.submit("c", [2], constraint=other)
        until(lambda: waits(rig, "c"))
        now[0] = 16.0
        other.ready = True
        rig.wait("c")
        now[0] = 18.0
        assert rig.engine.stalled_s == 0.0, "a token that came without a pass of the model is progress"
        rig.engine.abort("a")
        until(lambda: not rig.engine._sequences)
        now[0] = 90.0
        assert rig.engine.stalled_s == 0.0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), blocks=st.integers(8, 24), requests=st.integers(1, 8))
def test_any_mixture_with_any_delays_gives_the_tokens_that_it_gives_without(
    tmp_path: Path, seed: int, blocks: int, requests: int
) -> None:
    """With preemptions, aborts and masks that come in any order. A constraint that allows only the toy's own next tokens changes
    nothing, so blocks that were let go, kept or shared wrongly would show.
    """
    rng = random.Random(seed)
    slow: list[ScriptedConstraint] = []
    stop = threading.Event()

    def masks() -> None:
        while not stop.wait(0.0005):
            for constraint in slow:
                if rng.random() < 0.5:
                    constraint.ready = True
            rig.engine.wake()

    rig = rig_of(tmp_path, blocks=blocks, eos=(), step_tokens=rng.choice([4, 64]), max_running=rng.randint(1, 4))
    thread = threading.Thread(target=masks)
    expected: dict[str, list[int]] = {}
    aborted: set[str] = set()
    with rig:
        thread.start()
        try:
            for index in range(requests):
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
                expected[name] = tokens = continuation(prompt, rng.randint(1, 10), 10) if (name := f"r{index}") else []
                constraint = None
                if rng.random() < 0.7:
                    constraint = ScriptedConstraint([{token} for token in tokens], ready=False, pauses=True)
                    slow.append(constraint)
                rig.submit(name, prompt, len(tokens), priority=rng.randint(0, 1), constraint=constraint)
                if rng.random() < 0.2:
                    aborted.add(name)
                    rig.engine.abort(name)
            rig.wait(*(expected.keys() - aborted))
            rig.wait_idle()
        finally:
            stop.set()
            thread.join()
        for name, tokens in expected.items():
            got = rig.tokens[name]
            assert got == (tokens[: len(got)] if name in aborted else tokens)
    assert all(constraint.closed == 1 for constraint in slow)
