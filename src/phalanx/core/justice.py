"""Who is out, and why: pure functions of agreed messages. Same transcript, same verdicts, for peers and auditors.

``find_offenders`` looks at one phase. ``make_agenda`` says what is to be voted on, ``decide`` what follows. Only these
can ban; a ban needs a proof that is in the transcript, or a strict majority of signed ballots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec

from phalanx.core import messages as m
from phalanx.core.config import AutomaticTau, Config
from phalanx.core.crypto import compute_commitment, compute_digest
from phalanx.core.envelope import Letter
from phalanx.core.gap import SUSPENDED, Gap, find_gaps, find_suspended
from phalanx.core.membership import (
    Caught,
    Changes,
    Complaint,
    Count,
    Rift,
    Suspect,
    View,
    change_members,
    find_record,
    find_replacements,
    find_targets,
    finish_step,
    has_concluded,
    is_enough,
    note_commits,
    note_draw,
    note_ending,
    note_withheld_share,
    retry_step,
)
from phalanx.core.messages import MAX_BALLOTS, Phase, Rule, Signed, Verdict
from phalanx.core.pace import (
    RIFT_STEPS,
    find_debtors,
    find_estranged,
    find_leak,
    find_limit,
    judge,
    limit_stay,
    make_pair,
    move_pace,
    read_timings,
    settle_debts,
    tell_debt,
)
from phalanx.core.partition import compute_part_sizes
from phalanx.core.slowpath import Resolution
from phalanx.core.transcript import Transcript
from phalanx.core.verification import sum_bound
from phalanx.core.wire import WIRE_TYPES

Cases = Mapping[bytes, m.Accusation | m.Proof]
"""Accusations and proofs by their digests: whoever has the digest knows that it has the right one."""


UNKNOWN = bytes(32)
"""The state that a member confirms if it lacks what would lead to one."""
LEFT = "left"
"""The reason of a removal that the member itself asked for."""
LATE = "late too often"
PAIR = "a pair that keeps naming each other"
PUT_OFF = "should have gone when the roster was too small for it"
_UNHEARD = "accused without evidence"
_PATIENT_WAITS = 12
"""WAITs, of some five deltas each, in which witnesses of attempts that are still checked are waited for."""


@dataclass(frozen=True, slots=True)
class Offence:
    """Why somebody is banned."""

    rule: Rule
    step: int
    reason: str
    evidence: tuple[Signed, ...]
    case: m.Accusation | m.Proof | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """What a step leaves of who costs whom time."""

    step: int
    debts: tuple[Count, ...]
    rifts: tuple[Rift, ...]


@dataclass(slots=True)
class Decision:
    banned: dict[bytes, Offence] = field(default_factory=dict)
    removed: dict[bytes, str] = field(default_factory=dict)
    failed: bool = False
    """The attempt cannot go on, whoever is to blame."""
    wrong: bool = False
    """An aggregate was wrong: the update is undone and the step tried again."""
    acquitted: tuple[Suspect, ...] = ()
    state: bytes | None = None
    """What the majority says the new state is."""
    corrections: dict[tuple[bytes, int], tuple[float, ...]] = field(default_factory=dict)
    undecided: set[bytes] = field(default_factory=set)
    """Accusers whose accusation found no majority either way."""
    accomplices: dict[tuple[int, int], list[tuple[bytes, bytes, Offence]]] = field(default_factory=dict)
    """By step and attempt: aggregators who let a wrong report pass, and whose."""
    excused: set[bytes] = field(default_factory=set)
    """Members who may know of lies that nobody was convicted of: no vote came of what they said."""
    pairs: set[tuple[bytes, bytes]] = field(default_factory=set)
    """Of those who are removed: who kept naming each other."""
    coming: frozenset[bytes] = frozenset()
    """Suspended members that come in at once, for those that go."""
    patient: bool = False
    """Whether witnesses of earlier attempts were waited for long enough."""
    late: frozenset[bytes] = frozenset()
    """Members that were late to more others than can be Byzantine, or say so of more: a strike."""
    cut: set[bytes] = field(default_factory=set)
    """Members that named more liars than fit the agenda."""
    pace: Pace | None = None
    """What is known of everybody's time after this attempt; None: nothing new."""
    slow: set[bytes] = field(default_factory=set)
    """Of those who are removed: who costs the others too much time."""

    def ban(self, key: bytes, offence: Offence) -> None:
        held = self.banned.get(key)
        if held is None or held.step < offence.step:
            self.banned[key] = offence
        self.removed.pop(key, None)

    def remove(self, key: bytes, reason: str) -> None:
        if key not in self.banned:
            self.removed.setdefault(key, reason)

    @property
    def ends_attempt(self) -> bool:
        return bool(self.failed or self.banned or self.removed)

    def get_changes(self, late: frozenset[bytes] = frozenset()) -> Changes:
        leaving = frozenset(key for key, reason in self.removed.items() if reason == LEFT)
        return Changes(
            frozenset(self.banned), frozenset(self.removed), late | self.late, frozenset(self.pairs), leaving
        )


def explain(view: View, key: bytes) -> str:
    """Why somebody goes whom this attempt did not blame: an earlier one did, or it has too many strikes."""
    group = next((group for group in view.owed if key in group), ())
    return (LATE, PUT_OFF, PAIR)[len(group)]


def is_stuck(config: Config, view: View, decision: Decision) -> bool:
    """Whether the same members would repeat the attempt: the floor lets nobody go that should.

    Nothing is repeated for free. The members say again what was to be said, until it can be had.
    """
    asked = {key for key, reason in decision.removed.items() if reason == LEFT}
    if decision.banned or not decision.removed.keys() - asked - decision.slow:
        return False
    return change_members(config, view, decision.get_changes()).roster == view.roster


# ---- One phase


