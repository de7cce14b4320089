"""One region: a file in a shared memory directory, mapped; control part first, KV bytes after it.

Creating. The file is made under a temporary name, filled, and linked to its real name last, so whoever sees the name
sees a whole region; a name that exists is never replaced (`region_file.py`).

Attaching. Magic, layout version, layout digest, sizes, and on request geometry and fingerprint, must be ours:
RegionMismatch.

Liveness. Everyone who has the region open holds an open-file-description lock on it: shared on the header's bytes,
and exclusive on the bytes of a process slot once it takes one. The kernel drops them at any death. A file on which
nobody holds a lock is an orphan (`orphans.py`). Locks live on a descriptor that is never mapped, because a mapping
inherited by a forked child would keep them; the child closes its copy at fork, so it keeps nothing alive, and finds
its Region closed.

Limits: Linux; a mount that supports hard links (tmpfs does). `close()` cannot unmap while somebody still looks at the
memory (a tensor): then the mapping goes with the last look, the locks at once. The file outlives a SIGKILL on
purpose.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import weakref
from pathlib import Path
from types import TracebackType
from typing import Final

from kvpool import layout as lay
from kvpool import ofd_lock, region_file
from kvpool.control import Control, header_word
from kvpool.errors import PoolError, RegionMismatch
from kvpool.geometry import BlockGeometry
from kvpool.layout import Layout
from kvpool.region_file import CREATING

DEFAULT_DIRECTORY: Final = Path("/dev/shm")
REGION_PREFIX = "kvatlas-"
"""What the names of replicas' regions begin with, for those who sweep up after them."""
_open_regions: weakref.WeakSet[Region] = weakref.WeakSet()


