"""What strangers cost: steps of a run while free keys hold its doors and draw its state, and whether others still join.

    python benchmarks/strangers.py [--json] [--turns 1] [--seconds 30] [--keys 8] [--hosts 1] [--kinds hold drain mixed]

Four peers of real processes on this machine train the digits. The strangers (``tests/network/hold.py``) do this:

    hold     all keys at the first peer, whose address newcomers know: silent, half and dripping questions, answers that
             nobody reads
    drain    keys at all peers: state at random offsets, chains, aggregates, messages, as fast as they are taken
    mixed    all of this at all peers, and keys that reconnect as others

Before each kind there is calm: as many strangers do the same to a port where nobody listens, so that what they take of
this machine's processors slows both kinds of steps alike; a stranger that is refused works less, so that the ratio is
too high rather than too low. After ``--seconds`` of a kind, while the strangers go on, an honest newcomer starts from
nothing but an address, and leaves when it is a member. Steps are counted before it comes. ``--hosts 1`` has strangers
and newcomer share one address. ``_load`` is the processor time that all peers and daemons took in a second.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from phalanx import events
from phalanx.core.crypto import Identity
from phalanx.node import run_init
from phalanx.swarm import Attackers, Process, Swarm

STRANGERS = Path(__file__).parents[1] / "tests" / "network" / "hold.py"
PEERS = 4
DEAD_PORT = 1
WARM_UP = 30  # steps
PATIENCE = 240.0  # seconds for joining
SETTINGS = {"byzantine": 1, "validators": 1, "threads": 1, "delta": 5.0, "steps": 1_000_000}
SETTINGS |= {"gradient_time": 20.0, "transfer_time": 10.0, "probation": 5, "newcomer_probation": 5}
KINDS = {
    "hold": ["silent", "half", "drip", "deaf"],
    "drain": ["state", "chain"],
    "mixed": ["silent", "half", "drip", "deaf", "talk", "state", "chain", "reconnect"],
}
TARGETS = {"ratio": 1.25, "banned": 0, "removed": 0, "joins_missed": 0}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Siege:
    """Strangers that do something to peers, or to nobody, until they are told to stop."""

    def __init__(self, addresses: list[str], run: str, kinds: list[str], keys: int, hosts: int) -> None:
        words = [sys.executable, str(STRANGERS), "--address", *addresses, "--run", run, "--seconds", "600"]
        words += ["--keys", str(keys), "--hosts", str(hosts), "--kinds", *kinds]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


class Newcomer:
    """An honest peer that has an address and a key, and nothing else."""

    def __init__(self, folder: Path, address: str, number: int) -> None:
        key = folder / f"newcomer-{number}.key"
        Identity.generate().save(key)
        self.key = Identity.load(key).key.hex()
        self.output = folder / f"newcomer-{number}.log"
        words = [sys.executable, "-m", "phalanx", "join", address, "--key", str(key)]
        words += ["--out", str(folder / f"newcomer-{number}"), "--listen", "/ip4/127.0.0.1/tcp/0"]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ))
        self.begun = time.monotonic()

    def await_joined(self, swarm: Swarm) -> float | None:
        """Seconds until the others tell that it is a member; None if it is not."""
        while time.monotonic() - self.begun < PATIENCE and self.process.poll() is None:
            if any(isinstance(event, events.Joined) and event.key == self.key for event in swarm.merged):
                return time.monotonic() - self.begun
            time.sleep(0.1)
        log(f"the newcomer did not join: {self.output.read_text(errors='replace')[-500:]}")
        return None

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure_cpu(processes: list[Process]) -> float:
    """Seconds of processor time that these peers and their daemons have taken."""
    parents = {process.popen.pid for process in processes if process.popen is not None}
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(entry.name) in parents or int(fields[1]) in parents:
                    total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def get_times(swarm: Swarm, since: int) -> list[float]:
    """Seconds of the steps after ``since``, as the first to tell of them says."""
    steps = (event for event in swarm.merged if isinstance(event, events.StepFinished) and event.step > since)
    return [event.seconds for event in steps if event.seconds is not None]


@contextmanager
def running(folder: Path) -> Iterator[Swarm]:
    """Four peers, some steps after their beginning."""
    swarm = Swarm(folder / "swarm", PEERS, Attackers(), [], [], lambda event: None)
    run_init(swarm.folder / "run.toml", "digits", swarm.founders, SETTINGS)
    stop = Event()
    thread = Thread(target=swarm.run, args=(600.0, stop.is_set))
    thread.start()
    try:
        while swarm.processes[0].step < WARM_UP:
            if not thread.is_alive():
                raise RuntimeError(f"the swarm did not start: {swarm.processes[0].last_words}")
            time.sleep(0.1)
        yield swarm
    finally:
        stop.set()
        thread.join()


def measure(folder: Path, turns: int, seconds: float, keys: int, hosts: int, kinds: list[str]) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for kind in kinds for name in (f"{kind}_calm", kind)}
    load: dict[str, list[float]] = {name: [] for name in times}
    joins: dict[str, list[float | None]] = {kind: [] for kind in kinds}
    with running(folder) as swarm:
        founders = swarm.processes[:PEERS]
        run = next(event.run for event in founders[0].told if isinstance(event, events.RunStarted))
        nobody = [f"/ip4/127.0.0.1/tcp/{DEAD_PORT}/p2p/{swarm.founders[-1]}"]
        for turn, name in ((turn, name) for turn in range(turns) for name in times):
            kind, is_calm = name.removesuffix("_calm"), name not in joins
            aims = [process.address for process in (founders[:1] if kind == "hold" else founders)]
            siege = Siege(nobody if is_calm else aims, run, KINDS[kind], keys, hosts)
            try:
                time.sleep(5.0)  # until they are there
                since, before, begun = (
                    max(process.step for process in founders),
                    measure_cpu(founders),
                    time.monotonic(),
                )
                time.sleep(seconds)
                times[name] += (found := get_times(swarm, since))
                load[name].append((measure_cpu(founders) - before) / (time.monotonic() - begun))
                words = f"turn {turn + 1}, {name}: {len(found)} steps, median {1000 * statistics.median(found):.0f} ms"
                if not is_calm:
                    newcomer = Newcomer(folder, founders[0].address, turn * len(times) + list(times).index(name))
                    joins[kind].append(took := newcomer.await_joined(swarm))
                    newcomer.end()
                    words += f"; joined: {'no' if took is None else f'{took:.0f} s'}"
                log(words)
            finally:
                siege.end()
        honest = {process.identity.key.hex() for process in founders}
        banned = sum(isinstance(event, events.Banned) for event in swarm.merged)
        removed = sum(isinstance(event, events.Removed) and event.key in honest for event in swarm.merged)
    medians = {name: statistics.median(found) for name, found in times.items()}
    ratios = {kind: round(medians[kind] / medians[f"{kind}_calm"], 3) for kind in kinds}
    return {
        "ratio": max(ratios.values()),
        "joins_missed": sum(took is None for taken in joins.values() for took in taken),
        "banned": banned,
        "removed": removed,
        **{f"{kind}_ratio": ratio for kind, ratio in ratios.items()},
        **{f"{name}_ms": round(1000 * value, 1) for name, value in medians.items()},
        **{f"{name}_load": round(statistics.mean(found), 2) for name, found in load.items()},
        **{f"{name}_steps": len(found) for name, found in times.items()},
        **{f"{kind}_join_s": [took and round(took, 1) for took in taken] for kind, taken in joins.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What strangers cost a run.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0, help="of steps that are counted, of each kind")
    parser.add_argument("--keys", type=int, default=8, help="strangers")
    parser.add_argument("--hosts", type=int, default=1, help="addresses that they come from")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-strangers-") as folder:
        found = measure(Path(folder), options.turns, options.seconds, options.keys, options.hosts, list(options.kinds))
    met = {name: found[name] <= most for name, most in TARGETS.items()}
    for name, most in TARGETS.items():
        log(f"{name}: {found[name]} (at most {most}): {'met' if met[name] else 'NOT met'}")
    if options.json:
        print(json.dumps(found | {"met": met}))
    sys.exit(0 if all(met.values()) else 1)


if __name__ == "__main__":
    main()
