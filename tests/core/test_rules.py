"""Every rule of docs/PROTOCOL.md, section 7: it fires, it leaves honest peers alone, and to cry it falsely costs.

Each run is a small swarm with the outside checkers on. The cap is a few ``tau``, so that V2 has teeth for two-byte wire
types as well (``verification.sum_bound``).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from phalanx.attacks import Attack, Insider, combine
from phalanx.attacks.aggregation import (
    CoveredAggregate,
    FalseComplaints,
    FalseReport,
    Framing,
    NonFiniteAggregate,
    ShiftedAggregate,
    WrongOpenings,
)
from phalanx.attacks.base import change_body, note_case
from phalanx.attacks.broadcast import Equivocate, EquivocateToEach, Malformed
from phalanx.attacks.gradients import NonFiniteParts, WrongGradient
from phalanx.attacks.justice import FalseAccusation, ShieldingVotes, WrongReveal
from phalanx.core import messages as m
from phalanx.core.config import Tolerance
from phalanx.core.crypto import Domain
from phalanx.core.effects import ComputeAggregate, Delivery, Sign
from phalanx.core.events import AttemptStarted, Banned, Diverged, Halted, Removed, RunFinished, StepFinished, Synced
from phalanx.core.messages import Phase, Rule, Signed
from phalanx.core.verification import sum_bound
from phalanx.core.wire import WIRE_TYPES
from phalanx.simulation.checkers import Checkers
from phalanx.simulation.machine import Bowl
from phalanx.simulation.swarm import Setup, Swarm

TAU, CAP, SIZE = 1.0, 4.0, 32

KEEN: dict[str, dict[str, Any]] = {"int8": {"cap": 1.0, "projections": 4, "steps": 8}}
"""What V2 wants before it sees a wrong aggregate within a few steps, where rounding hides more."""

over_all_wires = pytest.mark.parametrize("wire", WIRE_TYPES)


@dataclass
class Run:
    """A run that is over. All checkers were content unless a test says otherwise."""

    swarm: Swarm
    found: list[Any] = field(default_factory=list)
    """What one honest member noted, in order: one that saw every ban happen, where it can be."""

    def get(self, kind: type) -> list[Any]:
        return [event for event in self.found if isinstance(event, kind)]

    @property
    def bans(self) -> dict[int, Banned]:
        """By the number of the peer."""
        return {self.swarm.keys.index(event.key): event for event in self.get(Banned)}

    @property
    def rules(self) -> dict[int, Rule]:
        return {number: event.rule for number, event in self.bans.items()}

    @property
    def removals(self) -> dict[int, str]:
        return {self.swarm.keys.index(event.key): event.reason for event in self.get(Removed)}

    def find_next(self, event: Any) -> Any:
        """The view of the first attempt after this event."""
        later = self.found[self.found.index(event) + 1 :]
        return next(x.view for x in later if isinstance(x, AttemptStarted))


def make_swarm(
    *attacks: Attack,
    members: int = 5,
    byzantine: int = 1,
    steps: int = 4,
    seed: int = 1,
    rounding: float = 0.0,
    **settings: Any,
) -> Swarm:
    """The last members attack, the others are honest."""
    setup = Setup(
        founders=members,
        settings={"byzantine": byzantine, "steps": steps, "size": SIZE, "tau": TAU, "cap": CAP, **settings},
        attackers={members - len(attacks) + place: attack for place, attack in enumerate(attacks)},
        rounding=rounding,
    )
    return Swarm(setup, seed, keep_events=True)


def finish(swarm: Swarm, until: float = 600.0) -> Run:
    """Run to the end: whatever happens, honest peers stay together, get there, and no invariant breaks."""
    checkers = Checkers(swarm)
    assert swarm.run(until, swarm.is_over), f"not over after {until} s, at step {checkers.step}"
    checkers.finish()
    assert checkers.violations == []
    assert checkers.step == swarm.config.steps
    assert not swarm.failed
    runs = [Run(swarm, [event for _, event in swarm.events[key]]) for key in swarm.honest if key in swarm.finished]
    assert not any(run.get(Halted) for run in runs)
    run = max(runs, key=lambda run: len(run.bans))  # who was led past a ban by a certificate has no word of it
    assert {swarm.keys[number] for number in run.bans} == set(run.get(RunFinished)[-1].view.banned)
    return run


def run(*attacks: Attack, **options: Any) -> Run:
    return finish(make_swarm(*attacks, **options))


def assert_false_accusation(found: Run, rule: Rule, accuser: int = 4) -> None:
    """The accuser is banned for it, and nobody else is."""
    assert found.rules == {accuser: rule}
    assert found.bans[accuser].reason == "a false accusation"
    assert not found.removals


@dataclass(kw_only=True, eq=False)
class Covered(CoveredAggregate):
    """One of the plot moves its aggregate, in those steps only in which all who could cover it report."""

    shift: float = -1.0

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        ready = insider.plot.keys <= set(insider.duties.contributors) and insider.key == min(insider.plot.keys)
        return super().on_aggregate(insider, effect, result) if ready else result


# ---- Without attackers, no rule fires


@over_all_wires
@pytest.mark.parametrize("mode", ["exact", "tolerant"])
def test_no_rule_fires_on_honest_peers(wire: str, mode: str) -> None:
    tolerance = Tolerance(0.02, 0.1) if mode == "tolerant" else None
    found = run(wire=wire, tolerance=tolerance, rounding=1e-6 if tolerance else 0.0, projections=2, validators=2)
    assert not found.bans
    assert not found.removals
    assert not found.get(Diverged)
    assert len(found.swarm.config.founders) == len(found.get(StepFinished)[-1].view.roster)


# ---- V1 report


@over_all_wires
@pytest.mark.parametrize(
    "lie", [FalseReport(), FalseReport(sums=0.0, norms=1.0), FalseReport(part=0)], ids=["sums", "norms", "one part"]
)
def test_v1_fires_on_a_wrong_report(wire: str, lie: Attack) -> None:
    found = run(lie, wire=wire)
    assert found.rules == {4: Rule.REPORT}
    assert found.bans[4].reason == "convicted by vote"
    assert isinstance(found.bans[4].case, m.Accusation)


@over_all_wires
def test_v1_does_not_fire_on_what_rounding_may_do(wire: str) -> None:
    """Nearly the whole tolerance, in one direction: neither aggregators nor voters mind."""
    assert not run(Framing(share=0.99), Framing(share=0.99), members=7, byzantine=2, wire=wire).bans


@over_all_wires
def test_v1_false_accusation_costs_the_accuser(wire: str) -> None:
    assert_false_accusation(run(FalseAccusation(rule=Rule.REPORT), wire=wire), Rule.REPORT)


@over_all_wires
def test_v1_wrong_report_alone_leaves_the_update_standing(wire: str) -> None:
    found = run(FalseReport(part=0, start=1), wire=wire)
    ban = found.bans[4]
    after = found.find_next(ban)
    assert ban.step == ban.at
    assert (after.step, after.failed) == (ban.at + 1, 0), "no attempt was lost"


@over_all_wires
def test_v1_aggregator_that_let_a_wrong_report_pass_is_banned_too(wire: str) -> None:
    """A colluder's report hides a moved aggregate from V2; V4 finds the report, and whose aggregate it covered."""
    attack = Covered(by_colluder=True)
    found = run(attack, attack, members=7, byzantine=2, validators=2, wire=wire, steps=20, seed=2)
    aggregator, liar = sorted((5, 6), key=lambda number: found.swarm.keys[number])
    assert found.rules == {aggregator: Rule.REPORT, liar: Rule.GRADIENT}
    assert found.bans[aggregator].reason == "let a wrong report on its aggregate pass"
    assert found.bans[aggregator].at == found.bans[liar].at


