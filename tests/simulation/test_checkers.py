"""Each checker catches a violation that was made up for it, and is content with a run as it should be."""

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import pytest
import torch

from phalanx.attacks import Attack
from phalanx.attacks.aggregation import FalseReport, ShiftedAggregate
from phalanx.core import messages as m
from phalanx.core.config import Tolerance
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import seal
from phalanx.core.events import AttemptStarted, Banned, Diverged, Removed, StepFinished, Synced
from phalanx.core.justice import find_offenders
from phalanx.core.membership import (
    Candidate,
    Caught,
    Committed,
    Count,
    Suspect,
    Suspension,
    View,
    compute_duties,
    find_last,
)
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.peer import compute_case_digest
from phalanx.core.transcript import Transcript, compute_values_root
from phalanx.simulation.checkers import ALL, Checkers, verify_ban
from phalanx.simulation.swarm import Setup, Swarm

NOBODY = bytes(32)


def make_watched(steps: int = 4, founders: int = 5, **settings: object) -> Checkers:
    """A swarm of five, of whom the last may do anything, halfway through its run."""
    setup = Setup(founders=founders, settings={"byzantine": 1, "steps": 10, **settings}, attackers={4: Attack()})
    checkers = Checkers(Swarm(setup, 3))
    checkers.swarm.run(1e6, lambda: checkers.step >= steps)
    return checkers


@pytest.fixture
def watched() -> Checkers:
    checkers = make_watched()
    assert checkers.violations == []
    return checkers


def rules(checkers: Checkers) -> set[str]:
    return {violation.rule for violation in checkers.violations}


def note(checkers: Checkers, event: object, peer: int = 0) -> None:
    checkers.on_note(checkers.swarm.world.now, checkers.swarm.keys[peer], event)


def change(view: View | None, **fields: object) -> View:
    assert view is not None
    return msgspec.structs.replace(view, **fields)


def next_view(checkers: Checkers, **fields: object) -> View:
    """A view that comes after everything seen so far."""
    view = change(checkers.latest)
    return change(view, attempt=view.attempt + 50, **fields)


def sign(
    checkers: Checkers, peer: int, phase: Phase, body: m.Body, height: int = 0, previous: bytes = NOBODY
) -> m.Signed:
    view, swarm = checkers.latest, checkers.swarm
    assert view is not None
    return seal(
        swarm.signers[peer], swarm.config.run, height or view.height, view.step, view.attempt, phase, previous, body
    )


def test_a_run_without_faults_satisfies_all() -> None:
    checkers = make_watched(steps=10, tolerance=Tolerance(1e-4, 1e-2))
    checkers.finish()
    assert checkers.violations == []


def test_agreement_catches_two_views_of_one_attempt(watched: Checkers) -> None:
    view = change(watched.latest)
    note(watched, StepFinished(view.step - 1, change(view, roster=view.roster[:-1])), peer=1)
    assert "agreement" in rules(watched)
    assert "other roster" in watched.violations[0].text


def test_agreement_catches_two_states_of_one_step(watched: Checkers) -> None:
    view = next_view(watched, state=NOBODY)
    note(watched, StepFinished(view.step - 1, view))
    assert "agreement" in rules(watched)


def test_one_signature_catches_a_second_message_at_a_height(watched: Checkers) -> None:
    key = watched.swarm.keys[0]
    for body in (b"one", b"one", b"two"):
        payload = msgspec.msgpack.encode((watched.swarm.config.run, 10_000, 5, 0, Phase.COMMIT, key, NOBODY, body))
        watched.on_sign(key, Domain.AGREED, payload)
    assert [violation.rule for violation in watched.violations] == ["one signature"]


def make_outcome(watched: Checkers, key: bytes, view: bytes, *, final: bool = True) -> bytes:
    body = m.Outcome(0, final, bytes(32), True, view)
    return msgspec.msgpack.encode(
        (watched.swarm.config.run, 77, 5, 0, Phase.COMMIT, key, NOBODY, msgspec.msgpack.encode(body))
    )


def test_one_signature_catches_a_second_vote(watched: Checkers) -> None:
    key = watched.swarm.keys[0]
    for outcome in (b"a" * 32, b"a" * 32, b"b" * 32):
        watched.on_sign(key, Domain.OUTCOME, make_outcome(watched, key, outcome, final=False))
    assert rules(watched) == {"one signature"}


def test_one_certificate_catches_two_outcomes_that_find_a_quorum(watched: Checkers) -> None:
    votes = [(0, b"a"), (1, b"a"), (2, b"b"), (3, b"b")]  # with the Byzantine one, three of five for each
    for count, (peer, outcome) in enumerate(votes):
        assert watched.violations == [], f"too early, after {count} votes"
        key = watched.swarm.keys[peer]
        watched.on_sign(key, Domain.OUTCOME, make_outcome(watched, key, outcome * 32))
    assert rules(watched) == {"one certificate"}


def test_innocence_catches_the_ban_of_an_honest_peer(watched: Checkers) -> None:
    note(watched, Banned(watched.swarm.keys[1], Rule.SUM, 3, 3, "made up", (), None))
    assert "no honest peer is banned" in rules(watched)


def test_innocence_catches_a_ban_that_nobody_announced(watched: Checkers) -> None:
    view = next_view(watched, banned=(watched.swarm.keys[1],))
    note(watched, StepFinished(view.step - 1, view))
    assert "no honest peer is banned" in rules(watched)


def remove(watched: Checkers, reason: str, *peers: int) -> None:
    keys = {watched.swarm.keys[peer] for peer in peers}
    for key in keys:
        note(watched, Removed(key, watched.step, reason))
    roster = tuple(key for key in change(watched.latest).roster if key not in keys)
    view = next_view(watched, roster=roster)
    note(watched, StepFinished(view.step - 1, view))


def test_removals_catch_an_honest_peer_that_was_up(watched: Checkers) -> None:
    remove(watched, "silent", 1)
    assert rules(watched) == {"no honest peer is removed"}


def test_removals_of_byzantine_peers_and_of_those_who_leave_are_fine() -> None:
    watched = make_watched(founders=6)
    watched.swarm.leave(watched.swarm.keys[1])
    remove(watched, "left", 1, 4)
    assert watched.violations == []


