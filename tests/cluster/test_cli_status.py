"""`kvatlas status` against the HTTP app: what it says of replicas, pools and routing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.status import ReplicaStatus
from cluster import server_state
from cluster.cli.target import KEY_VARIABLE
from tests.cluster.command import Command, Done, assert_one_sentence
from tests.cluster.conftest import ADMIN_KEY
from tests.fakes.engine import READY, ROUTING, FakeEngine

BUSY = replace(
    READY,
    capacity_blocks=262_144,
    held_blocks=131_072,
    running=256,
    waiting=1024,
    prefix_queried_tokens=1_000_000,
    prefix_hit_tokens=600_000,
    publisher={"state": "open", "published_blocks": 131_000, "lag_s": 0.0},
)


@pytest.fixture
def status(kvatlas: Command, served_url: str, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command with the admin key, about the served app."""
    monkeypatch.setenv(KEY_VARIABLE, ADMIN_KEY)

    def run(*arguments: str) -> Done:
        return kvatlas("status", "--url", served_url, *arguments)

    return run


def _directory(**changes: Any) -> dict[str, Any]:
    """The router's report with its view of the directory changed."""
    return ROUTING | {"directory": ROUTING["directory"] | changes}


def _pool(replica_id: str, **changes: Any) -> dict[str, Any]:
    pool: dict[str, Any] = ROUTING["directory"]["pools"][0]
    return pool | {"pool": f"pool of {replica_id}", "replica_ids": [replica_id]} | changes


def _table(done: Done) -> dict[str, dict[str, str]]:
    """The rows of the table by replica, cut at the columns of its head."""
    lines = done.stdout.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("REPLICA"))
    names = [name for name in lines[at].split("  ") if name]
    starts = [lines[at].index(name) for name in names]
    rows = {}
    for line in lines[at + 1 :]:
        ends = [*starts[1:], len(line)]
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        rows[cells[0]] = dict(zip((name.strip() for name in names), cells, strict=True))
    return rows


def test_the_cluster_as_a_whole(status: Command, engine: FakeEngine) -> None:
    other = replace(READY, replica_id="r1", prefix_queried_tokens=500_000, prefix_hit_tokens=0)
    engine.statuses, engine.report = [BUSY, other], ROUTING
    done = status()
    assert done.returncode == 0
    said = done.stdout.splitlines()
    assert "ready  tiny (exact)" in said[0]
    assert "cluster    2 replicas, 262,152 blocks, hit rate 40% (600,000 of 1,500,000 tokens)" in said
    assert "routing    cost: 6 prefix_hit, 3 no_prefix, 1 load_override, 0 fallback; 0 retries" in said
    assert "tokens     of 4,000 queried: 2,100 predicted to be cached, 2,000 were; 100 phantom" in said
    assert "directory  live, lag 0.004 s (0 entries behind), 1 resync, 0 gaps, 0 digest mismatches" in said


@pytest.mark.parametrize("pools", [[_pool("0123abcd")], []])
def test_it_fits_120_columns(status: Command, engine: FakeEngine, pools: list[dict[str, Any]]) -> None:
    engine.statuses = [
        replace(BUSY, replica_id="0123abcd", prefix_queried_tokens=9_876_543, prefix_hit_tokens=9_000_000)
    ]
    counts = dict.fromkeys(ROUTING["decisions"], 1_234_567)
    engine.report = _directory(pools=pools, lag_s=123.456, lag_entries=100_000, resyncs=1000) | {"decisions": counts}
    assert max(len(line) for line in status().stdout.splitlines()) <= 120


@pytest.mark.parametrize(
    ("replica", "report", "published", "pool"),
    [
        (BUSY, ROUTING, "131,000", "live"),
        (BUSY, _directory(pools=[_pool("r0", state="suspect")]), "131,000", "suspect"),
        (BUSY, _directory(pools=[_pool("r0", whole=False)]), "131,000", "live, no keys"),
        (BUSY, _directory(pools=[_pool("another"), _pool("r0")]), "131,000", "live"),
        (BUSY, _directory(pools=[_pool("another")]), "131,000", "not listed"),
        (BUSY, _directory(pools=[], state="silent"), "131,000", "not listed"),
        (replace(READY, publisher={"state": "lost", "published_blocks": 7}), ROUTING, "7 (lost)", "live"),
        (
            replace(READY, publisher={"state": "standby", "published_blocks": 0}),
            _directory(pools=[_pool("another", replica_ids=["another", "r0"])]),
            "standby",
            "live",
        ),
        (replace(READY, publisher={}), _directory(pools=[], state="off"), "-", "-"),
        (replace(READY, publisher={}), {}, "-", "-"),
        (BUSY, {}, "131,000", "-"),
    ],
)
def test_the_pool_of_a_replica(
    status: Command, engine: FakeEngine, replica: ReplicaStatus, report: dict[str, Any], published: str, pool: str
) -> None:
    engine.statuses, engine.report = [replica], report
    row = _table(status())["r0"]
    assert (row["PUBLISHED"], row["POOL"], row["INTEGRITY"]) == (published, pool, "ok")


