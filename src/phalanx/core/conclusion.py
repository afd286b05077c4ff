"""How an attempt ends: CONFIRM, VOTE and SEAL, or ABORT; and when what it led to is settled.

``conclude`` and ``abort`` give the view to go on from; ``follow`` does where a slow path has ended the attempt.
"""

from __future__ import annotations

import math

import msgspec

from phalanx.core import messages as m
from phalanx.core.broadcast import agree
from phalanx.core.checking import (
    check_case,
    count_gradients,
    fetch,
    fetch_cases,
    fetch_evidence,
    find_fetch_time,
    is_kept,
)
from phalanx.core.crypto import compute_digest
from phalanx.core.effects import Broadcast, Heard, Keep, KeepMessages, Note, Story
from phalanx.core.events import Banned, Diverged, Left, Removed, StepFinished, Waiting
from phalanx.core.justice import (
    Case,
    Decision,
    decide,
    explain,
    find_distant,
    find_offenders,
    find_relief,
    follow_resolution,
    is_changed,
    is_received,
    is_stuck,
    make_agenda,
    make_next,
    make_retry,
)
from phalanx.core.membership import View, compute_quorum, encode_view, is_another_electorate
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.opening import open_parts
from phalanx.core.peer import Own, Peer, compute_case_digest
from phalanx.core.slowpath import Resolution
from phalanx.core.transcript import Transcript

_ORDER = {Rule.REPORT: 0, Rule.GRADIENT: 1}
"""Of accusations, where not all fit the agenda: who does not name those who lie about its part may be taken for one."""


# ---- CONFIRM and VOTE


def make_confirm(peer: Peer, state: bytes, accusations: list[m.Accusation], *, blind: bool = False) -> m.Confirm:
    view = peer.view
    digests = []
    charges = [charge for charge in (*accusations, *peer.charges) if is_kept(view, charge.step, charge.attempt)]
    for charge in sorted(charges, key=lambda charge: _ORDER.get(charge.rule, 2)):
        digest = compute_case_digest(charge)
        peer.cases[digest] = charge
        digests.append(digest)
    digests += [digest for accused, digest in sorted(peer.proofs.items()) if accused in peer.circle]
    absent = {member.key for member in view.suspended}
    known = {*view.roster, *absent, *view.banned, *(candidate.key for candidate in view.candidates)}
    back = sorted(key for key in absent if peer.is_back(key))[: m.MAX_CASES]
    joins = sorted(key for key in peer.joins if key not in known)
    if len(joins) > m.MAX_CASES - len(back):  # everybody lists the same ones
        joins.sort(key=lambda key: compute_digest("join", view.randomness, key))
    joins = sorted([*back, *joins[: m.MAX_CASES - len(back)]])
    late = tuple(sorted(key for key in peer.late if key in view.roster))
    return m.Confirm(state, tuple(dict.fromkeys(digests))[: m.MAX_CASES], tuple(joins), late, peer.leaving, blind)


def confirm(peer: Peer, body: m.Confirm, work: float = 0.0) -> Story:
    """CONFIRM. Whoever accuses must be able to show its evidence, also after a crash."""
    peer.late -= {*body.late}  # who is late from now on is in my next
    if peer.member and body.accusations:
        cases = tuple(peer.cases[digest] for digest in body.accusations)
        yield KeepMessages(peer.level + 1, Heard.CASES, cases)
    return (yield from agree(peer, Phase.CONFIRM, body, work))


def conclude(peer: Peer, state: bytes) -> Story:
    """VOTE if there is something to vote on, decide, and SEAL if the roster changes."""
    config, transcript = peer.config, peer.transcript
    agenda = make_agenda(config, transcript)
    while True:
        if agenda:
            offenders = yield from vote(peer, agenda)
            if offenders.banned:
                return (yield from abort(peer, offenders))
        decision = decide(config, transcript, agenda, peer.cases)
        if not (agenda and decision.wrong and is_stuck(config, peer.view, decision)):
            break
        ending = yield from wait(peer, decision)  # else vote again: evidence that is to be had comes in the end
        if ending is not None:
            return ending
    voted = {case.digest for case in agenda}
    peer.charges = [charge for charge in peer.charges if compute_case_digest(charge) not in voted]
    if not peer.member:
        peer.late.clear()
    view = make_next(config, transcript, decision, peer.level + 1, peer.root)
    if not is_changed(peer.view, view):
        return view, True
    view = msgspec.structs.replace(view, height=peer.level + 2)
    execute(peer.view, decision, view)
    transcript.offences, transcript.removals = decision.banned, decision.removed
    if peer.member and decision.state is not None and decision.state != state:
        yield Note(Diverged(peer.view.step))
    yield from seal(peer, Phase.SEAL, m.Seal(view.digest), view)
    yield from announce(peer, decision)
    return view, False


