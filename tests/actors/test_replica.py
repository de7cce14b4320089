"""A whole replica without Ray: requests in, text out, everything given back."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from actors.config import EngineConfig, Membership, ModelConfig, PoolConfig, ReplicaConfig
from actors.engine import StepOutput
from actors.errors import ModelNotFound, ReplicaFailed, RequestRefused
from actors.grammar import GrammarConstraint
from actors.model import PagedModel
from actors.replica import Replica
from actors.request import Admitted, Delta, GenerateRequest, Grammar, Sampling
from kvpool import PoolStats, Region, SharedMemoryTooSmall
from kvpool.directory import DirectoryWriter, Space
from kvpool.directory.memory import MemoryReader, MemoryServer, MemoryWriter
from kvpool.directory.messages import split_keys
from router.follower import Follower
from router.mirror import Mirror, PoolView
from tests.fakes.tiny_checkpoint import byte_tokenizer, save_tiny_checkpoint
from tests.fakes.tiny_models import first_real_mismatch, reference_tokens


class Recorded:
    """Metrics kept in memory."""

    def __init__(self) -> None:
        self.queried = self.hits = self.first = self.following = self.generated = 0
        self.reasons: Counter[str] = Counter()
        self.blocks: Mapping[str, int] = {}
        self.publisher: Mapping[str, Any] = {}

    def looked_up(self, queried_tokens: int, hit_tokens: int) -> None:
        self.queried += queried_tokens
        self.hits += hit_tokens

    def first_token(self, seconds: float) -> None:
        self.first += 1

    def next_tokens(self, count: int, seconds: float) -> None:
        self.following += count

    def finished(self, reason: str, seconds: float, generated_tokens: int) -> None:
        self.reasons[reason] += 1
        self.generated += generated_tokens

    def levels(self, pool: str, stats: PoolStats, running: int, waiting: int, preemptions: int) -> None:
        self.blocks = stats.blocks

    def published(self, report: Mapping[str, Any]) -> None:
        self.publisher = report


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


DYING = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.actors.test_replica import build, collect, request_of, tokens_of
async def main():
    replica = build(Path(sys.argv[1]), Path(sys.argv[2]), scope=sys.argv[3])
    _, deltas = await collect(replica, request_of(sys.argv[4], "done", 20, ignore_eos=True))
    unfinished = replica.generate(request_of("another prompt, cut off " * 4, "cut", 300, ignore_eos=True))
    for _ in range(4):
        await anext(unfinished)
    print(*tokens_of(deltas), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def build(
    checkpoint: Path,
    directory: Path,
    store: Callable[[Space], DirectoryWriter] | None = None,
    replica_id: str = "r1",
    secret: bytes = bytes(32),
    replicas: int = 1,
    **pool: Any,
) -> Replica:
    config = ReplicaConfig(
        ModelConfig(served_name="tiny"),
        EngineConfig(mode="exact", threads=1),
        PoolConfig(**{"tokens": 2048, **pool}),
        membership=Membership("c1", secret, replicas),
    )
    return Replica(
        config, str(checkpoint), replica_id=replica_id, metrics=Recorded(), region_directory=directory, directory=store
    )


@pytest.fixture
async def replica(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Replica]:
    """A replica that must come to rest with every block given back."""
    built = build(checkpoint, tmp_path)
    yield built
    for _ in range(500):
        status = await built.status()
        if not (status.held_blocks or status.running or status.waiting):
            break
        await asyncio.sleep(0.01)
    built.close()
    assert status.held_blocks == 0
    assert status.integrity == ""
    assert sum(status.blocks.values()) == status.capacity_blocks
    assert os.listdir(tmp_path) == [], "the region stays behind"


def request_of(text: str | list[int], name: str = "a", max_tokens: int = 8, **options: Any) -> GenerateRequest:
    ids = byte_tokenizer().encode(text) if isinstance(text, str) else text
    sampling = {k: options.pop(k) for k in list(options) if k in Sampling.__dataclass_fields__}
    return GenerateRequest(name, tuple(ids), Sampling(max_tokens, **{"temperature": 0.0, **sampling}), **options)


async def collect(replica: Replica, request: GenerateRequest) -> tuple[Admitted, list[Delta]]:
    events = [event async for event in replica.generate(request)]
    assert isinstance(events[0], Admitted)
    deltas = [event for event in events[1:] if isinstance(event, Delta)]
    assert len(deltas) == len(events) - 1
    assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return events[0], deltas


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_tokens_equal_those_of_generate_and_the_second_time_hits(replica: Replica, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    prompts = [list(random.Random(n).randbytes(n)) for n in (1, 5, 16, 33, 90, 150)]
    for round_ in range(2):
        runs = await asyncio.gather(
            *(
                collect(replica, request_of(prompt, f"{round_}-{n}", 20, ignore_eos=True))
                for n, prompt in enumerate(prompts)
            )
        )
        for prompt, (admitted, deltas) in zip(prompts, runs, strict=True):
            assert first_real_mismatch(tokens_of(deltas), *reference_tokens(model, prompt, 20)) is None
            if round_:
                assert admitted.cached_tokens == min(len(prompt) // 16 * 16, len(prompt) - 1)


async def test_text_is_what_the_tokens_decode_to(replica: Replica) -> None:
    _, deltas = await collect(replica, request_of("hello", max_tokens=60, ignore_eos=True, skip_special_tokens=False))
    assert text_of(deltas) == byte_tokenizer().decode(tokens_of(deltas), clean_up_tokenization_spaces=False)


async def test_a_stop_string_ends_the_text_where_it_starts(replica: Replica) -> None:
    _, deltas = await collect(replica, request_of("hello", max_tokens=60, ignore_eos=True))
    whole = text_of(deltas)
    stop = whole[10:13]
    _, cut = await collect(replica, request_of("hello", "b", 60, ignore_eos=True, stop=(stop,)))
    assert text_of(cut) == whole[: whole.index(stop)]
    assert cut[-1].finish_reason == "stop"
    assert cut[-1].stop_reason == stop
    assert len(tokens_of(cut)) < len(tokens_of(deltas))


async def test_seeds_repeat_and_differ(replica: Replica) -> None:
    runs = [
        tokens_of((await collect(replica, request_of("x", f"s{n}", 24, temperature=1.0, seed=seed)))[1])
        for n, seed in enumerate((1, 1, 2))
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("after", [0, 1, 2, 5])
async def test_leaving_at_any_point_gives_everything_back(replica: Replica, after: int) -> None:
    before = len(asyncio.all_tasks())
    events = replica.generate(request_of("some prompt " * 10, max_tokens=200, ignore_eos=True))
    for _ in range(after):
        await anext(events)
    await events.aclose()
    assert len(asyncio.all_tasks()) <= before + 1  # the reporter of levels lives as long as the replica
    _, deltas = await collect(replica, request_of("next", "b"))
    assert len(tokens_of(deltas)) == 8


async def test_cancelling_the_reader_gives_everything_back(replica: Replica) -> None:
    tasks = [
        asyncio.create_task(collect(replica, request_of(f"p{n}", f"c{n}", 300, ignore_eos=True))) for n in range(12)
    ]
    await asyncio.sleep(0.05)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert all(isinstance(result, tuple) for result in results[1::2])


async def test_bad_requests_are_refused_and_counted(replica: Replica) -> None:
    for name, ids in (("empty", []), ("range", [10**6]), ("long", [1] * 600)):
        with pytest.raises(RequestRefused):
            await anext(replica.generate(request_of(ids, name)))
    with pytest.raises(RequestRefused, match="token ids") as refused:
        await anext(replica.generate(request_of("x", "stops", stop_token_ids=(10**6,))))
    assert refused.value.param == "stop_token_ids"
    metrics = replica._metrics
    assert isinstance(metrics, Recorded)
    assert metrics.reasons == {"error": 4}


async def test_an_id_used_again_gets_only_its_own_tokens(replica: Replica) -> None:
    for _ in range(20):
        first = replica.generate(request_of("first prompt", "same", 300, ignore_eos=True))
        for _ in range(3):
            await anext(first)
        await first.aclose()
        admitted, deltas = await collect(replica, request_of("second", "same", 5, ignore_eos=True))
        assert len(tokens_of(deltas)) == 5
        assert admitted.prompt_tokens == len("second")


async def test_min_tokens_delays_every_kind_of_end(replica: Replica) -> None:
    _, free = await collect(replica, request_of("hello", "free", 60, ignore_eos=True))
    whole, tokens = text_of(free), tokens_of(free)
    ends = (tokens[2], tokens[3])
    _, delayed = await collect(
        replica, request_of("hello", "ids", 60, ignore_eos=True, stop_token_ids=ends, min_tokens=10)
    )
    assert 10 < len(tokens_of(delayed)) <= 60
    assert not set(tokens_of(delayed)[:10]) & set(ends)
    _, strings = await collect(
        replica, request_of("hello", "strings", 60, ignore_eos=True, stop=(whole[2],), min_tokens=40)
    )
    assert len(tokens_of(strings)) > 40


async def test_one_request_without_a_possible_token_fails_alone(replica: Replica) -> None:
    everything = tuple(range(replica._model.vocab_size))
    neighbour = asyncio.create_task(collect(replica, request_of("hello", "good", 60, ignore_eos=True)))
    for temperature in (0.0, 1.0):
        impossible = request_of("x", "bad", stop_token_ids=everything, min_tokens=2, temperature=temperature)
        with pytest.raises(RequestRefused, match="min_tokens forbids an end"):
            await collect(replica, impossible)
    assert len(tokens_of((await neighbour)[1])) == 60
    await replica.check_health()


async def test_a_look_up_counts_though_its_client_has_left_before_it_is_told(replica: Replica) -> None:
    metrics = replica._metrics
    assert isinstance(metrics, Recorded)
    replica._deliver([StepOutput("gone", cached_tokens=16, prompt_tokens=20), StepOutput("gone", token=1)])
    assert (metrics.queried, metrics.hits) == (20, 16)


async def test_metrics_agree_with_the_events(replica: Replica) -> None:
    runs = [await collect(replica, request_of("measure this prompt, please", f"m{n}")) for n in range(3)]
    metrics = replica._metrics
    assert isinstance(metrics, Recorded)
    status = await replica.status()
    assert metrics.queried == status.prefix_queried_tokens == sum(admitted.prompt_tokens for admitted, _ in runs)
    assert metrics.hits == status.prefix_hit_tokens == sum(admitted.cached_tokens for admitted, _ in runs) > 0
    assert metrics.first == 3
    assert metrics.generated == metrics.first + metrics.following == sum(len(tokens_of(deltas)) for _, deltas in runs)
    assert set(metrics.reasons) <= {"stop", "length"}
    assert sum(metrics.blocks.values()) == status.capacity_blocks


async def test_tokens_that_come_with_the_first_one_are_counted(replica: Replica) -> None:
    """A busy event loop gets the tokens of several steps at once."""
    events = replica.generate(request_of("hello", max_tokens=40, ignore_eos=True))
    reader = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)  # it has submitted the request and waits
    while replica._engine.running or replica._engine.waiting:
        time.sleep(0.01)  # noqa: ASYNC251 - the loop is busy
    assert isinstance(await reader, Admitted)
    first = await anext(events)
    assert isinstance(first, Delta)
    assert len(first.token_ids) > 1
    rest = [event async for event in events if isinstance(event, Delta)]
    metrics = replica._metrics
    assert isinstance(metrics, Recorded)
    assert metrics.first + metrics.following == metrics.generated == len(tokens_of([first, *rest])) == 40


async def test_levels_that_cannot_be_told_harm_nobody(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an answer nor the replica's health, and the next ones are told."""
    metrics = replica._metrics
    assert isinstance(metrics, Recorded)
    told = asyncio.Event()

    def fail(*_: Any) -> None:
        told.set()
        raise ValueError("-0.3875 is no level")

    monkeypatch.setattr("actors.replica._LEVELS_PERIOD_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "levels", fail)
        _, deltas = await collect(replica, request_of("hello"))
        assert len(tokens_of(deltas)) == 8
        await asyncio.wait_for(told.wait(), 10)
    await replica.check_health()
    for _ in range(500):
        if metrics.blocks:
            break
        await asyncio.sleep(0.01)
    assert sum(metrics.blocks.values()) == (await replica.status()).capacity_blocks


async def test_health_fails_when_the_step_thread_dies(replica: Replica) -> None:
    await replica.check_health()

    def explode(*args: Any) -> Any:
        raise RuntimeError("device lost")

    replica._model.forward = explode  # type: ignore[assignment]
    with pytest.raises(ReplicaFailed, match="device lost"):
        await collect(replica, request_of("x"))
    with pytest.raises(ReplicaFailed, match="device lost"):
        await replica.check_health()


async def test_health_fails_when_the_step_thread_hangs(replica: Replica) -> None:
    replica._engine._config = EngineConfig(stall_s=0.05)
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    forward = replica._model.forward

    def hang(pieces: Any) -> Any:
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)
        return forward(pieces)

    replica._model.forward = hang  # type: ignore[method-assign]
    reader = asyncio.create_task(collect(replica, request_of("x")))
    await asyncio.sleep(0.3)
    with pytest.raises(ReplicaFailed, match="no step"):
        await replica.check_health()
    gate.set()
    await reader
    await replica.check_health()


