"""Small traces for the tests of the replay."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from router.replay.service_times import ServiceTimes
from router.replay.trace import Trace, made

BLOCK = 8

QUICK = ServiceTimes(
    token_s=0.001,
    pair_s=1e-6,
    weights_s=0.002,
    context_token_s=1e-6,
    overhead_s=0.0005,
    step_tokens=32,
    max_running=4,
)


def trace_of(rows: Sequence[Sequence[int]], *, tail: int = 3, output_tokens: int = 4, gap_s: float = 0.01) -> Trace:
    """Prompts of these full blocks and `tail` more tokens, one every `gap_s`."""
    return made(
        BLOCK,
        np.arange(len(rows), dtype=np.float64) * gap_s,
        len(rows) * gap_s,
        [BLOCK * len(row) + tail for row in rows],
        [output_tokens] * len(rows),
        rows,
    )


def mixed(seed: int, requests: int = 60, gap_s: float = 0.02) -> Trace:
    """Conversations that grow, and prompts of their own."""
    rng = random.Random(seed)
    talks: list[list[int]] = [[talk] for talk in range(5)]
    fresh = 1000
    rows = []
    for _ in range(requests):
        talk = rng.choice(talks)
        if rng.random() < 0.3:
            rows.append([fresh + number for number in range(rng.randint(1, 4))])
            fresh += 10
            continue
        talk.append(fresh)
        fresh += 10
        rows.append(list(talk))
    return trace_of(rows, gap_s=gap_s)
