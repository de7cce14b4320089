"""One request inside the engine: its tokens, its keys, its blocks, how far it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from actors.contained import Contained
from actors.request import FinishReason, GenerateRequest
from actors.sampler import Draw
from actors.shaping import Shaper
from kvpool import BlockTable, KeySpace


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request. Only the step thread touches it.

    `ends` are the ids that end it. `tokens` is prompt + generated; `keys` the keys of its full blocks so far, extended
    by `key_at`. `computed` counts the leading tokens whose K and V are in `table`'s blocks. `cached_tokens` is set at
    the first admission and never again: a request that is preempted and comes back is still one look-up.
    `predicted_tokens` of the prompt are expected to be found cached, by whoever sent it here.

    `logits` [vocab] are those of its next token while its `constraint` is not ready to choose one. All its tokens are computed
    then, so the model can do nothing for it.
    """

    request: GenerateRequest
    root: bytes
    keyspace: KeySpace
    block_tokens: int
    arrival: int
    tokens: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    table: BlockTable | None = None
    computed: int = 0
    cached_tokens: int | None = None
    predicted_tokens: int = 0
    shaper: Shaper | None = None
    constraint: Contained | None = None
    logits: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        request: GenerateRequest,
        root: bytes,
        keyspace: KeySpace,
        block_tokens: int,
        arrival: int,
        eos: frozenset[int] = frozenset(),
    ) -> Sequence:
        """A waiting sequence for `request`, with the keys of its prompt's full blocks. `eos`: the model's own ends."""
        tokens = list(request.prompt_token_ids)
        keys = keyspace.block_keys(root, tokens, block_tokens)
        ends = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            ends |= eos
        shaper = Shaper.of(request.sampling, request.prompt_token_ids)
        return cls(request, root, keyspace, block_tokens, arrival, tokens, keys, ends, shaper=shaper)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def generated(self) -> int:
        """How many tokens it has produced."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first, of those that wait and of those that run: the lower priority, then the earlier arrival."""
        return self.request.priority, self.arrival

    @property
    def pending(self) -> int:
        """Tokens known but not computed: 1 while decoding, more while prefilling, 0 while it waits for its constraint."""
        return len(self.tokens) - self.computed

    @property
    def uncached(self) -> int:
        """Prompt tokens it will probably have to compute: exact while it runs, a guess before."""
        if self.table is None:
            return max(1, self.pending - self.predicted_tokens)
        return self.pending if self.pending > 1 else 0

    def block_span(self, position: int) -> list[int]:
        """Token ids of block `position`, which must be full."""
        return self.tokens[position * self.block_tokens : (position + 1) * self.block_tokens]

    def full_keys(self) -> list[bytes]:
        """Keys of every full block of the tokens known now. Mutates the memo."""
        while len(self.keys) < len(self.tokens) // self.block_tokens:
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(self.keyspace.extend(parent, self.block_span(len(self.keys))))
        return self.keys

    @property
    def ready(self) -> bool:
        """Whether its next token can be chosen as soon as there are logits."""
        return self.constraint is None or self.constraint.ready

    def draw(self) -> Draw:
        """What its next token depends on besides logits. Those that would end it before its `min_tokens` are forbidden."""
        if self.shaper is not None and self.shaper.seen is not None:
            self.shaper.seen.catch_up(self.tokens)
        sampling = self.request.sampling
        forbidden = tuple(self.ends) if self.generated < sampling.min_tokens else ()
        mask = self.constraint.apply if self.constraint is not None else None
        return Draw(sampling, self.request.choice, len(self.tokens), forbidden, self.shaper, mask)

    def finish_reason(self, token: int, context_tokens: int) -> FinishReason | None:
        """Why the sequence ends with `token`, its newest, or None."""
        sampling = self.request.sampling
        if self.constraint is not None and self.constraint.done:
            return "stop"
        if token in self.ends and self.generated > sampling.min_tokens:
            return "stop"
        if self.generated >= sampling.max_tokens or len(self.tokens) >= context_tokens:
            return "length"
        return None
