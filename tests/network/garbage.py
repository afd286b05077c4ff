"""Hostile traffic against one peer, to be run beside honest peers that must not mind.

    python tests/network/garbage.py --host 127.0.0.1 --port 4001 --seconds 10 --kinds random slow
    python tests/network/garbage.py --address /ip4/127.0.0.1/tcp/4001/p2p/12D3Koo... --run 00ff... --seconds 10

The first talks to a TCP port, where a libp2p daemon waits for a handshake. The second has a key, passes the handshake,
and talks on streams of our protocol, where frames are expected. The kinds of garbage are the same:

    random        random bytes, some of them in a frame of the right length
    truncated     the beginning of what a peer says, cut somewhere; the line is dropped or left open
    huge          a frame that is announced to have a gigabyte, and then bytes for as long as they are taken
    connections   a hundred new lines a second, dropped at once or held until there are too many
    slow          many lines, one byte a second on each

Prints one JSON line: for each kind how many lines were opened, refused (a dead port is fine) and closed by the other
side, and the bytes sent. What it takes for itself is bounded: see ``sockets``.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import resource
import tempfile
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GIGABYTE = 1 << 30
KINDS = ("random", "truncated", "huge", "connections", "slow")

_CONNECTIONS_A_SECOND = 100
_AT_ONCE = {"random": 8, "truncated": 16, "huge": 4, "connections": 200, "slow": 100}  # lines
_PATIENCE = 5.0  # seconds for opening a line, and for sending something on it

Opener = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@dataclass
class Counts:
    opened: int = 0
    refused: int = 0
    closed: int = 0  # by the other side
    sent: int = 0  # bytes


async def attack_port(
    host: str, port: int, seconds: float, kinds: Sequence[str] = KINDS, *, seed: int = 0, sockets: int = 400
) -> dict[str, Counts]:
    """Attack whoever listens at a TCP port. At most ``sockets`` are open at once."""

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(host, port, limit=4096)

    return await _Attack(connect, _HANDSHAKES + _FRAMES, kinds, seed, sockets).run(seconds)


async def attack_streams(
    address: str,
    run_hex: str,
    seconds: float,
    kinds: Sequence[str] = KINDS,
    *,
    key_file: Path | None = None,
    seed: int = 0,
    sockets: int = 400,
) -> dict[str, Counts]:
    """Attack the peer at a multiaddress on both lanes of a run, as a stranger or as whoever's key is in ``key_file``.

    A peer may keep one stream only for each key and lane, so kinds that run together cut one another short there.
    """
    lanes = itertools.cycle(f"/phalanx/1/{run_hex[:16]}/{lane}" for lane in ("small", "bulk"))
    async with _daemon(key_file) as open_stream:
        attack = _Attack(lambda: open_stream(address, next(lanes)), _FRAMES, kinds, seed, sockets)
        return await attack.run(seconds)


# ---- What is sent


def _frame(data: bytes, announced: int | None = None) -> bytes:
    """Our frame: a length of four bytes, most significant first, then the data."""
    return (len(data) if announced is None else announced).to_bytes(4, "big") + data


def _varint(value: int) -> bytes:
    groups = [value >> shift & 0x7F for shift in range(0, max(1, value.bit_length()), 7)]
    return bytes([group | 0x80 for group in groups[:-1]] + groups[-1:])


def _line(text: bytes) -> bytes:
    """A line of multistream-select, by which libp2p agrees on what is spoken next."""
    return _varint(len(text) + 1) + text + b"\n"


_HELLO = _line(b"/multistream/1.0.0")
_HANDSHAKES = (
    _HELLO,
    _HELLO + _line(b"/noise") + (0xFFFF).to_bytes(2, "big") + bytes(200),
    _HELLO + _line(b"/tls/1.0.0") + bytes.fromhex("1603010200010001fc0303") + bytes(200),
    _HELLO + _varint(GIGABYTE) + bytes(200),
)
_FRAMES = (_frame(bytes(1000)), _frame(bytes(200), announced=60_000), _frame(bytes(200), announced=GIGABYTE))


# ---- How it is sent


class _Line:
    """A connection or a stream to the victim. Whatever comes from there is read and forgotten."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: Counts) -> None:
        self._writer, self._counts = writer, counts
        self._end = asyncio.create_task(_read_to_end(reader))

    async def send(self, data: bytes) -> None:
        """Send, or ConnectionError as the other side has closed, or takes nothing."""
        if self._end.done():
            raise ConnectionResetError
        self._writer.write(data)
        async with asyncio.timeout(_PATIENCE):  # not wait_for, which in Python 3.11 may swallow a cancellation
            await self._writer.drain()
        self._counts.sent += len(data)

    async def wait(self, seconds: float) -> None:
        """Let time pass, or ConnectionError as the other side closes."""
        await asyncio.wait([self._end], timeout=seconds)
        if self._end.done():
            raise ConnectionResetError

    def close(self, *, abrupt: bool) -> None:
        self._end.cancel()
        if abrupt:
            self._writer.transport.abort()
        else:
            self._writer.close()


