"""What one block of KV cache holds, in tokens and in bytes.

A block is ONE contiguous byte range with the keys and values of `block_tokens` tokens in every layer, head-major
inside: `[layers, 2, kv_heads, block_tokens, head_dim]`. So a copy-on-write, a move between tiers and a guard check
are one memory copy each, whatever the model.

Limits: all layers have the same number of KV heads and the same head size, and K and V have one element type.
"""

from __future__ import annotations

from dataclasses import dataclass

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element, by the name of its type."""


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """The shape of every block of a pool.

    `layers`, `kv_heads`, `head_dim` and `block_tokens` are counts (>= 1); `dtype` is "float32", "bfloat16" or
    "float16". Raises ValueError when one of them is out of its range.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {self.dtype!r}")

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block in elements: [layers, 2, kv_heads, block_tokens, head_dim]."""
        return (self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)

    def describe(self) -> str:
        """Returns one line for logs and error messages."""
        return (
            f"{self.layers} layers x {self.kv_heads} KV heads x {self.head_dim} {self.dtype}, "
            f"{self.block_tokens} tokens = {self.block_bytes} bytes a block"
        )
