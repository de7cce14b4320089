"""The field of a scenario: a Redis, pools and routers in processes of their own, and the hand that stops and replaces them.

Every wait has an end, and every process is ended by its own id, on every path.
"""

from __future__ import annotations

import base64
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from cluster.directory_check import compare
from cluster.mirror_picture import MirrorPicture, PoolPicture
from kvpool.directory import Space
from kvpool.directory.redis_backend import RedisReader
from kvpool.region_view import RegionView
from tests.failures.prompts import BLOCK_TOKENS, indexed
from tests.fakes.redis_server import RedisServer

_ROOT: Final = Path(__file__).resolve().parents[2]
_START_S: Final = 120.0
WAIT_S: Final = 25.0
"""How long anything may take that takes some seconds at most on an idle machine."""
SLOW_S: Final = 6.0
"""What takes longer to be whole again is told of in detail."""
LEASE_S: Final = 1.5
SPACE: Final = Space("cluster", "ab" * 16, BLOCK_TOKENS)


class Mother:
    """See `mother.py`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.failures.mother"],
                cwd=_ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._answer(_START_S) == "ready"

    def fork(self, kind: str, address: str) -> int:
        """Forks a process; its pid."""
        return int(self._ask(f"fork {kind} {address}"))

    def reap(self, pid: int) -> int:
        """Waits for one that was killed, or ends; its exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(int(self._ask(f"reap {pid}")))

    def close(self) -> None:
        """Ends it and all its children."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        return self._answer(WAIT_S)

    def _answer(self, timeout_s: float) -> str:
        pipe = self._process.stdout
        assert pipe is not None
        ready, _, _ = select.select([pipe], [], [], timeout_s)
        line = pipe.readline().decode().strip() if ready else ""
        assert line, f"the mother process says nothing: {self._log.read_text()[-2000:]}"
        return line


class Process:
    """A pool's or a router's process."""

    def __init__(self, mother: Mother, kind: str, space: Space) -> None:
        self.space = space
        self._mother = mother
        address = f"kvatlas-failures-{os.getpid()}-{os.urandom(6).hex()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{address}")
            listener.listen()
            listener.settimeout(WAIT_S)
            self.pid = mother.fork(kind, address)
            self._connection, _ = listener.accept()
        self._connection.settimeout(WAIT_S)
        self._lines = self._connection.makefile("rb")
        self.alive = True
        self.stopped = False

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Sends a command and returns its answer."""
        self._connection.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self._lines.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def stop(self) -> None:
        """SIGSTOP: it answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """SIGKILL; idempotent."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
            assert self._mother.reap(self.pid) == -signal.SIGKILL
            self._forget()

    def end(self) -> dict[str, Any]:
        """Lets it leave properly."""
        answer = self.ask("leave")
        self._connection.shutdown(socket.SHUT_RDWR)
        assert self._mother.reap(self.pid) == 0
        self._forget()
        return answer

    def _forget(self) -> None:
        self.alive = False
        self._lines.close()
        self._connection.close()


@dataclass
class PoolHand:
    """A pool's process: the pool's name, the region's file, the replicas that its heartbeats name."""

    process: Process
    pool: str
    path: Path
    replica_ids: list[str]

    def state(self) -> dict[str, Any]:
        """See `PoolProcess.state`."""
        return self.process.ask("state")

    @property
    def publishes(self) -> bool:
        """Whether it is the one that publishes its pool, and does."""
        return bool(self.state()["publisher"]["state"] == "open")


