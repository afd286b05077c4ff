"""The simulated world keeps its promises: it repeats itself, bounds delays, loses what it says, and remembers disks."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.codec import encode, encode_frame
from phalanx.core.crypto import Domain, Signer
from phalanx.core.effects import (
    AdoptState,
    Apply,
    Begin,
    Broadcast,
    ComputeAggregate,
    ComputeGradient,
    ComputeReport,
    Delivery,
    DrawSecret,
    Effect,
    Finished,
    HashState,
    HasState,
    Heard,
    Keep,
    KeepMessages,
    Note,
    ReadState,
    Receive,
    Send,
    Sign,
    Story,
    Undo,
)
from phalanx.core.envelope import Examiner, seal
from phalanx.core.errors import LocalError
from phalanx.core.messages import (
    MAX_FRAME,
    AggregateChunk,
    Commit,
    Manifest,
    Message,
    Outcome,
    PartChunk,
    Phase,
    PullAggregate,
    PullManifest,
    PullState,
    Seal,
    StateChunk,
    Timeout,
)
from phalanx.network import disk as disk_module
from phalanx.network import simulated
from phalanx.network.disk import Disk
from phalanx.network.ideal import make_signers
from phalanx.network.simulated import USUAL, Garbage, Links, Oversize, Skew, StoryFailed, World
from phalanx.network.traffic import Count

RUN, PREVIOUS = bytes(range(32)), bytes(range(32, 64))
SIGNERS, VERIFY = make_signers(8, 0, ideal=True)
ALICE, BOB, CAROL, DAVE = (signer.key for signer in SIGNERS[:4])
Start = Callable[[Disk], Story]


class Counter:
    """A machine whose state is one number."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.states = {0: 0.0}
        self.crashes = 0

    def compute_gradient(self, step: int, seed: bytes) -> Tensor:
        return torch.full((4,), self.states[step] + len(seed))

    def compute_aggregate(self, rows: Tensor, tau: float) -> Tensor:
        return rows.mean(0)

    def compute_report(self, parts: Any, aggregates: Any, seeds: Any, tau: float) -> Any:
        return ("report", len(parts), len(aggregates), len(seeds), tau)

    def apply(self, step: int, aggregate: Tensor) -> None:
        self.states[step + 1] = self.states[step] + float(aggregate.sum())

    def hash_state(self, step: int) -> bytes:
        return bytes(31) + bytes([int(self.states[step])])

    def undo(self, step: int) -> None:
        del self.states[step + 1]

    def has_state(self, step: int, digest: bytes) -> bool:
        return step in self.states and digest == self.hash_state(step)

    def read_state(self, step: int) -> bytes | None:
        return str(self.states[step]).encode() if step in self.states else None

    def adopt_state(self, step: int, digest: bytes, data: bytes) -> bool:
        self.states[step] = float(data)
        return True

    def duration(self, effect: Effect | ComputeGradient) -> float:
        return self.seconds

    def crash(self) -> None:
        self.crashes += 1


def make_world(*stories: Story | Start, links: Links | None = None, seed: int = 1, **options: Any) -> World:
    """A world of Alice, Bob, Carol and so on, one for each story."""
    world = World(RUN, seed, links, **options)
    for signer, story in zip(SIGNERS, stories, strict=False):
        add(world, signer, story)
    return world


def add(world: World, signer: Signer, story: Story | Start, machine: Any = None, skew: Skew | None = None) -> Disk:
    return world.add(signer.key, signer, machine, story if callable(story) else lambda disk: story, skew)


def pull(number: int) -> Message:
    """A short message that carries a number."""
    return PullAggregate(number, 0, 0, 0)


def wait(seconds: float) -> Story:
    """Let time pass; what arrives meanwhile is the result."""
    first = yield Receive(-math.inf)
    until, got = first.now + seconds, [first] if first.message is not None else []
    while (delivery := (yield Receive(until))).message is not None:
        got.append(delivery)
    return got


def send_every(interval: float, count: int, to: tuple[bytes, ...]) -> Story:
    for number in range(count):
        yield Broadcast(to, pull(number))
        yield from wait(interval)


def numbers(deliveries: list[Delivery]) -> list[int]:
    return [delivery.message.step for delivery in deliveries]  # type: ignore[union-attr]


def chat(rounds: int) -> list[Start]:
    """Four peers that sign, send to all, draw secrets and note what they hear."""

    def story(me: int) -> Story:
        for height in range(rounds):
            message = yield Sign(height, height, 0, Phase.SEAL, PREVIOUS, Seal(bytes(32)))
            yield Broadcast(tuple(signer.key for signer in SIGNERS[:4]), message)
            for delivery in (yield from wait(0.7 + 0.1 * me)):
                yield Note((delivery.sender.hex(), delivery.message.height))

    return [lambda disk, me=me: story(me) for me in range(4)]  # type: ignore[misc]


# ---- Determinism

RICH = {"delta": 1.0, "low": 0.1, "high": 0.6, "loss": 0.2, "duplicate": 0.2}


def run_chat(seed: int, **options: Any) -> tuple[str, str, list[Any]]:
    log = io.StringIO()
    world = make_world(*chat(20), links=Links(**RICH), seed=seed, log=log, **options)
    world.at(3.0, lambda: world.crash(BOB, lost=0.5))
    world.at(5.0, lambda: world.restart(BOB))
    world.run()
    return world.trace_digest, log.getvalue(), world.notes


def test_a_seed_is_the_whole_run() -> None:
    assert run_chat(1) == run_chat(1)


