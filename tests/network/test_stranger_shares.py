"""Strangers at the door: what many free keys can take of a peer, and what they cannot keep from others."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.crypto import Identity
from phalanx.core.messages import MAX_CHUNK, Message, PullChain, PullState, StateChunk
from phalanx.network.addresses import encode_place, find_host, parse_address
from phalanx.network.lanes import Circle, Complaints, Limits, Quota
from phalanx.network.libp2p import Daemon
from phalanx.network.strangers import Accounts, Hosts, Rank, Share, choose_leaver
from phalanx.network.transport import Transport

HOLD = Path(__file__).parent / "hold.py"
RUN = bytes(range(32))
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
KEYS = [bytes([number]) * 32 for number in range(1, 250)]
ALICE, BOB, CAROL, *MANY = KEYS
_RELAY = "12D3KooWJ27na6SMGYTvfjezmzVtq8THGQrgJeC71wFNEogChiyZ"


# ---- Hosts


@pytest.mark.parametrize(
    ("place", "host"),
    [
        ("/ip4/203.0.113.7/tcp/4001", "203.0.113.7"),
        ("/ip4/203.0.113.7/udp/4001/quic-v1", "203.0.113.7"),
        ("/ip6/2001:db8:1:2:3:4:5:6/tcp/1", "2001:db8:1:2::/64"),
        ("/ip6/2001:db8:1:2:ffff::1/tcp/2", "2001:db8:1:2::/64"),
        ("/ip6/::ffff:203.0.113.7/tcp/1", "203.0.113.7"),
        (f"/ip4/198.51.100.1/tcp/1/p2p/{_RELAY}/p2p-circuit", "198.51.100.1"),
        ("/dns4/example.org/tcp/1", ""),
    ],
)
def test_keys_of_one_host_are_known_as_such(place: str, host: str) -> None:
    assert find_host(encode_place(place)) == host


def test_a_place_that_is_no_address_is_no_host() -> None:
    assert find_host(b"") == find_host(b"\xff\xff\xff") == find_host(b"\x04\x7f") == ""


def test_hosts_and_accounts_of_the_latest_keys_are_kept() -> None:
    hosts, accounts = Hosts(), Accounts()
    for number in range(10_000):
        hosts.note(number.to_bytes(32, "big"), str(number))
        accounts.add(number, 1.0, 0.0)
    assert hosts.get((9_999).to_bytes(32, "big")) == "9999"
    assert hosts.get(bytes(32)) == ""
    assert accounts.get(9_999, 0.0) == 1.0
    assert accounts.get(9_999, 60.0) == 0.5
    assert accounts.get(0, 0.0) == 0.0


# ---- Places


class Someone:
    def __init__(self, key: bytes, host: str, last_heard: float) -> None:
        self.key, self.host, self.last_heard = key, host, last_heard


def test_the_host_with_most_places_gives_one_up_and_of_its_own_the_one_silent_longest() -> None:
    honest = Someone(BOB, "honest", 0.0)
    crowd = [Someone(key, "crowd", 10.0 + number) for number, key in enumerate(MANY[:20])]
    assert choose_leaver([honest, *crowd]) is crowd[0]


def test_of_one_host_the_key_with_most_places_gives_one_up() -> None:
    honest = Someone(BOB, "shared", 0.0)
    greedy = [Someone(CAROL, "shared", 5.0), Someone(CAROL, "shared", 6.0)]
    assert choose_leaver([honest, *greedy]) is greedy[0]


def test_where_all_have_one_place_the_one_silent_longest_gives_it_up() -> None:
    guests = [Someone(key, str(number), float(number)) for number, key in enumerate(MANY[:20])]
    assert choose_leaver(guests[::-1]) is guests[0]


def test_among_those_just_heard_the_one_that_had_most_gives_its_place_up() -> None:
    now = time.monotonic()
    quiet, loud, newest = (Someone(key, "shared", now - age) for key, age in ((BOB, 1.0), (CAROL, 0.1), (ALICE, 0.0)))
    assert choose_leaver([quiet, loud, newest], {BOB: 1.0, CAROL: 50.0, ALICE: 0.0}.__getitem__) is loud


# ---- Turns and bytes


class Line:
    """A share, and the order in which those who wait for it are served."""

    def __init__(self, rate: float, burst: float, former: frozenset[bytes] = frozenset(), **options: Any) -> None:
        self.members: set[bytes] = {ALICE}
        self._former = former
        self.hosts = Hosts()
        self.share = Share(rate, burst, self._get_rank, self.hosts, **options)
        self.served: list[bytes] = []
        self._tasks: list[asyncio.Task[None]] = []

    def _get_rank(self, key: bytes) -> Rank:
        if key in self.members:
            return Rank.MEMBER
        return Rank.FORMER if key in self._former else Rank.STRANGER

    def stand(self, key: bytes, host: str, cost: float = 1.0, kind: object = None) -> None:
        async def wait() -> None:
            await self.share.take(key, cost, kind)
            self.served.append(key)

        self.hosts.note(key, host)
        self._tasks.append(asyncio.ensure_future(wait()))

    async def await_served(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.served) < count:
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.share.end()


def test_all_strangers_together_get_so_much_a_second() -> None:
    async def run() -> None:
        line = Line(rate=100.0, burst=10.0)
        begun = time.monotonic()
        for number in range(60):
            line.stand(MANY[number], str(number % 7))
        await line.await_served(60)
        assert time.monotonic() - begun > 0.45
        await line.end()

    asyncio.run(run())


def test_one_host_takes_its_own_share_however_many_keys_it_has() -> None:
    async def run() -> None:
        line = Line(rate=200.0, burst=1.0)
        for key in MANY[:100]:
            line.stand(key, "crowd")
        await line.await_served(5)
        line.stand(BOB, "honest")
        line.stand(BOB, "honest")
        await line.await_served(12)
        assert line.served.count(BOB) == 2, "one behind a hundred others"
        await line.end()

    asyncio.run(run())


def test_of_one_host_the_key_that_had_least_comes_first() -> None:
    async def run() -> None:
        line = Line(rate=200.0, burst=1.0)
        for _ in range(50):
            line.stand(CAROL, "shared")
        await line.await_served(5)
        line.stand(BOB, "shared")
        await line.await_served(8)
        assert BOB in line.served
        await line.end()

    asyncio.run(run())


def test_members_stand_in_no_line_and_who_becomes_one_leaves_it() -> None:
    async def run() -> None:
        line = Line(rate=0.001, burst=1.0)
        line.stand(CAROL, "crowd", cost=1000)
        line.stand(BOB, "honest")
        line.stand(ALICE, "member", cost=1e9)
        await line.await_served(2)
        assert set(line.served) == {CAROL, ALICE}
        line.members.add(BOB)
        await line.await_served(3)
        await line.end()

    asyncio.run(run())


def test_former_members_come_first_and_leave_a_quarter_to_others() -> None:
    async def run() -> None:
        former = frozenset(MANY[:3])
        line = Line(rate=2000.0, burst=1.0, former=former)
        for number in range(200):
            line.stand(MANY[number % 3], "former")
            line.stand(MANY[100 + number % 100], str(number))
        await line.await_served(100)
        share = sum(key in former for key in line.served[:100])
        assert 70 <= share <= 80, "of a hundred"
        await line.end()

    asyncio.run(run())


def test_of_one_kind_only_so_many_go_in_a_window_and_others_go_on() -> None:
    async def run() -> None:
        line = Line(rate=1e6, burst=1e6, window=60.0, get_limit=lambda kind: 3 if kind == "rare" else None)
        for key in MANY[:10]:
            line.stand(key, "crowd", kind="rare")
        line.stand(BOB, "honest", kind="common")
        await line.await_served(4)
        await asyncio.sleep(0.05)
        assert len(line.served) == 4
        assert BOB in line.served
        line.stand(CAROL, "honest", kind="rare")
        line.share.renew()
        await line.await_served(7)
        assert CAROL in line.served, "its host had less than the crowd's"
        await line.end()

    asyncio.run(run())


def test_who_gives_up_waiting_takes_nothing() -> None:
    async def run() -> None:
        line = Line(rate=10.0, burst=1.0)
        line.stand(CAROL, "crowd", cost=3.0)
        await line.await_served(1)
        for key in MANY[:50]:
            line.stand(key, "crowd")
        await asyncio.sleep(0)
        for task in line._tasks[1:]:
            task.cancel()
        line.stand(BOB, "crowd")
        await line.await_served(2)
        assert line.served[-1] == BOB
        await line.end()

    asyncio.run(run())


# ---- Streams of one host


def test_one_host_opens_only_so_many_streams_whatever_its_keys() -> None:
    circle = Circle(Limits(openings_of_host=Quota(messages=1 / 3600, bytes=1, burst=3600 * 20)), Complaints())
    for key in MANY[:10]:
        circle.hosts.note(key, "crowd")
    opened = sum(circle.may_open(key) for _ in range(30) for key in MANY[:10])
    assert opened == 80, "eight of each key pass: behind one address there may be many people"
    circle.hosts.note(BOB, "honest")
    assert all(circle.may_open(BOB) for _ in range(20))
    circle.hosts.note(CAROL, "crowd")
    assert circle.may_open(CAROL)
    circle.set(frozenset({ALICE}), frozenset())
    circle.hosts.note(ALICE, "crowd")
    assert all(circle.may_open(ALICE) for _ in range(20)), "a member is not counted with its host"


# ---- Peers with daemons


class Host:
    """A peer that answers strangers as a member of a run would."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        path = folder / "host.key"
        Identity.generate().save(path)
        self.inbox: list[tuple[bytes, Message]] = []
        self.transport = Transport(path, RUN, self._take, listen=LOOPBACK, limits=limits or Limits())
        self.transport.start()
        self.transport.answer("manifest", lambda key, request: b"manifest")
        self.transport.answer("task", lambda key, request: bytes(1 << 20))
        self.transport.set_circle(frozenset({ALICE}), frozenset())

    @property
    def address(self) -> str:
        return self.transport.addresses[0]

    def _take(self, key: bytes, message: Message, size: int) -> bool:
        self.inbox.append((key, message))
        if isinstance(message, PullState):
            self.transport.send([key], StateChunk(message.step, MAX_CHUNK, 0, bytes(MAX_CHUNK)))
        return True


