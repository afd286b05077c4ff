"""The seam between a peer's story and the network: messages in, messages out, in a thread of their own.

Two lanes lead to every receiver, each a one-way stream that the sender opens. Members of the circle may send what the
protocol needs; strangers a little, in the small lane; the banned nothing. ``ask`` and ``answer`` are for what peers
need of one another before they share a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from phalanx.core.codec import decode_message
from phalanx.core.errors import LocalError, Malformed
from phalanx.core.messages import Message, PullAggregate, PullChain, PullMessages, PullState
from phalanx.network.addresses import is_loopback, parse_address
from phalanx.network.contacts import Answerer, Contacts
from phalanx.network.door import Door
from phalanx.network.lanes import Circle, Complaints, FrameStream, Lane, Limits, Outbox, Parcel, Quota, find_lane
from phalanx.network.libp2p import Daemon, Tasks, Unreachable
from phalanx.network.strangers import Rank, Share, choose_leaver
from phalanx.network.traffic import Count, Traffic, name_kind

__all__ = ["Limits", "Quota", "Transport", "Unreachable"]

T = TypeVar("T")
_Place = tuple[bytes, Lane]

_REFRESH = 30.0
_RESTART_PAUSE = 1.0
_ANSWERS_WAITING = 1 << 20  # bytes for one stranger, above which nothing more is read of it
_PATIENCE = 0.1  # seconds between two looks whether it has taken them
_ASKED_IN_A_TURN: dict[object, int] = {PullChain: 8, PullState: 32, PullMessages: 32}
"""The core answers all strangers together twice as many of these in each attempt, and within delta (``handlers.py``);
an attempt is announced to us twice. More are not passed on: who is answered is decided here, where hosts are known."""


class Transport:
    """Long-lived framed streams to other peers, with an event loop in a thread of its own.

    All methods may be called from any thread. ``deliver(sender, message, size)`` is called in the transport's own; if
    it returns False the receiver wants no more chunks for now, until :meth:`resume`.
    """

    def __init__(
        self,
        key_file: Path,
        run: bytes,
        deliver: Callable[[bytes, Message, int], bool | None],
        *,
        listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",),
        announce: Sequence[str] = (),
        peers: Sequence[str] = (),
        limits: Limits = Limits(),  # noqa: B008 (it is frozen)
    ) -> None:
        self.key = b""
        """Ours, once it is started."""
        self._key_file, self._deliver, self._limits = key_file, deliver, limits
        self._listen, self._announce = tuple(listen), tuple(announce)
        self._peers = tuple(parse_address(peer) for peer in peers)
        self._protocols = {lane: f"/phalanx/1/{run.hex()[:16]}/{lane}" for lane in Lane}
        self._traffic, self._dropped = Traffic(), 0
        self._complaints = Complaints()
        self._circle = Circle(limits, self._complaints)
        self._tasks = Tasks()
        self._door = Door(self._circle, self._tasks)
        rank, hosts = self._circle.get_rank, self._circle.hosts
        self._turns = Share(
            limits.strangers_turns,
            limits.strangers_turns,
            rank,
            hosts,
            window=limits.turn_time,
            get_limit=self._find_limit,
        )
        self._purse = Share(limits.strangers_rate, limits.strangers_rate, rank, hosts)
        self._contacts = Contacts(
            self._circle, self._door, limits, self._complaints, self._peers, self._turns, self._purse
        )
        self._contacts.found = self._rouse
        self._outboxes: dict[_Place, Outbox] = {}
        self._incoming: dict[_Place, _Incoming] = {}
        self._stopping, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._ready: Future[None] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # -- from other threads

    def start(self) -> None:
        """Start the daemon; :class:`LocalError` with one clear sentence if that fails."""
        if self._loop is not None:
            raise LocalError("a transport is started once; make a new one")
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="phalanx-network", daemon=True)
        self._thread.start()
        self._ready.result()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can find us, best first."""
        return self._contacts.own

    @property
    def traffic(self) -> Traffic:
        """What was given to streams so far, by kind."""
        counts = list(self._traffic.items())
        return Traffic((kind, Count(count.messages, count.payload, count.rest)) for kind, count in counts)

    @property
    def dropped(self) -> int:
        """How many messages were not sent because too much waited to be."""
        return self._dropped + sum(outbox.dropped for outbox in list(self._outboxes.values()))

    def send(self, to: Iterable[bytes], message: Message) -> None:
        """Line up a message for each of ``to``. It never blocks, and may never arrive."""
        if self._loop is not None:
            self._call(self._send, tuple(to), Parcel(message), message)

    def set_circle(
        self, members: frozenset[bytes], banned: frozenset[bytes], former: frozenset[bytes] = frozenset()
    ) -> None:
        """Who may send what from now on. Streams of the banned end at once.

        Called whenever the protocol counts anew what it gives to strangers, with whoever is in the circle then.
        """
        self._call(self._set_circle, members, banned, former)

    def add_addresses(self, addresses: Iterable[str]) -> None:
        """Take addresses that our user gives, or their owner; :class:`LocalError` for what is none."""
        self._call(self._contacts.add, [parse_address(address) for address in addresses])

    def resume(self) -> None:
        """There is room for deliveries again: read chunks on."""
        self._call(self._has_room.set)

    def answer(self, what: str, answerer: Answerer) -> None:
        """Answer requests for ``what`` from now on."""
        is_new = what not in self._contacts.answerers
        self._contacts.answerers[what] = answerer
        if is_new and self._loop is not None:
            self._wait_for(self._contacts.serve(what), 15)

    def ask(self, address: str, what: str, request: bytes, timeout: float, limit: int) -> bytes:
        """Ask the peer at ``address`` for something of at most ``limit`` bytes; :class:`Unreachable` if it fails."""
        peer = parse_address(address)
        return self._wait_for(self._contacts.ask(peer.key, (peer,), what, request, timeout, limit), timeout + 5)

    def close(self) -> None:
        """Send what waits, for a moment; stop the daemon and the thread. Closing twice does no harm."""
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._call(self._stopping.set)
            self._thread.join()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        """Have something done in the loop; before it runs, at once; after it has ended, never."""
        if self._loop is None:
            function(*arguments)
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _wait_for(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        try:
            if self._loop is None or threading.current_thread() is self._thread:
                raise RuntimeError("it is not started, or this is its own thread, which must not wait")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            work.close()
            raise Unreachable(f"the transport cannot ask: {error}") from None
        try:
            return future.result(timeout)
        except (TimeoutError, CancelledError):
            future.cancel()
            raise Unreachable("the transport got no answer in time, or was closed") from None

    # -- the thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _main(self) -> None:
        daemon = await self._start_daemon()
        try:
            self._ready.set_result(None)
            self._tasks.spawn(self._refresh_addresses())
            while not await self._is_told_to_stop(daemon):
                daemon = await self._replace(daemon)
            await self._flush()
        finally:
            for outbox in self._outboxes.values():
                outbox.task.cancel()
            await asyncio.gather(*(outbox.task for outbox in self._outboxes.values()), return_exceptions=True)
            await self._contacts.end()
            await self._tasks.end()
            await self._turns.end()
            await self._purse.end()
            await daemon.close()

    async def _start_daemon(self) -> Daemon:
        local = all(map(is_loopback, self._listen))
        daemon = await Daemon.start(
            self._key_file, listen=self._listen, announce=self._announce, peers=self._peers, relay=not local
        )
        try:
            self.key = daemon.key
            daemon.on_caller = self._circle.hosts.note
            self._contacts.own = tuple(await daemon.get_addresses())
            for lane in Lane:
                await daemon.serve(self._protocols[lane], self._door.guard(_Acceptor(self._accept, lane)))
            await self._contacts.use(daemon)
        except BaseException:
            await daemon.close()
            raise
        return daemon

    async def _is_told_to_stop(self, daemon: Daemon) -> bool:
        """Wait for the end: ours, or that of the daemon."""
        endings = {asyncio.ensure_future(event.wait()) for event in (self._stopping, daemon.ended)}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for ending in endings:
            ending.cancel()
        return self._stopping.is_set()

    async def _replace(self, daemon: Daemon) -> Daemon:
        """Start the daemon again: it was killed, or it failed. Streams are opened anew when they are needed."""
        self._complaints.say("daemon", "the network daemon has ended; it is started again")
        await daemon.close()
        while not self._stopping.is_set():
            try:
                return await self._start_daemon()
            except LocalError as error:
                self._complaints.say("restart", "the network daemon cannot be started again: %s", error)
                await asyncio.sleep(_RESTART_PAUSE)
        return daemon

    async def _flush(self) -> None:
        endings = [asyncio.ensure_future(outbox.finish()) for outbox in self._outboxes.values()]
        if endings:
            _, late = await asyncio.wait(endings, timeout=self._limits.flush)
            for ending in late:
                ending.cancel()

    async def _refresh_addresses(self) -> None:
        """Behind a NAT it takes the daemon a while to learn where others see it."""
        while True:
            await asyncio.sleep(_REFRESH)
            with contextlib.suppress(Unreachable):
                if self._contacts.daemon is not None:
                    self._contacts.own = tuple(await self._contacts.daemon.get_addresses())

    # -- sending

    def _send(self, to: tuple[bytes, ...], parcel: Parcel, message: Message) -> None:
        if not parcel.fits:
            self._dropped += len(to)
            self._complaints.say("oversize", "a %s of %d bytes is too long to be sent", parcel.kind, parcel.size)
            return
        for key in to:
            if key == self.key:
                self._hand_over(key, message, 0)
            elif key not in self._circle.banned:
                self._get_outbox(key, parcel.lane).put(parcel)
                if key not in self._circle.members:
                    self._shorten_queues()

    def _get_outbox(self, key: bytes, lane: Lane) -> Outbox:
        outbox = self._outboxes.get((key, lane))
        if outbox is not None:
            return outbox
        if key not in self._circle.members:
            self._make_room()
        outbox = self._outboxes[key, lane] = Outbox(
            lambda: self._contacts.reach(key, self._protocols[lane]),
            self._count,
            lambda: self._circle.get_room(key, lane),
            self._limits,
            lambda size: self._purse.take(key, size),
        )
        return outbox

    def _make_room(self) -> None:
        """If too many receivers that are no members are looked after, one gives way."""
        strange = [
            _Queue(key, self._circle.hosts.get(key), outbox.last_used, (key, lane))
            for (key, lane), outbox in self._outboxes.items()
            if key not in self._circle.members
        ]
        if len(strange) >= 2 * self._limits.strangers:
            self._drop_outbox(choose_leaver(strange, self._purse.get_had).place)

    def _shorten_queues(self) -> None:
        """Keys are free, so all that are no members share some room; whoever has most waiting gives way."""
        strange = [outbox for (key, _), outbox in self._outboxes.items() if key not in self._circle.members]
        excess = sum(outbox.waiting for outbox in strange) - self._limits.strangers_queue
        while excess > 0 and strange:
            fullest = max(strange, key=lambda outbox: outbox.waiting)
            freed = fullest.drop()
            excess -= freed
            if not freed:
                strange.remove(fullest)

    def _drop_outbox(self, place: _Place) -> None:
        outbox = self._outboxes.pop(place)
        self._dropped += outbox.dropped
        outbox.task.cancel()

    def _count(self, parcel: Parcel) -> None:
        self._traffic.add(parcel.kind, 1, parcel.size, parcel.payload)

    def _rouse(self, key: bytes) -> None:
        for lane in Lane:
            if (key, lane) in self._outboxes:
                self._outboxes[key, lane].rouse()

    # -- receiving

    def _accept(self, key: bytes, lane: Lane, stream: socket.socket) -> None:
        """Take or refuse a stream that somebody opened. A new one takes the place of the old."""
        place = key, lane
        if not self._may_open(key, lane):
            stream.close()
            self._complaints.say("refused", "a %s stream of peer %s was refused", lane, key)
            return
        if place in self._incoming:
            self._incoming[place].task.cancel()
        incoming = self._incoming[place] = _Incoming(key, self._circle.hosts.get(key))
        incoming.task = self._tasks.spawn(self._receive(key, lane, stream, incoming))
        incoming.task.add_done_callback(lambda _: self._part_with(place, incoming, stream))
        self._rouse(key)
        self._contacts.greet(key)

    def _part_with(self, place: _Place, incoming: _Incoming, stream: socket.socket) -> None:
        stream.close()
        if self._incoming.get(place) is incoming:
            del self._incoming[place]

    def _may_open(self, key: bytes, lane: Lane) -> bool:
        """Whether somebody may send in a lane. If too many strangers do, one of them gives way."""
        if key in self._circle.members:
            return True
        if key in self._circle.banned or lane is Lane.BULK:
            return False
        strangers = [
            incoming
            for (other, of), incoming in self._incoming.items()
            if other not in self._circle.members and of is Lane.SMALL
        ]
        if (key, lane) not in self._incoming and len(strangers) >= self._limits.strangers:
            leaver = choose_leaver(strangers, self._turns.get_had)
            leaver.task.cancel()
            del self._incoming[leaver.key, Lane.SMALL]
        return True

    async def _receive(self, key: bytes, lane: Lane, stream: socket.socket, incoming: _Incoming) -> None:
        frames = FrameStream(stream, self._limits.minimum_rate, self._limits.window)
        try:
            while True:
                if lane is Lane.BULK:
                    await self._has_room.wait()
                frame = await frames.read(lambda: self._circle.get_frame_limit(key, lane))
                if frame is None:
                    return
                message = decode_message(frame)
                if find_lane(message) is not lane:  # each has its quotas, and its own way to wait
                    raise Malformed(f"a {name_kind(message)} has no place here")
                incoming.last_heard = math.inf  # who waits for its turn is not silent
                await self._turns.take(key, 1, type(message))
                incoming.last_heard = time.monotonic()
                self._hand_over(key, message, len(frame))
                await self._circle.hold_to_quota(key, lane, len(frame))
                await self._await_answers_taken(key)
        except Malformed as complaint:
            self._complaints.say("malformed", "peer %s, %s lane: %s", key, lane, complaint)
        except TimeoutError:
            self._complaints.say("stalled", "peer %s, %s lane: a frame came too slowly", key, lane)
        except (OSError, EOFError):
            pass  # it will open another

    async def _await_answers_taken(self, key: bytes) -> None:
        """A stranger that does not take its answers, or not as fast as it asks, is not read on."""
        while self._circle.get_rank(key) is not Rank.MEMBER and self._count_waiting(key) > _ANSWERS_WAITING:
            await asyncio.sleep(_PATIENCE)

    def _count_waiting(self, key: bytes) -> int:
        return sum(self._outboxes[key, lane].waiting for lane in Lane if (key, lane) in self._outboxes)

    def _find_limit(self, kind: object) -> int | None:
        return len(self._circle.members) if kind is PullAggregate else _ASKED_IN_A_TURN.get(kind)

    def _hand_over(self, key: bytes, message: Message, size: int) -> None:
        if self._deliver(key, message, size) is False:
            self._has_room.clear()

    def _set_circle(self, members: frozenset[bytes], banned: frozenset[bytes], former: frozenset[bytes]) -> None:
        self._circle.set(members, banned, former)
        self._turns.renew()
        for (key, lane), incoming in self._incoming.items():
            if key in banned or (lane is Lane.BULK and key not in self._circle.members):
                incoming.task.cancel()
        for place in list(self._outboxes):
            if place[0] in banned:
                self._drop_outbox(place)


class _Incoming:
    """A stream that somebody opened."""

    __slots__ = ("host", "key", "last_heard", "task")

    task: asyncio.Task[None]

    def __init__(self, key: bytes, host: str) -> None:
        self.key, self.host = key, host
        self.last_heard = time.monotonic()


class _Queue(NamedTuple):
    """What waits for a receiver that is no member."""

    key: bytes
    host: str
    last_heard: float
    place: _Place


class _Acceptor:
    """Takes the streams of one lane."""

    def __init__(self, accept: Callable[[bytes, Lane, socket.socket], None], lane: Lane) -> None:
        self._accept, self._lane = accept, lane

    def __call__(self, key: bytes, stream: socket.socket) -> None:
        self._accept(key, self._lane, stream)
