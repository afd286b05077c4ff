"""The invariants of docs/PROTOCOL.md, section 12, checked from outside while a swarm runs.

A checker sees what every honest peer notes and signs, and may look into its memory; it never changes anything. Views
reach the checkers in the order in which they are first certified: what all honest peers go on from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from phalanx.core import messages as m
from phalanx.core.checking import cut, is_proven
from phalanx.core.codec import decode_body
from phalanx.core.config import KEPT_STEPS, AutomaticTau, Config
from phalanx.core.crypto import Domain, compute_commitment, compute_digest
from phalanx.core.envelope import Examiner
from phalanx.core.events import (
    AttemptStarted,
    Banned,
    Diverged,
    Halted,
    Jumped,
    Removed,
    RunFinished,
    SlowPath,
    StepFinished,
    Synced,
)
from phalanx.core.justice import find_offenders
from phalanx.core.membership import View, compute_batch_seed, compute_duties, compute_quorum, draw_targets
from phalanx.core.merkle import compute_root, hash_part, verify_path
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.partition import compute_part_sizes, join_parts
from phalanx.core.peer import Peer, compute_case_digest
from phalanx.core.transcript import Transcript
from phalanx.core.verification import (
    WIRE_TYPES,
    compute_report,
    prepare_gradient,
    projection_seeds,
    read_aggregate,
    read_part,
    sum_bound,
)
from phalanx.simulation.machine import Bowl, compute_state_digest
from phalanx.simulation.swarm import Swarm

PAIR = "a pair"
"""How the reason of an elimination begins."""


@dataclass(frozen=True, slots=True)
class Violation:
    seed: int
    step: int
    rule: str
    """The name of the invariant."""
    text: str

    def __str__(self) -> str:
        return f"seed {self.seed}, step {self.step}: {self.rule}: {self.text}"


class Checkers:
    """All checkers of one swarm, and what they found."""

    def __init__(self, swarm: Swarm, kinds: Iterable[type[Checker]] | None = None) -> None:
        self.swarm = swarm
        self.violations: list[Violation] = []
        self.chain: dict[tuple[int, int], View] = {}
        """Every certified view, by step and attempt, as first seen."""
        self.latest: View | None = None
        self.checkers: tuple[Checker, ...] = tuple(kind(self) for kind in (ALL if kinds is None else kinds))
        swarm.observers.append(self)

    @property
    def step(self) -> int:
        """How many steps are final."""
        return self.latest.step if self.latest is not None else 0

    def report(self, rule: str, step: int, text: str) -> None:
        if len(self.violations) < 100:
            self.violations.append(Violation(self.swarm.seed, step, rule, text))

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        for checker in self.checkers:
            checker.on_sign(key, domain, payload)

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        if not self.swarm.is_honest(key):
            return
        for checker in self.checkers:
            checker.on_note(key, event)
        if isinstance(event, StepFinished | RunFinished):
            self._see(key, event.view)
        elif isinstance(event, AttemptStarted):
            peer = self.swarm.get_peer(key)
            if peer is None or not peer.riding:  # what it rides on is not certified yet
                self._see(key, event.view)

    def _see(self, key: bytes, view: View) -> None:
        place = (view.step, view.attempt)
        if place not in self.chain:
            self.chain[place] = view
            before = self.latest
            if before is None or place > (before.step, before.attempt):
                self.latest = view
                for checker in self.checkers:
                    checker.on_view(key, before, view)

    def finish(self) -> None:
        for checker in self.checkers:
            checker.finish()


class Checker:
    """One invariant."""

    rule = ""

    def __init__(self, all_of_them: Checkers) -> None:
        self.all = all_of_them
        self.swarm = all_of_them.swarm
        self.config = self.swarm.config

    def report(self, step: int, text: str) -> None:
        self.all.report(self.rule, step, text)

    def on_note(self, key: bytes, event: Any) -> None:
        """An honest peer noted something."""

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        """``key`` is the first honest peer that starts from this certified view; ``before`` is the one before it."""

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        """An honest peer signed something."""

    def finish(self) -> None:
        """The run is over."""


def name(key: bytes) -> str:
    return key[:4].hex()


# ---- Agreement


class Agreement(Checker):
    """Honest peers hold bit-identical state, roster, ban list and history: for each attempt there is one view."""

    rule = "agreement"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.views: dict[tuple[int, int], tuple[bytes, bytes, View]] = {}
        self.states: dict[int, tuple[bytes, bytes]] = {}

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, AttemptStarted):
            peer = self.swarm.get_peer(key)
            if peer is not None and peer.riding:
                return
        elif not isinstance(event, StepFinished):
            return
        view: View = event.view
        digest = view.digest
        other, first, held = self.views.setdefault((view.step, view.attempt), (key, digest, view))
        if first != digest:
            fields = [f for f in View.__struct_fields__ if getattr(view, f) != getattr(held, f)]
            place = f"attempt {view.attempt}"
            self.report(view.step, f"{name(other)} and {name(key)} start {place} from other {', '.join(fields)}")
        other, state = self.states.setdefault(view.step, (key, view.state))
        if state != view.state:
            self.report(view.step, f"{name(other)} and {name(key)} hold different states")


class OneSignature(Checker):
    """No honest peer signs two values in a slot, or two votes in one ballot, crashes included."""

    rule = "one signature"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.signed: dict[tuple[Any, ...], bytes] = {}

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        place: tuple[Any, ...]
        if domain is Domain.AGREED:
            _, height, step, *_ = msgspec.msgpack.decode(payload)
            place = (key, height)
        elif domain is Domain.OUTCOME:
            content = msgspec.msgpack.decode(payload)
            height, step, body = content[1], content[2], decode_body(content[7])
            assert isinstance(body, m.Outcome)
            place = (key, height, body.round, body.final)
        else:
            return
        if self.signed.setdefault(place, payload) != payload:
            self.report(step, f"{name(key)} signed twice at {place[1:]}")


class OneCertificate(Checker):
    """Never two certificates for one slot: no two outcomes of a slow path can both find a quorum."""

    rule = "one certificate"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.votes: dict[int, dict[bytes, set[bytes]]] = {}

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        if domain is not Domain.OUTCOME:
            return
        content = msgspec.msgpack.decode(payload)
        height, step, body = content[1], content[2], decode_body(content[7])
        if not isinstance(body, m.Outcome) or not body.final:
            return
        outcome = msgspec.msgpack.encode(msgspec.structs.replace(body, round=0, final=False))
        outcomes = self.votes.setdefault(height, {})
        outcomes.setdefault(outcome, set()).add(key)
        view = self.all.latest
        if len(outcomes) > 1 and view is not None:
            byzantine = sum(member in self.swarm.byzantine for member in view.roster)
            likely = [who for who in outcomes.values() if len(who) + byzantine >= compute_quorum(self.config, view)]
            if len(likely) > 1:
                self.report(step, f"two outcomes at height {height} can find a quorum")


# ---- Punishment


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


# ---- The model's state


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
        sizes, dtype = compute_part_sizes(config.size, len(view.roster)), WIRE_TYPES[config.wire]
        parts = []
        for part, (owner, size) in enumerate(zip(view.roster, sizes, strict=True)):
            letter, data = (transcript.aggregates or {}).get(owner), peer.aggregates.get((*_place(view), part))
            body = letter.body if letter is not None else None
            if data is None or not isinstance(body, m.Aggregate) or hash_part(data) != body.result:
                return False
            aggregate = read_aggregate(data, size, dtype, config.cap)
            if aggregate is None:
                return False
            parts.append(aggregate)
        machine = self.swarm.get_machine(peer.key)
        if view.step not in machine.states or after.step != view.step + 1:
            return False
        copy = Bowl(config.size)
        copy.states = {view.step: machine.states[view.step]}
        if copy.apply(view.step, join_parts(parts).to(torch.float32)) != after.state:
            self.report(view.step, f"{name(peer.key)} goes on from a state that the agreed aggregates do not give")
        if (peer.key, view.step) not in self.punished:
            self._check_sums(transcript, sizes, dtype)
        return True

    def _check_sums(self, transcript: Transcript, sizes: Sequence[int], dtype: torch.dtype) -> None:
        config, view = self.config, transcript.view
        bodies = [x.body for x in (transcript.reports or {}).values() if isinstance(x.body, m.Report) and x.body.norms]
        for part, size in enumerate(sizes):
            eps = sum_bound(view.tau, len(bodies), size, dtype, config.cap)
            for place in range(part, config.projections * len(sizes), len(sizes)):
                total = sum(body.sums[place] for body in bodies)
                if not abs(total) <= eps:
                    self.report(view.step, f"part {part} is off balance by {total:.3g}, and nobody was punished")


def _place(view: View) -> tuple[int, int]:
    return view.step, view.attempt


# ---- Limits


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


# ---- Justice, draws and disputes


class Justice(Checker):
    """An attacker that keeps attacking is banned at the predicted rate; guilt that all can see is punished at once.

    The simulator knows every true gradient. From it follow what each contributor should have committed to and reported
    and whether an aggregate balances: nothing of this goes through the rules that it is to check. Where being caught is
    a matter of chance, a survivor's luck is multiplied up; less than one in a million is no luck.
    """

    rule = "justice"
    LEAST_LUCK = 1e-6

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.luck: dict[bytes, float] = {}
        self.wrong: dict[bytes, dict[int, float]] = {}
        """Who committed to, or reported, something wrong; in which steps; with which chance to be caught for it."""
        self.trials: dict[bytes, set[int]] = {}
        self.left: dict[bytes, int] = {}
        self.covered: set[int] = set()
        """Parts of the step that somebody reports wrongly about."""
        self.done: set[int] = set()
        self.end: View | None = None
        self.exact = self.swarm.setup.rounding == 0 and self.config.tolerance is None

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        for who in before.roster if before is not None else ():
            if who not in view.roster:
                self.left.setdefault(who, view.step)

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, RunFinished):
            self.end = event.view
        if not isinstance(event, StepFinished) or event.step in self.done or not self.exact:
            return
        peer = self.swarm.get_peer(key)
        transcript = _find_transcript(peer, event.step)
        states = self.swarm.get_machine(key).states
        if peer is None or transcript is None or transcript.reports is None or event.step not in states:
            return
        if Phase.CONFIRM in transcript.phases and event.view.step == event.step + 1:
            self.done.add(event.step)
            self._audit(peer, transcript, event.view)

    def _audit(self, peer: Peer, transcript: Transcript, after: View) -> None:
        config, view = self.config, transcript.view
        for who, steps in self.wrong.items():
            if view.step - 1 in steps and who in after.roster:
                self._try_luck(view.step, who, 1 - steps[view.step - 1])
        self._check_shares(transcript)
        count, dtype = len(view.roster), WIRE_TYPES[config.wire]
        sizes = compute_part_sizes(config.size, count)
        aggregates: list[torch.Tensor] = []
        for part, size in enumerate(sizes):
            read = read_aggregate(peer.aggregates.get((view.step, view.attempt, part), b""), size, dtype, config.cap)
            aggregates.append(torch.zeros(size, dtype=dtype) if read is None else read)
        duties, rows = compute_duties(config, view), {}
        self.covered = set()
        honest = sum(self.swarm.is_honest(who) for who in view.roster)
        for who in duties.contributors:
            parts = self._compute_parts(peer, view, who)
            commit = transcript.phases[Phase.COMMIT][who].body
            true = compute_root([hash_part(part) for part in parts])
            if isinstance(commit, m.Commit) and commit.parts == true:
                rows[who] = [
                    read_part(data, size, dtype, config.cap)[0] for data, size in zip(parts, sizes, strict=True)
                ]
                fine = self._check_report(transcript, after, who, rows[who], aggregates)
            else:
                fine = False
            if not fine:
                chance = len(duties.validators) / len(duties.contributors) * (honest - count // 2) / count
                self.wrong.setdefault(who, {})[view.step] = chance
        if len(rows) == len(duties.contributors):
            self._check_aggregates(view, after, rows, aggregates)
        self._check_trials(peer, view, after)

    def _check_trials(self, peer: Peer, view: View, after: View) -> None:
        """What a probationer is credited with was said by it; if it was wrong, it does not go on for long."""
        served = {candidate.key: candidate.served for candidate in after.candidates}
        for candidate in view.candidates:
            who = candidate.key
            if who in after.banned or (who not in served and who not in after.roster):
                continue
            if view.step - 1 in self.trials.get(who, ()):
                others = sum(other in self.swarm.byzantine for other in view.roster)
                self._try_luck(view.step, who, others / len(view.roster))
            if served.get(who, candidate.served + 1) > candidate.served:
                true = compute_root([hash_part(part) for part in self._compute_parts(peer, view, who)])
                roots = self._find_trials(view, who)
                if not roots:
                    self.report(view.step, f"{name(who)} is credited with a step that it did not serve")
                elif true not in roots:
                    self.trials.setdefault(who, set()).add(view.step)

    def _find_trials(self, view: View, who: bytes) -> set[bytes]:
        """What a probationer committed to, as far as honest peers know."""
        peers = [peer for key in self.swarm.honest if (peer := self.swarm.get_peer(key)) is not None]
        letters = [x for peer in peers for x in peer.trials.get(view.height, {}).get(who, {}).values()]
        return {letter.body.parts for letter in letters if isinstance(letter.body, m.Trial)}

    def _compute_parts(self, peer: Peer, view: View, who: bytes) -> list[bytes]:
        seed = compute_batch_seed(self.config, view.randomness, view.step, who)
        gradient = self.swarm.get_machine(peer.key).compute_gradient(view.step, seed)
        assert gradient is not None
        return cut(prepare_gradient(gradient, self.config.cap, WIRE_TYPES[self.config.wire]), len(view.roster))

    def _check_shares(self, transcript: Transcript) -> None:
        view = transcript.view
        shares: dict[bytes, bytes] = {}
        for who, letter in transcript.phases[Phase.REVEAL].items():
            commit = transcript.phases[Phase.COMMIT][who].body
            assert isinstance(letter.body, m.Reveal)
            assert isinstance(commit, m.Commit)
            place = (self.config.run, view.step, view.attempt, who, letter.body.share, letter.body.salt)
            if compute_commitment(*place) != commit.share:
                self.report(view.step, f"the share of {name(who)} counts, and does not open its commitment")
            if shares.setdefault(letter.body.share, who) != who:
                self.report(view.step, f"{name(who)} has the same share as {name(shares[letter.body.share])}")

    def _check_report(
        self, transcript: Transcript, after: View, who: bytes, rows: list[torch.Tensor], aggregates: list[torch.Tensor]
    ) -> bool:
        """Whether a report is right where that is left to chance; where an honest aggregator saw it, it is reported."""
        view, letter = transcript.view, (transcript.reports or {})[who]
        if not isinstance(letter.body, m.Report) or letter.body.lacking or transcript.randomness is None:
            return True
        seeds = projection_seeds(transcript.randomness, len(rows), self.config.projections)
        right, fine = compute_report(rows, aggregates, seeds, view.tau), True
        for at, (said, true) in enumerate(zip(letter.body.sums, right.sums, strict=True)):
            part = at % len(rows)
            scale = view.tau * math.sqrt(len(rows[part]))
            norms = abs(letter.body.norms[part] - right.norms[part]) > 1e-6 * max(right.norms[part], 1e-30)
            if abs(said - true) <= 1e-6 * scale and not norms:
                continue
            aggregator = view.roster[part]
            self.covered.add(part)
            if who == aggregator or not self.swarm.is_honest(aggregator):
                fine = False
            elif who not in after.banned and self.swarm.is_steady(aggregator, 60 * self.config.delta):
                self.report(view.step, f"{name(who)} reported something wrong to {name(aggregator)}, and is not banned")
        return fine

    def _check_aggregates(
        self, view: View, after: View, rows: dict[bytes, list[torch.Tensor]], aggregates: list[torch.Tensor]
    ) -> None:
        """V2 and V3: how likely it is that this imbalance passed."""
        config, dtype = self.config, WIRE_TYPES[self.config.wire]
        for part, aggregate in enumerate(aggregates):
            differences = torch.stack([row[part].double() - aggregate.double() for row in rows.values()])
            norms = differences.norm(dim=1)
            clipped = differences * (view.tau / norms.clamp(min=view.tau))[:, None]
            off = float(clipped.sum(dim=0).norm())
            rounding = torch.finfo(dtype).eps * 1.03 * config.cap + 1e-7 * math.sqrt(len(aggregate))
            bound = len(rows) * (1e-6 * view.tau + rounding)
            who = view.roster[part]
            if who in after.roster and off > 2 * bound and part not in self.covered:
                self._try_luck(view.step, who, min(1.0, 8 * bound / off) ** config.projections)
                if 2 * int((norms > config.delta_max).sum()) > len(rows):
                    self.report(
                        view.step, f"the aggregate of {name(who)} is far from everybody's part and not balanced"
                    )

    def _try_luck(self, step: int, who: bytes, chance: float) -> None:
        before = self.luck.get(who, 1.0)
        self.luck[who] = before * chance
        if self.luck[who] < self.LEAST_LUCK <= before:
            self.report(step, f"{name(who)} keeps attacking, and is not banned")

    def finish(self) -> None:
        latest = self.end
        if latest is None:
            return
        for who, steps in self.wrong.items():
            left = self.left.get(who, latest.step)
            recent = [at for at in steps if at >= left - KEPT_STEPS] if who in self.left else []
            recent += [at for at in steps if at == self.config.steps - 1]
            if recent and who not in latest.banned:
                self.report(latest.step, f"{name(who)} was wrong in step {max(recent)}, and nobody found out")


class Accusers(Checker):
    """A false accusation hurts the accuser."""

    rule = "false accusations"

    def on_note(self, key: bytes, event: Any) -> None:
        if not isinstance(event, StepFinished) or self.config.tolerance is not None:
            return
        peer = self.swarm.get_peer(key)
        transcript = _find_transcript(peer, event.step)
        if peer is None or transcript is None:
            return
        for who, letter in transcript.phases.get(Phase.CONFIRM, {}).items():
            if who not in event.view.roster or not isinstance(letter.body, m.Confirm):
                continue
            for digest in letter.body.accusations[:1]:
                case = peer.cases.get(digest)
                if not isinstance(case, m.Accusation) or not self.swarm.is_honest(case.accused):
                    continue
                ballots = [
                    ballot.verdict
                    for key, vote in transcript.phases.get(Phase.VOTE, {}).items()
                    if key != case.accused and isinstance(vote.body, m.Vote)
                    for ballot in vote.body.ballots
                    if ballot.case == digest
                ]  # evidence shown to a few at the last moment finds no majority: then nobody goes
                if 2 * ballots.count(Verdict.INNOCENT) > len(transcript.view.roster) - 1:
                    self.report(event.step, f"{name(who)} accused {name(case.accused)}, and is still a member")


class Bounds(Checker):
    """``b_t``: never below the number of Byzantine members, and one less for each that is banned."""

    rule = "bound"

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        there = sum(who in self.swarm.byzantine for who in view.roster)
        if there > view.bound:
            self.report(view.step, f"{there} Byzantine members, and a bound of {view.bound}")
        if before is not None and (view.step, view.attempt) != (before.step, before.attempt):
            fresh = sum(who in before.roster for who in set(view.banned) - set(before.banned))
            new = len(set(view.roster) - set(before.roster))
            if view.bound > max(0, before.bound - fresh) + new:
                self.report(
                    view.step, f"{fresh} members were banned, and the bound went from {before.bound} to {view.bound}"
                )


class Disputes(Checker):
    """Disputes in a whole run are few, and while ``delta`` holds no slow path ends without a quorum."""

    rule = "few disputes"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.seen: set[tuple[int, int, int]] = set()

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        quiet = all(self.swarm.is_steady(who, 60 * self.config.delta) for who in self.swarm.honest)
        again = before is not None and before.step == view.step and before.attempt < view.attempt
        replaced = before is not None and view.height == before.height + 2  # a slow path while it was being sealed
        same = before is not None and before.roster == view.roster
        if quiet and again and same and not replaced and view.step < self.config.steps:
            self.report(view.step, "an attempt failed, and nobody had to go")

    def on_note(self, key: bytes, event: Any) -> None:
        quiet = all(self.swarm.is_steady(who, 60 * self.config.delta) for who in self.swarm.honest)
        if isinstance(event, SlowPath) and quiet:
            self.seen.add((event.step, event.attempt, event.height))
            setup, latest = self.swarm.setup, self.all.latest
            removed = sum(count.count for count in latest.absences) if latest is not None else 0
            limit = 2 * self.config.strikes * (len(setup.attackers) + setup.joiners + removed + 2)
            if len(self.seen) > limit:
                self.report(event.step, f"{len(self.seen)} slow paths")
        elif isinstance(event, Halted) and quiet:
            self.report(event.step, f"{name(key)} halted at height {event.height}, and delta holds")


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
                contributors = compute_duties(self.config, transcript.view).contributors
                count = self.config.validators
                self.drawn.setdefault(at, set()).update(draw_targets(transcript.randomness, contributors, count))
        if view.step == before.step + 1:
            lost = self.drawn.get(before.step, set()) - set(view.targets)
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


ALL: tuple[type[Checker], ...] = (
    Agreement,
    OneSignature,
    OneCertificate,
    Innocence,
    Removals,
    Evidence,
    Exile,
    Probation,
    States,
    Aggregates,
    Memory,
    Justice,
    Accusers,
    Bounds,
    Disputes,
    Draws,
    Endings,
    Places,
)
