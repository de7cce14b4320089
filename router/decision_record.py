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
passed over, so that logs of a later one can be read.
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
    """Returns the record of a line. Raises `MalformedRecord`."""
    try:
        told = json.loads(line)
        if told["kind"] == "measured":
            ttft_s = told["ttft_s"]
            return Measured(
                float(told["time_s"]),
                str(told["request_id"]),
                str(told["replica_id"]),
                int(told["cached_tokens"]),
                None if ttft_s is None else float(ttft_s),
            )
        if told["kind"] != "decided":
            raise ValueError(f"unknown kind {told['kind']!r:.40}")
        return Decided(
            float(told["time_s"]),
            str(told["request_id"]),
            int(told["prompt_tokens"]),
            int(told["output_tokens"]),
            str(told["policy"]),
            str(told["outcome"]),
            str(told["reason"]),
            str(told["replica_id"]),
            int(told["predicted_tokens"]),
            _view(told),
            tuple(str(name) for name in told["unheard"]),
            str(told["session"]),
            bytes.fromhex(told["prefix"]).hex(),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise MalformedRecord(f"not a line of a decision log ({type(error).__name__}: {error!s:.80})") from error


def _view(told: dict[str, Any]) -> View:
    columns, share = told["columns"], told["reuse_share"]
    names = [str(name) for name in columns["replica_ids"]]
    known: dict[str, Any] = {name: _column(columns[name]) for name in COLUMNS if name in columns}
    return View(names, **known, reuse_share=math.nan if share is None else float(share))


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


def _column(values: list[int | float | None]) -> np.ndarray[Any, Any]:
    """Whole numbers stay such; with a float or a null among them, all are floats."""
    if all(type(value) is int for value in values):
        return np.array(values, np.int64)
    return np.array([math.nan if value is None else float(value) for value in values], np.float64)
