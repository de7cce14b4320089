"""GET /debug/state: for the operator, behind the admin key."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import asdict

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.edge import Edge
from cluster.api.errors import ApiError
from cluster.api.health import replica_statuses
from cluster.api.json_response import json_response


def debug_router(edge: Edge) -> APIRouter:
    """The route, bound to `edge`."""
    router = APIRouter()

    @router.get("/debug/state", response_model=None, include_in_schema=False)
    async def debug_state(request: Request) -> Response:
        """Every replica's status, and how many tasks this process has."""
        require_admin(request, edge.settings.admin_key)
        replicas = [asdict(status) for status in await replica_statuses(edge)]
        return json_response({"replicas": replicas, "asyncio_tasks": len(asyncio.all_tasks())})

    return router


def require_admin(request: Request, admin_key: str) -> None:
    """Raise `ApiError`: 404 when there is no admin key (the route does not exist then), 401 when it is not given."""
    if not admin_key:
        raise ApiError(404, f"Invalid URL ({request.method} {request.url.path}).", code="unknown_url")
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Digests have one length, so the comparison takes one time whatever is sent.
    same = hmac.compare_digest(_digest(given.strip()), _digest(admin_key))
    if scheme.lower() != "bearer" or not same:
        raise ApiError(
            401, "A valid admin key is required.", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
        )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
