"""The tools of the network tests do what they say: lines that delay, lose and limit, cuts that heal, and garbage."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import namespaces
import pytest
from namespaces import NotPermitted
from relay import Counts, Network, Router

import garbage
from phalanx.core.crypto import Identity

with warnings.catch_warnings():
    # hivemind compiles a function with torch.jit.script when it is imported, which torch deprecates.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.jit\.")
    from hivemind.p2p import P2P, PeerID
    from hivemind.utils.multiaddr import Multiaddr

# hivemind looks for its daemon with a function of importlib.resources that Python 3.11 and 3.12 deprecate.
pytestmark = pytest.mark.filterwarnings(r"ignore:path is deprecated:DeprecationWarning:hivemind\.p2p\.p2p_daemon")

RUN = "ab" * 32
PERFECT: dict[str, Any] = {"delay": 0.0, "loss": 0.0, "rate": float("inf")}


# ---- The router, in a time of our own


def make_router(**options: Any) -> Router:
    return Router(["10.77.0.1", "10.77.0.2", "10.77.0.3"], **{**PERFECT, "queue": 0.2, "seed": 1, **options})


def make_packet(target: int, size: int = 1000, version: int = 4) -> bytes:
    header = struct.pack("!B15s4s", version << 4, bytes(15), bytes([10, 77, 0, target + 1]))
    return header + bytes(size - len(header))


def get_arrivals(router: Router, until: float) -> list[tuple[float, int]]:
    """When packets arrive, in milliseconds, and for whom."""
    found, now = [], 0.0
    while (wait := router.get_wait(now)) is not None and now + wait <= until:
        now += wait
        found += [(round(now * 1000), target) for target, _ in router.receive(now)]
    return found


def test_a_packet_comes_after_the_delay_of_its_link() -> None:
    router = make_router(delay=[[0, 0.01, 0.02], [0.03, 0, 0.04], [0.05, 0.06, 0]])
    for source, target in ((0, 1), (0, 2), (1, 0), (2, 1)):
        router.send(0.0, source, make_packet(target))
    assert get_arrivals(router, 1.0) == [(10, 1), (20, 2), (30, 0), (60, 1)]


def test_what_is_for_nobody_goes_nowhere() -> None:
    router = make_router()
    for packet in (make_packet(77), make_packet(1, version=6), b"", b"\x45"):
        router.send(0.0, 0, packet)
    assert router.get_wait(0.0) is None


def test_a_sender_has_one_rate_for_all_it_sends() -> None:
    router = make_router(rate=[100_000.0, 1e9, 1e9])
    for target in (1, 2, 1, 2):
        router.send(0.0, 0, make_packet(target))
    assert get_arrivals(router, 1.0) == [(10, 1), (20, 2), (30, 1), (40, 2)]


def test_a_receiver_has_one_rate_for_all_who_send() -> None:
    router = make_router(rate=[1e9, 1e9, 100_000.0])
    for source in (0, 1, 0, 1):
        router.send(0.0, source, make_packet(2))
    assert get_arrivals(router, 1.0) == [(0, 2), (10, 2), (20, 2), (30, 2)]


def test_a_full_queue_drops() -> None:
    router = make_router(rate=100_000.0, queue=0.05)
    for _ in range(20):
        router.send(0.0, 0, make_packet(1))
    assert len(get_arrivals(router, 1.0)) == 6  # what waits for at most 50 ms, 10 ms each
    assert router.counts.dropped == 14
    router.send(1.0, 0, make_packet(1))
    assert len(list(router.receive(2.0))) == 1


def test_losses_are_by_the_seed_and_the_pair() -> None:
    def send_many(seed: int, others: bool) -> list[int]:
        router = make_router(loss=0.1, seed=seed)
        for number in range(2000):
            router.send(float(number), 0, make_packet(1, 100 + number))
            if others:
                router.send(float(number), 2, make_packet(1, 50))
        return [len(packet) for _, packet in router.receive(1e9) if len(packet) > 50]

    first = send_many(1, others=False)
    assert 1730 <= len(first) <= 1870
    assert send_many(1, others=True) == first
    assert send_many(2, others=False) != first


def test_a_partition_cuts_what_is_under_way_and_who_is_left_out() -> None:
    router = make_router(delay=0.05)
    router.send(0.0, 0, make_packet(1))
    router.send(0.0, 0, make_packet(2))
    router.partition([[0, 1]])
    router.send(0.0, 2, make_packet(1))
    router.send(0.0, 1, make_packet(0))
    assert get_arrivals(router, 1.0) == [(50, 1), (50, 0)]
    assert router.counts.cut == 2
    router.partition([[0, 1, 2]])
    router.send(1.0, 2, make_packet(1))
    assert len(list(router.receive(2.0))) == 1


# ---- Namespaces and the relay, in real time. Bounds on time are from below only.


def make_network(count: int = 2, **options: Any) -> Network:
    try:
        return Network(count, **{**PERFECT, "seed": 1, **options})
    except NotPermitted as error:
        pytest.skip(str(error))


def listen(net: Network, index: int, kind: socket.SocketKind) -> socket.socket:
    place = net.socket(index, kind)
    place.bind((net.address(index), 5000))
    place.settimeout(20.0)
    if kind == socket.SOCK_STREAM:
        place.listen()
    return place


def transfer(net: Network, data: bytes) -> tuple[bytes, float]:
    """What peer 1 received of what peer 0 sent over TCP, and how long it took."""

    def send() -> None:
        with net.socket(0) as sender:
            sender.connect((net.address(1), 5000))
            sender.sendall(data)

    with listen(net, 1, socket.SOCK_STREAM) as place:
        start, thread = time.monotonic(), threading.Thread(target=send)
        thread.start()
        connection, _ = place.accept()
        with connection, connection.makefile("rb") as file:
            received = file.read()
        thread.join()
        return received, time.monotonic() - start


def sum_packets(counts: Counts) -> int:
    return counts.passed + counts.lost + counts.dropped + counts.cut


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came about")


def test_a_round_trip_takes_both_delays() -> None:
    with (
        make_network(delay=[[0.0, 0.03], [0.05, 0.0]]) as net,
        listen(net, 0, socket.SOCK_DGRAM) as alice,
        listen(net, 1, socket.SOCK_DGRAM) as bob,
    ):
        for _ in range(5):
            start = time.monotonic()
            alice.sendto(b"ping", (net.address(1), 5000))
            assert bob.recv(100) == b"ping"
            assert time.monotonic() - start >= 0.03
            bob.sendto(b"pong", (net.address(0), 5000))
            assert alice.recv(100) == b"pong"
            assert time.monotonic() - start >= 0.08


def test_the_share_that_is_lost_is_as_asked() -> None:
    with (
        make_network(loss=0.1) as net,
        net.socket(0, socket.SOCK_DGRAM) as sender,
        listen(net, 1, socket.SOCK_DGRAM),  # or the peer would answer that it has no such port
    ):
        for number in range(2000):
            sender.sendto(bytes(100), (net.address(1), 5000))
            if number % 100 == 0:
                time.sleep(0.01)  # the device has room for so many only
        wait_until(lambda: sum_packets(net.counts) == 2000)
        assert 130 <= net.counts.lost <= 270
        assert net.counts.cut == net.counts.dropped == 0


def test_a_transfer_takes_as_long_as_the_rate_says() -> None:
    with make_network(rate=1e6, mtu=9000) as net:
        data = random.Random(1).randbytes(1_000_000)
        received, seconds = transfer(net, data)
        assert received == data
        assert seconds >= 0.8  # all but what may wait in the queue
        assert net.counts.passed_bytes > len(data)


def test_tcp_survives_losses() -> None:
    with make_network(loss=0.03, delay=0.002) as net:
        data = random.Random(2).randbytes(500_000)
        received, _ = transfer(net, data)
        assert hashlib.sha256(received).digest() == hashlib.sha256(data).digest()
        assert net.counts.lost > 0


def test_a_partition_cuts_and_heals() -> None:
    with make_network(3) as net, listen(net, 2, socket.SOCK_DGRAM) as carol:

        def reaches_carol(index: int) -> bool:
            with net.socket(index, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"hello", (net.address(2), 5000))
            try:
                return carol.recv(100) == b"hello"
            except TimeoutError:
                return False

        assert reaches_carol(0)
        assert reaches_carol(1)
        net.partition([[0], [1, 2]])
        assert reaches_carol(1)
        carol.settimeout(0.3)
        assert not reaches_carol(0)
        assert net.counts.cut >= 1
        net.heal()
        carol.settimeout(20.0)
        assert reaches_carol(0)


def test_a_connection_outlives_a_partition() -> None:
    with make_network() as net, listen(net, 1, socket.SOCK_STREAM) as place, net.socket(0) as alice:
        alice.connect((net.address(1), 5000))
        bob, _ = place.accept()
        with bob:
            net.partition([])
            alice.sendall(b"late")
            bob.settimeout(0.3)
            with pytest.raises(TimeoutError):
                bob.recv(100)
            net.heal()
            bob.settimeout(20.0)
            assert bob.recv(100) == b"late"


ECHO = """
import socket, sys
with socket.create_server(("127.0.0.1", 5001)), socket.create_server((sys.argv[1], 5000)) as place:
    print("ready", flush=True)
    connection, other = place.accept()
    connection.sendall(other[0].encode() + connection.recv(100))
    connection.recv(100)
