"""What a routing decision sees: one row per candidate replica, as columns.

Columns are numpy arrays of equal length, so that a policy scores all candidates at once and the decision can keep every
term it used. A view is built for one request and never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What matters of a request. `turn` counts requests of this router; only round robin looks at it."""

    prompt_tokens: int
    output_tokens: int = 0
    turn: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The candidates.

    `cached_tokens`: of this prompt, predicted from the directory; never more than the prompt. `queued_tokens`: prompt
    tokens the replica has yet to compute, those booked and not yet reported included. `running`: requests that decode
    there now. `free_tokens`: room in the pool that holds nothing. `prefill_tokens_per_s`: measured by the replica; 0
    where it has measured nothing yet.
    """

    replica_ids: Sequence[str]
    cached_tokens: IntColumn
    queued_tokens: IntColumn
    running: IntColumn
    free_tokens: IntColumn
    prefill_tokens_per_s: FloatColumn

    def __post_init__(self) -> None:
        columns = (self.cached_tokens, self.queued_tokens, self.running, self.free_tokens, self.prefill_tokens_per_s)
        lengths = {len(self.replica_ids), *(len(column) for column in columns)}
        if lengths != {len(self.replica_ids)}:
            raise ValueError(f"columns of a view differ in length: {sorted(lengths)}")

    def __len__(self) -> int:
        return len(self.replica_ids)
