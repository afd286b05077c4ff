"""How long a cheat lasts: one marked member sends wrong gradients while the other ``b - 1`` attackers shield it.

docs/PROTOCOL.md, section 9, predicts a conviction after ``1 / p`` steps on average, ``p = q m (n - b) / (n (n - 1))``.

    python experiments/conviction.py --runs 1000 --share 1 [--silent | --both] [--only 16,4,2] [--jobs 2] [--json]

prints, for (n, b, m) = (8, 3, 1), (16, 7, 1), (16, 4, 2), the mean of (step of the convicted gradient - first step of
the attack + 1), its standard error, and the prediction. With ``--silent`` the attacker falls silent whenever a gradient
that it cheated with is about to be checked. Everything it committed to of late is checked then; what counts is the
gradient that was drawn, not one that it sent in the attempt that its silence ended, and that was never applied. With
``--both`` each run is made once up to the first draw and goes on from there both ways, in two processes: the same
figures as without and with ``--silent``, in little more than half of the time. Exit 1 if a mean is more than three
standard errors off.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from phalanx.attacks import Attack, Insider, Plot, combine
from phalanx.attacks.base import Mail
from phalanx.attacks.justice import IdleValidator, ShieldingVotes
from phalanx.core.config import Config
from phalanx.core.events import Banned
from phalanx.core.life import run_peer
from phalanx.core.messages import Message
from phalanx.network.ideal import IdentityExaminer, make_signers
from phalanx.network.simulated import Links, World
from phalanx.simulation.machine import Bowl, compute_state_digest, make_start

SETTINGS = ((8, 3, 1), (16, 7, 1), (16, 4, 2))
SIZE = 32
START = 2


@dataclass(kw_only=True, eq=False)
class Cheat(Attack):
    """A wrong gradient in a share of the steps; silent before the check of one, if ``hides``."""

    hides: bool = False
    splits: bool = False
    """At the first draw, go on both ways: the child process hides."""
    child: int | None = None

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        insider.notes.setdefault("cheated", set()).add(step)
        return -3 * gradient

    def is_active(self, insider: Insider) -> bool:
        if self.splits and self._is_drawn(insider):
            self.splits = False
            self.child = os.fork()
            self.hides = self.child == 0
        return super().is_active(insider) or (self.hides and self._is_drawn(insider))

    def _is_drawn(self, insider: Insider) -> bool:
        cheated = insider.notes.get("cheated", ())
        drawn = [
            check.step
            for check in insider.duties.checks
            if check.target == insider.key and check.checker not in insider.plot.keys and check.step in cheated
        ]
        insider.plot.notes.setdefault("drawn", []).extend(drawn)
        return bool(drawn)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if self.hides and (insider.notes.get("hidden") or self._is_drawn(insider)):
            insider.notes["hidden"] = True
            return ()
        return ((to, message),)


def run_once(job: tuple[int, int, int, float, bool, int]) -> int | None:
    """Steps until the marked member was convicted; None if it never was."""
    n, b, m, share, silent, seed = job
    return _run(n, b, m, seed, Cheat(start=START, probability=share, hides=silent))


def run_both(job: tuple[int, int, int, float, bool, int]) -> tuple[int | None, int | None]:
    """The same without and with silence."""
    n, b, m, share, _, seed = job
    cheat = Cheat(start=START, probability=share, splits=True)
    ours, theirs = os.pipe()
    try:
        found = _run(n, b, m, seed, cheat)
        if cheat.child == 0:
            os.write(theirs, json.dumps(found).encode())
    finally:  # the child has nothing to go back to, whatever happened
        if cheat.child == 0:
            os._exit(0)
    os.close(theirs)
    with open(ours) as told:
        said = told.read()
    if cheat.child is None:  # convicted before anybody was drawn to check it
        return found, found
    os.waitpid(cheat.child, 0)
    return found, json.loads(said)


def _run(n: int, b: int, m: int, seed: int, cheat: Cheat) -> int | None:
    torch.set_num_threads(1)
    signers, verify = make_signers(n, seed, ideal=True)
    config = Config(
        founders=tuple(signer.key for signer in signers),
        byzantine=b,
        validators=m,
        size=SIZE,
        steps=100_000,
        seed=seed.to_bytes(32, "little"),
        state=compute_state_digest(make_start(SIZE)),
    ).check()
    random = Random(seed)
    plot = Plot(random=random)
    attackers = random.sample(range(n), b)
    marked = signers[attackers[0]].key
    convicted: list[int] = []

    def listen(key: bytes, event: object) -> None:
        if isinstance(event, Banned) and event.key == marked:
            convicted.append(event.step)

    world = World(
        config.run, seed, Links(low=0.01, high=0.3), count=False, trace=False, on_note=listen, keep_notes=False
    )
    examiner = IdentityExaminer(verify)
    for place, signer in enumerate(signers):

        def start(disk, signer=signer, place=place):  # type: ignore[no-untyped-def]
            story = run_peer(config, signer.key, examiner, disk.view)
            if place not in attackers:
                return story
            if place == attackers[0]:
                attack: Attack = cheat
            else:
                attack = combine(ShieldingVotes(), IdleValidator())
            return attack.wrap(story, Insider(signer, config, plot))

        world.add(signer.key, signer, Bowl(SIZE), start)
    world.run(stop=lambda: bool(convicted), until=2e5)
    if not convicted:
        return None
    return (plot.notes["drawn"][0] if cheat.hides else convicted[0]) - START + 1


def predict(n: int, b: int, m: int, share: float) -> float:
    return n * (n - 1) / (share * m * (n - b))


def summarize(found: Sequence[int | None], expected: float) -> dict[str, Any]:
    steps = [x for x in found if x is not None]
    if len(steps) < 2:  # one that is silent when it is drawn halts a run that is at its floor
        nothing = dict.fromkeys(("mean", "error", "off"))
        return {**nothing, "expected": expected, "escaped": len(found) - len(steps), "fine": False}
    error = stdev(steps) / math.sqrt(len(steps))
    off = (mean(steps) - expected) / error
    escaped = len(found) - len(steps)
    numbers = {"mean": mean(steps), "error": error, "expected": expected, "off": off, "escaped": escaped}
    return numbers | {"fine": abs(off) <= 3 and not escaped}


def describe(row: dict[str, Any]) -> str:
    if row["mean"] is None:
        return f"n={row['n']} b={row['b']} m={row['m']}: the run waits at its floor for the one that is silent"
    return (
        f"n={row['n']} b={row['b']} m={row['m']}{', silent when drawn' if row['silent'] else ''}: "
        f"{row['mean']:.2f} +- {row['error']:.2f} steps, expected {row['expected']:.2f} "
        f"({row['off']:+.1f} standard errors){'' if row['fine'] else '  <-- off'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--share", type=float, default=1.0)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--silent", action="store_true")
    ways.add_argument("--both", action="store_true")
    parser.add_argument("--only", help="one setting, such as 16,4,2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name, low in {"runs": 2, "jobs": 1}.items():  # a mean of one run has no error
        if getattr(options, name) < low:
            parser.exit(2, f"{parser.prog}: --{name}: expected at least {low}, got {getattr(options, name)}\n")
    if not 0 < options.share <= 1:
        parser.exit(2, f"{parser.prog}: --share: expected a number above 0, up to 1, got {options.share}\n")
    rows, fine = [], True
    settings = [tuple(map(int, options.only.split(",")))] if options.only else SETTINGS
    with ProcessPoolExecutor(options.jobs) as pool:
        for n, b, m in settings:
            jobs = [(n, b, m, options.share, options.silent, options.seed + i) for i in range(options.runs)]
            run = run_both if options.both else run_once
            found = list(pool.map(run, jobs, chunksize=4))
            for silent in (False, True) if options.both else (options.silent,):
                steps = [pair[silent] for pair in found] if options.both else found
                row = {"n": n, "b": b, "m": m, "silent": silent} | summarize(steps, predict(n, b, m, options.share))
                rows.append(row)
                fine &= row["fine"]
                print(describe(row), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"share": options.share, "silent": options.silent, "runs": options.runs, "rows": rows}))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
