"""Who a request is from, as far as the server can tell.

The key that a client sends says it (`cluster.api.keys`); without keys everybody is `ANONYMOUS`. The name is for fair
shares and for logs; the salt, empty unless keys have salts of their own, keeps what this client computes in the pools
apart from everybody else's. It decides what is shared, so it never leaves the server.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Scope

_STATE = "identity"


@dataclass(frozen=True, slots=True)
class Identity:
    """A client: the name of its API key, and the salt of that key; "" where there is none."""

    name: str
    salt: str = field(default="", repr=False)


ANONYMOUS = Identity("")


def identity_of(scope: Scope) -> Identity:
    """The identity that `set_identity` gave this exchange; `ANONYMOUS` without one."""
    found = scope.get("state", {}).get(_STATE, ANONYMOUS)
    return found if isinstance(found, Identity) else ANONYMOUS


def set_identity(scope: Scope, identity: Identity) -> None:
    """Note in `scope` that `identity` sent this request. Mutates the scope's state."""
    scope.setdefault("state", {})[_STATE] = identity