def test_another_seed_is_another_run() -> None:
    assert run_chat(1)[0] != run_chat(2)[0]


def test_encoding_changes_nothing_in_what_happens() -> None:
    assert run_chat(1) == run_chat(1, wire=True)


def test_counting_changes_nothing_in_what_happens() -> None:
    assert run_chat(1) == run_chat(1, count=False)
    assert run_chat(1)[1:] == run_chat(1, trace=False)[1:]


def test_the_trace_tells_notes_and_messages_apart() -> None:
    def say(word: str, number: int) -> Story:
        yield Note(word)
        yield Send(BOB, pull(number))

    def digest(word: str, number: int) -> str:
        world = make_world(say(word, number), wait(2))
        world.run()
        return world.trace_digest

    assert len({digest("a", 1), digest("b", 1), digest("a", 2)}) == 3


# ---- Links


def test_delays_are_bounded_by_delta_and_messages_overtake() -> None:
    world = make_world(send_every(0.1, 200, (BOB,)), wait(30), links=Links(delta=0.5, low=0.2))
    world.run()
    got = world.results[BOB]
    delays = [delivery.now - 0.1 * number for delivery, number in zip(got, numbers(got), strict=True)]
    assert sorted(numbers(got)) == list(range(200))
    assert min(delays) >= 0.2 - 1e-9
    assert max(delays) <= 0.5 + 1e-9
    assert max(delays) - min(delays) > 0.25
    assert numbers(got) != sorted(numbers(got))
    assert {delivery.sender for delivery in got} == {ALICE}


def test_fifo_links_keep_the_order_within_delta() -> None:
    world = make_world(
        send_every(0.1, 200, (BOB,)), wait(30), links=Links(delta=0.5, low=0.1, fifo=True, loss=0.3, duplicate=0.3)
    )
    world.run()
    got = world.results[BOB]
    assert numbers(got) == sorted(numbers(got))
    assert set(numbers(got)) == set(range(200))
    assert all(delivery.now - 0.1 * delivery.message.step <= 0.5 + 1e-9 for delivery in got)


def test_a_lost_message_comes_later_but_within_delta() -> None:
    world = make_world(send_every(0.1, 400, (BOB,)), wait(60), links=Links(delta=2.0, low=0.1, high=0.2, loss=0.25))
    world.run()
    got = world.results[BOB]
    delays = [delivery.now - 0.1 * delivery.message.step for delivery in got]
    assert sorted(numbers(got)) == list(range(400))
    assert 60 < sum(delay > 0.2 + 1e-9 for delay in delays) < 140
    assert max(delays) <= 2.0 + 1e-9


def test_duplicates_arrive_twice() -> None:
    world = make_world(send_every(0.1, 400, (BOB,)), wait(60), links=Links(delta=0.5, duplicate=0.25))
    world.run()
    got = numbers(world.results[BOB])
    assert set(got) == set(range(400))
    assert 60 < len(got) - 400 < 140
    assert max(got.count(number) for number in got) == 2
    assert world.traffic["pullaggregate"].messages == 400


def test_a_delay_factor_breaks_delta_until_it_is_restored() -> None:
    world = make_world(send_every(0.1, 300, (BOB,)), wait(60), links=Links(delta=0.5, high=0.1))
    world.at(9.95, lambda: world.set_delay_factor(10))
    world.at(19.95, lambda: world.set_delay_factor(1))
    world.run()
    delay_of = {delivery.message.step: delivery.now - 0.1 * delivery.message.step for delivery in world.results[BOB]}
    broken = [delay_of[number] for number in range(100, 200)]
    assert 4 < max(broken) <= 5 + 1e-9
    assert max(delay_of[number] for number in [*range(100), *range(200, 300)]) <= 0.1 + 1e-9


def test_a_route_chooses_delays_drops_or_leaves_it() -> None:
    def route(now: float, sender: bytes, receiver: bytes, message: Message) -> float | None:
        assert (sender, receiver) == (ALICE, BOB)
        return {0: None, 1: 3.5, 2: 0.0}.get(message.step, USUAL)  # type: ignore[union-attr]

    def story() -> Story:
        for number in range(4):
            yield Send(BOB, pull(number))

    world = make_world(story(), wait(9), links=Links(delta=1.0, low=0.5, route=route))
    world.run()
    got = world.results[BOB]
    assert numbers(got) == [2, 3, 1]
    assert [got[0].now, got[2].now] == [0.0, 3.5]
    assert 0.5 <= got[1].now <= 1.0


def test_a_partition_drops_and_heals() -> None:
    world = make_world(
        send_every(1.0, 30, (BOB, CAROL, DAVE)), wait(40), wait(40), wait(40), links=Links(delta=0.5, low=0.3)
    )
    world.at(9.9, lambda: world.partition([[ALICE, BOB], [CAROL, BOB]]))
    world.at(19.9, world.heal)
    world.run()
    outside = [*range(10), *range(20, 30)]
    assert numbers(world.results[BOB]) == list(range(30))
    assert numbers(world.results[CAROL]) == outside
    assert numbers(world.results[DAVE]) == outside


def test_a_partition_drops_what_is_under_way() -> None:
    world = make_world(send_every(1.0, 1, (BOB,)), wait(5), links=Links(delta=1.0, low=0.5))
    world.at(0.1, lambda: world.partition([[ALICE], [BOB]]))
    world.run()
    assert world.results[BOB] == []


