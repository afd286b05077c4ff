"""Streams between peers: hivemind's libp2p daemon, started with our key and asked over a unix socket.

This is the only file that knows hivemind, and it takes two files of it: the daemon's program and the schema of its
control protocol. The package itself is never imported: that would compile functions with torch.jit, rename a level of
``logging`` for everybody, and print to stderr.

The daemon encrypts, proves keys, finds peers by their id, and gets through NATs. A stream is a unix socket: after one
exchange of control messages every byte on it is the other peer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from phalanx.core.crypto import Identity, format_peer_id, is_usable_key
from phalanx.core.errors import LocalError
from phalanx.network.addresses import (
    Address,
    encode_place,
    encode_unix_path,
    find_host,
    format_place,
    is_loopback,
    name_peer,
)

log = logging.getLogger("phalanx.network")

Acceptor: TypeAlias = Callable[[bytes, socket.socket], None]
"""Called with the key of who opened a stream, and the stream. It owns the socket, and closes it to refuse."""

DIAL_TIMEOUT = 10
"""Seconds for reaching somebody."""

_START_TIMEOUT = 20.0
_STOP_TIMEOUT = 3.0
_IDLE_TIMEOUT = 30
_MAX_REPLY = 1 << 20
_SOCKET_BUFFER = 1 << 22
_MAX_SOCKET_PATH = 100  # the kernel takes 107 bytes
_OUTPUT = 4096
_WEIGHT = 1000


class Unreachable(LocalError):  # noqa: N818
    """Somebody could not be reached, or did not answer. The message says who, and why."""


class Tasks:
    """Work in one event loop that ends together. What fails is a bug, and is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._take_leave)
        return task

    def _take_leave(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the network failed: %r", error, exc_info=error)

    async def end(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Daemon:
    """hivemind's libp2p daemon, one per peer, started with our key file. Use it from one event loop."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, schema: ModuleType) -> None:
        """Use :meth:`start`."""
        self.key = b""
        self.ended = asyncio.Event()
        """Set when the daemon's program has ended, asked or not."""
        self.on_caller: Callable[[bytes, str], None] = lambda key, host: None
        """Called with who opened a stream and from which host, before the stream is handed on."""
        self._process, self._folder, self._schema = process, folder, schema
        self._control = str(folder / "control")
        self._lifeline: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._acceptors: dict[str, Acceptor] = {}
        self._tasks = Tasks()
        self._closed = False
        self._output = b""
        assert process.stdout is not None
        self._output_end = process.stdout.fileno()
        os.set_blocking(self._output_end, False)
        asyncio.get_running_loop().add_reader(self._output_end, self._take_output)

    # -- starting

    @classmethod
    async def start(
        cls,
        key_file: Path,
        *,
        listen: Sequence[str],
        announce: Sequence[str] = (),
        peers: Sequence[Address] = (),
        relay: bool = True,
    ) -> Daemon:
        """Start a daemon that is the peer of ``key_file``; :class:`LocalError` if it cannot.

        ``peers`` may serve as relays where nobody can reach us directly; the daemon is not connected to them yet.
        """
        identity = Identity.load(key_file)
        package = _find_hivemind()
        folder = _make_folder()
        try:
            arguments = _make_arguments(package, key_file, folder, listen, announce, peers, relay)
            self = cls(_launch(arguments), folder, _load_schema(package))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._attach()
            if self.key != identity.key:
                raise LocalError(f"the network daemon did not take the key in {key_file}; update hivemind to 1.1.12")
        except TimeoutError:
            await self.close()
            raise LocalError(f"the network daemon did not start within {_START_TIMEOUT:.0f} s; try again") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def _attach(self) -> None:
        """Wait for the control socket; open the connection with which the daemon lives and dies."""
        while not await self._is_listening():
            if self.ended.is_set():
                raise LocalError(_explain_end(self._output))
            await asyncio.sleep(0.02)
        kinds = self._schema
        self._lifeline, _ = await self._exchange(kinds.Request(type=kinds.Request.PERSISTENT_CONN_UPGRADE), 10)
        _lifelines.add(self._lifeline)
        reply = await self._ask(kinds.Request(type=kinds.Request.IDENTIFY), 10)
        self.key = _key_of(reply.identify.id)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._folder / "streams"))
        self._listener.listen(128)
        self._tasks.spawn(self._accept())

    async def _is_listening(self) -> bool:
        """Whether the control socket takes connections: its file is there a moment before."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(probe, self._control)
            except OSError:
                return False
        return True

    def _take_output(self) -> None:
        try:
            data = os.read(self._output_end, 1 << 16)
        except BlockingIOError:
            return
        if data:
            self._output = (self._output + data)[-_OUTPUT:]
            log.debug("daemon: %s", ascii(data[-_OUTPUT:].decode(errors="replace").strip()))
        else:
            asyncio.get_running_loop().remove_reader(self._output_end)
            self.ended.set()

    # -- what it is asked for

    async def get_addresses(self) -> list[str]:
        """Where others can find us now; addresses that only this machine knows come last."""
        reply = await self._ask(self._schema.Request(type=self._schema.Request.IDENTIFY), 10)
        texts: list[str] = []
        for place in reply.identify.addrs:
            with contextlib.suppress(ValueError):  # of a kind that nobody here would understand
                texts.append(f"{format_place(place)}/p2p/{format_peer_id(self.key)}")
        return sorted(dict.fromkeys(texts), key=is_loopback)

    async def connect(self, key: bytes, addresses: Sequence[Address], timeout: int = DIAL_TIMEOUT) -> None:
        """Make sure that we are connected; without any address the daemon asks those it is connected to."""
        kinds = self._schema
        places = [address.place for address in addresses if address.key == key]
        request = kinds.ConnectRequest(peer=_id_of(key), addrs=places, timeout=timeout)
        await self._ask_about(key, kinds.Request(type=kinds.Request.CONNECT, connect=request), timeout)

    async def open_stream(self, key: bytes, protocol: str, timeout: int = DIAL_TIMEOUT) -> socket.socket:
        """Open a stream to a peer. Closing the socket ends it."""
        kinds = self._schema
        request = kinds.StreamOpenRequest(peer=_id_of(key), proto=[protocol], timeout=timeout)
        full = kinds.Request(type=kinds.Request.STREAM_OPEN, streamOpen=request)
        stream, _ = await self._exchange_about(key, full, timeout)
        return stream

    async def serve(self, protocol: str, acceptor: Acceptor) -> None:
        """From now on, streams of this protocol that others open go to ``acceptor``."""
        kinds = self._schema
        place = encode_unix_path(str(self._folder / "streams"))
        request = kinds.StreamHandlerRequest(addr=place, proto=[protocol], balanced=False)
        self._acceptors[protocol] = acceptor
        await self._ask(kinds.Request(type=kinds.Request.STREAM_HANDLER, streamHandler=request), 10)

    async def favour(self, key: bytes) -> None:
        """Have the connection to somebody kept when there are too many: strangers' connections go first."""
        kinds = self._schema
        tag = kinds.ConnManagerRequest(
            type=kinds.ConnManagerRequest.TAG_PEER, peer=_id_of(key), tag="phalanx", weight=_WEIGHT
        )
        await self._ask_about(key, kinds.Request(type=kinds.Request.CONNMANAGER, connManager=tag), 10)

    # -- the control protocol

    async def _ask(self, request: Any, timeout: float) -> Any:
        stream, reply = await self._exchange(request, timeout)
        stream.close()
        return reply

    async def _ask_about(self, key: bytes, request: Any, timeout: float) -> None:
        stream, _ = await self._exchange_about(key, request, timeout)
        stream.close()

    async def _exchange_about(self, key: bytes, request: Any, timeout: float) -> tuple[socket.socket, Any]:
        try:
            return await self._exchange(request, timeout + 1)
        except Unreachable as error:
            raise Unreachable(f"peer {name_peer(key)} cannot be reached: {error}") from None

    async def _exchange(self, request: Any, timeout: float) -> tuple[socket.socket, Any]:
        """Ask the daemon for something; the reply, and the connection on which it came."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(timeout):
                await loop.sock_connect(connection, self._control)
                await loop.sock_sendall(connection, _pack(request))
                reply = await _read_message(connection, self._schema.Response)
            if reply.type != self._schema.Response.OK:
                raise Unreachable(shorten(" ".join(reply.error.msg.split())))
            return connection, reply
        except TimeoutError:
            connection.close()
            raise Unreachable(f"no answer within {timeout:.0f} s") from None
        except (OSError, EOFError, ValueError) as error:
            connection.close()
            raise Unreachable(f"the network daemon does not answer: {error}") from None
        except BaseException:
            connection.close()
            raise

    # -- streams that others open

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        while True:
            try:
                stream, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no file handles left, most likely: this passes
                log.warning("a stream could not be accepted: %s", error)
                await asyncio.sleep(1.0)
            else:
                self._tasks.spawn(self._introduce(stream)).add_done_callback(_Closing(stream))

    async def _introduce(self, stream: socket.socket) -> None:
        """Read who opened a stream, and hand it on."""
        try:
            stream.setblocking(False)
            async with asyncio.timeout(10):
                info = await _read_message(stream, self._schema.StreamInfo)
            key, acceptor = _key_of(info.peer), self._acceptors[info.proto]
        except (OSError, EOFError, ValueError, KeyError, LocalError):
            stream.close()  # a peer whose key is of another kind than ours, or a stream that is gone again
        else:
            self.on_caller(key, find_host(info.addr))
            acceptor(key, stream)

    # -- ending

    async def close(self) -> None:
        """Stop the daemon; when this returns its process is gone, and so are its files. Twice does no harm."""
        if self._closed:
            return
        self._closed = True
        await self._tasks.end()
        for connection in (self._listener, self._lifeline):
            if connection is not None:
                connection.close()
        await self._stop()
        asyncio.get_running_loop().remove_reader(self._output_end)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.ended.set()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _stop(self) -> None:
        process = self._process
        try:
            process.terminate()
            async with asyncio.timeout(_STOP_TIMEOUT):
                while process.poll() is None:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            process.kill()
            process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise


class _Closing:
    """Closes a stream if who was to introduce it did not get to run."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def __call__(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._stream.close()


