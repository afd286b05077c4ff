"""The transport: quotas and queues on their own, then peers with real daemons on the loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from phalanx.core.codec import encode, encode_frame
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError, Malformed
from phalanx.core.messages import MAX_CHUNK, AggregateChunk, Manifest, Message, PartChunk, PullChain, PullManifest
from phalanx.network.addresses import parse_address
from phalanx.network.lanes import Bucket, Circle, Complaints, FrameStream, Lane, Outbox, Parcel
from phalanx.network.libp2p import Daemon, Unreachable
from phalanx.network.transport import Limits, Quota, Transport

T = TypeVar("T")
RUN = bytes(range(32))
SMALL = f"/phalanx/1/{RUN.hex()[:16]}/small"
BULK = f"/phalanx/1/{RUN.hex()[:16]}/bulk"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NOBODY: frozenset[bytes] = frozenset()


def chunk(number: int, size: int = MAX_CHUNK) -> AggregateChunk:
    return AggregateChunk(number, 0, 0, size, 0, random.Random(number).randbytes(size))


def await_that(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


# ---- Quotas


def test_a_bucket_lets_a_burst_pass_and_then_so_much_a_second() -> None:
    bucket = Bucket(Quota(messages=10, bytes=1000, burst=2), now=0.0)
    assert [bucket.take(50, 0.0) for _ in range(20)] == [0.0] * 20
    assert bucket.take(50, 0.0) == pytest.approx(0.1)
    assert bucket.take(0, 0.2) == 0.0
    assert bucket.take(5000, 100.0) == pytest.approx(3.0)


def test_new_members_start_with_a_members_quota() -> None:
    async def count() -> None:
        circle = Circle(Limits(stranger=Quota(1, 1, 1)), Complaints())
        await circle.hold_to_quota(b"a", Lane.SMALL, 1)
        circle.set(frozenset({b"a"}), NOBODY)
        async with asyncio.timeout(10):
            for _ in range(100):
                await circle.hold_to_quota(b"a", Lane.SMALL, 1)

    asyncio.run(count())


def test_complaints_are_logged_once_a_second_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for number in range(1000):
        complaints.say("one", "one %d", number)
    complaints.say("other", "other")
    assert len(caplog.records) < 10
    assert caplog.messages[0] == "one 0"


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(LocalError):
        Limits(stranger_frame=0)
    with pytest.raises(LocalError):
        Limits(bulk_queue=0)


# ---- Frames


def with_pipe(talk: Callable[[socket.socket, socket.socket], Awaitable[T]]) -> T:
    async def run() -> T:
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            there.setblocking(False)
            async with asyncio.timeout(20):
                return await talk(here, there)

    return asyncio.run(run())


def test_frames_of_any_size_are_found_however_they_are_cut() -> None:
    rng = random.Random(1)
    frames = [rng.randbytes(rng.choice([1, 2, 100, 5000, 16380, 16384, 16385, 100_000])) for _ in range(60)]
    raw = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)

    async def talk(here: socket.socket, there: socket.socket) -> None:
        async def write() -> None:
            place = 0
            while place < len(raw):
                size = rng.choice([1, 3, 5, 50, 20_000, 60_000])
                await asyncio.get_running_loop().sock_sendall(there, raw[place : place + size])
                place += size
                await asyncio.sleep(0)
            there.shutdown(socket.SHUT_WR)

        writing = asyncio.ensure_future(write())
        stream = FrameStream(here, 1, 10.0)
        for frame in frames:
            assert await stream.read(lambda: 1 << 20) == frame
        assert await stream.read(lambda: 1 << 20) is None
        await writing

    with_pipe(talk)


def test_an_empty_frame_is_a_goodbye() -> None:
    async def talk(here: socket.socket, there: socket.socket) -> None:
        there.send(b"\0\0\0\x01a\0\0\0\0")
        stream = FrameStream(here, 1, 10.0)
        assert await stream.read(lambda: 100) == b"a"
        assert await stream.read(lambda: 100) is None

    with_pipe(talk)


@pytest.mark.parametrize("size", [101, 1 << 31])
def test_a_frame_outside_the_limit_is_refused_before_memory_is_taken(size: int) -> None:
    async def talk(here: socket.socket, there: socket.socket) -> None:
        there.send(size.to_bytes(4, "big"))
        with pytest.raises(Malformed):
            await FrameStream(here, 1, 10.0).read(lambda: 100)

    with_pipe(talk)


@pytest.mark.parametrize("beginning", [b"\0", b"\0\0\0", b"\0\x01\0\0abc", b"\0\0\0\x05abc"])
def test_a_frame_that_has_begun_must_go_on(beginning: bytes) -> None:
    async def talk(here: socket.socket, there: socket.socket) -> None:
        there.send(beginning)
        with pytest.raises(TimeoutError):
            await FrameStream(here, 1000, 0.05).read(lambda: 1 << 20)
        there.send(beginning)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            await FrameStream(here, 1000, 10.0).read(lambda: 1 << 20)

    with_pipe(talk)


def test_silence_between_frames_is_no_fault() -> None:
    async def talk(here: socket.socket, there: socket.socket) -> None:
        reading = asyncio.ensure_future(FrameStream(here, 1000, 0.01).read(lambda: 100))
        await asyncio.sleep(0.2)
        there.send(b"\0\0\0\x01a")
        assert await reading == b"a"

    with_pipe(talk)


# ---- Queues


class Link:
    """Streams for an outbox; ``ends`` are the far ends."""

    def __init__(self) -> None:
        self.ends: list[socket.socket] = []
        self.is_up = True
        self.sent: list[Parcel] = []

    async def open(self) -> socket.socket:
        if not self.is_up:
            raise Unreachable("down")
        here, there = socket.socketpair()
        here.setblocking(False)
        there.setblocking(False)
        self.ends.append(there)
        return here

    def make_outbox(self, room: int = 1 << 30, **limits: float) -> Outbox:
        quick = replace(Limits(first_pause=0.001, longest_pause=0.01), **limits)
        return Outbox(self.open, self.sent.append, lambda: room, quick)


def with_link(talk: Callable[[Link], Awaitable[None]]) -> None:
    async def run() -> None:
        link = Link()
        try:
            async with asyncio.timeout(20):
                await talk(link)
        finally:
            for end in link.ends:
                end.close()

    asyncio.run(run())


async def read_frames(stream: socket.socket, count: int) -> list[bytes]:
    frames = FrameStream(stream, 1, 10.0)
    return [await frames.read(lambda: 1 << 24) or b"" for _ in range(count)]


async def end(outbox: Outbox) -> None:
    outbox.task.cancel()
    await asyncio.wait({outbox.task})


def test_what_waits_too_long_gives_way_to_what_is_new() -> None:
    async def talk(link: Link) -> None:
        link.is_up = False
        messages = [PullChain(height) for height in range(100)]
        parcels = [Parcel(message) for message in messages]
        outbox = link.make_outbox(room=sum(parcel.size for parcel in parcels[-10:]))
        for parcel in parcels:
            outbox.put(parcel)
        assert outbox.dropped == 90
        link.is_up = True
        await_opened = asyncio.ensure_future(wait_for_end(link, 0))
        assert await read_frames(await await_opened, 10) == [encode(message) for message in messages[-10:]]
        await end(outbox)

    with_link(talk)


async def wait_for_end(link: Link, index: int) -> socket.socket:
    while len(link.ends) <= index:
        await asyncio.sleep(0.001)
    return link.ends[index]


def test_a_queue_is_bounded_in_messages_too() -> None:
    async def talk(link: Link) -> None:
        link.is_up = False
        outbox = link.make_outbox(queue_messages=5)
        for height in range(8):
            outbox.put(Parcel(PullChain(height)))
        assert outbox.dropped == 3
        await end(outbox)

    with_link(talk)


def test_a_receiver_that_does_not_read_stops_its_own_stream_only() -> None:
    async def talk(link: Link) -> None:
        outbox = link.make_outbox(room=8 << 20)
        for number in range(40):
            outbox.put(Parcel(chunk(number)))
            await asyncio.sleep(0)
        slow = await wait_for_end(link, 0)
        await asyncio.sleep(0.05)
        assert len(link.sent) < 3
        assert outbox.dropped > 20
        frames = await read_frames(slow, 40 - outbox.dropped)
        assert frames[0] == encode(chunk(0))  # a frame that has begun is never given up
        assert frames[-1] == encode(chunk(39))
        await end(outbox)

    with_link(talk)


def test_a_frame_stays_first_until_a_stream_has_taken_it() -> None:
    async def talk(link: Link) -> None:
        outbox = link.make_outbox()
        outbox.put(Parcel(PullChain(1)))
        first = await wait_for_end(link, 0)
        assert await read_frames(first, 1) == [encode(PullChain(1))]
        first.close()
        outbox.put(Parcel(chunk(2)))
        outbox.put(Parcel(PullChain(3)))
        second = await wait_for_end(link, 1)
        assert await read_frames(second, 2) == [encode(chunk(2)), encode(PullChain(3))]
        await end(outbox)

    with_link(talk)


def test_a_receiver_that_writes_back_loses_its_stream_and_is_not_listened_to() -> None:
    async def talk(link: Link) -> None:
        outbox = link.make_outbox()
        outbox.put(Parcel(PullChain(1)))
        first = await wait_for_end(link, 0)
        assert await read_frames(first, 1) == [encode(PullChain(1))]
        taken = 0
        with contextlib.suppress(OSError):
            async with asyncio.timeout(1):
                while True:
                    await asyncio.get_running_loop().sock_sendall(first, bytes(1 << 16))
                    taken += 1 << 16
        assert taken <= 1 << 20, "what fits into the buffers of a socket"
        outbox.put(Parcel(PullChain(2)))
        assert await read_frames(await wait_for_end(link, 1), 1) == [encode(PullChain(2))]
        await end(outbox)

    with_link(talk)


def test_finishing_sends_what_waits() -> None:
    async def talk(link: Link) -> None:
        outbox = link.make_outbox()
        for number in range(5):
            outbox.put(Parcel(chunk(number)))
        finishing = asyncio.ensure_future(outbox.finish())
        there = await wait_for_end(link, 0)
        assert await read_frames(there, 6) == [*(encode(chunk(number)) for number in range(5)), b""]
        assert not finishing.done()  # it waits for the receiver to have read everything
        there.close()
        await finishing

    with_link(talk)


# ---- Peers with daemons


class Peer:
    """A transport, and what it delivered."""

    def __init__(self, folder: Path, name: str, *, peers: tuple[str, ...] = (), limits: Limits | None = None) -> None:
        path = folder / f"{name}.key"
        if not path.exists():
            Identity.generate().save(path)
        self.key = Identity.load(path).key
        self.inbox: list[tuple[bytes, Message]] = []
        self.has_room = True
        limits = Limits() if limits is None else limits
        self.transport = Transport(path, RUN, self.take, listen=LOOPBACK, peers=peers, limits=limits)
        self.transport.start()

    def take(self, key: bytes, message: Message, size: int) -> bool:
        self.inbox.append((key, message))
        return self.has_room

    def await_message(self, sender: Peer | bytes, message: Message) -> None:
        key = sender if isinstance(sender, bytes) else sender.key
        await_that(lambda: (key, message) in self.inbox, f"{message!r:.60} did not arrive")

    @property
    def daemon(self) -> Daemon:
        daemon = self.transport._contacts.daemon
        assert daemon is not None
        return daemon


@contextmanager
def make_peers(folder: Path, *names: str, circle: bool = True, limits: Limits | None = None) -> Iterator[list[Peer]]:
    """Peers that know the first one's address, and each other as members."""
    peers: list[Peer] = []
    try:
        for name in names:
            known = peers[0].transport.addresses if peers else ()
            peers.append(Peer(folder, name, peers=known, limits=limits))
        if circle:
            for peer in peers:
                peer.transport.set_circle(frozenset(other.key for other in peers), NOBODY)
        yield peers
    finally:
        for peer in peers:
            peer.transport.close()


