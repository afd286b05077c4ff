"""What costs others time or memory costs its sender its place, or is not kept.

And whoever is blamed is blamed for one attempt, and for what it did there: no crowd and no restart changes that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer, is_out
from test_draws import CoverAll, start_again
from test_strangers import TOLERANT, make_swarm, play
from torch import Tensor

from phalanx.attacks import Attack, Insider
from phalanx.attacks.aggregation import QuietShift
from phalanx.attacks.base import change_body
from phalanx.attacks.framing import make_charge
from phalanx.attacks.justice import Accuser
from phalanx.attacks.strangers import make_malformed
from phalanx.core import messages as m
from phalanx.core.effects import Broadcast, ComputeAggregate, Delivery, Effect, Sign
from phalanx.core.envelope import seal
from phalanx.core.events import Removed
from phalanx.core.membership import Changes, change_members, make_genesis
from phalanx.core.messages import Phase, Rule, Signed, Verdict
from phalanx.core.partition import compute_part_sizes
from phalanx.simulation.swarm import Swarm

# ---- Charges that few can see


@dataclass(kw_only=True, eq=False)
class HalfShownCharges(Accuser):
    """False charges, shown to so few and so late that no majority says so; nor does the plot."""

    brings: bool = True
    many: bool = False
    """Of more members than may be guilty."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Vote):
            ballots = (m.Ballot(x.case, self._judge(insider, x)) for x in sign.body.ballots)
            return change_body(sign, ballots=tuple(ballots))
        if not self.brings or not isinstance(sign.body, m.Confirm) or insider.view.step == insider.config.steps:
            return sign
        accused = [key for key in insider.duties.contributors if key in insider.honest]
        charges = (make_charge(insider, key, ()) for key in accused[: None if self.many else insider.view.bound])
        return self.bring(insider, sign, *(charge for charge in charges if charge is not None))

    def _judge(self, insider: Insider, ballot: m.Ballot) -> Verdict:
        return Verdict.INCONCLUSIVE if ballot.case in insider.plot.notes else ballot.verdict

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, plot, view = delivery.message, insider.plot, insider.view
        if not isinstance(message, m.PullProof) or (self, message.case) not in insider.notes:
            return delivery
        if message.case not in plot.notes:
            plot.notes[message.case] = True
            few = min(len(view.roster) - view.bound, 2 * view.bound + 1) - len(plot.keys)
            case = insider.notes[self, message.case]
            insider.send_later(1.8 * insider.config.delta, insider.honest[:few], case)
        return None


def test_false_charges_that_half_can_see_cost_their_accuser_its_place() -> None:
    attackers = {5: HalfShownCharges(start=1), 6: HalfShownCharges(start=1, brings=False)}
    swarm = play(attackers, steps=5)
    assert swarm.plot.notes
    assert is_out(swarm, 5), describe(swarm)


def test_who_accuses_more_than_can_be_guilty_is_not_heard() -> None:
    attackers = {5: HalfShownCharges(start=1, many=True), 6: HalfShownCharges(start=1, brings=False)}
    swarm = play(attackers, steps=5)
    assert not swarm.plot.notes, "nobody asks for the evidence"
    assert is_out(swarm, 5), describe(swarm)


# ---- Free keys that are banned one after the other

FREE = 200
"""Keys that are nobody's."""


