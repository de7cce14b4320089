"""The name of a full block of tokens: a keyed BLAKE2b-128 chain.

    root  = BLAKE2b(secret, "root",  schema version, model, block size, element type, LoRA id + generation, salt)
    key_0 = BLAKE2b(secret, "block", root   || token ids of block 0)
    key_i = BLAKE2b(secret, "block", key_i-1 || token ids of block i)

A key therefore names the whole prefix up to the end of its block, and two prefixes share keys exactly as long as they
share tokens, model, adapter and salt. Token ids enter as little-endian u32, a fixed width, so no two sequences encode
alike. Every field of the root is written as type, length, value, so a salt cannot pass for an adapter name.

The secret is one per cluster: without it nobody can construct two prompts with one key, or learn from a key what a
prompt said. Nothing depends on the process (no `hash()`, no PYTHONHASHSEED): the same bytes come out everywhere, and
golden vectors in the tests hold them fast.

Limits: 128 bits, so a chance collision needs about 2^64 blocks; the pool still compares token ids on request. Only
FULL blocks have keys; a partial tail has none.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

KEY_BYTES = 16
"""Length of a key."""

SCHEMA_VERSION = 1
"""Raised whenever the meaning of any hashed byte changes."""

_BLOCK_PERSON: Final = b"kvatlas-block"


@dataclass(frozen=True, slots=True)
class KeyRoot:
    """All that must be equal, besides the tokens, for two requests to share KV blocks.

    `model_fingerprint` names the exact weights; `block_tokens` and `kv_dtype` the layout of a block; `lora_id` with
    `lora_generation` the adapter (a reload under the same name is another generation); `salt` isolates tenants.
    """

    model_fingerprint: str
    block_tokens: int
    kv_dtype: str
    lora_id: str = ""
    lora_generation: int = 0
    salt: str = ""

    def encode(self) -> bytes:
        """Returns the typed, length-prefixed encoding: schema version, then each field in order."""
        parts = [_encode_field(SCHEMA_VERSION)]
        parts.extend(_encode_field(getattr(self, field.name)) for field in fields(self))
        return b"".join(parts)


def _encode_field(value: int | str) -> bytes:
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"s" + struct.pack("<Q", len(data)) + data
    return b"i" + struct.pack("<Qq", 8, value)


def encode_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns the ids as little-endian u32, 4 bytes each.

    Raises ValueError when an id is not an integer in 0 .. 2^32-1.
    """
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except (struct.error, TypeError) as error:
        raise ValueError(f"token ids must be integers in 0..2^32-1: {error}") from error


class KeySpace:
    """Makes the keys of one cluster.

    `secret` is the cluster's secret, 16 to 64 bytes. Immutable after construction; safe to use from several threads.
    Raises ValueError when the secret is too short or too long.
    """

    __slots__ = ("_block_hash", "_root_hash", "_secret", "_state")

    def __init__(self, secret: bytes) -> None:
        if not 16 <= len(secret) <= 64:
            raise ValueError(f"the cluster secret must have 16 to 64 bytes, got {len(secret)}")
        # Copying a keyed hash is cheaper than making one: the key block has been compressed already.
        self._root_hash = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=b"kvatlas-root")
        self._block_hash = hashlib.blake2b(key=secret, digest_size=KEY_BYTES, person=_BLOCK_PERSON)
        self._secret = secret
        self._state: npt.NDArray[np.uint64] | None = (
            None  # of `kernels/key_chain.py`, which is loaded when first needed
        )

    def root(self, root: KeyRoot) -> bytes:
        """Returns the 16-byte parent of every first block under `root`."""
        digest = self._root_hash.copy()
        digest.update(root.encode())
        return digest.digest()

    def block_keys(self, root: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
        """Returns the keys of the full blocks of `token_ids`, in order: len(token_ids) // block_tokens of them.

        `root` is what `root()` returned, or the key of the block before. Raises ValueError for a bad block size,
        parent or id.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        _check_parent(root)
        data = encode_tokens(token_ids)
        step = 4 * block_tokens
        start_hash = self._block_hash.copy
        parent = root
        keys = []
        for start in range(0, len(data) - step + 1, step):
            digest = start_hash()
            digest.update(parent + data[start : start + step])
            parent = digest.digest()
            keys.append(parent)
        return keys

    def packed_block_keys(self, root: bytes, token_ids: Sequence[int], block_tokens: int) -> bytes:
        """Returns what `block_keys` does, in one piece, 16 bytes a key: a fifth of its time, in machine code.

        Raises ValueError as `block_keys` does. The first call of a process loads that code.
        """
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
        _check_parent(root)
        from kvpool.kernels import key_chain

        if self._state is None:
            self._state = key_chain.keyed_state(self._secret, _BLOCK_PERSON)
        return key_chain.chained(self._state, root, encode_tokens(token_ids), block_tokens)

    def extend(self, parent_key: bytes, token_ids: Sequence[int]) -> bytes:
        """Returns the key of the block that holds exactly `token_ids` and follows the block named `parent_key`.

        Raises ValueError for a bad parent or id.
        """
        _check_parent(parent_key)
        digest = self._block_hash.copy()
        digest.update(parent_key + encode_tokens(token_ids))
        return digest.digest()


def _check_parent(key: bytes) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a parent key has {KEY_BYTES} bytes, got {len(key)}")
