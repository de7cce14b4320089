from __future__ import annotations

import os
import subprocess
import sys

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
