"""The step loop of one replica: one thread that plans, computes, samples and seals, step after step.

Other threads talk to it through `submit` and `abort`, which leave a command in the inbox; it answers through
`on_outputs`, once per step with everything that step produced. It knows token ids only. Commands are applied between
steps, so an abort takes effect after the step in progress.

If a step raises, the engine is dead: every request gets the failure, blocks go back through the forced release, and
`failure` says why. It does not try to go on with a pool it cannot vouch for.

A sequence with a constraint is computed like any other while the mask of its next token is made elsewhere. If that is not
there after the forward pass, the sequence keeps its logits and is in no step until it is: nobody else waits for it. When all
wait, the thread sleeps until `wake`, or looks again after `_RETRY_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.config import EngineConfig
from actors.constraint import Constraint
from actors.contained import Contained
from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from actors.outcome import Outcome, outcomes
from actors.prefill_rate import PrefillRate
from actors.request import FinishReason, GenerateRequest, TokenLogprob
from actors.request_limits import RequestLimits
from actors.scheduler import Scheduler, Work
from actors.sequence import Sequence
from actors.step import Piece
from kvpool import KeyRoot, KeySpace, Pool

_log = logging.getLogger(__name__)
_RETRY_S = 0.01
"""Longest pause before planning again when requests wait but nothing can run."""


class TokenModel(Protocol):
    """What the engine needs of a model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def forward(self, pieces: list[Piece]) -> tuple[torch.Tensor, list[int]]:
        """Compute `pieces`; float32 logits [rows, vocab] and the index in `pieces` of each row."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request: admission (`cached_tokens` of `prompt_tokens`), a token, an end, or a failure.

    An end usually comes with its token. `is_text` is false for a token that only says that the answer ends. A failure is a
    `RequestRefused` where the request itself is at fault.
    """

    request_id: str
    cached_tokens: int | None = None
    token: int | None = None
    finish_reason: FinishReason | None = None
    failure: ReplicaFailed | RequestRefused | None = None
    logprob: TokenLogprob | None = None
    is_text: bool = True
    prompt_tokens: int = 0


