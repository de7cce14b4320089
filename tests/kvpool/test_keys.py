from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from dataclasses import astuple, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool import KeyRoot, KeySpace
from kvpool.keys import encode_tokens

GOLDEN = Path(__file__).parent.parent / "golden" / "keys.json"
SECRET = bytes(range(32))
ROOT = KeyRoot("model-a", 4, "bfloat16")
SPACE = KeySpace(SECRET)

roots = st.builds(
    KeyRoot,
    model_fingerprint=st.text(max_size=6),
    block_tokens=st.integers(1, 64),
    kv_dtype=st.sampled_from(["float32", "bfloat16"]),
    lora_id=st.text(max_size=6),
    lora_generation=st.integers(0, 3),
    salt=st.text(max_size=6),
)


def test_golden_vectors() -> None:
    cases = json.loads(GOLDEN.read_text())
    assert len(cases) >= 5
    for case in cases:
        space = KeySpace(bytes.fromhex(case["secret"]))
        root = space.root(KeyRoot(**case["root"]))
        assert root.hex() == case["root_key"]
        keys = space.block_keys(root, case["token_ids"], case["root"]["block_tokens"])
        assert [key.hex() for key in keys] == case["block_keys"]
        packed = space.packed_block_keys(root, case["token_ids"], case["root"]["block_tokens"])
        assert packed.hex() == "".join(case["block_keys"])


def test_definition_written_out() -> None:
    """The chain as the module's first lines define it, with nothing but hashlib."""
    field = b"".join(
        b"s" + struct.pack("<Q", len(value)) + value.encode()
        if isinstance(value, str)
        else b"i" + struct.pack("<Qq", 8, value)
        for value in (1, *astuple(ROOT))
    )
    root = hashlib.blake2b(field, key=SECRET, digest_size=16, person=b"kvatlas-root").digest()
    assert SPACE.root(ROOT) == root
    key = root
    for block in ([1, 2, 3, 2**32 - 1], [5, 6, 7, 8]):
        data = key + struct.pack("<4I", *block)
        key = hashlib.blake2b(data, key=SECRET, digest_size=16, person=b"kvatlas-block").digest()
    assert SPACE.block_keys(root, [1, 2, 3, 2**32 - 1, 5, 6, 7, 8, 9], 4)[-1] == key


def test_t22_same_bytes_in_every_process() -> None:
    program = (
        "import kvpool; space = kvpool.KeySpace(bytes(range(32)));"
        "root = space.root(kvpool.KeyRoot('model-a', 4, 'bfloat16'));"
        "print(space.block_keys(root, list(range(12)), 4)[-1].hex())"
    )
    expected = SPACE.block_keys(SPACE.root(ROOT), list(range(12)), 4)[-1].hex()
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        output = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert output.stdout.strip() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=24), st.lists(st.integers(0, 1), max_size=24), st.integers(1, 5))
def test_keys_agree_exactly_as_long_as_prefixes_do(left: list[int], right: list[int], size: int) -> None:
    root = SPACE.root(ROOT)
    left_keys, right_keys = SPACE.block_keys(root, left, size), SPACE.block_keys(root, right, size)
    assert len(left_keys) == len(left) // size
    for position, (one, other) in enumerate(zip(left_keys, right_keys, strict=False)):
        end = (position + 1) * size
        assert (one == other) == (left[:end] == right[:end])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_extend_is_one_step_of_the_chain(tokens: list[int]) -> None:
    root = SPACE.root(ROOT)
    keys = SPACE.block_keys(root, tokens, 3)
    assert keys[0] == SPACE.extend(root, tokens[:3])
    assert keys[1] == SPACE.extend(keys[0], tokens[3:])
    assert SPACE.block_keys(keys[0], tokens[3:], 3) == keys[1:]


@settings(max_examples=50, deadline=None)
@given(roots, roots)
def test_different_roots_never_encode_alike(one: KeyRoot, other: KeyRoot) -> None:
    assert (one == other) == (one.encode() == other.encode()) == (SPACE.root(one) == SPACE.root(other))


def test_t19_salt_and_adapter_names_cannot_be_confused() -> None:
    assert SPACE.root(replace(ROOT, salt="x")) != SPACE.root(replace(ROOT, lora_id="x"))
    assert SPACE.root(replace(ROOT, salt="xy")) != SPACE.root(replace(ROOT, lora_id="x", salt="y"))


def test_t21_reloaded_adapter_has_other_keys() -> None:
    adapter = replace(ROOT, lora_id="poet", lora_generation=1)
    assert SPACE.root(adapter) != SPACE.root(replace(adapter, lora_generation=2))


def test_every_field_of_the_root_matters() -> None:
    changed = [
        replace(ROOT, **{field.name: getattr(ROOT, field.name) + ("x" if field.type == "str" else 1)})
        for field in fields(ROOT)
    ]
    assert len({SPACE.root(root) for root in (ROOT, *changed)}) == 1 + len(fields(ROOT))


def test_secret_matters_and_does_not_show() -> None:
    assert KeySpace(bytes(32)).root(ROOT) != SPACE.root(ROOT)
    assert SECRET.hex() not in repr(SPACE)


@pytest.mark.parametrize("length", [0, 15, 65])
def test_secret_length(length: int) -> None:
    with pytest.raises(ValueError, match=f"16 to 64 bytes, got {length}"):
        KeySpace(bytes(length))


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"]])
def test_bad_token_ids(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"token ids must be integers in 0\.\.2\^32-1"):
        encode_tokens(bad)


def test_bad_parent_and_block_size() -> None:
    with pytest.raises(ValueError, match="a parent key has 16 bytes, got 3"):
        SPACE.extend(b"abc", [1])
    with pytest.raises(ValueError, match="a parent key has 16 bytes"):
        SPACE.block_keys(b"", [1], 1)
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        SPACE.block_keys(bytes(16), [1], 0)


def test_t24_only_full_blocks_have_keys() -> None:
    root = SPACE.root(ROOT)
    assert [len(SPACE.block_keys(root, [0] * length, 4)) for length in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]
    assert len(SPACE.block_keys(root, [0] * 3, 1)) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=80), st.integers(1, 40), st.binary(min_size=16, max_size=64))
def test_packed_keys_are_the_same_keys(tokens: list[int], size: int, secret: bytes) -> None:
    space = KeySpace(secret)
    root = space.root(ROOT)
    assert space.packed_block_keys(root, tokens, size) == b"".join(space.block_keys(root, tokens, size))


def test_packed_keys_refuse_what_keys_refuse() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        SPACE.packed_block_keys(b"", [1], 1)
    with pytest.raises(ValueError, match="block_tokens"):
        SPACE.packed_block_keys(bytes(16), [1], 0)
    for wrong in ([-1], [1 << 32], [1.5], ["1"], [None]):
        with pytest.raises(ValueError, match="token ids"):
            SPACE.packed_block_keys(bytes(16), wrong, 1)  # type: ignore[arg-type]


def test_naming_blocks_one_by_one_loads_no_machine_code() -> None:
    program = (
        "import sys, kvpool; space = kvpool.KeySpace(bytes(32));"
        "space.block_keys(bytes(16), [1, 2], 1); print('numba' in sys.modules);"
        "space.packed_block_keys(bytes(16), [1, 2], 1); print('numba' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == ["False", "True"]