def talk_as(path: Path, peer: Peer, talk: Callable[[Daemon], Awaitable[T]]) -> T:
    """Do something with a bare daemon that is connected to a peer: what no transport of ours would do."""

    async def run() -> T:
        if not path.exists():
            Identity.generate().save(path)
        daemon = await Daemon.start(path, listen=LOOPBACK, relay=False)
        try:
            await daemon.connect(peer.key, [parse_address(text) for text in peer.transport.addresses])
            async with asyncio.timeout(30):
                return await talk(daemon)
        finally:
            await daemon.close()

    return asyncio.run(run())


async def is_closed(stream: socket.socket) -> None:
    """Wait until the other side has ended the stream."""
    try:
        while await asyncio.get_running_loop().sock_recv(stream, 1024):
            pass
    except OSError:
        pass


def test_messages_of_both_lanes_arrive_and_are_counted(tmp_path: Path) -> None:
    with make_peers(tmp_path, "a", "b", "c") as (alice, bob, carol):
        everybody = (alice.key, bob.key, carol.key)
        small, bulk = PullChain(7), PartChunk(1, 0, alice.key, 2, (), MAX_CHUNK, 0, os.urandom(MAX_CHUNK))
        for peer in (alice, bob, carol):
            peer.transport.send(everybody, small)
            peer.transport.send(everybody, bulk)
        for receiver in (alice, bob, carol):
            for sender in (alice, bob, carol):
                receiver.await_message(sender, small)
                receiver.await_message(sender, bulk)
        await_that(lambda: alice.transport.traffic.total.messages == 4, "not everything was counted")
        traffic = alice.transport.traffic
        assert (traffic["pullchain"].messages, traffic["pullchain"].payload) == (2, 0)
        assert traffic["pullchain"].rest == 2 * len(encode_frame(small))
        assert traffic["partchunk"].payload == 2 * MAX_CHUNK
        assert traffic["partchunk"].rest == 2 * (len(encode_frame(bulk)) - MAX_CHUNK)
        assert alice.transport.dropped == 0


