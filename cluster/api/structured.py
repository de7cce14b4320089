"""What an answer must look like: the fields that ask for it, and the check of a grammar before anything is scheduled.

| field | value | the answer |
|---|---|---|
| `response_format` | {"type": "text"} | anything |
| | {"type": "json_object"} | any JSON object |
| | {"type": "json_schema", "json_schema": {"name", "schema", "strict"}} | JSON of that schema |
| `structured_outputs` | one of {"json": schema}, {"json_object": true} | JSON |
| | or {"regex": text}, {"choice": [text, ...]}, {"grammar": text} | the text |
| `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | as above, the older names | |

At most one in a request. A schema is enforced whatever `strict` says; one that cannot be enforced in full is refused, with
llguidance's own message. A schema may say in "x-guidance" how llguidance reads it. A grammar is in Lark's syntax as llguidance
extends it, or in GBNF.

Limits: GBNF is converted here, so only short ones are taken. Schemas that refer to others by URL are refused: nothing is fetched.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Protocol

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from actors.errors import RequestRefused
from actors.grammar_source import check_size
from actors.grammar_trial import GrammarTrial
from actors.request import Grammar
from cluster.api.errors import invalid, shorten, unavailable
from cluster.api.text import is_text

logger = logging.getLogger(__name__)

MAX_GBNF_CHARS = 8192
MAX_WAITING = 64
"""Grammars that wait to be tried, at most."""
KNOWN_GRAMMARS = 1024
"""Verdicts remembered."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class GrammarCodec(Protocol):
    """What is needed of the served model's tokenizer."""

    def grammar_tokenizer(self) -> LLTokenizer:
        """The tokenizer as llguidance wants it. May raise `RequestRefused`."""
        ...


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """What the fields of `body` ask for; None where the answer is free.

    Raises `ApiError` 400 for fields that are malformed or contradict each other. Whether the grammar makes sense: `check`.
    """
    asked = _asked(body)
    if len(asked) > 1:
        message = f"'{asked[0][0]}' and '{asked[1][0]}' both say what the answer must look like; give one of them."
        raise invalid(message, asked[1][0])
    return asked[0][1]() if asked else None


def param_of(body: Mapping[str, Any]) -> str:
    """The path of the field that `grammar_of` reads; "" where none asks for anything."""
    asked = _asked(body)
    return asked[0][0] if asked else ""


async def check(grammar: Grammar, codec: GrammarCodec, param: str = "response_format") -> None:
    """Raise `ApiError` 400 with `param` for a grammar that is wrong, takes too long or too much memory, or fits no text.

    503 when too many grammars wait to be tried. A grammar that was tried before costs nothing.
    """
    checker = _CHECKERS.get(codec)
    if checker is None:
        checker = _CHECKERS[codec] = GrammarChecker()
        weakref.finalize(codec, checker.close)
    await checker.check(grammar, codec, param)


