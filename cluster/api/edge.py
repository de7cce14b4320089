"""Everything a handler needs, in one value: settings, the replicas, the tokenizer, and the injected sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.api.settings import ApiSettings
from cluster.engine_client import EngineClient
from cluster.text_codec import TextCodec


@dataclass(frozen=True, slots=True)
class Edge:
    """Dependencies of the routes.

    `new_id` returns an identifier never returned before, `clock` Unix time in seconds, `draw_seed` an integer in
    [0, 2^64) that nobody can predict.
    """

    settings: ApiSettings
    client: EngineClient
    codec: TextCodec
    new_id: Callable[[], str]
    clock: Callable[[], float]
    draw_seed: Callable[[], int]
