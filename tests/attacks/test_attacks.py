"""Every attack against a small swarm: honest peers finish together and unharmed, attackers get what they deserve."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from arena import Arena, assert_safe, run_arena

from phalanx.attacks import ATTACKS, Attack, load_attack
from phalanx.attacks.broadcast import Equivocate, Malformed, Silent, WrongRoot
from phalanx.attacks.gradients import Drift, SharedCompute
from phalanx.core.config import AutomaticTau
from phalanx.core.events import Banned, Synced
from phalanx.core.messages import Phase


@dataclass(frozen=True)
class Fate:
    """What one attacker may end with: banned for a rule, ``removed``, or ``-`` for neither."""

    fates: tuple[str, ...]
    removable: int = 0
    """Honest members that may go as well, each with an attacker."""
    steps: int = 8


def get_fate(arena: Arena, key: bytes) -> str:
    if key in arena.bans:
        return "+".join(sorted(arena.bans[key]))
    return "removed" if key in arena.removed else "-"


def check(arena: Arena, *expected: Fate) -> None:
    assert_safe(arena, removable=max(fate.removable for fate in expected))
    for key, fate in zip(arena.attackers, expected, strict=True):
        assert get_fate(arena, key) in fate.fates, arena.describe()


HARMLESS, REMOVED = Fate(("-",)), Fate(("removed",))
E1, E2, E3, E4, V2 = (Fate((rule,)) for rule in ("E1", "E2", "E3", "E4", "V2"))
V1, V4 = Fate(("V1",)), Fate(("V4",))
E1_OR_E2 = Fate(("E1", "E2", "E1+E2"))  # the second share is wrong as well
SLOW = Fate(("removed", "-"))  # it pays in time, and is suspended for it if that is too much
CAUGHT = Fate(("V4", "-"))  # if a validator was drawn in time

FATES: dict[str, Fate] = {
    "honest": HARMLESS,
    "wrong_gradient": V4,
    "random_gradient": V4,
    "zero_gradient": V4,
    "stale_gradient": V4,
    "drift": V4,
    "nonfinite_parts": Fate(("E4",)),
    "huge_parts": Fate(("E4",)),
    "sleeper": CAUGHT,
    "sybils": CAUGHT,
    "wrong_aggregate": V2,
    "covered_aggregate": Fate(("V2", "V4")),
    "aggregate_covered_by_colluder": Fate(("V1", "V2", "V4")),
    "false_report": Fate(("V1",)),
    "false_norm": Fate(("V1",)),
    "framing": HARMLESS,
    "nonfinite_aggregate": Fate(("E4", "V2")),
    "withheld_parts_from_one": SLOW,
    "withheld_parts": SLOW,
    "withheld_parts_from_one_for_good": REMOVED,
    "withheld_parts_for_good": REMOVED,
    "wrong_openings": E3,
    "withheld_aggregate_from_one": HARMLESS,
    "withheld_aggregate_from_some": HARMLESS,
    "withheld_aggregate": REMOVED,
    "false_complaint": SLOW,
    "stubborn_complaint": REMOVED,
    "complaint_spam": SLOW,
    "deaf_to_parts": REMOVED,
    "deaf_to_aggregates": REMOVED,
    "equivocate": E1,
    "equivocate_commit": E1,
    "equivocate_aggregate": E1,
    "equivocate_aggregate_again": HARMLESS,
    "equivocate_reveal": E1_OR_E2,
    "equivocate_report": E1,
    "equivocate_report_again": HARMLESS,
    "equivocate_confirm": E1,
    "equivocate_vote": E1,
    "equivocate_seal": Fate(("E1", "-")),
    "equivocate_abort": HARMLESS,
    "equivocate_to_each": E1,
    "equivocate_commit_to_each": E1,
    "equivocate_report_to_each": E1,
    "equivocate_confirm_to_each": E1,
    "equivocate_late": E1,
    "wrong_root": REMOVED,
    "silent": REMOVED,
    "silent_commit": REMOVED,
    "silent_aggregate": REMOVED,
    "silent_aggregate_again": HARMLESS,
    "silent_reveal": REMOVED,
    "silent_report": REMOVED,
    "silent_report_again": HARMLESS,
    "silent_confirm": REMOVED,
    "silent_vote": REMOVED,
    "silent_seal": Fate(("removed", "-")),
    "silent_abort": HARMLESS,
    "silent_to_one": HARMLESS,
    "silent_to_most": HARMLESS,
    "late": SLOW,
    "too_late": REMOVED,
    "premature_timeouts": HARMLESS,
    "replay": HARMLESS,
    "echo": HARMLESS,
    "malformed": E4,
    "wrong_phase_body": E4,
    "oversize": E4,
    "out_of_range": E4,
    "wrong_labels": E4,
    "flood": HARMLESS,
    "late_second_value": HARMLESS,
    "too_late_second_value": HARMLESS,
    "garbage_gossip": HARMLESS,
    "late_endorsements": HARMLESS,
    "votes_to_some": HARMLESS,
    "two_votes": HARMLESS,
    "withheld_certificates": HARMLESS,
    "withheld_reveal": REMOVED,
    "wrong_reveal": E2,
    "copied_commitment": E2,
    "rushed_reveal": Fate(("removed", "-")),
    "false_accusation_report": V1,
    "false_accusation_gradient": V4,
    "false_accusation_malformed": E4,
    "accusation_for_few": Fate(("V1", "removed")),
    "accusation_without_evidence": REMOVED,
    "accusation_spam": REMOVED,
    "shielding_votes": HARMLESS,
    "empty_votes": HARMLESS,
    "unreceived_votes": HARMLESS,
    "lying_validator": CAUGHT,
    "idle_validator": HARMLESS,
    "shielded_gradient": V4,
    "leave": REMOVED,
    "hit_and_leave": Fate(("V4", "removed")),
    "hit_and_vanish": Fate(("V4", "removed")),
    "absent": REMOVED,
    "silent_target": V4,
    "wrong_seal": HARMLESS,
    "wrong_state": HARMLESS,
    "endless_state": HARMLESS,
    "wrong_chain": HARMLESS,
}


@pytest.mark.parametrize("name", FATES)
def test_two_attackers(name: str) -> None:
    attack = ATTACKS[name]()
    check(run_arena(attack, attack, seed=2, limit=200.0), FATES[name], FATES[name])


# ---- Attacks that need somebody to open the door

TOGETHER: dict[str, tuple[Fate, Fate]] = {
    "equivocate_seal+false_accusation_gradient": (Fate(("E1", "-")), V4),
    "silent_seal+false_accusation_gradient": (REMOVED, V4),
    "equivocate_abort+wrong_reveal": (Fate(("E1", "-")), E2),
    "silent_abort+wrong_reveal": (REMOVED, E2),
    "equivocate_aggregate_again+false_complaint": (Fate(("E1", "E1+E4")), SLOW),
    "silent_aggregate_again+false_complaint": (REMOVED, SLOW),
    "equivocate_report_again+deaf_to_aggregates": (E1, REMOVED),
    "silent_report_again+deaf_to_aggregates": (REMOVED, REMOVED),
    "late_second_value+silent_aggregate": (E1, REMOVED),
    "too_late_second_value+silent_report": (HARMLESS, REMOVED),
    "late_endorsements+silent_reveal": (HARMLESS, REMOVED),
    "votes_to_some+silent_confirm": (HARMLESS, REMOVED),
    "two_votes+equivocate_report": (HARMLESS, E1),
    "withheld_certificates+silent_report": (HARMLESS, REMOVED),
    "equivocate_vote+false_accusation_gradient": (E1, V4),
    "silent_vote+false_accusation_gradient": (REMOVED, V4),
    "premature_timeouts+silent_aggregate": (HARMLESS, REMOVED),
    "flood+silent_confirm": (HARMLESS, REMOVED),
    "accusation_spam+wrong_gradient": (REMOVED, V4),
    "accusation_spam+equivocate_report": (REMOVED, E1),
    "wrong_root@2+silent_report@2": (REMOVED, REMOVED),
    "shielding_votes+false_accusation_report": (HARMLESS, V1),
    "withheld_certificates+wrong_reveal": (HARMLESS, E2),
}


@pytest.mark.parametrize("pair", TOGETHER)
def test_together(pair: str) -> None:
    members = 9 if "silent_aggregate_again" in pair else 8  # one more may go, and a pair
    check(run_arena(*map(load_attack, pair.split("+")), seed=2, members=members), *TOGETHER[pair])


def test_garbage_in_the_slow_path() -> None:
    arena = run_arena(load_attack("garbage_gossip"), load_attack("silent_commit"), seed=1)
    assert_safe(arena, halts=True)


# ---- Every phase

COMMON = [Phase.COMMIT, Phase.AGGREGATE, Phase.REVEAL, Phase.REPORT, Phase.CONFIRM]


IN_EVERY_PHASE = [
    pytest.param(make, phase, fate, id=f"{make.__name__}-{phase.name}")
    for make, fate in ((Malformed, E4), (WrongRoot, REMOVED), (Silent, REMOVED), (Equivocate, E1_OR_E2))
    for phase in COMMON
    if (make, phase) != (Equivocate, Phase.CONFIRM)
]


@pytest.mark.parametrize(("make", "phase", "fate"), IN_EVERY_PHASE)
def test_in_every_phase(make: type[Attack], phase: Phase, fate: Fate) -> None:
    check(run_arena(make(phases=(phase,), start=1), seed=4, steps=4), fate)  # type: ignore[call-arg]


def test_one_equivocates_in_confirm() -> None:
    check(run_arena(Equivocate(phases=(Phase.CONFIRM,)), seed=1), E1)


def test_a_late_second_value_is_a_proof_for_all() -> None:
    check(run_arena(load_attack("equivocate_late"), seed=2), E1)


def test_late_to_the_last_phase() -> None:
    attack = load_attack("late")
    attack.delay = 3.5  # type: ignore[attr-defined]
    assert_safe(run_arena(attack, attack, seed=3))


# ---- Joining


@pytest.mark.parametrize(
    "pair", ["wrong_state+wrong_chain", "withheld_certificates+wrong_chain", "wrong_seal+wrong_aggregate@1"]
)
def test_joiner_finds_the_truth(pair: str) -> None:
    arena = run_arena(
        *map(load_attack, pair.split("+")), steps=14, joiners=(None,), join_at=12.0, probation=5, newcomer_probation=5
    )
    assert_safe(arena)
    joiner = arena.honest[-1]
    assert any(key == joiner for key, _ in arena.get_events(Synced))
    assert all(joiner in view.roster for view in arena.ends.values())


def test_joiner_is_not_starved() -> None:
    attack = load_attack("endless_state")
    arena = run_arena(
        attack, attack, steps=14, joiners=(None,), join_at=12.0, probation=5, newcomer_probation=5, seed=3
    )
    assert all(arena.honest[-1] in view.roster for view in arena.ends.values())


def test_joiner_tells_bans_as_they_were() -> None:
    arena = run_arena(
        load_attack("wrong_aggregate@1"), steps=8, joiners=(None,), join_at=12.0, probation=5, newcomer_probation=5
    )
    assert {event.rule for _, event in arena.get_events(Banned)} == {"V2"}


def test_sybils_are_no_cheaper_than_peers() -> None:
    """Four keys with the compute of one: those without a gradient of their own are found out on probation."""
    sybil = SharedCompute(budget=1)
    arena = run_arena(steps=14, joiners=(sybil,) * 4, join_at=1.0, probation=5, newcomer_probation=5, admissions=4)
    assert_safe(arena)
    admitted = [key for key in arena.attackers if key in next(iter(arena.ends.values())).roster]
    assert len(admitted) <= 1
    assert all(rules <= {"V4"} for rules in arena.bans.values())


# ---- Automatic tau, and the wire


def test_drift_does_not_carry_tau_away() -> None:
    tau = AutomaticTau(multiple=1.5, start=1.0, floor=0.05, ceiling=100.0)
    fair = run_arena(steps=12, tau=tau)
    arena = run_arena(Drift(growth=1.5), Drift(growth=1.5), steps=12, tau=tau)
    assert_safe(arena)
    (ends,) = {view.tau for view in arena.ends.values()}
    (usual,) = {view.tau for view in fair.ends.values()}
    assert ends <= 2 * usual


@pytest.mark.parametrize(
    ("name", "fate"),
    [("malformed", E4), ("oversize", REMOVED), ("replay", HARMLESS), ("flood", HARMLESS), ("equivocate", E1)],
)
def test_over_the_wire(name: str, fate: Fate) -> None:
    """Behind the decoder: what is too long for the schema never arrives, and its sender counts as silent."""
    check(run_arena(ATTACKS[name](), seed=4, steps=4, wire=True), fate)
