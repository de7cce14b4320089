"""The child process of the engine benchmark: `python -m cluster.bench.engine_worker [CORE]` does what its stdin says.

One command a line, `{"do": NAME, ...}`, answered by one line: what the method of that name below returns, or
`{"error": WHY}` for what kvatlas refuses. Ends with its stdin.

Limits: one engine.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from actors.config import Mode
from cluster.bench.engine_machine import Memory, Products
from cluster.bench.engine_model import Weights, weights_of
from cluster.bench.engine_scene import Scene
from kvpool import KvatlasError
from kvpool.process import start_ticks

Answer = dict[str, Any]
_STATUS = Path("/proc/self/status")


class Measured:
    """What this process has: an engine, or a look at the machine. Every public method is a command."""

    def __init__(self) -> None:
        self._imports_s = self._age_s()
        self._scene: Scene | None = None
        self._memory: Memory | None = None
        self._products: Products | None = None

    @staticmethod
    def _age_s() -> float:
        """Seconds since this process began; the kernel notes that in hundredths."""
        began = start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began

    def open(
        self,
        model_dir: str,
        directory: str,
        name: str,
        mode: Mode,
        deterministic: bool,
        threads: int,
        pool_tokens: int,
        max_running: int,
    ) -> Answer:
        """Starts an engine, and says where the time went until its first token."""
        torch.set_num_threads(threads)
        begun = time.perf_counter()
        self._scene = scene = Scene(
            Path(model_dir),
            Path(directory),
            name,
            mode=mode,
            deterministic=deterministic,
            pool_tokens=pool_tokens,
            max_running=max_running,
        )
        opened_s = time.perf_counter() - begun
        first_s, _ = scene.first_token(scene.prompt(-1, 1))
        startup = {"imports_s": self._imports_s, **scene.phases, "first_token_s": first_s}
        # What is in no phase: reading the fingerprint, starting threads.
        startup["rest_s"] = max(0.0, opened_s - sum(scene.phases.values()))
        shape = scene.shape
        return {
            "startup": {**startup, "total_s": sum(startup.values())},
            "weight_bytes": shape.weight_bytes,
            "linear_parameters": shape.linear_parameters,
            "token_bytes": shape.token_bytes,
            "step_tokens": scene.config.step_tokens,
            "max_running": scene.config.max_running,
        }

    def fill(self, numbers: Sequence[int], tokens: int) -> Answer:
        """Caches these prompts."""
        self._opened().fill(numbers, tokens)
        return {}

    def decode(self, numbers: Sequence[int], tokens: int, generated: int) -> Answer:
        """Streams of these prompts, on the clock that all processes of the machine share."""
        return {"streams": self._opened().decode(numbers, tokens, generated)}

    def first_token(self, number: int, tokens: int) -> Answer:
        """Time to the first token of a prompt, and what of it was cached."""
        scene = self._opened()
        seconds, cached = scene.first_token(scene.prompt(number, tokens))
        return {"seconds": seconds, "cached_tokens": cached}

    def tail(self, number: int, start: int, own: int, tokens: int) -> Answer:
        """The same of `tokens` tokens of prompt `own` behind the first `start` of prompt `number`."""
        scene = self._opened()
        seconds, cached = scene.first_token([*scene.prompt(number, start), *scene.prompt(own, tokens)])
        return {"seconds": seconds, "cached_tokens": cached}

    def peak(self) -> Answer:
        """The most memory that was resident at a time, the touched part of the pool included, in MiB."""
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return {"mb": next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024}

    def look(self, model_dir: str, mode: Mode, threads: int, read_bytes: int) -> Answer:
        """Gets ready to measure the machine, instead of an engine; memory by `read_bytes` at a time."""
        torch.set_num_threads(threads)
        weights: Weights = weights_of(Path(model_dir), mode)
        self._memory = Memory(read_bytes)
        dtypes = (torch.bfloat16, torch.float32) if mode == "fast" else (torch.float32,)
        self._products = Products(weights.linears, dtypes)
        return {}

    def bandwidth(self, seconds: float) -> Answer:
        """GB/s of large reads."""
        assert self._memory is not None, "look comes first"
        return {"gb_s": self._memory.read_gb_s(seconds)}

    def gemm(self, seconds: float) -> Answer:
        """GFLOP/s of the model's linear layers on many rows."""
        assert self._products is not None, "look comes first"
        return {"gflops": self._products.gflops(seconds)}

    def _opened(self) -> Scene:
        assert self._scene is not None, "open comes first"
        return self._scene

    def _close(self) -> None:
        if self._scene is not None:
            self._scene.close()


def commands(measured: Measured) -> dict[str, Callable[..., Answer]]:
    """The commands by name."""
    return {name: getattr(measured, name) for name in vars(Measured) if not name.startswith("_")}


def main() -> None:
    """Answers until stdin ends."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    logging.disable(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    measured = Measured()
    known = commands(measured)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        try:
            answer = known[command.pop("do")](**command)
        except KvatlasError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)
    measured._close()


if __name__ == "__main__":
    main()
