"""One replica: a model, a pool, an engine, and the coroutines that answer requests.

Two threads matter. The event loop takes requests, turns tokens into text and streams it; the step thread computes. They
meet in the engine's inbox and in the mail room, once per step each way. A request is closed on every path by the
`finally` of `generate`: finished, refused, cancelled by a client that went away, or failed.

The region may be one that dead processes left, then the replica is warm from the start, or one that it shares with other
replicas of its machine (`region_home.py`).

Plain Python: `cluster.engine_deployment` puts it into a Ray Serve deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from actors.capacity import context_tokens
from actors.config import ReplicaConfig
from actors.cpus import usable_cpus
from actors.engine import Engine, StepOutput
from actors.errors import ReplicaFailed, ReplicaOverloaded, RequestRefused
from actors.fingerprint import model_fingerprint
from actors.grammar import GrammarConstraint, Grammars
from actors.loader import weight_files
from actors.mailbox import MailRoom
from actors.metrics import ReplicaMetrics
from actors.model import load_model
from actors.progress import Progress, SilentProgress
from actors.publication import Publication
from actors.region_home import Home, settle
from actors.request import Admitted, Event, GenerateRequest
from actors.status import ReplicaStatus
from actors.step import Piece
from actors.team import apart
from actors.text_stream import TextStream
from kvpool import DEFAULT_DIRECTORY, KeyRoot, KeySpace, Pool, SlotLoad, TidyReport, TidyThread
from kvpool.directory import DirectoryWriter, PoolLoad, ReplicaLoad, Space
from kvpool.storage import copy_block, kv_tensor

_log = logging.getLogger(__name__)
_LEVELS_PERIOD_S = 1.0
_INTEGRITY_PERIOD_S = 30.0


class Replica:
    """Serves one model from one pool. Build it where it will run; `close` leaves the region."""

    def __init__(
        self,
        config: ReplicaConfig,
        model_dir: str,
        *,
        replica_id: str,
        metrics: ReplicaMetrics,
        progress: Progress | None = None,
        region_directory: Path = DEFAULT_DIRECTORY,
        directory: Callable[[Space], DirectoryWriter] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`directory` gives the side of the directory that this pool writes to; None: it is published nowhere."""
        self._config = config
        self._progress = progress or SilentProgress()
        self._metrics = metrics
        self._clock = clock
        self._mail = MailRoom(config.engine.stream_interval_s)
        self._serial = itertools.count()
        self._checked_at = float("-inf")
        self._integrity_found = ""
        self._closed = False
        self._reporter: asyncio.Task[None] | None = None
        self.replica_id = replica_id
        _use_threads(config.engine.threads, config.membership.replicas)
        # Its bars would be drawn into the log of a process that has no terminal.
        transformers_logging.disable_progress_bar()
        path = Path(model_dir)
        with self._progress.phase("load") as phase:
            phase.done_bytes = sum(file.stat().st_size for file in weight_files(path))
            self._model = apart(
                lambda: load_model(
                    path, config.model.served_name, config.engine.mode, deterministic=config.engine.deterministic
                )
            )
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
            fingerprint = self._fingerprint = model_fingerprint(
                path, config.engine.mode, deterministic=config.engine.deterministic
            )
        with contextlib.ExitStack() as undo:
            with self._progress.phase("allocate") as phase:
                self._home = self._settle(region_directory, fingerprint)
                self._region = self._home.region
                undo.callback(self._region.leave)
                phase.done_bytes = self._region.path.stat().st_size
                self._pool = Pool.create(self._region, floor_blocks=self._home.floor_blocks, guard=config.pool.guard)
                undo.callback(self._pool.close)
                self._tidy = TidyThread(self._pool, config.pool.tidy_s, on_report=self._tidied)
                undo.callback(self._tidy.close)
                undo.callback(self._model.unbind)
            self._engine = self._make_engine(fingerprint)
            self._grammars = Grammars(self._tokenizer, self._model.vocab_size, self._model.eos_token_ids)
            undo.callback(self._grammars.close)
            with self._progress.phase("warm-up"):
                apart(self._warm_up)
            self._report_load()
            self._publication = self._publish(directory)
            self._memory = undo.pop_all()
        self._engine.start()

    def _settle(self, directory: Path, fingerprint: bytes) -> Home:
        return settle(
            self._config.pool,
            self._config.model,
            self._config.membership,
            replica_id=self.replica_id,
            geometry=self._model.geometry(self._config.pool.block_tokens),
            fingerprint=fingerprint,
            model_tokens=self._model.context_tokens,
            directory=directory,
        )

    def _make_engine(self, fingerprint: bytes) -> Engine:
        tensor = kv_tensor(self._region)
        self._model.bind(tensor)
        geometry = self._pool.geometry
        self._context_tokens = context_tokens(
            self._model.context_tokens,
            self._config.model.max_model_len,
            self._pool.capacity_blocks,
            geometry.block_tokens,
        )

        def root(salt: str) -> KeyRoot:
            return KeyRoot(fingerprint.hex(), geometry.block_tokens, geometry.dtype, salt=salt)

        return Engine(
            self._model,
            self._pool,
            KeySpace(self._config.membership.secret),
            root,
            self._config.engine,
            context_tokens=self._context_tokens,
            copy_block=lambda source, target: copy_block(tensor, source, target),
            on_outputs=self._deliver,
        )

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Takes a step's outputs; called by the step thread. Look-ups are counted here, where the pool counts them: a client may
        have left before its coroutine reads of its admission.
        """
        for output in outputs:
            if output.cached_tokens is not None:
                self._metrics.looked_up(output.prompt_tokens, output.cached_tokens)
        self._mail.deliver(outputs)

    def _publish(self, directory: Callable[[Space], DirectoryWriter] | None) -> Publication | None:
        if directory is None:
            return None
        block_tokens = self._pool.geometry.block_tokens
        space = Space(self._config.membership.cluster_id, self._fingerprint.hex(), block_tokens)
        return Publication(
            self._region,
            self._home.pool,
            directory(space),
            load=self._pool_load,
            stand_by=self._report_load,
            lease_s=self._config.directory.lease_s,
            clock=self._clock,
            rng=random.SystemRandom(),
        )

    def _pool_load(self) -> PoolLoad:
        """What is free in the pool, and how busy those are that share it. Called by the publisher's thread."""
        self._report_load()
        loads = {
            one.replica_id: ReplicaLoad(
                one.replica_id, one.queued_prefill_tokens, one.running, one.waiting, one.prefill_tokens_per_s
            )
            for one in self._pool.loads()
        }
        return PoolLoad(self._pool.unused(), tuple(loads.values()))

    def _report_load(self) -> None:
        """Shows how busy this replica is to the one that publishes the pool."""
        engine = self._engine
        self._pool.report_load(
            SlotLoad(
                self.replica_id,
                engine.queued_prefill_tokens,
                engine.running,
                engine.waiting,
                engine.prefill_tokens_per_s,
            )
        )

    def _tidied(self, _report: TidyReport) -> None:
        """After each pass of the one process that tidies the region."""
        self._region.touch()

    def _warm_up(self) -> None:
        """Run a chunk, a cached chunk and a decode once, so that no request pays for compiling and first touches."""
        tokens = min(2 * self._config.pool.block_tokens + 1, self._context_tokens)
        table = self._pool.table("warm-up")
        if self._pool.allocate(table, -(-tokens // self._config.pool.block_tokens)):
            cut = tokens // 2
            for start, end in ((0, cut), (cut, tokens - 1), (tokens - 1, tokens)):
                if end > start:
                    self._model.forward([Piece([0] * (end - start), start, table.blocks, True)])
        self._pool.release(table)

    async def generate(self, request: GenerateRequest, predicted_tokens: int = 0) -> AsyncGenerator[Event]:
        """Yield one `Admitted`, then `Delta`s until one has a finish reason. Closing the generator aborts the request.

        `predicted_tokens` of the prompt were expected to be cached here when it was routed.

        Raises `RequestRefused`, `ReplicaOverloaded`, `ReplicaFailed`.
        """
        self._start_reporter()
        arrived = self._clock()
        # An abort takes effect after the step in progress, so an id that is used again must not get the old one's tokens.
        request = dataclasses.replace(request, request_id=f"{request.request_id}.{next(self._serial)}")
        box = self._mail.open(request.request_id)
        reason, generated, last = "abort", 0, 0.0
        try:
            await self._submit(request, predicted_tokens)
            text = TextStream(request, self._tokenizer)
            while True:
                outputs = await box.take()
                self._raise_failure(outputs)
                for output in outputs:
                    if output.cached_tokens is not None:
                        yield Admitted(self.replica_id, len(request.prompt_token_ids), output.cached_tokens)
                delta = text.feed(outputs)
                if delta.token_ids:
                    now = self._clock()
                    if generated:
                        self._metrics.next_tokens(len(delta.token_ids), now - last)
                    else:
                        self._metrics.first_token(now - arrived)
                        if len(delta.token_ids) > 1:  # which came together, as far as anybody can see
                            self._metrics.next_tokens(len(delta.token_ids) - 1, 0.0)
                    generated, last = generated + len(delta.token_ids), now
                elif delta.finish_reason is None:
                    continue
                # Known before the last yield: a reader need not come back after it.
                reason = delta.finish_reason or reason
                yield delta
                if delta.finish_reason is not None:
                    return
        except Exception as error:
            reason = "overload" if isinstance(error, ReplicaOverloaded) else "error"
            raise
        finally:
            self._mail.close(request.request_id)
            self._engine.abort(request.request_id)
            self._metrics.finished(reason, self._clock() - arrived, generated)

    async def _submit(self, request: GenerateRequest, predicted_tokens: int) -> None:
        """Queue the request, with the constraint that its grammar makes, which is the engine's from then on."""
        constraint: GrammarConstraint | None = None
        if request.grammar is not None:
            constraint = await self._grammars.open(request.grammar, self._engine.wake)
        try:
            self._engine.submit(request, predicted_tokens, constraint)
        except BaseException:
            if constraint is not None:
                constraint.close()
            raise

    @staticmethod
    def _raise_failure(outputs: list[StepOutput]) -> None:
        """A new error of the same kind: each request raises its own."""
        for output in outputs:
            failure = output.failure
            if isinstance(failure, RequestRefused):
                raise RequestRefused(failure.message, failure.param, failure.code)
            if failure is not None:
                raise ReplicaFailed(str(failure))

    async def _integrity(self) -> str:
        """The pool's invariants: checked now while nothing runs, else as of the last check if that is recent.

        The check holds the pool's lock for milliseconds, which a health probe must not take from the step thread each time.
        """
        if self._engine.running == 0 or self._clock() - self._checked_at > _INTEGRITY_PERIOD_S:
            self._integrity_found = await asyncio.to_thread(self._pool.check_integrity)
            self._checked_at = self._clock()
        return self._integrity_found

    async def status(self) -> ReplicaStatus:
        """A snapshot. `integrity` is of now when the replica is at rest, else at most `_INTEGRITY_PERIOD_S` old."""
        self._start_reporter()
        integrity = await self._integrity()
        stats = self._pool.stats()
        return ReplicaStatus(
            replica_id=self.replica_id,
            pool=self._home.pool,
            scope=self._config.pool.scope,
            adopted=self._home.adopted,
            pid=os.getpid(),
            model=self._config.model.served_name,
            mode=self._config.engine.mode,
            fingerprint=self._fingerprint.hex(),
            kv_dtype=self._pool.geometry.dtype,
            block_tokens=self._pool.geometry.block_tokens,
            capacity_blocks=self._pool.capacity_blocks,
            blocks=dict(stats.blocks),
            held_blocks=self._pool.held_blocks(),
            running=self._engine.running,
            waiting=self._engine.waiting,
            prefix_queried_tokens=stats.prefix_queried_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            max_model_len=self._context_tokens,
            asyncio_tasks=len(asyncio.all_tasks()),
            integrity=integrity,
            stalled_s=self._engine.stalled_s,
            load_s=dict(self._progress.seconds),
            load_bytes=dict(self._progress.bytes),
            publisher=self._publication.report() if self._publication is not None else {},
        )

    async def indexed_keys(self) -> bytes:
        """The keys of every block that can be matched now, packed, in no order."""
        return await asyncio.to_thread(self._pool.indexed_keys)

    async def check_health(self) -> None:
        """Raise `ReplicaFailed` when the step thread died, or hangs with work in hand. Ray Serve then replaces the replica."""
        if self._engine.failure is not None:
            raise self._engine.failure
        stalled_s = self._engine.stalled_s
        if stalled_s:
            raise ReplicaFailed(f"the step thread has finished no step for {stalled_s:.0f} s")

    def close(self) -> None:
        """Stop the engine and leave the region; the last one to leave removes it. Idempotent."""
        self._closed = True
        if self._publication is not None:
            self._publication.close()  # first of all: nobody should be sent here any more
        if self._reporter is not None:
            self._reporter.cancel()
            self._reporter = None
        if self._engine.stop():
            self._memory.close()
        elif not self._region.closed:
            # The step still writes into the pool: the memory goes with the process.
            _log.warning("the step in progress does not end; leaving its memory mapped")
            self._tidy.close()
            self._region.unlink_if_alone()

    def _start_reporter(self) -> None:
        """The constructor runs outside the event loop, so the first coroutine starts it."""
        if self._reporter is None:
            self._reporter = asyncio.create_task(self._report_levels())

    async def _report_levels(self) -> None:
        while not self._closed:
            try:
                engine = self._engine
                self._metrics.levels(
                    self._home.pool, self._pool.stats(), engine.running, engine.waiting, engine.preemptions
                )
                if self._publication is not None:
                    self._metrics.published(self._publication.report())
            except Exception:
                _log.exception("could not report the levels of this replica; trying again")
            await asyncio.sleep(_LEVELS_PERIOD_S)


def _use_threads(threads: int, replicas: int) -> None:
    """Tell torch, and through it our kernels, how many threads to use; 0: an even share of the machine among its `replicas`.

    The share leaves one core to the ingress, the proxy and our own event loop: OpenMP threads that wait for each other lose far
    more when one of them is descheduled than the missing core would add.
    """
    count = threads or max(1, (usable_cpus() - 1) // replicas)
    torch.set_num_threads(count)