async def test_the_pool_is_in_the_directory_and_leaves_it(checkpoint: Path, tmp_path: Path) -> None:
    server = MemoryServer(random.Random(1))
    spaces: list[Space] = []

    def store(space: Space) -> DirectoryWriter:
        spaces.append(space)
        return MemoryWriter(server, space)

    built = build(checkpoint, tmp_path, store)
    try:
        status = await built.status()
        (space,) = spaces
        assert (space.cluster_id, space.model_fingerprint, space.block_tokens) == ("c1", status.fingerprint, 16)
        mirror = Mirror()
        follower = Follower(MemoryReader(server, space), mirror, time.monotonic)
        _, _ = await collect(built, request_of("publish these blocks, please. " * 4))
        truth = set(split_keys(await built.indexed_keys()))
        assert len(truth) >= 7
        for _ in range(500):
            follower.step(0.01)
            views = mirror.pools(time.monotonic())
            if mirror.keys("replica-r1") == truth and views and views[0].free_blocks == 128 - len(truth):
                break
        assert status.pool == "replica-r1"
        assert mirror.keys(status.pool) == truth
        (view,) = mirror.pools(time.monotonic())
        assert (view.pool, view.replica_ids) == ("replica-r1", ("r1",))
        assert view.free_blocks == 128 - len(truth)
        report = (await built.status()).publisher
        assert (report["state"], report["published_blocks"], report["refused"]) == ("open", len(truth), {})
    finally:
        built.close()
    for _ in range(100):
        follower.step(0.01)
    assert mirror.pools(time.monotonic()) == []


