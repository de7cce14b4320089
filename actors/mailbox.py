"""Hands step outputs from the step thread to the coroutines that wait for them, one wake-up of the event loop per step."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from actors.engine import StepOutput


class Mailbox:
    """Outputs of one request. A reader that is slow finds several at once; what waits is bounded by its max_tokens."""

    def __init__(self) -> None:
        self._outputs: deque[StepOutput] = deque()
        self._filled = asyncio.Event()

    def put(self, output: StepOutput) -> None:
        """Add an output. Event loop only."""
        self._outputs.append(output)
        self._filled.set()

    async def take(self) -> list[StepOutput]:
        """Everything there is, at least one."""
        await self._filled.wait()
        self._filled.clear()
        outputs = list(self._outputs)
        self._outputs.clear()
        return outputs


class MailRoom:
    """The open mailboxes of a replica."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._boxes: dict[str, Mailbox] = {}

    def open(self, request_id: str) -> Mailbox:
        """A mailbox for a new request, whose id is used only once."""
        self._loop = asyncio.get_running_loop()
        box = self._boxes[request_id] = Mailbox()
        return box

    def close(self, request_id: str) -> None:
        """Forget a request; outputs still on their way to it are dropped."""
        self._boxes.pop(request_id, None)

    def deliver(self, outputs: list[StepOutput]) -> None:
        """Take a step's outputs. Called by the step thread."""
        loop = self._loop
        if loop is not None:
            # A loop that closes while the engine still steps has no reader left; that must not end the step thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._sort, outputs)

    def _sort(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            box = self._boxes.get(output.request_id)
            if box is not None:
                box.put(output)
