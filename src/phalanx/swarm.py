"""What ``phalanx swarm`` does: a run of real processes over libp2p on this machine, watched from outside.

Every peer is a ``phalanx start`` (or ``join``) of its own, with its own key, folder and log. Nothing is shared but the
network: what is shown and counted here is read from the peers' event logs.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, TypeAlias

import msgspec

from phalanx import events
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError
from phalanx.events import Event, LogFollower
from phalanx.node import write_manifest
from phalanx.training.allocation import trim_heaps
from phalanx.training.founding import make_network_manifest, require_whole
from phalanx.training.manifest import read_network_manifest
from phalanx.training.recorder import EVENTS
from phalanx.training.simulate import Result, summarize

OUTPUT = "output.log"
Launcher: TypeAlias = Callable[..., subprocess.Popen[bytes]]
_PAUSE = 0.05
_CROWDED = 5.0
"""Seconds for a gradient, at least, where all peers are on one machine."""
_PATIENCE = 120.0
"""Seconds without news from anybody, beyond the run's own deadlines, after which a swarm is given up."""


@dataclass(frozen=True, kw_only=True)
class SwarmResult:
    """The result of a run, and what only real processes have."""

    result: Result
    joined: list[int]
    """Peers that became members in the run."""
    lost: list[int]
    """Honest peers that were not members at the end."""
    seconds_per_step: float | None
    digests_equal: bool
    finished: bool

    def to_json(self) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name != "result"}
        return self.result.to_json() | own


@dataclass(frozen=True, kw_only=True)
class Attackers:
    attack: str = "none"
    start: int = 0
    every: int = 1
    places: tuple[int, ...] = ()


