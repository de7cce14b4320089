"""What the router benchmark asks of: prompts that pools hold to many depths."""

from __future__ import annotations

import random

import numpy as np

from cluster.bench.router_plan import DEPTHS, HOLDERS, PROMPT_BLOCKS
from cluster.bench.router_scene import LEASE_S, PROMPT_BYTES, Scene, depths_of_a_prompt, distinct_depths, random_keys
from kvpool.directory.messages import split_keys


def scene(pools: int = 40) -> Scene:
    numbers = np.random.default_rng(1)
    return Scene([random_keys(PROMPT_BLOCKS, numbers) for _ in range(2)], pools, 10.0, random.Random(1))


def test_a_prompt_is_held_to_as_many_depths_as_are_asked_for() -> None:
    held = depths_of_a_prompt(64, random.Random(1))
    assert (len({pool for pool, _ in held}), len({blocks for _, blocks in held})) == (HOLDERS, DEPTHS)
    assert max(blocks for _, blocks in held) == PROMPT_BLOCKS
    assert len(depths_of_a_prompt(3, random.Random(1))) == 3


def test_the_mirror_has_what_the_pools_were_given() -> None:
    made = scene()
    found = [made.mirror.depths(prompt) for prompt in made.prompts]
    assert [len(prompt) for prompt in made.prompts] == [PROMPT_BYTES] * 2
    assert sum(int(depths.sum()) for depths in found) == made.pairs
    assert [distinct_depths(depths) for depths in found] == [DEPTHS] * 2
    pools = made.mirror.pools(10.0 + LEASE_S / 2)
    assert [pool.replica_ids for pool in pools] == [(name,) for name in sorted(made.replica_ids)]


def test_what_is_filled_in_is_held_once() -> None:
    made, more = scene(3), random_keys(1000, np.random.default_rng(2))
    before = sum(pool.key_blocks for pool in made.mirror.pools(10.0))
    made.fill(more)
    assert sum(pool.key_blocks for pool in made.mirror.pools(10.0)) == before + 1000
    assert all(made.mirror.depths(key).max() == 1 for key in split_keys(more)[::100])
    assert made.mirror.counts["digest_mismatches"] == 0


def test_a_batch_and_a_heartbeat_follow_what_was_said() -> None:
    made, numbers = scene(2), np.random.default_rng(3)
    first, second = random_keys(5, numbers), random_keys(5, numbers)
    made.mirror.apply(made.change(0, b"", first), 10.0)
    made.mirror.apply(made.change(0, first, second), 10.0)
    made.beat(0)
    assert made.mirror.depths(first).max() == 0
    assert made.mirror.depths(second[:16]).max() == 1
    assert (made.mirror.counts["gaps"], made.mirror.counts["digest_mismatches"]) == (0, 0)
