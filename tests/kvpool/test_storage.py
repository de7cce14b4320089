from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvpool import BlockGeometry, Region
from kvpool.storage import copy_block, kv_tensor


def create(directory: Path, dtype: str) -> Region:
    return Region.create(directory, dtype, BlockGeometry(3, 2, 4, 5, dtype), 6, bytes(32), random.Random(0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_tensor_is_the_memory(tmp_path: Path, dtype: str) -> None:
    with create(tmp_path, dtype) as region:
        tensor = kv_tensor(region)
        assert tensor.shape == (6, 3, 2, 2, 5, 4)
        assert tensor.is_contiguous()
        assert str(tensor.dtype) == f"torch.{dtype}"
        tensor[2] = 1.5
        start = 2 * region.geometry.block_bytes
        window = region.kv_memory[start : start + region.geometry.block_bytes]
        assert torch.equal(torch.frombuffer(bytearray(window), dtype=tensor.dtype), tensor[2].flatten())
        assert not any(region.kv_memory[:start])
        with Region.attach(region.path) as other:
            assert kv_tensor(other)[2, 0, 0, 0, 0, 0] == 1.5


def test_copy_block(tmp_path: Path) -> None:
    with create(tmp_path, "float32") as region:
        tensor = kv_tensor(region)
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
        before = tensor.clone()
        copy_block(tensor, 1, 4)
        assert torch.equal(tensor[4], before[1])
        assert torch.equal(tensor[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


def test_a_tensor_outlives_its_region(tmp_path: Path) -> None:
    region = create(tmp_path, "float32")
    tensor = kv_tensor(region)
    tensor[0] = 3.0
    region.close()
    region.unlink()
    tensor[5] = 4.0
    assert tensor[0].eq(3.0).all()
    assert tensor[5].eq(4.0).all()