def test_removals_after_an_outage_are_fine(watched: Checkers) -> None:
    watched.swarm.crash(watched.swarm.keys[1])
    remove(watched, "silent", 1)
    assert watched.violations == []


def test_an_eliminated_peer_takes_a_byzantine_one_along() -> None:
    watched = make_watched(founders=8)
    remove(watched, "a pair that keeps accusing each other", 1, 4)
    assert watched.violations == []
    remove(watched, "a pair that keeps accusing each other", 2, 3)
    assert rules(watched) == {"no honest peer is removed"}


def test_evidence_catches_a_ban_without_any(watched: Checkers) -> None:
    note(watched, Banned(watched.swarm.keys[4], Rule.EQUIVOCATION, 3, 3, "made up", (), None))
    watched.finish()
    assert rules(watched) == {"bans have evidence"}


def test_evidence_catches_a_ban_that_nobody_announced(watched: Checkers) -> None:
    view = next_view(watched, banned=(watched.swarm.keys[4],), roster=watched.swarm.keys[:4])
    note(watched, StepFinished(view.step - 1, view))
    watched.finish()
    assert "bans have evidence" in rules(watched)


def test_exile_catches_a_banned_member(watched: Checkers) -> None:
    view = next_view(watched, banned=(watched.swarm.keys[4],))
    note(watched, StepFinished(view.step - 1, view))
    assert "banned for ever" in rules(watched)


def test_exile_catches_a_pardon(watched: Checkers) -> None:
    roster = watched.swarm.keys[:4]
    view = next_view(watched, banned=(watched.swarm.keys[4],), roster=roster)
    note(watched, StepFinished(view.step - 1, view))
    assert "banned for ever" not in rules(watched)
    note(watched, StepFinished(view.step - 1, next_view(watched, banned=())))
    assert "banned for ever" in rules(watched)


def see(checkers: Checkers, view: View) -> None:
    note(checkers, StepFinished(view.step - 1, view))


def test_floor_catches_a_roster_that_is_too_small(watched: Checkers) -> None:
    view = change(watched.latest)
    assert len(view.roster) == 5  # and the floor is 4
    see(watched, next_view(watched, roster=view.roster[:4]))
    assert "floor" not in rules(watched)
    small = change(watched.latest, attempt=view.attempt + 51, roster=view.roster[:3])
    see(watched, small)
    assert "floor" in rules(watched)
    assert any("below 4" in violation.text for violation in watched.violations)


def test_floor_catches_attackers_that_are_as_many_as_may_be() -> None:
    watched = make_watched(founders=5)
    attacker = watched.swarm.keys[4]
    few = (watched.swarm.keys[0], attacker)
    see(watched, next_view(watched, roster=few))
    assert any("honest members go on" in violation.text for violation in watched.violations)


def test_floor_catches_a_step_that_too_few_are_left_to_judge(watched: Checkers) -> None:
    """Unless they were waited for."""
    view = change(watched.latest)
    thin = tuple(msgspec.structs.replace(record, roster=record.roster[1:4]) for record in view.attempts)
    see(watched, next_view(watched, attempts=thin))
    before = len(watched.violations)
    gone = change(watched.latest, attempt=view.attempt + 51, roster=(view.roster[0], *view.roster[2:]))
    see(watched, gone)
    assert any("left to judge" in violation.text for violation in watched.violations[before:])


@pytest.mark.parametrize("steps", [50, 51])
def test_returns_catches_one_that_is_there_and_is_not_let_in(watched: Checkers, steps: int) -> None:
    view = change(watched.latest)
    out, roster = view.roster[1], (view.roster[0], *view.roster[2:])
    for step in (view.step, view.step + steps):
        later = change(view, step=step, attempt=view.attempt + 50, roster=roster)
        later = change(later, suspended=(Suspension(out, view.step, view.step),))
        see(watched, later)
    assert ("coming back" in rules(watched)) is (steps > 50)


def test_probation_catches_a_member_that_is_on_probation(watched: Checkers) -> None:
    candidate = Candidate(watched.swarm.keys[4], 1, 5, 2)
    view = next_view(watched, candidates=(candidate,))
    note(watched, StepFinished(view.step - 1, view))
    assert "probationers have no weight" in rules(watched)


@pytest.mark.parametrize(("served", "fine"), [(3, False), (5, True)])
def test_probation_catches_a_member_that_has_not_served(watched: Checkers, served: int, fine: bool) -> None:
    newcomer = Candidate(b"new" + bytes(29), 1, 5, served)
    view = next_view(watched, candidates=(newcomer,))
    note(watched, StepFinished(view.step - 1, view))
    view = next_view(watched, candidates=(), roster=(*view.roster, newcomer.key))
    note(watched, StepFinished(view.step - 1, view))
    assert ("probationers have no weight" not in rules(watched)) == fine


def test_probation_catches_a_vote_of_somebody_else(watched: Checkers) -> None:
    peer = watched.swarm.get_peer(watched.swarm.keys[0])
    view = change(watched.latest)
    assert peer is not None
    transcript = peer.transcripts[max(place for place in peer.transcripts if place[0] == view.step - 1)]
    values = transcript.phases[Phase.CONFIRM]
    values[NOBODY] = values[watched.swarm.keys[0]]
    note(watched, StepFinished(view.step - 1, view))
    assert "probationers have no weight" in rules(watched)


def test_states_catch_a_joiner_with_a_state_of_its_own(watched: Checkers) -> None:
    view = change(watched.latest)
    note(watched, Synced(view.step, view.state))
    assert watched.violations == []
    note(watched, Synced(view.step, NOBODY))
    assert rules(watched) == {"certified states"}


def test_states_catch_numbers_that_are_not_finite(watched: Checkers) -> None:
    from phalanx.simulation.machine import compute_state_digest

    view = change(watched.latest)
    machine = watched.swarm.get_machine(watched.swarm.keys[0])
    state = torch.full_like(machine.states[view.step], float("nan"))
    machine.states[view.step] = state
    note(watched, AttemptStarted(change(view, state=compute_state_digest(state))))
    assert any("not finite" in violation.text for violation in watched.violations)


