"""Speed of the whole protocol in the simulator: every peer of a swarm in one process, on one core, measured in one run.

    python benchmarks/protocol.py [--json]

Honest peers, gradients of 256 numbers, ideal signatures, no checkers, nothing traced or counted. What is timed is a
step of the whole swarm: all messages of all phases, all clipping, reports and checks. Swarms of 7, 16 and 32 take
turns, so that all see the same state of the machine; the first steps of each are not timed. The figures are medians: of
the time of a step, and of the ratio in each turn. Other work on the machine slows them all; ``cpu_ms_...`` is the time
that the processor spent on a step, which says what an idle machine would do, or nearly so.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from phalanx.core.config import Config
from phalanx.core.events import StepFinished
from phalanx.core.life import run_peer
from phalanx.network.ideal import IdentityExaminer, make_signers
from phalanx.network.simulated import Links, World
from phalanx.simulation.machine import Bowl, compute_state_digest, make_start

SIZE = 256
BYZANTINE = {7: 2, 16: 7, 32: 15}
STEPS = {7: 60, 16: 24, 32: 8}  # timed in one turn
WARM_UP = 3
TURNS = 7
TARGETS = {"steps_per_second_7": (">=", 100.0), "steps_per_second_16": (">=", 20.0), "ratio_32_16": ("<=", 4.5)}


class Timed:
    """A swarm that goes on as far as it is told."""

    def __init__(self, count: int) -> None:
        signers, verify = make_signers(count, 1, ideal=True)
        config = Config(
            founders=tuple(signer.key for signer in signers),
            byzantine=BYZANTINE[count],
            size=SIZE,
            steps=1_000_000,
            state=compute_state_digest(make_start(SIZE)),
        ).check()
        self.finished = 0
        self._first = signers[0].key
        links = Links(low=0.05, high=0.5)
        self.world = World(config.run, 1, links, count=False, trace=False, on_note=self._hear, keep_notes=False)
        examiner = IdentityExaminer(verify)
        for signer in signers:

            def start(disk, key=signer.key):  # type: ignore[no-untyped-def]
                return run_peer(config, key, examiner, disk.view)

            self.world.add(signer.key, signer, Bowl(SIZE, 0.5), start)

    def _hear(self, key: bytes, event: Any) -> None:
        if key == self._first and isinstance(event, StepFinished):
            self.finished = event.step + 1

    def time_step(self, steps: int) -> tuple[float, float]:
        """Seconds for each of the next steps: by the clock, and of the processor."""
        end = self.finished + steps
        start, spent = time.perf_counter(), time.process_time()
        self.world.run(stop=lambda: self.finished >= end)
        return (time.perf_counter() - start) / steps, (time.process_time() - spent) / steps


def run(turns: int = TURNS) -> dict[str, Any]:
    swarms = {count: Timed(count) for count in BYZANTINE}
    for swarm in swarms.values():
        swarm.time_step(WARM_UP)
    rounds = [{count: swarm.time_step(STEPS[count]) for count, swarm in swarms.items()} for _ in range(turns)]
    spent = {count: statistics.median(times[count][0] for times in rounds) for count in swarms}
    cpu = {count: statistics.median(times[count][1] for times in rounds) for count in swarms}
    return {
        "steps_per_second_7": 1 / spent[7],
        "steps_per_second_16": 1 / spent[16],
        "ratio_32_16": statistics.median(times[32][0] / times[16][0] for times in rounds),
        **{f"ms_{count}": 1e3 * seconds for count, seconds in spent.items()},
        **{f"cpu_ms_{count}": 1e3 * seconds for count, seconds in cpu.items()},
        "turns": turns,
        "torch": torch.__version__,
    }


def is_met(value: float, side: str, limit: float) -> bool:
    return value <= limit if side == "<=" else value >= limit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = run(options.turns)
    met = {key: is_met(results[key], *target) for key, target in TARGETS.items()}
    if options.json:
        limits = {key: {"side": side, "limit": limit, "met": met[key]} for key, (side, limit) in TARGETS.items()}
        print(json.dumps(results | {"targets": limits}))
    else:
        for key, (side, limit) in TARGETS.items():
            print(f"{key:>20} {results[key]:8.2f}   target {side} {limit:g}   {'met' if met[key] else 'MISSED'}")
        for count in BYZANTINE:
            spent, cpu = results[f"ms_{count}"], results[f"cpu_ms_{count}"]
            print(f"{f'{count} peers':>20} {spent:8.2f} ms a step, {cpu:.2f} ms of the processor")
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
