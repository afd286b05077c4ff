"""Whom a draw hits, nobody knows while it could still act on it; and who has just started again harms nobody.

Whoever covers a wrong aggregate is found, alone or with others. Whoever has lost what it knew is no witness.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer
from test_strangers import TOLERANT, make_swarm, play
from torch import Tensor

from phalanx.attacks import Attack, Insider, combine
from phalanx.attacks.aggregation import Cover, CoveredAggregate, QuietShift
from phalanx.attacks.base import change_body, forge
from phalanx.attacks.gradients import SignFlip
from phalanx.attacks.justice import Accuser, EmptyVotes
from phalanx.attacks.membership import ReturnForNewcomer
from phalanx.core import messages as m
from phalanx.core.crypto import SIGNATURE_SIZE, Domain, compute_digest
from phalanx.core.effects import ComputeAggregate, Sign
from phalanx.core.envelope import open_body
from phalanx.core.events import Removed
from phalanx.core.membership import Check, draw_targets
from phalanx.core.messages import Phase, Rule, Signed, Verdict
from phalanx.simulation.swarm import Swarm

# ---- Whom the shares of a step draw


def find_drawn(insider: Insider) -> set[bytes]:
    """Whom this step's randomness would draw from those who contribute to it: known before they report."""
    view, shares = insider.view, []
    for key in view.roster:
        reveal = insider.find(Phase.REVEAL, key)
        body = open_body(reveal) if reveal is not None else None
        shares += [body.share] if isinstance(body, m.Reveal) else []
    place = view.step.to_bytes(8, "little") + view.attempt.to_bytes(8, "little")
    randomness = compute_digest("randomness", insider.config.run, place, *shares)
    return {*draw_targets(randomness, insider.duties.contributors, insider.config.validators)}


@dataclass(kw_only=True, eq=False)
class CoverOfUndrawn(CoveredAggregate):
    """All of the plot send wrong aggregates; one of them that the draw passes over covers them all."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        return super().on_aggregate(insider, effect, result) if len(insider.crew) > 1 else result

    def _find_covered(self, insider: Insider) -> list[int]:
        drawn = find_drawn(insider)
        free = [key for key in insider.crew if key not in drawn]
        return [insider.view.roster.index(key) for key in insider.crew] if free[:1] == [insider.key] else []


def test_nobody_knows_when_it_reports_who_will_not_be_checked() -> None:
    attack = CoverOfUndrawn(start=1, stop=55, shift=5.0)
    swarm = play({5: attack, 6: attack}, steps=60, seed=3)
    assert {*get_bans(swarm)} == swarm.byzantine, describe(swarm)


@dataclass(kw_only=True, eq=False)
class FleeIfDrawn(CoveredAggregate):
    """Covers its own wrong aggregate now and then, and falls silent instead if the draw hits it."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        view, notes = insider.view, insider.notes
        again = any(record.step == view.step for record in view.attempts)
        if insider.key not in insider.duties.contributors or again or view.step < notes.get("next lie", 0):
            notes["lies"] = False
            return result
        notes["lies"] = True
        notes["next lie"] = view.step + 4  # when it flees, what it committed to last is clean
        return super().on_aggregate(insider, effect, result)

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Report) and insider.notes["lies"] and insider.key in find_drawn(insider):
            insider.notes["fled"] = True
            return None
        return super().on_body(insider, sign)


def test_who_covers_itself_unless_it_is_drawn_is_banned_in_the_end() -> None:
    swarm = play({5: FleeIfDrawn(start=1, stop=145, shift=5.0)}, founders=6, byzantine=1, steps=150, seed=3)
    assert get_notes(swarm, 5)["fled"]
    assert swarm.keys[5] in get_bans(swarm), describe(swarm)


# ---- A gradient that is neither right nor wrong


@dataclass(kw_only=True, eq=False)
class CoverInTheGap(CoveredAggregate):
    """Covers its wrong aggregate by its own report, on a gradient so little off that nobody can say it is wrong."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return gradient * 1.003

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        contributes = insider.key in insider.duties.contributors
        return super().on_aggregate(insider, effect, result) if contributes else result


def test_reports_on_a_gradient_in_the_gap_are_checked() -> None:
    attack = CoverInTheGap(start=1, shift=20.0)
    swarm = play({5: attack}, founders=6, byzantine=1, steps=20, seed=3, **TOLERANT)
    assert [*get_bans(swarm)] == [swarm.keys[5]], describe(swarm)


# ---- An accomplice in a crowd


@dataclass(kw_only=True, eq=False)
class CoverAll(Cover):
    """Makes the sums right for all others of the plot, wherever it stands among them."""

    def _find_covered(self, insider: Insider) -> list[int]:
        return [*range(len(insider.view.roster))]


@dataclass(kw_only=True, eq=False)
class GivesUpFormer(QuietShift, Accuser):
    """Wrong aggregates, and when their cover is checked a proof against a key of the plot that is suspended."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        ready = len(insider.crew) == 2 and find_former(insider)
        return super().on_aggregate(insider, effect, result) if ready else result

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        sign, former = super().on_body(insider, sign), find_former(insider)
        found = any(x.target in insider.friends and x.checker in insider.honest for x in insider.duties.checks)
        if not isinstance(sign.body, m.Confirm) or not found or not former:
            return sign
        insider.notes["given up"] = True
        place = (Domain.AGREED, insider.config.run, 1, 0, 0, Phase.COMMIT, former[0], bytes(32))
        spoilt = forge(insider.plot.signers[former[0]], Signed(*place, b"\xc1", bytes(SIGNATURE_SIZE)))
        return self.bring(insider, sign, m.MalformedBody(spoilt))


