"""Grammars tried in a process of its own: verdicts, hostile ones, and a process that ends with whoever started it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from actors.grammar_trial import CODE_ROOT, GrammarTrial
from actors.request import Grammar

FINE = Grammar("regex", "a+")


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    opened = GrammarTrial(LLTokenizer("byte"))
    yield opened
    opened.close()


@pytest.mark.parametrize(
    "grammar",
    [
        FINE,
        Grammar("regex", ""),
        Grammar("json_schema", '{"type": "object", "properties": {"a": {"const": "fixed"}}, "required": ["a"]}'),
        Grammar("lark", 'start: "\u00e9\U0001f600" | %json {"type": "integer"}'),
        Grammar("lark", "start: " + " | ".join(f'"{number}"' for number in range(5000))),
    ],
)
def test_a_good_grammar_passes(trial: GrammarTrial, grammar: Grammar) -> None:
    assert trial.verdict(grammar).problem == ""


@pytest.mark.parametrize(
    ("grammar", "part"),
    [
        (Grammar("json_schema", '{"type": "nosuch"}'), "nosuch"),
        (Grammar("json_schema", '{"type": "string", "pattern": "(("}'), "unclosed"),
        (Grammar("json_schema", "nonsense"), "not valid"),
        (Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'), "does not fetch"),
        (Grammar("regex", "[b-a]"), "invalid"),
        (Grammar("regex", r"[^\x00-\x{10ffff}]"), "No text"),
        (Grammar("regex", "\ud800"), ""),
        (Grammar("lark", "start: nosuch"), "nosuch"),
    ],
)
def test_a_bad_grammar_is_told_why_by_a_child_that_goes_on(trial: GrammarTrial, grammar: Grammar, part: str) -> None:
    assert trial.verdict(FINE).problem == ""
    pid = trial.pid
    problem = trial.verdict(grammar).problem
    assert problem
    assert part in problem
    assert trial.verdict(FINE).problem == ""
    assert trial.pid == pid


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}'),
        Grammar("lark", "start: T0\n" + "".join(f'T{i}:(T{i + 1}"x")*\n' for i in range(6000)) + 'T6000:"a"\n'),
    ],
)
def test_a_hostile_grammar_ends_its_process_and_nothing_else(grammar: Grammar) -> None:
    trial = GrammarTrial(LLTokenizer("byte"), cpu_s=0.3)
    assert trial.verdict(grammar).problem == "The grammar takes more than 0.3 s to compile; simplify it."
    assert trial.pid is None
    assert trial.verdict(FINE).problem == ""
    trial.close()


def test_a_grammar_that_needs_too_much_memory_is_too_large() -> None:
    """With time enough, the kernel refuses the memory, which ends the process in its own way."""
    trial = GrammarTrial(LLTokenizer("byte"), cpu_s=60.0)
    assert trial.verdict(FINE).problem == ""
    assert trial.pid is not None
    resource.prlimit(trial.pid, resource.RLIMIT_AS, (1, 1))
    large = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')
    assert trial.verdict(large).problem == "The grammar is too large to compile; simplify it."
    assert trial.verdict(FINE).problem == ""
    trial.close()


def test_one_that_nobody_closes_takes_its_child_along() -> None:
    trial = GrammarTrial(LLTokenizer("byte"))
    assert trial.verdict(FINE).problem == ""
    pid = trial.pid
    assert pid is not None
    del trial
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_chain_of_rules_as_long_as_a_grammar_may_be_passes_or_is_refused(trial: GrammarTrial) -> None:
    """Each level takes stack: with a usual one this ends the process."""
    chain = "start:a0\n" + "".join(f"a{i:x}:a{i + 1:x}\n" for i in range(9000)) + f'a{9000:x}:"a"\n'
    pid = trial.pid
    assert "large" not in trial.verdict(Grammar("lark", chain)).problem
    assert trial.verdict(FINE).problem == ""
    assert pid is None or trial.pid == pid


def test_a_killed_child_is_replaced(trial: GrammarTrial) -> None:
    assert trial.verdict(FINE).problem == ""
    assert trial.pid is not None
    os.kill(trial.pid, signal.SIGKILL)  # who may still look alive when it is asked next
    assert trial.verdict(FINE).problem == ""


def test_a_child_that_is_killed_over_a_grammar_again_and_again_is_a_verdict(trial: GrammarTrial) -> None:
    """By the kernel, for instance, because the machine has no memory for it."""
    slow = Grammar("json_schema", '{"type": "integer", "multipleOf": 99991}')
    ended = threading.Event()

    def kill() -> None:
        while not ended.wait(0.01):
            pid = trial.pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    assert trial.verdict(FINE).problem == ""
    killer = threading.Thread(target=kill)
    killer.start()
    problem = trial.verdict(slow).problem
    ended.set()
    killer.join()
    assert "too large" in problem
    assert trial.verdict(FINE).problem == ""


def test_several_threads_get_their_own_answers(trial: GrammarTrial) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = trial.verdict(Grammar("lark", f"start: rule_{number}")).problem

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"rule_{number}" in found[number] for number in range(8))


def test_closing_ends_the_child() -> None:
    trial = GrammarTrial(LLTokenizer("byte"))
    trial.close()  # that was never started
    trial = GrammarTrial(LLTokenizer("byte"))
    assert trial.verdict(FINE).problem == ""
    pid = trial.pid
    trial.close()
    trial.close()
    assert trial.pid is None
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(OSError, match="closed"):
        trial.verdict(FINE)


def test_the_child_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVATLAS_HTTP__ADMIN_KEY", "open sesame")
    trial = GrammarTrial(LLTokenizer("byte"))
    assert trial.verdict(FINE).problem == ""
    assert b"sesame" not in Path(f"/proc/{trial.pid}/environ").read_bytes()
    trial.close()


def test_the_child_dies_with_its_parent() -> None:
    program = (
        "from llguidance import LLTokenizer\n"
        "from actors.grammar_trial import GrammarTrial\n"
        "from actors.request import Grammar\n"
        "import os, signal\n"
        "trial = GrammarTrial(LLTokenizer('byte'))\n"
        "assert trial.verdict(Grammar('regex', 'a')).problem == ''\n"
        "print(trial.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    output = subprocess.run([sys.executable, "-c", program], cwd=CODE_ROOT, capture_output=True, check=False).stdout
    child = Path(f"/proc/{int(output)}/stat")
    for _ in range(1000):
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("the child lives on")
