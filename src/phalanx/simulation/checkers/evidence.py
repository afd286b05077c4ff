"""Every ban has evidence that verifies offline, from nothing but the run and the messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from phalanx.core import messages as m
from phalanx.core.checking import is_proven
from phalanx.core.config import Config
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import Examiner
from phalanx.core.events import (
    AttemptStarted,
    Banned,
    StepFinished,
)
from phalanx.core.justice import find_offenders
from phalanx.core.membership import View, compute_duties
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.partition import compute_part_sizes
from phalanx.core.peer import compute_case_digest
from phalanx.core.transcript import Transcript
from phalanx.core.verification import (
    sum_bound,
)
from phalanx.core.wire import WIRE_TYPES
from phalanx.simulation.checkers.base import Checker, Checkers, name


class Evidence(Checker):
    """Every ban has evidence that verifies offline."""

    rule = "bans have evidence"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.open: dict[bytes, str] = {}
        self.proven: set[bytes] = set()
        self.views: dict[bytes, View] = {}
        self.together: dict[bytes, list[Banned]] = {}

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, AttemptStarted):
            self.views[key] = event.view
            self.together.pop(key, None)
        elif isinstance(event, StepFinished):
            self._check(key)
        elif isinstance(event, Banned):
            self.together.setdefault(key, []).append(event)
            self.open.setdefault(event.key, f"{name(event.key)} by {event.rule}: {event.reason}")
            self._check(key)

    def _check(self, key: bytes) -> None:
        """Whatever one peer said in one attempt; V2 rests on what V1 corrected there."""
        events = self.together.get(key, [])
        for event in events:
            if event.key not in self.proven and event.evidence:
                view = self.views.get(key)
                event = self._complete(key, event)
                if view is not None and verify_ban(self.config, self.swarm.examiner, view, event, events):
                    self.proven.add(event.key)

    def _complete(self, key: bytes, event: Banned) -> Banned:
        """The ban with the CONFIRMs that its votes are about: they say who accused."""
        peer = self.swarm.get_peer(key)
        if peer is None or any(message.phase is Phase.CONFIRM for message in event.evidence):
            return event
        confirms = tuple(letter.message for letter in peer.transcript.phases.get(Phase.CONFIRM, {}).values())
        return replace(event, evidence=(*event.evidence, *confirms)) if isinstance(event.case, m.Accusation) else event

    def finish(self) -> None:
        latest = self.all.latest
        for key, text in self.open.items():
            if key not in self.proven:
                self.report(latest.step if latest else 0, text)
        for key in latest.banned if latest else ():
            if key not in self.open:
                self.report(latest.step if latest else 0, f"{name(key)}, without a word")


def verify_ban(config: Config, examiner: Examiner, view: View, event: Banned, others: Iterable[Banned] = ()) -> bool:
    """Whether the evidence shows why this key was banned, for somebody who knows the run and the certified view.

    ``others`` are the bans of the same decision: V2 counts with what V1 has corrected.
    """
    letters = [examiner.examine(x) for x in event.evidence if x.run == config.run]
    if len(letters) != len(event.evidence) or any(letter is None for letter in letters):
        return False
    if event.case is not None and not isinstance(event.case, m.Accusation):
        accused = event.case.first if isinstance(event.case, m.Equivocation) else None
        accused = accused or (event.case.message if isinstance(event.case, m.MalformedBody) else event.case.commit)  # type: ignore[union-attr]
        if accused.sender == event.key and is_proven(config.run, examiner, event.case):
            return True
    if event.rule is Rule.EQUIVOCATION and event.case is None:
        try:
            proof = m.Equivocation(*event.evidence)
        except (TypeError, ValueError):
            return False
        return proof.first.sender == event.key and is_proven(config.run, examiner, proof)
    if event.rule is Rule.MALFORMED and event.case is None:
        return _is_malformed(config, examiner, view, event)
    if event.rule is Rule.SUM:
        return _is_off_balance(config, examiner, view, event, others)
    return _is_voted(config, examiner, view, event)


def _is_malformed(config: Config, examiner: Examiner, view: View, event: Banned) -> bool:
    """E4: what it says is no body, or none that it may say there."""
    messages = [x for x in event.evidence if x.sender == event.key and x.domain is Domain.AGREED]
    letters = {x.phase: letter for x in messages if (letter := examiner.examine(x)) is not None}
    if any(letter.body is None for letter in letters.values()):
        return True
    for phase, letter in letters.items():
        message = letter.message
        if (message.step, message.attempt) != (view.step, view.attempt) and message.height >= view.height:
            return True
        transcript = Transcript(
            view, compute_duties(config, view), {other: {event.key: letters[other]} for other in letters}
        )
        try:
            found = find_offenders(config, transcript, phase)
        except KeyError:  # the evidence is not whole
            continue
        if event.key in found.banned:
            return True
    return False


def _is_off_balance(config: Config, examiner: Examiner, view: View, event: Banned, others: Iterable[Banned]) -> bool:
    """V2: the reports, corrected where somebody was convicted, do not add up to zero."""
    if event.key not in view.roster:
        return False
    part, count = view.roster.index(event.key), len(view.roster)
    bodies: dict[bytes, m.Report] = {}
    for message in event.evidence:
        letter = examiner.examine(message)
        here = (message.step, message.attempt) == (view.step, view.attempt)
        if letter is not None and here and isinstance(letter.body, m.Report) and letter.body.norms:
            bodies[message.sender] = letter.body
    contributors = set(compute_duties(config, view).contributors)
    if set(bodies) != contributors:
        return False
    fixed: dict[bytes, tuple[float, ...]] = {}
    for other in others:
        case = other.case
        if not isinstance(case, m.Accusation) or case.rule is not Rule.REPORT or part not in case.parts:
            continue
        if other.key == case.accused and (case.step, case.attempt) == (view.step, view.attempt):
            fixed[case.accused] = case.sums[case.parts.index(part) :: len(case.parts)]
    size = compute_part_sizes(config.size, count)[part]
    eps = sum_bound(view.tau, len(bodies), size, WIRE_TYPES[config.wire], config.cap)
    for place in range(config.projections):
        total = 0.0
        for key, body in bodies.items():
            total += fixed[key][place] if key in fixed else body.sums[place * count + part]
        if not abs(total) <= eps:
            return True
    return False


def _is_voted(config: Config, examiner: Examiner, view: View, event: Banned) -> bool:
    """A strict majority of those who were members then, without the parties, said so in signed ballots."""
    ballots: dict[bytes, dict[bytes, Verdict]] = {}
    accusers: set[bytes] = set()
    charge = compute_case_digest(event.case) if event.case is not None else b""
    for message in event.evidence:
        letter = examiner.examine(message)
        body = letter.body if letter is not None else None
        if (message.step, message.attempt) != (view.step, view.attempt) or message.sender not in view.roster:
            continue
        if isinstance(body, m.Vote):
            ballots[message.sender] = {ballot.case: ballot.verdict for ballot in body.ballots}
        elif isinstance(body, m.Confirm) and charge in body.accusations:
            accusers.add(message.sender)
    case = event.case
    if event.rule is Rule.NORMS and event.key in view.roster:
        part = view.roster.index(event.key)
        digest = compute_digest("norms", view.step.to_bytes(8, "little"), part.to_bytes(8, "little"))
        return _has_majority(ballots, digest, set(view.roster) - {event.key}, Verdict.GUILTY)
    if case is None:
        for suspect in view.suspects:
            if suspect.key != event.key or suspect.step != event.step:
                continue
            place = suspect.step.to_bytes(8, "little") + suspect.attempt.to_bytes(8, "little")
            digest = compute_digest("suspect", suspect.key, place)
            voters = _find_voters(view, suspect.step, suspect.attempt) - {suspect.key}
            if _has_majority(ballots, digest, voters, Verdict.GUILTY):
                return True
        return False
    digest = compute_case_digest(case)
    if isinstance(case, m.Accusation):
        accused, step, attempt = case.accused, case.step, case.attempt
    else:
        first = next(getattr(case, field) for field in case.__struct_fields__)
        accused, step, attempt = first.sender, first.step, first.attempt
    voters = _find_voters(view, step, attempt) - {accused}
    if event.key == accused:
        return _has_majority(ballots, digest, voters, Verdict.GUILTY)
    if isinstance(case, m.Accusation) and case.rule is Rule.GRADIENT and event.rule is Rule.REPORT:
        records = [record for record in view.attempts if (record.step, record.attempt) == (step, attempt)]
        passed = {record.roster[part] for record in records for part in case.parts if part < len(record.roster)}
        return event.key in passed and _has_majority(ballots, digest, voters, Verdict.GUILTY)
    return event.key in accusers and _has_majority(ballots, digest, voters, Verdict.INNOCENT)


def _find_voters(view: View, step: int, attempt: int) -> set[bytes]:
    for record in view.attempts:
        if (record.step, record.attempt) == (step, attempt):
            return set(view.roster) & set(record.roster)
    return set(view.roster)


def _has_majority(
    ballots: dict[bytes, dict[bytes, Verdict]], digest: bytes, voters: set[bytes], verdict: Verdict
) -> bool:
    count = sum(ballots.get(key, {}).get(digest) is verdict for key in voters)
    return 2 * count > len(voters)
