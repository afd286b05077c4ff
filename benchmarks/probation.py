"""What a newcomer on probation costs the members: the time of a step with one, over that without.

    python benchmarks/probation.py [--real] [--json]

Some member recomputes the newcomer's gradient in every step. In the simulator, in virtual time, each peer computes one
gradient at a time, as a machine with one device does; links take 5 to 50 ms, and a gradient 1 s. The figures are the
members' seconds a step while the newcomer serves, its probation being longer than the run, over those of the same run
without a newcomer. ``tight`` is a swarm with no member to spare: all but one have to contribute. ``found`` is the share
of cheating newcomers that were banned, and ``steps`` how many steps of cheating that took on average: what must not
change.

With ``--real`` four peers and a newcomer are processes on this machine, whose gradients are 0.5 s of waiting, so that
they do not take the processor from one another.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from phalanx.attacks import Attack, load_attack
from phalanx.core.effects import ComputeGradient, Foresee
from phalanx.core.events import Banned, StepFinished
from phalanx.events import StepFinished as StepLogged
from phalanx.events import read_events
from phalanx.network import simulated
from phalanx.network.simulated import Links, World
from phalanx.simulation import swarm as simulation
from phalanx.simulation.swarm import Setup, Swarm
from phalanx.swarm import Attackers, run_swarm
from phalanx.training.recorder import EVENTS

GRADIENT, LOW, HIGH = 1.0, 0.005, 0.05  # seconds
SWARMS = {"4": (4, 0), "8": (8, 2), "16": (16, 3), "tight": (16, 7)}
STEPS, WARM_UP, JOIN_AT = 40, 12, 3.0
CHEATS = 8
PAUSE = 0.5
TARGETS = {"ratio_4": 1.05, "ratio_8": 1.05, "ratio_16": 1.05, "ratio_real": 1.1}
PACED = """
import time
from dataclasses import replace
from phalanx.training.tasks import digits

def make_task():
    task = digits.make_task()
    def loss(model, batch):
        time.sleep({pause})
        return task.loss(model, batch)
    return replace(task, loss=loss)
"""


class OneAtATime(World):
    """A world in which a peer's gradients wait for one another, as in ``network/live.py``."""

    def __init__(self, *words: Any, **more: Any) -> None:
        super().__init__(*words, **more)
        self._queues: dict[bytes, list[tuple[tuple[int, bytes], float, bool]]] = {}
        """What each peer's device is at, when that is done, and whether somebody asked for it."""

    def _take_waiting(self, peer: Any, foreseen_only: bool) -> list[tuple[tuple[int, bytes], float, bool]]:
        """Take back what the device has not begun."""
        queue = [job for job in self._queues.get(peer.key, ()) if job[1] > self.now]
        keeps = [place == 0 or (foreseen_only and asked) for place, (_, _, asked) in enumerate(queue)]
        self._queues[peer.key] = [job for job, keep in zip(queue, keeps, strict=True) if keep]
        return [job for job, keep in zip(queue, keeps, strict=True) if not keep]

    def _append(self, peer: Any, place: tuple[int, bytes], asked: bool) -> float:
        queue = self._queues.setdefault(peer.key, [])
        begin = max(self.now, queue[-1][1]) if queue else self.now
        end = begin + self._get_duration(peer, ComputeGradient(*place))
        queue.append((place, end, asked))
        return end

    def _start_work(self, peer: Any, work: ComputeGradient) -> int:
        place = (work.step, work.seed)
        ends = {job: end for job, end, _ in self._queues.get(peer.key, ())}
        if place in ends and place in peer.foreseen:
            end = ends[place]
        elif place in peer.foreseen:  # it is done
            end = self.now
        else:
            waiting = self._take_waiting(peer, foreseen_only=True)
            end = self._append(peer, place, True)
            for job, _, _ in waiting:
                self._append(peer, job, False)
        peer.foreseen.pop(place, None)
        peer.ticket += 1
        value = peer.disk.machine.compute_gradient(work.step, work.seed)
        self._push(max(end, self.now), simulated._FINISH, peer, peer.ticket, value)
        return int(peer.ticket)

    def _perform_foresee(self, peer: Any, effect: Foresee) -> None:
        self._take_waiting(peer, foreseen_only=True)
        peer.foreseen.clear()
        for work in effect.find():
            place = (work.step, work.seed)
            peer.foreseen[place] = self._append(peer, place, False)


