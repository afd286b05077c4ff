"""Attacks that turn what the rules allow against honest peers: nobody honest goes, and the run comes to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from torch import Tensor

from phalanx.attacks import ATTACKS, Attack, Insider, Mail, combine
from phalanx.attacks.aggregation import CoveredAggregate, FalseReport
from phalanx.attacks.base import change_body, forge, note_case
from phalanx.attacks.broadcast import Silent, SlowPathAttack, is_own
from phalanx.attacks.gradients import NonFiniteParts
from phalanx.attacks.justice import compute_suspect_digest
from phalanx.attacks.membership import Leave
from phalanx.core import messages as m
from phalanx.core.config import Tolerance
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Broadcast, ComputeAggregate, ComputeReport, Delivery, Effect, Sign
from phalanx.core.envelope import compute_message_digest, open_body, seal
from phalanx.core.events import AttemptStarted, Banned, Halted, Removed, RunFinished, SlowPath, StepFinished
from phalanx.core.membership import View, encode_view
from phalanx.core.messages import MAX_BODY, Message, Phase, Rule, Signed
from phalanx.core.partition import compute_part_sizes, join_parts, split_parts
from phalanx.core.peer import Peer, compute_case_digest
from phalanx.core.step import make_confirm
from phalanx.core.verification import Projections, report_tolerance
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm

QUICK = Links(delta=1.0, low=0.02, high=0.1)
STEADY = Links(delta=1.0, low=0.05, high=0.1)


def make_swarm(
    attackers: Mapping[int, Attack],
    *,
    founders: int = 7,
    byzantine: int = 2,
    steps: int = 8,
    links: Links | None = None,
    seed: int = 1,
    rounding: float = 0.0,
    wire: bool = False,
    **settings: Any,
) -> Swarm:
    usual = {"byzantine": byzantine, "steps": steps, "size": 64, "tau": 1.0, "cap": 100.0}
    setup = Setup(founders=founders, settings=usual | settings, attackers=attackers, rounding=rounding, wire=wire)
    return Swarm(setup, seed, replace(links) if links is not None else None, keep_events=True)


def play(attackers: Mapping[int, Attack], *, until: float = 400.0, paired: int = 0, **options: Any) -> Swarm:
    """Run to the end, where honest peers are unharmed."""
    swarm = make_swarm(attackers, **options)
    swarm.run(until, swarm.is_over)
    assert_unharmed(swarm, paired)
    return swarm


def assert_unharmed(swarm: Swarm, paired: int = 0) -> None:
    """No honest peer is banned or removed; all came to the end with one view, and through the same states.

    An attacker that keeps being at odds with an honest peer may take it along; so ``paired`` of them at most.
    """
    text, honest = describe(swarm), swarm.honest
    banned = [swarm.keys.index(key) for key in get_bans(swarm) if key in honest]
    assert not banned, text
    removed = {event.key: event.reason for event in get_events(swarm, Removed) if event.key in honest}
    assert len(removed) <= paired, text
    assert set(removed.values()) <= {"a pair that keeps naming each other"}, text
    late = [swarm.keys.index(key) for key in honest if key not in swarm.finished]
    assert not late, text
    ends = {event.view.digest for event in get_events(swarm, RunFinished)}
    steps = {(event.step, event.view.state) for event in get_events(swarm, StepFinished)}
    assert len(ends) == 1, text
    assert sorted(step for step, _ in steps) == list(range(swarm.config.steps)), text


def describe(swarm: Swarm) -> str:
    """Who went for what, and who is not at the end."""
    found: dict[str, set[bytes]] = {}
    for event in get_events(swarm, Banned):
        found.setdefault(f"banned by {event.rule}, {event.reason}", set()).add(event.key)
    for event in get_events(swarm, Removed):
        found.setdefault(f"removed, {event.reason}", set()).add(event.key)
    for key in swarm.honest:
        view = get_peer(swarm, key).view
        if key not in swarm.finished:
            place = f"in step {view.step}, attempt {view.attempt}, view {view.digest[:3].hex()}"
            found.setdefault(f"not at the end but {place}", set()).add(key)
    lines = []
    for what, keys in found.items():
        honest = sorted(swarm.keys.index(key) for key in keys - swarm.byzantine)
        others = sorted(swarm.keys.index(key) for key in keys & swarm.byzantine)
        lines.append(f"{what}: honest {honest}, attackers {others}")
    return "\n".join(["", *sorted(lines), f"halts: {len(get_events(swarm, Halted))}"])


def get_peer(swarm: Swarm, key: bytes) -> Peer:
    peer = swarm.get_peer(key)
    assert peer is not None
    return peer


def get_events(swarm: Swarm, kind: type) -> list[Any]:
    """What honest peers told of one kind."""
    return [event for key in swarm.honest for _, event in swarm.events[key] if isinstance(event, kind)]


def get_bans(swarm: Swarm) -> dict[bytes, Rule]:
    return {event.key: event.rule for event in get_events(swarm, Banned)}


def is_out(swarm: Swarm, index: int) -> bool:
    """Whether it was banned or removed."""
    key = swarm.keys[index]
    return key in get_bans(swarm) or any(event.key == key for event in get_events(swarm, Removed))


def get_notes(swarm: Swarm, index: int) -> dict[Any, Any]:
    return swarm.insiders[swarm.keys[index]].notes


def get_state(swarm: Swarm) -> Tensor:
    """The parameters at the end, as an honest peer has them."""
    states = swarm.get_machine(swarm.honest[0]).states
    return states[max(states)]


def get_crew(insider: Insider) -> list[bytes]:
    """The contributors that are in the plot."""
    return [key for key in insider.duties.contributors if key in insider.plot.keys]


class Accuser(Attack):
    """Shows the charge that it noted to whoever asks for it."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        digest, charge = insider.notes.get("charge", (None, None))
        message, sender = delivery.message, delivery.sender
        if isinstance(message, m.PullProof) and message.case == digest and sender is not None:
            insider.send_later(0.0, (sender,), charge)
        return delivery


