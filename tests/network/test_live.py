"""Stories in real time: what waits for them, what they ask for, how they end. Then whole peers with real signatures."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.core.codec import decode_message, encode
from phalanx.core.config import Config
from phalanx.core.crypto import Domain, Signer
from phalanx.core.effects import (
    Apply,
    Begin,
    Broadcast,
    ComputeGradient,
    DrawSecret,
    Finished,
    Foresee,
    HashState,
    HasState,
    Heard,
    Keep,
    KeepMessages,
    Leave,
    Note,
    Receive,
    Send,
    Sign,
    Story,
    Undo,
)
from phalanx.core.envelope import Examiner, compute_message_digest
from phalanx.core.errors import WriteFailed
from phalanx.core.events import Banned, RunFinished, StepFinished
from phalanx.core.life import make_peer, run_made_peer
from phalanx.core.messages import AggregateChunk, Message, Phase, PullAggregate, Seal, Signed, StateChunk
from phalanx.network.ideal import make_signers
from phalanx.network.journal import Journal
from phalanx.network.live import Driver, Inbox
from phalanx.simulation.machine import Bowl
from phalanx.simulation.swarm import Setup, make_config

RUN = bytes(range(32))
ALICE, BOB, CAROL = make_signers(3, 0, ideal=True)[0]
SOON = -math.inf
PATIENCE = 300.0
"""Seconds after which a test says that something hangs."""


def pull(number: int) -> Message:
    """A short message that carries a number."""
    return PullAggregate(number, 0, 0, 0)


def chunk(number: int, size: int = 1000) -> Message:
    return AggregateChunk(number, 0, 0, size, 0, bytes(size))


class Slow(Bowl):
    """A machine whose gradients can be watched, held up and broken."""

    def __init__(self) -> None:
        super().__init__(4)
        self.go = Event()
        self.go.set()
        self.threads: list[Thread] = []
        self.computed: list[tuple[int, bytes]] = []
        self.error: Exception | None = None

    def prepare_gradient(self, step: int, seed: bytes) -> Callable[[], Tensor] | None:
        if step not in self.states:
            return None
        state = self.states[step]

        def compute() -> Tensor:
            self.threads.append(current_thread())
            assert self.go.wait(PATIENCE)
            self.computed.append((step, seed))
            if self.error is not None:
                raise self.error
            return state + len(seed)

        return compute


class Wire:
    """Takes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[bytes, ...], Message]] = []
        self.resumed = 0

    def send(self, to: Iterable[bytes], message: Message) -> None:
        self.sent.append((tuple(to), message))

    def resume(self) -> None:
        self.resumed += 1


class Stage:
    """A driver for Alice and everything around it."""

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / "journal.bin", RUN)
        self.machine, self.wire, self.inbox = Slow(), Wire(), Inbox(20_000)
        self.notes: list[Any] = []
        self.driver = Driver(RUN, ALICE, self.machine, self.journal, self.wire, self.notes.append, self.inbox)
        self.result: Any = None

    def begin(self, story: Story) -> Thread:
        """Let a story run in a thread of its own."""

        def run() -> None:
            self.result = self.driver.run(story)

        thread = Thread(target=run, name="story")
        thread.start()
        return thread


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    before = set(threading.enumerate())
    stage = Stage(tmp_path)
    yield stage
    stage.machine.go.set()
    stage.journal.close()
    assert set(threading.enumerate()) <= before, "threads are left behind"


def join(thread: Thread) -> None:
    thread.join(PATIENCE)
    assert not thread.is_alive()


def take_all(inbox: Inbox) -> list[Any]:
    taken = []
    while (item := inbox.take(SOON)[0]) is not None:
        taken.append(item)
    return taken


# ---- The inbox


