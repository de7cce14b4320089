"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.body import read_object
from cluster.api.chat_choice import ChatChoice
from cluster.api.conversation import render
from cluster.api.edge import Edge
from cluster.api.errors import ApiError
from cluster.api.generation import Generation, GenerationResponse
from cluster.api.grammar_check import COSTLY
from cluster.api.identity import Identity, identity_of
from cluster.api.logprobs import TokenNames
from cluster.api.openapi import json_body
from cluster.api.plan import Caller, Plan, plan
from cluster.api.reply import Reply
from cluster.api.schemas import ChatRequest
from cluster.api.session import session_of
from cluster.api.structured import grammar_of, param_of
from cluster.api.tool_format import detect
from cluster.api.tools import Tooling, tooling
from cluster.api.validation import validate


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A checked chat request, and what the replicas are asked for."""

    fields: ChatRequest
    tooling: Tooling
    plan: Plan


def chat_router(edge: Edge) -> APIRouter:
    """The route, bound to `edge`."""
    router = APIRouter()

    @router.post("/v1/chat/completions", response_model=None, openapi_extra=json_body(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Continue a conversation."""
        body = await read_object(request, edge.settings.max_body_bytes)
        caller = Caller(identity_of(request.scope), session_of(request))

        async def prepare() -> Generation:
            planned = await plan_chat(edge, body, caller)
            return Generation(edge, planned.fields, _reply(edge, planned), planned.plan)

        return GenerationResponse(edge, prepare)

    return router


async def plan_chat(edge: Edge, body: dict[str, Any], caller: Caller) -> ChatPlan:
    """`body`, checked, rendered and tokenized. Raises `ApiError` and `RequestRefused`."""
    fields = validate(ChatRequest, body, edge.settings)
    content = grammar_of(body)
    tools = tooling(
        fields, detect(edge.codec.chat_template), edge.new_id, content=content, token_ids=edge.codec.special_tokens
    )
    prompt = await render(edge, fields.messages, fields, tools)
    planned = plan(
        edge,
        fields,
        [prompt],
        param="messages",
        default_max_tokens=None,
        caller=caller,
        grammar=tools.grammar,
        keep_special_tokens=tools.keep_special_tokens,
    )
    if content is not None:
        await edge.grammars.check(content, param_of(body), caller.identity)
    await _check_tools(edge, tools, caller.identity)
    return ChatPlan(fields, tools, planned)


async def _check_tools(edge: Edge, tools: Tooling, identity: Identity) -> None:
    """Raises `ApiError` 400 where what tools ask for cannot be enforced; names the tool at fault if it is a single one's."""
    if tools.grammar is None:
        return
    try:
        await edge.grammars.check(tools.grammar, "tools", identity)
    except ApiError as error:
        if error.status != 400 or error.code == COSTLY:
            raise  # nothing was found wrong; or looking for the one at fault would cost as much again for each
        for param, schema in tools.schemas:
            await edge.grammars.check(schema, param, identity)
        raise


def _reply(edge: Edge, planned: ChatPlan) -> Reply:
    fields = planned.fields
    names = None
    if fields.logprobs:
        names = TokenNames(edge.codec, as_ids=bool(fields.return_tokens_as_token_ids))
    tell_ids = bool(fields.return_token_ids)
    choices = [
        ChatChoice(index, names=names, reader=planned.tooling.reader(), tell_ids=tell_ids)
        for index in range(len(planned.plan.requests))
    ]
    extra = {"prompt_token_ids": list(planned.plan.requests[0].prompt_token_ids)} if tell_ids else {}
    return Reply("chatcmpl", "chat.completion", "chat.completion.chunk", choices, extra)
