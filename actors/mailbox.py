"""Hands step outputs from the step thread to the coroutines that wait for them, one wake-up of the event loop per step.

A reader may ask to be woken less often than every step: each token on its way to a client takes processor time in every process
it passes, as much for several as for one. The first token, the last, and whatever is no token, wake it at once all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from actors.engine import StepOutput


class Mailbox:
    """Outputs of one request. A reader that is slow finds several at once; what waits is bounded by its max_tokens."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float) -> None:
        self._outputs: deque[StepOutput] = deque()
        self._filled = asyncio.Event()
        self._loop = loop
        self._interval_s = interval_s
        self._due_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: StepOutput) -> None:
        """Add an output. Event loop only."""
        self._outputs.append(output)
        goes_on = output.token is not None and output.finish_reason is None and output.failure is None
        if not goes_on or self._loop.time() >= self._due_at:
            self._filled.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due_at, self._filled.set)

    async def take(self) -> list[StepOutput]:
        """Everything there is, at least one."""
        await self._filled.wait()
        self.silence()
        outputs = list(self._outputs)
        self._outputs.clear()
        if any(output.token is not None for output in outputs):
            self._due_at = self._loop.time() + self._interval_s
        return outputs

    def silence(self) -> None:
        """Nobody is to be woken for what there is."""
        self._filled.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class MailRoom:
    """The open mailboxes of a replica."""

    def __init__(self, interval_s: float = 0.0) -> None:
        """Readers are woken for tokens at most once in `interval_s` seconds each; 0.0: every step."""
        self._interval_s = interval_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._boxes: dict[str, Mailbox] = {}

    def open(self, request_id: str) -> Mailbox:
        """A mailbox for a new request, whose id is used only once."""
        self._loop = asyncio.get_running_loop()
        box = self._boxes[request_id] = Mailbox(self._loop, self._interval_s)
        return box

    def close(self, request_id: str) -> None:
        """Forget a request; outputs still on their way to it are dropped."""
        box = self._boxes.pop(request_id, None)
        if box is not None:
            box.silence()

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
