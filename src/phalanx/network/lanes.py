"""One stream in each direction and lane: what waits to be sent to a peer, and how what it sends is read.

Everything here is bounded by :class:`Limits`, whatever the other side does: too slow, too fast, too long, or nothing
at all. A peer that misbehaves costs its own streams and nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from phalanx.core.codec import encode
from phalanx.core.errors import LocalError, Malformed
from phalanx.core.messages import MAX_CHUNK, MAX_FRAME, Message
from phalanx.network.addresses import name_peer
from phalanx.network.libp2p import Unreachable, shorten
from phalanx.network.strangers import Hosts, Rank
from phalanx.network.traffic import CHUNKS, name_kind

log = logging.getLogger("phalanx.network")

_HEADER = 4
_GOODBYE = bytes(_HEADER)
"""An empty frame: nothing follows. A connection that is closed takes along what its far end has not read yet, so who
sends waits for who reads to close the stream."""
_READ_AHEAD = 1 << 14
_JOIN = 1 << 14  # bytes that are cheaper to copy behind their header than to send on their own
_BUCKETS = 4096
_MIB = 1 << 20

ASK, OPEN, HOST = "ask", "open", "host"
"""What questions count as, beside the two lanes; and new streams, of one key and of all strangers of one host."""
_FEW = 8
"""Streams that a key may open although its host has opened too many: behind one address there may be many people."""


class Lane(StrEnum):
    """Small messages never wait behind chunks: each lane is a stream of its own."""

    SMALL = "small"
    BULK = "bulk"


# ---- Limits


@dataclass(frozen=True, slots=True)
class Quota:
    """What one peer may send in one lane, on average; whoever exceeds it is read more slowly."""

    messages: float
    """A second."""
    bytes: float
    """A second."""
    burst: float = 4.0
    """How many seconds' worth may come at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of this machine others can take. The defaults fit any run, but for ``bulk_queue``."""

    small_queue: int = 16 * _MIB
    """Bytes that wait for one member, beside chunks."""
    bulk_queue: int = 512 * _MIB
    """Bytes of chunks that wait for one member: at least three gradients, or parts of them are dropped."""
    stranger_queue: int = 16 * _MIB
    """Bytes that wait in each lane for one who is no member."""
    strangers_queue: int = 64 * _MIB
    """Bytes that wait for all of these together."""
    queue_messages: int = 4096
    """Messages that wait for one receiver in one lane."""
    member_small: Quota = Quota(messages=1000, bytes=16 * _MIB)
    """Above what a slow path may need: a few frames of the largest size within a delta."""
    member_bulk: Quota = Quota(messages=4000, bytes=1024 * _MIB)
    stranger: Quota = Quota(messages=20, bytes=64 * 1024)
    openings: Quota = Quota(messages=2, bytes=1, burst=32)
    """Streams that one peer may open, for all purposes: many more than one opens whose network comes and goes."""
    openings_of_host: Quota = Quota(messages=16, bytes=1, burst=8)
    """Streams that all strangers of one host may open together, beside a few of each."""
    stranger_frame: int = 64 * 1024
    bulk_frame: int = MAX_CHUNK + 4096
    strangers: int = 32
    """How many streams, questions and receivers that are no members are looked after at once, each."""
    strangers_rate: float = 2 * _MIB
    """Bytes a second that are sent to all strangers together: a sixth of 100 megabits."""
    strangers_turns: float = 50.0
    """Messages and questions of all strangers together that are taken in a second."""
    turn_time: float = 2.0
    """Seconds after which strangers may ask again for what the protocol gives them only so often: the run's delta."""
    question_time: float = 2.0
    """Seconds within which who opened a stream to ask has to have asked."""
    minimum_rate: int = 1024
    """Bytes a second in which a frame that has begun must go on, on average over ``window``."""
    window: float = 10.0
    first_pause: float = 0.1
    longest_pause: float = 2.0
    """How long to wait before a broken stream is opened again; growing from the one to the other."""
    flush: float = 1.5
    """Seconds that closing may take to send what still waits."""

    def __post_init__(self) -> None:
        if not (0 < self.stranger_frame <= MAX_FRAME and 0 < self.bulk_frame <= MAX_FRAME):
            raise LocalError(f"limits: frames of strangers and of chunks need 1 to {MAX_FRAME} bytes")
        if min(self.small_queue, self.bulk_queue, self.queue_messages, self.minimum_rate, self.window) <= 0:
            raise LocalError("limits: queues, minimum_rate and window must be above 0")


