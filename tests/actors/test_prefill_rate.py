"""The measured rate of prompt tokens."""

from __future__ import annotations

import pytest

from actors.prefill_rate import PrefillRate


def test_nothing_measured_is_zero() -> None:
    rate = PrefillRate()
    rate.note(1, 1.0)
    rate.note(100, 0.0)
    assert rate.tokens_per_s == 0.0


def test_large_chunks_count_for_more_than_ends_of_prompts() -> None:
    rate = PrefillRate()
    rate.note(256, 0.5)
    assert rate.tokens_per_s == pytest.approx(512)
    rate.note(8, 0.1)
    assert 350 < rate.tokens_per_s < 512


def test_it_follows_a_change() -> None:
    rate = PrefillRate()
    for _ in range(50):
        rate.note(200, 1.0)
    for _ in range(50):
        rate.note(200, 0.1)
    assert rate.tokens_per_s == pytest.approx(2000, rel=0.05)
