"""Traces: what is read, how arrivals are spread, what could be reused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.replay.errors import ReplayError
from router.replay.trace import read, spread
from tests.router.replay.traces import BLOCK, mixed, trace_of


def _record(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 1025, "output_length": 5, "hash_ids": [7, 8, 9]} | changes


def _file(folder: Path, records: list[Any], *, zipped: bool = False) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    file = folder / "trace.jsonl"
    file.write_bytes(gzip.compress(text) if zipped else text)
    return file


@pytest.mark.parametrize("zipped", [False, True])
def test_only_full_blocks_are_read_and_arrivals_are_sorted(tmp_path: Path, zipped: bool) -> None:
    later = _record(timestamp=3000, input_length=512, hash_ids=[7])
    trace = read(_file(tmp_path, [later, _record()], zipped=zipped))
    assert np.diff(trace.first).tolist() == [2, 1]
    assert trace.nodes[0] == trace.nodes[2]
    assert trace.input_tokens.tolist() == [1025, 512]
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.packed_keys(1) == trace.packed_keys(0)[:16]


@pytest.mark.parametrize(
    "broken",
    [
        {"hash_ids": [7, 8]},
        {"hash_ids": [7, 8, "9"]},
        {"hash_ids": None},
        {"input_length": 0, "hash_ids": []},
        {"input_length": -5},
        {"timestamp": float("nan")},
        {"output_length": True},
        {"timestamp": 1e300},
    ],
)
def test_a_record_that_is_no_request_is_refused_with_its_line(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(ReplayError, match="line 2 of"):
        read(_file(tmp_path, [_record(), _record(**broken)]))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[1]\n", b"\x1f\x8bzip", b"\xff\xfe"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(content)
    with pytest.raises(ReplayError, match="trace"):
        read(file)


def test_equal_ids_after_other_blocks_are_other_blocks() -> None:
    trace = trace_of([[1, 5], [2, 5], [1, 5]])
    assert trace.node_count == 4
    assert len({trace.keys[node].tobytes() for node in range(4)}) == 4
    assert trace.packed_keys(0) == trace.packed_keys(2) != trace.packed_keys(1)


def test_requests_of_one_timestamp_are_spread_over_the_step() -> None:
    arrivals, length_s = spread(np.array([10.0, 10.0, 10.0, 13.0, 16.0, 16.0]))
    assert arrivals.tolist() == [0.0, 1.0, 2.0, 3.0, 6.0, 7.5]
    assert length_s == 9.0
    assert spread(np.array([4.0, 4.0]))[0].tolist() == [0.0, 1.0]


def test_reusable_tokens_are_those_that_a_set_of_all_blocks_would_have() -> None:
    trace = mixed(3)
    seen: set[bytes] = set()
    for request, reusable in enumerate(trace.reusable_tokens().tolist()):
        keys = trace.packed_keys(request)
        blocks = [keys[start : start + 16] for start in range(0, len(keys), 16)]
        found = next((number for number, key in enumerate(blocks) if key not in seen), len(blocks))
        assert reusable == min(found * BLOCK, trace.input_tokens[request] - 1)
        seen.update(blocks)


def test_a_prompt_that_is_all_cached_has_its_last_token_computed() -> None:
    assert trace_of([[1, 2], [1, 2]], tail=0).reusable_tokens().tolist() == [0, 2 * BLOCK - 1]


def test_nothing_is_shared_in_the_control() -> None:
    trace = mixed(4)
    control = trace.unshared()
    assert not control.reusable_tokens().any()
    assert control.input_tokens.tolist() == trace.input_tokens.tolist()
    assert np.diff(control.first).tolist() == np.diff(trace.first).tolist()


def test_stretching_and_cutting_keep_the_rest() -> None:
    trace = mixed(5)
    slow = trace.stretched(2 * trace.length_s)
    assert slow.arrival_s == pytest.approx(2 * trace.arrival_s)
    head = trace.head(10)
    assert len(head) == 10
    assert head.length_s == trace.arrival_s[10]
    assert head.packed_keys(9) == trace.packed_keys(9)
    assert trace.head(1000) is trace
