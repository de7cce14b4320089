"""The server that a command asks, and the admin key for it: the one running here, or the one that --url names."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from cluster import server_state
from cluster.cli.servers import pick
from cluster.errors import UsageError
from cluster.server_state import ServerState

KEY_VARIABLE = "KVATLAS_HTTP__ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class Target:
    """`url` without a slash at its end; `admin_key` empty where none is known; `state` None for a server elsewhere."""

    url: str
    admin_key: str = field(repr=False)
    state: ServerState | None

    @property
    def is_starting(self) -> bool:
        """Whether it is known not to serve yet: it learns of its metrics when it is ready."""
        return self.state is not None and not self.state.metrics_url


def find(url: str | None, port: int | None) -> Target:
    """The server at `url`, else the one of this user that runs here, at `port` where that is given. Raises `UsageError`."""
    if url is None:
        state = pick(server_state.running(server_state.runtime_dir(os.environ)), port)
        return Target(state.url.rstrip("/"), state.admin_key, state)
    if port is not None:
        raise UsageError("--url and --port both name a server: give one of them.")
    url = url.rstrip("/")
    given = os.environ.get(KEY_VARIABLE, "")
    here = [one for one in server_state.running(server_state.runtime_dir(os.environ)) if one.url.rstrip("/") == url]
    return Target(url, given or (here[0].admin_key if here else ""), here[0] if here else None)
