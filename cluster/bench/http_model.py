"""A model directory without a model: a tokenizer with one token a byte, its chat template, and a configuration.

It is all that an ingress reads. No weights: what answers is `http_engine.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from actors.loader import ModelFiles

NAME = "bench"
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def write(path: Path) -> ModelFiles:
    """Writes the files into the directory `path`, which exists."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE, "eos_token": "<|end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    config = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelFiles(path, NAME, "local")
