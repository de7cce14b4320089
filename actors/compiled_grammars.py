"""Compiled grammars of one tokenizer: each is compiled once for all who ask for it, in a thread of its own.

A compiled grammar is a matcher that nobody moves; everybody gets a copy of it, which costs microseconds. The last `KEPT` are
kept. A hostile one may hold what the edge lets it take (`grammar_trial.MEMORY_BYTES`), so they are few: they are for the many
choices of one request and the many requests of one client, not for everything that ever came. Copies share their lexer, and the
limit of its states (`grammar_source.LIMITS`), so one makes `COPIES` and is then compiled anew.

What nobody waits for any more is taken out of the line.

Limits: a compilation cannot be interrupted. One that takes longer than `compile_s` is given up, its thread still busy; so the
edge tries grammars first, in a process that can be ended (`grammar_trial.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer

from actors.deep_threads import DeepThreads
from actors.errors import ReplicaOverloaded, RequestRefused
from actors.grammar_source import matcher_of, problem_of
from actors.request import Grammar

_log = logging.getLogger(__name__)
COMPILE_S = 30.0
WAIT_S = 30.0
"""What a grammar waits for its turn, at most."""
MAX_COMPILING = 128
"""Different grammars that wait to be compiled, at most."""
KEPT = 4
COPIES = 16
PARAM = "response_format"


@dataclass(eq=False, slots=True)
class _Kept:
    """A compiled grammar, and how many copies were made of it."""

    matcher: LLMatcher
    copies: int = 0


@dataclass(eq=False, slots=True)
class _Job:
    """One that is compiled, or waits to be, for `waiting` callers."""

    task: asyncio.Task[_Kept]
    waiting: int = 0


class CompiledGrammars:
    """`matcher` from one event loop; `close` from anywhere. `tokenizer` is asked once, in the thread that compiles."""

    def __init__(
        self, tokenizer: Callable[[], LLTokenizer], *, compile_s: float = COMPILE_S, wait_s: float = WAIT_S
    ) -> None:
        self._make_tokenizer = tokenizer
        self._compile_s = compile_s
        self._wait_s = wait_s
        self._tokenizer: LLTokenizer | None = None
        self._thread = DeepThreads("kvatlas-grammar")
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._compiling: dict[Grammar, _Job] = {}

    async def matcher(self, grammar: Grammar) -> LLMatcher:
        """A matcher of the caller's own at the start of `grammar`; no token is taken in, no mask made, that others see.

        Raises `RequestRefused` for a grammar that is wrong or takes too long, and `ReplicaOverloaded` when too many wait.
        """
        while True:
            kept = self._kept.get(grammar)
            if kept is None:
                kept = await self._made(grammar)
            if kept.copies < COPIES:
                break
            # Others were faster: this one is used up, so wait for the next.
            self.forget(grammar)
        kept.copies += 1
        if kept.copies == COPIES:
            self.forget(grammar)
        elif grammar in self._kept:
            self._kept.move_to_end(grammar)
        return kept.matcher.deep_copy()

    def forget(self, grammar: Grammar) -> None:
        """Compile it anew for the next who asks: a copy of it did not work."""
        self._kept.pop(grammar, None)

    async def _made(self, grammar: Grammar) -> _Kept:
        job = self._compiling.get(grammar)
        if job is None:
            if len(self._compiling) >= MAX_COMPILING:
                waiting = len(self._compiling)
                raise ReplicaOverloaded(f"{waiting} grammars wait to be compiled already; try again later")
            job = self._compiling[grammar] = _Job(asyncio.create_task(self._compile(grammar)))
            job.task.add_done_callback(lambda done: self._compiled(grammar, done))
        job.waiting += 1
        try:
            # Who leaves does not take it from those who wait for the same.
            return await asyncio.shield(job.task)
        finally:
            job.waiting -= 1
            if not job.waiting and not job.task.done():
                job.task.cancel()
                del self._compiling[grammar]

    def close(self) -> None:
        """End the thread after what it does now. Idempotent."""
        self._thread.close()

    def _compiled(self, grammar: Grammar, done: asyncio.Task[_Kept]) -> None:
        job = self._compiling.get(grammar)
        if job is not None and job.task is done:
            del self._compiling[grammar]
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[grammar] = done.result()
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    async def _compile(self, grammar: Grammar) -> _Kept:
        loop = asyncio.get_running_loop()
        begun = asyncio.Event()

        def job() -> LLMatcher:
            loop.call_soon_threadsafe(begun.set)
            return self._work(grammar)

        future = self._thread.submit(job)
        if future.cancelled():
            raise ReplicaOverloaded("the replica is stopping; try again")
        try:
            async with asyncio.timeout(self._wait_s):
                await begun.wait()
        except TimeoutError:
            if future.cancel():
                message = f"a grammar waited {self._wait_s:g} s to be compiled: others take too long; try again later"
                raise ReplicaOverloaded(message) from None
        except asyncio.CancelledError:
            future.cancel()
            raise
        try:
            return _Kept(await asyncio.wait_for(asyncio.wrap_future(future), self._compile_s))
        except TimeoutError:
            message = f"The grammar takes more than {self._compile_s:g} s to compile; simplify it."
            raise RequestRefused(message, PARAM) from None

    def _work(self, grammar: Grammar) -> LLMatcher:
        """The thread's."""
        try:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            matcher = matcher_of(self._tokenizer, grammar)
            if not matcher.is_error() and not matcher.is_stopped():
                matcher.compute_bitmask()  # the first is the dear one, and copies know what was found for it
            problem = problem_of(matcher)
        except RequestRefused as error:
            raise RequestRefused(error.message, PARAM) from error
        except Exception:
            raise
        except BaseException as error:  # a panic of native code would end the event loop
            _log.warning("a grammar could not be compiled: %s", type(error).__name__)
            raise RequestRefused("The grammar cannot be compiled; simplify it.", PARAM) from error
        if problem:
            raise RequestRefused(problem, PARAM)
        return matcher