@dataclass(kw_only=True, eq=False)
class FreeBans(Attack):
    """Free keys ask to join through a member; once they are on probation each shows one member what has it banned."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return None if isinstance(sign.body, m.Join) else sign

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        view, plot = insider.view, insider.plot
        signers = [plot.make_stranger(number) for number in range(FREE)]
        tried = {candidate.key for candidate in view.candidates}
        waiting = [signer for signer in signers if signer.key not in tried and signer.key not in view.banned]
        at = (insider.config.run, view.height, view.step, view.attempt, Phase.COMMIT, bytes(32))
        for signer in waiting[: 2 * insider.config.admissions]:
            yield Broadcast(view.roster, seal(signer, *at, m.Join(view.digest, 0)))
        for signer in signers:
            if signer.key in tried:
                yield Broadcast(view.roster[:1], make_malformed(insider, signer, height=view.height))


def play_with_free_keys() -> Swarm:
    options: dict[str, Any] = {"strangers": FREE, "admissions": 8, "byzantine": 1, "steps": 30}
    swarm = play({4: FreeBans()}, founders=5, **options)
    assert len(get_bans(swarm)) > 20, describe(swarm)
    return swarm


def test_free_keys_that_get_themselves_banned_do_not_make_the_view_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.core.membership._MOST_BANNED", 20, raising=False)
    swarm = play_with_free_keys()
    assert len(get_peer(swarm, swarm.keys[0]).view.banned) == 20


def test_free_keys_that_get_themselves_banned_do_not_make_the_chain_long() -> None:
    """The roster never changes, so nobody needs a link to follow it."""
    swarm = play_with_free_keys()
    assert not get_peer(swarm, swarm.keys[0]).links


def test_of_free_keys_at_most_1024_are_on_record_and_of_members_all() -> None:
    swarm = make_swarm({})
    view, member = make_genesis(swarm.config), swarm.keys[0]
    strangers = frozenset(number.to_bytes(32, "big") for number in range(3000))
    view = change_members(swarm.config, view, Changes(banned=strangers))
    assert len(view.banned) == 1024
    view = change_members(swarm.config, view, Changes(banned=strangers | {member}))
    assert len(view.banned) == 1025
    assert member in view.banned


# ---- Parts that nobody asked for


@dataclass(kw_only=True, eq=False)
class UnaskedParts(Attack):
    """On probation it commits to nothing, and sends all members all parts of a gradient, again for earlier attempts."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return None if isinstance(sign.body, m.Trial) else sign

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        view, notes = insider.view, insider.notes
        known = notes.setdefault("views", [])
        known.append(view)
        if insider.key in {candidate.key for candidate in view.candidates}:
            notes["sent"] = True
            for old in known[-4:]:
                for part, size in enumerate(compute_part_sizes(insider.config.size, len(old.roster))):
                    chunk = m.PartChunk(old.step, old.attempt, insider.key, part, (), 4 * size, 0, bytes(4 * size))
                    yield Broadcast(view.roster, chunk)


def test_parts_that_nobody_asked_for_are_not_kept() -> None:
    attackers = dict.fromkeys((5, 6), UnaskedParts())
    swarm = make_swarm(attackers, founders=5, joiners=2, byzantine=1, steps=10, admissions=2)
    kept: set[Any] = set()

    def look() -> bool:
        owners = {owner for _, _, owner, _ in get_peer(swarm, swarm.keys[0]).parts}
        kept.update(owners & swarm.byzantine)
        return swarm.is_over()

    swarm.run(400.0, look)
    assert_unharmed(swarm)
    assert all(get_notes(swarm, index)["sent"] for index in attackers)
    assert not kept


# ---- Attackers that take turns


def is_due(insider: Insider, key: bytes) -> bool:
    """Whether this one's probation ends with this step."""
    return any(x.key == key and x.served == x.term - 1 for x in insider.view.candidates)


@dataclass(kw_only=True, eq=False)
class LetPassAndLeave(Attack):
    """Lets a lie about its aggregate pass, and leaves when the next one comes."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.plot.notes
        going = "lie" in notes or is_due(insider, notes["next"])
        return change_body(sign, accusations=(), leaving=going) if isinstance(sign.body, m.Confirm) else sign


@dataclass(kw_only=True, eq=False)
class LieAndCover(CoverAll):
    """Lies about the aggregate of the one that leaves; in the next step it covers that of the one that came."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        view, notes, body = insider.view, insider.plot.notes, sign.body
        lies = isinstance(body, m.Report) and body.norms and is_due(insider, notes["next"])
        if not lies or notes["first"] not in view.roster:
            return super().on_body(insider, sign)
        part = view.roster.index(notes["first"])
        notes["lie"] = (view.step, view.attempt, part)
        return change_body(sign, norms=tuple(x + (place == part) for place, x in enumerate(body.norms)))


