"""Windows read off transformers' own mask functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    sliding_window_causal_mask_function,
)

from actors.errors import ModelRefused
from actors.masks import MaskRecorder, window_of


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(causal_mask_function) == 0


@pytest.mark.parametrize("window", [1, 2, 11, 4096, 131_072])
def test_a_sliding_window_is_counted_as_transformers_counts_it(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window)) == window


def every_other(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query - key) % 2 == 0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (bidirectional_mask_function, "not causal"),
        (and_masks(causal_mask_function, chunked_overlay(8192, torch.zeros(1, dtype=torch.int64))), "chunks"),
        (and_masks(causal_mask_function, every_other), "holes"),
    ],
)
def test_other_patterns_are_refused(function: Any, words: str) -> None:
    with pytest.raises(ModelRefused, match=words):
        window_of(function)


def test_masks_that_we_did_not_make_are_refused() -> None:
    with MaskRecorder("kvatlas_test") as masks:
        marker = masks(mask_function=causal_mask_function, q_length=1)
        assert masks.function_of(marker) is causal_mask_function
    with pytest.raises(ModelRefused, match="own making"):
        masks.function_of(torch.zeros(1))
    with pytest.raises(ModelRefused, match="no mask"):
        masks.function_of(None)
