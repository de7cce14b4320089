"""From a model name to a directory that `from_pretrained` can read.

Three kinds of name, told apart by their looks and never by trying one after the other: `demo`; a path (it starts with
`/`, `.` or `~`, or exists as a directory); anything else is a hub id. So a mistyped path is answered as a missing path
at once, and is never sent to a server as the name of a repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from actors.demo_model import DEMO_MODEL_NAME, demo_model_dir
from actors.errors import ModelNotFound
from actors.progress import Progress

Source = Literal["demo", "local", "hub"]

WAYS = "give `demo`, a directory with config.json and weights, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct"

# Weights, configuration, tokenizer and chat template; not the other formats that hub repositories carry beside them.
HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
WEIGHTS = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. `name` is what clients call it unless the configuration says otherwise."""

    path: Path
    name: str
    source: Source


def cache_root() -> Path:
    """Where converted models live: `$KVATLAS_CACHE_DIR`, else `~/.cache/kvatlas`."""
    configured = os.environ.get("KVATLAS_CACHE_DIR", "")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "kvatlas"


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a model directory, by name."""
    return sorted(file for pattern in WEIGHTS for file in path.glob(pattern))


def resolve_model(name: str, progress: Progress) -> ModelFiles:
    """Find the model `name`, downloading or converting it first where needed.

    Reports phases `download` and `convert` to `progress`. Raises `ModelNotFound` with the fix in its message.
    """
    if name == "demo":
        return ModelFiles(demo_model_dir(cache_root() / "models", progress), DEMO_MODEL_NAME, "demo")
    if not name.strip():
        raise ModelNotFound(f"No model is named: {WAYS}.")
    if name.startswith(("/", ".", "~")) or Path(name).is_dir():
        return _local(Path(name).expanduser())
    return _hub(name, progress)


def _local(path: Path) -> ModelFiles:
    if not path.is_dir():
        state = "is a file, not a directory" if path.exists() else "does not exist"
        raise ModelNotFound(f"Model path {path} {state}: {WAYS}.")
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"Model path {path} has no config.json: point to the directory that save_pretrained wrote.")
    if not weight_files(path):
        raise ModelNotFound(
            f"Model path {path} has no weights (*.safetensors or *.bin): copy them next to config.json."
        )
    resolved = path.resolve()
    return ModelFiles(resolved, resolved.name, "local")


def _hub(name: str, progress: Progress) -> ModelFiles:
    """Fetch a hub repository into the hub's own cache; a complete copy there is used without a connection."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    with progress.phase("download", name) as phase:
        try:
            path = Path(snapshot_download(name, allow_patterns=HUB_PATTERNS))
            if not any(path.glob("*.safetensors")):  # older repositories have only the pickled format
                path = Path(snapshot_download(name, allow_patterns=[*HUB_PATTERNS, "*.bin", "*.bin.index.json"]))
        except HFValidationError:
            raise ModelNotFound(f"{name!r} is neither a path that exists nor a hub id: {WAYS}.") from None
        except Exception as error:  # every transport and status error of the hub client ends here, as one sentence
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelNotFound(f"Hub model {name} cannot be fetched ({reason}): {WAYS}.") from error
        phase.done_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    found = _local(path)
    return ModelFiles(found.path, name, "hub")
