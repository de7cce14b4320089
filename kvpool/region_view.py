"""A look at a region from outside: its control part, read only, without a slot, a lock or a trace.

Who looks is nobody's neighbour: the region stays as old, and as much an orphan, as it is, an adopter is not kept out, and
nothing can be written by mistake. KV bytes are not mapped.

Limits: others go on meanwhile, so two words read one after the other may tell of different moments. A region that is
removed or adopted meanwhile can still be looked at, as that file. Locks are asked for, not held: answers may be history.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvpool import layout as lay
from kvpool import ofd_lock, region_file
from kvpool.control import Control, header_word
from kvpool.errors import RegionMismatch


class RegionView:
    """The region at `path`, as long as it is open; a context manager that closes.

    `header`: its constants; `control`: its control part, not writable. Raises RegionMismatch when the file is no region
    of this build of kvatlas, OSError when it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            self.header = region_file.check(self._fd, self.path)
            self.layout = lay.plan(self.header.geometry, self.header.capacity_blocks)
            size = self.layout.control_bytes
            self._memory = mmap.mmap(self._fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self.control = Control(self._memory, self.layout, self.header.geometry.block_tokens)
        self._closed = False

    def is_live(self) -> bool:
        """Whether somebody has it open, or is just adopting or removing it."""
        return ofd_lock.is_locked(self._fd, 0, 0)

    def slot_is_live(self, slot: int) -> bool:
        """Whether a living process has process slot `slot`."""
        return ofd_lock.is_locked(self._fd, lay.SLOTS_OFFSET + slot * lay.SLOT_BYTES, lay.SLOT_BYTES)

    def unused_s(self) -> float:
        """Seconds since its last use, as far as its users tell; see `orphans.py`."""
        return max(0.0, time.time() - os.fstat(self._fd).st_mtime)

    def close(self) -> None:
        """Ends the look. Idempotent."""
        if not self._closed:
            self._closed = True
            self.control.release()
            os.close(self._fd)
            with contextlib.suppress(BufferError):  # an array in the traceback of an error: it goes with that
                self._memory.close()

    def __enter__(self) -> RegionView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class RegionFile:
    """What the first bytes of a file say, for files that may be none of ours.

    `problem`: '' for a region that can be looked at, else why it cannot, in a sentence; `kind`: that in a word or two
    {region, half made, other version, damaged, unreadable}.
    """

    path: Path
    file_bytes: int
    kind: str
    problem: str = ""


def regions_in(directory: str | os.PathLike[str], prefix: str) -> list[RegionFile]:
    """Returns the regions in `directory` whose names begin with `prefix`, by name, those that cannot be looked at
    included. Raises OSError when the directory cannot be read.
    """
    home = Path(directory)
    found = (describe_file(home / name) for name in sorted(os.listdir(home)) if name.startswith(prefix))
    return [file for file in found if file is not None]


def describe_file(path: Path) -> RegionFile | None:
    """Returns what kind of region is at `path`; None when there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return RegionFile(path, 0, "unreadable", f"{path} cannot be read: {error.strerror}")
    try:
        return _describe(fd, path)
    finally:
        os.close(fd)


def _describe(fd: int, path: Path) -> RegionFile | None:
    try:
        head = os.pread(fd, lay.HEADER_BYTES, 0)
    except OSError:  # a directory
        return None
    size = os.fstat(fd).st_size
    if region_file.CREATING in path.name:
        return RegionFile(path, size, "half made", f"{path} is still being made, or its maker died: then remove it")
    if not region_file.is_region(head):
        return None
    try:
        region_file.check(fd, path)
    except RegionMismatch as error:
        return RegionFile(path, size, "other version" if _is_foreign(head) else "damaged", str(error))
    return RegionFile(path, size, "region")


def _is_foreign(head: bytes) -> bool:
    """Whether another build of kvatlas made the region that begins with `head`."""
    if len(head) < lay.HEADER_BYTES:
        return False
    words = memoryview(head).cast("Q")
    laid_out = (header_word(words, "digest_low"), header_word(words, "digest_high"))
    return header_word(words, "version") != lay.LAYOUT_VERSION or laid_out != lay.digest()
