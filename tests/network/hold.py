"""What strangers do to a peer's door, to be run beside honest peers that must not mind.

    python tests/network/hold.py --address /ip4/127.0.0.1/tcp/4001/p2p/12D3Koo... --run 00ff... --seconds 10 --keys 8

Every key has a daemon of its own, passes the handshake, and does some of these, all with bytes of the protocol:

    silent      opens questions and says nothing, four at a time; opens the next when one is ended
    half        says the first half of a question, and no more
    drip        says a question byte by byte, one in half a second
    deaf        asks for the longest answer there is, and does not read it
    talk        keeps a stream for messages, and sends one now and then so as not to be silent
    state       asks for state, at the latest step it heard of and at random offsets
    chain       asks for the chain of views, and aggregates, and messages, as fast as it may
    reconnect   asks nothing, drops its connection and comes back with a new key

Prints one JSON line: streams opened, streams that could not be opened, bytes of answers, and of state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from phalanx.core.codec import decode_message, encode_frame
from phalanx.core.crypto import Identity
from phalanx.core.errors import Malformed
from phalanx.core.membership import decode_view
from phalanx.core.messages import Chain, Message, PullAggregate, PullChain, PullMessages, PullState, StateChunk
from phalanx.network.addresses import encode_page, parse_address
from phalanx.network.lanes import FrameStream
from phalanx.network.libp2p import Daemon, Unreachable

KINDS = ("silent", "half", "drip", "deaf", "talk", "state", "chain", "reconnect")
_AT_ONCE = 4


class Stranger:
    """One key that somebody made a moment ago."""

    def __init__(self, address: str, run: str, until: float, host: str, counts: Counter[str], seed: int) -> None:
        self._peer, self._run, self._until, self._host = parse_address(address), run, until, host
        self._counts, self._draw = counts, random.Random(seed)
        self._daemon: Daemon | None = None
        self._step = 0

    async def misbehave(self, kinds: Sequence[str]) -> None:
        """Do all of these at once until the time is up."""
        with tempfile.TemporaryDirectory() as folder:
            await self._come(Path(folder) / "key")
            try:
                async with asyncio.timeout(max(0.1, self._until - time.time())), asyncio.TaskGroup() as group:
                    for kind in kinds:
                        for _ in range(_AT_ONCE if kind in ("silent", "half", "drip", "deaf") else 1):
                            group.create_task(self._repeat(getattr(self, f"_be_{kind}"), Path(folder)))
            except TimeoutError:
                pass
            finally:
                assert self._daemon is not None
                await self._daemon.close()

    async def _come(self, key: Path) -> None:
        if not key.exists():
            Identity.generate().save(key)
        self._daemon = await Daemon.start(key, listen=(f"/ip4/{self._host}/tcp/0",), relay=False)
        for lane in ("small", "bulk"):
            await self._daemon.serve(f"/phalanx/1/{self._run[:16]}/{lane}", self._hear)
        with contextlib.suppress(Unreachable):
            await self._daemon.connect(self._peer.key, (self._peer,))

    async def _repeat(self, behave: Callable[[Path], Awaitable[None]], folder: Path) -> None:
        while time.time() < self._until:
            begun = time.time()
            try:
                await behave(folder)
            except Unreachable:
                self._counts["refused"] += 1
            except OSError:
                self._counts["broken"] += 1
            if time.time() - begun < 0.5:
                await asyncio.sleep(0.25)

    async def _open(self, protocol: str) -> socket.socket:
        assert self._daemon is not None
        stream = await self._daemon.open_stream(self._peer.key, protocol)
        self._counts["opened"] += 1
        return stream

    def _hear(self, key: bytes, stream: socket.socket) -> None:
        asyncio.get_running_loop().create_task(self._listen(stream))

    async def _listen(self, stream: socket.socket) -> None:
        """Count what comes back."""
        frames = FrameStream(stream, 1, 60.0)
        with stream, contextlib.suppress(OSError, EOFError, TimeoutError, Malformed):
            while (frame := await frames.read(lambda: 1 << 24)) is not None:
                message = decode_message(frame)
                self._counts["answers"] += len(frame)
                if isinstance(message, StateChunk):
                    self._counts["state"] += len(message.data)
                elif isinstance(message, Chain):
                    views = [decode_view(link.view) for link in message.links]
                    self._step = max([self._step, *(view.step for view in views if view is not None)])

    # -- questions

    async def _be_silent(self, folder: Path) -> None:
        with await self._open("/phalanx/1/ask/manifest") as stream:
            await asyncio.get_running_loop().sock_recv(stream, 1)

    async def _be_half(self, folder: Path) -> None:
        with await self._open("/phalanx/1/ask/manifest") as stream:
            await asyncio.get_running_loop().sock_sendall(stream, (100).to_bytes(4, "big") + bytes(50))
            await asyncio.get_running_loop().sock_recv(stream, 1)

    async def _be_drip(self, folder: Path) -> None:
        with await self._open("/phalanx/1/ask/manifest") as stream:
            for byte in (100).to_bytes(4, "big") + bytes(100):
                await asyncio.get_running_loop().sock_sendall(stream, bytes([byte]))
                await asyncio.sleep(0.5)

    async def _be_deaf(self, folder: Path) -> None:
        what, request = self._draw.choice([("task", b""), ("book", encode_page([]))])
        with await self._open(f"/phalanx/1/ask/{what}") as stream:
            await asyncio.get_running_loop().sock_sendall(stream, len(request).to_bytes(4, "big") + request)
            await asyncio.sleep(20)

    # -- messages

    async def _be_talk(self, folder: Path) -> None:
        await self._say_often(lambda: [PullMessages(self._draw.randrange(100), (self._peer.key,))], 2.0)

    async def _be_state(self, folder: Path) -> None:
        def ask() -> list[Message]:
            step = max(0, self._step - self._draw.randrange(3))
            pulls: list[Message] = [PullState(step, self._draw.choice([0, self._draw.randrange(1 << 20)]))]
            return pulls + [PullChain(0)] * (self._draw.random() < 0.2)

        await self._say_often(ask, 0.05)

    async def _be_chain(self, folder: Path) -> None:
        def ask() -> list[Message]:
            step, part = max(0, self._step - self._draw.randrange(2)), self._draw.randrange(4)
            pulls: list[Message] = [
                PullChain(0),
                PullAggregate(step, 0, part, 0),
                PullMessages(step, (self._peer.key,)),
            ]
            return pulls

        await self._say_often(ask, 0.05)

    async def _say_often(self, make: Callable[[], list[Message]], pause: float) -> None:
        with await self._open(f"/phalanx/1/{self._run[:16]}/small") as stream:
            ended = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(stream, 1))
            try:
                while not ended.done():
                    for message in make():
                        await asyncio.get_running_loop().sock_sendall(stream, encode_frame(message))
                    await asyncio.sleep(pause)
            finally:
                ended.cancel()
                await asyncio.gather(ended, return_exceptions=True)

    async def _be_reconnect(self, folder: Path) -> None:
        assert self._daemon is not None
        streams = []
        with contextlib.suppress(Unreachable):  # starting a daemon is work, also where nobody is
            streams = [await self._open("/phalanx/1/ask/manifest") for _ in range(_AT_ONCE)]
        await asyncio.sleep(0.5)
        for stream in streams:
            stream.close()
        await self._daemon.close()
        self._counts["keys"] += 1
        await self._come(folder / f"key-{self._counts['keys']}")


async def besiege(
    addresses: Sequence[str], run: str, seconds: float, kinds: Sequence[str], keys: int, hosts: int = 1, seed: int = 0
) -> dict[str, int]:
    """So many strangers, each doing all of these to one of the peers, from ``hosts`` addresses of this machine."""
    if unknown := set(kinds) - set(KINDS):
        raise ValueError(f"no such kind: {', '.join(sorted(unknown))}")
    counts: Counter[str] = Counter()
    until = time.time() + seconds
    strangers = [
        Stranger(addresses[place % len(addresses)], run, until, f"127.0.0.{1 + place % hosts}", counts, seed + place)
        for place in range(keys)
    ]
    async with asyncio.TaskGroup() as group:
        for place, stranger in enumerate(strangers):
            calm = [kind for kind in kinds if kind != "reconnect"]
            own = ["reconnect"] if "reconnect" in kinds and (not calm or place % 4 == 3) else calm
            group.create_task(stranger.misbehave(own))
    return dict(counts)


def main() -> None:
    parser = argparse.ArgumentParser(description="Strangers at a peer's door.")
    parser.add_argument("--address", required=True, nargs="+")
    parser.add_argument("--run", required=True, help="the run in hexadecimal, as in the event RunStarted")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--hosts", type=int, default=1, help="addresses of the loopback to come from")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    options = parser.parse_args()
    found = asyncio.run(
        besiege(options.address, options.run, options.seconds, options.kinds, options.keys, options.hosts)
    )
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
