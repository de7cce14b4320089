"""JSON read as it comes: where one object ends, or the first character that cannot belong to it.

It builds no values, keeps no text and does not recurse, so neither length nor depth cost more than the reading. What it
accepts is RFC 8259, as `json.loads` does without its NaN and Infinity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WHITESPACE = " \t\n\r"

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER_CHARS = re.compile(r"[0-9+\-.eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


@dataclass(frozen=True, slots=True)
class Member:
    """A member of the outermost object, as (start, end) of key and value, in characters from the object's start."""

    key: tuple[int, int]
    value: tuple[int, int]


class JsonScanner:
    """One object. `done`: it is complete. `failed`: it is not JSON; both stay. `members` grows with what is complete."""

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.members: list[Member] = []
        self._open: list[str] = []
        self._state = "object"
        self._rest = ""
        """Of a word or of a \\u escape: what must still come; of a number: what came."""
        self._string_is_key = False
        self._taken = 0
        self._key = (0, 0)
        self._from = 0

    def feed(self, text: str, at: int = 0) -> int:
        """Take `text` from index `at`. Returns the index after what was taken: the end of the object, of the text, or,
        if `failed`, of what was right.
        """
        before = self._taken - at
        while at < len(text) and not self.done and not self.failed:
            at = self._take(text, at)
            self._taken = before + at
        return at

    def _take(self, text: str, at: int) -> int:
        if self._state == "string":
            return self._in_string(text, at)
        if self._state == "number":
            return self._in_number(text, at)
        if self._state in ("word", "escape", "hex"):
            return self._in_fixed(text, at)
        if text[at] in WHITESPACE and self._state != "object":
            match = _SPACE.match(text, at)
            return match.end() if match else at
        return self._structure(text[at], at)

    def _structure(self, char: str, at: int) -> int:
        """Between values. Returns `at` itself when `char` is wrong, or belongs to what begins here."""
        state = self._state
        here = self._taken
        if char == '"' and state in ("key", "key or end"):
            self._begin_string(is_key=True, start=here)
        elif state in ("value", "value or end") and char not in "]},:":
            return self._begin_value(char, at)
        elif state == "object" and char == "{":
            self._open.append("{")
            self._state = "key or end"
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "comma or end" and char == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif self._may_close(char):
            self._open.pop()
            self._value_ends(here + 1)
        else:
            self.failed = True
            return at
        return at + 1

    def _may_close(self, char: str) -> bool:
        if char == "}":
            return self._state in ("key or end", "comma or end") and self._open[-1] == "{"
        return char == "]" and self._state in ("value or end", "comma or end") and self._open[-1] == "["

    def _begin_value(self, char: str, at: int) -> int:
        if len(self._open) == 1:
            self._from = self._taken
        if char == '"':
            self._begin_string(is_key=False, start=self._taken)
        elif char in "{[":
            self._open.append(char)
            self._state = "key or end" if char == "{" else "value or end"
        elif char in _WORDS:
            self._state, self._rest = "word", _WORDS[char][1:]
        elif char == "-" or "0" <= char <= "9":
            self._state, self._rest = "number", ""
            return at
        else:
            self.failed = True
            return at
        return at + 1

    def _begin_string(self, is_key: bool, start: int) -> None:
        self._state = "string"
        self._string_is_key = is_key
        if is_key and len(self._open) == 1:
            self._key = (start, start)

    def _in_string(self, text: str, at: int) -> int:
        run = _IN_STRING.match(text, at)
        if run is not None and run.end() > at:
            return run.end()
        if text[at] == '"':
            if not self._string_is_key:
                self._value_ends(self._taken + 1)
            else:
                self._state = "colon"
                if len(self._open) == 1:
                    self._key = (self._key[0], self._taken + 1)
            return at + 1
        if text[at] == "\\":
            self._state = "escape"
            return at + 1
        self.failed = True
        return at

    def _in_number(self, text: str, at: int) -> int:
        run = _NUMBER_CHARS.match(text, at)
        if run is not None and run.end() > at:
            self._rest += run.group()
            return run.end()
        if _NUMBER.fullmatch(self._rest):
            self._value_ends(self._taken)
        else:
            self.failed = True
        return at

    def _in_fixed(self, text: str, at: int) -> int:
        """Inside true, false, null, or an escape: one character, of which few are right."""
        char = text[at]
        if self._state == "word" and char == self._rest[0]:
            self._rest = self._rest[1:]
            if not self._rest:
                self._value_ends(self._taken + 1)
        elif self._state == "escape" and char == "u":
            self._state, self._rest = "hex", "0000"
        elif self._state == "escape" and char in _ESCAPES:
            self._state = "string"
        elif self._state == "hex" and char in _HEX:
            self._rest = self._rest[1:]
            if not self._rest:
                self._state = "string"
        else:
            self.failed = True
            return at
        return at + 1

    def _value_ends(self, end: int) -> None:
        self.done = not self._open
        self._state = "comma or end"
        if len(self._open) == 1:
            self.members.append(Member(self._key, (self._from, end)))
