"""What strangers share: places, turns and bytes.

Keys are free, so what one key may take bounds nothing. Addresses cost something. Two rules hold wherever strangers want
more than there is:

* a place goes to the newest, and the host with most places gives one up: of its keys the one with most, of those the
  one that was silent longest, and if all were heard a moment ago the one that had most (:func:`choose_leaver`);
* turns and bytes go to the host that had least of them lately, and of its keys to the one that had least
  (:class:`Share`).

So one host, whatever keys it makes, takes from its own share. Members and candidates stand in no line. Former members
come before other strangers, up to three quarters of what there is: one of them may be an attacker that was removed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Protocol, TypeVar

_REMEMBERED = 4096
"""Hosts and keys of which something is remembered: the latest."""
_HALF_LIFE = 60.0
"""Seconds after which half of what somebody had is forgotten."""
_FORMER_SHARE = 3.0
"""Former members get so many times what all other strangers get, where both want more than there is."""
_SILENCE = 2.0
"""Seconds without a word after which somebody is silent."""
_LOOK = 0.25
"""Seconds between two looks at a line: whoever waits may have become a member."""


class Rank(IntEnum):
    """Who somebody is to us, in the order in which they are served."""

    MEMBER = 0
    """Or a candidate."""
    FORMER = 1
    STRANGER = 2


class Hosts:
    """From which host each key called last."""

    def __init__(self) -> None:
        self._hosts: dict[bytes, str] = {}

    def note(self, key: bytes, host: str) -> None:
        self._hosts.pop(key, None)
        self._hosts[key] = host
        if len(self._hosts) > _REMEMBERED:
            del self._hosts[next(iter(self._hosts))]

    def get(self, key: bytes) -> str:
        """The host; those who never called share one."""
        return self._hosts.get(key, "")


# ---- Places


class Guest(Protocol):
    """A stranger's stream, question or queue: it has a place."""

    @property
    def key(self) -> bytes: ...

    @property
    def host(self) -> str: ...

    @property
    def last_heard(self) -> float:
        """When it last did anything for which it has its place."""
        ...


G = TypeVar("G", bound=Guest)


def choose_leaver(guests: Iterable[G], get_had: Callable[[bytes], float] = lambda key: 0.0) -> G:
    """Who gives up its place to a newer one. ``get_had`` is what a key had lately of that for which it has its place.

    Who says nothing leaves before who says much, or many that hold their peace would outlast one that asks.
    """
    guests, now = list(guests), time.monotonic()
    hosts = Counter(guest.host for guest in guests)
    keys = Counter(guest.key for guest in guests)

    def rate(guest: G) -> tuple[int, int, float, float, float]:
        silence = now - guest.last_heard
        return (
            hosts[guest.host],
            keys[guest.key],
            silence if silence > _SILENCE else 0.0,
            get_had(guest.key),
            silence,
        )

    return max(guests, key=rate)


# ---- Turns and bytes


class Accounts:
    """What hosts and keys had lately."""

    def __init__(self) -> None:
        self._had: dict[object, tuple[float, float]] = {}

    def get(self, whose: object, now: float) -> float:
        amount, since = self._had.get(whose, (0.0, now))
        return float(amount * 0.5 ** ((now - since) / _HALF_LIFE))

    def add(self, whose: object, amount: float, now: float) -> None:
        before = self.get(whose, now)
        self._had.pop(whose, None)
        self._had[whose] = before + amount, now
        if len(self._had) > _REMEMBERED:
            del self._had[next(iter(self._had))]


class _Waiter:
    __slots__ = ("cost", "go", "host", "key", "kind", "number")

    def __init__(self, number: int, key: bytes, host: str, cost: float, kind: object, go: asyncio.Future[None]) -> None:
        self.number, self.key, self.host, self.cost, self.kind, self.go = number, key, host, cost, kind, go


class Share:
    """So much a second for all strangers together. It lives in one event loop.

    ``get_limit`` may name a kind of which only so many go in one window; :meth:`renew` begins a new window, and so does
    the time.
    """

    def __init__(
        self,
        rate: float,
        burst: float,
        get_rank: Callable[[bytes], Rank],
        hosts: Hosts,
        *,
        window: float = 1.0,
        get_limit: Callable[[object], int | None] = lambda kind: None,
    ) -> None:
        self._rate, self._burst, self._get_rank, self._hosts = rate, burst, get_rank, hosts
        self._window, self._get_limit = window, get_limit
        self._left, self._time = burst, time.monotonic()
        self._went: Counter[object] = Counter()
        self._renewed = self._time
        self._accounts = Accounts()
        self._waiters: list[_Waiter] = []
        self._number = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take(self, key: bytes, cost: float, kind: object = None) -> None:
        """Wait until somebody's turn has come; members and candidates do not."""
        if self._get_rank(key) is Rank.MEMBER:
            return
        loop = asyncio.get_running_loop()
        self._number += 1
        waiter = _Waiter(self._number, key, self._hosts.get(key), cost, kind, loop.create_future())
        self._waiters.append(waiter)
        self._serve()
        if not waiter.go.done() and (self._task is None or self._task.done()):
            self._task = loop.create_task(self._run())
        try:
            await waiter.go
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def get_had(self, key: bytes) -> float:
        """What a key had lately."""
        return self._accounts.get(key, time.monotonic())

    def renew(self) -> None:
        """Begin a new window: whoever limits the kinds counts anew."""
        self._went.clear()
        self._renewed = time.monotonic()
        self._changed.set()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Look after the line until nobody stands in it."""
        while self._waiters:
            self._changed.clear()
            self._serve()
            if not self._waiters:
                return
            pause = _LOOK if self._left > 0 else min(_LOOK, (1e-3 - self._left) / self._rate)
            try:
                async with asyncio.timeout(pause):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _serve(self) -> None:
        """Let all go whose turn it is."""
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._time) * self._rate)
        self._time = now
        if now - self._renewed >= self._window:
            self._went.clear()
            self._renewed = now
        for waiter in [waiter for waiter in self._waiters if self._get_rank(waiter.key) is Rank.MEMBER]:
            self._let_go(waiter)
        while self._left > 0:
            may = [waiter for waiter in self._waiters if self._is_within(waiter.kind) and not waiter.go.done()]
            if not may:
                return
            self._charge(chosen := self._choose(may, now), now)
            self._let_go(chosen)

    def _is_within(self, kind: object) -> bool:
        limit = self._get_limit(kind)
        return limit is None or self._went[kind] < limit

    def _choose(self, waiters: list[_Waiter], now: float) -> _Waiter:
        get = self._accounts.get
        had = {rank: get(rank, now) for rank in (Rank.FORMER, Rank.STRANGER)}
        former_first = had[Rank.FORMER] <= _FORMER_SHARE * had[Rank.STRANGER] + self._burst

        def rate(waiter: _Waiter) -> tuple[bool, float, float, float, int]:
            is_former = self._get_rank(waiter.key) is Rank.FORMER
            of_host, of_key = get(waiter.host, now), get(waiter.key, now)
            return is_former is not former_first, of_host, of_key, waiter.cost, waiter.number

        return min(waiters, key=rate)

    def _charge(self, waiter: _Waiter, now: float) -> None:
        self._left -= waiter.cost
        self._went[waiter.kind] += 1
        for whose in (self._get_rank(waiter.key), waiter.host, waiter.key):
            self._accounts.add(whose, waiter.cost, now)

    def _let_go(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        if not waiter.go.done():
            waiter.go.set_result(None)
