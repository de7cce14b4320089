from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool import BlockGeometry, Pool, PoolError, Region, RegionMismatch, layout, ofd_lock, recovery, words
from kvpool.region import Role

GEOMETRY = BlockGeometry(2, 1, 4, 4, "float32")
FINGERPRINT = b"f" * 32


OWNER = b"o" * 16


def create(directory: Path, name: str = "r", capacity: int = 6, owner: bytes = OWNER) -> Region:
    return Region.create(directory, name, GEOMETRY, capacity, FINGERPRINT, random.Random(1), owner)


def adopt(path: Path, owner: bytes = OWNER) -> Region | None:
    return Region.adopt(path, geometry=GEOMETRY, fingerprint=FINGERPRINT, owner=owner)


def adopted(path: Path) -> Region:
    region = adopt(path)
    assert region is not None
    return region


def test_create_then_attach(tmp_path: Path) -> None:
    with create(tmp_path) as made, Region.attach(tmp_path / "r", geometry=GEOMETRY, fingerprint=FINGERPRINT) as other:
        assert other.geometry == GEOMETRY
        assert other.capacity_blocks == 6
        assert other.fingerprint == FINGERPRINT
        assert other.owner == made.owner == OWNER
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
    with pytest.raises(ValueError, match="16 bytes, got 2"):
        create(tmp_path, owner=b"ab")
    assert os.listdir(tmp_path) == []


def test_another_model_geometry_or_owner_is_a_mismatch(tmp_path: Path) -> None:
    with create(tmp_path) as region:
        with pytest.raises(RegionMismatch, match="another model"):
            Region.attach(region.path, fingerprint=b"g" * 32)
        with pytest.raises(RegionMismatch, match=r"other blocks.*wanted 2 layers.* 8 tokens"):
            Region.attach(region.path, geometry=replace(GEOMETRY, block_tokens=8))
        with pytest.raises(RegionMismatch, match="another cluster"):
            Region.attach(region.path, owner=bytes(16))
        Region.attach(region.path, owner=OWNER).close()


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
        ("owner", 1, "has a damaged header"),
        ("check", 1, "has a damaged header"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, word: str, value: int, message: str) -> None:
    create(tmp_path).close()
    with open(tmp_path / "r", "r+b") as file:
        file.seek(8 * layout.HEADER_WORDS[word])
        file.write(struct.pack("<Q", value))
    before = (tmp_path / "r").read_bytes()
    for use in (Region.attach, adopt):
        with pytest.raises(RegionMismatch, match=message):
            use(tmp_path / "r")
    assert (tmp_path / "r").read_bytes() == before


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
        with pytest.raises(RegionMismatch):
            adopt(tmp_path / "r", bytes(16))
        with adopted(tmp_path / "r"):
            assert adopt(tmp_path / "r") is None
        with pytest.raises(PoolError):
            create(tmp_path)
        os.unlink(tmp_path / "r")
    assert len(os.listdir("/proc/self/fd")) == before


def test_closed_region_says_so(tmp_path: Path) -> None:
    region = create(tmp_path)
    region.close()
    region.close()
    assert region.closed
    for use in (
        lambda: region.kv_memory,
        region.control,
        lambda: region.lock_slot(0),
        lambda: region.try_lead("tidy"),
        region.alone,
        region.touch,
        region.unlink_if_alone,
    ):
        with pytest.raises(PoolError, match="is closed in this process"):
            use()
    region.unlock_slot(0)
    region.resign("tidy")


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


def test_an_adopted_region_has_what_was_complete_and_nothing_else(tmp_path: Path) -> None:
    made = create(tmp_path)
    made.kv_memory[5] = 99
    with contextlib.closing(Pool.create(made)) as pool:
        table = pool.table("doomed")
        pool.allocate(table, 3)
        pool.seal(table, 0, b"k" * 16, [1, 2, 3, 4])
        made.close()  # as a death does: nothing was given back
    incarnation = made.incarnation
    with adopted(tmp_path / "r") as region:
        assert region.incarnation == incarnation
        assert region.kv_memory[5] == 99
        control = region.control()
        states = sorted(words.state_of(word) for word in control.state)
        assert states == sorted([words.INDEXED] + 5 * [words.FREE])
        assert not any(control.holders)
        control.release()
        with contextlib.closing(Pool.create(region)) as pool:
            assert pool.peek([b"k" * 16]) == 1
            assert pool.check_integrity() == ""


def test_nobody_adopts_from_the_living_and_nothing_that_is_gone(tmp_path: Path) -> None:
    with create(tmp_path) as made:
        assert adopt(made.path) is None
        with Region.attach(made.path):
            made.close()
            assert adopt(made.path) is None
    with adopted(made.path) as region, Region.attach(made.path):
        assert adopt(made.path) is None
        region.unlink()
        assert adopt(made.path) is None


