from __future__ import annotations

import json

import pytest

from kvpool.directory import ReplicaLoad
from router.directory_state import DirectoryWatch
from router.mirror import Mirror
from tests.router.scene import Scene


@pytest.mark.parametrize(
    ("lag_s", "connected", "state"),
    [(0.0, True, "live"), (0.4, True, "live"), (0.6, True, "stale"), (0.0, False, "stale"), (3.1, True, "silent")],
)
def test_states(lag_s: float, connected: bool, state: str) -> None:
    scene = Scene()
    scene.hear("r0")
    scene.mirror.note_progress(100.0, 0)
    watch = DirectoryWatch(scene.mirror, lambda: connected, 3.0)
    assert watch.state(100.0 + lag_s) == state
    assert bool(watch.silence(100.0 + lag_s)) == (state == "silent")


def test_a_directory_that_tells_of_no_pool_is_silent() -> None:
    """It answers reads, but nobody can write to it, or nobody does."""
    scene = Scene()
    watch = DirectoryWatch(scene.mirror, lambda: True, 3.0, lambda: "why")
    scene.mirror.note_progress(scene.now, 0)
    assert watch.state(scene.now) == "silent"
    assert watch.report(scene.now)["problem"] == "why"
    scene.hear("r0")
    assert watch.state(scene.now) == "live"
    scene.mirror.note_progress(scene.now + 3.1, 0)
    assert watch.state(scene.now + 3.1) == "silent"


def test_reasons_for_silence_are_words() -> None:
    mirror = Mirror()
    watch = DirectoryWatch(mirror, lambda: True, 3.0)
    assert (watch.state(5.0), watch.silence(5.0)) == ("silent", "the directory has not answered yet")
    mirror.note_progress(100.0, 0)
    assert watch.silence(104.25) == "directory silent for 4.2 s"
    off = DirectoryWatch(None, lambda: True, 3.0)
    assert (off.state(5.0), off.silence(5.0), off.counts()) == ("off", "no directory", (0, 0, 0))


def test_report_is_strict_json() -> None:
    for mirror in (None, Mirror()):
        report = DirectoryWatch(mirror, lambda: True, 3.0).report(5.0)
        assert (report["lag_s"], report["pools"]) == (None, [])
        json.dumps(report, allow_nan=False)
    scene = Scene()
    scene.hear("r0", held=[1, 2])
    report = DirectoryWatch(scene.mirror, lambda: True, 3.0).report(scene.now + 0.25)
    (pool,) = report["pools"]
    assert (pool["pool"], pool["state"], pool["key_blocks"], pool["age_s"]) == ("p-r0", "live", 2, 0.25)
    assert (pool["replica_ids"], pool["free_blocks"]) == (["r0"], 1000)
    assert (report["resyncs"], report["lag_entries"], report["lag_s"]) == (1, 0, 0.25)
    json.dumps(report, allow_nan=False)


def test_the_report_tells_the_load_of_each_replica_of_a_shared_pool() -> None:
    scene = Scene()
    scene.hear_shared("node", ReplicaLoad("r0", 100, 3, 1, 500.0), ReplicaLoad("r1"), free_blocks=40)
    (pool,) = DirectoryWatch(scene.mirror, lambda: True, 3.0).report(scene.now)["pools"]
    assert (pool["free_blocks"], pool["replica_ids"]) == (40, ["r0", "r1"])
    assert pool["replicas"][0] == {
        "replica_id": "r0",
        "queued_prefill_tokens": 100,
        "running": 3,
        "waiting": 1,
        "prefill_tokens_per_s": 500.0,
    }
