"""Where an embedded Redis listens: a unix socket, or a TCP port that stays reserved for it."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from cluster.errors import ServeFailed

OWN_INSTEAD: Final = "or name a Redis of yours in directory.redis_url"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the server listens. `reservation` keeps the port from others while the server is not there."""

    family: socket.AddressFamily
    address: str | tuple[str, int]
    shown: str
    url: str = field(repr=False)
    directives: tuple[str, ...] = field(repr=False)
    password: str = field(default="", repr=False)
    reservation: socket.socket | None = None

    def greet(self) -> tuple[int, int] | None:
        """Returns the version of a server that answers PING here; None when none does (yet)."""
        auth = f"AUTH {self.password}\r\n" if self.password else ""
        answer = b""
        try:
            with socket.socket(self.family, socket.SOCK_STREAM) as channel:
                channel.settimeout(1.0)
                channel.connect(self.address)
                channel.sendall(f"{auth}PING\r\nINFO server\r\n".encode())
                while (found := re.search(rb"\+PONG\r\n.*redis_version:(\d+)\.(\d+)\D", answer, re.DOTALL)) is None:
                    more = channel.recv(4096)
                    if not more or len(answer) > 65536:
                        return None
                    answer += more
        except OSError:
            return None
        return int(found[1]), int(found[2])

    def release(self) -> None:
        """Gives the port back."""
        if self.reservation is not None:
            self.reservation.close()


def unix(path: Path) -> Endpoint:
    directives = ("port 0", f"unixsocket {quoted(path)}", "unixsocketperm 700")
    return Endpoint(socket.AF_UNIX, str(path), str(path), f"unix://{quote(str(path))}", directives)


def tcp(host: str, password: str) -> Endpoint:
    """Finds and reserves a free port of `host`.

    A bound socket that does not listen is no obstacle for a server that sets SO_REUSEADDR, as Redis does, but the kernel gives
    its port to nobody who asks for any: neither now nor between two lives of the server.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        reservation = socket.socket(family, kind, protocol)
        try:
            reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reservation.bind(address)
        except OSError:
            reservation.close()
            raise
    except OSError as error:
        raise ServeFailed(
            f"The embedded Redis cannot listen on {host} ({error.strerror}): give it an address of this machine, {OWN_INSTEAD}."
        ) from error
    number, port = reservation.getsockname()[:2]
    shown = f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
    directives = (f"port {port}", f"bind {number}", f"requirepass {password}")
    url = f"redis://:{password}@{shown}/0"
    return Endpoint(family, (number, port), shown, url, directives, password, reservation)


def quoted(path: Path) -> str:
    """`path` as the configuration file takes it, whatever characters it has."""
    encoded = re.sub(rb"[^A-Za-z0-9/._-]", lambda found: b"\\x%02x" % found[0][0], os.fsencode(path))
    return f'"{encoded.decode("ascii")}"'
