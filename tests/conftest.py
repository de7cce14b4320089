"""Settings that must be in place before anything heavy is imported."""

from __future__ import annotations

import os

from hypothesis import settings

# Tiny models gain nothing from a second thread and lose much when the machine is busy: OpenMP threads wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about us.
settings.register_profile("kvatlas", deadline=None)
settings.load_profile("kvatlas")
