"""Everything a handler needs, in one value: settings, the replicas, the tokenizer, and the injected sources."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.api.admission import Admission
from cluster.api.grammar_check import GrammarCheck
from cluster.api.settings import ApiSettings
from cluster.engine_client import EngineClient
from cluster.text_codec import TextCodec

TOKENIZING_THREADS = 2
"""Long texts tokenized at once: each takes a core, and many times its own size in memory."""


@dataclass(frozen=True, slots=True)
class Edge:
    """Dependencies of the routes.

    `new_id` returns an identifier never returned before, `clock` Unix time in seconds, `draw_seed` an integer in
    [0, 2^64) that nobody can predict. `grammars` tries those that requests bring; `tokenizing` bounds the threads that tokenize
    long texts, `admission` what is on its way to the replicas.
    """

    settings: ApiSettings
    client: EngineClient
    codec: TextCodec
    new_id: Callable[[], str]
    clock: Callable[[], float]
    draw_seed: Callable[[], int]
    grammars: GrammarCheck
    admission: Admission = field(default_factory=Admission)
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOKENIZING_THREADS))