async def _read_to_end(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(4096):
            pass


Behaviour = Callable[[_Line, random.Random, Sequence[bytes]], Awaitable[None]]


async def _send_random(line: _Line, draw: random.Random, beginnings: Sequence[bytes]) -> None:
    for _ in range(16):
        data = draw.randbytes(draw.randrange(1, 4096))
        await line.send(data if draw.random() < 0.5 else _frame(data))


async def _send_truncated(line: _Line, draw: random.Random, beginnings: Sequence[bytes]) -> None:
    beginning = draw.choice(beginnings)
    await line.send(beginning[: draw.randrange(1, len(beginning))])
    if draw.random() < 0.5:
        await line.wait(2.0)


async def _send_huge(line: _Line, draw: random.Random, beginnings: Sequence[bytes]) -> None:
    await line.send(draw.choice([one for one in beginnings if _announces_a_gigabyte(one)]))
    while True:
        await line.send(bytes(1 << 16))
        await line.wait(0.02)  # three megabytes a second


async def _hold_or_drop(line: _Line, draw: random.Random, beginnings: Sequence[bytes]) -> None:
    if draw.random() < 0.5:
        await line.wait(60.0)


async def _send_slowly(line: _Line, draw: random.Random, beginnings: Sequence[bytes]) -> None:
    for byte in itertools.cycle(draw.choice(beginnings)):
        await line.send(bytes([byte]))
        await line.wait(1.0)


def _announces_a_gigabyte(beginning: bytes) -> bool:
    return beginning.startswith(_frame(b"", GIGABYTE)) or _varint(GIGABYTE) in beginning


class _Attack:
    """Some kinds of garbage at once, on lines from ``opener``."""

    def __init__(
        self, opener: Opener, beginnings: Sequence[bytes], kinds: Sequence[str], seed: int, sockets: int
    ) -> None:
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"no such kind of garbage: {', '.join(sorted(unknown))}")
        self._opener, self._beginnings = opener, beginnings
        self._draw = random.Random(seed)
        self._counts = {kind: Counts() for kind in kinds}
        share = min(1.0, _count_free_sockets(sockets) / sum(_AT_ONCE[kind] for kind in self._counts))
        self._at_once = {kind: max(1, int(_AT_ONCE[kind] * share)) for kind in self._counts}

    async def run(self, seconds: float) -> dict[str, Counts]:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for kind, behaviour in (
                    ("random", _send_random),
                    ("truncated", _send_truncated),
                    ("huge", _send_huge),
                    ("slow", _send_slowly),
                ):
                    for _ in range(self._at_once.get(kind, 0)):
                        group.create_task(self._repeat(kind, behaviour))
                if "connections" in self._counts:
                    group.create_task(self._open_many())
        await asyncio.sleep(0.01)  # transports that were closed say so to the loop
        return self._counts

    async def _repeat(self, kind: str, behaviour: Behaviour) -> None:
        await asyncio.sleep(self._draw.random())  # not all in one moment
        while True:
            await self._open_one(kind, behaviour)
            await asyncio.sleep(0.1)

    async def _open_many(self) -> None:
        """New lines at a steady rate; when too many are open the oldest makes room."""
        loop = asyncio.get_running_loop()
        start, tasks = loop.time(), deque[asyncio.Task[None]]()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count(1):
                tasks = deque(task for task in tasks if not task.done())
                if len(tasks) >= self._at_once["connections"]:
                    tasks.popleft().cancel()
                    await asyncio.sleep(0)
                tasks.append(group.create_task(self._open_one("connections", _hold_or_drop)))
                await asyncio.sleep(max(0.0, start + number / _CONNECTIONS_A_SECOND - loop.time()))

    async def _open_one(self, kind: str, behaviour: Behaviour) -> None:
        counts = self._counts[kind]
        try:
            async with asyncio.timeout(_PATIENCE):
                reader, writer = await self._opener()
        except (OSError, TimeoutError):
            counts.refused += 1
            return
        counts.opened += 1
        line = _Line(reader, writer, counts)
        try:
            await behaviour(line, self._draw, self._beginnings)
        except ConnectionError:
            counts.closed += 1
        except TimeoutError:  # it takes nothing more
            pass
        finally:
            line.close(abrupt=self._draw.random() < 0.5)