class SelfAccuser(Accuser):
    """Lies in one REPORT, and accuses itself of it a step later: whoever let the lie pass would be to blame."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, view, notes = sign.body, insider.view, insider.notes
        if not isinstance(body, m.Confirm) or "parts" not in notes:
            return sign
        if "quote" not in notes:  # the step of the lie
            said = insider.find(Phase.COMMIT, insider.key), insider.find(Phase.REPORT, insider.key)
            notes["quote"] = view.step, view.attempt, said
        step, attempt, (commit, report) = notes["quote"]
        if view.step == step or "charge" in notes:
            return sign
        charge = m.Accusation(Rule.GRADIENT, insider.key, step, attempt, notes["parts"], commit, report, (), ())
        notes["charge"] = note_case(insider, charge), charge
        return change_body(sign, accusations=(*body.accusations, notes["charge"][0]))


# ---- Who let a lie about its aggregate pass


@dataclass(kw_only=True, eq=False)
class EdgeLie(SelfAccuser):
    """The lie is about all aggregates of others, and of ``share`` tolerances: some see it and some do not."""

    share: float = 1.5

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        if "parts" in insider.notes:
            return projections
        count, mine = len(effect.parts), insider.index
        sizes = compute_part_sizes(insider.config.size, count)
        insider.notes["parts"] = tuple(part for part in range(count) if part != mine)
        sums = (
            x + self.share * report_tolerance(effect.tau, sizes[at % count])[0] * (at % count != mine)
            for at, x in enumerate(projections.sums)
        )
        return replace(projections, sums=tuple(sums))


@pytest.mark.parametrize("share", [0.6, 1.0, 1.5, 2.5, 4.0, 10.0])
def test_nobody_honest_is_banned_for_a_lie_on_the_edge(share: float) -> None:
    swarm = play({6: EdgeLie(share=share)}, steps=6)
    assert "parts" in get_notes(swarm, 6)


def test_nobody_honest_is_banned_for_a_lie_of_one_who_vanishes() -> None:
    """The lie is in REPORT; without a CONFIRM of the liar the attempt is repeated, and nobody got to accuse."""
    swarm = play({6: combine(FalseReport(start=2), Silent(phases=(Phase.CONFIRM,), start=2))})
    assert is_out(swarm, 6)


@dataclass(kw_only=True, eq=False)
class LateAccuser(Accuser):
    """Accuses another attacker of the lie for which it was convicted a step ago, as though nobody had seen it then."""

    liar: int = 6

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, view, notes = sign.body, insider.view, insider.notes
        if not isinstance(body, m.Confirm):
            return sign
        liar = insider.config.founders[self.liar]
        if liar in view.roster and view.step == 2:
            said = insider.find(Phase.COMMIT, liar), insider.find(Phase.REPORT, liar)
            notes["quote"] = view.step, view.attempt, said
        if liar not in view.banned or "quote" not in notes or "charge" in notes:
            return sign
        step, attempt, (commit, report) = notes["quote"]
        parts = tuple(place for place, key in enumerate(insider.config.founders) if key not in insider.plot.keys)
        charge = m.Accusation(Rule.GRADIENT, liar, step, attempt, parts[:1], commit, report, (), ())
        notes["charge"] = note_case(insider, charge), charge
        return change_body(sign, accusations=(*body.accusations, notes["charge"][0]))


def test_who_has_accused_a_liar_is_not_blamed_for_its_lie_later() -> None:
    swarm = play({5: LateAccuser(), 6: FalseReport(start=2)}, founders=9, byzantine=3)
    assert get_bans(swarm)[swarm.keys[6]] is Rule.REPORT
    assert "charge" in get_notes(swarm, 5)


def test_what_is_no_longer_kept_is_not_charged() -> None:
    """A lie that is found in the last vote on a step is told of in the next, and then it is too late."""
    swarm = make_swarm({})
    found = []
    for step in (1, 6):
        swarm.run(400.0, lambda step=step: get_peer(swarm, swarm.keys[0]).view.step > step)  # type: ignore[misc]
        peer = get_peer(swarm, swarm.keys[0])
        commit = peer.transcripts[step, 0].phases[Phase.COMMIT][swarm.keys[1]].message
        found.append(m.Accusation(Rule.GRADIENT, swarm.keys[1], step, 0, (), commit, None, (), ()))
    peer.charges += found
    assert make_confirm(peer, bytes(32), []).accusations == (compute_case_digest(found[1]),)


# ---- What one member alone has seen


@dataclass(kw_only=True, eq=False)
class ReportForOne(FalseReport):
    """A wrong REPORT for one member only, and a next message with a wrong root; so a slow path opens. Then silence."""

    def is_active(self, insider: Insider) -> bool:
        contributes = super().is_active(insider) and insider.key in insider.duties.contributors
        return contributes or "shown" in insider.notes

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if "shown" in insider.notes:
            return ()
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.REPORT,)):
            return ((to, message),)
        insider.notes["shown"] = True
        place = (message.height + 1, message.step, message.attempt, Phase.CONFIRM, bytes([7]) * 32)
        wrong = seal(insider.signer, insider.config.run, *place, m.Confirm(bytes(32), (), (), (), False))
        insider.send_later(0.0, insider.honest[:1], wrong)
        insider.send_later(1.0, insider.honest[:1], message)
        return ()


def test_who_alone_has_seen_a_report_is_not_banned_for_accusing() -> None:
    swarm = play({6: ReportForOne(start=1, part=6)})  # of its own part: there is no honest aggregator to blame
    assert get_notes(swarm, 6)["shown"]
    assert is_out(swarm, 6)


@dataclass(kw_only=True, eq=False)
class AggregateForOne(FalseReport):
    """Gives its aggregate to one member only, ``after`` so many deltas, and lies about it in its report."""

    after: float = 3.6

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and insider.key in insider.duties.contributors

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, m.AggregateChunk) or message.part != insider.index:
            return ((to, message),)
        if len(to) > 1:
            insider.notes["chunk", message.step, message.attempt] = message
        return ()

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        self.part, config = insider.index, insider.config
        chunk = insider.notes["chunk", insider.view.step, insider.view.attempt]
        insider.send_later(self.after * config.delta + config.transfer_time, insider.honest[:1], chunk)
        insider.notes["shown"] = True
        return super().on_report(insider, effect, projections)


@pytest.mark.parametrize("after", [1.6, 2.6, 3.3, 3.6, 3.8])
def test_who_alone_has_an_aggregate_is_not_banned_for_accusing(after: float) -> None:
    swarm = play({6: AggregateForOne(start=1, after=after)}, links=QUICK)
    assert get_notes(swarm, 6)["shown"]


# ---- Parts that are hidden where results may differ a little

TOLERANT: dict[str, Any] = {"steps": 40, "rounding": 1e-6, "tolerance": Tolerance(1e-4, 1e-2), "seed": 3}


@dataclass(kw_only=True, eq=False)
class HiddenPart(CoveredAggregate):
    """Sends any aggregate of its part, makes the sums right by its own report, and shows nobody its gradient there."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        contributes = insider.key in insider.duties.contributors
        return super().on_aggregate(insider, effect, result) if contributes else result

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and (message.owner, message.part) == (insider.key, insider.index):
            return ()
        return ((to, message),)