def find_offenders(config: Config, transcript: Transcript, phase: Phase) -> Decision:
    """Who has said in this phase what nobody may say. Everything here is in the messages themselves."""
    view, values = transcript.view, transcript.phases[phase]
    place, start, decision = (view.step, view.attempt, phase), view.digest, Decision()
    for key, letter in values.items():
        message, body = letter.message, letter.body
        labels = (message.step, message.attempt, message.phase) == place
        if not labels or body is None or not _fits(config, transcript, key, letter):
            said: list[Signed] = []
            if not labels:  # only what stands beside it shows where it stood
                said = [x.message for other, x in values.items() if other != key]
            elif phase is Phase.AGGREGATE_AGAIN:  # what is said again is measured by what was said before
                said = [transcript.phases[Phase.AGGREGATE][key].message]
            reason = f"a {phase.name} that says what it may not"
            decision.ban(key, Offence(Rule.MALFORMED, view.step, reason, (message, *said)))
        elif isinstance(body, m.Commit) and (body.view != start or message.previous != view.previous):
            decision.remove(key, "starts from another view")
        elif isinstance(body, m.Reveal):
            commit = transcript.phases[Phase.COMMIT][key]
            assert isinstance(commit.body, m.Commit)
            opened = compute_commitment(config.run, view.step, view.attempt, key, body.share, body.salt)
            if opened != commit.body.share:
                case = m.WrongReveal(commit.message, message)
                offence = Offence(
                    Rule.REVEAL, view.step, "a share that does not open its commitment", (commit.message, message), case
                )
                decision.ban(key, offence)
    return decision


def _fits(config: Config, transcript: Transcript, key: bytes, letter: Letter) -> bool:
    """Whether a body can be said by this member in this attempt."""
    body, contributors = letter.body, transcript.duties.contributors
    if isinstance(body, m.Reveal):
        return True
    view, count = transcript.view, len(transcript.view.roster)
    if isinstance(body, m.Commit):
        return (body.parts is not None) == (key in contributors)
    if isinstance(body, m.Aggregate):
        known = not body.missing or all(i < count and view.roster[i] in contributors for i in body.missing)
        opened = not body.unopened or all(i < count and j < count for i, j in body.unopened)
        again = letter.message.phase is Phase.AGGREGATE_AGAIN
        if again:
            first = transcript.phases[Phase.AGGREGATE][key].body
            # Who lost its memory meanwhile may lack what it had, but nobody changes its mind.
            same = not isinstance(first, m.Aggregate) or body.result is None or first.result in (None, body.result)
            return known and opened and same and not body.trials
        return known and not body.unopened
    if isinstance(body, m.Report):
        if key not in contributors:
            whole = not body.sums and not body.norms
        else:
            whole = len(body.norms) == count and len(body.sums) == count * config.projections
        return whole and (not body.lacking or all(i < count for i in body.lacking))
    return not isinstance(body, m.Confirm) or body.timing.fits(count)


def find_unopened(
    transcript: Transcript, bodies: Mapping[bytes, m.Aggregate | m.Vote], asked: set[tuple[int, int]]
) -> Decision:
    """Who did not open a part although asked: more than ``bound`` members, so an honest one, did not get it."""
    view, decision = transcript.view, Decision()
    lacking = Counter(pair for body in bodies.values() for pair in body.unopened if pair in asked)
    for (owner, _), count in lacking.items():
        if count > view.bound:
            decision.remove(view.roster[owner], "did not open a part that it was asked for")
    return decision


def decide_openings(config: Config, transcript: Transcript) -> Decision:
    """After AGGREGATE was said again: whoever withheld a part goes, or whoever still denies to have it."""
    again = transcript.phases[Phase.AGGREGATE_AGAIN]
    bodies = {key: x.body for key, x in again.items() if isinstance(x.body, m.Aggregate)}
    decision = find_unopened(transcript, bodies, find_requests(transcript))
    if not decision.removed:
        for key, body in bodies.items():
            if body.result is None:
                decision.remove(key, "denies to have a part that all could get")
    return _forgive(transcript, decision)


def _forgive(transcript: Transcript, decision: Decision) -> Decision:
    """More to blame than there can be attackers: ``delta`` did not hold. The attempt is over, but nobody goes."""
    decision.failed = bool(decision.removed)
    if len(decision.removed) > transcript.view.bound:
        decision.removed.clear()
    return decision


def find_requests(transcript: Transcript) -> set[tuple[int, int]]:
    """The pairs (owner, part) that aggregators named missing."""
    found = set()
    for part, letter in enumerate(transcript.phases[Phase.AGGREGATE].values()):
        if isinstance(letter.body, m.Aggregate):
            found |= {(owner, part) for owner in letter.body.missing}
    return found


def decide_aggregates(transcript: Transcript) -> Decision:
    """After REPORT: an aggregate that at most ``bound`` members have puts its aggregator out."""
    view, decision = transcript.view, Decision()
    bodies = [x.body for x in transcript.phases[Phase.REPORT].values() if isinstance(x.body, m.Report)]
    lacking = Counter(part for body in bodies for part in body.lacking)
    for part, count in lacking.items():
        if len(view.roster) - count <= view.bound:
            decision.remove(view.roster[part], "kept its aggregate from almost everybody")
    return _forgive(transcript, decision)


def decide_reports(transcript: Transcript) -> Decision:
    """After REPORT was said again: an aggregate that others had could be fetched; one that few have was kept back."""
    view, decision = transcript.view, Decision()
    said = transcript.phases[Phase.REPORT_AGAIN]
    bodies = {key: letter.body for key, letter in said.items() if isinstance(letter.body, m.Report)}
    lacking = Counter(part for body in bodies.values() for part in body.lacking)
    hidden = {part for part, count in lacking.items() if len(view.roster) - count <= view.bound}
    for part in sorted(hidden):
        decision.remove(view.roster[part], "kept its aggregate from almost everybody")
    for key, body in bodies.items():
        if set(body.lacking) - hidden:
            decision.remove(key, "denies to have an aggregate that all could get")
    return _forgive(transcript, decision)


# ---- The whole step


@dataclass(frozen=True, slots=True)
class Case:
    """Something to vote on: an accusation, the commit of somebody who left, or an aggregate far from everybody."""

    digest: bytes
    accusers: tuple[bytes, ...] = ()
    suspect: Suspect | None = None
    part: int | None = None
    charge: bool = False
    """Whether it is a gradient charge, heard where its accusers declared it as one."""
    round: int = 0
    """In which VOTE of the attempt it is heard."""


