"""A peer's lifetime in a run between machines: from its folder to the end of the run, or until it leaves.

The folder holds the manifest, the journal of what was signed, the peer's event log, the transcript and checkpoints.
Starting again in the same folder goes on from there: from the last checkpoint, with the journal's word for all that was
signed since, so that whoever was killed in the middle of a step never says anything twice.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from phalanx import __version__, events
from phalanx.attacks import Attack, Insider, Plot
from phalanx.core import events as notes
from phalanx.core.config import Config
from phalanx.core.crypto import Identity, format_peer_id
from phalanx.core.effects import Leave, Story
from phalanx.core.envelope import Examiner
from phalanx.core.errors import LocalError
from phalanx.core.justice import LEFT, find_leaving
from phalanx.core.life import make_peer, run_made_peer
from phalanx.core.membership import View, compute_batch_seed, compute_margin, compute_quorum, encode_view
from phalanx.core.memory import Link, Memory, recall, remember, remember_notes, take_down
from phalanx.core.messages import Phase, PullChain, Timeout
from phalanx.core.peer import Peer
from phalanx.core.wire import WIRE_TYPES
from phalanx.events import Event
from phalanx.network.disk import JOURNAL_HEIGHTS
from phalanx.network.journal import Journal
from phalanx.network.live import Driver, Inbox
from phalanx.network.transport import Limits, Transport
from phalanx.training.allocation import return_freed_memory
from phalanx.training.checkpoints import Checkpoint, find_latest, make_folder, read_checkpoint
from phalanx.training.gradients import describe_platform
from phalanx.training.manifest import NetworkManifest
from phalanx.training.recorder import EVENTS, Recorder, find_past, require_records
from phalanx.training.shelf import SHELVED_FROM, Shelf
from phalanx.training.solo import Solo

JOURNAL = "journal.bin"
SHELF = "shelf"
_INBOX = 1 << 27
_GRADIENTS_QUEUED, _LEAST_QUEUE = 3, 1 << 24
_KNOCK = 0.25  # seconds between two looks at who is there
_LINGER = 10.0  # times delta, for those who are not as far when the run ends
_MOST_STEPS_BETWEEN = JOURNAL_HEIGHTS // 16  # two checkpoints: if all stop, each must know what it said since
_GOODBYE = 12.0  # times delta: longer than that nobody waits to be let go


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a peer's part in a run ended."""

    peer_id: str
    steps: int
    """That are final, as far as this peer knows."""
    final_metric: float | None
    metric_name: str
    state_digest: str | None
    member: bool
    banned: bool
    finished: bool
    """Whether the run came to its end."""
    out: str

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Settings:
    """What is one peer's own business."""

    out: Path
    listen: Sequence[str] = ("/ip4/0.0.0.0/tcp/0",)
    announce: Sequence[str] = ()
    peers: Sequence[str] = ()
    """Addresses of some who are in the run."""
    shelf: bool | None = None
    """Whether what past steps leave is held in files; None: if the model is large."""
    evaluates: bool = True
    """Whether there is time for the metric before the run is over."""
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    attack: Attack | None = None
    """What this peer does to the others, for experiments."""
    colluders: Sequence[bytes] = ()
    on_event: Callable[[Event], None] | None = None
    patience: float = 600.0
    """Seconds to wait for the other founders."""
    say: Callable[[str], None] = lambda text: None
    on_ready: Callable[[tuple[str, ...]], None] | None = None
    """Called with this peer's addresses when it can be reached."""
    answers: dict[str, Callable[[bytes, bytes], bytes]] = field(default_factory=dict)
    """What strangers may ask for: the manifest, the code of the task."""


def make_halted(note: notes.Halted, peer: Peer, places: Mapping[bytes, int]) -> events.Halted:
    """The log's event for a halt: silent is who sent nothing at its height, or no vote although there was one."""
    epoch = peer.find_epoch(note.height)
    assert epoch is not None
    view, config = epoch.view, peer.config
    voters = {key for (height, _, _), votes in peer.votes.items() if height == note.height for key in votes}
    heard = peer.page(note.height).letters.keys() & (voters or set(view.roster))
    named = peer.timeouts.get((note.height, 0), {}).get(peer.key)
    missed = named.body.missing if named is not None and isinstance(named.body, Timeout) else ()
    silent = [key for key in view.roster if key not in heard] or [key for key in view.roster if key in missed]
    return events.Halted(
        step=note.step,
        silent=[places[key] for key in silent],
        keys=[key.hex() for key in silent],
        allowed=max(0, min(compute_margin(config, view), len(view.roster) - compute_quorum(config, view))),
    )