"""


def test_processes_run_as_peers_and_end_with_the_network() -> None:
    with make_network() as net:
        command = [sys.executable, "-c", ECHO, net.address(1)]
        server = net.popen(1, command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        with net.socket(0) as client:
            client.connect((net.address(1), 5000))
            client.sendall(b" sent this")
            assert client.recv(100) == b"10.77.0.1 sent this"
            # A process that starts another, and waits for it.
            shell = net.popen(0, ["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
            assert shell.stdout is not None
            grandchild = int(shell.stdout.readline())
            assert is_running(grandchild)
            net.close()
    assert server.returncode == shell.returncode == -9
    assert not is_running(grandchild)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_nothing_is_left_behind() -> None:
    make_network().close()
    before = sorted(os.listdir("/proc/self/fd"))
    with make_network(3) as net:
        relay = net._relay.pid
        assert is_running(relay)
    assert not is_running(relay)
    assert sorted(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ZeroDivisionError), make_network():
        _ = 1 / 0
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_the_relay_ends_with_who_started_it() -> None:
    make_network().close()
    script = "import relay, time; net = relay.Network(2); print(net._relay.pid, flush=True); time.sleep(1000)"
    command = [sys.executable, "-c", script]
    folder = Path(__file__).parent
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        relay = int(owner.stdout.readline())
        assert is_running(relay)
        owner.kill()
    wait_until(lambda: not is_running(relay))


def test_who_may_not_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def unshare(self, flags: int) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(namespaces, "_libc", Refusing())
    with pytest.raises(NotPermitted, match="cannot make a network namespace: Operation not permitted"):
        Network(2)
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---- libp2p


@asynccontextmanager
async def daemon(key_file: Path, host: str) -> AsyncIterator[P2P]:
    Identity.generate().save(key_file)
    p2p = await P2P.create(
        identity_path=str(key_file),
        check_if_identity_free=False,
        host_maddrs=[f"/ip4/{host}/tcp/0"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        startup_timeout=60,
    )
    try:
        yield p2p
    finally:
        await p2p.shutdown()
        p2p._child._transport.close()  # or its pipe may outlive the event loop
        await asyncio.sleep(0.05)  # streams that end with the daemon


def test_libp2p_daemons_meet_across_namespaces(tmp_path: Path) -> None:
    """One peer in each of two threads, as a daemon is started where its thread is."""
    size = 300_000
    published: list[str] = []
    known, done = threading.Event(), threading.Event()

    async def serve(net: Network) -> int:
        received = asyncio.get_running_loop().create_future()

        async def receive(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            received.set_result(len(await reader.readexactly(size)))
            writer.close()

        async with daemon(tmp_path / "server.key", net.address(0)) as p2p:
            await p2p.add_binary_stream_handler("/test", receive)
            published.append(str((await p2p.get_visible_maddrs())[0]))
            known.set()
            return await asyncio.wait_for(received, 60)

    async def send(net: Network) -> None:
        async with daemon(tmp_path / "client.key", net.address(1)) as p2p:
            place, _, name = published[0].rpartition("/p2p/")
            await p2p._client.connect(PeerID.from_base58(name), [Multiaddr(place)])
            _, _, writer = await p2p._client.stream_open(PeerID.from_base58(name), ("/test",))
            writer.write(bytes(size))
            await writer.drain()
            await asyncio.to_thread(done.wait, 60)
            writer.close()

    with make_network(delay=0.01, rate=100e6 / 8) as net, ThreadPoolExecutor(2) as pool:
        server = pool.submit(net.call, 0, asyncio.run, serve(net))
        assert known.wait(60)
        client = pool.submit(net.call, 1, asyncio.run, send(net))
        try:
            assert server.result(120) == size
        finally:
            done.set()
        client.result(60)
        assert published[0].startswith("/ip4/10.77.0.1/tcp/")
        assert net.counts.passed_bytes > size


# ---- Garbage


def test_every_kind_of_garbage_arrives_on_few_sockets() -> None:
    limit, now_open, most_open = 60, 0, 0

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal now_open, most_open
        now_open += 1
        most_open = max(most_open, now_open)
        try:
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        finally:
            now_open -= 1
            writer.close()

    async def attack() -> dict[str, garbage.Counts]:
        async with await asyncio.start_server(receive, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            counts = await garbage.attack_port("127.0.0.1", port, 3.0, sockets=limit)
            while now_open:
                await asyncio.sleep(0.01)
            return counts

    counts = asyncio.run(attack())
    assert set(counts) == set(garbage.KINDS)
    for kind, count in counts.items():
        assert count.opened > 0
        assert count.refused == 0
        assert count.sent > 0 or kind == "connections"
    assert most_open <= 2 * limit  # those that we have dropped may not have been closed there yet


def test_garbage_begins_like_something_good() -> None:
    beginnings: list[bytes] = []

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            beginnings.append(await reader.read(100))
        writer.close()

    async def attack() -> dict[str, garbage.Counts]:
        async with await asyncio.start_server(receive, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await garbage.attack_port("127.0.0.1", port, 3.0, ["truncated", "huge"])

    counts = asyncio.run(attack())
    assert counts["huge"].closed > 0
    assert any(beginning.startswith((1 << 30).to_bytes(4, "big")) for beginning in beginnings)
    assert any(beginning.startswith(b"\x13/multistream/1.0.0\n") for beginning in beginnings)


def test_a_dead_port_is_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    counts = asyncio.run(garbage.attack_port("127.0.0.1", port, 1.5, ["random", "connections"]))
    assert list(counts) == ["random", "connections"]
    for count in counts.values():
        assert count.refused > 0
        assert count.opened == count.sent == 0


def test_garbage_as_a_command() -> None:
    command = [sys.executable, garbage.__file__, "--port", "1", "--seconds", "0.5", "--kinds", "connections"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('{"connections": {"opened": 0, "refused": ')
    assert done.stderr == ""


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no such kind of garbage: kindness"):
        asyncio.run(garbage.attack_port("127.0.0.1", 1, 1.0, ["kindness"]))


def test_garbage_comes_on_streams_of_both_lanes(tmp_path: Path) -> None:
    seen = {"small": 0, "bulk": 0}

    async def attack() -> dict[str, garbage.Counts]:
        async with daemon(tmp_path / "victim.key", "127.0.0.1") as p2p:
            for lane in seen:

                async def receive(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    try:
                        while data := await reader.read(1 << 16):
                            seen[info.proto.rpartition("/")[2]] += len(data)
                    except ConnectionError:
                        pass
                    finally:
                        writer.close()

                await p2p.add_binary_stream_handler(f"/phalanx/1/{RUN[:16]}/{lane}", receive)
            address = str((await p2p.get_visible_maddrs())[0])
            counts = await garbage.attack_streams(address, RUN, 3.0, sockets=60)
            await asyncio.sleep(0.2)
            return counts

    counts = asyncio.run(attack())
    assert all(count.opened > 0 for count in counts.values())
    assert all(count > 0 for count in seen.values())
