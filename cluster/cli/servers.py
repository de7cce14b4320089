"""Which of the servers running on this machine a command means."""

from __future__ import annotations

from cluster.errors import UsageError
from cluster.server_state import ServerState


def pick(running: list[ServerState], port: int | None) -> ServerState:
    """The server at `port`, or the only one. Raises `UsageError` when there is none, or several to choose from."""
    if port is not None:
        running = [state for state in running if state.port == port]
    if not running:
        where = f" on port {port}" if port is not None else ""
        raise UsageError(f"No kvatlas of yours is running here{where}: start one with `kvatlas serve`.")
    if len(running) > 1:
        listed = ", ".join(str(state.port) for state in running)
        raise UsageError(f"Several servers are running here (ports {listed}): choose one with --port.")
    return running[0]
