"""Honest peers only, on links that are as bad as ``delta`` allows: nobody is ever banned or removed.

    python experiments/honest.py --peer-steps 100000 [--tolerant] [--jobs 2] [--json]

Swarms of 4 to 16 peers until so many steps times peers are done; every run has its own links (jitter up to all of
``delta``, loss, duplicates, messages that overtake one another), clocks that run apart, wire type and clipping radius.
``--tolerant``: every platform computes with relative errors of 1e-6 of its own, and gradients are compared with
tolerances of 1e-4 and 1e-2; without it, recomputation is exact. Prints totals, and the seeds of runs in which something
happened: ``--peer-steps 1 --seed N`` is that run alone. Exit 1 if anybody was banned, removed, diverged or did not come
to the end with the same state as all others; slow paths and jumps to a later view are allowed, and counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from random import Random
from typing import Any

import torch

from phalanx.core.config import AutomaticTau, Tolerance
from phalanx.core.crypto import Domain
from phalanx.core.events import Banned, Diverged, Halted, Jumped, Removed, SlowPath
from phalanx.network.simulated import Links, Skew
from phalanx.simulation.swarm import Setup, Swarm

SIZES = (4, 5, 7, 10, 16)
PEER_STEPS = 400
"""Of one run."""
ROUNDING = 1e-6
TOLERANCE = Tolerance(1e-4, 1e-2)


class Watch:
    """Counts what should not happen."""

    def __init__(self, swarm: Swarm) -> None:
        self.counts = dict.fromkeys((Banned, Removed, Diverged, Jumped, Halted, SlowPath), 0)
        swarm.observers.append(self)

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if type(event) in self.counts:
            self.counts[type(event)] += 1

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Result:
    peers: int
    peer_steps: int
    finished: bool
    """Whether all came to the end, with one state and the roster of the beginning."""
    events: dict[str, int]


def draw_setup(random: Random, n: int, tolerant: bool) -> tuple[Setup, Links]:
    draw = random.random
    b = int(draw() * ((n - 2) // 2 + 1))
    m = 1 + int(draw() * max(0, min(2, n - 2 * b - 2)))
    delta = random.choice((0.5, 1.0, 2.0))
    tau: float | AutomaticTau = random.choice((0.5, 1.0, 4.0))
    if draw() < 0.4:
        tau = AutomaticTau(min(2.0, 0.9 * (n - m - b) / max(b, 1)), 2.0, 0.01, 100.0)
    gradient_time = random.choice((0.0, 1.0, 3.0))
    settings = {
        "byzantine": b,
        "validators": m,
        "size": random.choice((64, 100, 256)),
        "steps": -(-PEER_STEPS // n),
        "wire": random.choice(("float32", "bfloat16", "float16")),
        "tau": tau,
        "projections": random.choice((1, 2)),
        "delta": delta,
        "gradient_time": gradient_time,
        "transfer_time": random.choice((0.0, 1.0)),
        "tolerance": TOLERANCE if tolerant else None,
    }
    limit = 0.9 * delta  # what is left is for clocks that run apart
    links = Links(delta=limit, high=limit * draw(), loss=0.3 * draw(), duplicate=0.3 * draw(), fifo=draw() < 0.2)
    skews = {index: Skew(1000 * draw(), 1 + 1e-3 * (2 * draw() - 1)) for index in range(n)}
    return Setup(
        founders=n,
        settings=settings,
        skews=skews,
        compute_time=0.8 * gradient_time * draw(),
        rounding=ROUNDING if tolerant else 0.0,
    ), links


def run_once(job: tuple[int, int, bool]) -> Result:
    n, seed, tolerant = job
    torch.set_num_threads(1)
    setup, links = draw_setup(Random(seed), n, tolerant)
    swarm = Swarm(setup, seed, links)
    watch = Watch(swarm)
    config = swarm.config
    step = 60 * config.delta + 12 * (config.gradient_time + config.transfer_time)
    swarm.run(config.steps * step, lambda: len(swarm.finished) == n)
    views = [peer.view for key in swarm.keys if (peer := swarm.get_peer(key)) is not None]
    same = len(views) == n and all(view.state == views[0].state and view.roster == swarm.keys for view in views)
    return Result(
        peers=n,
        peer_steps=sum(view.step for view in views),
        finished=same and len(swarm.finished) == n,
        events={kind.__name__: count for kind, count in watch.counts.items()},
    )


def run(peer_steps: int, tolerant: bool, jobs: int, seed: int = 0) -> dict[str, Any]:
    count = -(-peer_steps // PEER_STEPS)
    tasks = [(SIZES[number % len(SIZES)], number, tolerant) for number in range(seed, seed + count)]
    if jobs == 1:
        results = list(map(run_once, tasks))
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            results = list(pool.map(run_once, tasks, chunksize=4))
    found = {name: sum(result.events[name] for result in results) for name in results[0].events}
    seeds = {
        name: [task[1] for task, result in zip(tasks, results, strict=True) if result.events[name]]
        for name, count in found.items()
        if count
    }
    unfinished = [task[1] for task, result in zip(tasks, results, strict=True) if not result.finished]
    done = sum(result.peer_steps for result in results)
    return {"tolerant": tolerant, "runs": count, "peer_steps": done, **found, "unfinished": unfinished, "seeds": seeds}


def is_fine(results: dict[str, Any]) -> bool:
    return not (results["Banned"] or results["Removed"] or results["Diverged"] or results["unfinished"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-steps", type=int, default=10_000)
    parser.add_argument("--tolerant", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name in ("peer_steps", "jobs"):
        if getattr(options, name) < 1:
            option = name.replace("_", "-")
            parser.exit(2, f"{parser.prog}: --{option}: expected at least 1, got {getattr(options, name)}\n")
    results = run(options.peer_steps, options.tolerant, options.jobs, options.seed)
    if options.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:>10} {value}")
    return 0 if is_fine(results) else 1


if __name__ == "__main__":
    sys.exit(main())
