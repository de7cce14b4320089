"""What the HTTP benchmark compares with: the same answer from a bare Ray Serve application.

An ingress deployment, a deployment behind it that streams, nothing else: no framework, no schema. The events are constants
as long as kvatlas's own, and pass the ingress as they are. Same way in (Serve's proxy), same number of replicas, same pace.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, Final, cast

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cluster.app import ENGINE_CPUS, INGRESS_CPUS, MAX_ONGOING
from cluster.bench.http_plan import MARK

APP: Final = "echo"
INGRESS: Final = "echo-ingress"
SOURCE: Final = "echo-source"
PREFIX: Final = "/echo"
EVENT: Final = (
    'data: {"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion.chunk","created":1700000000,'
    f'"model":"bench","choices":[{{"index":0,"delta":{{"content":"{MARK}"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
)
END: Final = "data: [DONE]\n\n"


class EchoSource:
    """Streams events, `cadence_s` apart."""

    def __init__(self, cadence_s: float) -> None:
        self._cadence_s = cadence_s

    async def events(self, tokens: int) -> AsyncGenerator[str]:
        """An event each `cadence_s` seconds, counted from now; then the end mark."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(1, tokens + 1):
            await asyncio.sleep(begun + number * self._cadence_s - loop.time())
            yield EVENT
        yield END


class EchoIngress:
    """POST: as many events as the body's `max_tokens` says."""

    def __init__(self, source: DeploymentHandle[Any]) -> None:
        self._source = source.options(method_name="events", stream=True)

    async def __call__(self, request: Request) -> Response:
        """Streams what the source yields."""
        body = await request.json()
        events = cast("AsyncIterable[str]", self._source.remote(body["max_tokens"]))
        return StreamingResponse(events, media_type="text/event-stream")


def echo_application(replicas: int, cadence_s: float) -> Application:
    """The application, with as many replicas behind its ingress as kvatlas has."""
    source = serve.deployment(
        name=SOURCE,
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": ENGINE_CPUS},
    )(EchoSource)
    ingress = serve.deployment(
        name=INGRESS,
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
    )(EchoIngress)
    return ingress.bind(source.bind(cadence_s))
