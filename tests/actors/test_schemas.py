"""Answers of a model under a hundred JSON schemas, all at once in one batch: valid, unless cut off by their length."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from actors.config import EngineConfig, Membership, ModelConfig, PoolConfig, ReplicaConfig
from actors.loader import resolve_model
from actors.progress import SilentProgress
from actors.replica import Replica
from actors.request import Delta, GenerateRequest, Grammar, Sampling
from tests.actors.schemas import ALL, Schema, bounded
from tests.actors.test_replica import Recorded
from tests.fakes.tiny_checkpoint import save_tiny_checkpoint


def test_there_are_a_hundred_and_no_two_alike() -> None:
    assert len({json.dumps(schema, sort_keys=True) for schema in ALL}) == len(ALL) == 100
    for schema in ALL:
        Draft202012Validator.check_schema(schema)


async def cut_off(
    model: Path, directory: Path, schemas: Sequence[Schema] = ALL, *, mode: str, max_tokens: int, temperature: float
) -> list[Schema]:
    """The schemas whose answers did not come to an end. All others are asserted to be valid."""
    config = ReplicaConfig(
        ModelConfig(served_name="m"),
        EngineConfig(mode=mode, threads=1, max_waiting=len(schemas)),  # type: ignore[arg-type]
        PoolConfig(tokens=40_000),
        membership=Membership("c1", bytes(32)),
    )
    replica = Replica(config, str(model), replica_id="r1", metrics=Recorded(), region_directory=directory)
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    async def ask(number: int, schema: Schema) -> tuple[str, str]:
        question = f"Write an example of this JSON schema: {json.dumps(schema)[:300]}"
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompt = tuple(tokenizer(chat, add_special_tokens=False)["input_ids"])
        sampling = Sampling(max_tokens, temperature=temperature, seed=number)
        request = GenerateRequest(f"s{number}", prompt, sampling, grammar=Grammar("json_schema", json.dumps(schema)))
        deltas = [event async for event in replica.generate(request) if isinstance(event, Delta)]
        return "".join(delta.text for delta in deltas), str(deltas[-1].finish_reason)

    try:
        found = await asyncio.gather(*(ask(number, schema) for number, schema in enumerate(schemas)))
        status = await replica.status()
    finally:
        replica.close()
    assert (status.held_blocks, status.integrity) == (0, "")
    wrong = []
    for schema, (answer, reason) in zip(schemas, found, strict=True):
        if reason == "stop":
            checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
            try:
                errors = [error.message for error in checker.iter_errors(json.loads(answer))]
            except ValueError as error:
                errors = [str(error)]
            wrong += [(schema, answer, errors)] if errors else []
    assert wrong == []
    assert {reason for _, reason in found} <= {"stop", "length"}
    return [schema for schema, (_, reason) in zip(schemas, found, strict=True) if reason == "length"]


def test_few_schemas_are_without_bounds() -> None:
    assert sum(bounded(schema) for schema in ALL) >= 80


async def test_a_tiny_model_that_speaks_at_random(tmp_path: Path) -> None:
    model = save_tiny_checkpoint(tmp_path / "model", context_tokens=1024)
    cut = await cut_off(model, tmp_path, mode="exact", max_tokens=400, temperature=1.0)
    assert [schema for schema in cut if bounded(schema)] == []
    assert len(cut) < 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_demo_model(tmp_path: Path, temperature: float, capsys: pytest.CaptureFixture[str]) -> None:
    model = resolve_model("demo", SilentProgress()).path
    cut = await cut_off(model, tmp_path, mode="fast", max_tokens=500, temperature=temperature)
    with capsys.disabled():
        print(f"\ntemperature {temperature}: {len(ALL) - len(cut)} valid, {len(cut)} cut off by their length")
    assert [schema for schema in cut if bounded(schema)] == []
    assert len(cut) < 10
