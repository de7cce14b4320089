"""Settings that must be in place before anything heavy is imported."""

from __future__ import annotations

import os

# Tiny models gain nothing from a second thread and lose much when the machine is busy: OpenMP threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
