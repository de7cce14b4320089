"""`EngineClient` over a Ray Serve handle: requests go to replicas as streams of events, errors come back as ours.

Each request has a ticket at the router for as long as it lives; the router's adapter inside Serve finds it there by the id of
the request. A request with a cold prefix settles first who computes it (`router/claims.py`). A request whose replica dies before
its first token is sent once more, to another replica.

Ray wraps what a replica raises (`RayTaskError`) and has errors of its own for dead replicas and full queues. Here they become
the exceptions that `EngineClient` promises, so that the HTTP app knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any, cast

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.context import _set_request_context
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.errors import ReplicaDied, ReplicaFailed, ReplicaOverloaded
from actors.request import Admitted, Event, GenerateRequest
from actors.status import ReplicaStatus
from cluster.directory_check import compare
from cluster.event_wire import unpack
from cluster.explanation import explanation
from cluster.mirror_picture import MirrorPicture, all_routers, own_name, picture_of
from cluster.prefix_keys import PrefixKeys
from cluster.status_board import StatusBoard
from kvpool.directory import DirectoryReader, DirectoryUnavailable
from router.claims import Claims
from router.mirror import Mirror
from router.service import RouteService
from router.sharing import Sharing

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
"""A replica that takes longer to tell its status is late."""

CHECK_S = 10.0
"""How long a replica or a router may take to tell all its keys."""


class RayEngineClient:
    """Requests and status over `handle`, routed by `routes`. All after `keys` is None without a directory."""

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        routes: RouteService,
        keys: PrefixKeys,
        mirror: Mirror | None = None,
        open_reader: Callable[[], DirectoryReader] | None = None,
        claims: Claims | None = None,
        sharing: Sharing | None = None,
    ) -> None:
        # Over Serve's own gRPC: as an item of a Ray stream, which has an owner and a count of references, a token takes both
        # ends a third more processor time. In Serve's loop, not ours: there a call that was refused is read to its end; here
        # it would never end.
        self._streams = handle.options(method_name="generate", stream=True, _by_reference=False)
        self._handle = handle
        self._routes = routes
        self._keys = keys
        self._mirror = mirror
        self._open_reader = open_reader
        self._claims = claims if claims is not None else Claims(None, routes, clock=time.monotonic)
        self._sharing = sharing
        self._board = StatusBoard(time.monotonic)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """See `EngineClient.generate`. Leaving the generator early, by `aclose` or cancellation, aborts the request.

        A second `Admitted` before the first `Delta` means that the request began anew on another replica.
        """
        keys = self._keys.of(request)
        prompt_tokens, output_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
        request_id, session = request.request_id, request.session
        with (
            self._routes.ticket(request_id, keys, prompt_tokens, output_tokens, session=session) as ticket,
            self._claims.place(request_id, ticket.keys) as place,
        ):
            await place.settle()
            for is_last_try in (False, True):
                has_token = False
                try:
                    async with aclosing(self._stream(request)) as events:
                        async for event in events:
                            if isinstance(event, Admitted):
                                ticket.admitted(event.replica_id, event.cached_tokens)
                                decision = ticket.decision
                                event = replace(event, route=decision.header() if decision is not None else "")
                            elif not has_token:
                                has_token = True
                                ticket.started()
                                place.end()
                            yield event
                    return
                except ReplicaDied as error:
                    if has_token or is_last_try:
                        raise
                    logger.warning("request %s goes to another replica: %s", request.request_id, error)
                    ticket.retry()

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """One try. The handle's errors come out translated."""
        response = cast("DeploymentResponseGenerator[bytes]", _as_a_request_of_its_own(self._streams.remote, request))
        ended = False
        try:
            async for packed in response:
                yield unpack(packed)
            ended = True
        except Exception as error:
            ended = True
            raise translate(error) from error
        finally:
            if not ended:  # GeneratorExit or CancelledError: nobody reads on
                response.cancel()

    async def status(self) -> list[ReplicaStatus]:
        """See `EngineClient.status`. One that is too busy to answer is shown as it was, for a while."""
        return self._board.shown(await ask_all(self._handle, "status", ANSWER_S))

    def routing(self) -> dict[str, Any]:
        """See `EngineClient.routing`."""
        sharing = self._sharing.report() if self._sharing is not None else None
        return {**self._routes.report(), "sharing": sharing, "claims": self._claims.report()}

    async def check_directory(self) -> list[dict[str, Any]]:
        """See `EngineClient.check_directory`; empty without a directory."""
        if self._mirror is None or self._open_reader is None:
            return []
        answers = await ask_all(self._handle, "indexed_keys", CHECK_S)
        truth = dict(answer for answer in answers if not isinstance(answer, BaseException))
        if not truth or len(truth) < len(answers):
            raise DirectoryUnavailable(f"{len(truth)} of {len(answers)} replicas told what they hold: try again")
        pictures = await self._pictures()
        return [asdict(found) for found in await asyncio.to_thread(compare, truth, pictures, self._open_reader)]

    async def mirror_picture(self) -> MirrorPicture:
        """What this router's mirror believes; nothing without a directory."""
        if self._mirror is None:
            return MirrorPicture(own_name(), {})
        return await asyncio.to_thread(picture_of, own_name(), self._mirror, time.monotonic())

    async def _pictures(self) -> list[MirrorPicture]:
        """The mirrors of all routers of this application, by name. Raises `DirectoryUnavailable` unless every one has told."""
        routers = await all_routers()
        if routers is None:
            return [await self.mirror_picture()]
        answers = await ask_all(routers, "mirror_picture", CHECK_S)
        pictures = [answer for answer in answers if isinstance(answer, MirrorPicture)]
        if own_name() not in {picture.router for picture in pictures} or len(pictures) < len(answers):
            raise DirectoryUnavailable(f"{len(pictures)} of {len(answers)} routers told what they believe: try again")
        return sorted(pictures, key=lambda picture: picture.router)

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """See `EngineClient.explain`."""
        names = [status.replica_id for status in await self.status()]
        if not names:
            raise ReplicaFailed("No replica is available: see `kvatlas status`.")
        sizes = (len(request.prompt_token_ids), request.sampling.max_tokens)
        decision = self._routes.explain(self._keys.of(request), *sizes, names, request.session)
        return explanation(decision, *sizes, self._routes.report()["directory"])