def test_small_messages_overtake_chunks_and_keep_their_order() -> None:
    inbox = Inbox(1 << 20)
    for number in range(3):
        inbox.put(BOB.key, chunk(number))
        inbox.put(CAROL.key, pull(number))
    inbox.put(BOB.key, StateChunk(0, 1, 0, b"x"))
    inbox.put(None, Finished(1, None))
    small = [(CAROL.key, pull(number)) for number in range(3)] + [(None, Finished(1, None))]
    large = [(BOB.key, chunk(number)) for number in range(3)] + [(BOB.key, StateChunk(0, 1, 0, b"x"))]
    assert take_all(inbox) == small + large


def test_a_full_inbox_says_so_and_later_once_that_there_is_room() -> None:
    inbox = Inbox(10_000)
    rooms = [inbox.put(BOB.key, chunk(number)) for number in range(9)]
    assert rooms[0]
    assert not rooms[-1]
    assert rooms == sorted(rooms, reverse=True), "full stays full"
    assert not inbox.put(BOB.key, pull(0)), "a small message is taken, and chunks are still unwelcome"
    drained = [inbox.take(SOON)[1] for _ in range(10)]
    assert drained.count(True) == 1
    assert drained.index(True) > 4, "not before half of it is gone"
    assert inbox.put(BOB.key, chunk(0))
    assert inbox.take(SOON)[1] is False, "it was not full"


def test_one_chunk_may_be_larger_than_the_inbox() -> None:
    inbox = Inbox(100)
    assert not inbox.put(BOB.key, chunk(0))
    assert inbox.take(SOON)[1]


def test_chunks_without_data_take_room_too() -> None:
    inbox = Inbox(10_000)
    assert not all(inbox.put(BOB.key, chunk(number, 0)) for number in range(100))
    drained = [inbox.take(SOON)[1] for _ in range(100)]
    assert drained.count(True) == 1


def test_many_small_messages_are_never_refused() -> None:
    inbox = Inbox(100)
    assert all(inbox.put(BOB.key, pull(number)) for number in range(1000))


def test_one_sender_cannot_fill_the_memory_with_small_messages() -> None:
    """While the story is busy nothing is taken out: what waits of one sender is bounded, and others are not touched."""
    inbox, size = Inbox(100), 1 << 20
    for number in range(200):
        inbox.put(BOB.key, pull(number), size)
    inbox.put(CAROL.key, pull(0), size)
    inbox.put(ALICE.key, pull(0))
    inbox.put(None, Finished(1, None))
    taken = take_all(inbox)
    assert 60 <= len([item for item in taken if item[0] == BOB.key]) <= 65
    assert taken[-3:] == [(CAROL.key, pull(0)), (ALICE.key, pull(0)), (None, Finished(1, None))]
    inbox.put(BOB.key, pull(200), size)
    assert take_all(inbox) == [(BOB.key, pull(200))], "there is room again"


def test_who_was_awaited_is_not_once_it_has_said_anything() -> None:
    inbox = Inbox(100)
    inbox.awaited = {BOB.key, CAROL.key}
    inbox.put(BOB.key, chunk(0))
    inbox.put(ALICE.key, pull(0))
    assert inbox.awaited == {CAROL.key}


def test_nothing_is_lost_between_threads() -> None:
    inbox, count = Inbox(1 << 20), 500

    def put(sender: bytes, make: Callable[[int], Message]) -> None:
        for number in range(count):
            inbox.put(sender, make(number))

    threads = [Thread(target=put, args=(BOB.key, pull)), Thread(target=put, args=(CAROL.key, lambda n: chunk(n, 1)))]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE
    taken: list[Any] = [inbox.take(until)[0] for _ in range(2 * count)]
    for thread in threads:
        join(thread)
    for sender in (BOB.key, CAROL.key):
        assert [message.step for key, message in taken if key == sender] == list(range(count))


# ---- What a story gets


