"""The queue in front of the replicas: bounds, turns, and nothing lost or left behind however requests end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.admission import Admission, AdmissionLimits, Ticket
from cluster.api.app import ApiSettings, build_app
from cluster.api.errors import ApiError
from cluster.api.identity import ANONYMOUS, Identity
from cluster.api.key_list import parse_keys
from cluster.api.keys import KeyRing
from tests.api.asgi_call import AsgiCall, eventually
from tests.api.calls import CHAT, chat_body, error_of
from tests.fakes.codec import ByteCodec
from tests.fakes.engine import FakeEngine, Script

A, B, C = Identity("a"), Identity("b"), Identity("c")


class Caller:
    """A request that enters in a task of its own, stays until told, and notes in `order` when it was let go."""

    def __init__(
        self, admission: Admission, identity: Identity, tokens: int, order: list[Caller] | None = None
    ) -> None:
        self.identity = identity
        self.tokens = tokens
        self.ticket: Ticket | None = None
        self.refusal: ApiError | None = None
        self._order = order if order is not None else []
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        try:
            async with admission.enter(self.identity, self.tokens) as ticket:
                self.ticket = ticket
                self._order.append(self)
                await self._leave.wait()
        except ApiError as error:
            self.refusal = error

    @property
    def gone(self) -> bool:
        """Whether it has been let go."""
        return self.ticket is not None

    def leave(self) -> None:
        self._leave.set()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def finish(*callers: Caller) -> None:
    for caller in callers:
        caller.task.cancel()
    await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)


def is_empty(admission: Admission) -> bool:
    return not any(admission.report().values()) and not admission._ahead


async def test_without_limits_everything_goes_at_once() -> None:
    admission = Admission()
    callers = [Caller(admission, A, 10**9) for _ in range(100)]
    await settle()
    assert all(caller.ticket for caller in callers)
    assert admission.inflight_tokens == 100 * 10**9
    await finish(*callers)
    assert is_empty(admission)


async def test_what_a_replica_has_admitted_makes_room_for_the_next() -> None:
    admission = Admission(AdmissionLimits(inflight_tokens=100))
    first, second = Caller(admission, A, 60), Caller(admission, A, 60)
    await settle()
    assert (first.gone, second.gone) == (True, False)
    assert first.ticket is not None
    assert (admission.queued_tokens, admission.inflight_tokens, admission.waiting) == (120, 60, 1)
    first.ticket.admitted()
    first.ticket.admitted()  # changes nothing
    await settle()
    assert second.gone
    assert (admission.queued_tokens, admission.inflight_tokens, admission.waiting) == (60, 60, 0)
    await finish(first, second)
    assert is_empty(admission)


async def test_the_server_is_full_503() -> None:
    admission = Admission(AdmissionLimits(queue_tokens=100, inflight_tokens=50))
    callers = [Caller(admission, identity, 50) for identity in (A, B)]
    await settle()
    for identity in (A, B, C, ANONYMOUS):
        with pytest.raises(ApiError) as caught:
            await admission.enter(identity, 1).__aenter__()
        assert (caught.value.status, caught.value.code) == (503, "server_is_overloaded")
        assert caught.value.headers["retry-after"]
    callers[0].leave()
    await settle()
    late = Caller(admission, C, 50)
    await settle()
    assert late.refusal is None
    await finish(*callers, late)
    assert is_empty(admission)


async def test_one_key_asks_for_too_much_429_and_the_others_do_not_notice() -> None:
    admission = Admission(AdmissionLimits(queue_tokens=1000, key_queue_tokens=100))
    greedy = [Caller(admission, A, 50) for _ in range(3)]
    other = Caller(admission, B, 100)
    await settle()
    assert [caller.refusal is None for caller in greedy] == [True, True, False]
    refusal = greedy[2].refusal
    assert refusal is not None
    assert (refusal.status, refusal.code) == (429, "slow_down")
    assert refusal.headers["retry-after"]
    assert refusal.envelope()["error"]["type"] == "invalid_request_error"
    assert other.ticket is not None
    await finish(*greedy, other)
    assert is_empty(admission)


async def test_a_share_is_for_keys_and_not_for_the_anonymous() -> None:
    admission = Admission(AdmissionLimits(queue_tokens=1000, key_queue_tokens=10))
    callers = [Caller(admission, ANONYMOUS, 100) for _ in range(10)]
    await settle()
    assert all(caller.ticket for caller in callers)
    await finish(*callers)


async def test_what_is_larger_than_every_limit_goes_when_it_is_alone() -> None:
    admission = Admission(AdmissionLimits(queue_tokens=10, key_queue_tokens=10, inflight_tokens=10))
    large = Caller(admission, A, 1000)
    await settle()
    assert large.ticket is not None
    small = Caller(admission, B, 1)
    await settle()
    assert small.refusal is not None
    assert small.refusal.status == 503
    await finish(large)
    assert is_empty(admission)


async def test_small_ones_do_not_overtake_a_large_one_for_ever() -> None:
    admission = Admission(AdmissionLimits(inflight_tokens=100))
    order: list[Caller] = []
    running = [Caller(admission, A, 50, order), Caller(admission, A, 50, order)]
    await settle()
    large = Caller(admission, B, 100, order)
    await settle()
    small = [Caller(admission, A, 10, order) for _ in range(20)]
    await settle()
    running[0].leave()
    await settle()
    small.append(Caller(admission, C, 10, order))
    await settle()
    assert large.ticket is None, "no room for it yet, and none for those behind it"
    assert admission.inflight_tokens == 50
    running[1].leave()
    await settle()
    assert order[2] is large
    await finish(large, *small)
    assert is_empty(admission)


async def test_a_thousand_requests_of_one_client_do_not_stand_before_the_first_of_another() -> None:
    admission = Admission(AdmissionLimits(inflight_tokens=10))
    order: list[Caller] = []
    many = [Caller(admission, A, 10, order) for _ in range(1000)]
    await settle()
    one = Caller(admission, B, 10, order)
    await settle()
    order[0].leave()
    await settle()
    order[1].leave()
    await settle()
    assert one in order[:3]
    await finish(*many, one)
    assert is_empty(admission)


async def test_order_of_arrival_within_a_client() -> None:
    admission = Admission(AdmissionLimits(inflight_tokens=10))
    order: list[Caller] = []
    callers = [Caller(admission, A, 10, order) for _ in range(20)]
    for _ in callers:
        await settle()
        order[-1].leave()
    await settle()
    assert order == callers


async def test_a_client_that_was_away_has_saved_up_nothing() -> None:
    """B sends nothing while A is served a lot; when B comes, it gets half, not everything until it has caught up."""
    admission = Admission(AdmissionLimits(inflight_tokens=10))
    order: list[Caller] = []
    early = [Caller(admission, A, 10, order) for _ in range(60)]
    await settle()
    for turn in range(30):
        order[turn].leave()
        await settle()
    late = [Caller(admission, B, 10, order) for _ in range(20)]
    await settle()
    for turn in range(30, 40):
        order[turn].leave()
        await settle()
    served = Counter(caller.identity.name for caller in order[31:41])
    assert served == {"a": 5, "b": 5}
    await finish(*early, *late)
    assert is_empty(admission)


async def test_a_client_cannot_jump_the_line_by_leaving_and_coming_back() -> None:
    """B has one request at a time, ten times as large as A's: it is served a tenth as often, not every other time."""
    admission = Admission(AdmissionLimits(inflight_tokens=1))
    order: list[Caller] = []
    callers = [Caller(admission, A, 100, order)]
    await settle()
    callers += [Caller(admission, A, 10, order) for _ in range(400)] + [Caller(admission, B, 100, order)]
    await settle()
    turn = 0
    while turn < 200:
        caller = order[turn]
        caller.leave()
        turn += 1
        await settle()
        if caller.identity is B:
            callers.append(Caller(admission, B, 100, order))
            await settle()
    served: Counter[str] = Counter()
    for caller in order[1:turn]:
        served[caller.identity.name] += caller.tokens
    assert abs(served["a"] - served["b"]) <= 110
    await finish(*callers)
    assert is_empty(admission)


