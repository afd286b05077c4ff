"""The command line: it parses arguments, calls, and prints.

Exit 0 fine, 1 ran and found a failure, 2 bad input, 130 interrupted.

With ``--json`` the last line of stdout is one JSON object, and everything else goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from phalanx import __version__
from phalanx.core.crypto import Identity, parse_peer_id
from phalanx.core.errors import LocalError, RunHalted, WriteFailed
from phalanx.core.messages import MAX_MEMBERS

if TYPE_CHECKING:
    from phalanx.node import Door
    from phalanx.swarm import SwarmResult
    from phalanx.training.manifest import NetworkManifest
    from phalanx.training.member import Outcome

app = typer.Typer(
    help="Train one PyTorch model together with people you do not trust.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # it would take "[default: 16]" for markup, and show nothing
    pretty_exceptions_enable=False,
)
_LONGEST_LINE = 4000
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Method = Annotated[str | None, typer.Option(help="The paper's: btard-sgd, btard-clipped-sgd, restarted-btard-sgd.")]
Clip = Annotated[
    float | None, typer.Option("--clip", "--lambda", help="Scale gradients to this length: btard-clipped-sgd.")
]
LocalOption = Annotated[list[str] | None, typer.Option(help="Where the task's data are on this machine: data=PATH.")]
Optimizer = Annotated[list[str] | None, typer.Option(help="NAME=VALUE, e.g. name=adamw, rate=0.01; may be repeated.")]
TaskOption = Annotated[
    list[str] | None, typer.Option(help="NAME=VALUE for the task, e.g. data=FOLDER; may be repeated.")
]


def main() -> None:
    """Run the command line; what the user or the machine got wrong is one line on stderr and exit code 2."""
    try:
        _require_plain(sys.argv[1:])
        app()
    except LocalError as error:
        _say_error(f"{error}")
        sys.exit(2)
    except WriteFailed as error:
        _say_error(f"{error}; what was written before is intact")
        sys.exit(1)
    except RunHalted as error:
        _say_error(f"{error}")
        sys.exit(1)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        _say_error(f"{where}{error.strerror or error}")
        sys.exit(2)


def _require_plain(words: list[str]) -> None:
    """No path has a NUL in it: whatever opened it would fail, each in its own way."""
    for word in words:
        if "\0" in word:
            raise LocalError(f"{word!r}: a NUL, which no path and no option can have; take it out")


def _say_error(text: str) -> None:
    """One line on stderr. What is in it may come from anybody: a manifest, a file, another peer."""
    from phalanx.show.story import clean

    print(f"phalanx: {clean(text, _LONGEST_LINE)}", file=sys.stderr)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command(short_help="Make a peer's key.")
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


@app.command(short_help="Three of eight peers cheat: unprotected, and under Phalanx.")
def demo(
    out: Annotated[
        Path, typer.Option(help="A folder for picture and report; if it exists, one with a number is made.")
    ] = Path("phalanx-demo"),
    as_json: Json = False,
) -> None:
    """Three of eight peers cheat: watch the same training fall apart unprotected, and hold under Phalanx."""
    from phalanx.demo import compare_clipping, run_demo

    result = run_demo(_find_free(out))
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


@app.command(short_help="Train with a whole swarm in this process, attackers included.")
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
    optimizer: Optimizer = None,
    method: Method = None,
    clip: Clip = None,
    wire: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or int8. [default: float32]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cpu]")] = None,
    option: TaskOption = None,
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


Key = Annotated[Path, typer.Option("--key", help="This peer's key, as phalanx keygen makes it.")]
Listen = Annotated[
    list[str] | None,
    typer.Option(help="Where to be reached, as a multiaddress; may be repeated. [default: /ip4/0.0.0.0/tcp/0]"),
]
Announce = Annotated[
    list[str] | None, typer.Option(help="The address to tell others, if it is another; may be repeated.")
]
Peer = Annotated[list[str] | None, typer.Option("--peer", help="Address of somebody in the run; may be repeated.")]
Threads = Annotated[
    int | None, typer.Option(help="Of this peer's gradients, in a run with a tolerance. [default: the manifest's]")
]
ShelfOption = Annotated[
    bool | None,
    typer.Option(
        "--shelf/--no-shelf",
        help="Hold what past steps leave in files instead of memory. [default: for models from 64 MB]",
        show_default=False,
    ),
]


@app.command(short_help="Write the manifest of a run between machines.")
def init(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="The manifest to write; an existing file is never overwritten.")],
    founder: Annotated[
        list[str],
        typer.Option(
            help="Peer id of a founder, or the file of its key; once for each. [default with --continue: all members]",
            default_factory=list,
            show_default=False,
        ),
    ],
    task: Annotated[str, typer.Option(help="digits, pysource, cifar10, text, or FILE.py:NAME.")] = "digits",
    byzantine: Annotated[int, typer.Option(help="Members that may do anything, at most.")] = 0,
    validators: Annotated[int, typer.Option(help="Members that check others, each step.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps of training. [default: the task's]")] = None,
    seed: Annotated[int, typer.Option(help="Of initial parameters and batches.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Rows of a peer's batch. [default: the task's]")] = None,
    tau: Annotated[str, typer.Option(help="Where CenteredClip clips: auto, or a length.")] = "auto",
    wire: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(help="Of every peer's gradients. [default: this machine's]")] = None,
    delta: Annotated[float, typer.Option(help="Seconds within which a message arrives.")] = 2.0,
    gradient_time: Annotated[float | None, typer.Option(help="Seconds for a gradient. [default: measured]")] = None,
    transfer_time: Annotated[float | None, typer.Option(help="Seconds to move parts. [default: by bandwidth]")] = None,
    bandwidth: Annotated[float, typer.Option(help="Megabits a second that every peer has.")] = 100.0,
    quorum: Annotated[str, typer.Option(help="majority or partition-safe.")] = "majority",
    tolerance: Annotated[
        str | None, typer.Option(help="LOWER,UPPER: let platforms differ. SGD: 1e-4,1e-2; AdamW, LAMB: 0.03,0.3.")
    ] = None,
    probation: Annotated[int, typer.Option(help="The least steps of a newcomer without weight.")] = 12,
    newcomer_probation: Annotated[int, typer.Option(help="The number itself; 0: as the odds ask for.")] = 0,
    admissions: Annotated[int, typer.Option(help="Newcomers on probation at the same time.")] = 1,
    optimizer: Optimizer = None,
    method: Method = None,
    clip: Clip = None,
    option: TaskOption = None,
    folder: Annotated[
        Path | None,
        typer.Option("--continue", help="A peer's folder of an old run: the new one goes on from its certified state."),
    ] = None,
    at: Annotated[
        int | None, typer.Option(help="With --continue: the checkpoint of this step. [default: the last certified one]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the manifest of a run between machines, with times measured on this one, or those of the old run."""
    from phalanx.node import run_continue, run_init

    settings = {
        "byzantine": byzantine,
        "validators": validators,
        "steps": steps,
        "seed": seed,
        "batch": batch,
        "tau": tau,
        "wire": wire,
        "device": device,
        "threads": threads,
        "delta": delta,
        "gradient_time": gradient_time,
        "transfer_time": transfer_time,
        "bandwidth": bandwidth,
        "quorum": quorum,
        "tolerance": _parse_tolerance(tolerance),
        "probation": probation,
        "newcomer_probation": newcomer_probation,
        "admissions": admissions,
        "optimizer": _parse_settings(optimizer, "optimizer"),
        "method": method,
        "clip": clip,
        "options": _parse_pairs(option, "option"),
    }
    founders = [_find_founder(text) for text in founder or ()]
    state: Path | None = None
    with contextlib.redirect_stdout(sys.stderr):
        if folder is not None:
            given = _find_given(context)
            changes = {name: settings[name] for name in given - {"task"}}
            named, local = task if "task" in given else None, _parse_pairs(option, "option")
            manifest, state = run_continue(file, folder, founders, changes, at=at, task=named, options=local)
        elif at is not None:
            raise LocalError("--at: expected --continue FOLDER with it, the folder that has the checkpoint")
        else:
            manifest = run_init(file, task, founders, settings)
    _say_founded(file, manifest, state, as_json)


