"""The claims of this process in the claim store: one thread takes, renews and releases them, many in one round trip.

`take` and `release` only leave word, from the event loop; the answer of `take` comes back as a future of that loop. What is
held is renewed until it is released, so a claim lives as long as its request has not sent a token, and no longer than its life
after this process has died.

When the store does not answer, whoever asked is told, and so is everybody for the next `PAUSE_S` without asking it; whether a
claim was taken is then unknown, and it ends with its life.

The thread begins with an empty call of each kind, so that no request waits for a connection and for scripts to be loaded.

Limits: a claim is taken after one wake-up of the thread and one round trip, later while a call is in progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvpool.directory.errors import DirectoryUnavailable
from kvpool.directory.exchange import Claim, ClaimStore

LIFE_S: Final = 2.0
PAUSE_S: Final = 1.0
_log = logging.getLogger(__name__)
_Wanted = tuple[Claim, "asyncio.Future[str | None]"]


class ClaimKeeper:
    """See above, without the thread: one thread calls `step`, others the rest. `clock` gives monotonic seconds."""

    def __init__(self, store: ClaimStore, clock: Callable[[], float], life_s: float = LIFE_S) -> None:
        self.wake = threading.Event()
        """Set when `step` has something to do."""
        self._store = store
        self._clock = clock
        self._life_s = life_s
        self._lock = threading.Lock()
        self._wanted: list[_Wanted] = []
        self._done: list[Claim] = []
        self._held: set[Claim] = set()
        self._renew_at = math.inf
        self._silent_until = -math.inf
        self._asked_at: float | None = None
        self._is_closed = False

    @property
    def is_silent(self) -> bool:
        """Whether the store did not answer a moment ago, or nobody asks it any more."""
        return self._is_closed or self._clock() < self._silent_until

    @property
    def asking_s(self) -> float:
        """For how long the call to the store that is in progress has taken, in seconds; 0.0 while there is none."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, self._clock() - asked_at)

    @property
    def held(self) -> int:
        """How many claims are held."""
        return len(self._held)

    def take(self, claim: Claim) -> asyncio.Future[str | None]:
        """Returns who holds the key then; None when that is not known. Called in a running loop.

        `claim` is to be released unless another one holds the key.
        """
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.is_silent:
                answer.set_result(None)
                return answer
            self._wanted.append((claim, answer))
        self.wake.set()
        return answer

    def release(self, claim: Claim) -> None:
        """Its request has sent a token, or has ended."""
        with self._lock:
            if not self._is_closed:
                self._done.append(claim)
        self.wake.set()

    def due_s(self) -> float | None:
        """Returns when the next renewal is due, in seconds from now; None when there is nothing to renew."""
        return None if self._renew_at == math.inf else max(0.0, self._renew_at - self._clock())

    def step(self) -> None:
        """Does all that is to be done now. Raises nothing of the store."""
        self.wake.clear()
        with self._lock:
            wanted, self._wanted = self._wanted, []
            done, self._done = self._done, []
        holders: Sequence[str | None] = [None] * len(wanted)
        try:
            if wanted and not self.is_silent:
                claims = [claim for claim, _ in wanted]
                with self._asking():
                    holders = self._store.take(claims, self._life_s)
                self._held |= {claim for claim, holder in zip(claims, holders, strict=True) if claim.holder == holder}
            _answer(wanted, holders)
            self._held -= set(done)
            if done and not self.is_silent:
                with self._asking():
                    self._store.release(done)
            self._renew()
        except DirectoryUnavailable as error:
            if self._silent_until == -math.inf:
                _log.warning("cold prefixes are not claimed: %s", error)
            self._silent_until = self._clock() + PAUSE_S
            self._held -= set(done)
            self._renew_at = self._silent_until if self._held else math.inf
        finally:
            _answer(wanted, holders)

    def warm_up(self) -> None:
        """Makes an empty call of each kind. Raises nothing: a store that does not answer is found out when it matters."""
        try:
            with self._asking():
                self._store.take([], self._life_s)
                self._store.renew([], self._life_s)
                self._store.release([])
        except DirectoryUnavailable as error:
            _log.debug("the claim store does not answer yet: %s", error)

    def close(self) -> None:
        """Asks for nothing more, and releases what is held. Raises DirectoryUnavailable; idempotent."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            wanted, self._wanted = self._wanted, []
        _answer(wanted, [None] * len(wanted))
        if self._held and not was_closed:
            self._store.release(list(self._held))

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Around each call to the store, for `asking_s`."""
        self._asked_at = self._clock()
        try:
            yield
        finally:
            self._asked_at = None

    def _renew(self) -> None:
        """Renews what is held when it is time, and notes when the next time is."""
        now = self._clock()
        if not self._held:
            self._renew_at = math.inf
        elif self._renew_at == math.inf:
            self._renew_at = now + self._life_s / 3
        elif now >= self._renew_at:
            with self._asking():
                self._store.renew(list(self._held), self._life_s)
            self._renew_at = now + self._life_s / 3


class KeeperThread:
    """Steps `keeper` until `close()`, which also closes `store`."""

    def __init__(self, keeper: ClaimKeeper, store: ClaimStore) -> None:
        self.failure: BaseException | None = None
        self._keeper = keeper
        self._store = store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvatlas-claims", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Releases what is held, where the store answers, and stops. Idempotent."""
        self._stop.set()
        self._keeper.wake.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        keeper = self._keeper
        try:
            keeper.warm_up()
            while not self._stop.is_set():
                keeper.wake.wait(keeper.due_s())
                keeper.step()
        except BaseException as error:
            self.failure = error
            _log.exception("cold prefixes are not claimed any more")
        finally:
            try:
                keeper.close()
            except DirectoryUnavailable as error:
                _log.info("claims end with their life: %s", error)
            self._store.close()


def _answer(wanted: list[_Wanted], holders: Sequence[str | None]) -> None:
    for (_, answer), holder in zip(wanted, holders, strict=True):
        with contextlib.suppress(RuntimeError):  # its loop is closed
            answer.get_loop().call_soon_threadsafe(_set, answer, holder)


def _set(answer: asyncio.Future[str | None], holder: str | None) -> None:
    if not answer.done():
        answer.set_result(holder)