class Region:
    """A mapped region. Make one with `create` or `attach`; as a context manager it closes, and does not unlink."""

    path: Path
    geometry: BlockGeometry
    layout: Layout
    incarnation: int
    fingerprint: bytes

    def __init__(self, path: Path, memory: mmap.mmap, lock_fd: int) -> None:
        """For `create` and `attach` only: `memory` is a checked region, `lock_fd` holds the presence lock."""
        self.path = path
        self._memory = memory
        self._lock_fd = lock_fd
        with memoryview(memory) as view, view[: lay.HEADER_BYTES].cast("Q") as header:
            self.geometry = region_file.read_geometry(header)
            self.incarnation = header_word(header, "incarnation")
            self.layout = lay.plan(self.geometry, header_word(header, "capacity_blocks"))
        start = 8 * lay.HEADER_WORDS["fingerprint"]
        self.fingerprint = memory[start : start + lay.FINGERPRINT_BYTES]
        kv_bytes = self.geometry.block_bytes * self.layout.capacity_blocks
        self._kv = memoryview(memory)[self.layout.kv_offset : self.layout.kv_offset + kv_bytes]
        self._closed = False
        self._slots: set[int] = set()
        _open_regions.add(self)

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str] | None,
        name: str,
        geometry: BlockGeometry,
        capacity_blocks: int,
        fingerprint: bytes,
        rng: random.Random,
    ) -> Region:
        """Creates `directory`/`name` (None: /dev/shm) with every block free, and returns it attached.

        `fingerprint` is 32 bytes that name the model; `rng` gives the incarnation (64 bits; use
        `random.SystemRandom()`). Raises ValueError for a bad name, fingerprint or capacity, SharedMemoryTooSmall when
        the mount cannot hold it, PoolError when the name is taken.
        """
        if not name or "/" in name or name.startswith(".") or CREATING in name:
            raise ValueError(f"a region's name is a plain file name, got {name!r}")
        if len(fingerprint) != lay.FINGERPRINT_BYTES:
            raise ValueError(f"a model fingerprint has {lay.FINGERPRINT_BYTES} bytes, got {len(fingerprint)}")
        home = Path(directory) if directory is not None else DEFAULT_DIRECTORY
        layout = lay.plan(geometry, capacity_blocks)
        region_file.preflight(home, layout.file_bytes)
        temporary, fd, lock_fd = region_file.create_file(home, f"{name}{CREATING}")
        try:
            region_file.reserve(fd, home, layout.file_bytes)
            memory = mmap.mmap(fd, layout.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            region_file.populate(memory)
            region_file.fill(memory, geometry, layout, fingerprint, rng.getrandbits(64))
            try:
                os.link(temporary, home / name)
            except FileExistsError:
                raise PoolError(
                    f"there is a region {home / name} already; stop its owner, or sweep it if its owner is dead"
                ) from None
        except BaseException:
            os.close(lock_fd)
            raise
        finally:
            os.close(fd)
            os.unlink(temporary)
        return cls(home / name, memory, lock_fd)

    @classmethod
    def attach(
        cls,
        path: str | os.PathLike[str],
        *,
        geometry: BlockGeometry | None = None,
        fingerprint: bytes | None = None,
        populate: bool = False,
    ) -> Region:
        """Maps the region at `path` and returns it.

        With `geometry` or `fingerprint`, the region must have them. `populate` touches all pages now. Raises
        RegionMismatch when the file is not such a region, PoolError when it is being removed, FileNotFoundError when
        there is none.
        """
        file = Path(path)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            try:
                locked = ofd_lock.try_lock(lock_fd, 0, lay.LINE_BYTES, shared=True)
                if not locked or os.fstat(lock_fd).st_nlink == 0:
                    raise PoolError(f"{file} is being removed; create a new region")
                region_file.check(fd, file)
                memory = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                region = cls(file, memory, lock_fd)
            except BaseException:
                os.close(lock_fd)
                raise
        finally:
            os.close(fd)
        try:
            region.expect(geometry, fingerprint)
            if populate:
                region_file.populate(memory)
        except BaseException:
            region.close()
            raise
        return region

    def expect(self, geometry: BlockGeometry | None, fingerprint: bytes | None) -> None:
        """Raises RegionMismatch unless the region has this geometry and this fingerprint (None: any)."""
        if geometry is not None and geometry != self.geometry:
            raise RegionMismatch(
                f"{self.path} has other blocks: {self.geometry.describe()}; wanted {geometry.describe()}"
            )
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise RegionMismatch(
                f"{self.path} belongs to another model: fingerprint {self.fingerprint.hex()[:16]}..., "
                f"wanted {fingerprint.hex()[:16]}..."
            )

    @property
    def capacity_blocks(self) -> int:
        """Number of blocks."""
        return self.layout.capacity_blocks

    @property
    def kv_memory(self) -> memoryview:
        """The KV bytes, writable: capacity x block_bytes. Never `release()` it; make a view of your own and drop
        that.
        """
        self._check_open()
        return self._kv

    @property
    def closed(self) -> bool:
        """Whether this process has let go of the region, or inherited it by fork (which counts as closed)."""
        return self._closed

    def control(self) -> Control:
        """Returns a new window on the control part; its holder releases it before `close()`."""
        self._check_open()
        return Control(self._memory, self.layout, self.geometry.block_tokens)

    def lock_slot(self, slot: int) -> bool:
        """Locks the bytes of process slot `slot`, exclusively; False when it is taken, by a living process or through
        this object.
        """
        self._check_open()
        if slot in self._slots or not ofd_lock.try_lock(self._lock_fd, *_slot_range(slot)):
            return False
        self._slots.add(slot)
        return True

    def unlock_slot(self, slot: int) -> None:
        """Gives the lock of process slot `slot` back; a no-op when the region is closed."""
        if not self._closed:
            self._slots.discard(slot)
            ofd_lock.unlock(self._lock_fd, *_slot_range(slot))

    def slot_in_use(self, slot: int) -> bool:
        """Whether process slot `slot` is locked, by a living process or through this object."""
        self._check_open()
        return slot in self._slots or ofd_lock.is_locked(self._lock_fd, *_slot_range(slot))

    def close(self) -> None:
        """Drops the locks and unmaps, or leaves the mapping to whoever still looks at it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        _open_regions.discard(self)
        os.close(self._lock_fd)
        self._kv.release()
        with contextlib.suppress(BufferError):
            self._memory.close()

    def unlink(self) -> None:
        """Removes the file's name; the memory goes with its last user. Fine when the name is gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError(f"the region {self.path} is closed in this process")

    def _forget_after_fork(self) -> None:
        os.close(self._lock_fd)
        self._closed = True

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _slot_range(slot: int) -> tuple[int, int]:
    """Returns (first byte, length) of a slot in the file, which is also the range of its lock."""
    return lay.SLOTS_OFFSET + slot * lay.SLOT_BYTES, lay.SLOT_BYTES


def _after_fork_in_child() -> None:
    for region in list(_open_regions):
        region._forget_after_fork()
    _open_regions.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
