"""What a replay can refuse."""

from __future__ import annotations

from kvpool.errors import KvatlasError


class ReplayError(KvatlasError):
    """A trace, a calibration or the size of a replay is not what can be replayed; the message says what to give instead."""