def make_closing_agenda(view: View) -> tuple[Case, ...]:
    """What is to be voted on anyway, whatever members say."""
    return tuple(map(_make_case, find_heard(view)))


def _make_case(suspect: Suspect) -> Case:
    place = suspect.step.to_bytes(8, "little") + suspect.attempt.to_bytes(8, "little")
    return Case(compute_digest("suspect", suspect.key, place), suspect=suspect)


def make_agenda(config: Config, transcript: Transcript, cases: Cases, rounds: int = 0) -> tuple[Case, ...]:
    """What is voted on, and in which round, once ``rounds`` VOTEs are over.

    Gradient charges cost everybody a gradient each: of each accuser they are heard one by one, as long as they prove
    true. All else is heard at once.
    """
    agenda = [*_make_first_agenda(config, transcript)]
    for round_ in range(1, rounds + 1):
        agenda += _make_later_agenda(config, transcript, cases, agenda, round_)
    return tuple(agenda)


def find_lists(transcript: Transcript) -> dict[bytes, tuple[tuple[bytes, bytes], ...]]:
    """The gradient charges of each accuser: whom, and the case. One that accuses more than can be guilty has none."""
    view, share = transcript.view, get_share(transcript)
    lists = {}
    for key, letter in transcript.phases[Phase.CONFIRM].items():
        if isinstance(letter.body, m.Confirm) and letter.body.charged:
            fits = len(letter.body.accusations) - len(letter.body.charged) < share
            lists[key] = letter.body.charges if fits and not _accuses_too_many(view, letter.body) else ()
    return lists


def _accuses_too_many(view: View, body: m.Confirm) -> bool:
    return len({*body.charged} - {*view.banned}) > max(1, view.bound)


def _make_later_agenda(
    config: Config, transcript: Transcript, cases: Cases, agenda: Sequence[Case], round_: int
) -> list[Case]:
    """The next charge of each list whose charges so far were all true. Who is convicted is not tried again."""
    known = {case.digest: case for case in agenda if case.charge}
    guilty = {x for x, case in known.items() if _find_verdict(config, transcript, case, cases) is Verdict.GUILTY}
    convicted = {get_accused(cases[digest]) for digest in guilty}
    accusers: dict[bytes, list[bytes]] = {}
    for key, charges in find_lists(transcript).items():
        for accused, digest in charges:
            if digest not in known and accused not in convicted:
                accusers.setdefault(digest, []).append(key)
                break
            if digest in known and not (digest in guilty and _is_declared(cases[digest], True, accused)):
                break
    return [Case(digest, tuple(accusers[digest]), charge=True, round=round_) for digest in sorted(accusers)]


def _find_verdict(config: Config, transcript: Transcript, case: Case, cases: Cases) -> Verdict | None:
    """The verdict on an accusation that was received; None: no majority, or nobody knows what it says."""
    if not is_received(config, transcript, case):
        return None
    charge = cases[case.digest]
    # Those who accuse vote too: of what is true all honest members may be the accusers.
    voters = find_voters(transcript, *get_place(charge)) - {get_accused(charge)}
    return _tally(transcript, case, voters)


def _make_first_agenda(config: Config, transcript: Transcript) -> tuple[Case, ...]:
    view = transcript.view
    unshown = {suspect for suspect in find_unshown(config, transcript).values() if suspect.key in view.roster}
    cases = {case.digest: case for case in map(_make_case, (*find_heard(view), *unshown))}
    for part in find_distant(config, transcript):
        digest = compute_digest("norms", view.step.to_bytes(8, "little"), part.to_bytes(8, "little"))
        cases[digest] = Case(digest, part=part)
    share = get_share(transcript)
    charges: dict[bytes, list[bytes]] = {}
    for key, listed in find_lists(transcript).items():
        if listed:
            charges.setdefault(listed[0][1], []).append(key)
    for digest, keys in charges.items():
        cases.setdefault(digest, Case(digest, tuple(keys), charge=True))
    accusers: dict[bytes, list[bytes]] = {}
    for key, letter in transcript.phases[Phase.CONFIRM].items():
        if isinstance(letter.body, m.Confirm):
            for digest in _get_plain(letter.body)[:share]:
                accusers.setdefault(digest, []).append(key)
    for digest, keys in accusers.items():
        cases.setdefault(digest, Case(digest, tuple(keys)))
    return tuple(cases[digest] for digest in sorted(cases))


def _get_plain(body: m.Confirm) -> tuple[bytes, ...]:
    """The accusations that are heard at once."""
    return body.accusations[: len(body.accusations) - len(body.charged)]


def find_heard(view: View) -> list[Suspect]:
    """The suspects that are voted on now: the oldest first, as many as leave room for parts, checks and accusations."""
    oldest = sorted(view.suspects, key=lambda suspect: (suspect.step, suspect.attempt, suspect.key))
    return oldest[: MAX_BALLOTS - 3 * len(view.roster)]


def find_unshown(config: Config, transcript: Transcript) -> dict[tuple[bytes, bytes], Suspect]:
    """Tolerant: whose bytes its checker says it did not get, by checker and target. Everybody asks members for them."""
    view = transcript.view
    if config.tolerance is None:
        return {}
    said = {
        (key, finding.target)
        for key, letter in (transcript.reports or {}).items()
        if isinstance(letter.body, m.Report)
        for finding in letter.body.findings
        if finding.verdict is Verdict.NOT_RECEIVED
    }
    found = {}
    for check in transcript.duties.checks:
        record, pair = find_record(view, check.step, check.attempt), (check.checker, check.target)
        if pair in said and record is not None and check.target in (*record.contributors, *record.trials):
            found[pair] = Suspect(check.target, record.step, record.attempt)
    return dict(sorted(found.items()))


