"""The command line: it parses arguments, calls, and prints.

Exit 0 fine, 1 ran and found a failure, 2 bad input, 130 interrupted after a checkpoint.

With ``--json`` the last line of stdout is one JSON object, and everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from phalanx import __version__
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError, WriteFailed

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
    except WriteFailed as error:
        print(f"phalanx: {error}; what was written before is intact", file=sys.stderr)
        sys.exit(1)
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
def demo(
    out: Annotated[
        Path, typer.Option(help="A folder for picture and report; if it exists, one with a number is made.")
    ] = Path("phalanx-demo"),
    as_json: Json = False,
) -> None:
    """Three of eight peers cheat: watch the same training fall apart unprotected, and hold under Phalanx."""
    from phalanx.demo import compare_clipping, run_demo

    folder, number = out, 1
    while folder.exists():
        number += 1
        folder = out.with_name(f"{out.name}-{number}")
    result = run_demo(folder)
    bare, safe = result.unprotected, result.protected
    print(
        f"{bare.metric_name}: {_format_share(bare.final_metric)} unprotected, {_format_share(safe.final_metric)} "
        f"protected; {safe.byzantine_banned} of 3 attackers banned, {safe.honest_banned} honest peers\n"
        f"picture: {result.picture}\nreport:  {result.report}",
        file=sys.stderr if as_json else sys.stdout,
    )
    if as_json:
        runs = {"unprotected": bare.to_json(), "protected": safe.to_json()}
        files = {"picture": str(result.picture), "report": str(result.report)}
        _print_json({**compare_clipping(), **runs, **files})


@app.command()
def simulate(
    task: Annotated[
        str | None, typer.Option(help="digits, pysource, cifar10, text, or FILE.py:NAME. [default: digits]")
    ] = None,
    peers: Annotated[int | None, typer.Option(help="Members of the swarm. [default: 16]")] = None,
    byzantine: Annotated[int | None, typer.Option(help="How many of them attack. [default: 0]")] = None,
    attack: Annotated[
        str | None,
        typer.Option(
            help="sign_flip, random_direction, label_flip, delayed, ipm_0.1, ipm_0.6, alie, none, an attack on the "
            "protocol, or FILE.py:NAME. [default: none]"
        ),
    ] = None,
    start: Annotated[int | None, typer.Option(help="The step in which attackers begin. [default: 0]")] = None,
    every: Annotated[int | None, typer.Option(help="They act in every so-many-th step. [default: 1]")] = None,
    delay: Annotated[
        int | None, typer.Option(help="Steps that the attack delayed lags behind. [default: 1000]")
    ] = None,
    defense: Annotated[
        str | None,
        typer.Option(
            help="phalanx, or behind a trusted server: mean, allreduce, median, geometric_median, krum, multi_krum, "
            "trimmed_mean, server_clip. [default: phalanx]"
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training. [default: the task's]")] = None,
    validators: Annotated[int | None, typer.Option(help="Members that check others, each step. [default: 1]")] = None,
    tau: Annotated[
        str | None, typer.Option(help="Where CenteredClip clips: auto, or a length. [default: auto]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random. [default: 0]")] = None,
    batch: Annotated[int | None, typer.Option(help="Rows of a peer's batch. [default: the task's]")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, e.g. name=adamw, rate=0.01; may be repeated.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The paper's: btard-sgd, btard-clipped-sgd, restarted-btard-sgd.")
    ] = None,
    clip: Annotated[
        float | None, typer.Option("--clip", "--lambda", help="Scale gradients to this length: btard-clipped-sgd.")
    ] = None,
    wire: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. [default: float32]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cpu]")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the task, e.g. data=FOLDER; may be repeated.")
    ] = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between measurements.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="A folder for manifest, transcript, events, checkpoints, plots.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    stop_at: Annotated[int | None, typer.Option(help="Stop before this step, as Ctrl-C would.")] = None,
    as_json: Json = False,
) -> None:
    """Train a task with a swarm in this process: the whole protocol, attackers included."""
    from phalanx.run import run_simulate

    given = {
        "task": task,
        "peers": peers,
        "byzantine": byzantine,
        "attack": attack,
        "start": start,
        "every": every,
        "delay": delay,
        "defense": defense,
        "steps": steps,
        "validators": validators,
        "tau": tau,
        "seed": seed,
        "batch": batch,
        "optimizer": _parse_settings(optimizer, "optimizer"),
        "method": method,
        "clip": clip,
        "wire": wire,
        "device": device,
        "options": {name: str(value) for name, value in (_parse_pairs(option, "option") or {}).items()} or None,
        "evaluate_every": evaluate_every,
        "checkpoint_every": checkpoint_every,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints
        result = run_simulate(chosen, out, resume=resume, stop_at=stop_at)
    if as_json:
        _print_json(result.to_json())
    if result.interrupted:
        raise typer.Exit(130)
    if result.honest_banned:
        raise typer.Exit(1)


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


def _parse_pairs(texts: list[str] | None, option: str) -> dict[str, str] | None:
    """NAME=VALUE, each."""
    if not texts:
        return None
    pairs = [text.partition("=") for text in texts]
    for text, (name, equals, _) in zip(texts, pairs, strict=True):
        if not (name and equals):
            raise LocalError(f"{option}: expected NAME=VALUE, got {text!r}")
    return {name: value for name, _, value in pairs}


def _parse_settings(texts: list[str] | None, option: str) -> dict[str, Any] | None:
    """The same, with numbers and true or false as such."""
    pairs = _parse_pairs(texts, option)
    return {name: _parse_value(value) for name, value in pairs.items()} if pairs is not None else None


def _parse_value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _format_share(value: float | None) -> str:
    return f"{100 * value:.1f}%" if value is not None else "none"


def _print_json(values: dict[str, Any]) -> None:
    """One line; a number that is not finite is null."""
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    print(json.dumps(clean, allow_nan=False), flush=True)
