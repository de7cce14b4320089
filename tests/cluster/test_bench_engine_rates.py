"""The engine benchmark's arithmetic on streams and sizes that can be reckoned by hand."""

from __future__ import annotations

import itertools

import pytest

from cluster.bench.engine_plan import Plan, Point, prompt_tokens
from cluster.bench.engine_rates import (
    Marks,
    NeverTogether,
    Shape,
    ceiling_tok_s,
    linear_share,
    steady,
    tokens_at,
    until_together,
)

MS = 1_000_000
SHAPE = Shape(weight_bytes=269_000_000, linear_parameters=106_000_000, token_bytes=23_040)


def stream(first_ms: int, step_ms: int, tokens: int) -> Marks:
    return [((first_ms + step_ms * number) * MS, number + 1) for number in range(tokens)]


def test_streams_in_step_count_every_token_between_the_last_begin_and_the_first_end() -> None:
    found = steady([stream(0, 50, 11), stream(0, 50, 11)])
    assert [found.tokens, found.seconds] == pytest.approx([18, 0.45])  # from the second token to the eleventh
    assert found.tokens_per_s == pytest.approx(40.0)
    assert found.generated == (2 + 11) / 2


def test_a_late_stream_and_an_early_end_do_not_count() -> None:
    late, early = stream(200, 50, 21), stream(0, 50, 11)
    found = steady([late, early])  # together from 250 ms, when the late one has two, to 500 ms
    assert [found.tokens, found.seconds] == pytest.approx([10, 0.25])
    assert found.tokens_per_s == pytest.approx(40.0)


def test_streams_that_are_not_in_step_are_counted_over_one_span() -> None:
    """Two engines of different speed: 20 and 50 tokens a second each, whatever the ends of their steps."""
    found = steady([stream(0, 50, 40), stream(7, 20, 60)])
    assert found.tokens_per_s == pytest.approx(1000 / 50 + 1000 / 20)


def test_several_tokens_may_come_at_once() -> None:
    marks = [(0, 1), (100 * MS, 3), (150 * MS, 4), (300 * MS, 9)]
    assert [tokens_at(marks, moment * MS) for moment in (0, 50, 100, 300)] == [1, 2, 3, 9]
    assert tokens_at(marks, 225 * MS) == pytest.approx(6.5)


def test_streams_that_never_run_together_are_no_measurement() -> None:
    with pytest.raises(NeverTogether, match="never decoded together"):
        steady([stream(0, 10, 5), stream(100, 10, 5)])


def test_streams_get_longer_until_they_run_together() -> None:
    tried: list[int] = []

    def attempt(steps: int) -> float:
        tried.append(steps)
        return steady([stream(0, 10, steps), stream(100, 10, steps)]).tokens_per_s

    assert until_together(attempt, 5) == pytest.approx(200.0)
    assert tried == [5, 10, 20]
    with pytest.raises(NeverTogether):
        until_together(attempt, 1)


def test_the_ceiling_is_reading_the_weights_and_the_contexts() -> None:
    """The figures of a machine that reads 33 GB/s, as they are known for the demo model."""
    assert ceiling_tok_s(SHAPE, 1, 1, 64, 33) == pytest.approx(122, rel=0.01)
    assert ceiling_tok_s(SHAPE, 16, 1, 64, 33) == pytest.approx(1800, rel=0.01)
    assert ceiling_tok_s(SHAPE, 16, 1, 1500, 33) == pytest.approx(640, rel=0.02)
    one, two = (ceiling_tok_s(SHAPE, 16, engines, 0, 10) for engines in (1, 2))
    assert one == pytest.approx(2 * two)  # each of two reads the weights


def test_the_linear_share_of_a_prompt() -> None:
    assert linear_share(SHAPE, 1000, 1.0, 212.0) == pytest.approx(1.0)
    assert linear_share(SHAPE, 1000, 2.0, 212.0) == pytest.approx(0.5)


@pytest.mark.parametrize(("ctx", "steps"), [(64, 24), (1500, 24), (512, 48), (33, 8)])
def test_a_prompt_leads_to_its_context(ctx: int, steps: int) -> None:
    prompt = prompt_tokens(ctx, steps)
    found = steady([stream(0, 10, steps + 2)] * 3)
    assert prompt + found.generated == pytest.approx(ctx, abs=1)
    assert prompt_tokens(1, steps) == 1


def test_the_grid_has_each_batch_once_and_halves_the_largest() -> None:
    points = Plan().points
    assert points[:9] == [Point(ctx, batch) for ctx, batch in itertools.product((64, 512, 1500), (1, 8, 16))]
    assert points[9:] == [Point(64, 16, 2), Point(512, 16, 2), Point(1500, 16, 2)]
    assert [point.engines for point in Plan(contexts=(64,), batches=(1, 3)).points] == [1, 1]
    assert Plan(contexts=(), batches=()).points == []


def test_a_pool_has_room_for_its_share_of_the_grid() -> None:
    plan = Plan()
    assert plan.pool_tokens(1) > 16 * 1500
    assert 8 * 1500 < plan.pool_tokens(2) < plan.pool_tokens(1)
    assert Plan(contexts=(), batches=()).pool_tokens(1) > 4 * plan.prompt_tokens
