"""What a server counted while it was loaded: two looks at GET /debug/state, and the difference between them.

The replicas count prompt tokens asked for and found (`prefix_queried_tokens`, `prefix_hit_tokens`), the router counts what it
decided and predicted (`routing`). Both are totals since the process started, so only differences say something about a load.

Limits: needs the admin key. Where a replica came or went between the looks, the cluster's sums are not known: they are None
then. So is everything that the server does not tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster import http_client
from cluster.errors import ServeFailed

ROUTED = ("queried_tokens", "predicted_tokens", "measured_tokens", "phantom_tokens", "retries")
# The state names only the replicas that answered in time, and under load one may not.
TRIES = 5
PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look: status records by replica id, and the router's record (empty where there is none)."""

    replicas: Mapping[str, Mapping[str, Any]]
    routing: Mapping[str, Any]

    @property
    def policy(self) -> str:
        """The routing policy in force; `unknown` where the server does not say."""
        return str(self.routing.get("policy") or "unknown")

    @property
    def pool_tokens(self) -> int | None:
        """Tokens that the smallest pool holds; None without replicas."""
        sizes = [status["capacity_blocks"] * status["block_tokens"] for status in self.replicas.values()]
        return min(sizes, default=None)

    @property
    def cached_blocks(self) -> int | None:
        """Blocks that a prompt could find in some pool: 0 of cold pools; None without replicas."""
        blocks = [status["blocks"] for status in self.replicas.values()]
        return sum(each["held"] + each["cached"] for each in blocks) if blocks else None

    def has(self, replicas: int) -> bool:
        """Whether it lists that many replicas."""
        return len(self.replicas) >= replicas

    def routes_to(self, replicas: int) -> bool:
        """Whether the router hears of that many replicas through the directory; true where there is none to hear through."""
        directory = self.routing.get("directory") or {"state": "off"}
        if directory["state"] == "off":
            return True
        heard = {replica for pool in directory["pools"] if pool["state"] == "live" for replica in pool["replica_ids"]}
        return directory["state"] == "live" and len(heard) >= replicas


NOTHING = Snapshot({}, {})


def parse(body: Mapping[str, Any]) -> Snapshot:
    """The snapshot in a body of /debug/state."""
    statuses = body.get("replicas") or []
    return Snapshot({str(status["replica_id"]): status for status in statuses}, body.get("routing") or {})


def look(
    url: str,
    admin_key: str,
    at_least: int = 1,
    expected: frozenset[str] = frozenset(),
    sleep: Callable[[float], None] = time.sleep,
) -> Snapshot:
    """Ask the server at `url`; up to `TRIES` times, until it lists `at_least` replicas and all of `expected`.

    `NOTHING` without a key, with a wrong one, and when nothing answers: the load itself tells of that.
    """
    found = NOTHING
    for attempt in range(TRIES if admin_key else 0):
        if attempt:
            sleep(PAUSE_S)
        try:
            answer = http_client.get(f"{url}/debug/state", 10.0, admin_key)
        except ServeFailed:
            continue
        if answer.status in (401, 404):
            break
        if answer.status == 200:
            found = parse(answer.body)
            if found.has(at_least) and expected <= found.replicas.keys():
                break
    return found


def difference(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """What was counted between two looks, for the report.

    `replica_hit` is `replica_hit_tokens` over `replica_queried_tokens`, counted by the replicas. `decisions` maps an outcome of
    routing to how many requests had it.
    """
    queried = _sum(before, after, "prefix_queried_tokens")
    hit = _sum(before, after, "prefix_hit_tokens")
    return {
        "replica_hit": round(hit / queried, 4) if queried and hit is not None else None,
        "replica_queried_tokens": queried,
        "replica_hit_tokens": hit,
        **{name: _rise(before.routing, after.routing, name) for name in ROUTED},
        "decisions": _decisions(before.routing, after.routing),
    }


def _sum(before: Snapshot, after: Snapshot, name: str) -> int | None:
    """The rise of a counter over all replicas; None unless both looks saw the same ones."""
    if not before.replicas or before.replicas.keys() != after.replicas.keys():
        return None
    total = 0
    for replica, status in after.replicas.items():
        risen = int(status[name]) - int(before.replicas[replica][name])
        if risen < 0:  # another life of the replica under the same name
            return None
        total += risen
    return total


def _rise(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> int | None:
    earlier, later = before.get(name), after.get(name)
    if not isinstance(earlier, int) or not isinstance(later, int) or later < earlier:
        return None
    return later - earlier


def _decisions(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    earlier, later = before.get("decisions") or {}, after.get("decisions") or {}
    risen = {outcome: int(count - earlier.get(outcome, 0)) for outcome, count in later.items()}
    return {outcome: count for outcome, count in risen.items() if count > 0}