def _find_hidden(config: Config, transcript: Transcript) -> set[bytes]:
    """Tolerant: whose bytes most of its checkers say they did not get. Some may lie."""
    unshown = find_unshown(config, transcript)
    if not unshown:
        return set()
    checkers: dict[bytes, set[bytes]] = {}
    for check in transcript.duties.checks:
        checkers.setdefault(check.target, set()).add(check.checker)
    lacking = Counter(target for _, target in unshown)
    return {target for target, count in lacking.items() if 2 * count > len(checkers[target])}


def get_share(transcript: Transcript) -> int:
    """How many accusations of one member fit the agenda."""
    parts, suspects = len(transcript.view.roster), len(find_heard(transcript.view))
    return (MAX_BALLOTS - 2 * parts - suspects) // parts


def _find_cut(transcript: Transcript, heard: Mapping[bytes, m.Accusation | m.Proof]) -> set[bytes]:
    """Members whose whole share of the agenda is liars about their own part, with more accusations to come."""
    view, share, found = transcript.view, get_share(transcript), set()
    for key, letter in transcript.phases[Phase.CONFIRM].items():
        if isinstance(letter.body, m.Confirm) and len(_get_plain(letter.body)) > share:
            charges = [heard.get(digest) for digest in _get_plain(letter.body)[:share]]
            own = (Rule.REPORT, view.step, view.attempt, (view.roster.index(key),))
            liars = {
                charge.accused
                for charge in charges
                if isinstance(charge, m.Accusation) and (charge.rule, charge.step, charge.attempt, charge.parts) == own
            }
            found |= {key} if len(liars) == share else set()
    return found


def find_distant(config: Config, transcript: Transcript) -> list[int]:
    """V3: parts whose aggregate more than half of the contributors find farther than ``delta_max``."""
    rows, limit = _get_norms(transcript), config.delta_max
    far = [(j, norms) for j, norms in enumerate(zip(*rows, strict=False)) if max(norms) > limit]  # usually none
    return [j for j, norms in far if 2 * sum(norm > limit for norm in norms) > len(rows)]


def _get_norms(transcript: Transcript) -> list[tuple[float, ...]]:
    """What each contributor reported of its distances, one from each part's aggregate."""
    bodies = (letter.body for letter in (transcript.reports or {}).values())
    return [body.norms for body in bodies if isinstance(body, m.Report) and body.norms]


def find_voters(transcript: Transcript, step: int, attempt: int) -> set[bytes]:
    """Members now that were members then. Nobody votes on what is no longer kept."""
    view = transcript.view
    if (step, attempt) == (view.step, view.attempt):
        return set(view.roster)
    for record in view.attempts:
        if (record.step, record.attempt) == (step, attempt):
            return set(view.roster) & set(record.roster)
    return set(view.roster)


def is_received(config: Config, transcript: Transcript, case: Case) -> bool:
    """Whether an honest member has the evidence, so that all can get it, and few lack it.

    Honest members that have it are then more than ``bound``, even if all attackers say that they do: if it is false,
    they say so, and its bearer pays. Some that were out may lack it. An honest accuser shows it to all others.
    """
    view, ballots = transcript.view, _ballots(transcript, case)
    having = sum(ballots.get(key, Verdict.NOT_RECEIVED) is not Verdict.NOT_RECEIVED for key in view.roster)
    return view.bound < having >= min(len(view.roster) - view.bound, 2 * view.bound + 1)


def _ballots(transcript: Transcript, case: Case) -> dict[bytes, Verdict]:
    found = {}
    for key, letter in transcript.get_votes(case.round).items():
        if isinstance(letter.body, m.Vote):
            for ballot in letter.body.ballots:
                if ballot.case == case.digest:
                    found[key] = ballot.verdict
    return found


def _tally(transcript: Transcript, case: Case, voters: set[bytes]) -> Verdict | None:
    """The verdict of a strict majority, if there is one."""
    ballots = _ballots(transcript, case)
    counts = Counter(ballots[key] for key in voters if key in ballots)
    for verdict in (Verdict.GUILTY, Verdict.INNOCENT):
        if 2 * counts[verdict] > len(voters) and counts[verdict] > transcript.view.bound:
            return verdict
    return None


def get_accused(case: m.Accusation | m.Proof) -> bytes:
    if isinstance(case, m.Accusation):
        return case.accused
    if isinstance(case, m.Equivocation):
        return case.first.sender
    return case.message.sender if isinstance(case, m.MalformedBody) else case.commit.sender


_RULES: dict[type, Rule] = {
    m.Equivocation: Rule.EQUIVOCATION,
    m.WrongReveal: Rule.REVEAL,
    m.WrongOpening: Rule.OPENING,
    m.MalformedBody: Rule.MALFORMED,
}


def decide(config: Config, transcript: Transcript, agenda: tuple[Case, ...], cases: Cases) -> Decision:
    """What follows from a whole attempt. ``cases`` holds what is behind the digests of the agenda."""
    decision = Decision()
    _decide_votes(config, transcript, agenda, cases, decision)
    _decide_norms(transcript, agenda, decision)
    _decide_sums(config, transcript, decision)
    _decide_blind(config, transcript, decision)
    _decide_states(transcript, decision)
    _decide_complaints(config, transcript, decision)
    if config.tolerance is not None:
        gaps = (*transcript.view.gaps, *find_fresh_gaps(transcript))
        for key in sorted(find_suspended(gaps, transcript.view.bound)):
            decision.remove(key, SUSPENDED)
    _decide_pace(config, transcript, decision)
    for key in sorted(find_leaving(transcript)):
        decision.remove(key, LEFT)
    return decision


def find_fresh_gaps(transcript: Transcript) -> list[Gap]:
    """Tolerant: what this attempt's reports say of gradients between the thresholds."""
    said = {k: x.body.findings for k, x in (transcript.reports or {}).items() if isinstance(x.body, m.Report)}
    drawn = {(check.checker, check.target) for check in transcript.duties.checks}
    found = find_gaps(transcript.view.step, said, drawn)
    return [gap for gap in found if gap.target in transcript.view.roster]


