"""Bad weather: what the model of it does to a swarm, and that patient attackers gain nothing by it.

The long runs are in ``experiments/weather.py``; here are short ones of the same kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import msgspec
import pytest
from test_experiments import load

from phalanx.attacks import Attack, load_attack
from phalanx.core.crypto import Domain
from phalanx.core.events import StepFinished
from phalanx.core.membership import compute_duties, make_genesis
from phalanx.core.messages import Phase
from phalanx.network.simulated import Links
from phalanx.simulation.checkers import Checkers
from phalanx.simulation.swarm import Setup, Swarm
from phalanx.simulation.weather import Kind, LateMessages, Moment, Stalls, Weather, When

DELTA = 1.0


def make_swarm(
    n: int = 7,
    b: int = 1,
    steps: int = 12,
    seed: int = 3,
    trace: bool = False,
    attackers: Mapping[int, Attack] | None = None,
) -> Swarm:
    settings = {"byzantine": b, "steps": steps, "delta": DELTA, "gradient_time": 1.0, "transfer_time": 1.0}
    setup = Setup(founders=n, settings=settings, compute_time=0.4, attackers=attackers or {})
    return Swarm(setup, seed, Links(delta=0.9 * DELTA, low=0.02, high=0.1), trace=trace, keep_events=True)


class Signatures:
    """When each honest peer signed what."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.found: list[tuple[float, bytes, Domain, int]] = []
        swarm.observers.append(self)

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        pass

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        phase = msgspec.msgpack.decode(payload)[4]
        self.found.append((self.swarm.world.now, key, domain, phase))


def run(swarm: Swarm, until: float = 2000.0) -> None:
    swarm.run(until, swarm.is_over)


# ---- The model


@pytest.mark.parametrize("kind", Kind)
def test_a_stall_holds_messages_both_ways_until_it_is_over(kind: Kind) -> None:
    swarm = make_swarm()
    weather = Weather(swarm, Stalls(rate=0.1, lengths=(5, 9), most=1, kinds=(kind,)), clears=6)
    deliveries: list[tuple[float, bytes, bytes]] = []
    deliver = swarm.world._deliver

    def watch(peer: Any, sender: bytes, parcel: Any) -> None:
        deliveries.append((swarm.world.now, sender, peer.key))
        deliver(peer, sender, parcel)

    swarm.world._deliver = watch  # type: ignore[method-assign]
    run(swarm)
    assert weather.past
    for stall in weather.past:
        ways = [time for time, *ends in deliveries if stall.key in ends and stall.begin + 0.1 < time < stall.end]
        assert not ways, f"{stall}: {len(ways)} messages came through (seed {swarm.seed})"
        after = {
            key for time, *ends in deliveries if stall.key in ends and stall.end < time < stall.end + 1 for key in ends
        }
        assert len(after) > 3


def test_a_process_that_stands_still_signs_nothing_and_one_that_is_cut_off_does() -> None:
    found = {}
    for kind in Kind:
        swarm = make_swarm()
        signatures = Signatures(swarm)
        weather = Weather(swarm, Stalls(rate=0.1, lengths=(8, 8), most=1, kinds=(kind,)), clears=6)
        run(swarm)
        found[kind] = sum(
            stall.begin < time < stall.end and key == stall.key
            for stall in weather.past
            for time, key, *_ in signatures.found
        )
        assert weather.past
    assert found[Kind.PAUSE] == 0 < found[Kind.CUT]


MOMENTS: list[When] = [
    Moment.BOUNDARY,
    Moment.ANYTIME,
    Moment.SCATTER,
    Moment.GATHER,
    *(Phase.COMMIT, Phase.AGGREGATE, Phase.REVEAL, Phase.REPORT, Phase.CONFIRM),
]


@pytest.mark.parametrize("when", MOMENTS, ids=lambda when: when.name.lower())
def test_a_stall_begins_at_its_moment(when: When) -> None:
    swarm = make_swarm(steps=4)
    signatures = Signatures(swarm)
    weather = Weather(swarm, Stalls(rate=0.2, lengths=(5, 5), most=1, when=(when,)))
    run(swarm, 100.0)
    assert {stall.when for stall in weather.past} == {when}
    for stall in weather.past if isinstance(when, Phase) else ():
        assert (stall.begin, stall.key, Domain.AGREED, when) in signatures.found