@dataclass(kw_only=True, eq=False)
class CoverAndLeave(Covered):
    """Whoever has covered a colluder's aggregate leaves before anybody is drawn to check it."""

    by_colluder: bool = True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        changed = super().on_body(insider, sign)
        lied = insider.plot.keys <= set(insider.duties.contributors) and insider.key != min(insider.plot.keys)
        if lied and isinstance(changed, Sign) and isinstance(changed.body, m.Confirm):
            return change_body(changed, leaving=True)
        return changed


def test_v1_aggregator_is_banned_too_if_the_liar_has_left() -> None:
    """It is drawn as if it were there, and the ban reaches it. Each time that it leaves it stays out for longer."""
    outside = caught = 0
    for seed in range(1, 9):
        found = run(CoverAndLeave(), CoverAndLeave(), members=11, byzantine=2, validators=3, steps=25, seed=seed)
        swarm = found.swarm
        aggregator, liar = sorted((9, 10), key=lambda number: swarm.keys[number])
        assert found.removals == {liar: "left"}
        assert found.rules in ({}, {liar: Rule.GRADIENT, aggregator: Rule.REPORT}), "both, or neither was drawn"
        left = [event.step for event in found.get(Removed)]
        assert len(left) >= (not found.bans) + 1, "it goes on with it until it is drawn"
        for number, (first, second) in enumerate(itertools.pairwise(left), 1):
            assert second - first >= (2, 4, 8, 16)[number - 1]
        if found.bans:
            caught += 1
            assert found.bans[aggregator].at == found.bans[liar].at
            ended = next(event.view for event in found.get(AttemptStarted) if event.view.step == found.bans[liar].at)
            outside += swarm.keys[liar] not in ended.roster
    assert caught >= 4, "of eight"
    assert outside >= 1


