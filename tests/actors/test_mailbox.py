"""Outputs cross from the step thread to their readers."""

from __future__ import annotations

import asyncio
import threading

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
