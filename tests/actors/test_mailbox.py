"""Outputs cross from the step thread to their readers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from actors.engine import StepOutput
from actors.mailbox import MailRoom


async def test_outputs_reach_their_reader_in_order() -> None:
    room = MailRoom()
    boxes = {name: room.open(name) for name in "ab"}
    sent = [[StepOutput(name, token=step) for name in "ab"] for step in range(100)]

    def step_thread() -> None:
        for outputs in sent:
            room.deliver(outputs)

    thread = threading.Thread(target=step_thread)
    thread.start()
    for name, box in boxes.items():
        got: list[StepOutput] = []
        while len(got) < 100:
            got += await asyncio.wait_for(box.take(), 5)
        assert got == [outputs["ab".index(name)] for outputs in sent]
    thread.join()


async def test_the_first_and_the_last_token_come_at_once_however_long_the_interval() -> None:
    room = MailRoom(interval_s=3600)
    box = room.open("a")
    taken: list[list[int | None]] = []

    async def read() -> None:
        while not taken or taken[-1][-1] != 99:
            taken.append([output.token for output in await box.take()])

    reader = asyncio.create_task(read())
    for output in (StepOutput("a", cached_tokens=3), *(StepOutput("a", token=token) for token in range(30))):
        room.deliver([output])
        for _ in range(3):
            await asyncio.sleep(0)
    room.deliver([StepOutput("a", token=99, finish_reason="stop")])
    await asyncio.wait_for(reader, 5)
    assert taken == [[None], [0], [*range(1, 30), 99]]


async def test_tokens_between_come_after_the_interval() -> None:
    room = MailRoom(interval_s=0.05)
    box = room.open("a")
    room.deliver([StepOutput("a", token=0)])
    assert len(await asyncio.wait_for(box.take(), 5)) == 1
    begun = asyncio.get_running_loop().time()
    for token in range(1, 4):
        room.deliver([StepOutput("a", token=token)])
    assert [output.token for output in await asyncio.wait_for(box.take(), 5)] == [1, 2, 3]
    assert asyncio.get_running_loop().time() - begun >= 0.04


async def test_nobody_is_woken_for_a_request_that_is_over() -> None:
    room = MailRoom(interval_s=0.02)
    box = room.open("a")
    for token in range(2):
        room.deliver([StepOutput("a", token=token)])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if not token:
            await box.take()
    room.close("a")
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(box.take(), 0.01)


async def test_a_closed_box_drops_what_comes() -> None:
    room = MailRoom()
    room.open("a")
    room.close("a")
    room.close("a")
    room.deliver([StepOutput("a", token=1)])
    box = room.open("a")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    room.deliver([StepOutput("a", token=2)])
    assert [output.token for output in await asyncio.wait_for(box.take(), 5)][-1] == 2


def test_delivery_to_a_closed_loop_is_dropped() -> None:
    room = MailRoom()

    async def open_one() -> None:
        room.open("a")

    asyncio.run(open_one())
    room.deliver([StepOutput("a", token=1)])
