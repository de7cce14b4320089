"""POST /v1/completions. Several prompts in one request are several choices, numbered in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.body import read_object
from cluster.api.completion_choice import CompletionChoice
from cluster.api.edge import Edge
from cluster.api.generation import Generation, GenerationResponse
from cluster.api.identity import identity_of
from cluster.api.logprobs import CompletionLogprobs, TokenNames
from cluster.api.openapi import json_body
from cluster.api.plan import Caller, Plan, plan, tokenize
from cluster.api.prompts import Prompt, split_prompts
from cluster.api.reply import Reply
from cluster.api.schemas import CompletionRequest
from cluster.api.session import session_of
from cluster.api.structured import grammar_of, param_of
from cluster.api.validation import validate

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CompletionPlan:
    """A checked completion request, and what the replicas are asked for. `echoes`: what each prompt says, if that is wanted."""

    fields: CompletionRequest
    echoes: tuple[str, ...]
    plan: Plan


def completions_router(edge: Edge) -> APIRouter:
    """The route, bound to `edge`."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, openapi_extra=json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or more texts."""
        body = await read_object(request, edge.settings.max_body_bytes)
        caller = Caller(identity_of(request.scope), session_of(request))

        async def prepare() -> Generation:
            planned = await plan_completions(edge, body, caller)
            return Generation(edge, planned.fields, _reply(edge, planned), planned.plan)

        return GenerationResponse(edge, prepare)

    return router


async def plan_completions(edge: Edge, body: dict[str, Any], caller: Caller) -> CompletionPlan:
    """`body`, checked and tokenized. Raises `ApiError` and `RequestRefused`."""
    fields = validate(CompletionRequest, body, edge.settings)
    grammar = grammar_of(body)
    prompts = split_prompts(fields.prompt)
    texts = [[prompt] for prompt in prompts if isinstance(prompt, str)]
    special = fields.add_special_tokens is not False

    def token_ids(prompt: Prompt) -> list[int]:
        return edge.codec.encode(prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt

    token_lists = await tokenize(edge, texts, lambda: [token_ids(prompt) for prompt in prompts], param="prompt")
    planned = plan(
        edge,
        fields,
        token_lists,
        param="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        caller=caller,
        grammar=grammar,
    )
    if grammar is not None:
        await edge.grammars.check(grammar, param_of(body), caller.identity)
    echoes = [prompt if isinstance(prompt, str) else edge.codec.decode(prompt) for prompt in prompts if fields.echo]
    return CompletionPlan(fields, tuple(echoes), planned)


def _reply(edge: Edge, planned: CompletionPlan) -> Reply:
    choices = [_choice(edge, planned, index) for index in range(len(planned.plan.requests))]
    return Reply("cmpl", "text_completion", "text_completion", choices)


def _choice(edge: Edge, planned: CompletionPlan, index: int) -> CompletionChoice:
    fields, request = planned.fields, planned.plan.requests[index]
    logprobs = None
    if fields.logprobs is not None:
        names = TokenNames(edge.codec, as_ids=bool(fields.return_tokens_as_token_ids), prefix="bytes:")
        logprobs = CompletionLogprobs(names, skip_special_tokens=request.skip_special_tokens)
    return CompletionChoice(
        index,
        echo=planned.echoes[index // planned.plan.copies] if planned.echoes else "",
        logprobs=logprobs,
        prompt_ids=request.prompt_token_ids if fields.return_token_ids else None,
    )
