"""GET /health, /health/live, /health/ready, /version.

Live: this process answers. Ready: every replica that is up makes progress and has an intact pool, and there is at least
one. /health is readiness, which is what load balancers ask. Without its directory the cluster serves on, routed by what
the mirror still knows or by load: that is told here, and is no reason to take the server out of rotation.
"""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter
from starlette.responses import Response

from actors.status import ReplicaStatus
from cluster.api.edge import Edge
from cluster.api.errors import unavailable
from cluster.api.json_response import json_response


def health_router(edge: Edge) -> APIRouter:
    """The routes, bound to `edge`."""
    router = APIRouter()

    @router.get("/health/live", response_model=None)
    async def live() -> Response:
        """Always 200: the process is up."""
        return json_response({"status": "ok"})

    @router.get("/health", response_model=None)
    @router.get("/health/ready", response_model=None)
    async def ready() -> Response:
        """200 when requests would be served, else 503 with the reason."""
        statuses = await replica_statuses(edge)
        problem = _problem(statuses)
        if problem:
            raise unavailable(f"Not ready: {problem}.", "not_ready")
        told = directory_state(edge)
        return json_response({"status": "ok", "replicas": len(statuses)} | ({"directory": told} if told else {}))

    @router.get("/version", response_model=None)
    async def show_version() -> Response:
        """The version of kvatlas."""
        return json_response({"version": installed_version()})

    return router


def directory_state(edge: Edge) -> str:
    """How the router sees the directory: "off", "live", "stale" or "silent"; empty where there is no router."""
    return str(edge.client.routing().get("directory", {}).get("state", ""))


async def replica_statuses(edge: Edge) -> list[ReplicaStatus]:
    """The replicas' statuses. Raises `ApiError` 503 when they do not answer in time: a hung replica is not ready."""
    limit = edge.settings.status_timeout_s
    try:
        return await asyncio.wait_for(edge.client.status(), limit)
    except TimeoutError:
        raise unavailable(f"Not ready: no status within {limit:g} s.", "not_ready") from None


def installed_version() -> str:
    """The distribution's version; "unknown" in a source tree that is not installed."""
    try:
        return version("kvatlas")
    except PackageNotFoundError:
        return "unknown"


def _problem(statuses: list[ReplicaStatus]) -> str:
    """What keeps the cluster from being ready, or the empty string."""
    if not statuses:
        return "no replica is up"
    for status in statuses:
        if status.stalled_s > 0:
            return f"replica {status.replica_id} has made no progress for {status.stalled_s:.1f} s"
        if status.integrity:
            return f"the pool of replica {status.replica_id} is damaged: {status.integrity}"
    return ""
