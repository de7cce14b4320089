"""What Ray is told through the environment, before it is imported."""

from __future__ import annotations

import socket

from cluster.ray_cluster import HAPROXY, SIDE_PORTS, prepare_environment


def test_side_ports_are_free_and_differ() -> None:
    name, host, default = SIDE_PORTS[2]
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as Ray's proxies open theirs
        try:
            other.bind((host, default))
            other.listen()
        except OSError:
            pass  # another server has it already, which is the case to be tested
        env: dict[str, str] = {}
        prepare_environment(env)
    assert env[name] != str(default)
    assert len({env[port] for port, _, _ in SIDE_PORTS}) == len(SIDE_PORTS)


def test_what_a_person_set_stays() -> None:
    env = {HAPROXY: "0", SIDE_PORTS[0][0]: "1234"}
    prepare_environment(env)
    assert env[HAPROXY] == "0"
    assert env[SIDE_PORTS[0][0]] == "1234"
