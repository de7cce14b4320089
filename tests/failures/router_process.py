"""A process that follows the directory and decides, as an ingress does, without HTTP: about prompts at random.

    Redis -> FollowerThread -> Mirror -> RouteService <- decisions

After each decision it looks into the region of the pool that was chosen, past everything, and counts what was predicted by
the directory and is not there: phantoms. A block that goes between the decision and the look counts as one, too. If it is told to
watch, it looks into all regions every few milliseconds, and knows of each phantom since when at most it is one.

It decides only from when it is ready on, as an ingress gets requests only then. Every public method is a command of the test.
"""

from __future__ import annotations

import base64
import itertools
import math
import random
import threading
import time
from collections import Counter
from typing import Any, Final

from cluster.bench.router_scene import Silent
from kvpool import KvatlasError
from kvpool.directory import Space
from kvpool.directory.redis_backend import RedisReader
from kvpool.region_view import RegionView
from router.follower import FollowerThread
from router.mirror import Mirror
from router.route_config import RouteConfig
from router.service import RouteService
from tests.failures.prompts import BLOCK_TOKENS, KEYS, PROMPTS, indexed

Answer = dict[str, Any]
_WATCH_S: Final = 0.003


class RouterProcess:
    """See above. Counted: decisions, blind (decided without the directory), unheard (candidates that no pool spoke for),
    predicted and phantom blocks, dead (decisions for a pool without a living process), and what had failed.
    """

    def __init__(self) -> None:
        self._deciding = threading.Event()
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._members: list[str] = []
        self._regions: dict[str, str] = {}
        self._numbers = itertools.count()
        self._failure = ""
        self._oddity = ""
        self._there_at: dict[tuple[str, bytes], float] | None = None
        self._late_s: list[float] = []

    def start(
        self, url: str, space: list[Any], lease_s: float, per_s: float, seed: int, members: Answer, ready_s: float
    ) -> Answer:
        """Follows the directory; returns when it is ready, how long that took, and whether it took longer than `ready_s`."""
        began = time.monotonic()
        self.members(**members)
        self._mirror = Mirror(default_lease_s=lease_s)
        reader = RedisReader(url, Space(*space))
        self._thread = FollowerThread(reader, self._mirror, clock=time.monotonic, rng=random.Random(seed))
        self._service = RouteService(
            self._mirror,
            RouteConfig(),
            block_tokens=BLOCK_TOKENS,
            clock=time.monotonic,
            rng=random.Random(seed),
            metrics=Silent(),
            fresh_s=lease_s,
            connected=lambda: self._thread.alive and self._thread.follower.connected,
        )
        self._rng = random.Random(seed)
        is_ready = self._thread.wait_until_whole(self._members, ready_s)
        self._deciding.set()
        threading.Thread(target=self._run, args=(per_s,), name="decisions", daemon=True).start()
        return {"ready": is_ready, "ready_s": time.monotonic() - began}

    def members(self, members: list[str], regions: dict[str, str]) -> Answer:
        """From now on these replicas may be chosen; `regions` has the file of each pool's region."""
        self._members, self._regions = list(members), dict(regions)
        return {}

    def look(self) -> Answer:
        """What it knows of each pool but the keys, and how it follows."""
        now = time.monotonic()
        return {
            "pools": {
                view.pool: {
                    "whole": view.whole,
                    "state": view.state,
                    "age_s": view.age_s,
                    "replica_ids": view.replica_ids,
                    "writer": [view.incarnation, view.epoch],
                }
                for view in self._mirror.pools(now)
            },
            "connected": self._thread.follower.connected,
            "behind": self._mirror.lag_entries(),
            "position": self._mirror.counts["entries"],
            "mirror": dict(self._mirror.counts),
            "follower": dict(self._thread.follower.counts),
            "failure": self._failure or (repr(self._thread.failure) if self._thread.failure else ""),
        }

    def picture(self) -> Answer:
        """The replicas and the packed keys of each pool that it routes to."""
        views = self._mirror.pools(time.monotonic())
        return {
            view.pool: [view.replica_ids, base64.b64encode(b"".join(self._mirror.keys(view.pool))).decode()]
            for view in views
        }

    def mark(self) -> Answer:
        """What was counted since the last mark."""
        with self._lock:
            seen, self._seen = self._seen, Counter()
        return dict(seen)

    def watch(self) -> Answer:
        """From now on it looks into all regions."""
        self._there_at = {}
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        return {}

    def late(self) -> Answer:
        """How long each phantom seen while it watched had been one at most, in seconds; infinite for one that was never seen."""
        with self._lock:
            return {"late_s": list(self._late_s)}

    def oddity(self) -> Answer:
        """What it knew when a candidate was last unheard or a phantom predicted, in words."""
        return {"oddity": self._oddity}

    def rest(self) -> Answer:
        """Decides nothing until `go`."""
        self._deciding.clear()
        with self._lock:
            return {}

    def go(self) -> Answer:
        """Goes on deciding."""
        self._deciding.set()
        return {}

    def decide(self) -> Answer:
        """Decides about every prompt once, now; returns what that counted, and only that."""
        self.mark()
        for number in range(PROMPTS):
            self._decide(number)
        return self.mark()

    def leave(self) -> Answer:
        """Ends following."""
        self._deciding.clear()
        self._thread.close()
        return {}

    def _run(self, per_s: float) -> None:
        try:
            while self._thread.alive:
                time.sleep(1 / per_s)
                if self._deciding.is_set():
                    self._decide(self._rng.randrange(PROMPTS))
        except Exception as error:
            self._failure = repr(error)

    def _decide(self, number: int) -> None:
        members, keys = self._members, KEYS[number]
        request_id = f"request-{next(self._numbers)}"
        with self._lock, self._service.ticket(request_id, keys, len(keys) * BLOCK_TOKENS + 1, 8) as ticket:
            homes = {one: view.pool for view in self._mirror.pools(time.monotonic()) for one in view.replica_ids}
            decision = self._service.route(request_id, members)
            listed, chosen = ticket.listed_tokens, decision.order[0]
            listed_blocks = int(listed[chosen]) // BLOCK_TOKENS if listed is not None and chosen < len(listed) else 0
            decided_at = time.monotonic()
            pool = homes.get(decision.replica_id, "")
            is_live, there = self._inside(pool)
            self._seen["decisions"] += 1
            self._seen["blind"] += decision.outcome == "fallback"
            unheard = set(members) - set(homes)
            phantoms = [key for key in keys[:listed_blocks] if key not in there]
            phantom = len(phantoms)
            if self._there_at is not None:
                self._late_s += [decided_at - self._there_at.get((pool, key), -math.inf) for key in phantoms]
            if unheard or phantom:
                self._oddity = f"unheard {unheard}, {phantom} phantom at {decision.replica_id}: {self.look()}"
            self._seen["unheard"] += len(unheard)
            self._seen["predicted"] += listed_blocks
            self._seen["phantom"] += phantom
            self._seen["dead"] += not is_live and decision.outcome != "fallback"
            ticket.admitted(decision.replica_id, listed_blocks * BLOCK_TOKENS)
            ticket.started()

    def _watch(self) -> None:
        try:
            while self._thread.alive and self._there_at is not None:
                for pool in self._regions:
                    now = time.monotonic()
                    _, there = self._inside(pool)
                    self._there_at.update(dict.fromkeys([(pool, key) for key in there], now))
                time.sleep(_WATCH_S)
        except Exception as error:
            self._failure = repr(error)

    def _inside(self, pool: str) -> tuple[bool, set[bytes]]:
        """Whether somebody lives in the region of `pool`, and the keys there."""
        try:
            with RegionView(self._regions.get(pool, "")) as view:
                return view.is_live(), indexed(view)
        except (OSError, KvatlasError):
            return False, set()