@pytest.mark.parametrize("how", ["cancelled", "raises"])
async def test_who_leaves_gives_its_place_back(how: str) -> None:
    admission = Admission(AdmissionLimits(queue_tokens=100, inflight_tokens=10))
    callers = [Caller(admission, A, 10) for _ in range(10)]
    await settle()
    await finish(*callers[1:])  # those that wait
    assert (admission.queued_tokens, admission.inflight_tokens, admission.waiting) == (10, 10, 0)
    await finish(callers[0])
    assert is_empty(admission)
    if how == "raises":
        with pytest.raises(RuntimeError):
            async with admission.enter(A, 10):
                raise RuntimeError
        assert is_empty(admission)


async def test_who_is_let_go_in_the_moment_it_is_cancelled_does_not_keep_the_place() -> None:
    admission = Admission(AdmissionLimits(inflight_tokens=10))
    callers = [Caller(admission, A, 10) for _ in range(3)]
    await settle()
    assert callers[0].ticket is not None
    callers[0].ticket.admitted()  # lets the second go, which has not run yet
    callers[1].task.cancel()
    await settle()
    assert callers[1].ticket is None
    assert callers[2].ticket is not None, "the wake-up was lost"
    await finish(*callers)
    assert is_empty(admission)


async def test_who_is_cancelled_in_the_moment_before_it_is_let_go_does_not_keep_the_place() -> None:
    admission = Admission(AdmissionLimits(inflight_tokens=10))
    callers = [Caller(admission, A, 10) for _ in range(3)]
    await settle()
    assert callers[0].ticket is not None
    callers[1].task.cancel()  # it has not run since, and its future is cancelled
    callers[0].ticket.admitted()
    await settle()
    assert callers[1].ticket is None
    assert callers[2].ticket is not None, "the wake-up was lost"
    await finish(*callers)
    assert is_empty(admission)


