"""The KV bytes of a region as one torch tensor. The only file of the package that imports torch.

The tensor IS the mapped memory: writing to it writes to the region, for every process that maps it. It keeps the
mapping alive, so it stays valid after `Region.close()`; the memory is unmapped when the last tensor over it goes.

Limits: host memory only; one element type for all layers.
"""

from __future__ import annotations

from typing import Final

import torch

from kvpool.region import Region

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def kv_tensor(region: Region) -> torch.Tensor:
    """Returns [blocks, layers, 2, kv_heads, block_tokens, head_dim] over the region's bytes, without a copy."""
    # A view of our own: torch keeps the object it was given, and that object must never be released under it.
    window = memoryview(region.kv_memory)
    flat = torch.frombuffer(window, dtype=_DTYPES[region.geometry.dtype])
    return flat.view(region.capacity_blocks, *region.geometry.shape)


def copy_block(tensor: torch.Tensor, source: int, target: int) -> None:
    """Copies all bytes of block `source` over block `target` of `tensor`."""
    tensor[target].copy_(tensor[source])
