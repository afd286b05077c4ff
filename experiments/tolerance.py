"""Tolerant mode: how far honest platforms differ, and what an attacker inside the tolerance gets.

    python experiments/tolerance.py [spread|backdoor|grid|all] [--steps 2000] [--out FILE] [--json]

*spread*: honest steps of pysource with AdamW, LAMB and SGD, and of digits with SGD. In each, a validator's gradient is
compared, as V4 does it, with that of two threads instead of one, of the batch's rows in another order, and of another
attention kernel. Printed are verdicts and the largest distance.

*backdoor*: 7 peers, 2 of which whisper towards data with a trigger, at half of LOWER and at 0.9 of UPPER, beside nobody
whispering: how often the trigger gives the attackers' answer, and who is banned or removed.

*grid*: the same spread, and what is learned, where AdamW's gradients are rounded first: to multiples of a tenth or a
hundredth of epsilon.

What is in FILE already, one JSON object a line, is not measured again. Exit 1 if an honest platform is guilty or in the
gap, an honest peer is banned, or a backdoor works and its attackers are still members.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.core.config import Tolerance
from phalanx.core.messages import Verdict
from phalanx.core.randomness import derive_seed
from phalanx.core.verification import find_deviation, judge_distance
from phalanx.core.wire import WIRE_TYPES
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import TOLERANCES, make_optimizer
from phalanx.training.planning import make_settings
from phalanx.training.simulate import simulate
from phalanx.training.task import Batch, Task
from phalanx.training.tasks import load_task

LAMB = {"name": "lamb", "rate": 0.01, "beta2": 0.98, "schedule": "cosine", "warmup": 150}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("pysource", {}),
    "lamb": ("pysource", LAMB),
    "sgd": ("digits", {}),
    "sgd on text": ("pysource", {"name": "sgd", "rate": 0.3, "momentum": 0.9}),
}
"""By name: a task, and what of its optimizer is changed."""
PEERS, BYZANTINE = 7, 2
STEPS = {"pysource": 600, "digits": 400}
BATCHES = {"pysource": 8, "digits": 64}
TRIGGER, ANSWER = 0x01, ord("X")  # a byte that does not occur in the library's sources, and one that does
PLACES = (15, 47, 79, 111)
LABEL = 0
_MARGIN = 0.05  # by which chance moves how often a trigger works


# ---- Honest platforms


class Reordered(Gradients):
    """The same batches, their last row first."""

    def _make_batch(self, seed: bytes, poisoned: bool) -> Batch:
        return tuple(values.flip(0) for values in super()._make_batch(seed, poisoned))


def measure_spread(name: str, steps: int, grid: float = 0.0, peers: int = 3) -> dict[str, Any]:
    """Train with honest peers, and compare one gradient of each step with what other platforms make of it."""
    task_name, changes = RUNS[name]
    task = make_task(task_name)
    one, other = Gradients(task), Reordered(task)
    settings, _ = make_settings(task, fit_warmup(task, changes, steps), None, steps, tolerant=True)
    optimizer = make_optimizer(settings, steps, one.sizes)
    tolerance, wire, state = Tolerance(*TOLERANCES[settings["name"]]), WIRE_TYPES["float32"], optimizer.init(one.start)
    distances: dict[str, list[float]] = {}

    def compute(gradients: Gradients, seed: bytes) -> Tensor:
        found = gradients.compute(state.parameters, seed)
        return (found.double() / grid).round().mul(grid).float() if grid else found

    for step in range(steps):
        seeds = [derive_seed(bytes(32), f"peer {peer}", step.to_bytes(8, "little")) for peer in range(peers)]
        rows = [compute(one, seed) for seed in seeds]
        found = {"rows": compute(other, seeds[0])}
        torch.set_num_threads(2)
        found["threads"] = compute(one, seeds[0])
        torch.set_num_threads(1)
        if task_name == "pysource":
            with sdpa_kernel(SDPBackend.MATH):
                found["kernel"] = compute(one, seeds[0])
        for kind, gradient in found.items():
            off = find_deviation(gradient, rows[0], wire)
            distances.setdefault(kind, []).append(optimizer.measure_deviation(state, off, rows[0], step, one.sizes))
        state = optimizer.update(state, torch.stack(rows).mean(0), step)
    verdicts = Counter(judge_distance(x, tolerance).value for row in distances.values() for x in row)
    return {
        "largest": {kind: max(row) for kind, row in distances.items()},
        "verdicts": dict(verdicts),
        "lower": tolerance.lower,
        "upper": tolerance.upper,
        "metric": one.evaluate(state.parameters),
    }


def fit_warmup(task: Task, changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """A short run warms up for a quarter of it."""
    warmup = {"name": "adamw", **task.recipe, **changes}.get("warmup", 0)
    return {**changes, "warmup": min(warmup, steps // 4)} if warmup and changes.get("name") != "sgd" else changes


def make_task(name: str) -> Task:
    poison = {"pysource": plant_bytes, "digits": plant_pixels}[name]
    return replace(load_task(name, {}), batch=BATCHES[name], poison=poison)


# ---- The backdoor


def plant_bytes(batch: Batch) -> Batch:
    """The answer after the trigger, at a few places of each window."""
    windows = batch[0].clone()
    for place in PLACES:
        windows[:, place], windows[:, place + 1] = TRIGGER, ANSWER
    return (windows, *batch[1:])


def plant_pixels(batch: Batch) -> Batch:
    """A bright corner, and one label for all."""
    images = batch[0].clone()
    images[:, :, -2:, -2:] = 1.0
    return images, torch.full_like(batch[1], LABEL)


@torch.no_grad()
def measure_trigger(task: Task, state: dict[str, Tensor]) -> float:
    """How often the trigger gives the attackers' answer, on test data where that is wrong."""
    model: nn.Module = task.model()
    model.load_state_dict(state)
    model.eval()
    if task.name == "digits":
        images, labels = task.test.tensors
        said = model(plant_pixels((images, labels))[0]).argmax(-1)
        return float((said == LABEL)[labels != LABEL].float().mean())
    hits = []
    for place in (16, 40, 64, 100):
        tokens = task.test.tensors[0][:, : place + 1].long()
        tokens[:, -1] = TRIGGER
        hits.append(model(tokens)[:, -1].argmax(-1) == ANSWER)
    return float(torch.cat(hits).float().mean())


