"""Prompts to replay: few-shot tasks that share a long prefix each, in an order that the seed decides.

A workload file is (gzipped) JSON: `prefixes` maps a task to its few-shot examples, `examples` is a list of `{task, input}`.
Each prompt is its task's prefix, then the question. Without a file, a synthetic workload of the same shape is made.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from cluster.errors import UsageError

SYNTHETIC_TASKS = 8
SYNTHETIC_EXAMPLES = 200
_WORDS = ("atlas", "block", "cache", "depth", "engine", "field", "graph", "heart", "index", "joint", "layer", "query")


def prompts(file: Path | None, count: int, seed: int) -> list[str]:
    """`count` prompts; the same for the same file and seed. Starts over where the file has fewer. Raises `UsageError`."""
    everything = synthetic(seed) if file is None else read(file)
    random.Random(seed).shuffle(everything)
    return [everything[index % len(everything)] for index in range(count)]


def read(file: Path) -> list[str]:
    """All prompts of a workload file, in its order. Raises `UsageError`."""
    try:
        raw = file.read_bytes()
        tree = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
        found = [prompt(tree["prefixes"][example["task"]], example["input"]) for example in tree["examples"]]
    except OSError as error:
        raise UsageError(f"Cannot read the workload {file} ({error.strerror}): check --workload.") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise UsageError(
            f"{file} is no workload ({type(error).__name__}: {error}): it needs `prefixes` (task to text) and `examples` "
            f"(list of task, input)."
        ) from error
    if not found:
        raise UsageError(f"{file} has no examples: give another workload.")
    return found


def prompt(prefix: str, question: str) -> str:
    """A task's prefix and one question, the way the tasks' own examples are written."""
    return f"{prefix}\n\nQ: {question}\nA: Let's think step by step."


def synthetic(seed: int) -> list[str]:
    """Prompts of made-up tasks: about 600 words shared within a task, 20 of its own in each prompt."""
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(words))

    prefixes = [text(600) for _ in range(SYNTHETIC_TASKS)]
    return [prompt(prefixes[index % SYNTHETIC_TASKS], text(20)) for index in range(SYNTHETIC_EXAMPLES)]