def test_a_directory_that_was_never_read(status: Command, engine: FakeEngine) -> None:
    engine.report = _directory(state="silent", lag_s=None, pools=[])
    assert "directory  silent, lag unknown" in status().stdout


def test_without_a_directory(status: Command, engine: FakeEngine) -> None:
    engine.report = _directory(state="off", lag_s=None, pools=[])
    done = status()
    assert done.returncode == 0
    assert "directory  off: requests are routed by load only" in done.stdout


def test_without_a_router(status: Command) -> None:
    done = status()
    assert "routing" not in done.stdout
    assert "cluster    1 replica, 8 blocks, no token asked for yet" in done.stdout


def test_a_decision_log_is_told_of_and_first_of_all_that_it_fails(status: Command, engine: FakeEngine) -> None:
    log = {"path": "/logs/d.jsonl", "written": 1200, "dropped": 3, "failed": 0, "problem": ""}
    engine.report = ROUTING | {"decision_log": log}
    assert "log        /logs/d.jsonl: 1,200 written, 3 dropped, 0 failed" in status().stdout.splitlines()
    engine.report = ROUTING | {"decision_log": log | {"failed": 7, "problem": "No space left on device"}}
    (line,) = (line for line in status().stdout.splitlines() if line.startswith("log "))
    assert "cannot be written (No space left on device): check router.decision_log; 1,200 written" in line
    engine.report = ROUTING
    assert "\nlog " not in status().stdout


def test_json(status: Command, engine: FakeEngine) -> None:
    engine.report = ROUTING
    report = json.loads(status("--json").stdout.splitlines()[-1])
    assert report["ready"]
    assert report["routing"] == ROUTING
    assert report["replicas"][0]["publisher"] == READY.publisher


def test_not_ready_still_shows_what_there_is(status: Command, engine: FakeEngine) -> None:
    engine.statuses, engine.report = [replace(READY, stalled_s=9.0)], ROUTING
    done = status()
    assert done.returncode == 1
    assert "r0 has made no progress for 9.0 s" in done.stdout
    assert "r0" in _table(done)


def test_without_the_key(kvatlas: Command, served_url: str) -> None:
    done = kvatlas("status", "--url", served_url)
    assert done.returncode == 0
    assert KEY_VARIABLE in done.stdout
    report = json.loads(kvatlas("status", "--url", served_url, "--json").stdout)
    assert (report["replicas"], report["routing"]) == ([], {})


def test_the_server_running_here_is_found_with_its_key(kvatlas: Command, served_url: str, tmp_path: Path) -> None:
    port = int(served_url.rpartition(":")[2])
    state = server_state.here("127.0.0.1", port, served_url, "tiny", ADMIN_KEY)
    server_state.write(tmp_path / "run", replace(state, metrics_url="http://metrics"))
    done = kvatlas("status")
    assert done.returncode == 0
    assert "metrics at http://metrics" in done.stdout
    assert "r0" in _table(done)
    assert ADMIN_KEY not in done.stdout
    assert_one_sentence(kvatlas("status", "--url", served_url, "--port", str(port)), 2, "--url", "--port")


def test_a_key_that_is_not_accepted_is_told(kvatlas: Command, served_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    done = kvatlas("status", "--url", served_url)
    assert "does not accept this admin key" in done.stdout


def test_the_key_of_a_server_that_runs_here_is_found_by_its_url_too(
    kvatlas: Command, served_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.setenv("KVATLAS_RUNTIME_DIR", str(tmp_path))
    host, _, port = served_url.rpartition("//")[2].partition(":")
    state = server_state.here(host, int(port), served_url, "tiny", ADMIN_KEY)
    server_state.write(tmp_path, replace(state, metrics_url="http://metrics"))  # which it knows once it is ready
    done = kvatlas("status", "--url", served_url + "/")
    assert "REPLICA" in done.stdout
    monkeypatch.setenv(KEY_VARIABLE, "wrong")  # what is said beats what is found
    assert "does not accept" in kvatlas("status", "--url", served_url).stdout
