"""The Dockerfile, read step by step: there is no Docker here, but most of what can be wrong shows without it."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from cluster import haproxy
from tests.deploy import manifest

DOCKERFILE = manifest.DEPLOY / "Dockerfile"
IGNORED = manifest.ROOT / ".dockerignore"


def steps() -> list[tuple[str, str]]:
    """(instruction, rest) of every step, continued lines joined, without comments."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, rest = line.split(None, 1)
            found.append((word, rest.strip()))
    return found


def of(instruction: str) -> list[str]:
    return [rest for word, rest in steps() if word == instruction]


def copied() -> set[str]:
    """What COPY takes from the repository."""
    return {source for rest in of("COPY") for source in shlex.split(rest)[:-1]}


def variables() -> dict[str, str]:
    """What ENV sets."""
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in shlex.split(rest))


def test_everything_copied_exists() -> None:
    assert copied()
    for source in copied():
        assert (manifest.ROOT / source).exists(), source


def test_the_packages_copied_are_the_ones_installed() -> None:
    project = tomllib.loads((manifest.ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    files = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml", "constraints.txt"}
    assert copied() == packages | files


def test_nothing_else_is_sent_to_the_build() -> None:
    rules = [line for line in IGNORED.read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == copied()
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__"]


def test_python_is_the_one_that_the_versions_were_pinned_for() -> None:
    (base,) = of("FROM")
    match = re.fullmatch(r"python:(\d+)\.(\d+)-slim", base)
    assert match is not None
    project = tomllib.loads((manifest.ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={match[1]}.{match[2]}"
    assert f"Programming Language :: Python :: {match[1]}.{match[2]}" in project["classifiers"]


def test_every_installation_is_pinned() -> None:
    installs = [part for rest in of("RUN") for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 2
    for part in installs:
        assert "-c constraints.txt" in part or "--no-deps" in part


def test_the_requirements_are_those_of_the_project() -> None:
    (command,) = [rest for rest in of("RUN") if "requirements.txt" in rest]
    code = shlex.split(command.split(">")[0])
    done = subprocess.run([sys.executable, *code[1:]], cwd=manifest.ROOT, capture_output=True, text=True, check=True)
    project = tomllib.loads((manifest.ROOT / "pyproject.toml").read_text())["project"]
    assert done.stdout.splitlines() == project["dependencies"]


def test_haproxys_launcher_is_written_where_ray_looks_for_it(tmp_path: Path) -> None:
    (command,) = [rest for rest in of("RUN") if "write_launcher" in rest]
    told = Path(variables()[haproxy.BINARY_PATH])
    code = shlex.split(command.split("&&")[0])[2]
    assert str(told.parent) in code
    moved = code.replace(str(told.parent), str(tmp_path / "bin"))
    subprocess.run([sys.executable, "-c", moved], cwd=manifest.ROOT, check=True)
    done = subprocess.run([tmp_path / "bin" / told.name, "-v"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("HAProxy version")


def test_the_model_is_resolved_by_name(tmp_path: Path) -> None:
    (command,) = [rest for rest in of("RUN") if "resolve_model" in rest]
    script = command.replace("python -c", f"{shlex.quote(sys.executable)} -c")
    run = ["sh", "-euc", script]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(manifest.ROOT)}
    done = subprocess.run(run, env={**env, "MODEL": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(tmp_path)
    assert subprocess.run(run, env={**env, "MODEL": ""}, capture_output=True, check=True).stdout == b""
    assert subprocess.run(run, env={**env, "MODEL": "/not/there"}, capture_output=True, check=False).returncode != 0


def test_it_runs_as_the_user_of_the_manifest() -> None:
    (user,) = of("USER")
    for group in manifest.ray_groups():
        context = group["template"]["spec"]["securityContext"]
        assert user == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert [word for word, _ in steps()][-1] == "CMD"
    assert not [rest for rest in of("CMD") + of("ENTRYPOINT") if "sudo" in rest or "su " in rest]


def test_what_kuberay_calls_is_there() -> None:
    assert any(re.search(r"apt-get install .*\bwget\b", rest) for rest in of("RUN"))


def test_it_exposes_the_ports_of_the_manifest() -> None:
    (exposed,) = of("EXPOSE")
    for group in manifest.worker_groups():
        assert sorted(int(port) for port in exposed.split()) == sorted(
            item["containerPort"] for item in manifest.container(group)["ports"]
        )


def test_no_secret_goes_in() -> None:
    named = [*variables(), *(rest.split("=")[0] for rest in of("ARG"))]
    assert not [
        name for name in named if fnmatch.fnmatch(name.upper(), "*TOKEN*") or "PASSWORD" in name or "SECRET" in name
    ]
    assert not [name for name in named if name.startswith("KVATLAS_") and name != "KVATLAS_CACHE_DIR"]
    assert not re.search(r"https?://", DOCKERFILE.read_text())
    assert not of("ADD")
