"""Gradient charges one by one, and the pace as ``justice.decide`` applies it: from letters as they were agreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.crypto import Identity
from phalanx.core.envelope import Letter, seal
from phalanx.core.justice import Decision, decide, find_offenders, make_agenda
from phalanx.core.membership import (
    Changes,
    Count,
    Suspension,
    compute_duties,
    finish_step,
    make_genesis,
    note_commits,
    note_draw,
)
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.peer import compute_case_digest
from phalanx.core.transcript import Transcript

PEERS = sorted((Identity(bytes([number]) * 32) for number in range(1, 9)), key=lambda peer: peer.key)
KEYS = tuple(peer.key for peer in PEERS)
CONFIG = Config(founders=KEYS, byzantine=2, size=1000, steps=100).check()
ZERO = bytes(32)
GUILTY, INNOCENT, NOT_RECEIVED = Verdict.GUILTY, Verdict.INNOCENT, Verdict.NOT_RECEIVED


def make_charge(accused: int) -> m.Accusation:
    commit = seal(PEERS[accused], CONFIG.run, 0, 0, 0, Phase.COMMIT, ZERO, m.Commit(ZERO, ZERO, ZERO))
    return m.Accusation(Rule.GRADIENT, KEYS[accused], 0, 0, (), commit, None, (), ())


CHARGES = {place: make_charge(place) for place in range(8)}
CASES: dict[bytes, m.Accusation | m.Proof] = {compute_case_digest(charge): charge for charge in CHARGES.values()}
DIGEST = {place: compute_case_digest(charge) for place, charge in CHARGES.items()}


def say(place: int, phase: Phase, body: m.Body) -> Letter:
    return Letter(seal(PEERS[place], CONFIG.run, 9, 1, 0, phase, ZERO, body), bytes([place]) * 32, body)


def make_transcript(
    lists: Mapping[int, Sequence[int]] | None = None,
    timings: Mapping[int, m.Timing] | None = None,
    named: Sequence[bytes] | None = None,
    **fields: object,
) -> Transcript:
    """A step in which members charge others with wrong gradients, and say how long they waited."""
    view = note_commits(make_genesis(CONFIG), KEYS, ())
    view = msgspec.structs.replace(view, step=1, **fields)
    confirms = {}
    for place, key in enumerate(KEYS):
        listed = (lists or {}).get(place, ())
        cases, timing = tuple(DIGEST[x] for x in listed), (timings or {}).get(place, m.NOTHING)
        charged = tuple(KEYS[x] for x in listed) if named is None else tuple(named) if listed else ()
        confirms[key] = say(place, Phase.CONFIRM, m.Confirm(ZERO, cases, (), (), False, False, charged, timing))
    return Transcript(view, compute_duties(CONFIG, view), {Phase.CONFIRM: confirms})


def hear(transcript: Transcript, verdicts: Mapping[int, Verdict]) -> Decision:
    """Vote round by round, all alike, until no list goes on."""
    agenda = make_agenda(CONFIG, transcript, CASES)
    while True:
        here = [case.digest for case in agenda if case.round == len(transcript.heard)]
        ballots = tuple(m.Ballot(x, verdicts[y]) for x, y in sorted((DIGEST[y], y) for y in DIGEST) if x in here)
        votes = {key: say(place, Phase.VOTE, m.Vote(ballots, ())) for place, key in enumerate(KEYS)}
        transcript.phases[Phase.VOTE] = votes
        more = make_agenda(CONFIG, transcript, CASES, len(transcript.heard) + 1)
        if len(more) == len(agenda):
            return decide(CONFIG, transcript, agenda, CASES)
        transcript.heard.append(votes)
        agenda = more


# ---- Rounds


def test_charges_of_one_accuser_are_heard_one_by_one_and_all_convict() -> None:
    transcript = make_transcript({0: (6, 7)})
    decision = hear(transcript, {6: GUILTY, 7: GUILTY})
    assert decision.banned.keys() == {KEYS[6], KEYS[7]}
    assert len(transcript.heard) == 1
    assert len(decision.banned[KEYS[7]].evidence) == 3 * len(KEYS), "CONFIRM and two rounds of votes"


def test_a_false_charge_ends_the_list_and_bans_its_accuser() -> None:
    transcript = make_transcript({0: (6, 7)})
    decision = hear(transcript, {6: INNOCENT, 7: GUILTY})
    assert decision.banned.keys() == {KEYS[0]}
    assert not transcript.heard


def test_a_charge_that_nobody_received_ends_the_list_and_suspends_its_accuser() -> None:
    transcript = make_transcript({0: (6, 7)})
    decision = hear(transcript, {6: NOT_RECEIVED, 7: GUILTY})
    assert (decision.banned.keys(), decision.removed.keys()) == (set(), {KEYS[0]})
    assert not transcript.heard


def test_a_list_of_more_accused_than_can_be_guilty_is_not_heard() -> None:
    transcript = make_transcript({0: (5, 6, 7)})
    assert not make_agenda(CONFIG, transcript, CASES)
    decision = decide(CONFIG, transcript, (), CASES)
    assert decision.removed == {KEYS[0]: "accuses more members than may be Byzantine"}
    assert not decision.wrong, "the step stands"


def test_one_that_is_convicted_is_not_tried_again_and_costs_nobody_its_list() -> None:
    transcript = make_transcript({0: (6, 7), 1: (7, 6)})
    decision = hear(transcript, {6: GUILTY, 7: GUILTY})
    assert decision.banned.keys() == {KEYS[6], KEYS[7]}
    assert not transcript.heard, "both were heard in the first round"


def test_a_false_charge_of_one_member_does_not_end_the_list_of_another() -> None:
    transcript = make_transcript({0: (5,), 1: (6, 7)})
    decision = hear(transcript, {5: INNOCENT, 6: GUILTY, 7: GUILTY})
    assert decision.banned.keys() == {KEYS[0], KEYS[6], KEYS[7]}


def test_who_names_another_than_the_case_does_is_suspended() -> None:
    transcript = make_transcript({0: (6,)}, named=[KEYS[3]])
    decision = hear(transcript, {6: GUILTY})
    assert decision.removed.keys() == {KEYS[0]}
    assert KEYS[3] not in decision.banned


def test_a_gradient_charge_that_was_not_declared_suspends_its_accuser() -> None:
    transcript = make_transcript({0: (6,)}, named=[])
    decision = hear(transcript, {6: GUILTY})
    assert decision.removed.keys() == {KEYS[0]}
    assert not decision.banned


# ---- Pace


def time_all(late: Mapping[int, int], step: int = 1000) -> m.Timing:
    lags = tuple(late.get(place, 0) for place in range(len(KEYS)))
    return m.Timing(step, 0, 50, lags if any(lags) else (), (), ())


def test_who_cost_more_than_the_limit_is_suspended_with_the_numbers() -> None:
    transcript = make_transcript(timings={place: time_all({7: 13_000}) for place in range(7)}, pace=1000)
    decision = decide(CONFIG, transcript, (), CASES)
    assert decision.removed == {
        KEYS[
            7
        ]: "too slow: it cost 13.0 s in this step beyond twice the median, 12.9 s in all, and 10.0 s are put up with"
    }
    assert decision.pace is not None
    assert decision.pace.debts == (Count(KEYS[7], 12_900),)


def test_who_cost_less_only_owes_it() -> None:
    transcript = make_transcript(timings={place: time_all({7: 3000}) for place in range(7)}, pace=1000)
    decision = decide(CONFIG, transcript, (), CASES)
    assert not decision.removed
    assert decision.pace is not None
    assert decision.pace.debts == (Count(KEYS[7], 2900),)


def test_liars_charge_nobody() -> None:
    transcript = make_transcript(timings={place: time_all({0: 90_000}) for place in (6, 7)}, pace=1000)
    decision = decide(CONFIG, transcript, (), CASES)
    assert not decision.removed
    assert decision.pace is not None
    assert not decision.pace.debts


@pytest.mark.parametrize(("debt", "back"), [(10_000, True), (10_001, False)])
def test_a_debtor_is_back_when_it_owes_no_more_than_the_limit(debt: int, back: bool) -> None:
    view = msgspec.structs.replace(
        make_genesis(CONFIG),
        roster=KEYS[:7],
        suspended=(Suspension(KEYS[7], 0, 0),),
        debts=(Count(KEYS[7], debt),),
        pace=1000,
    )
    after = finish_step(
        CONFIG,
        note_draw(view, bytes([1]) * 32, ()),
        Changes(),
        height=6,
        previous=ZERO,
        state=ZERO,
        scale=None,
        complaints=(),
        served=(),
        joins=[KEYS[7]],
    )
    assert (KEYS[7] in after.roster) == back


def test_a_timing_of_another_roster_is_malformed() -> None:
    transcript = make_transcript(timings={3: m.Timing(1, 0, 0, (1, 2), (), ())})
    assert find_offenders(CONFIG, transcript, Phase.CONFIRM).banned.keys() == {KEYS[3]}
