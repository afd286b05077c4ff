"""What a peer writes into its log when the run halts and when it goes on, and when one that left has an end of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from phalanx import events
from phalanx.core import events as notes
from phalanx.core.crypto import Domain
from phalanx.core.justice import LEFT
from phalanx.simulation.swarm import Setup, Swarm
from phalanx.training.member import Member


class Scribe:
    """Gives the notes of one simulated peer to a member that has no more than a log."""

    def __init__(self, swarm: Swarm, key: bytes) -> None:
        self.key, self.told = key, list[events.Event]()
        self._member = member = Member.__new__(Member)
        member._peer, member._index = swarm._peers[key], {key: place for place, key in enumerate(swarm.keys)}
        member._told, member._halted, member._leaving, member._left = set(), False, False, False
        member._left_at, member._key = None, key
        member._recorder = SimpleNamespace(add=self.told.append)  # type: ignore[assignment]
        member._meet = member._finish_step = member._finish_run = lambda *arguments: None  # type: ignore[method-assign]

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if key == self.key:
            self._member._on_note(event)
            if isinstance(event, notes.StepFinished):
                self.told.append(events.Evaluated(event.step, None))

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        pass

    def tell(self, *kinds: type) -> list[events.Event]:
        return [event for event in self.told if isinstance(event, kinds)]


def run_without(crashed: tuple[int, ...], back: tuple[int, ...], founders: int = 4, **settings: Any) -> Scribe:
    """Some crash, the others wait, and some come back: what peer 0 tells of it."""
    usual = {"byzantine": 0, "steps": 5, "size": 32, "tau": 1.0, "cap": 4.0}
    swarm = Swarm(Setup(founders=founders, settings={**usual, **settings}), 1)
    scribe = Scribe(swarm, swarm.keys[0])
    swarm.observers.append(scribe)
    for place in crashed:
        swarm.world.at(6.0, lambda place=place: swarm.crash(swarm.keys[place]))  # type: ignore[misc]
    swarm.run(200.0, swarm.is_over)
    for place in back:
        swarm.restart(swarm.keys[place])
    assert swarm.run(2000.0, swarm.is_over)
    keys = {swarm.keys[place].hex() for place in crashed}
    assert all(event.keys and {*event.keys} <= keys for event in scribe.tell(events.Halted))
    return scribe


@pytest.mark.parametrize(
    ("crashed", "back", "settings", "silent", "allowed"),
    [
        ((1,), (1,), {"founders": 2}, [1], 0),
        ((2, 3), (2,), {"founders": 5, "byzantine": 1}, [2, 3], 1),
        ((2, 3), (3,), {}, [2, 3], 1),
    ],
    ids=["nobody may be out", "one may be out", "no quorum is left"],
)
def test_a_halt_names_who_is_silent_and_ends_when_they_are_back(
    crashed: tuple[int, ...], back: tuple[int, ...], settings: dict[str, Any], silent: list[int], allowed: int
) -> None:
    scribe = run_without(crashed, back, **settings)
    halted, went_on = scribe.tell(events.Halted, events.WentOn)
    assert isinstance(halted, events.Halted)
    assert isinstance(went_on, events.WentOn)
    assert (halted.silent, halted.allowed) == (silent, allowed)
    assert went_on.step >= halted.step
    after = scribe.told[scribe.told.index(went_on) :]
    assert any(isinstance(event, events.Evaluated) for event in after)


def test_as_many_as_are_allowed_are_removed_without_a_halt() -> None:
    scribe = run_without((1,), ())
    assert scribe.tell(events.Halted, events.WentOn) == []
    assert scribe.tell(events.SlowPathOpened)


@pytest.mark.parametrize(("step", "is_in", "stops"), [(6, False, False), (7, True, False), (7, False, True)])
def test_who_left_stops_once_the_others_have_gone_on(step: int, is_in: bool, stops: bool) -> None:
    """Not as long as the seal of its leaving may be disputed, nor if it has been, and it is in again."""
    swarm = Swarm(Setup(founders=4, settings={"byzantine": 0, "steps": 9}), 1)
    key, stopped = swarm.keys[0], list[bool]()
    member = Scribe(swarm, key)._member
    member._driver = SimpleNamespace(stop=lambda: stopped.append(True))  # type: ignore[assignment]
    view = swarm._peers[key].view
    roster = view.roster if is_in else tuple(other for other in view.roster if other != key)
    jumped = notes.Jumped(replace(view, step=step, roster=roster))
    member._on_note(jumped)
    assert not stopped, "it did not want to leave"
    member._leaving = True
    member._on_note(notes.Removed(key, 5, LEFT))
    member._on_note(jumped)
    assert bool(stopped) == stops
