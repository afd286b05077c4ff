"""How many memberships computation buys: an attacker computes ``k`` gradients a step and has ``10 k`` keys.

docs/PROTOCOL.md, section 10, promises that a share of the compute buys about that share of the memberships, however
many keys one makes. Eight honest founders (b = 3, one validator); every Sybil key asks to join from the first step on.
Sybils never check anybody, and shield one another in votes. Who gets the gradients of a step is the attacker's choice:

* ``first``: whoever asks first (the attack ``sybils``); the others commit to an old gradient.
* ``members``: those who are in keep in; what is left goes to the candidate that has served longest. Candidates
  without a gradient say nothing, which costs them a step of their probation and nothing else.
* ``candidates``: candidates come first, and members cheat until they are caught. A member is checked so much more
  rarely than a candidate that this is the best choice while probation is not much longer than a cheat lasts.

    python experiments/sybils.py --runs 200 [--sharing candidates] [--probation 45] [--admissions 1] [--jobs 2] [--json]

prints, for k = 1, 2, 3, how many runs had how many Sybils in the roster at the same time, at most. Exit 1 if there were
ever more than ``k + 1``, or if an honest founder is gone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from phalanx.attacks import Attack, Insider, combine
from phalanx.attacks.gradients import SharedCompute
from phalanx.attacks.justice import IdleValidator, ShieldingVotes
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Sign
from phalanx.core.events import StepFinished
from phalanx.core.membership import View
from phalanx.core.messages import Signed
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm

FOUNDERS, BYZANTINE = 8, 3
KEYS_PER_GRADIENT = 10
SIZE = 32
ASKED = 5
"""By this step every Sybil has asked to join."""
SHARINGS = ("first", "members", "candidates")


@dataclass(kw_only=True, eq=False)
class Rationed(Attack):
    """Sybils that decide together, once for each step, who gets one of the ``budget`` gradients."""

    budget: int = 1
    members_first: bool = True

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return gradient if insider.key in self._choose(insider) else torch.zeros_like(gradient)

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Trial) and insider.key not in self._choose(insider):
            return None
        return sign

    def _choose(self, insider: Insider) -> frozenset[bytes]:
        """Whoever comes first in a step looks at where the run stands, and divides."""
        place = ("rations", insider.view.step)
        if place not in insider.plot.notes:
            keys = insider.plot.keys
            working = [key for key in insider.duties.contributors if key in keys]
            candidates = sorted((c for c in insider.view.candidates if c.key in keys), key=lambda c: (-c.served, c.key))
            trying = [candidate.key for candidate in candidates]
            order = working + trying if self.members_first else trying + working
            insider.plot.notes[place] = frozenset(order[: self.budget])
        chosen: frozenset[bytes] = insider.plot.notes[place]
        return chosen


class Census:
    """Counts the Sybils in every certified roster, as honest peers see it.

    A Sybil that has asked to join sleeps until it is on probation: members remember who asked, and following a run
    without a part in it changes nothing. It only costs time here.
    """

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.counts: dict[int, int] = {}
        self.view: View | None = None
        swarm.observers.append(self)

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if isinstance(event, StepFinished) and self.swarm.is_honest(key) and event.step not in self.counts:
            self.view = event.view
            self.counts[event.step] = sum(member in self.swarm.byzantine for member in event.view.roster)
            if event.step >= ASKED:
                self.swarm.world.at(time, partial(self.wake, event.view))

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        pass

    def wake(self, view: View) -> None:
        busy = {*view.roster, *(candidate.key for candidate in view.candidates)}
        for key in self.swarm.keys[FOUNDERS:]:
            up = self.swarm.is_up(key)
            if key in busy and not up:
                self.swarm.restart(key)
            elif key not in busy and up:
                self.swarm.crash(key)

    def is_over(self) -> bool:
        return len(self.counts) >= self.swarm.config.steps


@dataclass(frozen=True, slots=True)
class Job:
    gradients: int
    sharing: str
    steps: int
    probation: int
    admissions: int
    seed: int


@dataclass(frozen=True, slots=True)
class Result:
    most: int
    """Sybils in the roster at the same time."""
    mean: float
    """The same, over the second half of the run."""
    steps: int
    banned: int
    honest_lost: int


def make_attack(sharing: str, gradients: int) -> Attack:
    if sharing == "first":
        share: Attack = SharedCompute(budget=gradients)
    else:
        share = Rationed(budget=gradients, members_first=sharing == "members")
    return combine(share, ShieldingVotes(), IdleValidator())


def run_once(job: Job) -> Result:
    torch.set_num_threads(1)
    sybils = KEYS_PER_GRADIENT * job.gradients
    attack = make_attack(job.sharing, job.gradients)
    settings = {
        "byzantine": BYZANTINE,
        "size": SIZE,
        "steps": job.steps,
        "newcomer_probation": job.probation,
        "admissions": job.admissions,
    }
    setup = Setup(
        founders=FOUNDERS,
        joiners=sybils,
        settings=settings,
        compute_time=0.9,
        attackers={FOUNDERS + number: attack for number in range(sybils)},
    )
    swarm = Swarm(setup, job.seed, Links(low=0.01, high=0.3))
    census = Census(swarm)
    for number in range(sybils):
        swarm.start(FOUNDERS + number)
    swarm.run(200.0 * job.steps, census.is_over)
    late = [count for step, count in census.counts.items() if 2 * step >= job.steps]
    view = census.view
    assert view is not None
    return Result(
        most=max(census.counts.values(), default=0),
        mean=sum(late) / max(1, len(late)),
        steps=len(census.counts),
        banned=len(swarm.byzantine.intersection(view.banned)),
        honest_lost=sum(key not in view.roster for key in swarm.keys[:FOUNDERS]),
    )


def summarize(gradients: int, sharing: str, results: Sequence[Result]) -> dict[str, Any]:
    allowed = gradients + 1
    histogram = Counter(result.most for result in results)
    return {
        "k": gradients,
        "keys": KEYS_PER_GRADIENT * gradients,
        "sharing": sharing,
        "runs": len(results),
        "most": max(histogram),
        "allowed": allowed,
        "exceeded": sum(result.most > allowed for result in results),
        "histogram": {str(most): histogram[most] for most in sorted(histogram)},
        "mean_late": sum(result.mean for result in results) / len(results),
        "mean_banned": sum(result.banned for result in results) / len(results),
        "honest_lost": sum(result.honest_lost for result in results),
        "fewest_steps": min(result.steps for result in results),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--sharing", choices=(*SHARINGS, "all"), default="all")
    parser.add_argument("--gradients", type=int, nargs="+", default=[1, 2, 3], metavar="K")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--probation", type=int, default=0, help="steps; 0: as the configuration says")
    parser.add_argument("--admissions", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    lowest = {"runs": 1, "steps": 1, "probation": 0, "admissions": 1, "jobs": 1}
    for name, low in lowest.items():
        if getattr(options, name) < low:
            parser.exit(2, f"{parser.prog}: --{name}: expected at least {low}, got {getattr(options, name)}\n")
    if min(options.gradients) < 1:
        parser.exit(2, f"{parser.prog}: --gradients: expected at least 1 each, got {min(options.gradients)}\n")
    rows = []
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for sharing in SHARINGS if options.sharing == "all" else (options.sharing,):
            for gradients in options.gradients:
                jobs = [
                    Job(gradients, sharing, options.steps, options.probation, options.admissions, options.seed + run)
                    for run in range(options.runs)
                ]
                row = summarize(gradients, sharing, list(pool.map(run_once, jobs)))
                rows.append(row)
                found = ", ".join(f"{most} in {count}" for most, count in row["histogram"].items())
                print(
                    f"{sharing}, k={gradients}, {row['keys']} keys: most at once {found} of {row['runs']} runs "
                    f"(allowed {row['allowed']}); {row['mean_late']:.2f} on average in the second half, "
                    f"{row['mean_banned']:.1f} banned{'  <-- exceeded' if row['exceeded'] else ''}",
                    file=sys.stderr,
                    flush=True,
                )
    if options.json:
        print(
            json.dumps(
                {"steps": options.steps, "probation": options.probation, "admissions": options.admissions}
                | {"rows": rows}
            )
        )
    return 1 if any(row["exceeded"] or row["honest_lost"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
