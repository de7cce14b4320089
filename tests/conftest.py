"""Settings that must be in place before anything heavy is imported."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Tiny models gain nothing from a second thread and lose much when the machine is busy: OpenMP threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about us.
settings.register_profile("kvatlas", deadline=None)
settings.load_profile("kvatlas")

# Signals that whoever started us ignores (a shell ignores SIGINT for a command in the background) would be ignored by every
# process that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