def test_one_address_is_enough_to_find_everybody(tmp_path: Path) -> None:
    with make_peers(tmp_path, "a", "b", "c", "d") as peers:
        for sender in peers[1:]:
            sender.transport.send((peer.key for peer in peers), PullManifest())
        for receiver in peers:
            for sender in peers[1:]:
                receiver.await_message(sender, PullManifest())
        books = [peer.transport._contacts.book for peer in peers]
        for book, owner in zip(books, peers, strict=True):
            others = [peer.key for peer in peers if peer is not owner]
            await_that(lambda book=book, others=others: all(map(book.is_sure_of, others)), "an address is not known")


def test_closing_flushes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with make_peers(tmp_path, "a", "b", limits=Limits(flush=30)) as (alice, bob):
        process = alice.daemon._process
        for number in range(20):
            alice.transport.send([bob.key], chunk(number))
        alice.transport.close()
        alice.transport.close()
        assert process.returncode is not None
        alice.transport.send([bob.key], PullChain(1))  # to nobody, and without a word
        with pytest.raises(Unreachable):
            alice.transport.ask(bob.transport.addresses[0], "book", b"", 1, 100)
        bob.await_message(alice, chunk(19))
        assert [message for _, message in bob.inbox] == [chunk(number) for number in range(20)]
    assert set(threading.enumerate()) == before


