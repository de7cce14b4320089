"""Jobs in order, deep recursion, errors of any kind, and an orderly end."""

from __future__ import annotations

import threading

import pytest

from actors.deep_threads import DeepThreads

DEEP_CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"\n'


def test_jobs_are_done_in_order_by_another_thread() -> None:
    threads = DeepThreads("test")
    seen: list[int] = []
    futures = [threads.submit(lambda number=number: seen.append(number)) for number in range(20)]  # type: ignore[misc]
    who = threads.submit(threading.get_ident)
    assert [future.result() for future in futures] == [None] * 20
    assert seen == list(range(20))
    assert who.result() != threading.get_ident()
    threads.close()


def test_native_code_may_recurse_deep() -> None:
    """This many rules, each the only content of the one before, overflow a usual stack and end the process."""
    from llguidance import LLMatcher

    threads = DeepThreads("test")
    before = threading.stack_size()
    assert threads.submit(lambda: LLMatcher.validate_grammar(DEEP_CHAIN)).result() == ""
    assert threading.stack_size() == before
    threads.close()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_of_any_kind_reaches_who_asked_and_ends_no_thread(kind: type[BaseException]) -> None:
    threads = DeepThreads("test")

    def fail() -> None:
        raise kind("broken")

    with pytest.raises(kind):
        threads.submit(fail).result()
    assert threads.submit(lambda: 1).result() == 1
    threads.close()


def test_closing_finishes_what_was_submitted_and_takes_nothing_more() -> None:
    threads = DeepThreads("test", count=2)
    futures = [threads.submit(lambda: 1) for _ in range(10)]
    threads.close()
    threads.close()
    assert [future.result() for future in futures] == [1] * 10
    assert threads.submit(lambda: 1).cancelled()


def test_a_cancelled_job_is_not_done() -> None:
    threads = DeepThreads("test")
    gate = threading.Event()
    done: list[int] = []
    threads.submit(gate.wait)
    waiting = threads.submit(lambda: done.append(1))
    assert threads.waiting >= 1
    assert waiting.cancel()
    gate.set()
    threads.close()
    assert done == []
