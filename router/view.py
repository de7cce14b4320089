"""What a routing decision sees: one row per candidate replica, as columns.

Columns are numpy arrays of equal length, so that a policy scores all candidates at once and the decision can keep every
term it used. A view is built for one request and never changed. Columns that a caller does not know may be left out; what they
then hold says so to the policies.

Nothing here changes once it is made. Nothing stops it either: frozen dataclasses take three times as long to make.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]


def _not_given() -> Any:
    """A column that `View` fills for all its candidates."""
    return np.empty(0, np.int64)


@dataclass(slots=True)
class RouteRequest:
    """What matters of a request.

    `output_tokens`: at most so many will be generated. `turn` counts requests of this router; only round robin looks at it.
    `session` is the client's word for what belongs together; a hint, "" for none. `prefix` names how the prompt begins (the key
    of its first block; b"" for a prompt shorter than that); only `chwbl` looks at it.
    """

    prompt_tokens: int
    output_tokens: int = 0
    turn: int = 0
    session: str = ""
    prefix: bytes = b""


@dataclass(slots=True)
class View:
    """The candidates.

    `cached_tokens`: of this prompt, predicted from the directory; never more than the prompt. `queued_tokens`: prompt
    tokens the replica has yet to compute, those booked and not yet reported included. `running`: requests that decode
    there now. `free_tokens`: room in the pool that holds nothing. `prefill_tokens_per_s`: measured; 0 where nothing is known yet.

    `decode_interference_s`: seconds that each running decode adds to the time to first token; NaN (the default) stands for the
    configured value. `waiting`: requests accepted there that neither decode nor are counted in `running` (default 0).
    `held_tokens`: what the pool has cached of any prompt (default 0). `reuse_share`: how much of all prompts was found cached
    lately, 0 to 1; NaN (the default) stands for the configured value.
    """

    replica_ids: Sequence[str]
    cached_tokens: IntColumn
    queued_tokens: IntColumn
    running: IntColumn
    free_tokens: IntColumn
    prefill_tokens_per_s: FloatColumn
    decode_interference_s: FloatColumn = field(default_factory=_not_given)
    waiting: IntColumn = field(default_factory=_not_given)
    held_tokens: IntColumn = field(default_factory=_not_given)
    reuse_share: float = math.nan

    def __post_init__(self) -> None:
        """Raises ValueError for columns of unequal length."""
        n = len(self.replica_ids)
        if not len(self.decode_interference_s):
            self.decode_interference_s = np.full(n, np.nan)
        if not len(self.waiting):
            self.waiting = np.zeros(n, np.int64)
        if not len(self.held_tokens):
            self.held_tokens = np.zeros(n, np.int64)
        if not (
            n
            == len(self.cached_tokens)
            == len(self.queued_tokens)
            == len(self.running)
            == len(self.free_tokens)
            == len(self.prefill_tokens_per_s)
            == len(self.decode_interference_s)
            == len(self.waiting)
            == len(self.held_tokens)
        ):
            lengths = sorted({n, *(len(column) for column in self.columns().values())})
            raise ValueError(f"columns of a view differ in length: {lengths}")

    def __len__(self) -> int:
        return len(self.replica_ids)

    def columns(self) -> dict[str, IntColumn | FloatColumn]:
        """Returns the columns of numbers by name, in the order of the fields."""
        return {name: getattr(self, name) for name in COLUMNS}

    def joined(self, more: View) -> View:
        """Returns a view of these candidates and then those of `more`; what is not of one candidate stays as it is here."""
        theirs = more.columns()
        columns: dict[str, Any] = {
            name: np.concatenate([column, theirs[name]]) for name, column in self.columns().items()
        }
        return View([*self.replica_ids, *more.replica_ids], **columns, reuse_share=self.reuse_share)


COLUMNS = tuple(one.name for one in fields(View) if one.name not in ("replica_ids", "reuse_share"))
"""Names of the columns of numbers."""