async def test_a_directory_that_is_down_harms_nothing(checkpoint: Path, tmp_path: Path) -> None:
    server = MemoryServer(random.Random(1))
    server.up = False
    built = build(checkpoint, tmp_path, lambda space: MemoryWriter(server, space))
    try:
        _, deltas = await collect(built, request_of("hello"))
        assert len(tokens_of(deltas)) == 8
        report = (await built.status()).publisher
        assert report["state"] == "waiting"
        assert report["published_blocks"] == 0
    finally:
        built.close()


def test_a_pool_that_does_not_fit_is_refused_with_both_sizes(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SharedMemoryTooSmall, match=r"free.*needs"):
        build(checkpoint, tmp_path, tokens=10**10)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_a_model_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="holds no model"):
        build(tmp_path, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["replica", "node"])
async def test_a_replica_that_follows_a_killed_one_is_warm_at_once(
    checkpoint: Path, tmp_path: Path, scope: Any
) -> None:
    """It has what was complete, in the directory too, and gives the same tokens."""
    prompt = "a prompt that somebody computed before the lights went out. " * 3
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DYING, str(checkpoint), str(tmp_path), scope, prompt]
    ended = await asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = os.listdir(tmp_path)

    server = MemoryServer(random.Random(1))
    spaces: list[Space] = []

    def store(space: Space) -> DirectoryWriter:
        spaces.append(space)
        return MemoryWriter(server, space)

    built = build(checkpoint, tmp_path, store, "r2", scope=scope)
    try:
        status = await built.status()
        assert (status.adopted, status.scope, f"kvatlas-{status.pool}") == (True, scope, left)
        assert (status.integrity, status.held_blocks) == ("", 0)
        mirror = Mirror()
        follower = Follower(MemoryReader(server, spaces[0]), mirror, time.monotonic)
        truth = set(split_keys(await built.indexed_keys()))
        for _ in range(500):
            follower.step(0.01)
            if mirror.keys(status.pool) == truth and mirror.pools(time.monotonic()):
                break
        assert mirror.keys(status.pool) == truth
        assert mirror.pools(time.monotonic())[0].replica_ids == ("r2",)
        admitted, deltas = await collect(built, request_of(prompt, "again", 20, ignore_eos=True))
        assert admitted.cached_tokens == len(prompt) // 16 * 16
        assert tokens_of(deltas) == [int(token) for token in ended.stdout.split()]
    finally:
        built.close()
    assert os.listdir(tmp_path) == []


