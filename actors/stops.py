"""Stop strings in streamed text.

Text goes in piece by piece. What comes out never contains a stop string, nor any end of the text so far that could
still grow into one: that part is held back until the next piece decides. Matching is on text, so a stop string may
begin and end inside tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Screened:
    """`text` may be sent. `stop` is the stop string found, after which nothing more is sent."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches one sequence's text. `include` keeps the stop string itself in the text."""

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def push(self, text: str) -> Screened:
        """Take the next piece of text. After a stop was found, do not call again."""
        if not self._stops:
            return Screened(text)
        buffer = self._held + text
        hits = [(at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if hits:
            # The stop that begins first wins; of two that begin together the shorter one, which completed first.
            at, stop = min(hits, key=lambda hit: (hit[0], len(hit[1])))
            self._held = ""
            return Screened(buffer[: at + len(stop)] if self._include else buffer[:at], stop)
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return Screened(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The sequence ended for another reason: what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
