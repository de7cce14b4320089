"""Region files whose users are all dead: adopting them, and removing them.

Everyone who has a region open holds a lock on its file (`region.py`), and the kernel drops it at any death. So a file
without a lock is an orphan. Looking for orphans takes no lock; whoever wants one takes the file's whole range
exclusively: if it gets it, nobody lives there, and the file is adopted, or its name goes, while the lock is held. An
attacher that opened the file just before finds its own lock refused, or the file without a name, and reports that; it
is never left with a region that somebody else creates anew under the same name.

An orphan's age is the time since its last use, as the file's modification time tells it: it is renewed when a region is
attached or adopted, and by those who live there (`Region.touch`). Adoption prefers the youngest, making room begins with
the oldest. A region that was still being filled (its name says so) can never be completed and goes with any sweep.

Process ids play no part, so two lives of a process with the same id cannot be taken for each other.

Limits: only files whose name starts with the given prefix AND that are regions (magic), or regions that were still
being filled, are candidates. Files of other users are skipped. A region whose users do not touch it looks as old as its
last attacher.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvpool import ofd_lock, region_file
from kvpool.errors import RegionMismatch
from kvpool.geometry import BlockGeometry
from kvpool.region import Region
from kvpool.region_file import CREATING, Header

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A region file that nobody has open, as of the look at it.

    `mtime_ns`: last use, nanoseconds of Unix time. `held_bytes`: what removing it sets free. `header` is None for a region
    still in the making, damaged, or of another build of kvatlas; nobody can adopt those.
    """

    path: Path
    mtime_ns: int
    held_bytes: int
    header: Header | None

    @property
    def half_made(self) -> bool:
        """Whether its maker died while filling it."""
        return CREATING in self.path.name

    def fits(self, geometry: BlockGeometry, fingerprint: bytes, owner: bytes, capacity_blocks: int | None) -> bool:
        """Whether it is such a region (`capacity_blocks` None: of any size)."""
        header = self.header
        if header is None or header.mismatch(geometry, fingerprint, owner):
            return False
        return capacity_blocks is None or header.capacity_blocks == capacity_blocks


def candidates(directory: str | os.PathLike[str], prefix: str) -> list[Orphan]:
    """Returns the orphans in `directory` whose file name starts with `prefix`, the most recently used first.

    Raises ValueError for an empty prefix (it would touch files that are not ours).
    """
    if not prefix:
        raise ValueError("a search for orphans needs a non-empty name prefix")
    home = Path(directory)
    found = [_look(home / name) for name in sorted(os.listdir(home)) if name.startswith(prefix)]
    return sorted((orphan for orphan in found if orphan is not None), key=lambda orphan: -orphan.mtime_ns)


def adopt(
    directory: str | os.PathLike[str],
    prefix: str,
    *,
    geometry: BlockGeometry,
    fingerprint: bytes,
    owner: bytes,
    capacity_blocks: int | None,
) -> Region | None:
    """Takes over the most recently used orphan that is such a region (`capacity_blocks` None: of any size).

    Returns it attached, as `Region.adopt` does; None when there is none. Logs it.
    """
    for orphan in candidates(directory, prefix):
        if not orphan.fits(geometry, fingerprint, owner, capacity_blocks):
            continue
        try:
            region = Region.adopt(orphan.path, geometry=geometry, fingerprint=fingerprint, owner=owner)
        except RegionMismatch as error:  # another file has the name by now
            _log.info("left an orphan alone: %s", error)
            continue
        if region is not None:
            _log.info("adopted the orphaned region %s with %d blocks", region.path, region.capacity_blocks)
            return region
    return None


def sweep(
    directory: str | os.PathLike[str],
    prefix: str,
    *,
    older_than_s: float = 0.0,
    owner: bytes | None = None,
    now: Callable[[], float] = time.time,
) -> list[Path]:
    """Removes the orphans in `directory` whose name starts with `prefix` and that are unused for `older_than_s` seconds.

    With `owner`, only those of that owner. Half-made regions go in any case. `now` gives Unix time in seconds. Returns
    the paths, in order, and logs each. Raises ValueError for an empty prefix.
    """
    removed = []
    for orphan in candidates(directory, prefix):
        if not orphan.half_made:
            age_s = max(0.0, now() - orphan.mtime_ns / 1e9)
            foreign = owner is not None and (orphan.header is None or orphan.header.owner != owner)
            if foreign or age_s < older_than_s:
                continue
        if remove(orphan):
            removed.append(orphan.path)
    return sorted(removed)


def make_room(directory: str | os.PathLike[str], prefix: str, needed_bytes: int) -> list[Path]:
    """Removes orphans, the oldest first, until `directory` has `needed_bytes` free; returns their paths.

    Removes nothing where all of them together would not be enough. Raises ValueError for an empty prefix.
    """
    found = candidates(directory, prefix)
    home = Path(directory)
    removed: list[Path] = []
    if region_file.free_bytes(home) + sum(orphan.held_bytes for orphan in found) < needed_bytes:
        return removed
    for orphan in sorted(found, key=lambda orphan: (not orphan.half_made, orphan.mtime_ns)):
        if region_file.free_bytes(home) >= needed_bytes:
            break
        if remove(orphan):
            removed.append(orphan.path)
    return removed


def remove(orphan: Orphan) -> bool:
    """Removes `orphan` unless somebody has it open, or used it since it was looked at. Logs it; returns whether it did."""
    removed = region_file.remove_unused(orphan.path, mtime_ns=orphan.mtime_ns)
    if removed:
        _log.info("removed the orphaned region %s: nobody had it open", orphan.path)
    return removed


def _look(path: Path) -> Orphan | None:
    """Returns the file at `path` as an orphan; None when it is none, or not ours."""
    fd = region_file.open_candidate(path)
    if fd is None:
        return None
    try:
        if ofd_lock.is_locked(fd, 0, 0):
            return None
        status = os.fstat(fd)
        try:
            header = None if CREATING in path.name else region_file.check(fd, path)
        except RegionMismatch:
            header = None
        return Orphan(path, status.st_mtime_ns, 512 * status.st_blocks, header)
    finally:
        os.close(fd)
