"""The model's state: certified, from committed parts, finite; and that memory stays bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from phalanx.core import messages as m
from phalanx.core.config import KEPT_STEPS
from phalanx.core.events import (
    AttemptStarted,
    Banned,
    Diverged,
    StepFinished,
    Synced,
)
from phalanx.core.membership import View, compute_duties
from phalanx.core.merkle import hash_part, verify_path
from phalanx.core.messages import Phase
from phalanx.core.partition import compute_part_sizes, join_parts
from phalanx.core.peer import Peer
from phalanx.core.transcript import Transcript
from phalanx.core.verification import (
    read_aggregate,
    sum_bound,
)
from phalanx.core.wire import WIRE_TYPES, Wire
from phalanx.simulation.checkers.base import Checker, Checkers, name
from phalanx.simulation.checkers.punishment import _find_transcript
from phalanx.simulation.machine import Bowl, compute_state_digest


class States(Checker):
    """Honest peers hold the certified state, joiners too, and nothing in it is other than finite."""

    rule = "certified states"

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, AttemptStarted):
            self._check(key, event.view.step, event.view.state)
        elif isinstance(event, Synced):
            self._check(key, event.step, event.state)
            held = {view.state for view in self.all.chain.values() if view.step == event.step}
            if held and event.state not in held:
                self.report(event.step, f"{name(key)} joined with a state that nobody certified")
        elif isinstance(event, Diverged):
            peer = self.swarm.get_peer(key)
            if peer is not None and self.swarm.is_steady(key, 60 * self.config.delta):
                self.report(event.step, f"{name(key)} came to another state than the majority")

    def _check(self, key: bytes, step: int, digest: bytes) -> None:
        machine: Bowl = self.swarm.get_machine(key)
        state = machine.states.get(step)
        if state is None:
            self.report(step, f"{name(key)} starts without the state of its view")
        elif compute_state_digest(state) != digest:
            self.report(step, f"{name(key)} starts from another state than its view's")
        elif not bool(torch.isfinite(state).all()):
            self.report(step, f"{name(key)} holds a state that is not finite")


class Aggregates(Checker):
    """An applied aggregate is what was agreed, comes from committed parts, and passes V2 or somebody is punished."""

    rule = "applied aggregates"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.done: set[int] = set()
        self.punished: set[tuple[bytes, int]] = set()

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, Banned):
            self.punished.add((key, event.at))
        if not isinstance(event, StepFinished):
            return
        peer = self.swarm.get_peer(key)
        transcript = _find_transcript(peer, event.step)
        if peer is None or transcript is None or Phase.CONFIRM not in transcript.phases:
            return
        if key in transcript.view.roster:
            self._check_parts(peer, transcript)
        if event.step not in self.done and self._check_whole(peer, transcript, event.view):
            self.done.add(event.step)

    def _check_parts(self, peer: Peer, transcript: Transcript) -> None:
        """An honest aggregator: every row that it used fits its owner's commitment."""
        view = transcript.view
        letter = (transcript.aggregates or {}).get(peer.key)
        if letter is None or not isinstance(letter.body, m.Aggregate) or letter.body.result is None:
            self.report(view.step, f"{name(peer.key)} finished a step without an aggregate of its own")
            return
        index = view.roster.index(peer.key)
        if not self.swarm.is_steady(peer.key, 60 * self.config.delta):
            return  # what it held is lost, but for what it had signed
        for owner in compute_duties(self.config, view).contributors:
            commit = transcript.phases[Phase.COMMIT][owner].body
            held = peer.parts.get((*_place(view), owner, index))
            if owner == peer.key:
                continue
            data, path = held or (b"", ())
            root = commit.parts if isinstance(commit, m.Commit) and commit.parts is not None else b""
            if not verify_path(root, len(view.roster), index, hash_part(data), path):
                self.report(view.step, f"{name(peer.key)} used a part of {name(owner)} that was not committed")

    def _check_whole(self, peer: Peer, transcript: Transcript, after: View) -> bool:
        """The state after the step follows from the agreed aggregates; False if this peer cannot tell."""
        config, view = self.config, transcript.view
        sizes, wire = compute_part_sizes(config.size, len(view.roster)), WIRE_TYPES[config.wire]
        parts = []
        for part, (owner, size) in enumerate(zip(view.roster, sizes, strict=True)):
            letter, data = (transcript.aggregates or {}).get(owner), peer.aggregates.get((*_place(view), part))
            body = letter.body if letter is not None else None
            if data is None or not isinstance(body, m.Aggregate) or hash_part(data) != body.result:
                return False
            aggregate = read_aggregate(data, size, wire, config.cap)
            if aggregate is None:
                return False
            parts.append(aggregate)
        machine = self.swarm.get_machine(peer.key)
        if view.step not in machine.states or after.step != view.step + 1:
            return False
        copy = Bowl(config.size)
        copy.states = {view.step: machine.states[view.step]}
        copy.apply(view.step, join_parts(parts).to(torch.float32))
        if not copy.has_state(after.step, after.state):
            self.report(view.step, f"{name(peer.key)} goes on from a state that the agreed aggregates do not give")
        if (peer.key, view.step) not in self.punished:
            self._check_sums(transcript, sizes, wire)
        return True

    def _check_sums(self, transcript: Transcript, sizes: Sequence[int], wire: Wire) -> None:
        config, view = self.config, transcript.view
        bodies = [x.body for x in (transcript.reports or {}).values() if isinstance(x.body, m.Report) and x.body.norms]
        for part, size in enumerate(sizes):
            eps = sum_bound(view.tau, len(bodies), size, wire, config.cap)
            for place in range(part, config.projections * len(sizes), len(sizes)):
                total = sum(body.sums[place] for body in bodies)
                if not abs(total) <= eps:
                    self.report(view.step, f"part {part} is off balance by {total:.3g}, and nobody was punished")


def _place(view: View) -> tuple[int, int]:
    return view.step, view.attempt


class Memory(Checker):
    """What a peer keeps is bounded, whatever it is sent."""

    rule = "bounded memory"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.told: set[tuple[bytes, str]] = set()

    def on_note(self, key: bytes, event: Any) -> None:
        if not isinstance(event, StepFinished):
            return
        peer = self.swarm.get_peer(key)
        if peer is None:
            return
        view = peer.view
        circle = len(view.roster) + len(view.candidates) + len(view.banned) + 4
        for table, limit in self._limits(circle, len(self.all.chain)).items():
            size = len(getattr(peer, table, ()))
            if size > limit and (key, table) not in self.told:
                self.told.add((key, table))
                self.report(event.step, f"{name(key)} holds {size} {table}, expected at most {limit}")

    def _limits(self, circle: int, views: int) -> dict[str, int]:
        """Entries that a table may hold. Attempts at one step are few: each costs a member."""
        attempts = (KEPT_STEPS + 2) * (circle + 2)
        heights = 256
        return {
            "pages": heights,
            "trials": heights,
            "alarms": heights,
            "timeouts": 4 * heights,
            "votes": 8 * heights,
            "gossip": 4 * heights,
            "transcripts": attempts,
            "own": KEPT_STEPS + 4,
            "parts": attempts * circle * circle,
            "aggregates": attempts * circle,
            "openings": attempts * circle * circle,
            "partial": attempts * circle * circle,
            "gradients": 4 * attempts * circle,
            "state_chunks": 16,
            "state_size": 64,
            "cases": 2048,
            "proofs": 256,
            "joins": 512,
            "asked": 16 * attempts * circle * circle,
            "answered_alarms": 4 * heights,
            "answers": 1024,
            "finished": 64,
            "links": views + 64,
        }