def _find_given(context: typer.Context) -> set[str]:
    """The settings that were given with --continue; all but some are the old run's."""
    from phalanx.training.continuing import CHANGEABLE

    around = {"file", "folder", "at", "founder", "as_json", "task", "option"}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    for name in sorted(given - around - {*CHANGEABLE}):
        raise LocalError(
            f"--{name.replace('_', '-')}: a run that goes on has it from the old one; leave it out, or found a run "
            "without --continue"
        )
    return given - around | given & {"task"}


def _say_founded(file: Path, manifest: NetworkManifest, state: Path | None, as_json: bool) -> None:
    from phalanx.show.story import describe_floor
    from phalanx.training.planning import find_floor

    run, origin = manifest.run, manifest.origin
    floor = find_floor(run.byzantine, run.validators, manifest.network.quorum)
    print(f"phalanx: {describe_floor(run.peers, run.byzantine, floor)}", file=sys.stderr)
    if as_json:
        room = {"floor": floor, "margin": run.peers - floor}
        before = {} if origin is None else {"continues": origin.run, "steps_before": origin.steps, "state": str(state)}
        _print_json({"file": str(file), "run": manifest.name, "peers": run.peers, "steps": run.steps, **room, **before})
        return
    what = "it"
    if origin is not None:
        what = "both"
        print(
            f"goes on from run {origin.run} after {origin.steps} steps of training, {run.steps} are left\n"
            f"its state is in {state}"
        )
    print(
        f"run {manifest.name}\n"
        f"written to {file}: read it, give {what} to every founder, then: phalanx start {file} --key KEY"
    )


