from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvpool import SecretFileError, load_or_create


def test_creates_once_and_loads_after(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "secret"
    secret = load_or_create(path)
    assert len(secret) == 32
    assert load_or_create(path) == secret
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]


def test_randomness_is_injected(tmp_path: Path) -> None:
    assert load_or_create(tmp_path / "s", lambda count: b"r" * count) == b"r" * 32
    with pytest.raises(SecretFileError, match="gave 3 bytes, not 32"):
        load_or_create(tmp_path / "t", lambda count: b"abc")
    assert os.listdir(tmp_path) == ["s"]


def test_many_starters_agree(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with ThreadPoolExecutor(16) as threads:
        secrets = set(threads.map(lambda _: load_or_create(path), range(64)))
    assert len(secrets) == 1
    assert os.listdir(tmp_path) == ["secret"]


def test_loser_of_the_race_reads_the_winners_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"

    def slow_random(count: int) -> bytes:
        load_or_create(path, lambda size: b"w" * size)
        return b"l" * count

    assert load_or_create(path, slow_random) == b"w" * 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_refuses_a_file_others_can_use(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    load_or_create(path)
    path.chmod(mode)
    with pytest.raises(SecretFileError, match=rf"mode {mode:04o}\); run: chmod 600 {path}"):
        load_or_create(path)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_refuses_a_wrong_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(bytes(size))
    path.chmod(0o600)
    with pytest.raises(SecretFileError, match=f"exactly 32 bytes, it has {size}"):
        load_or_create(path)


def test_refuses_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SecretFileError, match="not a regular file"):
        load_or_create(Path("/dev/null"))