def test_states_catch_an_honest_peer_that_diverged(watched: Checkers) -> None:
    note(watched, Diverged(3))
    assert rules(watched) == {"certified states"}


def test_aggregates_catch_a_state_that_does_not_follow(watched: Checkers) -> None:
    view = change(watched.latest)
    for checker in watched.checkers:
        getattr(checker, "done", set()).clear()
    note(watched, StepFinished(view.step - 1, change(view, state=NOBODY)))
    assert "applied aggregates" in rules(watched)


def test_aggregates_catch_a_part_that_was_not_committed(watched: Checkers) -> None:
    view, key = change(watched.latest), watched.swarm.keys[0]
    peer = watched.swarm.get_peer(key)
    assert peer is not None
    for place in [place for place in peer.parts if place[0] == view.step - 1]:
        peer.parts[place] = (b"x" * len(peer.parts[place][0]), peer.parts[place][1])
    note(watched, StepFinished(view.step - 1, view))
    assert "applied aggregates" in rules(watched)


def test_aggregates_catch_an_aggregate_off_balance_that_nobody_paid_for(watched: Checkers) -> None:
    view = change(watched.latest)
    peer = watched.swarm.get_peer(watched.swarm.keys[0])
    assert peer is not None
    for checker in watched.checkers:
        getattr(checker, "done", set()).clear()
    transcript = peer.transcripts[max(place for place in peer.transcripts if place[0] == view.step - 1)]
    reports = transcript.phases[Phase.REPORT]
    key, letter = next((k, x) for k, x in reports.items() if isinstance(x.body, m.Report) and x.body.norms)
    assert isinstance(letter.body, m.Report)
    shifted = msgspec.structs.replace(letter.body, sums=tuple(s + 1 for s in letter.body.sums))
    reports[key] = type(letter)(letter.message, letter.digest, shifted)
    note(watched, StepFinished(view.step - 1, view))
    assert any("off balance" in violation.text for violation in watched.violations)


def test_memory_catches_a_table_that_grows(watched: Checkers) -> None:
    view = change(watched.latest)
    peer = watched.swarm.get_peer(watched.swarm.keys[0])
    assert peer is not None
    for height in range(3000):
        peer.gossip[height, 0] = {}
    note(watched, StepFinished(view.step - 1, view))
    assert rules(watched) == {"bounded memory"}


def test_every_checker_has_a_name_of_its_own() -> None:
    assert len({kind.rule for kind in ALL}) == len(ALL)
    assert all(kind.rule for kind in ALL)


# ---- Evidence, rule by rule


def check(
    watched: Checkers,
    event: Banned,
    others: tuple[Banned, ...] = (),
    view: View | None = None,
    cases: Iterable[m.Accusation | m.Proof] = (),
) -> bool:
    swarm = watched.swarm
    return verify_ban(swarm.config, swarm.examiner, view or change(watched.latest), event, others, cases)


def test_e1_needs_two_messages_of_the_banned_peer(watched: Checkers) -> None:
    guilty, other = watched.swarm.keys[4], watched.swarm.keys[3]
    first, second = (sign(watched, 4, Phase.REVEAL, m.Reveal(bytes([n]) * 32, NOBODY)) for n in (1, 2))
    ban = Banned(guilty, Rule.EQUIVOCATION, 3, 3, "", (first, second), None)
    assert check(watched, ban)
    assert not check(watched, Banned(other, Rule.EQUIVOCATION, 3, 3, "", (first, second), None)), "another's messages"
    assert not check(watched, Banned(guilty, Rule.EQUIVOCATION, 3, 3, "", (first, first), None)), "the same twice"
    forged = msgspec.structs.replace(second, sender=other)
    assert not check(watched, Banned(other, Rule.EQUIVOCATION, 3, 3, "", (forged, first), None)), "a forgery"


def test_e2_needs_a_share_that_does_not_open(watched: Checkers) -> None:
    from phalanx.core.crypto import compute_commitment

    view, config, key = change(watched.latest), watched.swarm.config, watched.swarm.keys[4]
    reveal = sign(watched, 4, Phase.REVEAL, m.Reveal(NOBODY, NOBODY), height=view.height + 2)
    right = compute_commitment(config.run, view.step, view.attempt, key, NOBODY, NOBODY)
    for share, proven in ((NOBODY, True), (right, False)):
        commit = sign(watched, 4, Phase.COMMIT, m.Commit(None, share, NOBODY))
        case = m.WrongReveal(commit, reveal)
        assert check(watched, Banned(key, Rule.REVEAL, view.step, view.step, "", (commit, reveal), case)) == proven


def test_e4_needs_a_body_that_may_not_be_said(watched: Checkers) -> None:
    key = watched.swarm.keys[4]
    fine = sign(watched, 4, Phase.REVEAL, m.Reveal(NOBODY, NOBODY))
    aggregate = m.Aggregate(None, (200,), (), ())
    wrong = sign(watched, 4, Phase.AGGREGATE, aggregate)
    assert not check(watched, Banned(key, Rule.MALFORMED, 3, 3, "", (fine,), None))
    assert check(watched, Banned(key, Rule.MALFORMED, 3, 3, "", (wrong,), None))
    assert not check(watched, Banned(watched.swarm.keys[3], Rule.MALFORMED, 3, 3, "", (wrong,), None))


def relabel(watched: Checkers, peer: int, message: m.Signed, **labels: object) -> m.Signed:
    """What this member said, as though it had said it elsewhere."""
    changed, letter = msgspec.structs.replace(message, **labels), watched.swarm.examiner.examine(message)
    assert letter is not None
    assert letter.body is not None
    place = (changed.height, changed.step, changed.attempt, changed.phase, changed.previous)
    return seal(watched.swarm.signers[peer], changed.run, *place, letter.body)


def get_transcript(watched: Checkers, back: int = 1) -> Transcript:
    """What was agreed, a few steps ago."""
    peer = watched.swarm.get_peer(watched.swarm.keys[0])
    assert peer is not None
    step = change(watched.latest).step - back
    return peer.transcripts[max(place for place in peer.transcripts if place[0] == step)]


