"""The command line: it parses arguments, calls, and prints. Exit 0 fine, 1 ran and found a failure, 2 bad input.

With ``--json`` the last line of stdout is one JSON object, and everything else goes to stderr.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from phalanx import __version__
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError

app = typer.Typer(
    help="Train one PyTorch model together with people you do not trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]


def main() -> None:
    """Run the command line; what the user or the machine got wrong is one line on stderr and exit code 2."""
    try:
        app()
    except LocalError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"phalanx: {where}{error.strerror or error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def keygen(
    file: Annotated[Path, typer.Argument(help="Where to write the key; an existing file is never overwritten.")],
    as_json: Json = False,
) -> None:
    """Make a peer's key: an Ed25519 key in libp2p's form, readable by its owner alone."""
    identity = Identity.generate()
    identity.save(file)
    if as_json:
        _print_json({"file": str(file), "peer_id": identity.peer_id})
    else:
        print(f"{identity.peer_id}\nwritten to {file}; keep it: it is this peer's name, and cannot be made again")


@app.command()
def demo(as_json: Json = False) -> None:
    """Seven of sixteen peers cheat: watch the mean fail and CenteredClip hold."""
    from phalanx.demo import STEPS, run_demo

    result = run_demo()
    curves = (result.honest, result.clipped, result.mean)
    table = Table(title="Distance to the true parameters")
    table.add_column("step", justify="right")
    for curve in curves:
        table.add_column(curve.name, justify="right")
    for step in (0, 1, 2, 5, 10, 20, 50, STEPS):
        table.add_row(str(step), *(_format_error(curve.errors[step]) for curve in curves))
    console = Console(stderr=as_json)
    console.print(table)
    console.print(
        f"Every attacker sent its gradient times -1000. The mean follows them; CenteredClip gave no attacker more than "
        f"{100 * result.attacker_weight:.2g}% of the weight (an equal share is {100 / 16:.2g}%)."
    )
    if as_json:
        names = ("honest", "clipped", "mean")
        errors = {f"{name}_error": curve.errors[-1] for name, curve in zip(names, curves, strict=True)}
        _print_json({**errors, "attacker_weight": result.attacker_weight})


@app.command()
def fuzz(
    seeds: Annotated[str, typer.Option(help="Which seeds, A:B, without B.")],
    peers: Annotated[int | None, typer.Option(help="Founders, instead of a drawn number.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each run, instead of a drawn number.")] = None,
    attack: Annotated[
        str | None, typer.Option(help="What every attacker does: NAME or FILE.py:NAME, then perhaps @STEP, %ODDS.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(help="A file for a line per delivery and event; with more than one seed, of the last."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Simulate runs with random faults and attackers, one per seed, and check every invariant from outside."""
    from phalanx.simulation.scenario import fuzz_seeds, parse_seeds

    chosen = parse_seeds(seeds)
    if jobs < 1:
        raise LocalError(f"jobs: expected at least 1, got {jobs}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    totals = {
        "seeds": 0,
        "steps": 0,
        "violations": 0,
        "byzantine_banned": 0,
        "byzantine_total": 0,
        "honest_banned": 0,
        "honest_eliminated": 0,
    }
    begun = time.perf_counter()
    failed: list[int] = []
    for result in fuzz_seeds(chosen, peers, steps, attack, jobs, str(trace) if trace is not None else None):
        totals["seeds"] += 1
        totals["violations"] += len(result.violations)
        for field in ("steps", "byzantine_banned", "byzantine_total", "honest_banned", "honest_eliminated"):
            totals[field] += getattr(result, field)
        if result.violations:
            failed.append(result.seed)
            for violation in result.violations:
                console.print(str(violation), markup=False)
            console.print(f"replay: {result.command}", markup=False)
        for failure in result.attack_failures:
            console.print(f"seed {result.seed}: an attacker broke: {failure}", markup=False)
        if totals["seeds"] % 20 == 0 or totals["seeds"] == len(chosen):
            spent = time.perf_counter() - begun
            rate = totals["steps"] / spent
            console.print(f"{totals['seeds']} of {len(chosen)} seeds, {len(failed)} failed, {rate:.0f} steps/s")
    seconds = time.perf_counter() - begun
    if as_json:
        _print_json({**totals, "seconds": seconds, "failed": failed})
    else:
        print(
            f"{totals['seeds']} seeds, {totals['steps']} steps, {totals['violations']} violations; of "
            f"{totals['byzantine_total']} Byzantine peers {totals['byzantine_banned']} banned; of the honest "
            f"{totals['honest_banned']} banned, {totals['honest_eliminated']} eliminated; {seconds:.1f} s"
        )
    if totals["violations"]:
        raise typer.Exit(1)


def _format_error(error: float) -> str:
    return f"{error:.3g}" if math.isfinite(error) else "overflow"


def _print_json(values: dict[str, Any]) -> None:
    """One line; a number that is not finite is null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    print(json.dumps(clean, allow_nan=False), flush=True)
