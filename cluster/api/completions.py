"""POST /v1/completions. Several prompts in one request are several choices, numbered in order."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.body import read_object
from cluster.api.edge import Edge
from cluster.api.generation import GenerationResponse
from cluster.api.openapi import json_body
from cluster.api.plan import Plan, plan, tokenize
from cluster.api.prompts import Prompt, split_prompts
from cluster.api.reply import Outcome
from cluster.api.schemas import CompletionRequest
from cluster.api.session import session_of
from cluster.api.validation import validate

DEFAULT_MAX_TOKENS = 16


class CompletionShape:
    """Choices of a completion reply; chunks and whole replies share one object name."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, choice: int) -> dict[str, Any] | None:
        """Completions have no role to announce."""
        return None

    def text(self, choice: int, text: str) -> dict[str, Any]:
        """New text."""
        return {"index": choice, "text": text, "logprobs": None, "finish_reason": None}

    def finish(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        """No text, and the reason."""
        return self.text(choice, "") | {"finish_reason": outcome.finish_reason, "stop_reason": outcome.stop_reason}

    def whole(self, choice: int, outcome: Outcome) -> dict[str, Any]:
        """All text, and the reason."""
        return self.finish(choice, outcome) | {"text": outcome.content}


def completions_router(edge: Edge) -> APIRouter:
    """The route, bound to `edge`."""
    router = APIRouter()

    @router.post("/v1/completions", response_model=None, openapi_extra=json_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue one or more texts."""
        body = await read_object(request, edge.settings.max_body_bytes)
        fields, planned = await plan_completions(edge, body, session_of(request))
        return GenerationResponse(edge, fields, CompletionShape(), planned)

    return router


async def plan_completions(edge: Edge, body: dict[str, Any], session: str = "") -> tuple[CompletionRequest, Plan]:
    """`body`, checked and tokenized, of the client's `session`, with one request for each of its prompts. Raises `ApiError`."""
    fields = validate(CompletionRequest, body, edge.settings.model_name)
    prompts = split_prompts(fields.prompt)
    texts = [[prompt] for prompt in prompts if isinstance(prompt, str)]

    def token_ids(prompt: Prompt) -> list[int]:
        return edge.codec.encode(prompt) if isinstance(prompt, str) else prompt

    token_lists = await tokenize(edge, texts, lambda: [token_ids(prompt) for prompt in prompts], param="prompt")
    most = DEFAULT_MAX_TOKENS
    return fields, plan(edge, fields, token_lists, param="prompt", default_max_tokens=most, session=session)
