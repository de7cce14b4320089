"""The secret that names blocks, and the name of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.config import Membership
from cluster import membership
from cluster.config import ClusterConfig


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVATLAS_CACHE_DIR", str(tmp_path))


def test_without_a_secret_one_is_made_and_kept() -> None:
    first, second = membership.of(ClusterConfig()), membership.of(ClusterConfig(replicas=3))
    assert first.secret == second.secret
    assert len(first.secret) == 32
    assert second.replicas == 3


def test_a_given_secret_is_the_same_everywhere_and_leaves_no_file(tmp_path: Path) -> None:
    given = ClusterConfig(secret="sixteen letters!")
    assert membership.of(given).secret == membership.of(given).secret
    assert membership.of(given).secret != membership.of(ClusterConfig(secret="sixteen letters?")).secret
    assert list(tmp_path.iterdir()) == []


def test_no_secret_in_a_repr() -> None:
    config = ClusterConfig(secret="sixteen letters!")
    member = membership.of(config)
    assert "sixteen" not in repr(config)
    assert repr(member.secret) not in repr(member)


@pytest.mark.parametrize(
    ("given", "nodes", "wanted"),
    [
        (Membership("", b"", 2), [{"CPU": 4}], ("session_1", 2)),
        (Membership("mine", b"", 5), [{"CPU": 4}, {"CPU": 4}, {"memory": 1}], ("mine", 3)),
        (Membership("mine", b"", 2), [], ("mine", 2)),
    ],
)
def test_a_process_learns_the_rest_from_ray(
    monkeypatch: pytest.MonkeyPatch, given: Membership, nodes: list[dict[str, int]], wanted: tuple[str, int]
) -> None:
    import ray

    class Context:
        def get_session_name(self) -> str:
            return "session_1"

    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": resources} for resources in nodes])
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    found = membership.joined(given)
    assert (found.cluster_id, found.replicas) == wanted
