"""What ``phalanx init``, ``start`` and ``join`` do: a run between machines, from the side of one of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from phalanx.attacks import Attack
from phalanx.core.crypto import Identity, compute_digest, parse_peer_id
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.messages import MAX_MANIFEST
from phalanx.events import Event
from phalanx.network.addresses import parse_address
from phalanx.show.story import clean
from phalanx.training.checkpoints import find_latest, make_folder, write_safely
from phalanx.training.continuing import (
    find_certified,
    find_state_file,
    make_continued_manifest,
    read_state,
    write_state,
)
from phalanx.training.files import read_file
from phalanx.training.founding import (
    MAX_CODE,
    count_history,
    format_commented,
    make_network_manifest,
    prepare,
    require_whole,
)
from phalanx.training.manifest import (
    LOCAL_OPTIONS,
    MAX_THREADS,
    NetworkManifest,
    format_manifest,
    parse_network_manifest,
    read_network_manifest,
)
from phalanx.training.member import Member, Outcome, Settings
from phalanx.training.optimizers import State
from phalanx.training.tasks import TASKS, load_task

if TYPE_CHECKING:
    from phalanx.network.transport import Transport

MANIFEST = "manifest.toml"
CODE = "task.py"
_ASK_SECONDS = 20.0
_ASK_PAUSE = 1.0
_ASK_TIMES = 4
_LONGEST_LINE = 2000


@dataclass(frozen=True, kw_only=True)
class Door:
    """How this machine is reached, and whom it knows."""

    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Sequence[str] = ()
    peers: Sequence[str] = ()


def run_init(path: Path, task: str, founders: Sequence[str], settings: Mapping[str, Any]) -> NetworkManifest:
    """Write a commented manifest; an existing file is never overwritten."""
    _require_free(path)
    _require_threads(settings.get("threads"))
    if not founders:
        raise LocalError("founders: expected their peer ids; phalanx keygen prints one for each key that it makes")
    manifest = make_network_manifest(task, founders, **settings)
    try:
        write_manifest(path, manifest)
    except WriteFailed as error:
        raise LocalError(str(error)) from None
    return manifest


def run_continue(
    path: Path,
    folder: Path,
    founders: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    *,
    at: int | None = None,
    task: str | None = None,
    options: Mapping[str, str] | None = None,
) -> tuple[NetworkManifest, Path]:
    """Write the manifest of a run that goes on from a peer's folder of an old one, and the file of its state.

    The state is that of the last certified checkpoint, or of the one of step ``at``. ``founders`` are the old run's
    members unless they are named. ``task``, if given, is the old run's; ``options`` say where this machine has the
    data.
    """
    _require_free(path)
    _require_local(options)
    if not (folder / MANIFEST).is_file():
        raise LocalError(f"{folder}: there is no {MANIFEST} in it; expected the folder of a peer of the old run")
    manifest = read_network_manifest(folder / MANIFEST)
    if task is not None and task != manifest.task.name:
        raise LocalError(f"{folder}: a run of task {manifest.task.name!r}, not of {task!r}; leave --task out")
    old = find_certified(manifest, folder, at, _say)
    spec = _find_code(manifest, path.parent, folder / CODE)
    fresh = make_continued_manifest(
        old, load_task(spec, {**manifest.task.options, **(options or {})}), founders, changes or {}
    )
    place = find_state_file(path)
    try:
        write_state(place, old.state, old.digest)
        write_manifest(path, fresh)
    except WriteFailed as error:
        raise LocalError(str(error)) from None
    return fresh, place


def _require_free(path: Path) -> None:
    if path.exists():
        raise LocalError(f"{path} exists and is not overwritten: it may be the manifest of a run")
    if not path.parent.is_dir():
        raise LocalError(f"{path.parent}: there is no such folder")
    if not os.access(path.parent, os.W_OK):
        raise LocalError(f"{path.parent}: nothing can be written to this folder; choose another")


def write_manifest(path: Path, manifest: NetworkManifest) -> None:
    write_safely(path, lambda place: place.write_text(format_commented(manifest), encoding="utf-8"))


def run_start(
    path: Path,
    key_file: Path,
    out: Path | None,
    door: Door,
    *,
    on_event: Callable[[Event], None] | None = None,
    attack: Attack | None = None,
    colluders: Sequence[str] = (),
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    threads: int | None = None,
    shelf: bool | None = None,
    options: Mapping[str, str] | None = None,
) -> Outcome:
    """Found a run, or go on with it."""
    counts = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every, "threads": threads}
    for name, value in counts.items():
        require_whole(name, value)
    _require_threads(threads)
    _require_local(options)
    manifest = read_network_manifest(path)
    identity = Identity.load(key_file)
    if identity.key not in manifest.founders:
        raise LocalError(
            f"{key_file}: {identity.peer_id} is not among the founders in {path}; "
            f"to take part, join with the address of somebody who is in: phalanx join ADDRESS --key {key_file}"
        )
    spec = _find_code(manifest, path.parent)
    folder = out if out is not None else Path(f"{path.stem}-{identity.peer_id[-6:]}")
    state = _find_start(manifest, path, folder)
    settings = _make_settings(folder, door, manifest, spec)
    settings.on_event, settings.attack = on_event, attack
    settings.colluders = [parse_peer_id(text) for text in colluders]
    settings.evaluate_every, settings.checkpoint_every = evaluate_every, checkpoint_every
    settings.shelf = shelf
    return _take_part(manifest, key_file, spec, settings, threads, options, state)


def _find_start(manifest: NetworkManifest, path: Path, folder: Path) -> State | None:
    """The state that a run goes on from, if it does; a peer that has a checkpoint of it needs none."""
    if manifest.origin is None or find_latest(folder) is not None:
        return None
    return read_state(find_state_file(path), manifest.network.state)


def run_join(
    address: str,
    key_file: Path,
    out: Path | None,
    door: Door,
    *,
    trust_task: str | None = None,
    run: str | None = None,
    threads: int | None = None,
    shelf: bool | None = None,
    options: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Outcome:
    """Join a run that somebody at ``address`` is in. ``options`` say where this machine has the task's data."""
    _require_threads(threads)
    _require_local(options)
    identity = Identity.load(key_file)
    name = address.rpartition("/p2p/")[2]
    if "/p2p/" not in address:
        raise LocalError(
            f"{address!r} is no address of a peer; expected something like /ip4/1.2.3.4/tcp/5555/p2p/12D3..."
        )
    parse_peer_id(name)
    folder = out if out is not None else Path(f"run-{identity.peer_id[-6:]}")
    manifest, spec = _fetch(address, key_file, folder, trust_task)
    _require_run(manifest, run, address)
    _describe(manifest, spec)
    door = Door(listen=door.listen, announce=door.announce, peers=(address, *door.peers))
    settings = _make_settings(folder, door, manifest, spec)
    settings.on_event, settings.shelf = on_event, shelf
    return _take_part(manifest, key_file, spec, settings, threads, options)


