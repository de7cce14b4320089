"""Grammars are tried before anything is scheduled for their requests: in a child process, one at a time, fairly by client.

    check -> known | waits in its client's line -> tried (`actors.grammar_trial`) -> known

One that several ask for is tried once. Next is the line whose last turn is longest ago, so that a client with many hostile
grammars, each of which takes seconds, holds another up by the one that is being tried. Who leaves takes what only he asked for
out of the line; what is being tried is tried to its end, and remembered.

Everything but the trial itself happens in the event loop between two awaits, so there is no lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from llguidance import LLTokenizer

from actors.errors import RequestRefused
from actors.grammar_source import check_size
from actors.grammar_trial import GrammarTrial, Verdict
from actors.request import Grammar
from cluster.api.errors import invalid, slow_down, unavailable
from cluster.api.identity import ANONYMOUS, Identity

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Grammars that wait to be tried, at most; a key that has none among them may add one in any case."""
MAX_WAITING_OF_KEY = 16
"""Of those, what one API key may have asked for."""
KNOWN_GRAMMARS = 1024
"""Verdicts remembered."""
TURNS_KNOWN = 1024
"""Names whose last turn is remembered."""
COSTLY = "grammar_too_complex"
"""The code of the error for a grammar that takes too long or too much memory."""


class GrammarCodec(Protocol):
    """What is needed of the served model's tokenizer."""

    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance wants it. May raise `RequestRefused`."""
        ...


@dataclass(eq=False, slots=True)
class _Job:
    """A grammar without a verdict; `asking` counts who waits for it, by name."""

    key: bytes
    grammar: Grammar
    verdict: asyncio.Future[Verdict]
    asking: Counter[str] = field(default_factory=Counter)
    waits: bool = True


class GrammarCheck:
    """Of one codec, in one event loop. `close` ends the child."""

    def __init__(self, codec: GrammarCodec, trial: Callable[[LLTokenizer], GrammarTrial] = GrammarTrial) -> None:
        self._codec = codec
        self._make_trial = trial
        self._trial: GrammarTrial | None = None
        self._known: OrderedDict[bytes, Verdict] = OrderedDict()
        self._jobs: dict[bytes, _Job] = {}
        self._lines: dict[str, dict[_Job, None]] = {}
        """By name; in each, the grammars in the order in which they came."""
        self._turns: OrderedDict[str, int] = OrderedDict()
        """By name, the number of its last turn. Who is not in it had none, or long ago."""
        self._turn = 0
        self._trying: asyncio.Task[None] | None = None

    async def check(self, grammar: Grammar, param: str = "response_format", identity: Identity = ANONYMOUS) -> None:
        """Raise `ApiError` 400 with `param` for a grammar that is wrong, takes too long or too much memory, or fits no text.

        503 when too many wait to be tried, 429 when too many of `identity` alone do. One that was tried before costs nothing.
        """
        try:
            check_size(grammar, param)
            verdict = await self._verdict(grammar, identity.name)
        except RequestRefused as error:
            raise invalid(error.message, param) from error
        if verdict.problem:
            raise invalid(verdict.problem, param, COSTLY if verdict.costly else None)

    async def close(self) -> None:
        """End the child, whatever it does. Idempotent."""
        if self._trial is not None:
            await asyncio.to_thread(self._trial.close)
        if self._trying is not None:
            await asyncio.wait([self._trying])

    async def _verdict(self, grammar: Grammar, name: str) -> Verdict:
        key = blake2b(f"{grammar.kind}\n{grammar.text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        job = self._jobs.get(key)
        if job is None or (job.waits and name not in job.asking):
            self._check_room(job, name)
        if job is None:
            job = self._jobs[key] = _Job(key, grammar, asyncio.get_running_loop().create_future())
        self._join(job, name)
        try:
            # Shielded: the verdict is for everybody who waits for it.
            return await asyncio.shield(job.verdict)
        except OSError as error:
            raise unavailable("Grammars cannot be checked now. Retry in a moment.", "server_is_overloaded") from error
        finally:
            self._leave(job, name)

    def _check_room(self, job: _Job | None, name: str) -> None:
        newcomer = name and name not in self._lines
        if job is None and not newcomer and sum(one.waits for one in self._jobs.values()) >= MAX_WAITING:
            raise unavailable("Too many grammars wait to be checked. Retry in a moment.", "server_is_overloaded")
        if name and len(self._lines.get(name, ())) >= MAX_WAITING_OF_KEY:
            raise slow_down("Too many grammars of this API key wait to be checked. Retry in a moment.")

    def _join(self, job: _Job, name: str) -> None:
        job.asking[name] += 1
        if job.waits:
            self._lines.setdefault(name, {})[job] = None
            self._try_next()

    def _leave(self, job: _Job, name: str) -> None:
        job.asking[name] -= 1
        if not job.asking[name]:
            del job.asking[name]
            if job.waits:
                self._take_out(job, name)
                if not job.asking:
                    del self._jobs[job.key]

    def _take_out(self, job: _Job, name: str) -> None:
        del self._lines[name][job]
        if not self._lines[name]:
            del self._lines[name]

    def _try_next(self) -> None:
        if self._trying is not None or not self._lines:
            return
        name = min(self._lines, key=lambda one: self._turns.get(one, 0))
        job = next(iter(self._lines[name]))
        self._turn += 1
        self._turns[name] = self._turn
        self._turns.move_to_end(name)
        if len(self._turns) > TURNS_KNOWN:
            self._turns.popitem(last=False)
        for asking in job.asking:
            self._take_out(job, asking)
        job.waits = False
        self._trying = asyncio.create_task(self._try(job))

    async def _try(self, job: _Job) -> None:
        try:
            verdict = await asyncio.to_thread(self._tried, job.grammar)
        except Exception as error:
            if isinstance(error, OSError):
                logger.error("a grammar could not be checked: %s", error)
            job.verdict.set_exception(error)
            job.verdict.exception()  # seen, also where nobody waits for it any more
        else:
            self._remember(job.key, verdict)
            job.verdict.set_result(verdict)
        del self._jobs[job.key]
        self._trying = None
        self._try_next()

    def _tried(self, grammar: Grammar) -> Verdict:
        if self._trial is None:
            self._trial = self._make_trial(self._codec.grammar_tokenizer())
        return self._trial.verdict(grammar)

    def _remember(self, key: bytes, verdict: Verdict) -> None:
        self._known[key] = verdict
        if len(self._known) > KNOWN_GRAMMARS:
            self._known.popitem(last=False)
