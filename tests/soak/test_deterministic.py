"""A deterministic server of the demo model: the same tokens alone, in company, cut differently, cached or not, anywhere."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import ports
from cluster.bench.workload import prompts
from tests.raycluster.server_process import ROOT, Server, clean_environment, regions

pytestmark = [pytest.mark.soak, pytest.mark.ray, pytest.mark.timeout(3600)]

MODEL = "SmolLM2-135M-Instruct"
WORKLOAD = ROOT.parent / "shared" / "traces" / "bbh.json.gz"
PROMPTS = 30
TOKENS = 24
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came, and how."""

    token_ids: tuple[int, ...]
    replica: str
    cached: int


def bodies() -> list[dict[str, Any]]:
    """Real prompts, greedy and sampled in turn."""
    texts = prompts(WORKLOAD, PROMPTS, 0)
    rest = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
    return [{"prompt": text, **rest, **(SAMPLED if n % 2 else {"temperature": 0})} for n, text in enumerate(texts)]


async def ask(url: str, wanted: list[dict[str, Any]], at_once: int) -> tuple[list[Answer], float]:
    """The answers in the order of `wanted`, `at_once` of them at a time, and the seconds it took."""
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:

        async def one(body: dict[str, Any]) -> Answer:
            async with places:
                response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            reply = response.json()
            cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
            return Answer(tuple(reply["choices"][0]["token_ids"]), response.headers["x-kvatlas-replica"], cached)

        begun = time.monotonic()
        answers = await asyncio.gather(*map(one, wanted))
        return list(answers), time.monotonic() - begun


class Rounds:
    """Asks the same again and again, and notes every prompt's answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._bodies = bodies()
        self.answers: list[list[Answer]] = [[] for _ in self._bodies]

    def ask(self, at_once: int, seed: int, salt: str = "") -> float:
        """All of them in an order of the `seed`; a new `salt` finds nothing cached. Tokens a second."""
        order = random.Random(seed).sample(range(PROMPTS), PROMPTS)
        wanted = [self._bodies[n] | ({"cache_salt": salt} if salt else {}) for n in order]
        answers, seconds = asyncio.run(ask(self._url, wanted, at_once))
        for n, answer in zip(order, answers, strict=True):
            self.answers[n].append(answer)
        return PROMPTS * TOKENS / seconds


def serve(directory: Path, *options: str) -> tuple[Server, str]:
    port = ports.choose("127.0.0.1", 0)
    more = [word for option in options for word in ("--set", option)]
    server = Server(clean_environment(directory), "demo", "--port", str(port), "--pool-tokens", "60000", *more)
    server.wait_for("Stop with Ctrl-C")
    return server, f"http://127.0.0.1:{port}"


def test_tokens_depend_on_the_request_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not WORKLOAD.exists():
        pytest.skip(f"the workload {WORKLOAD.name} is not beside the repository")
    before = regions()
    found: list[list[list[Answer]]] = []
    rates: dict[str, float] = {}
    for name, options in {
        "deterministic": ("engine.deterministic=true", "router.policy=round_robin"),
        "deterministic, other chunks": (
            "engine.deterministic=true",
            "router.policy=round_robin",
            "engine.step_tokens=72",
        ),
        "fast": ("router.policy=round_robin",),
    }.items():
        directory = tmp_path / str(len(rates))
        directory.mkdir()
        server, url = serve(directory, *options)
        try:
            rounds = Rounds(url)
            rounds.ask(1, 0)  # alone, cold
            rounds.ask(1, 1)  # alone, another order: half of them on the other replica, many with a cached prefix
            rates[name] = rounds.ask(16, 2, salt="b")  # in company, cold
            rounds.ask(16, 3)  # in company, cached
            found.append(rounds.answers)
        finally:
            server.close()
    assert regions() <= before
    with capsys.disabled():
        for name, answers in zip(rates, found, strict=True):
            differing = sum(len({one.token_ids for one in of_prompt}) > 1 for of_prompt in answers)
            print(
                f"\n{name}: {rates[name]:.0f} tokens/s, {differing} of {PROMPTS} prompts answered in more than one way"
            )
    same = [first + second for first, second in zip(*found[:2], strict=True)]
    for of_prompt in same:
        assert len({one.token_ids for one in of_prompt}) == 1
        assert all(len(one.token_ids) == TOKENS for one in of_prompt)
    assert sum(len({one.replica for one in of_prompt[:4]}) == 2 for of_prompt in same) >= PROMPTS / 2
    assert any(one.cached > 0 for of_prompt in same for one in of_prompt)
    assert any(one.cached == 0 for of_prompt in same for one in of_prompt)
