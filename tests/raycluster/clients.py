"""Clients of a running application: load, prompts asked again, answers read as they come; and whether all of it is up."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.raycluster.conftest import REPLICAS, Served


def directory_of(served: Served) -> dict[str, Any]:
    """What the router knows of the directory."""
    found: dict[str, Any] = served.state()["routing"]["directory"]
    return found


def is_whole(served: Served) -> bool:
    """Every replica up, its pool known to the router, all of it."""
    return shows_all(served.state())


def shows_all(state: dict[str, Any]) -> bool:
    """What `is_whole` tells, of a body of /debug/state."""
    pools = state["routing"]["directory"]["pools"]
    live = {replica["replica_id"] for replica in state["replicas"]}
    routed = {name for pool in pools if pool["whole"] for name in pool["replica_ids"]}
    return len(live) == REPLICAS and routed == live and state["routing"]["directory"]["state"] == "live"


def remembered(served: Served, prompt: str) -> tuple[str, int]:
    """Asks for `prompt`; who answered, and how many of its tokens were cached there."""
    body = {"model": served.model, "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    cached = int(answer.headers["x-kvatlas-cached-tokens"])
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    return answer.headers["x-kvatlas-replica"], cached


class Load:
    """Clients that ask for prompts of a few prefixes, one after the other, until told to stop.

    Every prompt ends differently, or in one of `endings` ways: then all of them together need a limited number of blocks. Each
    client pauses for `pause_s` after every answer.
    """

    def __init__(self, served: Served, clients: int, endings: int = 0, pause_s: float = 0.0) -> None:
        self.results: Counter[str] = Counter()
        self.outcomes: list[tuple[float, str]] = []
        self._served = served
        self._endings = endings
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(clients)]

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        with httpx.Client(base_url=self._served.url, timeout=60) as client:
            while not self._stop.wait(self._pause_s):
                ending = rng.randrange(self._endings) if self._endings else rng.random()
                prompt = f"prefix {rng.randrange(6)} " + "of many words " * 20 + str(ending)
                body = {"model": self._served.model, "prompt": prompt, "max_tokens": 6, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                route = answer.headers.get("x-kvatlas-route", "")
                outcome = route.partition("outcome=")[2].partition(";")[0]
                self.results["ok" if answer.status_code == 200 else answer.text] += 1
                self.outcomes.append((time.monotonic(), outcome))

    def saw(self, outcome: str, since: float) -> bool:
        """Whether a request got `outcome` from the router after `since`, in monotonic seconds."""
        return any(at > since and seen == outcome for at, seen in self.outcomes)

    @contextmanager
    def running(self) -> Iterator[Load]:
        """The clients run while the body does."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(70)


class Stream:
    """A greedy completion of `tokens` tokens, read as it comes by a thread of its own. Begins at once."""

    def __init__(self, served: Served, prompt: str, tokens: int) -> None:
        self.replica = ""
        """Who answers; empty until the first text is there."""
        self.text = ""
        self.failure = ""
        """Code of the error event at its end; empty without one."""
        self._has_text = threading.Event()
        self._served = served
        self._body = {"model": served.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        body = self._body | {"ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._served.url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.failure = event["error"]["code"]
                    continue
                self.replica = answer.headers["x-kvatlas-replica"]
                self.text += "".join(choice["text"] for choice in event["choices"])
                self._has_text.set()

    def wait_for_text(self, seconds: float) -> bool:
        """Waits until its first text is there; whether it came in time."""
        return self._has_text.wait(seconds)

    @property
    def ended(self) -> bool:
        """Whether it is over, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Waits for its end."""
        self._thread.join(70)
        assert self.ended
