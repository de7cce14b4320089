"""Names of models: told apart by their looks, and refused with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import demo_model, loader
from actors.errors import ModelNotFound
from actors.loader import cache_root, resolve_model
from actors.progress import SilentProgress


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The least that counts as a model."""
    path = tmp_path / "tiny"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise AssertionError("a path must not be looked up on the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)


def test_a_directory_is_used_as_it_is(model_dir: Path) -> None:
    files = resolve_model(str(model_dir), SilentProgress())
    assert (files.path, files.name, files.source) == (model_dir, "tiny", "local")


def test_a_directory_named_like_a_hub_id_is_a_directory(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, no_hub: None
) -> None:
    monkeypatch.chdir(model_dir.parent)
    assert resolve_model("tiny", SilentProgress()).source == "local"
    assert resolve_model("./tiny", SilentProgress()).path == model_dir


def test_pickled_weights_count(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    assert resolve_model(str(model_dir), SilentProgress()).source == "local"


@pytest.mark.parametrize("name", ["/nope", "./nope", "../nope", "~/nope", ".", "/"])
def test_a_wrong_path_is_answered_as_a_path(
    name: str, no_hub: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=r"^Model path "):
        resolve_model(name, SilentProgress())


def test_what_a_directory_lacks_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"no weights"):
        resolve_model(str(model_dir), SilentProgress())
    (model_dir / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve_model(str(model_dir), SilentProgress())
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve_model(str(model_dir / "x"), SilentProgress())
    (model_dir / "x").touch()
    with pytest.raises(ModelNotFound, match="is a file"):
        resolve_model(str(model_dir / "x"), SilentProgress())


@pytest.mark.parametrize("name", ["", " ", "a//b", "what is this?"])
def test_what_is_no_name_at_all(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"demo.*directory.*hub id"):
        resolve_model(name, SilentProgress())


def test_an_unreachable_hub_is_one_sentence_with_three_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto host\n")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"org/m .*no route.*`demo`.*directory.*hub id") as caught:
        resolve_model("org/m", SilentProgress())
    assert "\n" not in str(caught.value)


def test_a_hub_model_is_fetched_without_other_formats(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def fetch(_: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if "*.bin" in allow_patterns:
            (model_dir / "pytorch_model.bin").write_bytes(b"12345")
        return str(model_dir)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    progress = SilentProgress()
    assert resolve_model("org/m", progress).name == "org/m"
    assert len(asked) == 1
    assert "*.bin" not in asked[0]
    (model_dir / "model.safetensors").unlink()
    assert resolve_model("org/m", progress).source == "hub"
    assert "*.bin" in asked[-1]
    assert list(progress.seconds) == ["download"]


def test_the_demo_lives_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_CACHE_DIR", str(tmp_path))
    ready = tmp_path / "models" / f"{demo_model.DEMO_MODEL_NAME}-fp32-v{demo_model.CONVERSION}"
    ready.mkdir(parents=True)
    assert resolve_model("demo", SilentProgress()) == loader.ModelFiles(ready, "SmolLM2-135M-Instruct", "demo")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_CACHE_DIR", "~/c")
    assert cache_root() == Path.home() / "c"
    monkeypatch.delenv("KVATLAS_CACHE_DIR")
    assert cache_root() == Path.home() / ".cache" / "kvatlas"