def ban_by_label(watched: Checkers, key: bytes, said: list[m.Signed], view: View) -> bool:
    """Whether the message that comes first has wrong labels, as the others show."""
    return check(watched, Banned(key, Rule.MALFORMED, view.step, view.step, "", tuple(said), None), view=view)


@pytest.mark.parametrize(
    "labels", [{"step": 9}, {"attempt": 7}, {"phase": Phase.REPORT_AGAIN}], ids=["step", "attempt", "phase"]
)
def test_e4_of_a_label_needs_the_messages_beside_it(watched: Checkers, labels: dict[str, object]) -> None:
    """Alone it does not show where it stood: the core hands over all messages of its height."""
    key, transcript, config = watched.swarm.keys[4], get_transcript(watched), watched.swarm.config
    view, values = transcript.view, transcript.phases[Phase.REPORT]
    letter = watched.swarm.examiner.examine(relabel(watched, 4, values[key].message, **labels))
    assert letter is not None
    said = Transcript(view, transcript.duties, {Phase.REPORT: {**values, key: letter}})
    offence = find_offenders(config, said, Phase.REPORT).banned[key]
    assert offence.rule is Rule.MALFORMED
    assert offence.evidence[0] == letter.message, "the offender's comes first"
    assert {x.sender for x in offence.evidence} == set(view.roster)
    evidence = list(offence.evidence)
    assert ban_by_label(watched, key, evidence, view)
    assert not ban_by_label(watched, key, evidence[:1], view), "alone"
    assert not ban_by_label(watched, key, evidence[:2], view), "another attacker may say so"
    assert ban_by_label(watched, key, evidence[:3], view), "one of two others is honest"
    assert not ban_by_label(watched, key, [evidence[0], evidence[1], evidence[1]], view), "one of them twice"
    assert not ban_by_label(watched, watched.swarm.keys[0], evidence, view), "whose labels are right"


def test_e4_of_a_label_asks_for_one_height_roster_and_history(watched: Checkers) -> None:
    key, transcript = watched.swarm.keys[4], get_transcript(watched)
    view, values = transcript.view, transcript.phases[Phase.REPORT]
    wrong = relabel(watched, 4, values[key].message, step=9)
    others = [x.message for other, x in values.items() if other != key]
    assert ban_by_label(watched, key, [wrong, *others], view)
    elsewhere = relabel(watched, 4, wrong, height=wrong.height + 1)
    assert not ban_by_label(watched, key, [elsewhere, *others], view), "of another height"
    shorter = change(view, roster=tuple(k for k in view.roster if k not in watched.swarm.keys[:3]))
    assert not ban_by_label(watched, key, [wrong, *others], shorter), "from nobody in the roster"
    outside = change(view, roster=watched.swarm.keys[:4])
    assert not ban_by_label(watched, key, [wrong, *others], outside), "no member itself"
    # Who saw other messages before may rightly be in another phase: the others name another root.
    astray = relabel(watched, 4, values[key].message, phase=Phase.REPORT_AGAIN, previous=NOBODY)
    assert not ban_by_label(watched, key, [astray, *others], view), "after another history"


def test_e4_of_a_label_in_the_first_commit_of_a_sealed_view_may_name_any_root(watched: Checkers) -> None:
    """Nobody honest signs anything else at that height; what others ride on, somebody may not yet know."""
    key, transcript = watched.swarm.keys[4], get_transcript(watched)
    view, values = transcript.view, transcript.phases[Phase.COMMIT]
    wrong = relabel(watched, 4, values[key].message, step=9, previous=NOBODY)
    evidence = [wrong, *(x.message for other, x in values.items() if other != key)]
    assert not ban_by_label(watched, key, evidence, view), "ridden on"
    *before, last = view.attempts
    sealed = change(view, attempts=(*before, msgspec.structs.replace(last, roster=(*last.roster, NOBODY))))
    assert ban_by_label(watched, key, evidence, sealed)


def test_e4_is_not_passed_by_honest_messages_of_other_attempts(watched: Checkers) -> None:
    """Made-up: whoever has a peer's COMMITs of two steps shows each with the other's view."""
    early, late = get_transcript(watched, 2), get_transcript(watched, 1)
    for mine, other in ((early, late), (late, early)):
        for phase, values in mine.phases.items():
            for key, letter in values.items():
                assert not ban_by_label(watched, key, [letter.message], other.view), "alone"
                beside = [x.message for x in other.phases[phase].values()]
                assert not ban_by_label(watched, key, [letter.message, *beside], other.view), "with strange ones"
                everybody = [letter.message, *(x.message for k, x in values.items() if k != key)]
                assert not ban_by_label(watched, key, everybody, other.view), "with all of its height"
                assert not ban_by_label(watched, key, everybody, mine.view), "in its own attempt"


Said = tuple[m.Signed, ...]


def agree(watched: Checkers, phase: Phase, bodies: dict[int, m.Body], before: Said = ()) -> Said:
    """What all members say in a phase, as one that goes on from what all said before it."""
    previous = get_root(watched, before) if before else NOBODY
    height = before[0].height + 1 if before else 0
    return tuple(sign(watched, peer, phase, body, height, previous) for peer, body in bodies.items())


def get_root(watched: Checkers, said: Said) -> bytes:
    letters = {x.sender: letter for x in said if (letter := watched.swarm.examiner.examine(x)) is not None}
    return compute_values_root([x.sender for x in said], letters)


def get_peers(watched: Checkers, view: View | None = None) -> list[int]:
    """The members' places in the run, in the order of the roster."""
    return [watched.swarm.keys.index(key) for key in (view or change(watched.latest)).roster]


def make_reports(watched: Checkers, totals: dict[int, float], *, again: bool = False) -> Said:
    """Reports of all members, of which the first contributor's put some parts off balance."""
    view, bodies = change(watched.latest), dict[int, m.Body]()
    first, *others = compute_duties(watched.swarm.config, view).contributors
    norms = (1.0,) * len(view.roster)
    for peer in get_peers(watched):
        key = watched.swarm.keys[peer]
        sums = tuple(totals.get(part, 0.0) if key == first else 0.0 for part in range(len(view.roster)))
        bodies[peer] = m.Report(sums, norms, (), ()) if key in (first, *others) else m.Report((), (), (), ())
    return agree(watched, Phase.REPORT_AGAIN if again else Phase.REPORT, bodies)


