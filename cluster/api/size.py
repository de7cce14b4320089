"""How many values a piece of JSON holds, counted before anybody looks into them.

A body of some megabytes can hold millions of values. Checking each of them takes microseconds, and all of them together many
seconds in which nothing else happens; counting stops at the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic_core import PydanticCustomError


def holds_more(value: Any, most: int) -> bool:
    """Whether `value`, parsed JSON, holds more than `most` values in lists and objects, however deep."""
    seen, waiting = 0, [value]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, dict):
            inner = list(inner.values())
        if isinstance(inner, list):
            seen += len(inner)
            if seen > most:
                return True
            waiting += [one for one in inner if isinstance(one, dict | list)]
    return False


def at_most(most: int) -> Callable[[Any], Any]:
    """A validator for pydantic: the value as it is, refused if it holds more than `most` values."""

    def check(value: Any) -> Any:
        if holds_more(value, most):
            raise PydanticCustomError("too_many_values", "More than {most} values are too many", {"most": most})
        return value

    return check
