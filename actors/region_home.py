"""Where a replica gets its region: adopted from a dead process, shared with the other replicas of its machine, or new.

Scope `replica`: an orphan of the same cluster, model and layout is adopted, with everything complete that its replica had
cached; else a region of its own is created. Scope `node`: one region for all replicas of this machine, under a name that
they all compute; whoever comes first adopts or creates it, the others attach.

"The same cluster" means the same secret of the block keys, because keys made with another one never match. A region carries
a tag computed from it (`owner_tag`).

Orphans that nobody adopts go when they are older than `pool.orphan_ttl_s`, or when a new region needs their memory, the oldest
first, whoever owned them.

Limits: the size of a shared region is decided by whoever creates it and stays for those who come while it lives. Two
machines, also two containers with names of their own, never share a region, even if they see the same shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from actors.capacity import context_tokens, pool_blocks
from actors.config import Membership, ModelConfig, PoolConfig
from kvpool import (
    REGION_PREFIX,
    BlockGeometry,
    PoolError,
    Region,
    RegionMismatch,
    SharedMemoryTooSmall,
    layout,
    orphans,
)

_log = logging.getLogger(__name__)
NODE_PREFIX = f"{REGION_PREFIX}node-"
REPLICA_PREFIX = f"{REGION_PREFIX}replica-"
_PAUSE_S = 0.05
_LONGEST_S = 600.0
"""A shared region is waited for this long while another process creates, adopts or removes it. To create a large one takes
a minute; the lock of a process that died is gone at once."""


@dataclass(frozen=True, slots=True)
class Home:
    """The region a replica lives in.

    `adopted`: it was left by dead processes, and what they had cached is there. `floor_blocks`: what this replica can
    always have of a shared region; 0 where it has all.
    """

    region: Region
    adopted: bool
    floor_blocks: int

    @property
    def pool(self) -> str:
        """The pool's name in the directory; stays the same over an adoption."""
        return self.region.path.name.removeprefix(REGION_PREFIX)


def owner_tag(secret: bytes) -> bytes:
    """The 16-byte tag that regions of the cluster with this secret of the block keys carry. It does not reveal the secret."""
    return blake2b(secret, digest_size=16, person=b"kvatlas-region").digest()


def node_region_name(owner: bytes, fingerprint: bytes, geometry: BlockGeometry, machine: str) -> str:
    """The file name of the region that replicas of one cluster, model and build share on `machine`."""
    shape = f"{geometry.describe()}|{geometry.block_tokens}|{geometry.dtype}|{layout.LAYOUT_VERSION}|{layout.digest()}"
    parts = (owner, fingerprint, shape.encode(), machine.encode())
    # Each part with its length, so that no two lists of parts give the same bytes.
    data = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return NODE_PREFIX + blake2b(data, digest_size=8, person=b"kvatlas-node").hexdigest()


def this_machine() -> str:
    """Names this machine, or container: pools of two of them that share a directory must have different names."""
    boot = ""
    with contextlib.suppress(OSError):  # a sandbox may not show it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