async def test_a_killed_replica_of_another_cluster_is_nobodys_business(checkpoint: Path, tmp_path: Path) -> None:
    foreign = build(checkpoint, tmp_path, secret=b"x" * 32)
    foreign._region.close()  # as a death does
    built = build(checkpoint, tmp_path, replica_id="r2")
    try:
        status = await built.status()
        assert not status.adopted
        assert sorted(os.listdir(tmp_path)) == ["kvatlas-replica-r1", "kvatlas-replica-r2"]
    finally:
        built.close()
        foreign.close()
    assert os.listdir(tmp_path) == []


async def test_leaving_keeps_the_region_for_those_who_are_still_there(checkpoint: Path, tmp_path: Path) -> None:
    built = build(checkpoint, tmp_path, scope="node")
    (name,) = os.listdir(tmp_path)
    with Region.attach(tmp_path / name) as other:
        await collect(built, request_of("hello"))
        built.close()
        built.close()
        assert os.listdir(tmp_path) == [name]
        assert other.leave()
    assert os.listdir(tmp_path) == []


async def test_a_step_that_hangs_at_the_end_leaves_no_name_behind(checkpoint: Path, tmp_path: Path) -> None:
    built = build(checkpoint, tmp_path)
    stop = built._engine.stop
    built._engine.stop = lambda timeout_s=0.0: False  # type: ignore[method-assign]
    built.close()
    assert os.listdir(tmp_path) == []
    assert not built._region.closed
    built._engine.stop = stop  # type: ignore[method-assign]
    built.close()
    assert built._region.closed


