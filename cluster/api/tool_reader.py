"""Tool calls read out of the text that a model writes, as it comes.

Text is held back only while it may still become a call: a suffix that may become an opening tag, and a call until its name and
the start of its arguments are there. From then on arguments stream as they come. What turns out to be no call (no JSON, a
name that is no tool's, arguments that are no object) comes out as content, byte for byte. What a part says depends on the
text alone, never on how it was cut, so the parts of a stream add up to those of the whole answer.

Limits: a call that has begun cannot be taken back. If its arguments end too early, or stop being JSON, they are what the model
wrote, up to the closing tag. White space between calls is dropped, and so is what is left of a call's markup where the answer
was cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from cluster.api.text import is_text
from cluster.api.tool_format import ToolFormat
from cluster.api.tool_json import JsonScanner, Member

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = r"[ \t\n\r]{0,16}"
_WHITESPACE = re.compile(r"[ \t\n\r]*")
_BETWEEN = re.compile(r"[ \t\n\r;]*")
"""What stands between calls that have neither tags nor an array around them."""
_HEAD = re.compile(
    rf'\{{{_SPACE}"name"{_SPACE}:{_SPACE}"([A-Za-z0-9_-]{{1,64}})"{_SPACE},{_SPACE}'
    rf'"(?:arguments|parameters)"{_SPACE}:{_SPACE}(?=\{{)'
)
"""The usual start of a call, bounded since it is looked for again with each piece of text. Any other object is read too, but only
once it is complete.
"""


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins: the `index`-th of the answer, from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call `index`: a piece of JSON text, as the model wrote it."""

    index: int
    text: str


Part = Content | CallStart | CallArguments