def test_a_story_gets_what_arrives_and_when(stage: Stage) -> None:
    def story() -> Story:
        first = yield Receive(math.inf)
        stage.inbox.put(None, Leave())
        second = yield Receive(first.now + PATIENCE)
        third = yield Receive(second.now + 0.01)
        return first, second, third

    before = time.monotonic()
    stage.inbox.put(BOB.key, pull(1))
    first, second, third = stage.driver.run(story())
    assert (first.sender, first.message) == (BOB.key, pull(1))
    assert (second.sender, second.message) == (None, Leave())
    assert (third.sender, third.message) == (None, None)
    assert before <= first.now <= second.now <= third.now - 0.01 <= time.monotonic()


def test_a_wait_that_is_over_already_still_takes_what_is_there(stage: Stage) -> None:
    def story() -> Story:
        return (yield Receive(SOON)).message, (yield Receive(SOON)).message

    stage.inbox.put(BOB.key, pull(1))
    assert stage.driver.run(story()) == (pull(1), None)


def test_a_waiting_story_wakes_when_something_comes(stage: Stage) -> None:
    waits = Event()

    def story() -> Story:
        yield Note("here")
        waits.set()
        return (yield Receive(math.inf)).message

    thread = stage.begin(story())
    assert waits.wait(PATIENCE)
    stage.inbox.put(BOB.key, chunk(3))
    join(thread)
    assert stage.result == chunk(3)


def test_messages_to_oneself_need_no_transport(stage: Stage) -> None:
    def story() -> Story:
        yield Broadcast((BOB.key, ALICE.key, CAROL.key), pull(1))
        yield Send(ALICE.key, pull(2))
        yield Send(BOB.key, pull(3))
        yield Broadcast((ALICE.key,), pull(4))
        yield Broadcast((), pull(5))
        got = []
        while (delivery := (yield Receive(SOON))).message is not None:
            got.append((delivery.sender, delivery.message.step))
        return got

    assert stage.driver.run(story()) == [(ALICE.key, 1), (ALICE.key, 2), (ALICE.key, 4)]
    assert stage.wire.sent == [((BOB.key, CAROL.key), pull(1)), ((BOB.key,), pull(3))]


def test_a_drained_inbox_resumes_the_transport_once(stage: Stage) -> None:
    def story() -> Story:
        while (yield Receive(SOON)).message is not None:
            pass
        yield Note("empty")

    full = [stage.inbox.put(BOB.key, chunk(number)) for number in range(30)]
    assert not full[-1]
    stage.driver.run(story())
    assert stage.wire.resumed == 1


def test_signatures_secrets_views_and_notes_reach_journal_and_listener(stage: Stage, tmp_path: Path) -> None:
    def story(body: Seal) -> Story:
        message = yield Sign(7, 1, 0, Phase.SEAL, bytes(32), body)
        secret = yield DrawSecret(7)
        yield Keep(b"a view", 7)
        yield KeepMessages(7, Heard.MESSAGES, (message,))
        yield Note(("an event", body))
        return message, secret

    message, secret = stage.driver.run(story(Seal(bytes(32))))
    assert stage.notes == [("an event", Seal(bytes(32)))]
    assert stage.journal.view == b"a view"
    assert stage.journal.messages == [message]
    stage.journal.close()
    again = Stage(tmp_path)
    assert again.driver.run(story(Seal(RUN))) == (message, secret)
    again.journal.close()


# ---- Computing


def seek(step: int, seed: bytes) -> Story:
    """Have a gradient computed; it, and what was delivered before it."""
    ticket = yield Begin(ComputeGradient(step, seed))
    before = []
    while True:
        message = (yield Receive(math.inf)).message
        if isinstance(message, Finished) and message.ticket == ticket:
            return message.value, before
        before.append(message)


def test_a_gradient_is_computed_elsewhere_while_messages_come(stage: Stage) -> None:
    stage.machine.go.clear()

    def story() -> Story:
        ticket = yield Begin(ComputeGradient(0, b"abc"))
        first = yield Receive(math.inf)  # it cannot be the gradient
        stage.machine.go.set()
        second = yield Receive(math.inf)
        return ticket, first.message, second.message, current_thread()

    stage.inbox.put(BOB.key, pull(1))
    ticket, first, second, mine = stage.driver.run(story())
    assert first == pull(1)
    assert second.ticket == ticket
    assert torch.equal(second.value, stage.machine.states[0] + 3)
    assert mine not in stage.machine.threads
    assert len(stage.machine.threads) == 1


