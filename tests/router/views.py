"""Views and decisions for tests of policies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from router.decision import RouteDecision
from router.policy import decide
from router.route_config import PolicyName, RouteConfig
from router.view import COLUMNS, RouteRequest, View


def view(n: int = 2, reuse_share: float = 0.0, **columns: Sequence[float]) -> View:
    """A view of `n` idle, empty replicas at 1,000 tokens/s that add 20 ms a decode, with some columns set."""
    defaults: dict[str, Sequence[float]] = {
        "cached_tokens": [0] * n,
        "queued_tokens": [0] * n,
        "running": [0] * n,
        "free_tokens": [100_000] * n,
        "prefill_tokens_per_s": [1000.0] * n,
        "decode_interference_s": [0.02] * n,
        "waiting": [0] * n,
        "held_tokens": [0] * n,
    }
    assert set(columns) <= set(defaults) == set(COLUMNS)
    chosen: dict[str, Any] = {
        name: np.array(columns.get(name, values), np.float64 if name.endswith("_s") else np.int64)
        for name, values in defaults.items()
    }
    return View([f"r{index}" for index in range(n)], **chosen, reuse_share=reuse_share)


def route(seen: View, policy: str = "cost", prompt_tokens: int = 1000, seed: int = 0, **request: Any) -> RouteDecision:
    """The decision on a request with these fields."""
    config = RouteConfig(cast(PolicyName, policy))
    return decide(RouteRequest(prompt_tokens, **request), seen, config, random.Random(seed))


def permuted(seen: View, order: Sequence[int]) -> View:
    """The same candidates in another order."""
    columns: dict[str, Any] = {name: column[list(order)] for name, column in seen.columns().items()}
    return replace(seen, replica_ids=[seen.replica_ids[index] for index in order], **columns)


def with_column(seen: View, name: str, values: npt.NDArray[Any]) -> View:
    """The same view with one column replaced."""
    changed: dict[str, Any] = {name: values}
    return replace(seen, **changed)


@st.composite
def views(draw: st.DrawFn, least: int = 1, most: int = 6, prompt_tokens: int = 4000) -> View:
    """Any views: idle and overloaded, empty and full, measured and not.

    Made from a drawn seed: drawing each of some fifty numbers takes fifty times as long.
    """
    n = draw(st.integers(least, most))
    rng = random.Random(draw(st.integers(0, 2**32)))

    def column(*corners: float, to: float) -> list[float]:
        """Corners and other numbers up to `to`, of all orders of magnitude."""
        return [rng.choice([*corners, rng.uniform(0, to), to ** rng.random()]) for _ in range(n)]

    return view(
        n,
        cached_tokens=column(0, 0, 16, 1600, prompt_tokens - 1, to=prompt_tokens - 1),
        queued_tokens=column(0, 0, 1000, to=10**9),
        running=column(0, 0, 1, to=1000),
        waiting=column(0, to=100),
        free_tokens=column(0, 10**7, to=10**6),
        held_tokens=column(0, to=10**6),
        prefill_tokens_per_s=column(0, 1000, to=10**5),
        decode_interference_s=column(0, float("nan"), to=1),
        reuse_share=rng.choice([0.0, 1.0, float("nan"), rng.random()]),
    )
