"""Ports: taken, foreign, forbidden, free."""

from __future__ import annotations

import socket

import pytest

from cluster import ports
from cluster.errors import UsageError


def test_a_free_port_passes_and_stays_free() -> None:
    port = ports.choose("127.0.0.1", 0)
    ports.require_free("127.0.0.1", port)
    ports.require_free("127.0.0.1", port)


def test_a_taken_port_is_a_sentence_with_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"Port {port} on 127\.0\.0\.1 is taken: .*--port\.$"):
            ports.require_free("127.0.0.1", port)
        assert ports.choose("127.0.0.1", port) != port


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_a_host_that_is_not_ours(host: str) -> None:
    with pytest.raises(UsageError, match="address of this machine"):
        ports.require_free(host, 8000)