def test_a_wrong_aggregate_is_not_covered_by_a_part_that_nobody_may_see() -> None:
    honest = play({6: Attack()}, until=2000.0, **TOLERANT)
    swarm = play({6: HiddenPart(shift=5.0, start=1)}, until=2000.0, **TOLERANT)
    assert is_out(swarm, 6), describe(swarm)
    assert float((get_state(swarm) - get_state(honest)).norm()) < 1.0


@dataclass(kw_only=True, eq=False)
class PartForValidators(Attack):
    """A gradient that is wrong in the part that nobody else holds, which only validators get to see."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        parts = [part.clone() for part in split_parts(gradient, len(insider.view.roster))]
        if insider.index is not None:
            parts[insider.index] *= -5
        return join_parts(parts)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and (message.owner, message.part) == (insider.key, insider.index):
            checkers = {check.checker for check in insider.duties.checks if check.target == insider.key}
            to = tuple(key for key in to if key in checkers and len(to) == 1)
            insider.notes["shown"] = insider.notes.get("shown", 0) + len(to)
        return ((to, message),)


def test_a_validator_is_not_banned_for_what_it_alone_was_shown() -> None:
    swarm = play({6: PartForValidators(start=1)}, until=2000.0, **TOLERANT)
    assert get_notes(swarm, 6)["shown"]


# ---- Parts that come late


@dataclass(kw_only=True, eq=False)
class LateOpening(Attack):
    """Withholds a part from one aggregator, and opens it to all others ``early`` deltas before it is too late."""

    early: float = 0.4

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and insider.key in insider.view.roster and len(insider.honest) > 0

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes, here, victim = insider.notes, (insider.view.step, insider.view.attempt), insider.honest[0]
        if insider.key not in insider.duties.contributors:
            return ((to, message),)
        if isinstance(message, m.PartChunk):
            place = (insider.key, insider.view.roster.index(victim), *here)
            if (message.owner, message.part, message.step, message.attempt) != place:
                return ((to, message),)
            if len(to) > 1 and ("opened", here) not in notes:
                notes["opened", here] = notes["opened"] = True
                delta = insider.config.delta
                at = notes["sent", here] + 0.05 + (6 - self.early) * delta + insider.config.transfer_time
                insider.send_later(at - insider.now, (key for key in insider.honest if key != victim), message)
            return ()
        if isinstance(message, Signed) and is_own(insider, message, (Phase.AGGREGATE,)):
            insider.withhold(message)
            notes["mine", here] = to, message
            self._send_last(insider)
            return ()
        return ((to, message),)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, Signed):
            self._send_last(insider)
        return delivery

    def _send_last(self, insider: Insider) -> None:
        notes, here = insider.notes, (insider.view.step, insider.view.attempt)
        if ("mine", here) not in notes or ("sent", here) in notes:
            return
        if all(insider.find(Phase.AGGREGATE, key) for key in insider.view.roster):
            notes["sent", here] = insider.now + 0.3
            insider.send_later(0.3, *notes["mine", here])


@pytest.mark.parametrize("early", [0.0, 0.2, 0.4, 0.6, 1.0, 2.0])
def test_an_aggregator_that_could_not_get_a_part_in_time_stays(early: float) -> None:
    swarm = play({6: LateOpening(start=1, stop=3, early=early)}, steps=5, links=QUICK)
    assert get_notes(swarm, 6)["opened"]
    assert get_most_attempts(swarm) < 8


def test_late_parts_in_every_step_do_not_empty_the_roster() -> None:
    swarm = play({6: LateOpening(start=1)}, steps=12, links=QUICK, until=600.0, paired=1)
    assert get_notes(swarm, 6)["opened"]
    assert get_most_attempts(swarm) < 8


@dataclass(kw_only=True, eq=False)
class LateDenial(LateOpening):
    """Denies to have a part as well: more are to blame than there are attackers."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        contributors = insider.duties.contributors
        if isinstance(sign.body, m.Aggregate) and insider.key in contributors:
            owner = next(key for key in contributors if key != insider.key)
            return change_body(sign, result=None, missing=(insider.view.roster.index(owner),))
        return sign


