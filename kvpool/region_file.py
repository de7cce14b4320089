"""Making the file of a region, and checking one that is there.

Preflight: the mount must have room for the whole file (`statvfs`), and `posix_fallocate` must get it, because a file
that is only promised space kills the process later with SIGBUS. A file in the making has a name that says so, and that only
one process can have: of several that want to create the same region one takes memory, the others are told at once. It is
locked from birth, so whoever finds it unlocked may remove it. Pages are touched at once (MADV_POPULATE_WRITE, or
a read-modify-write of every page where the kernel lacks it), so serving never pays for a first touch.

Removing: `remove_unused` takes the whole file exclusively first, so it never takes a region from somebody who lives there;
its limits are in `orphans.py`.

Limits: a memory limit of the container can still be lower than what the mount promises; tmpfs pages count against it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool import layout as lay
from kvpool import ofd_lock, words
from kvpool.control import Control, header_word
from kvpool.errors import PoolError, RegionMismatch, SharedMemoryTooSmall
from kvpool.geometry import BlockGeometry
from kvpool.guard import magic_of
from kvpool.layout import Layout

CREATING: Final = ".creating"
"""End of the name of a region that is still being filled."""
NO_OWNER: Final = bytes(lay.OWNER_BYTES)
"""Tag of a region that belongs to no cluster in particular."""
PRESENCE: Final = (0, lay.LINE_BYTES)
"""(first byte, length) of the range that everyone who lives in a region holds a shared lock on."""

_MADV_POPULATE_WRITE: Final = 23
_DTYPES: Final = {code: name for name, code in lay.DTYPE_CODES.items()}
_log = logging.getLogger(__name__)


def _too_small(directory: Path, needed: int, free: int) -> SharedMemoryTooSmall:
    return SharedMemoryTooSmall(
        f"{directory} has {free} bytes ({free / 2**20:.0f} MiB) free, the pool needs {needed} bytes "
        f"({needed / 2**20:.0f} MiB): lower pool.tokens (KVATLAS_POOL__TOKENS), or enlarge {directory} "
        "(docker: --shm-size; Kubernetes: an emptyDir of medium Memory with a larger sizeLimit, mounted there)"
    )


def free_bytes(directory: Path) -> int:
    """Returns the bytes that may still be taken in `directory`."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def preflight(directory: Path, needed: int) -> None:
    """Raises SharedMemoryTooSmall when `directory` has less than `needed` bytes free."""
    free = free_bytes(directory)
    if free < needed:
        raise _too_small(directory, needed, free)


def reserve(fd: int, directory: Path, size: int) -> None:
    """Makes the file behind `fd` `size` bytes long, all of them really there. Raises SharedMemoryTooSmall when they
    are not.
    """
    free = free_bytes(directory)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise _too_small(directory, size, free) from error
        raise


def lock_descriptor(fd: int) -> int:
    """Returns a new open file description of the file behind `fd`, to hold locks."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def create_file(directory: Path, name: str) -> tuple[Path, int, int]:
    """Returns (path, descriptor to map, descriptor that holds the presence lock) of a new empty file for region `name`.

    Raises PoolError when a living process is making one.
    """
    path = directory / f"{name}{CREATING}"
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            if remove_unused(path):
                continue
            raise PoolError(f"another process is creating {directory / name} just now: try again") from None
        lock_fd = lock_descriptor(fd)
        if ofd_lock.try_lock(lock_fd, *PRESENCE, shared=True) and os.fstat(lock_fd).st_nlink == 1:
            return path, fd, lock_fd
        # A sweep came between the birth of the file and our lock, and takes it for an orphan: leave it that one.
        os.close(lock_fd)
        os.close(fd)


def populate(memory: mmap.mmap) -> None:
    """Touches every page of the mapping without changing it."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.info("this kernel lacks MADV_POPULATE_WRITE; touching %d pages", len(memory) // lay.PAGE_BYTES)
        for offset in range(0, len(memory), lay.PAGE_BYTES):
            memory[offset] = memory[offset]