def test_each_gradient_has_its_ticket(stage: Stage) -> None:
    def story() -> Story:
        tickets = []
        for length in range(5):
            tickets.append((yield Begin(ComputeGradient(0, bytes(length)))))
        got = {}
        for _ in tickets:
            message = (yield Receive(math.inf)).message
            got[message.ticket] = float(message.value[0] - stage.machine.states[0][0])
        return [got[ticket] for ticket in tickets]

    assert stage.driver.run(story()) == pytest.approx([0, 1, 2, 3, 4])


def test_a_gradient_of_a_state_that_is_not_here_is_none(stage: Stage) -> None:
    assert stage.driver.run(seek(9, b"")) == (None, [])


def test_other_computations_are_done_at_once(stage: Stage) -> None:
    def story() -> Story:
        yield Apply(0, torch.ones(4))
        digest = yield HashState(1)
        found = [(yield HasState(1, digest))]
        yield Undo(0)
        found.append((yield HasState(1, digest)))
        return found

    assert stage.driver.run(story()) == [True, False]


def foresee(*works: tuple[int, bytes]) -> Foresee:
    return Foresee(lambda: [ComputeGradient(*work) for work in works])


def test_what_was_foreseen_is_computed_once(stage: Stage) -> None:
    def story() -> Story:
        yield foresee((0, b"a"), (0, b"bc"), (5, b"no such state"))
        first, _ = yield from seek(0, b"bc")
        second, _ = yield from seek(0, b"a")
        third, _ = yield from seek(0, b"other")
        return [float(value[0] + 1) for value in (first, second, third)]

    assert stage.driver.run(story()) == [2, 1, 5]
    assert stage.machine.computed == [(0, b"a"), (0, b"bc"), (0, b"other")]


def test_what_is_asked_for_goes_before_what_is_only_foreseen(stage: Stage) -> None:
    """A vote allows for one gradient that is being made already, not for all that may be wanted in the next step."""
    stage.machine.go.clear()

    def story() -> Story:
        yield foresee((0, b"a"), (0, b"bc"), (0, b"def"))
        ticket = yield Begin(ComputeGradient(0, b"vote"))
        stage.machine.go.set()
        assert (yield Receive(math.inf)).message.ticket == ticket
        for seed in (b"a", b"bc", b"def"):
            yield from seek(0, seed)

    stage.driver.run(story())
    assert stage.machine.computed in (
        [(0, seed) for seed in (b"a", b"vote", b"bc", b"def")],
        [(0, seed) for seed in (b"vote", b"a", b"bc", b"def")],  # nothing had begun
    )


@pytest.mark.parametrize("change", [Apply(0, 2 * torch.ones(4)), Undo(0)], ids=["applied anew", "undone"])
def test_what_was_foreseen_at_another_state_is_dropped(stage: Stage, change: Apply | Undo) -> None:
    def story() -> Story:
        yield Apply(0, torch.ones(4))
        yield foresee((1, b"a"), (0, b"a"))
        yield change
        later, _ = yield from seek(1, b"a")
        earlier, _ = yield from seek(0, b"a")
        return later, earlier

    later, earlier = stage.driver.run(story())
    assert torch.equal(earlier, stage.machine.states[0] + 1)
    if isinstance(change, Undo):
        assert later is None
    else:
        assert torch.equal(later, stage.machine.states[1] + 1)


# ---- What goes wrong


class Broken(Exception):  # noqa: N818
    pass


def catch(effect: Any) -> Story:
    """What is raised where an effect is asked for."""
    try:
        yield effect
    except Broken as error:
        return error
    return None