@dataclass(kw_only=True, eq=False)
class ShiftAndTell(QuietShift, Accuser):
    """A wrong aggregate as soon as it is a member; when its cover is accused it tells of the lie before."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        lie, view, liar = insider.plot.notes.get("lie"), insider.view, insider.plot.notes["liar"]
        ready = lie is not None and view.step == lie[0] + 1 and liar in insider.duties.contributors
        return super().on_aggregate(insider, effect, result) if ready and insider.index is not None else result

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        lie, liar, quiet = insider.plot.notes.get("lie"), insider.plot.notes["liar"], super().on_body(insider, sign)
        if not isinstance(sign.body, m.Confirm) or lie is None or sign.step != lie[0] + 3:
            return quiet
        step, attempt, part = lie
        heard = (x for (_, key), x in insider.heard.items() if key == liar and (x.step, x.attempt) == (step, attempt))
        said = {message.phase: message for message in heard}
        insider.notes["told"] = True
        place = (Rule.GRADIENT, liar, step, attempt, (part,))
        return self.bring(insider, quiet, m.Accusation(*place, said[Phase.COMMIT], said[Phase.REPORT], (), ()))


def test_accomplices_are_counted_for_each_attempt() -> None:
    """There are never more than two at a time, though three in two steps."""
    attackers = {5: LetPassAndLeave(), 6: LieAndCover(), 7: ShiftAndTell(shift=20.0)}
    swarm = make_swarm(attackers, joiners=1, steps=18, seed=3, newcomer_probation=6)
    swarm.plot.notes.update(dict(zip(("first", "liar", "next"), swarm.keys[5:], strict=True)))
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert get_notes(swarm, 7)["told"]
    assert {*get_bans(swarm)} == swarm.byzantine, describe(swarm)


# ---- An aggregate that differs after a restart


@dataclass(kw_only=True, eq=False)
class NamesPart(Attack):
    """Says that it lacks a part, so that all say again what they aggregated."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Aggregate) or sign.phase is not Phase.AGGREGATE:
            return sign
        owner = next(key for key in insider.duties.contributors if key in insider.honest)
        return change_body(sign, result=None, missing=(insider.view.roster.index(owner),))


@pytest.mark.parametrize("contributes", [False, True])
@pytest.mark.parametrize("settings", [{}, TOLERANT], ids=["exact", "tolerant"])
def test_an_aggregator_that_rounds_differently_after_a_restart_is_removed_and_not_banned(
    settings: dict[str, Any], contributes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = NamesPart(start=2, stop=3)
    swarm = make_swarm({5: attack}, founders=6, byzantine=1, steps=6, seed=3, **settings)
    assert swarm.run(400.0, lambda: any(has_aggregated(swarm, key, contributes) for key in swarm.honest))
    one = next(key for key in swarm.honest if has_aggregated(swarm, key, contributes))
    machine = swarm.get_machine(one)
    compute = machine.compute_aggregate
    monkeypatch.setattr(machine, "compute_aggregate", lambda rows, tau: compute(rows, tau) * (1 + 1e-6))
    start_again(swarm, one, lost=1.0)
    swarm.run(400.0, swarm.is_over)
    assert not get_bans(swarm), describe(swarm)
    assert {event.key for event in get_events(swarm, Removed)} == {one}, describe(swarm)
    assert {*swarm.honest} <= swarm.finished, describe(swarm)


def has_aggregated(swarm: Swarm, key: bytes, contributes: bool) -> bool:
    """Whether all have agreed on what they aggregated."""
    peer = get_peer(swarm, key)
    return peer.view.step == 2 and peer.level == peer.view.height + 1 and peer.contributes == contributes
