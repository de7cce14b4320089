"""`serve deploy` of the manifest's Serve config: an operator's way to run kvatlas, on a local Ray cluster of its own.

The Serve config and the environment of the pods are those of `deploy/rayservice.yaml`, but for what a test machine needs: a free
port, a tiny model with a small pool, another address of Redis. One cluster for all tests here; each begins with the manifest's
config deployed, so their order does not matter.
"""

from __future__ import annotations

import copy
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from cluster import haproxy
from cluster.app import APP_NAME
from cluster.embedded_redis import EmbeddedRedis
from tests.deploy import manifest
from tests.raycluster.head_process import Head, PortSource, wait_until
from tests.raycluster.server_process import ROOT, clean_environment, regions

pytestmark = [pytest.mark.ray, pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(400)]

REPLICAS = manifest.application()["args"]["cluster.replicas"]
PROMPT = "A long prompt that several requests share, word for word. " * 16


class Operated:
    """A cluster with an application, as its operator and its clients see it."""

    def __init__(self, head: Head, redis: EmbeddedRedis, config: dict[str, Any], hidden: dict[str, str]) -> None:
        """`config` is the Serve config of the manifest, made fit for this machine; `hidden` has what nobody may see, by name."""
        self.head = head
        self.redis = redis
        self.config = config
        self.hidden = hidden
        self.url = f"http://127.0.0.1:{config['http_options']['port']}"
        self.seen: set[str] = set()
        """Ids of all engine replicas that have served."""
        self._deployed: dict[str, Any] = {}

    def with_args(self, **args: object) -> dict[str, Any]:
        """The config with other arguments of the application; `__` in a name stands for the point."""
        config = copy.deepcopy(self.config)
        config["applications"][0]["args"] |= {name.replace("__", "."): value for name, value in args.items()}
        return config

    def deploy(self, config: dict[str, Any]) -> None:
        """Run `serve deploy`; returns as soon as Serve has taken the config."""
        file = self.head.directory / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        done = self.head.serve("deploy", str(file))
        assert done.returncode == 0, done.stdout + done.stderr
        self._deployed = config

    def deploy_manifest(self) -> None:
        """Make sure that the manifest's config is what runs."""
        if self._deployed != self.config:
            self.deploy(self.config)
            self.wait_running()
        wait_until(self.is_ready, 120, lambda: self.get("/health/ready").text)
        self.seen |= self.replicas().keys()

    def wait_running(self) -> None:
        """Wait until Serve says that the application runs as configured."""
        wait_until(lambda: self.status() == "RUNNING", 200, self.head.applications)

    def status(self) -> str:
        return str(self.head.application(APP_NAME)["status"])

    def get(self, path: str) -> httpx.Response:
        key = {"authorization": f"Bearer {self.hidden['admin key']}"}
        return httpx.get(self.url + path, headers=key, timeout=60)

    def is_ready(self) -> bool:
        try:
            answer = self.get("/health/ready")
        except httpx.TransportError:  # HAProxy begins to listen
            return False
        wanted = {"status": "ok", "replicas": REPLICAS, "directory": "live"}
        return answer.status_code == 200 and answer.json() == wanted

    def state(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("/debug/state").raise_for_status().json()
        return body

    def replicas(self) -> dict[str, int]:
        """Process ids of the engine replicas, by id."""
        return {one["replica_id"]: one["pid"] for one in self.state()["replicas"]}

    def actors(self) -> set[str]:
        """Ids of all replicas that Serve has, ingress included."""
        deployments = self.head.application(APP_NAME)["deployments"].values()
        return {replica["replica_id"] for one in deployments for replica in one["replicas"]}

    def ask(self, prompt: str) -> httpx.Response:
        """The answer to a request, which must be no failure."""
        model = Path(self.config["applications"][0]["args"]["model.model"]).name
        body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    def check_directory(self) -> list[dict[str, Any]]:
        """The pools that `kvatlas directory check` has compared, without a difference."""
        command = [sys.executable, "-m", "cluster.cli.main", "directory", "check", "--json", "--url", self.url]
        env = {"KVATLAS_HTTP__ADMIN_KEY": self.hidden["admin key"], "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=90, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        pools: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["pools"]
        return pools

    def files_with(self, words: str) -> list[Path]:
        """The files of Ray and Serve that hold `words`."""
        return [file for file in self.head.files() if words.encode() in file.read_bytes()]

    def leaks(self) -> list[str]:
        """Where one of the hidden values can be read: the dashboard, `serve status`, process lists, files of Ray and Serve."""
        shown = {"REST": self.head.applications(), "serve status": self.head.serve("status").stdout}
        assert all(APP_NAME in text for text in shown.values()), shown
        shown |= {f"process {pid}": line for pid, line in self.head.processes().items()}
        found = [
            f"{name} in {place}" for name, value in self.hidden.items() for place in shown if value in shown[place]
        ]
        return found + [f"{name} in {file}" for name, value in self.hidden.items() for file in self.files_with(value)]


@pytest.fixture(scope="module")
def cluster(tiny_model_dir: Path) -> Iterator[Operated]:
    """The cluster, with nothing deployed. Ends with the module, and must leave neither processes nor regions."""
    # Not pytest's own directory: its path is too long for Ray's sockets.
    with (
        tempfile.TemporaryDirectory(prefix="kva-", dir="/tmp") as name,
        EmbeddedRedis(Path(name), "127.0.0.1") as redis,
    ):
        source = PortSource(random.Random())
        hidden = _hidden(redis)
        config = manifest.serve_config()
        config["http_options"]["port"] = source.take()
        args = {"model.model": str(tiny_model_dir), "pool.tokens": 4096, "engine.threads": 1}
        config["applications"][0]["args"] |= args
        pods = manifest.head_group(), *(group for group in manifest.worker_groups() for _ in range(group["replicas"]))
        head = Head(
            Path(name),
            _environment(Path(name), redis, hidden),
            source,
            num_cpus=sum(int(pod["rayStartParams"]["num-cpus"]) for pod in pods),
            object_store_memory=manifest.head_group()["rayStartParams"]["object-store-memory"],
        )
        operated = Operated(head, redis, config, hidden)
        try:
            head.start()
            yield operated
        finally:
            left = head.close()
        assert not left
        assert not regions() & {f"kvatlas-replica-{replica}" for replica in operated.seen}


def _hidden(redis: EmbeddedRedis) -> dict[str, str]:
    password = urlsplit(redis.url).password
    assert password
    made = {name: secrets.token_hex(24) for name in ("cluster secret", "admin key", "Ray token")}
    return made | {"Redis password": password}


def _environment(directory: Path, redis: EmbeddedRedis, hidden: dict[str, str]) -> dict[str, str]:
    """What the pods of the manifest see: their image's launcher of HAProxy, KubeRay's token, the values of the Secret."""
    binary = haproxy.bundled_binary()
    assert binary is not None
    ours = clean_environment(directory)
    ours |= {haproxy.BINARY_PATH: str(haproxy.write_launcher(binary, directory / "bin"))}
    ours |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": hidden["Ray token"]}
    keys = {"redis-password": "Redis password", "cluster-secret": "cluster secret", "admin-key": "admin key"}
    entries = copy.deepcopy(manifest.container(manifest.head_group())["env"])
    for entry in entries:
        if "valueFrom" in entry:
            entry["value"] = hidden[keys[entry["valueFrom"]["secretKeyRef"]["key"]]]
    pod = manifest.environment(entries)
    in_cluster = urlsplit(pod["KVATLAS_DIRECTORY__REDIS_URL"])
    address = f"{in_cluster.hostname}:{in_cluster.port}"
    pod["KVATLAS_DIRECTORY__REDIS_URL"] = in_cluster.geturl().replace(address, f"127.0.0.1:{urlsplit(redis.url).port}")
    return ours | pod


@pytest.fixture
def deployed(cluster: Operated) -> Operated:
    """The cluster with the manifest's config deployed, and ready."""
    cluster.deploy_manifest()
    return cluster


def cached_tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_request_is_served_through_the_router(deployed: Operated) -> None:
    prompt = f"{random.random()} {PROMPT}"
    first, again = deployed.ask(prompt), deployed.ask(prompt)
    assert cached_tokens(first) == 0
    assert first.headers["x-kvatlas-route"].startswith("policy=cost; outcome=no_prefix")
    assert cached_tokens(again) > 0
    assert again.headers["x-kvatlas-replica"] == first.headers["x-kvatlas-replica"]
    assert again.headers["x-kvatlas-route"].startswith("policy=cost; outcome=prefix_hit")

    directory = deployed.state()["routing"]["directory"]
    assert directory["state"] == "live"
    assert {name for pool in directory["pools"] for name in pool["replica_ids"]} == deployed.replicas().keys()
    assert len(directory["pools"]) == REPLICAS
    checked = {name for pool in deployed.check_directory() for name in pool["replica_ids"]}
    assert checked == deployed.replicas().keys()


def test_the_same_config_again_restarts_nothing(deployed: Operated) -> None:
    home = deployed.ask(PROMPT).headers["x-kvatlas-replica"]
    before = deployed.actors(), deployed.replicas()
    taken = deployed.head.application(APP_NAME)["last_deployed_time_s"]
    deployed.deploy(deployed.config)
    assert deployed.head.application(APP_NAME)["last_deployed_time_s"] > taken
    deployed.wait_running()
    assert (deployed.actors(), deployed.replicas()) == before
    again = deployed.ask(PROMPT)
    assert again.headers["x-kvatlas-replica"] == home
    assert cached_tokens(again) > 0


def test_a_wrong_argument_is_told_and_serving_goes_on(deployed: Operated) -> None:
    before = deployed.replicas()
    deployed.deploy(deployed.with_args(pool__token=4096))
    wait_until(lambda: deployed.status() == "DEPLOY_FAILED", 100, deployed.head.applications)
    assert "did you mean pool.tokens?" in deployed.head.application(APP_NAME)["message"]
    deployed.ask(PROMPT)
    assert deployed.replicas() == before
    deployed.deploy(deployed.config)
    deployed.wait_running()
    assert deployed.replicas() == before


def test_nobody_sees_a_secret_even_while_redis_is_away(deployed: Operated) -> None:
    deployed.ask(PROMPT)
    restarts, pid = deployed.redis.restarts, deployed.redis.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: deployed.redis.restarts > restarts and deployed.is_ready(), 60, deployed.state)
    address = f"127.0.0.1:{urlsplit(deployed.redis.url).port}"
    wait_until(lambda: deployed.files_with(address) != [], 20, lambda: "nobody has written of the loss of Redis")
    assert deployed.leaks() == []


def test_another_policy_is_applied_in_the_same_cluster_without_a_failed_request(deployed: Operated) -> None:
    before = deployed.replicas()
    deployed.deploy(deployed.with_args(router__policy="round_robin"))
    while deployed.status() != "RUNNING":
        deployed.ask(f"{random.random()} {PROMPT}")
    deployed.seen |= deployed.replicas().keys()
    wait_until(deployed.is_ready, 60, deployed.state)
    answers = [deployed.ask(PROMPT) for _ in range(2 * REPLICAS)]
    assert all(answer.headers["x-kvatlas-route"].startswith("policy=round_robin;") for answer in answers)
    assert {answer.headers["x-kvatlas-replica"] for answer in answers} == deployed.replicas().keys()
    assert not before.keys() & deployed.replicas().keys(), "Serve replaces what has other arguments"

    def routed() -> set[str]:
        pools = deployed.state()["routing"]["directory"]["pools"]
        return {name for pool in pools for name in pool["replica_ids"]}

    wait_until(lambda: routed() == deployed.replicas().keys(), 20, routed)  # those of before have left
    assert len(deployed.check_directory()) == REPLICAS
