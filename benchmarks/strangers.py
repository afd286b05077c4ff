"""What strangers cost: steps of a run while free keys hold its doors and draw its state, and whether others still join.

    python benchmarks/strangers.py [--json] [--turns 1] [--seconds 30] [--keys 8] [--hosts 1] [--kinds hold drain mixed]

Four peers of real processes on this machine train the digits. The strangers (``tests/network/hold.py``) do this:

    hold     all keys at the first peer, whose address newcomers know: silent, half and dripping questions, answers that
             nobody reads
    drain    keys at all peers: state at random offsets, chains, aggregates, messages, as fast as they are taken
    mixed    all of this at all peers, and keys that reconnect as others

Each turn has a time of calm, in which as many strangers do the same to a port where nobody listens, so that what they
take of this machine's processors slows both kinds of steps alike; a stranger that is refused works less, so that the
ratio is too high rather than too low. After ``--seconds`` of each kind, while the strangers go on, an honest newcomer
starts from nothing but an address, and leaves when it is a member. Steps are counted before it comes. ``--hosts 1``
has strangers and newcomer share one address. ``_cpu_ms`` is the processor time of all peers and daemons for a step:
what strangers cost where they have machines of their own.

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


def find_aims(kind: str, processes: list[Process], nobody: str) -> list[str]:
    if kind == "calm":
        return [f"/ip4/127.0.0.1/tcp/{DEAD_PORT}/p2p/{nobody}"]
    return [process.address for process in (processes[:1] if kind == "hold" else processes)]


def measure(folder: Path, turns: int, seconds: float, keys: int, hosts: int, kinds: list[str]) -> dict[str, Any]:
    times: dict[str, list[float]] = {kind: [] for kind in ("calm", *kinds)}
    joins: dict[str, list[float | None]] = {kind: [] for kind in times}
    cpu: dict[str, list[float]] = {kind: [] for kind in times}
    with running(folder) as swarm:
        founders = swarm.processes[:PEERS]
        run = next(event.run for event in founders[0].told if isinstance(event, events.RunStarted))
        for turn in range(turns):
            for kind in times:
                does = KINDS.get(kind, KINDS["mixed"])
                siege = Siege(find_aims(kind, founders, swarm.founders[-1]), run, does, keys, hosts)
                try:
                    time.sleep(5.0)  # until they are there
                    since = max(process.step for process in founders)
                    before = measure_cpu(founders)
                    time.sleep(seconds)
                    found = get_times(swarm, since)
                    cpu[kind].append((measure_cpu(founders) - before) / max(1, len(found)))
                    newcomer = Newcomer(folder, founders[0].address, turn * len(times) + list(times).index(kind))
                    joins[kind].append(newcomer.await_joined(swarm))
                    newcomer.end()
                finally:
                    siege.end()
                times[kind] += found
                took = "no" if joins[kind][-1] is None else f"{joins[kind][-1]:.0f} s"
                middle = 1000 * statistics.median(found)
                log(
                    f"turn {turn + 1}, {kind}: {len(found)} steps, median {middle:.0f} ms, "
                    f"{1000 * cpu[kind][-1]:.0f} ms of the peers' processors each; joined: {took}"
                )
        honest = {process.identity.key.hex() for process in founders}
        banned = sum(isinstance(event, events.Banned) for event in swarm.merged)
        removed = sum(isinstance(event, events.Removed) and event.key in honest for event in swarm.merged)
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    ratios = {kind: round(medians[kind] / medians["calm"], 3) for kind in kinds}
    return {
        "ratio": max(ratios.values()),
        "joins_missed": sum(took is None for taken in joins.values() for took in taken),
        "banned": banned,
        "removed": removed,
        **{f"ratio_{kind}": ratio for kind, ratio in ratios.items()},
        **{f"{kind}_ms": round(1000 * value, 1) for kind, value in medians.items()},
        **{f"{kind}_cpu_ms": round(1000 * statistics.mean(found), 1) for kind, found in cpu.items()},
        **{f"{kind}_steps": len(found) for kind, found in times.items()},
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
