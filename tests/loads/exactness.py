"""Greedy completions through HTTP, compared token for token with `model.generate`.

Text would hide differences (and add some), so the reference's tokens are decoded the way the server decodes and the texts are
compared; where they differ, the first differing token decides, with the reference's own gap between its two best logits there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.detokenizer import Detokenizer
from tests.fakes.tiny_models import reference_tokens


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, what the reference says after it, and its gaps between best and second-best logit."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]
    text: str


def make_cases(model_dir: Path, count: int, longest: int, new_tokens: int, seed: int = 11) -> list[Case]:
    """`count` prompts of 1 to `longest` tokens, some sharing prefixes, with the reference's continuation of each."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randrange(2, longest) for _ in range(count - 2))]
    text = " ".join(rng.choice(_WORDS) for _ in range(longest))
    shared: list[int] = tokenizer.encode(text, add_special_tokens=False)
    cases = []
    for index, length in enumerate(lengths):
        own = tokenizer.encode(" ".join(rng.choice(_WORDS) for _ in range(longest)), add_special_tokens=False)
        cut = length // 2 if index % 2 else 0
        prompt = (shared[:cut] + own)[:length]
        assert len(prompt) == length
        tokens, gaps = reference_tokens(model, prompt, new_tokens)
        detokenizer = Detokenizer(tokenizer, prompt)
        decoded = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
        cases.append(Case(prompt, tokens, gaps, decoded))
    return cases


async def compare(url: str, model: str, cases: list[Case], model_dir: Path) -> tuple[list[str], list[str], int]:
    """Send all cases at once. Returns mismatches, near ties of the reference that fell the other way, and cached tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        answers = await asyncio.gather(*(_complete(client, model, case) for case in cases))
    mismatches: list[str] = []
    ties: list[str] = []
    cached = 0
    for index, (case, body) in enumerate(zip(cases, answers, strict=True)):
        cached += body["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert body["usage"]["completion_tokens"] == len(case.tokens)
        text = body["choices"][0]["text"]
        if text == case.text:
            continue
        at = _first_difference(tokenizer, case, text)
        note = f"case {index} ({len(case.prompt)} tokens) differs at token {at}, where the reference's gap is {case.gaps[at]:.2e}"
        (ties if case.gaps[at] < 1e-4 else mismatches).append(note)
    return mismatches, ties, cached


def _first_difference(tokenizer: Any, case: Case, text: str) -> int:
    detokenizer = Detokenizer(tokenizer, case.prompt)
    said = ""
    for index, token in enumerate(case.tokens):
        said += detokenizer.push(token)
        if not text.startswith(said):
            return index
    return len(case.tokens) - 1


async def _complete(client: httpx.AsyncClient, model: str, case: Case) -> dict[str, Any]:
    answer = await client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": case.prompt,
            "max_tokens": len(case.tokens),
            "temperature": 0,
            "ignore_eos": True,
        },
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert isinstance(body, dict)
    return body


_WORDS = (
    "river",
    "stone",
    "light",
    "winter",
    "question",
    "garden",
    "number",
    "letter",
    "machine",
    "yellow",
    "paper",
    "music",
)
