"""The door for streams that others open: so many a second of each key, and whoever opens more is kept waiting.

To refuse a stream at once is no defence: who is refused opens the next in the same moment, and every stream costs the
daemon and us more than what is said on it. One that is kept waiting is read, a little, and forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from phalanx.network.lanes import Circle
from phalanx.network.libp2p import Acceptor, Tasks

_HELD = 64
_PATIENCE = 10.0
_HEARD = 4096
"""How many streams wait at once, for how many seconds each, and after how many bytes it is enough. While one waits it
takes 150 kB of the daemon."""


class Door:
    """Lets streams in that their opener may open, and keeps others waiting. It lives in the transport's event loop."""

    def __init__(self, circle: Circle, tasks: Tasks) -> None:
        self._circle, self._tasks = circle, tasks
        self._held = 0

    def guard(self, acceptor: Acceptor) -> Acceptor:
        """An acceptor that passes on only those that may come in."""

        def accept(key: bytes, stream: socket.socket) -> None:
            if self._circle.may_open(key):
                acceptor(key, stream)
            elif self._held >= _HELD:
                stream.close()
            else:
                self._held += 1
                self._tasks.spawn(_wait(stream)).add_done_callback(lambda _: self._let_go(stream))

        return accept

    def _let_go(self, stream: socket.socket) -> None:
        self._held -= 1
        stream.close()


async def _wait(stream: socket.socket) -> None:
    """Until its opener closes it, says too much, or time is up."""
    loop, heard = asyncio.get_running_loop(), 0
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            while heard < _HEARD and (data := await loop.sock_recv(stream, _HEARD)):
                heard += len(data)
