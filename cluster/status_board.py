"""The last that each replica said of itself, for when it is too busy to answer.

On a saturated machine a replica may take seconds to answer while it serves well. Whoever asks then gets what it said last, as
long as that is no older than `LATE_S`. A replica that is known to be dead is not late: nothing is shown for it.

Limits: an answer that did not come does not say whose it is. Of those that are missing, the ones heard last count as late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from actors.status import ReplicaStatus

LATE_S: Final = 15.0


class StatusBoard:
    """See above. `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[float, ReplicaStatus]] = {}

    def shown(self, answers: Sequence[Any]) -> list[ReplicaStatus]:
        """Notes these answers, one for each replica asked: its status, or the exception there was instead; a single TimeoutError
        where not even that was known. Returns the status of each that has answered or is only late, by id.
        """
        now = self._clock()
        here = {answer.replica_id: answer for answer in answers if isinstance(answer, ReplicaStatus)}
        late = sum(isinstance(answer, TimeoutError) for answer in answers)
        if late and len(answers) == 1:
            late = len(self._heard)
        known = {name: one for name, one in self._heard.items() if now - one[0] <= LATE_S and name not in here}
        missing = sorted(known, key=lambda name: known[name][0], reverse=True)[:late]
        self._heard = known | {name: (now, status) for name, status in here.items()}
        shown = [*here.values(), *(known[name][1] for name in missing)]
        return sorted(shown, key=lambda status: status.replica_id)
