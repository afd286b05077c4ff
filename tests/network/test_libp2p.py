"""The daemon: started with our key, streams between peers, and gone when we are gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError
from phalanx.network import libp2p
from phalanx.network.addresses import parse_address
from phalanx.network.libp2p import Daemon, Unreachable, read_exactly

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/phalanx/test/echo"


def save(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.exists():
        Identity.generate().save(path)
    return path


@asynccontextmanager
async def daemon(path: Path) -> AsyncIterator[Daemon]:
    started = await Daemon.start(path, listen=LOOPBACK, relay=False)
    try:
        yield started
    finally:
        await started.close()


async def connect(one: Daemon, other: Daemon) -> None:
    await one.connect(other.key, [parse_address(text) for text in await other.get_addresses()])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, "the daemon outlives its owner"
        time.sleep(0.02)


def test_streams_between_daemons_carry_bytes_and_keys(tmp_path: Path) -> None:
    async def talk() -> None:
        async with daemon(save(tmp_path, "a")) as alice, daemon(save(tmp_path, "b")) as bob:
            assert alice.key == Identity.load(tmp_path / "a").key
            (address,) = await alice.get_addresses()
            assert parse_address(address).key == alice.key
            opened: asyncio.Queue[tuple[bytes, socket.socket]] = asyncio.Queue()
            await alice.serve(ECHO, lambda key, stream: opened.put_nowait((key, stream)))
            await connect(bob, alice)
            loop = asyncio.get_running_loop()
            with await bob.open_stream(alice.key, ECHO) as there:
                await loop.sock_sendall(there, b"x" * 100_000)
                key, here = await opened.get()
                with here:
                    assert key == bob.key
                    assert await read_exactly(here, 100_000) == b"x" * 100_000
                    await loop.sock_sendall(here, b"and back")
                    assert await read_exactly(there, 8) == b"and back"
                assert await loop.sock_recv(there, 1) == b""  # closing one end ends the stream

    asyncio.run(talk())


def test_who_is_not_there_is_unreachable(tmp_path: Path) -> None:
    async def search() -> None:
        async with daemon(save(tmp_path, "a")) as alice, daemon(save(tmp_path, "b")) as bob:
            (address,) = await alice.get_addresses()
            nobody = Identity.generate()
            with pytest.raises(Unreachable):
                await bob.connect(nobody.key, (), timeout=2)
            impostor = parse_address(address.replace(Identity.load(tmp_path / "a").peer_id, nobody.peer_id))
            with pytest.raises(Unreachable):  # alice cannot prove that key
                await bob.connect(nobody.key, [impostor], timeout=2)
            await connect(bob, alice)
            with pytest.raises(Unreachable, match="protocol"):
                await bob.open_stream(alice.key, "/phalanx/test/unknown")

    asyncio.run(search())


def test_a_closed_daemon_leaves_nothing_behind(tmp_path: Path) -> None:
    async def start() -> tuple[int, Path]:
        started = await Daemon.start(save(tmp_path, "a"), listen=LOOPBACK)
        pid, folder = started._process.pid, started._folder
        assert folder.stat().st_mode & 0o077 == 0
        await started.close()
        await started.close()
        return pid, folder

    pid, folder = asyncio.run(start())
    assert not is_running(pid)
    assert not folder.exists()


def test_a_daemon_without_a_port_can_still_ask_others(tmp_path: Path) -> None:
    async def start() -> None:
        quiet = await Daemon.start(save(tmp_path, "a"), listen=())
        try:
            assert await quiet.get_addresses() == []
            async with daemon(save(tmp_path, "b")) as other:
                await connect(quiet, other)
        finally:
            await quiet.close()

    asyncio.run(start())


def test_what_is_wrong_with_the_start_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(path: Path, listen: str) -> None:
        asyncio.run(Daemon.start(path, listen=[listen]))

    key = save(tmp_path, "a")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LocalError, match="already in use"):
        start(key, f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}")
    with pytest.raises(LocalError, match="not an address"):
        start(key, "127.0.0.1:4001")
    with pytest.raises(LocalError, match="not one of this machine's"):
        start(key, "/ip4/203.0.113.5/tcp/4001")
    with pytest.raises(LocalError, match="keygen"):
        start(tmp_path / "none", LOOPBACK[0])
    monkeypatch.setattr(libp2p.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalError, match=r"\.\[network\]"):
        start(key, LOOPBACK[0])


ALONE = """
import asyncio, logging, os, sys, time
from pathlib import Path
from phalanx.network.libp2p import Daemon

async def main():
    daemon = await Daemon.start(Path(sys.argv[1]), listen=["/ip4/127.0.0.1/tcp/0"])
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    level = logging.getLevelName(logging.WARNING)
    print(daemon._process.pid, daemon._folder, "hivemind" in sys.modules, level, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_daemon_dies_with_us_even_by_kill_9(tmp_path: Path) -> None:
    """And while a child that was forked lives on. Nor is hivemind imported, which would rename levels of logging."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", ALONE, str(save(tmp_path, "a"))],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            pid, folder, imported, level = process.stdout.readline().split()
            assert (imported, level) == ("False", "WARNING")
            assert is_running(int(pid))
            process.kill()
            process.wait()
            await_end(int(pid))
            shutil.rmtree(folder)  # nobody is left to do it
        finally:
            os.killpg(process.pid, signal.SIGKILL)