# ---- V2 sum


@over_all_wires
def test_v2_fires_on_a_moved_aggregate(wire: str) -> None:
    assert run(ShiftedAggregate(), wire=wire, **KEEN.get(wire, {})).rules == {4: Rule.SUM}


@over_all_wires
@pytest.mark.parametrize("projections", [1, 3])
def test_v2_fires_on_an_aggregate_that_holds_no_numbers(wire: str, projections: int) -> None:
    options = {**KEEN.get(wire, {}), "projections": projections}
    assert run(NonFiniteAggregate(), wire=wire, **options).rules == {4: Rule.SUM}


@over_all_wires
def test_v2_wrong_aggregate_is_undone_and_the_attempt_retried(wire: str) -> None:
    found = run(ShiftedAggregate(start=1), wire=wire, **KEEN.get(wire, {}))
    ban = found.bans[4]
    before = next(x.view for x in found.get(AttemptStarted) if x.view.step == ban.step)
    after = found.find_next(ban)
    assert (after.step, after.failed, after.state) == (ban.step, 1, before.state)
    assert found.swarm.keys[4] not in after.roster
    assert found.get(StepFinished)[ban.step].view.failed == 1


@over_all_wires
def test_v2_does_not_fire_although_liars_use_all_that_v1_lets_pass(wire: str) -> None:
    """Accusers allow for twice what voters do: nobody is accused, until all vote on the last step."""
    found = run(Framing(share=1.99), Framing(share=1.99), members=7, byzantine=2, wire=wire, steps=5)
    assert Rule.SUM not in found.rules.values()
    assert all(ban.at == 5 for ban in found.bans.values())


@over_all_wires
def test_v2_cannot_be_cried_against_an_honest_aggregator(wire: str) -> None:
    """A lie that tips the sum of part 0 is corrected by V1 before sums are counted: only the liar goes."""
    off = 2 * sum_bound(TAU, 4, SIZE, WIRE_TYPES[wire], CAP)
    found = run(FalseReport(sums=off / TAU, part=0), wire=wire)
    assert found.rules == {4: Rule.REPORT}


@pytest.mark.parametrize("delay", [2.5, 3.5])
def test_v2_does_not_ban_an_honest_aggregator_whose_evidence_is_late(delay: float) -> None:
    """``delta`` does not hold for it, so it may be removed. It has cheated nobody."""
    swarm = make_swarm(FalseReport(start=1), members=7, byzantine=2)
    slow = swarm.keys[2]
    swarm.world.links.route = lambda now, sender, to, message: delay if sender == slow and now > 5 else -1.0
    assert swarm.run(600.0, swarm.is_over)
    banned = {event.key for key in swarm.honest for _, event in swarm.events[key] if isinstance(event, Banned)}
    assert banned == {swarm.keys[6]}


def test_v2_does_not_ban_an_honest_aggregator_that_crashes_after_confirm() -> None:
    """Its CONFIRM names the accusation; when it is back, the others have voted."""
    banned = set()
    for moment in (8.75, 9.0, 9.25, 9.5):
        swarm = make_swarm(FalseReport(start=1), members=7, byzantine=2)
        key = swarm.keys[2]
        swarm.world.at(moment, lambda swarm=swarm, key=key: swarm.crash(key, lost=0.0))
        swarm.world.at(moment + 0.2, lambda swarm=swarm, key=key: swarm.restart(key))
        assert swarm.run(600.0, swarm.is_over)
        banned |= {swarm.keys.index(x.key) for k in swarm.honest for _, x in swarm.events[k] if isinstance(x, Banned)}
    assert banned == {6}


