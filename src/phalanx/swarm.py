"""What ``phalanx swarm`` does: a run of real processes over libp2p on this machine, watched from outside.

Every peer is a ``phalanx start`` (or ``join``) of its own, with its own key, folder and log. Nothing is shared but the
network: what is shown and counted here is read from the peers' event logs.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import median
from types import FrameType
from typing import Any, TypeAlias

import msgspec

from phalanx import events
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError
from phalanx.events import Event, LogFollower
from phalanx.node import write_manifest
from phalanx.show.story import describe_floor, describe_halt, format_peers, tell
from phalanx.training.allocation import trim_heaps
from phalanx.training.founding import make_network_manifest, require_whole
from phalanx.training.manifest import LOCAL_OPTIONS, read_network_manifest
from phalanx.training.planning import find_floor
from phalanx.training.recorder import EVENTS
from phalanx.training.simulate import Result, summarize

OUTPUT = "output.log"
Launcher: TypeAlias = Callable[..., subprocess.Popen[bytes]]
_PAUSE = 0.05
_CROWDED = 5.0
"""Seconds for a gradient, at least, where all peers are on one machine."""
_PATIENCE = 120.0
"""Seconds without news from anybody, beyond the run's own deadlines, after which a swarm is given up."""
_GRACE = 10.0
"""Seconds that peers have to end, each time they are asked."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Moment: TypeAlias = tuple[int, int]
"""A peer's place, and a step."""


