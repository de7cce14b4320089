"""`kvatlas pool` over real regions in a directory of the test's own: of a process that lives, and of one that was killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.pool import pool as commands
from kvpool import BlockGeometry, Pool, Region, layout
from tests.cluster.command import Command, Done, assert_one_sentence

ROOT = Path(__file__).parents[2]

PROCESS = """
import random, sys, time
from kvpool import BlockGeometry, KeyRoot, KeySpace, Pool, Region, SlotLoad
geometry = BlockGeometry(1, 1, 4, 2, "float32")
region = Region.create(sys.argv[1], sys.argv[2], geometry, 16, bytes(range(32)), random.Random(1))
pool = Pool.create(region, guard=True)
pool.report_load(SlotLoad("replica-x", 5, 1, 0, 10.0))
space = KeySpace(bytes(32))
tokens = [1, 2, 3, 4, 5]
keys = space.block_keys(space.root(KeyRoot("m", 2, "float32")), tokens, 2)
for name in ("a-request-that-is-done", "a-request-in-progress"):
    table = pool.table(name)
    matched = pool.match(table, keys, tokens)
    assert pool.allocate(table, 3 - matched)
    for position in range(matched, 2):
        pool.seal(table, position, keys[position], tokens[2 * position : 2 * position + 2])
    if name.endswith("done"):
        pool.release(table)