def test_those_in_no_group_stay_together() -> None:
    world = make_world(send_every(1.0, 3, (BOB, CAROL)), wait(9), wait(9))
    world.partition([[CAROL]])
    world.run()
    assert numbers(world.results[BOB]) == [0, 1, 2]
    assert world.results[CAROL] == []


def test_a_message_to_oneself_is_next_and_uses_no_link() -> None:
    def story() -> Story:
        yield Broadcast((BOB, ALICE), pull(1))
        yield Send(ALICE, pull(2))
        first, second = (yield Receive(9.0)), (yield Receive(9.0))
        return first, second

    world = make_world(story(), wait(2), links=Links(loss=0.5))
    world.run()
    assert world.results[ALICE] == (Delivery(0.0, ALICE, pull(1)), Delivery(0.0, ALICE, pull(2)))
    assert world.traffic.total.messages == 1


def test_nobody_gets_a_message_to_a_stranger() -> None:
    world = make_world(send_every(1.0, 1, (bytes(32), BOB)), wait(2))
    world.run()
    assert len(world.results[BOB]) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"low": 2.0}, {"high": 2.0}, {"low": -0.1}, {"low": 0.5, "high": 0.4}, {"loss": 1.5}, {"duplicate": -1.0}],
    ids=str,
)
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="links"):
        Links(**wrong)  # type: ignore[arg-type]


def test_a_delay_factor_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="factor"):
        World(RUN, 1).set_delay_factor(0.5)


# ---- Time


def test_receive_ends_at_its_deadline() -> None:
    def story() -> Story:
        return (yield Receive(2.5)), (yield Receive(1.0)), (yield Receive(3.0))

    world = make_world(story())
    world.run()
    assert [delivery.now for delivery in world.results[ALICE]] == [2.5, 2.5, 3.0]
    assert world.now == 3.0


@pytest.mark.parametrize(
    "skew", [Skew(100.0, 1.0), Skew(-3.0, 2.0), Skew(1e9, 0.9), Skew(0.1, 1 / 3), Skew(1e-9, 1.0 + 1e-9)], ids=str
)
def test_a_local_clock_never_ends_a_wait_too_early(skew: Skew) -> None:
    asked = [skew.offset + 0.1 * number for number in range(1, 50)]

    def story() -> Story:
        got = []
        for until in asked:
            got.append((yield Receive(until)).now)
        return got

    world = World(RUN, 1)
    add(world, SIGNERS[0], story(), skew=skew)
    world.run()
    shown = world.results[ALICE]
    assert all(0 <= now - until <= 1e-6 for now, until in zip(shown, asked, strict=True))
    assert world.now == pytest.approx((asked[-1] - skew.offset) / skew.rate, rel=1e-6)
    assert world.get_local_time(ALICE) == shown[-1]


def test_clocks_run_apart() -> None:
    world = World(RUN, 1)
    for signer, skew in zip(SIGNERS, [Skew(), Skew(50.0, 1.1)], strict=False):
        add(world, signer, wait(10.0), skew=skew)
    world.run(until=9.5)
    assert set(world.results) == {BOB}
    assert world.get_local_time(BOB) == pytest.approx(50 + 1.1 * 9.5)


@pytest.mark.parametrize("wrong", [(0.0, 0.0), (0.0, -1.0), (math.inf, 1.0), (0.0, math.inf), (math.nan, 1.0)])
def test_impossible_clocks_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="skew"):
        Skew(*wrong)


def test_shorter_and_longer_waits_share_timers() -> None:
    """A wait that a message ends leaves a timer behind, which must end no later wait early, nor be missed."""

    def listen() -> Story:
        moments = []
        for until in (5.0, 3.0, 4.0, 8.0):
            delivery = yield Receive(until)
            moments.append((delivery.now, delivery.message is not None))
        return moments

    world = make_world(
        send_every(1.0, 1, (BOB,)), listen(), links=Links(route=lambda now, sender, receiver, message: 0.5)
    )
    world.run()
    assert world.results[BOB] == [(0.5, True), (3.0, False), (4.0, False), (8.0, False)]


def test_timers_do_not_pile_up() -> None:
    world = make_world(send_every(0.01, 2000, (BOB,)), wait(1000.0), links=Links(delta=0.02))
    world.run(until=20.0)
    assert len(world._schedule) < 10


def test_scenarios_run_at_their_time() -> None:
    world, seen = World(RUN, 1), []
    world.at(2.0, lambda: seen.append(("late", world.now)))
    world.at(1.0, lambda: seen.append(("early", world.now)))
    world.at(1.0, lambda: world.at(1.5, lambda: seen.append(("nested", world.now))))
    assert not world.run(until=1.7)
    assert seen == [("early", 1.0), ("nested", 1.5)]
    assert world.now == 1.7
    with pytest.raises(ValueError, match="before"):
        world.at(1.0, lambda: None)
    world.run()
    assert seen[-1] == ("late", 2.0)


def test_run_stops_when_told() -> None:
    world = make_world(send_every(1.0, 100, (BOB,)), wait(200))
    assert world.run(stop=lambda: world.deliveries >= 7)
    assert world.deliveries == 7
    assert world.run(stop=lambda: True)
    assert not world.run(until=20.0, stop=lambda: False)
    assert world.now == 20.0


# ---- Computing


