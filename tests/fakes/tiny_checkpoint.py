"""A tiny model with a byte-level tokenizer, saved as a directory that can be served in seconds."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fakes.tiny_models import tiny_model

_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<pad>", "<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then a few special tokens; `<|end|>` ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def save_tiny_checkpoint(path: Path, *, context_tokens: int = 512) -> Path:
    """Write config, weights and tokenizer to `path` and return it. The model speaks random bytes."""
    tokenizer = byte_tokenizer()
    model = tiny_model(
        "llama",
        {},
        vocab_size=len(tokenizer),
        max_position_embeddings=context_tokens,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