def _require_threads(count: int | None) -> None:
    """The library that starts them ends the process if there is no room for so many."""
    require_whole("threads", count)
    if count is not None and count > MAX_THREADS:
        raise LocalError(f"threads: expected at most {MAX_THREADS}, got {count}")


# ---- Taking part


def _take_part(
    manifest: NetworkManifest,
    key_file: Path,
    spec: str,
    settings: Settings,
    threads: int | None,
    options: Mapping[str, str] | None,
    start: State | None = None,
) -> Outcome:
    task = load_task(spec, {**manifest.task.options, **(options or {})})
    prepared = prepare(manifest, task, _say, threads, count_history(settings.attack), start)
    settings.on_ready, settings.say = _say_where, _say
    settings.evaluates = prepared.evaluates
    member = Member(manifest, prepared.config, key_file, prepared.solo, settings, prepared.gradients)
    with _on_interrupt(member.leave):
        return member.run()


def _require_local(options: Mapping[str, str] | None) -> None:
    """What is this machine's own business may be said on its command line; all else is the run's."""
    for name in options or {}:
        if name not in LOCAL_OPTIONS:
            raise LocalError(
                f"option {name!r}: it is in the manifest, the same for all; expected {', '.join(LOCAL_OPTIONS)}"
            )


def _make_settings(folder: Path, door: Door, manifest: NetworkManifest, spec: str) -> Settings:
    """Put the manifest into the peer's folder; refuse a folder of another run."""
    for address in door.peers:  # before there is a folder
        parse_address(address)
    make_folder(folder)
    _require_folder(folder, manifest)
    text = format_manifest(manifest)
    write_safely(folder / MANIFEST, lambda place: place.write_text(text, encoding="utf-8"))
    code = read_file(Path(spec.rpartition(":")[0]), MAX_CODE, "code:") if spec not in TASKS else b""
    return Settings(
        out=folder,
        listen=door.listen,
        announce=door.announce,
        peers=door.peers,
        answers={"manifest": lambda key, request: text.encode(), "task": lambda key, request: code},
    )


def _require_folder(folder: Path, manifest: NetworkManifest) -> None:
    held = folder / MANIFEST
    if held.exists() and format_manifest(read_network_manifest(held)) != format_manifest(manifest):
        raise LocalError(f"{folder}: there is another run in this folder; choose another with --out")