def _admission(sequence: Sequence) -> StepOutput:
    prompt_tokens = len(sequence.request.prompt_token_ids)
    return StepOutput(sequence.request_id, cached_tokens=sequence.cached_tokens, prompt_tokens=prompt_tokens)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A request on its way to the step thread. `predicted_tokens`: what its router expects to be cached."""

    request: GenerateRequest
    predicted_tokens: int
    constraint: Contained | None

    @property
    def uncached_tokens(self) -> int:
        return max(1, len(self.request.prompt_token_ids) - self.predicted_tokens)


class Engine:
    """Runs requests over one pool. `start` it once, `stop` it once."""

    def __init__(
        self,
        model: TokenModel,
        pool: Pool,
        keyspace: KeySpace,
        root: Callable[[str], KeyRoot],
        config: EngineConfig,
        *,
        context_tokens: int,
        copy_block: Callable[[int, int], None],
        on_outputs: Callable[[list[StepOutput]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._pool = pool
        self._keyspace = keyspace
        self._root = root
        self._config = config
        self._context_tokens = context_tokens
        self._on_outputs = on_outputs
        self._clock = clock
        # An id outside the vocabulary, as some configs have, can neither be generated nor masked.
        self._eos = frozenset(token for token in model.eos_token_ids if 0 <= token < model.vocab_size)
        self._limits = RequestLimits(
            model.vocab_size, self._eos, context_tokens, pool.geometry.block_tokens, pool.capacity_blocks
        )
        self._scheduler = Scheduler(pool, copy_block, step_tokens=config.step_tokens, max_running=config.max_running)
        self._sequences: dict[str, Sequence] = {}
        self._inbox: deque[_Arrival | str] = deque()
        self._wake = threading.Condition()
        # Apart from `_wake`: a constraint may ring it under a lock of its own, also while one is closed under `_wake`.
        self._bell = threading.Event()
        self._stopping = False
        self._progress_at = clock()
        self._arrivals = 0
        self._rate = PrefillRate()
        self.failure: ReplicaFailed | None = None
        self._thread = threading.Thread(target=self._run, name="kvatlas-step", daemon=True)

    def start(self) -> None:
        """Start the step thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Stop after the step in progress and give every block back. False if that step does not end in time. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._bell.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, request: GenerateRequest, predicted_tokens: int = 0, constraint: Constraint | None = None) -> None:
        """Queue a request. `predicted_tokens` only helps to say how much work waits here.

        From then on the `constraint` is the engine's, which closes it when the request ends.

        Raises `RequestRefused`, `ReplicaOverloaded` or `ReplicaFailed`; then nothing is queued, and the constraint is
        still the caller's.
        """
        self._check(request)
        if request.grammar is not None and constraint is None:
            raise ReplicaFailed("a request with a grammar came without the constraint made of it")
        contained = Contained(constraint) if constraint is not None else None
        with self._wake:
            if self.failure is not None or self._stopping:
                raise self.failure or ReplicaFailed("the replica is stopping")
            if self.waiting >= self._config.max_waiting:
                raise ReplicaOverloaded(
                    f"{self.waiting} requests wait for this replica already (engine.max_waiting); try again later"
                )
            self._leave(_Arrival(request, predicted_tokens, contained))

    def wake(self) -> None:
        """Look again now at requests whose constraints were not ready. Any thread, at any time; never waits."""
        self._bell.set()

    def abort(self, request_id: str) -> None:
        """Forget a request, wherever it is. Unknown and finished ids are ignored."""
        with self._wake:
            if self.failure is None:
                self._leave(request_id)

    def _leave(self, command: _Arrival | str) -> None:
        """Put a command into the inbox. The caller holds `_wake`."""
        if not (self._inbox or self._sequences):
            # Time spent idle is not time without progress.
            self._progress_at = self._clock()
        self._inbox.append(command)
        self._wake.notify()
        self._bell.set()

    @property
    def running(self) -> int:
        """Requests computed together now."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests queued, including those the step thread has not seen yet. A hint: other threads move it."""
        return len(self._scheduler.waiting) + len(self._arrived())

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens yet to be computed by requests that are here, without what is expected to be cached. A hint."""
        arriving = sum(arrival.uncached_tokens for arrival in self._arrived())
        return arriving + self._scheduler.queued_prefill_tokens

    @property
    def prefill_tokens_per_s(self) -> float:
        """Measured rate of prompt tokens; 0.0 while little was measured lately."""
        return self._rate.tokens_per_s(self._clock())

    def _arrived(self) -> list[_Arrival]:
        return [command for command in tuple(self._inbox) if isinstance(command, _Arrival)]

    @property
    def preemptions(self) -> int:
        """Times a running request gave its blocks up for an older one."""
        return self._scheduler.preemptions

    @property
    def stalled_s(self) -> float:
        """Seconds without a finished step while there is work, once that exceeds `stall_s`; else 0.0."""
        if not (self._sequences or self._inbox):
            return 0.0
        idle_s = self._clock() - self._progress_at
        return idle_s if idle_s > self._config.stall_s else 0.0

    def _check(self, request: GenerateRequest) -> None:
        self._limits.check(request)

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if not self._step():
                    self._bell.wait(_RETRY_S)
        except BaseException as error:
            _log.exception("the step thread failed; the replica cannot serve any more")
            self._end(
                ReplicaFailed(f"the replica's step thread failed: {type(error).__name__}: {error}"), orderly=False
            )
        else:
            self._end(ReplicaFailed("the replica is stopping"), orderly=True)

    def _wait_for_work(self) -> bool:
        """Apply queued commands, waiting for one if there is nothing to do. False: stop."""
        self._bell.clear()  # first, so that whatever comes while this step looks around is looked at in the next
        with self._wake:
            while not (self._inbox or self._sequences or self._stopping):
                self._wake.wait()
            if self._stopping:
                return False
            commands = list(self._inbox)
            # Registered before the inbox empties, so that work in hand is visible to `stalled_s` throughout.
            for command in commands:
                self._apply(command)
            self._inbox.clear()
        return True

    def _apply(self, command: _Arrival | str) -> None:
        if isinstance(command, str):
            sequence = self._sequences.pop(command, None)
            if sequence is not None:
                self._close(sequence)
                self._scheduler.finish(sequence)
            return
        request = command.request
        root = self._keyspace.root(self._root(request.salt))
        self._arrivals += 1
        block_tokens = self._pool.geometry.block_tokens
        sequence = Sequence.of(request, root, self._keyspace, block_tokens, self._arrivals, self._eos)
        sequence.predicted_tokens, sequence.constraint = command.predicted_tokens, command.constraint
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def _step(self) -> bool:
        """Compute one step. False if nothing could run though requests wait."""
        if self._pool.guard:
            self._pool.check_guard()
        # Before planning: who gets a token now decodes in this very step.
        late = self._decide_late()
        work, admitted = self._scheduler.plan()
        if admitted:
            # Before computing: the caller learns what was cached while the prompt is still being prefilled.
            self._on_outputs([_admission(sequence) for sequence in admitted])
        if not work:
            if self._scheduler.room_moved:
                # Waiting for other processes of the pool while they go on is not standing still.
                self._progress_at = self._clock()
            return late or not self._sequences
        began = self._clock()
        logits, order = self._model.forward([self._piece(item) for item in work])
        outputs = self._decide(work, order, logits)
        self._progress_at = self._clock()
        prefilled = sum(item.count for item in work if item.count > 1)
        self._rate.note(prefilled, self._progress_at - began, self._progress_at)
        if outputs:
            self._on_outputs(outputs)
        return True

    def _decide_late(self) -> bool:
        """Choose the tokens of sequences that have had their logits before their constraint. False: there are none."""
        late = [s for s in self._scheduler.running if s.logits is not None and s.ready]
        if not late:
            return False
        logits = torch.stack([s.logits for s in late if s.logits is not None])
        outputs = self._decide([Work(s, s.computed, 0) for s in late], list(range(len(late))), logits)
        self._progress_at = self._clock()
        self._on_outputs(outputs)
        return True

    def _decide(self, work: list[Work], order: list[int], logits: torch.Tensor) -> list[StepOutput]:
        """Choose the token of each row whose sequence is ready, `work[order[row]]`, and record the step.

        The others keep their logits. Mutates `logits`.
        """
        sequences = [work[index].sequence for index in order]
        ready = [row for row, sequence in enumerate(sequences) if sequence.ready]
        if len(ready) < len(order):
            for row in set(range(len(order))).difference(ready):
                sequences[row].logits = logits[row].clone()  # a view would keep those of all
            sequences, order, logits = [sequences[row] for row in ready], [order[row] for row in ready], logits[ready]
        found = outcomes(sequences, logits)
        self._scheduler.commit(
            work, {i: one.token for i, one in zip(order, found, strict=True) if one.token is not None}
        )
        return [self._settle(sequence, one) for sequence, one in zip(sequences, found, strict=True)]

    @staticmethod
    def _piece(item: Work) -> Piece:
        table = item.sequence.table
        assert table is not None
        tokens = item.sequence.tokens[item.start : item.start + item.count]
        return Piece(tokens, item.start, table.blocks, item.samples)

    def _settle(self, sequence: Sequence, outcome: Outcome) -> StepOutput:
        """What the outcome of a step, which is recorded, means for its sequence."""
        sequence.logits = None
        name, token = sequence.request_id, outcome.token
        if token is None:
            self._forget(sequence)
            return StepOutput(name, finish_reason=None if outcome.failure else "stop", failure=outcome.failure)
        if sequence.constraint is not None:
            sequence.constraint.accept(token)
        reason = sequence.finish_reason(token, self._context_tokens)
        if reason is not None:
            self._forget(sequence)
        is_text = reason != "stop" or token not in sequence.ends | self._eos
        return StepOutput(name, None, token, reason, logprob=outcome.logprob, is_text=is_text)

    def _forget(self, sequence: Sequence) -> None:
        self._close(sequence)
        self._scheduler.finish(sequence)
        del self._sequences[sequence.request_id]

    @staticmethod
    def _close(sequence: Sequence) -> None:
        if sequence.constraint is not None:
            sequence.constraint.close()

    def _end(self, failure: ReplicaFailed, *, orderly: bool) -> None:
        """Refuse what comes, fail what is here, give every block back; through the forced release unless `orderly`."""
        with self._wake:
            self.failure = failure
            arrived = self._arrived()
            self._inbox.clear()
        queued = [arrival.request.request_id for arrival in arrived]
        for constraint in [a.constraint for a in arrived] + [s.constraint for s in self._sequences.values()]:
            if constraint is not None:
                constraint.close()
        left = [*self._sequences, *(request_id for request_id in queued if request_id not in self._sequences)]
        for sequence in self._sequences.values():
            if orderly:
                self._scheduler.finish(sequence)
            else:
                self._scheduler.force_out(sequence, "failed step")
        self._sequences.clear()
        if left:
            self._on_outputs([StepOutput(request_id, failure=failure) for request_id in left])
