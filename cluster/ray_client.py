"""`EngineClient` over a Ray Serve handle: requests go to replicas as streams of events, errors come back as ours.

Ray wraps what a replica raises (`RayTaskError`) and has errors of its own for dead replicas and full queues. Here they become
the exceptions that `EngineClient` promises, so that the HTTP app knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, cast

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from actors.errors import ReplicaFailed, ReplicaOverloaded
from actors.request import Event, GenerateRequest
from actors.status import ReplicaStatus

logger = logging.getLogger(__name__)


class RayEngineClient:
    """Requests and status over `handle`. `status_timeout_s` bounds the wait for a replica that does not answer."""

    def __init__(self, handle: DeploymentHandle[Any], status_timeout_s: float = 2.0) -> None:
        self._streams = handle.options(method_name="generate", stream=True)
        self._handle = handle
        self._status_timeout_s = status_timeout_s

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """See `EngineClient.generate`. Leaving the generator early, by `aclose` or cancellation, aborts the request."""
        response = cast("DeploymentResponseGenerator[Event]", self._streams.remote(request))
        ended = False
        try:
            async for event in response:
                yield event
            ended = True
        except Exception as error:
            ended = True
            raise translate(error) from error
        finally:
            if not ended:  # GeneratorExit or CancelledError: nobody reads on
                response.cancel()

    async def status(self) -> list[ReplicaStatus]:
        """See `EngineClient.status`. Asks every replica; empty also when one of them does not answer in time."""
        try:
            answers = await self._handle.broadcast("status").results_async(
                timeout_s=self._status_timeout_s, return_exceptions=True
            )
        except (TimeoutError, RayError, DeploymentUnavailableError) as error:
            logger.debug("no replica status: %s", error)
            return []
        return [answer for answer in answers if isinstance(answer, ReplicaStatus)]


def translate(error: Exception) -> Exception:
    """Our exception for one that came out of a handle; an unknown one stays what it was at the replica."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, RayTaskError):  # a replica's own call into Ray failed
            return translate(cause)
        return cause if isinstance(cause, Exception) else ReplicaFailed(str(cause))
    if isinstance(error, BackPressureError):
        return ReplicaOverloaded("The waiting line of the replicas is full: retry in a moment.")
    if isinstance(error, DeploymentUnavailableError):
        return ReplicaFailed("No replica is available: see `kvatlas status`.")
    if isinstance(error, RayActorError):
        return ReplicaFailed("The replica died while it served this request: send it again.")
    if isinstance(error, asyncio.TimeoutError):
        return ReplicaFailed("The replica did not answer in time: see `kvatlas status`.")
    return error
