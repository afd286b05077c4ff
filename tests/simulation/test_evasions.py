"""Ways around a rule: what is shown to some, said of a dead attempt, said many times, or done when it is too late.

Nobody who cheats so keeps what it gained by it, and nobody honest pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer, is_out
from test_strangers import TOLERANT, make_swarm, play
from torch import Tensor

from phalanx.attacks import Attack, Insider, Mail, combine
from phalanx.attacks.aggregation import Cover, PartForValidators, QuietShift, is_own_part
from phalanx.attacks.base import change_body
from phalanx.attacks.justice import Accuser, EmptyAccusation, EmptyVotes, IdleValidator, ShieldingVotes
from phalanx.attacks.membership import Leave
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import ComputeReport, Sign
from phalanx.core.events import AttemptStarted, Removed, SlowPath
from phalanx.core.life import make_peer
from phalanx.core.memory import recall, remember, remember_notes
from phalanx.core.messages import Message, Phase, Rule, Signed
from phalanx.core.peer import Peer
from phalanx.core.verification import Projections
from phalanx.simulation.swarm import Swarm

# ---- Sums that are too large to add up


@dataclass(kw_only=True, eq=False)
class HugeSums(QuietShift):
    """Reports the largest of numbers as the sum on the first part of the plot: two of them are no number."""

    shift: float = 0.0

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        part = min(place for place, key in enumerate(insider.view.roster) if key in insider.plot.keys)
        return replace(projections, sums=tuple(1.7e308 if at == part else x for at, x in enumerate(projections.sums)))


def test_sums_that_cannot_be_added_up_are_off_balance() -> None:
    swarm = play(dict.fromkeys((5, 6), HugeSums(start=1)), steps=5)
    assert get_bans(swarm) == dict.fromkeys(swarm.byzantine, Rule.SUM), describe(swarm)


# ---- A trial that few are sent


@dataclass(kw_only=True, eq=False)
class TrialForFew(IdleValidator):
    """On probation it computes nothing, and only so many see its trial as have to list it; nobody passes it on."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return gradient * 0 if insider.index is None else gradient

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Certificate):
            message = m.Certificate(tuple(x for x in message.messages if x.domain is not Domain.TRIAL))
        if isinstance(message, Signed) and message.domain is Domain.TRIAL:
            friends = insider.friends
            few = (*friends, *insider.honest[: len(insider.view.roster) // 2 + 1 - len(friends)])
            to = tuple(key for key in to if key in few)
            insider.notes["trial shown"] = True
        return ((to, message),)


@pytest.mark.parametrize("votes", [ShieldingVotes(), EmptyVotes(unreceived=True)])
def test_a_trial_shown_to_few_counts_as_shown_to_all(votes: Attack) -> None:
    """Neither does its sender become a member, nor goes whoever checked it and accuses it."""
    attackers = dict.fromkeys((5, 6, 7), combine(TrialForFew(), votes))
    swarm = play(attackers, joiners=1, steps=12, newcomer_probation=5)
    assert get_notes(swarm, 7)["trial shown"]
    assert get_bans(swarm) == {swarm.keys[7]: Rule.GRADIENT}, describe(swarm)


# ---- Bytes that some are shown


@dataclass(kw_only=True, eq=False)
class PartForSome(PartForValidators):
    """A gradient that is wrong in the part that nobody else holds; half see that, and validators see nothing."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if is_own_part(insider, message):
            checkers = {check.checker for check in insider.duties.checks if check.target == insider.key}
            some = [key for key in insider.honest if key not in checkers][:3] if checkers else []
            to = tuple(key for key in to if key in some)
            insider.notes["shown to some"] = insider.notes.get("shown to some", 0) + len(to)
        return ((to, message),)


def test_a_gradient_shown_to_some_is_not_shown() -> None:
    """Guilty for some, not received for the others: neither would be enough."""
    attackers = {5: combine(IdleValidator(), EmptyVotes()), 6: combine(PartForSome(start=1, stop=12), IdleValidator())}
    swarm = play(attackers, steps=15, until=2000.0, seed=2, **TOLERANT)
    assert get_notes(swarm, 6)["shown to some"]
    assert is_out(swarm, 6), describe(swarm)


# ---- An excuse that costs less than a ban


def test_a_wrong_aggregate_does_not_stand_if_its_aggregator_accuses_without_evidence() -> None:
    cover = combine(Cover(start=1, stop=2), Leave(start=2, stop=3))
    attack = combine(QuietShift(start=1, stop=2), EmptyAccusation(start=1, stop=2))
    swarm = play({5: cover, 6: attack})
    rosters = get_rosters(swarm, step=1)
    assert len(rosters) > 1, describe(swarm)
    assert swarm.keys[6] not in rosters[max(rosters)]


def get_rosters(swarm: Swarm, step: int) -> dict[int, tuple[bytes, ...]]:
    """Who took part in each attempt of a step."""
    views = [event.view for event in get_events(swarm, AttemptStarted)]
    return {view.failed: view.roster for view in views if view.step == step}


# ---- A member that has lost the rows of its part


@dataclass(kw_only=True, eq=False)
class LieToBlind(Attack):
    """Lies in one attempt about the part of one member, sends it its row only once, and is silent in a slow path."""

    victim: int

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and not insider.view.attempt

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        part = insider.view.roster.index(insider.config.founders[self.victim])
        return replace(projections, sums=tuple(x + 2.0 * (at == part) for at, x in enumerate(projections.sums)))

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Gossip | m.Alarm):
            return ()
        if isinstance(message, Signed) and message.domain in (Domain.TIMEOUT, Domain.OUTCOME):
            return ()
        if isinstance(message, m.PartChunk) and to == (insider.config.founders[self.victim],):
            if insider.notes.get("row sent"):
                return ()
            insider.notes["row sent"] = True
        return ((to, message),)


def test_who_has_lost_its_rows_is_not_banned_for_what_others_said_of_them() -> None:
    attack = LieToBlind(start=2, stop=3, victim=0)
    swarm = make_swarm({4: attack}, founders=5, byzantine=1, partition_safe=True, steps=5)
    victim = swarm.keys[0]

    def has_reported() -> bool:
        peer = get_peer(swarm, victim)
        return peer.view.step == 2 and Phase.REPORT in peer.transcript.heights.values()

    assert swarm.run(400.0, has_reported)
    swarm.crash(victim, 0.0)
    swarm.world.at(swarm.world.now + 0.05, lambda: swarm.restart(victim))
    swarm.run(400.0, swarm.is_over)
    assert not get_bans(swarm), describe(swarm)
    assert {*swarm.honest} <= swarm.finished, describe(swarm)
    assert {event.reason for event in get_events(swarm, Removed)} == {"lost the rows of its part"}, describe(swarm)


# ---- A stop, and what was committed to before it


def test_nobody_is_removed_for_a_gradient_of_before_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stop between two steps, and begin again with what they remember: their targets can show their bytes."""
    memories: dict[bytes, Any] = {}

    def make_again(config: Any, key: bytes, *others: Any) -> Peer:
        peer = make_peer(config, key, *others)
        if key in memories:
            recall(peer, *memories[key])
        return peer

    monkeypatch.setattr("phalanx.simulation.swarm.make_peer", make_again)
    swarm = make_swarm({}, founders=5, byzantine=1, steps=20, seed=3, **TOLERANT)
    for stop in (8, 16):
        assert swarm.run(400.0, lambda stop=stop: is_between(swarm, stop))  # type: ignore[misc]
        for key in swarm.keys:
            peer = get_peer(swarm, key)
            memories[key] = remember(peer), remember_notes(peer)
            swarm.crash(key, 1.0)
            swarm.world.at(swarm.world.now + 0.5, lambda key=key: swarm.restart(key))  # type: ignore[misc]
    swarm.run(400.0, lambda: len(swarm.finished) == len(swarm.keys))  # at first nobody is up
    assert_unharmed(swarm)


def is_between(swarm: Swarm, step: int) -> bool:
    """Whether all have begun this step, each from a view that is settled, and none has sent an aggregate."""
    peers = [get_peer(swarm, key) for key in swarm.keys]
    return all(
        peer.view.step == step and peer.base == peer.view and Phase.AGGREGATE not in peer.transcript.phases
        for peer in peers
    )


# ---- A report of a dead attempt


@dataclass(kw_only=True, eq=False)
class ShortReport(Attack):
    """Reports on one part only: the attempt is over, and it is banned."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        lies = isinstance(sign.body, m.Report) and bool(sign.body.norms)
        return change_body(sign, sums=(0.0,), norms=(0.0,)) if lies else sign


def find_last(insider: Insider, sender: bytes, phase: Phase) -> Signed | None:
    """The sender's latest message of a phase that was heard, of whatever attempt."""
    said = (x for (_, key), x in reversed(insider.heard.items()) if key == sender and x.phase is phase)
    return next(said, None)


@dataclass(kw_only=True, eq=False)
class AccusesTheBanned(Accuser):
    """Accuses a friend that is banned of its last report, on the part that the accuser itself aggregated."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        friends = [key for key in insider.view.banned if key in insider.plot.keys]
        if not isinstance(sign.body, m.Confirm) or not friends or "accused" in insider.notes:
            return sign
        commit, report = (find_last(insider, friends[0], phase) for phase in (Phase.COMMIT, Phase.REPORT))
        assert commit is not None
        assert report is not None
        insider.notes["accused"] = True
        parts = (insider.view.attempts[-1].roster.index(insider.key),)
        place = (friends[0], report.step, report.attempt)
        return self.bring(insider, sign, m.Accusation(Rule.REPORT, *place, parts, commit, report, (0.0,), (0.0,)))


def test_a_report_that_ended_its_attempt_breaks_nobody_who_judges_it() -> None:
    swarm = play({5: ShortReport(start=1), 6: AccusesTheBanned(start=1)}, steps=6)
    assert get_notes(swarm, 6)["accused"]
    assert swarm.keys[5] in get_bans(swarm)


# ---- The last step


def test_who_lets_a_lie_pass_in_the_last_step_is_banned_too() -> None:
    swarm = play({5: Cover(start=7), 6: QuietShift(start=7, shift=20.0)}, steps=8)
    assert {*get_bans(swarm)} == swarm.byzantine, describe(swarm)


# ---- One gradient, and many accusations


@dataclass(kw_only=True, eq=False)
class HiddenFrom(Attack):
    """Hides from ``count`` honest members the bytes that only their owner in the plot holds."""

    count: int

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and message.owner in insider.plot.keys:
            own = insider.view.roster[message.part : message.part + 1] == (message.owner,)
            to = tuple(key for key in to if not own or key not in insider.honest[: self.count])
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class AccusesInManyWays(Accuser):
    """Accuses a friend of one gradient in many ways, and never truly."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        view, friend = insider.view, insider.friends[:1]
        commit = find_last(insider, friend[0], Phase.COMMIT) if friend else None
        if not isinstance(sign.body, m.Confirm) or commit is None:
            return sign
        insider.notes["accused"] = True
        ways = [*combinations(range(len(view.roster)), 2)][:12]
        place = (friend[0], commit.step, commit.attempt)
        charges = (m.Accusation(Rule.GRADIENT, *place, parts, commit, None, (), ()) for parts in ways)
        return self.bring(insider, sign, *charges)


@pytest.mark.parametrize("count", [2, 5])
def test_a_gradient_accused_in_many_ways_is_waited_for_once(count: int) -> None:
    hides = HiddenFrom(count=count, start=2, stop=6)
    attackers = {5: hides, 6: combine(hides, AccusesInManyWays(start=3, stop=5))}
    swarm = play(attackers, until=3000.0, seed=3, **TOLERANT)
    assert get_notes(swarm, 6)["accused"]
    assert not get_events(swarm, SlowPath)
