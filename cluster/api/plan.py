"""From a checked body and its token ids to what the replicas are asked for.

Every limit that protects a replica is applied here: ids inside the vocabulary, prompt inside the context, and a
`max_tokens` of any size clamped to what the context has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from actors.request import GenerateRequest, Sampling
from cluster.api.edge import Edge
from cluster.api.errors import invalid
from cluster.api.schemas import GenerationFields

THREAD_CHARS = 4096
U64 = 2**64
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` under one `reply_id`, which the client sees and which starts the ids that the replicas see."""

    reply_id: str
    requests: tuple[GenerateRequest, ...]


async def tokenize(text_chars: int, work: Callable[[], T]) -> T:
    """The result of `work`, computed in a thread when `text_chars` are many, so that other requests go on meanwhile."""
    return work() if text_chars < THREAD_CHARS else await asyncio.to_thread(work)


def plan(
    edge: Edge,
    fields: GenerationFields,
    prompts: Sequence[Sequence[int]],
    *,
    param: str,
    default_max_tokens: int | None,
) -> Plan:
    """One `GenerateRequest` per prompt, choice numbers in order, under fresh ids and one seed.

    `param` names the body's prompt field in errors; `default_max_tokens` None means "to the end of the context".
    Raises `ApiError` 400.
    """
    for prompt in prompts:
        _check_prompt(edge, prompt, param)
    for token in fields.stop_token_ids or ():
        _check_token(edge, token, "stop_token_ids")
    base = edge.new_id()
    seed = edge.draw_seed() if fields.seed is None else fields.seed
    requests = tuple(
        GenerateRequest(
            request_id=base if len(prompts) == 1 else f"{base}-{choice}",
            prompt_token_ids=tuple(prompt),
            sampling=_sampling(edge, fields, seed % U64, len(prompt), default_max_tokens),
            stop=tuple(fields.stop or ()),
            salt=fields.cache_salt or "",
            choice=choice,
            skip_special_tokens=fields.skip_special_tokens is not False,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        )
        for choice, prompt in enumerate(prompts)
    )
    return Plan(base, requests)


def _sampling(
    edge: Edge, fields: GenerationFields, seed: int, prompt_tokens: int, default_max_tokens: int | None
) -> Sampling:
    room = edge.settings.max_model_len - prompt_tokens
    max_tokens = min(fields.requested_max_tokens or default_max_tokens or room, room)
    temperature = edge.settings.default_temperature if fields.temperature is None else fields.temperature
    return Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=min(max(fields.top_k or 0, 0), edge.codec.vocab_size),  # -1 is another spelling of "off"
        min_p=fields.min_p or 0.0,
        seed=seed,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=min(fields.min_tokens or 0, max_tokens),
    )


def _check_prompt(edge: Edge, prompt: Sequence[int], param: str) -> None:
    limit = edge.settings.max_model_len
    if not prompt:
        raise invalid(f"'{param}' has no tokens.", param)
    if len(prompt) >= limit:
        message = f"This model's maximum context length is {limit} tokens, and your {param} resulted in {len(prompt)} "
        raise invalid(message + f"tokens. Reduce it to at most {limit - 1}.", param, "context_length_exceeded")
    for token in (min(prompt), max(prompt)):
        _check_token(edge, token, param)


def _check_token(edge: Edge, token: int, param: str) -> None:
    if not 0 <= token < edge.codec.vocab_size:
        shown = token if abs(token) < U64 else "of more than 64 bits"
        raise invalid(f"Token id {shown} is not in the vocabulary [0, {edge.codec.vocab_size}).", param)