STEPS = st.lists(
    st.tuples(st.sampled_from(["enter", "admit", "leave", "cancel", "run"]), st.integers(0, 3), st.integers(1, 40)),
    max_size=80,
)
LIMITS = st.builds(
    AdmissionLimits, st.sampled_from([0, 60, 200]), st.sampled_from([0, 40, 100]), st.sampled_from([0, 1, 30, 60])
)


@given(LIMITS, STEPS, st.integers(0, 2**32))
def test_any_history_keeps_the_sums_and_wakes_whoever_fits(
    limits: AdmissionLimits, steps: list[tuple[str, int, int]], seed: int
) -> None:
    """After every step: the sums are those of the tickets, no bound is exceeded by more than one large request, and nobody
    waits that would fit as the only one. In the end nothing is left."""

    async def play() -> None:
        admission, rng = Admission(limits), random.Random(seed)
        callers: list[Caller] = []
        for action, who, tokens in steps:
            alive = [caller for caller in callers if not caller.task.done()]
            gone = [caller for caller in alive if caller.ticket is not None]
            if action == "enter":
                callers.append(Caller(admission, Identity("" if who == 0 else str(who)), tokens))
            elif action == "run":
                await settle()
            elif action == "cancel" and alive:
                rng.choice(alive).task.cancel()
            elif gone and action == "leave":
                rng.choice(gone).leave()
            elif gone and action == "admit":
                ticket = rng.choice(gone).ticket
                assert ticket is not None
                ticket.admitted()
            check(admission, limits)
            if rng.random() < 0.5:
                await settle()
                check(admission, limits)
        await settle()
        while any(caller.ticket for caller in callers if not caller.task.done()):
            for caller in callers:
                if caller.ticket is not None:
                    caller.leave()
            await settle()
        assert all(caller.task.done() for caller in callers), "somebody was never let go"
        await asyncio.gather(*(caller.task for caller in callers), return_exceptions=True)
        assert is_empty(admission)

    asyncio.run(play())


