"""A training run under the protocol, every peer in one process and in virtual time.

Peers are those of the network: the same stories, real signatures. :class:`SwarmRun` starts them, watches what honest
ones say, writes the transcript, and takes checkpoints: of each peer when it enters the checkpoint's step, so that all
of them can start again from there together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from phalanx import events
from phalanx.attacks import Attack, Insider, Plot
from phalanx.core import events as notes
from phalanx.core.config import KEPT_STEPS, Config
from phalanx.core.crypto import Signer
from phalanx.core.effects import Story
from phalanx.core.envelope import Verify
from phalanx.core.errors import LocalError, RunHalted, WriteFailed
from phalanx.core.justice import LEFT
from phalanx.core.life import make_peer, run_made_peer
from phalanx.core.membership import View, compute_batch_seed, compute_floor, compute_margin, encode_view
from phalanx.core.memory import Epoch, Memory, Notes, recall, remember, remember_notes, take_down
from phalanx.core.messages import Phase
from phalanx.core.peer import Peer
from phalanx.network.disk import Disk
from phalanx.network.ideal import IdentityExaminer
from phalanx.network.simulated import Links, StoryFailed, World
from phalanx.training.checkpoints import Checkpoint
from phalanx.training.machine import Trainer, Workshop
from phalanx.training.recorder import Recorder

_LINKS = Links(low=0.01, high=0.05)
_GRADIENT_TIME = 0.5  # virtual seconds
_PATIENCE = 300
"""Deltas without a step after which nothing more will happen: who is missing does not come."""


@dataclass(slots=True)
class _Cut:
    """A checkpoint in the making: what each peer remembered when it entered the step."""

    step: int
    view: View
    last: bool
    """Whether the run stops here."""
    memory: Memory | None = None
    notes: dict[bytes, Notes] = field(default_factory=dict)


class SwarmRun:
    """Founders, some of them attackers, from the beginning or from a checkpoint."""

    def __init__(
        self,
        config: Config,
        signers: list[Signer],
        verify: Verify,
        attackers: dict[bytes, Attack],
        workshop: Workshop,
        recorder: Recorder,
        checkpoint: Checkpoint | None = None,
        seed: int = 0,
    ) -> None:
        self._config, self._workshop, self._recorder = config, workshop, recorder
        self._examiner = IdentityExaminer(verify)
        self._attackers = attackers
        self._index = {signer.key: place for place, signer in enumerate(signers)}
        self._plot = Plot(random=Random(seed))
        self._peers: dict[bytes, Peer] = {}
        self._trainers: dict[bytes, Trainer] = {}
        self._world = World(
            config.run, seed, _LINKS, strict=True, count=True, trace=False, on_note=self._on_note, keep_notes=False
        )
        self._cut: _Cut | None = None
        self._done = False
        self._over: set[bytes] = set()
        """Honest peers that have come to the end of the run."""
        self._told: set[tuple[Any, ...]] = set()
        self._sent = 0
        self._seconds = 0.0
        self._step = checkpoint.step if checkpoint is not None else 0
        """Steps that are final."""
        self._roster = config.founders
        for signer in signers:
            self._start(signer, checkpoint)

    def run(self) -> None:
        """Go on until the end, or until the recorder wants to stop and the checkpoint is written."""
        while not self._done:
            try:
                step, until = self._step, self._world.now + _PATIENCE * self._config.delta
                self._world.run(until, lambda step=step: self._done or self._step > step)  # type: ignore[misc]
            except StoryFailed as failure:
                cause = failure.__cause__
                if isinstance(cause, LocalError | WriteFailed):
                    raise cause from None
                if failure.key not in self._attackers:
                    raise
                place = self._index[failure.key]
                raise LocalError(f"the attack of peer {place} failed in step {self._step}: {cause!r}") from cause
            else:
                if not self._done and self._step == step:
                    raise RunHalted(self._explain_halt())

    def _explain_halt(self) -> str:
        waits = [event for event in self._recorder.events if isinstance(event, events.Waiting)]
        step, silent = (waits[-1].step, ", ".join(map(str, waits[-1].silent))) if waits else (self._step, "unknown")
        config, members = self._config, len(self._roster)
        floor = compute_floor(config, config.byzantine)
        return (
            f"halted: the run has waited in step {step} for {_PATIENCE} delta (peers that are missing: {silent}); "
            f"it had {members} members, and goes on with {floor} of them at least: silent attackers can halt it unless "
            f"peers >= {floor + config.byzantine} (byzantine = {config.byzantine}, validators = {config.validators})"
        )

    # ---- Starting

    def _start(self, signer: Signer, checkpoint: Checkpoint | None) -> None:
        key, config = signer.key, self._config
        trainer = Trainer(self._workshop, _GRADIENT_TIME)
        memory = checkpoint.memory if checkpoint is not None else None
        kept = memory.view if memory is not None else None
        peer = make_peer(config, key, self._examiner, kept)
        if key in peer.view.banned:
            return
        self._peers[key] = peer
        returning = key not in peer.view.roster
        if checkpoint is not None and memory is not None:
            self._roster = peer.view.roster
            trainer.digests = {step: self._workshop.add(state) for step, state in checkpoint.states.items()}
            if not returning:
                recall(peer, memory, checkpoint.notes.get(key))
        self._trainers[key] = trainer
        attack = self._attackers.get(key)

        def begin(disk: Disk) -> Story:
            story = run_made_peer(peer, returning)
            if attack is None:
                return story
            return attack.wrap(story, Insider(signer, config, self._plot, oracle=trainer))

        self._world.add(key, signer, trainer, begin)

    # ---- Watching

    def _on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, notes.StepFinished) and self._cut is not None:
            self._note_cut(key, event.view)
        if key in self._attackers:
            return
        match event:
            case notes.StepFinished() if event.step >= self._step:
                self._finish_step(key, event)
            case notes.Banned() if self._is_news("banned", event.key):
                self._recorder.add(events.make_banned(event, self._index))
            case notes.Removed() if self._is_news("removed", event.key, event.step):
                peer, key_text = self._index[event.key], event.key.hex()
                left = events.Left(event.step, peer, key_text)
                gone = events.Removed(event.step, peer, key_text, event.reason)
                self._recorder.add(left if event.reason == LEFT else gone)
            case notes.SlowPath() if self._is_news("slow path", event.height):
                self._recorder.add(events.SlowPathOpened(event.step, event.phase.name))
            case notes.Waiting() if self._is_news("waiting", event.height):
                silent = [self._index[member] for member in event.missing]
                self._recorder.add(events.Waiting(event.step, silent, [member.hex() for member in event.missing]))
            case notes.MarginLost() if self._is_news("margin", event.step, event.margin):
                self._recorder.add(events.MarginLost(event.step, 0, event.margin))
            case notes.RunFinished():
                self._end(key, event.view)

    def _is_news(self, *what: Any) -> bool:
        fresh = what not in self._told
        self._told.add(what)
        return fresh

    def _finish_step(self, key: bytes, event: notes.StepFinished) -> None:
        """The first honest peer says that a step is final."""
        view, peer = event.view, self._peers[key]
        self._step = view.step
        epochs = [epoch for place, epoch in sorted(peer.transcripts.items()) if place[0] == event.step]
        self._recorder.write_transcript([take_down(peer, epoch) for epoch in epochs if Phase.COMMIT in epoch.phases])
        for joined in [member for member in view.roster if member not in self._roster]:
            self._recorder.add(events.Joined(view.step, self._index[joined], joined.hex()))
        self._roster = view.roster
        total = self._world.traffic.total
        sent, now = total.payload + total.rest, self._world.now
        last = epochs[-1] if epochs else None
        self._recorder.add(
            events.StepFinished(
                step=event.step,
                attempt=last.view.failed if last is not None else view.failed,
                members=len(last.view.roster) if last is not None else len(view.roster),
                loss=self._find_loss(last.view, last.duties.contributors) if last is not None else None,
                tau=view.tau,
                bytes_sent=sent - self._sent,
                seconds=now - self._seconds,
                state=view.state.hex(),
                margin=compute_margin(self._config, view),
            )
        )
        self._sent, self._seconds = sent, now
        self._recorder.evaluate(view.step, self._workshop.get(view.state).parameters)
        needed = {digest for trainer in self._trainers.values() for digest in trainer.digests.values()}
        self._workshop.forget(needed | {view.state})
        missed = self._cut is not None and view.step > self._cut.step + 1  # somebody jumped over it: take another
        due = self._cut is None and self._recorder.is_checkpoint_due(view.step)
        if (missed or due) and view.step < self._config.steps:
            self._cut = _Cut(view.step, view, self._recorder.wants_to_stop(view.step))
            self._note_cut(key, view)

    def _find_loss(self, view: View, contributors: tuple[bytes, ...]) -> float | None:
        """The mean loss that honest contributors saw."""
        losses = [
            self._workshop.find_loss(view.state, compute_batch_seed(self._config, view.randomness, view.step, key))
            for key in contributors
            if key not in self._attackers
        ]
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known else None

    # ---- Checkpoints

    def _note_cut(self, key: bytes, view: View) -> None:
        """A peer has entered a step: if a checkpoint is made there, take down what it remembers."""
        cut = self._cut
        assert cut is not None
        if view != cut.view:
            return
        peer = self._peers[key]
        cut.notes[key] = remember_notes(peer)
        if cut.memory is None and key not in self._attackers:
            cut.memory = remember(peer)
        awaited = [member for member in view.roster if member not in self._attackers and self._world.is_up(member)]
        if all(member in cut.notes for member in awaited):
            self._cut = None
            self._write(cut.step, view, cut.memory, cut.notes)
            self._done = cut.last

    def _write(self, step: int, view: View, memory: Memory | None, private: dict[bytes, Notes]) -> None:
        known = {at: digest for trainer in self._trainers.values() for at, digest in trainer.digests.items()}
        honest = next(key for key in view.roster if key not in self._attackers)
        known |= self._trainers[honest].digests
        states = {at: self._workshop.get(known[at]) for at in sorted(known) if step - KEPT_STEPS <= at < step}
        states[step] = self._workshop.get(view.state)
        history = {at: value for at, value in self._workshop.parameters.items() if at < step}
        self._recorder.write_checkpoint(
            Checkpoint(run=self._config.run, step=step, states=states, memory=memory, notes=private, history=history)
        )

    def _end(self, key: bytes, view: View) -> None:
        """A peer has come to the end: the state may be released when all honest members have."""
        self._over.add(key)
        awaited = [member for member in view.roster if member not in self._attackers]
        if self._done or not all(member in self._over or not self._world.is_up(member) for member in awaited):
            return
        peer = self._peers[key]
        closing: list[Epoch] = [
            take_down(peer, epoch)
            for place, epoch in sorted(peer.transcripts.items())
            if place[0] == view.step and Phase.CONFIRM in epoch.phases
        ]
        self._recorder.write_transcript(closing)
        memory = remember(peer)
        self._write(view.step, view, Memory(encode_view(view), memory.epochs, memory.aggregates, memory.links), {})
        self._done = True
