"""The process from which those of a scenario are forked: it has imported everything and loaded all kernels, once.

    fork KIND ADDRESS   forks a pool or a router, which takes commands over the abstract socket ADDRESS; answers its pid
    reap PID            waits until it has ended; answers its wait status

Commands are JSON objects, one a line, and so are the answers; an exception is an answer, too. Until it is reaped an ended
process stays a zombie, so its id is its own. When the input ends, all are killed; they also die with this process.

Limits: Linux. Run as `python -m tests.failures.mother`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import random
import signal
import socket
import sys
import tempfile
import traceback

from kvpool import Pool, Region
from kvpool.directory import Snapshot, StoredSnapshot, Writer
from kvpool.directory.digest import digest_of
from kvpool.directory.shadow import Shadow
from router.mirror import Mirror
from tests.failures.pool_process import PoolProcess
from tests.failures.prompts import BLOCK_TOKENS, FINGERPRINT, GEOMETRY, KEYS, TOKENS
from tests.failures.router_process import RouterProcess

_PR_SET_PDEATHSIG = 1
KINDS = {"pool": PoolProcess, "router": RouterProcess}


def warm_up() -> None:
    """Loads the kernels, so that children inherit them."""
    keys, tokens = KEYS[0], TOKENS[0]
    with tempfile.TemporaryDirectory() as home:
        region = Region.create(home, "warm", GEOMETRY, 16, FINGERPRINT, random.Random(1))
        pool = Pool.create(region)
        with pool.table("warm") as table:
            pool.match(table, keys, tokens)
            pool.allocate(table, len(keys))
            for position, key in enumerate(keys):
                pool.seal(table, position, key, tokens[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS])
        control = region.control()
        Shadow(control).scan(True, 100)
        control.release()
        pool.evict(1)
        pool.tidy()
        pool.check_integrity()
        pool.close()
        region.close()
    mirror, packed = Mirror(), b"".join(keys)
    mirror.load(StoredSnapshot(Snapshot(Writer("warm", 1, 1), 0, packed, digest_of(packed)), 0), 0.0)
    mirror.match(keys)
    mirror.keys("warm")
    gc.collect()


def serve() -> None:
    """Answers until the input ends."""
    warm_up()
    children: set[int] = set()
    gc.freeze()
    print("ready", flush=True)
    try:
        for line in iter(sys.stdin.readline, ""):
            verb, *rest = line.split()
            if verb == "fork":
                pid = _fork(*rest)
                children.add(pid)
                print(pid, flush=True)
            else:
                _, status = os.waitpid(int(rest[0]), 0)
                children.discard(int(rest[0]))
                print(status, flush=True)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(kind: str, address: str) -> int:
    mother = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == mother:
            logging.disable(logging.CRITICAL)
            _obey(kind, address)
            status = 0
    finally:
        os._exit(status)


def _obey(kind: str, address: str) -> None:
    """Follows commands until the connection ends."""
    subject = KINDS[kind]()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address}")
        with connection.makefile("rwb") as lines:
            for line in lines:
                command = json.loads(line)
                try:
                    answer = getattr(subject, command.pop("do"))(**command)
                except Exception:
                    answer = {"error": traceback.format_exc()}
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()


if __name__ == "__main__":
    serve()
