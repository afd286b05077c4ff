"""``kill -9`` of an honest peer at each moment of a step: the others go on, it returns, and nobody is banned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest

from phalanx.node import run_init
from phalanx.swarm import Attackers, Swarm, SwarmResult
from phalanx.training.recorder import EVENTS

MORTAL, PACED = (Path(__file__).with_name(name) for name in ("mortal.py", "paced.py"))
PEERS, BYZANTINE, DELTA, GRADIENT_TIME = 8, 2, 1.0, 2.0
FIRST, PAUSE = 3, 40
"""The step of the first death, and steps between two."""
MOMENTS = (
    "before_commit",
    "commit_signed",
    "commit_sent",
    "scatter",
    "aggregate_signed",
    "gather",
    "reveal_signed",
    "reveal_sent",
    "report_signed",
    "applied",
    "confirm_signed",
    "confirm_sent",
)


def run_with_deaths(out: Path, moments: Sequence[str]) -> tuple[Swarm, SwarmResult, float]:
    """One swarm in which a peer dies at each of the moments, one after another, and comes back."""
    deaths = [(place % PEERS, FIRST + PAUSE * place, moment) for place, moment in enumerate(moments)]
    extra = {
        place: ["--attack", f"{MORTAL}:{moment}", "--start", str(step), "--checkpoint-every", "5"]
        for place, step, moment in deaths
    }
    joins = [(place, step + 4) for place, step, _ in deaths]  # by then each has died
    swarm = Swarm(out, PEERS, Attackers(), [], joins, lambda event: None, extra)
    manifest = run_init(
        out / "run.toml",
        f"{PACED}:make_task",
        swarm.founders,
        {"byzantine": BYZANTINE, "validators": 1, "threads": 1, "delta": DELTA, "probation": 5}
        | {"steps": FIRST + PAUSE * len(moments), "gradient_time": GRADIENT_TIME, "transfer_time": 1.0},
    )
    net = manifest.network
    finished = swarm.run(120.0, lambda: False)
    bound = 4 * DELTA + net.gradient_time + 4 * DELTA + net.transfer_time + (BYZANTINE + 1) * 2 * DELTA
    return swarm, swarm.sum_up(finished), bound


def check(swarm: Swarm, found: SwarmResult, bound: float, moments: Sequence[str]) -> None:
    assert found.finished
    assert found.result.honest_banned == 0
    assert found.digests_equal
    assert found.lost == []
    for place in range(len(moments)):
        process = swarm.processes[place]
        assert process.finished is not None, f"peer {place} ({moments[place]}) did not come to the end"
    removed: set[int] = set()
    for process in swarm.processes[len(moments) :]:  # who never died
        removals, steps = measure_waits(process.folder / "run" / EVENTS)
        removed |= {peer for peer, _ in removals}
        assert max(seconds for _, seconds in removals) <= bound + DELTA, "longer than a timeout and a slow path take"
        assert max(steps) <= bound + GRADIENT_TIME + DELTA, "and then the step is taken once more, without the dead"
    assert removed == set(range(len(moments)))


def measure_waits(log: Path) -> tuple[list[tuple[int, float]], list[float]]:
    """Who was removed, with the seconds from the last step's end before that began; and those of all later steps."""
    removals, steps, ends = [], [], []
    began = 0.0
    for line in log.read_text().splitlines():
        event = json.loads(line)
        moment = datetime.fromisoformat(event["time"]).timestamp()
        if event["type"] == "SlowPathOpened":
            began = ends[-1]
        elif event["type"] == "Removed":
            removals.append((event["peer"], moment - began))
        elif event["type"] == "StepFinished":
            steps += [moment - ends[-1]] if ends else []
            ends.append(moment)
    return removals, steps


def test_the_others_go_on_and_the_killed_come_back(tmp_path: Path) -> None:
    moments = ("scatter", "reveal_signed")
    check(*run_with_deaths(tmp_path / "swarm", moments), moments)


@pytest.mark.long
@pytest.mark.parametrize("half", [MOMENTS[:6], MOMENTS[6:]], ids=["early", "late"])
def test_kill_matrix(tmp_path: Path, half: tuple[str, ...]) -> None:
    check(*run_with_deaths(tmp_path / "swarm", half), half)
