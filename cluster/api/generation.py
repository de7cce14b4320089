"""One generation, from planned requests to the last byte: the flow that chat and completions share.

    planned  ->  let in  ->  admitted (all choices)  ->  200 and headers  ->  deltas  ->  finish, usage, [DONE]      (stream)
                                                     ->  deltas, collected  ->  200 with everything                  (not stream)

The headers of a stream go out at the latest `keep_alive_s` after its first choice is admitted, so that nobody in between takes
the silence for a failure. A sequence that is admitted later, or moves to another replica before its first token, is told of by
the usage only.

All of it is within the deadline, planning too. Until the 200 any error is a real HTTP status, a deadline that passes among
them. After it, an error is the stream's last event before [DONE]. At every point the client may leave: the generators are then
closed at once, which frees their blocks. They are closed before an error is sent, too: nobody's blocks wait for a slow reader
to take his bad news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.edge import Edge
from cluster.api.errors import ApiError, report
from cluster.api.json_response import encode_json, json_response
from cluster.api.lifeline import ClientGone, guarded_send, run_while_connected
from cluster.api.plan import Plan
from cluster.api.reply import Reply, reply_headers, system_fingerprint, usage
from cluster.api.request_id import request_id_of
from cluster.api.schemas import GenerationFields
from cluster.api.sse import SseWriter
from cluster.api.streams import Streams


class GenerationResponse(Response):
    """The response to one generation request. Nothing runs until the server calls it: `prepare`, then the generation."""

    def __init__(self, edge: Edge, prepare: Callable[[], Awaitable[Generation]]) -> None:
        super().__init__()
        self._limit_s = edge.settings.request_timeout_s
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. Raises errors only while no status has been sent."""
        with suppress(ClientGone):
            await run_while_connected(receive, self._run(scope, receive, guarded_send(send)))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = SseWriter(send)
        try:
            whole = await self._within_the_deadline(writer)
        except ClientGone:
            raise
        except Exception as exc:
            if not writer.started:
                raise
            await writer.event(report(exc, request_id_of(scope)).envelope())
            whole = None
        if whole is not None:
            await whole(scope, receive, send)
        else:
            await writer.done()

    async def _within_the_deadline(self, writer: SseWriter) -> Response | None:
        """See `Generation.run`. Raises `ApiError` 504 when it takes too long; the replicas are done with it by then."""
        deadline = asyncio.timeout(self._limit_s or None)
        try:
            async with deadline:
                generation = await self._prepare()
                return await generation.run(writer)
        except TimeoutError as exc:
            if not deadline.expired():
                raise  # somebody else's
            message = f"The request took longer than the {self._limit_s:g} s that this server gives it."
            raise ApiError(504, message, code="deadline_exceeded") from exc


class Generation:
    """A planned request: `fields` say how it is answered, `reply` is what the answer is made of."""

    def __init__(self, edge: Edge, fields: GenerationFields, reply: Reply, plan: Plan) -> None:
        self._edge = edge
        self._settings = edge.settings
        self._fields = fields
        self._reply = reply
        self._choices = reply.choices
        self._plan = plan
        self._place = edge.admission.enter(plan.identity, plan.tokens)
        self._streams = Streams(edge.client, plan.requests, self._place.admitted)
        self._id = f"{reply.id_prefix}-{plan.reply_id}"
        self._created = int(edge.clock())
        self._has_usage = fields.wants_usage_chunk or fields.wants_usage_always

    async def run(self, writer: SseWriter) -> Response | None:
        """Once, to its end. The whole answer; None where it has been streamed to `writer`, but for its end."""
        async with self._place, self._streams as streams:
            if self._fields.stream:
                await streams.admitted(self._settings.keep_alive_s)
                await self._stream(writer)
                return None
            await streams.admitted()
            async with aclosing(streams.deltas()) as deltas:
                async for choice, delta in deltas:
                    self._choices[choice].add(delta)
        return self._whole()

    async def _stream(self, writer: SseWriter) -> None:
        await writer.start(self._reply_headers())
        first, encoder = self._encoder(self._reply.extra), self._encoder({})
        for index, choice in enumerate(self._choices):
            opening = choice.opening()
            if opening is not None:
                await writer.encoded_event((encoder if index else first).chunk([opening], self._usage_so_far()))
        async with aclosing(self._streams.deltas(self._settings.keep_alive_s, writer.keep_alive)) as deltas:
            async for index, delta in deltas:
                for part in self._choices[index].chunks(delta):
                    await writer.encoded_event(encoder.chunk([part], self._usage_so_far()))
        if self._fields.wants_usage_chunk:
            await writer.encoded_event(self._encoder({}).chunk([], self._usage()))

    def _encoder(self, extra: dict[str, Any]) -> _ChunkEncoder:
        return _ChunkEncoder(self._head(self._reply.chunk_object) | extra, has_usage=self._has_usage)

    def _whole(self) -> Response:
        choices = [choice.whole() for choice in self._choices]
        body = self._head(self._reply.whole_object) | {"choices": choices, "usage": self._usage()}
        return json_response(body | self._reply.extra, headers=self._reply_headers())

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._settings.model_name,
            "system_fingerprint": system_fingerprint(self._settings.model_name, self._settings.max_model_len),
        }

    def _reply_headers(self) -> dict[str, str]:
        return reply_headers(self._streams.admissions, self._plan.copies) if self._settings.debug_headers else {}

    def _usage(self) -> dict[str, Any]:
        outcomes = [choice.outcome for choice in self._choices]
        tell_cached = self._settings.debug_headers
        return usage(self._streams.admissions, outcomes, self._plan.copies, tell_cached=tell_cached)

    def _usage_so_far(self) -> dict[str, Any] | None:
        return self._usage() if self._fields.wants_usage_always else None


class _ChunkEncoder:
    """Chunks as JSON. What all chunks of a stream have in common is encoded once."""

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._head = encode_json(head).removesuffix(b"}") + b',"choices":'
        self._has_usage = has_usage

    def chunk(self, choices: list[dict[str, Any]], counted: dict[str, Any] | None) -> bytes:
        """One chunk; `counted` is left out where the client asked for no usage at all."""
        end = b',"usage":' + encode_json(counted) + b"}" if self._has_usage else b"}"
        return self._head + encode_json(choices) + end
