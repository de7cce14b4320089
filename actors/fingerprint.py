"""Which exact weights a replica computes with, as 32 bytes: part of every block key and of the region's header.

Hashing all weights of a large model takes longer than loading it, so of every weight file the name, the size, the first
and the last 64 KiB enter (the first holds a safetensors file's whole index), together with the config and the engine's
mode. Limit: weights patched in place, same size, outside those ranges, look the same.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from actors.config import Mode
from actors.loader import weight_files

_EDGE_BYTES = 64 * 1024


def model_fingerprint(path: Path, mode: Mode, *, deterministic: bool = False) -> bytes:
    """32 bytes that name the model in directory `path`, run in `mode`. Raises OSError for an unreadable file.

    What a deterministic replica computes is no other's: K and V differ in their last bits.
    """
    digest = blake2b(digest_size=32, person=b"kvatlas-model")

    def add(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    add(f"{mode} deterministic".encode() if deterministic else mode.encode())
    add((path / "config.json").read_bytes())
    for file in weight_files(path):
        size = file.stat().st_size
        add(file.name.encode())
        add(size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            add(stream.read(_EDGE_BYTES))
            stream.seek(max(0, size - _EDGE_BYTES), os.SEEK_SET)
            add(stream.read(_EDGE_BYTES))
    return digest.digest()