async def test_a_replica_says_that_its_region_is_in_use(checkpoint: Path, tmp_path: Path) -> None:
    """Else it would be too old to be adopted when it dies."""
    built = build(checkpoint, tmp_path, tidy_s=0.01)
    try:
        os.utime(built._region.path, (1, 1))
        for _ in range(2000):
            if built._region.path.stat().st_mtime > 1:
                break
            await asyncio.sleep(0.01)
        assert built._region.path.stat().st_mtime > 1
    finally:
        built.close()


async def test_replicas_of_a_machine_share_what_they_compute(checkpoint: Path, tmp_path: Path) -> None:
    """One region, one pool in the directory that tells of both; whoever publishes it may leave."""
    server = MemoryServer(random.Random(1))
    spaces: list[Space] = []

    def store(space: Space) -> DirectoryWriter:
        spaces.append(space)
        return MemoryWriter(server, space)

    def views() -> list[PoolView]:
        follower.step(0.01)
        return mirror.pools(time.monotonic())

    first, second = (build(checkpoint, tmp_path, store, name, replicas=2, scope="node") for name in ("r1", "r2"))
    try:
        assert len(os.listdir(tmp_path)) == 1
        mirror = Mirror()
        follower = Follower(MemoryReader(server, spaces[0]), mirror, time.monotonic)
        prompt = "one of them computes this long prompt, the other one has it. " * 3
        _, ours = await collect(first, request_of(prompt, "a", 20, ignore_eos=True))
        admitted, theirs = await collect(second, request_of(prompt, "b", 20, ignore_eos=True))
        assert admitted.cached_tokens == len(prompt) // 16 * 16
        assert tokens_of(ours) == tokens_of(theirs)
        one, other = await first.status(), await second.status()
        assert one.pool == other.pool
        assert one.capacity_blocks == other.capacity_blocks == 2 * 128
        assert (one.scope, one.adopted, other.adopted) == ("node", False, False)
        assert sorted((one.publisher["state"], other.publisher["state"])) == ["open", "standby"]
        assert await first.indexed_keys() == await second.indexed_keys()
        for _ in range(500):
            if views() and set(views()[0].replica_ids) == {"r1", "r2"}:
                break
        (view,) = views()
        assert (view.pool, set(view.replica_ids)) == (one.pool, {"r1", "r2"})
        leaver, stayer = (first, second) if one.publisher["state"] == "open" else (second, first)
        leaver.close()
        for _ in range(500):
            if views() and views()[0].replica_ids == (stayer.replica_id,):
                break
        assert views()[0].replica_ids == (stayer.replica_id,)
        status = await stayer.status()
        assert (status.publisher["state"], status.integrity) == ("open", "")
        assert mirror.keys(status.pool) == set(split_keys(await stayer.indexed_keys()))
        admitted, again = await collect(stayer, request_of(prompt, "c", 20, ignore_eos=True))
        assert (admitted.cached_tokens, tokens_of(again)) == (len(prompt) // 16 * 16, tokens_of(ours))
        assert len(os.listdir(tmp_path)) == 1
    finally:
        first.close()
        second.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("guard", [False, True])
async def test_what_the_configuration_says_reaches_the_pool(checkpoint: Path, tmp_path: Path, guard: bool) -> None:
    built = build(checkpoint, tmp_path, replicas=2, scope="node", guard=guard)
    try:
        assert built._pool.guard is guard
        assert built._pool.floor_blocks == 512 // 16
        _, deltas = await collect(built, request_of("hello"))
        assert len(tokens_of(deltas)) == 8
    finally:
        built.close()


@pytest.mark.slow
async def test_a_neighbour_that_is_killed_costs_the_others_nothing(checkpoint: Path, tmp_path: Path) -> None:
    """In the middle of a request over the same blocks: tokens stay right, and what the dead one held comes back."""
    prompt = "a prompt that both of them read while one of them dies. " * 3
    built = build(checkpoint, tmp_path, replica_id="r2", scope="node", tidy_s=0.05)
    try:
        _, alone = await collect(built, request_of(prompt, "before", 200, ignore_eos=True))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", DYING, str(checkpoint), str(tmp_path), "node", prompt]
        dying = asyncio.create_task(
            asyncio.to_thread(subprocess.run, command, env=environment, capture_output=True, text=True)
        )
        rounds = 0
        while not dying.done() or not rounds:
            _, deltas = await collect(built, request_of(prompt, f"beside-{rounds}", 200, ignore_eos=True))
            assert tokens_of(deltas) == tokens_of(alone)
            rounds += 1
        ended = await dying
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert [int(token) for token in ended.stdout.split()] == tokens_of(alone)[:20]
        for _ in range(1000):
            status = await built.status()
            if built._pool.stats().reclaimed_processes and status.blocks["free"] + status.blocks["cached"] == 128:
                break
            await asyncio.sleep(0.01)
        assert built._pool.stats().reclaimed_processes == 1
        assert (status.integrity, status.held_blocks) == ("", 0)
        assert os.listdir(tmp_path) == [f"kvatlas-{status.pool}"]
    finally:
        built.close()
    assert os.listdir(tmp_path) == []


AMBIGUOUS = Grammar("lark", 'start: x{1,3000}\nx: y{1,3000}\ny: "a" | "b"')


@pytest.fixture
def constraints(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> list[GrammarConstraint]:
    """Every constraint that `replica` opens."""
    opened: list[GrammarConstraint] = []
    grammars = replica._grammars
    original = grammars.open

    async def open_and_note(grammar: Grammar, on_ready: Callable[[], None]) -> GrammarConstraint:
        opened.append(await original(grammar, on_ready))
        return opened[-1]

    monkeypatch.setattr(grammars, "open", open_and_note)
    return opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_follows_its_grammar_and_ends_with_it(
    replica: Replica, constraints: list[GrammarConstraint], temperature: float
) -> None:
    grammar = Grammar("regex", "[a-f]{5}(yes|no)")
    request = request_of("hello", max_tokens=40, temperature=temperature, grammar=grammar)
    _, deltas = await collect(replica, request)
    assert re.fullmatch(grammar.text, text_of(deltas))
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].stop_reason is None
    assert [constraint._closed for constraint in constraints] == [True]


async def test_the_empty_answer_ends_without_a_token(replica: Replica) -> None:
    _, deltas = await collect(replica, request_of("hello", grammar=Grammar("regex", "")))
    assert (text_of(deltas), tokens_of(deltas), deltas[-1].finish_reason) == ("", [], "stop")


async def test_a_grammar_cut_off_by_the_length_says_so(replica: Replica) -> None:
    _, deltas = await collect(replica, request_of("hello", max_tokens=3, grammar=Grammar("regex", "[a-f]{5}")))
    assert deltas[-1].finish_reason == "length"
    assert re.fullmatch("[a-f]{3}", text_of(deltas))


async def test_a_bad_grammar_is_refused_before_anything_is_admitted(replica: Replica) -> None:
    with pytest.raises(RequestRefused, match="nosuch") as caught:
        await collect(replica, request_of("hello", grammar=Grammar("json_schema", '{"type": "nosuch"}')))
    assert caught.value.param == "response_format"
    assert replica._engine.waiting == replica._engine.running == 0


async def test_a_constraint_is_closed_when_its_request_is_refused_or_left(
    replica: Replica, constraints: list[GrammarConstraint]
) -> None:
    grammar = Grammar("regex", "[a-f]*")
    with pytest.raises(RequestRefused):
        await collect(replica, request_of([0] * 5000, grammar=grammar))
    assert [constraint._closed for constraint in constraints] == [True]
    unfinished = replica.generate(request_of("hello", max_tokens=300, ignore_eos=True, grammar=grammar))
    await anext(unfinished)
    await unfinished.aclose()
    for _ in range(1000):
        if constraints[1]._closed:
            break
        await asyncio.sleep(0.01)
    assert constraints[1]._closed


async def test_a_grammar_that_explodes_ends_its_own_request_and_no_other(replica: Replica) -> None:
    plain = request_of("something else", "plain", 60, ignore_eos=True)
    _, alone = await collect(replica, plain)
    hostile = request_of("hello", "hostile", 200, min_tokens=150, grammar=AMBIGUOUS)
    together = await asyncio.gather(collect(replica, plain), collect(replica, hostile), return_exceptions=True)
    assert isinstance(together[1], RequestRefused)
    assert not isinstance(together[0], BaseException)
    assert tokens_of(together[0][1]) == tokens_of(alone)


async def test_many_answers_follow_grammars_of_their_own(replica: Replica) -> None:
    patterns = [f"[a-{last}]{{{count}}}" for last in "bdf" for count in (1, 7, 19)]
    runs = await asyncio.gather(
        *(
            collect(
                replica,
                request_of(f"prompt {number}", f"r{number}", 40, temperature=1.0, grammar=Grammar("regex", one)),
            )
            for number, one in enumerate(patterns)
        )
    )
    for pattern, (_, deltas) in zip(patterns, runs, strict=True):
        assert re.fullmatch(pattern, text_of(deltas))
        assert deltas[-1].finish_reason == "stop"


async def test_only_the_step_thread_computes_for_good(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that torch keeps for any other would make those of the step thread sleep between two kernels."""
    computed: set[threading.Thread] = set()

    def watched(method: str) -> None:
        original = getattr(PagedModel, method)

        def noted(model: PagedModel, *args: Any) -> Any:
            computed.add(threading.current_thread())
            return original(model, *args)

        monkeypatch.setattr(PagedModel, method, noted)

    watched("learn")
    watched("forward")
    built = build(checkpoint, tmp_path)
    try:
        while_built = len(computed)
        await collect(built, request_of("hello"))
        assert (while_built, [one.name for one in computed if one.is_alive()]) == (2, ["kvatlas-step"])
    finally:
        built.close()
