"""Who is drawn, how a run ends, and who holds a place."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core.config import AutomaticTau
from phalanx.core.crypto import Domain
from phalanx.core.events import (
    RunFinished,
)
from phalanx.core.membership import View, compute_duties, draw_targets, find_last
from phalanx.core.messages import Phase
from phalanx.simulation.checkers.base import Checker, Checkers, name
from phalanx.simulation.checkers.verdicts import Justice


class Draws(Checker):
    """Targets come from randomness that nobody knew at COMMIT and survive a dead attempt; duties vary; tau is slow."""

    rule = "draws"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.drawn: dict[int, set[bytes]] = {}
        self.alike = 1.0
        self.validators: tuple[bytes, ...] = ()

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        peer = self.swarm.get_peer(key)
        if before is None or peer is None:
            return
        for (at, _), transcript in peer.transcripts.items():
            if at == before.step and transcript.randomness is not None and Phase.REPORT in transcript.phases:
                last = find_last(before, at - 1)
                past = peer.transcripts.get((at - 1, last.attempt)) if last is not None else None
                if past is not None:  # who was away may know of another attempt only
                    contributors = compute_duties(self.config, past.view).contributors
                    drawn = draw_targets(transcript.randomness, contributors, self.config.validators)
                    self.drawn.setdefault(at, set()).update(drawn)
        if view.step == before.step + 1:
            lost = self.drawn.get(before.step, set()) - {target.key for target in view.targets} - {*view.banned}
            if lost and view.attempts:
                self.report(view.step, f"{', '.join(map(name, lost))} drawn, and not to be checked")
            self._check_tau(before, view)
            validators = compute_duties(self.config, view).validators
            chance = len(view.roster) - len(validators) > 1  # with one contributor there is nothing to draw
            same = chance and validators == self.validators and view.roster == before.roster
            self.alike = self.alike / len(view.roster) if same else 1.0
            self.validators = validators
            if self.alike < Justice.LEAST_LUCK / 1000:
                self.report(view.step, "the same validators, again and again")

    def _check_tau(self, before: View, view: View) -> None:
        tau = self.config.tau
        if isinstance(tau, AutomaticTau):
            low, high = before.tau / tau.step_factor, before.tau * tau.step_factor
            if not 0.999 * low <= view.tau <= 1.001 * high:
                self.report(view.step, f"tau went from {before.tau:.3g} to {view.tau:.3g} in one step")


class Endings(Checker):
    """All honest peers that come to the end come to the same one."""

    rule = "one end"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.end: View | None = None

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, RunFinished):
            self.end = self.end or event.view
            if event.view != self.end:
                self.report(event.view.step, f"{name(key)} comes to another end than others")


class Places(Checker):
    """What an honest peer signs says in which run it does, and shares are not shown before AGGREGATE is complete."""

    rule = "places"

    def on_sign(self, key: bytes, domain: Any, payload: bytes) -> None:
        run, _, at, _, phase, *_ = msgspec.msgpack.decode(payload)
        if run != self.config.run:
            self.report(at, f"{name(key)} signed something that is good in any run")
        peer = self.swarm.get_peer(key)
        known = set(peer.transcript.phases) if peer is not None else {Phase.AGGREGATE}
        if domain is Domain.AGREED and phase == Phase.REVEAL and not known & {Phase.AGGREGATE, Phase.AGGREGATE_AGAIN}:
            self.report(at, f"{name(key)} shows its share before the aggregates are fixed")
