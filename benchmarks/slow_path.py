"""What one slow path moves: a member falls silent, and the others agree to go on without it.

    python benchmarks/slow_path.py [--members 16 32 64 128] [--attack silent] [--json]

A quarter of the members may be Byzantine; one of them is. In step 2 it says nothing more, and the slow path at its
COMMIT suspends it. Counted are the bytes of what is said only in slow paths (timeouts, alarms, gossip, votes,
settlements, certificates, chains and requests for them), for each member. Virtual time, so the figures are
the same on every machine.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if the target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from phalanx.attacks import load_attack
from phalanx.core.events import SlowPath, StepFinished
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm

MEMBERS = (16, 32, 64, 128)
START, STEPS = 2, 5
MOST = 2e6
"""Bytes that one member may send."""
USUAL = {"COMMIT", "AGGREGATE", "AGGREGATE_AGAIN", "REVEAL", "REPORT", "REPORT_AGAIN", "CONFIRM", "VOTE", "SEAL"}
BULK = {"partchunk", "aggregatechunk", "statechunk"}


class Watch:
    """How many steps are final, and at which heights slow paths were open."""

    def __init__(self) -> None:
        self.steps = 0
        self.heights: set[int] = set()

    def on_sign(self, *_: Any) -> None:
        pass

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if isinstance(event, StepFinished):
            self.steps = max(self.steps, event.step + 1)
        elif isinstance(event, SlowPath):
            self.heights.add(event.height)


def measure(members: int, attack: str) -> dict[str, float]:
    settings = {
        "byzantine": (members - 1) // 4,
        "steps": 1000,
        "size": 4 * members,
        "validators": max(1, members // 16),
    }
    attackers = {members - 1: load_attack(f"{attack}@{START}")}
    setup = Setup(founders=members, settings=settings, compute_time=0.1, attackers=attackers)
    swarm, watch = Swarm(setup, 1, Links(delta=0.9, low=0.02, high=0.1), count=True), Watch()
    swarm.observers.append(watch)
    swarm.run(1e9, lambda: watch.steps >= STEPS)
    kinds = {kind: count for kind, count in swarm.world.traffic.items() if kind not in USUAL and kind not in BULK}
    total = sum(count.payload + count.rest for count in kinds.values())
    return {
        "bytes": total / members,
        "slow_paths": len(watch.heights),
        "messages": sum(c.messages for c in kinds.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=MEMBERS)
    parser.add_argument("--attack", default="silent", help="what the one attacker does, by name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    say = sys.stderr if options.json else sys.stdout
    for members in options.members:
        row = measure(members, options.attack)
        found |= {f"{name}_{members}": value for name, value in row.items()}
        print(
            f"{members:4} members: {row['bytes'] / 1e6:7.3f} MB a member in {row['slow_paths']} slow path(s); "
            f"at most {MOST / 1e6:.0f}",
            file=say,
            flush=True,
        )
    missed = [name for name, value in found.items() if name.startswith("bytes") and value > MOST]
    if options.json:
        print(json.dumps({**found, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