@contextmanager
def hosting(folder: Path, limits: Limits | None = None) -> Iterator[Host]:
    host = Host(folder, limits)
    try:
        yield host
    finally:
        host.transport.close()


class Newcomer:
    """An honest peer that nobody knows yet."""

    def __init__(self, folder: Path, address: str, name: str = "new") -> None:
        path = folder / f"{name}.key"
        Identity.generate().save(path)
        self.address, self.key = address, Identity.load(path).key
        self.chunks = 0
        self.transport = Transport(path, RUN, self._take, listen=LOOPBACK, peers=(address,))
        self.transport.start()
        self.transport.set_circle(frozenset({parse_address(address).key}), frozenset())

    def _take(self, key: bytes, message: Message, size: int) -> bool:
        self.chunks += isinstance(message, StateChunk)
        return True

    def ask(self) -> bytes:
        return self.transport.ask(self.address, "manifest", b"", 10, 100)


@contextmanager
def besieged(host: Host, keys: int, kinds: list[str], seconds: float = 60.0, hosts: int = 1) -> Iterator[None]:
    """While this many strangers are at it, and have been for a moment."""
    words = ["--address", host.address, "--run", RUN.hex(), "--seconds", str(seconds), "--keys", str(keys)]
    words = [sys.executable, str(HOLD), *words, "--hosts", str(hosts), "--kinds", *kinds]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        time.sleep(4.0)
        yield
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("kind", ["silent", "deaf"])
def test_who_asks_nothing_or_hears_nothing_keeps_no_place_from_others(tmp_path: Path, kind: str) -> None:
    """Ten keys hold four questions each; there are 32 places."""
    with hosting(tmp_path) as host:
        newcomer = Newcomer(tmp_path, host.address)
        try:
            with besieged(host, 10, [kind]):
                for _ in range(5):
                    assert newcomer.ask() == b"manifest"
                    time.sleep(0.2)
        finally:
            newcomer.transport.close()


