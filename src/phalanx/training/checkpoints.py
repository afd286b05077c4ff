"""Checkpoints: a folder for each, written whole or not at all.

``model.safetensors`` is what ``model.load_state_dict`` takes. ``state.safetensors`` holds parameters and optimizer
state before this step and the last few, ``certificate.bin`` the members' signatures under the digest of the state, and
``memory.bin`` what the peers need to go on as if they had not stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.core.certificates import find_certificate
from phalanx.core.config import Config
from phalanx.core.crypto import compute_digest
from phalanx.core.envelope import Examiner
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.membership import decode_view, make_genesis
from phalanx.core.memory import Epoch, Link, Memory, Notes
from phalanx.core.messages import Confirm, Phase
from phalanx.training.optimizers import State, compute_state_digest

FOLDER = "checkpoints"
_AT_ONCE = 1 << 26
_FORMATS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


@dataclass(kw_only=True)
class Checkpoint:
    """A run between two steps."""

    run: bytes
    """Its name: a checkpoint is of no use in another."""
    step: int
    states: dict[int, State]
    """Before this step and the last few."""
    memory: Memory | None = None
    notes: dict[bytes, Notes] = field(default_factory=dict)
    history: dict[int, Tensor] = field(default_factory=dict)
    """What attackers remember of past parameters."""
    randomness: bytes = b""
    """Of a run behind a server."""


class Certificate(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why the digest of a state is the right one: how the roster came about, and what its members confirmed."""

    links: tuple[Link, ...]
    epoch: Epoch


