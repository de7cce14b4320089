"""What one router believes of the pools, in a form that travels, and the way to the routers of the same application.

A picture has 16 bytes for each key and pool. It is for a look now and then: of a large cluster it is tens of megabytes for each
router.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from router.mirror import Mirror

LONE = "this router"
"""What a router outside Serve is called."""


@dataclass(frozen=True, slots=True)
class PoolPicture:
    """One pool as a router sees it: the replicas that live there, and its packed keys in no order."""

    replica_ids: tuple[str, ...]
    keys: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MirrorPicture:
    """What the mirror of `router` has, by pool; only pools whose lease holds, because no other is routed by."""

    router: str
    pools: dict[str, PoolPicture]


def picture_of(router: str, mirror: Mirror, now: float) -> MirrorPicture:
    """Takes the picture at `now`, in seconds of the mirror's clock. A pool whose keys are not known just now has none."""
    pools = {view.pool: PoolPicture(view.replica_ids, b"".join(mirror.keys(view.pool))) for view in mirror.pools(now)}
    return MirrorPicture(router, pools)


def own_name() -> str:
    """The id of the Serve replica that this process is; `LONE` where it is none."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        return str(serve.get_replica_context().replica_id.unique_id)
    except RayServeException:
        return LONE


async def all_routers() -> Any:
    """A handle to all replicas of the deployment that this process is a replica of; None where it is none."""
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    # It asks the controller whether there is such a deployment, and waits for the answer.
    return await asyncio.to_thread(serve.get_deployment_handle, context.deployment, context.app_name)