def test_an_error_in_a_gradient_is_raised_in_the_story(stage: Stage) -> None:
    stage.machine.error = Broken()

    def story() -> Story:
        yield Begin(ComputeGradient(0, b""))
        first = yield from catch(Receive(math.inf))
        stage.machine.error = None
        value, _ = yield from seek(0, b"ab")
        return first, value

    first, value = stage.driver.run(story())
    assert isinstance(first, Broken)
    assert torch.equal(value, stage.machine.states[0] + 2)


def test_an_error_in_an_effect_is_raised_in_the_story(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*anything: Any) -> None:
        raise Broken

    monkeypatch.setattr(stage.machine, "undo", fail)
    monkeypatch.setattr(stage.wire, "send", fail)
    monkeypatch.setattr(stage.machine, "prepare_gradient", fail)

    def story() -> Story:
        found = []
        for effect in (Undo(0), Send(BOB.key, pull(1)), Begin(ComputeGradient(0, b"")), Note("fine")):
            found.append((yield from catch(effect)))
        return [type(error) for error in found]

    assert stage.driver.run(story()) == [Broken, Broken, Broken, type(None)]
    assert stage.notes == ["fine"]


def test_what_a_story_does_not_catch_ends_it(stage: Stage) -> None:
    ended = []

    def story() -> Story:
        try:
            yield Undo(0)
            yield Begin(ComputeGradient(0, b""))
            yield Receive(math.inf)
        finally:
            ended.append(True)

    stage.machine.error = Broken()
    with pytest.raises(Broken):
        stage.driver.run(story())
    assert ended == [True]


