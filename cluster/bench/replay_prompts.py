"""The prompts of a workload file as a trace for `kvatlas replay`: what a benchmark of a real server sent, in numbers of tokens.

The tokenizer of the model gives each prompt's ids; a block is what its ids are, after all blocks before it. Prompts come
one a second, in the order that the benchmark's seed gives them; a replay scales that to its load.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cluster.bench.workload import prompts
from cluster.text_codec import TransformersCodec
from router.replay.trace import Trace, made

_ANY_ID = 1 << 31


def trace_of(workload: Path, tokenizer: Path, count: int, seed: int, block_tokens: int, output_tokens: int) -> Trace:
    """Returns `count` prompts of a workload file, as `kvatlas bench serve` sends them with this seed; each is answered by
    `output_tokens`. `tokenizer`: a model directory. Raises `UsageError` and `ModelRefused`.
    """
    codec = TransformersCodec(tokenizer, _ANY_ID)
    ids = [codec.encode(prompt) for prompt in prompts(workload, count, seed)]
    blocks = [
        [tuple(row[start : start + block_tokens]) for start in range(0, len(row) - block_tokens + 1, block_tokens)]
        for row in ids
    ]
    lengths = [max(1, len(row)) for row in ids]
    return made(
        block_tokens, np.arange(count, dtype=np.float64), float(count), lengths, [output_tokens] * count, blocks
    )