def test_each_effect_reaches_the_machine() -> None:
    def story() -> Story:
        ticket = yield Begin(ComputeGradient(0, b"seed"))
        finished = (yield Receive(math.inf)).message
        assert finished.ticket == ticket
        gradient = finished.value
        aggregate = yield ComputeAggregate(torch.stack([gradient, gradient]), 1.0)
        report = yield ComputeReport((gradient,), (aggregate, None), ((b"z",),), 2.0)
        yield Apply(0, aggregate)
        digest = yield HashState(1)
        has = (yield HasState(1, digest)), (yield HasState(1, bytes(32))), (yield HasState(2, digest))
        after = yield ReadState(1)
        undone = yield Undo(0)
        gone = yield ReadState(1)
        adopted = yield AdoptState(5, bytes(32), b"7.0")
        adopted_state = yield ReadState(5)
        return report, digest[-1], has, after, undone, gone, adopted, adopted_state

    world = World(RUN, 1)
    add(world, SIGNERS[0], story(), machine=Counter(seconds=0.5))
    world.run()
    has = (True, False, False)
    assert world.results[ALICE] == (("report", 1, 2, 1, 2.0), 16, has, b"16.0", None, None, True, b"7.0")
    assert world.now == 6.5  # thirteen effects


def test_messages_wait_while_a_peer_computes() -> None:
    def story() -> Story:
        yield ReadState(0)
        return (yield from wait(0.0))

    world = make_world(send_every(0.2, 5, (BOB,)), links=Links(delta=0.1))
    add(world, SIGNERS[1], story(), machine=Counter(seconds=3.0))
    world.run()
    assert numbers(world.results[BOB]) == [0, 1, 2, 3, 4]
    assert {delivery.now for delivery in world.results[BOB]} == {3.0}


def test_messages_do_not_wait_for_work_that_was_begun() -> None:
    def story() -> Story:
        ticket = yield Begin(ComputeGradient(0, b"seed"))
        return ticket, (yield from wait(5.0))

    world = make_world(send_every(1.0, 5, (BOB,)), links=Links(delta=0.1))
    add(world, SIGNERS[1], story(), machine=Counter(seconds=2.5))
    world.run()
    ticket, got = world.results[BOB]
    finished = got.pop(3)
    assert (finished.now, finished.sender, finished.message.ticket) == (2.5, None, ticket)
    assert finished.message.value.tolist() == [4.0] * 4
    assert numbers(got) == [0, 1, 2, 3, 4]
    assert all(delivery.now - delivery.message.step <= 0.1 + 1e-9 for delivery in got)


def test_finished_work_waits_for_a_peer_that_does_not_receive() -> None:
    def story() -> Story:
        first = yield Begin(ComputeGradient(0, b"a"))
        second = yield Begin(ComputeGradient(0, b"ab"))
        assert first != second
        yield Apply(0, torch.ones(4))
        got = yield from wait(0.0)
        assert all(isinstance(delivery.message, Finished) for delivery in got)
        return [(delivery.now, delivery.message.ticket) for delivery in got] == [(106.0, first), (106.0, second)]

    world = World(RUN, 1)
    machine = Counter(seconds=1.0)
    machine.duration = lambda effect: 3.0 if isinstance(effect, Apply) else 1.0  # type: ignore[method-assign]
    add(world, SIGNERS[0], story(), machine=machine, skew=Skew(100.0, 2.0))
    world.run()
    assert world.results[ALICE]


def test_work_that_takes_no_time_is_there_at_once() -> None:
    def story() -> Story:
        ticket = yield Begin(ComputeGradient(0, b"abc"))
        delivery = yield Receive(-math.inf)
        return delivery.now, delivery.sender, delivery.message.ticket == ticket, delivery.message.value.tolist()

    world = World(RUN, 1)
    add(world, SIGNERS[0], story(), machine=Counter())
    world.run()
    assert world.results[ALICE] == (0.0, None, True, [3.0] * 4)


def test_a_crash_drops_the_work_that_was_begun() -> None:
    lives: list[list[Any]] = []

    def story(seed: bytes) -> Story:
        life: list[Any] = []
        lives.append(life)
        life.append((yield Begin(ComputeGradient(0, seed))))
        while True:
            life.append((yield Receive(math.inf)))

    world, machine = World(RUN, 1), Counter(seconds=2.0)
    add(world, SIGNERS[0], lambda disk: story(bytes(len(lives))), machine=machine)
    world.at(1.0, lambda: world.crash(ALICE))
    world.at(1.5, lambda: world.restart(ALICE))
    world.run(until=9.0)
    (_,), (ticket, delivery) = lives
    assert (delivery.now, delivery.message.ticket) == (3.5, ticket)
    assert delivery.message.value.tolist() == [1.0] * 4


def test_work_shows_in_the_trace_by_its_kind_alone() -> None:
    def story(seed: bytes) -> Story:
        if seed:
            yield Begin(ComputeGradient(0, seed))
        yield Receive(5.0)

    def run(seed: bytes, seconds: float) -> tuple[str, str]:
        log = io.StringIO()
        world = World(RUN, 1, log=log)
        add(world, SIGNERS[0], story(seed), machine=Counter(seconds))
        world.run()
        assert (world.deliveries, world.traffic.total) == (0, Count())
        return world.trace_digest, log.getvalue()

    assert run(b"a", 1.0) == run(b"ab", 1.0)
    assert len({run(b"", 1.0), run(b"a", 1.0), run(b"a", 2.0)}) == 3
    assert run(b"a", 1.0)[1] == f"1.000000000 {ALICE[:4].hex()} finished computegradient\n"


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_work_that_fails_ends_the_run(seconds: float) -> None:
    def story() -> Story:
        yield Begin(ComputeGradient(99, b""))
        yield Receive(math.inf)

    world = World(RUN, 1)
    add(world, SIGNERS[0], story(), machine=Counter(seconds))
    with pytest.raises(StoryFailed, match=f"{ALICE[:4].hex()} at 0.*KeyError"):  # computed when it begins
        world.run()


