"""What Ray is told through the environment, before it is imported."""

from __future__ import annotations

from cluster.ray_cluster import HAPROXY, SIDE_PORTS, prepare_environment


def test_two_servers_that_start_together_share_no_side_port() -> None:
    servers: list[dict[str, str]] = [{}, {}]
    for env in servers:
        prepare_environment(env)
    chosen = [env[name] for env in servers for name in SIDE_PORTS]
    assert len(set(chosen)) == 2 * len(SIDE_PORTS)


def test_what_a_person_set_stays() -> None:
    env = {HAPROXY: "0", SIDE_PORTS[0]: "1234"}
    prepare_environment(env)
    assert env[HAPROXY] == "0"
    assert env[SIDE_PORTS[0]] == "1234"
