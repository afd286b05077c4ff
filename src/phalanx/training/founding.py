"""How a run between machines begins: its manifest, and what every peer checks before it takes part."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from msgspec import structs

from phalanx.attacks import Attack, list_parts
from phalanx.attacks.gradients import Delayed
from phalanx.core.config import Config
from phalanx.core.crypto import compute_digest, parse_peer_id
from phalanx.core.errors import LocalError
from phalanx.core.randomness import derive_seed, gaussian_vector
from phalanx.core.wire import WIRE_TYPES
from phalanx.training.files import read_file
from phalanx.training.gradients import Gradients, describe_platform
from phalanx.training.manifest import (
    LOCAL_OPTIONS,
    NetworkManifest,
    NetworkSection,
    format_manifest,
    parse_network_manifest,
)
from phalanx.training.optimizers import Continued, Optimizer, State, compute_state_digest, make_optimizer
from phalanx.training.planning import make_plan
from phalanx.training.solo import Solo
from phalanx.training.task import Task
from phalanx.training.tasks import load_task

DELTA = 2.0
BANDWIDTH = 100.0
"""Megabits a second that every peer should have."""
_SLACK = 5.0  # a gradient may take so many times longer than where it was measured
_TRANSFERS = 3.0  # a transfer so many times longer than the bandwidth allows
_TIMED = 3  # gradients that are timed
_QUORUMS = ("majority", "partition-safe")
_MOST = 1 << 31
MAX_CODE = 1 << 20
"""Bytes of a task's file."""


@dataclass(frozen=True)
class Prepared:
    """What a peer needs to take part, all of it checked."""

    config: Config
    gradients: Gradients
    solo: Solo
    evaluates: bool
    """Whether there is time for the metric while the run goes on."""


def make_network_manifest(
    task: str,
    founders: Sequence[str],
    *,
    byzantine: int = 0,
    validators: int = 1,
    steps: int | None = None,
    seed: int = 0,
    batch: int | None = None,
    options: Mapping[str, str] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    method: str | None = None,
    clip: float | None = None,
    tau: float | str = "auto",
    wire: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    delta: float = DELTA,
    gradient_time: float | None = None,
    transfer_time: float | None = None,
    bandwidth: float = BANDWIDTH,
    quorum: str = "majority",
    tolerance: tuple[float, float] | None = None,
    probation: int = 12,
    newcomer_probation: int = 0,
    admissions: int = 1,
) -> NetworkManifest:
    """A manifest for ``founders`` (peer ids), with scales and times as measured on this machine."""
    for text in founders:
        parse_peer_id(text)
    for name, value in {"steps": steps, "batch": batch, "threads": threads, "admissions": admissions}.items():
        require_whole(name, value)
    for name, value in {"byzantine": byzantine, "newcomer_probation": newcomer_probation}.items():
        require_whole(name, value, 0)
    times = {"delta": delta, "gradient_time": gradient_time, "transfer_time": transfer_time}
    for name, number in {**times, "bandwidth": bandwidth, "clip": clip}.items():
        require_positive(name, number)
    if quorum not in _QUORUMS:
        raise LocalError(f"quorum: {quorum!r} is not one of {', '.join(_QUORUMS)}")
    if wire not in WIRE_TYPES:
        raise LocalError(f"wire: {wire!r} is not one of {', '.join(WIRE_TYPES)}")
    peers = len(founders)
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = load_task(task, dict(options or {}))
    chosen = replace(chosen, batch=batch) if batch is not None else chosen
    gradients = Gradients(chosen, seed, device)
    plan = make_plan(
        *(gradients, task, peers, seed),
        byzantine=byzantine,
        validators=validators,
        steps=steps,
        options={name: value for name, value in (options or {}).items() if name not in LOCAL_OPTIONS},
        optimizer=optimizer,
        method=method,
        clip=clip,
        tau=tau,
        wire=wire,
        device=device,
        code=compute_code_digest(task),
        tolerant=tolerance is not None,
    )
    solo = Solo(gradients, make_optimizer(plan.optimizer, plan.run.steps, gradients.sizes))
    if gradient_time is None:
        gradient_time = round(max(1.0, _SLACK * time_gradient(solo)), 1)
    if transfer_time is None:
        bits = 8 * 2 * WIRE_TYPES[wire].count_bytes(gradients.size)
        transfer_time = round(max(1.0, _TRANSFERS * bits / (bandwidth * 1e6)), 1)
    manifest = NetworkManifest(
        **structs.asdict(plan),
        network=NetworkSection(
            founders=list(founders),
            delta=delta,
            gradient_time=gradient_time,
            transfer_time=transfer_time,
            quorum=quorum,  # type: ignore[arg-type]
            lower=tolerance[0] if tolerance is not None else None,
            upper=tolerance[1] if tolerance is not None else None,
            platform=describe_platform(device),
            probation=probation,
            newcomer_probation=newcomer_probation,
            admissions=admissions,
            state=solo.start_digest.hex(),
            conformance=compute_conformance(solo),
        ),
    )
    manifest.make_config(manifest.founders, gradients.size, solo.start_digest).check()
    return parse_network_manifest(format_manifest(manifest), "the manifest")  # as others will read it