def _count_free_sockets(wanted: int) -> int:
    """As many as wanted, or as this process may open and leave some for others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(wanted, max(1, soft - len(os.listdir("/proc/self/fd")) - 64))


# ---- libp2p


@asynccontextmanager
async def _daemon(key_file: Path | None) -> AsyncIterator[Callable[[str, str], Awaitable[tuple[Any, Any]]]]:
    """A libp2p daemon that listens nowhere, as a function that opens a stream at an address for a protocol."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # hivemind's, as in test_identity.py
        from hivemind.p2p import P2P, PeerID
        from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure, raise_if_failed, read_pbmsg_safe, write_pbmsg
        from hivemind.proto import p2pd_pb2
        from hivemind.utils.multiaddr import Multiaddr
    from phalanx.core.crypto import Identity

    with tempfile.TemporaryDirectory() as folder:
        if key_file is None:
            key_file = Path(folder) / "throwaway.key"
            Identity.generate().save(key_file)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            p2p = await P2P.create(
                identity_path=str(key_file),
                check_if_identity_free=False,
                no_listen=True,
                dht_mode="client",
                auto_nat=False,
                nat_port_map=False,
                use_relay=False,
            )

        async def ask(request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            """As hivemind asks its daemon, which leaves connections open when it is refused or interrupted."""
            reader, writer = await p2p._client.control.daemon_connector.open_connection()
            try:
                await write_pbmsg(writer, request)
                response = p2pd_pb2.Response()
                await read_pbmsg_safe(reader, response)
                raise_if_failed(response)
            except BaseException as error:
                writer.transport.abort()
                if isinstance(error, ControlFailure | EOFError):
                    raise ConnectionRefusedError(str(error)) from error
                raise
            return reader, writer

        async def open_stream(address: str, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            place, _, name = address.rpartition("/p2p/")
            peer = PeerID.from_base58(name).to_bytes()
            connect = p2pd_pb2.ConnectRequest(peer=peer, addrs=[Multiaddr(place).to_bytes()])
            _, writer = await ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connect))
            writer.transport.abort()
            stream = p2pd_pb2.StreamOpenRequest(peer=peer, proto=[protocol])
            return await ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=stream))

        try:
            yield open_stream
        finally:
            await p2p.shutdown()
            p2p._child._transport.close()  # or its pipe may outlive the event loop
            await asyncio.sleep(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile traffic against one peer.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, help="attack this TCP port")
    parser.add_argument("--address", help="attack streams of the peer at this multiaddress; needs --run")
    parser.add_argument("--run", help="the run's id in hexadecimal")
    parser.add_argument("--key-file", type=Path, help="attack streams with this key, not a throwaway one")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sockets", type=int, default=400, help="open at most so many at once")
    options = parser.parse_args()
    common = {"kinds": options.kinds, "seed": options.seed, "sockets": options.sockets}
    if options.port is not None:
        attack = attack_port(options.host, options.port, options.seconds, **common)
    elif options.address and options.run:
        attack = attack_streams(options.address, options.run, options.seconds, key_file=options.key_file, **common)
    else:
        parser.error("say --port, or --address and --run")
    print(json.dumps({kind: asdict(counts) for kind, counts in asyncio.run(attack).items()}))


if __name__ == "__main__":
    main()
