"""The measured rate of prompt tokens."""

from __future__ import annotations

import pytest

from actors.prefill_rate import PrefillRate


def test_little_evidence_is_none() -> None:
    rate = PrefillRate()
    rate.note(1, 1.0, 1.0)
    rate.note(5000, 0.0, 1.0)
    rate.note(1000, 1.0, 1.0)
    assert rate.tokens_per_s(1.0) == 0.0
    rate.note(1000, 1.0, 2.0)
    assert rate.tokens_per_s(2.0) == pytest.approx(1000)


def test_large_chunks_count_for_more_than_ends_of_prompts() -> None:
    rate = PrefillRate()
    for step in range(10):
        rate.note(256, 0.5, float(step))
    rate.note(8, 0.1, 10.0)
    assert 450 < rate.tokens_per_s(10.0) < 512


def test_it_follows_a_change_and_forgets() -> None:
    rate = PrefillRate()
    for step in range(50):
        rate.note(200, 1.0, float(step))
    for step in range(50):
        rate.note(2000, 1.0, 50.0 + step)
    assert rate.tokens_per_s(100.0) == pytest.approx(2000, rel=0.05)
    assert rate.tokens_per_s(200.0) == 0.0