def prepare(
    manifest: NetworkManifest,
    task: Task,
    say: Callable[[str], None],
    threads: int | None = None,
    history: int = 0,
    start: State | None = None,
) -> Prepared:
    """Check that this machine holds the same data and computes the same; :class:`LocalError` says what differs.

    ``threads`` may be another number than the manifest's where the run tolerates other platforms; ``history`` is of how
    many past steps this peer keeps the parameters (:func:`count_history`). ``start`` is the state that a run goes on
    from, if it does and this peer has it: one that joins gets the present one from the members.
    """
    section, run, net = manifest.task, manifest.run, manifest.network
    task = replace(task, batch=section.batch)
    if task.digest != section.digest:
        raise LocalError(
            f"task {section.name!r}: the data here is not the run's (content hash {task.digest[:16]}, expected "
            f"{section.digest[:16]}); get the same files"
        )
    if threads is not None and threads != run.threads and net.lower is None:
        raise LocalError(
            f"threads: {threads}, and the run, which compares gradients bit for bit, has {run.threads}; "
            "leave --threads out"
        )
    threads = threads if threads is not None else run.threads
    require_whole("threads", threads)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    here = describe_platform(run.device)
    if net.lower is None and here != net.platform:
        raise LocalError(
            f"this machine computes gradients otherwise than the run's: it is {here}, and the run, which compares them "
            f"bit for bit, has {net.platform}; take part from such a machine, or found a run with a tolerance"
        )
    gradients = Gradients(task, run.seed, run.device)
    gradients.require_repeatable()
    if not re.fullmatch("[0-9a-f]{64}", net.state):
        raise LocalError(f"state: expected a digest, 64 hexadecimal digits, got {net.state[:80]!r}")
    optimizer = find_optimizer(manifest, gradients)
    if start is not None and (len(start.parameters), len(start.slots)) != (gradients.size, len(optimizer.slot_names)):
        raise LocalError(
            f"the state that the run goes on from is not one of task {section.name!r} with {manifest.optimizer['name']}"
        )
    solo = Solo(gradients, optimizer, history, start)
    if manifest.origin is None and solo.start_digest.hex() != net.state:
        raise LocalError(
            "the initial parameters differ from the run's: the software here draws others; install the versions that "
            "the founders have"
        )
    if compute_conformance(solo) != net.conformance:
        raise LocalError(
            "one update of the optimizer gives other bits here than for the founders: this platform cannot take part"
        )
    seconds = time_gradient(solo)
    if seconds > net.gradient_time:
        raise LocalError(
            f"a gradient takes {seconds:.1f} s here, and the run allows {net.gradient_time:g} s: this machine would be "
            "removed as too slow; take a faster one, or more of its cores"
        )
    if seconds > 0.5 * net.gradient_time:
        say(f"a gradient takes {seconds:.1f} s here, more than half of the {net.gradient_time:g} s that the run allows")
    evaluation = time_evaluation(solo)
    evaluates = seconds + evaluation <= net.gradient_time
    if not evaluates:
        say(
            f"the metric takes {evaluation:.1f} s here, and the run allows {net.gradient_time:g} s for a gradient, "
            "which would have to wait for it: it is computed at the end only"
        )
    config = manifest.make_config(manifest.founders, gradients.size, bytes.fromhex(net.state)).check()
    return Prepared(config, gradients, solo, evaluates)