def settle(
    pool: PoolConfig,
    model: ModelConfig,
    membership: Membership,
    *,
    replica_id: str,
    geometry: BlockGeometry,
    fingerprint: bytes,
    model_tokens: int,
    directory: Path,
    machine: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> Home:
    """Finds or makes the region of replica `replica_id` in `directory`, as `pool` says.

    `model_tokens` is the longest context of the model (0: no limit), `machine` what `this_machine` gives unless given. Removes
    orphans that are too old or in the way. The caller ends with `region.leave()`.

    Raises `SharedMemoryTooSmall` and other `PoolError`s where no region can be had.
    """
    seeker = _Seeker(pool, membership.replicas, geometry, fingerprint, owner_tag(membership.secret), directory)
    if pool.scope == "node":
        name = node_region_name(seeker.owner, fingerprint, geometry, machine or this_machine())
        region, adopted = seeker.shared(name, sleep)
        capacity = region.capacity_blocks
        longest = context_tokens(model_tokens, model.max_model_len, capacity, geometry.block_tokens)
        floor_blocks = min(-(-longest // geometry.block_tokens), capacity // membership.replicas)
    else:
        region, adopted = seeker.own(f"{REPLICA_PREFIX}{replica_id}")
        floor_blocks = 0
    # Only now: what can be adopted was, however old it is.
    orphans.sweep(directory, REGION_PREFIX, older_than_s=pool.orphan_ttl_s)
    return Home(region, adopted, floor_blocks)


@dataclass(frozen=True, slots=True)
class _Seeker:
    """The ways to a region, and what they have in common."""

    pool: PoolConfig
    replicas: int
    geometry: BlockGeometry
    fingerprint: bytes
    owner: bytes
    directory: Path

    def own(self, name: str) -> tuple[Region, bool]:
        """An orphan of one replica, else a new region. Returns it, and whether it was adopted."""
        wanted = self._blocks(1) if self.pool.tokens else None
        found = orphans.adopt(
            self.directory,
            REPLICA_PREFIX,
            geometry=self.geometry,
            fingerprint=self.fingerprint,
            owner=self.owner,
            capacity_blocks=wanted,
        )
        if found is not None:
            return found, True
        for orphan in orphans.candidates(
            self.directory, name
        ):  # of an earlier life with our name, and not what we need
            orphans.remove(orphan)
        return self._create(name, self._blocks(1)), False

    def shared(self, name: str, sleep: Callable[[float], None]) -> tuple[Region, bool]:
        """The region `name`: adopted, attached or created, whatever is possible first. And whether it was adopted."""
        path = self.directory / name
        for _ in range(round(_LONGEST_S / _PAUSE_S)):
            found = self._adopt_shared(path)
            if found is not None:
                return found, True
            try:
                return self._attach(path), False
            except FileNotFoundError:
                blocks = self._blocks(self.replicas)
            except RegionMismatch:
                raise
            except PoolError:  # another one adopts or removes it just now
                sleep(_PAUSE_S)
                continue
            try:
                return self._create(name, blocks), False
            except SharedMemoryTooSmall:
                raise
            except PoolError:  # another one was faster
                sleep(_PAUSE_S)
        raise PoolError(f"{path} was not to be had for {_LONGEST_S:.0f} s: end the process that creates or adopts it")

    def _adopt_shared(self, path: Path) -> Region | None:
        """The region at `path` if it is an orphan that fits; one that does not fit is removed. Else None."""
        wanted = self._blocks(self.replicas) if self.pool.tokens else None
        for orphan in orphans.candidates(self.directory, path.name):
            if orphan.path != path:
                continue
            if orphan.fits(self.geometry, self.fingerprint, self.owner, wanted):
                return Region.adopt(path, geometry=self.geometry, fingerprint=self.fingerprint, owner=self.owner)
            orphans.remove(orphan)
        return None

    def _attach(self, path: Path) -> Region:
        region = Region.attach(
            path, geometry=self.geometry, fingerprint=self.fingerprint, owner=self.owner, populate=True
        )
        wanted = self._blocks(self.replicas) if self.pool.tokens else region.capacity_blocks
        if region.capacity_blocks != wanted:
            _log.warning(
                "%s has %d blocks, not the %d of this configuration: it was made by another one and lives",
                path,
                region.capacity_blocks,
                wanted,
            )
        return region

    def _create(self, name: str, blocks: int) -> Region:
        try:
            return self._try_create(name, blocks)
        except SharedMemoryTooSmall:
            if not orphans.make_room(self.directory, REGION_PREFIX, layout.plan(self.geometry, blocks).file_bytes):
                raise
        return self._try_create(name, blocks)

    def _try_create(self, name: str, blocks: int) -> Region:
        rng = random.SystemRandom()
        return Region.create(self.directory, name, self.geometry, blocks, self.fingerprint, rng, self.owner)

    def _blocks(self, replicas: int) -> int:
        """Blocks of a region for `replicas` replicas."""
        reclaimable = sum(orphan.held_bytes for orphan in orphans.candidates(self.directory, REGION_PREFIX))
        return replicas * pool_blocks(self.pool, self.geometry, self.directory, self.replicas, reclaimable)
