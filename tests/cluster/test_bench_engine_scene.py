"""The benchmark's engine with a tiny model: what it asks for is what it gets, and its sizes are the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from actors.errors import RequestRefused
from cluster.bench import engine_machine
from cluster.bench.engine_machine import Memory, Products, best_s
from cluster.bench.engine_model import weights_of
from cluster.bench.engine_rates import steady
from cluster.bench.engine_scene import Scene
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint
from tests.fakes.tiny_models import tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def scene(checkpoint: Path, tmp_path: Path) -> Iterator[Scene]:
    with Scene(checkpoint, tmp_path, "scene", mode="exact", pool_tokens=2048) as opened:
        yield opened
    assert list(tmp_path.iterdir()) == []


def test_streams_of_an_engine(scene: Scene) -> None:
    scene.fill([0, 1, 2], 100)
    streams = scene.decode([0, 1, 2], 60, 12)
    assert [[tokens for _, tokens in marks] for marks in streams] == [list(range(1, 13))] * 3
    assert all(earlier < later for marks in streams for (earlier, _), (later, _) in pairwise(marks))
    found = steady(streams)
    assert found.tokens_per_s > 0
    # They decode together: the steps' moments are the same for all.
    assert {marks[-1] for marks in streams} == {streams[0][-1]}


def test_a_filled_prompt_is_cached_and_shares_nothing_with_another(scene: Scene) -> None:
    scene.fill([0, 1], 100)
    for number in (0, 1):
        _, cached = scene.first_token(scene.prompt(number, 90))
        assert cached == 80
    seconds, cached = scene.first_token(scene.prompt(2, 90))
    assert (cached, seconds > 0) == (0, True)
    _, cached = scene.first_token([*scene.prompt(0, 48), *scene.prompt(3, 40)])
    assert cached == 48


def test_a_start_is_split_into_phases(scene: Scene) -> None:
    assert set(scene.phases) == {"weights_s", "proof_s", "pack_s", "pool_s", "first_steps_s"}
    assert all(seconds >= 0 for seconds in scene.phases.values())
    assert scene.phases["proof_s"] > 0


def test_what_the_engine_refuses_is_raised(scene: Scene) -> None:
    with pytest.raises(RequestRefused):
        scene.first_token(scene.prompt(0, 600))
    assert scene.first_token(scene.prompt(0, 20))[1] == 0  # it goes on


def test_the_weights_that_a_step_reads(checkpoint: Path, tmp_path: Path) -> None:
    model = tiny_model("llama", {}, vocab_size=262, max_position_embeddings=512)
    table = model.get_input_embeddings().weight
    layers = 3
    found = weights_of(checkpoint, "exact")
    assert found.read_bytes == 4 * (sum(p.numel() for p in model.parameters()) - table.numel())
    assert weights_of(checkpoint, "fast").read_bytes == found.read_bytes // 2
    per_layer = 32 * 32 * 2 + 16 * 32 * 2 + 64 * 32 * 3  # q and o, k and v, gate, up and down
    assert found.linear_parameters == layers * per_layer
    assert sum(count for _, _, count in found.linears) == layers * 7

    tied = tiny_model("llama", {}, vocab_size=262, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path)
    assert weights_of(tmp_path, "exact").read_bytes == found.read_bytes  # the one table is read as the last layer


def test_the_sizes_are_those_of_the_model_that_runs(scene: Scene) -> None:
    assert scene.shape.token_bytes == 3 * 2 * 2 * 8 * 4
    assert scene.shape.weight_bytes == scene.weights.read_bytes > 0


def test_the_best_of_several_tries() -> None:
    moments = iter([0.0, 0.0, 3.0, 3.0, 4.0, 4.0, 9.0])
    calls: list[int] = []
    assert best_s(lambda: calls.append(1), 9.0, lambda: next(moments)) == 1.0
    assert len(calls) == 3


def test_the_machine_is_measured_in_its_own_units(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[torch.Tensor, float]] = []

    def half_a_second(work: Callable[[], torch.Tensor], seconds: float) -> float:
        taken.append((work(), seconds))
        return 0.5

    monkeypatch.setattr(engine_machine, "best_s", half_a_second)
    assert Memory(100 * 4096 * 4).read_gb_s(1.0) == pytest.approx(100 * 4096 * 4 / 1e9 / 0.5)
    products = Products([(32, 16, 2), (16, 32, 1)], [torch.float32], rows=8)
    # Three products of 2 x 8 x 32 x 16 operations, half a second each.
    assert products.gflops(3.0) == pytest.approx(3 * 2 * 8 * 32 * 16 / 1.5 / 1e9)
    assert [seconds for _, seconds in taken] == [0.5, 0.5, 1.5, 1.5]
    rows, whole, first, second = (result for result, _ in taken)
    assert torch.equal(rows, torch.full((100,), 4096.0))  # every word was read
    assert whole == 100 * 4096
    assert (first.shape, second.shape) == ((8, 32), (8, 16))
