"""How a model writes tool calls, told from its chat template.

Three layouts cover the common templates that hand tools to the model: Hermes and Qwen, Llama 3, Mistral. Every other template
gets the generic one, in which this server describes the tools in the system message and the model answers as Hermes would
(`tool_prompt.py`). That includes templates with a layout of their own that is not JSON in tags: what the reader cannot read
must not be asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

_SHORT_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One layout. A call is a JSON object with "name" and `arguments_key`, between `opening` and `closing`.

    `array`: all calls of an answer are in one JSON array after `opening`. `bare`: an answer may begin with a call without
    `opening`. `tag_needed`: calls are not found without `opening`, so where that is a special token the text must keep it.
    `several`: the template can show an earlier answer with several calls. `in_template`: the template itself takes tools,
    calls and results. `short_ids`: it takes ids of nine letters and digits only.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str = "arguments"
    array: bool = False
    bare: bool = False
    tag_needed: bool = True
    several: bool = True
    in_template: bool = True
    short_ids: bool = False

    def call_id(self, new_id: Callable[[], str]) -> str:
        """A fresh id of a call, as this template can take it back."""
        if self.short_ids:
            return hashlib.blake2b(new_id().encode()).hexdigest()[:_SHORT_ID_CHARS]
        return f"call_{new_id()}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat(
    "llama3", "<|python_tag|>", "", arguments_key="parameters", bare=True, tag_needed=False, several=False
)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", array=True, bare=True, short_ids=True)
GENERIC = ToolFormat("generic", "<tool_call>", "</tool_call>", in_template=False)

_XML_MARKS = ("<function=", "<arg_key>", "<parameter=")
"""Of templates that have the tags of Hermes, and no JSON between them."""


def detect(chat_template: str | None) -> ToolFormat | None:
    """The layout of `chat_template`; None where there is no template, and so no chat."""
    if not chat_template:
        return None
    if "tools" in chat_template:
        if "[TOOL_CALLS]" in chat_template and "[ARGS]" not in chat_template:
            return MISTRAL
        if "<tool_call>" in chat_template and not any(mark in chat_template for mark in _XML_MARKS):
            return HERMES
        if '"parameters": dictionary' in chat_template.replace('\\"', '"'):
            return LLAMA3
    return GENERIC