def find_leaving(transcript: Transcript) -> set[bytes]:
    """Who said goodbye. Where too few would stay they remain members, and say so again."""
    confirms = transcript.phases.get(Phase.CONFIRM, {})
    return {key for key, letter in confirms.items() if isinstance(letter.body, m.Confirm) and letter.body.leaving}


def _decide_votes(
    config: Config, transcript: Transcript, agenda: tuple[Case, ...], cases: Cases, decision: Decision
) -> None:
    view = transcript.view
    votes = _get_vote_evidence(transcript)
    acquitted, unshown = [], []
    verdicts: dict[tuple[bytes, bool], Verdict | None] = {}
    for case in agenda:
        if case.suspect is not None:
            suspect = case.suspect
            voters = find_voters(transcript, suspect.step, suspect.attempt) - {suspect.key}
            verdict = _tally(transcript, case, voters)
            if verdict is Verdict.GUILTY and suspect.key not in view.banned:
                left = suspect.key not in view.roster
                reason = "left, and its gradient was wrong" if left else "its gradient was wrong when all checked it"
                decision.ban(suspect.key, Offence(Rule.GRADIENT, suspect.step, reason, votes))
            if verdict is not None or view.step >= config.steps:  # else it is voted on again, as long as it is kept
                acquitted.append(suspect)
            if config.tolerance is not None and verdict is None:
                ballots = _ballots(transcript, case)
                # Right bytes, shown to all, would have cleared it: it shows wrong ones to some.
                lacking = sum(ballots.get(key) in (Verdict.NOT_RECEIVED, Verdict.GUILTY) for key in voters)
                if 2 * lacking > len(voters) and not _has_been_out(view, suspect):
                    unshown.append(suspect.key)
        elif case.accusers and is_received(config, transcript, case):
            verdicts[case.digest, case.charge] = _find_verdict(config, transcript, case, cases)
    decision.acquitted = tuple(acquitted)
    hidden = {*unshown} & {*view.roster}
    if len(hidden) <= view.bound:  # else it was not they: messages took longer than delta
        for key in hidden:
            decision.remove(key, "did not show its gradient when all asked for it")
    decision.undecided = {
        key
        for case in agenda
        if verdicts.get((case.digest, case.charge), Verdict.GUILTY) is None
        for key in case.accusers
    }
    named = {(case.digest, case.charge) for case in agenda}
    convicted = {
        get_accused(cases[digest])
        for (digest, charge), verdict in verdicts.items()
        if charge and verdict is Verdict.GUILTY
    }
    lists = find_lists(transcript)
    for key, letter in transcript.phases[Phase.CONFIRM].items():
        if not isinstance(letter.body, m.Confirm):
            continue
        if _accuses_too_many(view, letter.body):
            decision.remove(key, "accuses more members than may be Byzantine")
        said = [(digest, False, b"") for digest in _get_plain(letter.body)]
        said += [(digest, True, accused) for accused, digest in lists.get(key, ())]
        for digest, listed, accused in said:
            # An accusation stands under the same digest where somebody else declared it as a gradient charge.
            place = (digest, listed or (digest, False) not in named)
            if place not in named:
                if listed and accused in convicted:
                    continue  # it was right, and others were heard first
                break  # beyond its share of the agenda, or of a list that has ended
            if place not in verdicts or not _is_declared(cases[digest], listed, accused):
                decision.remove(key, _UNHEARD)
                break
            verdict = verdicts[place]
            if verdict is Verdict.INNOCENT:
                reason = "a false accusation"
                decision.ban(key, Offence(_get_rule(cases[digest]), view.step, reason, votes, cases[digest]))
                break
            if verdict is Verdict.GUILTY:
                _convict(config, transcript, cases[digest], votes, decision)
            elif listed:
                break
    heard = {digest: cases[digest] for digest, _ in verdicts}
    for case in agenda:
        if verdicts.get((case.digest, case.charge), Verdict.GUILTY) is None:
            # All can see the evidence of V1 and agree on it, unless it was kept from some. And one honest member that
            # finds a charge false shows that it was not made in good faith.
            cleared = Counter(_ballots(transcript, case).values())[Verdict.INNOCENT] > view.bound
            if cleared or _get_rule(heard[case.digest]) is Rule.REPORT:
                for key in case.accusers:
                    decision.remove(key, _UNHEARD)
    confirmed = {k for k, x in transcript.phases[Phase.CONFIRM].items() if isinstance(x.body, m.Confirm)}
    unheard = {key for key, reason in decision.removed.items() if reason == _UNHEARD}
    decision.wrong |= bool(unheard)  # whether their aggregates are right nobody can say
    decision.cut = _find_cut(transcript, heard)
    decision.excused = {*view.roster} - confirmed | unheard | decision.cut
    for found in decision.accomplices.values():
        if len({key for pair in found for key in pair[:2]} - {*view.banned}) <= view.bound:  # else it was not they
            for key, _, offence in found:
                if key not in view.banned:
                    decision.ban(key, offence)


def _is_declared(case: m.Accusation | m.Proof, listed: bool, accused: bytes) -> bool:
    """Whether an accusation is what its accuser said it was: a gradient charge, of this member, or none."""
    gradient = isinstance(case, m.Accusation) and case.rule is Rule.GRADIENT
    return gradient == listed and (not listed or get_accused(case) == accused)


def _has_been_out(view: View, suspect: Suspect) -> bool:
    """Whether a member was suspended since that commit: it may have lost its bytes, and has paid for its absence."""
    place = (suspect.step, suspect.attempt)
    return any(suspect.key not in x.roster for x in view.attempts if (x.step, x.attempt) > place)


def _get_vote_evidence(transcript: Transcript) -> tuple[Signed, ...]:
    """Who accused, and who voted how: enough to count again."""
    phases = (transcript.phases.get(phase, {}) for phase in (Phase.CONFIRM, Phase.VOTE))
    confirms, last = phases
    rounds = (confirms, *transcript.heard, last)
    return tuple(letter.message for values in rounds for letter in values.values())


def get_place(charge: m.Accusation | m.Proof) -> tuple[int, int]:
    if isinstance(charge, m.Accusation):
        return charge.step, charge.attempt
    message = charge.first if isinstance(charge, m.Equivocation) else None
    message = message or (charge.message if isinstance(charge, m.MalformedBody) else charge.commit)  # type: ignore[union-attr]
    return message.step, message.attempt