class _Papers(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    memory: Memory | None
    notes: dict[bytes, Notes]
    randomness: bytes


# ---- Writing


def write_checkpoint(run: Path, checkpoint: Checkpoint, model: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint into the folder of a run; :class:`WriteFailed` if the disk does not take it."""
    folder = run / FOLDER / f"{checkpoint.step:06d}"
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_tensors({name: value.contiguous() for name, value in model.items()}, temporary / "model.safetensors")
        papers = msgspec.msgpack.encode(_Papers(checkpoint.memory, checkpoint.notes, checkpoint.randomness))
        (temporary / "memory.bin").write_bytes(papers)
        _save_states(temporary / "state.safetensors", checkpoint, papers)
        certificate = make_certificate(checkpoint.memory) if checkpoint.memory is not None else None
        if certificate is not None:
            (temporary / "certificate.bin").write_bytes(msgspec.msgpack.encode(certificate))
        if checkpoint.history:
            past = {str(step): value.cpu() for step, value in checkpoint.history.items()}
            save_tensors(past, temporary / "attackers.safetensors")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            shutil.rmtree(temporary, ignore_errors=True)
        raise WriteFailed(f"{folder}: the checkpoint could not be written: {_explain(error)}") from error
    return folder


def make_folder(folder: Path) -> None:
    """A folder for a run, if it is not there yet."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"{folder}: cannot be a run's folder: {_explain(error)}; choose another with --out") from None


def write_safely(path: Path, write: Callable[[Path], Any]) -> None:
    """Have something written beside ``path`` and put in its place when it is whole."""
    temporary = path.with_name(f".{path.name}")
    try:
        write(temporary)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise WriteFailed(f"{path}: could not be written: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _save_states(path: Path, checkpoint: Checkpoint, papers: bytes) -> None:
    tensors: dict[str, Tensor] = {}
    for step, state in checkpoint.states.items():
        tensors[f"{step}.parameters"] = state.parameters.cpu()
        tensors |= {f"{step}.slot{place}": slot.cpu() for place, slot in enumerate(state.slots)}
    digests = {f"state {step}": compute_state_digest(state).hex() for step, state in checkpoint.states.items()}
    metadata = {"run": checkpoint.run.hex(), "step": str(checkpoint.step), "memory": _name_papers(papers)}
    save_tensors(tensors, path, metadata | digests)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """A file in the safetensors format. Unlike the library's function, this one copies nothing."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    order, end = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0
    for name in order:
        t = tensors[name]
        if t.dtype not in _FORMATS:
            raise SafetensorError(f"{name} is {t.dtype}, which the format does not know")
        begin, end = end, end + t.numel() * t.itemsize
        header[name] = {"dtype": _FORMATS[t.dtype], "shape": list(t.shape), "data_offsets": [begin, end]}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        write_all(file, len(text).to_bytes(8, "little") + text)
        for name in order:
            values = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            write_all(file, values.numpy().data)


def write_all(file: FileIO, data: bytes | bytearray | memoryview) -> None:
    """Every byte, in calls of a size that every system takes."""
    with memoryview(data).cast("B") as view:
        at = 0
        while at < len(view):
            at += file.write(view[at : at + _AT_ONCE])


def _name_papers(papers: bytes) -> str:
    return compute_digest("memory of a checkpoint", papers).hex()


# ---- Reading


def find_latest(run: Path) -> Path | None:
    """The last checkpoint of a run; it is whole unless it was altered."""
    folder = run / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        raise LocalError(f"{folder}: expected a folder, in which a run keeps its checkpoints; remove it")
    found = sorted((path for path in folder.glob("[0-9]*") if path.name.isdecimal()), key=lambda path: int(path.name))
    return found[-1] if found else None


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint, or :class:`LocalError` with what is wrong with it."""
    if not folder.is_dir():
        raise LocalError(f"{folder}: expected the folder of a checkpoint; remove it to use the one before")
    try:
        data = (folder / "memory.bin").read_bytes()
        papers = msgspec.msgpack.decode(data, type=_Papers)
        tensors, metadata = _load(folder / "state.safetensors")
        step, _ = int(metadata["step"]), bytes.fromhex(metadata["run"])
        steps = sorted({int(name.partition(".")[0]) for name in tensors})
        states = {at: _assemble(tensors, at) for at in steps}
        intact = step in states and _name_papers(data) == metadata["memory"]
        intact &= all(compute_state_digest(state).hex() == metadata[f"state {at}"] for at, state in states.items())
        history = _load(folder / "attackers.safetensors")[0] if (folder / "attackers.safetensors").exists() else {}
    except (OSError, SafetensorError, msgspec.DecodeError, KeyError, ValueError, OverflowError) as error:
        explained = _explain(error)
        raise LocalError(f"{folder}: not a whole checkpoint ({explained}); remove it to use the one before") from None
    if not intact:
        raise LocalError(f"{folder}: not what was written there (a hash differs); remove it to use the one before")
    return Checkpoint(
        run=bytes.fromhex(metadata["run"]),
        step=step,
        states=states,
        memory=papers.memory,
        notes=papers.notes,
        history={int(at): value for at, value in history.items()},
        randomness=papers.randomness,
    )


def _load(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _assemble(tensors: Mapping[str, Tensor], step: int) -> State:
    slots: list[Tensor] = []
    while f"{step}.slot{len(slots)}" in tensors:
        slots.append(tensors[f"{step}.slot{len(slots)}"])
    return State(tensors[f"{step}.parameters"].to(torch.float32), tuple(slots))


# ---- Certificates


def make_certificate(memory: Memory) -> Certificate | None:
    """What the members signed about the state that the memory's view starts from; None before the first step."""
    for epoch in reversed(memory.epochs):
        confirms = tuple(said for said in epoch.said if said.phase is Phase.CONFIRM)
        if confirms:
            return Certificate(memory.links, Epoch(epoch.view, confirms, None, {}, ()))
    return None


def read_certificate(folder: Path) -> Certificate:
    try:
        return msgspec.msgpack.decode((folder / "certificate.bin").read_bytes(), type=Certificate)
    except (OSError, msgspec.DecodeError) as error:
        raise LocalError(f"{folder}: no readable certificate ({_explain(error)})") from None


def check_certificate(config: Config, examiner: Examiner, certificate: Certificate) -> bytes | None:
    """The digest of the state that a strict majority of the members confirmed, or None if that is not shown.

    The roster is followed from the founders, each change certified by the roster before it.
    """
    last = decode_view(certificate.epoch.view)
    view = make_genesis(config)
    for link in certificate.links:
        later = decode_view(link.view)
        if later is None or find_certificate(config, examiner, view, later, link.messages) is None:
            return None
        if last is None or later.height > last.height:  # the roster changed after the state was confirmed
            break
        view = later
    if last is None or last.roster != view.roster:
        return None
    votes: dict[bytes, set[bytes]] = {}
    for message in (message for said in certificate.epoch.said for message in said.messages):
        letter = examiner.examine(message)
        place = (message.run, message.step, message.attempt)
        if letter is None or place != (config.run, last.step, last.attempt) or message.sender not in last.roster:
            continue
        if isinstance(letter.body, Confirm):
            votes.setdefault(letter.body.state, set()).add(message.sender)
    return next((state for state, voters in votes.items() if 2 * len(voters) > len(last.roster)), None)
