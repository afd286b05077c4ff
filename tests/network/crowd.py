"""A swarm of real processes on the loopback that goes on while a test does something to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from threading import Thread
from typing import Any, TypeVar

from phalanx import events
from phalanx.node import run_init
from phalanx.swarm import Swarm

LONG = 300.0
"""Seconds after which something that should have happened never will: not a bound on how long it takes."""

E = TypeVar("E", bound=events.Event)


def wait_for(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {LONG:.0f} s"
        time.sleep(0.1)


class Crowd:
    """Founders who go on until they are stopped."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.stop = Flag()
        self._failures: list[BaseException] = []

    @property
    def address(self) -> str:
        return self.swarm.processes[0].address

    @property
    def step(self) -> int:
        return max(process.step for process in self.swarm.processes)

    def tell(self, kind: type[E]) -> list[E]:
        return [event for event in self.swarm.merged if isinstance(event, kind)]

    def read_states(self) -> dict[int, str]:
        """The state after each step, as all agree."""
        told = {(e.step, e.state) for p in self.swarm.processes for e in p.told if isinstance(e, events.StepFinished)}
        states = dict(told)
        assert len(states) == len(told), "two states after one step"
        return states

    def await_steps(self, count: int) -> None:
        goal = self.step + count
        wait_for(lambda: self.step >= goal or bool(self._failures), f"{count} more steps")
        assert not self._failures, self._failures

    def run(self) -> None:
        try:
            self.swarm.run(LONG, self.stop.is_set)
        except BaseException as error:
            self._failures.append(error)


@contextmanager
def gather(swarm: Swarm, task: str | Path, settings: Mapping[str, Any]) -> Iterator[Crowd]:
    """The swarm, two steps after its beginning."""
    run_init(swarm.folder / "run.toml", str(task), swarm.founders, settings)
    crowd = Crowd(swarm)
    thread = Thread(target=crowd.run)
    thread.start()
    try:
        crowd.await_steps(2)
        yield crowd
    finally:
        crowd.stop.set()
        thread.join()