def _get_rule(charge: m.Accusation | m.Proof) -> Rule:
    return charge.rule if isinstance(charge, m.Accusation) else _RULES[type(charge)]


def _convict(
    config: Config,
    transcript: Transcript,
    charge: m.Accusation | m.Proof,
    votes: tuple[Signed, ...],
    decision: Decision,
) -> None:
    accused, (step, attempt), rule = get_accused(charge), get_place(charge), _get_rule(charge)
    if accused not in transcript.view.banned:
        decision.ban(accused, Offence(rule, step, "convicted by vote", votes, charge))
    if not isinstance(charge, m.Accusation) or not charge.parts:
        return
    if rule is Rule.REPORT and (step, attempt) == (transcript.view.step, transcript.view.attempt):
        width = len(charge.parts)
        for place, part in enumerate(charge.parts):
            decision.corrections[accused, part] = charge.sums[place::width]
    elif rule is Rule.GRADIENT:
        record = find_record(transcript.view, step, attempt)
        if record is None or not has_concluded(transcript.view, step, attempt):
            return
        for part in charge.parts:
            aggregator = record.roster[part] if part < len(record.roster) else accused
            if aggregator not in (accused, *record.excused) and Caught(accused, part) not in record.caught:
                reason = "let a wrong report on its aggregate pass"
                offence = Offence(Rule.REPORT, step, reason, votes, charge)
                decision.accomplices.setdefault((step, attempt), []).append((aggregator, accused, offence))


def _decide_norms(transcript: Transcript, agenda: tuple[Case, ...], decision: Decision) -> None:
    """V3: the aggregate of an opened part was recomputed by all; whoever withheld its part goes instead."""
    view = transcript.view
    distant = [case for case in agenda if case.part is not None]
    if not distant:
        return
    bodies = {key: x.body for key, x in transcript.get_votes(0).items() if isinstance(x.body, m.Vote)}
    asked = {(owner, case.part) for case in distant for owner in range(len(view.roster)) if case.part is not None}
    unopened = find_unopened(transcript, bodies, asked)
    for key, reason in unopened.removed.items():
        decision.remove(key, reason)
        decision.wrong = True
    for case in distant:
        assert case.part is not None
        aggregator = view.roster[case.part]
        if _tally(transcript, case, set(view.roster) - {aggregator}) is Verdict.GUILTY:
            evidence = _get_vote_evidence(transcript)
            decision.ban(aggregator, Offence(Rule.NORMS, view.step, "an aggregate far from everybody", evidence))
            decision.wrong = True


def _decide_sums(config: Config, transcript: Transcript, decision: Decision) -> None:
    """V2, after V1's corrections."""
    view, reports = transcript.view, transcript.reports or {}
    sizes = compute_part_sizes(config.size, len(view.roster))
    wire = WIRE_TYPES[config.wire]
    bodies = {k: x.body for k, x in reports.items() if isinstance(x.body, m.Report) and x.body.norms}
    parts = len(view.roster)
    if not bodies:
        return
    failing: dict[bytes, Offence] = {}
    evidence: tuple[Signed, ...] | None = None
    columns = list(zip(*(body.sums for body in bodies.values()), strict=False))
    bounds = {size: sum_bound(view.tau, len(bodies), size, wire, config.cap) for size in set(sizes)}
    for part, size in enumerate(sizes):
        eps = bounds[size]
        for place in range(config.projections):
            said: Collection[float] = columns[place * parts + part]
            if decision.corrections:
                column = dict(zip(bodies, said, strict=True))
                column |= {key: fixed[place] for (key, at), fixed in decision.corrections.items() if at == part}
                said = column.values()
            total = _add_up(said)
            if not abs(total) <= eps:
                # Only CONFIRM shows that all had these reports, and only the votes that nothing else was corrected.
                evidence = evidence or (*(x.message for x in reports.values()), *_get_vote_evidence(transcript))
                decision.wrong = True
                reason = f"its aggregate is off balance by {abs(total):.3g}, more than {eps:.3g}"
                failing[view.roster[part]] = Offence(Rule.SUM, view.step, reason, evidence)
    if len(failing) > view.bound:
        return  # more than there can be attackers: it was not they, and the step is tried again
    for key, offence in failing.items():
        if key in find_blind(config, transcript):
            continue
        if key in decision.undecided:  # it may be right about those who lied; but no attempt is lost for free
            decision.remove(key, "its aggregate is off balance, and nobody can tell whose fault that is")
        # Who named more liars than fit is spared: those convicted go in its place. Not heard is not proven wrong.
        elif key not in decision.cut and decision.removed.get(key) != _UNHEARD:
            decision.ban(key, offence)


def _decide_blind(config: Config, transcript: Transcript, decision: Decision) -> None:
    """Whoever cannot check what was said of its part answers for nothing: the step is tried again without it."""
    blind = find_blind(config, transcript)
    decision.wrong |= bool(blind)
    for key in sorted(blind) if len(blind) <= transcript.view.bound else ():  # else all have lost their memory
        decision.remove(key, "lost the rows of its part")


def find_blind(config: Config, transcript: Transcript) -> set[bytes]:
    """Members that lost the rows of their part. Where the run cannot go on without them they get them again."""
    view, confirms = transcript.view, transcript.phases[Phase.CONFIRM]
    blind = {key for key, letter in confirms.items() if isinstance(letter.body, m.Confirm) and letter.body.blind}
    if len(blind) > view.bound:
        return blind
    return {key for key in blind if is_enough(config, view.attempts, {*view.roster} - {key}, view.doubts)}


def _add_up(numbers: Iterable[float]) -> float:
    """The exact sum, so the same for everybody; whoever reports what has none is off balance."""
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.inf