def test_a_crash_while_computing_leaves_no_trace_of_it() -> None:
    def story() -> Story:
        yield Apply(0, torch.ones(4))
        yield Receive(math.inf)

    world, machine = World(RUN, 1), Counter(seconds=2.0)
    add(world, SIGNERS[0], lambda disk: story(), machine=machine)
    world.at(1.0, lambda: world.crash(ALICE))
    world.run(until=5.0)
    assert (machine.states, machine.crashes) == ({0: 0.0}, 1)
    world.restart(ALICE)
    world.run(until=8.0)
    assert machine.states == {0: 0.0, 1: 4.0}


def test_a_failing_machine_tells_the_story_where_it_asked() -> None:
    def story() -> Story:
        try:
            yield Apply(99, torch.ones(4))
        except KeyError:
            return "told"

    world = World(RUN, 1)
    add(world, SIGNERS[0], story(), machine=Counter())
    add(world, SIGNERS[1], story(), machine=Counter(seconds=1.0))
    world.run()
    assert world.results == {ALICE: "told", BOB: "told"}


@pytest.mark.parametrize("effect", [ReadState(0), Begin(ComputeGradient(0, b""))], ids=["compute", "begin"])
def test_a_peer_without_a_machine_cannot_compute(effect: Effect) -> None:
    def story() -> Story:
        yield effect

    with pytest.raises(StoryFailed, match="no machine"):
        make_world(story()).run()


# ---- Disks


def sign_seal(height: int, view: int) -> Sign:
    return Sign(height, 1, 0, Phase.SEAL, PREVIOUS, Seal(view.to_bytes(32, "big")))


@pytest.mark.parametrize("ideal", [True, False], ids=["ideal", "real"])
def test_signed_messages_pass_the_examiner(ideal: bool) -> None:
    (signer,), verify = make_signers(1, 5, ideal)

    def story() -> Story:
        agreed = yield sign_seal(3, 1)
        timeout = yield Sign(3, 1, 0, Phase.SEAL, PREVIOUS, Timeout((BOB,), 0, None))
        return agreed, timeout

    world = World(RUN, 1)
    add(world, signer, story())
    world.run()
    agreed, timeout = world.results[signer.key]
    letters = [Examiner(verify).examine(message) for message in (agreed, timeout)]
    assert [letter and letter.body for letter in letters] == [Seal((1).to_bytes(32, "big")), Timeout((BOB,), 0, None)]
    assert agreed == seal(signer, RUN, 3, 1, 0, Phase.SEAL, PREVIOUS, Seal((1).to_bytes(32, "big")))
    assert (agreed.domain, timeout.domain) == (Domain.AGREED, Domain.TIMEOUT)


def test_a_crash_keeps_the_journal_the_view_and_the_secrets() -> None:
    lives: list[Any] = []

    def start(disk: Disk) -> Story:
        def story() -> Story:
            view = len(lives)
            message = yield sign_seal(7, view)
            secret = yield DrawSecret(7)
            lives.append((message, secret, disk.view, disk.messages))
            yield Keep(b"view %d" % view, 7)
            yield KeepMessages(7, Heard.MESSAGES, (message,))
            yield Receive(math.inf)

        return story()

    world = make_world(start)
    world.run(until=1.0)
    world.crash(ALICE)
    assert not world.is_up(ALICE)
    world.restart(ALICE)
    world.run(until=2.0)
    world.restart(ALICE)
    world.run(until=3.0)
    assert world.is_up(ALICE)
    messages, secrets, views, heard = zip(*lives, strict=True)
    assert len(messages) == 3
    assert len({encode(message) for message in messages}) == 1
    assert messages[2].body == encode(Seal(bytes(32)))
    assert len(set(secrets)) == 1
    assert views == (None, b"view 0", b"view 1")
    assert heard == ([], [messages[0]], [messages[0]])
    assert world.get_disk(ALICE).journal == {7: messages[0]}


def test_other_bodies_are_not_journalled() -> None:
    def story() -> Story:
        first = yield Sign(7, 1, 0, Phase.SEAL, PREVIOUS, Timeout((BOB,), 0, None))
        second = yield Sign(7, 1, 0, Phase.SEAL, PREVIOUS, Timeout((CAROL,), 0, None))
        agreed = yield sign_seal(7, 1)
        return first, second, agreed

    world = make_world(story())
    world.run()
    first, second, agreed = world.results[ALICE]
    assert first != second
    assert world.get_disk(ALICE).journal == {7: agreed}


def test_a_height_that_was_signed_for_another_place_has_nothing_to_say() -> None:
    body = Seal((1).to_bytes(32, "big"))

    def story() -> Story:
        agreed = yield Sign(7, 1, 0, Phase.SEAL, PREVIOUS, body)
        commit = yield Sign(7, 1, 0, Phase.COMMIT, PREVIOUS, Commit(None, bytes(32), bytes(32)))
        step = yield Sign(7, 2, 0, Phase.SEAL, PREVIOUS, body)
        attempt = yield Sign(7, 1, 1, Phase.SEAL, PREVIOUS, body)
        again = yield Sign(7, 1, 0, Phase.SEAL, bytes(32), Seal(bytes(32)))
        return agreed, again, [commit, step, attempt]

    world = make_world(story())
    world.run()
    agreed, again, others = world.results[ALICE]
    assert others == [None, None, None]
    assert again is agreed
    assert world.get_disk(ALICE).journal == {7: agreed}


