"""Headers of a reply: what many choices have in common, and that nothing in them can break a response."""

from __future__ import annotations

import pytest

from actors.request import Admitted
from cluster.api.reply import ROUTE_CHARS, reply_headers


def _route(*routes: str) -> str | None:
    admitted = [Admitted("r0", 1, 0, route) for route in routes]
    return reply_headers(admitted).get("x-kvatlas-route")


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
