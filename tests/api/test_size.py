"""Values are counted before they are looked into, in a body of any shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.api.settings import ApiSettings
from cluster.api.size import holds_more
from tests.api.calls import CHAT, MODEL, chat_body, error_of
from tests.api.conftest import CONTEXT

JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


def counted(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(inner) + sum(map(counted, inner))


@given(JSON)
def test_every_value_counts_once(value: Any) -> None:
    count = counted(value)
    assert not holds_more(value, count)
    assert count == 0 or holds_more(value, count - 1)


def test_depth_is_no_limit() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    assert holds_more(value, 99_999)
    while value:  # a deep list frees itself by recursion
        value = value.pop()


@pytest.fixture
def settings() -> ApiSettings:
    """Room for bodies that are checked by their values."""
    return ApiSettings(MODEL, CONTEXT, max_body_bytes=8_000_000)


def tool(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"} | parameters}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": tool({"anyOf": [{}] * 30_000})}, "tools"),
        ({"tools": tool({"properties": {str(number): {} for number in range(30_000)}})}, "tools"),
        ({"tools": tool({"enum": list(range(30_000))})}, "tools"),
        ({"messages": [{}] * 200_000}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 200_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{}] * 200_000}]}, "messages"),
        ({"chat_template_kwargs": {str(number): 1 for number in range(20_000)}}, "chat_template_kwargs"),
    ],
)
async def test_too_many_values_are_refused_with_the_field(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    response = await client.post(CHAT, json=chat_body() | fields)
    error = error_of(response, 400)
    assert error["param"] == param
    assert "too many" in error["message"]