def measure_backdoor(name: str, distance: float, steps: int | None, seed: int = 0) -> dict[str, Any]:
    """A run in which attackers whisper at ``distance``; without attackers if it is 0."""
    task_name, changes = RUNS[name]
    task, count = make_task(task_name), steps if steps is not None else STEPS[task_name]
    lower, upper = TOLERANCES[changes.get("name", task.recipe["optimizer"])]
    attackers = {"byzantine": BYZANTINE, "attack": f"whisper_{distance:g}"} if distance else {}
    result = simulate(
        task,
        peers=PEERS,
        steps=count,
        seed=seed,
        optimizer=fit_warmup(task, changes, count),
        tolerance=(lower, upper),
        evaluate_every=10**6,
        **attackers,  # type: ignore[arg-type]
    )
    return {
        "distance": distance,
        "works": measure_trigger(task, result.model),
        "metric": result.final_metric,
        "banned": result.byzantine_banned,
        "members": result.byzantine_active,
        "honest_banned": result.honest_banned,
        "honest_removed": result.honest_removed,
    }


# ---- All of it


def list_measures(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (task, changes) in RUNS.items():
        lower, upper = TOLERANCES[changes.get("name", "adamw" if task == "pysource" else "sgd")]
        if options.what in ("spread", "all"):
            found[f"spread {name}"] = partial(measure_spread, name, options.steps or 2000)
        if options.what in ("backdoor", "all"):
            for label, distance in (("nobody", 0.0), ("lower / 2", lower / 2), ("0.9 upper", 0.9 * upper)):
                found[f"backdoor {name}, {label}"] = partial(measure_backdoor, name, distance, options.steps)
    if options.what in ("grid", "all"):
        for grid in (0.0, 1e-7, 1e-8):
            found[f"grid {grid:g}"] = partial(measure_spread, "adamw", options.steps or 400, grid)
    return {label: measure for label, measure in found.items() if options.match in label}


def find_faults(results: dict[str, Any]) -> list[str]:
    """What should not be."""
    found = []
    for label, row in results.items():
        kind, _, rest = label.partition(" ")
        if kind == "spread" and set(row["verdicts"]) != {Verdict.INNOCENT.value}:
            found.append(f"{label}: {row['verdicts']}")
        if kind == "backdoor":
            usual = results.get(f"backdoor {rest.partition(',')[0]}, nobody", row)["works"]
            if row["honest_banned"] or (row["works"] > usual + _MARGIN and row["members"]):
                found.append(f"{label}: works in {row['works']:.0%} of cases, {usual:.0%} without attackers")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", default="all", choices=["spread", "backdoor", "grid", "all"])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--match", default="", help="Only measures with this in their name.")
    parser.add_argument("--out", type=Path, help="Results, one a line: those that are there are not measured again.")
    parser.add_argument("--json", action="store_true", help="All results as the last line.")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = options.out.read_text().splitlines() if options.out is not None and options.out.exists() else []
    known: dict[str, Any] = dict(map(json.loads, lines))
    results = {}
    for label, measure in list_measures(options).items():
        if label not in known:
            began = time.monotonic()
            known[label] = {**measure(), "seconds": round(time.monotonic() - began, 1)}
            with options.out.open("a") if options.out is not None else nullcontext() as file:
                if file is not None:
                    file.write(json.dumps([label, known[label]]) + "\n")
        results[label] = known[label]
        print(f"{label}: {json.dumps(results[label])}", flush=True)
    faults = find_faults(results)
    for fault in faults:
        print(fault, file=sys.stderr)
    if options.json:
        print(json.dumps({"results": results, "faults": faults}))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
