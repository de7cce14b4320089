"""Workload files: parsing, order, and what is said about a bad one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from cluster.bench.workload import prompts, read, synthetic
from cluster.errors import UsageError

TREE = {
    "prefixes": {"a": "Count.", "b": "Sort."},
    "examples": [{"task": "a", "input": f"{i}?", "target": ""} for i in range(5)] + [{"task": "b", "input": "z"}],
}


def file_with(tmp_path: Path, value: object) -> Path:
    file = tmp_path / "w.json"
    file.write_text(json.dumps(value))
    return file


def test_a_prompt_is_prefix_and_question(tmp_path: Path) -> None:
    assert read(file_with(tmp_path, TREE))[0] == "Count.\n\nQ: 0?\nA: Let's think step by step."


def test_gzip_or_plain(tmp_path: Path) -> None:
    packed = tmp_path / "w.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(TREE).encode()))
    assert read(packed) == read(file_with(tmp_path, TREE))


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    file = file_with(tmp_path, TREE)
    assert prompts(file, 6, 1) == prompts(file, 6, 1)
    assert prompts(file, 6, 1) != prompts(file, 6, 2)
    assert sorted(prompts(file, 6, 1)) == sorted(read(file))


def test_more_requests_than_prompts_start_over(tmp_path: Path) -> None:
    file = file_with(tmp_path, TREE)
    assert prompts(file, 12, 0)[6:] == prompts(file, 6, 0)


def test_synthetic_prompts_share_prefixes() -> None:
    made = synthetic(3)
    assert made == synthetic(3)
    assert len(set(made)) == len(made)
    assert len({prompt[:2000] for prompt in made}) == 8


@pytest.mark.parametrize(
    "value", [[], {}, {"prefixes": {}, "examples": [{"task": "a", "input": ""}]}, {"prefixes": {}, "examples": []}]
)
def test_a_bad_workload_is_a_sentence(tmp_path: Path, value: object) -> None:
    with pytest.raises(UsageError, match=r"w\.json"):
        read(file_with(tmp_path, value))


@pytest.mark.parametrize("content", [b"no json", b"\x1f\x8bcut", b"\xff\xfe\x00"])
def test_not_json_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "w.json"
    file.write_bytes(content)
    with pytest.raises(UsageError):
        read(file)


def test_a_missing_workload_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--workload"):
        read(tmp_path / "none")
