"""One generation, from planned requests to the last byte: the flow that chat and completions share.

    admitted (all choices)  ->  200 and headers  ->  deltas  ->  finish, usage, [DONE]      (stream)
                            ->  deltas, collected  ->  200 with everything                  (not stream)

A sequence that moves to another replica before its first token is told of by the usage and by the headers of a whole reply;
the headers of a stream have gone out by then.

Until the 200 any error is a real HTTP status. After it, an error is the stream's last event before [DONE]. At every
point the client may leave: the generators are then closed at once, which frees their blocks.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.edge import Edge
from cluster.api.errors import report
from cluster.api.json_response import json_response
from cluster.api.lifeline import ClientGone, guarded_send, run_while_connected
from cluster.api.plan import Plan
from cluster.api.reply import Outcome, ReplyShape, reply_headers, usage
from cluster.api.request_id import request_id_of
from cluster.api.schemas import GenerationFields
from cluster.api.sse import SseWriter
from cluster.api.streams import Streams


class GenerationResponse(Response):
    """The response to one generation request. Nothing runs until the server calls it."""

    def __init__(self, edge: Edge, fields: GenerationFields, shape: ReplyShape, plan: Plan) -> None:
        super().__init__()
        self._edge = edge
        self._fields = fields
        self._shape = shape
        self._requests = plan.requests
        self._outcomes = [Outcome() for _ in plan.requests]
        self._id = f"{shape.id_prefix}-{plan.reply_id}"
        self._created = int(edge.clock())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Raises errors only while no status has been sent."""
        with suppress(ClientGone):
            await run_while_connected(receive, self._run(scope, receive, guarded_send(send)))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with Streams(self._edge.client, self._requests) as streams:
            await streams.admitted()
            if self._fields.stream:
                await self._stream(scope, streams, SseWriter(send))
                return
            async with aclosing(streams.deltas()) as deltas:
                async for choice, delta in deltas:
                    self._outcomes[choice].add(delta, keep_text=True)
        await self._whole(streams)(scope, receive, send)

    async def _stream(self, scope: Scope, streams: Streams, writer: SseWriter) -> None:
        await writer.start(reply_headers(streams.admissions))
        try:
            await self._chunks(streams, writer)
            if self._fields.wants_usage_chunk:
                await writer.event(self._chunk([], usage(streams.admissions, self._outcomes)))
        except ClientGone:
            raise
        except Exception as exc:
            await writer.event(report(exc, request_id_of(scope)).envelope())
        await writer.done()

    async def _chunks(self, streams: Streams, writer: SseWriter) -> None:
        for choice in range(len(self._requests)):
            opening = self._shape.opening(choice)
            if opening is not None:
                await writer.event(self._chunk([opening]))
        async with aclosing(streams.deltas()) as deltas:
            async for choice, delta in deltas:
                outcome = self._outcomes[choice]
                outcome.add(delta, keep_text=False)
                if delta.text:
                    await writer.event(self._chunk([self._shape.text(choice, delta.text)]))
                # On its own, without text: many clients stop reading at the finish reason.
                if delta.finish_reason is not None:
                    await writer.event(self._chunk([self._shape.finish(choice, outcome)]))

    def _chunk(self, choices: list[dict[str, Any]], counted: dict[str, Any] | None = None) -> dict[str, Any]:
        chunk = self._head(self._shape.chunk_object) | {"choices": choices}
        if self._fields.wants_usage_chunk:
            chunk["usage"] = counted
        return chunk

    def _whole(self, streams: Streams) -> Response:
        admitted = streams.admissions
        choices = [self._shape.whole(choice, outcome) for choice, outcome in enumerate(self._outcomes)]
        body = self._head(self._shape.whole_object) | {"choices": choices, "usage": usage(admitted, self._outcomes)}
        return json_response(body, headers=reply_headers(admitted))

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._edge.settings.model_name}