def test_questions_are_answered_for_strangers_too(tmp_path: Path) -> None:
    with make_peers(tmp_path, "a", "b", circle=False) as (alice, bob):
        address = alice.transport.addresses[0]
        alice.transport.answer("manifest", lambda key, request: b"for " + key + request)
        assert bob.transport.ask(address, "manifest", b"", 10, 100) == b"for " + bob.key
        assert bob.transport.ask(address, "manifest", b"!", 10, 100) == b"for " + bob.key + b"!"
        alice.transport.answer("manifest", lambda key, request: bytes(1 << 20))
        assert bob.transport.ask(address, "manifest", b"", 10, 1 << 20) == bytes(1 << 20)
        with pytest.raises(Unreachable):
            bob.transport.ask(address, "manifest", b"", 10, 100)
        with pytest.raises(Unreachable):
            bob.transport.ask(address, "unheard of", b"", 10, 100)
        alice.transport.set_circle(NOBODY, frozenset({bob.key}))
        with pytest.raises(Unreachable):
            bob.transport.ask(address, "manifest", b"", 10, 1 << 20)


def say_until_heard(sender: Peer, receiver: Peer, message: Message) -> None:
    """What went into a stream just before the receiver closed it is lost: the protocol asks again, and so do we."""

    def is_heard() -> bool:
        sender.transport.send([receiver.key], message)
        time.sleep(0.1)
        return (sender.key, message) in receiver.inbox

    await_that(is_heard, f"{message!r:.60} did not arrive")


