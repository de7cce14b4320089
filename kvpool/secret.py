"""The cluster's secret: 32 random bytes in a file that only its owner can read.

Whoever comes first writes a temporary file (O_EXCL, mode 0600) and links it to the final name; a link to a name that
exists fails, so of any number of processes that start together exactly one secret wins and all of them read that one.
A reader never sees a partial file, because the name appears only after the bytes are on disk.

A restarted cluster must find the same secret, or the blocks it kept warm would never match again.

Limits: one host, one file system; bringing the file to other hosts is the operator's part.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import SecretFileError

SECRET_BYTES = 32
"""Length of the secret."""


def load_or_create(path: str | os.PathLike[str], random_bytes: Callable[[int], bytes] = os.urandom) -> bytes:
    """Returns the secret kept at `path`, creating it (and missing parent directories, mode 0700) when there is none.

    `random_bytes(n)` gives n random bytes. Raises SecretFileError when the file has the wrong size, is not a regular
    file, belongs to another user, or can be read or written by group or others.
    """
    file = Path(path)
    try:
        return _load(file)
    except FileNotFoundError:
        pass
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.creating-{os.urandom(8).hex()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            os.fchmod(fd, 0o600)  # a strange umask must not decide whether we can read it back
            secret = random_bytes(SECRET_BYTES)
            if len(secret) != SECRET_BYTES:
                raise SecretFileError(f"the random source gave {len(secret)} bytes, not {SECRET_BYTES}")
            os.write(fd, secret)
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(temporary, file)
        except FileExistsError:
            return _load(file)
        return secret
    finally:
        os.unlink(temporary)


def _load(file: Path) -> bytes:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise SecretFileError(f"{file} is not a regular file; point the secret at a file of its own")
        if status.st_uid != os.geteuid():
            raise SecretFileError(
                f"{file} belongs to user {status.st_uid}, not to us ({os.geteuid()}); give it another path"
            )
        if status.st_mode & 0o077:
            mode = stat.S_IMODE(status.st_mode)
            raise SecretFileError(f"{file} can be used by others (mode {mode:04o}); run: chmod 600 {file}")
        secret = os.read(fd, SECRET_BYTES + 1)
    finally:
        os.close(fd)
    if len(secret) != SECRET_BYTES:
        raise SecretFileError(
            f"{file} must hold exactly {SECRET_BYTES} bytes, it has {status.st_size}; remove it to get a new secret "
            "(cached blocks of the old one will not match any more)"
        )
    return secret
