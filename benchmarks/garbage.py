"""What garbage costs: steps of a run while strangers throw it at one of the peers, and while they throw it nowhere.

    python benchmarks/garbage.py [--json] [--turns 3] [--seconds 30]

Four peers of real processes on this machine train the digits. The generator (``tests/network/garbage.py``) is aimed at
the second of them: at its port, with all kinds of garbage at once, and at its streams, with a throwaway key. In turn
with that, the same generators are aimed at a port where nobody listens, so that what they take of this machine's
processors slows both kinds of steps alike. The ratio is that of the median steps; memory is the resident one of the
victim and its daemon: by how much more it has grown than that of the others, who get no garbage.

A generator that is refused at a dead port works less than one that is answered: on a machine with few cores the ratio
counts that as well, and is too high rather than too low.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

from phalanx import events
from phalanx.node import run_init
from phalanx.swarm import Attackers, Process, Swarm

GENERATOR = Path(__file__).parents[1] / "tests" / "network" / "garbage.py"
PEERS, VICTIM = 4, 1
DEAD_PORT = 1
WARM_UP = 30  # steps
SETTINGS = {"byzantine": 1, "validators": 1, "threads": 1, "delta": 10.0, "steps": 1_000_000}
SETTINGS |= {"gradient_time": 20.0, "transfer_time": 10.0}
TARGETS = {"ratio": 1.25, "extra_mb": 50.0, "banned": 0, "removed": 0}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_memory(peer: Process) -> tuple[int, int]:
    """Resident bytes of a peer's process and of its daemon."""
    assert peer.popen is not None
    own = daemon = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            except OSError:
                continue
            size = int(status.get("VmRSS", "0").split()[0]) * 1024
            own += size if int(entry.name) == peer.popen.pid else 0
            daemon += size if int(status["PPid"]) == peer.popen.pid else 0
    return own, daemon


def throw(victim: Process | None, run: str, peer_id: str, seconds: float) -> None:
    """Aim both generators at a peer, or at nobody, and wait until they are done."""
    address = victim.address if victim is not None else f"/ip4/127.0.0.1/tcp/{DEAD_PORT}/p2p/{peer_id}"
    aims: Sequence[Sequence[str]] = (["--port", address.split("/")[4]], ["--address", address, "--run", run])
    command = [sys.executable, str(GENERATOR), "--seconds", str(seconds)]
    generators = [subprocess.Popen([*command, *aim], stdout=subprocess.DEVNULL) for aim in aims]
    for generator in generators:
        if generator.wait() != 0:
            raise RuntimeError("the generator of garbage failed")


def get_times(swarm: Swarm, since: int) -> list[float]:
    """Seconds of the steps after ``since``, as the first to tell of them says."""
    steps = (event for event in swarm.merged if isinstance(event, events.StepFinished) and event.step > since)
    return [event.seconds for event in steps if event.seconds is not None]


def measure(out: Path, turns: int, seconds: float) -> dict[str, Any]:
    swarm = Swarm(out / "swarm", PEERS, Attackers(), [], [], lambda event: None)
    run_init(swarm.folder / "run.toml", "digits", swarm.founders, SETTINGS)
    stop = Event()
    thread = Thread(target=swarm.run, args=(600.0, stop.is_set))
    thread.start()
    victim = swarm.processes[VICTIM]
    times: dict[str, list[float]] = {"calm": [], "garbage": []}
    try:
        while victim.step < WARM_UP:
            if not thread.is_alive():
                raise RuntimeError(f"the swarm did not start: {victim.last_words}")
            time.sleep(0.1)
        run = next(event.run for event in victim.told if isinstance(event, events.RunStarted))
        before = [measure_memory(process) for process in swarm.processes]
        for turn in range(turns):
            for kind in times:
                since = max(process.step for process in swarm.processes)
                throw(victim if kind == "garbage" else None, run, swarm.founders[-1], seconds)
                found = get_times(swarm, since)
                times[kind] += found
                log(f"turn {turn + 1}, {kind}: {len(found)} steps, median {1000 * statistics.median(found):.0f} ms")
        after = [measure_memory(process) for process in swarm.processes]
    finally:
        stop.set()
        thread.join()
    growth = [[(new - old) / 1e6 for old, new in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    others = [sum(grown) for place, grown in enumerate(growth) if place != VICTIM]
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    return {
        "ratio": round(medians["garbage"] / medians["calm"], 3),
        "extra_mb": round(sum(growth[VICTIM]) - statistics.median(others), 1),
        "growth_of_process_mb": round(growth[VICTIM][0], 1),
        "growth_of_daemon_mb": round(growth[VICTIM][1], 1),
        "growth_of_others_mb": round(statistics.median(others), 1),
        "banned": sum(isinstance(event, events.Banned) for event in swarm.merged),
        "removed": sum(isinstance(event, events.Removed) for event in swarm.merged),
        **{f"{kind}_ms": round(1000 * value, 1) for kind, value in medians.items()},
        **{f"{kind}_steps": len(found) for kind, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What garbage costs a run.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="of garbage, and of calm, in each turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-garbage-") as out:
        found = measure(Path(out), options.turns, options.seconds)
    met = {name: found[name] <= most for name, most in TARGETS.items()}
    for name, most in TARGETS.items():
        log(f"{name}: {found[name]} (at most {most}): {'met' if met[name] else 'NOT met'}")
    if options.json:
        print(json.dumps(found | {"met": met}))
    sys.exit(0 if all(met.values()) else 1)


if __name__ == "__main__":
    main()
