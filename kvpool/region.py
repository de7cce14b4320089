"""One region: a file in a shared memory directory, mapped; control part first, KV bytes after it.

Creating. The file is made under a temporary name, filled, and linked to its real name last, so whoever sees the name
sees a whole region; a name that exists is never replaced (`region_file.py`).

Attaching. Magic, layout version, layout digest, sizes, and on request geometry and fingerprint, must be ours:
RegionMismatch.

Adopting. A region outlives its processes, and what they left complete is still good. `adopt` takes the whole file
exclusively, brings it back to rest (`recovery.py`), and only then lets others in.

Locks. Everyone who has the region open holds an open-file-description lock on it: shared on its first bytes, and
exclusive on the bytes of a process slot once it takes one. Jobs that one process does for all (`Role`) are an
exclusive lock on bytes of their own: whoever gets it has the job, everybody else tries again from time to time. The
kernel drops all of them at any death. A file on which nobody holds a lock is an orphan (`orphans.py`). Locks live on a
descriptor that is never mapped, because a mapping inherited by a forked child would keep them; the child closes its
copy at fork, so it keeps nothing alive, and finds its Region closed.

Last use is the file's modification time, which writing through a mapping does not change: `touch` does, and who lives
in a region for long calls it from time to time.

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
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from kvpool import layout as lay
from kvpool import ofd_lock, recovery, region_file
from kvpool.control import Control
from kvpool.errors import PoolError, RegionMismatch
from kvpool.geometry import BlockGeometry
from kvpool.layout import Layout
from kvpool.region_file import CREATING, NO_OWNER, PRESENCE

DEFAULT_DIRECTORY: Final = Path("/dev/shm")
REGION_PREFIX = "kvatlas-"
"""What the names of replicas' regions begin with, for those who sweep up after them."""

Role = Literal["tidy", "publisher"]
"""A job that one process does for all that share a region."""

_ROLE_RANGES: Final[dict[Role, tuple[int, int]]] = {
    "tidy": (1024, lay.LINE_BYTES),
    "publisher": (1024 + lay.LINE_BYTES, lay.LINE_BYTES),
}
"""(first byte, length) of each role's lock: in the header's page, behind the words that are in use."""

_open_regions: weakref.WeakSet[Region] = weakref.WeakSet()


