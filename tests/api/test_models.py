"""GET /v1/models, by id too, and /openapi.json."""

from __future__ import annotations

import httpx

from tests.api.calls import error_of

CARD = {
    "id": "org/tiny",
    "object": "model",
    "created": 7,
    "owned_by": "kvatlas",
    "root": "org/tiny",
    "parent": None,
    "max_model_len": 128,
}


async def test_list_and_by_id(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models")).json() == {"object": "list", "data": [CARD]}
    assert (await client.get("/v1/models/org/tiny")).json() == CARD
    assert (await client.get("/v1/models/org%2Ftiny")).json() == CARD


async def test_unknown_id(client: httpx.AsyncClient) -> None:
    for name in ("other", "org", "org/tiny/x", "", "%ed%a0%80", "x" * 5000):
        error = error_of(await client.get(f"/v1/models/{name}"), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_openapi_describes_the_bodies_and_hides_the_debug_route(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert "/debug/state" not in document["paths"]
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    for hidden in ("/docs", "/redoc"):
        error_of(await client.get(hidden), 404)