@dataclass
class Process:
    """One peer: its process, if it is up, and what its log has told so far."""

    place: int
    folder: Path
    key_file: Path
    identity: Identity
    address: str
    popen: subprocess.Popen[bytes] | None = None
    follower: LogFollower = field(init=False)
    told: list[Event] = field(default_factory=list)
    killed: bool = False

    def __post_init__(self) -> None:
        self.follower = LogFollower(self.folder / EVENTS)

    @property
    def is_up(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    @property
    def failed(self) -> bool:
        """Whether it ended by a failure of its own."""
        code = self.popen.poll() if self.popen is not None else None
        return code is not None and code not in (0, 130) and not self.killed and not self.banned

    @property
    def banned(self) -> bool:
        key = self.identity.key.hex()
        return any(isinstance(event, events.Banned) and event.key == key for event in self.told)

    @property
    def last_words(self) -> str:
        try:
            lines = (self.folder / OUTPUT).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return lines[-1] if lines else "nothing was said"

    @property
    def step(self) -> int:
        """How many steps this peer knows to be final."""
        return max((event.step + 1 for event in self.told if isinstance(event, events.StepFinished)), default=0)

    @property
    def finished(self) -> events.RunFinished | None:
        return next((event for event in reversed(self.told) if isinstance(event, events.RunFinished)), None)

    def launch(self, words: Sequence[str], start: Launcher) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / OUTPUT, "ab") as output:
            self.popen = start(
                self.place,
                [sys.executable, "-m", "phalanx", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is for the swarm, which tells them
            )

    def send(self, number: int) -> None:
        if self.popen is not None and self.is_up:
            self.popen.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.killed = True


def _start_here(place: int, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, **options)


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Where processes run: on this machine's loopback, unless tests have other places for them."""

    launch: Launcher = _start_here
    """Starts the process of a place."""
    host: Callable[[int], str] = lambda place: "127.0.0.1"
    """A place's address."""


class Swarm:
    """Processes of one run, from the first to the last."""

    def __init__(
        self,
        out: Path,
        peers: int,
        attackers: Attackers,
        kills: Sequence[tuple[int, int]],
        joins: Sequence[tuple[int, int]],
        on_event: Callable[[Event], None],
        extra: Mapping[int, Sequence[str]] | None = None,
        ground: Ground = Ground(),  # noqa: B008 (it is frozen)
        identities: Sequence[Identity] = (),
    ) -> None:
        self._identities = identities  # of the first peers, if they were made before
        self._ground = ground
        self.folder, self._peers, self._attackers = out, peers, attackers
        self._kills, self._joins, self._on_event = list(kills), list(joins), on_event
        self._extra = dict(extra or {})  # words for a peer's first start
        count = max([peers, *(place + 1 for place, _ in joins)])
        self.processes = [self._make_process(place) for place in range(count)]
        self._index = {process.identity.key.hex(): process.place for process in self.processes}
        self._known: set[tuple[Any, ...]] = set()
        self.merged: list[Event] = []
        self._without_loss: dict[int, events.StepFinished] = {}
        self._manifest = out / "run.toml"

    @property
    def founders(self) -> list[str]:
        return [process.identity.peer_id for process in self.processes[: self._peers]]

    def _make_process(self, place: int) -> Process:
        folder = self.folder / f"peer-{place:02d}"
        folder.mkdir(parents=True)
        key_file = folder / "peer.key"
        identity = self._identities[place] if place < len(self._identities) else Identity.generate()
        identity.save(key_file)
        address = f"/ip4/{self._ground.host(place)}/tcp/{_find_port()}/p2p/{identity.peer_id}"
        return Process(place, folder, key_file, identity, address)

    def run(self, patience: float, should_stop: Callable[[], bool]) -> bool:
        """Until all honest members have come to the end. Whether they have."""
        for process in self.processes[: self._peers]:
            self._start(process)
        heard = time.monotonic()
        try:
            while not self._is_over():
                if self._look() or self._act():
                    heard = time.monotonic()
                if should_stop() or time.monotonic() > heard + patience:
                    return False
                time.sleep(_PAUSE)
            return True
        finally:
            self._end()
            self._look()

    def _start(self, process: Process) -> None:
        mine = process.address.rpartition("/p2p/")[0]
        known = next(other for other in self.processes if other is not process and not other.killed)
        common = ["--key", str(process.key_file), "--out", str(process.folder / "run"), "--listen", mine]
        process.follower = LogFollower(process.folder / "run" / EVENTS)
        process.killed = False
        if process.place >= self._peers:
            code = read_network_manifest(self._manifest).task.code
            trust = ["--trust-task", code] if code is not None else []  # whoever starts a swarm has chosen its task
            process.launch(["join", known.address, *common, *trust], self._ground.launch)
            return
        words = ["start", str(self._manifest), *common, "--peer", known.address, *self._extra.pop(process.place, ())]
        if process.place in self._attackers.places:
            words += ["--attack", self._attackers.attack, "--start", str(self._attackers.start)]
            words += ["--every", str(self._attackers.every)]
            for place in self._attackers.places:
                words += ["--colluder", self.processes[place].identity.peer_id]
        process.launch(words, self._ground.launch)

    def _is_honest(self, process: Process) -> bool:
        return process.place not in self._attackers.places

    def _is_over(self) -> bool:
        awaited = [process for process in self.processes if self._is_honest(process) and process.is_up]
        if not awaited:
            return True
        return not self._joins and all(process.finished is not None for process in awaited)

    # ---- Watching

    def _look(self) -> bool:
        """Read what is new in the logs. Whether there was anything."""
        fresh = False
        for process in self.processes:
            for event in process.follower.read():
                fresh = True
                process.told.append(event)
                if self._is_honest(process):
                    self._merge(process, event)
        return fresh

    def _merge(self, process: Process, event: Event) -> None:
        """The story that all honest peers tell: whoever tells a thing first is believed, the others are not heard."""
        match event:
            case events.RunStarted():
                name: tuple[Any, ...] = ("started",)
                event = self._introduce(event)
            case events.StepFinished() | events.Evaluated() | events.RunFinished() | events.MarginLost():
                name = (type(event), event.step)
            case events.SlowPathOpened():
                name = (type(event), event.step, event.phase)
            case events.Banned():
                name = (type(event), event.key)
            case events.Removed() | events.Left() | events.Joined():
                name = (type(event), event.key, event.step)
            case _:
                return
        if isinstance(event, events.Banned | events.Removed | events.Left | events.Joined):
            event = msgspec.structs.replace(event, peer=self._index.get(event.key, event.peer))
        if isinstance(event, events.StepFinished) and event.loss is None:  # a validator has none: others will tell it
            self._without_loss.setdefault(event.step, event)
            return
        if name not in self._known:
            self._known.add(name)
            self.merged.append(event)
            self._on_event(event)

    def _introduce(self, event: events.RunStarted) -> events.RunStarted:
        """Who attacks is known here, and to no peer."""
        chosen = self._attackers
        attacks = bool(chosen.places) and chosen.attack != "none"
        return msgspec.structs.replace(
            event,
            attack=chosen.attack if attacks else None,
            start=chosen.start if attacks else None,
            every=chosen.every if attacks else None,
            attackers=list(chosen.places),
        )

    def _act(self) -> bool:
        """Kill and start who is due."""
        front = max((process.step for process in self.processes if self._is_honest(process)), default=0)
        acted = self._notice_dead()
        for place, step in list(self._kills):
            if self.processes[place].step >= step:
                self._kills.remove((place, step))
                self.processes[place].kill()
                acted = True
        for place, step in list(self._joins):
            if front >= step and not self.processes[place].is_up:
                self._joins.remove((place, step))
                self._start(self.processes[place])
                acted = True
        return acted

    def _notice_dead(self) -> bool:
        """Tell of peers that ended though nobody killed them; without all founders no run begins."""
        dead = [process for process in self.processes if process.failed]
        for process in dead:
            process.killed = True
            text = f"peer {process.place} ended early: {process.last_words}"
            if not self.merged or process.step == 0:
                raise LocalError(text)
            print(f"phalanx: {text}", file=sys.stderr)
        return bool(dead)

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                process.send(number)
            deadline = time.monotonic() + 10.0
            while any(process.is_up for process in self.processes) and time.monotonic() < deadline:
                time.sleep(_PAUSE)

    # ---- Summing up

    def sum_up(self, finished: bool) -> SwarmResult:
        rest = [event for step, event in self._without_loss.items() if (events.StepFinished, step) not in self._known]
        told = [
            self._add_bytes(event) if isinstance(event, events.StepFinished) else event
            for event in (*self.merged, *rest)
        ]
        if not any(isinstance(event, events.StepFinished) for event in told):
            raise LocalError(f"no step was finished; the peers' own words are in {self.folder}/peer-*/{OUTPUT}")
        result = replace(summarize(told, {}, self.folder), interrupted=not finished)
        honest = [process for process in self.processes if self._is_honest(process)]
        digests = {process.finished.state for process in honest if process.finished is not None}
        seconds = [event.seconds for event in told if isinstance(event, events.StepFinished) and event.step > 0]
        members = self._find_members()
        return SwarmResult(
            result=result,
            joined=sorted({event.peer for event in told if isinstance(event, events.Joined)}),
            lost=[process.place for process in honest if process.place not in members and process.popen is not None],
            seconds_per_step=median(x for x in seconds if x is not None) if seconds else None,
            digests_equal=len(digests) == 1,
            finished=finished,
        )

    def _add_bytes(self, event: events.StepFinished) -> events.StepFinished:
        """A peer counts its own bytes; here are those of all."""
        same = [
            other.bytes_sent
            for process in self.processes
            for other in process.told
            if isinstance(other, events.StepFinished) and other.step == event.step
        ]
        return msgspec.structs.replace(event, bytes_sent=sum(same))

    def _find_members(self) -> set[int]:
        members = set(range(self._peers))
        for event in self.merged:
            if isinstance(event, events.Joined):
                members.add(event.peer)
            elif isinstance(event, events.Removed | events.Left | events.Banned):
                members.discard(event.peer)
        return members


def run_swarm(
    *,
    task: str,
    peers: int,
    byzantine: int,
    attackers: Attackers,
    seed: int,
    out: Path,
    settings: Mapping[str, Any],
    kills: Sequence[tuple[int, int]],
    joins: Sequence[tuple[int, int]],
    on_event: Callable[[Event], None],
    should_stop: Callable[[], bool],
    extra: Mapping[int, Sequence[str]] | None = None,
) -> SwarmResult:
    """Start a swarm, watch it to its end, and tell how it went."""
    _check(peers, byzantine, kills, joins)
    require_whole("start", attackers.start, 0)
    require_whole("every", attackers.every)
    if out.exists():
        raise LocalError(f"{out} exists and is not overwritten; choose another folder")
    places = tuple(sorted(Random(seed).sample(range(peers), byzantine))) if attackers.attack != "none" else ()
    chosen = {"byzantine": byzantine, "seed": seed, "threads": 1, **settings}
    if chosen.get("gradient_time") is None:
        chosen["gradient_time"] = max(_CROWDED, peers)  # they share this machine's cores
    identities = [Identity.generate() for _ in range(peers)]
    manifest = make_network_manifest(task, [identity.peer_id for identity in identities], **chosen)
    attackers = replace(attackers, places=places)
    swarm = Swarm(out, peers, attackers, kills, joins, on_event, extra, identities=identities)  # makes its folders
    write_manifest(out / "run.toml", manifest)
    trim_heaps()  # this process holds no model from now on
    net = manifest.network
    patience = _PATIENCE + 20 * net.delta + 4 * (net.gradient_time + net.transfer_time)
    return swarm.sum_up(swarm.run(patience, should_stop))


def _check(peers: int, byzantine: int, kills: Sequence[tuple[int, int]], joins: Sequence[tuple[int, int]]) -> None:
    if peers < 2:
        raise LocalError(f"peers: expected at least 2, got {peers}")
    if not 0 <= byzantine <= peers:
        raise LocalError(f"byzantine: expected 0 to {peers}, the number of peers, got {byzantine}")
    for place, _ in kills:
        if not 0 <= place < peers:
            raise LocalError(f"--kill {place}@...: expected a peer from 0 to {peers - 1}")
    dead = {place for place, _ in kills}
    for place, _ in joins:
        if place < peers and place not in dead:
            raise LocalError(f"--join {place}@...: peer {place} is in from the beginning; new ones count from {peers}")


def _find_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
