"""``kill -9`` of an honest peer at each moment of a step: the others go on, it returns, and nobody is banned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx import events
from phalanx.node import run_init
from phalanx.swarm import Attackers, Swarm, SwarmResult

MORTAL, PACED = (Path(__file__).with_name(name) for name in ("mortal.py", "paced.py"))
PEERS, BYZANTINE, OUTAGES, DELTA = 8, 2, 1, 1.0
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
    joins = [(place, step + 1) for place, step, _ in deaths]
    swarm = Swarm(out, PEERS, Attackers(), [], joins, lambda event: None, extra)
    manifest = run_init(
        out / "run.toml",
        f"{PACED}:make_task",
        swarm.founders,
        {"byzantine": BYZANTINE, "outages": OUTAGES, "validators": 1, "threads": 1, "delta": DELTA, "probation": 5}
        | {"steps": FIRST + PAUSE * len(moments), "gradient_time": 2.0, "transfer_time": 1.0},
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
    waits = [event.seconds for event in swarm.merged if isinstance(event, events.StepFinished) and event.seconds]
    assert max(waits) <= bound + DELTA, "the others waited longer than a timeout and a slow path take"


def test_the_others_go_on_and_the_killed_come_back(tmp_path: Path) -> None:
    moments = ("scatter", "reveal_signed")
    check(*run_with_deaths(tmp_path / "swarm", moments), moments)


@pytest.mark.long
@pytest.mark.parametrize("half", [MOMENTS[:6], MOMENTS[6:]], ids=["early", "late"])
def test_kill_matrix(tmp_path: Path, half: tuple[str, ...]) -> None:
    check(*run_with_deaths(tmp_path / "swarm", half), half)
