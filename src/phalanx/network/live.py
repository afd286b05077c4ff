"""Drives one peer in real time: the same story as in the simulator, with a clock, a disk, threads and a transport.

The story runs in the thread that calls :meth:`Driver.run`. Gradients are computed in a thread of their own, and the
transport has its own as well; what they have to say waits in the inbox. Small messages are taken out of it before
chunks: no agreed message waits behind a gradient.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Condition
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from phalanx.core.crypto import Signer
from phalanx.core.effects import (
    AdoptState,
    Apply,
    Begin,
    Broadcast,
    Delivery,
    DrawSecret,
    Effect,
    Finished,
    Foresee,
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
from phalanx.core.messages import Message
from phalanx.network.journal import Journal
from phalanx.network.machine import COMPUTATIONS, Machine
from phalanx.network.traffic import CHUNKS

_LONGEST_WAIT = 0.5
"""Seconds: a signal handler may wake the story in the very moment before it falls asleep, and would not be heard."""
_COST = 512
"""Bytes that a message takes beside its data: one without any takes room as well."""
_SMALL_ROOM = 1 << 26
"""Bytes of one sender's small messages that may wait: more than its quota lets through at once."""
_Item: TypeAlias = tuple[bytes | None, Message | Finished | Leave]


class Sender(Protocol):
    """What a driver needs of a transport."""

    def send(self, to: Iterable[bytes], message: Message) -> None: ...

    def resume(self) -> None:
        """Chunks are welcome again."""
        ...


class LiveMachine(Machine, Protocol):
    """A machine whose gradients can be computed beside everything else."""

    def prepare_gradient(self, step: int, seed: bytes) -> Callable[[], Tensor] | None: ...


class Inbox:
    """What waits for the story. Any thread may put something in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._small: deque[tuple[_Item, int]] = deque()
        self._of_each: Counter[bytes] = Counter()
        self._chunks: deque[_Item] = deque()
        self._calls: deque[Callable[[], object]] = deque()
        self._bytes = 0
        self._full = False
        self._changed = Condition()
        self.awaited: set[bytes] = set()
        """Of these, who has not sent anything yet."""

    def put(self, sender: bytes | None, message: Message | Finished | Leave, size: int = 0) -> bool:
        """Take something in; whether there is room for more chunks.

        ``size`` is what a small message from outside took on its way. Whoever sends more of them than we get round to
        loses some, as the network may lose any.
        """
        with self._changed:
            if sender is not None:
                self.awaited.discard(sender)
            if isinstance(message, CHUNKS):
                self._chunks.append((sender, message))
                self._bytes += len(message.data) + _COST
                self._full = self._full or self._bytes >= self._most
            elif sender is None or not size:
                self._small.append(((sender, message), 0))
            elif self._of_each[sender] < _SMALL_ROOM:
                self._of_each[sender] += size + _COST
                self._small.append(((sender, message), size + _COST))
            self._changed.notify()
            return not self._full

    def call(self, function: Callable[[], object]) -> None:
        """Have this done in the story's thread, between two of its effects."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def take(self, until: float) -> tuple[_Item | Callable[[], object] | None, bool]:
        """The next thing, or None when the time comes first; and whether chunks have become welcome again."""
        with self._changed:
            while not (self._calls or self._small or self._chunks):
                left = until - time.monotonic()
                if left <= 0:
                    return None, False
                self._changed.wait(min(left, _LONGEST_WAIT))
            if self._calls:
                return self._calls.popleft(), False
            if self._small:
                return self._take_small(), False
            item = self._chunks.popleft()
            self._bytes -= len(item[1].data) + _COST  # type: ignore[union-attr]
            drained = self._full and 2 * self._bytes <= self._most
            self._full = self._full and not drained
            return item, drained

    def _take_small(self) -> _Item:
        item, cost = self._small.popleft()
        if item[0] is not None and cost:
            self._of_each[item[0]] -= cost
            if not self._of_each[item[0]]:
                del self._of_each[item[0]]
        return item


