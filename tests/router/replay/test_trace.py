"""Traces: what is read, how arrivals are spread, what could be reused."""

from __future__ import annotations

import gzip
import json
import random
import re
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
        {"timestamp": None},
        {"timestamp": 10**400},
        {"output_length": 2**39},
        {"output_length": 10**400},
        {"output_length": float("inf")},
        {"input_length": 2**39},
        {"hash_ids": [7, 8, True]},
        {"hash_ids": [7, 8, -1]},
        {"hash_ids": [7, 8, 10**400]},
        {"hash_ids": [[], [], []]},
        {"hash_ids": {"7": 1, "8": 1, "9": 1}},
    ],
)
def test_a_record_that_is_no_request_is_refused_with_its_line(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(ReplayError, match="line 2 of") as refused:
        read(_file(tmp_path, [_record(), _record(**broken)]))
    assert not re.search(r"[A-Z][a-z]+Error", str(refused.value)), "words of ours, not of Python"


@pytest.mark.parametrize("name", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_a_field_that_is_missing_is_named(tmp_path: Path, name: str) -> None:
    record = _record()
    del record[name]
    with pytest.raises(ReplayError, match=f"line 1 of .*{name} is"):
        read(_file(tmp_path, [record]))


@pytest.mark.parametrize("line", ["{", "[" * 100_000, "null", "7", '"text"', "[]", "NaN", "\ufeff{}"])
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps(_record()) + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(ReplayError, match=r"line 2 of .* \(it is no JSON"):
        read(file)


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    record = json.dumps(_record(note="\u2028\u2029\x85"), ensure_ascii=False)
    file.write_text("\ufeff" + record + "\r\n\r\n" + record, encoding="utf-8")
    assert len(read(file)) == 2


def test_a_damaged_gzip_file_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    whole = _file(
        tmp_path, [_record(timestamp=n, hash_ids=[n, n * n, n**3]) for n in range(40)], zipped=True
    ).read_bytes()
    rng = random.Random(1)
    file = tmp_path / "damaged"
    refused, places = [], range(2, len(whole), 9)
    for at in places:
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]):
            file.write_bytes(data)
            try:
                read(file)  # a damaged name or time in the head harms nothing
            except ReplayError as error:
                refused.append(str(error))
    assert len(refused) > len(places)
    assert all(str(file) in message for message in refused)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ReplayError, match="cannot be read"):
            read(path)


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
