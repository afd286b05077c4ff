"""Train with a swarm in one process: ``phalanx.simulate``, and what ``phalanx simulate`` calls.

import phalanx
from phalanx.training.tasks import load_task

result = phalanx.simulate("digits", peers=16, byzantine=7, attack="sign_flip", start=50)
print(result.final_metric, result.steps_to_ban)
model = load_task("digits").model()
model.load_state_dict(result.model)
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
from torch import Tensor

from phalanx import events
from phalanx.attacks import Attack, get_start, list_parts, load_attack, set_options
from phalanx.attacks.base import Combined
from phalanx.attacks.gradients import Delayed
from phalanx.baselines.aggregators import BASELINES, get_baseline
from phalanx.core.config import Config
from phalanx.core.crypto import Signer
from phalanx.core.errors import LocalError
from phalanx.core.wire import WIRE_TYPES
from phalanx.events import Event
from phalanx.network.ideal import make_signers
from phalanx.show.story import tell
from phalanx.training.checkpoints import FOLDER, Checkpoint, find_latest, make_folder, read_checkpoint, write_safely
from phalanx.training.founding import count_history, require_positive, require_whole
from phalanx.training.gradients import Gradients, describe_platform
from phalanx.training.machine import Workshop
from phalanx.training.manifest import (
    Manifest,
    SimulationSection,
    format_manifest,
    read_manifest,
)
from phalanx.training.optimizers import make_optimizer
from phalanx.training.planning import find_floor, make_plan
from phalanx.training.recorder import EVENTS, TRANSCRIPT, Recorder
from phalanx.training.server import ServerRun
from phalanx.training.swarm import SwarmRun
from phalanx.training.task import Task
from phalanx.training.tasks import load_task

MANIFEST = "manifest.toml"
PHALANX = "phalanx"
DEFENSES = (PHALANX, *BASELINES)

_STAND_INS = tuple(bytes([number]) * 32 for number in range(1, 5))


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    final_metric: float | None
    metric_name: str
    steps: int
    honest_banned: int
    honest_removed: int
    byzantine_banned: int
    byzantine_active: int
    """Byzantine members at the end."""
    steps_to_ban: list[int]
    """For each attacker that was banned: steps from the start of the attack to the ban, both included."""
    bytes_per_peer_step: float | None
    """Sent by a member in a step, on average, framing included."""
    allreduce_bytes_per_peer_step: float
    """The same for a plain butterfly all-reduce."""
    state_digest: str
    floor: int | None = None
    """The members below which the run waits, while nobody is banned; None behind a server."""
    margin: int | None = None
    """Members beyond those, at the start: so many may be away."""
    interrupted: bool = False
    out: str | None = None
    log_head: str | None = None
    """The hash of the last line of the event log: who knows it can tell whether the log was cut short."""
    model: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """For ``load_state_dict``."""
    events: list[Event] = field(default_factory=list, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {name: value for name, value in vars(self).items() if name not in ("model", "events")}


def simulate(
    task: str | Task,
    *,
    peers: int = 16,
    byzantine: int = 0,
    attack: str | Attack = "none",
    start: int | None = None,
    every: int = 1,
    delay: int | None = None,
    defense: str = PHALANX,
    steps: int | None = None,
    validators: int = 1,
    tau: float | str = "auto",
    seed: int = 0,
    batch: int | None = None,
    optimizer: Mapping[str, Any] | None = None,
    method: str | None = None,
    clip: float | None = None,
    wire: str = "float32",
    device: str = "cpu",
    options: Mapping[str, str] | None = None,
    tolerance: tuple[float, float] | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    out: str | Path | None = None,
    on_event: Callable[[Event], None] | None = None,
    stop: Callable[[int], bool] | None = None,
) -> Result:
    """Train ``task`` with ``peers`` peers, ``byzantine`` of which attack, all in this process.

    ``task`` is a :class:`Task`, the name of a built-in one, or FILE.py:NAME; ``options`` are the task's. Attackers
    follow ``attack`` from step ``start`` on (if None, the attack's own), in every ``every``-th step. ``optimizer``
    overrides settings of the task's recipe; ``method`` is one of the paper's, of which btard-clipped-sgd scales
    gradients to length ``clip`` (lambda). With a ``tolerance``, LOWER and UPPER, gradients are checked as if platforms
    differed.

    With ``out``, a folder that must not hold a run yet, everything is written there, and a run that was stopped goes on
    with :func:`resume`. ``on_event`` hears of everything as it happens; ``stop(step)``, asked after each step, ends the
    run with a checkpoint.
    """
    chosen = load_task(task, dict(options or {})) if isinstance(task, str) else task
    if batch is not None:
        chosen = replace(chosen, batch=batch)
    attacking = load_attack(attack) if isinstance(attack, str) else attack
    _require_attackers(attack, byzantine)
    start = get_start(attacking) if start is None else start
    _check(
        *(peers, byzantine, start, every, defense, seed),
        steps=steps,
        validators=validators,
        batch=batch,
        delay=delay,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
    )
    require_positive("clip", clip)
    attacking = set_options(attacking, start=start, every=every)
    if delay is not None:
        attacking = _set_delay(attacking, delay)
    gradients = Gradients(chosen, seed, device)
    plan = make_plan(
        *(gradients, task if isinstance(task, str) else task.name, peers, seed),
        byzantine=byzantine,
        validators=validators,
        steps=steps,
        options=options,
        optimizer=optimizer,
        method=method,
        clip=clip,
        tau=tau,
        wire=wire,
        device=device,
        tolerant=tolerance is not None,
    )
    attacks = byzantine > 0 and attack != "none"
    if attacks and start >= plan.run.steps:
        raise LocalError(f"start: the attack begins in step {start}, and the last step is {plan.run.steps - 1}")
    manifest = Manifest(
        **msgspec.structs.asdict(plan),
        simulation=SimulationSection(
            defense=defense,
            attack=attack if isinstance(attack, str) else type(attack).__name__,
            start=start,
            every=every,
            delay=delay,
            lower=tolerance[0] if tolerance is not None else None,
            upper=tolerance[1] if tolerance is not None else None,
            attackers=sorted(Random(seed).sample(range(peers), byzantine)) if attacks else [],
            evaluate_every=evaluate_every if evaluate_every is not None else max(1, plan.run.steps // 40),
            checkpoint_every=checkpoint_every if checkpoint_every is not None else max(1, plan.run.steps // 4),
        ),
    )
    folder = None
    if out is not None:
        folder = Path(out)
        if any((folder / name).exists() for name in (MANIFEST, EVENTS, TRANSCRIPT, FOLDER)):
            raise LocalError(f"{folder}: there is a run already; resume it, or choose another folder")
    return _run(manifest, chosen, gradients, attacking, folder, None, on_event, stop)


def resume(
    out: str | Path,
    *,
    task: Task | None = None,
    attack: Attack | None = None,
    on_event: Callable[[Event], None] | None = None,
    stop: Callable[[int], bool] | None = None,
) -> Result:
    """Go on with a run from its last checkpoint. It ends in the same state as if it had not stopped.

    A task or an attack that was given as an object has to be given again. A run that is at its end stays as it is.
    """
    folder = Path(out)
    manifest = read_manifest(folder / MANIFEST)
    section, simulation = manifest.task, manifest.simulation
    chosen = load_task(section.name, dict(section.options)) if task is None else task
    chosen = replace(chosen, batch=section.batch)
    if chosen.digest != section.digest:
        raise LocalError(
            f"task {section.name!r}: its data is not what {folder} was started with (content hash "
            f"{chosen.digest[:16]}, expected {section.digest[:16]})"
        )
    if manifest.run.threads != torch.get_num_threads():
        torch.set_num_threads(manifest.run.threads)
    attacking = load_attack(simulation.attack) if attack is None else attack
    attacking = set_options(attacking, start=simulation.start, every=simulation.every)
    if simulation.delay is not None:
        attacking = _set_delay(attacking, simulation.delay)
    latest = find_latest(folder)
    checkpoint = read_checkpoint(latest) if latest is not None else None
    gradients = Gradients(chosen, manifest.run.seed, manifest.run.device)
    return _run(manifest, chosen, gradients, attacking, folder, checkpoint, on_event, stop, resumed=True)


def _run(
    manifest: Manifest,
    task: Task,
    gradients: Gradients,
    attack: Attack,
    out: Path | None,
    checkpoint: Checkpoint | None,
    on_event: Callable[[Event], None] | None,
    stop: Callable[[int], bool] | None,
    resumed: bool = False,
) -> Result:
    run, simulation = manifest.run, manifest.simulation
    optimizer = make_optimizer(manifest.optimizer, run.steps, gradients.sizes)
    workshop = Workshop(gradients, optimizer, count_history(attack))
    signers, verify = make_signers(run.peers, run.seed, ideal=False)
    keys = tuple(signer.key for signer in signers)
    config = manifest.make_config(keys, gradients.size, workshop.start_digest)
    _require_possible(manifest, config)
    if out is not None and not resumed:
        make_folder(out)
        write_safely(out / MANIFEST, lambda path: path.write_text(format_manifest(manifest), encoding="utf-8"))
    recorder = Recorder(
        gradients,
        steps=run.steps,
        evaluate_every=simulation.evaluate_every,
        checkpoint_every=simulation.checkpoint_every,
        out=out,
        resume=resumed and out is not None and (out / EVENTS).exists(),
        on_event=on_event,
        stop=stop,
    )
    attackers = {keys[place]: attack for place in simulation.attackers}
    if checkpoint is not None:
        workshop.parameters = dict(checkpoint.history)
    try:
        if "label_flip" in simulation.attack and task.poison is None:
            raise LocalError(f"attack label_flip: task {task.name!r} does not say what false labels are (Task.poison)")
        started = _announce(manifest, task, config)
        told = recorder.events if resumed else []
        if told:
            _require_same(told[0], started, out)
            recorder.require_run(config.run)
        else:
            recorder.add(started)
        if checkpoint is not None and checkpoint.run != config.run:
            raise LocalError(f"{out}: the checkpoint of step {checkpoint.step} is of another run; remove it")
        over = checkpoint is not None and checkpoint.step >= run.steps
        if resumed and not (over and any(isinstance(event, events.RunFinished) for event in told)):
            recorder.add(events.Resumed(checkpoint.step if checkpoint is not None else 0))
        if checkpoint is None:
            recorder.evaluate(0, gradients.start)
        if checkpoint is not None and checkpoint.step >= run.steps:
            recorder.release(checkpoint)
        elif checkpoint is not None and recorder.wants_to_stop(checkpoint.step):
            recorder.state = checkpoint.states[checkpoint.step]
            recorder.add(events.Interrupted(checkpoint.step))
        else:
            _make_run(manifest, config, signers, verify, attackers, workshop, recorder, checkpoint).run()
    finally:
        recorder.close()
    assert recorder.state is not None, "a run ends with a checkpoint"
    model = gradients.make_state_dict(recorder.state.parameters)
    return replace(summarize(recorder.events, model, out), log_head=recorder.log_head)


def _make_run(
    manifest: Manifest,
    config: Config,
    signers: list[Signer],
    verify: Any,
    attackers: dict[bytes, Attack],
    workshop: Workshop,
    recorder: Recorder,
    checkpoint: Checkpoint | None,
) -> SwarmRun | ServerRun:
    seed, defense = manifest.run.seed, manifest.simulation.defense
    if defense == PHALANX:
        return SwarmRun(config, signers, verify, attackers, workshop, recorder, checkpoint, seed)
    whole = WIRE_TYPES[config.wire].count_bytes(config.size)
    sent = round(_count_allreduce(config)) if defense == "allreduce" else whole
    clip = manifest.clipping
    # A server clips whole gradients: with parts of equal scale they lie sqrt(n) times as far apart.
    tau = clip.tau if clip.tau is not None else clip.start * math.sqrt(manifest.run.peers)
    combine = get_baseline(defense, tau if defense == "server_clip" else None)
    return ServerRun(config, signers, attackers, workshop, recorder, combine, sent, checkpoint, seed)


def _require_same(before: Event, now: events.RunStarted, out: Path | None) -> None:
    """The run that is resumed is the one that was started."""
    for name in now.__struct_fields__:
        if name != "software" and getattr(before, name, None) != getattr(now, name):
            raise LocalError(
                f"{out}: the manifest was changed since the run was started ({name} is another); "
                "put it back as it was, or start a new run"
            )


def summarize(told: list[Event], model: dict[str, Tensor], out: Path | None = None) -> Result:
    """The result of a run, from its events alone."""
    story = tell(told)
    first, steps = story.started, list(story.steps.values())
    banned = {ban.peer for ban in story.bans}
    out_now: set[int] = set()
    for event in told:
        if isinstance(event, events.Removed | events.Left):
            out_now.add(event.peer)
        elif isinstance(event, events.Joined):
            out_now.discard(event.peer)
    attackers = set(first.attackers)
    work = sum(event.members for event in steps)
    size, n = first.size * first.number_bytes, first.peers
    floor = find_floor(first.byzantine, first.validators) if first.defense == PHALANX else None
    waits = (story.compute_delay(ban) for ban in sorted(story.caught, key=lambda ban: ban.peer))
    return Result(
        final_metric=story.final_metric,
        metric_name=first.metric_name,
        steps=len(steps),
        honest_banned=len(story.wronged),
        honest_removed=len({event.peer for event in story.gone if isinstance(event, events.Removed)} - attackers),
        byzantine_banned=len(story.caught),
        byzantine_active=len(attackers - banned - out_now),
        steps_to_ban=[wait for wait in waits if wait is not None],
        bytes_per_peer_step=sum(event.bytes_sent for event in steps) / work if work else None,
        allreduce_bytes_per_peer_step=2 * (n - 1) / n * size,
        state_digest=story.finished.state if story.finished is not None else steps[-1].state,
        floor=floor,
        margin=n - floor if floor is not None else None,
        interrupted=story.finished is None,
        out=str(out) if out is not None else None,
        model=model,
        events=told,
    )


# ---- Preparing a run


def _require_attackers(attack: str | Attack, byzantine: int) -> None:
    """Where there is an attack, somebody attacks."""
    if attack != "none" and byzantine == 0:
        name = repr(attack) if isinstance(attack, str) else type(attack).__name__
        raise LocalError(f"attack {name}: byzantine is 0, so nobody attacks; say how many do, or leave the attack out")


def _check(peers: int, byzantine: int, start: int, every: int, defense: str, seed: int, **counts: int | None) -> None:
    """Numbers that no run can have, before anything is computed or written."""
    if defense not in DEFENSES:
        raise LocalError(f"defense {defense!r} is unknown; expected one of {', '.join(DEFENSES)}")
    lowest = {"peers": 1, "byzantine": 0, "start": 0, "every": 1}
    given = {"peers": peers, "byzantine": byzantine, "start": start, "every": every, **counts}
    for name, value in given.items():
        require_whole(name, value, lowest.get(name, 1))
    if type(seed) is not int:
        raise LocalError(f"seed: expected a whole number, got {seed!r}")
    if byzantine > peers:
        raise LocalError(f"byzantine: expected 0 to {peers}, the number of peers, got {byzantine}")


def _require_possible(manifest: Manifest, config: Config) -> None:
    """What every defense needs of its numbers."""
    peers, defense = manifest.run.peers, manifest.simulation.defense
    if defense == PHALANX:
        config.check()
        return
    msgspec.structs.replace(config, byzantine=0, validators=1, founders=_STAND_INS).check()
    if defense != "allreduce":
        get_baseline(defense)(torch.zeros(peers, 2), manifest.run.byzantine)


def _set_delay(attack: Attack, delay: int) -> Attack:
    if delay < 1:
        raise LocalError(f"delay: expected at least 1 step, got {delay}")
    if not any(isinstance(part, Delayed) for part in list_parts(attack)):
        raise LocalError("delay: only the attack 'delayed' lags behind; leave --delay out")
    return _replace_delay(attack, delay)


def _replace_delay(attack: Attack, delay: int) -> Attack:
    if isinstance(attack, Combined):
        return replace(attack, attacks=tuple(_replace_delay(part, delay) for part in attack.attacks))
    return replace(attack, delay=delay) if isinstance(attack, Delayed) else attack


def _count_allreduce(config: Config) -> float:
    n = len(config.founders)
    return 2 * (n - 1) / n * config.size * WIRE_TYPES[config.wire].number_bytes


def _announce(manifest: Manifest, task: Task, config: Config) -> events.RunStarted:
    from phalanx import __version__

    run, simulation = manifest.run, manifest.simulation
    attacks = run.byzantine > 0 and simulation.attack != "none"
    return events.RunStarted(
        run=config.run.hex(),
        task=manifest.task.name,
        peers=run.peers,
        byzantine=run.byzantine,
        attack=simulation.attack if attacks else None,
        start=simulation.start if attacks else None,
        every=simulation.every if attacks else None,
        defense=simulation.defense,
        steps=run.steps,
        validators=run.validators,
        seed=run.seed,
        size=config.size,
        metric_name=task.metric_name,
        higher_is_better=task.higher_is_better,
        keys=[key.hex() for key in config.founders],
        attackers=simulation.attackers,
        software={
            "phalanx": __version__,
            "python": platform.python_version(),
            "platform": describe_platform(run.device),
        },
        number_bytes=WIRE_TYPES[run.wire].number_bytes,
    )