def _say(text: str) -> None:
    """Print one line. What is in it may come from anybody."""
    print(f"phalanx: {clean(text, _LONGEST_LINE)}", file=sys.stderr, flush=True)


def _say_where(addresses: tuple[str, ...]) -> None:
    for address in addresses:
        _say(f"others reach this peer at {address}")


@contextmanager
def _on_interrupt(leave: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and the wish of the system to end: leave in good order; the second time, at once."""

    def hear(number: int, frame: FrameType | None) -> None:
        _say(leave())

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- The task's code


def _find_code(manifest: NetworkManifest, folder: Path, *others: Path) -> str:
    """Where the task of a manifest is: the founder's own file must be the one that the manifest names.

    It is looked for in ``folder``, and then in the files ``others``.
    """
    section = manifest.task
    file, colon, name = section.name.rpartition(":")
    if not colon:
        return section.name
    for place in (Path(file), folder / file, *others):
        if place.is_file():
            _require_same_code(read_file(place, MAX_CODE, "code:"), section.code, str(place))
            return f"{place}:{name}"
    raise LocalError(f"task {section.name!r}: there is no file {file}; it belongs beside the manifest")


def _require_same_code(code: bytes, expected: str | None, place: str) -> None:
    found = compute_digest("code of a task", code).hex()
    if found != expected:
        raise LocalError(f"{place}: not the task of this run (its hash is {found[:16]}, expected {str(expected)[:16]})")


def _fetch(address: str, key_file: Path, folder: Path, trust: str | None) -> tuple[NetworkManifest, str]:
    """The manifest from an address, and the task to run: code from strangers only if its hash is trusted."""
    from phalanx.network.transport import Transport

    transport = Transport(key_file, bytes(32), lambda key, message, size: True, listen=(), peers=(address,))
    transport.start()
    try:
        _say(f"asking {address} for the manifest")
        text = _ask(transport, address, "manifest", MAX_MANIFEST)
        manifest = parse_network_manifest(text.decode("utf-8", "replace"), address)
        section = manifest.task
        if ":" not in section.name:
            return manifest, section.name
        code = _ask(transport, address, "task", MAX_CODE)
    finally:
        transport.close()
    _require_same_code(code, section.code, address)
    _require_folder(folder, manifest)
    make_folder(folder)
    write_safely(folder / CODE, lambda place: place.write_bytes(code))
    if trust != section.code:
        raise LocalError(
            f"the task of this run is code from its founders, written to {folder / CODE} and not run: read it, and if "
            f"you trust it add --trust-task {section.code}"
        )
    return manifest, f"{folder / CODE}:{section.name.rpartition(':')[2]}"


def _ask(transport: Transport, address: str, what: str, most: int) -> bytes:
    """An answer. Whoever is asked may be beset by others, so that a question gets lost: ask a few times."""
    from phalanx.network.transport import Unreachable

    for _ in range(_ASK_TIMES - 1):
        try:
            return transport.ask(address, what, b"", _ASK_SECONDS, most)
        except Unreachable:
            time.sleep(_ASK_PAUSE)
    return transport.ask(address, what, b"", _ASK_SECONDS, most)


def _require_run(manifest: NetworkManifest, run: str | None, address: str) -> None:
    """The manifest is the one that the user was told of, if it was: whoever answers could have another."""
    if run is not None and manifest.name != run:
        raise LocalError(f"{address} is in the run {manifest.name}, not in {run}; ask those who told you of it")


def _describe(manifest: NetworkManifest, spec: str) -> None:
    """What this machine is about to run."""
    run, net = manifest.run, manifest.network
    _say(f"run {manifest.name}")
    _say(
        f"task {manifest.task.name} ({manifest.task.digest[:16]}), {run.steps} steps, batch {manifest.task.batch}, "
        f"{manifest.optimizer.get('name')}, on {run.device} with {run.threads} threads"
    )
    if manifest.task.options:
        _say("with " + ", ".join(f"{name} = {value}" for name, value in manifest.task.options.items()))
    if manifest.origin is not None:
        _say(f"it goes on from run {manifest.origin.run}, after {manifest.origin.steps} steps of training")
    tolerance = f"within {net.lower:g} to {net.upper:g}" if net.lower is not None else "bit for bit"
    _say(
        f"founded by {run.peers} peers, at most {run.byzantine} of them Byzantine; {run.validators} validators a step, "
        f"gradients compared {tolerance}; delta {net.delta:g} s, {net.gradient_time:g} s for a gradient"
    )
