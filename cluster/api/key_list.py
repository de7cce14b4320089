"""Lists of API keys, and what is kept of them.

A list is text, one `NAME:KEY` or `NAME:sha256:HEX` for each client, separated by blanks or newlines; the second form is for
files that shall hold no key. A name may stand there twice, so that a key can be replaced without a moment in which neither
works. Only SHA-256 digests are kept, so no log, repr or dump of a process's arguments shows a key. A digest without a salt
is safe only for keys that nobody can guess, hence the least length.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.errors import KvatlasError

LEAST_CHARS = 16
MOST_KEYS = 4096
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class KeyListError(KvatlasError):
    """A list of API keys that makes no sense. The message names the entry by its number, never by its content."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The SHA-256 digest of one key, and whose it is."""

    name: str
    digest: bytes = field(repr=False)


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """The keys in `text`. Raises `KeyListError`, also where there is none."""
    keys = tuple(_parse(number, entry) for number, entry in enumerate(text.split(), 1))
    if not keys:
        raise KeyListError("there is no key in it: write NAME:KEY, one for each client")
    if len(keys) > MOST_KEYS:
        raise KeyListError(f"it has {len(keys)} keys: {MOST_KEYS} are the most")
    owners: dict[bytes, str] = {}
    for number, key in enumerate(keys, 1):
        if owners.setdefault(key.digest, key.name) != key.name:
            raise KeyListError(f"entry {number} has the key of another name: give each name a key of its own")
    return keys


def _parse(number: int, entry: str) -> ApiKey:
    name, colon, key = entry.partition(":")
    if not colon or not _NAME.fullmatch(name):
        raise KeyListError(
            f"entry {number} is not NAME:KEY or NAME:sha256:HEX, where NAME is up to 64 letters, digits, dots, dashes and "
            f"underscores"
        )
    kind, colon, digest = key.partition(":")
    if kind == "sha256" and colon:
        if not _DIGEST.fullmatch(digest):
            raise KeyListError(f"entry {number} needs 64 hexadecimal digits after 'sha256:'")
        return ApiKey(name, bytes.fromhex(digest))
    if not key.isascii():
        raise KeyListError(f"entry {number} has a key with characters that no HTTP header carries: use ASCII only")
    if len(key) < LEAST_CHARS:
        raise KeyListError(f"entry {number} has a key of {len(key)} characters: {LEAST_CHARS} are the least")
    return ApiKey(name, digest_of(key))


def digest_of(key: str) -> bytes:
    """SHA-256 of `key`, whatever characters it has."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def salt_of(secret: bytes, name: str) -> str:
    """The salt of the keys called `name`: 32 hexadecimal digits that nobody without the cluster's `secret` can compute."""
    return hmac.new(secret, b"kvatlas api key salt\0" + name.encode(), hashlib.sha256).hexdigest()[:32]


def read_keys(file: Path) -> tuple[ApiKey, ...]:
    """The keys in `file`. Raises `KeyListError`."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise KeyListError(f"it cannot be read ({reason})") from error
    return parse_keys(text)
