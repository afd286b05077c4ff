"""Strangers throw garbage at a peer while it trains: the run goes on, nobody is out, and memory does not grow.

What it costs in time is measured by ``benchmarks/garbage.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crowd import LONG, Crowd, gather

from phalanx import events
from phalanx.swarm import Attackers, Process, Swarm

GARBAGE = Path(__file__).with_name("garbage.py")
SETTINGS = {"byzantine": 1, "validators": 1, "threads": 1, "delta": 5.0, "steps": 100_000}
SETTINGS |= {"gradient_time": 10.0, "transfer_time": 5.0}
SECONDS = 20
MOST_GROWTH = 50e6
"""Bytes, beyond what the run itself takes."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    swarm = Swarm(tmp_path_factory.mktemp("garbage") / "swarm", 4, Attackers(), [], [], lambda event: None)
    with gather(swarm, "digits", SETTINGS) as crowd:
        crowd.await_steps(20)  # what grows with the first steps has grown
        yield crowd


def measure_memory(peer: Process) -> int:
    """Resident bytes of a peer and its daemon."""
    assert peer.popen is not None
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            except OSError:  # it has just ended
                continue
            if peer.popen.pid in (int(entry.name), int(status["PPid"])):
                found[entry.name] = int(status.get("VmRSS", "0").split()[0]) * 1024
    assert len(found) > 1, "the daemon is no child of its peer"
    return sum(found.values())


@pytest.mark.long
@pytest.mark.parametrize("way", ["port", "streams", "both"])
def test_garbage_is_the_senders_own_affair(crowd: Crowd, way: str) -> None:
    bystander, victim = crowd.swarm.processes[:2]
    before, step = [measure_memory(process) for process in (bystander, victim)], crowd.step
    started = next(event for event in victim.told if isinstance(event, events.RunStarted))
    port = victim.address.split("/")[4]
    aims = {"port": ["--port", port], "streams": ["--address", victim.address, "--run", started.run]}
    generators = [
        subprocess.Popen([sys.executable, GARBAGE, "--seconds", str(SECONDS), *aim], stdout=subprocess.PIPE)
        for name, aim in aims.items()
        if way in (name, "both")
    ]
    for generator in generators:
        output, _ = generator.communicate(timeout=LONG)
        counts = json.loads(output)
        assert all(count["opened"] for count in counts.values()), counts
    assert crowd.step > step, "the run stood still"
    crowd.await_steps(5)
    usual, grown = (measure_memory(p) - old for p, old in zip((bystander, victim), before, strict=True))
    assert grown - max(0, usual) < MOST_GROWTH, f"{grown / 1e6:.0f} MB; a peer without garbage {usual / 1e6:.0f} MB"
    assert all(process.is_up for process in crowd.swarm.processes)
    assert crowd.tell(events.Banned) == []
    assert crowd.tell(events.Removed) == []
