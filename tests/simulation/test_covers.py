"""Who covers a wrong aggregate takes it along, however it goes: it leaves, is silent, or is banned for something else.

And what is honest outlasts a start with other last bits, checkers that deny what they got, and more than fits a list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from test_breaks import describe, get_bans, get_events, get_notes, get_peer
from test_draws import CoverAll, start_again
from test_strangers import TOLERANT, make_swarm, play
from torch import Tensor

from phalanx.attacks import Attack, Insider
from phalanx.attacks.aggregation import QuietShift
from phalanx.attacks.base import change_body, forge
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.crypto import SIGNATURE_SIZE, Domain, compute_digest
from phalanx.core.effects import ComputeAggregate, Sign
from phalanx.core.envelope import open_body, seal
from phalanx.core.events import Removed
from phalanx.core.membership import find_targets
from phalanx.core.messages import Phase, Rule, Signed, Verdict
from phalanx.network.ideal import make_signers
from phalanx.simulation.swarm import Swarm


def find_drawn(insider: Insider) -> set[bytes]:
    """Whom this step's randomness draws: known when all have revealed their shares."""
    view, shares = insider.view, []
    for key in view.roster:
        reveal = insider.find(Phase.REVEAL, key)
        body = open_body(reveal) if reveal is not None else None
        assert isinstance(body, m.Reveal)
        shares.append(body.share)
    place = view.step.to_bytes(8, "little") + view.attempt.to_bytes(8, "little")
    randomness = compute_digest("randomness", insider.config.run, place, *shares)
    attempts = 1 + sum(record.step == view.step for record in view.attempts)
    return {target.key for target in (*find_targets(insider.config, view, randomness, attempts), *view.carried)}


@dataclass(kw_only=True, eq=False)
class CoveredShift(QuietShift):
    """Wrong aggregates as long as the whole plot contributes, in one step or in all."""

    once: bool = False

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        moved = {step for _, step, *_ in find_moved(insider.plot.notes)}
        ready = insider.plot.keys == {*insider.crew} and (not self.once or moved <= {insider.view.step})
        return super().on_aggregate(insider, effect, result) if ready else result


def find_moved(notes: dict[Any, Any]) -> list[Any]:
    """Where there were wrong aggregates: step, attempt and part of each."""
    return [place for place in notes if place[0] == "moved"]


# ---- A cover that is out before its aggregators are named


@dataclass(kw_only=True, eq=False)
class CoverAndLeave(CoverAll):
    """Covers, and leaves in the same step."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Confirm):
            return change_body(sign, accusations=(), leaving=bool(find_moved(insider.plot.notes)))
        return sign


@pytest.mark.parametrize(("founders", "byzantine", "seed"), [(10, 2, 1), (10, 2, 3), (13, 3, 2)])
def test_a_cover_that_leaves_takes_along_as_many_as_there_can_be(founders: int, byzantine: int, seed: int) -> None:
    """Leaving does not change who is drawn: the ban reaches the cover where it is, and those that it covered."""
    attackers = dict.fromkeys(range(6, 5 + byzantine), CoveredShift(start=3, shift=20.0))
    options: dict[str, Any] = {"founders": founders, "byzantine": byzantine, "validators": 3}
    swarm = play({5: CoverAndLeave(start=3), **attackers}, steps=24, seed=seed, **options)
    assert find_moved(swarm.plot.notes)
    assert {event.reason for event in get_events(swarm, Removed) if event.key == swarm.keys[5]} == {"left"}
    rules = {swarm.keys[5]: Rule.GRADIENT} | dict.fromkeys(swarm.keys[6 : 5 + byzantine], Rule.REPORT)
    assert get_bans(swarm) == rules, describe(swarm)


@dataclass(kw_only=True, eq=False)
class CoverUntilDrawn(CoverAll):
    """Covers until it is drawn; then it is silent, or says what has it banned for something else."""

    silent: bool

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Report) or insider.key not in find_drawn(insider):
            return super().on_body(insider, sign)
        insider.notes["drawn"] = True
        norms = () if sign.body.norms else (1.0,)
        return None if self.silent else change_body(sign, sums=norms, norms=norms)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_cover_that_is_silent_when_it_is_drawn_takes_its_aggregator_along(seed: int) -> None:
    attackers = {5: CoverUntilDrawn(start=3, silent=True), 6: CoveredShift(start=3, shift=20.0)}
    swarm = play(attackers, steps=40, seed=seed)
    assert get_notes(swarm, 5)["drawn"]
    assert get_bans(swarm) == {swarm.keys[5]: Rule.GRADIENT, swarm.keys[6]: Rule.REPORT}, describe(swarm)
    assert (swarm.keys[5], "silent") in {(event.key, event.reason) for event in get_events(swarm, Removed)}


@pytest.mark.parametrize(("founders", "byzantine"), [(7, 2), (9, 3)])
def test_a_cover_that_is_banned_for_something_else_takes_its_aggregator_along(founders: int, byzantine: int) -> None:
    attackers = {5: CoverUntilDrawn(start=3, silent=False), 6: CoveredShift(start=3, shift=20.0)}
    swarm = play(attackers, founders=founders, byzantine=byzantine, steps=40)
    assert get_notes(swarm, 5)["drawn"]
    assert get_bans(swarm) == {swarm.keys[5]: Rule.MALFORMED, swarm.keys[6]: Rule.REPORT}, describe(swarm)


@dataclass(kw_only=True, eq=False)
class CoverThatGivesItselfUp(CoverAll, Accuser):
    """Covers, and brings a proof against itself in the same step."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm) or insider.view.step == insider.config.steps:
            return super().on_body(insider, sign)
        place = (Domain.AGREED, insider.config.run, 1, 0, 0, Phase.COMMIT, insider.key, bytes(32))
        spoilt = forge(insider.signer, Signed(*place, b"\xc1", bytes(SIGNATURE_SIZE)))
        return self.bring(insider, change_body(sign, accusations=()), m.MalformedBody(spoilt))


