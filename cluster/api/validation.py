"""From a JSON object to a checked request body, with errors a person can act on."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster.api.errors import ApiError, invalid, shorten
from cluster.api.fields import Fields
from cluster.api.schemas import ChatRequest, CompletionRequest, GenerationFields
from cluster.api.settings import ApiSettings
from cluster.api.unsupported import CHAT_ONLY, COMPLETIONS_ONLY, refuse_unsupported

MAX_ERRORS = 3
A = TypeVar("A", bound=Fields)
F = TypeVar("F", bound=GenerationFields)


def validate(kind: type[F], body: dict[str, Any], settings: ApiSettings) -> F:
    """`body` as a `kind` of generation. Raises `ApiError`: 400 for a field at fault, 404 for a model that is not served."""
    fields = parse(kind, body)
    require_model(fields.model, settings.model_name)
    refuse_unsupported(body, CHAT_ONLY if issubclass(kind, ChatRequest) else COMPLETIONS_ONLY)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("'stream_options' is only allowed with 'stream': true.", "stream_options")
    limit = fields.requested_max_tokens
    if limit is not None and (fields.min_tokens or 0) > limit:
        raise invalid(f"'min_tokens' must not exceed the {limit} tokens of the answer.", "min_tokens")
    if fields.best_of not in (None, 1, fields.choices_per_prompt):
        message = f"'best_of' other than 'n' ({fields.choices_per_prompt}) is not supported: ask for all and choose."
        raise invalid(message, "best_of", "unsupported_parameter")
    if fields.priority and not settings.allow_priority:
        raise invalid("'priority' is not enabled on this server.", "priority", "unsupported_parameter")
    if isinstance(fields, ChatRequest):
        _check_chat(fields)
    elif isinstance(fields, CompletionRequest) and fields.echo and fields.logprobs is not None:
        message = "'echo' cannot be combined with 'logprobs': prompts have no log probabilities here."
        raise invalid(message, "echo", "unsupported_parameter")
    return fields


def parse(kind: type[A], body: dict[str, Any]) -> A:
    """`body` as a `kind`, each field by itself. Raises `ApiError` 400."""
    try:
        return kind.model_validate(body)
    except ValidationError as exc:
        raise _as_api_error(exc) from None


def require_model(wanted: str, model_name: str) -> None:
    """Raise `ApiError` 404 unless `wanted` is the served model."""
    if wanted != model_name:
        message = f"The model '{shorten(wanted)}' does not exist. This server serves '{model_name}'."
        raise ApiError(404, message, param="model", code="model_not_found")


def check_turn(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Raise `ApiError` 400 for a conversation that should both go on within its last message and with a new one."""
    if add_generation_prompt and continue_final_message:
        message = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        raise invalid(message, "continue_final_message")


def _check_chat(fields: ChatRequest) -> None:
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("'top_logprobs' is only allowed with 'logprobs': true.", "top_logprobs")
    check_turn(fields.add_generation_prompt, fields.continue_final_message)


def _as_api_error(exc: ValidationError) -> ApiError:
    """The first few field errors in one sentence each; `param` is the first one's path."""
    details = exc.errors(include_url=False)
    sentences = [_sentence(detail) for detail in details[:MAX_ERRORS]]
    if len(details) > MAX_ERRORS:
        sentences.append(f"and {len(details) - MAX_ERRORS} more")
    return invalid("; ".join(sentences) + ".", _path(details[0]) or None)


def _sentence(detail: ErrorDetails) -> str:
    path, value = _path(detail), detail["input"]
    echo = ""
    if isinstance(value, str | int | float):
        echo = f" (got {shorten(repr(value))})"
    return f"{path}: {detail['msg']}{echo}" if path else f"{detail['msg']}{echo}"


def _path(detail: ErrorDetails) -> str:
    context: dict[str, Any] = detail.get("ctx", {})
    return shorten(str(context.get("param") or ".".join(str(part) for part in detail["loc"])))
