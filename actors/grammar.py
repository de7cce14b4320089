"""Grammars at a replica: compiled, then a mask of the tokens that may come next, for each token of each sequence.

Everything of llguidance's runs in threads of its own, never in the event loop or the step thread: one compiles
(`compiled_grammars.py`), the others take tokens in and make masks, of all sequences in turn. Compiling and making masks is done
without the interpreter's lock; taking a token in holds it, tens of microseconds for a JSON schema. A sequence may spend
`ACCEPT_S` of CPU a token on that, and `ACCEPT_RESERVE_S` beyond; one that spends more, or `MASK_S` on one mask, ends: what
others lose to it is bounded by that.

The tokenizer is converted at the first use: a third of a second and 30 MB for a vocabulary of 50,000.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from actors.compiled_grammars import COMPILE_S, PARAM, CompiledGrammars
from actors.deep_threads import DeepThreads
from actors.errors import ReplicaOverloaded, RequestRefused
from actors.grammar_source import check_size, problem_of
from actors.request import Grammar

_log = logging.getLogger(__name__)
ACCEPT_S = 0.0005
ACCEPT_RESERVE_S = 0.05
MASK_S = 0.25


class GrammarConstraint:
    """See `actors.constraint.Constraint`. Made by `Grammars.open`; ready from the start. `eos_ids` are in [0, `vocab_size`).

    `matcher` and the mask are written by the worker while not ready, and by nobody while ready.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        eos_ids: frozenset[int],
        worker: DeepThreads,
        on_ready: Callable[[], None],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._matcher: LLMatcher | None = matcher
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._ends = sorted(eos_ids)
        self._worker = worker
        self._on_ready = on_ready
        self._cpu_clock = cpu_clock
        self._reserve_s = ACCEPT_RESERVE_S
        self._forbidden: torch.Tensor | None = None
        self._failure = ""
        self._done = False
        self._ready = False
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether the mask of the next token is there, or it is known that there will be none."""
        return self._ready

    @property
    def failure(self) -> str:
        """Why it cannot go on; empty while it can."""
        return self._failure if self._ready else ""

    @property
    def done(self) -> bool:
        """Whether nothing may follow."""
        return self._ready and self._done

    def apply(self, logits: torch.Tensor) -> None:
        """Sets to minus infinity what may not come next, in one row [vocab]."""
        assert self._ready
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden.to(logits.device), float("-inf"))

    def accept(self, token: int) -> None:
        """The token has come. Ready at once where it ends the answer, else when the worker has made the next mask."""
        assert self._ready
        if self._done or self._failure or self._closed:
            return
        if token in self._eos_ids:
            # It was allowed, so the answer was complete.
            self._done = True
            return
        self._ready = False
        self._worker.submit(lambda: self._advance(token))

    def close(self) -> None:
        """Give the memory back, in the worker: that of a large grammar takes its time. Idempotent."""
        if not self._closed:
            self._closed = True
            self._worker.submit(self._drop)

    def _drop(self) -> None:
        self._matcher = None
        self._forbidden = None

    def _advance(self, token: int) -> None:
        """Take `token` in and make the mask after it. Worker only."""
        if self._closed:
            return
        try:
            self._take(token)
            if not self._failure:
                self.look()
        except BaseException as error:  # a panic of native code is no Exception
            _log.exception("a grammar failed; its request ends")
            self._failure = f"The grammar failed: {type(error).__name__}."
        self._ready = True
        self._on_ready()

    def _take(self, token: int) -> None:
        matcher = self._matcher
        assert matcher is not None
        began = self._cpu_clock()
        taken = matcher.consume_token(token)
        self._reserve_s = min(self._reserve_s + ACCEPT_S, ACCEPT_RESERVE_S) - (self._cpu_clock() - began)
        if not taken:
            # The step took a token that the mask did not allow, or a limit was passed.
            self._failure = problem_of(matcher) or "The answer left its grammar."
        elif self._reserve_s < 0:
            self._failure = "The grammar is too ambiguous: reading the answer by it takes too long; simplify it."

    def look(self) -> None:
        """Make the mask of the next token, or find that there is none. Worker only.

        An answer after which nothing but an end may come is complete: no token is spent on saying so.
        """
        matcher = self._matcher
        assert matcher is not None
        began = self._cpu_clock()
        if not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size)
            if matcher.is_accepting():
                # All ends alike, also one that the model has and the tokenizer has not.
                allowed[self._ends] = 1
                self._done = int(allowed.sum()) == len(self._ends)
            self._forbidden = torch.from_numpy(allowed == 0)
        self._failure = problem_of(matcher)
        self._done = self._done or (matcher.is_stopped() and not self._failure)
        if not self._failure and not self._done and self._cpu_clock() - began > MASK_S:
            self._failure = "The grammar is too complex: finding the next token by it takes too long; simplify it."

    def begin(self) -> None:
        """Look for the first time. Worker only; afterwards ready."""
        self.look()
        self._ready = True


class Grammars:
    """Compiles grammars for one tokenizer. `open` from the event loop; `close` ends the threads."""

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        eos_ids: Sequence[int],
        *,
        threads: int = 1,
        compile_s: float = COMPILE_S,
    ) -> None:
        """`tokenizer` is transformers' and fast; `vocab_size` the width of the model's logits; `threads` make masks."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(token for token in eos_ids if 0 <= token < vocab_size)
        self._threads = threads
        self._compile_s = compile_s
        self._parts: tuple[CompiledGrammars, DeepThreads] | None = None
        self._lock = threading.Lock()
        self._closed = False

    async def open(self, grammar: Grammar, on_ready: Callable[[], None]) -> GrammarConstraint:
        """A constraint at its first token, ready. `on_ready` is called by a thread of ours whenever it is ready again.

        Raises `RequestRefused` for a grammar that is wrong, too large, takes too long, or that no text satisfies, and
        `ReplicaOverloaded` when too many wait.
        """
        check_size(grammar, PARAM)
        compiled, worker = self._running()
        for _ in range(2):
            matcher = await compiled.matcher(grammar)
            constraint = GrammarConstraint(matcher, self._vocab_size, self._eos_ids, worker, on_ready)
            await asyncio.wrap_future(worker.submit(constraint.begin))
            if not constraint.failure:
                return constraint
            compiled.forget(grammar)  # those who had copies may have used up what copies share
        raise RequestRefused(constraint.failure, PARAM)

    def close(self) -> None:
        """End the threads after what they do now. Constraints that are open are never ready again. Idempotent."""
        with self._lock:
            self._closed = True
            running, self._parts = self._parts, None
        for part in running or ():
            part.close()

    def _running(self) -> tuple[CompiledGrammars, DeepThreads]:
        """What has the threads, started by the first who asks."""
        with self._lock:
            if self._closed:
                raise ReplicaOverloaded("the replica is stopping; try again")
            if self._parts is None:
                compiled = CompiledGrammars(self._converted, compile_s=self._compile_s)
                self._parts = compiled, DeepThreads("kvatlas-mask", self._threads)
            return self._parts

    def _converted(self) -> LLTokenizer:
        backend = getattr(self._source, "backend_tokenizer", None)
        if backend is None:
            raise RequestRefused("This model has no fast tokenizer, so its answers cannot follow a grammar.", PARAM)
        # A copy: settings saved with the tokenizer are not for this, and others use it now.
        backend = copy.copy(backend)
        backend.no_padding()
        backend.no_truncation()
        # Ids that the model has and the tokenizer has not are never allowed; the other way round they cannot come.
        highest = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
        size = max(self._vocab_size, highest + 1)
        ends = sorted(token for token in self._eos_ids if token <= highest)
        if not ends:
            raise RequestRefused("This model has no token that ends an answer, so none can follow a grammar.", PARAM)
        try:
            return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=ends)
        except ValueError as error:
            _log.warning("llguidance cannot read the tokenizer: %s", error)
            raise RequestRefused("This model's tokenizer cannot be used with a grammar.", PARAM) from error