@dataclass(kw_only=True, eq=False)
class Undecidable(ShiftedAggregate):
    """A wrong aggregate, and more accusations than fit the agenda, of a colluder in the gap of tolerant mode."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        digests = []
        for friend in insider.friends if isinstance(sign.body, m.Confirm) else ():
            commit, report = insider.find(Phase.COMMIT, friend), insider.find(Phase.REPORT, friend)
            if commit is not None and report is not None and friend in insider.duties.contributors:
                place = (friend, insider.view.step, insider.view.attempt)
                for number in range(m.MAX_CASES):
                    charge = m.Accusation(Rule.GRADIENT, *place, (number,), commit, report, (), ())
                    digests.append(note_case(insider, charge))
                    insider.notes["charge", digests[-1]] = charge
        return change_body(sign, accusations=tuple(digests)) if digests else sign

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, m.PullProof) and delivery.sender is not None:
            charge = insider.notes.get(("charge", delivery.message.case))
            if charge is not None:
                insider.send_later(0.0, (delivery.sender,), charge)
        return delivery


def test_v2_is_not_escaped_by_accusations_that_nobody_can_decide() -> None:
    gap = WrongGradient(change=lambda gradient, random: 1.1 * gradient)
    options = {"members": 8, "byzantine": 2, "cap": 50.0, "tolerance": Tolerance(0.02, 0.2), "rounding": 1e-6}
    swarm = make_swarm(gap, Undecidable(), **options)
    assert swarm.run(200.0, swarm.is_over), "it takes a minute, not for ever"
    ends = [event.view for _, event in swarm.events[swarm.keys[0]] if isinstance(event, RunFinished)]
    assert swarm.keys[7] not in ends[0].roster, "no attempt is lost for nothing"


# ---- V3 norms

FAR = 1.7
"""Honest parts are mostly nearer to their aggregate, and farther from one that is moved by 1 in every coordinate."""


@over_all_wires
def test_v3_fires_on_an_aggregate_far_from_everybody(wire: str) -> None:
    """Its aggregator covers it with its own report, so that V2 sees nothing."""
    found = run(Covered(), wire=wire, delta_max=FAR)
    assert found.rules == {4: Rule.NORMS}
    assert found.bans[4].reason == "an aggregate far from everybody"
    assert found.find_next(found.bans[4]).step == found.bans[4].step, "the update is undone"


@over_all_wires
def test_v3_does_not_fire_on_right_aggregates_even_if_all_are_opened(wire: str) -> None:
    found = run(Attack(), wire=wire, delta_max=1e-9)
    assert not found.bans
    assert not found.removals


@over_all_wires
def test_v3_cannot_be_cried_by_a_minority(wire: str) -> None:
    """Norms that are made up open nothing, and V1 sees them; false votes on opened parts are outvoted."""
    made_up = FalseReport(sums=0.0, norms=1e3)
    found = run(made_up, made_up, members=7, byzantine=2, wire=wire, delta_max=100.0)
    assert found.rules == {5: Rule.REPORT, 6: Rule.REPORT}
    found = run(ShieldingVotes(), ShieldingVotes(), members=7, byzantine=2, wire=wire, delta_max=1e-9, steps=3)
    assert not found.bans


# ---- V4 gradient

EXACT: dict[str, Any] = {}
TOLERANT: dict[str, Any] = {"tolerance": Tolerance(0.02, 0.1), "rounding": 1e-6}
both_modes = pytest.mark.parametrize("mode", [EXACT, TOLERANT], ids=["exact", "tolerant"])


@over_all_wires
@both_modes
def test_v4_fires_on_another_gradient(wire: str, mode: dict[str, Any]) -> None:
    found = run(WrongGradient(), wire=wire, validators=2, steps=14, **mode)
    assert found.rules == {4: Rule.GRADIENT}
    assert found.bans[4].reason == "convicted by vote"


@over_all_wires
@both_modes
def test_v4_fires_on_reports_that_cover_an_aggregate_of_ones_own(wire: str, mode: dict[str, Any]) -> None:
    """V2 adds up, and nobody but the aggregator itself recomputes what it reports of its own part."""
    found = run(Covered(), wire=wire, validators=2, steps=14, **mode)
    assert found.rules == {4: Rule.GRADIENT}
    case = found.bans[4].case
    assert isinstance(case, m.Accusation)
    assert case.parts == (4,)


@over_all_wires
def test_v4_fires_on_everybody_after_the_last_step(wire: str) -> None:
    """Nobody would be drawn to check the last step: all of it is checked before the end is released."""
    found = run(WrongGradient(start=2), WrongGradient(start=2), members=7, byzantine=2, wire=wire, steps=3)
    assert found.bans, "of two, one at least contributed"
    assert {(ban.rule, ban.step) for ban in found.bans.values()} == {(Rule.GRADIENT, 2)}


@over_all_wires
def test_v4_does_not_fire_on_another_platform_in_tolerant_mode(wire: str) -> None:
    found = run(wire=wire, tolerance=Tolerance(0.02, 0.1), rounding=1e-3, validators=2, steps=5)
    assert not found.bans


@over_all_wires
@both_modes
def test_v4_false_accusation_costs_the_accuser(wire: str, mode: dict[str, Any]) -> None:
    assert_false_accusation(run(FalseAccusation(rule=Rule.GRADIENT), wire=wire, **mode), Rule.GRADIENT)


# ---- Bogus proofs


@dataclass(kw_only=True, eq=False)
class BogusProof(FalseComplaints):
    """Brings a proof against an honest member that proves nothing, made of what that member did sign.

    To have an opening to show, it names a part that it has got.
    """

    rule: Rule

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Aggregate) and self.rule is Rule.OPENING:
            return super().on_body(insider, sign)
        proof = self._make(insider) if isinstance(sign.body, m.Confirm) else None
        if proof is None:
            return sign
        digest = note_case(insider, proof)
        insider.notes["charge", digest] = proof
        return change_body(sign, accusations=(digest,))

    def _make(self, insider: Insider) -> m.Proof | None:
        victim = next(key for key in insider.duties.contributors if key not in insider.plot.keys)
        commit, reveal = insider.find(Phase.COMMIT, victim), insider.find(Phase.REVEAL, victim)
        opening = insider.notes.get(("opening", insider.view.step, victim))
        assert commit is not None
        assert reveal is not None
        if self.rule is Rule.EQUIVOCATION:
            return m.Equivocation(reveal, msgspec.structs.replace(reveal, body=bytes(20)))
        if self.rule is Rule.REVEAL:
            return m.WrongReveal(commit, reveal)
        if self.rule is Rule.OPENING:
            return m.WrongOpening(commit, opening) if opening is not None else None
        return m.MalformedBody(commit)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if isinstance(message, Signed) and message.domain is Domain.OPENING:
            insider.notes["opening", message.step, message.sender] = message
        if isinstance(message, m.PullProof) and delivery.sender is not None:
            proof = insider.notes.get(("charge", message.case))
            if proof is not None:
                insider.send_later(0.0, (delivery.sender,), proof)
        return delivery


@over_all_wires
def test_v4_does_not_fire_on_a_gradient_that_was_cut_twice(wire: str) -> None:
    """A lost attempt leaves fewer parts, so blocks begin elsewhere: what is rounded again is the gradient itself."""
    attacks = WrongReveal(start=1), WrongReveal(start=2)
    found = run(*attacks, members=7, byzantine=2, validators=2, wire=wire)
    assert found.rules == {5: Rule.REVEAL, 6: Rule.REVEAL}


# ---- E1 equivocation


@over_all_wires
@pytest.mark.parametrize("phase", [Phase.COMMIT, Phase.AGGREGATE, Phase.REPORT], ids=lambda phase: phase.name)
def test_e1_fires_on_two_values_in_one_slot(wire: str, phase: Phase) -> None:
    found = run(Equivocate(phases=(phase,), start=1), wire=wire)
    assert found.rules == {4: Rule.EQUIVOCATION}
    case = found.bans[4].case
    assert isinstance(case, m.Equivocation)
    assert case.first.sender == case.second.sender == found.swarm.keys[4]


def test_e1_fires_on_a_value_for_each() -> None:
    assert run(EquivocateToEach(phases=(Phase.COMMIT,))).rules == {4: Rule.EQUIVOCATION}


@pytest.mark.parametrize("moment", [0.5, 1.5, 2.5, 3.5, 4.5])
def test_e1_does_not_fire_on_a_peer_that_crashes_and_comes_back(moment: float) -> None:
    """Whatever it had signed is on its disk: it says the same again."""
    swarm = make_swarm(steps=5)
    swarm.world.at(5 + moment, lambda: swarm.crash(swarm.keys[2]))
    swarm.world.at(5.2 + moment, lambda: swarm.restart(swarm.keys[2]))
    assert not finish(swarm).bans


@pytest.mark.parametrize("moment", [9.2, 9.4, 9.6, 9.8])
def test_e1_does_not_fire_on_a_peer_that_would_now_say_something_else(moment: float) -> None:
    """Its memory is lost, and with it that it wanted to leave: its CONFIRM would be another one."""
    swarm = make_swarm(Attack(), members=7, byzantine=2)
    checkers, key = Checkers(swarm), swarm.keys[2]
    swarm.world.at(5.5, lambda: swarm.leave(key))
    swarm.world.at(moment, lambda: swarm.crash(key, lost=0.0))
    swarm.world.at(moment + 0.2, lambda: swarm.restart(key))
    assert swarm.run(600.0, swarm.is_over)
    bans = [x for k in swarm.honest for _, x in swarm.events[k] if isinstance(x, Banned)]
    assert Rule.EQUIVOCATION not in {ban.rule for ban in bans}
    assert "one signature" not in {violation.rule for violation in checkers.violations}


@over_all_wires
def test_e1_bogus_proof_costs_the_accuser(wire: str) -> None:
    assert_false_accusation(run(BogusProof(rule=Rule.EQUIVOCATION), wire=wire), Rule.EQUIVOCATION)


# ---- E2 reveal


@over_all_wires
def test_e2_fires_on_a_share_that_does_not_open_its_commitment(wire: str) -> None:
    found = run(WrongReveal(start=1), wire=wire)
    assert found.rules == {4: Rule.REVEAL}
    assert isinstance(found.bans[4].case, m.WrongReveal)
    after = found.find_next(found.bans[4])
    assert (after.step, after.failed) == (1, 1), "the randomness is drawn anew, without its share"


@over_all_wires
def test_e2_does_not_fire_on_the_shares_of_a_second_attempt(wire: str) -> None:
    """Two attempts die, one after the other; whoever is honest has new shares each time, and they open."""
    found = run(WrongReveal(start=1), ShiftedAggregate(start=1), members=7, byzantine=2, wire=wire)
    assert found.rules == {5: Rule.REVEAL, 6: Rule.SUM}


@over_all_wires
def test_e2_bogus_proof_costs_the_accuser(wire: str) -> None:
    assert_false_accusation(run(BogusProof(rule=Rule.REVEAL), wire=wire), Rule.REVEAL)


# ---- E3 opening


@over_all_wires
def test_e3_fires_on_an_opening_of_something_else(wire: str) -> None:
    found = run(WrongOpenings(start=1), wire=wire)
    assert found.rules == {4: Rule.OPENING}
    assert isinstance(found.bans[4].case, m.WrongOpening)


@over_all_wires
def test_e3_does_not_fire_on_honest_openings(wire: str) -> None:
    found = run(FalseComplaints(stop=1), wire=wire)
    assert not found.bans
    assert not found.removals, "one complaint is within the budget"


@over_all_wires
def test_e3_bogus_proof_costs_the_accuser(wire: str) -> None:
    assert_false_accusation(run(BogusProof(rule=Rule.OPENING), wire=wire), Rule.OPENING)


# ---- E4 malformed


@over_all_wires
@pytest.mark.parametrize("kind", ["garbage", "swapped", "oversize", "range", "step"])
def test_e4_fires_on_a_message_outside_the_schema(wire: str, kind: str) -> None:
    found = run(Malformed(kind=kind, start=1), wire=wire)
    assert found.rules == {4: Rule.MALFORMED}


@over_all_wires
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 60_000.0], ids=["nan", "inf", "beyond the cap"])
def test_e4_fires_on_parts_that_are_no_numbers_of_allowed_size(wire: str, value: float) -> None:
    found = run(NonFiniteParts(value=value), wire=wire)
    assert found.rules == {4: Rule.MALFORMED}
    assert isinstance(found.bans[4].case, m.Accusation)


class Overflowing(Bowl):
    """Now and then its gradient is not finite, and often longer than the cap: as the seed has it, so for everybody."""

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None:
        gradient = super().compute_gradient(step, seed)
        if gradient is None or seed[0] % 3 == 0:
            return gradient
        return gradient * (1e30 if seed[0] % 3 == 1 else float("inf"))


@over_all_wires
def test_e4_does_not_fire_on_an_overflow(wire: str) -> None:
    """What all would compute is nobody's guilt: it counts as zero, or is cut to the cap."""
    swarm = make_swarm(wire=wire, steps=5)
    for key in swarm.keys:
        swarm.world.get_disk(key).machine = Overflowing(SIZE)
    found = finish(swarm)
    assert not found.bans
    state = swarm.get_machine(swarm.keys[0]).states[5]
    assert bool(torch.isfinite(state).all())


