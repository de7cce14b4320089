"""What the decision log has in its lines: a decision with everything the policy saw, and what came of it.

One JSON object a line, with `kind`, `time_s` (Unix time) and `request_id`, and

    decided     prompt_tokens, output_tokens, policy, outcome, reason, replica_id (chosen), predicted_tokens;
                columns: those of the `View`, by name, one value for each candidate that the policy scored; reuse_share;
                unheard: candidates of which no pool in the directory told, in a fallback all of them;
                session, prefix: names under which requests belong together, empty for none: a hash of the session that the client
                gave, and the key of the first block
    measured    replica_id (which took it), cached_tokens (found there), ttft_s (from the request's arrival to its first token;
                null when it ended without one)

No prompt, no text. A key is a keyed hash and a session is hashed, so a reader sees that prompts begin alike, not how. Floats keep
six digits. Columns that hold nothing but the view's default are left out.

A request that is decided again, because its replica died, has two lines of `decided`. A column that this version does not know is
passed over, so that logs of a later one can be read. A line with a value that no decision has (not finite, below 0, beyond a
trillion tokens, null where something is always known) is no record.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, dataclass, fields
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from kvpool.errors import KvatlasError
from kvpool.keys import KEY_BYTES
from router.decision import RouteDecision
from router.ticket import Ticket
from router.view import COLUMNS, View

DIGITS: Final = 6
OPTIONAL: Final = frozenset(one.name for one in fields(View) if one.default_factory is not MISSING)
"""Columns that a caller may leave out."""

# What a line may say: wide of anything that happens, and narrow enough for the arithmetic of every policy.
_MOST: Final = 1 << 40
_RATES: Final = (1e-6, 1e12)
_TIMES_S: Final = (0.0, 1e12)
_WAITS_S: Final = (0.0, 1e9)


class MalformedRecord(KvatlasError):
    """A line that is no record."""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision as it was made. `view`: the candidates that were scored, none in a fallback without a picture of any."""

    time_s: float
    request_id: str
    prompt_tokens: int
    output_tokens: int
    policy: str
    outcome: str
    reason: str
    replica_id: str
    predicted_tokens: int
    view: View
    unheard: tuple[str, ...] = ()
    session: str = ""
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a request."""

    time_s: float
    request_id: str
    replica_id: str
    cached_tokens: int
    ttft_s: float | None


Record = Decided | Measured


def decided(time_s: float, ticket: Ticket, decision: RouteDecision) -> Decided:
    """Returns the record of `decision` for the request of `ticket`. Keeps its columns, so nobody may write to them."""
    view = decision.view
    heard = np.flatnonzero(np.isfinite(decision.score)) if decision.outcome != "fallback" else np.arange(0)
    names = [view.replica_ids[index] for index in heard.tolist()]
    known = set(names)
    columns: dict[str, Any] = {name: column[heard] for name, column in view.columns().items()}
    return Decided(
        time_s=time_s,
        request_id=ticket.request_id,
        prompt_tokens=ticket.prompt_tokens,
        output_tokens=ticket.output_tokens,
        policy=decision.policy,
        outcome=decision.outcome,
        reason=decision.reason,
        replica_id=decision.replica_id,
        predicted_tokens=decision.predicted_tokens,
        view=View(names, **columns, reuse_share=view.reuse_share),
        unheard=tuple(name for name in view.replica_ids if name not in known),
        session=blake2b(ticket.session.encode("utf-8", "replace"), digest_size=8).hexdigest() if ticket.session else "",
        prefix=ticket.keys[:KEY_BYTES].hex(),
    )


def to_line(record: Record) -> bytes:
    """Returns `record` as a line, with its end."""
    told: dict[str, Any]
    if isinstance(record, Measured):
        told = {"kind": "measured", "time_s": round(record.time_s, 6), "request_id": record.request_id}
        told |= {"replica_id": record.replica_id, "cached_tokens": record.cached_tokens}
        told |= {"ttft_s": None if record.ttft_s is None else round(record.ttft_s, 6)}
    else:
        view = record.view
        told = {"kind": "decided", "time_s": round(record.time_s, 6), "request_id": record.request_id}
        told |= {"prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens}
        told |= {"policy": record.policy, "outcome": record.outcome, "reason": record.reason}
        told |= {"replica_id": record.replica_id, "predicted_tokens": record.predicted_tokens}
        columns: dict[str, Any] = {"replica_ids": list(view.replica_ids)}
        columns |= _told(view)
        share = view.reuse_share
        told |= {"columns": columns, "reuse_share": share if math.isfinite(share) else None}
        told |= {"unheard": list(record.unheard), "session": record.session, "prefix": record.prefix}
    return json.dumps(told, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def from_line(line: bytes) -> Record:
    """Returns the record of a line. Raises `MalformedRecord`, also for values that no decision has."""
    try:
        told = json.loads(line)
        if told["kind"] == "measured":
            ttft_s = told["ttft_s"]
            return Measured(
                _number(told["time_s"], _TIMES_S),
                _text(told["request_id"]),
                _text(told["replica_id"]),
                _count(told["cached_tokens"]),
                None if ttft_s is None else _number(ttft_s, _WAITS_S),
            )
        if told["kind"] != "decided":
            raise ValueError(f"unknown kind {told['kind']!r:.40}")
        return Decided(
            _number(told["time_s"], _TIMES_S),
            _text(told["request_id"]),
            _count(told["prompt_tokens"]),
            _count(told["output_tokens"]),
            _text(told["policy"]),
            _text(told["outcome"]),
            _text(told["reason"]),
            _text(told["replica_id"]),
            _count(told["predicted_tokens"]),
            _view(told),
            tuple(_text(name) for name in told["unheard"]),
            _text(told["session"]),
            bytes.fromhex(told["prefix"]).hex(),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise MalformedRecord(f"not a line of a decision log ({type(error).__name__}: {error!s:.80})") from error


def _view(told: dict[str, Any]) -> View:
    columns, share = told["columns"], told["reuse_share"]
    names = [_text(name) for name in columns["replica_ids"]]
    known: dict[str, Any] = {name: _column(name, columns[name]) for name in COLUMNS if name in columns}
    return View(names, **known, reuse_share=math.nan if share is None else _number(share, (0.0, 1.0)))


def _told(view: View) -> dict[str, Any]:
    """The columns that say more than their defaults, which a view fills in by itself."""
    first: dict[str, Any] = dict(view.columns())
    bare = View(view.replica_ids, **{name: first[name] for name in COLUMNS if name not in OPTIONAL}).columns()
    return {
        name: _values(column)
        for name, column in first.items()
        if name not in OPTIONAL or not np.array_equal(column, bare[name], equal_nan=column.dtype.kind == "f")
    }


def _values(column: np.ndarray[Any, Any]) -> list[int | float | None]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    known = np.isfinite(column)
    size = np.abs(np.where(known & (column != 0), column, 1.0))
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(size)))
    rounded = np.where(known, np.round(np.where(known, column, 0.0) * scale) / scale, np.nan)
    return rounded.tolist() if known.all() else [value if value == value else None for value in rounded.tolist()]


def _column(name: str, values: list[int | float | None]) -> np.ndarray[Any, Any]:
    """The values of a column. Raises ValueError for one that the column cannot have."""
    if name == "decode_interference_s":  # null stands for the configured value
        known = [math.nan if value is None else _number(value, _WAITS_S) for value in values]
        return np.array(known, np.float64)
    if name == "prefill_tokens_per_s":  # 0 stands for one that is not known
        return np.array([_number(value, _RATES) if value != 0 else 0.0 for value in values], np.float64)
    return np.array([_count(value) for value in values], np.int64)


def _count(value: object) -> int:
    """A number of tokens or requests. Above the bound nothing counts any more, and sums of columns would overflow."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r:.40} is no number of tokens or requests")
    return value


def _number(value: object, between: tuple[float, float]) -> float:
    low, high = between
    if type(value) not in (int, float) or not low <= value <= high:  # type: ignore[operator]  # a number by then
        raise ValueError(f"{value!r:.40} is no number from {low:g} to {high:g}")
    return float(value)  # type: ignore[arg-type]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")
    value.encode()  # raises for halves of characters
    return value