def test_strangers_may_say_a_little_and_the_banned_nothing(tmp_path: Path) -> None:
    with make_peers(tmp_path, "a", "b", circle=False) as (alice, bob):
        bob.transport.send([alice.key], PullManifest())
        alice.await_message(bob, PullManifest())
        bob.transport.send([alice.key], chunk(1))
        bob.transport.send([alice.key], Manifest(bytes((1 << 16) - 100)))
        alice.await_message(bob, Manifest(bytes((1 << 16) - 100)))
        assert not any(isinstance(message, AggregateChunk) for _, message in alice.inbox)
        alice.transport.set_circle(frozenset({bob.key}), NOBODY)
        say_until_heard(bob, alice, chunk(2))
        alice.transport.set_circle(frozenset({bob.key}), frozenset({bob.key}))
        await_that(lambda: not alice.transport._incoming, "streams of the banned are open")
        heard = len(alice.inbox)
        for height in range(3):
            bob.transport.send([alice.key], PullChain(height))
            bob.transport.send([alice.key], chunk(height))
            time.sleep(0.1)
        assert len(alice.inbox) == heard
        alice.transport.set_circle(frozenset({bob.key}), NOBODY)
        say_until_heard(bob, alice, PullChain(9))


def test_what_is_malformed_ends_the_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    evil = tmp_path / "evil.key"
    Identity.generate().save(evil)
    bad = [
        b"\0\0\0\x03abc",  # a frame of nonsense
        ((1 << 16) + 1).to_bytes(4, "big") + b"a",  # longer than strangers may
        encode_frame(PullChain(1))[:-1] + b"\xff" + encode_frame(PullChain(2)),
    ]

    async def misbehave(daemon: Daemon) -> None:
        for raw in bad:
            with await daemon.open_stream(alice.key, SMALL) as stream:
                await asyncio.get_running_loop().sock_sendall(stream, encode_frame(PullManifest()) + raw)
                await is_closed(stream)
        with await daemon.open_stream(alice.key, BULK) as stream:  # not for strangers at all
            await is_closed(stream)

    with make_peers(tmp_path, "a") as (alice,), caplog.at_level(logging.WARNING):
        talk_as(evil, alice, misbehave)
        assert [message for _, message in alice.inbox] == [PullManifest()] * len(bad)
        assert caplog.records