def test_the_journal_is_bounded_and_signs_nothing_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "JOURNAL_HEIGHTS", 3)

    def story() -> Story:
        for height in (0, 1, 2, 4, 5):
            yield sign_seal(height, 0)
        kept = yield sign_seal(2, 1)
        assert kept.body == encode(Seal(bytes(32)))
        with pytest.raises(LocalError, match="journal"):
            yield sign_seal(1, 1)
        return "done"

    world = make_world(story())
    world.run()
    assert world.results[ALICE] == "done"
    assert list(world.get_disk(ALICE).journal) == [2, 4, 5]


def sign_vote(height: int, round: int, final: bool, view: int = 0) -> Sign:
    outcome = Outcome(round, final, bytes(32), True, view.to_bytes(32, "big"))
    return Sign(height, 1, 0, Phase.SEAL, PREVIOUS, outcome)


BALLOTS = [(7, 0, False), (7, 0, True), (7, 1, False), (7, 1, True), (8, 0, False)]


def test_there_is_one_vote_in_each_ballot_also_after_a_crash() -> None:
    lives: list[list[Any]] = []

    def start(disk: Disk) -> Story:
        def story() -> Story:
            votes: list[Any] = []
            agreed = yield sign_seal(7, len(lives))
            for ballot in BALLOTS:
                votes.append((yield sign_vote(*ballot, view=len(lives))))
                assert votes[-1] is (yield sign_vote(*ballot, view=99))
            lives.append([agreed, *votes])
            yield Receive(math.inf)

        return story()

    world = make_world(start)
    world.run(until=1.0)
    world.crash(ALICE)
    world.restart(ALICE)
    world.run(until=2.0)
    assert lives[0] == lives[1]
    agreed, *votes = lives[0]
    assert {vote.domain for vote in votes} == {Domain.OUTCOME}
    assert [vote.body for vote in votes] == [encode(sign_vote(*ballot).body) for ballot in BALLOTS]
    assert world.get_disk(ALICE).journal == {7: agreed}
    assert world.get_disk(ALICE).votes == dict(zip(BALLOTS, votes, strict=True))


def test_the_votes_are_bounded_and_none_is_cast_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "JOURNAL_VOTES", 3)

    def story() -> Story:
        for ballot in BALLOTS:
            yield sign_vote(*ballot)
        kept = yield sign_vote(*BALLOTS[2], view=1)
        assert kept.body == encode(sign_vote(*BALLOTS[2]).body)
        for ballot in [*BALLOTS[:2], (6, 5, True)]:
            with pytest.raises(LocalError, match="journal"):
                yield sign_vote(*ballot, view=1)
        yield sign_seal(1, 0)  # agreed messages have a journal of their own
        return "done"

    world = make_world(story())
    world.run()
    assert world.results[ALICE] == "done"
    assert list(world.get_disk(ALICE).votes) == BALLOTS[2:]


def test_secrets_differ_between_heights_and_peers_and_seeds() -> None:
    def story() -> Story:
        return (yield DrawSecret(1)), (yield DrawSecret(2)), (yield DrawSecret(1))

    drawn: list[bytes] = []
    for seed in (1, 2):
        world = make_world(story(), story(), seed=seed)
        world.run()
        for first, second, again in world.results.values():
            assert first == again
            drawn += [*first, *second]
    assert len(set(drawn)) == len(drawn) == 16
    assert {len(secret) for secret in drawn} == {32}


def test_what_would_be_refused_is_not_signed() -> None:
    def story() -> Story:
        with pytest.raises(ValueError, match="body"):
            yield Sign(1, 1, 0, Phase.COMMIT, PREVIOUS, Seal(bytes(32)))
        with pytest.raises(ValueError, match="body"):
            yield Sign(2, 1, 0, Phase.SEAL, PREVIOUS, Seal(bytes(31)))
        return "refused"

    world = make_world(story())
    world.run()
    assert world.results[ALICE] == "refused"
    assert world.get_disk(ALICE).journal == {}


# ---- Crashes


@pytest.mark.parametrize(("lost", "arrived"), [(1.0, 0), (0.0, 50)])
def test_a_crash_loses_what_it_had_sent_or_not(lost: float, arrived: int) -> None:
    def burst() -> Story:
        for number in range(50):
            yield Send(BOB, pull(number))
        yield Receive(math.inf)

    world = make_world(burst(), wait(9), links=Links(low=0.5))
    world.at(0.1, lambda: world.crash(ALICE, lost))
    world.run()
    assert len(world.results[BOB]) == arrived


def test_a_crash_loses_a_share() -> None:
    world = make_world(send_every(0.0, 400, (BOB,)), wait(9), links=Links(low=0.5))
    world.at(0.1, lambda: world.crash(BOB, lost=0.5))
    world.at(0.2, lambda: world.restart(BOB))
    add(world, SIGNERS[2], send_every(0.0, 10, (DAVE,)))
    add(world, SIGNERS[3], wait(9))
    world._peers[BOB].start = lambda disk: wait(9)  # the first story is used up
    world.run()
    assert 150 < len(world.results[BOB]) < 250
    assert len(world.results[DAVE]) == 10  # nobody else's