class Bucket:
    """Counts one peer's messages and bytes against its quota."""

    def __init__(self, quota: Quota, now: float) -> None:
        self._quota, self._time = quota, now
        self._messages, self._bytes = quota.messages * quota.burst, quota.bytes * quota.burst

    def take(self, size: int, now: float) -> float:
        """Count a message; the result is how long to wait before the next is read."""
        quota, passed = self._quota, now - self._time
        self._time = now
        self._messages = min(self._messages + passed * quota.messages, quota.messages * quota.burst) - 1
        self._bytes = min(self._bytes + passed * quota.bytes, quota.bytes * quota.burst) - size
        return max(0.0, -self._messages / quota.messages, -self._bytes / quota.bytes)

    def may_take(self, now: float) -> bool:
        """Count a message if there is room for it; whether there was. What is refused makes no debt."""
        if self._messages + (now - self._time) * self._quota.messages < 1:
            return False
        return self.take(0, now) == 0

    def has_taken(self, few: int) -> bool:
        """Whether more than a few messages were counted lately."""
        return self._messages < self._quota.messages * self._quota.burst - few


class Complaints:
    """A log that others can fill only slowly: one line a second of each kind, with how many were left out."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._silenced: dict[str, int] = {}

    def say(self, kind: str, text: str, *arguments: object) -> None:
        """Log a warning. ``kind`` is one of ours, never a peer's words: there are only so many. Keys are named."""
        now = time.monotonic()
        if now - self._last.get(kind, -1.0) < 1.0:
            self._silenced[kind] = self._silenced.get(kind, 0) + 1
            return
        self._last[kind] = now
        more = self._silenced.pop(kind, 0)
        named = [name_peer(argument) if isinstance(argument, bytes) else argument for argument in arguments]
        log.warning("%s", shorten(text % tuple(named)) + (f" ({more} more like this)" if more else ""))


class Circle:
    """Who others are to us, and how much each has sent: members, the banned, and everybody else."""

    def __init__(self, limits: Limits, complaints: Complaints) -> None:
        self.members: frozenset[bytes] = frozenset()
        self.banned: frozenset[bytes] = frozenset()
        self.former: frozenset[bytes] = frozenset()
        self.hosts = Hosts()
        self._limits, self._complaints = limits, complaints
        self._buckets: dict[tuple[bytes, str], Bucket] = {}

    def set(self, members: frozenset[bytes], banned: frozenset[bytes], former: frozenset[bytes] = frozenset()) -> None:
        """Change who is who. Whoever comes in or goes out starts with the quota of its new place."""
        members -= banned
        for key in members ^ self.members:
            for what in (Lane.SMALL, Lane.BULK, ASK, OPEN):
                self._buckets.pop((key, what), None)
        self.members, self.banned, self.former = members, banned, former - members - banned

    def get_rank(self, key: bytes) -> Rank:
        if key in self.members:
            return Rank.MEMBER
        return Rank.FORMER if key in self.former else Rank.STRANGER

    def get_room(self, key: bytes, lane: Lane) -> int:
        """How many bytes may wait for somebody."""
        if key not in self.members:
            return self._limits.stranger_queue
        return self._limits.bulk_queue if lane is Lane.BULK else self._limits.small_queue

    def get_frame_limit(self, key: bytes, lane: Lane) -> int:
        if key not in self.members:
            return self._limits.stranger_frame
        return self._limits.bulk_frame if lane is Lane.BULK else MAX_FRAME

    async def hold_to_quota(self, key: bytes, what: str, size: int) -> None:
        """Count a message; wait if there were too many. Nothing more is read of the stream meanwhile."""
        pause = self._get_bucket(key, what).take(size, time.monotonic())
        if pause > 0:
            self._complaints.say("quota", "peer %s sends too much and is read more slowly", key)
            await asyncio.sleep(pause)

    def may_open(self, key: bytes) -> bool:
        """Count a stream that somebody opened; whether there were not too many of its key, and of its host."""
        own, now = self._get_bucket(key, OPEN), time.monotonic()
        if own.take(0, now) > 0:
            self._complaints.say("openings", "peer %s opens too many streams; they are not read", key)
            return False
        if key in self.members:
            return True
        of_host = self._get_bucket(self.hosts.get(key).encode(), HOST)
        if not of_host.may_take(now) and own.has_taken(_FEW):
            self._complaints.say("host", "the host of peer %s opens too many streams; they are not read", key)
            return False
        return True

    def _get_bucket(self, key: bytes, what: str) -> Bucket:
        """The count outlives streams: opening a new one gives nobody a new quota."""
        bucket = self._buckets.get((key, what))
        if bucket is None:
            bucket = Bucket(self._find_quota(key, what), time.monotonic())
            if len(self._buckets) >= _BUCKETS:
                del self._buckets[next(iter(self._buckets))]
            self._buckets[key, what] = bucket
        return bucket

    def _find_quota(self, key: bytes, what: str) -> Quota:
        limits = self._limits
        if what in (OPEN, HOST):
            return limits.openings if what == OPEN else limits.openings_of_host
        if key not in self.members:
            return limits.stranger
        return limits.member_bulk if what == Lane.BULK else limits.member_small


