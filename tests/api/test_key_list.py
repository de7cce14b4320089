"""Lists of API keys: what is read, what is refused, and that neither keys nor digests are ever shown."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from cluster.api.key_list import MOST_KEYS, KeyListError, digest_of, parse_keys, read_keys, salt_of

ALICE = "alice-0123456789-key"
BOB = "bob-0123456789-key:with:colons"


def test_both_forms_and_every_separator() -> None:
    keys = parse_keys(f"\n alice:{ALICE} bob:{BOB}\n\ncarol:sha256:{sha256(b'x' * 20).hexdigest().upper()}\n")
    assert [key.name for key in keys] == ["alice", "bob", "carol"]
    assert [key.digest for key in keys] == [digest_of(ALICE), digest_of(BOB), digest_of("x" * 20)]


def test_a_name_may_have_two_keys_while_one_replaces_the_other() -> None:
    assert [key.name for key in parse_keys(f"alice:{ALICE} alice:{ALICE}2")] == ["alice", "alice"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key"),
        (" \n", "no key"),
        (ALICE, "entry 1"),
        (f":{ALICE}", "entry 1"),
        (f"bob:{BOB} a/b:{ALICE}", "entry 2"),
        (f"{'n' * 65}:{ALICE}", "entry 1"),
        ("alice:tooshort-secret", "15 characters"),
        ("alice:sha256:abc", "64 hexadecimal"),
        ("alice:\u00e9" + "k" * 32, "ASCII only"),
        (f"alice:{ALICE} bob:{ALICE}", "entry 2"),
        (" ".join(f"n:{number:016}" for number in range(MOST_KEYS + 1)), str(MOST_KEYS)),
    ],
)
def test_a_mistake_is_told_by_its_number_and_not_by_its_content(text: str, words: str) -> None:
    if words == "15 characters":
        text = "alice:tooshort-secret"[: len("alice:") + 15]
    with pytest.raises(KeyListError, match=words) as caught:
        parse_keys(text)
    for secret in (ALICE, "tooshort"):
        assert secret not in str(caught.value)


def test_no_digest_in_a_repr() -> None:
    (key,) = parse_keys(f"alice:{ALICE}")
    assert repr(key) == "ApiKey(name='alice')"


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_a_useless_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KeyListError):
        read_keys(file)


def test_salts_differ_by_name_and_by_cluster_and_stay_the_same() -> None:
    salts = {salt_of(secret, name) for secret in (b"s" * 32, b"t" * 32) for name in ("alice", "bob")}
    assert len(salts) == 4
    assert salt_of(b"s" * 32, "alice") in salts
    assert all(len(salt) == 32 for salt in salts)