def _as_a_request_of_its_own(send: Callable[[GenerateRequest], Any], request: GenerateRequest) -> Any:
    """What `send(request)` returns, called under a fresh internal id of Serve.

    By default all calls made for one HTTP request share that request's internal id, but Serve's router tells the requests that
    wait to be routed apart by it: of several choices sent at once some would wait for ever.
    """
    context = contextvars.copy_context()
    context.run(_set_request_context, _internal_request_id=uuid.uuid4().hex)
    return context.run(send, request)


async def replica_statuses(handle: DeploymentHandle[Any]) -> list[ReplicaStatus]:
    """The status of every replica that answers in time, by id; empty while there is none. Raises nothing."""
    answers = await ask_all(handle, "status", ANSWER_S)
    found = [answer for answer in answers if isinstance(answer, ReplicaStatus)]
    return sorted(found, key=lambda status: status.replica_id)


async def ask_all(handle: DeploymentHandle[Any], method: str, limit_s: float) -> list[Any]:
    """What `method` returns at every replica; the exception of one that fails or takes longer than `limit_s`. Raises nothing.

    A single exception where it cannot be known whom to ask.
    """
    try:
        # Ray's own `results_async` gives nothing at all when a single replica is late.
        asked = await asyncio.wait_for(handle.broadcast(method)._fetch_replica_results_async(), limit_s)
    except (TimeoutError, RayError, DeploymentUnavailableError) as error:
        logger.debug("no replica answers %s: %s", method, error)
        return [error]
    waits = [asyncio.wait_for(one.get_async(), limit_s) for one in asked]
    return await asyncio.gather(*waits, return_exceptions=True)


def translate(error: Exception) -> Exception:
    """Our exception for one that came out of a handle; an unknown one stays what it was at the replica."""
    if isinstance(error, RayTaskError):
        cause = error.cause  # which may be of Ray, where a replica's own call into Ray failed
        return translate(cause) if isinstance(cause, Exception) else ReplicaFailed(str(cause))
    if isinstance(error, BackPressureError):
        return ReplicaOverloaded("The waiting line of the replicas is full: retry in a moment.")
    if isinstance(error, DeploymentUnavailableError):
        return ReplicaFailed("No replica is available: see `kvatlas status`.")
    if isinstance(error, RayActorError):
        return ReplicaDied("The replica died while it served this request: send it again.")
    if isinstance(error, RayError):  # cancelled; its node, owner or object lost: not the request's fault
        return ReplicaFailed("Ray lost the request on its way: send it again.")
    if isinstance(error, asyncio.TimeoutError):
        return ReplicaFailed("The replica did not answer in time: see `kvatlas status`.")
    return error
