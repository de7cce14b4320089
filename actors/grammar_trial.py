"""Tries a grammar in a process of its own, which may take too long, grow too large or crash without anybody noticing.

Compiling a hostile grammar can take minutes and gigabytes, and nothing in llguidance limits that. The child compiles with the
limits, the vocabulary and the stack that a replica has, so what passes here passes there. The kernel ends it when one
grammar takes `CPU_S` of CPU time or `MEMORY_BYTES`; the next grammar gets another child. It runs at a lower priority.

Messages are msgpack over its standard input and output: the vocabulary first, then [kind, text] -> problem, "" for none.

Limits: Linux. One grammar at a time; 40 MB and half a second to start for a vocabulary of 50,000, at the first use.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgpack
from llguidance import LLTokenizer, TokenizerWrapper

from actors.deep_threads import DeepThreads
from actors.errors import RequestRefused
from actors.grammar_source import matcher_of, problem_of
from actors.request import Grammar

CPU_S = 2.0
WALL_S = 20.0
"""What is waited for an answer on a busy machine."""
MEMORY_BYTES = 256 * 1024 * 1024
CODE_ROOT = Path(__file__).resolve().parent.parent
_START_S = 60.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`problem` is a sentence for the client, empty where there is none; `costly`: the limits of the child were met."""

    problem: str = ""
    costly: bool = False


class GrammarTrial:
    """The child, started when there is something to try. From several threads, one at a time."""

    def __init__(self, tokenizer: LLTokenizer, cpu_s: float = CPU_S) -> None:
        """`cpu_s` is what one grammar may take."""
        self._tokenizer = tokenizer
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._unclosed: weakref.finalize[..., GrammarTrial] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the child; None while there is none."""
        child = self._child
        return child.pid if child is not None else None

    def verdict(self, grammar: Grammar) -> Verdict:
        """What is wrong with `grammar`. Waits, up to `WALL_S`.

        Raises `OSError` where no child can be started, or it does not get enough CPU to come to an end.
        """
        with self._lock:
            answer = self._ask(grammar)
            if answer == -signal.SIGKILL:
                # Somebody ended it, perhaps before it read this: no verdict.
                answer = self._ask(grammar)
        if isinstance(answer, str):
            return Verdict(answer)
        if answer == -signal.SIGPROF:
            return Verdict(f"The grammar takes more than {self._cpu_s:g} s to compile; simplify it.", costly=True)
        return Verdict("The grammar is too large to compile; simplify it.", costly=True)

    def _ask(self, grammar: Grammar) -> str | int | None:
        """The verdict, or the exit status of a child that ended over it."""
        child = self._running()
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # told below, by how it ended
            child.stdin.write(msgpack.packb([grammar.kind, grammar.text], unicode_errors="surrogatepass"))
            child.stdin.flush()
        answer = _answer(child, WALL_S)
        if isinstance(answer, str):
            return answer
        ended = self._end()
        if answer is None:
            raise TimeoutError(f"a grammar was not tried within {WALL_S:g} s: the machine is too busy")
        return ended

    def close(self) -> None:
        """End the child, whatever it does. Idempotent; nothing can be tried any more."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise OSError("the trial of grammars is closed")
        if self._child is not None and self._child.poll() is not None:
            self._end()
        if self._child is None:
            self._child = self._start()
        return self._child

    def _start(self) -> subprocess.Popen[bytes]:
        # No secrets for a process that reads hostile input.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CODE_ROOT), environment.get("PYTHONPATH"))))
        child = subprocess.Popen(
            [sys.executable, "-m", "actors.grammar_trial", str(self._cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(msgpack.packb(_vocabulary(self._tokenizer)))
            child.stdin.flush()
        if _answer(child, _START_S) != "":
            _discard(child)
            raise OSError("the process that tries grammars does not start")
        self._unclosed = weakref.finalize(self, _discard, child)  # for whoever forgets to close
        return child

    def _end(self) -> int | None:
        """Its exit status, negative for a signal."""
        child, self._child = self._child, None
        if child is None:
            return None
        if self._unclosed is not None:
            self._unclosed.detach()
        # One that ended by itself tells why, so it gets a moment to.
        with contextlib.suppress(subprocess.TimeoutExpired):
            if child.stdout is not None and not child.stdout.closed and _at_end(child.stdout):
                child.wait(_END_S)
        return _discard(child)


def _discard(child: subprocess.Popen[bytes]) -> int:
    """End it, whatever it does, and everything that belongs to it. Its exit status."""
    child.kill()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    return child.wait()


def _answer(child: subprocess.Popen[bytes], timeout_s: float) -> str | bytes | None:
    """The next message; b"" if the child has ended; None if there is none in time."""
    assert child.stdout is not None
    unpacker = msgpack.Unpacker()
    until = time.monotonic() + timeout_s
    while select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
        data = os.read(child.stdout.fileno(), 65536)
        if not data:
            return b""
        unpacker.feed(data)
        for message in unpacker:
            return str(message)
    return None


def _at_end(stream: IO[bytes]) -> bool:
    return bool(select.select([stream], [], [], 0)[0])


def _vocabulary(tokenizer: LLTokenizer) -> list[Any]:
    ids = range(tokenizer.vocab_size)
    tokens = [tokenizer.decode_bytes([token]) for token in ids]
    return [tokens, [token for token in ids if tokenizer.is_special_token(token)], tokenizer.eos_tokens]


class _Vocabulary:
    """What `TokenizerWrapper` reads. Text that is forced is tokenized greedily: which tokens make it up is all the same here."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], ends: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = ends[0]
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str) or self.tokenizer is None:
            raise TypeError("text only")  # which is how it is asked whether it takes bytes
        return self.tokenizer.greedy_tokenize(text)


def _problem(tokenizer: LLTokenizer, grammar: Grammar) -> str:
    try:
        matcher = matcher_of(tokenizer, grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return problem_of(matcher)
    except RequestRefused as error:
        return error.message


def _messages(source: IO[bytes]) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(unicode_errors="surrogatepass", max_buffer_size=0)
    while data := os.read(source.fileno(), 65536):
        unpacker.feed(data)
        yield from unpacker


def _limit_memory() -> None:
    """`MEMORY_BYTES` more than now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(cpu_s: float) -> None:
    """The child: until its standard input ends. A grammar that takes longer than `cpu_s` of CPU ends it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    messages = _messages(sys.stdin.buffer)
    vocabulary = _Vocabulary(*next(messages))
    tokenizer = LLTokenizer(
        TokenizerWrapper(vocabulary), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.eos_token_id
    )
    vocabulary.tokenizer = tokenizer
    thread = DeepThreads("grammar")
    thread.submit(lambda: _problem(tokenizer, Grammar("regex", "a"))).result()  # what is made once, before the limit
    _limit_memory()
    os.nice(10)
    _say("")
    for kind, text in messages:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        problem = thread.submit(partial(_problem, tokenizer, Grammar(kind, text))).result()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        _say(problem)


def _say(problem: str) -> None:
    sys.stdout.buffer.write(msgpack.packb(problem))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
