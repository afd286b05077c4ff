"""A new run from a certified state of an old one: the way on when members are gone for good.

The old run's folder of any peer is enough. What comes out depends on the old run and the choices made, not on the
machine: two members that continue from the same step with the same words write the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from safetensors import SafetensorError, safe_open

from phalanx import events
from phalanx.core.crypto import format_peer_id, parse_peer_id
from phalanx.core.envelope import Examiner
from phalanx.core.errors import LocalError
from phalanx.core.membership import View, decode_view
from phalanx.training.checkpoints import (
    FOLDER,
    check_certificate,
    read_certificate,
    read_checkpoint,
    save_tensors,
    write_safely,
)
from phalanx.training.founding import compute_conformance, find_optimizer, require_positive, require_whole
from phalanx.training.gradients import Gradients, describe_platform
from phalanx.training.manifest import ClippingSection, NetworkManifest, OriginSection
from phalanx.training.optimizers import State, compute_state_digest
from phalanx.training.planning import make_clipping
from phalanx.training.recorder import EVENTS
from phalanx.training.solo import Solo
from phalanx.training.task import Task

_RUN = ("byzantine", "validators", "threads", "device")
_NETWORK = ("delta", "gradient_time", "transfer_time", "quorum", "probation", "newcomer_probation", "admissions")
CHANGEABLE = (*_RUN, *_NETWORK, "tolerance")
"""What a run that goes on may have otherwise than the old one. All else is the old one's."""


@dataclass(frozen=True)
class Certified:
    """A state of an old run, and what its members signed it in."""

    manifest: NetworkManifest
    step: int
    """How many steps of the old run made it."""
    state: State
    digest: bytes
    view: View
    banned: frozenset[bytes]
    """In the old run, as far as the folder's owner knows: also after this step."""

    @property
    def members(self) -> tuple[bytes, ...]:
        """In good standing: in the roster or suspended, and not banned since."""
        known = (*self.view.roster, *(member.key for member in self.view.suspended))
        return tuple(key for key in known if key not in self.banned)


# ---- The old run


def find_certified(
    manifest: NetworkManifest, folder: Path, at: int | None, say: Callable[[str], None] = lambda text: None
) -> Certified:
    """The last checkpoint in the folder whose state the members certified, or the one of step ``at``."""
    steps = {int(path.name): path for path in (folder / FOLDER).glob("[0-9]*") if path.name.isdecimal()}
    if not steps:
        raise LocalError(f"{folder}: there is no checkpoint in it; expected the folder of a peer that has trained")
    if at is not None:
        if at not in steps:
            known = ", ".join(map(str, sorted(steps)))
            raise LocalError(f"--at {at}: {folder} has no checkpoint of this step; it has {known}")
        return _read_certified(manifest, folder, steps[at])
    passed: list[str] = []
    for _, path in sorted(steps.items(), reverse=True):
        try:
            found = _read_certified(manifest, folder, path)
        except LocalError as error:
            passed.append(str(error))
            continue
        for text in passed:
            say(f"passed over: {text}")
        return found
    raise LocalError(
        f"{folder}: none of its checkpoints is certified by the members (the last: {passed[0]}); "
        "take another peer's folder"
    )


def _read_certified(manifest: NetworkManifest, folder: Path, path: Path) -> Certified:
    checkpoint = read_checkpoint(path)
    state = checkpoint.states[checkpoint.step]
    digest = compute_state_digest(state)
    first = b""
    with suppress(ValueError):  # then it is another run's
        first = bytes.fromhex(manifest.network.state)
    config = manifest.make_config(manifest.founders, len(state.parameters), first)
    view = decode_view(checkpoint.memory.view) if checkpoint.memory is not None else None
    if checkpoint.run != config.run or view is None:
        raise LocalError(f"{path}: a checkpoint of another run than the manifest beside it")
    if check_certificate(config, Examiner(), read_certificate(path)) != digest or view.state != digest:
        raise LocalError(f"{path}: the members did not certify this state")
    return Certified(manifest, checkpoint.step, state, digest, view, _find_banned(folder, view))


def _find_banned(folder: Path, view: View) -> frozenset[bytes]:
    log = folder / EVENTS
    told = events.read_events(log) if log.exists() else []
    return frozenset(view.banned) | {bytes.fromhex(event.key) for event in told if isinstance(event, events.Banned)}


# ---- The new run


def choose_founders(old: Certified, founders: Sequence[str]) -> list[str]:
    """The founders of the new run, of whom none was banned in the old one; if none are given, all its members."""
    if not founders:
        return [format_peer_id(key) for key in old.members]
    for text in founders:
        if parse_peer_id(text) in old.banned:
            raise LocalError(f"founder {text}: banned in the old run; leave it out")
    return list(founders)


