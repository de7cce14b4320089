"""The manifests agree with the code, with each other and with themselves."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from ray.serve import Application

from cluster import haproxy
from cluster.ray_cluster import SETTINGS
from kvpool import BlockGeometry
from kvpool.layout import plan
from tests.deploy import manifest
from tests.deploy.manifest import quantity

# The demo model, SmolLM2-135M-Instruct.
GEOMETRY = BlockGeometry(layers=30, kv_heads=3, head_dim=64, block_tokens=16, dtype="bfloat16")
README = (manifest.DEPLOY / "README.md").read_text()


def pinned(package: str) -> str:
    """The version of `package` in constraints.txt."""
    (found,) = re.findall(rf"^{package}==(\S+)$", (manifest.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def cluster_spec() -> dict[str, Any]:
    spec: dict[str, Any] = manifest.ray_service()["spec"]["rayClusterConfig"]
    return spec


def images() -> list[str]:
    return [item["image"] for spec in manifest.pod_specs() for item in spec["containers"]]


def test_ray_is_the_pinned_one() -> None:
    assert cluster_spec()["rayVersion"] == pinned("ray")


def test_the_image_is_this_version() -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (manifest.ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert {manifest.container(group)["image"] for group in manifest.ray_groups()} == {f"kvatlas:{version}"}
    assert f"-t kvatlas:{version}" in README


def test_images_have_a_tag_and_no_registry() -> None:
    for image in images():
        assert re.fullmatch(r"[a-z-]+:[0-9][\w.-]*", image), image


def test_head_and_workers_see_the_same_environment() -> None:
    head, *workers = [manifest.container(group)["env"] for group in manifest.ray_groups()]
    assert workers
    assert all(env == head for env in workers)


def test_rays_settings_are_those_of_kvatlas_serve() -> None:
    env = manifest.environment(manifest.container(manifest.head_group())["env"])
    assert {name: value for name, value in env.items() if name.startswith(("RAY_", "MALLOC_"))} == SETTINGS
    assert haproxy.BINARY_PATH not in env  # the image says it


def test_a_variable_that_is_put_into_another_stands_above_it() -> None:
    entries = manifest.container(manifest.head_group())["env"]
    assert "$(" not in "".join(manifest.environment(entries).values())
    assert "$(" in "".join(manifest.environment(list(reversed(entries))).values())


def test_service_variables_of_kubernetes_stay_out() -> None:
    # They start with the names of Services, and so with ours: unknown options, with which no pod would start.
    services = [item["metadata"]["name"] for item in manifest.of_kind("Service")]
    assert any(name.startswith("kvatlas") for name in services)
    assert all(spec["enableServiceLinks"] is False for spec in manifest.pod_specs())


@pytest.mark.parametrize("group", manifest.ray_groups(), ids=lambda group: group.get("groupName", "head"))
def test_shared_memory_holds_the_object_store_and_the_pools(group: dict[str, Any]) -> None:
    args = manifest.application()["args"]
    assert args["model.model"] == "demo", "another model: another GEOMETRY"
    assert args.get("engine.mode", "fast") == "fast"
    pool_bytes = plan(GEOMETRY, -(-args["pool.tokens"] // GEOMETRY.block_tokens)).file_bytes
    replicas = min(args["cluster.replicas"], int(group["rayStartParams"]["num-cpus"]))
    need = int(group["rayStartParams"]["object-store-memory"]) + replicas * pool_bytes
    spec, container = group["template"]["spec"], manifest.container(group)
    (mount,) = [item for item in container["volumeMounts"] if item["mountPath"] == "/dev/shm"]
    (volume,) = [item for item in spec["volumes"] if item["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    size = quantity(volume["emptyDir"]["sizeLimit"])
    assert need <= size
    assert need >= size / 2, "far too large: a pod's memory that nobody uses"
    assert size < quantity(container["resources"]["limits"]["memory"]) / 2  # the processes need memory too


def test_the_sum_in_the_comment_is_right() -> None:
    text = (manifest.DEPLOY / "rayservice.yaml").read_text()
    (line,) = re.findall(r"(\d+) MiB \+ (\d+) \* ([\d,]+) \* ([\d,]+) B \* ([\d.]+) = ([\d.]+) GiB", text)
    store, replicas, tokens, token_bytes, control, total = (float(part.replace(",", "")) for part in line)
    (group,) = manifest.worker_groups()
    assert store * 2**20 == int(group["rayStartParams"]["object-store-memory"])
    assert replicas == int(group["rayStartParams"]["num-cpus"])
    assert tokens == manifest.application()["args"]["pool.tokens"]
    assert token_bytes == GEOMETRY.token_bytes
    exact = plan(GEOMETRY, int(tokens) // GEOMETRY.block_tokens).file_bytes
    assert exact <= tokens * token_bytes * control
    assert total == round((store * 2**20 + replicas * tokens * token_bytes * control) / 2**30, 1)


def test_the_workers_have_room_for_the_replicas() -> None:
    assert manifest.head_group()["rayStartParams"]["num-cpus"] == "0"
    logical, engines = 0, 0
    for group in manifest.worker_groups():
        num_cpus = int(group["rayStartParams"]["num-cpus"])
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        logical += group["replicas"] * num_cpus
        engines += num_cpus
        args = manifest.application()["args"]
        assert quantity(manifest.container(group)["resources"]["requests"]["cpu"]) >= num_cpus * args["engine.threads"]
    assert logical >= manifest.application()["args"]["cluster.replicas"] + 1  # the ingress takes part of one


def test_ports_are_the_ones_that_ray_listens_on() -> None:
    serve_port = manifest.serve_config()["http_options"]["port"]
    for group in manifest.ray_groups():
        ports = {item["name"]: item["containerPort"] for item in manifest.container(group)["ports"]}
        assert ports["serve"] == serve_port
        assert ports["metrics"] == int(group["rayStartParams"]["metrics-export-port"])


def test_the_readme_says_how_much_room_it_takes() -> None:
    def asked(spec: dict[str, Any], name: str) -> float:
        return sum(quantity(item["resources"]["requests"][name]) for item in spec["containers"])

    pods = [manifest.head_group()["template"]["spec"]]
    pods += [group["template"]["spec"] for group in manifest.worker_groups() for _ in range(group["replicas"])]
    pods += [document["spec"]["template"]["spec"] for document in manifest.of_kind("Deployment")]
    (cores, gib) = re.findall(r"(\d+) cores and (\d+) GiB", README)[0]
    assert int(cores) == math.ceil(sum(asked(spec, "cpu") for spec in pods))
    assert int(gib) == math.ceil(sum(asked(spec, "memory") for spec in pods) / 2**30)


def test_pods_run_without_privileges() -> None:
    for spec in manifest.pod_specs():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        for item in spec["containers"]:
            assert item["securityContext"]["allowPrivilegeEscalation"] is False
            assert item["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert item["resources"]["requests"].keys() == {"cpu", "memory"}
            assert item["resources"]["limits"]["memory"] == item["resources"]["requests"]["memory"]


def test_running_answers_have_the_time_that_replicas_give_them(serve_app: Application) -> None:
    ingress: Any = serve_app._bound_deployment
    engine = ingress.init_args[1]._bound_deployment
    longest = engine._deployment_config.graceful_shutdown_timeout_s
    assert longest > 0
    assert manifest.ray_service()["spec"]["rayClusterDeletionDelaySeconds"] >= longest
    for group in manifest.worker_groups():
        sleep, seconds = manifest.container(group)["lifecycle"]["preStop"]["exec"]["command"]
        assert sleep == "sleep"
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > int(seconds) >= longest


def test_two_clusters_never_share_state() -> None:
    spec = manifest.ray_service()["spec"]
    assert spec["upgradeStrategy"] == {"type": "NewCluster"}
    assert "gcsFaultToleranceOptions" not in spec["rayClusterConfig"]
    assert "cluster.id" not in manifest.application()["args"]
    assert all(entry["name"] != "KVATLAS_CLUSTER__ID" for entry in manifest.container(manifest.head_group())["env"])


def test_ray_is_guarded_by_a_token() -> None:
    assert cluster_spec()["authOptions"] == {"mode": "token"}


def test_the_directory_is_where_redis_is() -> None:
    (service,) = manifest.of_kind("Service")
    (deployment,) = manifest.of_kind("Deployment")
    (port,) = service["spec"]["ports"]
    url = manifest.environment(manifest.container(manifest.head_group())["env"])["KVATLAS_DIRECTORY__REDIS_URL"]
    assert url.endswith(f"@{service['metadata']['name']}:{port['port']}/0")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (redis,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {item["name"]: item["containerPort"] for item in redis["ports"]} == {port["targetPort"]: port["port"]}
    # The Service must not reach pods of the RayService, which have labels alike.
    for group in manifest.ray_groups():
        assert not service["spec"]["selector"].items() <= group["template"]["metadata"]["labels"].items()


def test_secrets_are_only_named() -> None:
    assert manifest.of_kind("Secret") == []
    made = set(re.findall(r"--from-file=([\w-]+)=", README))
    assert {key for _, key in manifest.secret_refs()} == made
    assert {name for name, _ in manifest.secret_refs()} == set(
        re.findall(r"kubectl create secret generic (\S+)", README)
    )
    for spec in manifest.pod_specs():
        for item in spec["containers"]:
            for entry in item["env"]:
                if re.search("password|secret|key|token", entry["name"], re.IGNORECASE):
                    assert "value" not in entry, entry["name"]
                elif "://" in entry.get("value", ""):
                    assert re.search(r":\$\(\w+\)@", entry["value"]), entry["name"]
