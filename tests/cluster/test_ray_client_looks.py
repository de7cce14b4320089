"""What an operator asks of the client: every router's mirror, and an explanation."""

from __future__ import annotations

from typing import Any

import pytest

from actors.errors import ReplicaFailed
from actors.request import GenerateRequest, Sampling
from cluster import ray_client
from cluster.mirror_picture import LONE, MirrorPicture, PoolPicture
from cluster.prefix_keys import PrefixKeys
from cluster.ray_client import RayEngineClient
from kvpool.directory import DirectoryUnavailable
from tests.cluster.test_ray_client import NEVER, Handle, client
from tests.fakes.engine import READY
from tests.router.scene import Scene

TRUTH = ("r0", bytes(16))
RIGHT = {"p": PoolPicture(("r0",), bytes(16))}


@pytest.fixture
def routers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what the routers of the application answer; this process is the one called i1."""
    monkeypatch.setattr(ray_client, "own_name", lambda: "i1")

    def answer(*answers: Any) -> Handle:
        handle = Handle(answers=list(answers))

        async def found() -> Handle:
            return handle

        monkeypatch.setattr(ray_client, "all_routers", found)
        return handle

    return answer


async def test_every_router_is_asked_for_its_mirror(routers: Any) -> None:
    handle = routers(MirrorPicture("i2", {}), MirrorPicture("i1", RIGHT))
    (found,) = await client(Handle(answers=[TRUTH]), mirrored=True).check_directory()
    assert handle.asked == ["mirror_picture"]
    assert (found["pool"], found["replica_ids"]) == ("p", ("r0",))
    assert [(place["place"], place["missing"]) for place in found["places"]] == [("directory", 1), ("i1", 0), ("i2", 1)]


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([MirrorPicture("i1", RIGHT), ValueError("x")], "1 of 2 routers"),
        ([MirrorPicture("i1", RIGHT), NEVER], "1 of 2 routers"),
        ([MirrorPicture("i2", RIGHT)], "1 of 1 routers"),
        ([], "0 of 0 routers"),
    ],
)
async def test_a_router_that_does_not_tell_makes_the_check_fail(
    routers: Any, monkeypatch: pytest.MonkeyPatch, answers: list[Any], told: str
) -> None:
    monkeypatch.setattr(ray_client, "CHECK_S", 0.05)
    routers(*answers)
    with pytest.raises(DirectoryUnavailable, match=told):
        await client(Handle(answers=[TRUTH]), mirrored=True).check_directory()


async def test_outside_serve_the_own_mirror_is_compared() -> None:
    scene = Scene()
    scene.hear("r0", held=[7])
    (found,) = await client(Handle(answers=[TRUTH]), scene, mirrored=True).check_directory()
    assert [place["place"] for place in found["places"]] == ["directory", LONE]


async def test_a_router_without_a_directory_believes_nothing() -> None:
    assert await client(Handle()).mirror_picture() == MirrorPicture(LONE, {})


def request(count: int, session: str = "") -> GenerateRequest:
    return GenerateRequest("never sent", tuple(range(count)), Sampling(max_tokens=5), salt="s", session=session)


async def test_an_explanation_books_and_sends_nothing() -> None:
    scene = Scene(directory=False)
    handle = Handle(answers=[READY])
    told = await client(handle, scene).explain(request(40))
    assert (told["outcome"], told["reason"], told["replica_id"]) == ("fallback", "no directory", "r0")
    assert (told["prompt_tokens"], told["output_tokens"]) == (40, 5)
    assert handle.asked == ["status"]
    assert scene.service.report()["bookings"] == 0


async def test_an_explanation_is_of_the_keys_that_would_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(directory=False)
    seen: list[tuple[Any, ...]] = []
    real = scene.service.explain

    def explain(*asked: Any) -> Any:
        seen.append(asked)
        return real(*asked)

    monkeypatch.setattr(scene.service, "explain", explain)
    keys = PrefixKeys(bytes(32), READY)
    looking = RayEngineClient(Handle(answers=[READY]), scene.service, keys)  # type: ignore[arg-type]
    await looking.explain(request(40, "a chat"))
    assert seen == [(keys.of(request(40)), 40, 5, ["r0"], "a chat")]


async def test_without_a_replica_there_is_nothing_to_explain() -> None:
    with pytest.raises(ReplicaFailed, match="kvatlas status"):
        await client(Handle(answers=[])).explain(request(40))
