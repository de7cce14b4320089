"""What makes processes one cluster: the secret of the block keys, and the name in a directory that several clusters share.

The secret is chosen where the application is built and travels to ingress and replicas with their arguments, so all of them
name a block alike, on whatever machine they run. The name is the id of the Ray session unless given, so that two clusters
that run side by side, as during an upgrade, never mix; each process reads it from Ray when it starts.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from actors.config import Membership
from actors.loader import cache_root
from cluster.config import ClusterConfig
from kvpool import load_or_create


def of(config: ClusterConfig) -> Membership:
    """The membership that `config` tells of; the id stays empty until `joined`. Raises `SecretFileError`."""
    return Membership(config.id, _secret(config), config.replicas)


def joined(membership: Membership) -> Membership:
    """`membership` as seen by a process of the Ray cluster: with its id, and with the replicas that share its machine."""
    import ray

    machines = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
    return replace(
        membership,
        cluster_id=membership.cluster_id or ray.get_runtime_context().get_session_name(),
        replicas=-(-membership.replicas // max(1, machines)),
    )


def _secret(config: ClusterConfig) -> bytes:
    if config.secret:
        return blake2b(config.secret.encode(), digest_size=32, person=b"kvatlas-secret").digest()
    return load_or_create(cache_root() / "cluster.key")
