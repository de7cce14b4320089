"""The process from which workers are forked: it has imported and compiled everything, with pause points.

Code with pause points is not cached, so this takes long, once. Then it reads lines from its standard input:

    fork ORDER   forks a worker; answers its pid
    reap PID     waits until that worker has ended; answers its wait status

Until it is reaped an ended worker stays a zombie, so its pid cannot come to mean another process meanwhile. When the input
ends, all workers are killed. Workers die with the zygote.

Limits: Linux (prctl). Run as `python -m tests.chaos.zygote` with KVATLAS_PAUSE_POINTS=1.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys

from kvpool.compiled import PAUSE_POINTS
from tests.chaos.worker import Order, main

_PR_SET_PDEATHSIG = 1


def serve() -> None:
    """Answers until the input ends."""
    assert PAUSE_POINTS, "the zygote needs KVATLAS_PAUSE_POINTS=1"
    children: set[int] = set()
    gc.freeze()
    print("ready", flush=True)
    try:
        for line in iter(sys.stdin.readline, ""):
            verb, _, rest = line.strip().partition(" ")
            if verb == "fork":
                pid = _fork(Order.decode(rest))
                children.add(pid)
                print(pid, flush=True)
            elif verb == "reap":
                _, status = os.waitpid(int(rest), 0)
                children.discard(int(rest))
                print(status, flush=True)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(order: Order) -> int:
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
            status = main(order)
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
