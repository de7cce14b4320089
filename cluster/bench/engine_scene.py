"""One engine over one pool, as a replica has them, without the event loop and the text: who asks is timed by the token.

It is put together in phases that are timed, for the report of where a start spends its time:

    weights_s      transformers reads them
    proof_s        the trial passes in which the model shows its attention and the paged path is compared with its own; here the
                   attention kernels are loaded, or compiled where no cache has them
    pack_s         layers are replaced by ones laid out for the CPU
    pool_s         the region is created, with all its pages, and the pool opened
    first_steps_s  one chunk, one cached chunk, one decode

Prompts are random ids, a different one for each number, and always the same for a number: a shorter prompt of a number is the
beginning of its longer one, so that the pool finds it cached and measurements need not compute it again. No two numbers share
a block.

Limits: one at a time in a process; requests that the engine refuses or fails end in its errors.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from actors import model as model_module
from actors.capacity import context_tokens
from actors.config import EngineConfig, Mode, PoolConfig
from actors.engine import Engine, StepOutput
from actors.errors import ReplicaFailed, RequestRefused
from actors.fingerprint import model_fingerprint
from actors.model import load_model
from actors.progress import SilentProgress
from actors.request import GenerateRequest, Sampling
from actors.step import Piece
from actors.team import apart
from cluster.bench.engine_model import weights_of
from cluster.bench.engine_rates import Marks, Shape
from kvpool import KeyRoot, KeySpace, Pool, Region, TidyThread
from kvpool.storage import copy_block, kv_tensor

LIMIT_S: Final = 300.0
"""No request may take longer."""
_SECRET: Final = bytes(range(32))


class Scene:
    """The engine, running. As a context manager it stops the engine and removes the region."""

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        name: str,
        *,
        mode: Mode,
        deterministic: bool = False,
        pool_tokens: int,
        max_running: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Creates the region `directory`/`name`. `max_running` 0: the engine's default. Raises KvatlasError."""
        progress = SilentProgress()
        self._clock_ns = clock_ns
        self._changed = threading.Condition()
        self._marks: dict[str, list[int]] = {}
        self._cached: dict[str, int] = {}
        self._ended: dict[str, ReplicaFailed | RequestRefused | None] = {}
        self._serial = 0
        self._ends = contextlib.ExitStack()
        with progress.phase("weights_s"), _inner_phases(progress):
            model = apart(lambda: load_model(model_dir, "bench", mode, deterministic=deterministic))
        self.config = EngineConfig(
            mode=mode, deterministic=deterministic, max_running=max(EngineConfig().max_running, max_running)
        )
        pool = PoolConfig()
        geometry = model.geometry(pool.block_tokens)
        fingerprint = model_fingerprint(model_dir, mode, deterministic=deterministic)
        with self._ends, progress.phase("pool_s"):
            blocks = -(-pool_tokens // geometry.block_tokens)
            region = Region.create(directory, name, geometry, blocks, fingerprint, random.SystemRandom())
            self._ends.callback(region.leave)
            self._pool = Pool.create(region)
            self._ends.callback(self._pool.close)
            self._ends.callback(TidyThread(self._pool, pool.tidy_s).close)
            tensor = kv_tensor(region)
            model.bind(tensor)
            self._ends.callback(model.unbind)
            self._ends = self._ends.pop_all()
        self._engine = Engine(
            model,
            self._pool,
            KeySpace(_SECRET),
            lambda salt: KeyRoot(fingerprint.hex(), geometry.block_tokens, geometry.dtype, salt=salt),
            self.config,
            context_tokens=context_tokens(model.context_tokens, 0, blocks, geometry.block_tokens),
            copy_block=lambda source, target: copy_block(tensor, source, target),
            on_outputs=self._take,
        )
        with progress.phase("first_steps_s"):
            apart(lambda: self._first_steps(model))
        self._engine.start()
        self._vocab_size = model.vocab_size
        self.phases: dict[str, float] = dict(progress.seconds)
        self.weights = weights_of(model_dir, mode)
        self.shape = Shape(self.weights.read_bytes, self.weights.linear_parameters, geometry.token_bytes)

    def _first_steps(self, model: model_module.PagedModel) -> None:
        """As a replica does before it is ready."""
        size = self._pool.geometry.block_tokens
        with self._pool.table("first") as table:
            self._pool.allocate(table, 3)
            for start, end in ((0, size), (size, 2 * size), (2 * size, 2 * size + 1)):
                model.forward([Piece([0] * (end - start), start, table.blocks, True)])

    def fill(self, numbers: Sequence[int], tokens: int) -> None:
        """Computes the first `tokens` of these prompts, so that they are cached from now on."""
        self._wait([self._submit(self.prompt(number, tokens), 1) for number in numbers])

    def decode(self, numbers: Sequence[int], tokens: int, generated: int) -> list[Marks]:
        """Continues the first `tokens` of each of these prompts by `generated` tokens, all together; their streams."""
        names = [self._submit(self.prompt(number, tokens), generated) for number in numbers]
        return [list(zip(marks, range(1, len(marks) + 1), strict=True)) for marks in self._wait(names)]

    def first_token(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token after `prompt`, and how many of its tokens were cached."""
        begun = self._clock_ns()
        name = self._submit(prompt, 1)
        (marks,) = self._wait([name], keep_cached=True)
        return (marks[0] - begun) / 1e9, self._cached.pop(name)

    def prompt(self, number: int, tokens: int) -> list[int]:
        """The first `tokens` ids of prompt `number`."""
        return random.Random(number).choices(range(self._vocab_size), k=tokens)

    def _submit(self, prompt: Sequence[int], generated: int) -> str:
        name = f"{self._serial}"
        self._serial += 1
        sampling = Sampling(generated, temperature=0.0, ignore_eos=True)
        with self._changed:
            self._marks[name] = []
        self._engine.submit(GenerateRequest(name, tuple(prompt), sampling))
        return name

    def _take(self, outputs: list[StepOutput]) -> None:
        """What a step did; called by the step thread. Wakes nobody while a request goes on."""
        now = self._clock_ns()
        with self._changed:
            for output in outputs:
                if output.cached_tokens is not None:
                    self._cached[output.request_id] = output.cached_tokens
                if output.token is not None:
                    self._marks[output.request_id].append(now)
                if output.finish_reason is not None or output.failure is not None:
                    self._ended[output.request_id] = output.failure
                    self._changed.notify_all()

    def _wait(self, names: Sequence[str], *, keep_cached: bool = False) -> list[list[int]]:
        """Until all of `names` have ended; the moments of their tokens. Raises what one of them failed with."""
        with self._changed:
            if not self._changed.wait_for(lambda: all(name in self._ended for name in names), LIMIT_S):
                raise ReplicaFailed(f"the engine did not finish {len(names)} requests within {LIMIT_S:g} s")
            failures = [failure for name in names if (failure := self._ended.pop(name)) is not None]
            marks = [self._marks.pop(name) for name in names]
            for name in () if keep_cached else names:
                self._cached.pop(name, None)
        if failures:
            raise failures[0]
        return marks

    def close(self) -> None:
        """Stops the engine, removes the region. Idempotent."""
        if self._engine.stop():
            self._ends.close()

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def _inner_phases(progress: SilentProgress) -> Iterator[None]:
    """Splits the time of `load_model`: while the body runs, the functions that it is made of note their own.

    What is not there any more is counted to the phase around it. Not for several threads.
    """
    own = SilentProgress()
    names = {"adopt": "proof_s", "pack": "pack_s", "flatten": "pack_s"}
    originals = {name: getattr(model_module, name) for name in names if hasattr(model_module, name)}

    def timed(name: str) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            with own.phase(names[name]):
                return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(model_module, name, timed(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(model_module, name, original)
    pack_s, proof_s = own.seconds.get("pack_s", 0.0), own.seconds.get("proof_s", 0.0)
    # The phase around this one adds its whole time to what is noted here.
    progress.seconds |= {"weights_s": -proof_s, "proof_s": proof_s - pack_s, "pack_s": pack_s}