@dataclass(frozen=True, kw_only=True)
class SwarmResult:
    """The result of a run, and what only real processes have."""

    result: Result
    joined: list[int]
    """Peers that became members in the run."""
    lost: list[int]
    """Honest peers that were not members at the end."""
    seconds_per_step: float | None
    digests_equal: bool | None
    """Whether all honest peers that finished have one state; None if none did."""
    finished: bool
    reason: str | None
    """Why the run did not come to its end."""
    missed: list[str]
    """Kills and joins that did not happen, as they were asked for."""

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
    step: int = 0
    """How many steps this peer knows to be final."""
    halted: events.Halted | None = None
    """What it said when it halted, if it has not gone on since."""
    finished: events.RunFinished | None = None
    killed: bool = False

    def __post_init__(self) -> None:
        self.follower = LogFollower(self.folder / "run" / EVENTS)

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

    def hear(self, event: Event) -> None:
        self.told.append(event)
        if isinstance(event, events.Halted):
            self.halted = event
        elif isinstance(event, events.WentOn | events.StepFinished | events.RunFinished):
            self.halted = None
        if isinstance(event, events.StepFinished):
            self.step = max(self.step, event.step + 1)
        elif isinstance(event, events.RunFinished):
            self.finished = event

    @property
    def end(self) -> str:
        """How its process ended."""
        code = self.popen.poll() if self.popen is not None else None
        if code is None:
            return "it is up"
        return f"exit code {code}" if code >= 0 else _name_signal(-code)

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


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
        kills: Sequence[Moment],
        joins: Sequence[Moment],
        on_event: Callable[[Event], None],
        extra: Mapping[int, Sequence[str]] | None = None,
        ground: Ground = Ground(),  # noqa: B008 (it is frozen)
        identities: Sequence[Identity] = (),
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._identities = identities  # of the first peers, if they were made before
        self._ground = ground
        self._options = [f"--option={name}={value}" for name, value in (options or {}).items()]  # where data are
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
        self._halt: events.Halted | None = None
        self._reason: str | None = None
        self._broken: BaseException | None = None  # what a signal asks to be raised
        self._ending = self._hurry = False

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
        """Until all honest members have come to the end. Whether they have. No process is up afterwards."""
        self._reason = self._broken = None
        self._ending = self._hurry = False
        with self._hear_signals():
            try:
                for process in self.processes[: self._peers]:
                    self._start(process)
                self._reason = self._watch(patience, should_stop)
            finally:
                self._ending = True
                self._end()
                self._look()
        return self._reason is None

    def _watch(self, patience: float, should_stop: Callable[[], bool]) -> str | None:
        """Until the end; or why it does not come."""
        heard = time.monotonic()
        while not self._is_over():
            fresh = self._look()
            acted = self._act(blocked=self._is_blocked() or time.monotonic() > heard + patience / 2)
            if fresh or acted:
                heard = time.monotonic()
            if self._broken is not None:
                raise self._broken
            if should_stop():
                return "it was interrupted"
            if time.monotonic() > heard + patience:
                return f"nobody got any further for {patience:.0f} s: {self._explain_silence()}"
            time.sleep(_PAUSE)
        self._look()
        return None if self._is_done() else "all honest peers have ended before that"

    def _start(self, process: Process) -> None:
        mine = process.address.rpartition("/p2p/")[0]
        others = [other for other in self.processes if other is not process]
        known = next((other for other in others if not other.killed), others[0])
        common = ["--key", str(process.key_file), "--out", str(process.folder / "run"), "--listen", mine]
        common += self._options
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

    @property
    def _honest(self) -> list[Process]:
        return [process for process in self.processes if self._is_honest(process)]

    @property
    def _front(self) -> int:
        return max((process.step for process in self._honest), default=0)

    def _is_done(self) -> bool:
        return any(process.finished is not None for process in self._honest)

    def _is_over(self) -> bool:
        awaited = [process for process in self._honest if process.is_up]
        if self._is_done():
            return all(process.finished is not None for process in awaited)
        return not awaited and not self._find_blocked()

    # ---- Signals

    @contextmanager
    def _hear_signals(self) -> Iterator[None]:
        """No signal breaks anything off, or processes would be left behind: what it asks for is done at the next look.

        The wish of the system to end counts as Ctrl-C. While the processes are being ended, any signal kills them.
        """
        if threading.current_thread() is not threading.main_thread():  # signals go elsewhere
            yield
            return
        held = {number: signal.getsignal(number) for number in _SIGNALS}
        before = {number: handler for number, handler in held.items() if handler not in (None, signal.SIG_IGN)}

        def hear(number: int, frame: FrameType | None) -> None:
            if self._ending:
                self._hurry = True
                return
            handler = before[signal.Signals(number)]
            asked = handler if callable(handler) else before.get(signal.SIGINT)
            try:
                if not callable(asked):
                    raise SystemExit(128 + number)
                asked(number, frame)
            except BaseException as error:
                self._broken = error

        try:
            for number in before:
                signal.signal(number, hear)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- Watching

    def _look(self) -> bool:
        """Read what is new in the logs. Whether there was anything."""
        fresh = False
        for process in self.processes:
            for event in process.follower.read():
                fresh = True
                process.hear(event)
                if self._is_honest(process):
                    self._merge(event)
        self._look_for_halt()
        return fresh

    def _look_for_halt(self) -> None:
        """Tell when the run halts and when it goes on: a member that only fell behind does not count."""
        front = self._front
        halts = [process.halted for process in self._honest if process.is_up]
        halt = next((halt for halt in halts if halt is not None and halt.step >= front - 1), None)
        if halt is not None and self._halt is None:
            silent = sorted(self._index[key] for key in halt.keys if key in self._index)
            self._halt = msgspec.structs.replace(halt, silent=silent)
            self._tell(self._halt)
        elif halt is None and self._halt is not None and not self._ending:
            step, self._halt = self._halt.step, None
            self._tell(events.WentOn(max(step, front)))

    def _tell(self, event: Event) -> None:
        self.merged.append(event)
        self._on_event(event)

    def _merge(self, event: Event) -> None:
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
            self._tell(event)

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

    def _act(self, blocked: bool) -> bool:
        """Kill and start who is due; if the run is ``blocked``, also start those who would come back later."""
        front, acted = self._front, self._notice_dead()
        for place, step in list(self._kills):
            process = self.processes[place]
            if process.is_up and process.step >= step and process.finished is None:
                self._kills.remove((place, step))
                process.kill()
                acted = True
        early = self._find_blocked() if blocked else []
        for place, step in sorted(self._joins, key=lambda moment: moment[1]):
            if self._is_done() or self.processes[place].is_up:
                continue
            if front < step and (place, step) in early:
                _say(f"peer {place} comes back before step {step}: without it the run stands still at step {front}")
            elif front < step:
                continue
            self._joins.remove((place, step))
            self._start(self.processes[place])
            acted = True
        return acted

    def _is_blocked(self) -> bool:
        """Whether the run cannot go on without those who are down."""
        if not any(process.is_up for process in self._honest):
            return True
        return self._halt is not None and len(self._halt.silent) > self._halt.allowed

    def _find_blocked(self) -> list[Moment]:
        """The joins of members that are down: they will not come to pass if the run waits for these members."""
        members = self._find_members()
        return [
            (place, step)
            for place, step in self._joins
            if place in members and self.processes[place].popen is not None and not self.processes[place].is_up
        ]

    def _explain_silence(self) -> str:
        if self._halt is not None:
            return f"the run halts in step {self._halt.step}, since {describe_halt(self._halt)}"
        members = self._find_members()
        down = [process.place for process in self.processes if process.place in members and not process.is_up]
        return f"{format_peers(down)} {'is' if len(down) == 1 else 'are'} down" if down else "all members are up"

    def _notice_dead(self) -> bool:
        """Tell of peers that ended though nobody killed them; without all founders no run begins."""
        dead = [process for process in self.processes if process.failed]
        for process in dead:
            process.killed = True
            text = f"peer {process.place} ended early ({process.end}); its last line: {process.last_words}"
            if not self.merged or process.step == 0:
                raise LocalError(text)
            _say(text)
        return bool(dead)

    def _end(self) -> None:
        """Ask all to leave, then to stop; whoever is still up is killed, at once if somebody is in a hurry."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            is_last = number == signal.SIGKILL
            for process in self.processes:
                process.send(number)
            deadline = time.monotonic() + _GRACE
            while any(process.is_up for process in self.processes) and time.monotonic() < deadline:
                if self._hurry and not is_last:
                    break
                time.sleep(_PAUSE)

    # ---- Summing up

    def sum_up(self, finished: bool) -> SwarmResult:
        rest = [event for step, event in self._without_loss.items() if (events.StepFinished, step) not in self._known]
        told = [
            self._add_bytes(event) if isinstance(event, events.StepFinished) else event
            for event in (*self.merged, *rest)
        ]
        begun = any(isinstance(event, events.StepFinished) for event in told)
        result = replace(
            summarize(told, {}, self.folder) if begun else self._sum_up_nothing(told), interrupted=not finished
        )
        honest = self._honest
        digests = {process.finished.state for process in honest if process.finished is not None}
        times = [event.seconds for event in told if isinstance(event, events.StepFinished) and event.step > 0]
        seconds = [taken for taken in times if taken is not None]
        members = self._find_members()
        return SwarmResult(
            result=result,
            joined=sorted({event.peer for event in told if isinstance(event, events.Joined)}),
            lost=[process.place for process in honest if process.place not in members and process.popen is not None],
            seconds_per_step=median(seconds) if seconds else None,
            digests_equal=len(digests) == 1 if digests else None,
            finished=finished,
            reason=self._reason,
            missed=[
                f"--{name} {place}@{step}"
                for name, moments in (("kill", self._kills), ("join", self._joins))
                for place, step in moments
            ],
        )

    def _sum_up_nothing(self, told: list[Event]) -> Result:
        """The result of a run that was over before its first step."""
        story = tell(told) if told else None
        started = story.started if story is not None else None
        return Result(
            final_metric=story.final_metric if story is not None else None,
            metric_name=started.metric_name if started is not None else "metric",
            steps=0,
            honest_banned=0,
            honest_removed=0,
            byzantine_banned=0,
            byzantine_active=len(self._attackers.places),
            steps_to_ban=[],
            bytes_per_peer_step=None,
            allreduce_bytes_per_peer_step=math.nan,
            state_digest="",
            out=str(self.folder),
            events=told,
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
    kills: Sequence[Moment],
    joins: Sequence[Moment],
    on_event: Callable[[Event], None],
    should_stop: Callable[[], bool],
    extra: Mapping[int, Sequence[str]] | None = None,
) -> SwarmResult:
    """Start a swarm, watch it to its end, and tell how it went."""
    _check(peers, byzantine, kills, joins, settings.get("steps"))
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
    _check_moments(kills, joins, manifest.run.steps)
    attackers = replace(attackers, places=places)
    given = settings.get("options") or {}
    local = {name: str(Path(given[name]).absolute()) for name in LOCAL_OPTIONS if name in given}
    swarm = Swarm(  # makes its folders
        out, peers, attackers, kills, joins, on_event, extra, identities=identities, options=local
    )
    write_manifest(out / "run.toml", manifest)
    floor = find_floor(byzantine, manifest.run.validators, manifest.network.quorum)
    _say(describe_floor(peers, byzantine, floor))
    trim_heaps()  # this process holds no model from now on
    net = manifest.network
    patience = _PATIENCE + 20 * net.delta + 4 * (net.gradient_time + net.transfer_time)
    found = swarm.sum_up(swarm.run(patience, should_stop))
    found = replace(found, result=replace(found.result, floor=floor, margin=peers - floor))
    if found.reason is not None:
        words = f"; the peers' own words are in {out}/peer-*/{OUTPUT}" if not should_stop() else ""
        _say(f"the run did not come to its end: {found.reason}{words}")
    if found.missed:
        _say(f"this did not happen before the end: {', '.join(found.missed)}")
    return found


def _say(text: str) -> None:
    print(f"phalanx: {text}", file=sys.stderr)


def _check(
    peers: int, byzantine: int, kills: Sequence[Moment], joins: Sequence[Moment], steps: int | None = None
) -> None:
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
    if steps is not None:
        _check_moments(kills, joins, steps)


def _check_moments(kills: Sequence[Moment], joins: Sequence[Moment], steps: int) -> None:
    for name, moments in (("kill", kills), ("join", joins)):
        for place, step in moments:
            if not 0 <= step < steps:
                raise LocalError(
                    f"--{name} {place}@{step}: the run has {steps} steps; expected one from 0 to {steps - 1}"
                )


def _find_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
