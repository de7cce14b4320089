"""What one replica can refuse. The root of the tree is `kvpool.errors.KvatlasError`."""

from __future__ import annotations

from kvpool.errors import KvatlasError


class ModelNotFound(KvatlasError):
    """The model name or path leads to nothing that can be loaded."""


class ModelRefused(KvatlasError):
    """The model exists but kvatlas would not serve it correctly; the message says why."""


class RequestRefused(KvatlasError):
    """A request that this replica can never serve (a client error, HTTP 400).

    `param` names the request field at fault; `code` is the OpenAI error code or None.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, param, code)
        self.message = message
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.message


class ReplicaOverloaded(KvatlasError):
    """The replica's waiting line is full (HTTP 503 with Retry-After)."""


class ReplicaFailed(KvatlasError):
    """The replica cannot serve any request: its step thread died or is stopping (HTTP 503)."""


class ReplicaDied(ReplicaFailed):
    """The replica's process ended with the request in it: another replica can serve it, if nothing was sent yet."""
