"""Network namespaces of our own, each with a loopback and one TUN device.

For Linux, and for who may: root, or CAP_SYS_ADMIN and CAP_NET_ADMIN with /dev/net/tun in a container, or `unshare -rn`.

A namespace has no name: descriptors hold it, so it goes when they are closed or the process ends, however it ends. It
is made in a thread that lives for that only, as a namespace belongs to a thread: the rest of the process stays where it
is. What is started or opened in such a thread belongs to the namespace for good, whatever thread uses it later.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

DEVICE = "tun0"
_BACKLOG = 5000  # packets that wait in the device until the relay reads them

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFTXQLEN = 0x8922, 0x8943
_UP_AND_RUNNING = 0x41

_libc = ctypes.CDLL(None, use_errno=True)


class NotPermitted(Exception):  # noqa: N818
    """This process may not make namespaces or TUN devices here."""


class Namespace:
    """A network namespace with the address ``address`` on a TUN device; whoever reads ``tun`` gets its packets."""

    def __init__(self, address: str, *, mtu: int, congestion: str = "cubic") -> None:
        self.address = address
        self.handle, self.tun = _run_in_thread(_make, address, mtu, congestion)
        status = os.fstat(self.handle)
        self._place = (status.st_dev, status.st_ino)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``function`` returns when it is called inside: sockets and processes that it makes stay inside."""

        def enter_and_call() -> T:
            _check(_libc.setns(self.handle, _CLONE_NEWNET), "enter a network namespace")
            return function(*args, **kwargs)

        return _run_in_thread(enter_and_call)

    def popen(self, command: Sequence[str | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
        return self.call(subprocess.Popen, command, **options)

    def kill_all(self) -> None:
        """Kill whoever is inside, children of children included, and wait until nobody is."""
        for _ in range(1000):
            if not self._kill_found():
                return
            time.sleep(0.01)
        raise RuntimeError(f"processes at {self.address} do not end though they were killed")

    def _kill_found(self) -> bool:
        found = False
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                process = os.pidfd_open(int(entry.name))  # so that no other process can take the number meanwhile
            except OSError:
                continue
            try:
                status = (entry / "ns/net").stat()  # gone for who has ended, even if nobody has waited for it
                if (status.st_dev, status.st_ino) == self._place:
                    found = True
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            except OSError:
                pass
            finally:
                os.close(process)
        return found

    def close(self) -> None:
        """Give up our hold; the device goes when nobody holds ``tun``, the namespace when nobody is inside."""
        self.close_tun()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def close_tun(self) -> None:
        if self.tun >= 0:
            os.close(self.tun)
            self.tun = -1


def _make(address: str, mtu: int, congestion: str) -> tuple[int, int]:
    """Leave for a new namespace and furnish it: its handle and its TUN device."""
    _check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
    handle = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        return handle, _furnish(address, mtu, congestion)
    except BaseException:
        os.close(handle)
        raise


def _furnish(address: str, mtu: int, congestion: str) -> int:
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    except OSError as error:
        raise NotPermitted(f"cannot open /dev/net/tun: {error.strerror}") from error
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            _configure(control, DEVICE, _SIOCSIFADDR, _pack_address(address))
            _configure(control, DEVICE, _SIOCSIFNETMASK, _pack_address("255.255.255.0"))
            _configure(control, DEVICE, _SIOCSIFMTU, struct.pack("i", mtu))
            with suppress(PermissionError):  # for the machine's root only; others keep the usual 500
                _configure(control, DEVICE, _SIOCSIFTXQLEN, struct.pack("i", _BACKLOG))
            _configure(control, DEVICE, _SIOCSIFFLAGS, struct.pack("H", _UP_AND_RUNNING))
            _configure(control, "lo", _SIOCSIFFLAGS, struct.pack("H", _UP_AND_RUNNING))
        _choose_congestion(address, congestion)
    except OSError as error:
        os.close(tun)
        raise NotPermitted(f"cannot set up a TUN device: {error}") from error
    except BaseException:
        os.close(tun)
        raise
    return tun


def _choose_congestion(address: str, congestion: str) -> None:
    """How TCP here takes losses. Set on the route: as its own setting a namespace may choose few, by the machine."""
    if Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip() != congestion:
        subnet = f"{address.rpartition('.')[0]}.0/24"
        command = ["ip", "route", "replace", subnet, "dev", DEVICE, "src", address, "congctl", congestion]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotPermitted(f"cannot choose {congestion}: {done.stderr.strip()}")


def _configure(control: socket.socket, device: str, request: int, value: bytes) -> None:
    fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), value))


def _pack_address(address: str) -> bytes:
    return struct.pack("HH4s", socket.AF_INET, 0, socket.inet_aton(address))


def _check(result: int, purpose: str) -> None:
    if result != 0:
        raise NotPermitted(f"cannot {purpose}: {os.strerror(ctypes.get_errno())}")


def _run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``function`` returns or raises, called in a thread that ends with it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function(*args, **kwargs))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="namespace")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results[0]