def test_what_arrives_at_a_peer_that_is_down_is_lost() -> None:
    world = make_world(send_every(1.0, 10, (BOB,)), lambda disk: wait(20), links=Links(delta=0.1))
    world.at(2.5, lambda: world.crash(BOB))
    world.at(5.5, lambda: world.restart(BOB))
    world.run()
    assert numbers(world.results[BOB]) == [6, 7, 8, 9]


def test_stop_lets_what_was_sent_arrive() -> None:
    machine = Counter()
    world = make_world(links=Links(low=0.5))
    add(world, SIGNERS[0], send_every(9.0, 2, (BOB,)), machine=machine)
    add(world, SIGNERS[1], wait(20))
    world.at(0.1, lambda: world.stop(ALICE))
    world.run()
    assert numbers(world.results[BOB]) == [0]
    assert ALICE not in world.results
    assert machine.crashes == 0


def test_a_crash_closes_the_story() -> None:
    ended: list[float] = []
    world = make_world(links=Links())

    def story() -> Story:
        try:
            yield Receive(math.inf)
        finally:
            ended.append(world.now)

    add(world, SIGNERS[0], story())
    world.at(3.0, lambda: world.crash(ALICE))
    world.run()
    assert ended == [3.0]
    assert ALICE not in world.results


def test_a_note_may_crash_its_peer_between_signing_and_sending() -> None:
    def on_note(key: bytes, event: Any) -> None:
        if event == "signed" and not lives[1:]:
            world.crash(key)
            world.restart(key)

    lives: list[str] = []

    def start(disk: Disk) -> Story:
        def story() -> Story:
            lives.append("life")
            message = yield sign_seal(1, len(lives))
            yield Note("signed")
            yield Send(BOB, message)

        return story()

    world = make_world(start, wait(3), on_note=on_note)
    world.run()
    assert lives == ["life", "life"]
    (delivery,) = world.results[BOB]
    assert delivery.message.body == encode(Seal((1).to_bytes(32, "big")))


def test_a_story_may_crash_itself_while_it_runs() -> None:
    """As a filter on effects does that ends its peer at a chosen place."""
    closed: list[bool] = []

    def story() -> Story:
        try:
            yield Send(BOB, pull(1))
            world.crash(ALICE, lost=0.0)
            yield Send(BOB, pull(2))
            yield Send(BOB, pull(3))
        finally:
            closed.append(True)

    world = make_world(story(), wait(3))
    world.run()
    assert numbers(world.results[BOB]) == [1]
    assert closed == [True]
    assert not world.is_up(ALICE)


def test_a_route_may_crash_the_sender() -> None:
    def route(now: float, sender: bytes, receiver: bytes, message: Message) -> float | None:
        world.crash(ALICE)
        return 0.1

    world = make_world(send_every(1.0, 5, (BOB,)), wait(9), links=Links(route=route))
    world.run()
    assert numbers(world.results[BOB]) == [0]


# ---- Stories that go wrong


def test_a_story_that_raises_is_named() -> None:
    def story() -> Story:
        yield Receive(1.5)
        raise ZeroDivisionError("a bug")

    world = make_world(story(), seed=77)
    with pytest.raises(StoryFailed, match=rf"{ALICE[:4].hex()} at 1\.5.* seed 77: ZeroDivisionError") as caught:
        world.run()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.key, caught.value.time, caught.value.seed) == (ALICE, 1.5, 77)


def test_what_is_no_effect_is_refused() -> None:
    def story() -> Any:
        yield "hello"

    with pytest.raises(StoryFailed, match="'hello' is no effect"):
        make_world(story()).run()


def test_only_a_gradient_is_begun_and_it_is_only_begun() -> None:
    def story(effect: Any) -> Any:
        yield effect

    with pytest.raises(StoryFailed, match="no work"):
        make_world(story(Begin(ReadState(0)))).run()  # type: ignore[arg-type]
    with pytest.raises(StoryFailed, match="no effect"):
        make_world(story(ComputeGradient(0, b""))).run()


def test_a_story_that_never_waits_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "_EFFECTS_AT_ONE_INSTANT", 1000)

    def story() -> Story:
        while True:
            yield Receive(0.0)

    with pytest.raises(StoryFailed, match="never waits"):
        make_world(story()).run()


def test_a_checker_that_objects_is_not_blamed_on_the_story() -> None:
    def story() -> Story:
        try:
            yield Note("wrong")
        except AssertionError:
            return "hidden"

    def object_to(key: bytes, event: Any) -> None:
        raise AssertionError(event)

    with pytest.raises(AssertionError, match="wrong"):
        make_world(story(), on_note=object_to).run()


def test_a_key_is_added_once_and_by_its_own_signer() -> None:
    world = make_world(wait(1))
    with pytest.raises(ValueError, match="already"):
        add(world, SIGNERS[0], wait(1))
    with pytest.raises(ValueError, match="signer"):
        world.add(BOB, SIGNERS[2], None, lambda disk: wait(1))


def test_notes_are_kept_and_passed_on() -> None:
    def story() -> Story:
        yield Receive(1.0)
        yield Note({"what": "banned"})

    seen: list[Any] = []
    for keep in (True, False):
        world = make_world(story(), on_note=lambda key, event: seen.append((key, event)), keep_notes=keep)
        world.run()
        assert world.notes == [(1.0, ALICE, {"what": "banned"})] * keep
    assert seen == [(ALICE, {"what": "banned"})] * 2


# ---- Bytes

