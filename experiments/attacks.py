"""The paper's seven attacks on a task: who is banned, and how good is the model afterwards?

    python experiments/attacks.py [--task digits] [--steps 400] [--start 50] [--seeds 3] [--jobs 2] [--json]

16 peers, 7 of which attack from ``--start`` on, every step, for each attack and each seed; beside it 16 honest peers,
and ``mean`` under ``sign_flip`` without any defense. Metrics are means over seeds. Exit 1 if an attacker that kept
attacking is still in, an honest peer was banned, or a metric is farther from that of honest peers than ``--margin`` (a
difference; with ``--relative``, a share).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from phalanx.core.errors import LocalError
from phalanx.training.simulate import simulate
from phalanx.training.tasks import load_task

PEERS, BYZANTINE = 16, 7
ATTACKS = ("sign_flip", "random_direction", "label_flip", "delayed", "ipm_0.1", "ipm_0.6", "alie")

Job = tuple[str, dict[str, Any]]


def run_once(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    task, settings = job
    return simulate(task, peers=PEERS, **settings).to_json()


def make_jobs(options: argparse.Namespace) -> list[tuple[str, Job]]:
    """What to run, each with the row of the table that it belongs to."""
    common = {"steps": options.steps} if options.steps is not None else {}
    found: list[tuple[str, Job]] = []
    for seed in range(options.seeds):
        found.append(("honest", (options.task, {**common, "seed": seed})))
        attacked = {**common, "seed": seed, "byzantine": BYZANTINE, "start": options.start}
        for name in options.attacks:
            lag = {"delay": options.delay} if name == "delayed" else {}
            found.append((name, (options.task, {**attacked, **lag, "attack": name})))
        if options.undefended:
            undefended = {**attacked, "attack": "sign_flip", "defense": "mean"}
            found.append(("sign_flip, mean", (options.task, undefended)))
    return found


def summarize(results: list[dict[str, Any]]) -> dict[str, Any]:
    to_ban = [steps for result in results for steps in result["steps_to_ban"]]
    traffic = [result["bytes_per_peer_step"] / result["allreduce_bytes_per_peer_step"] for result in results]
    return {
        "metric": statistics.mean(result["final_metric"] for result in results),
        "metrics": [result["final_metric"] for result in results],
        "byzantine_banned": [result["byzantine_banned"] for result in results],
        "byzantine_active": [result["byzantine_active"] for result in results],
        "honest_banned": sum(result["honest_banned"] for result in results),
        "honest_removed": sum(result["honest_removed"] for result in results),
        "steps_to_ban": statistics.mean(to_ban) if to_ban else None,
        "traffic": statistics.mean(traffic),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    jobs = make_jobs(options)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(run_once, [job for _, job in jobs]))
    rows: dict[str, list[dict[str, Any]]] = {}
    for (name, _), result in zip(jobs, results, strict=True):
        rows.setdefault(name, []).append(result)
    return {name: summarize(found) for name, found in rows.items()}


def find_failures(rows: dict[str, Any], margin: float, relative: bool) -> list[str]:
    honest = rows["honest"]["metric"]
    allowed = margin * abs(honest) if relative else margin
    found = []
    for name, row in rows.items():
        if name.endswith("mean"):
            continue
        if abs(row["metric"] - honest) > allowed:
            found.append(f"{name}: metric {row['metric']:.4f}, honest {honest:.4f}")
        if row["honest_banned"]:
            found.append(f"{name}: {row['honest_banned']} honest peers banned")
        if any(row["byzantine_active"]) and name != "honest":
            found.append(f"{name}: {row['byzantine_active']} attackers still in")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--start", type=int, default=50)
    parser.add_argument("--delay", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS))
    parser.add_argument("--undefended", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--margin", type=float, default=0.01)
    parser.add_argument("--relative", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name in ("seeds", "jobs"):
        if getattr(options, name) < 1:
            parser.exit(2, f"{parser.prog}: --{name}: expected at least 1, got {getattr(options, name)}\n")
    try:
        load_task(options.task)
        rows = run(options)
    except LocalError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    failures = find_failures(rows, options.margin, options.relative)
    if options.json:
        print(json.dumps({"task": options.task, "rows": rows, "failures": failures}))
    else:
        print(f"{'attack':>18}  {'metric':>7}  banned  honest banned  steps to ban  bytes / all-reduce")
        for name, row in rows.items():
            banned = f"{sum(row['byzantine_banned'])}/{len(row['metrics']) * BYZANTINE}" if name != "honest" else "-"
            waited = f"{row['steps_to_ban']:.1f}" if row["steps_to_ban"] is not None else "-"
            print(
                f"{name:>18}  {row['metric']:7.4f}  {banned:>6}  {row['honest_banned']:>13}  {waited:>12}  "
                f"{row['traffic']:.3f}"
            )
        print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