def test_adopting_another_thing_leaves_it_as_it_was(tmp_path: Path) -> None:
    create(tmp_path).close()
    (tmp_path / "link").symlink_to(tmp_path / "r")
    os.mkfifo(tmp_path / "fifo")
    before = (tmp_path / "r").read_bytes()
    for path, owner in ((tmp_path / "r", bytes(16)), (tmp_path / "link", OWNER), (tmp_path / "fifo", OWNER)):
        with pytest.raises(RegionMismatch):
            adopt(path, owner)
    assert (tmp_path / "r").read_bytes() == before
    adopted(tmp_path / "r").close()


def test_who_comes_during_an_adoption_is_told_and_never_sees_it_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the lock's last change lets others in: while blocks are brought to rest nobody is there."""
    create(tmp_path).close()
    seen = []

    def look(control: object) -> int:
        with pytest.raises(PoolError, match="being removed or adopted"):
            Region.attach(tmp_path / "r")
        seen.append(adopt(tmp_path / "r"))
        return 0

    monkeypatch.setattr(recovery, "recover", look)
    with adopted(tmp_path / "r") as region:
        assert seen == [None]
        assert region.alone()
        with Region.attach(tmp_path / "r") as other:
            assert other.lock_slot(3)
            assert other.try_lead("tidy")
            assert not region.alone()


def test_the_presence_lock_is_held_without_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every single change of a lock during an adoption the file is no orphan."""
    create(tmp_path).close()
    looks = []

    def watched(name: str) -> Callable[..., object]:
        real = getattr(ofd_lock, name)

        def call(fd: int, start: int, length: int, **options: bool) -> object:
            answer = real(fd, start, length, **options)
            probe = os.open(tmp_path / "r", os.O_RDWR)
            looks.append(ofd_lock.is_locked(probe, 0, 0))
            os.close(probe)
            return answer

        return call

    for name in ("try_lock", "unlock"):
        monkeypatch.setattr(ofd_lock, name, watched(name))
    with adopted(tmp_path / "r"):
        assert looks == [True] * 3


@pytest.mark.parametrize("role", ["tidy", "publisher"])
def test_one_leads_at_a_time(tmp_path: Path, role: Role) -> None:
    other_role: Role = "publisher" if role == "tidy" else "tidy"
    with create(tmp_path) as one, Region.attach(one.path) as other:
        assert one.try_lead(role)
        assert one.try_lead(role)
        assert not other.try_lead(role)
        assert other.try_lead(other_role)
        other.resign(role)  # not its own
        assert not other.try_lead(role)
        one.resign(role)
        assert other.try_lead(role)
        other.close()
        assert one.try_lead(role)


def test_a_role_goes_with_its_process_and_is_not_inherited(tmp_path: Path) -> None:
    region = create(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), Region.attach(tmp_path / "r") as own:
            os.write(writer, b"y" if own.try_lead("publisher") else b"n")
            signal.pause()
        os._exit(2)
    assert os.read(reader, 1) == b"y"
    assert not region.try_lead("publisher")
    assert region.try_lead("tidy")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert region.try_lead("publisher")
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(2)
    try:
        region.close()
        # The child closes its copy when it first runs, not at the fork itself.
        deadline = time.monotonic() + 20.0
        with Region.attach(tmp_path / "r") as next_one:
            while not (next_one.try_lead("publisher") and next_one.try_lead("tidy")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_the_locks_of_presence_roles_and_slots_do_not_touch(tmp_path: Path) -> None:
    """Nor do a role's bytes hold a word of the header."""
    with create(tmp_path) as region:
        used = {byte for word in layout.HEADER_WORDS.values() for byte in range(8 * word, 8 * word + 8)}
        assert max(used) < 1024
        with Region.attach(region.path) as other:
            assert other.try_lead("tidy")
            assert other.try_lead("publisher")
            assert all(region.lock_slot(slot) for slot in range(layout.SLOTS))
            with Region.attach(region.path):
                pass


def test_the_last_one_to_leave_removes_the_file(tmp_path: Path) -> None:
    one = create(tmp_path)
    two = Region.attach(one.path)
    assert not one.alone()
    assert not one.leave()
    assert two.alone()
    assert two.leave()
    assert not two.leave()
    assert os.listdir(tmp_path) == []


def test_leaving_never_takes_the_file_from_a_successor(tmp_path: Path) -> None:
    one = create(tmp_path)
    one.unlink()
    with create(tmp_path) as successor:
        assert not one.leave()
        assert os.listdir(tmp_path) == ["r"]
        assert successor.alone()


def test_taking_the_name_away_while_it_stays_mapped(tmp_path: Path) -> None:
    with create(tmp_path) as one:
        with Region.attach(one.path):
            assert not one.unlink_if_alone()
            assert one.path.exists()
        assert one.unlink_if_alone()
        assert os.listdir(tmp_path) == []
        one.kv_memory[0] = 1
        with create(tmp_path) as successor:
            assert successor.kv_memory[0] == 0


def test_every_way_in_renews_the_last_use(tmp_path: Path) -> None:
    region = create(tmp_path)
    os.utime(region.path, (1, 1))
    region.touch()
    assert region.path.stat().st_mtime > 1
    region.close()
    for enter in (Region.attach, adopted):
        os.utime(tmp_path / "r", (1, 1))
        enter(tmp_path / "r").close()
        assert (tmp_path / "r").stat().st_mtime > 1