def test_rare_moments_come_when_somebody_is_missing() -> None:
    swarm = make_swarm(steps=30)
    weather = Weather(swarm, Stalls(rate=0.1, lengths=(12, 12), when=(Moment.SLOW_PATH, Moment.BOUNDARY)))
    run(swarm, 500.0)
    assert {stall.when for stall in weather.past} == {Moment.SLOW_PATH, Moment.BOUNDARY}


@pytest.mark.parametrize(("group", "most"), [(1, 1), (3, None), (3, 4)])
def test_as_many_peers_are_out_as_asked_for(group: int, most: int | None) -> None:
    swarm = make_swarm(steps=10)
    weather = Weather(swarm, Stalls(rate=0.1, lengths=(3, 6), group=group, most=most), clears=6)
    run(swarm, 300.0)
    out = [sum(x.begin <= stall.begin < x.end for x in weather.past) for stall in weather.past]
    assert max(out) >= group
    assert most is None or max(out) <= most


def test_one_seed_is_one_weather() -> None:
    def trace(seed: int) -> tuple[str, list[Any]]:
        swarm = make_swarm(steps=8, seed=seed, trace=True)
        fronts = Stalls(rate=0.05, lengths=(3, 9), kinds=tuple(Kind), when=tuple(Moment)), LateMessages(share=0.01)
        weather = Weather(swarm, *fronts)
        run(swarm, 300.0)
        return swarm.world.trace_digest, weather.past

    assert trace(5) == trace(5)
    assert trace(5)[0] != trace(6)[0]


def test_the_swarm_knows_for_whom_delta_does_not_hold() -> None:
    swarm = make_swarm(steps=6)
    weather = Weather(swarm, Stalls(rate=1.0, lengths=(5, 5), most=1), clears=2)
    swarm.run(100.0, lambda: bool(weather.past))
    (stall,) = weather.past
    others = [key for key in swarm.keys if key != stall.key]
    for later, steady in ((4.9, False), (6.0, False), (20.0, True)):
        swarm.run(stall.begin + later)
        assert swarm.is_steady(stall.key, 10.0) is steady
        assert all(swarm.is_steady(key, 0.1) for key in others)


def test_late_messages_break_delta_for_all() -> None:
    swarm = make_swarm(steps=6)
    weather = Weather(swarm, LateMessages(share=0.05, factor=3.0), clears=3)
    run(swarm)
    assert weather.late_messages > 10
    assert 0 < swarm.delta_broken < swarm.world.now


def test_weather_clears() -> None:
    swarm = make_swarm(steps=16)
    weather = Weather(swarm, Stalls(rate=0.1, lengths=(3, 5), when=(Phase.REPORT, Moment.ANYTIME)), clears=8)
    run(swarm)
    assert weather.past
    assert max(stall.step for stall in weather.past) < 8
    assert swarm.world.links.route is None
    assert not weather.out


def test_work_waits_while_the_process_stands_still() -> None:
    """A gradient that a pause interrupts is finished as much later."""
    swarm = make_swarm(steps=4)
    weather = Weather(swarm, Stalls(rate=0.0, lengths=(5, 5), kinds=(Kind.PAUSE,)))
    contributors = compute_duties(swarm.config, make_genesis(swarm.config)).contributors
    key, front = contributors[0], weather.stalls[0]
    finished: list[float] = []

    class Steps(Signatures):
        def on_note(self, time: float, key: bytes, event: Any) -> None:
            if isinstance(event, StepFinished) and not finished:
                finished.append(time)

    signatures = Steps(swarm)
    swarm.world.at(0.3, lambda: weather._begin(front, key, Moment.ANYTIME))
    run(swarm, 50.0)
    commits = [time for time, who, _, phase in signatures.found if who == key and phase == Phase.COMMIT]
    # Three tenths of the first gradient's 0.4 s were computed before the pause.
    assert commits[0] == pytest.approx(0.3 + 5 + 0.1)


