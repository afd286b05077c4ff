"""How peers find one another, and what they ask before they share a run.

A question is a stream of its own: a request, then an answer, each behind its length. One question every transport
answers: "book". Who asks it says where it can be found itself, and is told where the circle's members can be found. So
the address of any one of them is enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from phalanx.core.errors import Malformed
from phalanx.network.addresses import (
    MAX_PAGE,
    MAX_PER_KEY,
    Address,
    Book,
    decode_page,
    encode_page,
    name_peer,
)
from phalanx.network.door import Door
from phalanx.network.lanes import ASK, Circle, Complaints, FrameStream, Limits
from phalanx.network.libp2p import Daemon, Tasks, Unreachable
from phalanx.network.strangers import Share, choose_leaver

Answerer: TypeAlias = Callable[[bytes, bytes], bytes]
"""From who asks, and the request, to the answer. Called in the network's thread: quick, and never back into it."""

BOOK = "book"
MAX_REQUEST = 1 << 12
"""Bytes of a question: four addresses fit."""

_QUESTIONS_AT_ONCE = 4  # of one peer
_ANSWER_TIMEOUT = 30.0
_SPOONFUL = 1 << 14  # bytes of an answer after which it is noted that they were taken
_SEARCH_PAUSE = 2.0
_SEARCH_AMONG = 3
_MEET_PAUSE = 15.0