class GrammarChecker:
    """Tries grammars in a child process, one at a time, and remembers the verdicts. Of one codec."""

    def __init__(self, trial: Callable[[LLTokenizer], GrammarTrial] = GrammarTrial) -> None:
        self._make_trial = trial
        self._trial: GrammarTrial | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvatlas-grammar-check")
        self._waiting = 0

    async def check(self, grammar: Grammar, codec: GrammarCodec, param: str) -> None:
        """See `check`."""
        try:
            check_size(grammar, param)
            problem = await self._problem(grammar, codec)
        except RequestRefused as error:
            raise invalid(error.message, param) from error
        if problem:
            raise invalid(problem, param)

    async def _problem(self, grammar: Grammar, codec: GrammarCodec) -> str:
        key = blake2b(f"{grammar.kind}\n{grammar.text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        if self._waiting >= MAX_WAITING:
            raise unavailable("Too many grammars wait to be checked. Retry in a moment.", "server_is_overloaded")
        self._waiting += 1
        try:
            problem = await asyncio.get_running_loop().run_in_executor(self._thread, self._try, grammar, codec)
        except OSError as error:
            logger.error("a grammar could not be checked: %s", error)
            raise unavailable("Grammars cannot be checked now. Retry in a moment.", "server_is_overloaded") from error
        finally:
            self._waiting -= 1
        self._known[key] = problem
        if len(self._known) > KNOWN_GRAMMARS:
            self._known.popitem(last=False)
        return problem

    def _try(self, grammar: Grammar, codec: GrammarCodec) -> str:
        if self._trial is None:
            self._trial = self._make_trial(codec.grammar_tokenizer())
        return self._trial.problem(grammar)

    def close(self) -> None:
        """End the child. Idempotent."""
        # Not waited for: this may be that thread, which has let go of a codec last.
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()


_CHECKERS: weakref.WeakKeyDictionary[GrammarCodec, GrammarChecker] = weakref.WeakKeyDictionary()


def _asked(body: Mapping[str, Any]) -> list[tuple[str, Callable[[], Grammar]]]:
    """The path of every field that asks for something, with what reads it. Raises `ApiError` where that cannot be told."""
    asked: list[tuple[str, Callable[[], Grammar]]] = []
    response_format = body.get("response_format")
    if response_format is not None:
        reader = _response_format(response_format)
        if reader is not None:
            asked.append(("response_format", reader))
    structured = body.get("structured_outputs")
    if structured is not None:
        asked.append(_structured_outputs(structured))
    for name, kind in _GUIDED.items():
        if body.get(name) is not None:
            asked.append((name, _reader(kind, body[name], name)))
    return asked


def _response_format(value: Any) -> Callable[[], Grammar] | None:
    path = "response_format"
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be an object.", path)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return lambda: _ANY_OBJECT
    if kind != "json_schema":
        given = "is missing" if kind is None else f"is {shorten(repr(kind), 64)}"
        message = f"'{path}.type' {given}; it must be 'text', 'json_object' or 'json_schema'."
        raise invalid(message, f"{path}.type")
    return lambda: _named_schema(value.get("json_schema"), f"{path}.json_schema")


def _named_schema(value: Any, path: str) -> Grammar:
    """OpenAI's object around a schema. Its description and `strict` change nothing: a schema is always enforced."""
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be an object with 'name' and 'schema'.", path)
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(f"'{path}.name' must be 1 to 64 letters, digits, '_' or '-'.", f"{path}.name")
    if not isinstance(value.get("strict"), bool | None):
        raise invalid(f"'{path}.strict' must be a boolean.", f"{path}.strict")
    if not isinstance(value.get("description"), str | None):
        raise invalid(f"'{path}.description' must be a string.", f"{path}.description")
    if not isinstance(value.get("schema"), dict):
        raise invalid(f"'{path}.schema' must be a JSON schema: an object.", f"{path}.schema")
    return _schema(value["schema"], f"{path}.schema")


def _structured_outputs(value: Any) -> tuple[str, Callable[[], Grammar]]:
    path = "structured_outputs"
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be an object.", path)
    given = {str(name): item for name, item in value.items() if item is not None and item is not False}
    for name in given:
        if name not in _READERS:
            field = f"{path}.{shorten(name, 64)}"
            raise invalid(f"'{field}' is not supported.", field, "unsupported_parameter")
    if len(given) != 1:
        raise invalid(f"'{path}' must have exactly one of {', '.join(sorted(_READERS))}.", path)
    [(name, item)] = given.items()
    return f"{path}.{name}", _reader(name, item, f"{path}.{name}")


def _reader(kind: str, value: Any, path: str) -> Callable[[], Grammar]:
    return lambda: _READERS[kind](value, path)


def _json(value: Any, path: str) -> Grammar:
    """A schema as an object, or as text that spells one."""
    if isinstance(value, str):
        try:
            value = json.loads(_text(value, path))
        except (ValueError, RecursionError) as error:
            raise invalid(f"'{path}' is not valid JSON: {shorten(str(error))}.", path) from error
    if not isinstance(value, dict):
        raise invalid(f"'{path}' must be a JSON schema: an object.", path)
    return _schema(value, path)


def _schema(value: dict[str, Any], path: str) -> Grammar:
    try:
        return Grammar("json_schema", json.dumps(value, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise invalid(f"'{path}' cannot be written as JSON: {shorten(str(error))}.", path) from error


def _json_object(value: Any, path: str) -> Grammar:
    if value is not True:
        raise invalid(f"'{path}' must be a boolean.", path)
    return _ANY_OBJECT


def _regex(value: Any, path: str) -> Grammar:
    return Grammar("regex", _text(value, path))


def _choice(value: Any, path: str) -> Grammar:
    """One of the texts exactly: literals, which nothing in a text can end."""
    if not isinstance(value, list) or not value:
        raise invalid(f"'{path}' must be a list of strings that is not empty.", path)
    texts = [_text(item, f"{path}.{index}") for index, item in enumerate(value)]
    return Grammar("lark", "start: " + " | ".join(json.dumps(text) for text in texts) + "\n")


def _grammar(value: Any, path: str) -> Grammar:
    text = _text(value, path)
    if "::=" not in text:
        return Grammar("lark", text)
    if len(text) > MAX_GBNF_CHARS:
        message = f"'{path}' in GBNF has {len(text)} characters, more than {MAX_GBNF_CHARS}; write it in Lark's syntax."
        raise invalid(message, path)
    try:
        return Grammar("lark", any_to_lark(text))
    except Exception as error:  # the converter raises what it likes
        reason = "it nests too deep" if isinstance(error, RecursionError) else shorten(" ".join(str(error).split()))
        raise invalid(f"'{path}' is no GBNF that can be read: {reason}.", path) from error


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise invalid(f"'{path}' must be a string.", path)
    if not is_text(value):
        raise invalid(f"'{path}' must not contain an unpaired surrogate (\\ud800 to \\udfff).", path)
    return value


_READERS: dict[str, Callable[[Any, str], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
