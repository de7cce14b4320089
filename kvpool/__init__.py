"""Blocks of KV cache, and who holds them: one region of memory, shared by requests with equal prefixes.

    region = Region.create("/dev/shm", "kvatlas-demo", geometry, capacity_blocks, fingerprint, random.SystemRandom())
    pool = Pool.create(region)
    keys = key_space.block_keys(root, token_ids, geometry.block_tokens)
    with pool.table(request_id) as table:
        hit_blocks = pool.match(table, keys, token_ids)
        if pool.allocate(table, needed_blocks - hit_blocks):
            ...  # write KV, pool.seal(table, position, key, ids) for each full block

`kvpool.storage` shows the KV bytes as a torch tensor; importing it, and only it, imports torch.
"""

from kvpool.block_table import BlockTable
from kvpool.errors import KvatlasError, PoolError, RegionMismatch, SecretFileError, SharedMemoryTooSmall
from kvpool.geometry import BlockGeometry
from kvpool.keys import KeyRoot, KeySpace
from kvpool.orphans import sweep
from kvpool.pool import Pool
from kvpool.region import DEFAULT_DIRECTORY, REGION_PREFIX, Region
from kvpool.secret import load_or_create
from kvpool.stats import PoolStats

__all__ = [
    "DEFAULT_DIRECTORY",
    "REGION_PREFIX",
    "BlockGeometry",
    "BlockTable",
    "KeyRoot",
    "KeySpace",
    "KvatlasError",
    "Pool",
    "PoolError",
    "PoolStats",
    "Region",
    "RegionMismatch",
    "SecretFileError",
    "SharedMemoryTooSmall",
    "load_or_create",
    "sweep",
]
