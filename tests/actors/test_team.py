"""Kernels on the threads that torch computes with."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from actors import team
from actors.team import apart, run, threads_for
from kvpool.compiled import thread_entry
from kvpool.kernels.atomics import fetch_add, get, put
from tests.actors.torch_threads import torch_threads


@thread_entry
def _square(record: int) -> None:
    """out[i] = i * i + a for i < count. Words: address of out, count, a; and of a count of threads."""
    fetch_add(get(record + 32), 1)
    while True:
        index = fetch_add(record, 1)
        if index >= get(record + 16):
            break
        put(get(record + 8) + 8 * index, index * index + get(record + 24))


def squares(threads: int, count: int, plus: int) -> tuple[list[int], int]:
    out, came = np.full(count, -1, np.int64), np.zeros(1, np.int64)
    run(_square, threads, out.ctypes.data, count, plus, came.ctypes.data)
    return out.tolist(), int(came[0])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_thread_runs_it_and_each_share_is_taken_once(threads: int) -> None:
    for count in (0, 1, 1000):
        found, came = squares(threads, count, 7)
        assert found == [index * index + 7 for index in range(count)]
        assert came == threads


def test_torch_and_kernels_take_turns_on_the_same_threads() -> None:
    x = torch.randn(300, 300)
    with torch_threads(2):
        wanted = x @ x
        for _ in range(200):
            assert torch.equal(x @ x, wanted)
            assert squares(2, 50, 1)[0][49] == 49 * 49 + 1


def test_python_threads_may_run_kernels_at_the_same_time() -> None:
    found: list[bool] = []

    def work(plus: int) -> None:
        found.extend(squares(2, 200, plus)[0] == [index * index + plus for index in range(200)] for _ in range(100))

    threads = [threading.Thread(target=work, args=(plus,)) for plus in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 300


def test_without_gnu_openmp_the_caller_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_fork_address", lambda: 0)
    assert squares(4, 100, 0) == ([index * index for index in range(100)], 1)


def test_no_library_is_no_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(team, "_MAPS", tmp_path / "absent")
    assert team._fork_address.__wrapped__() == 0
    (tmp_path / "maps").write_text("00-11 r-xp 0 0:0 1 /nowhere/libgomp.so.1\n")
    monkeypatch.setattr(team, "_MAPS", tmp_path / "maps")
    assert team._fork_address.__wrapped__() == 0


def test_what_came_with_torch_is_asked_first() -> None:
    home = Path(torch.__file__).parent
    ours, beside = f"{home}/lib/libgomp.so.1", f"{home.parent}/torch.libs/libgomp-1.so"
    other, system = f"{home.parent}/other.libs/libgomp-2.so", "/usr/lib/libgomp.so.1"
    for own in (ours, beside):
        assert sorted([system, other, own], key=team._distance) == [own, system, other]


def test_torch_here_has_gnu_openmp() -> None:
    """Else all the tests above are about one thread."""
    assert team._fork_address()


def test_few_rows_do_not_wake_anybody() -> None:
    with torch_threads(2):
        assert (threads_for(1), threads_for(16), threads_for(1000)) == (1, 1, 2)


def test_what_is_done_apart_leaves_no_threads() -> None:
    """A team that stays makes the threads of the next one sleep between any two kernels."""

    def native_threads() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    def work() -> int:
        assert squares(3, 100, 0)[1] == 3
        during.update(native_threads())
        return 7

    during, before = set[str](), native_threads()
    assert apart(work) == 7
    assert len(during - before) >= 3
    deadline = time.monotonic() + 10
    while during & native_threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not during & (native_threads() - before)


def test_what_fails_apart_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        apart(lambda: 1 // 0)