def _decide_states(transcript: Transcript, decision: Decision) -> None:
    """E5: whoever comes to another state than the majority has to fetch it again. Never a ban."""
    confirms = transcript.phases[Phase.CONFIRM]
    states = Counter(x.body.state for x in confirms.values() if isinstance(x.body, m.Confirm))
    states.pop(UNKNOWN, None)
    state, count = states.most_common(1)[0] if states else (UNKNOWN, 0)
    if 2 * count <= len(confirms):
        return
    decision.state = state
    for key, letter in confirms.items():
        if isinstance(letter.body, m.Confirm) and letter.body.state != state:
            decision.remove(key, "came to another state")


def find_complaints(config: Config, transcript: Transcript) -> tuple[list[Complaint], frozenset[bytes]]:
    """Tolerant: who named whom where only the two of them can be to blame; and who was late.

    A member that more than ``bound`` name was late to an honest one, and one that names more than ``bound`` was itself
    cut off: each earns one strike, and nobody else is drawn into it. If more are late than can be Byzantine, ``delta``
    did not hold. Parts that are missing are paid for in time (:func:`_decide_pace`).
    """
    view = transcript.view
    unshown = find_unshown(config, transcript).items()
    here = (pair for pair, x in unshown if x.key in view.roster and not _has_been_out(view, x))
    found = [Complaint(view.step, *pair) for pair in here]
    late = _find_quarrellers(view, found)
    if len(late) > view.bound:
        return [], frozenset()
    return [c for c in found if c.namer not in late and c.named not in late], frozenset(late)


def _find_quarrellers(view: View, complaints: Sequence[Complaint]) -> set[bytes]:
    """Who names, or is named by, more members than may be Byzantine."""
    at_odds: dict[bytes, set[bytes]] = {}
    for complaint in complaints:
        at_odds.setdefault(complaint.namer, set()).add(complaint.named)
        at_odds.setdefault(complaint.named, set()).add(complaint.namer)
    return {key for key, others in at_odds.items() if len(others) > view.bound}


def _decide_complaints(config: Config, transcript: Transcript, decision: Decision) -> None:
    """Elimination: a pair that keeps naming each other goes together; who is at odds with too many goes alone."""
    view = transcript.view
    fresh, decision.late = find_complaints(config, transcript)
    if not fresh:
        return
    done = {*decision.banned, *decision.removed}  # whoever goes anyway takes nobody along
    complaints = [c for c in (*view.complaints, *fresh) if c.namer not in done and c.named not in done]
    gone = _find_quarrellers(view, complaints)
    if len(gone) > view.bound:
        return
    for key in sorted(gone):
        decision.remove(key, "at odds with more members than may be Byzantine")
    pairs = Counter(frozenset((c.namer, c.named)) for c in complaints)
    for pair, count in sorted(pairs.items(), key=lambda item: sorted(item[0])):
        if count >= config.complaints and not pair & gone:  # whoever takes one along takes nobody else
            gone |= pair
            if len(pair) == 2:
                one, other = sorted(pair)
                decision.pairs.add((one, other))
            reason = PAIR if len(pair) == 2 else "keeps naming itself"
            for key in sorted(pair):
                decision.remove(key, reason)


# ---- Pace


def _decide_pace(config: Config, transcript: Transcript, decision: Decision) -> None:
    """Who pays for whose time, from what all said in CONFIRM; who owes too much is suspended."""
    if transcript.view.step >= config.steps:
        return  # the run is over
    view, roster = transcript.view, transcript.view.roster
    place = {key: i for i, key in enumerate(roster)}
    bodies = [x.body for x in transcript.phases[Phase.CONFIRM].values()]
    reading = read_timings([x.timing if isinstance(x, m.Confirm) else m.NOTHING for x in bodies], view.bound)
    pace = move_pace(view.pace, reading.step)
    apart = {make_pair(place[rift.one], place[rift.other]) for rift in view.rifts}
    found = judge(reading, view.bound, pace, apart, _find_claims(transcript))
    charges = {roster[i]: charge for i, charge in found.charges.items()}
    leak = find_leak(pace)
    debts = settle_debts({x.key: x.count for x in view.debts}, charges, leak)
    limit = find_limit(config.delta, config.transfer_time, pace)
    gone = {*decision.banned, *decision.removed}
    counts = {record.key: record.count for record in view.absences}
    growing = [key for key in roster if charges.get(key, 0) > leak and key not in gone]  # else it makes up for it
    for key in find_debtors(debts, growing, limit, view.bound):
        debt = debts[key]
        debts[key] = limit_stay(debt, charges[key], limit, leak, counts.get(key, 0) + 1)
        decision.remove(key, tell_debt(charges[key], debt, limit))
        decision.slow.add(key)
    gone = {*decision.banned, *decision.removed}
    old = [rift for rift in view.rifts if rift.step > view.step - RIFT_STEPS]
    new = [Rift(view.step, roster[one], roster[other]) for one, other in sorted(found.rifts) if one != other]
    rifts = tuple(rift for rift in (*old, *new) if rift.one not in gone and rift.other not in gone)
    if find_estranged({make_pair(place[x.one], place[x.other]) for x in rifts}, view.bound) is None:
        rifts = ()  # it was the weather
    known = {*roster, *(x.key for x in view.suspended)} - {*decision.banned, *view.banned}
    owed = tuple(Count(key, debt) for key, debt in sorted(debts.items()) if key in known)
    decision.pace = Pace(pace, owed, rifts)


def _find_claims(transcript: Transcript) -> set[tuple[int, int]]:
    """Who says in AGGREGATE or REPORT that it misses a part or an aggregate, and whose."""
    place = {key: i for i, key in enumerate(transcript.view.roster)}
    claims: set[tuple[int, int]] = set()
    for phase in (Phase.AGGREGATE, Phase.REPORT):
        for key, letter in transcript.phases.get(phase, {}).items():
            if isinstance(letter.body, m.Aggregate):
                claims |= {(place[key], other) for other in letter.body.missing}
            elif isinstance(letter.body, m.Report):
                claims |= {(place[key], other) for other in letter.body.lacking}
    return claims


# ---- Views