@pytest.mark.parametrize("attack", [None, "patient_gradient@5"])
def test_the_checkers_ask_for_no_more_than_the_weather_allows(attack: str | None) -> None:
    attackers = {index: load_attack(attack) for index in (6, 7)} if attack is not None else {}
    swarm = make_swarm(n=8, b=2, steps=40, seed=2, attackers=attackers)
    checkers = Checkers(swarm)
    weather = Weather(swarm, Stalls(rate=0.05, lengths=(3, 15), kinds=tuple(Kind), when=(*Moment, *Phase)), clears=30)
    run(swarm)
    checkers.finish()
    assert weather.past
    assert not checkers.violations, "\n".join(map(str, checkers.violations))


# ---- What it must not do to a run


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    return load("experiments/weather.py")


def get_wrong(experiment: ModuleType, cells: Iterable[Any]) -> dict[str, Any]:
    """What is amiss, by the command that shows it."""
    rows = {experiment.replay_takeover(cell): experiment.run_cell(cell, 120.0)["wrong"] for cell in cells}
    return {command: wrong for command, wrong in rows.items() if wrong}


TAKEOVERS = {
    "one at a time, at boundaries, where all are needed": (
        16,
        7,
        "patient_takeover",
        "boundary",
        10,
        "one",
        "cut",
        False,
        60,
    ),
    "few at a time, in scatter, partition-safe": (16, 3, "patient_takeover", "scatter", 5, "few", "cut", True, 150),
    "few at a time, anytime": (16, 5, "patient_takeover", "anytime", 10, "few", "cut", False, 120),
    "paused in scatter, cheats at the least margin": (
        8,
        1,
        "patient_gradient",
        "scatter",
        10,
        "few",
        "pause",
        False,
        200,
    ),
}


@pytest.mark.parametrize("name", TAKEOVERS)
def test_patient_attackers_take_nothing_over(experiment: ModuleType, name: str) -> None:
    fields = ("n", "b", "attack", "when", "length", "crowd", "kind", "safe", "steps")
    cell = experiment.Cell(number=2, **dict(zip(fields, TAKEOVERS[name], strict=True)))
    assert not get_wrong(experiment, [cell])


def test_honest_hiccups_leave_everybody_in_the_run(experiment: ModuleType) -> None:
    sky = experiment.Sky(weather="boundary", length=10.0, compute=0.5, kind="cut", seed=1, steps=200)
    (row,) = experiment.judge_skies([experiment.run_sky(sky, 120.0)])
    assert not row["wrong"], row


def test_a_calm_swarm_has_nothing_to_wait_for(experiment: ModuleType) -> None:
    sky = experiment.Sky(weather="calm", length=0.0, compute=0.5, kind="cut", seed=1, steps=100)
    (row,) = experiment.judge_skies([experiment.run_sky(sky, 120.0)])
    assert (row["wrong"], row["member_share"], row["waits"], row["slow_paths"]) == ([], 1.0, 0, 0)


def test_the_grid_has_every_kind_of_run(experiment: ModuleType) -> None:
    cells = list(experiment.draw_cells(1000))
    assert len({cell.name for cell in cells}) == len(cells) == 300
    for (n, b), count in experiment.SIZES.items():
        some = [cell for cell in cells if (cell.n, cell.b) == (n, b)]
        assert len(some) == count
        assert {cell.attack for cell in some} == set(experiment.PATIENT)
        assert {cell.when for cell in some} == set(experiment.MOMENTS)
        assert {cell.length for cell in some} == set(experiment.LENGTHS)
        assert {cell.safe for cell in some} == ({False, True} if 3 * b < n else {False})


@pytest.mark.parametrize("b", [0, 1])
@pytest.mark.parametrize("kind", Kind)
def test_who_stood_still_or_was_cut_off_blames_nobody_for_it(b: int, kind: Kind) -> None:
    """Its deadlines have passed when it wakes, and what was sent to it meanwhile is under way."""
    swarm = make_swarm(6, b, steps=20, seed=5)
    sleeper = swarm.keys[0]
    front = Stalls(rate=0.5, lengths=(5, 7), when=(Phase.REVEAL,), kinds=(kind,), most=1, peers=(sleeper,))
    weather = Weather(swarm, front, clears=12)
    run(swarm)
    assert swarm.is_over()
    assert len(weather.past) >= 3
    blamed = set[bytes]()
    for _, event in swarm.events[swarm.keys[1]]:
        if isinstance(event, StepFinished):
            blamed |= {count.key for count in event.view.strikes} | {record.key for record in event.view.absences}
    assert blamed == {sleeper}
