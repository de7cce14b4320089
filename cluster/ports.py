"""Whether a TCP port can be had, asked before anything expensive starts."""

from __future__ import annotations

import contextlib
import errno
import random
import socket

from cluster.errors import UsageError

QUIET_PORTS = range(20_000, 30_000)
TRIES = 20


def require_free(host: str, port: int) -> None:
    """Raise `UsageError` when nothing can listen on `host`:`port`, with the reason and the fix."""
    try:
        _bind(host, port)
    except socket.gaierror as error:
        raise UsageError(
            f"{host} is no address of this machine ({error.strerror}): set --host, e.g. 127.0.0.1."
        ) from error
    except OSError as error:
        raise UsageError(_reason(host, port, error)) from error


def choose(host: str, preferred: int) -> int:
    """`preferred` where it is free on `host`, else a port that is free now."""
    with contextlib.suppress(OSError):
        return _bind(host, preferred)
    return pick(host)


def pick(host: str) -> int:
    """A port that is free on `host` now, and that nobody else will pick before it is used.

    So it is drawn by chance from below those that the system hands out by itself, as long as one of those is free.
    """
    for port in random.SystemRandom().sample(QUIET_PORTS, TRIES):
        with contextlib.suppress(OSError):
            return _bind(host, port)
    return _bind(host, 0)


def _bind(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # with SO_REUSEADDR only this finds another listener
        bound: int = listener.getsockname()[1]
        return bound


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is taken: stop what listens there (`kvatlas stop --port {port}` if it is kvatlas), "
            f"or choose another with --port."
        )
    if error.errno == errno.EACCES:
        return f"Port {port} needs root: choose one above 1023 with --port."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: set --host to one of its own, or 0.0.0.0 for all."
    return f"Cannot listen on {host}:{port} ({error.strerror}): choose another --host or --port."
