"""What every checker has: the swarm it watches, and where it reports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.core.crypto import Domain
from phalanx.core.events import (
    AttemptStarted,
    RunFinished,
    StepFinished,
)
from phalanx.core.membership import View
from phalanx.simulation.swarm import Swarm


@dataclass(frozen=True, slots=True)
class Violation:
    seed: int
    step: int
    rule: str
    """The name of the invariant."""
    text: str

    def __str__(self) -> str:
        return f"seed {self.seed}, step {self.step}: {self.rule}: {self.text}"


class Checkers:
    """All checkers of one swarm, and what they found."""

    def __init__(self, swarm: Swarm, kinds: Iterable[type[Checker]] | None = None) -> None:
        self.swarm = swarm
        self.violations: list[Violation] = []
        self.chain: dict[tuple[int, int], View] = {}
        """Every certified view, by step and attempt, as first seen."""
        self.latest: View | None = None
        if kinds is None:
            from phalanx.simulation.checkers import ALL

            kinds = ALL
        self.checkers: tuple[Checker, ...] = tuple(kind(self) for kind in kinds)
        swarm.observers.append(self)

    @property
    def step(self) -> int:
        """How many steps are final."""
        return self.latest.step if self.latest is not None else 0

    def report(self, rule: str, step: int, text: str) -> None:
        if len(self.violations) < 100:
            self.violations.append(Violation(self.swarm.seed, step, rule, text))

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        for checker in self.checkers:
            checker.on_sign(key, domain, payload)

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if not self.swarm.is_honest(key):
            return
        for checker in self.checkers:
            checker.on_note(key, event)
        if isinstance(event, StepFinished | RunFinished):
            self._see(key, event.view)
        elif isinstance(event, AttemptStarted):
            peer = self.swarm.get_peer(key)
            if peer is None or not peer.riding:  # what it rides on is not certified yet
                self._see(key, event.view)

    def _see(self, key: bytes, view: View) -> None:
        place = (view.step, view.attempt)
        if place not in self.chain:
            self.chain[place] = view
            before = self.latest
            if before is None or place > (before.step, before.attempt):
                self.latest = view
                for checker in self.checkers:
                    checker.on_view(key, before, view)

    def finish(self) -> None:
        for checker in self.checkers:
            checker.finish()


class Checker:
    """One invariant."""

    rule = ""

    def __init__(self, all_of_them: Checkers) -> None:
        self.all = all_of_them
        self.swarm = all_of_them.swarm
        self.config = self.swarm.config

    def report(self, step: int, text: str) -> None:
        self.all.report(self.rule, step, text)

    def on_note(self, key: bytes, event: Any) -> None:
        """An honest peer noted something."""

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        """``key`` is the first honest peer that starts from this certified view; ``before`` is the one before it."""

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        """An honest peer signed something."""

    def finish(self) -> None:
        """The run is over."""


def name(key: bytes) -> str:
    return key[:4].hex()
