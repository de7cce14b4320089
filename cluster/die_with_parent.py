"""A child process that the kernel ends when its parent dies, however that dies.

The child asks for it itself (PR_SET_PDEATHSIG), in a few lines of Python that then become the command: code between fork and exec
(`preexec_fn`) is not safe in a process with threads. The kernel means the *thread* that forked, so fork in one that lives as
long as the child shall.

Limits: Linux. Costs the start of a Python interpreter, some twenty milliseconds.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

# PR_SET_PDEATHSIG is 1. A parent that died before the call is noticed by its id. Isolated (-I): nothing is imported from the
# environment of whoever starts it.
_BECOME = """\
import ctypes, os, sys
number, parent, *command = sys.argv[1:]
if ctypes.CDLL(None).prctl(1, int(number), 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) is refused")
if int(parent) in (0, os.getppid()):
    os.execv(command[0], command)
"""


def bound(command: Sequence[str], number: signal.Signals, parent: int = 0) -> list[str]:
    """The command line that runs `command` (a path and arguments), which gets signal `number` when its parent dies.

    It does not run when its parent is not `parent` by then; 0 takes any.
    """
    return [sys.executable, "-I", "-S", "-c", _BECOME, str(int(number)), str(parent), *command]
