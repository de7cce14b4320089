"""Stands between a publisher and Redis, and loses, repeats or delays what the publisher writes, when told to.

    lost        the next batch never arrives; the connection ends
    unanswered  it arrives, but its answer does not come back; the connection ends
    twice       it arrives twice, the answer comes back once
    late        it is held back, the connection ends, and it arrives after the next session was opened

Everything else passes, one command and one answer at a time. `answers` has what Redis said to second copies and to late ones.

Limits: protocol 2; a client that waits for each answer, or reads them in order.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from io import BufferedReader
from pathlib import Path
from typing import Final, Literal

Fault = Literal["lost", "unanswered", "twice", "late"]
FAULTS: Final[tuple[Fault, ...]] = ("lost", "unanswered", "twice", "late")


class Tap:
    """Listens at `url` until `close()`."""

    def __init__(self, socket_of_redis: Path, own: Path) -> None:
        self.url = f"unix://{own}"
        self.answers: list[bytes] = []
        self.done = 0
        """Faults made so far."""
        self._target = str(socket_of_redis)
        self._fault: Fault | None = None
        self._held = b""
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(own))
        self._server.listen()
        self._thread = threading.Thread(target=self._accept, name="tap", daemon=True)
        self._thread.start()

    def make(self, fault: Fault) -> None:
        """The next batch meets this fault."""
        with self._lock:
            self._fault = fault

    def close(self) -> None:
        """Ends listening; connections end with their processes."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), client, socket.socket(socket.AF_UNIX) as redis:
            redis.connect(self._target)
            with client.makefile("rb") as commands, redis.makefile("rb") as answers:
                while True:
                    command, words = _command(commands)
                    answer = self._pass(command, words, redis, answers)
                    if answer is None:
                        return
                    client.sendall(answer)

    def _pass(self, command: bytes, words: list[bytes], redis: socket.socket, answers: BufferedReader) -> bytes | None:
        """Returns the answer; None when the connection is to end."""
        is_batch = words[0].upper() == b"EVALSHA" and b"batch" in words
        with self._lock:
            fault, self._fault = (self._fault, None) if is_batch else (None, self._fault)
            late, self._held = (self._held, b"") if is_batch and self._held else (b"", self._held)
        if fault is not None:
            self.done += 1
        if fault == "late":
            self._held = command
        if fault in ("lost", "late"):
            return None
        redis.sendall(command)
        answer = _answer(answers)
        for again in (command if fault == "twice" else b"", late):
            if again:
                redis.sendall(again)
                self.answers.append(_answer(answers))
        return None if fault == "unanswered" else answer


def _line(stream: BufferedReader) -> bytes:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise EOFError
    return line


def _command(stream: BufferedReader) -> tuple[bytes, list[bytes]]:
    """The next command, as it came and in words."""
    raw = head = _line(stream)
    words = []
    for _ in range(int(head[1:])):
        size = _line(stream)
        word = stream.read(int(size[1:]) + 2)
        raw += size + word
        words.append(word[:-2])
    return raw, words


def _answer(stream: BufferedReader) -> bytes:
    """The next answer, as it came."""
    raw = line = _line(stream)
    kind, number = line[:1], line[1:-2]
    if kind == b"$" and int(number) >= 0:
        raw += stream.read(int(number) + 2)
    elif kind == b"*":
        for _ in range(int(number)):
            raw += _answer(stream)
    return raw