def vote(peer: Peer, agenda: tuple[Case, ...]) -> Story:
    """VOTE; then hold whatever case most have seen. Returns who said what nobody may say."""
    config, transcript = peer.config, peer.transcript
    ballots, unopened = yield from make_ballots(peer, agenda)
    held = tuple(peer.cases[case.digest] for case in agenda if case.digest in peer.cases)
    if peer.member and held:  # whoever votes must be able to show on what
        yield KeepMessages(peer.level + 1, Heard.CASES, held)
    yield from agree(peer, Phase.VOTE, m.Vote(ballots, unopened), work=find_vote_time(peer, agenda))
    offenders = find_offenders(config, transcript, Phase.VOTE)
    received = [case for case in agenda if case.accusers and is_received(config, transcript, case)]
    if received and not offenders.banned:
        yield from fetch_cases(peer, received, math.inf)
        peer.entered += 2 * config.delta  # nobody knows who lacked one: what follows waits for all alike
    return offenders


def wait(peer: Peer, decision: Decision) -> Story:
    """WAIT: the floor lets nobody go that should. Returns how the attempt ends if enough are back to do without them.

    Otherwise what was to be said is said again. Nobody hurries: what is waited for takes time.
    """
    config = peer.config
    if peer.member:
        yield Note(Waiting(peer.view.step, peer.level + 1, tuple(sorted(decision.removed))))
    yield from fetch(peer, lambda: False, tuple, peer.time + 4 * config.delta)
    back = tuple(sorted(filter(peer.is_back, peer.absent)))[: m.MAX_MEMBERS]
    yield from agree(peer, Phase.WAIT, m.Wait(back), work=4 * config.delta)
    offenders = find_offenders(config, peer.transcript, Phase.WAIT)
    if offenders.banned:
        return (yield from abort(peer, offenders))
    coming = find_relief(config, peer.transcript, decision)
    if coming is None:
        return None
    decision.coming = coming
    return (yield from abort(peer, decision))


def execute(before: View, decision: Decision, view: View) -> None:
    """Let a decision say who really goes: the floor may keep some in, strikes or an earlier decision may add some."""
    gone = {*before.roster} - {*view.roster} - {*view.banned}
    decision.removed = {key: decision.removed.get(key) or explain(before, key) for key in sorted(gone)}


def find_vote_time(peer: Peer, agenda: tuple[Case, ...]) -> float:
    """Seconds that the verdicts on an agenda may take."""
    config = peer.config
    each = config.gradient_time + find_fetch_time(config)
    return (1 + count_gradients(peer, agenda)) * each + 2 * config.transfer_time + 12 * config.delta


def make_ballots(peer: Peer, agenda: tuple[Case, ...]) -> Story:
    """My verdict on every case; for V3, everybody's part is opened first."""
    view, config = peer.view, peer.config
    unopened: tuple[tuple[int, int], ...] = ()
    if any(case.part is not None for case in agenda):
        distant = find_distant(config, peer.transcript)
        requests = {(view.roster.index(key), part) for key in peer.duties.contributors for part in distant}
        unopened = yield from open_parts(peer, peer.own.get(view.step) or Own(b""), requests)
    yield from fetch_evidence(peer, agenda)
    peer.waits.clear()
    peer.bearers = find_bearers(peer, agenda)
    until = peer.time
    ballots = []
    for case in agenda:
        verdict = (yield from check_case(peer, case, until)) if peer.member else Verdict.NOT_RECEIVED
        ballots.append(m.Ballot(case.digest, verdict))
    peer.bearers = {}
    return tuple(ballots), unopened


