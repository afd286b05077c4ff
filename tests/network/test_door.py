"""The door: how many streams a key may open, and what happens to the others. Sockets stand for streams."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from phalanx.network import door
from phalanx.network.door import Door
from phalanx.network.lanes import Circle, Complaints, Limits, Quota
from phalanx.network.libp2p import Tasks

ALICE, MALLORY = bytes([1]) * 32, bytes([2]) * 32


class Entrance:
    """A door that two streams of each key pass at once, then one an hour."""

    def __init__(self) -> None:
        self.tasks, self.came = Tasks(), list[bytes]()
        self.circle = Circle(Limits(openings=Quota(messages=1 / 3600, bytes=1, burst=7200)), Complaints())
        self._accept = Door(self.circle, self.tasks).guard(self._let_in)
        self._streams = list[socket.socket]()

    def _let_in(self, key: bytes, stream: socket.socket) -> None:
        self.came.append(key)
        self._streams.append(stream)

    def open(self, key: bytes) -> socket.socket:
        """The far end of a new stream."""
        near, far = socket.socketpair()
        for end in (near, far):
            end.setblocking(False)
        self._streams.append(far)
        self._accept(key, near)
        return far

    async def end(self) -> None:
        await self.tasks.end()
        await asyncio.sleep(0)
        for stream in self._streams:
            stream.close()


def at_the_door(talk: Callable[[Entrance], Awaitable[None]]) -> None:
    async def run() -> None:
        entrance = Entrance()
        try:
            async with asyncio.timeout(20):
                await talk(entrance)
        finally:
            await entrance.end()

    asyncio.run(run())


async def await_end(stream: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):  # as it is if something was not read
        assert await asyncio.get_running_loop().sock_recv(stream, 1) == b""


async def is_open(stream: socket.socket) -> bool:
    await asyncio.sleep(0.02)
    try:
        return bool(stream.recv(1))
    except BlockingIOError:
        return True


def test_who_opens_too_many_streams_is_kept_waiting_and_others_are_not() -> None:
    async def talk(entrance: Entrance) -> None:
        far = [entrance.open(MALLORY) for _ in range(5)]
        entrance.open(ALICE)
        assert entrance.came == [MALLORY, MALLORY, ALICE]
        assert all([await is_open(stream) for stream in far]), "closed, it would open another at once"

    at_the_door(talk)


def test_who_is_kept_waiting_may_say_little_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(entrance: Entrance) -> None:
        far = [entrance.open(MALLORY) for _ in range(4)]
        far[2].send(bytes(10))
        assert await is_open(far[2])
        far[2].send(bytes(10_000))
        await await_end(far[2])  # it said too much
        assert await is_open(far[3])
        monkeypatch.setattr(door, "_PATIENCE", 0.05)
        await await_end(entrance.open(MALLORY))

    at_the_door(talk)


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_HELD", 3)

    async def talk(entrance: Entrance) -> None:
        far = [entrance.open(MALLORY) for _ in range(7)]
        assert [await is_open(stream) for stream in far[2:]] == [True, True, True, False, False]
        far[2].close()
        await asyncio.sleep(0.02)
        assert await is_open(entrance.open(MALLORY)), "one has gone, and made room"

    at_the_door(talk)


def test_who_becomes_a_member_starts_anew() -> None:
    async def talk(entrance: Entrance) -> None:
        for _ in range(3):
            entrance.open(ALICE)
        entrance.circle.set(frozenset({ALICE}), frozenset())
        entrance.open(ALICE)
        assert entrance.came == [ALICE] * 3

    at_the_door(talk)
