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


Event = Admitted | Delta
