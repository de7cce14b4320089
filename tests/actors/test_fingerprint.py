"""The fingerprint names the weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.fingerprint import model_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(bytes(300_000))
    return path


def test_a_copy_has_the_same_fingerprint(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert model_fingerprint(model, "exact") == model_fingerprint(tmp_path / "copy", "exact")
    assert len(model_fingerprint(model, "exact")) == 32


def rewrite(model: Path, at: int) -> None:
    data = bytearray((model / "model.safetensors").read_bytes())
    data[at] ^= 1
    (model / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text("{ }"),
        lambda model: rewrite(model, 10),
        lambda model: rewrite(model, 299_990),
        lambda model: (model / "model.safetensors").write_bytes(bytes(300_001)),
        lambda model: (model / "model.safetensors").rename(model / "other.safetensors"),
        lambda model: (model / "more.safetensors").write_bytes(b""),
    ],
)
def test_other_weights_have_another(model: Path, change: Callable[[Path], object]) -> None:
    before = model_fingerprint(model, "exact")
    change(model)
    assert model_fingerprint(model, "exact") != before


def test_modes_differ(model: Path) -> None:
    named = [model_fingerprint(model, "exact"), model_fingerprint(model, "fast")]
    named.append(model_fingerprint(model, "fast", deterministic=True))
    assert len(set(named)) == 3
