"""How many blocks a replica's pool gets, and the longest request it then serves."""

from __future__ import annotations

import os
from pathlib import Path

from actors.config import PoolConfig
from kvpool import BlockGeometry, PoolError

_DEFAULT_TOKENS = 65_536
_DEFAULT_SHARE = 0.5
_LEAST_TOKENS = 512


def pool_blocks(
    config: PoolConfig, geometry: BlockGeometry, directory: Path, replicas: int, reclaimable_bytes: int = 0
) -> int:
    """Number of blocks: `config.tokens` rounded up, or for 0 an even share, bounded, of half the memory free in `directory`.

    `reclaimable_bytes` are taken but count as free. `replicas` share the memory. Those that start later see less of it free
    and take a little less, so all fit. Raises `PoolError` where the share is too little to serve anything; an explicit size
    that does not fit is refused later, by the region, with both sizes.
    """
    if config.tokens:
        return -(-config.tokens // config.block_tokens)
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize + reclaimable_bytes
    share_bytes = int(free_bytes * _DEFAULT_SHARE / replicas)
    tokens = min(_DEFAULT_TOKENS, share_bytes // geometry.token_bytes)
    if tokens < max(_LEAST_TOKENS, config.block_tokens):
        raise PoolError(
            f"{directory} has {free_bytes / 2**20:.0f} MiB free; a replica's share of it, {share_bytes / 2**20:.0f} MiB, holds "
            f"{tokens} tokens of this model, too few to serve. Set pool.tokens (KVATLAS_POOL__TOKENS) to use more of it (one "
            f"token takes {geometry.token_bytes} bytes), or "
            "enlarge it (docker: --shm-size; Kubernetes: emptyDir, medium Memory, larger sizeLimit)"
        )
    return tokens // config.block_tokens


def context_tokens(model_tokens: int, asked_tokens: int, capacity_blocks: int, block_tokens: int) -> int:
    """Longest prompt + output: the least of what the model, the settings (0: no wish) and the whole pool allow."""
    limits = [capacity_blocks * block_tokens, *(limit for limit in (model_tokens, asked_tokens) if limit)]
    return min(limits)
