"""A network of bad lines on one machine: namespaces joined by a router in user space. No netem, no bridge, no firewall.

    with Network(count=8, delay=0.05, loss=0.01, rate=100e6 / 8, seed=1) as net:
        server = net.popen(0, [sys.executable, "serve.py", net.address(0)])
        net.partition([[0, 1, 2], [3, 4, 5, 6, 7]])
        net.heal()

Every peer is a namespace with one TUN device at 10.77.0.<peer + 1>. One process reads the packets of all devices and
writes each to the device it is addressed to, later or never:

    peer --> uplink (rate, queue) --> wire (delay one way, loss, partition) --> downlink (rate, queue) --> peer

``delay`` is one way, so a round trip takes twice that. ``rate`` is in bytes a second and holds for each direction of
each peer's line; what would wait for a line longer than ``queue`` seconds is dropped. Losses are drawn per pair of
peers from ``seed``: the n-th packet from one to another is lost or not, whenever it comes. The clock is real, so
nothing else repeats itself.

What TCP makes of such a line depends on two settings, which are by default what most machines have:

- ``mtu``, the longest packet: 1500 bytes. A loss takes a whole packet, so longer ones flatter a line that loses.
- ``congestion``: "cubic", whatever this machine has chosen for itself. "bbr" hardly minds losses.

A connection carries about 1.2 mtu / (round trip x root of loss) bytes a second whatever the rate is: 0.18 MB/s with the
defaults. The router manages some hundred thousand packets a second on a core of its own, 150 MB/s in all with mtu=1500;
where much is sent and nothing lost, mtu=16384 leaves more of the core to others.
"""

from __future__ import annotations

import gc
import heapq
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Any, ParamSpec, TypeVar

from namespaces import Namespace

P = ParamSpec("P")
T = TypeVar("T")

_BURST = 64  # packets read from one device before the others have their turn


@dataclass
class Counts:
    """What became of the packets between peers."""

    passed: int = 0
    passed_bytes: int = 0
    lost: int = 0  # by the seed
    dropped: int = 0  # by a full queue
    cut: int = 0  # by a partition


class Router:
    """What becomes of each packet. Knows neither devices nor the clock.

    ``delay`` and ``rate`` are one number for all, or a table: ``delay[source][target]``, ``rate[peer]``.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        delay: float | Sequence[Sequence[float]],
        loss: float,
        rate: float | Sequence[float],
        queue: float,
        seed: int,
    ) -> None:
        count = len(addresses)
        self.counts = Counts()
        self._targets = {socket.inet_aton(address): index for index, address in enumerate(addresses)}
        self._delay = [[delay] * count] * count if isinstance(delay, int | float) else delay
        self._rate = [rate] * count if isinstance(rate, int | float) else rate
        self._loss, self._queue = loss, queue
        self._draw = [[random.Random(f"{seed}/{a}/{b}").random for b in range(count)] for a in range(count)]
        self._group = [0] * count
        self._uplink_free = [0.0] * count  # when the line has sent what it took
        self._downlink_free = [0.0] * count
        # when, running number, source, target, whether it has come through the downlink's queue, packet
        self._flying: list[tuple[float, int, int, int, bool, bytes]] = []
        self._number = 0

    def send(self, now: float, source: int, packet: bytes) -> None:
        """Take a packet from a peer's device. What is not for another peer goes nowhere."""
        target = self._targets.get(packet[16:20])
        if target is None or packet[0] >> 4 != 4:
            return
        if self._group[source] != self._group[target]:
            self.counts.cut += 1
            return
        start = max(now, self._uplink_free[source])
        if start - now > self._queue:
            self.counts.dropped += 1
            return
        end = self._uplink_free[source] = start + len(packet) / self._rate[source]
        if self._draw[source][target]() < self._loss:
            self.counts.lost += 1
            return
        self._push(end + self._delay[source][target], source, target, False, packet)

    def receive(self, now: float) -> Iterator[tuple[int, bytes]]:
        """The packets that have arrived by ``now``, each with the peer it is for."""
        flying, counts = self._flying, self.counts
        while flying and flying[0][0] <= now:
            when, _, source, target, waited, packet = heapq.heappop(flying)
            if not waited:
                # Its first bits have come: it is handed over at once if the line is free, or else when it is.
                start = max(when, self._downlink_free[target])
                if start - when > self._queue:
                    counts.dropped += 1
                    continue
                self._downlink_free[target] = start + len(packet) / self._rate[target]
                if start > now:
                    self._push(start, source, target, True, packet)
                    continue
            counts.passed += 1
            counts.passed_bytes += len(packet)
            yield target, packet

    def get_wait(self, now: float) -> float | None:
        """Seconds until the next packet arrives, if one is under way."""
        return max(0.0, self._flying[0][0] - now) if self._flying else None

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """Nothing passes between groups, not even what is under way. Who is in no group is alone."""
        self._group = [-1 - index for index in range(len(self._group))]
        for number, group in enumerate(groups):
            for index in group:
                self._group[index] = number
        kept = [entry for entry in self._flying if self._group[entry[2]] == self._group[entry[3]]]
        self.counts.cut += len(self._flying) - len(kept)
        self._flying[:] = kept
        heapq.heapify(self._flying)

    def _push(self, when: float, source: int, target: int, waited: bool, packet: bytes) -> None:
        self._number += 1
        heapq.heappush(self._flying, (when, self._number, source, target, waited, packet))


