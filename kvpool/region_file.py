"""Making the file of a region, and checking one that is there.

Preflight: the mount must have room for the whole file (`statvfs`), and `posix_fallocate` must get it, because a file
that is only promised space kills the process later with SIGBUS. A file in the making has a name that says so and is
locked from birth, so a sweep that finds it unlocked may remove it. Pages are touched at once (MADV_POPULATE_WRITE, or
a read-modify-write of every page where the kernel lacks it), so serving never pays for a first touch.

Limits: a memory limit of the container can still be lower than what the mount promises; tmpfs pages count against it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import struct
from pathlib import Path
from typing import Final

from kvpool import layout as lay
from kvpool import ofd_lock, words
from kvpool.control import Control, header_word
from kvpool.errors import RegionMismatch, SharedMemoryTooSmall
from kvpool.geometry import BlockGeometry
from kvpool.layout import Layout

CREATING: Final = ".creating-"
"""Part of the name of a region that is still being filled."""

_MADV_POPULATE_WRITE: Final = 23
_DTYPES: Final = {code: name for name, code in lay.DTYPE_CODES.items()}
_log = logging.getLogger(__name__)


def _too_small(directory: Path, needed: int, free: int) -> SharedMemoryTooSmall:
    return SharedMemoryTooSmall(
        f"{directory} has {free} bytes ({free / 2**20:.0f} MiB) free, the pool needs {needed} bytes "
        f"({needed / 2**20:.0f} MiB): lower pool.tokens (KVATLAS_POOL__TOKENS), or enlarge {directory} "
        "(docker: --shm-size; Kubernetes: an emptyDir of medium Memory with a larger sizeLimit, mounted there)"
    )


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def preflight(directory: Path, needed: int) -> None:
    """Raises SharedMemoryTooSmall when `directory` has less than `needed` bytes free."""
    free = _free_bytes(directory)
    if free < needed:
        raise _too_small(directory, needed, free)


def reserve(fd: int, directory: Path, size: int) -> None:
    """Makes the file behind `fd` `size` bytes long, all of them really there. Raises SharedMemoryTooSmall when they
    are not.
    """
    free = _free_bytes(directory)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise _too_small(directory, size, free) from error
        raise


def create_file(directory: Path, stem: str) -> tuple[Path, int, int]:
    """Returns (path, descriptor to map, descriptor that holds the presence lock) of a new empty file."""
    while True:
        path = directory / f"{stem}{os.urandom(8).hex()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        if ofd_lock.try_lock(lock_fd, 0, lay.LINE_BYTES, shared=True) and os.fstat(lock_fd).st_nlink == 1:
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


def fill(memory: mmap.mmap, geometry: BlockGeometry, layout: Layout, fingerprint: bytes, incarnation: int) -> None:
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
    end = 8 * lay.HEADER_WORDS["check"]
    struct.pack_into("<Q", memory, end, lay.header_check(memory[:end]))
    control = Control(memory, layout, geometry.block_tokens)
    control.array("state")[:] = words.pack(words.FREE, words.NO_SLOT, 0)
    control.set_all_bits("free")
    control.release()


def read_geometry(header: memoryview) -> BlockGeometry:
    """Returns the geometry in a header (u64 words) whose check was right."""
    return BlockGeometry(
        layers=header_word(header, "layers"),
        kv_heads=header_word(header, "kv_heads"),
        head_dim=header_word(header, "head_dim"),
        block_tokens=header_word(header, "block_tokens"),
        dtype=_DTYPES[header_word(header, "dtype")],
    )


def check(fd: int, file: Path) -> None:
    """Raises RegionMismatch unless the file behind `fd` is a whole region of our layout."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, lay.HEADER_BYTES, 0)
    if len(head) < lay.HEADER_BYTES or int.from_bytes(head[:8], "little") != lay.MAGIC:
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
    layout = lay.plan(read_geometry(header), header_word(header, "capacity_blocks"))
    if size != layout.file_bytes:
        raise RegionMismatch(f"{file} has {size} bytes, its header asks for {layout.file_bytes}: it was truncated")