def test_a_new_stream_takes_the_place_of_the_old(tmp_path: Path) -> None:
    async def open_two(daemon: Daemon) -> None:
        loop = asyncio.get_running_loop()
        with await daemon.open_stream(alice.key, SMALL) as old:
            await loop.sock_sendall(old, encode_frame(PullChain(1)))
            while not alice.inbox:
                await asyncio.sleep(0.01)
            with await daemon.open_stream(alice.key, SMALL) as new:
                await loop.sock_sendall(new, encode_frame(PullChain(2)))
                await is_closed(old)
                await loop.sock_sendall(new, encode_frame(PullChain(3)))
                while len(alice.inbox) < 3:
                    await asyncio.sleep(0.01)

    with make_peers(tmp_path, "a") as (alice,):
        talk_as(tmp_path / "evil.key", alice, open_two)
        assert [message for _, message in alice.inbox] == [PullChain(height) for height in (1, 2, 3)]


def test_a_frame_that_stalls_is_given_up(tmp_path: Path) -> None:
    async def stall(daemon: Daemon) -> None:
        with await daemon.open_stream(alice.key, SMALL) as stream:
            await asyncio.get_running_loop().sock_sendall(stream, encode_frame(Manifest(bytes(50_000)))[:1000])
            await is_closed(stream)

    with make_peers(tmp_path, "a", limits=Limits(window=0.2)) as (alice,):
        talk_as(tmp_path / "evil.key", alice, stall)
        assert not alice.inbox


def test_strangers_share_a_few_streams_and_the_newest_has_a_place(tmp_path: Path) -> None:
    async def hold(daemon: Daemon) -> None:
        with await daemon.open_stream(alice.key, SMALL) as stream:
            await asyncio.get_running_loop().sock_sendall(stream, encode_frame(PullChain(1)))
            while not alice.inbox:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(talk_as, tmp_path / "second.key", alice, be_heard)
            await is_closed(stream)

    async def be_heard(daemon: Daemon) -> None:
        with await daemon.open_stream(alice.key, SMALL) as stream:
            await asyncio.get_running_loop().sock_sendall(stream, encode_frame(PullChain(2)))
            while len(alice.inbox) < 2:
                await asyncio.sleep(0.01)

    with make_peers(tmp_path, "a", limits=Limits(strangers=1)) as (alice,):
        talk_as(tmp_path / "first.key", alice, hold)
        assert [message for _, message in alice.inbox] == [PullChain(1), PullChain(2)]


def test_strangers_that_do_not_read_share_one_room_and_leave_it_to_others(tmp_path: Path) -> None:
    """They may have as many keys as they like: what waits for all of them together is bounded."""
    limits = Limits(stranger_queue=8 * MAX_CHUNK, strangers_queue=12 * MAX_CHUNK)
    with make_peers(tmp_path, "a", limits=limits) as (alice,):
        greedy = [Identity.generate().key for _ in range(10)]
        modest = Identity.generate().key
        for number in range(8):
            alice.transport.send(greedy, chunk(number))
        alice.transport.send([modest], chunk(8))
        await_that(lambda: (modest, Lane.BULK) in alice.transport._outboxes, "nothing waits")
        waiting = {key: alice.transport._outboxes[key, Lane.BULK].waiting for key in (*greedy, modest)}
        assert sum(waiting.values()) <= 12 * MAX_CHUNK
        assert waiting[modest] > MAX_CHUNK, "who asks for little is served"
        assert alice.transport.dropped >= 81 - 12


@pytest.mark.parametrize(("lane", "message"), [(SMALL, chunk(0, 10)), (BULK, PullChain(0))])
def test_a_message_in_the_wrong_lane_ends_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, lane: str, message: Message
) -> None:
    """In the other one its quota would be another, or nothing would hold it back."""

    async def send(daemon: Daemon) -> None:
        with await daemon.open_stream(alice.key, lane) as stream:
            await asyncio.get_running_loop().sock_sendall(stream, encode_frame(message))
            await is_closed(stream)

    with make_peers(tmp_path, "a") as (alice,):
        Identity.generate().save(tmp_path / "evil.key")
        alice.transport.set_circle(frozenset({alice.key, Identity.load(tmp_path / "evil.key").key}), NOBODY)
        talk_as(tmp_path / "evil.key", alice, send)
        assert not alice.inbox
    assert "has no place here" in caplog.text


