"""Peers whose gradients differ in the last bits, in a run with a tolerance: cheats are told from platforms."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.node import run_init
from phalanx.swarm import Attackers, Swarm
from phalanx.training.gradients import Gradients
from phalanx.training.tasks import load_task

PEERS, BYZANTINE = 6, 2


def test_threads_make_a_difference() -> None:
    """Or the test below would show nothing."""
    gradients, before = Gradients(load_task("digits")), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(gradients.compute(gradients.start, bytes(32)))
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(*found)


def test_one_and_two_threads_with_a_tolerance(tmp_path: Path) -> None:
    """Every other peer computes with two threads; no honest one is banned for it, all attackers are."""
    attackers = Attackers(attack="sign_flip", start=2, places=(1, 4))
    extra = {place: ["--threads", str(1 + place % 2)] for place in range(PEERS)}
    swarm = Swarm(tmp_path / "swarm", PEERS, attackers, [], [], lambda event: None, extra)
    settings = {"byzantine": BYZANTINE, "threads": 1, "delta": 2.0, "steps": 40, "tolerance": (1e-4, 1e-2)}
    settings["gradient_time"] = 20.0
    run_init(swarm.folder / "run.toml", "digits", swarm.founders, settings)
    found = swarm.sum_up(swarm.run(120.0, lambda: False))
    assert found.finished
    assert found.digests_equal
    assert found.lost == []
    assert (found.result.honest_banned, found.result.byzantine_banned) == (0, BYZANTINE)
