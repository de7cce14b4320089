"""Tenants told apart by their salt share nothing in pool, directory or router; what one has computed is there for itself."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from tests.raycluster.conftest import ADMIN_KEY, Served
from tests.raycluster.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def cached(served: Served, prompt: str, salt: str | None) -> int:
    """Asks; how many tokens were found cached."""
    body = {"model": served.model, "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def explained(served: Served, prompt: str, salt: str | None) -> list[dict[str, Any]]:
    """What the router sees of each replica for such a request."""
    body = {"model": served.model, "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    answer = httpx.post(f"{served.url}/debug/route", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    candidates: list[dict[str, Any]] = answer.json()["candidates"]
    return candidates


def test_equal_prompts_share_under_one_salt_and_under_no_other(served: Served) -> None:
    prompt = random.Random(77).randbytes(160).hex()  # 320 tokens
    assert cached(served, prompt, "tenant a") == 0
    mine = cached(served, prompt, "tenant a")
    assert mine >= 304

    def is_known() -> bool:
        return any(one["matched_tokens"] >= mine for one in explained(served, prompt, "tenant a"))

    assert until(is_known), "the directory does not have it"
    for other in ("tenant b", "tenant a ", "Tenant a", None):
        seen = explained(served, prompt, other)
        assert {(one["matched_tokens"], one["promised_tokens"], one["cached_tokens"]) for one in seen} == {(0, 0, 0)}
        assert cached(served, prompt, other) == 0
    for tenant in ("tenant a", "tenant b"):
        seen = explained(served, prompt, tenant)
        assert cached(served, prompt, tenant) == mine, seen
