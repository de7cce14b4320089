"""Headers and usage of a reply: what many choices have in common, and that nothing in them can break a response."""

from __future__ import annotations

import pytest

from actors.request import Admitted
from cluster.api.reply import ROUTE_CHARS, Outcome, cached_tokens, reply_headers, system_fingerprint, usage


def _route(*routes: str) -> str | None:
    admitted = [Admitted("r0", 1, 0, route) for route in routes]
    return reply_headers(admitted, 1).get("x-kvatlas-route")


@pytest.mark.parametrize(
    ("routes", "header"),
    [
        (("a",), "a"),
        (("a", "b", "a", "", "b"), "a, b"),
        (("",), None),
        (("", ""), None),
        ((" \t",), "?"),
        (("a\r\nx-evil: 1",), "a??x-evil: 1"),
        (("h\u00e9\U0001f600\x7f\x00",), "h????"),
        (("  ",), None),
    ],
)
def test_route_header(routes: tuple[str, ...], header: str | None) -> None:
    assert _route(*routes) == header


def test_the_route_header_is_bounded() -> None:
    assert _route("x" * ROUTE_CHARS) == "x" * ROUTE_CHARS
    for routes in (["x" * ROUTE_CHARS * 2], [f"policy=cost; predicted={count}" for count in range(256)]):
        header = _route(*routes)
        assert header is not None
        assert len(header) == ROUTE_CHARS
        assert header.endswith("...")


@pytest.mark.parametrize(
    ("counts", "copies", "cached"),
    [([5], 1, 5), ([5, 7], 1, 12), ([0, 48, 48], 3, 0), ([48, 16, 48, 0, 32, 16], 3, 16), ([], 1, 0)],
)
def test_what_was_cached_before_the_request_is_the_least_of_a_prompts_copies(
    counts: list[int], copies: int, cached: int
) -> None:
    admitted = [Admitted("r0", 50, count) for count in counts]
    assert cached_tokens(admitted, copies) == cached
    assert reply_headers(admitted, copies)["x-kvatlas-cached-tokens"] == str(cached)
    told = usage(admitted, [Outcome(2)] * len(counts), copies)
    assert told["prompt_tokens_details"] == {"cached_tokens": cached}
    assert told["prompt_tokens"] == 50 * len(counts) // copies
    assert told["completion_tokens"] == 2 * len(counts)
    assert told["total_tokens"] == told["prompt_tokens"] + told["completion_tokens"]


def test_usage_without_what_tells_of_the_caches() -> None:
    assert "prompt_tokens_details" not in usage([Admitted("r0", 5, 3)], [Outcome(1)], 1, tell_cached=False)


def test_the_fingerprint_names_model_and_version() -> None:
    names = {system_fingerprint("a", 10), system_fingerprint("a", 11), system_fingerprint("b", 10)}
    assert len(names) == 3
    assert all(name.startswith("fp_") for name in names)
    assert system_fingerprint("\ud800", 1)