def fill(
    memory: mmap.mmap, geometry: BlockGeometry, layout: Layout, fingerprint: bytes, owner: bytes, incarnation: int
) -> None:
    """Writes the control part of a region whose blocks are all free into zeroed memory."""
    low, high = lay.digest()
    values = {
        "magic": lay.MAGIC,
        "version": lay.LAYOUT_VERSION,
        "digest_low": low,
        "digest_high": high,
        "file_bytes": layout.file_bytes,
        "control_bytes": layout.control_bytes,
        "kv_offset": layout.kv_offset,
        "capacity_blocks": layout.capacity_blocks,
        "layers": geometry.layers,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "block_tokens": geometry.block_tokens,
        "dtype": lay.DTYPE_CODES[geometry.dtype],
        "block_bytes": geometry.block_bytes,
        "incarnation": incarnation,
        "index_entries": layout.index_entries,
    }
    for name, value in values.items():
        struct.pack_into("<Q", memory, 8 * lay.HEADER_WORDS[name], value)
    start = 8 * lay.HEADER_WORDS["fingerprint"]
    memory[start : start + lay.FINGERPRINT_BYTES] = fingerprint
    start = 8 * lay.HEADER_WORDS["owner"]
    memory[start : start + lay.OWNER_BYTES] = owner
    end = 8 * lay.HEADER_WORDS["check"]
    struct.pack_into("<Q", memory, end, lay.header_check(memory[:end]))
    control = Control(memory, layout, geometry.block_tokens)
    control.array("state")[:] = words.pack(words.FREE, words.NO_SLOT, 0)
    control.set_all_bits("free")
    control.array("magic")[:] = magic_of(incarnation, layout.capacity_blocks)
    control.release()


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of a region says of it. `owner` is the tag of the cluster that made it."""

    geometry: BlockGeometry
    capacity_blocks: int
    incarnation: int
    fingerprint: bytes
    owner: bytes

    def mismatch(self, geometry: BlockGeometry | None, fingerprint: bytes | None, owner: bytes | None) -> str:
        """Returns what is not as wanted (None: anything will do), in words; '' when nothing is."""
        if geometry is not None and geometry != self.geometry:
            return f"has other blocks: {self.geometry.describe()}; wanted {geometry.describe()}"
        if fingerprint is not None and fingerprint != self.fingerprint:
            return (
                f"belongs to another model: fingerprint {self.fingerprint.hex()[:16]}..., "
                f"wanted {fingerprint.hex()[:16]}..."
            )
        if owner is not None and owner != self.owner:
            return f"belongs to another cluster: owner {self.owner.hex()[:8]}..., wanted {owner.hex()[:8]}..."
        return ""


def read_header(head: bytes) -> Header:
    """Returns what the first `HEADER_BYTES` bytes of a region say, once its check was right."""
    words_ = memoryview(head).cast("Q")
    geometry = BlockGeometry(
        layers=header_word(words_, "layers"),
        kv_heads=header_word(words_, "kv_heads"),
        head_dim=header_word(words_, "head_dim"),
        block_tokens=header_word(words_, "block_tokens"),
        dtype=_DTYPES[header_word(words_, "dtype")],
    )
    fingerprint, owner = 8 * lay.HEADER_WORDS["fingerprint"], 8 * lay.HEADER_WORDS["owner"]
    return Header(
        geometry,
        header_word(words_, "capacity_blocks"),
        header_word(words_, "incarnation"),
        head[fingerprint : fingerprint + lay.FINGERPRINT_BYTES],
        head[owner : owner + lay.OWNER_BYTES],
    )


def check(fd: int, file: Path) -> Header:
    """Returns the header of the file behind `fd`. Raises RegionMismatch unless that is a whole region of our layout."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, lay.HEADER_BYTES, 0)
    if not is_region(head) or len(head) < lay.HEADER_BYTES:
        raise RegionMismatch(f"{file} is not a kvatlas region (no magic in its first bytes)")
    header = memoryview(head).cast("Q")
    version = header_word(header, "version")
    if version != lay.LAYOUT_VERSION:
        raise RegionMismatch(
            f"{file} has layout version {version}, this kvatlas has {lay.LAYOUT_VERSION}: "
            "use the same kvatlas, or remove the file"
        )
    if (header_word(header, "digest_low"), header_word(header, "digest_high")) != lay.digest():
        raise RegionMismatch(f"{file} was laid out by another build of kvatlas: use the same one, or remove it")
    if header_word(header, "check") != lay.header_check(head[: 8 * lay.HEADER_WORDS["check"]]):
        raise RegionMismatch(f"{file} has a damaged header: remove the file")
    found = read_header(head)
    layout = lay.plan(found.geometry, found.capacity_blocks)
    if size != layout.file_bytes:
        raise RegionMismatch(f"{file} has {size} bytes, its header asks for {layout.file_bytes}: it was truncated")
    return found


def is_region(head: bytes) -> bool:
    """Whether a file that begins with `head` is a region, of whatever layout."""
    return int.from_bytes(head[:8], "little") == lay.MAGIC


def open_candidate(path: Path) -> int | None:
    """Returns a descriptor of the file at `path`, if it is a region, or one in the making, that we may write to."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # gone meanwhile, not ours, or not a file
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode) and (CREATING in path.name or is_region(os.pread(fd, 8, 0))):
        return fd
    os.close(fd)
    return None


def has_name(fd: int, path: Path) -> bool:
    """Whether `path` still means the file behind `fd`."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


def remove_unused(path: Path, *, mtime_ns: int | None = None) -> bool:
    """Removes the region at `path` if nobody lives there, and if it has not been used since `mtime_ns` (None: or has).

    Returns whether it did. The name goes while the whole file is locked.
    """
    fd = open_candidate(path)
    if fd is None:
        return False
    try:
        if not ofd_lock.try_lock(fd, 0, 0) or not has_name(fd, path):
            return False
        if mtime_ns is not None and os.fstat(fd).st_mtime_ns != mtime_ns:
            return False
        os.unlink(path)
        return True
    except FileNotFoundError:
        return False
    finally:
        os.close(fd)