# ---- Sending


def find_lane(message: Message) -> Lane:
    return Lane.BULK if isinstance(message, CHUNKS) else Lane.SMALL


class Parcel:
    """A message as it goes on a stream: encoded once, whoever gets it."""

    __slots__ = ("kind", "lane", "payload", "pieces", "size")

    def __init__(self, message: Message) -> None:
        data = encode(message)
        header = len(data).to_bytes(_HEADER, "big")
        self.pieces = (header + data,) if len(data) <= _JOIN else (header, data)
        self.size = _HEADER + len(data)
        self.kind = name_kind(message)
        self.lane = find_lane(message)
        self.payload = len(message.data) if isinstance(message, CHUNKS) else 0

    @property
    def fits(self) -> bool:
        """Whether anybody would take it."""
        return self.size <= _HEADER + MAX_FRAME


async def _await_nothing(size: int) -> None:
    """Whoever needs no share of anything."""


class Outbox:
    """What waits for one receiver in one lane, and the stream that it goes on.

    The stream is opened when there is something to send, and again when it breaks. A frame stays first in line until
    the stream has taken all of it; what the stream took and did not deliver is lost, and the protocol asks again.
    """

    def __init__(
        self,
        open_stream: Callable[[], Awaitable[socket.socket]],
        sent: Callable[[Parcel], None],
        get_room: Callable[[], int],
        limits: Limits,
        await_share: Callable[[int], Awaitable[None]] = _await_nothing,
    ) -> None:
        self._open_stream, self._sent, self._limits = open_stream, sent, limits
        self._get_room, self._await_share = get_room, await_share
        self._queue: deque[Parcel] = deque()
        self.waiting = 0
        """How many bytes."""
        self._is_first_begun = False
        self._filled, self._roused = asyncio.Event(), asyncio.Event()
        self._ending = False
        self.dropped = 0
        """How many messages gave way to newer ones."""
        self.last_used = time.monotonic()
        self.task = asyncio.get_running_loop().create_task(self._run())

    def put(self, parcel: Parcel) -> None:
        """Line up a message. The oldest ones that nothing was sent of give way if there are too many."""
        self._queue.append(parcel)
        self.waiting += parcel.size
        self.last_used = time.monotonic()
        room, begun = self._get_room(), int(self._is_first_begun)
        while len(self._queue) > begun + 1 and self._is_above(room):
            self.drop()
        self._filled.set()

    def _is_above(self, room: int) -> bool:
        return self.waiting > room or len(self._queue) > self._limits.queue_messages

    def drop(self) -> int:
        """Give up the oldest message that nothing was sent of; the result is how many bytes it had, 0 for none."""
        oldest = int(self._is_first_begun)
        if len(self._queue) <= oldest:
            return 0
        size = self._queue[oldest].size
        del self._queue[oldest]
        self.waiting -= size
        self.dropped += 1
        return size

    def rouse(self) -> None:
        """There is reason to believe that the receiver can be reached: do not wait out a pause."""
        self._roused.set()

    async def finish(self) -> None:
        """Send what waits, and end the stream so that all of it arrives."""
        self._ending = True
        self._filled.set()
        await asyncio.wait({self.task})

    async def _run(self) -> None:
        pause = self._limits.first_pause
        while await self._has_more():
            opened = time.monotonic()
            try:
                await self._use(await self._open_stream())
            except (Unreachable, OSError) as error:
                log.debug("a stream to send on: %s", error)
            if self._ending and not self._queue:
                return
            if time.monotonic() - opened > 10 * self._limits.longest_pause:
                pause = self._limits.first_pause
            await self._rest(pause)
            pause = min(2 * pause, self._limits.longest_pause)

    async def _use(self, stream: socket.socket) -> None:
        """Write to a stream until it breaks, or until everything is sent and we are ending."""
        loop = asyncio.get_running_loop()
        ended = loop.create_task(_await_end(stream))
        ended.add_done_callback(lambda _: self._filled.set())
        try:
            await self._write(stream, ended)
        finally:
            ended.cancel()
            await asyncio.wait({ended})
            stream.close()

    async def _write(self, stream: socket.socket, ended: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        while await self._has_more(ended):
            await self._await_share(self._queue[0].size)
            if not self._queue or ended.done():  # it has given way meanwhile, or nobody is there any more
                continue
            parcel = self._queue[0]
            self._is_first_begun = True
            try:
                for piece in parcel.pieces:
                    await loop.sock_sendall(stream, piece)
            finally:
                self._is_first_begun = False
            self._queue.popleft()
            self.waiting -= parcel.size
            self.last_used = time.monotonic()
            self._sent(parcel)
        if not ended.done():
            await loop.sock_sendall(stream, _GOODBYE)
            await asyncio.wait({ended})  # the receiver closes the stream once it has read everything

    async def _has_more(self, ended: asyncio.Task[None] | None = None) -> bool:
        """Wait for something to send; False if we are ending, or the stream has ended."""
        while ended is None or not ended.done():
            if self._queue or self._ending:
                return bool(self._queue)
            self._filled.clear()
            await self._filled.wait()
        return False

    async def _rest(self, pause: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._roused.wait()
        self._roused.clear()


async def _await_end(stream: socket.socket) -> None:
    """A receiver says nothing on a stream: whatever comes back is its end, and nothing more should be sent on it."""
    with contextlib.suppress(OSError):
        await asyncio.get_running_loop().sock_recv(stream, 1)


# ---- Receiving


class FrameStream:
    """Cuts what a stream brings into frames. Between frames it may be silent; within one it has to go on."""

    def __init__(self, stream: socket.socket, minimum_rate: int, window: float) -> None:
        self._stream, self._window = stream, window
        self._least = max(1, int(minimum_rate * window))
        self._view = memoryview(bytearray(_READ_AHEAD))
        self._start = self._end = 0

    async def read(self, get_limit: Callable[[], int], least: int = 1) -> bytes | None:
        """The next frame; None at the end of the stream, or at a frame of less than ``least`` bytes: a goodbye.

        :class:`Malformed` if it is longer than ``get_limit()`` says when its length is known; TimeoutError if it comes
        too slowly; EOFError if the stream ends in mid-frame.
        """
        if self._start == self._end and not await self._fill():
            return None
        if self._end - self._start < _HEADER:
            async with asyncio.timeout(self._window):
                while self._end - self._start < _HEADER:
                    if not await self._fill():
                        raise EOFError("the stream ended within a frame")
        size = int.from_bytes(self._view[self._start : self._start + _HEADER], "big")
        limit = get_limit()
        if size < least:
            return None
        if size > limit:
            raise Malformed(f"a frame of {size} bytes where {least} to {limit} are allowed")
        self._start += _HEADER
        if size <= self._end - self._start:
            self._start += size
            return bytes(self._view[self._start - size : self._start])
        return await self._read_long(size)

    async def _fill(self) -> int:
        """Read what there is behind what is left of the last time."""
        left = self._end - self._start
        if self._start:
            self._view[:left] = self._view[self._start : self._end]
            self._start, self._end = 0, left
        count = await asyncio.get_running_loop().sock_recv_into(self._stream, self._view[left:])
        self._end += count
        return count

    async def _read_long(self, size: int) -> bytes:
        """The rest of a frame, straight into memory of its own. Pages of it are taken as they are written."""
        frame = bytearray(size)
        have = self._end - self._start
        frame[:have] = self._view[self._start : self._end]
        self._start = self._end = 0
        with memoryview(frame) as view:
            while have < size:
                async with asyncio.timeout(self._window):
                    have = await self._read_into(view, have, min(size, have + self._least))
        # Not copied into bytes: the decoder copies what it keeps, and nobody else has this.
        return cast(bytes, frame)

    async def _read_into(self, view: memoryview, have: int, goal: int) -> int:
        """Read on until there are ``goal`` bytes or more; the result is how many there are."""
        loop = asyncio.get_running_loop()
        while have < goal:
            count = await loop.sock_recv_into(self._stream, view[have:])
            if not count:
                raise EOFError("the stream ended within a frame")
            have += count
        return have