def test_no_step_is_repeated_for_ever() -> None:
    swarm = play({3: LateDenial(start=1)}, founders=4, byzantine=1, steps=12, links=QUICK, until=600.0, paired=1)
    assert get_notes(swarm, 3)["opened"]
    assert get_most_attempts(swarm) < 8


def get_most_attempts(swarm: Swarm) -> int:
    views: list[View] = [event.view for event in get_events(swarm, AttemptStarted)]
    return 1 + max(view.attempt for view in views)


# ---- Evidence that not all have, in a slow path


@dataclass(kw_only=True, eq=False)
class HalfShownCharge(Attack):
    """Shows two of three members the evidence of an accusation, and opens a slow path at VOTE."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm) or "charge" in insider.notes:
            return sign
        view = insider.view
        victim = next(key for key in insider.duties.contributors if key not in insider.plot.keys)
        commit = insider.find(Phase.COMMIT, victim)
        assert commit is not None
        charge = m.Accusation(Rule.GRADIENT, victim, view.step, view.attempt, (), commit, None, (), ())
        insider.notes["charge"] = charge
        return change_body(sign, accusations=(note_case(insider, charge),))

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes = insider.notes
        if "opened" in notes:
            return ()
        if "charge" not in notes or not isinstance(message, Signed) or not is_own(insider, message, (Phase.VOTE,)):
            return ((to, message),)
        notes["opened"] = True
        place = (message.height + 1, message.step + 1, message.attempt, Phase.COMMIT, bytes([9]) * 32)
        wrong = seal(insider.signer, insider.config.run, *place, m.Commit(bytes(32), bytes(32), bytes(32)))
        insider.send_later(0.0, insider.honest[:1], wrong)
        insider.send_later(4.0, insider.honest[1:2], message)
        insider.send_later(4.05, insider.honest[:1], message)
        return ()

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes = insider.notes
        if isinstance(delivery.message, m.PullProof) and "charge" in notes and "shown" not in notes:
            notes["shown"] = True
            insider.send_later(1.1, insider.honest[:2], notes["charge"])  # the third has asked for the last time
        return delivery


def test_evidence_that_some_lack_does_not_halt_a_slow_path() -> None:
    links = Links(delta=1.0, low=0.2, high=0.22)
    swarm = play({3: HalfShownCharge(start=1)}, founders=4, byzantine=1, steps=6, links=links)
    assert get_notes(swarm, 3)["shown"]
    assert get_notes(swarm, 3)["opened"]


# ---- A certificate instead of a message


@dataclass(kw_only=True, eq=False)
class ChainForSome(Attack):
    """Sends its SEAL to nobody, and shows ``victims`` the whole certificate of which it is a part."""

    victims: int = 1

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes = insider.notes
        if "spent" in notes:
            return ((to, message),) if isinstance(message, m.Chain) and notes.pop("chain", None) else ()
        if isinstance(message, Signed) and is_own(insider, message, (Phase.SEAL,)):
            notes["spent"] = notes["seal"] = message
            return ()
        return ((to, message),)

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        kept = insider.notes.pop("seal", None)
        if kept is not None:
            insider.notes["shown"] = True
            seals = tuple(x for (height, _), x in insider.heard.items() if height == kept.height)
            yield Broadcast(insider.honest[: self.victims], m.Chain((m.Link(encode_view(insider.view), seals),)))


@pytest.mark.parametrize("victims", [1, 2, 3, 4])
def test_who_goes_on_by_a_certificate_is_at_one_with_the_others(victims: int) -> None:
    attackers = {5: Leave(start=2), 6: ChainForSome(start=2, victims=victims)}
    swarm = play(attackers, steps=6, links=QUICK)
    assert get_notes(swarm, 6)["shown"]


@pytest.mark.parametrize("victims", [1, 2])
def test_who_goes_on_by_a_certificate_of_one_who_leaves_is_at_one_with_the_others(victims: int) -> None:
    attackers = {3: combine(Leave(start=2), ChainForSome(start=2, victims=victims))}
    swarm = play(attackers, founders=4, byzantine=1, steps=6, links=QUICK)
    assert get_notes(swarm, 3)["shown"]


# ---- An item of a slow path that mixes what does not belong together


@dataclass(kw_only=True, eq=False)
class MixedItem(SlowPathAttack):
    """Opens a slow path by a wrong root, and puts in a vote and a timeout as one item."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return replace(sign, previous=bytes([5]) * 32) if isinstance(sign.body, m.Reveal) else sign

    def on_slow_path(self, insider: Insider, event: SlowPath) -> None:
        place = (event.height, event.step, event.attempt, Phase.COMMIT, bytes(32))
        run, signer = insider.config.run, insider.signer
        vote = seal(signer, run, *place, m.Outcome(0, False, (), (), (), False, bytes(32)))
        other = seal(signer, run, *place, m.Timeout(tuple(sorted(insider.honest[:1])), 0, None))
        item = compute_digest("item", compute_message_digest(vote), compute_message_digest(other))
        mine = seal(signer, run, *place, m.Endorsement(0, item))
        insider.notes["sent"] = True
        insider.send_later(0.0, insider.honest, m.Gossip(event.height, 0, (m.Relay((vote, other), (mine,)),)))


