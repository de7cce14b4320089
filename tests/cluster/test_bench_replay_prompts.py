"""A workload of prompts as a trace: the same prompts in the same order, blocks shared as far as their ids are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.bench import replay_prompts
from cluster.bench.workload import prompts


class _Letters:
    """A tokenizer with one id a character."""

    def __init__(self, directory: Path, vocab: int) -> None:
        assert directory == Path("model")

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    file = tmp_path / "work.json"
    examples = [{"task": task, "input": f"{task}{number}"} for task in ("sums", "words") for number in range(3)]
    file.write_text(json.dumps({"prefixes": {"sums": "a" * 40, "words": "b" * 40}, "examples": examples}))
    return file


def test_blocks_are_shared_as_far_as_ids_are(workload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_prompts, "TransformersCodec", _Letters)
    trace = replay_prompts.trace_of(workload, Path("model"), 6, seed=3, block_tokens=8, output_tokens=5)
    texts = prompts(workload, 6, 3)
    assert trace.input_tokens.tolist() == [len(text) for text in texts]
    assert trace.output_tokens.tolist() == [5] * 6
    seen: set[str] = set()
    for request, reusable in enumerate(trace.reusable_tokens().tolist()):
        ends = range(8, len(texts[request]) + 1, 8)
        assert trace.first[request + 1] - trace.first[request] == len(ends)
        found = sum(texts[request][:end] in seen for end in ends)
        assert reusable == min(8 * found, len(texts[request]) - 1)
        seen.update(texts[request][:end] for end in ends)
    assert trace.reusable_tokens().sum() > 0