def note_progress(config: Config, transcript: Transcript, until: int) -> View:
    """The attempt's view with what was agreed below height ``until`` and outlives the attempt: commits and targets."""
    view = transcript.view
    known = {phase for height, phase in transcript.heights.items() if height < until}
    contributors = transcript.duties.contributors
    if Phase.COMMIT in known and Phase.COMMIT in transcript.phases:
        served = tuple(sorted(find_served(transcript))) if Phase.AGGREGATE in known else ()
        view = note_commits(view, contributors, served)
    if Phase.REVEAL in known and transcript.randomness is not None:
        attempts = sum(record.step == view.step for record in view.attempts)
        drawn = find_targets(config, view, transcript.randomness, attempts)
        view = note_draw(view, transcript.randomness, drawn)
    return view


def find_late(transcript: Transcript) -> frozenset[bytes]:
    """Who was late in a slow path: more than ``bound`` members, so an honest one, say in CONFIRM that it was so.

    Two at least, where there are others: one that was cut off would say it of everybody.
    """
    confirms = transcript.phases.get(Phase.CONFIRM, {}).values()
    said = Counter(key for x in confirms if isinstance(x.body, m.Confirm) for key in x.body.late)
    least = min(max(2, transcript.view.bound + 1), len(transcript.view.roster) - 1)
    return frozenset(key for key, count in said.items() if count >= least)


def find_served(transcript: Transcript) -> dict[bytes, bytes]:
    """Probationers whose commit a strict majority lists, and the digest of that commit."""
    view = transcript.view
    if not view.candidates:
        return {}
    listed = Counter(
        trial
        for letter in transcript.phases.get(Phase.AGGREGATE, {}).values()
        if isinstance(letter.body, m.Aggregate)
        for trial in letter.body.trials
    )
    candidates = {candidate.key for candidate in view.candidates}
    return {
        trial.key: trial.message
        for trial, count in listed.items()
        if 2 * count > len(view.roster) and trial.key in candidates
    }


def make_retry(config: Config, transcript: Transcript, decision: Decision, height: int, previous: bytes) -> View:
    """The view of the next attempt at the same step."""
    view = _note_pace(note_progress(config, transcript, height), decision)
    changes = replace(decision.get_changes(find_late(transcript)), coming=decision.coming, patient=decision.patient)
    return retry_step(config, view, changes, height, previous, decision.acquitted)


def make_next(config: Config, transcript: Transcript, decision: Decision, height: int, previous: bytes) -> View:
    """The view of the next step, or of another attempt if an aggregate was wrong."""
    if decision.wrong or decision.state is None or transcript.randomness is None:
        return make_retry(config, transcript, decision, height, previous)
    view = _note_pace(note_progress(config, transcript, height), decision)
    view = note_ending(view, decision.excused, decision.corrections)
    norms = _get_norms(transcript)
    automatic = isinstance(config.tau, AutomaticTau)  # else nobody asks for the scale
    scale = median(map(median, zip(*norms, strict=False))) if norms and automatic else None
    confirms = transcript.phases[Phase.CONFIRM].values()
    asked = Counter(key for x in confirms if isinstance(x.body, m.Confirm) for key in set(x.body.joins))
    return finish_step(
        config,
        view,
        decision.get_changes(find_late(transcript)),
        height=height,
        previous=previous,
        state=decision.state,
        scale=scale,
        complaints=find_complaints(config, transcript)[0],
        served=find_served(transcript),
        unshown=_find_hidden(config, transcript),
        joins=[key for key, count in asked.items() if count > transcript.view.bound],
        acquitted=decision.acquitted,
        gaps=find_fresh_gaps(transcript) if config.tolerance is not None else (),
    )


def _note_pace(view: View, decision: Decision) -> View:
    pace = decision.pace
    if pace is None:
        return view
    return msgspec.structs.replace(view, pace=pace.step, debts=pace.debts, rifts=pace.rifts)


def follow_resolution(
    config: Config, transcript: Transcript, height: int, resolution: Resolution, concluded: View | None
) -> View:
    """The view after a slow path. ``concluded`` is what the step leads to if it stands, or what was being sealed."""
    if not resolution.out:
        return transcript.view
    previous = compute_digest("slow path", *(x for slot in resolution.slots for x in (slot.owner, slot.value or b"")))
    changes = Changes(resolution.banned, resolution.removed, coming=resolution.coming, patient=resolution.patient)
    start = height + 3  # above everything that anybody has signed
    if concluded is not None:
        return retry_step(config, concluded, changes, start, previous)
    view = note_progress(config, transcript, height)
    if resolution.removed and _may_be_revealed(transcript, height, resolution):
        view = note_withheld_share(view)
    return retry_step(config, view, changes, start, previous)


def _may_be_revealed(transcript: Transcript, height: int, resolution: Resolution) -> bool:
    """Whether somebody may have known the outcome of REVEAL and kept it from the others, by silence or a stray root."""
    phase = transcript.heights.get(height)
    if phase in (Phase.AGGREGATE, Phase.AGGREGATE_AGAIN):
        return any(slot.height == height + 1 for slot in resolution.slots)
    return phase is Phase.REVEAL


def find_back(transcript: Transcript) -> set[bytes]:
    """Suspended members that more than ``bound`` members, so an honest one, have heard of while they wait."""
    values = transcript.phases.get(Phase.WAIT, {}).values()
    listed = Counter(key for x in values if isinstance(x.body, m.Wait) for key in x.body.joins)
    return {key for key, count in listed.items() if count > transcript.view.bound}


def find_relief(config: Config, transcript: Transcript, decision: Decision) -> frozenset[bytes] | None:
    """Who comes in for those whom the floor kept, once a WAIT is agreed; None if too few are back."""
    waits = sum(phase is Phase.WAIT for phase in transcript.heights.values())
    changes, back = decision.get_changes(), find_back(transcript)
    decision.patient = waits >= _PATIENT_WAITS
    return find_replacements(config, transcript.view, changes, back, False, waits, decision.patient)


def is_changed(before: View, after: View) -> bool:
    """Whether the roster, or who may enter it, differs: then the old roster seals it."""
    return after.step == before.step or set(after.roster) != set(before.roster) or after.banned != before.banned
