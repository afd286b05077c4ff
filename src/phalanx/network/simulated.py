"""A world in one process: seeded, in virtual time, the same on every run.

It drives the very generators that the network drives. Links lose, delay, duplicate and reorder; peers crash and come
back with what their disk holds; clocks run apart; computing takes time. Every choice comes from one
``random.Random(seed)``, of which only ``random()`` is used (the same on all platforms and versions of Python), and
events at one instant happen in the order in which they were scheduled. So a seed and a scenario are the whole run.

Messages travel by reference unless ``wire=True``: then they are encoded, framed, cut and decoded as on a real stream.
Only there does the schema stand between an attacker and its victims.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from random import Random
from struct import Struct
from typing import Any, TextIO, TypeAlias

from blake3 import blake3
from torch import Tensor

from phalanx.core.codec import FrameReader, decode_message, encode
from phalanx.core.crypto import Signer, compute_digest
from phalanx.core.effects import (
    Begin,
    Broadcast,
    ComputeGradient,
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
)
from phalanx.core.errors import Malformed
from phalanx.core.messages import (
    MAX_BODY,
    MAX_FRAME,
    Message,
    Signed,
)
from phalanx.network.disk import Disk
from phalanx.network.machine import COMPUTATIONS, Machine
from phalanx.network.traffic import CHUNKS, Traffic, name_kind

USUAL = -1.0
"""What a route returns to leave a message to the links' usual delays."""

_HEADER = 4
_EFFECTS_AT_ONE_INSTANT = 1_000_000
_TRACE_BUFFER = 1 << 16
_SOME_GRADIENT = ComputeGradient(0, b"")
_pack_time = Struct("<d").pack


# ---- What a peer is made of


@dataclass(frozen=True, slots=True)
class Skew:
    """A local clock shows ``offset + rate * virtual time``."""

    offset: float = 0.0
    rate: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.offset) and 0 < self.rate < math.inf):
            raise ValueError(
                f"skew: offset {self.offset} and rate {self.rate}, expected finite ones and a rate above 0"
            )


class _Peer:
    """A process: its story, what waits for it, and what it waits for."""

    __slots__ = (
        "deadline",
        "disk",
        "foreseen",
        "inbox",
        "key",
        "offset",
        "rate",
        "readers",
        "signer",
        "start",
        "story",
        "ticket",
        "timer",
        "until",
        "waiting",
    )

    def __init__(self, key: bytes, signer: Signer, start: Callable[[Disk], Story], disk: Disk, skew: Skew) -> None:
        self.key, self.signer, self.start, self.disk = key, signer, start, disk
        self.offset, self.rate = skew.offset, skew.rate
        self.story: Story | None = None
        self.inbox: deque[tuple[bytes | None, Message | Finished | Leave]] = deque()
        self.readers: dict[bytes, FrameReader] = {}
        self.foreseen: dict[tuple[int, bytes], float] = {}
        """Gradients that the machine has been at since then, though nobody has asked for them yet."""
        self.ticket = 0
        """The last that this story was given."""
        self.waiting = False
        self.until = self.deadline = math.inf
        """When the Receive it waits in ends: on the local clock, and in virtual time."""
        self.timer = math.inf
        """When it is next woken to look at its deadline; no later than the deadline while it waits."""

    def get_moment(self, local: float) -> float:
        """The first moment in virtual time at which the local clock shows at least this.

        Never an instant too early: a story that asks again would get the same answer for ever.
        """
        moment = (local - self.offset) / self.rate
        while self.offset + self.rate * moment < local:
            moment = math.nextafter(moment + max(math.ulp(local), math.ulp(self.offset)) / self.rate, math.inf)
        return moment


# ---- Links, and what went over them

Route: TypeAlias = Callable[[float, bytes, bytes, Message], float | None]
"""From now, sender, receiver and message: its delay, None to lose it for good, or ``USUAL``."""