class Region:
    """A mapped region. Make one with `create`, `attach` or `adopt`; as a context manager it closes, and does not
    unlink.
    """

    path: Path
    geometry: BlockGeometry
    layout: Layout
    incarnation: int
    fingerprint: bytes
    owner: bytes

    def __init__(self, path: Path, memory: mmap.mmap, lock_fd: int) -> None:
        """For the class methods only: `memory` is a checked region, `lock_fd` holds the presence lock."""
        self.path = path
        self._memory = memory
        self._lock_fd = lock_fd
        header = self._header = region_file.read_header(memory[: lay.HEADER_BYTES])
        self.geometry, self.fingerprint, self.owner = header.geometry, header.fingerprint, header.owner
        self.incarnation = header.incarnation
        self.layout = lay.plan(header.geometry, header.capacity_blocks)
        kv_bytes = self.geometry.block_bytes * self.layout.capacity_blocks
        self._kv = memoryview(memory)[self.layout.kv_offset : self.layout.kv_offset + kv_bytes]
        self._closed = False
        self._slots: set[int] = set()
        self._on_close: list[Callable[[], None]] = []
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
        owner: bytes = NO_OWNER,
    ) -> Region:
        """Creates `directory`/`name` (None: /dev/shm) with every block free, and returns it attached.

        `fingerprint` is 32 bytes that name the model, `owner` 16 that name the cluster; `rng` gives the incarnation
        (64 bits; use `random.SystemRandom()`). Raises ValueError for a bad name, fingerprint, owner or capacity,
        SharedMemoryTooSmall when the mount cannot hold it, PoolError when the name is taken, or another process is
        creating it just now.
        """
        if not name or "/" in name or name.startswith(".") or CREATING in name:
            raise ValueError(f"a region's name is a plain file name, got {name!r}")
        if len(fingerprint) != lay.FINGERPRINT_BYTES:
            raise ValueError(f"a model fingerprint has {lay.FINGERPRINT_BYTES} bytes, got {len(fingerprint)}")
        if len(owner) != lay.OWNER_BYTES:
            raise ValueError(f"an owner's tag has {lay.OWNER_BYTES} bytes, got {len(owner)}")
        home = Path(directory) if directory is not None else DEFAULT_DIRECTORY
        layout = lay.plan(geometry, capacity_blocks)
        taken = f"there is a region {home / name} already; stop its owner, or sweep it if its owner is dead"
        temporary, fd, lock_fd = region_file.create_file(home, name)
        try:
            try:
                if os.path.lexists(home / name):
                    raise PoolError(taken)
                region_file.preflight(home, layout.file_bytes)
                region_file.reserve(fd, home, layout.file_bytes)
                memory = mmap.mmap(fd, layout.file_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                region_file.populate(memory)
                region_file.fill(memory, geometry, layout, fingerprint, owner, rng.getrandbits(64))
                try:
                    os.link(temporary, home / name)
                except FileExistsError:
                    raise PoolError(taken) from None
            finally:  # while it is locked: then nobody can have put a file of his own under that name
                os.unlink(temporary)
                os.close(fd)
        except BaseException:
            os.close(lock_fd)
            raise
        return cls(home / name, memory, lock_fd)

    @classmethod
    def attach(
        cls,
        path: str | os.PathLike[str],
        *,
        geometry: BlockGeometry | None = None,
        fingerprint: bytes | None = None,
        owner: bytes | None = None,
        populate: bool = False,
    ) -> Region:
        """Maps the region at `path` and returns it.

        With `geometry`, `fingerprint` or `owner`, the region must have them. `populate` touches all pages now. Raises
        RegionMismatch when the file is not such a region, PoolError when it is being removed or adopted,
        FileNotFoundError when there is none.
        """
        file = Path(path)
        fd = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            lock_fd = region_file.lock_descriptor(fd)
            try:
                locked = ofd_lock.try_lock(lock_fd, *PRESENCE, shared=True)
                if not locked or os.fstat(lock_fd).st_nlink == 0:
                    raise PoolError(f"{file} is being removed or adopted; try again, or create a new region")
                region = cls._checked(file, fd, lock_fd)
            except BaseException:
                os.close(lock_fd)
                raise
        finally:
            os.close(fd)
        region._settle_in(geometry, fingerprint, owner, populate)
        return region

    @classmethod
    def adopt(
        cls, path: str | os.PathLike[str], *, geometry: BlockGeometry, fingerprint: bytes, owner: bytes
    ) -> Region | None:
        """Takes over the region at `path`, whose processes are all dead, with everything complete that they left.

        Returns it attached; None when somebody lives there, or there is no such file. Mutates its control part:
        afterwards every block is free, or indexed and held by nobody. Raises RegionMismatch when it is another thing,
        which is left as it was, or when the file is none that may be written to.
        """
        file = Path(path)
        fd = region_file.open_candidate(file)
        if fd is None:
            if not os.path.lexists(file):
                return None
            raise RegionMismatch(f"{file} is not a kvatlas region that we may write to: leave it alone")
        try:
            lock_fd = region_file.lock_descriptor(fd)
            try:
                if not ofd_lock.try_lock(lock_fd, 0, 0) or not region_file.has_name(lock_fd, file):
                    os.close(lock_fd)
                    return None
                region = cls._checked(file, fd, lock_fd)
            except BaseException:
                os.close(lock_fd)
                raise
        finally:
            os.close(fd)
        try:
            region.expect(geometry, fingerprint, owner)
            region._recover()
            # The first bytes go from exclusive to shared in one step; only then is the rest let go.
            ofd_lock.try_lock(lock_fd, *PRESENCE, shared=True)
            ofd_lock.unlock(lock_fd, sum(PRESENCE), 0)
        except BaseException:
            region.close()
            raise
        region._settle_in(None, None, None, populate=True)
        return region

    @classmethod
    def _checked(cls, file: Path, fd: int, lock_fd: int) -> Region:
        """Maps the file behind `fd`. Raises RegionMismatch when it is no region of ours."""
        region_file.check(fd, file)
        return cls(file, mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE), lock_fd)

    def _recover(self) -> None:
        control = self.control()
        try:
            recovery.recover(control)
        finally:
            control.release()

    def _settle_in(
        self, geometry: BlockGeometry | None, fingerprint: bytes | None, owner: bytes | None, populate: bool
    ) -> None:
        try:
            self.expect(geometry, fingerprint, owner)
            self.touch()
            if populate:
                region_file.populate(self._memory)
        except BaseException:
            self.close()
            raise

    def expect(self, geometry: BlockGeometry | None, fingerprint: bytes | None, owner: bytes | None = None) -> None:
        """Raises RegionMismatch unless the region has this geometry, this fingerprint and this owner (None: any)."""
        problem = self._header.mismatch(geometry, fingerprint, owner)
        if problem:
            raise RegionMismatch(f"{self.path} {problem}")

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

    def on_close(self, call: Callable[[], None]) -> None:
        """Has `call` called when this process lets go of the region, whether by `close` or by fork."""
        self._check_open()
        self._on_close.append(call)

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

    def try_lead(self, role: Role) -> bool:
        """Whether this object has the job `role` now: it gets it when nobody has it, and keeps it until `resign`,
        `close` or death.
        """
        self._check_open()
        return ofd_lock.try_lock(self._lock_fd, *_ROLE_RANGES[role])

    def resign(self, role: Role) -> None:
        """Gives the job `role` up; a no-op when it is not ours or the region is closed."""
        if not self._closed:
            ofd_lock.unlock(self._lock_fd, *_ROLE_RANGES[role])

    def alone(self) -> bool:
        """Whether nobody else has the region open, in this process or another. May be history at once."""
        self._check_open()
        return not ofd_lock.is_locked(self._lock_fd, *PRESENCE)

    def touch(self) -> None:
        """Says that the region is in use now, by the time of its file; see `orphans.py`."""
        self._check_open()
        os.utime(self._lock_fd)

    def close(self) -> None:
        """Drops the locks and unmaps, or leaves the mapping to whoever still looks at it. Idempotent."""
        if self._closed:
            return
        self._shut()
        _open_regions.discard(self)
        os.close(self._lock_fd)
        self._kv.release()
        with contextlib.suppress(BufferError):
            self._memory.close()

    def unlink(self) -> None:
        """Removes the file's name; the memory goes with its last user. Fine when the name is gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def leave(self) -> bool:
        """Closes the region, and removes its file if nobody else has it open then. Returns whether it removed it.

        Of several that leave at the same moment one removes it. Somebody who comes at that moment either keeps it, or is
        refused by `attach` and finds no file afterwards.
        """
        self.close()
        return region_file.remove_unused(self.path)

    def unlink_if_alone(self) -> bool:
        """Removes the file's name if nobody else has the region open; it stays mapped here. Returns whether it did."""
        self._check_open()
        if not ofd_lock.try_lock(self._lock_fd, *PRESENCE):
            return False
        self.unlink()
        ofd_lock.try_lock(self._lock_fd, *PRESENCE, shared=True)
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError(f"the region {self.path} is closed in this process")

    def _shut(self) -> None:
        self._closed = True
        for call in self._on_close:
            call()

    def _forget_after_fork(self) -> None:
        os.close(self._lock_fd)
        self._shut()

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