def check(admission: Admission, limits: AdmissionLimits) -> None:
    """The invariants of `test_any_history_keeps_the_sums_and_wakes_whoever_fits`."""
    clients = admission._clients.values()
    assert admission.queued_tokens == sum(client.queued_tokens for client in clients)
    assert all(client.queued_tokens > 0 for client in clients)
    waiting = [ticket for client in clients for ticket in client.waiting]
    assert admission.waiting == len(waiting)
    assert admission.inflight_tokens == admission.queued_tokens - sum(ticket.tokens for ticket in waiting)
    assert 0 <= admission.inflight_tokens <= admission.queued_tokens
    if limits.inflight_tokens:
        assert admission.inflight_tokens <= max(limits.inflight_tokens, 40)
    else:
        assert not waiting
    if limits.queue_tokens:
        assert admission.queued_tokens <= max(limits.queue_tokens, 40)
    if waiting:
        assert admission.inflight_tokens > 0, "there is room, and nobody is let in"
    assert all(client.clock >= admission._now for client in clients if client.waiting), "somebody has saved up turns"


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.integers(1, 50), min_size=20, max_size=40), min_size=2, max_size=4),
    st.integers(1, 100),
    st.integers(0, 2**32),
)
def test_clients_that_always_wait_are_served_alike(sizes: list[list[int]], inflight: int, seed: int) -> None:
    """Between any two moments no client is ahead of another by more than the largest request of each."""

    async def play() -> None:
        admission, rng = Admission(AdmissionLimits(inflight_tokens=inflight)), random.Random(seed)
        order: list[Caller] = []
        blocker = Caller(admission, Identity("blocker"), inflight)
        await settle()
        callers = [
            Caller(admission, Identity(str(client)), tokens, order)
            for client, requests in enumerate(sizes)
            for tokens in requests
        ]
        rng.shuffle(callers)
        await settle()
        blocker.leave()
        await settle()
        left = {str(client): len(requests) for client, requests in enumerate(sizes)}
        served = dict.fromkeys(left, 0)
        ahead = {(a, b): [0, 0] for a in left for b in left if a < b}
        noted = 0
        while noted < len(order):
            for caller in order[noted:]:
                left[caller.identity.name] -= 1
                served[caller.identity.name] += caller.tokens
                noted += 1
                if not all(left.values()):
                    await finish(*callers, blocker)  # from here on somebody does not always wait
                    return
                for (a, b), (low, high) in ahead.items():
                    gap = served[a] - served[b]
                    low, high = ahead[a, b] = [min(low, gap), max(high, gap)]
                    assert high - low <= max(sizes[int(a)]) + max(sizes[int(b)])
                caller.leave()
            await settle()

    asyncio.run(play())


ALICE, BOB = "alice-0123456789-key", "bob-0123456789-key"


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http(engine: FakeEngine, codec: ByteCodec, stream: bool) -> None:
    """While one request waits for a replica: 429 to its key, 503 to others when all is full; all is well once it has left."""
    limits = AdmissionLimits(queue_tokens=250, key_queue_tokens=150)
    settings = ApiSettings("org/tiny", 128, admission=limits)
    app = build_app(settings, engine, codec, keys=KeyRing(parse_keys(f"alice:{ALICE} bob:{BOB}")))
    engine.script = Script(admit_delay_s=3600)
    body = chat_body(stream=stream)  # to the end of the context: 128 tokens
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:

        def ask(key: str, **fields: object) -> asyncio.Task[httpx.Response]:
            headers = {"authorization": f"Bearer {key}"}
            return asyncio.create_task(client.post(CHAT, json=body | fields, headers=headers))

        waits = ask(ALICE)
        await eventually(lambda: len(engine.requests) == 1)
        refused = await ask(ALICE)
        assert error_of(refused, 429)["code"] == "slow_down"
        assert refused.headers["retry-after"] == "1"
        assert error_of(await ask(BOB), 503)["code"] == "server_is_overloaded"
        assert len(engine.requests) == 1, "what is refused must not reach a replica"
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        engine.script = Script()
        for key in (ALICE, BOB, ALICE):
            assert (await ask(key)).status_code == 200


async def test_who_waits_in_front_and_leaves_frees_its_place(engine: FakeEngine, codec: ByteCodec) -> None:
    settings = ApiSettings("org/tiny", 128, admission=AdmissionLimits(inflight_tokens=128))
    app = build_app(settings, engine, codec)
    engine.script = Script(admit_delay_s=3600)
    first = AsgiCall(app, CHAT, chat_body())
    await eventually(lambda: len(engine.requests) == 1)
    others = [AsgiCall(app, CHAT, chat_body()) for _ in range(2)]
    await asyncio.sleep(0.02)
    assert len(engine.requests) == 1, "there is no room for two"
    others[0].disconnect()
    await others[0].task
    engine.script = Script()
    first.disconnect()
    await asyncio.gather(first.task, others[1].task)
    assert len(engine.requests) == 2
    assert others[1].status == 200
