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

from typing import TYPE_CHECKING, Any

from kvpool.errors import (
    GuardViolation,
    KvatlasError,
    PoolError,
    RegionMismatch,
    SecretFileError,
    SharedMemoryTooSmall,
)
from kvpool.geometry import BlockGeometry
from kvpool.keys import KeyRoot, KeySpace
from kvpool.orphans import sweep
from kvpool.region import DEFAULT_DIRECTORY, REGION_PREFIX, Region
from kvpool.secret import load_or_create

if TYPE_CHECKING:
    from kvpool.block_table import BlockTable
    from kvpool.pool import Pool
    from kvpool.reclaimed import Reclaimed, TidyReport
    from kvpool.slot import SlotLoad
    from kvpool.stats import PoolStats
    from kvpool.tidy_thread import TidyThread

_COMPILED = {
    "BlockTable": "kvpool.block_table",
    "Pool": "kvpool.pool",
    "PoolStats": "kvpool.stats",
    "Reclaimed": "kvpool.reclaimed",
    "SlotLoad": "kvpool.slot",
    "TidyReport": "kvpool.reclaimed",
    "TidyThread": "kvpool.tidy_thread",
}
"""What stands on machine code: loaded when first asked for, so that whoever only names blocks does not pay a second."""

__all__ = [
    "DEFAULT_DIRECTORY",
    "REGION_PREFIX",
    "BlockGeometry",
    "BlockTable",
    "GuardViolation",
    "KeyRoot",
    "KeySpace",
    "KvatlasError",
    "Pool",
    "PoolError",
    "PoolStats",
    "Reclaimed",
    "Region",
    "RegionMismatch",
    "SecretFileError",
    "SharedMemoryTooSmall",
    "SlotLoad",
    "TidyReport",
    "TidyThread",
    "load_or_create",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _COMPILED:
        from importlib import import_module

        return getattr(import_module(_COMPILED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