def make_continued_manifest(
    old: Certified, task: Task, founders: Sequence[str], changes: Mapping[str, Any]
) -> NetworkManifest:
    """The manifest of a run that goes on from a certified state. ``changes`` are some of :data:`CHANGEABLE`."""
    before, run, net = old.manifest, old.manifest.run, old.manifest.network
    left = run.steps - old.step
    if left < 1:
        raise LocalError(
            f"the old run is at its end, after step {old.step} of {run.steps}: nothing is left to do; "
            "to go on from an earlier checkpoint, name its step with --at"
        )
    for name in ("validators", "threads", "probation", "admissions"):
        require_whole(name, changes.get(name))
    for name in ("byzantine", "newcomer_probation"):
        require_whole(name, changes.get(name), 0)
    for name in ("delta", "gradient_time", "transfer_time"):
        require_positive(name, changes.get(name))
    if changes.get("quorum", net.quorum) not in ("majority", "partition-safe"):
        raise LocalError(f"quorum: {changes['quorum']!r} is not one of majority, partition-safe")
    chosen = choose_founders(old, founders)
    run = structs.replace(run, peers=len(chosen), steps=left, byzantine=_count_doubts(old, chosen))
    run = structs.replace(run, **_choose(changes, *_RUN))
    net = structs.replace(net, founders=chosen, state=old.digest.hex(), **_choose(changes, *_NETWORK))
    if "tolerance" in changes:
        net = structs.replace(net, lower=changes["tolerance"][0], upper=changes["tolerance"][1])
    torch.set_num_threads(run.threads)
    if "threads" in changes or "device" in changes:
        net = structs.replace(net, platform=describe_platform(run.device))
    if task.digest != before.task.digest:
        raise LocalError(
            f"task {before.task.name!r}: the data here is not the old run's (content hash {task.digest[:16]}, expected "
            f"{before.task.digest[:16]}); get the same files"
        )
    gradients = Gradients(replace(task, batch=before.task.batch), run.seed, run.device)
    if gradients.size != len(old.state.parameters):
        raise LocalError(
            f"task {before.task.name!r}: {gradients.size} parameters, and the old run's state has "
            f"{len(old.state.parameters)}: it is of another task"
        )
    manifest = structs.replace(
        before,
        run=run,
        clipping=_continue_clipping(old, run.peers, run.byzantine, run.validators),
        network=net,
        origin=OriginSection(run=before.name, steps=before.steps_before + old.step),
    )
    solo = Solo(gradients, find_optimizer(manifest, gradients), start=old.state)
    manifest = structs.replace(manifest, network=structs.replace(net, conformance=compute_conformance(solo)))
    manifest.make_config(manifest.founders, gradients.size, old.digest).check()
    return manifest


def _choose(changes: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: changes[name] for name in names if name in changes}


def _count_doubts(old: Certified, founders: Sequence[str]) -> int:
    """Founders that may be Byzantine, as the old run counts: each ban is one less, each stranger one more, up to b."""
    members = {*old.view.roster, *(member.key for member in old.view.suspended)}
    strangers = {parse_peer_id(text) for text in founders} - members
    doubts = old.view.doubts - len(old.banned & members) + len(strangers)
    return min(old.manifest.run.byzantine, max(0, doubts))


def _continue_clipping(old: Certified, peers: int, byzantine: int, validators: int) -> ClippingSection:
    """Automatic tau goes on from where it stood, for parts of another length if there are more or fewer members."""
    clip = old.manifest.clipping
    if clip.tau is not None:
        return clip
    scale = old.view.tau / clip.multiple * math.sqrt(len(old.view.roster) / peers)
    return make_clipping("auto", peers, byzantine, validators, scale, clip.cap)


# ---- The state's file


def find_state_file(path: Path) -> Path:
    """Where the state lies that a manifest goes on from: beside it."""
    return path.with_name(f"{path.stem}.state.safetensors")


def write_state(path: Path, state: State, digest: bytes) -> None:
    """Write the file, unless it is there already; another one is not overwritten."""
    if path.exists():
        with suppress(LocalError):
            if compute_state_digest(_load(path)) == digest:
                return
        raise LocalError(f"{path} exists and is not overwritten: it is another state")
    tensors = {"parameters": state.parameters, **{f"slot{place}": slot for place, slot in enumerate(state.slots)}}
    write_safely(path, lambda place: save_tensors(tensors, place, {"state": digest.hex()}))


def read_state(path: Path, digest: str) -> State:
    """The state in a file, or :class:`LocalError` if it is not the one with this digest."""
    if not path.is_file():
        raise LocalError(
            f"{path} does not exist: this run goes on from a state, which belongs beside its manifest under this name; "
            "get the file from another founder"
        )
    state = _load(path)
    if compute_state_digest(state).hex() != digest:
        raise LocalError(f"{path}: not the state that the run goes on from (its digest is another); get the file anew")
    return state


def _load(path: Path) -> State:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise LocalError(f"{path}: not a file of a state ({error}); get it anew") from None
    slots = [tensors.get(f"slot{place}") for place in range(len(tensors) - 1)]
    found = [tensors.get("parameters"), *slots]
    if any(t is None or t.dtype != torch.float32 or t.ndim != 1 for t in found):
        raise LocalError(f"{path}: not a file of a state (expected vectors of float32 named parameters, slot0, ...)")
    parameters, *others = [t for t in found if t is not None]
    return State(parameters, tuple(others))
