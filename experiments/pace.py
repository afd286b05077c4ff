"""What members that are slow on purpose cost the others, and how long they may.

    python experiments/pace.py [--attacks every_deadline slow_to_one ...] [--gradients 0.5 2 20] [--steps 80] [--json]

Sixteen members, ``b = 3``, ``delta = 2`` s, links of 0.02 to 0.1 s, in virtual time. The attack begins at step 5. For
each attack: seconds a step without it; what was lost until the last attacker was out (in worst-case steps: all
deadlines of a step one after another); seconds a step from then on, beside the calm ones; honest members that were put
out, and whether victims are among them. ``slow_honest``: an honest member takes twice as long as the others for its
gradients, and nobody attacks. Exit 1 if an honest member was put out, if more than ``MOST_LOST`` worst-case steps were
lost, or if steps after that take more than ``MOST_AFTER`` (attackers that stay: ``MOST_UNDER``) times the calm ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from statistics import fmean, median

import torch

from phalanx.attacks import load_attack
from phalanx.core.config import Config
from phalanx.core.events import StepFinished
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm

MEMBERS, BYZANTINE, DELTA, TRANSFER = 16, 3, 2.0, 1.0
START, SETTLE, CLOSING = 5, 2, 3
"""Steps before the attack; steps that tell nothing yet, and at the end of a run, where all check all."""
MOST_LOST, MOST_AFTER, MOST_UNDER = 2.0, 1.1, 2.2
GRADIENTS = (0.5, 2.0, 20.0)
ALLOWED = 4.0
"""How many times longer than it takes a gradient may take by the manifest."""

SCENARIOS: Mapping[str, tuple[str | None, int]] = {
    "slow_honest": (None, 0),
    "every_deadline": ("every_deadline", 1),
    "every_deadline_and_round": ("every_deadline_and_round", 1),
    "deadlines_in_turns": ("deadlines_in_turns", 2),
    "synchronised": ("half_deadlines", 3),
    "late_parts": ("late_parts", 1),
    "slow_parts_to_one": ("slow_parts_to_one", 1),
    "slow_aggregates_to_one": ("slow_aggregates_to_one", 1),
    "slow_letters_to_one": ("slow_letters_to_one", 1),
    "slow_to_one_in_turns": ("slow_to_one_in_turns", 1),
    "three_slow_to_one": ("slow_to_one", 3),
    "false_lacking": ("false_lacking", 1),
    "quiet_complaints": ("quiet_complaints", 1),
    "slow_commit": ("slow_commit", 1),
    "too_slow_commit": ("too_slow_commit", 1),
    "many_accusations": ("many_accusations", 1),
}
"""Name, attack and number of attackers."""


@dataclass(frozen=True, slots=True)
class Result:
    scenario: str
    gradient: float
    calm: float
    """Seconds a step without the attack."""
    lost: float
    """Worst-case steps lost until the last attacker was out, or until the end."""
    stopped: int | None
    """Steps until then; None: an attacker is still a member."""
    worst: float
    """The longest step, in calm ones."""
    after: float
    """Seconds a step afterwards (over all steps of the attack if an attacker stays), in calm ones."""
    honest_out: tuple[int, ...]
    victims_out: tuple[int, ...]

    @property
    def passes(self) -> bool:
        if self.stopped is None:
            return not self.honest_out and self.after <= MOST_UNDER
        return not self.honest_out and self.lost <= MOST_LOST and self.after <= MOST_AFTER


def find_worst_step(config: Config) -> float:
    """Seconds of a step in which somebody uses each deadline, and has parts opened and aggregates reported again."""
    delta, transfer = config.delta, config.transfer_time
    heights = 4 * delta * 7  # COMMIT, AGGREGATE twice, REVEAL, REPORT twice, CONFIRM
    work = 2 * config.gradient_time + 3 * (4 * delta + transfer) + 2 * (6 * delta + transfer)
    return heights + work


def run_swarm(gradient: float, attack: str | None, attackers: int, slow: bool, steps: int, seed: int) -> Swarm:
    settings = {
        "byzantine": BYZANTINE,
        "steps": steps + CLOSING,
        "delta": DELTA,
        "gradient_time": ALLOWED * gradient,
        "transfer_time": TRANSFER,
    }
    made = load_attack(f"{attack}@{START}") if attack is not None else None
    setup = Setup(
        founders=MEMBERS,
        settings=settings,
        attackers={MEMBERS - 1 - place: made for place in range(attackers)} if made is not None else {},
        compute_time=gradient,
        compute_times={1: 2 * gradient} if slow else {},
    )
    swarm = Swarm(setup, seed, Links(delta=0.9 * DELTA, low=0.02, high=0.1), trace=False, keep_events=True)
    swarm.run(1e7, swarm.is_over)
    return swarm


def list_steps(swarm: Swarm) -> tuple[list[float], list[frozenset[bytes]]]:
    """Seconds of each step as an honest member that stayed longest saw it, and who were members after it."""
    seen = [[(t, e) for t, e in swarm.events[key] if isinstance(e, StepFinished)] for key in swarm.honest]
    finished = max(seen, key=len)
    times = [0.0, *(time for time, _ in finished)]
    durations = [after - before for before, after in pairwise(times)]
    return durations[:-CLOSING], [frozenset(event.view.roster) for _, event in finished][:-CLOSING]


def measure(scenario: str, gradient: float, steps: int, seed: int) -> Result:
    torch.set_num_threads(1)
    attack, attackers = SCENARIOS[scenario]
    calm = median(list_steps(run_swarm(gradient, None, 0, False, START + 10, seed))[0][SETTLE:])
    swarm = run_swarm(gradient, attack, attackers, scenario == "slow_honest", steps, seed)
    durations, rosters = list_steps(swarm)
    alone = (step for step, roster in enumerate(rosters) if attackers and not roster & swarm.byzantine)
    end = next((step for step in alone if step >= START), None)  # what they cost when they are back counts as well
    # The step after the last attacker went begins with gradients for another roster: that, too, is its cost.
    spell = durations[START : None if end is None else end + 2]
    rest = durations[START:] if end is None else durations[end + 2 :]
    out = {key for roster in rosters for key in swarm.honest if key not in roster}
    victims = swarm.plot.notes.get("victims", set())
    return Result(
        scenario,
        gradient,
        round(calm, 3),
        round(sum(seconds - calm for seconds in spell) / find_worst_step(swarm.config), 2),
        None if end is None else end + 1 - START,
        round(max(durations[START:]) / calm, 1),
        round(fmean(rest) / calm, 2) if rest else 0.0,
        tuple(sorted(swarm.keys.index(key) for key in out)),
        tuple(sorted(swarm.keys.index(key) for key in out & victims)),
    )


def measure_job(job: tuple[str, float, int, int]) -> Result:
    return measure(*job)


def show(result: Result) -> str:
    stopped = "stays" if result.stopped is None else f"out after {result.stopped:2d} steps"
    honest = f", honest members out: {result.honest_out}" if result.honest_out else ""
    victims = f", victims among them: {result.victims_out}" if result.victims_out else ""
    return (
        f"{result.scenario:24s} gradient {result.gradient:4.1f} s, calm {result.calm:6.2f} s a step: "
        f"lost {result.lost:6.2f} worst-case steps, {stopped:18s}, longest {result.worst:6.1f}, "
        f"afterwards {result.after:6.2f} times calm{honest}{victims}{'' if result.passes else '  <- misses'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--attacks", nargs="+", choices=[*SCENARIOS], default=[*SCENARIOS], metavar="NAME")
    parser.add_argument("--gradients", nargs="+", type=float, default=GRADIENTS, help="seconds")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="all results in one last line")
    options = parser.parse_args(arguments)
    jobs = [(name, gradient, options.steps, options.seed) for gradient in options.gradients for name in options.attacks]
    results = []
    if options.jobs == 1:
        for job in jobs:
            results.append(measure_job(job))
            print(show(results[-1]), flush=True)
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            for result in pool.map(measure_job, jobs):
                results.append(result)
                print(show(result), flush=True)
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
    return 0 if all(result.passes for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
