"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from cluster.api.json_response import json_response
from cluster.api.settings import ApiSettings
from cluster.api.validation import require_model


def models_router(settings: ApiSettings) -> APIRouter:
    """The routes, bound to `settings`."""
    router = APIRouter()

    @router.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        """The one model served here."""
        return json_response({"object": "list", "data": [_card(settings)]})

    # `path`, because the ids of models from a hub contain slashes.
    @router.get("/v1/models/{model_id:path}", response_model=None)
    async def get_model(model_id: str) -> Response:
        """The card of one model."""
        require_model(model_id, settings.model_name)
        return json_response(_card(settings))

    return router


def _card(settings: ApiSettings) -> dict[str, Any]:
    return {
        "id": settings.model_name,
        "object": "model",
        "created": settings.created,
        "owned_by": "kvatlas",
        "root": settings.model_name,
        "parent": None,
        "max_model_len": settings.max_model_len,
    }