class Driver:
    """One peer's effects, carried out. ``on_note`` hears what the story notes, in the story's thread."""

    def __init__(
        self,
        run: bytes,
        signer: Signer,
        machine: LiveMachine,
        journal: Journal,
        transport: Sender,
        on_note: Callable[[Any], None],
        inbox: Inbox,
    ) -> None:
        self._run, self._signer, self._machine, self._journal = run, signer, machine, journal
        self._transport, self._on_note, self._inbox = transport, on_note, inbox
        self._ticket = 0
        self._stopped = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradient")
        self._performers: dict[type, Callable[[Any], Any]] = {
            Receive: self._receive,
            Send: lambda effect: self._dispatch((effect.to,), effect.message),
            Broadcast: lambda effect: self._dispatch(effect.to, effect.message),
            Sign: lambda effect: journal.sign(signer, run, effect),
            DrawSecret: lambda effect: journal.draw_secret(effect.height),
            Begin: self._begin,
            Foresee: self._foresee,
            Keep: lambda effect: journal.keep(effect.view, effect.height),
            KeepMessages: journal.keep_messages,
            Note: lambda effect: on_note(effect.event),
        }
        self._performers |= {kind: partial(self._compute, compute) for kind, compute in COMPUTATIONS.items()}
        self._foreseen: dict[tuple[int, bytes], Future[Tensor]] = {}

    def run(self, story: Story) -> Any:
        """Follow a story to its end, and return what it returns; None if it was stopped before."""
        value: Any = None
        resume: Callable[[Any], Effect] = story.send
        try:
            while not self._stopped:
                effect = resume(value)
                try:
                    resume, value = story.send, self._performers[type(effect)](effect)
                except Exception as error:  # the story hears of it where it asked: the traceback shows the place
                    if self._stopped:
                        raise
                    resume, value = story.throw, error
        except StopIteration as end:
            return end.value
        finally:
            try:
                story.close()
            finally:
                self._worker.shutdown(cancel_futures=True)
        return None

    def stop(self) -> None:
        """End the story after the effect at hand."""
        self._stopped = True
        self._inbox.call(lambda: None)

    def work(self, function: Callable[[], Any], then: Callable[[Any], object]) -> None:
        """Compute something in the gradients' thread, then do something with it in the story's."""
        self._follow(self._worker.submit(function), then)

    def _follow(self, future: Future[Any], then: Callable[[Any], object]) -> None:
        def finish(done: Future[Any]) -> None:
            if not done.cancelled():
                self._inbox.call(lambda: then(done.result()))  # what went wrong is raised in the story's thread

        future.add_done_callback(finish)

    # ---- Effects

    def _receive(self, effect: Receive) -> Delivery:
        while not self._stopped:
            item, drained = self._inbox.take(effect.until)
            if drained:
                self._transport.resume()
            if callable(item):
                item()
            elif item is not None:
                return Delivery(time.monotonic(), *item)
            else:
                break
        return Delivery(time.monotonic(), None, None)

    def _dispatch(self, to: tuple[bytes, ...], message: Message) -> None:
        me = self._signer.key
        if me in to:
            self._inbox.put(me, message)
            to = tuple(key for key in to if key != me)
        if to:
            self._transport.send(to, message)

    def _begin(self, effect: Begin) -> int:
        self._ticket += 1
        ticket, place = self._ticket, (effect.work.step, effect.work.seed)
        future = self._foreseen.pop(place, None)
        if future is None:  # what is asked for goes before what is only foreseen
            waiting = [foreseen for foreseen, begun in self._foreseen.items() if begun.cancel()]
            for foreseen in waiting:
                del self._foreseen[foreseen]
            future = self._start(*place)
            self._start_foreseen(waiting)
        if future is None:
            self._inbox.put(None, Finished(ticket, None))
        else:
            self._follow(future, lambda value: self._inbox.put(None, Finished(ticket, value)))
        return ticket

    def _foresee(self, effect: Foresee) -> None:
        """Start on what will probably be asked for, and on nothing else that was foreseen before."""
        self._drop_foreseen(0)
        self._start_foreseen([(work.step, work.seed) for work in effect.find()])

    def _start_foreseen(self, places: Sequence[tuple[int, bytes]]) -> None:
        for place in places:
            future = self._start(*place)
            if future is not None:
                self._foreseen[place] = future

    def _start(self, step: int, seed: bytes) -> Future[Tensor] | None:
        compute = self._machine.prepare_gradient(step, seed)
        return self._worker.submit(compute) if compute is not None else None

    def _compute(self, compute: Callable[[Machine, Any], Any], effect: Any) -> Any:
        """Carry out a computation. If it changes a state, what was foreseen from that state is of no use."""
        if isinstance(effect, Apply | Undo):
            self._drop_foreseen(effect.step + 1)
        elif isinstance(effect, AdoptState):
            self._drop_foreseen(0)
        return compute(self._machine, effect)

    def _drop_foreseen(self, step: int) -> None:
        """Forget gradients at the states before this step and later ones."""
        for place in [place for place in self._foreseen if place[0] >= step]:
            self._foreseen.pop(place).cancel()
