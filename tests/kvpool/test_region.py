from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool import BlockGeometry, Pool, PoolError, Region, RegionMismatch, layout

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
FINGERPRINT = b"f" * 32


def create(directory: Path, name: str = "r", capacity: int = 6) -> Region:
    return Region.create(directory, name, GEOMETRY, capacity, FINGERPRINT, random.Random(1))


def test_create_then_attach(tmp_path: Path) -> None:
    with create(tmp_path) as made, Region.attach(tmp_path / "r", geometry=GEOMETRY, fingerprint=FINGERPRINT) as other:
        assert other.geometry == GEOMETRY
        assert other.capacity_blocks == 6
        assert other.fingerprint == FINGERPRINT
        assert other.incarnation == made.incarnation == random.Random(1).getrandbits(64)
        made.kv_memory[5] = 99
        assert other.kv_memory[5] == 99
        assert len(made.kv_memory) == 6 * GEOMETRY.block_bytes
    assert os.listdir(tmp_path) == ["r"]
    made.unlink()
    made.unlink()
    assert os.listdir(tmp_path) == []


def test_block_zero_never_overlaps_the_control_part(tmp_path: Path) -> None:
    with create(tmp_path) as region:
        before = region.path.read_bytes()[: region.layout.control_bytes]
        region.kv_memory[:] = b"\xff" * len(region.kv_memory)
        assert region.path.read_bytes()[: region.layout.control_bytes] == before


def test_private_to_its_user_and_not_inherited_by_exec(tmp_path: Path) -> None:
    with create(tmp_path) as region:
        assert region.path.stat().st_mode & 0o777 == 0o600
        inheritable = [fd for fd in os.listdir("/proc/self/fd") if _inheritable(int(fd), region.path)]
        assert inheritable == []


def _inheritable(fd: int, path: Path) -> bool:
    try:
        return os.get_inheritable(fd) and os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def test_a_taken_name_is_never_replaced(tmp_path: Path) -> None:
    with create(tmp_path) as region:
        with pytest.raises(PoolError, match=r"there is a region .*/r already"):
            create(tmp_path)
        assert os.listdir(tmp_path) == ["r"]
        Region.attach(region.path).close()


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x.creating-1"])
def test_bad_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="plain file name"):
        create(tmp_path, name)


def test_bad_fingerprint_and_capacity(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        Region.create(tmp_path, "r", GEOMETRY, 1, b"abc", random.Random(1))
    with pytest.raises(ValueError, match="got 0"):
        create(tmp_path, capacity=0)
    assert os.listdir(tmp_path) == []


def test_another_model_or_geometry_is_a_mismatch(tmp_path: Path) -> None:
    with create(tmp_path) as region:
        with pytest.raises(RegionMismatch, match="another model"):
            Region.attach(region.path, fingerprint=b"g" * 32)
        with pytest.raises(RegionMismatch, match=r"other blocks.*wanted 2 layers.* 8 tokens"):
            Region.attach(region.path, geometry=replace(GEOMETRY, block_tokens=8))


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        ("magic", 1, "is not a kvatlas region"),
        ("version", 99, "has layout version 99"),
        ("digest_low", 1, "laid out by another build"),
        ("capacity_blocks", 7, "has a damaged header"),
        ("dtype", 77, "has a damaged header"),
        ("kv_offset", 64, "has a damaged header"),
        ("fingerprint", 1, "has a damaged header"),
        ("check", 1, "has a damaged header"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, word: str, value: int, message: str) -> None:
    create(tmp_path).close()
    with open(tmp_path / "r", "r+b") as file:
        file.seek(8 * layout.HEADER_WORDS[word])
        file.write(struct.pack("<Q", value))
    with pytest.raises(RegionMismatch, match=message):
        Region.attach(tmp_path / "r")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    create(tmp_path).close()
    os.truncate(tmp_path / "r", 50_000)
    with pytest.raises(RegionMismatch, match="has 50000 bytes"):
        Region.attach(tmp_path / "r")
    os.truncate(tmp_path / "r", 10)
    with pytest.raises(RegionMismatch, match="is not a kvatlas region"):
        Region.attach(tmp_path / "r")


def test_attach_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Region.attach(tmp_path / "r")


def test_descriptors_are_all_given_back(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        create(tmp_path).close()
        with pytest.raises(RegionMismatch):
            Region.attach(tmp_path / "r", fingerprint=b"g" * 32)
        with pytest.raises(PoolError):
            create(tmp_path)
        os.unlink(tmp_path / "r")
    assert len(os.listdir("/proc/self/fd")) == before


def test_closed_region_says_so(tmp_path: Path) -> None:
    region = create(tmp_path)
    region.close()
    region.close()
    assert region.closed
    for use in (lambda: region.kv_memory, region.control, lambda: region.lock_slot(0)):
        with pytest.raises(PoolError, match="is closed in this process"):
            use()
    region.unlock_slot(0)


def test_slots_exclude_each_other(tmp_path: Path) -> None:
    with create(tmp_path) as one, Region.attach(one.path, populate=True) as other:
        assert one.lock_slot(0)
        assert not one.lock_slot(0)
        assert not other.lock_slot(0)
        assert other.lock_slot(1)
        assert one.slot_in_use(1)
        assert not one.slot_in_use(2)
        other.close()
        assert one.lock_slot(1)
        one.unlock_slot(1)
        assert not one.slot_in_use(1)


def test_a_forked_child_has_neither_region_nor_pool(tmp_path: Path) -> None:
    region = create(tmp_path)
    pool = Pool.create(region)
    table = pool.table("parent")
    assert pool.allocate(table, 2)
    child = os.fork()
    if child == 0:
        try:
            refusals = 0
            for use in (lambda: pool.allocate(table, 1), pool.stats, region.control):
                try:
                    use()
                except PoolError:
                    refusals += 1
            pool.close()
            region.close()
            os._exit(0 if refusals == 3 and pool.release(table) == 0 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.check_integrity() == ""
    assert pool.release(table) == 2
    pool.close()
    region.close()


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, kvpool; assert not {'torch', 'ray', 'redis'} & set(sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
