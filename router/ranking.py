"""Candidates in the order of their scores, equals in an order drawn by chance: one pass of machine code.

Compiled when it is imported, from numba's cache if it is there; nothing outside this file is part of it.

Method: a random permutation (Fisher-Yates over splitmix64), then a stable sort by score, so each order of equals is as likely as
another.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
from numba import njit


@njit("int64[::1](float64[::1], float64, int64, uint64)", cache=True)
def _ranked(score: npt.NDArray[np.float64], tie: float, first: int, seed: int) -> npt.NDArray[np.int64]:
    n = len(score)
    shuffled = np.arange(n)
    state = np.uint64(seed)
    for i in range(n - 1, 0, -1):
        state += np.uint64(0x9E3779B97F4A7C15)
        bits = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        j = np.int64(((bits ^ (bits >> np.uint64(31))) >> np.uint64(1)) % np.uint64(i + 1))
        shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
    best = score[0]
    for one in score:
        best = min(best, one)
    rank = np.empty(n)
    for i in range(n):
        candidate = shuffled[i]
        rank[i] = best if score[candidate] <= best + tie else score[candidate]
        if candidate == first:
            rank[i] = -np.inf
    return shuffled[np.argsort(rank, kind="mergesort")]


def ranked(score: npt.NDArray[np.float64], tie: float, first: int, rng: random.Random) -> list[int]:
    """Returns the candidates, least score first; those within `tie` of the least are equal to it, and of these `first` (-1: none)
    comes first. Takes 64 bits from `rng`. Scores must be finite.
    """
    order: list[int] = _ranked(np.ascontiguousarray(score, np.float64), tie, first, rng.getrandbits(64)).tolist()
    return order