@over_all_wires
def test_e4_false_accusation_of_parts_costs_the_accuser(wire: str) -> None:
    assert_false_accusation(run(FalseAccusation(rule=Rule.MALFORMED), wire=wire), Rule.MALFORMED)


@over_all_wires
def test_e4_bogus_proof_costs_the_accuser(wire: str) -> None:
    assert_false_accusation(run(BogusProof(rule=Rule.MALFORMED), wire=wire), Rule.MALFORMED)


# ---- E5 state


class Astray(Bowl):
    """A machine whose optimizer errs in one step."""

    def apply(self, step: int, aggregate: Tensor) -> None:
        super().apply(step, aggregate * 1.5 if step == 1 else aggregate)


@over_all_wires
def test_e5_state_of_ones_own_is_fetched_anew_and_never_a_ban(wire: str) -> None:
    swarm = make_swarm(Attack(), wire=wire, steps=12, probation=5, newcomer_probation=5)
    key = swarm.keys[4]
    swarm.world.get_disk(key).machine = Astray(SIZE)
    found = finish(swarm)
    own = [event for _, event in swarm.events[key]]
    assert [event.step for event in own if isinstance(event, Diverged)] == [1]
    assert not found.bans
    assert found.removals == {4: "came to another state"}
    assert any(isinstance(event, Synced) for event in own), "it fetched what the others have"
    assert key in found.get(StepFinished)[-1].view.roster, "and served its way back"


