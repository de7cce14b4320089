"""The edge's view of the replicas, so that the HTTP app runs the same over Ray Serve and over a scripted fake."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from actors.request import Event, GenerateRequest
from actors.status import ReplicaStatus


class EngineClient(Protocol):
    """Where requests go."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """Yield one `Admitted`, then `Delta`s; the last has a finish reason. `aclose()` aborts the request.

        Another `Admitted` before the first `Delta` means that the request moved to another replica, and takes the place of
        the one before. Raises `RequestRefused` (client error), `ReplicaOverloaded`, `ReplicaFailed`; before `Admitted` or
        after. Nothing of the transport comes out.
        """
        ...

    async def status(self) -> list[ReplicaStatus]:
        """One status per live replica that answers in time; an empty list while none is ready. Raises nothing."""
        ...

    def routing(self) -> dict[str, Any]:
        """What the router of this process knows (`RouteService.report`), ready for JSON. Raises nothing."""
        ...

    async def check_directory(self) -> list[dict[str, Any]]:
        """Compares pools, directory and every router's mirror: one record (`PoolCheck`) per pool. Raises `DirectoryError`."""
        ...

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """Where the request would go now, and why (`explanation`), ready for JSON. Nothing is sent or booked.

        Raises `ReplicaFailed` while there is no replica.
        """
        ...
