"""Text that a client sent: real text, and message content brought to one form."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from cluster.api.errors import shorten


def is_text(value: str) -> bool:
    """False when `value` holds half of a surrogate pair: JSON can spell it, UTF-8 and tokenizers cannot hold it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _require_text(value: str) -> str:
    if not is_text(value):
        raise PydanticCustomError("text", "Text must not contain an unpaired surrogate (\\ud800 to \\udfff)")
    return value


Text = Annotated[str, AfterValidator(_require_text)]


def flatten_content(value: Any) -> Any:
    """Message content as one string or None: a list of text parts becomes its texts, one per line.

    Chat templates of text models expect a string. Raises `PydanticCustomError` for parts that are not text.
    """
    if not isinstance(value, list):
        return value
    if not value:
        raise PydanticCustomError("content", "A list of content parts must not be empty")
    return "\n".join(_part_text(index, part) for index, part in enumerate(value))


def _part_text(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise _part_error(index, "must be an object with a type")
    if kind != "text":
        raise _part_error(index, f"of type '{shorten(kind)}' is not supported: only text is")
    text = part.get("text")
    if not isinstance(text, str):
        raise _part_error(index, "must have a string in 'text'")
    return text


def _part_error(index: int, problem: str) -> PydanticCustomError:
    return PydanticCustomError("content_part", "Content part {index} {problem}", {"index": index, "problem": problem})