@dataclass(slots=True)
class Links:
    """How links behave; may be changed while the world runs. While it holds, nothing takes longer than ``delta``."""

    delta: float = 1.0
    low: float = 0.0
    high: float | None = None
    """Delays are uniform between ``low`` and ``high`` (``delta`` if None), so that messages overtake one another."""
    loss: float = 0.0
    """The odds that a message has to be sent again by the link: it comes later, though within ``delta``."""
    duplicate: float = 0.0
    """The odds that a message arrives twice, the second time with a delay of its own."""
    fifo: bool = False
    """Whether messages on one link wait for those sent before them."""
    route: Route | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= (self.delta if self.high is None else self.high) <= self.delta < math.inf:
            raise ValueError(f"links: expected 0 <= low <= high <= delta, got {self.low}, {self.high}, {self.delta}")
        if not (0 <= self.loss <= 1 and 0 <= self.duplicate <= 1):
            raise ValueError(f"links: loss {self.loss} and duplicate {self.duplicate} are no odds")


def _is_acceptable(message: Message) -> bool:
    """Whether a receiver would take it; of what travels in other messages only decoding shows that."""
    if type(message) is Signed:
        return len(message.body) <= MAX_BODY
    if isinstance(message, CHUNKS):
        return True
    try:
        decode_message(encode(message))
    except Malformed:
        return False
    return True


class _Parcel:
    """A message under way, with what is computed once for all its receivers."""

    __slots__ = ("digest", "frame", "kind", "message", "size")

    def __init__(self, message: Message | None, kind: str, size: int, digest: bytes, frame: bytes) -> None:
        self.message, self.kind, self.size, self.digest, self.frame = message, kind, size, digest, frame


@dataclass(frozen=True, slots=True)
class Oversize:
    """Noted for a sender whose message is longer than a frame: nobody gets it."""

    kind: str
    size: int


@dataclass(frozen=True, slots=True)
class Garbage:
    """Noted for a receiver whose decoder refused what came over a link."""

    sender: bytes
    complaint: str


class StoryFailed(Exception):  # noqa: N818
    """A story raised; the cause is attached. An honest peer never does, whatever the others send."""

    def __init__(self, key: bytes, time: float, seed: int, error: BaseException) -> None:
        super().__init__(f"peer {key[:4].hex()} at {time:.6f} s of virtual time, seed {seed}: {error!r}")
        self.key, self.time, self.seed = key, time, seed


# ---- The world

# What an entry of the schedule is: (time, sequence, what, peer, first, second). Sequences differ, so that nothing
# behind them is ever compared.
_DELIVER, _WAKE, _RESUME, _FINISH, _START, _CALL = range(6)
_Entry: TypeAlias = tuple[float, int, int, Any, Any, Any]


