"""Bad weather for a simulated swarm: machines that pause, lines that drop, messages that take too long.

A :class:`Weather` watches a swarm and lets its fronts happen: :class:`Stalls` cut peers off or let their processes
stand still, :class:`LateMessages` breaks ``delta`` for some messages. All choices come from the swarm's seed, so a seed
and the fronts are the whole weather. What ``delta`` no longer holds for, the swarm is told
(:meth:`Swarm.disturb`, ``Swarm.delta_broken``), so that the checkers go on asking for what they may ask for.

    weather = Weather(swarm, Stalls(rate=0.01, lengths=(10, 10)), clears=900)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, TypeAlias

import msgspec

from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Begin, Delivery, Finished, Receive, Story
from phalanx.core.events import StepFinished
from phalanx.core.messages import Message, Phase
from phalanx.network.simulated import USUAL
from phalanx.simulation.swarm import Swarm

_FASTEST = 1.001
"""How fast a local clock may run: whoever waits by it for a moment does not wake before it."""
_TICK = 1e-6
_STEP_MEMORY = 20
"""Steps whose shortest says how long a step takes in calm weather."""


class Kind(Enum):
    """What a stall does to a peer."""

    CUT = "cut"
    """The line is down: what the peer sends and what is sent to it arrives when the stall is over."""
    PAUSE = "pause"
    """The process stands still as well: the peer reads, computes and signs nothing, and its timers fire afterwards."""


class Moment(Enum):
    """When in a step a stall begins; a :class:`Phase` instead: as the peer signs its message of that phase."""

    BOUNDARY = "boundary"
    """As the first member finishes the step before."""
    ANYTIME = "anytime"
    """At a random moment of a step, each as likely as any other."""
    SCATTER = "scatter"
    """As the peer sends the first of its parts."""
    GATHER = "gather"
    """As the peer sends its aggregate."""
    SLOW_PATH = "slow path"
    """As the peer says that its deadline has passed."""


When: TypeAlias = Moment | Phase

_CHUNKS: dict[type, Moment] = {m.PartChunk: Moment.SCATTER, m.AggregateChunk: Moment.GATHER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalls:
    """Peers that are out for a while."""

    rate: float
    """The odds that a peer's stall is drawn in a step."""
    lengths: tuple[float, float]
    """From and to, in deltas."""
    when: tuple[When, ...] = (Moment.BOUNDARY,)
    """The moments of which each stall draws one."""
    kinds: tuple[Kind, ...] = (Kind.CUT,)
    group: int = 1
    """How many peers stall together, each time that a stall is drawn; one that is out already is left alone."""
    most: int | None = None
    """No stall begins while so many peers are out. None: no limit."""
    peers: tuple[bytes, ...] | None = None
    """Who may stall. None: the honest peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateMessages:
    """A share of all messages takes ``factor`` deltas."""

    share: float
    factor: float = 3.0


Front: TypeAlias = Stalls | LateMessages


@dataclass(frozen=True, slots=True)
class Stall:
    """What happened to one peer."""

    key: bytes
    step: int
    """How many steps were final."""
    begin: float
    end: float
    kind: Kind
    when: When


class Weather:
    """Lets fronts happen to a swarm, from now until ``clears`` steps are final (None: to the end).

    It is an observer of the swarm, and its links' route while something is held back.
    """

    def __init__(self, swarm: Swarm, *fronts: Front, clears: int | None = None) -> None:
        self.swarm, self.world, self.clears = swarm, swarm.world, clears
        self.stalls = tuple(front for front in fronts if isinstance(front, Stalls))
        self.late = tuple(front for front in fronts if isinstance(front, LateMessages))
        self.past: list[Stall] = []
        """Every stall that began."""
        self.late_messages = 0
        self.step = 0
        self._random = Random(f"{swarm.seed} weather").random
        self._ends: dict[bytes, float] = {}
        """When the last stall of a peer is over, or was."""
        self._pauses: dict[bytes, float] = {}
        """The same of stalls in which the process stands still."""
        self._armed: dict[bytes, tuple[Stalls, When]] = {}
        """Peers that stall as soon as their moment comes."""
        self._began = self.world.now
        self._durations: deque[float] = deque(maxlen=_STEP_MEMORY)
        self._kept = 0
        self._other_route = self.world.links.route
        swarm.observers.append(self)
        if any(Kind.PAUSE in front.kinds for front in self.stalls):
            for key in swarm.keys:
                _filter_story(swarm, key, self._hold_story)
        self._set_route()

    # ---- What is known of it

    @property
    def is_clear(self) -> bool:
        """Whether no more bad weather begins."""
        return self.clears is not None and self.step >= self.clears

    def is_out(self, key: bytes) -> bool:
        """Whether this peer is cut off or stands still."""
        return self._ends.get(key, 0.0) > self.world.now

    @property
    def out(self) -> tuple[bytes, ...]:
        """Peers that are cut off or stand still."""
        return tuple(key for key in self.swarm.keys if self.is_out(key))

    # ---- What the swarm tells

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if type(event) is not StepFinished or event.step < self.step:
            return
        self.step = event.step + 1
        self._durations.append(time - self._began)
        self._began = time
        if self.is_clear:
            self._armed.clear()
            self._set_route()
            return
        for front in self.stalls:
            self._draw(front)

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        if key not in self._armed:
            return
        front, when = self._armed[key]
        if domain is Domain.AGREED and isinstance(when, Phase):
            comes = msgspec.msgpack.decode(payload)[4] == when
        else:
            comes = domain is Domain.TIMEOUT and when is Moment.SLOW_PATH
        if comes:
            self._begin(front, key, when)

    # ---- Stalls

    def _draw(self, front: Stalls) -> None:
        """Draw whom a step's stalls hit, and when."""
        swarm, random = self.swarm, self._random
        peers = [key for key in (swarm.honest if front.peers is None else front.peers) if swarm.is_up(key)]
        for key in peers:
            if random() >= front.rate:
                continue
            others = [other for other in peers if other != key]
            group = [key]
            while others and len(group) < front.group:
                group.append(others.pop(int(random() * len(others))))
            when = front.when[int(random() * len(front.when))]
            delay = random() * min(self._durations) if when is Moment.ANYTIME else 0.0
            for member in group:
                if when is Moment.BOUNDARY:
                    self._begin(front, member, when)
                elif when is Moment.ANYTIME:
                    self.world.at(self.world.now + delay, partial(self._begin, front, member, when))
                else:
                    self._armed[member] = front, when
        self._set_route()

    def _begin(self, front: Stalls, key: bytes, when: When) -> None:
        self._armed.pop(key, None)
        out = self.out
        if key in out or (front.most is not None and len(out) >= front.most):
            return
        low, high = front.lengths
        now, random = self.world.now, self._random
        kind = front.kinds[int(random() * len(front.kinds))]
        end = now + (low + (high - low) * random()) * self.swarm.config.delta
        self.past.append(Stall(key, self.step, now, end, kind, when))
        self._ends[key] = end
        if kind is Kind.PAUSE:
            self._pauses[key] = end
        limit = self.world.links.delta
        self.swarm.disturb(key, end + limit)  # what was held back arrives then
        self._set_route()
        self.world.at(end, self._set_route)

    # ---- Messages

    def _set_route(self) -> None:
        """Stand in the way of messages while there is a reason: links without a route are faster."""
        busy = self._armed or (self.late and not self.is_clear) or any(map(self.is_out, self._ends))
        self.world.links.route = self._route if busy else self._other_route

    def _route(self, now: float, sender: bytes, to: bytes, message: Message) -> float | None:
        if sender in self._armed and self._armed[sender][1] is _CHUNKS.get(type(message)):
            self._begin(self._armed[sender][0], sender, self._armed[sender][1])
        end = max(self._ends.get(sender, 0.0), self._ends.get(to, 0.0))
        if end > now:
            links = self.world.links
            high = links.delta if links.high is None else links.high
            return end - now + links.low + (high - links.low) * self._random()
        if not self.is_clear:
            for front in self.late:
                if self._random() < front.share:
                    delay = front.factor * self.swarm.config.delta
                    self.late_messages += 1
                    self.swarm.delta_broken = max(self.swarm.delta_broken, now + delay)
                    return delay
        return USUAL if self._other_route is None else self._other_route(now, sender, to, message)

    # ---- Processes that stand still

    def _hold_story(self, key: bytes, story: Story) -> Story:
        """A peer's story, to which nothing happens during a pause: what comes meanwhile waits."""
        begun: dict[int, float] = {}
        kept: list[tuple[float, int, Delivery]] = []
        """When each delivery may be had; in the order of their arrival if at once."""
        resume: Any = story.send
        value: Any = None
        while True:
            try:
                effect = resume(value)
            except StopIteration as end:
                return end.value
            resume = story.send
            if type(effect) is Receive:
                value = yield from self._receive(key, effect, begun, kept)
                continue
            try:
                value = yield effect
            except Exception as error:  # the story hears of it where it asked
                value, resume = error, story.throw
                continue
            if type(effect) is Begin:
                begun[value] = self.world.now

    def _receive(
        self, key: bytes, effect: Receive, begun: dict[int, float], kept: list[tuple[float, int, Delivery]]
    ) -> Story:
        world, pauses = self.world, self._pauses
        while True:
            resumes = pauses.get(key, 0.0)
            due = max(resumes, kept[0][0]) if kept else resumes if resumes > world.now else math.inf
            if kept and due <= world.now:
                return msgspec.structs.replace(heappop(kept)[2], now=world.get_local_time(key))
            wait = effect
            local = world.get_local_time(key) + _FASTEST * (due - world.now) + _TICK
            if resumes > world.now or local < effect.until:
                wait = Receive(local)
            delivery: Delivery = yield wait
            held = pauses.get(key, 0.0) > world.now
            if delivery.message is None:
                if not held and delivery.now >= effect.until and not (kept and kept[0][0] <= world.now):
                    return delivery
                continue
            ready = world.now
            if type(delivery.message) is Finished:
                ready = self._find_end_of_work(key, begun.pop(delivery.message.ticket, world.now), world.now)
            if not held and ready <= world.now and not (kept and kept[0][0] <= world.now):
                return delivery
            self._kept += 1
            heappush(kept, (ready, self._kept, delivery))

    def _find_end_of_work(self, key: bytes, begin: float, end: float) -> float:
        """When work is done that would take from ``begin`` to ``end``: during a pause it does not get on."""
        for stall in self.past:
            if stall.key == key and stall.kind is Kind.PAUSE and begin < stall.end and stall.begin < end:
                lost = stall.end - max(stall.begin, begin)
                begin, end = stall.end, end + lost
        return end


def _filter_story(swarm: Swarm, key: bytes, hold: Callable[[bytes, Story], Story]) -> None:
    """Put a filter between a peer's story and its world, also after a restart."""
    peer = swarm.world._peers.get(key)
    if peer is None:  # a joiner that has not begun
        return
    start = peer.start
    peer.start = lambda disk: hold(key, start(disk))
    if peer.story is not None:
        peer.story = hold(key, peer.story)
