"""What a Serve config may say, and what it may not."""

from __future__ import annotations

import pytest

from cluster.app import ENGINE_CPUS, INGRESS_CPUS, app_from_env
from cluster.errors import UsageError


@pytest.mark.parametrize("path", ["http.port", "http.host", "ray.address", "ray.metrics_port"])
def test_options_without_effect_are_refused(path: str) -> None:
    with pytest.raises(UsageError, match=rf"^{path} has no effect .* leave it out"):
        app_from_env({path: "1"})


def test_a_wrong_option_is_named_with_where_it_stands() -> None:
    with pytest.raises(UsageError, match=r"pool\.token in flag args|pool\.token in args pool\.token"):
        app_from_env({"pool.token": 1})


def test_two_replicas_and_the_ingress_have_room_on_two_cores() -> None:
    assert 2 * ENGINE_CPUS + INGRESS_CPUS <= 2