def test_who_sends_too_much_is_read_more_slowly_and_not_cut(tmp_path: Path) -> None:
    limits = Limits(member_small=Quota(messages=50, bytes=1 << 20, burst=0.2))
    with make_peers(tmp_path, "a", "b", limits=limits) as (alice, bob):
        for height in range(40):
            bob.transport.send([alice.key], PullChain(height))
        alice.await_message(bob, PullChain(39))
        assert [message for _, message in alice.inbox] == [PullChain(height) for height in range(40)]


def test_a_full_inbox_stops_chunks_and_nothing_else(tmp_path: Path) -> None:
    with make_peers(tmp_path, "a", "b") as (alice, bob):
        alice.has_room = False
        for number in range(30):
            bob.transport.send([alice.key], chunk(number))
        await_that(lambda: alice.inbox, "no chunk arrived")
        for height in range(5):
            bob.transport.send([alice.key], PullChain(height))
        alice.await_message(bob, PullChain(4))
        chunks = [message for _, message in alice.inbox if isinstance(message, AggregateChunk)]
        assert len(chunks) == 1
        alice.has_room = True
        alice.transport.resume()
        alice.await_message(bob, chunk(29))


@pytest.mark.parametrize("who", ["peer", "daemon"])
def test_streams_come_back_after_a_restart(tmp_path: Path, who: str) -> None:
    """Of a whole peer, with the same key at another port; or of the daemon alone, which is killed."""
    with make_peers(tmp_path, "a", "b", "c") as peers:
        alice, bob, carol = peers
        keys = frozenset(peer.key for peer in peers)
        for peer in peers:
            peer.transport.send(keys - {peer.key}, PullChain(1))
        for sender, receiver in ((alice, bob), (bob, alice), (carol, bob)):
            receiver.await_message(sender, PullChain(1))
        if who == "peer":
            bob.transport.close()
            bob = peers[1] = Peer(tmp_path, "b", peers=carol.transport.addresses)
            bob.transport.set_circle(keys, NOBODY)
        else:
            os.kill(bob.daemon._process.pid, signal.SIGKILL)
        alice.inbox.clear()
        bob.inbox.clear()
        height = 1

        def is_heard() -> bool:
            """Whether all three hear from bob, and he from them. They keep talking: what a dead stream took is lost."""
            nonlocal height
            height += 1
            for peer in peers:
                peer.transport.send(keys - {peer.key}, PullChain(height))
            time.sleep(0.05)
            heard_by_bob, heard_by_alice = ({key for key, _ in peer.inbox} for peer in (bob, alice))
            return {alice.key, carol.key} <= heard_by_bob and bob.key in heard_by_alice

        await_that(is_heard, "not everybody is heard again")


def test_what_is_wrong_with_the_start_is_said(tmp_path: Path) -> None:
    Identity.generate().save(tmp_path / "a.key")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = [f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"]
        transport = Transport(tmp_path / "a.key", RUN, lambda key, message, size: None, listen=listen)
        with pytest.raises(LocalError, match="already in use"):
            transport.start()
        transport.close()
        with pytest.raises(LocalError, match="make a new one"):
            transport.start()
    with pytest.raises(LocalError, match="not the address of a peer"):
        Transport(tmp_path / "a.key", RUN, lambda key, message, size: None, peers=["/ip4/1.2.3.4/tcp/1"])
    unused = Transport(tmp_path / "a.key", RUN, lambda key, message, size: None)
    unused.set_circle(NOBODY, NOBODY)
    unused.send([bytes(32)], PullManifest())
    unused.close()
