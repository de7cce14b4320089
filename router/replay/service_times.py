"""How long a replica computes: the calibration file of a replay.

A step computes `prompt` tokens of prompts and one token for each of `decodes` requests, and takes

    overhead_s + max(weights_s, (prompt + decodes) x token_s) + pairs x pair_s + context x context_token_s

`weights_s`: reading the weights once, which few tokens cannot do without. `token_s`: what one token costs in all layers but
attention. `pairs`: (query, key) pairs that attention looks at for the prompt tokens: of a chunk of c tokens from position p
on, c x (p + (c+1)/2); this is the part that grows with the square of a prompt. `context`: cached tokens that the decodes
read.

`step_tokens` and `max_running` are the engine's limits. A file is one JSON object with these names and a `comment`.

The file that is shipped, deploy/calibration-h100-8b.json, is derived on paper for one H100 SXM (989 TFLOP/s dense bfloat16,
3.35 TB/s) and a model of 8.03e9 parameters with 32 layers, 32 query heads, 8 KV heads of 128 (Llama 3.1 8B), bfloat16
throughout:

    token_s          2 FLOP x 7.50e9 parameters without the embeddings = 15.0e9 FLOP, at 55 % of the peak       27.6e-6 s
    pair_s           4 FLOP x 32 heads x 128 x 32 layers = 524,288 FLOP, at 45 % of the peak (flash attention)  1.18e-9 s
    weights_s        16.06e9 bytes less the input embedding of 1.05e9, at 80 % of the bandwidth                 5.6e-3 s
    context_token_s  2 x 8 x 128 x 32 layers x 2 bytes = 131,072 bytes, at 80 % of the bandwidth                48.9e-9 s
    overhead_s       scheduling, launches, sampling, assumed                                                    1.0e-3 s

Efficiencies are assumptions, in the range that serving engines report; nothing was measured.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np

from router.replay.errors import ReplayError
from router.replay.trace import FloatArray, IntArray, Trace

LIMITS: Final[dict[str, tuple[float, float]]] = {
    "token_s": (1e-12, 1e3),
    "pair_s": (0.0, 1e3),
    "weights_s": (0.0, 1e3),
    "context_token_s": (0.0, 1e3),
    "overhead_s": (0.0, 1e3),
    "step_tokens": (1, 1 << 20),
    "max_running": (1, 65_536),
}
"""Least and most of each: wide of any machine, and narrow enough to be simulated. Those of the last two are the engine's."""


@dataclass(frozen=True, slots=True)
class ServiceTimes:
    """See above. Seconds, tokens, requests."""

    token_s: float
    pair_s: float
    weights_s: float
    context_token_s: float
    overhead_s: float
    step_tokens: int
    max_running: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least, most = LIMITS[name]
            is_whole = type(value) is int
            if not (is_whole or (type(value) is float and isinstance(most, float))) or not least <= value <= most:
                kind = "a number" if isinstance(most, float) else "a whole number"
                raise ReplayError(f"{name} of a calibration is {kind} from {least:g} to {most:,}, got {value!r:.40}")
        if self.step_tokens <= self.max_running:
            raise ReplayError(
                f"step_tokens ({self.step_tokens}) of a calibration is above max_running ({self.max_running}): else "
                f"decodes leave no room for prompts"
            )

    def prefill_tokens_per_s(self, prompt_tokens: float) -> float:
        """Prompt tokens a second of prompts this long, computed alone from their first token on."""
        return 1.0 / (self.token_s + self.pair_s * prompt_tokens / 2 + self.overhead_s / self.step_tokens)

    def decode_s(self, context_tokens: float) -> float:
        """Seconds that one more decode with this context adds to a step."""
        return self.token_s + self.context_token_s * context_tokens

    def work_s(self, trace: Trace, cached_tokens: IntArray) -> FloatArray:
        """Returns the seconds of a busy replica that each request takes, with so many of its prompt tokens cached.

        Busy: steps are full, so the weights are read in the time of their tokens, and overhead is shared by `step_tokens`.
        """
        given, answer = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
        own = given - cached_tokens
        pairs = own * (cached_tokens + (own + 1) / 2)
        later = np.maximum(answer - 1, 0)
        context = later * (given + answer / 2)
        token_s = self.token_s + self.overhead_s / self.step_tokens
        total: FloatArray = (own + later) * token_s + pairs * self.pair_s + context * self.context_token_s
        return total

    def longest_s(self, trace: Trace) -> float:
        """Returns a bound of the seconds that one replica needs for all of the trace with nothing cached, and then once more for
        its longest request alone.
        """
        nothing = np.zeros(len(trace), np.int64)
        given, answer = trace.input_tokens.astype(np.float64), trace.output_tokens.astype(np.float64)
        steps = answer + np.ceil(given / (self.step_tokens - self.max_running))
        alone = self.work_s(trace, nothing) + steps * (self.overhead_s + self.weights_s)
        return float(self.work_s(trace, nothing).sum() + alone.max())

    def saturated_s(self, trace: Trace, replicas: int) -> float:
        """Returns how long `replicas` need at least for the trace: all its work, with one cache that keeps everything, shared
        evenly. A trace stretched to this length arrives at the rate called saturation (load 1).
        """
        return float(self.work_s(trace, trace.reusable_tokens()).sum()) / replicas


H100_8B: Final = ServiceTimes(
    token_s=27.6e-6,
    pair_s=1.18e-9,
    weights_s=5.6e-3,
    context_token_s=48.9e-9,
    overhead_s=1.0e-3,
    step_tokens=2048,
    max_running=256,
)
"""What deploy/calibration-h100-8b.json has, for where the file is not at hand."""


def read(file: Path) -> ServiceTimes:
    """Returns the service times in `file`. Raises ReplayError."""
    names = [field.name for field in fields(ServiceTimes)]
    form = f"it is a JSON object with {', '.join(names)}"
    try:
        record = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ReplayError(f"the calibration {file} cannot be read ({error.strerror}): check the path") from error
    except (ValueError, RecursionError) as error:
        raise ReplayError(f"{file} is no calibration (it is no JSON): {form}") from error
    if not isinstance(record, dict):
        raise ReplayError(f"{file} is no calibration (it is no JSON object): {form}")
    missing = [name for name in names if name not in record]
    if missing:
        raise ReplayError(f"{file} is no calibration ({', '.join(missing)} missing): {form}")
    return ServiceTimes(**{name: record[name] for name in names})