@app.command()
def start(
    file: Annotated[Path, typer.Argument(help="The manifest, as phalanx init writes it.")],
    key: Key,
    out: Annotated[Path | None, typer.Option(help="This peer's folder. [default: named after file and key]")] = None,
    listen: Listen = None,
    announce: Announce = None,
    peer: Peer = None,
    evaluate_every: Annotated[int | None, typer.Option(help="Steps between measurements.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Steps between checkpoints, at most 256.")] = None,
    option: LocalOption = None,
    threads: Threads = None,
    shelf: ShelfOption = None,
    attack: Annotated[str | None, typer.Option(help="Cheat like this, for experiments.")] = None,
    start: Annotated[int | None, typer.Option(help="The step in which the attack begins.")] = None,
    every: Annotated[int | None, typer.Option(help="The attack acts in every so-many-th step. [default: 1]")] = None,
    colluder: Annotated[list[str] | None, typer.Option(help="Peer id of a fellow attacker; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Found a run between machines, or go on with it after a stop."""
    from phalanx.attacks import load_attack, set_options
    from phalanx.node import run_start
    from phalanx.show.progress import Progress
    from phalanx.training.founding import require_whole

    require_whole("start", start, 0)
    require_whole("every", every)
    attacking = load_attack(attack) if attack is not None else None
    if attacking is not None:
        chosen = {"every": every if every is not None else 1} | ({"start": start} if start is not None else {})
        attacking = set_options(attacking, **chosen)
    elif start is not None or every is not None or colluder:
        raise LocalError(
            "--start, --every, --colluder: there is no attack; choose one with --attack, or leave them out"
        )
    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        outcome = run_start(
            file,
            key,
            out,
            _make_door(listen, announce, peer),
            on_event=progress.on_event,
            attack=attacking,
            colluders=colluder or (),
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            threads=threads,
            shelf=shelf,
            options=_parse_pairs(option, "option"),
        )
    _say_outcome(outcome, as_json)


@app.command(short_help="Join a run that others are in.")
def join(
    address: Annotated[str, typer.Argument(help="Of anybody in the run, e.g. /ip4/1.2.3.4/tcp/5555/p2p/12D3KooW...")],
    key: Key,
    out: Annotated[Path | None, typer.Option(help="This peer's folder. [default: named after the key]")] = None,
    listen: Listen = None,
    announce: Announce = None,
    peer: Peer = None,
    trust_task: Annotated[
        str | None, typer.Option(help="The hash of the task's code, if it is not built in and you have read it.")
    ] = None,
    option: LocalOption = None,
    threads: Threads = None,
    shelf: ShelfOption = None,
    run: Annotated[
        str | None, typer.Option(help="The run's name, if somebody you trust told you: any other is refused.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Join a run: fetch its manifest, check this machine, sync the state, pass probation, become a member."""
    from phalanx.node import run_join
    from phalanx.show.progress import Progress

    with contextlib.redirect_stdout(sys.stderr), Progress() as progress:
        outcome = run_join(
            address,
            key,
            out,
            _make_door(listen, announce, peer),
            trust_task=trust_task,
            run=run,
            threads=threads,
            shelf=shelf,
            options=_parse_pairs(option, "option"),
            on_event=progress.on_event,
        )
    _say_outcome(outcome, as_json)


@app.command()
def swarm(
    task: Annotated[str, typer.Option(help="digits, pysource, cifar10, text, or FILE.py:NAME.")] = "digits",
    peers: Annotated[int, typer.Option(help="Processes that found the run.")] = 8,
    byzantine: Annotated[int, typer.Option(help="How many of them attack.")] = 0,
    attack: Annotated[str, typer.Option(help="What attackers do: as with simulate.")] = "none",
    begin: Annotated[int, typer.Option("--start", help="The step in which attackers begin.")] = 0,
    every: Annotated[int, typer.Option(help="They act in every so-many-th step.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Steps of training. [default: the task's]")] = None,
    validators: Annotated[int, typer.Option(help="Members that check others, each step.")] = 1,
    tau: Annotated[str, typer.Option(help="Where CenteredClip clips: auto, or a length.")] = "auto",
    wire: Annotated[str, typer.Option(help="float32, bfloat16, float16 or int8.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of initial parameters, batches and who attacks.")] = 0,
    batch: Annotated[int | None, typer.Option(help="Rows of a peer's batch. [default: the task's]")] = None,
    delta: Annotated[float, typer.Option(help="Seconds within which a message arrives.")] = 2.0,
    gradient_time: Annotated[float | None, typer.Option(help="Seconds for a gradient. [default: measured]")] = None,
    transfer_time: Annotated[float | None, typer.Option(help="Seconds to move parts. [default: by bandwidth]")] = None,
    quorum: Annotated[str, typer.Option(help="majority or partition-safe.")] = "majority",
    tolerance: Annotated[str | None, typer.Option(help="LOWER,UPPER: let platforms differ.")] = None,
    probation: Annotated[int, typer.Option(help="Steps of a returning member without weight.")] = 12,
    newcomer_probation: Annotated[int, typer.Option(help="The same for a newcomer; 0: as the odds ask for.")] = 0,
    kill: Annotated[list[str] | None, typer.Option(help="P@STEP: kill -9 a peer in a step; may be repeated.")] = None,
    joins: Annotated[
        list[str] | None,
        typer.Option("--join", help="P@STEP: a new peer joins, or a killed one comes back; may be repeated."),
    ] = None,
    optimizer: Optimizer = None,
    option: TaskOption = None,
    out: Annotated[Path, typer.Option(help="A folder for all peers; if it exists, one with a number is made.")] = Path(
        "phalanx-swarm"
    ),
    as_json: Json = False,
) -> None:
    """Run a swarm of real processes over libp2p on this machine."""
    from phalanx.attacks import load_attack
    from phalanx.run import listen_for_interrupts
    from phalanx.show.progress import Progress
    from phalanx.swarm import Attackers, run_swarm

    load_attack(attack)
    if peers > MAX_MEMBERS:
        raise LocalError(f"peers: {peers}, but a roster holds at most {MAX_MEMBERS}")
    settings = {
        "validators": validators,
        "steps": steps,
        "batch": batch,
        "tau": tau,
        "wire": wire,
        "delta": delta,
        "gradient_time": gradient_time,
        "transfer_time": transfer_time,
        "quorum": quorum,
        "tolerance": _parse_tolerance(tolerance),
        "probation": probation,
        "newcomer_probation": newcomer_probation,
        "optimizer": _parse_settings(optimizer, "optimizer"),
        "options": _parse_pairs(option, "option"),
    }
    with (
        contextlib.redirect_stdout(sys.stderr),
        listen_for_interrupts("stopping all peers; a swarm does not go on later") as is_interrupted,
        Progress() as progress,
    ):
        found = run_swarm(
            task=task,
            peers=peers,
            byzantine=byzantine,
            attackers=Attackers(attack=attack, start=begin, every=every),
            seed=seed,
            out=_find_free(out),
            settings=settings,
            kills=[_parse_moment(text, "--kill") for text in kill or ()],
            joins=[_parse_moment(text, "--join") for text in joins or ()],
            on_event=progress.on_event,
            should_stop=is_interrupted,
        )
    print(_describe_swarm(found), file=sys.stderr)
    if as_json:
        _print_json(found.to_json())
    if not found.finished:
        raise typer.Exit(130 if is_interrupted() else 1)
    if found.result.honest_banned or not found.digests_equal:
        raise typer.Exit(1)


@app.command(short_help="Simulate runs with random faults, and check every invariant.")
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
    if peers is not None and peers > MAX_MEMBERS:
        raise LocalError(f"peers: {peers}, but a roster holds at most {MAX_MEMBERS}")
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
    interrupted = False
    try:
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
    except KeyboardInterrupt:
        interrupted = True  # what is done counts
    seconds = time.perf_counter() - begun
    if as_json:
        _print_json({**totals, "seconds": seconds, "failed": failed, "interrupted": interrupted})
    else:
        print(
            f"{totals['seeds']} seeds, {totals['steps']} steps, {totals['violations']} violations; of "
            f"{totals['byzantine_total']} Byzantine peers {totals['byzantine_banned']} banned; of the honest "
            f"{totals['honest_banned']} banned, {totals['honest_eliminated']} eliminated; {seconds:.1f} s"
        )
    if interrupted:
        raise typer.Exit(130)
    if totals["violations"]:
        raise typer.Exit(1)


def _describe_swarm(found: SwarmResult) -> str:
    result, took = found.result, found.seconds_per_step
    metric = "none" if result.final_metric is None else f"{result.final_metric:.4f}"
    pace = f", {took:.2f} s each" if took is not None else ""
    equal: bool | None = found.digests_equal
    states = {True: "all honest states are equal", False: "honest states are NOT equal", None: "nobody finished"}
    return (
        f"{result.metric_name} {metric} after {result.steps} steps{pace}; "
        f"{result.byzantine_banned} attackers banned, honest peers banned: {result.honest_banned}; "
        f"{states[equal]}; written to {result.out}"
    )


def _find_free(out: Path) -> Path:
    """The folder, or one with a number if there is something already."""
    folder, number = out, 1
    while folder.exists():
        number += 1
        folder = out.with_name(f"{out.name}-{number}")
    return folder


def _find_founder(text: str) -> str:
    """A founder's peer id, or that of the key in a file."""
    if Path(text).is_file():
        return Identity.load(Path(text)).peer_id
    try:
        parse_peer_id(text)
    except LocalError as error:
        raise LocalError(f"--founder: {error}, and there is no such file") from None
    return text


def _make_door(listen: list[str] | None, announce: list[str] | None, peers: list[str] | None) -> Door:
    from phalanx.node import Door

    return Door(listen=listen or ("/ip4/0.0.0.0/tcp/0",), announce=announce or (), peers=peers or ())


def _say_outcome(outcome: Outcome, as_json: bool) -> None:
    """How a peer's part ended: exit 1 if it was banned, 130 if it left before the end."""
    if as_json:
        _print_json(outcome.to_json())
    if outcome.banned:
        print("phalanx: this peer was banned by the others", file=sys.stderr)
        raise typer.Exit(1)
    if not outcome.finished:
        print(f"phalanx: left after step {outcome.steps}; go on with the same command", file=sys.stderr)
        raise typer.Exit(130)


def _parse_moment(text: str, option: str) -> tuple[int, int]:
    peer, at, step = text.partition("@")
    if not (at and peer.isdecimal() and step.isdecimal()):
        raise LocalError(f"{option}: expected PEER@STEP, two whole numbers from 0, got {text!r}")
    return int(peer), int(step)


def _parse_tolerance(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        lower, upper = map(float, text.split(","))
    except ValueError:
        raise LocalError(f"--tolerance: expected LOWER,UPPER, two numbers, got {text!r}") from None
    return lower, upper


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
