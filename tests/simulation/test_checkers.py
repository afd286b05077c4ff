"""Each checker catches a violation that was made up for it, and is content with a run as it should be."""

import msgspec
import pytest
import torch

from phalanx.core import messages as m
from phalanx.core.config import Tolerance
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import seal
from phalanx.core.events import AttemptStarted, Banned, Diverged, Removed, StepFinished, Synced
from phalanx.core.membership import Candidate, Count, Suspect, View
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.simulation.checkers import ALL, Checkers, verify_ban
from phalanx.simulation.swarm import Setup, Swarm

NOBODY = bytes(32)


def make_watched(steps: int = 4, **settings: object) -> Checkers:
    """A swarm of five, of whom the last may do anything, halfway through its run."""
    from phalanx.attacks import Attack

    setup = Setup(founders=5, settings={"byzantine": 1, "steps": 10, **settings}, attackers={4: Attack()})
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


def sign(checkers: Checkers, peer: int, phase: Phase, body: m.Body, height: int = 0) -> m.Signed:
    view, swarm = checkers.latest, checkers.swarm
    assert view is not None
    return seal(
        swarm.signers[peer], swarm.config.run, height or view.height, view.step, view.attempt, phase, NOBODY, body
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
    body = m.Outcome(0, final, (), (), (), False, view)
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


def test_removals_of_byzantine_peers_and_of_those_who_leave_are_fine(watched: Checkers) -> None:
    watched.swarm.leave(watched.swarm.keys[1])
    remove(watched, "left", 1, 4)
    assert watched.violations == []


def test_removals_after_an_outage_are_fine(watched: Checkers) -> None:
    watched.swarm.crash(watched.swarm.keys[1])
    remove(watched, "silent", 1)
    assert watched.violations == []


def test_an_eliminated_peer_takes_a_byzantine_one_along(watched: Checkers) -> None:
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


def check(watched: Checkers, event: Banned, others: tuple[Banned, ...] = (), view: View | None = None) -> bool:
    swarm = watched.swarm
    return verify_ban(swarm.config, swarm.examiner, view or change(watched.latest), event, others)


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


def make_reports(watched: Checkers, part: int, total: float) -> tuple[m.Signed, ...]:
    from phalanx.core.membership import compute_duties

    view, found = change(watched.latest), []
    contributors = compute_duties(watched.swarm.config, view).contributors
    for number, key in enumerate(contributors):
        sums = [0.0] * len(view.roster)
        sums[part] = total if number == 0 else 0.0
        body = m.Report(tuple(sums), (1.0,) * len(view.roster), (), ())
        found.append(sign(watched, watched.swarm.keys.index(key), Phase.REPORT, body))
    return tuple(found)


def test_v2_needs_reports_that_do_not_add_up(watched: Checkers) -> None:
    key, part = watched.swarm.keys[4], change(watched.latest).roster.index(watched.swarm.keys[4])
    step = change(watched.latest).step
    for total, proven in ((100.0, True), (0.0, False)):
        reports = make_reports(watched, part, total)
        assert check(watched, Banned(key, Rule.SUM, step, step, "", reports, None)) == proven
        assert not check(watched, Banned(key, Rule.SUM, step, step, "", reports[1:], None)), "one report is missing"


def make_votes(watched: Checkers, digest: bytes, verdicts: list[Verdict]) -> tuple[m.Signed, ...]:
    return tuple(
        sign(watched, peer, Phase.VOTE, m.Vote((m.Ballot(digest, verdict),), ()))
        for peer, verdict in enumerate(verdicts)
    )


GUILTY, INNOCENT = Verdict.GUILTY, Verdict.INNOCENT


def test_v4_needs_a_strict_majority_of_the_voters(watched: Checkers) -> None:
    from phalanx.core.peer import compute_case_digest

    key, view = watched.swarm.keys[4], change(watched.latest)
    commit = sign(watched, 4, Phase.COMMIT, m.Commit(NOBODY, NOBODY, NOBODY))
    charge = m.Accusation(Rule.GRADIENT, key, view.step, view.attempt, (), commit, None, (), ())
    digest = compute_case_digest(charge)
    accuser = sign(watched, 0, Phase.CONFIRM, m.Confirm(NOBODY, (digest,), (), (), False))
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


def test_views_are_compared_as_a_whole(watched: Checkers) -> None:
    """Even what only later steps will use."""
    view = change(watched.latest)
    note(watched, StepFinished(view.step - 1, change(view, strikes=(Count(NOBODY, 1),))), peer=1)
    assert "other strikes" in watched.violations[0].text
