"""One run of the router benchmark: phases, and the figures made of them.

Rounds. Every round does each phase once, and phases are short: a shared machine changes its speed from second to second. A
figure is the median over the rounds; look-ups are taken together, because every prompt is looked up once only.

    look-ups     depths of prompts that were never asked about before, in a table of `entries` keys, with other keys beside
                 them until the table is larger than the last-level cache
    apply        batches of a publisher: as many blocks leave as come, and the digest after each is compared
    decide64     whole `RouteService.route` calls among 64 replicas, with requests in flight and a heartbeat before each
    decide1024   the same among 1,024
    ids          16,000 token ids -> keys -> decision, among 64

Then the way from a sealed block to a mirror in another process, over a Redis of this run's own (`router_visible.py`).

Limits: the figures are of one thread; whatever else runs on the machine is in them.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from cluster.bench import router_visible
from cluster.bench.pool_process import BenchFailed
from cluster.bench.router_plan import BATCH_BLOCKS, BLOCK_TOKENS, PROMPT_BLOCKS, Plan
from cluster.bench.router_scene import PROMPT_BYTES, Scene, Silent, distinct_depths, random_keys
from kvpool.keys import KEY_BYTES, KeyRoot, KeySpace
from router.route_config import RouteConfig
from router.service import RouteService

LEAST_DISTINCT: Final = 16
"""Every look-up must find at least so many different depths."""
MANY_PROMPTS: Final = 100
_CACHE: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_KEY_BYTES_IN_TABLE: Final = 38
"""What a key in the table takes at least; used only to say how many make it larger than the cache."""

Say = Callable[[str], None]


def measure(plan: Plan, say: Say) -> dict[str, Any]:
    """Runs it all and returns the report. `say` hears of progress. Raises BenchFailed, and what the Redis raises."""
    load = os.getloadavg()[0]
    parts = _Parts(plan, say)
    rounds = []
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        rounds.append(parts.round(number))
    told = {**figures(rounds), **parts.sizes}
    parts = None  # type: ignore[assignment]  # its memory is given back
    if plan.redis:
        told |= router_visible.measure(plan, say)
    return {**told, "entries": plan.entries, "rounds": plan.rounds, "load_before": load}


def figures(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The report's figures from what each round found."""
    looked_up = sorted(took for one in rounds for took in one["lookups_us"])

    def median(name: str) -> float:
        found: float = statistics.median(one[name] for one in rounds)
        return found

    return {
        "lookup_p50_us": statistics.median(looked_up),
        "lookup_p99_us": percentile(looked_up, 0.99),
        "apply_blocks_per_s": median("apply_blocks_per_s"),
        "decide64_p50_us": median("decide64_us"),
        "decide1024_p50_us": median("decide1024_us"),
        "ids_to_decision_16k_p50_us": median("ids_us"),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, which come in order and are not empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cache_bytes(folder: Path = _CACHE) -> int:
    """Size of the largest cache of the first processor; 0 where the kernel does not tell."""
    sizes = [0]
    for file in folder.glob("index*/size"):
        text = file.read_text(encoding="ascii").strip()
        factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KM") or 0) * factor)
    return max(sizes)


class _Parts:
    """The scenes that rounds measure, and what is left of the prompts that nobody has asked about."""

    def __init__(self, plan: Plan, say: Say) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._numbers = np.random.default_rng(plan.seed)
        now = time.monotonic()
        space = KeySpace(self._rng.randbytes(32))
        self._name = space.packed_block_keys
        self._root = space.root(KeyRoot("bench", BLOCK_TOKENS, "float32"))
        self._ids = [
            tuple(self._rng.choices(range(150_000), k=PROMPT_BLOCKS * BLOCK_TOKENS))
            for _ in range(plan.rounds * plan.prompts)
        ]
        named = [self._name(self._root, ids, BLOCK_TOKENS) for ids in self._ids]
        count = max(1, plan.entries // PROMPT_BLOCKS)
        say(f"{count} prompts of {PROMPT_BLOCKS} blocks in {plan.pools} pools")
        self._few = Scene([*self._random_prompts(count), *named], plan.pools, now, self._rng)
        keys = count * PROMPT_BLOCKS + sum(map(len, named)) // KEY_BYTES
        table_bytes = self._few.mirror.memory_bytes()
        self.sizes = {"bytes_per_entry": table_bytes / keys, "pairs": self._few.pairs}
        filled = keys
        if plan.beyond_cache:
            filled += self._fill(keys, say)
        self.sizes |= {
            "table_keys": filled,
            "table_bytes": self._few.mirror.memory_bytes(),
            "cache_bytes": cache_bytes(),
        }
        self._unasked = list(self._few.prompts[:count])
        self._rng.shuffle(self._unasked)
        self._last: list[bytes] = [b""] * plan.pools
        self._apply()  # so that from the first round on as many blocks leave as come
        say(f"{MANY_PROMPTS} prompts in {plan.many_pools} pools")
        self._many = Scene(self._random_prompts(MANY_PROMPTS), plan.many_pools, now, self._rng)
        self._service = self._served(self._few, plan.flights)
        self._many_service = self._served(self._many, plan.flights)
        self._asked = 0

    def round(self, number: int) -> dict[str, Any]:
        """What one round finds."""
        plan = self._plan
        found: dict[str, Any] = {"lookups_us": self._look_up(number)}
        found["apply_blocks_per_s"] = self._apply()
        found["decide64_us"] = statistics.median(self._decide(self._service, self._few, plan.decisions))
        many = max(1, plan.decisions // 10)
        found["decide1024_us"] = statistics.median(self._decide(self._many_service, self._many, many))
        found["ids_us"] = statistics.median(self._from_ids(number))
        return found

    def _look_up(self, number: int) -> list[float]:
        share = len(self._unasked) // self._plan.rounds or 1
        taken = []
        for prompt in self._unasked[number * share : (number + 1) * share]:
            asked = bytes(bytearray(prompt))  # as just made by whoever names blocks, not as it lay here
            begin = time.perf_counter_ns()
            depths = self._few.mirror.depths(asked)
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            distinct = distinct_depths(depths)
            if distinct < min(LEAST_DISTINCT, self._plan.pools):
                raise BenchFailed(
                    f"A look-up found {distinct} different depths instead of {LEAST_DISTINCT} or more: this is a fault of "
                    "the mirror, please report it."
                )
        return taken

    def _apply(self) -> float:
        """Blocks a second of batches for all pools in turn, each of which takes out what the pool's last one put in."""
        plan, mirror = self._plan, self._few.mirror
        wrong = mirror.counts["digest_mismatches"]
        took_ns = blocks = 0
        for number in range(plan.batches):
            pool = number % plan.pools
            removed, added = self._last[pool], random_keys(BATCH_BLOCKS, self._numbers)
            self._last[pool] = added
            entry = self._few.change(pool, removed, added)
            begin = time.perf_counter_ns()
            mirror.apply(entry, time.monotonic())
            took_ns += time.perf_counter_ns() - begin
            blocks += (len(removed) + len(added)) // KEY_BYTES
        if mirror.counts["digest_mismatches"] != wrong:
            raise BenchFailed("The mirror computes another digest than the publisher: please report it.")
        return blocks * 1e9 / took_ns

    def _decide(self, service: RouteService, scene: Scene, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            prompt = self._rng.choice(scene.prompts)
            kept = self._rng.randrange(1, PROMPT_BLOCKS) * KEY_BYTES
            keys = prompt[:kept] + random_keys(PROMPT_BLOCKS - kept // KEY_BYTES, self._numbers)
            scene.beat(self._rng.randrange(len(scene.replica_ids)))
            with service.ticket(self._next_id(), keys, PROMPT_BLOCKS * BLOCK_TOKENS, 128) as ticket:
                begin = time.perf_counter_ns()
                decision = service.route(ticket.request_id, scene.replica_ids)
                taken.append((time.perf_counter_ns() - begin) / 1e3)
            if decision.outcome == "fallback":
                raise BenchFailed(f"A decision was a fallback ({decision.reason}): please report it.")
        return taken

    def _from_ids(self, number: int) -> list[float]:
        plan, service, scene = self._plan, self._service, self._few
        taken = []
        for ids in self._ids[number * plan.prompts : (number + 1) * plan.prompts]:
            request_id = self._next_id()
            begin = time.perf_counter_ns()
            keys = self._name(self._root, ids, BLOCK_TOKENS)
            ticket = service.ticket(request_id, keys, len(ids), 128)
            decision = service.route(request_id, scene.replica_ids)
            taken.append((time.perf_counter_ns() - begin) / 1e3)
            ticket.close()
            if not decision.view.cached_tokens.any():
                raise BenchFailed("A prompt that pools hold was not found by its token ids: please report it.")
        return taken

    def _served(self, scene: Scene, flights: int) -> RouteService:
        """A router over the scene, with requests in flight at every replica: half of them have their first token."""
        service = RouteService(
            scene.mirror,
            RouteConfig(),
            block_tokens=BLOCK_TOKENS,
            clock=time.monotonic,
            rng=random.Random(self._plan.seed),
            metrics=Silent(),
            fresh_s=1e6,
            connected=lambda: True,
        )
        for number in range(flights * len(scene.replica_ids)):
            ticket = service.ticket(
                f"flight-{number}", self._rng.choice(scene.prompts), PROMPT_BLOCKS * BLOCK_TOKENS, 128
            )
            ticket.admitted(scene.replica_ids[number % len(scene.replica_ids)], 0)
            if number % 2:
                ticket.started()
        return service

    def _fill(self, keys: int, say: Say) -> int:
        """Adds keys until the table is larger than the cache; returns how many."""
        wanted = int(1.1 * cache_bytes() / _KEY_BYTES_IN_TABLE) - keys
        if wanted <= 0:
            return 0
        say(f"{wanted} more keys, so that the table does not fit into the cache")
        self._few.fill(random_keys(wanted, self._numbers))
        return wanted

    def _random_prompts(self, count: int) -> list[bytes]:
        keys = random_keys(count * PROMPT_BLOCKS, self._numbers)
        return [keys[start : start + PROMPT_BYTES] for start in range(0, len(keys), PROMPT_BYTES)]

    def _next_id(self) -> str:
        self._asked += 1
        return f"asked-{self._asked}"