print("ready", flush=True)
time.sleep(60)
"""


@dataclass
class Machine:
    """`live`: process id of the one that lives in kvatlas-live; the one of kvatlas-dead was killed."""

    directory: Path
    live: int
    dead: int
    run: Command

    def __call__(self, *arguments: str) -> Done:
        return self.run("pool", *arguments, "--directory", str(self.directory))

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def start(directory: Path, name: str, env: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(directory), name]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, int]]:
    """A directory with both regions; starting a process costs a second, so they are shared by tests that only look."""
    directory = tmp_path_factory.mktemp("shm")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [start(directory, name, env) for name in ("kvatlas-live", "kvatlas-dead")]
    try:
        os.kill(children[1].pid, signal.SIGKILL)
        children[1].wait()
        yield directory, children[0].pid, children[1].pid
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def machine(processes: tuple[Path, int, int], kvatlas: Command) -> Machine:
    return Machine(*processes, kvatlas)


@pytest.fixture
def own(tmp_path: Path, kvatlas: Command) -> Machine:
    """A directory that a test may change, with two orphans in it."""
    for name in ("kvatlas-one", "kvatlas-two"):
        geometry = BlockGeometry(1, 1, 4, 2, "float32")
        with Region.create(tmp_path, name, geometry, 8, bytes(32), random.Random(2)) as region, Pool.create(region):
            pass
    return Machine(tmp_path, 0, 0, kvatlas)


def test_ls(machine: Machine) -> None:
    done = machine("ls")
    assert done.returncode == 0, done.stderr
    head, dead, live = done.stdout.splitlines()
    assert head.split() == ["NAME", "MODEL", "SIZE", "BLOCKS", "USED", "CACHED", "FREE", "PROCESSES", "STATE"]
    size_kib = (machine.directory / "kvatlas-live").stat().st_size // 1024
    same = ["00010203", str(size_kib), "KiB", "16", "3", "0", "13"]
    assert live.split() == ["kvatlas-live", *same, "1", "live"]
    assert dead.split()[:11] == ["kvatlas-dead", *same, "0", "orphan,", "unused"]


def test_ls_as_json(machine: Machine) -> None:
    told = machine.json("ls")
    assert told["directory"] == str(machine.directory)
    dead, live = told["regions"]
    assert (live["name"], live["live"], live["pids"]) == ("kvatlas-live", True, [machine.live])
    assert (dead["name"], dead["live"], dead["pids"]) == ("kvatlas-dead", False, [])
    assert (live["used_blocks"], live["cached_blocks"], live["free_blocks"], live["capacity_blocks"]) == (3, 0, 13, 16)


def test_ls_of_nothing(kvatlas: Command, tmp_path: Path) -> None:
    assert kvatlas("pool", "ls", "--directory", str(tmp_path)).stdout == f"No region in {tmp_path}.\n"
    assert_one_sentence(kvatlas("pool", "ls", "--directory", str(tmp_path / "no")), 2, "No such file", "--directory")


def test_ls_shows_what_it_cannot_read(own: Machine) -> None:
    with (own.directory / "kvatlas-two").open("r+b") as file:
        file.seek(8 * layout.HEADER_WORDS["version"])
        file.write(bytes([99, 0, 0, 0, 0, 0, 0, 0]))
    (own.directory / "kvatlas-three.creating").write_bytes(b"")
    (own.directory / "kvatlas-note").write_text("none of ours")
    states = {line.split()[0]: " ".join(line.split()[9:]) for line in own("ls").stdout.splitlines()[1:]}
    assert states["kvatlas-one"].startswith("orphan, unused for 0.")
    assert states["kvatlas-two"] == "other version"
    assert states["kvatlas-three.creating"] == "half made"
    assert len(states) == 3
    _, three, two = own.json("ls")["regions"]
    assert (two["kind"], "layout version 99" in two["problem"]) == ("other version", True)
    assert three["kind"] == "half made"
    assert_one_sentence(own("show", "two"), 2, "layout version 99", "remove the file")
    assert_one_sentence(own("check", "three.creating"), 2, "still being made")
    assert own("rm", "two").returncode == own("rm", "three.creating").returncode == 0
    assert sorted(file.name for file in own.directory.iterdir()) == ["kvatlas-note", "kvatlas-one"]


@pytest.mark.parametrize("name", ["live", "kvatlas-live"])
def test_show(machine: Machine, name: str) -> None:
    done = machine("show", name)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("kvatlas-live  live, last used ")
    told = dict(line.split(maxsplit=1) for line in lines[1:11])
    assert told["model"].startswith("0001020304050607, owner 00000000, incarnation ")
    assert told["blocks"].startswith("16: 1 layers x 1 KV heads x 4 float32, 2 tokens")
    assert told["now"] == "13 free, 0 local, 1 mutable, 0 sealed, 2 held, 0 cached"
    assert told["integrity"] == "ok"
    assert lines[11].split()[:4] == ["SLOT", "PID", "REPLICA", "STATE"]
    assert lines[12].split()[:4] == ["0", str(machine.live), "replica-x", "alive"]
    assert len(lines) == 13


def test_show_an_orphan(machine: Machine) -> None:
    lines = machine("show", "dead").stdout.splitlines()
    assert lines[0].startswith("kvatlas-dead  orphan, ")
    assert lines[12].split()[:5] == ["0", str(machine.dead), "replica-x", "dead", "-"]


def test_show_as_json(machine: Machine) -> None:
    told = machine.json("show", "live")
    assert (told["live"], told["integrity"], told["capacity_blocks"]) == (True, "", 16)
    assert told["slots"][0]["pid"] == machine.live
    assert told["slots"][0]["queued_prefill_tokens"] == 5
    assert told["totals"]["prefix_hit_tokens"] == 0
    assert told["geometry"]["block_tokens"] == 2


def test_looking_changes_nothing(machine: Machine) -> None:
    """An orphan stays as old, and as adoptable, as it is."""
    path = machine.directory / "kvatlas-dead"
    before, content = path.stat().st_mtime_ns, path.read_bytes()
    for command in ("ls", "show", "check", "dump"):
        assert machine(command, *([] if command == "ls" else ["dead"])).returncode == 0
    assert path.stat().st_mtime_ns == before
    assert path.read_bytes() == content


def test_check(machine: Machine) -> None:
    assert machine("check", "live").stdout == "No violation.\n"
    told = machine.json("check", "dead")
    assert (told["live"], told["integrity"]) == (False, "")


def test_check_of_a_damaged_region(own: Machine) -> None:
    with Region.attach(own.directory / "kvatlas-one") as region:
        control = region.control()
        control.free[0] ^= 1 << 3
        control.release()
    done = own("check", "one")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "block 3 has free bit 0 but is FREE, generation 0.",
        "Its processes are dead: a replica that takes it over puts right what they left half done.",
    ]
    assert own.json("check", "one", code=1)["integrity"].startswith("block 3 has free bit 0")
    assert own.json("show", "one")["integrity"].startswith("block 3 has free bit 0")
    with Region.attach(own.directory / "kvatlas-one"):  # and the same while somebody lives there
        assert own("check", "one").stdout == "block 3 has free bit 0 but is FREE, generation 0.\n"


def test_dump(machine: Machine) -> None:
    lines = machine("dump", "live", "--request", "request-").stdout.splitlines()
    assert lines[0].split()[:6] == ["BLOCK", "STATE", "LIFE", "OWNER", "HOLDERS", "REQUEST"]
    states = [line.split()[1] for line in lines[1:]]
    assert sorted(states) == ["INDEXED", "INDEXED", "MUTABLE"]
    mutable = next(line.split() for line in lines if "MUTABLE" in line)
    assert mutable[3:7] == [f"0:{machine.live}", "(replica-x)", "-", "a-request-in-progress"]
    indexed = next(line.split() for line in lines if "INDEXED" in line)
    assert indexed[3:6] == ["-", "0", "a-request-that-is-done"]


def test_dump_of_one_block(machine: Machine) -> None:
    told = machine.json("dump", "live", "--state", "indexed")
    assert told["matching_blocks"] == 2
    block = told["blocks"][1]
    lines = machine("dump", "live", "--block", str(block["block"])).stdout.splitlines()
    assert lines[2] == f"key      {block['key']}"
    who = f"by process {machine.live} (replica-x) in slot 0 "
    assert lines[3].startswith(f"history  sealed {who}")
    assert f"; taken {who}" in lines[3]
    assert block["mark"].startswith("checksum ")
    assert block["parent"] == told["blocks"][0]["block"]


def test_dump_of_what_a_dead_process_had(machine: Machine) -> None:
    told = machine.json("dump", "dead", "--slot", "0", "--state", "MUTABLE")
    assert [(each["request"], each["pid"]) for each in told["blocks"]] == [("a-request-in-progress", machine.dead)]


def test_dump_stops_at_the_limit(machine: Machine) -> None:
    lines = machine("dump", "live", "--limit", "4").stdout.splitlines()
    assert len(lines) == 6
    assert lines[-1] == "12 more: raise --limit, or ask for less."
    told = machine.json("dump", "live", "--limit", "4")
    assert (told["matching_blocks"], len(told["blocks"])) == (16, 4)
    assert len(machine("dump", "live", "--limit", "0").stdout.splitlines()) == 17
    assert machine("dump", "live", "--request", "nobody").stdout == "No block fits.\n"


def test_what_cannot_be_asked_for(machine: Machine) -> None:
    assert_one_sentence(machine("show", "nothing"), 2, "no region nothing", "kvatlas pool ls")
    assert_one_sentence(machine("check", "../live"), 2, "--directory")
    assert_one_sentence(machine("dump", "live", "--block", "16"), 2, "blocks 0 to 15")
    assert_one_sentence(machine("dump", "live", "--state", "BUSY"), 2, "INDEXED")
    assert_one_sentence(machine("dump", "live", "--slot", "64"), 2, "slots 0 to 63")
    assert_one_sentence(machine("rm", "nothing"), 2, "kvatlas pool ls")


def test_rm_removes_an_orphan(own: Machine) -> None:
    path = own.directory / "kvatlas-one"
    kib = path.stat().st_size // 1024
    assert own("rm", "one").stdout == f"Removed {path} ({kib} KiB).\n"
    assert not path.exists()
    told = own.json("rm", "kvatlas-two")
    assert (told["removed"], told["freed"]) == (True, True)
    assert list(own.directory.iterdir()) == []


def test_rm_refuses_what_somebody_has_open(machine: Machine) -> None:
    assert_one_sentence(machine("rm", "live"), 2, f"open in process {machine.live}:", "kvatlas stop", "--force")
    assert (machine.directory / "kvatlas-live").exists()


def test_rm_refuses_what_is_no_region(own: Machine) -> None:
    (own.directory / "kvatlas-note").write_text("none of ours")
    (own.directory / "kvatlas-link").symlink_to(own.directory / "kvatlas-one")
    for name in ("note", "link"):
        assert own("rm", name, "--force").returncode == 2
    assert len(list(own.directory.iterdir())) == 4


def test_rm_by_force_takes_the_name_only(own: Machine) -> None:
    path = own.directory / "kvatlas-one"
    with Region.attach(path) as region, Pool.create(region) as inhabited:
        assert_one_sentence(own("rm", "one"), 2, "--force")
        told = own.json("rm", "one", "--force")
        assert (told["removed"], told["freed"]) == (True, False)
        assert not path.exists()
        with inhabited.table("goes on") as table:
            assert inhabited.allocate(table, 8)


def test_every_command_is_documented_and_speaks_json(kvatlas: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    names = sorted(command.callback.__name__ for command in commands.registered_commands if command.callback)
    assert names == ["check", "dump", "ls", "rm", "show"]
    for name in names:
        told = kvatlas("pool", name, "--help").stdout
        assert "--json" in told
        assert "--directory" in told