def make_limits(config: Config) -> Limits:
    """What others may take of this machine in a run of these numbers."""
    gradient = 4 * config.size
    usual = Limits()
    # Strangers get a gradient within the time for moving parts, or what they get of any small model.
    rate = max(usual.strangers_rate, gradient / max(config.transfer_time, 1.0))
    return replace(
        usual,
        bulk_queue=max(_LEAST_QUEUE, _GRADIENTS_QUEUED * gradient),
        strangers_rate=rate,
        turn_time=config.delta,
    )


class Member:
    """One peer of a run, in this process."""

    def __init__(
        self, manifest: NetworkManifest, config: Config, key_file: Path, solo: Solo, settings: Settings, evaluator: Any
    ) -> None:
        self._manifest, self._config, self._settings, self._solo = manifest, config, settings, solo
        self._identity = Identity.load(key_file)
        self._key = self._identity.key
        self._index = {key: place for place, key in enumerate(config.founders)}
        self._told: set[tuple[Any, ...]] = set()
        self._leaving = self._left = False
        self._left_at: int | None = None
        self._finished = self._banned = self._stopping = False
        self._halted = False
        self._say = settings.say
        self._sent, self._began = 0, time.monotonic()
        make_folder(settings.out)
        self._require_journal()
        checkpoint = self._read_checkpoint()
        self._journal = Journal(settings.out / JOURNAL, config.run, self._key)
        try:
            require_records(settings.out, None if self._journal.is_new else f"something signed in {JOURNAL}")
            self._recorder = self._make_recorder(evaluator)
            try:
                self._recorder.require_run(config.run)
                self._require_latest_journal(checkpoint)
                self._announce_run(evaluator)
            except BaseException:
                self._recorder.close()
                raise
        except BaseException:
            self._journal.close()
            raise
        self._inbox = Inbox(_INBOX)
        self._inbox.awaited = set(config.founders) - {self._key}
        self._transport = Transport(
            key_file,
            config.run,
            self._inbox.put,
            listen=settings.listen,
            announce=settings.announce,
            peers=settings.peers,
            limits=make_limits(config),
        )
        for what, answerer in settings.answers.items():
            self._transport.answer(what, answerer)
        self._peer = self._make_peer(checkpoint)
        self._peer.revived = not self._journal.is_new
        self._shelf: Shelf | None = None
        if settings.shelf if settings.shelf is not None else 4 * config.size >= SHELVED_FROM:
            self._use_shelf()
        else:
            solo.reserve_memory()
        self._view = self._peer.view
        self._driver = Driver(
            config.run, self._identity, solo, self._journal, self._transport, self._on_note, self._inbox
        )

    def _use_shelf(self) -> None:
        """From now on, what past steps leave is in files, and what is freed goes back to the system."""
        return_freed_memory()
        self._shelf = Shelf(self._settings.out / SHELF)
        self._solo.use_shelf(self._shelf)
        self._peer.store = self._shelf.put

    def run(self) -> Outcome:
        """Take part until the run ends or this peer has left."""
        try:
            self._transport.start()
            self._meet(self._view)
            if self._settings.on_ready is not None:
                self._settings.on_ready(self._transport.addresses)
            together = self._await_founders()
            self._driver.run(self._make_story(together))
        finally:
            self._transport.close()
            if self._shelf is not None:
                self._shelf.close()
            self._recorder.close()
            self._journal.close()
        return self._sum_up()

    def leave(self) -> str:
        """Say goodbye at the next step boundary; the second time, stop at once. What will happen, in words.

        Any thread, or a signal handler.
        """
        if self._leaving or self._finished or self._key not in self._view.roster or self._peer.entered == 0.0:
            self.stop()
            return "stopping"
        self._leaving = True
        self._inbox.put(None, Leave())
        patience = _GOODBYE + 8 + 2 * (self._config.byzantine + 2)
        deadline = time.monotonic() + patience * self._config.delta + 2 * self._config.gradient_time
        self._inbox.call(lambda: self._give_up_at(deadline))
        return "leaving at the end of this step, with a checkpoint; once more stops at once"

    def stop(self) -> None:
        """End now, without goodbye."""
        self._stopping = True
        self._driver.stop()

    def _give_up_at(self, deadline: float) -> None:
        """Nobody may be there to let this peer go."""
        from threading import Timer

        timer = Timer(max(0.0, deadline - time.monotonic()), self._driver.stop)
        timer.daemon = True
        timer.start()

    # ---- Starting

    def _require_journal(self) -> None:
        """A peer that has been in the run signed something, or may have: without its journal it would sign anew."""
        path = self._settings.out / JOURNAL
        past = find_past(self._settings.out) if not os.path.lexists(path) else None
        if past is not None:
            raise LocalError(
                f"{path}: missing, though there is {past}: this peer cannot know what it signed, and whoever signs "
                "twice is banned; put its journal back, or take a new key and another folder"
            )

    def _require_latest_journal(self, checkpoint: Checkpoint | None) -> None:
        """Whatever this peer signed, as far as its other files tell, is in its journal: else that is an older one."""
        if self._settings.attack is not None:  # an attacker signs what it likes
            return
        epochs = checkpoint.memory.epochs if checkpoint is not None and checkpoint.memory is not None else ()
        said = [message for epoch in epochs for phase in epoch.said for message in phase.messages]
        for message in (*said, *self._recorder.said.values()):
            if message.sender == self._key and not self._journal.holds(message):
                raise LocalError(
                    f"{self._settings.out / JOURNAL}: not the latest: this peer signed at height {message.height} "
                    f"(step {message.step}) what is not in it, and whoever signs twice is banned; put the latest back, "
                    "or take a new key and another folder"
                )

    def _make_recorder(self, evaluator: Any) -> Recorder:
        settings, steps = self._settings, self._manifest.run.steps
        evaluate_every, checkpoint_every = settings.evaluate_every, settings.checkpoint_every
        return Recorder(
            evaluator,
            steps=steps,
            evaluate_every=evaluate_every if evaluate_every is not None else max(1, steps // 40),
            checkpoint_every=min(checkpoint_every or max(1, steps // 20), _MOST_STEPS_BETWEEN),
            out=settings.out,
            resume=(settings.out / EVENTS).exists(),
            on_event=settings.on_event,
            stop=lambda step: self._left,
            timed=True,
            holds_state=False,
        )

    def _announce_run(self, evaluator: Any) -> None:
        """Tell of the run: in the log if it is new, and whoever watches in any case."""
        settings, told = self._settings, self._recorder.events
        if not told:
            self._recorder.add(self._announce(evaluator))
        elif settings.on_event is not None:  # who watches from now on should know what is going on
            for event in told:
                if isinstance(event, events.RunStarted | events.Banned):
                    settings.on_event(event)
        for event in told:
            if isinstance(event, events.Joined | events.Banned | events.Removed | events.Left):
                self._index.setdefault(bytes.fromhex(event.key), len(self._index))

    def _announce(self, evaluator: Any) -> events.RunStarted:
        run, config = self._manifest.run, self._config
        return events.RunStarted(
            run=config.run.hex(),
            task=self._manifest.task.name,
            peers=run.peers,
            byzantine=run.byzantine,
            attack=None,
            start=None,
            every=None,
            defense="phalanx",
            steps=run.steps,
            validators=run.validators,
            seed=run.seed,
            size=config.size,
            metric_name=evaluator.task.metric_name,
            higher_is_better=evaluator.task.higher_is_better,
            keys=[key.hex() for key in config.founders],
            attackers=[],
            software={
                "phalanx": __version__,
                "python": platform.python_version(),
                "platform": describe_platform(run.device),
            },
            number_bytes=WIRE_TYPES[run.wire].number_bytes,
            clock="wall",
        )

    def _read_checkpoint(self) -> Checkpoint | None:
        """The last one, if this peer wrote any."""
        latest = find_latest(self._settings.out)
        if latest is None:
            return None
        checkpoint = read_checkpoint(latest)
        if checkpoint.run != self._config.run:
            raise LocalError(f"{latest}: a checkpoint of another run; choose another folder for this one")
        if self._key not in checkpoint.notes:
            raise LocalError(f"{latest}: the checkpoint of another peer; choose another folder for this one")
        return checkpoint

    def _make_peer(self, checkpoint: Checkpoint | None) -> Peer:
        """From the last checkpoint, or with the founders."""
        if checkpoint is None or checkpoint.memory is None:
            return make_peer(self._config, self._key, Examiner(), None, self._journal.messages)
        peer = make_peer(self._config, self._key, Examiner(), checkpoint.memory.view, self._journal.messages)
        recall(peer, checkpoint.memory, checkpoint.notes.get(self._key))
        state = checkpoint.states[checkpoint.step]
        self._solo.return_to(checkpoint.step, state, peer.view.state)
        if any(isinstance(event, events.StepFinished) for event in self._recorder.events):
            self._recorder.add(events.Resumed(checkpoint.step))
        return peer

    def _await_founders(self) -> bool:
        """Wait until all founders are here, if this is the beginning. Whether they are."""
        founders, key = set(self._config.founders), self._key
        if not self._journal.is_new or key not in founders or self._peer.view.step > 0:
            return False
        others, said = founders - {key}, -1
        patience = time.monotonic() + self._settings.patience
        while self._inbox.awaited and not self._stopping:
            missing = len(self._inbox.awaited)
            if missing != said:
                said = missing
                self._say(f"waiting for {missing} of {len(others)} other founders")
            if time.monotonic() > patience:
                self._say(f"{missing} founders did not come; starting without them")
                return False
            self._transport.send(others, PullChain(0))
            time.sleep(_KNOCK)
        return True

    def _make_story(self, together: bool) -> Story:
        peer, attack = self._peer, self._settings.attack
        story = run_made_peer(peer, returning=not together)
        if attack is None:
            return story
        plot = Plot(keys=set(self._settings.colluders), random=Random(0))
        return attack.wrap(story, Insider(self._identity, self._config, plot, oracle=self._solo))

    # ---- Watching

    def _on_note(self, event: Any) -> None:
        if isinstance(event, notes.Resumed | notes.StepFinished):
            self._tell_went_on(event.step)
        elif isinstance(event, notes.AttemptStarted | notes.Jumped | notes.RunFinished):
            self._tell_went_on(event.view.step)
        match event:
            case notes.AttemptStarted():
                self._meet(event.view)
            case notes.StepFinished():
                self._finish_step(event)
            case notes.Jumped():
                self._meet(event.view)
                if self._has_gone_on(event.view):
                    self._driver.stop()
            case notes.Banned() if self._is_news("banned", event.key):
                self._recorder.add(events.make_banned(event, self._index))
            case notes.Removed() if self._is_news("removed", event.key, event.step):
                self._tell_removed(event)
            case notes.SlowPath() if self._is_news("slow path", event.height):
                self._recorder.add(events.SlowPathOpened(event.step, event.phase.name))
            case notes.Halted() if self._is_news("halted", event.height):
                self._tell_halted(event)
            case notes.Waiting() if self._is_news("waiting", event.height):
                silent = [key for key in event.missing if key in self._index]
                places = [self._index[key] for key in silent]
                self._recorder.add(events.Waiting(event.step, places, [key.hex() for key in silent]))
            case notes.MarginLost() if self._is_news("margin", event.step, event.margin):
                self._recorder.add(events.MarginLost(event.step, self._peer.duties.margin, event.margin))
            case notes.Left():
                self._driver.stop()
            case notes.RunFinished():
                self._finish_run(event.view)

    def _is_news(self, *what: Any) -> bool:
        fresh = what not in self._told
        self._told.add(what)
        return fresh

    def _meet(self, view: View) -> None:
        """The roster as it is now: whom the transport takes more from than from strangers, and whom nothing at all."""
        for key in view.roster:
            self._index.setdefault(key, len(self._index))
        if self._told and set(view.roster) - set(self._view.roster):
            self._tell_joined(view)
        self._view = view
        self._told.add(("met",))
        absent = {member.key for member in view.suspended}
        known = {*view.roster, *self._view.roster, *absent, *(c.key for c in view.candidates)}
        self._transport.set_circle(frozenset(known - {self._key}), frozenset(view.banned), frozenset(absent))
        if self._key in view.banned:
            self._banned = True
            self._driver.stop()

    def _tell_joined(self, view: View) -> None:
        for key in view.roster:
            if key not in self._view.roster and self._is_news("joined", key, view.step):
                self._recorder.add(events.Joined(view.step, self._index[key], key.hex()))

    def _tell_removed(self, event: notes.Removed) -> None:
        place, text = self._index.setdefault(event.key, len(self._index)), event.key.hex()
        left = event.reason == LEFT
        self._recorder.add(
            events.Left(event.step, place, text) if left else events.Removed(event.step, place, text, event.reason)
        )
        if self._leaving and event.key == self._key:
            self._left, self._left_at = True, event.step

    def _has_gone_on(self, view: View) -> bool:
        """Whether the step after the one that I left in is done: nobody needs me, and I need not run after them."""
        return self._left_at is not None and view.step > self._left_at + 1 and self._key not in view.roster

    def _tell_halted(self, event: notes.Halted) -> None:
        self._halted = True
        self._recorder.add(make_halted(event, self._peer, self._index))

    def _tell_went_on(self, step: int) -> None:
        if self._halted:
            self._halted = False
            self._recorder.add(events.WentOn(step))

    def _finish_step(self, event: notes.StepFinished) -> None:
        view, peer = event.view, self._peer
        self._meet(view)
        epochs = [epoch for place, epoch in sorted(peer.transcripts.items()) if place[0] == event.step]
        self._recorder.write_transcript([take_down(peer, epoch) for epoch in epochs if Phase.COMMIT in epoch.phases])
        total = self._transport.traffic.total
        sent, now = total.payload + total.rest, time.monotonic()
        last = epochs[-1].view if epochs else None
        self._recorder.add(
            events.StepFinished(
                step=event.step,
                attempt=last.failed if last is not None else view.failed,
                members=len(last.roster) if last is not None else len(view.roster),
                loss=self._find_loss(last) if last is not None else None,
                tau=view.tau,
                bytes_sent=sent - self._sent,
                seconds=now - self._began,
                state=view.state.hex(),
                margin=compute_margin(self._config, view),
            )
        )
        self._sent, self._began = sent, now
        if self._leaving and epochs and self._key in view.roster and self._key in find_leaving(epochs[-1]):
            self._left = True  # too few would stay: the others wait for me, and I can come back
            self._driver.stop()
        if not self._solo.has_state(view.step, view.state):  # it has to be fetched first
            return
        if self._settings.evaluates and self._recorder.is_evaluation_due(view.step):
            self._evaluate(view.step)
        if self._recorder.is_checkpoint_due(view.step) and view.step < self._config.steps:
            self._checkpoint(view)

    def _find_loss(self, view: View) -> float | None:
        seed = compute_batch_seed(self._config, view.randomness, view.step, self._key)
        return self._solo.losses.get((view.step, seed))

    def _evaluate(self, step: int) -> None:
        parameters = self._solo.states[step].parameters
        self._driver.work(
            lambda: self._solo.evaluate(parameters), lambda metric: self._recorder.add_metric(step, metric)
        )

    def _checkpoint(self, view: View) -> None:
        """What this peer needs to start again from this view."""
        peer = self._peer
        if not self._solo.has_state(view.step, view.state) or peer.view != view:
            return
        commits = peer.transcript.phases.get(Phase.COMMIT)
        memory = remember(peer, aggregates=False)
        here = (Link(encode_view(view), tuple(letter.message for letter in commits.values())),) if commits else ()
        self._recorder.write_checkpoint(
            Checkpoint(
                run=self._config.run,
                step=view.step,
                states={view.step: self._solo.states[view.step]},
                memory=Memory(encode_view(view), memory.epochs, (), memory.links + here),
                notes={self._key: remember_notes(peer)},
            )
        )

    def _finish_run(self, view: View) -> None:
        """The last state is checked by everybody: release it, and stay a little for those who are not as far."""
        if self._finished:
            return
        self._finished = True
        self._recorder.metric = self._solo.evaluate(self._solo.states[view.step].parameters)
        peer = self._peer
        closing = [
            take_down(peer, epoch)
            for place, epoch in sorted(peer.transcripts.items())
            if place[0] == view.step and Phase.CONFIRM in epoch.phases
        ]
        self._recorder.write_transcript(closing)
        self._checkpoint(view)
        self._give_up_at(time.monotonic() + _LINGER * self._config.delta)

    def _sum_up(self) -> Outcome:
        told = self._recorder.events
        steps = [event for event in told if isinstance(event, events.StepFinished)]
        return Outcome(
            peer_id=format_peer_id(self._key),
            steps=max((event.step + 1 for event in steps), default=0),
            final_metric=self._recorder.metric,
            metric_name=next(event for event in told if isinstance(event, events.RunStarted)).metric_name,
            state_digest=self._view.state.hex(),
            member=self._key in self._view.roster,
            banned=self._banned,
            finished=self._finished,
            out=str(self._settings.out),
        )