class Contacts:
    """The book of addresses, and questions in both directions. It lives in the transport's event loop."""

    def __init__(
        self,
        circle: Circle,
        door: Door,
        limits: Limits,
        complaints: Complaints,
        peers: Sequence[Address],
        turns: Share,
        purse: Share,
    ) -> None:
        self.book = Book()
        self.own: tuple[str, ...] = ()
        """Where others can find us."""
        self.daemon: Daemon | None = None
        self.answerers: dict[str, Answerer] = {BOOK: self._answer_book}
        self.found: Callable[[bytes], None] = lambda key: None
        """Called with whom there are new addresses of."""
        self._circle, self._door, self._limits = circle, door, limits
        self._complaints, self._peers = complaints, tuple(peers)
        self._turns, self._purse = turns, purse
        self._questions: set[_Question] = set()
        self._tasks = Tasks()
        self._meeting: asyncio.Task[None] | None = None
        self._being_greeted: set[bytes] = set()
        self._last_search = -_SEARCH_PAUSE
        self.add(peers)

    async def use(self, daemon: Daemon) -> None:
        """Start with a daemon, or with a new one after the last has ended."""
        self.daemon = daemon
        for what in tuple(self.answerers):
            await self.serve(what)
        if self._meeting is not None:
            self._meeting.cancel()
        self._meeting = self._tasks.spawn(self._meet())

    async def end(self) -> None:
        await self._tasks.end()

    # -- reaching others

    async def reach(self, key: bytes, protocol: str) -> socket.socket:
        """A stream to somebody. If that fails, others will be asked for its addresses."""
        try:
            daemon = self._get_daemon()
            await daemon.connect(key, self.book.get(key))
            if key in self._circle.members:
                await daemon.favour(key)
            stream = await daemon.open_stream(key, protocol)
        except Unreachable:
            self.book.forget_hearsay(key)
            self._look_for(key)
            raise
        self.greet(key)
        return stream

    def _get_daemon(self) -> Daemon:
        if self.daemon is None or self.daemon.ended.is_set():
            raise Unreachable("the network daemon has ended; it is started again")
        return self.daemon

    async def ask(
        self, key: bytes, addresses: Iterable[Address], what: str, request: bytes, timeout: float, limit: int
    ) -> bytes:
        """Ask one peer one question."""
        try:
            async with asyncio.timeout(timeout):
                daemon = self._get_daemon()
                await daemon.connect(key, (*addresses, *self.book.get(key)))
                with await daemon.open_stream(key, _name_service(what)) as stream:
                    await asyncio.get_running_loop().sock_sendall(stream, len(request).to_bytes(4, "big") + request)
                    return await self._read(stream, limit)
        except TimeoutError:
            raise Unreachable(f"peer {name_peer(key)}: no answer within {timeout:.0f} s") from None
        except (OSError, EOFError, Malformed) as error:
            raise Unreachable(f"peer {name_peer(key)} does not answer about {what!r}: {error}") from None

    # -- being asked

    async def serve(self, what: str) -> None:
        """Have others' questions about ``what`` answered."""
        acceptor = self._door.guard(lambda key, stream: self._accept(key, what, stream))
        await self._get_daemon().serve(_name_service(what), acceptor)

    def _accept(self, key: bytes, what: str, stream: socket.socket) -> None:
        """Give a question a place. If there is none left, a stranger's gives way: never does the new one wait."""
        own = [question for question in self._questions if question.key == key]
        if key in self._circle.banned or len(own) >= _QUESTIONS_AT_ONCE:
            stream.close()
            self._complaints.say("questions", "a question of peer %s was refused", key)
            return
        strange = [question for question in self._questions if question.key not in self._circle.members]
        if key not in self._circle.members and len(strange) >= self._limits.strangers:
            self._complaints.say("crowd", "strangers ask too much at once; those who hold most places give way")
            self._see_off(choose_leaver(strange))
        question = _Question(key, self._circle.hosts.get(key), stream)
        self._questions.add(question)
        question.task = self._tasks.spawn(self._answer(question, what))
        question.task.add_done_callback(lambda _: self._see_off(question))

    def _see_off(self, question: _Question) -> None:
        question.task.cancel()
        question.stream.close()
        self._questions.discard(question)

    async def _answer(self, question: _Question, what: str) -> None:
        key, stream = question.key, question.stream
        try:
            async with asyncio.timeout(self._limits.question_time):
                request = await self._read(stream, MAX_REQUEST)
            question.last_heard = time.monotonic()
            async with asyncio.timeout(_ANSWER_TIMEOUT):
                await self._circle.hold_to_quota(key, ASK, 0)
                await self._turns.take(key, 1, ASK)
                answer = self.answerers[what](key, request)
                await self._purse.take(key, len(answer))
                await question.write(answer)
                while await asyncio.get_running_loop().sock_recv(stream, 1024):
                    pass  # who asked closes the stream: were we to, the end of the answer might not arrive
        except (OSError, EOFError, TimeoutError, Malformed):
            pass  # it may ask again

    async def _read(self, stream: socket.socket, limit: int) -> bytes:
        frame = await FrameStream(stream, self._limits.minimum_rate, self._limits.window).read(lambda: limit, least=0)
        if frame is None:
            raise EOFError("the stream ended")
        return frame

    # -- the book

    def add(self, addresses: Iterable[Address]) -> None:
        """Take what our user, or its owner, says of somebody."""
        for address in addresses:
            self.book.add(address, self._circle.members)
            self.found(address.key)

    def greet(self, key: bytes) -> None:
        """There is a stream to or from somebody: if it is a member of whom there is only hearsay, ask it."""
        if key in self._circle.members and key not in self._being_greeted and not self.book.is_sure_of(key):
            self._being_greeted.add(key)
            task = self._tasks.spawn(self._try_exchange(key))
            task.add_done_callback(lambda _: self._being_greeted.discard(key))

    def _answer_book(self, sender: bytes, request: bytes) -> bytes:
        self.add(address for address in decode_page(request, MAX_PER_KEY) if address.key == sender)
        members = self._circle.members - {sender}
        return encode_page((*self.own[:MAX_PER_KEY], *self.book.list_for(members)))

    async def _exchange(self, key: bytes, *addresses: Address) -> None:
        """Tell somebody where we are, and learn where it knows others to be."""
        page = await self.ask(key, addresses, BOOK, encode_page(self.own[:MAX_PER_KEY]), 10, MAX_PAGE)
        for address in decode_page(page):
            if address.key == key:
                self.add((address,))
            elif address.key in self._circle.members or not self._circle.members:
                self.book.add_hearsay(address)
                self.found(address.key)

    async def _try_exchange(self, key: bytes) -> None:
        with contextlib.suppress(Unreachable):
            await self._exchange(key)

    async def _meet(self) -> None:
        """Talk once to each of the peers that we were given, however long that takes."""
        left = {peer.key: peer for peer in self._peers}
        while left:
            for peer in tuple(left.values()):
                with contextlib.suppress(Unreachable):
                    await self._exchange(peer.key, peer)
                    del left[peer.key]
            if left:
                await asyncio.sleep(_MEET_PAUSE * random.uniform(0.1, 1))

    def _look_for(self, key: bytes) -> None:
        """Ask a few others where somebody is; not often, however many cannot be reached."""
        if time.monotonic() - self._last_search < _SEARCH_PAUSE:
            return
        self._last_search = time.monotonic()
        others = (self._circle.members | {peer.key for peer in self._peers}) & self.book.keys() - {key}
        for other in random.sample(sorted(others), min(_SEARCH_AMONG, len(others))):
            self._tasks.spawn(self._try_exchange(other))


class _Question:
    """A stream on which somebody asks."""

    __slots__ = ("host", "key", "last_heard", "stream", "task")

    task: asyncio.Task[None]

    def __init__(self, key: bytes, host: str, stream: socket.socket) -> None:
        self.key, self.host, self.stream = key, host, stream
        self.last_heard = time.monotonic()

    async def write(self, answer: bytes) -> None:
        """Send an answer, and note how it is taken."""
        loop, data = asyncio.get_running_loop(), len(answer).to_bytes(4, "big") + answer
        for start in range(0, len(data), _SPOONFUL):
            await loop.sock_sendall(self.stream, data[start : start + _SPOONFUL])
            self.last_heard = time.monotonic()


def _name_service(what: str) -> str:
    return f"/phalanx/1/ask/{what}"
