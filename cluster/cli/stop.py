"""`kvatlas stop`: end a server that runs on this machine, as Ctrl-C would."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Annotated

import typer

from cluster import server_state
from cluster.cli.output import print_json, say
from cluster.cli.servers import pick
from cluster.errors import ServeFailed


def stop(
    port: Annotated[int | None, typer.Option(help="Which of several servers on this machine.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it to end.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line.")] = False,
) -> None:
    """Stop the running server and wait until it is gone."""
    state = pick(server_state.running(server_state.runtime_dir(os.environ)), port)
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        # The handle names the process itself; if its id was reused since, the check below fails and nobody is hit.
        handle = os.pidfd_open(state.pid)
        try:
            if server_state.is_alive(state):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            os.close(handle)
    while server_state.is_alive(state):
        if time.monotonic() - began > timeout:
            raise ServeFailed(f"Process {state.pid} is still stopping after {timeout:g} s: wait, or raise --timeout.")
        time.sleep(0.05)
    seconds = time.monotonic() - began
    if as_json:
        print_json({"stopped": True, "pid": state.pid, "port": state.port, "seconds": round(seconds, 3)})
    else:
        say(f"Stopped {state.url} in {seconds:.1f} s.")