def test_nothing_is_sent_that_the_disk_did_not_take(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    def story() -> Story:
        while True:
            try:
                message = yield Sign(7, 1, 0, Phase.SEAL, bytes(32), Seal(bytes(32)))
            except WriteFailed:  # no story does that; it must not help either
                message = yield Sign(7, 1, 0, Phase.SEAL, bytes(32), Seal(RUN))
            yield Broadcast((BOB.key,), message)

    monkeypatch.setattr("os.fdatasync", fail)
    with pytest.raises(WriteFailed):
        stage.driver.run(story())
    assert stage.wire.sent == []


# ---- How a story ends


def test_stop_ends_and_closes_a_waiting_story(stage: Stage) -> None:
    waits, closed = Event(), Event()

    def story() -> Story:
        try:
            waits.set()
            yield Receive(math.inf)
            stage.notes.append("went on")
        except GeneratorExit:
            closed.set()
            raise

    thread = stage.begin(story())
    assert waits.wait(PATIENCE)
    stage.driver.stop()
    join(thread)
    assert closed.is_set()
    assert stage.result is None
    assert stage.notes == []


def test_stop_ends_a_story_that_never_waits(stage: Stage) -> None:
    def story() -> Story:
        while True:
            yield Note(len(stage.notes))

    thread = stage.begin(story())
    stage.driver.stop()
    join(thread)


def test_a_story_may_stop_itself(stage: Stage) -> None:
    def story() -> Story:
        yield Note(1)
        stage.driver.stop()
        yield Note(2)
        yield Note(3)

    assert stage.driver.run(story()) is None
    assert stage.notes == [1, 2]


def test_stop_before_the_start_leaves_nothing_to_do(stage: Stage) -> None:
    def story() -> Story:
        yield Note(1)

    stage.driver.stop()
    assert stage.driver.run(story()) is None
    assert stage.notes == []


def test_stop_waits_for_the_gradient_at_hand_and_drops_the_others(stage: Stage) -> None:
    stage.machine.go.clear()
    began = Event()

    def story() -> Story:
        for length in range(5):
            yield Begin(ComputeGradient(0, bytes(length)))
        began.set()
        yield Receive(math.inf)

    thread = stage.begin(story())
    assert began.wait(PATIENCE)
    while not stage.machine.threads:
        time.sleep(0.001)
    stage.driver.stop()
    while not stage.driver._worker._shutdown:  # the story is over, its thread waits for the one that runs
        time.sleep(0.001)
    stage.machine.go.set()
    join(thread)
    assert len(stage.machine.computed) == 1


# ---- Work for others


def test_calls_are_made_in_the_storys_thread(stage: Stage) -> None:
    threads: list[Thread] = []

    def story() -> Story:
        delivery = yield Receive(math.inf)
        return delivery.message, current_thread()

    def call() -> None:
        threads.append(current_thread())
        stage.inbox.put(BOB.key, pull(1))

    other = Thread(target=stage.inbox.call, args=(call,))
    other.start()
    message, mine = stage.driver.run(story())
    join(other)
    assert message == pull(1)
    assert threads == [mine]


def test_work_is_done_in_the_gradients_thread_and_used_in_the_storys(stage: Stage) -> None:
    used: list[tuple[Any, Thread]] = []

    def use(value: Any) -> None:
        used.append((value, current_thread()))
        stage.inbox.put(None, Leave())

    def story() -> Story:
        yield from seek(0, b"")
        stage.driver.work(current_thread, use)
        yield Receive(math.inf)
        return current_thread()

    mine = stage.driver.run(story())
    assert used == [(stage.machine.threads[0], mine)]
    assert mine is not stage.machine.threads[0]


def test_work_that_fails_is_raised_in_the_story(stage: Stage) -> None:
    def fail() -> None:
        raise Broken

    def story() -> Story:
        stage.driver.work(fail, stage.notes.append)
        stage.inbox.call(lambda: None)
        return (yield from catch(Receive(math.inf)))

    assert isinstance(stage.driver.run(story()), Broken)
    assert stage.notes == []


# ---- Whole peers


class LiveBowl(Bowl):
    def prepare_gradient(self, step: int, seed: bytes) -> Callable[[], Tensor] | None:
        if step not in self.states:
            return None
        still = Bowl(len(self.states[step]))
        still.states = {step: self.states[step]}
        return lambda: still.compute_gradient(step, seed)  # type: ignore[return-value]


class Town:
    """Peers with real signatures in threads of one process, and what an observer sees of them."""

    def __init__(self, folder: Path, count: int, **settings: Any) -> None:
        self.folder = folder
        self.signers, _ = make_signers(count, 1, ideal=False)
        keys = tuple(signer.key for signer in self.signers)
        self.config: Config = make_config(Setup(founders=count, settings=settings), keys, 1)
        self.inboxes = {key: Inbox(1 << 20) for key in keys}
        self.machines = {key: LiveBowl(self.config.size) for key in keys}
        self.drivers: dict[bytes, Driver] = {}
        self.finished: dict[bytes, Any] = {}
        self.steps: dict[bytes, list[int]] = {key: [] for key in keys}
        self.banned: list[Banned] = []
        self.failures: list[BaseException] = []
        self.said: dict[tuple[bytes, int], set[bytes]] = {}
        """All that was agreed upon, by sender and height: more than one is an equivocation."""
        self.on_send: Callable[[bytes, Message], None] = lambda sender, message: None
        self._lock, self._over = Lock(), Event()
        self._threads: list[Thread] = []

    def start(self, signer: Signer, returning: bool = False) -> None:
        thread = Thread(target=self._live, args=(signer, returning), name=f"peer {signer.key[:2].hex()}")
        self._threads.append(thread)
        thread.start()

    def wait(self) -> None:
        """Until all peers have come to the end, or one has failed."""
        came = self._over.wait(PATIENCE)
        for driver in list(self.drivers.values()):
            driver.stop()
        for thread in self._threads:
            join(thread)
        for failure in self.failures:
            raise failure
        assert came, f"only {len(self.finished)} peers came to the end: {self.steps}"

    def _live(self, signer: Signer, returning: bool) -> None:
        key = signer.key
        journal = Journal(self.folder / f"{key.hex()}.bin", self.config.run)
        try:
            peer = make_peer(self.config, key, Examiner(), journal.view, journal.messages)
            driver = Driver(
                self.config.run,
                signer,
                self.machines[key],
                journal,
                Street(self, key),
                lambda event: self._note(key, event),
                self.inboxes[key],
            )
            self.drivers[key] = driver
            driver.run(run_made_peer(peer, returning))
        except BaseException as failure:
            self.failures.append(failure)
            self._over.set()
        finally:
            journal.close()
            self.gone(signer)

    def gone(self, signer: Signer) -> None:
        """Called in a peer's last moment."""

    def _note(self, key: bytes, event: Any) -> None:
        with self._lock:
            if isinstance(event, StepFinished):
                self.steps[key].append(event.step)
            elif isinstance(event, Banned):
                self.banned.append(event)
                self._over.set()  # nobody here deserves that, and who is out does not come to the end
            elif isinstance(event, RunFinished):
                self.finished[key] = event.view
                if len(self.finished) == len(self.signers):
                    self._over.set()

    def carry(self, sender: bytes, to: Iterable[bytes], message: Message) -> None:
        if isinstance(message, Signed) and message.domain is Domain.AGREED:
            assert message.sender != sender or Examiner().examine(message) is not None
            with self._lock:
                self.said.setdefault((message.sender, message.height), set()).add(compute_message_digest(message))
        data = encode(message)
        for key in to:
            if key in self.inboxes:
                self.inboxes[key].put(sender, decode_message(data))
        self.on_send(sender, message)


class Street:
    """One peer's way to all others."""

    def __init__(self, town: Town, me: bytes) -> None:
        self._town, self._me = town, me

    def send(self, to: Iterable[bytes], message: Message) -> None:
        self._town.carry(self._me, to, message)

    def resume(self) -> None:
        pass


@contextmanager
def no_threads_left() -> Any:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


SETTINGS = {"size": 32, "steps": 4, "byzantine": 0, "validators": 1, "delta": 1.0, "tau": 10.0}


def check_agreement(town: Town) -> None:
    assert town.banned == []
    assert max(map(len, town.said.values())) == 1, "somebody signed two messages at one height"
    views = list(town.finished.values())
    assert len(views) == len(town.signers)
    assert len({view.digest for view in views}) == 1
    assert views[0].step == town.config.steps
    assert all(town.machines[key].has_state(view.step, view.state) for key, view in town.finished.items())


def test_four_peers_train_together_in_real_time(tmp_path: Path) -> None:
    town = Town(tmp_path, 4, **SETTINGS)
    with no_threads_left():
        for signer in town.signers:
            town.start(signer)
        town.wait()
    check_agreement(town)
    assert all(steps == [0, 1, 2, 3] for steps in town.steps.values())
    assert len(next(iter(town.finished.values())).roster) == 4


@pytest.mark.parametrize(
    ("phase", "memory"),
    [(Phase.COMMIT, "keeps its states"), (Phase.REPORT, "loses its states")],
    ids=["after COMMIT", "after REPORT, without its states"],
)
def test_a_peer_that_was_stopped_goes_on_from_its_journal(tmp_path: Path, phase: Phase, memory: str) -> None:
    """It is stopped in step 1, once its message of a phase is out, and begins anew with what its journal holds."""
    town = Town(tmp_path, 4, **SETTINGS)
    victim = town.signers[2]
    stopped = Event()

    def stop_once(sender: bytes, message: Message) -> None:
        if isinstance(message, Signed) and not stopped.is_set():
            is_it = (sender, message.sender, message.step, message.phase) == (victim.key, victim.key, 1, phase)
            if is_it:
                stopped.set()
                town.drivers[sender].stop()

    def come_back(signer: Signer) -> None:
        town.gone = lambda signer: None  # type: ignore[method-assign]
        assert signer is victim
        town.inboxes[victim.key] = Inbox(1 << 20)
        if memory == "loses its states":
            town.machines[victim.key] = LiveBowl(town.config.size)
        town.start(victim, returning=True)

    town.on_send, town.gone = stop_once, come_back  # type: ignore[method-assign]
    with no_threads_left():
        for signer in town.signers:
            town.start(signer)
        town.wait()
    assert stopped.is_set()
    check_agreement(town)