@pytest.mark.parametrize("beginning", [b"", (100).to_bytes(4, "big") + bytes(50)], ids=["silent", "half"])
@pytest.mark.parametrize("drip", [False, True], ids=["at once", "drip"])
def test_a_question_is_asked_within_two_seconds(tmp_path: Path, beginning: bytes, drip: bool) -> None:
    async def hold() -> float:
        Identity.generate().save(tmp_path / "evil.key")
        daemon = await Daemon.start(tmp_path / "evil.key", listen=LOOPBACK, relay=False)
        peer, loop = parse_address(host.address), asyncio.get_running_loop()
        try:
            await daemon.connect(peer.key, (peer,))
            begun = time.monotonic()
            with await daemon.open_stream(peer.key, "/phalanx/1/ask/manifest") as stream:
                ended = asyncio.ensure_future(loop.sock_recv(stream, 1))
                await loop.sock_sendall(stream, beginning)
                while not ended.done():
                    if drip and beginning:
                        await loop.sock_sendall(stream, b"\0")
                    await asyncio.wait({ended}, timeout=0.2)
            return time.monotonic() - begun
        finally:
            await daemon.close()

    with hosting(tmp_path) as host:
        assert 1.5 < asyncio.run(hold()) < 6.0


def test_strangers_draw_no_more_than_their_bytes_and_a_newcomer_gets_its_own(tmp_path: Path) -> None:
    limits = Limits(strangers_rate=1 << 21)
    with hosting(tmp_path, limits) as host:
        greedy = [Newcomer(tmp_path, host.address, f"greedy-{number}") for number in range(4)]
        newcomer = Newcomer(tmp_path, host.address)
        peer = parse_address(host.address).key
        stop = threading.Event()

        def draw() -> None:
            while not stop.wait(0.02):
                for one in greedy:
                    one.transport.send([peer], PullState(0, random.randrange(1 << 20)))

        drawing = threading.Thread(target=draw)
        drawing.start()
        try:
            time.sleep(3.0)
            before, begun = sum(one.chunks for one in greedy), time.monotonic()
            for _ in range(3):
                had, asked = newcomer.chunks, time.monotonic()
                newcomer.transport.send([peer], PullState(0, 0))
                while newcomer.chunks == had:
                    assert time.monotonic() - asked < 10.0, "the newcomer gets nothing"
                    time.sleep(0.01)
            time.sleep(max(0.0, begun + 5.0 - time.monotonic()))
            drawn = (sum(one.chunks for one in greedy) - before) * MAX_CHUNK / (time.monotonic() - begun)
            assert drawn < 1.5 * limits.strangers_rate
        finally:
            stop.set()
            drawing.join()
            for one in (*greedy, newcomer):
                one.transport.close()


def test_a_stranger_is_heard_while_others_talk_without_end(tmp_path: Path) -> None:
    """Each keeps a stream, and there are fewer places; what they say is more than all may say."""
    with hosting(tmp_path, Limits(strangers=8)) as host, besieged(host, 12, ["chain", "talk"]):
        newcomer = Newcomer(tmp_path, host.address)
        try:
            heard = {message for key, message in host.inbox if key == newcomer.key}
            assert heard == set()
            begun = time.monotonic()
            for height in range(5):
                newcomer.transport.send([parse_address(host.address).key], PullChain(1000 + height))
            while len({message for key, message in host.inbox if key == newcomer.key}) < 5:
                assert time.monotonic() - begun < 20.0, "the newcomer is not heard"
                time.sleep(0.02)
        finally:
            newcomer.transport.close()
        count, begun = len(host.inbox), time.monotonic()
        time.sleep(3.0)
        assert (len(host.inbox) - count) / (time.monotonic() - begun) < 75, "all strangers together have 50 a second"