class World:
    """Peers, links and virtual time.

    ``strict``: whether messages that are too long for the schema are lost, as a real receiver would refuse them.
    ``count``: whether ``traffic`` is counted. ``trace``: whether ``trace_digest`` is kept. ``log``: a line for each
    delivery and note. ``on_note``: called with key and event; ``keep_notes``: whether ``notes`` collects them too.
    """

    def __init__(
        self,
        run: bytes,
        seed: int,
        links: Links | None = None,
        *,
        wire: bool = False,
        strict: bool = False,
        count: bool = True,
        trace: bool = True,
        log: TextIO | None = None,
        on_note: Callable[[bytes, Any], None] | None = None,
        keep_notes: bool = True,
    ) -> None:
        self.seed = seed
        self.links = Links() if links is None else links
        self.now = 0.0
        self.traffic = Traffic()
        self.deliveries = 0
        self.malformed = 0
        """How many frames and streams the receivers refused, with ``wire=True``."""
        self.notes: list[tuple[float, bytes, Any]] = []
        self.results: dict[bytes, Any] = {}
        """What the stories returned that came to their end."""
        self._random = Random(seed).random
        self._wire, self._count, self._trace, self._log = wire, count, trace, log
        self._strict = strict
        self._on_note, self._keep_notes = on_note, keep_notes
        self._measures = count or trace or wire or log is not None
        self._hasher = blake3()
        self._unhashed = bytearray()
        self._peers: dict[bytes, _Peer] = {}
        self._schedule: list[_Entry] = []
        self._sequence = 0
        self._groups: list[frozenset[bytes]] | None = None
        self._delay_factor = 1.0
        self._last_arrival: dict[tuple[bytes, bytes], float] = {}
        self._performers: dict[type, Callable[[_Peer, Any], Any]] = {
            Send: self._perform_send,
            Broadcast: self._perform_broadcast,
            Sign: lambda peer, effect: peer.disk.sign(peer.signer, run, effect),
            DrawSecret: lambda peer, effect: peer.disk.draw_secret(effect.height),
            Keep: self._perform_keep,
            KeepMessages: self._perform_keep_messages,
            Foresee: self._perform_foresee,
        }

    # -- scenario

    def add(
        self,
        key: bytes,
        signer: Signer,
        machine: Machine | None,
        start: Callable[[Disk], Story],
        skew: Skew | None = None,
    ) -> Disk:
        """A new peer; ``start`` makes its story from its disk, now and after every crash."""
        if key in self._peers:
            raise ValueError(f"key: {key[:4].hex()} is in this world already")
        if signer.key != key:
            raise ValueError(f"signer: of {signer.key[:4].hex()}, not of {key[:4].hex()}")
        secret = compute_digest("disk of a simulated peer", str(self.seed).encode(), key)
        peer = self._peers[key] = _Peer(key, signer, start, Disk(secret, machine), skew or Skew())
        self._begin(peer)
        return peer.disk

    def crash(self, key: bytes, lost: float = 1.0) -> None:
        """End a peer at once. Of what is under way from it and to it, each message is lost with odds ``lost``.

        What arrives while it is down is lost as well. May be called from anywhere, the peer's own story included.
        """
        peer = self._peers[key]
        self._end(peer)
        random, kept = self._random, []
        for entry in sorted(self._schedule):
            touches = entry[2] == _DELIVER and (entry[3] is peer or entry[4] == key)
            if not (touches and random() < lost):
                kept.append(entry)
        self._schedule[:] = kept  # in place, since run() holds it; sorted, it is a heap
        lose = getattr(peer.disk.machine, "crash", None)
        if lose is not None:
            lose()

    def stop(self, key: bytes) -> None:
        """End a peer in order: what it has sent still arrives, its machine loses nothing."""
        self._end(self._peers[key])

    def restart(self, key: bytes) -> None:
        """Start a peer again from its disk; one that is up is ended first, as by :meth:`stop`."""
        peer = self._peers[key]
        self._end(peer)
        self._begin(peer)

    def ask_to_leave(self, key: bytes) -> None:
        """What a user does who stops a peer in good order."""
        self._hand_over(self._peers[key], None, Leave())

    def is_up(self, key: bytes) -> bool:
        """Whether the peer's story goes on."""
        return self._peers[key].story is not None

    def get_disk(self, key: bytes) -> Disk:
        return self._peers[key].disk

    def get_local_time(self, key: bytes) -> float:
        peer = self._peers[key]
        return peer.offset + peer.rate * self.now

    def partition(self, groups: Iterable[Iterable[bytes]]) -> None:
        """Lose every message between peers that share no group, those under way included, until :meth:`heal`.

        Groups may overlap: who is in two talks to both. Those in none form one further group.
        """
        self._groups = [frozenset(group) for group in groups]

    def heal(self) -> None:
        self._groups = None

    def set_delay_factor(self, factor: float) -> None:
        """Break ``delta``: delays go up to ``factor * delta`` for what is sent from now on. 1 restores it.

        With ``fifo``, later messages still wait for those that were sent while ``delta`` was broken.
        """
        if not 1 <= factor < math.inf:
            raise ValueError(f"factor: expected a finite number from 1, got {factor}")
        self._delay_factor = factor

    def at(self, time: float, callback: Callable[[], None]) -> None:
        """Call back at this moment of virtual time."""
        if not time >= self.now:
            raise ValueError(f"time: {time} is before {self.now}")
        self._push(time, _CALL, None, callback, None)

    def inject(self, sender: bytes, receiver: bytes, raw: bytes) -> None:
        """Put bytes on the link from ``sender``, as an attacker that writes to the socket itself. For ``wire=True``."""
        if not self._wire:
            raise ValueError("inject: messages travel by reference in this world; it needs wire=True")
        digest = blake3(raw).digest() if self._trace else b""
        self._route(self._peers[sender], receiver, _Parcel(None, "raw", len(raw), digest, raw))
        if self._count:
            self.traffic.add("raw", 1, len(raw), 0)

    # -- running

    def run(self, until: float = math.inf, stop: Callable[[], bool] | None = None) -> bool:
        """Let events happen until the time is ``until``, ``stop()`` holds, or there are none left.

        Returns whether ``stop`` held; it is asked before the first event and after each.
        """
        schedule, deliver, advance = self._schedule, self._deliver, self._advance
        if stop is not None and stop():
            return True
        while schedule and schedule[0][0] <= until:
            time, _, what, peer, first, second = heappop(schedule)
            self.now = time
            if what == _DELIVER:
                deliver(peer, first, second)
            elif what == _WAKE:
                self._wake(peer, time)
            elif what == _RESUME:
                advance(peer, first)
            elif what == _FINISH:
                self._finish(peer, first, second)
            elif what == _START:
                advance(peer, None)
            else:
                first()
            if stop is not None and stop():
                return True
        if until < math.inf:
            self.now = max(self.now, until)
        return False

    @property
    def trace_digest(self) -> str:
        """A digest of all deliveries and notes so far. Notes count as they print, finished work by its kind alone."""
        self._hasher.update(bytes(self._unhashed))
        self._unhashed.clear()
        return self._hasher.hexdigest()

    def _push(self, time: float, what: int, peer: _Peer | None, first: Any, second: Any) -> None:
        self._sequence += 1
        heappush(self._schedule, (time, self._sequence, what, peer, first, second))

    def _begin(self, peer: _Peer) -> None:
        peer.story = peer.start(peer.disk)
        self._push(self.now, _START, peer, None, None)

    def _end(self, peer: _Peer) -> None:
        story, peer.story = peer.story, None
        peer.waiting, peer.timer, peer.ticket = False, math.inf, 0
        peer.inbox.clear()
        peer.foreseen.clear()
        peer.readers.clear()
        schedule = self._schedule
        schedule[:] = [entry for entry in schedule if entry[3] is not peer or entry[2] == _DELIVER]
        heapify(schedule)
        if story is not None and not getattr(story, "gi_running", False):  # else _advance closes it
            story.close()

    def _advance(self, peer: _Peer, value: Any) -> None:
        """Let a peer go on with the result of its last effect, until it waits or computes.

        ``value`` may be a computation whose time is over; then its result is what the story gets.
        """
        story, inbox, performers = peer.story, peer.inbox, self._performers
        assert story is not None
        local = peer.offset + peer.rate * self.now
        resume: Callable[[Any], Effect] = story.send
        if type(value) in COMPUTATIONS:
            resume, value = self._perform(story, COMPUTATIONS[type(value)], peer.disk.machine, value)
        for _ in range(_EFFECTS_AT_ONE_INSTANT):
            try:
                effect = resume(value)
            except StopIteration as end:
                if peer.story is story:
                    self._end(peer)
                    self.results[peer.key] = end.value
                return
            except Exception as error:
                raise self._blame(peer, error) from error
            if peer.story is not story:  # it crashed itself
                story.close()
                return
            kind = type(effect)
            if kind is Receive:
                if inbox:
                    sender, message = inbox.popleft()
                    value = Delivery(local, sender, message)
                elif effect.until > local:  # type: ignore[union-attr]
                    self._wait(peer, effect.until)  # type: ignore[union-attr]
                    return
                else:
                    value = Delivery(local, None, None)
                resume = story.send
            elif kind in performers:
                resume, value = self._perform(story, performers[kind], peer, effect)
            elif kind in COMPUTATIONS:
                duration = self._get_duration(peer, effect)
                if duration > 0:
                    self._push(self.now + duration, _RESUME, peer, effect, None)
                    return
                resume, value = self._perform(story, COMPUTATIONS[kind], peer.disk.machine, effect)
            elif kind is Begin:
                resume, value = story.send, self._start_work(peer, effect.work)  # type: ignore[union-attr]
            elif kind is Note:
                self._note(peer.key, effect.event)  # type: ignore[union-attr]
                resume, value = story.send, None
            else:
                raise self._blame(peer, TypeError(f"{effect!r} is no effect"))
            if peer.story is not story:  # crashed by what it caused
                return
        raise self._blame(peer, RuntimeError(f"{_EFFECTS_AT_ONE_INSTANT} effects at one instant: it never waits"))

    def _blame(self, peer: _Peer, error: Exception) -> StoryFailed:
        return StoryFailed(peer.key, self.now, self.seed, error)

    @staticmethod
    def _perform(
        story: Story, performer: Callable[[Any, Any], Any], actor: Any, effect: Effect
    ) -> tuple[Callable[[Any], Effect], Any]:
        """Carry an effect out. If that fails, the story hears of it where it asked: the traceback shows the place."""
        try:
            return story.send, performer(actor, effect)
        except Exception as error:
            return story.throw, error

    def _get_duration(self, peer: _Peer, effect: Effect | ComputeGradient) -> float:
        if peer.disk.machine is None:
            raise self._blame(peer, ValueError(f"{type(effect).__name__}, and the peer has no machine"))
        return peer.disk.machine.duration(effect)

    # -- working beside everything else

    def _start_work(self, peer: _Peer, work: ComputeGradient) -> int:
        if type(work) is not ComputeGradient:
            raise self._blame(peer, TypeError(f"{work!r} is no work to begin"))
        duration = self._get_duration(peer, work)
        begun = peer.foreseen.pop((work.step, work.seed), self.now)
        duration = max(0.0, duration - (self.now - begun))
        peer.ticket += 1
        machine = peer.disk.machine
        assert machine is not None
        try:  # on the state as it is now: it may be undone meanwhile
            value = machine.compute_gradient(work.step, work.seed)
        except Exception as error:
            raise self._blame(peer, error) from error
        if duration > 0:
            self._push(self.now + duration, _FINISH, peer, peer.ticket, value)
        else:
            self._finish(peer, peer.ticket, value)
        return peer.ticket

    def _perform_foresee(self, peer: _Peer, effect: Foresee) -> None:
        """Start the clock of what will probably be asked for. Its value is found when it is: on the state of then."""
        peer.foreseen.clear()
        if self._get_duration(peer, _SOME_GRADIENT) > 0:
            peer.foreseen = {(work.step, work.seed): self.now for work in effect.find()}

    def _finish(self, peer: _Peer, ticket: int, value: Tensor | None) -> None:
        """Hand in work whose time is over."""
        kind = ComputeGradient.__name__
        if self._trace:
            self._unhashed += _pack_time(self.now) + peer.key + kind.encode()
        if self._log is not None:
            self._log.write(f"{self.now:.9f} {peer.key[:4].hex()} finished {kind.lower()}\n")
        self._hand_over(peer, None, Finished(ticket, value))

    # -- waiting

    def _wait(self, peer: _Peer, until: float) -> None:
        """Have a peer woken in time. Most waits end with a message: they share the timer that is set, if it comes
        before their deadline, or the schedule would fill with timers that nobody needs."""
        peer.waiting = True
        if until != peer.until:  # most waits are the one before, gone on with
            peer.until = until
            peer.deadline = peer.get_moment(until) if until < math.inf else math.inf
        deadline = peer.deadline
        if deadline < peer.timer:
            peer.timer = deadline
            self._push(deadline, _WAKE, peer, None, None)

    def _wake(self, peer: _Peer, time: float) -> None:
        if time != peer.timer:  # an earlier one took its place
            return
        peer.timer = math.inf
        if not peer.waiting:
            return
        if peer.deadline <= time:
            peer.waiting = False
            self._advance(peer, Delivery(peer.offset + peer.rate * time, None, None))
        elif peer.deadline < math.inf:
            peer.timer = peer.deadline
            self._push(peer.deadline, _WAKE, peer, None, None)

    # -- sending

    def _perform_send(self, peer: _Peer, effect: Send) -> None:
        self._dispatch(peer, (effect.to,), effect.message)

    def _perform_broadcast(self, peer: _Peer, effect: Broadcast) -> None:
        self._dispatch(peer, effect.to, effect.message)

    def _dispatch(self, peer: _Peer, to: tuple[bytes, ...], message: Message) -> None:
        me, links, peers = peer.key, self.links, self._peers
        if me in to:  # never on a link
            peer.inbox.extend([(me, message)] * to.count(me))
            to = tuple(key for key in to if key != me)
        parcel = self._pack(me, message, len(to))
        if parcel is None:
            return
        plain = links.route is None and self._groups is None and self._delay_factor == 1.0
        if not plain or links.loss or links.duplicate or links.fifo:
            for key in to:
                self._route(peer, key, parcel)
            return
        schedule, random, now, sequence = self._schedule, self._random, self.now, self._sequence
        low = links.low
        span = (links.delta if links.high is None else links.high) - low
        for key in to:
            if key in peers:
                sequence += 1
                heappush(schedule, (now + (low + span * random()), sequence, _DELIVER, peers[key], me, parcel))
        self._sequence = sequence

    def _pack(self, sender: bytes, message: Message, receivers: int) -> _Parcel | None:
        """Measure a message once for all its receivers; None if it is too long for anybody."""
        if self._strict and not _is_acceptable(message):
            self._note(sender, Oversize(name_kind(message), len(encode(message))))
            return None
        if not self._measures:
            data = message.body if type(message) is Signed else message.data if isinstance(message, CHUNKS) else None
            if data is not None and len(data) < MAX_FRAME // 2:
                return _Parcel(message, "", 0, b"", b"")
        data = encode(message)
        kind, size = name_kind(message), _HEADER + len(data)
        if len(data) > MAX_FRAME:
            self._note(sender, Oversize(kind, len(data)))
            return None
        if self._count:
            payload = len(message.data) if isinstance(message, CHUNKS) else 0
            self.traffic.add(kind, receivers, size, payload)
        digest = blake3(data).digest() if self._trace else b""
        frame = len(data).to_bytes(_HEADER, "big") + data if self._wire else b""
        return _Parcel(message, kind, size, digest, frame)

    def _route(self, peer: _Peer, to: bytes, parcel: _Parcel) -> None:
        """Send one parcel with everything that can happen to it on the way."""
        sender, links, random = peer.key, self.links, self._random
        receiver = self._peers.get(to)
        if receiver is None or (self._groups is not None and self._is_cut(sender, to)):
            return
        delay = USUAL
        if links.route is not None and parcel.message is not None:
            chosen = links.route(self.now, sender, to, parcel.message)
            if chosen is None:
                return
            delay = chosen
        if delay < 0:
            delay = self._draw_delay()
            if links.duplicate and random() < links.duplicate:
                self._launch(receiver, sender, parcel, self._draw_delay())
        self._launch(receiver, sender, parcel, delay)

    def _draw_delay(self) -> float:
        links, random = self.links, self._random
        limit = links.delta * self._delay_factor
        high = links.high if links.high is not None and self._delay_factor == 1.0 else limit
        delay = links.low + (high - links.low) * random()
        if links.loss and random() < links.loss:
            delay += (limit - delay) * random()
        return min(delay, limit)

    def _launch(self, receiver: _Peer, sender: bytes, parcel: _Parcel, delay: float) -> None:
        arrival = self.now + delay
        if self.links.fifo:
            link = (sender, receiver.key)
            arrival = self._last_arrival[link] = max(arrival, self._last_arrival.get(link, 0.0))
        self._push(arrival, _DELIVER, receiver, sender, parcel)

    def _is_cut(self, one: bytes, other: bytes) -> bool:
        assert self._groups is not None
        named = False
        for group in self._groups:
            if one in group and other in group:
                return False
            named = named or one in group or other in group
        return named

    # -- arriving

    def _deliver(self, peer: _Peer, sender: bytes, parcel: _Parcel) -> None:
        if peer.story is None or (self._groups is not None and self._is_cut(sender, peer.key)):
            return
        self.deliveries += 1
        if self._trace:
            self._unhashed += _pack_time(self.now) + sender + peer.key + parcel.digest
            if len(self._unhashed) > _TRACE_BUFFER:
                self._hasher.update(bytes(self._unhashed))
                self._unhashed.clear()
        if self._log is not None:
            text = f"{self.now:.9f} {sender[:4].hex()} > {peer.key[:4].hex()} {parcel.kind} {parcel.size}\n"
            self._log.write(text)
        if self._wire:
            for read in self._read(peer, sender, parcel.frame):
                self._hand_over(peer, sender, read)
        elif peer.waiting:
            peer.waiting = False
            assert parcel.message is not None
            self._advance(peer, Delivery(peer.offset + peer.rate * self.now, sender, parcel.message))
        else:
            assert parcel.message is not None
            peer.inbox.append((sender, parcel.message))

    def _hand_over(self, peer: _Peer, sender: bytes | None, message: Message | Finished | Leave) -> None:
        if peer.waiting:
            peer.waiting = False
            self._advance(peer, Delivery(peer.offset + peer.rate * self.now, sender, message))
        elif peer.story is not None:
            peer.inbox.append((sender, message))

    def _read(self, peer: _Peer, sender: bytes, raw: bytes) -> list[Message]:
        """The messages in the next bytes of a stream. One that lost its place is given up: the link connects anew."""
        reader = peer.readers.get(sender)
        if reader is None:
            reader = peer.readers[sender] = FrameReader()
        messages: list[Message] = []
        try:
            for frame in reader.feed(raw):
                try:
                    messages.append(decode_message(frame))
                except Malformed as complaint:
                    self._refuse(peer, sender, complaint)
        except Malformed as complaint:
            peer.readers.pop(sender, None)
            self._refuse(peer, sender, complaint)
        return messages

    def _refuse(self, peer: _Peer, sender: bytes, complaint: Malformed) -> None:
        self.malformed += 1
        self._note(peer.key, Garbage(sender, str(complaint)))

    # -- notes and disks

    def _perform_keep(self, peer: _Peer, effect: Keep) -> None:
        peer.disk.keep(effect.view, effect.height)

    def _perform_keep_messages(self, peer: _Peer, effect: KeepMessages) -> None:
        peer.disk.keep_messages(effect)

    def _note(self, key: bytes, event: Any) -> None:
        if self._trace:
            self._unhashed += _pack_time(self.now) + key + repr(event).encode()
        if self._log is not None:
            self._log.write(f"{self.now:.9f} {key[:4].hex()} {event!r}\n")
        if self._keep_notes:
            self.notes.append((self.now, key, event))
        if self._on_note is not None:
            self._on_note(key, event)
