"""Work that ends when its client goes away.

Starlette does not cancel a handler when the connection closes, so a request nobody waits for would keep its blocks
until its last token. Here the work runs in a task of its own beside a watcher of the connection; whichever way the race
ends (done, client gone, server cancels us), both tasks are over before the caller goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Message, Receive, Send

from kvpool.errors import KvatlasError

T = TypeVar("T")


class ClientGone(KvatlasError):
    """The client closed the connection; there is nobody to answer."""


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its result, or cancel it when the client disconnects.

    The request body must have been read: every message on `receive` but the disconnect is dropped. Raises `ClientGone`,
    or what `work` raises. `work` is over when this returns, also when this is cancelled.
    """
    watcher = asyncio.ensure_future(_disconnected(receive))
    tasks: list[asyncio.Future[Any]] = [watcher]
    try:
        await asyncio.sleep(0)
        if watcher.done():
            # It left while its request waited to be read. On a busy server that is when most leave, and to begin costs most.
            raise ClientGone
        task = asyncio.ensure_future(work)
        tasks.append(task)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        if len(tasks) == 1:
            work.close()  # it has not begun
        await finish_tasks(*tasks)


async def finish_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel `tasks` and wait until they are over; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def guarded_send(send: Send) -> Send:
    """`send`, raising `ClientGone` where the server reports a closed connection as OSError."""

    async def guarded(message: Message) -> None:
        try:
            await send(message)
        except OSError as exc:
            raise ClientGone from exc

    return guarded


async def _disconnected(receive: Receive) -> None:
    """Return when the connection is gone. A `receive` that fails has lost its connection too."""
    while (await receive())["type"] != "http.disconnect":
        pass
