"""API keys: who may use the server, and under what name.

A key that a client sends is hashed and compared with every digest, each in constant time, without stopping at a match: how
long that takes tells nothing. It costs 0.14 microseconds for each key.

A file of keys is looked at again at most once per `LOOK_S`. A change that cannot be read or makes no sense leaves the keys as
they were and is written to the log: a slip in an editor locks nobody out.
"""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.api.errors import ApiError
from cluster.api.identity import Identity, set_identity
from cluster.api.key_list import ApiKey, KeyListError, digest_of, read_keys, salt_of

logger = logging.getLogger(__name__)

LOOK_S = 1.0
_Stamp = tuple[int, int, int]


class KeyRing:
    """The keys that open the server now: those given, and those of a file that is followed.

    `salt_secret` gives every name a salt of its own; without it all names share what is cached. Raises `KeyListError`
    where the file is no list of keys at the start. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        file: Path | None = None,
        *,
        salt_secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = tuple(keys)
        self._file = file
        self._salt_secret = salt_secret
        self._clock = clock
        self._stamp = _stamp(file) if file is not None else None
        self._look_at = clock() + LOOK_S
        self._hold(read_keys(file) if file is not None else ())

    def identify(self, given: str) -> Identity | None:
        """Whose key `given` is; None when it is nobody's."""
        self._follow()
        digest = digest_of(given)
        found: Identity | None = None
        for known, identity in self._known:
            if hmac.compare_digest(known, digest):
                found = identity
        return found

    def _hold(self, of_file: Sequence[ApiKey]) -> None:
        self._known = [(key.digest, self._identity(key.name)) for key in (*self._given, *of_file)]

    def _identity(self, name: str) -> Identity:
        return Identity(name, salt_of(self._salt_secret, name) if self._salt_secret else "")

    def _follow(self) -> None:
        """Read the file again when it has changed. A few microseconds a second where it has not."""
        if self._file is None or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_S
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._hold(read_keys(self._file))
        except KeyListError as error:
            logger.error("The API keys stay as they were, because %s changed and %s.", self._file, error)
            return
        logger.info("Read the API keys in %s again: %d keys are valid.", self._file, len(self._known))


def _stamp(file: Path) -> _Stamp | None:
    """What tells one content of `file` from another; None where there is none. Kubernetes swaps links: hence the inode."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class ApiKeysMiddleware:
    """Lets in whoever sends a key of `ring`, and notes in the scope who that is.

    Open to everybody are /health and below, and OPTIONS on any path: load balancers and browsers ask without a key. What is
    below /debug asks for the admin key itself.
    """

    def __init__(self, app: ASGIApp, ring: KeyRing) -> None:
        self.app = app
        self.ring = ring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope):
            identity = self.ring.identify(bearer_of(scope))
            if identity is None:
                raise ApiError(
                    401,
                    "A valid API key is required: send it as 'Authorization: Bearer KEY'.",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
            set_identity(scope, identity)
        await self.app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" or is_open(str(scope["path"]).removeprefix(str(scope.get("root_path", ""))))


def is_open(path: str) -> bool:
    """Whether `path` asks for no API key."""
    return path == "/health" or path.startswith(("/health/", "/debug/"))


def bearer_of(scope: Scope) -> str:
    """What the request sends as `Authorization: Bearer ...`; "" where it sends nothing like it."""
    scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""
