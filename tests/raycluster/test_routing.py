"""Two replicas behind the router: requests go to their prefix, the figures agree, and the directory is right."""

from __future__ import annotations

import random
import re
from typing import Any

import httpx
import pytest

from tests.raycluster.conftest import REPLICAS, Served
from tests.raycluster.directory_check import check_is_clean
from tests.raycluster.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def ask(served: Served, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": served.model, "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def prompts(groups: int, each: int, seed: int) -> list[str]:
    """Prompts of `groups` prefixes of 320 tokens (a token is a byte), shuffled."""
    rng = random.Random(seed)
    prefixes = [f"{number:03d}{rng.random()} " + "shared words " * 25 for number in range(groups)]
    made = [f"{prefix[:320]} question {turn} {rng.random()}" for prefix in prefixes for turn in range(each)]
    rng.shuffle(made)
    return made


def counters(served: Served, names: list[str]) -> dict[str, float]:
    """The exported totals, summed over processes and tags; replicas that died before this test do not count."""
    live = {replica["replica_id"] for replica in served.state()["replicas"]}
    found = dict.fromkeys(names, 0.0)
    text = httpx.get(served.metrics_url).text
    for name, tags, value in re.findall(r"^ray_kvatlas_(\w+?)_total\{([^}]*)\} (\S+)$", text, re.M):
        (replica_id,) = re.findall(r'replica_id="(\w+)"', tags) or [""]
        if name in found and (not replica_id or replica_id in live):
            found[name] += float(value)
    return found


def is_exported(served: Served, exported: dict[str, float]) -> bool:
    """Whether everything so far is in the scrape: every process reports when it likes."""
    state = served.state()
    replicas = state["replicas"]
    return bool(
        exported["router_requests"] == sum(state["routing"]["decisions"].values())
        and exported["router_measured_tokens"] == state["routing"]["measured_tokens"]
        and exported["prefix_cache_queries"] == sum(one["prefix_queried_tokens"] for one in replicas)
        and exported["prefix_cache_hits"] == sum(one["prefix_hit_tokens"] for one in replicas)
    )


def test_a_prefix_stays_where_it_is_cached_and_the_header_says_why(served: Served) -> None:
    first, *others = prompts(1, 6, seed=1)
    home = ask(served, first).headers
    assert "outcome=no_prefix" in home["x-kvatlas-route"]
    for prompt in others:
        answer = ask(served, prompt)
        assert answer.headers["x-kvatlas-replica"] == home["x-kvatlas-replica"]
        assert answer.headers["x-kvatlas-route"].startswith("policy=cost; outcome=prefix_hit; predicted_tokens=320;")
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 320


def test_prefixes_spread_over_the_replicas(served: Served) -> None:
    """Sooner or later: a pool with room for a new prefix is preferred to one that would lose an old one for it."""
    homes = set()
    for prompt in prompts(40, 1, seed=2):
        homes.add(ask(served, prompt).headers["x-kvatlas-replica"])
        if len(homes) == REPLICAS:
            return
    pytest.fail(f"40 new prefixes all went to {homes}")


def test_metrics_answers_and_status_tell_the_same_hits(served: Served) -> None:
    names = ["prefix_cache_queries", "prefix_cache_hits", "router_queried_tokens", "router_measured_tokens"]
    names += ["router_predicted_tokens", "router_phantom_tokens", "router_requests"]
    routing_before = served.state()["routing"]
    assert until(lambda: is_exported(served, counters(served, names)), 60)
    before = counters(served, names)
    answers = [ask(served, prompt) for prompt in prompts(4, 5, seed=3)]
    usages = [answer.json()["usage"] for answer in answers]
    queried = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    predicted = sum(int(re.findall(r"predicted_tokens=(\d+)", one.headers["x-kvatlas-route"])[0]) for one in answers)
    routes = [answer.headers["x-kvatlas-route"] for answer in answers]
    assert cached >= 4 * 4 * 320, "\n".join(routes)
    routing = served.state()["routing"]
    assert routing["queried_tokens"] - routing_before["queried_tokens"] == queried
    assert routing["measured_tokens"] - routing_before["measured_tokens"] == cached
    assert routing["predicted_tokens"] - routing_before["predicted_tokens"] == predicted

    wanted = dict(
        zip(names, [queried, cached, queried, cached, predicted, max(0, predicted - cached), 20], strict=True)
    )

    def grown() -> dict[str, float]:
        return {name: value - before[name] for name, value in counters(served, names).items()}

    until(lambda: grown() == wanted, 60)
    assert grown() == wanted


def test_every_policy_metric_is_exported(served: Served) -> None:
    ask(served, "metrics, please")
    wanted = ["router_decision_seconds_count", "directory_lag_seconds", "directory_state", "directory_resyncs_total"]
    wanted += ["directory_published_blocks", "directory_sessions_total", "router_bookings"]

    def exported() -> bool:
        text = httpx.get(served.metrics_url).text
        return all(f"ray_kvatlas_{name}" in text for name in wanted)

    assert until(exported, 60), [n for n in wanted if f"ray_kvatlas_{n}" not in httpx.get(served.metrics_url).text]


def test_the_directory_is_exact_at_rest(served: Served) -> None:
    for prompt in prompts(3, 2, seed=4):
        ask(served, prompt)
    shown = check_is_clean(served)
    assert "No difference" in shown
    assert all(replica["replica_id"] in shown for replica in served.state()["replicas"])


def test_bookings_are_gone_at_rest(served: Served) -> None:
    for prompt in prompts(2, 3, seed=5):
        ask(served, prompt, stream=False)
    assert until(lambda: served.state()["routing"]["bookings"] == 0, 10)


@pytest.mark.parametrize("count", [2, 5, 30])
@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_prompts_is_answered(served: Served, count: int, stream: bool) -> None:
    """Each choice is a request of its own to the router, at the same moment as the others."""
    asked = prompts(3, 10, seed=count)[:count]
    body = {"model": served.model, "prompt": asked, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    if stream:
        assert answer.text.count('"finish_reason":"length"') == count
        assert answer.text.rstrip().endswith("[DONE]")
    else:
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(count))
    assert until(lambda: served.state()["routing"]["bookings"] == 0, 10)
