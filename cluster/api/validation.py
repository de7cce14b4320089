"""From a JSON object to a checked request body, with errors a person can act on."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cluster.api.errors import ApiError, invalid, shorten
from cluster.api.schemas import GenerationFields
from cluster.api.unsupported import refuse_unsupported

MAX_ERRORS = 3
F = TypeVar("F", bound=GenerationFields)


def validate(kind: type[F], body: dict[str, Any], model_name: str) -> F:
    """`body` as a `kind`. Raises `ApiError`: 400 for a field at fault, 404 for a model that is not served."""
    try:
        fields = kind.model_validate(body)
    except ValidationError as exc:
        raise _as_api_error(exc) from None
    require_model(fields.model, model_name)
    refuse_unsupported(body)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("'stream_options' is only allowed with 'stream': true.", "stream_options")
    limit = fields.requested_max_tokens
    if limit is not None and (fields.min_tokens or 0) > limit:
        raise invalid(f"'min_tokens' must not exceed the {limit} tokens of the answer.", "min_tokens")
    return fields


def require_model(wanted: str, model_name: str) -> None:
    """Raise `ApiError` 404 unless `wanted` is the served model."""
    if wanted != model_name:
        message = f"The model '{shorten(wanted)}' does not exist. This server serves '{model_name}'."
        raise ApiError(404, message, param="model", code="model_not_found")


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
    return str(context.get("param") or ".".join(str(part) for part in detail["loc"]))
