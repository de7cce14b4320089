"""Fields that other servers honour and this one does not, yet.

Ignoring one of them would change the output silently, so each is refused by name, unless its value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import invalid

# Field -> the values that ask for nothing (null always does).
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": (),
    "functions": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": (),
    "tools": (),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "typical_p": (1, 1.0),
    "use_beam_search": (False,),
    "web_search_options": (),
}
_STREAM_OPTIONS_HARMLESS: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
_REFUSED_PREFIX = "guided_"


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise `ApiError` 400 for the first field of `body` that asks for something not built."""
    _refuse(body, _HARMLESS, "")
    for name, value in body.items():
        if name.startswith(_REFUSED_PREFIX) and value is not None:
            raise _not_supported(name[:64])
    options = body.get("stream_options")
    if isinstance(options, Mapping):
        _refuse(options, _STREAM_OPTIONS_HARMLESS, "stream_options.")


def _refuse(fields: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], path: str) -> None:
    for name, harmless in table.items():
        value = fields.get(name)
        # The type is compared too: `logprobs: 0` is a request for logprobs, though 0 == False.
        if value is not None and not any(type(value) is type(item) and value == item for item in harmless):
            raise _not_supported(path + name)


def _not_supported(param: str) -> Exception:
    hint = " with a value above 1" if param in ("n", "best_of") else ""
    return invalid(f"'{param}'{hint} is not supported yet.", param, "unsupported_parameter")
