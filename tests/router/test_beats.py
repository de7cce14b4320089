from __future__ import annotations

import threading

from router.beats import KEPT, Beats


def test_names_come_in_order_from_the_mark_on() -> None:
    beats = Beats()
    assert beats.since(0) == ()
    for name in "abc":
        beats.note(name)
    assert beats.count == 3
    assert beats.since(0) == ("a", "b", "c")
    assert beats.since(2) == ("c",)
    assert beats.since(3) == ()


def test_what_is_too_long_ago_is_said() -> None:
    beats = Beats()
    for number in range(3 * KEPT):
        beats.note(str(number))
    assert beats.since(2 * KEPT) is None
    assert beats.since(2 * KEPT + 1) == tuple(str(number) for number in range(2 * KEPT + 1, 3 * KEPT))


def test_a_reader_beside_the_writer_gets_right_names_or_none() -> None:
    beats = Beats()
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            mark = beats.count
            names = beats.since(max(0, mark - KEPT // 2))
            first = max(0, mark - KEPT // 2)
            if names is not None and names != tuple(str(number) for number in range(first, first + len(names))):
                wrong.append(names)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20 * KEPT):
        beats.note(str(number))
    stop.set()
    reader.join(10.0)
    assert not wrong
