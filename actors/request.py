"""What travels between the HTTP edge and a replica: one request in, a stream of events out.

Plain frozen values: no tokenizer, no torch, no Ray. The edge builds a `GenerateRequest`; the replica answers with
exactly one `Admitted`, then `Delta`s, the last of which carries a finish reason. Closing the stream aborts the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 mean "off". Randomness is a pure function of
    (`seed`, choice, position), so a request repeated with its seed repeats its tokens wherever it runs.

    `presence_penalty` and `frequency_penalty` are subtracted from the logit of each token generated so far, once and for each
    time. `repetition_penalty` divides positive logits of tokens in prompt and answer and multiplies negative ones; 1: "off".
    `logit_bias` is (token id, what is added to its logit). `allowed_token_ids` not empty: no other token may come.
    `logprobs`: how many alternatives to tell of with each token; None tells of nothing, 0 of the token alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the answer must look like. `text`: a JSON schema, a regular expression, or a grammar in llguidance's language."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue.

    `request_id` is ours and unique (never the client's x-request-id). `stop` are strings looked for in the new text.
    `salt` isolates tenants: equal prompts with different salts share no block. `session` is a hint for routing, nothing else:
    requests with the same one belong together.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()
    salt: str = ""
    choice: int = 0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    session: str = ""
    priority: int = 0
    """Lower comes first where requests wait at the replica; equals in the order in which they came."""
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has its blocks and starts computing. `cached_tokens` is measured: prompt tokens not computed again.

    `route` says how the request came to this replica; whoever routed it fills it in.
    """

    replica_id: str
    prompt_tokens: int
    cached_tokens: int
    route: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of probabilities, as the model gives them before temperature and all that `Sampling` changes; finite.

    `logprob` is the chosen token's, `top` the (token id, logprob) of the likeliest, first the likeliest.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the last event: one step's tokens, or several steps' where the reader was slower.

    `text` never holds a broken character, nor a suffix that could still become a stop string. `token_ids` counts every
    token generated, also those whose text is empty. `stop_reason` is the stop string or stop token id that ended it
    (None for end-of-sequence).
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids` where the request asked for them, else empty."""


Event = Admitted | Delta
