from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpool import compiled
from kvpool.kernels import entries


def run(code: str, **environment: str) -> str:
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_cache_key_names_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that was compiled from other sources is not found, though the function itself is unchanged."""

    def double(value: int) -> int:
        return 2 * value

    cache = compiled._SourceCache(double)
    codegen = compiled.dispatchers[entries.peek.__name__].targetctx.codegen()
    before = cache._index_key("signature", codegen)
    assert before == cache._index_key("signature", codegen)
    monkeypatch.setattr(compiled, "_DIGEST", "another")
    assert cache._index_key("signature", codegen) != before


def test_a_second_process_finds_the_code_compiled() -> None:
    code = (
        "from kvpool import compiled; from kvpool.kernels import entries; "
        "stats = [dispatcher.stats for dispatcher in compiled.dispatchers.values()]; "
        "print(sum(sum(one.cache_misses.values()) for one in stats), sum(sum(one.cache_hits.values()) for one in stats))"
    )
    run(code)
    misses, hits = map(int, run(code).split())
    assert misses == 0
    assert hits >= 15


@pytest.mark.parametrize(("flag", "contains"), [("0", False), ("1", True)])
def test_only_builds_for_it_contain_pause_points(flag: str, contains: bool) -> None:
    code = (
        "from kvpool.kernels.claims import wait_in_line; wait_in_line.compile('int64(int64, int64, int64)'); "
        "print(any('usleep' in code for code in wait_in_line.inspect_llvm().values()))"
    )
    assert run(code, KVATLAS_PAUSE_POINTS=flag) == str(contains)


def test_the_cache_key_names_the_sources_beside_the_function(tmp_path: Path) -> None:
    """An entry of another package is made of functions that lie beside it."""
    codegen = compiled.dispatchers[entries.peek.__name__].targetctx.codegen()
    keys = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper.py").write_text(f"STEP = {number}\n")
        source = folder / "asking.py"
        source.write_text("def double(value):\n    return 2 * value\n")
        names: dict[str, Any] = {}
        exec(compile(source.read_text(), str(source), "exec"), names)
        keys.append(compiled._SourceCache(names["double"])._index_key("signature", codegen))
    assert keys[0] != keys[1]


def test_two_entries_of_one_name_are_refused() -> None:
    """What is compiled lives as long as it is listed under its name."""

    def peek(value: int) -> int:
        return value

    with pytest.raises(AssertionError, match="peek"):
        compiled.entry(peek)


@pytest.mark.parametrize(("name", "runs"), [("sum_of_keys", False), ("sum_of_many_keys", True)])
def test_only_long_entries_let_others_run(name: str, runs: bool) -> None:
    """Some try of a few, because another process may keep either thread waiting."""
    code = f"""
import sys, threading, time
from kvpool.kernels import key_digest
from kvpool.packed import address_of
sys.setswitchinterval(1e-6)
keys, ticks, stop = bytes(16 * 4_000_000), [], threading.Event()
def tick():
    while not stop.is_set():
        ticks.append(time.perf_counter())
thread = threading.Thread(target=tick)
thread.start()
others_ran = []
for _ in range(10):
    begin = time.perf_counter()
    key_digest.{name}(address_of(keys), 4_000_000)
    end = time.perf_counter()
    quarter = (end - begin) / 4
    others_ran.append(any(begin + quarter < at < end - quarter for at in ticks))
    ticks.clear()
stop.set()
thread.join()
print({runs} in others_ran)
"""
    assert run(code) == "True"
