"""POST /tokenize and POST /detokenize: what a text or a conversation is in tokens, and what tokens say.

The same tokens that generation would see, so clients can count before they ask. Both are bounded as generation is: no text
that could not fit the context, no more tokens than it holds. Limit: a conversation may come to more tokens than the context; then
the count says so.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from cluster.api.body import read_object
from cluster.api.conversation import render
from cluster.api.edge import Edge
from cluster.api.errors import invalid
from cluster.api.json_response import json_response
from cluster.api.logprobs import TokenNames
from cluster.api.openapi import json_body
from cluster.api.plan import check_tokens, tokenize
from cluster.api.schemas import DetokenizeRequest, TokenizeRequest
from cluster.api.tool_format import detect
from cluster.api.tools import tooling
from cluster.api.validation import check_turn, parse, require_model


def tokenizing_router(edge: Edge) -> APIRouter:
    """The routes, bound to `edge`."""
    router = APIRouter()

    @router.post("/tokenize", response_model=None, openapi_extra=json_body(TokenizeRequest))
    async def tokenize_text(request: Request) -> Response:
        """The tokens of a prompt or of messages."""
        fields = parse(TokenizeRequest, await read_object(request, edge.settings.max_body_bytes))
        if fields.model is not None:
            require_model(fields.model, edge.settings.model_name)
        tokens = await _tokens(edge, fields)
        reply = {"count": len(tokens), "max_model_len": edge.settings.max_model_len, "tokens": tokens}
        if fields.return_token_strs:
            names = TokenNames(edge.codec)
            reply["token_strs"] = [names.of(token) for token in tokens]
        return json_response(reply)

    @router.post("/detokenize", response_model=None, openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        fields = parse(DetokenizeRequest, await read_object(request, edge.settings.max_body_bytes))
        if fields.model is not None:
            require_model(fields.model, edge.settings.model_name)
        limit = edge.settings.max_model_len
        if len(fields.tokens) > limit:
            raise invalid(f"'tokens' has {len(fields.tokens)} tokens, more than the context of {limit}.", "tokens")
        check_tokens(edge, fields.tokens, "tokens")
        return json_response({"prompt": edge.codec.decode(fields.tokens)})

    return router


async def _tokens(edge: Edge, fields: TokenizeRequest) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("Exactly one of 'prompt' and 'messages' must be given.", "prompt")
    if fields.messages is not None:
        check_turn(fields.add_generation_prompt, fields.continue_final_message)
        tools = tooling(fields, detect(edge.codec.chat_template), edge.new_id, token_ids=edge.codec.special_tokens)
        return await render(edge, fields.messages, fields, tools)
    prompt, special = fields.prompt or "", fields.add_special_tokens is not False
    return await tokenize(
        edge, [[prompt]], lambda: edge.codec.encode(prompt, add_special_tokens=special), param="prompt"
    )
