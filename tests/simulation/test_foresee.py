"""The next gradient starts while the step is verified: what is foreseen is asked for, and undoing costs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from phalanx.attacks import Attack, Insider, load_attack
from phalanx.core.effects import ComputeGradient, Foresee
from phalanx.core.events import StepFinished
from phalanx.core.membership import View
from phalanx.core.messages import AggregateChunk, Message
from phalanx.network.simulated import Links, World
from phalanx.simulation.swarm import Setup, Swarm

STEPS, GRADIENT = 8, 0.8


class Counting:
    """Counts the gradients of honest members that were asked for, and those that had been foreseen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, bool]] = []
        start = World._start_work

        def watch(world: World, peer: Any, work: ComputeGradient) -> int:
            self.asked.append((work.step, (work.step, work.seed) in peer.foreseen))
            return start(world, peer, work)

        monkeypatch.setattr(World, "_start_work", watch)


def run(attack: str | None = None, **settings: Any) -> Swarm:
    attackers = {2: load_attack(attack)} if attack is not None else {}
    setup = Setup(
        founders=7,
        settings={"byzantine": 2, "validators": 2, "size": 64, "steps": STEPS} | settings,
        attackers=attackers,
        compute_time=GRADIENT,
    )
    swarm = Swarm(setup, 5, Links(low=0.1, high=0.2), keep_events=True)
    swarm.run(2000.0)
    return swarm


def find_end(swarm: Swarm) -> float:
    return max(time for time, event in swarm.events[swarm.keys[0]] if isinstance(event, StepFinished))


def find_views(swarm: Swarm) -> list[View]:
    """All but how long things took, and the root of the messages that say so."""
    told = swarm.events[swarm.keys[0]]
    views = [event.view for _, event in told if isinstance(event, StepFinished)]
    return [msgspec.structs.replace(view, previous=b"", pace=0, debts=(), rifts=()) for view in views]


def test_every_gradient_after_the_first_step_is_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    counting = Counting(monkeypatch)
    run()
    steps = [step for step, _ in counting.asked]
    late = counting.asked[5 : steps.index(STEPS - 1)]  # five contribute to the first step; at the end everybody votes
    assert len(late) == 7 * (STEPS - 2) - 2  # in the second step nobody has been drawn yet
    assert all(foreseen for _, foreseen in late)


def test_a_step_is_shorter_and_otherwise_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = run()
    monkeypatch.setattr(World, "_perform_foresee", lambda world, peer, effect: None)
    slow = run()
    assert find_views(fast) == find_views(slow)
    assert len(find_views(fast)) == STEPS
    assert find_end(fast) < find_end(slow) - 0.1 * STEPS


@pytest.mark.parametrize("attack", ["wrong_aggregate@3", "wrong_reveal@3", "wrong_gradient@2"])
def test_what_was_foreseen_from_an_undone_state_is_not_used(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attacker is banned in mid-run: states, rosters and bans are those of a run that foresees nothing."""
    fast = run(attack)
    monkeypatch.setattr(World, "_perform_foresee", lambda world, peer, effect: None)
    assert find_views(fast) == find_views(run(attack))
    assert len(find_views(fast)) == STEPS


def test_nothing_is_foreseen_beyond_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    perform = World._perform_foresee

    def watch(world: World, peer: Any, effect: Foresee) -> None:
        seen.extend(work.step for work in effect.find())
        perform(world, peer, effect)

    monkeypatch.setattr(World, "_perform_foresee", watch)
    run()
    assert max(seen) == STEPS - 1


def run_with_joiner(moment: float, compute_time: float, links: Links, term: int, attackers: dict[int, Attack]) -> int:
    """How many steps a joiner was on probation; every one had the chance to serve a step of it."""
    settings = {"byzantine": 1, "size": 64, "steps": 60, "probation": term, "newcomer_probation": term}
    setup = Setup(founders=5, joiners=1, settings=settings, attackers=attackers, compute_time=compute_time)
    swarm = Swarm(setup, 5, links, keep_events=True)
    swarm.world.at(moment, lambda: swarm.start(5))
    swarm.run(300.0)
    views = [event.view for _, event in swarm.events[swarm.keys[0]] if isinstance(event, StepFinished)]
    began = next(view.step for view in views if view.candidates)
    return next((view.step for view in views if swarm.keys[5] in view.roster), 1000) - began


@pytest.mark.parametrize("moment", [5 + x / 10 for x in range(10)])
def test_a_probationer_gets_in_step_with_the_members(moment: float) -> None:
    """Gradients take nearly all the time. Whoever comes in mid-step is late first, and has to catch up."""
    term = 5
    assert run_with_joiner(moment, GRADIENT, Links(low=0.005, high=0.02), term, {}) <= term + 4


@dataclass(kw_only=True, eq=False)
class Stingy(Attack):
    """Sends its aggregates to members only."""

    def on_message(
        self, insider: Insider, to: tuple[bytes, ...], message: Message
    ) -> Iterable[tuple[tuple[bytes, ...], Message]]:
        if isinstance(message, AggregateChunk):
            to = tuple(key for key in to if key in insider.view.roster)
        return ((to, message),)


@pytest.mark.parametrize("high", [0.02, 0.2])
@pytest.mark.parametrize("compute_time", [0.05, 0.3, 0.8])
def test_no_member_alone_can_keep_a_probationer_out(compute_time: float, high: float) -> None:
    term = 12
    assert run_with_joiner(1.0, compute_time, Links(high=high), term, {2: Stingy()}) <= 3 * term