def find_bearers(peer: Peer, agenda: tuple[Case, ...]) -> dict[tuple[int, int, bytes], set[bytes]]:
    """Who says that a commit is wrong, and so has its bytes, by step, attempt and sender."""
    found: dict[tuple[int, int, bytes], set[bytes]] = {}
    for case in agenda:
        charge = peer.cases.get(case.digest)
        if isinstance(charge, m.Accusation) and charge.rule is Rule.GRADIENT:
            found.setdefault((charge.step, charge.attempt, charge.accused), set()).update(case.accusers)
    return found


# ---- SEAL and ABORT


def abort(peer: Peer, decision: Decision) -> Story:
    """End this attempt together, without the culprits."""
    view = make_retry(peer.config, peer.transcript, decision, peer.level + 2, peer.root)
    execute(peer.view, decision, view)
    peer.transcript.offences, peer.transcript.removals = decision.banned, decision.removed
    culprits = tuple(sorted((*decision.banned, *decision.removed)))
    yield from seal(peer, Phase.ABORT, m.Abort(culprits, view.digest), view)
    yield from announce(peer, decision)
    return view, False


def seal(peer: Peer, phase: Phase, body: m.Seal | m.Abort, view: View) -> Story:
    peer.transcript.sealing = view
    letters = yield from agree(peer, phase, body)
    if is_another_electorate(peer.view, view):
        peer.remember_link(view, tuple(letter.message for letter in letters.values()))


def announce(peer: Peer, decision: Decision) -> Story:
    """Tell the outside who went, and why."""
    at = peer.view.step
    for key, offence in decision.banned.items():
        yield Note(Banned(key, offence.rule, offence.step, at, offence.reason, offence.evidence, offence.case))
    for key, reason in decision.removed.items():
        yield Note(Removed(key, at, reason))


def follow(peer: Peer, transcript: Transcript, height: int, resolution: Resolution) -> View | None:
    """The view after a slow path at ``height``."""
    config, phase = peer.config, transcript.heights[height]
    concluded = transcript.sealing if phase in (Phase.SEAL, Phase.ABORT) else None
    transcript.removals = {**transcript.removals, **resolution.reasons}
    if concluded is None and resolution.stands and resolution.values is not None:
        closed = Transcript(
            transcript.view,
            transcript.duties,
            {**transcript.phases, phase: resolution.values},
            {**transcript.heights, height: phase},
            randomness=transcript.randomness,
        )
        agenda = make_agenda(config, closed)
        needed = {case.digest for case in agenda if case.accusers and is_received(config, closed, case)}
        peer.lacking = needed - peer.cases.keys()
        if peer.lacking:
            return None
        decision = decide(config, closed, agenda, peer.cases)
        transcript.offences, transcript.removals = decision.banned, {**decision.removed, **resolution.reasons}
        concluded = make_next(config, closed, decision, height + 1, bytes(32))
    return follow_resolution(config, transcript, height, resolution, concluded)


# ---- Settled


def settle_view(peer: Peer) -> Story:
    """COMMIT is complete: everybody starts from this view, and what the step before led to is settled for ever."""
    fresh, peer.base = peer.base != peer.view, peer.view
    peer.shorten_links(peer.view, next(iter(peer.transcript.phases.values())))
    if fresh:
        yield Keep(encode_view(peer.view), peer.view.height)
    if peer.riding:
        peer.riding = False
        yield Note(StepFinished(peer.view.step - 1, peer.view))
    if peer.leaving and not peer.member:
        if is_needed(peer):  # whoever has all these goes on, and disputes nothing
            letters = next(iter(peer.transcript.phases.values()))
            yield Broadcast(peer.others, m.Certificate(tuple(letter.message for letter in letters.values())))
            yield from fetch(peer, lambda: False, tuple, peer.time + find_slow_time(peer))
        yield Note(Left(peer.view))


def is_needed(peer: Peer) -> bool:
    """Whether those who stay may lack a quorum without me if the seal of my leaving is disputed."""
    epoch = peer.find_epoch(peer.view.height - 1)
    if epoch is None or peer.key not in epoch.view.roster:
        return False
    staying = sum(key in peer.view.roster for key in epoch.view.roster)
    return staying - epoch.view.bound < compute_quorum(peer.config, epoch.view)


def find_slow_time(peer: Peer) -> float:
    """Seconds in which whoever opens a slow path has settled it."""
    return (8 + 2 * (peer.view.bound + 2)) * peer.config.delta