SEALED = seal(SIGNERS[0], RUN, 3, 1, 0, Phase.SEAL, PREVIOUS, Seal(bytes(32)))
LATE = seal(SIGNERS[0], RUN, 3, 1, 0, Phase.SEAL, PREVIOUS, Timeout((BOB,), 0, None))
KINDS: dict[str, tuple[Message, int]] = {
    "SEAL": (SEALED, 0),
    "timeout": (LATE, 0),
    "partchunk": (PartChunk(1, 0, ALICE, 3, (bytes(32),), 500, 0, bytes(300)), 300),
    "aggregatechunk": (AggregateChunk(1, 0, 3, 500, 0, bytes(200)), 200),
    "statechunk": (StateChunk(1, 500, 0, bytes(100)), 100),
    "pullstate": (PullState(1, 0), 0),
}


def say_all(to: tuple[bytes, ...]) -> Story:
    for message, _ in KINDS.values():
        yield Broadcast(to, message)


@pytest.mark.parametrize("wire", [False, True], ids=["by reference", "as bytes"])
def test_traffic_is_the_encoded_bytes(wire: bool) -> None:
    world = make_world(say_all((BOB, CAROL, DAVE)), wait(3), wait(3), wait(3), wire=wire, links=Links(duplicate=0.5))
    world.run()
    assert set(world.traffic) == set(KINDS)
    for kind, (message, payload) in KINDS.items():
        size = len(encode_frame(message))
        assert world.traffic[kind] == Count(3, 3 * payload, 3 * (size - payload))
    total = world.traffic.total
    assert total.messages == 18
    assert total.payload + total.rest == 3 * sum(len(encode_frame(message)) for message, _ in KINDS.values())
    assert {delivery.message for delivery in world.results[BOB]} == {message for message, _ in KINDS.values()}


def test_counting_can_be_switched_off() -> None:
    world = make_world(say_all((BOB,)), wait(3), count=False, trace=False)
    world.run()
    assert world.traffic == {}
    assert len(world.results[BOB]) == len(KINDS)


@pytest.mark.parametrize(
    "options", [{}, {"wire": True}, {"count": False, "trace": False}], ids=["counted", "wire", "not counted"]
)
@pytest.mark.parametrize(
    "message", [Manifest(bytes(MAX_FRAME)), StateChunk(1, MAX_FRAME, 0, bytes(MAX_FRAME))], ids=["manifest", "chunk"]
)
def test_a_message_longer_than_a_frame_is_dropped_and_noted(message: Message, options: dict[str, bool]) -> None:
    def story() -> Story:
        yield Send(BOB, message)
        yield Send(BOB, pull(1))

    world = make_world(story(), wait(3), **options)
    world.run()
    assert numbers(world.results[BOB]) == [1]
    assert world.notes == [(0.0, ALICE, Oversize(type(message).__name__.lower(), len(encode(message))))]


def test_messages_travel_by_reference_unless_as_bytes() -> None:
    for wire in (False, True):
        world = make_world(say_all((BOB,)), wait(3), wire=wire)
        world.run()
        for delivery in world.results[BOB]:
            sent = next(message for message, _ in KINDS.values() if message == delivery.message)
            assert (sent is delivery.message) is not wire


FRAME = encode_frame(PullManifest())
LONG_WINDED = b"\xdc\x00\x01" + encode(PullManifest())[1:]  # an array of one in three bytes instead of one
NOISE = {
    "a frame of noise": b"\x00\x00\x00\x03\xff\x00\xff",
    "an empty frame": bytes(4),
    "an endless frame": b"\xff\xff\xff\xff",
    "not canonical": len(LONG_WINDED).to_bytes(4, "big") + LONG_WINDED,
}


@pytest.mark.parametrize("raw", NOISE.values(), ids=NOISE)
def test_garbage_is_dropped_and_counted(raw: bytes) -> None:
    world = make_world(wait(9), wait(9), wire=True, links=Links(delta=0.1))
    world.inject(ALICE, BOB, raw)
    world.at(1.0, lambda: world.inject(ALICE, BOB, FRAME))
    world.at(1.0, lambda: world.inject(CAROL, BOB, FRAME))
    add(world, SIGNERS[2], wait(9))
    world.run()
    assert world.malformed == 1
    ((_, key, event),) = world.notes
    assert (key, event.sender) == (BOB, ALICE)
    assert isinstance(event, Garbage)
    assert {(delivery.sender, delivery.message) for delivery in world.results[BOB]} == {
        (ALICE, PullManifest()),
        (CAROL, PullManifest()),
    }


def test_frames_may_come_in_pieces_or_together() -> None:
    world = make_world(wait(9), wait(9), wire=True, links=Links(delta=0.1))
    world.at(1.0, lambda: world.inject(ALICE, BOB, FRAME + FRAME + FRAME[:5]))
    world.at(2.0, lambda: world.inject(ALICE, BOB, FRAME[5:]))
    world.run()
    assert [math.floor(delivery.now) for delivery in world.results[BOB]] == [1, 1, 2]
    assert world.malformed == 0


def test_what_the_schema_refuses_does_not_pass_as_bytes() -> None:
    def story() -> Story:
        yield Send(BOB, PullState(-1, 0))
        yield Send(BOB, PullState(1, 0))

    world = make_world(story(), wait(3), wire=True)
    world.run()
    assert [delivery.message for delivery in world.results[BOB]] == [PullState(1, 0)]
    assert world.malformed == 1


def test_raw_bytes_need_a_wire() -> None:
    with pytest.raises(ValueError, match="wire"):
        make_world(wait(1), wait(1)).inject(ALICE, BOB, b"")