def find_optimizer(manifest: NetworkManifest, gradients: Gradients) -> Optimizer:
    """The run's optimizer; in a run that goes on from another one, with the steps before it behind it."""
    before = manifest.steps_before
    require_whole("origin: steps", before, 0)
    whole = make_optimizer(manifest.optimizer, before + manifest.run.steps, gradients.sizes)
    return Continued(rate=whole.rate, inner=whole, before=before) if manifest.origin is not None else whole


def require_whole(name: str, value: int | None, low: int = 1) -> None:
    """If a number was given, it is whole and not below ``low``."""
    if value is not None and (type(value) is not int or not low <= value < _MOST):
        raise LocalError(f"{name}: expected a whole number from {low}, got {value!r}")


def require_positive(name: str, value: float | None) -> None:
    """If a number was given, it is above 0, and there is an end to it."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise LocalError(f"{name}: expected a positive number, got {value!r}")


def count_history(attack: Attack | None) -> int:
    """Of how many past steps an attacker wants the parameters."""
    parts = list_parts(attack) if attack is not None else ()
    return max((part.delay for part in parts if isinstance(part, Delayed)), default=0)


def time_gradient(solo: Solo) -> float:
    """Seconds for a gradient on this machine; the first one, which warms up, does not count."""
    taken = []
    for number in range(1 + _TIMED):
        begun = time.perf_counter()
        solo.compute_gradient(0, derive_seed(bytes(32), "timing", number.to_bytes(8, "little")))
        taken.append(time.perf_counter() - begun)
    return median(taken[1:])


def time_evaluation(solo: Solo) -> float:
    """Seconds for the metric on this machine."""
    begun = time.perf_counter()
    solo.evaluate(solo.start.parameters)
    return time.perf_counter() - begun


def compute_conformance(solo: Solo) -> str:
    """The digest of the state after one update with a known vector: equal wherever the arithmetic is."""
    vector = gaussian_vector(derive_seed(bytes(32), "conformance"), len(solo.start.parameters))
    vector = vector.to(solo.start.parameters.device)
    return compute_state_digest(solo.optimizer.update(solo.optimizer.init(vector), vector, 0)).hex()


def compute_code_digest(task: str) -> str | None:
    """The hash of a task's file; None for a built-in task."""
    file, colon, _ = task.rpartition(":")
    if not colon:
        return None
    try:
        return compute_digest("code of a task", read_file(Path(file), MAX_CODE, "code:")).hex()
    except LocalError as error:
        raise LocalError(f"task {task!r}: {error}") from None


_COMMENTS = {
    "[task]": "What is trained. A peer whose data or code differs is told so before it starts.",
    "[run]": "The swarm: at most `byzantine` members may do anything; `validators` check others in each step.\n"
    "# The run goes on while 2 byzantine + 1 + validators of its members can be reached, and waits below.",
    "[clipping]": "CenteredClip. Without `tau` it follows the agreed scale of gradients between floor and ceiling.",
    "[network]": "Founders by their peer ids (phalanx keygen prints them). Times are in seconds.",
    "[origin]": "This run goes on from a certified state of another one, after so many steps of training.\n"
    "# The state is in the file beside this one; `start` checks it against `state` above.",
    "delta": "within this a message between honest peers arrives: generous, since removals rest on it",
    "gradient_time": "allowed for one gradient",
    "transfer_time": "allowed for moving the parts of a gradient, and for the arithmetic on them",
    "quorum": 'or "partition-safe": halts on both sides of a split network, needs byzantine < peers / 3',
    "platform": "recomputation is bit for bit on this platform; with `lower` and `upper`, relative distances, on any",
    "probation": "the least steps that a newcomer computes without weight",
    "newcomer_probation": "the number itself; 0: as the odds of catching a cheat ask for",
    "admissions": "newcomers on probation at the same time",
    "state": "digest of the parameters and the optimizer state before the first step",
    "conformance": "digest after one known update: shows that a platform's arithmetic is the run's",
}


def format_commented(manifest: NetworkManifest) -> str:
    """The manifest with a word on what its numbers mean."""
    lines = []
    for line in format_manifest(manifest).splitlines():
        name = line.partition(" =")[0]
        if line in _COMMENTS:
            lines += [f"# {_COMMENTS[line]}"]
        elif name in _COMMENTS:
            lines += [f"# {name}: {_COMMENTS[name]}"]
        lines.append(line)
    return "\n".join(lines) + "\n"
