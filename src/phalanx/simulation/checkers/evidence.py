"""Every ban has evidence that verifies offline, from nothing but the run and the messages."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from phalanx.core import messages as m
from phalanx.core.checking import is_proven
from phalanx.core.config import Config
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import Examiner, Letter
from phalanx.core.events import (
    AttemptStarted,
    Banned,
    StepFinished,
)
from phalanx.core.justice import Decision, decide, find_offenders, get_accused, get_place, is_received, make_agenda
from phalanx.core.membership import Caught, Suspect, View, compute_duties, find_last, find_record, has_concluded
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.partition import compute_part_sizes
from phalanx.core.peer import compute_case_digest
from phalanx.core.transcript import Transcript, Values, compute_values_root
from phalanx.core.verification import (
    sum_bound,
)
from phalanx.core.wire import WIRE_TYPES
from phalanx.simulation.checkers.base import Checker, Checkers, name

Charge = m.Accusation | m.Proof


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
                peer = self.swarm.get_peer(key)
                cases = peer.cases.values() if peer is not None else ()
                if view is not None and verify_ban(self.config, self.swarm.examiner, view, event, events, cases):
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


def verify_ban(
    config: Config,
    examiner: Examiner,
    view: View,
    event: Banned,
    others: Iterable[Banned] = (),
    cases: Iterable[Charge] = (),
) -> bool:
    """Whether the evidence shows why this key was banned, for somebody who knows the run and the certified view.

    ``others`` are the bans of the same decision. V2 counts with what V1 has corrected, and a liar is banned for one
    accusation of several: ``cases`` are the rest. Whoever leaves one out that members named and got shows nothing.
    """
    if not _is_signed(config, examiner, event):
        return False
    case = event.case
    shown = [*cases, *(x.case for x in (event, *others) if x.case is not None)]
    proof = case if case is not None and not isinstance(case, m.Accusation) else None
    if proof is not None and get_accused(proof) == event.key and is_proven(config.run, examiner, proof):
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
        return _is_off_balance(config, examiner, view, event, shown)
    return _is_voted(config, examiner, view, event, shown)


def _is_signed(config: Config, examiner: Examiner, event: Banned) -> bool:
    """Whether all of its evidence was said in this run, by those who are named."""
    return all(x.run == config.run and examiner.examine(x) is not None for x in event.evidence)


def _is_malformed(config: Config, examiner: Examiner, view: View, event: Banned) -> bool:
    """E4: what it says is no body, or none that it may say there, or it names another place than it stands at."""
    messages = [x for x in event.evidence if x.sender == event.key and x.domain is Domain.AGREED]
    own = [letter for x in messages if (letter := examiner.examine(x)) is not None]
    if any(letter.body is None for letter in own) or _is_mislabelled(view, event):
        return True
    letters = {x.message.phase: x for x in own if (x.message.step, x.message.attempt) == (view.step, view.attempt)}
    for phase in letters:
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


def _is_mislabelled(view: View, event: Banned) -> bool:
    """E4: more than ``bound`` other members, so an honest one, name another place at the same height.

    Honest members whose messages name one root came there by one way, and are at one place. Those who saw other
    messages before may be in another phase, without guilt.
    """
    said = {x.sender: x for x in event.evidence if x.domain is Domain.AGREED}
    whole = len(said) == len(event.evidence) and set(said) <= set(view.roster)
    own = said.pop(event.key, None)
    if own is None or not whole or any(x.height != own.height for x in said.values()):
        return False
    first = own.height == view.height and _is_sealed(view)
    places = Counter((x.step, x.attempt, x.phase) for x in said.values() if first or x.previous == own.previous)
    right = [x for x, count in places.items() if count > view.bound and x[:2] == (view.step, view.attempt)]
    return bool(right) and (own.step, own.attempt, own.phase) not in right


def _is_sealed(view: View) -> bool:
    """Whether the view was certified before its first message: then no honest member is elsewhere at that height."""
    last = view.attempts[-1] if view.attempts else None
    return last is None or last.step == view.step or last.roster != view.roster


def _is_off_balance(config: Config, examiner: Examiner, view: View, event: Banned, shown: Iterable[Charge]) -> bool:
    """V2: the reports that all agreed on, corrected where somebody was convicted, do not add up to zero."""
    transcript = _read_phases(config, examiner, view, event)
    decision = _judge(config, transcript, shown)
    if decision is None or transcript.reports is None or not _follows(decision, event):
        return False
    failing = _find_failing(config, view, transcript.reports, decision.corrections)
    return event.key in failing and len(failing) <= view.bound


def _find_failing(
    config: Config, view: View, reports: Values, corrections: Mapping[tuple[bytes, int], tuple[float, ...]]
) -> set[bytes]:
    """Whose aggregates are off balance, counted here again."""
    count, found = len(view.roster), set()
    bodies = {key: x.body for key, x in reports.items() if isinstance(x.body, m.Report) and x.body.norms}
    for part, size in enumerate(compute_part_sizes(config.size, count)):
        eps = sum_bound(view.tau, len(bodies), size, WIRE_TYPES[config.wire], config.cap)
        for place in range(config.projections):
            said = {key: body.sums[place * count + part] for key, body in bodies.items()}
            said |= {key: right[place] for (key, at), right in corrections.items() if at == part}
            try:
                fine = abs(math.fsum(said.values())) <= eps
            except OverflowError:
                fine = False
            found |= set() if fine else {view.roster[part]}
    return found


_WEIGHED = (Phase.REPORT, Phase.REPORT_AGAIN, Phase.CONFIRM, Phase.VOTE)
"""What the judges look at when an attempt is over."""


def _judge(config: Config, transcript: Transcript, shown: Iterable[Charge]) -> Decision | None:
    """What the judges make of the evidence; None if it is not what all agreed on, or something is left out.

    Each message names the root of all messages of the phase before it, and no honest member goes on from a phase in
    which they do not all name one. So what somebody signs later for an old slot is in nobody's history, and the accused
    itself has seen what it is judged by. On the votes nobody is asked to have agreed: what a few sign anew changes no
    majority of honest ones, and accusers without one are not banned.
    """
    phases, roster = transcript.phases, transcript.view.roster
    if Phase.CONFIRM not in phases or any({*values} != {*roster} for values in (*phases.values(), *transcript.heard)):
        return None
    votes = (*transcript.heard, phases.get(Phase.VOTE))
    chain = [x for x in (transcript.reports, phases[Phase.CONFIRM], *votes) if x is not None]
    for before, after in pairwise(chain):
        root = compute_values_root(roster, before)
        if any(letter.message.previous != root for letter in after.values()):
            return None
    if any(find_offenders(config, transcript, phase).banned for phase in phases):
        return None
    cases = {compute_case_digest(case): case for case in shown}
    try:
        agenda = make_agenda(config, transcript, cases, len(transcript.heard))
    except KeyError:  # a case is left out
        return None
    needed = {case.digest for case in agenda if case.accusers and is_received(config, transcript, case)}
    if (agenda and Phase.VOTE not in phases) or needed - cases.keys():
        return None
    return decide(config, transcript, agenda, cases)


def _follows(decision: Decision | None, event: Banned) -> bool:
    """Whether the judges ban this key by this rule."""
    offence = decision.banned.get(event.key) if decision is not None else None
    return offence is not None and offence.rule is event.rule


def _read_phases(config: Config, examiner: Examiner, view: View, event: Banned) -> Transcript:
    """What members said in this attempt, phase by phase; nothing of whoever is shown to have said two things."""
    said: dict[tuple[Phase, int], dict[bytes, list[Letter]]] = {}
    for message in event.evidence:
        letter = examiner.examine(message)
        here = message.domain is Domain.AGREED and (message.step, message.attempt) == (view.step, view.attempt)
        if letter is not None and here and message.phase in _WEIGHED:
            height = message.height if message.phase is Phase.VOTE else 0  # there may be several rounds of it
            said.setdefault((message.phase, height), {}).setdefault(message.sender, []).append(letter)
    found = {
        place: {key: values[key][0] for key in view.roster if len({x.digest for x in values.get(key, ())}) == 1}
        for place, values in sorted(said.items())
    }
    rounds = [values for (phase, _), values in found.items() if phase is Phase.VOTE]
    phases = {phase: values for (phase, _), values in found.items()}
    return Transcript(view, compute_duties(config, view), phases, heard=rounds[:-1])


def _is_voted(config: Config, examiner: Examiner, view: View, event: Banned, shown: Iterable[Charge]) -> bool:
    """A strict majority of those who were members then, without the accused, said so in signed ballots."""
    ballots, case = _read_ballots(examiner, view, event), event.case
    if event.rule is Rule.NORMS and event.key in view.roster:
        part = view.roster.index(event.key)
        digest = compute_digest("norms", view.step.to_bytes(8, "little"), part.to_bytes(8, "little"))
        return _has_majority(view, ballots, digest, set(view.roster) - {event.key}, Verdict.GUILTY)
    if case is None:
        for suspect in _list_suspects(config, view):
            if suspect.key != event.key or suspect.step != event.step:
                continue
            place = suspect.step.to_bytes(8, "little") + suspect.attempt.to_bytes(8, "little")
            digest = compute_digest("suspect", suspect.key, place)
            voters = _find_voters(view, suspect.step, suspect.attempt) - {suspect.key}
            if _has_majority(view, ballots, digest, voters, Verdict.GUILTY):
                return True
        return False
    if _is_convicted(config, examiner, view, event):
        return True
    digest, voters = compute_case_digest(case), _find_voters(view, *get_place(case)) - {get_accused(case)}
    if isinstance(case, m.Accusation) and case.rule is Rule.GRADIENT and event.rule is Rule.REPORT:
        guilty = _has_majority(view, ballots, digest, voters, Verdict.GUILTY)
        found = guilty and event.key in _find_accomplices(view, case)
        return found and _follows(_judge(config, _read_phases(config, examiner, view, event), shown), event)
    # A false accusation, perhaps of itself.
    named = event.key in _find_accusers(examiner, view, event, digest)
    return named and _has_majority(view, ballots, digest, voters, Verdict.INNOCENT)


def _is_convicted(config: Config, examiner: Examiner, view: View, event: Banned) -> bool:
    """Whether votes found the banned key guilty of what the case says."""
    case = event.case
    if case is None or get_accused(case) != event.key or not _is_signed(config, examiner, event):
        return False
    voters = _find_voters(view, *get_place(case)) - {event.key}
    ballots = _read_ballots(examiner, view, event)
    return _has_majority(view, ballots, compute_case_digest(case), voters, Verdict.GUILTY)


def _find_accomplices(view: View, case: m.Accusation) -> set[bytes]:
    """Who let the reports pass that this case proves wrong; nobody, if that would be more than can be attackers.

    Those of other cases count as well: see :func:`_judge`.
    """
    record = find_record(view, case.step, case.attempt)
    if record is None or not has_concluded(view, case.step, case.attempt):
        return set()
    innocent = {case.accused, *record.excused}
    missed = [x for x in case.parts if x < len(record.roster) and Caught(case.accused, x) not in record.caught]
    found = {record.roster[part] for part in missed} - innocent
    return found if len({case.accused, *found} - {*view.banned}) <= view.bound else set()


def _list_suspects(config: Config, view: View) -> list[Suspect]:
    """Whose gradient all may have voted on: who left, and, tolerant, members whose checker did not get their bytes."""
    found = list(view.suspects)
    for check in compute_duties(config, view).checks if config.tolerance is not None else ():
        last = find_last(view, check.step)
        committed = last is not None and check.target in (*last.contributors, *last.trials)
        if last is not None and committed and check.target in view.roster:
            found.append(Suspect(check.target, last.step, last.attempt))
    return found


def _read_ballots(examiner: Examiner, view: View, event: Banned) -> dict[bytes, dict[bytes, Verdict]]:
    """How members voted in this attempt, by voter and case."""
    found: dict[bytes, dict[bytes, Verdict]] = {}
    for key, body in _read_bodies(examiner, view, event):
        if isinstance(body, m.Vote):
            found.setdefault(key, {}).update({x.case: x.verdict for x in body.ballots})
    return found


def _find_accusers(examiner: Examiner, view: View, event: Banned, digest: bytes) -> set[bytes]:
    """Who named the case in this attempt."""
    bodies = _read_bodies(examiner, view, event)
    return {key for key, body in bodies if isinstance(body, m.Confirm) and digest in body.accusations}


def _read_bodies(examiner: Examiner, view: View, event: Banned) -> list[tuple[bytes, m.Body]]:
    """What members said in this attempt."""
    here = [x for x in event.evidence if (x.step, x.attempt) == (view.step, view.attempt) and x.sender in view.roster]
    letters = [letter for x in here if (letter := examiner.examine(x)) is not None]
    return [(x.message.sender, x.body) for x in letters if x.body is not None]


def _find_voters(view: View, step: int, attempt: int) -> set[bytes]:
    for record in view.attempts:
        if (record.step, record.attempt) == (step, attempt):
            return set(view.roster) & set(record.roster)
    return set(view.roster)


def _has_majority(
    view: View, ballots: dict[bytes, dict[bytes, Verdict]], digest: bytes, voters: set[bytes], verdict: Verdict
) -> bool:
    count = sum(ballots.get(key, {}).get(digest) is verdict for key in voters)
    return 2 * count > len(voters) and count > view.bound