@dataclass(kw_only=True, eq=False)
class OtherState(Attack):
    """Says in CONFIRM that it came to another state."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, state=bytes(32)) if isinstance(sign.body, m.Confirm) else sign


@over_all_wires
def test_e5_minority_that_names_another_state_removes_itself(wire: str) -> None:
    found = run(OtherState(start=1), OtherState(start=1), members=8, byzantine=2, wire=wire)
    assert not found.bans
    assert found.removals == dict.fromkeys((6, 7), "came to another state")
    assert not found.get(Diverged)
    assert found.get(StepFinished)[1].view.attempt == 0, "the update stands"


def test_e5_minority_that_names_another_state_is_kept_where_the_run_cannot_do_without_it() -> None:
    """One of the two goes, the other owes it. The run does not wait for them, and no attempt is repeated."""
    found = run(OtherState(start=1), OtherState(start=1), members=7, byzantine=2, steps=12)
    assert set(found.removals.values()) == {"came to another state"}
    assert all(event.view.failed == 0 for event in found.get(StepFinished))
    rosters = {len(event.view.roster) for event in found.get(AttemptStarted)}
    assert rosters == {6, 7}
    views = [event.view for event in found.get(StepFinished)]
    assert all(len(view.owed) == 1 for view in views[1:] if len(view.roster) == 6)


@over_all_wires
def test_e5_does_not_fire_after_an_update_was_undone(wire: str) -> None:
    found = run(
        combine(ShiftedAggregate(start=1), WrongGradient(start=1)), wire=wire, **{"steps": 5, **KEEN.get(wire, {})}
    )
    assert found.rules == {4: Rule.SUM}
    assert not found.get(Diverged)
    assert not found.removals
