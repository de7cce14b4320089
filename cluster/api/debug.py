"""GET /debug/state and /debug/directory, POST /debug/route: for the operator, behind the admin key.

State: what every replica and this process's router say of themselves. Directory: whether the blocks that pools hold, the
directory lists and every router's mirror believes in are the same ones. Pools move while they are compared, so a small
difference may be a matter of milliseconds: ask again. Route: where the request in the body, one for chat or completions, would
go now and why; it is not sent. The decision is that of the router that answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from actors.request import GenerateRequest
from cluster.api.body import read_object
from cluster.api.chat import plan_chat
from cluster.api.completions import plan_completions
from cluster.api.edge import Edge
from cluster.api.errors import MESSAGE_CHARS, ApiError, invalid, shorten, unavailable
from cluster.api.health import directory_state, replica_statuses
from cluster.api.identity import identity_of
from cluster.api.json_response import json_response
from cluster.api.plan import Caller
from cluster.api.session import session_of
from kvpool.directory import DirectoryError


def debug_router(edge: Edge) -> APIRouter:
    """The routes, bound to `edge`."""
    router = APIRouter()

    @router.get("/debug/state", response_model=None, include_in_schema=False)
    async def debug_state(request: Request) -> Response:
        """Every replica's status, the router's report, who waits for admission, and how many tasks this process has."""
        require_admin(request, edge.settings.admin_key)
        replicas = [asdict(status) for status in await replica_statuses(edge)]
        state = {"replicas": replicas, "routing": edge.client.routing(), "admission": edge.admission.report()}
        return json_response(state | {"asyncio_tasks": len(asyncio.all_tasks())})

    @router.get("/debug/directory", response_model=None, include_in_schema=False)
    async def debug_directory(request: Request) -> Response:
        """One record per pool: what is missing in the directory and in each mirror, and what is there that should not be."""
        require_admin(request, edge.settings.admin_key)
        if directory_state(edge) in ("", "off"):
            raise ApiError(409, _NO_DIRECTORY, code="directory_not_configured")
        pools = await _checked(edge)
        return json_response({"pools": pools, "state": directory_state(edge)})

    @router.post("/debug/route", response_model=None, include_in_schema=False)
    async def debug_route(request: Request) -> Response:
        """The decision on the request in the body, as `cluster.explanation` describes it."""
        require_admin(request, edge.settings.admin_key)
        body = await read_object(request, edge.settings.max_body_bytes)
        caller = Caller(identity_of(request.scope), session_of(request))
        return json_response(await edge.client.explain(await _asked(edge, body, caller)))

    return router


async def _asked(edge: Edge, body: dict[str, Any], caller: Caller) -> GenerateRequest:
    """The one request that `body` is for. Raises `ApiError` as the routes do that would serve it."""
    planned = await (plan_chat if "messages" in body else plan_completions)(edge, body, caller)
    requests = planned.plan.requests
    if len(requests) > 1:
        param = "n" if planned.plan.copies > 1 else "prompt"
        raise invalid(f"'{param}' asks for {len(requests)} choices: ask about one at a time.", param)
    return requests[0]


_NO_DIRECTORY = (
    "This server has no directory: set directory.redis_url (KVATLAS_DIRECTORY__REDIS_URL) to the address of a Redis, or "
    "start the server with `kvatlas serve`, which brings one."
)


async def _checked(edge: Edge) -> list[dict[str, Any]]:
    """The records of the check. Raises `ApiError` 503 when it cannot be made, or not in time."""
    limit = edge.settings.check_timeout_s
    try:
        return await asyncio.wait_for(edge.client.check_directory(), limit)
    except TimeoutError:
        message = f"Pools and directory could not be compared within {limit:g} s: see `kvatlas status`, and try again."
    except DirectoryError as error:
        message = shorten(str(error), MESSAGE_CHARS)
    raise unavailable(message, "directory_unavailable")


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
