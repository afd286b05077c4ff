"""CenteredClip against a plain mean and against the iteration it solves, measured in one run.

    python benchmarks/clipping.py [--json] [--device cpu|cuda]

Sixteen rows about a common vector, the first seven multiplied by -1000. The *iteration* is the paper's: start at the
coordinate median, then ``v += mean_i clip(g_i - v)`` until a step is shorter than 1e-6, or for 500 rounds; it is timed
as written, and again with a buffer that spares it fresh memory. On a CPU one stack of 687,500 columns; on a GPU rows of
11.17 million split into 16 parts, that is a batch of 16 stacks.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phalanx import centered_clip
from phalanx.core.gram import compute_gram

SEED = 0
ROWS, ATTACKERS = 16, 7
SCALE, BLOW_UP = 1e-3, -1000
COLUMNS = {"cpu": (1, 687_500), "cuda": (16, 698_125)}  # stacks, columns of each
PAIRS = 31
STEP, MOST_ROUNDS = 1e-6, 500
RADII = {"tau_1": 1.0, "tau_0_1": 0.1}

# What has to hold: the key of the figure, the side of the limit it must be on, and the limit.
TARGETS: dict[str, dict[str, tuple[str, float]]] = {
    "cpu": {
        "ratio_to_mean": ("<=", 5.0),
        "speedup_tau_1": (">=", 80.0),
        "speedup_tau_0_1": (">=", 500.0),
        "residual_over_tau_n": ("<=", 1e-6),
    },
    "cuda": {
        "clip_ms": ("<=", 1.0),
        "residual_over_tau_n": ("<=", 1e-6),
    },
}


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_parts(device: str) -> Tensor:
    """``(stacks, rows, columns)``, the same on every machine: drawn on the CPU."""
    stacks, columns = COLUMNS[device]
    generator = torch.Generator().manual_seed(SEED)
    parts = torch.empty(stacks, ROWS, columns).normal_(0, SCALE, generator=generator)
    parts += torch.empty(stacks, 1, columns).normal_(0, SCALE, generator=generator)
    parts[:, :ATTACKERS] *= BLOW_UP
    return parts.to(device)


def iterate(parts: Tensor, tau: float, buffer: Tensor | None = None) -> tuple[Tensor, int]:
    """The paper's iteration on all stacks at once, until none moves by more than ``STEP``; and its rounds.

    With a ``buffer`` of the size of the input, rounds write to it instead of to new memory.
    """
    v = parts.median(dim=1).values
    for done in range(1, MOST_ROUNDS + 1):
        offsets = torch.sub(parts, v[:, None], out=buffer)
        shares = (tau / offsets.norm(dim=2)).clamp(max=1.0)
        step = torch.mul(offsets, shares[:, :, None], out=buffer).mean(dim=1)
        v = v + step
        if float(step.norm(dim=1).max()) < STEP:
            return v, done
    return v, MOST_ROUNDS


def measure_residual(parts: Tensor, tau: float, weights: Tensor) -> float:
    """``|sum clip(g_i - v)| / (tau n)`` in float64 about the heaviest row, the worst stack's; no library code."""
    worst = 0.0
    for stack, share in zip(parts, weights, strict=True):
        about = stack.cpu().double()
        about -= about[int(share.argmax())].clone()
        about -= share.cpu() @ about
        distances = about.norm(dim=1)
        pulls = torch.where(distances > tau, tau / distances.clamp(min=tau), 1.0)
        worst = max(worst, float((pulls @ about).norm()) / (tau * len(stack)))
    return worst


