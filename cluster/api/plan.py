"""From a checked body and its token ids to what the replicas are asked for.

Every limit that protects a replica is applied here: ids inside the vocabulary, prompt inside the context, at most 256
choices, and a `max_tokens` of any size clamped to what the context has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from actors.request import GenerateRequest, Grammar, Sampling
from cluster.api.edge import Edge
from cluster.api.errors import ApiError, invalid
from cluster.api.identity import ANONYMOUS, Identity
from cluster.api.schemas import GenerationFields

MAX_CHOICES = 256
THREAD_CHARS = 4096
TEXT_CHARS = 64
"""What a text costs beside its length, a message's rendering above all, in characters of tokenizing."""
U64 = 2**64
SESSION_CHARS = 256
"""What of a session's name counts: it is a hint, so a longer one is no error."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the client, and which of its requests belong together as far as it said so in a header."""

    identity: Identity = ANONYMOUS
    session: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` under one `reply_id`, which the client sees and which starts the ids that the replicas see.

    Each prompt has `copies` requests, one after the other.
    """

    reply_id: str
    requests: tuple[GenerateRequest, ...]
    copies: int
    identity: Identity

    @property
    def tokens(self) -> int:
        """What all of it may come to: the prompt and the longest answer of every choice."""
        return sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in self.requests)


async def tokenize(edge: Edge, prompts: Sequence[Sequence[str]], work: Callable[[], T], *, param: str) -> T:
    """The result of `work`, which tokenizes `prompts`, each of one or more texts: in a thread when they are many or long.

    Raises `ApiError` 400 for a prompt too long to fit the context however it is cut: tokenizing it first would take seconds
    and gigabytes only to find out.
    """
    lengths = [sum(len(text) for text in texts) for texts in prompts]
    if max(lengths, default=0) > edge.settings.max_model_len * edge.codec.longest_token_chars:
        raise _too_long(edge, param, f"{max(lengths)} characters, more than so many tokens can hold")
    if sum(lengths) + TEXT_CHARS * sum(len(texts) for texts in prompts) < THREAD_CHARS:
        return work()
    async with edge.tokenizing:
        return await asyncio.to_thread(work)


def check_messages(edge: Edge, count: int) -> None:
    """Raise `ApiError` 400 for more messages than the context has tokens: each takes at least one."""
    if count >= edge.settings.max_model_len:
        raise _too_long(edge, "messages", f"{count} messages, each of at least one token")


def _too_long(edge: Edge, param: str, what: str) -> ApiError:
    limit = edge.settings.max_model_len
    message = f"This model's maximum context length is {limit} tokens, and your {param} resulted in {what}."
    return invalid(message, param, "context_length_exceeded")


def plan(
    edge: Edge,
    fields: GenerationFields,
    prompts: Sequence[Sequence[int]],
    *,
    param: str,
    default_max_tokens: int | None,
    caller: Caller,
    grammar: Grammar | None = None,
    keep_special_tokens: bool = False,
) -> Plan:
    """A `GenerateRequest` for each choice, `n` for each prompt, numbered in order, under fresh ids and one seed.

    What the client's seed gives a prompt does not depend on the prompts beside it: the copies of each are numbered from 0.
    Without one, equal prompts of a request are to differ, so all are numbered.

    `param` names the body's prompt field in errors; `default_max_tokens` None means "to the end of the context". The body's
    `prompt_cache_key` overrides the caller's session. `keep_special_tokens`: whoever reads the text needs them, whatever the body
    says. Raises `ApiError` 400.
    """
    copies = fields.choices_per_prompt
    if len(prompts) * copies > MAX_CHOICES:
        message = (
            f"{len(prompts)} prompts with {copies} choices each: one request may have at most {MAX_CHOICES} choices."
        )
        raise invalid(message, "n")
    for prompt in prompts:
        _check_prompt(edge, prompt, param)
    check_tokens(edge, fields.stop_token_ids or (), "stop_token_ids")
    check_tokens(edge, fields.allowed_token_ids or (), "allowed_token_ids")
    check_tokens(edge, fields.logit_bias or (), "logit_bias")
    if grammar is not None and fields.ignore_eos:
        message = (
            "'ignore_eos' cannot be combined with a grammar or a forced tool call: the answer ends where that does."
        )
        raise invalid(message, "ignore_eos", "unsupported_parameter")
    base = edge.new_id()
    seed = edge.draw_seed() if fields.seed is None else fields.seed
    answers = [(tuple(prompt), copy) for prompt in prompts for copy in range(copies)]
    samplings = [_sampling(edge, fields, seed % U64, len(prompt), default_max_tokens) for prompt in prompts]
    requests = tuple(
        GenerateRequest(
            request_id=base if len(answers) == 1 else f"{base}-{choice}",
            prompt_token_ids=prompt,
            sampling=samplings[choice // copies],
            stop=tuple(fields.stop or ()),
            salt=_salt(caller.identity, fields.cache_salt),
            choice=choice if fields.seed is None else choice % copies,
            skip_special_tokens=fields.skip_special_tokens is not False and not keep_special_tokens,
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            session=(fields.prompt_cache_key or caller.session)[:SESSION_CHARS],
            priority=fields.priority or 0,
            grammar=grammar,
        )
        for choice, (prompt, _) in enumerate(answers)
    )
    return Plan(base, requests, copies, caller.identity)


def check_tokens(edge: Edge, tokens: Iterable[int], param: str) -> None:
    """Raise `ApiError` 400 for a token id outside the vocabulary; `param` names the field it is from."""
    for token in tokens:
        if not 0 <= token < edge.codec.vocab_size:
            shown = token if abs(token) < U64 else "of more than 64 bits"
            raise invalid(f"Token id {shown} is not in the vocabulary [0, {edge.codec.vocab_size}).", param)


def _salt(identity: Identity, cache_salt: str | None) -> str:
    """Both salts in one. No salt contains NUL, so no two pairs are joined to the same."""
    return f"{identity.salt}\0{cache_salt or ''}" if identity.salt else cache_salt or ""


def _sampling(
    edge: Edge, fields: GenerationFields, seed: int, prompt_tokens: int, default_max_tokens: int | None
) -> Sampling:
    room = edge.settings.max_model_len - prompt_tokens
    asked = fields.requested_max_tokens or default_max_tokens or room
    if (fields.min_tokens or 0) > asked:
        raise invalid(f"'min_tokens' is {fields.min_tokens}, more than the {asked} of 'max_tokens'.", "min_tokens")
    max_tokens = min(asked, room)
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
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=tuple((fields.logit_bias or {}).items()),
        allowed_token_ids=tuple(dict.fromkeys(fields.allowed_token_ids or ())),
        logprobs=fields.requested_logprobs,
    )


def _check_prompt(edge: Edge, prompt: Sequence[int], param: str) -> None:
    limit = edge.settings.max_model_len
    if not prompt:
        raise invalid(f"'{param}' has no tokens.", param)
    if len(prompt) >= limit:
        message = f"This model's maximum context length is {limit} tokens, and your {param} resulted in {len(prompt)} "
        raise invalid(message + f"tokens. Reduce it to at most {limit - 1}.", param, "context_length_exceeded")
    check_tokens(edge, (min(prompt), max(prompt)), param)