def test_an_item_of_votes_and_something_else_breaks_nobody() -> None:
    swarm = play({3: MixedItem(start=1)}, founders=4, byzantine=1, steps=5, wire=True)
    assert get_notes(swarm, 3)["sent"]


# ---- A case in the place of another


@dataclass(kw_only=True, eq=False)
class Override(Attack):
    """Accuses by the name that the case of a friend has who cheated and left."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        first = next((key for key in insider.view.roster if key in insider.plot.keys), None)
        if not isinstance(sign.body, m.Confirm) or first != insider.key:
            return sign
        cases = tuple(
            compute_suspect_digest(suspect)
            for suspect in insider.view.suspects
            if suspect.key == insider.plot.notes["cheat"]
        )
        if not cases:
            return sign
        insider.plot.notes["overridden"] = True
        return change_body(sign, accusations=cases[:8])


def test_an_accusation_does_not_replace_the_case_of_one_who_left() -> None:
    attackers = {6: Override(), 7: Override(), 8: Override(), 9: ATTACKS["hit_and_leave"](start=2)}
    swarm = make_swarm(attackers, founders=10, byzantine=4, steps=10)
    swarm.plot.notes["cheat"] = swarm.keys[9]
    swarm.run(900.0, swarm.is_over)
    assert_unharmed(swarm)
    assert swarm.plot.notes["overridden"]
    assert get_bans(swarm).get(swarm.keys[9]) is Rule.GRADIENT, describe(swarm)


# ---- Gossip that is long


@dataclass(kw_only=True, eq=False)
class LongEndorsements(Attack):
    """Gossip of many rounds, of which the endorsements take most: ``each`` frames a round."""

    rounds: int = 10
    each: int = 2

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        if insider.view.step != 1 or "sent" in insider.notes:
            return
        insider.notes["sent"] = True
        place = (insider.config.run, 0, 0, 0, Phase.COMMIT, insider.key, bytes(32))
        long = Signed(Domain.ENDORSEMENT, *place, bytes(250_000), bytes(64))
        short = Signed(Domain.AGREED, *place, b"", bytes(64))
        for number in range(self.rounds * self.each):
            relay = m.Relay((short,), (long,) * 60)
            yield Broadcast(insider.honest[:1], m.Gossip(insider.view.height, 5 + number % self.rounds, (relay,)))


def weigh(thing: Any) -> int:
    """The bytes of all messages in it."""
    if isinstance(thing, msgspec.Struct):
        return len(msgspec.msgpack.encode(thing))
    if isinstance(thing, Mapping):
        return sum(map(weigh, thing.values()))
    return sum(map(weigh, thing)) if isinstance(thing, Iterable) and not isinstance(thing, bytes | str) else 0


def test_gossip_of_one_member_takes_little_memory_whatever_is_long_in_it() -> None:
    swarm = make_swarm({3: LongEndorsements()}, founders=4, byzantine=1, steps=3, wire=True, links=QUICK)
    most = 0

    def watch() -> bool:
        nonlocal most
        gossip = get_peer(swarm, swarm.honest[0]).gossip
        most = max(most, sum(weigh(queues.get(swarm.keys[3], ())) for queues in gossip.values()))
        return swarm.is_over()

    for moment in range(1, 61):
        swarm.run(moment / 2, swarm.is_over)
        if watch():
            break
    assert get_notes(swarm, 3)["sent"]
    assert_unharmed(swarm)
    assert most < 64 << 20


# ---- Many who name one another


@dataclass(kw_only=True, eq=False)
class NamesFriends(Attack):
    """Names the parts of all its friends missing, which open none."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Aggregate):
            missing = tuple(sorted(map(insider.view.roster.index, get_crew(insider))))
            return change_body(sign, result=None, missing=missing) if missing else sign
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk):
            to = tuple(key for key in to if len(to) == 1 and insider.view.roster[message.part] == key)
        return ((to, message),)


