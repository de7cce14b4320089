"""The key ring, and the server behind it."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest import mock

import httpx
import pytest
from fastapi import FastAPI

from cluster.api.app import ApiSettings, build_app
from cluster.api.identity import Identity
from cluster.api.key_list import KeyListError, digest_of, parse_keys
from cluster.api.keys import LOOK_S, KeyRing
from tests.api.calls import CHAT, chat_body, error_of
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine

ALICE = "alice-0123456789-key"
BOB = "bob-0123456789-key"
ADMIN = "admin-0123456789-key"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ring(text: str = f"alice:{ALICE} bob:{BOB}", secret: bytes = b"") -> KeyRing:
    return KeyRing(parse_keys(text), salt_secret=secret)


def test_whose_key_it_is() -> None:
    keys = ring()
    assert keys.identify(ALICE) == Identity("alice")
    assert keys.identify(BOB) == Identity("bob")
    for wrong in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), digest_of(ALICE).hex(), "alice", "\udce9\ud800"):
        assert keys.identify(wrong) is None


def test_every_digest_is_compared_whichever_matches() -> None:
    keys = ring()
    counts = []
    for given in (ALICE, BOB, "nobody's"):
        with mock.patch("cluster.api.keys.hmac.compare_digest", side_effect=lambda a, b: a == b) as compare:
            keys.identify(given)
        counts.append(compare.call_count)
    assert counts == [2, 2, 2]


def test_salts_per_key_are_one_per_name() -> None:
    keys = ring(f"alice:{ALICE} alice:{ALICE}2 bob:{BOB}", b"s" * 32)
    found = [keys.identify(key) for key in (ALICE, ALICE + "2", BOB)]
    salts = [identity.salt for identity in found if identity is not None]
    assert len(salts) == 3
    assert salts[0] == salts[1] != salts[2]
    assert all(salts)


def follow(tmp_path: Path, text: str) -> tuple[Path, KeyRing, Clock]:
    file, clock = tmp_path / "keys", Clock()
    file.write_text(text)
    return file, KeyRing(file=file, clock=clock), clock


def test_a_changed_file_counts_within_the_interval(tmp_path: Path) -> None:
    file, keys, clock = follow(tmp_path, f"alice:{ALICE}")
    file.write_text(f"bob:{BOB} alice2:{ALICE}2")
    assert keys.identify(ALICE) is not None, "looked at before its time"
    clock.now += LOOK_S
    assert keys.identify(ALICE) is None
    assert keys.identify(BOB) == Identity("bob")


def test_a_file_that_is_swapped_for_one_of_the_same_age_and_size_is_read(tmp_path: Path) -> None:
    file, keys, clock = follow(tmp_path, f"a:{ALICE}")
    other = tmp_path / "other"
    other.write_text(f"b:{ALICE}")
    before = file.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(file)
    clock.now += LOOK_S
    assert keys.identify(ALICE) == Identity("b")


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_text("what?")])
def test_a_file_that_went_wrong_changes_nothing_and_is_told_once(
    tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    file, keys, clock = follow(tmp_path, f"alice:{ALICE}")
    damage(file)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            clock.now += LOOK_S
            assert keys.identify(ALICE) == Identity("alice")
    assert len(caplog.records) == 1
    assert str(file) in caplog.text
    file.write_text(f"bob:{BOB}")
    clock.now += LOOK_S
    assert keys.identify(ALICE) is None
    assert keys.identify(BOB) == Identity("bob")


def test_a_file_must_be_right_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyListError):
        KeyRing(file=tmp_path / "none")


@pytest.fixture
def app(engine: FakeEngine, codec: ByteCodec) -> FastAPI:
    settings = ApiSettings("org/tiny", 128, admin_key=ADMIN)
    return build_app(settings, engine, codec, keys=ring(), new_id=lambda: "id1")


@pytest.fixture
async def guarded(app: FastAPI, no_leaks: None) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/models", "/version", "/openapi.json", "/tokenize", "/nowhere", "/"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer(ADMIN),
        {"authorization": ALICE},
        {"authorization": f"Basic {ALICE}"},
        {"x-api-key": ALICE},
    ],
)
async def test_without_a_key_everything_is_401(
    guarded: httpx.AsyncClient, engine: FakeEngine, method: str, path: str, headers: dict[str, str]
) -> None:
    response = await guarded.request(method, path, json=chat_body(), headers=headers)
    assert error_of(response, 401)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert not engine.requests
    for secret in (ALICE, ADMIN, "wrong"):
        assert secret not in response.text


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer "])
@pytest.mark.parametrize("stream", [True, False])
async def test_with_a_key_it_is_served(guarded: httpx.AsyncClient, scheme: str, stream: bool) -> None:
    headers = {"authorization": f"{scheme} {BOB}"}
    response = await guarded.post(CHAT, json=chat_body(stream=stream), headers=headers)
    assert response.status_code == 200


async def test_unknown_urls_are_told_to_those_with_a_key(guarded: httpx.AsyncClient) -> None:
    assert error_of(await guarded.get("/nowhere", headers=bearer(ALICE)), 404)["code"] == "unknown_url"


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_is_open(guarded: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await guarded.request(method, path)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/health"])
async def test_options_are_open(guarded: httpx.AsyncClient, path: str) -> None:
    assert (await guarded.options(path)).status_code == 204


@pytest.mark.parametrize("path", ["/healthy", "/health/../v1/models", "/debugging", "/debug", "//health"])
async def test_what_only_looks_open_is_not(guarded: httpx.AsyncClient, path: str) -> None:
    request = guarded.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    assert (await guarded.send(request)).status_code == 401


async def test_head_without_a_key_has_no_body(guarded: httpx.AsyncClient) -> None:
    response = await guarded.head("/v1/models")
    assert (response.status_code, response.content) == (401, b"")


@pytest.mark.parametrize(
    ("key", "status"),
    [(None, 401), ("wrong", 401), (ALICE, 401), (ADMIN, 200)],
    ids=["none", "wrong", "api key", "admin"],
)
async def test_debug_takes_the_admin_key_and_no_other(guarded: httpx.AsyncClient, key: str | None, status: int) -> None:
    response = await guarded.get("/debug/state", headers=bearer(key) if key else {})
    assert response.status_code == status
    if status == 401:
        assert error_of(response, 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/debug/state", "/debug/directory", "/debug/route"])
async def test_debug_does_not_exist_without_an_admin_key(engine: FakeEngine, codec: ByteCodec, path: str) -> None:
    app = build_app(ApiSettings("org/tiny", 128), engine, codec, keys=ring())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        method = "POST" if path.endswith("route") else "GET"
        for headers in ({}, bearer(ALICE), bearer(ADMIN)):
            response = await client.request(method, path, headers=headers)
            assert error_of(response, 404)["code"] == "unknown_url"