def make_confirms(
    watched: Checkers,
    reports: Said = (),
    charges: dict[int, tuple[m.Accusation, ...]] | None = None,
    blind: tuple[int, ...] = (),
    view: View | None = None,
) -> Said:
    bodies: dict[int, m.Body] = {}
    for peer in get_peers(watched, view):
        brought = (charges or {}).get(peer, ())
        named = tuple(map(compute_case_digest, brought))
        charged = tuple(charge.accused for charge in brought if charge.rule is Rule.GRADIENT)
        bodies[peer] = m.Confirm(NOBODY, named, (), (), False, peer in blind, charged, m.NOTHING)
    return agree(watched, Phase.CONFIRM, bodies, reports)


def make_trial(
    watched: Checkers, confirms: Said, verdicts: dict[bytes, list[Verdict]], view: View | None = None
) -> Said:
    """The CONFIRMs, and the ballots on each case in the order of the roster; whoever is not listed cannot tell."""
    bodies: dict[int, m.Body] = {}
    for place, peer in enumerate(get_peers(watched, view)):
        ballots = (
            m.Ballot(digest, said[place] if place < len(said) else Verdict.INCONCLUSIVE)
            for digest, said in sorted(verdicts.items())
        )
        bodies[peer] = m.Vote(tuple(ballots), ())
    return (*confirms, *agree(watched, Phase.VOTE, bodies, confirms))


def ban_by_sum(
    watched: Checkers, peer: int, said: Said, cases: tuple[m.Accusation, ...] = (), view: View | None = None
) -> bool:
    """Whether this shows that the member's aggregate is off balance."""
    step = change(watched.latest).step
    ban = Banned(watched.swarm.keys[peer], Rule.SUM, step, step, "", said, None)
    return check(watched, ban, cases=cases, view=view)


def get_part(watched: Checkers, peer: int) -> int:
    return change(watched.latest).roster.index(watched.swarm.keys[peer])


def find_liar(watched: Checkers) -> int:
    """Whose report puts parts off balance."""
    return watched.swarm.keys.index(compute_duties(watched.swarm.config, change(watched.latest)).contributors[0])


def test_v2_needs_reports_that_do_not_add_up(watched: Checkers) -> None:
    part = get_part(watched, 4)
    for total, proven in ((100.0, True), (0.0, False)):
        for again in (False, True):
            reports = make_reports(watched, {part: total}, again=again)
            said = (*reports, *make_confirms(watched, reports))
            assert ban_by_sum(watched, 4, said) == proven
            assert not ban_by_sum(watched, 3, said), "whose part is in balance"
            assert not ban_by_sum(watched, 4, said[1:]), "one report is missing"
            assert not ban_by_sum(watched, 4, said[:-1]), "one CONFIRM is missing"
            assert not ban_by_sum(watched, 4, reports), "nobody says that it has seen them"


def test_v2_forgives_where_more_fail_than_can_be_attackers(watched: Checkers) -> None:
    reports = make_reports(watched, {get_part(watched, 4): 100.0, get_part(watched, 3): -100.0})
    said = (*reports, *make_confirms(watched, reports))
    assert not ban_by_sum(watched, 4, said)
    assert ban_by_sum(watched, 4, said, view=change(watched.latest, bound=2))


def test_v2_spares_whoever_could_not_check_its_part(watched: Checkers) -> None:
    reports = make_reports(watched, {get_part(watched, 1): 100.0})
    assert ban_by_sum(watched, 1, (*reports, *make_confirms(watched, reports, blind=(2,))))
    assert not ban_by_sum(watched, 1, (*reports, *make_confirms(watched, reports, blind=(1,))))


def test_v2_needs_reports_that_all_have_agreed_on(watched: Checkers) -> None:
    """Made-up: a colluder signs another REPORT for its old slot, and shows it to outsiders only."""
    part, view = get_part(watched, 1), change(watched.latest)
    reports, other = make_reports(watched, {}), make_reports(watched, {part: 100.0})
    confirms = make_confirms(watched, reports)
    assert not ban_by_sum(watched, 1, (*reports, *confirms))
    assert not ban_by_sum(watched, 1, (*other, *confirms))
    assert not ban_by_sum(watched, 1, (*reports, *other, *confirms)), "both of them"
    strange = make_confirms(watched, other)
    for place, peer in enumerate(get_peers(watched)):
        if peer != 1:  # some may name it who were shown it, before a slow path: those did not go on
            mixed = (*strange[:place], confirms[place], *strange[place + 1 :])
            assert not ban_by_sum(watched, 1, (*other, *mixed)), "one has seen something else"
    assert ban_by_sum(watched, 1, (*other, *strange))
    lacking = tuple(
        relabel(watched, watched.swarm.keys.index(x.sender), x, height=view.height + 1, phase=Phase.REPORT_AGAIN)
        for x in reports
    )
    assert not ban_by_sum(watched, 1, (*other, *make_confirms(watched, lacking))), "said again meanwhile"


def make_votes(watched: Checkers, digest: bytes, verdicts: list[Verdict]) -> tuple[m.Signed, ...]:
    return tuple(
        sign(watched, peer, Phase.VOTE, m.Vote((m.Ballot(digest, verdict),), ()))
        for peer, verdict in enumerate(verdicts)
    )


GUILTY, INNOCENT = Verdict.GUILTY, Verdict.INNOCENT


def make_charge(
    watched: Checkers, rule: Rule, peer: int, parts: tuple[int, ...], back: int = 0, sums: tuple[float, ...] = ()
) -> m.Accusation:
    """Against what this member said in the attempt under way, or in the step before."""
    view, swarm = change(watched.latest), watched.swarm
    if back:
        transcript = get_transcript(watched, back)
        said = [transcript.phases[phase][swarm.keys[peer]].message for phase in (Phase.COMMIT, Phase.REPORT)]
    else:
        report = m.Report((0.0,) * len(view.roster), (1.0,) * len(view.roster), (), ())
        said = [sign(watched, peer, Phase.COMMIT, m.Commit(NOBODY, NOBODY, NOBODY))]
        said.append(sign(watched, peer, Phase.REPORT, report))
    numbers = (sums or (100.0,) * len(parts), (1.0,) * len(parts)) if rule is Rule.REPORT else ((), ())
    step, attempt = said[0].step, said[0].attempt
    return m.Accusation(rule, swarm.keys[peer], step, attempt, parts, said[0], said[1] if parts else None, *numbers)