def test_more_parts_unopened_than_a_message_holds_break_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.core.step.ask_part", lambda *_: ())  # millions of requests that nobody could answer
    attackers = dict.fromkeys(range(35, 68), NamesFriends())
    play(attackers, founders=68, byzantine=33, steps=1, size=256, links=STEADY, until=100.0)


# ---- Many who leave one by one


@dataclass(kw_only=True, eq=False)
class OneByOne(Attack):
    """Of those in the plot one in each attempt starts from a view of its own, and goes for it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        first = next((key for key in insider.view.roster if key in get_crew(insider)), None)
        if isinstance(sign.body, m.Commit) and first == insider.key:
            return change_body(sign, view=bytes(32))
        return sign


@pytest.mark.long
def test_more_suspects_than_a_vote_holds_break_nobody() -> None:
    attackers = dict.fromkeys(range(33, 64), OneByOne(start=2))
    play(attackers, founders=64, byzantine=31, steps=5, size=128, links=STEADY)


# ---- Long bodies in a slow path


@dataclass(kw_only=True, eq=False)
class LongBodies(Attack):
    """Two bodies at each of two heights instead of REVEAL, all as long as may be; then silence."""

    votes: bool = False
    """Whether it then agrees with everybody's vote."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if "spent" in insider.notes:
            return ()
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.REVEAL,)):
            return ((to, message),)
        insider.notes["spent"] = True
        self.spend(insider, message)
        return ()

    def spend(self, insider: Insider, message: Signed) -> None:
        for height, phase in ((message.height, Phase.REVEAL), (message.height + 1, Phase.REPORT)):
            for filling in (b"1", b"2"):
                place = msgspec.structs.replace(message, height=height, phase=phase, body=filling * MAX_BODY)
                insider.send_later(0.0, insider.honest, forge(insider.signer, place))
        if self.votes:
            last = max(insider.plot.keys, key=insider.view.roster.index)
            insider.send_later(3.9, insider.honest, insider.seal_again(message, m.Timeout((last,), 0, None)))

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if not self.votes or not isinstance(message, Signed) or message.domain is not Domain.OUTCOME:
            return delivery
        if message.sender == delivery.sender and message.sender in insider.honest:
            insider.send_later(0.0, (message.sender,), insider.seal_again(message, open_body(message)))
        return delivery