class ToolReader:
    """Of one answer. `push` its text, then `finish`; nothing after that.

    `names` are the tools that may be called. Neighbouring parts that one piece of text gives are never of the same kind and
    call.
    """

    def __init__(self, layout: ToolFormat, names: frozenset[str], new_id: Callable[[], str]) -> None:
        self._layout = layout
        self._names = names
        self._new_id = new_id
        self._text = ""
        """What came and is not yet told, or not yet dropped."""
        self._at = 0
        """How far `_text` is read as part of a call."""
        self._tag = 0
        """How much of `_text` is certainly content if it turns out to be no call."""
        self._scanner = JsonScanner()
        self._start = 0
        self._calls = 0
        self._ended = False
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._gap

    @property
    def called(self) -> bool:
        """Whether a call was read: the finish reason is then "tool_calls"."""
        return self._calls > 0

    def push(self, text: str) -> list[Part]:
        """What `text` adds."""
        self._text += text
        return self._run()

    def finish(self) -> list[Part]:
        """What was held back: the answer is over."""
        self._ended = True
        return self._run()

    def _run(self) -> list[Part]:
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    # States. Each returns whether it got anywhere; False waits for more text.

    def _gap(self) -> bool:
        """At the start of the answer, or after a call: white space is held, for a call may follow."""
        layout = self._layout
        lone = layout.bare and not layout.array
        start = self._at = _skip(self._text, self._at, _BETWEEN if self.called and lone else _WHITESPACE)
        rest = self._text[start : start + len(layout.opening) + 1]
        if not rest:
            return self._end_of_gap() if self._ended else False
        if layout.opening and rest.startswith(layout.opening):
            return self._open(start + len(layout.opening), tag=start + len(layout.opening))
        if layout.opening.startswith(rest) and not self._ended:
            return False
        may_be_bare = lone or (layout.bare and not self.called)
        if may_be_bare and rest[0] == ("[" if layout.array else "{"):
            return self._open(start, tag=start + 1)
        return self._go(self._content)

    def _end_of_gap(self) -> bool:
        if not self.called:
            self._say(self._text)
        self._text = ""
        return False

    def _content(self) -> bool:
        """Text, up to an opening tag or what may become one."""
        opening = self._layout.opening
        at = self._text.find(opening) if opening else -1
        if at >= 0:
            self._drop(self._say_to(at))
            return self._open(len(opening), tag=len(opening))
        held = 0 if self._ended else _may_become(self._text, opening)
        self._drop(self._say_to(len(self._text) - held))
        return False

    def _array(self) -> bool:
        """After the opening of an array of calls."""
        self._at = _skip(self._text, self._at)
        if self._at == len(self._text):
            return self._no_call() if self._ended else False
        if self._text[self._at] != "[":
            return self._no_call()
        self._at += 1
        return self._go(self._object)

    def _object(self) -> bool:
        """Where a call's object must begin."""
        self._at = _skip(self._text, self._at)
        if self._at == len(self._text):
            return self._no_call() if self._ended else False
        if self._text[self._at] != "{":
            return self._no_call()
        self._start = self._at
        self._scanner = JsonScanner()
        return self._go(self._head)

    def _head(self) -> bool:
        """Inside a call's object, before it is known whose call it is."""
        head = _HEAD.match(self._text, self._start)
        if head is not None:
            if head.group(1) not in self._names:
                return self._no_call()
            self._begin(head.group(1))
            self._drop(head.end())
            self._scanner = JsonScanner()
            return self._go(self._arguments)
        self._at = self._scanner.feed(self._text, self._at)
        if self._scanner.done:
            return self._complete()
        return self._no_call() if self._scanner.failed or self._ended else False

    def _complete(self) -> bool:
        """A whole object whose members come in another order: it is a call, or none."""
        call = _call(self._text[self._start : self._at], self._scanner.members)
        if call is None or call[0] not in self._names:
            return self._no_call()
        self._begin(call[0])
        self._say_arguments(call[1])
        self._drop(self._at)
        return self._go(self._after_object)

    def _arguments(self) -> bool:
        """Inside the arguments."""
        taken = self._scanner.feed(self._text)
        self._say_arguments(self._text[:taken])
        self._drop(taken)
        if self._scanner.failed:
            return self._go(self._broken_arguments)
        if not self._scanner.done:
            return False
        # What must follow is the rest of an object that has a member already.
        self._scanner = JsonScanner()
        self._scanner.feed('{"":null')
        return self._go(self._tail)

    def _broken_arguments(self) -> bool:
        """Arguments that are no JSON: all up to the closing tag is theirs."""
        closing = self._layout.closing
        at = self._text.find(closing) if closing else -1
        held = 0 if self._ended else _may_become(self._text, closing)
        told = at if at >= 0 else len(self._text) - held
        self._say_arguments(self._text[:told])
        self._drop(told)
        return self._go(self._after_object) if at >= 0 else False

    def _tail(self) -> bool:
        """Between the arguments and the end of the call's object: other members, which are dropped."""
        self._at = self._scanner.feed(self._text, self._at)
        if self._scanner.done:
            self._drop(self._at)
            return self._go(self._after_object)
        if self._scanner.failed:
            # The brace may be missing, and is not missed; anything else that is no JSON is content.
            self._at = 0
            return self._go(self._after_object)
        return self._cut_off()

    def _after_object(self) -> bool:
        """After a call: its closing tag, or what separates it from the next one in an array."""
        closing = self._layout.closing
        if not closing and not self._layout.array:
            return self._go(self._gap)
        start = self._at = _skip(self._text, self._at)
        rest = self._text[start : start + max(len(closing), 1)]
        if self._layout.array:
            if not rest:
                return self._cut_off()
            if rest == ",":
                self._at, self._tag = start + 1, 0
                return self._go(self._object)
            self._drop(start + 1 if rest == "]" else 0)
            return self._go(self._gap)
        if closing.startswith(rest) and rest != closing:
            return self._cut_off()
        self._drop(start + len(rest) if rest == closing else 0)
        return self._go(self._gap)

    # Steps between states.

    def _open(self, at: int, tag: int) -> bool:
        self._at, self._tag = at, tag
        return self._go(self._array if self._layout.array else self._object)

    def _no_call(self) -> bool:
        """The tag, and nothing else, is certainly content: another call may begin right after it."""
        self._drop(self._say_to(self._tag))
        return self._go(self._content)

    def _cut_off(self) -> bool:
        if self._ended:
            self._drop(len(self._text))
        return False

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _begin(self, name: str) -> None:
        self._parts.append(CallStart(self._calls, self._layout.call_id(self._new_id), name))
        self._calls += 1

    def _say_to(self, end: int) -> int:
        self._say(self._text[:end])
        return end

    def _say(self, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if text and isinstance(last, Content):
            self._parts[-1] = Content(last.text + text)
        elif text:
            self._parts.append(Content(text))

    def _say_arguments(self, text: str) -> None:
        index = self._calls - 1
        last = self._parts[-1] if self._parts else None
        if text and isinstance(last, CallArguments) and last.index == index:
            self._parts[-1] = CallArguments(index, last.text + text)
        elif text:
            self._parts.append(CallArguments(index, text))

    def _drop(self, count: int) -> None:
        self._text = self._text[count:]
        self._at = 0


def _skip(text: str, at: int, what: re.Pattern[str] = _WHITESPACE) -> int:
    """The first index from `at` on that is not `what`."""
    match = what.match(text, at)
    return match.end() if match else at


def _may_become(text: str, tag: str) -> int:
    """How long the longest end of `text` is that begins `tag` without being all of it."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def _call(text: str, members: list[Member]) -> tuple[str, str] | None:
    """Name and arguments of the call that the object `text` is, or None. Of members of one name the last counts."""
    values = {json.loads(text[slice(*member.key)]): text[slice(*member.value)] for member in members}
    name = values.get("name", "")
    if not name.startswith('"'):
        return None
    arguments = next((values[key] for key in _ARGUMENT_KEYS if key in values), "null")
    if arguments == "null":
        arguments = "{}"
    elif arguments.startswith('"'):
        # OpenAI's own form: JSON in a string.
        arguments = json.loads(arguments)
    scanner = JsonScanner()
    if not is_text(arguments) or scanner.feed(arguments) != len(arguments) or not scanner.done:
        return None
    return json.loads(name), arguments
