"""The blocks of one request in the twin: the counterpart of `kvpool.BlockTable`."""

from __future__ import annotations

from collections.abc import Callable


class TwinTable:
    """`blocks` is a fresh list each time; `keys` are those of the sealed prefix. Only the twin writes the rest."""

    def __init__(self, request_id: str, release: Callable[[TwinTable], int]) -> None:
        self.request_id = request_id
        self.keys: list[bytes] = []
        self.closed = False
        self.numbers: list[int] = []
        self.copy_sources: dict[int, int] = {}
        self._release = release

    @property
    def blocks(self) -> list[int]:
        """Block numbers in logical order."""
        return list(self.numbers)

    def held(self) -> list[int]:
        """Returns all that the table holds, sources of copies included, children before their parents."""
        return [*self.copy_sources.values(), *reversed(self.numbers)]

    def close(self) -> int:
        """Gives everything back."""
        return self._release(self)