def run(name: str, seed: int, joins: bool, attack: Attack | None = None, steps: int = STEPS) -> Swarm:
    count, byzantine = SWARMS[name]
    settings = {"byzantine": byzantine, "steps": steps, "newcomer_probation": 10 * steps, "probation": 10 * steps}
    setup = Setup(
        founders=count,
        joiners=1,
        settings={"size": 64, "gradient_time": 3.0, **settings},
        attackers={count: attack} if attack is not None else {},
        compute_time=GRADIENT,
    )
    swarm = Swarm(setup, seed, Links(low=LOW, high=HIGH), keep_events=True)
    if joins:
        swarm.world.at(JOIN_AT, lambda: swarm.start(count))
    swarm.run(20.0 * steps, swarm.is_over)
    return swarm


def measure(swarm: Swarm, joins: bool) -> float:
    """A member's seconds a step, once everything has settled."""
    times = [(time, event) for time, event in swarm.events[swarm.keys[0]] if isinstance(event, StepFinished)]
    assert len(times) == swarm.config.steps, f"only {len(times)} steps"
    serving = [event.view.candidates[0].served for _, event in times if event.view.candidates]
    assert not joins or serving[-1] >= swarm.config.steps - WARM_UP, "the newcomer does not serve"
    times = times[WARM_UP:-2]  # after the last step everybody checks everybody
    return (times[-1][0] - times[0][0]) / (len(times) - 1)


def measure_cheats(name: str) -> tuple[float, float]:
    """The share of newcomers that were banned of those that sent a wrong gradient; and how many steps it took."""
    taken: list[int] = []
    for seed in range(CHEATS):
        swarm = run(name, seed, True, load_attack("wrong_gradient"), steps=24)
        told = [event for _, event in swarm.events[swarm.keys[0]]]
        bans = [event for event in told if isinstance(event, Banned) and event.key == swarm.keys[-1]]
        views = [event.view for event in told if isinstance(event, StepFinished)]
        began = next(view.step for view in views if view.candidates)
        taken += [ban.at - began + 1 for ban in bans]
    return len(taken) / CHEATS, statistics.mean(taken) if taken else float("nan")


def measure_real(joins: bool, steps: int = 36) -> float:
    """The same with processes: the mean of a founder's seconds a step."""
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "paced.py"
        task.write_text(PACED.format(pause=PAUSE))
        settings = {"steps": steps, "delta": 2.0, "gradient_time": 6.0, "transfer_time": 2.0, "batch": 8}
        settings |= {"probation": 1000, "newcomer_probation": 1000}
        found = run_swarm(
            task=f"{task}:make_task",
            peers=4,
            byzantine=0,
            attackers=Attackers(),
            seed=0,
            out=Path(folder) / "swarm",
            settings=settings,
            kills=(),
            joins=((4, 1),) if joins else (),
            on_event=lambda event: None,
            should_stop=lambda: False,
        )
        assert found.finished, found.reason
        log = min((Path(folder) / "swarm").rglob(EVENTS))  # the first founder's
        took = [event.seconds for event in read_events(log) if isinstance(event, StepLogged)]
        return statistics.mean(seconds for seconds in took[-steps // 2 :] if seconds is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="processes on this machine as well")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    simulation.World = OneAtATime  # type: ignore[misc]
    found: dict[str, Any] = {}
    for name in SWARMS:
        alone, joined = (statistics.mean(measure(run(name, seed, x), x) for seed in range(3)) for x in (False, True))
        found |= {f"seconds_{name}": alone, f"seconds_joined_{name}": joined, f"ratio_{name}": joined / alone}
        print(f"{name:>5}: {alone:.2f} s a step, {joined:.2f} s with a newcomer: x {joined / alone:.2f}", flush=True)
    for name in ("8", "tight"):
        share, steps = measure_cheats(name)
        found |= {f"found_{name}": share, f"steps_{name}": steps}
        print(f"{name:>5}: of {CHEATS} cheating newcomers {share:.0%} banned, after {steps:.1f} steps", flush=True)
    if options.real:
        alone, joined = measure_real(False), measure_real(True)
        found |= {"seconds_real": alone, "seconds_joined_real": joined, "ratio_real": joined / alone}
        print(f" real: {alone:.2f} s a step, {joined:.2f} s with a newcomer: x {joined / alone:.2f}", flush=True)
    missed = [name for name, most in TARGETS.items() if name in found and found[name] > most]
    for name in missed:
        print(f"missed: {name} is {found[name]:.2f}, the target {TARGETS[name]}")
    if options.json:
        print(json.dumps(found | {"missed": missed}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
