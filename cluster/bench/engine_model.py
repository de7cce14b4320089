"""What a model's weights amount to, from its configuration alone: nothing is loaded.

Limits: a linear layer is whatever has a weight of two dimensions and is no embedding; expert weights of three are none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from actors.config import Mode

_DTYPES: dict[Mode, torch.dtype] = {"exact": torch.float32, "fast": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Weights:
    """`read_bytes` a decode step reads. `linears`: (out, in, how many) of the linear layers without the last one."""

    read_bytes: int
    linears: tuple[tuple[int, int, int], ...]

    @property
    def linear_parameters(self) -> int:
        """Of `linears`."""
        return sum(rows * columns * count for rows, columns, count in self.linears)


def weights_of(path: Path, mode: Mode) -> Weights:
    """The weights of the model in directory `path` as they are in memory in `mode`."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[mode], attn_implementation="eager")
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    # A table that is looked up costs a row a token; one that is also the last layer is read whole.
    looked_up = first.weight if last is None or last.weight is not first.weight else None
    read_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p is not looked_up)
    sizes: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if module is last or isinstance(module, nn.Embedding) or not isinstance(weight, torch.Tensor):
            continue
        if weight.dim() == 2:
            sizes[(int(weight.shape[0]), int(weight.shape[1]))] += 1
    return Weights(read_bytes, tuple((rows, columns, count) for (rows, columns), count in sorted(sizes.items())))
