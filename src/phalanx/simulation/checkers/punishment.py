"""Who is banned, removed or kept out, and that no honest peer is without an attacker."""

from __future__ import annotations

from typing import Any

from phalanx.core.events import (
    Banned,
    Jumped,
    Removed,
    StepFinished,
)
from phalanx.core.membership import View, compute_duties
from phalanx.core.peer import Peer
from phalanx.core.transcript import Transcript
from phalanx.simulation.checkers.base import Checker, Checkers, name

PAIR = "a pair"
"""How the reason of an elimination begins."""


class Innocence(Checker):
    """No honest peer is banned, whatever others say of it."""

    rule = "no honest peer is banned"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.known: set[bytes] = set()

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, Banned) and self.swarm.is_honest(event.key) and event.key not in self.known:
            self.known.add(event.key)
            self.report(event.at, f"{name(event.key)} by {event.rule}: {event.reason}")

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        for banned in view.banned:
            if self.swarm.is_honest(banned) and banned not in self.known:
                self.known.add(banned)
                self.report(view.step, f"{name(banned)}, without a word")


class Removals(Checker):
    """While ``delta`` holds, an honest peer that is up is removed only with a Byzantine one that it accused."""

    rule = "no honest peer is removed"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.reasons: dict[tuple[bytes, bytes], str] = {}
        self.jumped: set[bytes] = set()
        self.eliminated: set[bytes] = set()
        config = self.config
        rounds = 2 * (config.byzantine + 2)
        self.grace = (60 + 4 * rounds) * config.delta + 12 * (config.gradient_time + config.transfer_time)

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, Removed):
            self.reasons[key, event.key] = event.reason
        elif isinstance(event, Jumped):
            self.jumped.add(key)

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        if before is None or key in self.jumped:  # who was not there cannot tell; those who were do
            self.jumped.discard(key)
            return
        gone = [who for who in before.roster if who not in view.roster and who not in view.banned]
        reasons = {who: self.reasons.get((key, who), "without a word") for who in gone}
        pairs = [who for who in gone if reasons[who].startswith(PAIR)]
        friends = [who for who in pairs if self.swarm.is_honest(who)]
        self.eliminated.update(friends)
        for who in gone:
            if not self.swarm.is_honest(who) or who in self.swarm.leaving:
                continue
            if not self.swarm.is_steady(who, self.grace):
                continue
            if who not in pairs:
                self.report(view.step, f"{name(who)}: {reasons[who]}")
            elif 2 * len(friends) > len(pairs):
                self.report(view.step, f"{name(who)} was eliminated, and no Byzantine peer went with it")


class Exile(Checker):
    """A banned key never influences anything again."""

    rule = "banned for ever"

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        banned = set(view.banned)
        if before is not None and not set(before.banned) <= banned:
            self.report(view.step, "somebody is no longer banned")
        duties = compute_duties(self.config, view)
        places = {
            "roster": view.roster,
            "suspended": [member.key for member in view.suspended],
            "candidates": [candidate.key for candidate in view.candidates],
            "validators": duties.validators,
            "contributors": duties.contributors,
            "checkers": [check.checker for check in duties.checks],
            "namers": [complaint.namer for complaint in view.complaints],
        }
        for place, keys in places.items():
            for who in banned.intersection(keys):
                self.report(view.step, f"{name(who)} is among the {place}")


class Probation(Checker):
    """Probationers have no weight, and become members only after serving their term."""

    rule = "probationers have no weight"

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        candidates = {candidate.key: candidate for candidate in view.candidates}
        for who in candidates.keys() & set(view.roster):
            self.report(view.step, f"{name(who)} is a member and on probation")
        if before is None or (view.step, view.attempt) == (before.step, before.attempt):
            return
        served = {candidate.key: candidate for candidate in before.candidates}
        for who in set(view.roster) - set(before.roster):
            candidate = served.get(who)
            gap = view.step - before.step
            if any(member.key == who for member in before.suspended):
                continue
            if gap <= 1 and (candidate is None or candidate.served + gap < candidate.term):
                self.report(view.step, f"{name(who)} became a member before it had served its term")

    def on_note(self, key: bytes, event: Any) -> None:
        if not isinstance(event, StepFinished):
            return
        transcript = _find_transcript(self.swarm.get_peer(key), event.step)
        if transcript is not None:
            for phase, values in transcript.phases.items():
                if tuple(values) != transcript.view.roster:
                    self.report(event.step, f"{phase.name} counts others than the members for {name(key)}")


def _find_transcript(peer: Peer | None, step: int) -> Transcript | None:
    """The last attempt at a step, as a peer went through it."""
    if peer is None:
        return None
    places = [place for place in peer.transcripts if place[0] == step]
    return peer.transcripts[max(places)] if places else None
