"""The list of options, read off the dataclasses: path, type, default, documentation, allowed values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.config import Config


@dataclass(frozen=True, slots=True)
class Option:
    """One field of one section of `Config`."""

    path: str
    kind: Any
    default: Any
    doc: str
    secret: bool

    @property
    def env(self) -> str:
        """Its environment variable."""
        return "KVATLAS_" + self.path.upper().replace(".", "__")


@dataclass(frozen=True, slots=True)
class Range:
    """Closed interval of allowed numbers, and the words for what is outside it."""

    low: float
    high: float

    def __str__(self) -> str:
        if self.high == float("inf"):
            return f"at least {self.low:,}"
        return f"from {self.low:,} to {self.high:,}"


_ANY = float("inf")

# Every number has a range. A path missing here fails a test.
RANGES: dict[str, Range] = {
    "model.max_model_len": Range(0, _ANY),
    "cluster.replicas": Range(1, 256),
    "engine.threads": Range(0, 1024),
    "engine.step_tokens": Range(1, 1 << 20),
    "engine.max_running": Range(1, 65_536),
    "engine.max_waiting": Range(0, 1 << 20),
    "engine.stall_s": Range(1, _ANY),
    "engine.stream_interval_s": Range(0, 10),
    "pool.block_tokens": Range(1, 1024),
    "pool.tokens": Range(0, 1 << 31),
    "pool.orphan_ttl_s": Range(0, _ANY),
    "pool.tidy_s": Range(0.01, 60),
    "directory.lease_s": Range(0.5, 3600),
    "router.prefill_tokens_per_s": Range(1, _ANY),
    "router.rate_tolerance": Range(0, 100),
    "router.recompute_weight": Range(0, 100),
    "router.recompute_limit": Range(0, 100),
    "router.balance_weight": Range(0, 100),
    "router.decode_interference_s": Range(0, 60),
    "router.claim_tokens": Range(0, 1 << 20),
    "router.reuse_share": Range(0, 1),
    "router.displaced_weight": Range(0, 100),
    "router.tie_s": Range(0, 60),
    "http.port": Range(1, 65_535),
    "http.queue_tokens": Range(0, 1 << 40),
    "http.key_queue_tokens": Range(0, 1 << 40),
    "http.inflight_tokens": Range(0, 1 << 40),
    "http.request_timeout_s": Range(0, 86_400),
    "http.keep_alive_s": Range(0, 3600),
    "http.max_body_bytes": Range(1024, 1 << 30),
    "ray.object_store_bytes": Range(80_000_000, _ANY),
    "ray.metrics_port": Range(0, 65_535),
    "ray.start_timeout_s": Range(1, _ANY),
}

# What texts may look like, and the words for it.
PATTERNS: dict[str, tuple[str, str]] = {
    "cluster.id": (r"[A-Za-z0-9._-]{0,64}", "up to 64 letters, digits, dots, dashes and underscores"),
    "cluster.secret": (r"|.{16,}", "at least 16 characters"),
    "http.cors_origins": (
        r"|https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[1-9]\d{0,4})?(\s+https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[1-9]\d{0,4})?)*",
        "exact origins as browsers send them (https://HOST or https://HOST:PORT, lower case), separated by blanks",
    ),
    "directory.redis_url": (
        r"|rediss?://([^@/\s]*@)?(\[[0-9a-fA-F:.]+\]|[^:/@\s?\[\]]+)(:[1-9]\d{0,4})?(/\d*)?(\?\S*)?|unix://\S+",
        "redis://[:PASSWORD@]HOST[:PORT][/DATABASE], the same with rediss://, or unix://PATH",
    ),
}


def sections() -> Iterator[tuple[str, type[Any]]]:
    """(name, dataclass) of every section, in order."""
    kinds = typing.get_type_hints(Config)
    for section in dataclasses.fields(Config):
        yield section.name, kinds[section.name]


def options() -> list[Option]:
    """Every option, in the order of the dataclasses."""
    found = []
    for name, cls in sections():
        docs, kinds, defaults = field_docs(cls), typing.get_type_hints(cls), cls()
        for item in dataclasses.fields(cls):
            secret = bool(item.metadata.get("secret"))
            doc = docs.get(item.name, "")
            found.append(Option(f"{name}.{item.name}", kinds[item.name], getattr(defaults, item.name), doc, secret))
    return found


def field_docs(cls: type[Any]) -> dict[str, str]:
    """The string below each field of `cls`, joined to one line. Needs the class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    docs = {}
    for field, below in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(below.value.value).split())
    return docs