def find_former(insider: Insider) -> list[bytes]:
    """The keys of the plot that are suspended."""
    return [x.key for x in insider.view.suspended if x.key in insider.plot.keys]


def test_a_former_key_that_is_given_up_does_not_save_an_accomplice() -> None:
    attackers = {5: ReturnForNewcomer(start=1), 6: GivesUpFormer(start=2), 7: CoverAll(start=2)}
    swarm = play(attackers, joiners=1, steps=40, seed=14, newcomer_probation=6, probation=12)
    assert get_notes(swarm, 6)["given up"]
    assert {*get_bans(swarm)} == swarm.byzantine, describe(swarm)


# ---- Who has just started again


@dataclass(kw_only=True, eq=False)
class DenyOnce(Attack):
    """In the first step in which it checks somebody honest it says that it got no bytes, and votes so."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, step = sign.body, insider.view.step
        if isinstance(body, m.Report) and any(x.target in insider.honest for x in body.findings):
            insider.notes.setdefault("denied", step)
        if insider.notes.get("denied") != step:
            return sign
        if isinstance(body, m.Report):
            return change_body(sign, findings=tuple(m.Finding(x.target, Verdict.NOT_RECEIVED) for x in body.findings))
        if isinstance(body, m.Vote):
            return change_body(sign, ballots=tuple(m.Ballot(x.case, Verdict.NOT_RECEIVED) for x in body.ballots))
        return sign


def find_check(swarm: Swarm, attacker: bytes, *, as_target: bool) -> Check | None:
    """A check between an attacker and somebody honest, in a step that all have begun and nobody has committed to."""
    peers = [get_peer(swarm, key) for key in swarm.honest]
    if len({peer.view for peer in peers}) > 1 or any(peer.level >= peer.view.height for peer in peers):
        return None
    checks = (x for x in peers[0].duties.checks if x.checker != x.target)
    return next((x for x in checks if attacker == (x.target if as_target else x.checker)), None)


def start_again(swarm: Swarm, key: bytes, lost: float = 0.0) -> None:
    """Have a member crash and come back at once, with its disk."""
    swarm.crash(key, lost)
    swarm.restart(key)


def test_a_ballot_of_one_that_started_again_has_nobody_removed() -> None:
    swarm = make_swarm({4: DenyOnce()}, founders=5, byzantine=1, steps=12, seed=7, **TOLERANT)
    liar = swarm.keys[4]
    assert swarm.run(400.0, lambda: find_check(swarm, liar, as_target=False) is not None)
    check = find_check(swarm, liar, as_target=False)
    assert check is not None
    start_again(swarm, next(key for key in swarm.honest if key != check.target))
    swarm.run(400.0, swarm.is_over)
    assert "denied" in get_notes(swarm, 4)
    assert_unharmed(swarm)


def test_a_validator_is_heard_by_those_who_started_again() -> None:
    attack = combine(SignFlip(), EmptyVotes(unreceived=True))
    swarm = make_swarm({5: attack}, founders=6, byzantine=1, steps=14, seed=10)
    cheat = swarm.keys[5]
    assert swarm.run(400.0, lambda: find_check(swarm, cheat, as_target=True) is not None)
    check = find_check(swarm, cheat, as_target=True)
    assert check is not None
    for key in [key for key in swarm.honest if key != check.checker][:2]:
        start_again(swarm, key)
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert get_bans(swarm) == {cheat: Rule.GRADIENT}, describe(swarm)


@pytest.mark.parametrize("heights", [0, 1])
def test_who_rounds_differently_after_a_start_is_removed_and_not_banned(
    heights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops when all have committed, or when all have sent their aggregates."""
    swarm = make_swarm({}, founders=6, byzantine=1, steps=6, **TOLERANT)
    key = swarm.keys[2]

    def has_committed() -> bool:
        peer = get_peer(swarm, key)
        return peer.view.step == 2 and peer.contributes and peer.level == peer.view.height + heights

    assert swarm.run(400.0, has_committed)
    monkeypatch.setattr(swarm.get_machine(key), "_platform", b"another")
    start_again(swarm, key, lost=1.0)
    swarm.run(400.0, swarm.is_over)
    assert not get_bans(swarm), describe(swarm)
    assert {event.key for event in get_events(swarm, Removed)} == {key}, describe(swarm)
    assert {*swarm.honest} <= swarm.finished, describe(swarm)
