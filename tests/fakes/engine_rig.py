"""An engine over a real pool, with the outputs of every request collected. The model is the toy one unless another is given."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from actors.config import EngineConfig
from actors.constraint import Constraint
from actors.engine import Engine, StepOutput
from actors.model import PagedModel
from actors.request import GenerateRequest, Sampling, TokenLogprob
from kvpool import BlockGeometry, KeyRoot, KeySpace, Pool, Region
from kvpool.storage import copy_block, kv_tensor
from tests.fakes.toy_model import ToyModel

SECRET = bytes(range(32))


class EngineRig:
    """Build, use as a context manager, read `tokens[request_id]`. Leaving it checks that no block is held."""

    def __init__(
        self,
        directory: Path,
        *,
        blocks: int = 16,
        block_tokens: int = 4,
        vocab_size: int = 2,
        eos: tuple[int, ...] = (),
        context_tokens: int = 10_000,
        paged_model: PagedModel | None = None,
        **engine: Any,
    ) -> None:
        geometry = BlockGeometry(1, 1, 1, block_tokens, "float32")
        if paged_model is not None:
            geometry = paged_model.geometry(block_tokens)
        name = f"rig-{random.randrange(2**40):x}"
        self.region = Region.create(directory, name, geometry, blocks, bytes(32), random.Random(1))
        self.pool = Pool.create(self.region)
        self.model = ToyModel(blocks, block_tokens, vocab_size, eos)
        copy: Callable[[int, int], None] = self.model.copy_block
        if paged_model is not None:
            tensor = kv_tensor(self.region)
            paged_model.bind(tensor)
            copy = partial(copy_block, tensor)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.cached: dict[str, int] = {}
        self.finished: dict[str, str] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = defaultdict(list)
        self.is_text: dict[str, list[bool]] = defaultdict(list)
        self.failures: dict[str, Exception] = {}
        self._changed = threading.Condition()
        self.engine = Engine(
            paged_model or self.model,
            self.pool,
            KeySpace(SECRET),
            lambda salt: KeyRoot("toy", block_tokens, "float32", salt=salt),
            EngineConfig(**engine),
            context_tokens=context_tokens,
            copy_block=copy,
            on_outputs=self._collect,
        )

    def submit(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        salt: str = "",
        predicted_tokens: int = 0,
        priority: int = 0,
        constraint: Constraint | None = None,
        **sampling: Any,
    ) -> None:
        """Queue a request, a greedy one unless a temperature is given."""
        chosen = Sampling(max_tokens, **{"temperature": 0.0, **sampling})
        request = GenerateRequest(request_id, tuple(prompt), chosen, salt=salt, priority=priority)
        self.engine.submit(request, predicted_tokens, constraint)

    def wait(self, *request_ids: str, timeout_s: float = 20.0) -> None:
        """Until all of `request_ids` ended."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not all(request_id in self.finished for request_id in request_ids):
                left = deadline - time.monotonic()
                assert left > 0, f"only {sorted(self.finished)} of {request_ids} ended; waiting {self.engine.waiting}"
                self._changed.wait(left)

    def wait_idle(self, timeout_s: float = 20.0) -> None:
        """Until the engine has nothing to do."""
        deadline = time.monotonic() + timeout_s
        while self.engine.running or self.engine.waiting or self.engine._inbox or self.engine._sequences:
            assert time.monotonic() < deadline, "the engine does not come to rest"
            time.sleep(0.002)

    def _collect(self, outputs: list[StepOutput]) -> None:
        with self._changed:
            for output in outputs:
                if output.cached_tokens is not None:
                    self.cached[output.request_id] = output.cached_tokens
                if output.token is not None:
                    self.tokens[output.request_id].append(output.token)
                    self.is_text[output.request_id].append(output.is_text)
                if output.logprob is not None:
                    self.logprobs[output.request_id].append(output.logprob)
                if output.finish_reason is not None:
                    self.finished[output.request_id] = output.finish_reason
                if output.failure is not None:
                    self.finished[output.request_id] = f"failed: {output.failure}"
                    self.failures[output.request_id] = output.failure
            self._changed.notify_all()

    def __enter__(self) -> EngineRig:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.stop()
        try:
            if error is None:
                assert self.pool.held_blocks() == 0
                assert self.pool.check_integrity() == ""
        finally:
            self.pool.close()
            self.region.unlink()
            self.region.close()
