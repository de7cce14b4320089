"""What one run of the HTTP benchmark does, in numbers. Imports nothing heavy, so that the command line can ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MARK: Final = "tick "
"""Text of every token that is sent, on both sides; nothing else in an event contains it."""


@dataclass(frozen=True)
class Plan:
    """`concurrency` clients, each with one request after the other, for `tokens` tokens that come `cadence_s` apart.

    Each of `rounds` rounds sends `requests` to kvatlas and as many to the echo, in turns. Then `pairs` times one request to each
    on an idle server, of which only the first token counts. Prompts have `prompt_chars` characters, a token each. Before that
    `warm_up` requests go to either side, and for `idle_s` nobody asks for anything: what the processes use then is taken off.
    """

    rounds: int = 7
    requests: int = 320
    concurrency: int = 16
    tokens: int = 32
    cadence_s: float = 0.01
    prompt_chars: int = 512
    replicas: int = 2
    warm_up: int = 160
    idle_s: float = 5.0
    pairs: int = 100
