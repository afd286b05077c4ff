"""The memory and time of a run with a large model: real processes over libp2p on this machine.

    python benchmarks/large.py [--parameters 150000000] [--peers 4] [--steps 4] [--out FOLDER] [--json]

A swarm trains a few wide linear layers (SGD with momentum) through ``phalanx.swarm``: every peer is a ``phalanx start``
with a daemon of its own, and a folder that takes some twenty times the bytes of the model. Meanwhile the resident
memory of this process and all that descend from it is read from ``/proc``: RSS, and PSS, which counts what several of
them share only once. The time limits are wide, so that two cores are enough.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every step passed with equal
states and nobody was removed, within ``--limit`` GB of RSS; else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx import events
from phalanx.swarm import Attackers, run_swarm

LAYERS = 6
TIMES = {"delta": 30.0, "gradient_time": 180.0, "transfer_time": 300.0}
"""Seconds that nobody waits for unless something goes wrong."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PAUSE = 0.2
_PSS_EVERY = 5
"""Samples of RSS for one of PSS, which takes the system longer."""

TASK = """
import torch
from torch import nn
from phalanx.training.task import Data, Task

WIDTH, LAYERS = {width}, {layers}


def make_model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def compute_loss(model, batch):
    return model(batch[0]).square().mean()


inputs = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH)
task = Task(
    name="large",
    model=make_model,
    train=Data((inputs,)),
    test=Data((inputs,)),
    loss=compute_loss,
    metric=lambda model, data: float(compute_loss(model, data.tensors)),
    metric_name="loss",
    higher_is_better=False,
    batch=2,
    recipe={{"optimizer": "sgd", "rate": 0.01, "momentum": 0.9, "steps": 4}},
)
"""


def find_family() -> list[int]:
    """This process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sorted(family)


def read_rss(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return 0


def read_pss(pid: int) -> int:
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


@dataclass
class Watch:
    """Samples the memory of the family, in a thread of its own."""

    log: Path
    rss: int = 0
    pss: int = 0
    began: float = field(default_factory=time.monotonic)

    def __enter__(self) -> Watch:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        count = 0
        with open(self.log, "w", encoding="utf-8") as log:
            while not self._over.wait(_PAUSE):
                found = {pid: read_rss(pid) for pid in find_family()}
                self.rss = max(self.rss, sum(found.values()))
                pss = sum(map(read_pss, found)) if count % _PSS_EVERY == 0 else 0
                self.pss, count = max(self.pss, pss), count + 1
                each = " ".join(f"{pid}:{size / 1e9:.2f}" for pid, size in found.items())
                now, rss = time.monotonic() - self.began, sum(found.values())
                log.write(f"{now:.1f} {rss / 1e9:.3f} {pss / 1e9:.3f} {each}\n")
                log.flush()


def measure(parameters: int, peers: int, steps: int, out: Path, shelf: bool | None = None) -> dict[str, Any]:
    """Run a swarm in a new folder, and tell what it took. Peers write a checkpoint at the end."""
    words = ["--checkpoint-every", str(steps)]
    words += [] if shelf is None else ["--shelf" if shelf else "--no-shelf"]
    width = round(math.sqrt(parameters / LAYERS))
    out.mkdir(parents=True)
    task = out / "large.py"
    task.write_text(TASK.format(width=width, layers=LAYERS), encoding="utf-8")
    told: list[Any] = []

    def hear(event: Any) -> None:
        told.append(event)
        if isinstance(event, events.StepFinished):
            print(f"step {event.step}: {event.seconds:.1f} s, up to {watch.rss / 1e9:.2f} GB", file=sys.stderr)

    with Watch(out / "memory.txt") as watch:
        found = run_swarm(
            task=f"{task}:task",
            peers=peers,
            byzantine=0,
            attackers=Attackers(),
            seed=0,
            out=out / "swarm",
            settings={"steps": steps, **TIMES},
            kills=(),
            joins=(),
            on_event=hear,
            should_stop=lambda: False,
            extra=dict.fromkeys(range(peers), words),
        )
    removed = [event for event in told if isinstance(event, events.Removed | events.Banned | events.Left)]
    return {
        "parameters": LAYERS * width * width,
        "peers": peers,
        "steps": found.result.steps,
        "peak_rss_gb": round(watch.rss / 1e9, 2),
        "peak_pss_gb": round(watch.pss / 1e9, 2),
        "vectors_per_peer": round(watch.rss / peers / (4 * LAYERS * width * width), 1),
        "seconds_per_step": found.seconds_per_step,
        "passed": found.finished and found.result.steps == steps and not found.lost and not removed,
        "digests_equal": found.digests_equal,
        "removed": len(removed),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=150_000_000)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=20.0, help="GB of RSS")
    parser.add_argument("--out", type=Path, help="a new folder to keep; otherwise one that is removed at the end")
    parser.add_argument("--shelf", action=argparse.BooleanOptionalAction, help="files for past steps: as phalanx start")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    folder = chosen.out or Path(tempfile.mkdtemp(prefix="phalanx-large-")) / "run"
    try:
        found = measure(chosen.parameters, chosen.peers, chosen.steps, folder, chosen.shelf)
    finally:
        if chosen.out is None:
            shutil.rmtree(folder.parent, ignore_errors=True)
    good = found["passed"] and found["digests_equal"] and found["peak_rss_gb"] <= chosen.limit
    print(
        f"{found['parameters']:,} parameters, {found['peers']} peers, {found['steps']} steps: "
        f"{found['peak_rss_gb']} GB of RSS at the peak ({found['peak_pss_gb']} GB of PSS), "
        f"{found['vectors_per_peer']} times the parameters in each peer; {found['seconds_per_step']:.1f} s a step; "
        f"{'all steps passed' if found['passed'] else 'NOT all steps passed'}, "
        f"states {'equal' if found['digests_equal'] else 'NOT equal'}"
    )
    if chosen.json:
        print(json.dumps(found | {"limit_gb": chosen.limit, "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