class Network:
    """``count`` peers, each in a namespace of its own, on lines as above. Ends with everything that runs on it."""

    def __init__(
        self,
        count: int,
        *,
        delay: float | Sequence[Sequence[float]] = 0.05,
        loss: float = 0.01,
        rate: float | Sequence[float] = 100e6 / 8,
        queue: float = 0.2,
        seed: int = 0,
        mtu: int = 1500,
        congestion: str = "cubic",
    ) -> None:
        if not 1 <= count <= 254:
            raise ValueError("a network has 1 to 254 peers")
        self._addresses = [f"10.77.0.{index + 1}" for index in range(count)]
        self._processes: list[subprocess.Popen[Any]] = []
        settings = {"delay": delay, "loss": loss, "rate": rate, "queue": queue, "seed": seed}
        Router(self._addresses, **settings)  # complains here rather than in the other process
        with ExitStack() as stack:
            self._namespaces = []
            for address in self._addresses:
                self._namespaces.append(Namespace(address, mtu=mtu, congestion=congestion))
                stack.callback(self._namespaces[-1].close)
            stack.callback(self._end_processes)
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(self._control)
            with theirs:
                self._relay = _start_relay(theirs, [namespace.tun for namespace in self._namespaces])
            stack.callback(self._end_relay)
            for namespace in self._namespaces:
                namespace.close_tun()
            self._ask({"addresses": self._addresses, "mtu": mtu, **settings})
            self._stack = stack.pop_all()

    def address(self, index: int) -> str:
        return self._addresses[index]

    def popen(self, index: int, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        """A process of this peer. It is killed when the network ends, and so is whatever it started."""
        process = self._namespaces[index].popen(command, **options)
        self._processes.append(process)
        return process

    def call(self, index: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``function`` returns when it is called as this peer: what it opens and starts is the peer's."""
        return self._namespaces[index].call(function, *args, **kwargs)

    def socket(self, index: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """A socket of this peer, for use in this process."""
        return self.call(index, socket.socket, socket.AF_INET, kind)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """From now on nothing passes between these groups, not even what is under way. Who is in no group is alone."""
        self._ask({"groups": [list(group) for group in groups]})

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        self.partition([range(len(self._addresses))])

    @property
    def counts(self) -> Counts:
        return Counts(**self._ask({}))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self._control.send(json.dumps(request).encode())
        answer = self._control.recv(1 << 16)
        if not answer:
            raise RuntimeError("the relay has ended")
        return json.loads(answer)

    def _end_processes(self) -> None:
        for namespace in self._namespaces:
            namespace.kill_all()
        for process in self._processes:
            with suppress(OSError), process:  # closes its pipes and waits for it
                pass

    def _end_relay(self) -> None:
        self._relay.kill()
        self._relay.wait()


# ---- The relay's process


def _start_relay(control: socket.socket, tuns: Sequence[int]) -> subprocess.Popen[bytes]:
    handles = [control.fileno(), *tuns]
    command = [sys.executable, "-E", "-s", "-S", __file__, *map(str, handles)]
    return subprocess.Popen(command, pass_fds=handles, stdin=subprocess.DEVNULL)


def run_relay(control: socket.socket, tuns: Sequence[int]) -> None:
    """Carry packets until the other end of ``control`` is closed, as it is when the process that started us ends."""
    request = json.loads(control.recv(1 << 16) or b"null")
    if request is None:
        return
    longest = request.pop("mtu")
    router = Router(request.pop("addresses"), **request)
    control.send(json.dumps(asdict(router.counts)).encode())
    peers = {tun: index for index, tun in enumerate(tuns)}
    poll = select.epoll()
    for handle in (control.fileno(), *tuns):
        poll.register(handle, select.EPOLLIN)
    while True:
        for handle, _ in poll.poll(router.get_wait(time.monotonic())):
            if handle in peers:
                _read_burst(router, peers[handle], handle, longest)
            elif not _answer(router, control):
                return
        for target, packet in router.receive(time.monotonic()):
            with suppress(OSError):  # a device whose namespace has gone
                os.write(tuns[target], packet)


def _read_burst(router: Router, peer: int, tun: int, longest: int) -> None:
    now = time.monotonic()
    for _ in range(_BURST):
        try:
            packet = os.read(tun, longest)
        except OSError:  # no more for now, or its namespace has gone
            return
        router.send(now, peer, packet)


def _answer(router: Router, control: socket.socket) -> bool:
    """Do what is asked. False if nobody asks any more."""
    message = control.recv(1 << 16)
    if not message:
        return False
    request = json.loads(message)
    if "groups" in request:
        router.partition(request["groups"])
    control.send(json.dumps(asdict(router.counts)).encode())
    return True


def main(handles: Sequence[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C is for who started us: it ends us by closing the control
    with suppress(OSError):
        os.nice(-10)  # peers that compute must not look like a slow line
    gc.disable()  # nothing here is in a cycle
    with socket.socket(fileno=handles[0]) as control:
        run_relay(control, handles[1:])


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