def time_ms(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def time_in_turn(calls: list[Callable[[], object]], device: str) -> list[float]:
    """The median time of each, taken in turns so that all see the same state of the machine."""
    for call in calls * 3:
        call()
    times = [[time_ms(call, device) for call in calls] for _ in range(PAIRS)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def time_iteration(parts: Tensor, tau: float, buffer: Tensor | None, device: str) -> tuple[float, Tensor, int]:
    """Once: it takes seconds. A small one goes first, for whatever is set up on first use."""
    iterate(parts[:, :, :1000], tau)
    reached: list[tuple[Tensor, int]] = []
    spent = time_ms(lambda: reached.append(iterate(parts, tau, buffer)), device)
    return spent, *reached[0]


def run(device: str) -> dict[str, Any]:
    batch = make_parts(device)
    parts = batch[0] if len(batch) == 1 else batch  # one stack is given as one
    log(f"parts {tuple(parts.shape)} on {device}, seed {SEED}")
    results: dict[str, Any] = {"residual_over_tau_n": 0.0}
    means, clips = [], []
    for name, tau in RADII.items():

        def take_mean() -> object:
            return parts.mean(-2)

        def take_clip(tau: float = tau) -> object:
            return centered_clip(parts, tau)

        mean_ms, clip_ms = time_in_turn([take_mean, take_clip], device)
        means.append(mean_ms)
        clips.append(clip_ms)
        log(f"{name}: mean {mean_ms:.3f} ms, clip {clip_ms:.3f} ms")
        found = centered_clip(batch, tau)
        residual = measure_residual(batch, tau, found.weights)
        results["residual_over_tau_n"] = max(results["residual_over_tau_n"], residual)

        iteration_ms, aggregate, rounds = time_iteration(batch, tau, None, device)
        frugal_ms, _, _ = time_iteration(batch, tau, torch.empty_like(batch), device)
        log(f"{name}: iteration {iteration_ms:.0f} ms ({frugal_ms:.0f} ms with a buffer), {rounds} rounds")
        results |= {
            f"speedup_{name}": iteration_ms / clip_ms,
            f"ratio_to_mean_{name}": clip_ms / mean_ms,
            f"clip_{name}_ms": clip_ms,
            f"iteration_{name}_ms": iteration_ms,
            f"iteration_rounds_{name}": rounds,
            f"iteration_gap_{name}": float((aggregate - found.aggregate).norm(dim=1).max()),
            f"buffered_iteration_{name}_ms": frugal_ms,
            f"buffered_speedup_{name}": frugal_ms / clip_ms,
            f"residual_over_tau_n_{name}": residual,
            f"rounds_{name}": found.iterations,
        }
    gram_ms = time_in_turn([lambda: compute_gram(batch)], device)[0]
    results |= {
        "mean_ms": statistics.median(means),
        "gram_ms": gram_ms,
        "clip_ms": max(clips),
        "ratio_to_mean": max(results[f"ratio_to_mean_{name}"] for name in RADII),
        "device": device,
        "shape": list(parts.shape),
        "seed": SEED,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()}, {os.cpu_count()} cores",
    }
    return results


def is_met(value: float, side: str, limit: float) -> bool:
    return math.isfinite(value) and (value <= limit if side == "<=" else value >= limit)


def to_json(value: Any) -> Any:
    """JSON knows no NaN and no infinity; ``null`` says that there is no figure."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    return value


def print_table(results: dict[str, Any], targets: dict[str, tuple[str, float]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"CenteredClip, {tuple(results['shape'])} float32 on {results['machine']}")
    for heading in ("figure", "value", "target", "met"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for key, (side, limit) in targets.items():
        met = "yes" if is_met(results[key], side, limit) else "NO"
        table.add_row(key, f"{results[key]:.3g}", f"{side} {limit:g}", met)
    table.add_section()
    for key, value in results.items():
        if key not in targets and key.endswith(("_ms", "_tau_1", "_tau_0_1")):
            table.add_row(key, f"{value:.4g}", "", "")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--device", choices=sorted(COLUMNS), default="cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no such device here")

    results = run(arguments.device)
    targets = TARGETS[arguments.device]
    met = {key: is_met(results[key], side, limit) for key, (side, limit) in targets.items()}
    results["targets"] = {
        key: {"limit": limit, "side": side, "met": met[key]} for key, (side, limit) in targets.items()
    }
    if arguments.json:
        print(json.dumps(to_json(results), allow_nan=False))
    else:
        print_table(results, targets)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
