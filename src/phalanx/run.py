"""What ``phalanx simulate`` does around a run: show it, stop it in good order, and leave pictures behind."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from phalanx.core.errors import LocalError
from phalanx.events import Event, RunStarted, read_events
from phalanx.show.plots import plot_run
from phalanx.show.progress import Progress
from phalanx.show.report import write_report
from phalanx.show.story import describe_floor
from phalanx.training.allocation import keep_freed_memory
from phalanx.training.checkpoints import find_latest, write_safely
from phalanx.training.manifest import Manifest, read_manifest
from phalanx.training.planning import find_floor
from phalanx.training.recorder import EVENTS
from phalanx.training.simulate import MANIFEST, PHALANX, Result, resume, simulate

PLOT = "plot.png"
REPORT = "report.html"


def run_simulate(
    chosen: Mapping[str, Any], out: Path | None, *, resume: bool = False, stop_at: int | None = None
) -> Result:
    """Start a run with the options chosen, or go on with the one in ``out``."""
    keep_freed_memory()
    if out is not None:
        out = out.absolute()  # a task's file may change the folder
    if stop_at is not None and stop_at < 1:
        raise LocalError(f"--stop-at: expected a step from 1, got {stop_at}")
    if not resume and "attack" not in chosen and ("start" in chosen or "every" in chosen):
        raise LocalError("--start, --every: there is no attack; choose one with --attack, or leave them out")
    how = "with a checkpoint" if out is not None else "keeping nothing, since there is no --out"
    with listen_for_interrupts(f"stopping after this step, {how}") as is_interrupted, Progress() as progress:

        def hear(event: Event) -> None:
            progress.on_event(event)
            if isinstance(event, RunStarted) and event.defense == PHALANX:
                _say_floor(event.peers, event.byzantine, event.validators)

        def stop(step: int) -> bool:
            return is_interrupted() or (stop_at is not None and step >= stop_at)

        if resume:
            result = _resume(chosen, out, progress, stop, stop_at)
        else:
            result = simulate(**{"task": "digits", **chosen}, out=out, on_event=hear, stop=stop)
    _leave_pictures(result)
    _say_goodbye(result)
    return result


@contextmanager
def listen_for_interrupts(answer: str) -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks to stop; a second one stops at once. ``answer`` says what happens after the first."""
    asked = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print(f"phalanx: {answer}; press Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _resume(
    chosen: Mapping[str, Any],
    out: Path | None,
    progress: Progress,
    stop: Callable[[int], bool],
    stop_at: int | None,
) -> Result:
    if out is None:
        raise LocalError("--resume needs --out, the folder of the run")
    manifest = read_manifest(out / MANIFEST)
    for name, value in chosen.items():
        held = _look_up(manifest, name, value)
        if held != value:
            raise LocalError(
                f"--{name.replace('_', '-')} {value}: the run in {out} has {held}; "
                "leave the option out, or start a new run"
            )
    run = manifest.run
    if manifest.simulation.defense == PHALANX:
        _say_floor(run.peers, run.byzantine, run.validators)
    if (out / EVENTS).exists():
        progress.catch_up(read_events(out / EVENTS))
    latest = find_latest(out)
    done = int(latest.name) if latest is not None else 0
    if done >= manifest.run.steps:
        print(f"phalanx: the run in {out} is at its end; nothing is left to do", file=sys.stderr)
    elif stop_at is not None and done >= stop_at:
        print(f"phalanx: --stop-at {stop_at}: the run in {out} is at step {done} already", file=sys.stderr)
    return resume(out, on_event=progress.on_event, stop=stop)


def _say_floor(peers: int, byzantine: int, validators: int) -> None:
    print(f"phalanx: {describe_floor(peers, byzantine, find_floor(byzantine, validators))}", file=sys.stderr)


def _look_up(manifest: Manifest, name: str, value: Any) -> Any:
    """What a manifest says about an option that was given as ``value``."""
    if name == "task":
        same = _find_file(manifest.task.name) == _find_file(value)
        return value if same else manifest.task.name
    if name == "optimizer":
        return {key: manifest.optimizer.get(key) for key in value}
    if name == "clip":
        return manifest.clipping.cap
    if name == "tau":
        held = "auto" if manifest.clipping.tau is None else manifest.clipping.tau
        return value if held == _parse_tau(value) else held
    for section in (manifest.run, manifest.simulation, manifest.task):
        if name in section.__struct_fields__:
            return getattr(section, name)
    return None


def _parse_tau(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _find_file(task: str) -> str:
    """A task's name with the whole path of its file."""
    file, colon, name = task.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if colon else task


def _leave_pictures(result: Result) -> None:
    if result.out is None:
        return
    out = Path(result.out)
    write_safely(out / PLOT, lambda path: plot_run(result.events, path))
    command = format_command(read_manifest(out / MANIFEST))
    write_safely(out / REPORT, lambda path: write_report(path, result.events, command=command, head=result.log_head))


def format_command(manifest: Manifest) -> str:
    """The command that makes a run again."""
    task, run, clip, simulation = manifest.task, manifest.run, manifest.clipping, manifest.simulation
    words: list[tuple[str, Any]] = [("task", task.name)]
    words += [("option", f"{name}={value}") for name, value in task.options.items()]
    words += [(name, getattr(run, name)) for name in ("peers", "byzantine")]
    if run.byzantine and simulation.attack != "none":
        words += [(name, getattr(simulation, name)) for name in ("attack", "start", "every", "delay")]
    words += [("defense", simulation.defense), ("steps", run.steps), ("validators", run.validators)]
    words += [("tau", "auto" if clip.tau is None else clip.tau), ("seed", run.seed), ("batch", task.batch)]
    words += [("optimizer", f"{name}={json.dumps(value).strip(chr(34))}") for name, value in manifest.optimizer.items()]
    words += [("method", run.method)] if run.method != "none" else []
    words += [("clip", clip.cap)]  # as it was given or measured: the number, so that it is the same anywhere
    words += [("wire", run.wire), ("device", run.device)]
    options = (f"--{name} {shlex.quote(str(value))}" for name, value in words if value is not None)
    return " ".join(["phalanx simulate", *options])


def _say_goodbye(result: Result) -> None:
    value = "none" if result.final_metric is None else f"{result.final_metric:.4f}"
    traffic = result.bytes_per_peer_step or 0.0
    attacked = any(isinstance(event, RunStarted) and event.attack is not None for event in result.events)
    fate = f"{result.byzantine_banned} attackers banned, {result.byzantine_active} still in"
    print(
        f"{result.metric_name} {value} after {result.steps} steps; {fate if attacked else 'nobody attacked'}; "
        f"honest peers banned: {result.honest_banned}; "
        f"{traffic / 1e3:.1f} kB sent per peer and step (all-reduce: {result.allreduce_bytes_per_peer_step / 1e3:.1f})",
        file=sys.stderr,
    )
    if result.out is not None:
        print(f"written to {result.out}; the event log ends in {result.log_head}", file=sys.stderr)
    if result.interrupted and result.out is not None:
        print(f"go on with: phalanx simulate --out {shlex.quote(result.out)} --resume", file=sys.stderr)
    elif result.interrupted:
        print("nothing was kept; with --out FOLDER a run that was stopped can be resumed", file=sys.stderr)