def accuse(watched: Checkers, peer: int, charge: m.Accusation) -> m.Signed:
    body = m.Confirm(NOBODY, (compute_case_digest(charge),), (), (), False, False, (), m.NOTHING)
    return sign(watched, peer, Phase.CONFIRM, body)


def test_v2_counts_only_with_what_a_vote_has_corrected(watched: Checkers) -> None:
    """Made-up: real reports, and beside them a conviction of the author's choice."""
    part, step = get_part(watched, 1), change(watched.latest).step
    liar = next(peer for peer in (4, 3) if watched.swarm.keys[peer] in get_contributors(watched))
    charge, reports = make_charge(watched, Rule.REPORT, liar, (part,)), make_reports(watched, {})
    confirms, digest = make_confirms(watched, reports, {liar: (charge,)}), compute_case_digest(charge)
    for verdicts, proven in (([GUILTY] * 5, True), ([], False), ([GUILTY] * 2, False), ([INNOCENT] * 5, False)):
        trial = make_trial(watched, confirms, {digest: verdicts})
        assert ban_by_sum(watched, 1, (*reports, *trial), (charge,)) == proven, verdicts
    # It accused itself, of what it made up: it goes, but nothing is corrected by that.
    other = Banned(watched.swarm.keys[liar], Rule.REPORT, step, step, "", trial, charge)
    assert check(watched, other)
    honest = (*reports, *make_confirms(watched, reports))
    assert not ban_by_sum(watched, 1, honest, (charge,)), "that nobody named"
    trial = make_trial(watched, confirms, {digest: [GUILTY] * 5})
    forged = tuple(msgspec.structs.replace(x, signature=bytes(64)) for x in trial if x.phase is Phase.VOTE)
    assert not ban_by_sum(watched, 1, (*reports, *confirms, *forged), (charge,)), "forged votes"


def get_contributors(watched: Checkers) -> tuple[bytes, ...]:
    return compute_duties(watched.swarm.config, change(watched.latest)).contributors


def test_v2_is_not_shown_by_leaving_out_what_was_corrected(watched: Checkers) -> None:
    """Made-up: a liar put an honest aggregator's part off balance and was convicted; its report is shown without."""
    liar = find_liar(watched)
    honest, *others = (peer for peer in get_peers(watched) if peer != liar)
    part = get_part(watched, honest)
    charge, reports = make_charge(watched, Rule.REPORT, liar, (part,), sums=(0.0,)), make_reports(watched, {part: 1e2})
    confirms, digest = make_confirms(watched, reports, {honest: (charge,)}), compute_case_digest(charge)
    trial = make_trial(watched, confirms, {digest: [GUILTY] * 5})
    votes = trial[len(confirms) :]
    assert not ban_by_sum(watched, honest, (*reports, *trial), (charge,))
    assert not ban_by_sum(watched, honest, (*reports, *trial)), "without the accusation"
    assert not ban_by_sum(watched, honest, reports), "without the trial"
    assert not ban_by_sum(watched, honest, (*reports, *confirms), (charge,)), "without the votes"
    assert not ban_by_sum(watched, honest, (*reports, *confirms, *votes[1:]), (charge,)), "without one of the votes"
    assert not ban_by_sum(watched, honest, (*reports, *votes), (charge,)), "without the accusers"
    silent = tuple(x for x in confirms if x.sender != watched.swarm.keys[honest])
    assert not ban_by_sum(watched, honest, (*reports, *silent)), "without the accuser"
    assert not ban_by_sum(watched, honest, (*reports, *silent, *votes), (charge,)), "without the accuser"
    elsewhere = make_trial(watched, make_confirms(watched, reports), {})[len(confirms) :]
    assert not ban_by_sum(watched, honest, (*reports, *confirms, *elsewhere)), "votes after other accusations"
    undecided = make_trial(watched, confirms, {digest: [GUILTY] * 2})
    assert not ban_by_sum(watched, honest, (*reports, *undecided), (charge,)), "it may be right"
    # A correction that does not mend it: the aggregate is wrong as well.
    charge = make_charge(watched, Rule.REPORT, liar, (part,), sums=(50.0,))
    confirms = make_confirms(watched, reports, {others[0]: (charge,)})
    trial = make_trial(watched, confirms, {compute_case_digest(charge): [GUILTY] * 5})
    assert ban_by_sum(watched, honest, (*reports, *trial), (charge,))
    assert not ban_by_sum(watched, honest, (*reports, *trial))


def test_v2_counts_with_all_that_was_corrected_not_only_with_what_somebody_was_banned_for(watched: Checkers) -> None:
    """A liar is banned for one of the accusations; another aggregator's part fails but for the second."""
    liar, view = find_liar(watched), change(watched.latest)
    first, second, guilty, _ = (peer for peer in get_peers(watched) if peer != liar)
    parts = [get_part(watched, peer) for peer in (first, second, guilty)]
    reports = make_reports(watched, dict.fromkeys(parts, 100.0))
    one, two = (make_charge(watched, Rule.REPORT, liar, (part,), sums=(0.0,)) for part in parts[:2])
    confirms = make_confirms(watched, reports, {first: (one,), second: (two,)})
    votes = {compute_case_digest(charge): [GUILTY] * 5 for charge in (one, two)}
    said = (*reports, *make_trial(watched, confirms, votes))
    step, keys = view.step, watched.swarm.keys
    assert ban_by_sum(watched, guilty, said, (one, two))
    assert not ban_by_sum(watched, guilty, said, (one,)), "one is left out"
    assert not ban_by_sum(watched, first, said, (one, two))
    ban = Banned(keys[guilty], Rule.SUM, step, step, "", said, None)
    other = Banned(keys[liar], Rule.REPORT, step, step, "", said, one)
    assert not check(watched, ban, (ban, other))
    assert check(watched, ban, (ban, other), cases=(two,)), "one comes with the liar's own ban"


