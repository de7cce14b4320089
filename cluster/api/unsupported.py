"""Fields that other servers honour and this one does not.

Ignoring one of them would change the output silently, so each is refused by name, unless its value asks for nothing. What
belongs to the other route (`messages` aside, which decides nothing there) is refused in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import invalid

_Table = dict[str, tuple[Any, ...]]

# Field -> the values that ask for nothing (null always does).
_EVERYWHERE: _Table = {
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
CHAT_ONLY: _Table = _EVERYWHERE | {"echo": (False,)}
"""For POST /v1/chat/completions."""
COMPLETIONS_ONLY: _Table = _EVERYWHERE | {
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "tool_choice": ("none",),
    "tools": (),
    "top_logprobs": (0,),
}
"""For POST /v1/completions."""
_LEGACY = "guided_"
_LEGACY_HONOURED = {"guided_json", "guided_regex", "guided_choice", "guided_grammar"}


def refuse_unsupported(body: Mapping[str, Any], table: _Table) -> None:
    """Raise `ApiError` 400 for the first field of `body` that asks for something not built."""
    for name, harmless in table.items():
        value = body.get(name)
        # The type is compared too: `top_logprobs: false` is no count, though 0 == False.
        if value is not None and not any(type(value) is type(item) and value == item for item in harmless):
            raise _not_supported(name)
    for name, value in body.items():
        if name.startswith(_LEGACY) and name not in _LEGACY_HONOURED and value is not None:
            raise _not_supported(name[:64])


def _not_supported(param: str) -> Exception:
    return invalid(f"'{param}' is not supported here.", param, "unsupported_parameter")
