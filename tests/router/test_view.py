from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from router.view import COLUMNS, View
from tests.router.views import view, views


def test_columns_that_are_not_given_are_filled() -> None:
    zeros = np.zeros(3, np.int64)
    seen = View(["a", "b", "c"], zeros, zeros, zeros, zeros, np.ones(3))
    assert np.isnan(seen.decode_interference_s).all()
    assert seen.waiting.tolist() == seen.held_tokens.tolist() == [0, 0, 0]
    assert math.isnan(seen.reuse_share)
    assert [len(column) for column in seen.columns().values()] == [3] * len(COLUMNS)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_unequal_length_are_refused(name: str) -> None:
    seen = view(3)
    with pytest.raises(ValueError, match=r"differ in length: \[2, 3\]"):
        replace(seen, **{name: getattr(seen, name)[:2]})


def test_an_empty_view() -> None:
    assert len(view(0)) == 0


@given(views(), views())
def test_joined(one: View, other: View) -> None:
    both = one.joined(other)
    assert both.replica_ids == [*one.replica_ids, *other.replica_ids]
    for name, column in both.columns().items():
        np.testing.assert_array_equal(column, [*one.columns()[name], *other.columns()[name]])
        assert column.dtype == one.columns()[name].dtype
    assert both.reuse_share == one.reuse_share or math.isnan(one.reuse_share)
