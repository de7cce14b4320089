"""How a grammar is put to llguidance, and what it may cost: the same for a replica and for whoever tries it beforehand.

JSON is written as Python's json module does, ", " and ": " and no other white space: models know it so, and a small one that may
write white space writes little else. A schema says otherwise with an "x-guidance" of its own (llguidance's documentation).

Limits, all of llguidance's own making but the first and the last:
- `MAX_GRAMMAR_BYTES` of text, which also bounds how deep it nests, and so the stack that reading it takes (`deep_threads.py`);
- `LIMITS`: work to build a lexer, work and parser states for one mask, states that a lexer may have;
- building has neither a limit of time nor one of memory: multiples of a number of six digits take half a minute.
  `grammar_trial.py` is for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from actors.errors import RequestRefused
from actors.request import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 128 * 1024
LIMITS = LLParserLimits(
    # An ambiguous grammar costs its square, and while a token is taken in, llguidance holds the interpreter's lock. So many
    # are enough for an object of 300 optional properties.
    max_items_in_row=1000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
_END_CHARS = 150
_HINT = "Enable 'coerce_one_of' option"
_OUR_HINT = 'Use anyOf, or say "x-guidance": {"coerce_one_of": true} in the schema'
_WRITTEN: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check_size(grammar: Grammar, param: str) -> None:
    """Raise `RequestRefused` for more text than anybody reads."""
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise RequestRefused(
            f"The grammar has {size} bytes; give one of at most {MAX_GRAMMAR_BYTES} (a JSON schema counts as text).",
            param,
        )


def matcher_of(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the start of `grammar`, perhaps one in its error state. Takes up to seconds and much stack."""
    try:
        if grammar.kind == "json_schema":
            source = LLMatcher.grammar_from_json_schema(grammar.text, defaults=_WRITTEN)
        elif grammar.kind == "regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            source = LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise RequestRefused(f"The grammar is not valid: {error}") from error
    return LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)


def problem_of(matcher: LLMatcher) -> str:
    """What is wrong with the grammar, as a client may read it; empty while nothing is."""
    if not matcher.is_error():
        return ""
    message = matcher.get_error().split("\n<", 1)[0].strip()
    if message.startswith("panic"):
        return "The grammar cannot be compiled; simplify it."
    if message in ("NoExtension", "NoExtensionBias"):
        return "No text satisfies the grammar."
    return f"The grammar cannot be used: {_shortened(message.replace(_HINT, _OUR_HINT))}"


def _shortened(message: str) -> str:
    """In one line, both ends of it: it begins with what was read and ends with what is wrong there."""
    line = " ".join(message.split())
    return line if len(line) <= 2 * _END_CHARS else f"{line[:_END_CHARS]} ... {line[-_END_CHARS:]}"
