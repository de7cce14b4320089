"""The application that the manifest stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ray.serve import Application

from actors.loader import ModelFiles
from cluster.app import build
from cluster.config_sources import ENV_PREFIX, load
from tests.deploy import manifest

FILES = ModelFiles(Path("/a/model"), "a-model", "local")


@pytest.fixture
def pod_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process has the variables of the Ray pods, and no others of ours. Returns them."""
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)
    seen = manifest.environment(manifest.container(manifest.head_group())["env"])
    for name, value in seen.items():
        monkeypatch.setenv(name, value)
    return seen


@pytest.fixture
def serve_app(pod_environment: dict[str, str]) -> Application:
    """What the builder makes of the manifest's arguments and environment, with a model that is nowhere."""
    flags = {path: (path, value) for path, value in manifest.application()["args"].items()}
    return build(load(None, pod_environment, flags).config, FILES)