def test_a_cover_that_is_banned_in_the_last_step_takes_its_aggregator_along() -> None:
    attackers = {5: CoverThatGivesItselfUp(start=7), 6: CoveredShift(start=7, shift=20.0)}
    swarm = play(attackers, founders=9, byzantine=3, steps=8)
    assert find_moved(swarm.plot.notes)
    assert get_bans(swarm) == {swarm.keys[5]: Rule.MALFORMED, swarm.keys[6]: Rule.REPORT}, describe(swarm)


# ---- A start in the first step


def test_who_rounds_differently_after_a_start_in_the_first_step_is_removed_and_not_banned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = make_swarm({}, founders=6, byzantine=1, steps=6, **TOLERANT)
    key = next(key for key in swarm.keys if has_to_contribute(swarm, key))

    def has_sent_its_aggregate() -> bool:
        peer = get_peer(swarm, key)
        return peer.level == peer.view.height + 1

    assert swarm.run(400.0, has_sent_its_aggregate)
    assert not get_peer(swarm, key).view.step
    monkeypatch.setattr(swarm.get_machine(key), "_platform", b"another")
    start_again(swarm, key, lost=1.0)
    swarm.run(400.0, swarm.is_over)
    assert not get_bans(swarm), describe(swarm)
    assert {event.key for event in get_events(swarm, Removed)} == {key}, describe(swarm)
    assert {*swarm.honest} <= swarm.finished, describe(swarm)


def has_to_contribute(swarm: Swarm, key: bytes) -> bool:
    return key in get_peer(swarm, key).duties.contributors


# ---- Checkers that deny what they got


@dataclass(kw_only=True, eq=False)
class DenyTrials(Attack):
    """Says of everybody on probation whom it checks that it got nothing."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Report):
            return sign
        tried = {candidate.key for candidate in insider.view.candidates}
        mine = {check.target for check in insider.duties.checks if check.checker == insider.key} & tried
        findings = {x.target: x for x in sign.body.findings} | {x: m.Finding(x, Verdict.NOT_RECEIVED) for x in mine}
        insider.plot.notes["denied"] = insider.plot.notes.get("denied", 0) + len(mine)
        return change_body(sign, findings=tuple(findings[key] for key in sorted(findings)))


def test_one_checker_of_several_that_denies_a_trial_does_not_keep_a_joiner_out() -> None:
    attackers = dict.fromkeys((5, 6), DenyTrials())
    swarm = play(attackers, joiners=1, probation_checks=3, steps=90, seed=2, until=2000.0, **TOLERANT)
    assert swarm.plot.notes["denied"] > 10
    assert swarm.keys[7] in get_peer(swarm, swarm.keys[0]).view.roster


# ---- More findings than there can be cases


def test_a_report_has_room_for_findings_on_all_members() -> None:
    signers, _ = make_signers(m.MAX_MEMBERS, seed=1, ideal=True)
    findings = tuple(m.Finding(key, Verdict.INNOCENT) for key in sorted(signer.key for signer in signers))
    report = m.Report((), (), (), findings)
    sealed = seal(signers[0], bytes(32), 9, 2, 0, Phase.REPORT, bytes(32), report)
    assert open_body(sealed) == report