@pytest.mark.parametrize("attack", [FalseReport(start=1), ShiftedAggregate(start=1)], ids=["report", "aggregate"])
def test_v2_in_a_run_is_shown_of_whoever_is_banned_by_it_and_of_nobody_else(attack: Attack) -> None:
    settings = {"byzantine": 1, "steps": 3, "size": 64, "tau": 1.0, "cap": 100.0}
    swarm = Swarm(Setup(founders=5, settings=settings, attackers={4: attack}), 1, keep_events=True)
    checkers = Checkers(swarm)
    swarm.run(1e6, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    peer = swarm.get_peer(swarm.keys[0])
    assert peer is not None
    told = [event for _, event in swarm.events[peer.key] if isinstance(event, Banned)]
    assert [event.key for event in told] == [swarm.keys[4]]
    by_sum = told[0].rule is Rule.SUM
    phases = {Phase.REPORT, Phase.CONFIRM} if by_sum else {Phase.CONFIRM, Phase.VOTE}
    assert {x.phase for x in told[0].evidence} == phases
    cases = tuple(peer.cases.values())
    for transcript in peer.transcripts.values():
        view, values = transcript.view, [transcript.reports or {}]
        values += [transcript.phases.get(phase, {}) for phase in (Phase.CONFIRM, Phase.VOTE)]
        for until in range(1, 4):
            said = tuple(x.message for some in values[:until] for x in some.values())
            for key in view.roster:
                ban = Banned(key, Rule.SUM, view.step, view.step, "", said, None)
                right = by_sum and key == told[0].key and view.step == told[0].at and until > 1
                assert verify_ban(swarm.config, swarm.examiner, view, ban, (), cases) == right
                assert verify_ban(swarm.config, swarm.examiner, view, ban) == right


def test_v4_of_an_accomplice_needs_all_that_the_judges_ask(watched: Checkers) -> None:
    """A true conviction of a liar says nothing of aggregators that told of it, or never saw it."""
    view = change(watched.latest)
    last = view.attempts[-1]
    liar = next(peer for peer in (4, 3, 2) if watched.swarm.keys[peer] in last.contributors)
    part = next(part for part, key in enumerate(last.roster) if key == watched.swarm.keys[1])
    charge = make_charge(watched, Rule.GRADIENT, liar, (part,), back=1)
    digest, key = compute_case_digest(charge), watched.swarm.keys[1]

    def is_shown(view: View, key: bytes = key, verdicts: tuple[Verdict, ...] = (GUILTY,) * 5) -> bool:
        confirms = make_confirms(watched, (), {0: (charge,)}, view=view)
        votes = make_trial(watched, confirms, {digest: list(verdicts)}, view)
        ban = Banned(key, Rule.REPORT, charge.step, view.step, "", votes, charge)
        assert not check(watched, replace(ban, evidence=votes[len(confirms) :]), view=view), "who accused is left out"
        return check(watched, ban, view=view)

    def with_record(record: Committed) -> View:
        return change(view, bound=2, attempts=(*view.attempts[:-1], record))

    assert is_shown(with_record(last))
    assert not is_shown(with_record(last), verdicts=(GUILTY, GUILTY))
    assert not is_shown(with_record(last), watched.swarm.keys[0]), "of another part"
    assert not is_shown(with_record(msgspec.structs.replace(last, excused=(key,)))), "excused"
    caught = (Caught(watched.swarm.keys[liar], part),)
    assert not is_shown(with_record(msgspec.structs.replace(last, caught=caught))), "told of it then"
    assert not is_shown(change(view, bound=2, attempts=view.attempts[:-1])), "of an attempt that nobody remembers"
    later = msgspec.structs.replace(last, attempt=last.attempt + 1)
    assert not is_shown(change(view, bound=2, attempts=(*view.attempts, later))), "the attempt came to nothing"
    assert not is_shown(change(view, bound=1)), "with the liar more than can be attackers"
    left = tuple(k for k in view.roster if k != watched.swarm.keys[liar])
    assert not is_shown(change(view, bound=1, roster=left)), "also if the liar has left"
    assert is_shown(change(view, bound=2, roster=left))
    banned = (watched.swarm.keys[liar],)
    assert is_shown(change(view, bound=1, roster=left, banned=banned)), "not if the liar was banned before"


def test_v4_of_accomplices_counts_those_of_all_cases(watched: Checkers) -> None:
    """Each case alone has few enough to blame; together they are more than can be attackers."""
    last, keys = change(watched.latest).attempts[-1], watched.swarm.keys
    liars = [peer for peer in (4, 3, 2, 1) if keys[peer] in last.contributors][:2]
    parts = [part for part, key in enumerate(last.roster) if keys.index(key) not in liars]
    one, two = (make_charge(watched, Rule.GRADIENT, liars[x], (parts[x],), back=1) for x in range(2))
    votes = {compute_case_digest(charge): [GUILTY] * 5 for charge in (one, two)}
    said = make_trial(watched, make_confirms(watched, (), {0: (one,), 1: (two,)}), votes)
    for banned, proven in (((), False), ((keys[liars[1]],), True)):
        view = change(watched.latest, bound=3, banned=banned)
        ban = Banned(last.roster[parts[0]], Rule.REPORT, one.step, view.step, "", said, one)
        assert check(watched, ban, view=view, cases=(one, two)) == proven
        assert not check(watched, ban, view=view), "the other case is left out"


def test_v4_of_oneself_is_a_false_accusation_where_the_votes_say_so(watched: Checkers) -> None:
    view, key = change(watched.latest), watched.swarm.keys[4]
    charge = make_charge(watched, Rule.GRADIENT, 4, ())
    digest, named = compute_case_digest(charge), accuse(watched, 4, charge)
    strange = sign(watched, 4, Phase.CONFIRM, m.Confirm(NOBODY, (NOBODY,), (), (), False, False, (), m.NOTHING))

    def is_shown(verdicts: list[Verdict], *confirms: m.Signed, peer: int = 4) -> bool:
        votes = (*confirms, *make_votes(watched, digest, verdicts))
        return check(watched, Banned(watched.swarm.keys[peer], Rule.GRADIENT, view.step, view.step, "", votes, charge))

    assert is_shown([INNOCENT] * 4, named)
    assert is_shown([INNOCENT] * 3, named)
    assert is_shown([GUILTY] * 4, named), "and it may be true"
    assert not is_shown([INNOCENT] * 2, named)
    assert not is_shown([INNOCENT, INNOCENT, GUILTY, GUILTY], named)
    assert not is_shown([INNOCENT] * 4), "nobody accused"
    assert not is_shown([INNOCENT] * 4, strange), "accused of something else"
    assert not is_shown([INNOCENT] * 4, accuse(watched, 0, charge)), "another accused it"
    assert not is_shown([INNOCENT] * 4, named, peer=1), "the accuser is another"
    assert key == charge.accused


def test_a_majority_of_few_voters_must_be_more_than_the_attackers(watched: Checkers) -> None:
    """Of those who were members then perhaps only attackers are left."""
    view, config = change(watched.latest), watched.swarm.config
    last = view.attempts[-1]
    charge = make_charge(
        watched, Rule.GRADIENT, next(p for p in (1, 2) if watched.swarm.keys[p] in last.contributors), (), 1
    )
    few = msgspec.structs.replace(last, roster=(charge.accused, watched.swarm.keys[4]))
    view = change(view, attempts=(*view.attempts[:-1], few))
    votes = (sign(watched, 4, Phase.VOTE, m.Vote((m.Ballot(compute_case_digest(charge), GUILTY),), ())),)
    ban = Banned(charge.accused, Rule.GRADIENT, charge.step, view.step, "", votes, charge)
    assert config.byzantine == view.bound == 1
    assert not check(watched, ban, view=view)
    assert check(watched, ban, view=change(view, bound=0))


def test_v4_needs_a_strict_majority_of_the_voters(watched: Checkers) -> None:
    key, view = watched.swarm.keys[4], change(watched.latest)
    commit = sign(watched, 4, Phase.COMMIT, m.Commit(NOBODY, NOBODY, NOBODY))
    charge = m.Accusation(Rule.GRADIENT, key, view.step, view.attempt, (), commit, None, (), ())
    digest = compute_case_digest(charge)
    accuser = sign(watched, 0, Phase.CONFIRM, m.Confirm(NOBODY, (digest,), (), (), False, False, (), m.NOTHING))
    cases = [([GUILTY] * 4, True), ([GUILTY, GUILTY, GUILTY, INNOCENT], True), ([GUILTY, GUILTY, INNOCENT], False)]
    for verdicts, proven in cases:
        votes = (*make_votes(watched, digest, verdicts), accuser)
        assert check(watched, Banned(key, Rule.GRADIENT, view.step, view.step, "", votes, charge)) == proven
    votes = (*make_votes(watched, digest, [INNOCENT] * 4), accuser)
    assert check(watched, Banned(watched.swarm.keys[0], Rule.GRADIENT, view.step, view.step, "", votes, charge))
    assert not check(watched, Banned(watched.swarm.keys[1], Rule.GRADIENT, view.step, view.step, "", votes, charge))


def test_v3_and_suspects_are_voted_on_as_well(watched: Checkers) -> None:
    view, key = change(watched.latest), watched.swarm.keys[4]
    part = view.roster.index(key)
    norms = compute_digest("norms", view.step.to_bytes(8, "little"), part.to_bytes(8, "little"))
    for verdicts, proven in (([GUILTY] * 3, True), ([GUILTY] * 2, False)):
        votes = make_votes(watched, norms, verdicts)
        assert check(watched, Banned(key, Rule.NORMS, view.step, view.step, "", votes, None)) == proven
    place = (view.step - 1).to_bytes(8, "little") + bytes(8)
    digest = compute_digest("suspect", key, place)
    view = change(view, suspects=(Suspect(key, view.step - 1, 0),), roster=watched.swarm.keys[:4])
    for verdicts, proven in (([GUILTY] * 3, True), ([GUILTY] * 2, False)):
        votes = make_votes(watched, digest, verdicts)
        ban = Banned(key, Rule.GRADIENT, view.step - 1, view.step, "", votes, None)
        assert check(watched, ban, view=view) == proven


def test_v4_of_a_member_whose_bytes_all_asked_for_is_voted_on_as_well() -> None:
    """Tolerant: its checker did not get them. It is no suspect of the view, which is from before."""
    watched = make_watched(tolerance=Tolerance(1e-4, 1e-2))
    view, swarm = change(watched.latest), watched.swarm
    one = next(x for x in compute_duties(swarm.config, view).checks)
    last = find_last(view, one.step)
    assert last is not None
    assert view.suspects == ()
    place = last.step.to_bytes(8, "little") + last.attempt.to_bytes(8, "little")

    def is_shown(key: bytes, count: int, view: View = view) -> bool:
        voters = [peer for peer in range(5) if swarm.keys[peer] != key][:count]
        body = m.Vote((m.Ballot(compute_digest("suspect", key, place), GUILTY),), ())
        votes = tuple(sign(watched, peer, Phase.VOTE, body) for peer in voters)
        return check(watched, Banned(key, Rule.GRADIENT, last.step, view.step, "", votes, None), view=view)

    assert is_shown(one.target, 3)
    assert not is_shown(one.target, 2)
    targets = {x.target for x in compute_duties(swarm.config, view).checks}
    assert not any(is_shown(key, 4) for key in view.roster if key not in targets), "nobody was to check it"
    others = tuple(key for key in last.contributors if key != one.target)
    record = msgspec.structs.replace(last, contributors=others)
    attempts = tuple(record if x == last else x for x in view.attempts)
    assert not is_shown(one.target, 4, change(view, attempts=attempts)), "it had not committed"
    left = tuple(key for key in view.roster if key != one.target)
    assert not is_shown(one.target, 4, change(view, roster=left)), "who left is asked for nothing"


def test_views_are_compared_as_a_whole(watched: Checkers) -> None:
    """Even what only later steps will use."""
    view = change(watched.latest)
    note(watched, StepFinished(view.step - 1, change(view, strikes=(Count(NOBODY, 1),))), peer=1)
    assert "other strikes" in watched.violations[0].text
