"""The ingress names blocks as the replicas do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from actors.request import GenerateRequest, Sampling
from cluster.prefix_keys import PrefixKeys
from kvpool.directory.messages import split_keys
from tests.fakes.engine import READY
from tests.fakes.engine_rig import SECRET, EngineRig


def test_its_keys_are_those_in_the_pool(tmp_path: Path) -> None:
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1, 1]
    keys = PrefixKeys(SECRET, replace(READY, fingerprint="toy", block_tokens=4, kv_dtype="float32"))
    with EngineRig(tmp_path) as rig:
        for name, salt in (("a", ""), ("b", "tenant")):
            rig.submit(name, prompt, salt=salt)
            rig.wait(name)
            request = GenerateRequest(name, tuple(prompt), Sampling(1), salt=salt)
            found = split_keys(keys.of(request))
            assert len(found) == 2
            assert rig.pool.peek(found) == 2


def test_a_prompt_shorter_than_a_block_has_none() -> None:
    keys = PrefixKeys(SECRET, replace(READY, fingerprint="toy", block_tokens=16, kv_dtype="float32"))
    assert keys.of(GenerateRequest("a", (1, 2, 3), Sampling(1))) == b""