@dataclass(kw_only=True, eq=False)
class RevealForSome(LongBodies):
    """Its REVEAL reaches ``count`` members, shortly before it is too late."""

    count: int = 1

    def spend(self, insider: Insider, message: Signed) -> None:
        insider.send_later(4 * insider.config.delta - 0.2, insider.honest[: self.count], message)


@pytest.mark.parametrize(("count", "votes"), [(1, False), (10, True)])
def test_long_bodies_keep_no_honest_message_out_of_a_slow_path(count: int, votes: bool) -> None:
    attackers: dict[int, Attack] = dict.fromkeys(range(19, 35), LongBodies(start=1, votes=votes))
    attackers[35] = RevealForSome(start=1, count=count, votes=votes)
    links = Links(delta=1.0, low=0.1, high=0.11)
    swarm = play(attackers, founders=36, byzantine=17, steps=3, size=144, links=links, until=120.0)
    assert all(insider.notes["spent"] for insider in swarm.insiders.values())


# ---- More to accuse than there is room for


@dataclass(kw_only=True, eq=False)
class NoNumbers(NonFiniteParts):
    """All of the plot but the last send parts that hold no numbers: honest aggregators have much to accuse."""

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and insider.key in get_crew(insider)[:-1]


@dataclass(kw_only=True, eq=False)
class LastLies(SelfAccuser):
    """The last of the plot lies about the aggregates of ``victims``, by ``share`` of tau."""

    share: float
    victims: int | None = None
    accuses: bool = False

    def is_active(self, insider: Insider) -> bool:
        return "parts" in insider.notes or (super().is_active(insider) and insider.key in get_crew(insider)[-1:])

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        if "parts" in insider.notes:
            return projections
        count = len(effect.parts)
        parts = sorted(map(insider.view.roster.index, insider.honest[: self.victims]))
        insider.notes["parts"] = insider.plot.notes["lied"] = tuple(parts)
        lie = self.share * effect.tau
        return replace(projections, sums=tuple(x + lie * (i % count in parts) for i, x in enumerate(projections.sums)))

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return super().on_body(insider, sign) if self.accuses else sign


@pytest.mark.long
@pytest.mark.parametrize(("share", "victims", "accuses"), [(1.0, 5, False), (1e-5, None, True)])
def test_who_has_more_to_accuse_than_there_is_room_for_is_not_banned(
    share: float, victims: int | None, accuses: bool
) -> None:
    liar = LastLies(start=1, stop=2, share=share, victims=victims, accuses=accuses)
    attackers = dict.fromkeys(range(18, 34), combine(NoNumbers(start=1, stop=2), liar))
    swarm = play(attackers, founders=34, byzantine=16, steps=4, size=136, links=STEADY, until=60.0)
    assert swarm.plot.notes["lied"]