@dataclass
class Field:
    """See the module. `pools`: living ones that belong there; `others`: processes that live and do not (stopped, replaced)."""

    mother: Mother
    home: Path
    redis: RedisServer
    seed: int
    lease_s: float = LEASE_S
    pools: list[PoolHand] = field(default_factory=list)
    routers: list[Process] = field(default_factory=list)
    others: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._made = 0
        self._notes: dict[str, float] = {}
        self._loaded = Counter[str]()

    # Making processes

    def pool(
        self,
        pool: str,
        *,
        how: str = "create",
        path: Path | None = None,
        replica_ids: list[str] | None = None,
        space: Space = SPACE,
        url: str = "",
        capacity_blocks: int = 128,
        log_entries: int = 16384,
        retention_s: float = 60.0,
        per_s: float = 60.0,
    ) -> PoolHand:
        """A process that publishes pool `pool`, in a new region or in the one at `path`."""
        self._made += 1
        where = path or self.home / f"region-{self._made}"
        hand = PoolHand(Process(self.mother, "pool", space), pool, where, replica_ids or [f"{pool}-{self._made}"])
        self.pools.append(hand)
        hand.process.ask(
            "start",
            url=url or self.redis.url,
            space=list(asdict(space).values()),
            path=str(where),
            how=how,
            pool=pool,
            replica_ids=hand.replica_ids,
            capacity_blocks=capacity_blocks,
            lease_s=self.lease_s,
            log_entries=log_entries,
            retention_s=retention_s,
            per_s=per_s,
            seed=self.rng.getrandbits(32),
        )
        self._tell_members()
        return hand

    def router(self, space: Space = SPACE, ready_s: float = WAIT_S, per_s: float = 40.0) -> Process:
        """A router's process, from when it is ready on."""
        router = Process(self.mother, "router", space)
        answer = router.ask(
            "start",
            url=self.redis.url,
            space=list(asdict(space).values()),
            lease_s=self.lease_s,
            per_s=per_s,
            seed=self.rng.getrandbits(32),
            members=self._members(space),
            ready_s=ready_s,
        )
        assert answer["ready"], f"seed {self.seed}: a router was not ready within {ready_s:g} s"
        self.note("ready_s", answer["ready_s"])
        self.routers.append(router)
        return router

    def begin(self, pools: int = 2, routers: int = 1, **what: Any) -> list[PoolHand]:
        """That many pools and routers, all whole, and with something in them."""
        hands = [self.pool(f"pool-{number}", **what) for number in range(pools)]
        for _ in range(routers):
            self.router()
        self.recovered()
        self.run(0.4)
        return hands

    def _members(self, space: Space) -> dict[str, Any]:
        hands = [hand for hand in self.pools if hand.process.space == space]
        members = sorted({one for hand in hands for one in hand.replica_ids})
        return {"members": members, "regions": {hand.pool: str(hand.path) for hand in hands}}

    def _tell_members(self) -> None:
        """What Serve tells routers: who may be chosen now. One that is stopped hears it when all settles."""
        for router in self.routers:
            members = self._members(router.space)
            if members["members"] and not router.stopped:
                router.ask("members", **members)

    # Ending them

    def kill(self, hand: PoolHand) -> float:
        """SIGKILL; returns when."""
        hand.process.kill()
        self.drop(hand)
        return time.monotonic()

    def leave(self, hand: PoolHand) -> None:
        """It goes properly, and its pool was right to the last."""
        self.pools.remove(hand)
        self._tell_members()
        assert hand.process.end()["violation"] == ""

    def drop(self, hand: PoolHand) -> None:
        """It does not belong there any more, whether it lives or not."""
        self.pools.remove(hand)
        if hand.process.alive:
            self.others.append(hand.process)
        self._tell_members()

    def kill_router(self, router: Process) -> None:
        """SIGKILL."""
        router.kill()
        self.routers.remove(router)

    def close(self) -> None:
        """Kills whatever lives."""
        for process in [*self.others, *self.routers, *(hand.process for hand in self.pools)]:
            with suppress(ProcessLookupError):
                process.kill()

    # Waiting and looking

    def wait_for(self, condition: Callable[[], object], what: str) -> float:
        """Returns after how many seconds `condition` holds. Fails when that takes too long."""
        begun = time.monotonic()
        while not condition():
            waited = time.monotonic() - begun
            assert waited < WAIT_S, f"seed {self.seed}: waited {waited:.1f} s for {what}"
            time.sleep(0.02)
        return time.monotonic() - begun

    def run(self, seconds: float) -> None:
        """Lets traffic go on."""
        time.sleep(seconds)

    def gone(self, pool: str, since: float) -> float:
        """Waits until no router lists `pool`; returns how long that was after `since`."""
        self.wait_for(lambda: all(pool not in router.ask("look")["pools"] for router in self.routers), f"{pool} to go")
        return time.monotonic() - since

    def gone_from(self, router: Process, pool: str) -> None:
        """Waits until `router` does not list `pool`."""
        self.wait_for(lambda: pool not in router.ask("look")["pools"], f"{pool} to go")

    def recovered(self, since: float | None = None) -> float:
        """Waits until every router has every pool by its newest writer, and nothing else; returns how long that was after
        `since`, or after the call.
        """
        begun = time.monotonic() if since is None else since
        called, problem, told = time.monotonic(), [""], [False]

        def is_whole() -> bool:
            problem[0] = self._unlike()
            if problem[0] and not told[0] and time.monotonic() - called > SLOW_S:
                told[0] = True
                publishers = {hand.pool: hand.state()["publisher"] for hand in self.pools}
                print(f"seed {self.seed}: not whole after {SLOW_S:g} s: {problem[0]}; publishers: {publishers}")
            return not problem[0]

        try:
            self.wait_for(is_whole, "all to be whole")
        except AssertionError as error:
            raise AssertionError(f"{error}: {problem[0]}") from None
        return time.monotonic() - begun

    def _unlike(self) -> str:
        """What is not as it should be of the pools that routers list; "" when nothing."""
        for router in self.routers:
            seen = router.ask("look")
            assert not seen["failure"], f"seed {self.seed}: {seen['failure']}"
            if not seen["connected"] or seen["behind"]:
                return f"a router is behind: {seen}"
            writers = {}
            for hand in self.pools:
                state = hand.state()
                assert not state["failure"], f"seed {self.seed}: {state['failure']}"
                if hand.process.space == router.space and state["publisher"]["state"] != "standby":
                    writers[hand.pool] = state["publisher"]["epoch"] if state["publisher"]["state"] == "open" else None
            listed = {pool: view["writer"][1] for pool, view in seen["pools"].items()}
            if listed != writers:
                return f"a router lists {listed}, and the publishers are {writers}"
            if not all(view["whole"] and view["state"] == "live" for view in seen["pools"].values()):
                return f"not all pools are whole: {seen}"
        return ""

    def differences(self) -> list[str]:
        """What differs between regions, directory and mirrors, key by key."""
        found = []
        for space in dict.fromkeys(router.space for router in self.routers):
            truth: dict[str, bytes] = {}
            for hand in self.pools:
                if hand.process.space == space:
                    with RegionView(hand.path) as view:
                        truth |= dict.fromkeys(hand.replica_ids, b"".join(indexed(view)))
            pictures = [
                _picture(f"router-{number}", router)
                for number, router in enumerate(self.routers)
                if router.space == space
            ]
            checks = compare(truth, pictures, lambda space=space: RedisReader(self.redis.url, space))  # type: ignore[misc]
            known = {check.pool for check in checks}
            wanted = {hand.pool for hand in self.pools if hand.process.space == space}
            if known != wanted:
                found.append(f"pools {known} are known of {wanted}")
            found += [
                f"{check.pool} at {place.place}: {place.missing} missing, {place.phantom} phantom of {check.pool_blocks}"
                for check in checks
                for place in check.places
                if place.missing or place.phantom
            ]
        return found

    def settle(self) -> Counter[str]:
        """Traffic rests; then all three must be equal, key by key, and no decision may be blind or predict a phantom.
        Returns what those decisions counted. Traffic goes on.
        """
        self._tell_members()
        self._all("rest")
        self.recovered()
        last: list[str] = []

        def is_clean() -> bool:
            last[:] = self.differences()
            return not last

        try:
            self.wait_for(is_clean, "the directory check to be clean")
        except AssertionError as error:
            raise AssertionError(f"{error}: {last}") from None
        during = self.counted()
        quiet = Counter[str]()
        for router in self.routers:
            quiet += Counter(router.ask("decide"))
        self._loaded += during
        bad = {name: quiet[name] for name in ("blind", "unheard", "phantom", "dead") if quiet[name]}
        if bad:
            odd = [router.ask("oddity")["oddity"] for router in self.routers]
            publishers = [(hand.pool, hand.replica_ids, hand.state()["publisher"]) for hand in self.pools]
            raise AssertionError(f"seed {self.seed}: decisions at rest counted {bad}: {odd}; publishers: {publishers}")
        assert quiet["predicted"] > 0, "the decisions at rest predicted nothing, so they prove nothing"
        self._all("go")
        return quiet

    def counted(self) -> Counter[str]:
        """What the decisions of all routers counted since the last call."""
        total = Counter[str]()
        for router in self.routers:
            total += Counter(router.ask("mark"))
        return total

    def note(self, name: str, value: float) -> None:
        """Keeps a measurement for `report`."""
        self._notes[name] = value

    def report(self, what: str) -> None:
        """Prints what was noted, and what decisions came to under load up to the last `settle`."""
        noted = ", ".join(f"{name} {value:.2f}" for name, value in self._notes.items())
        names = ("decisions", "blind", "unheard", "dead", "predicted", "phantom")
        loaded = ", ".join(f"{name} {self._loaded[name]}" for name in names)
        print(f"{what} (seed {self.seed}): {noted}; under load: {loaded}; phantom at rest: 0")

    def finish(self, what: str) -> None:
        """Settles, reports, and lets everybody leave, after which nothing is listed."""
        self.settle()
        self.report(what)
        for hand in list(self.pools):
            self.leave(hand)
        for router in self.routers:
            self.wait_for(lambda router=router: not router.ask("look")["pools"], "all pools to be gone")  # type: ignore[misc]
        for router in list(self.routers):
            router.end()
            self.routers.remove(router)

    def _all(self, do: str) -> None:
        processes: Iterable[Process] = [*(hand.process for hand in self.pools), *self.routers]
        for process in processes:
            process.ask(do)


def _picture(name: str, router: Process) -> MirrorPicture:
    told = router.ask("picture")
    pools = {pool: PoolPicture(tuple(ids), base64.b64decode(keys)) for pool, (ids, keys) in told.items()}
    return MirrorPicture(name, pools)