# ---- The daemon's life hangs on a connection of ours: it ends when that is closed, even by kill -9. A child that was
# forked has a copy of it, and would keep the daemon alive.

_lifelines: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _cut_lifelines() -> None:
    for lifeline in list(_lifelines):
        lifeline.close()


os.register_at_fork(after_in_child=_cut_lifelines)


# ---- Starting the program


def _find_hivemind() -> Path:
    spec = importlib.util.find_spec("hivemind")  # finds it without running any of it
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    if not places or not (package := Path(places[0])).joinpath("hivemind_cli", "p2pd").is_file():
        raise LocalError("the network needs hivemind, which is not here; install it with: pip install -e '.[network]'")
    return package


def _load_schema(package: Path) -> ModuleType:
    """The messages of the control protocol, as hivemind's copy of the schema has them."""
    spec = importlib.util.spec_from_file_location("phalanx_p2pd_pb2", package / "proto" / "p2pd_pb2.py")
    if spec is None or spec.loader is None:
        raise LocalError("hivemind lacks proto/p2pd_pb2.py; install it again: pip install -e '.[network]'")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_folder() -> Path:
    """A folder that only we can enter, for the sockets; their paths must be short."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="phalanx-", dir=base if len(base) < _MAX_SOCKET_PATH - 30 else "/tmp"))


def _make_arguments(
    package: Path,
    key_file: Path,
    folder: Path,
    listen: Sequence[str],
    announce: Sequence[str],
    peers: Sequence[Address],
    relay: bool,
) -> list[str]:
    for address in (*listen, *announce):
        encode_place(address)  # so that a slip gets our sentence and not the daemon's
    local = all(map(is_loopback, listen))
    where = f"-hostAddrs={','.join(listen)}" if listen else "-noListenAddrs=1"
    arguments = [
        str(package / "hivemind_cli" / "p2pd"),
        f"-id={key_file}",
        f"-listen=/unix{folder / 'control'}",
        where,
        f"-idleTimeout={_IDLE_TIMEOUT}s",
        "-dhtServer=1",
        "-connManager=1",
        f"-autonat={int(not local)}",
        f"-natPortMap={int(not local)}",
        f"-relay={int(relay)}",
        f"-relayService={int(relay and not local)}",
        f"-autoRelay={int(relay and not local)}",
    ]
    if announce:
        arguments.append(f"-announceAddrs={','.join(announce)}")
    if relay and not local and peers:
        arguments.append(f"-trustedRelays={','.join(peer.text for peer in peers)}")
    return arguments


def _launch(arguments: list[str]) -> subprocess.Popen[bytes]:
    environment = {"GOLOG_LOG_LEVEL": "error"} | dict(os.environ)
    try:
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us: we tell the daemon when to stop
        )
    except OSError as error:
        raise LocalError(
            f"the network daemon {arguments[0]} cannot be started: {error.strerror}; install hivemind again"
        ) from None


def _explain_end(output: bytes) -> str:
    """One sentence from what the daemon said last."""
    text = shorten(" ".join(output.decode(errors="replace").split())[-300:])
    if "address already in use" in text:
        return f"cannot listen there: the address is already in use; choose another port, or 0 for any ({text})"
    if "cannot assign requested address" in text:
        return f"cannot listen there: the address is not one of this machine's ({text})"
    return f"the network daemon ended at once: {text or 'it said nothing'}"


# ---- Messages of the control protocol: each behind its length


def _pack(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    size, prefix = len(data), bytearray()
    while size >= 0x80:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(prefix) + bytes([size]) + data


async def _read_message(connection: socket.socket, kind: Any) -> Any:
    """One message and not a byte more: what follows it is the stream's."""
    size = shift = 0
    while True:
        (byte,) = await read_exactly(connection, 1)
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise ValueError("a length that never ends")
    if size > _MAX_REPLY:
        raise ValueError(f"a reply of {size} bytes")
    message, data = kind(), await read_exactly(connection, size)
    try:
        message.ParseFromString(bytes(data))
    except Exception as error:  # protobuf's own DecodeError, which is not imported for this one line
        raise ValueError(f"not a message: {shorten(str(error))}") from None
    return message


async def read_exactly(connection: socket.socket, size: int) -> bytearray:
    """The next ``size`` bytes; EOFError if the stream ends before."""
    loop = asyncio.get_running_loop()
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = await loop.sock_recv_into(connection, view)
        if not count:
            raise EOFError("the stream ended")
        view = view[count:]
    return data


def _id_of(key: bytes) -> bytes:
    return bytes.fromhex("002408011220") + key


def _key_of(peer_id: bytes) -> bytes:
    """The key in a peer id in bytes; ValueError if it is none like ours."""
    key = peer_id[6:]
    if peer_id[:6] != bytes.fromhex("002408011220") or not is_usable_key(key):
        raise ValueError("not an Ed25519 key")
    return key


def shorten(text: str) -> str:
    """A line for a log: what others wrote is in it, so it is short and printable."""
    text = text if len(text) <= 300 else f"{text[:200]} ... {text[-80:]}"
    return text if text.isprintable() else ascii(text)
