"""What was sealed, voted for or accused of is not lost: by a crash, by a slow path one height below, or for a newcomer.

Whoever denies a seal is alone with it: nobody is called back to it, and who has settled it can show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer
from test_roots import EVEN, OTHER, Hushed, LateAt, leave
from test_strangers import make_swarm, play
from torch import Tensor

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.base import accuse, change_body
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Delivery, Sign
from phalanx.core.envelope import open_body
from phalanx.core.events import AttemptStarted, Banned, Removed, RunFinished, Waiting
from phalanx.core.membership import encode_view
from phalanx.core.messages import Message, Phase, Rule, Signed, Verdict
from phalanx.core.peer import compute_case_digest
from phalanx.simulation.swarm import Swarm


def assert_others_go_on(swarm: Swarm, leavers: Iterable[bytes]) -> None:
    """Nobody honest is banned, or removed but for those who left, and all others come to one end."""
    text, left = describe(swarm), {*leavers}
    assert not [key for key in get_bans(swarm) if key in swarm.honest], text
    removed = {event.key: event.reason for event in get_events(swarm, Removed) if event.key in swarm.honest}
    assert removed == dict.fromkeys(left, "left"), text
    assert {*swarm.honest} - left <= swarm.finished, text
    assert len({event.view.digest for event in get_events(swarm, RunFinished)}) == 1, text


def crash_when(swarm: Swarm, key: bytes, is_time: Callable[[], bool], lost: float = 0.0) -> None:
    """Let the run go on until it is time; then have a member crash, and come back a moment later."""
    assert swarm.run(400.0, is_time)
    swarm.crash(key, lost)
    back = swarm.world.now + 0.05
    swarm.world.at(back, lambda: swarm.restart(key))
    swarm.run(back + 0.001)


# ---- A seal that is denied


@dataclass(kw_only=True, eq=False)
class DenySeal(Hushed):
    """Its COMMIT after a SEAL denies it and goes to ``few`` alone; an alarm calls all others back to the SEAL."""

    delay: float = 0.02

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes, few = insider.notes, insider.plot.notes["few"]
        if isinstance(sign.body, m.Seal):
            notes["height"], notes["roster"] = sign.height, insider.view.roster
        if not isinstance(sign.body, m.Commit) or notes.get("height") != sign.height - 1 or "hushed" in notes:
            return sign
        notes["hushed"] = True
        height, commit = notes["height"], insider.seal(sign, previous=OTHER)
        seals = (insider.heard[height, key] for key in notes["roster"])
        rest = [key for key in notes["roster"] if key != insider.key and key not in few]
        insider.send_later(0.0, few, commit)
        insider.send_later(self.delay, rest, m.Alarm(height, 0, (*seals, commit)))
        for more in (0.3, 0.8):
            insider.send_later(self.delay + more, rest, m.Gossip(height, 0, (m.Relay((commit,), ()),), ()))
        return commit


@pytest.mark.parametrize(("founders", "byzantine"), [(6, 1), (9, 2)])
def test_a_seal_that_is_denied_to_the_leaver_alone_halts_nobody(founders: int, byzantine: int) -> None:
    attackers = dict.fromkeys(range(founders - byzantine, founders), DenySeal(delay=0.8))
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=8)
    leaver = leave(swarm, 0)
    swarm.plot.notes["few"] = (leaver,)
    swarm.run(400.0, swarm.is_over)
    assert all(insider.notes["hushed"] for insider in swarm.insiders.values())
    assert_others_go_on(swarm, [leaver])


def test_who_crashes_right_after_it_has_settled_a_seal_stays() -> None:
    swarm = make_swarm({6: DenySeal()}, byzantine=1, steps=8)
    one, leaver = swarm.keys[0], leave(swarm, 5)
    swarm.plot.notes["few"] = (one,)
    crash_when(swarm, one, lambda: has_settled(swarm, one, 6))
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 6)["hushed"]
    assert_others_go_on(swarm, [leaver])


def has_settled(swarm: Swarm, key: bytes, size: int) -> bool:
    """Whether it has settled a view of so many members."""
    peer = get_peer(swarm, key)
    return len(peer.view.roster) == size and peer.base == peer.view


@pytest.mark.parametrize("joiners", [1, 2])
def test_newcomers_that_settle_alone_the_seal_that_lets_them_in_stay(joiners: int) -> None:
    options: dict[str, Any] = {"joiners": joiners, "admissions": 2, "newcomer_probation": 12}
    swarm = make_swarm({4: DenySeal()}, founders=5, byzantine=1, steps=30, **options)
    newcomers = swarm.plot.notes["few"] = swarm.keys[5:]
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 4)["hushed"]
    assert_others_go_on(swarm, [])
    assert {*newcomers} <= {*get_peer(swarm, swarm.keys[0]).view.roster}, describe(swarm)


# ---- A crash between SEAL and COMMIT


def test_who_crashes_between_seal_and_commit_stays() -> None:
    swarm = make_swarm({5: DenySeal(delay=2.0)}, founders=6, byzantine=1, steps=8)
    swarm.plot.notes["few"], leaver = (), leave(swarm, 0)
    crash_when(swarm, swarm.keys[1], lambda: is_sealed(swarm, swarm.keys[1], 5))
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 5)["hushed"]
    assert_others_go_on(swarm, [leaver])


def is_sealed(swarm: Swarm, key: bytes, size: int) -> bool:
    """Whether it is in a view of so many members that is not settled yet."""
    peer = get_peer(swarm, key)
    return len(peer.view.roster) == size and peer.base != peer.view


@dataclass(kw_only=True, eq=False)
class SealTooLateForOne(Hushed):
    """Its SEAL comes too late for one, who complains; later its own complaint makes that an alarm for all."""

    delay: float = 0.05

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if not isinstance(sign.body, m.Seal) or "hushed" in notes:
            return sign
        notes.update({"hushed": True, "seal": sign, "others": insider.others})
        seal, victim = insider.seal(sign), insider.plot.notes["victim"]
        insider.send_later(4 - 2.6 * self.delay, (key for key in insider.others if key != victim), seal)
        return seal

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        said, notes = delivery.message, insider.notes
        timeout = isinstance(said, Signed) and said.domain is Domain.TIMEOUT
        if not timeout or said.sender != insider.plot.notes["victim"] or "complaint" in notes:
            return delivery
        notes["complaint"] = insider.seal(notes["seal"], m.Timeout((insider.key,), 0, None))
        insider.send_later(2.0, notes["others"], m.Alarm(said.height, 0, (said, notes["complaint"])))
        return delivery


def test_two_that_crash_between_seal_and_commit_can_go_back_to_the_seal() -> None:
    """They crash one after the other; the alarm is not only the attacker's."""
    swarm = make_swarm({5: SealTooLateForOne()}, founders=6, byzantine=1, steps=8, links=EVEN)
    swarm.plot.notes["victim"], leaver = swarm.keys[3], leave(swarm, 0)
    for key in swarm.keys[1:3]:
        crash_when(swarm, key, lambda key=key: is_sealed(swarm, key, 5))  # type: ignore[misc]
        swarm.run(swarm.world.now + 0.5)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 5)["complaint"]
    assert_others_go_on(swarm, [leaver])


# ---- Cases that somebody named


@dataclass(kw_only=True, eq=False)
class NamesNothing(Attack):
    """In a roster of ``size`` it names a case that nobody has, and votes as if it had it."""

    size: int

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Confirm) and len(insider.view.roster) == self.size:
            insider.notes["named"] = True
            return accuse(sign, OTHER)
        if isinstance(sign.body, m.Vote):
            ballots = (m.Ballot(x.case, Verdict.INNOCENT) if x.case == OTHER else x for x in sign.body.ballots)
            return change_body(sign, ballots=tuple(ballots))
        return sign


@pytest.mark.parametrize(("founders", "byzantine", "left"), [(7, 1, 2), (11, 2, 3)])
def test_a_case_that_nobody_has_halts_no_small_roster(founders: int, byzantine: int, left: int) -> None:
    attackers = dict.fromkeys(range(founders - byzantine, founders), NamesNothing(size=founders - left))
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=14)
    leavers = [leave(swarm, index, 0.6 + index) for index in range(left)]
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, founders - 1)["named"]
    assert_others_go_on(swarm, leavers)
    away = {event.key for event in get_events(swarm, Removed)} - {*leavers}
    assert away == {*swarm.byzantine}, "whoever names it goes, and the run has a margin for all of them"


@pytest.mark.parametrize(("founders", "byzantine", "left"), [(6, 1, 2), (9, 2, 3)])
def test_a_case_that_nobody_has_is_waited_for_at_the_floor(founders: int, byzantine: int, left: int) -> None:
    """No attempt is repeated there, and all say for whom they wait. With a third of the members gone attackers can."""
    attackers = dict.fromkeys(range(founders - byzantine, founders), NamesNothing(size=founders - left))
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=14)
    leavers = [leave(swarm, index, 0.6 + index) for index in range(left)]
    swarm.run(400.0, swarm.is_over)
    assert not get_bans(swarm)
    assert {event.key: event.reason for event in get_events(swarm, Removed)} == dict.fromkeys(leavers, "left")
    for key in {*swarm.honest} - {*leavers}:
        events = [event for _, event in swarm.events[key]]
        assert not any(event.view.failed for event in events if isinstance(event, AttemptStarted))
        waits = [event.missing for event in events if isinstance(event, Waiting)]
        assert len(waits) > 3
        assert {*waits} <= {tuple(sorted(swarm.byzantine))}, "the case is said to be missing of who named it"


@dataclass(kw_only=True, eq=False)
class NamesItself(Attack):
    """Its gradients are wrong; when its validator says so its own CONFIRM comes late, and may name the same case."""

    names: bool

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return -3 * gradient

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Commit):
            notes["commit", sign.step] = insider.view
        checks = (x for x in insider.duties.checks if x.target == insider.key != x.checker)
        check = next((x for x in checks if ("commit", x.step) in notes), None)
        if not isinstance(sign.body, m.Confirm) or check is None or "validator" in insider.plot.notes:
            return sign
        insider.plot.notes.update({"validator": check.checker, "step": check.step})
        before = notes["commit", check.step]
        commit = insider.heard[before.height, insider.key]
        charge = m.Accusation(Rule.GRADIENT, insider.key, check.step, before.attempt, (), commit, None, (), ())
        confirm = insider.seal(accuse(sign, compute_case_digest(charge)) if self.names else sign)
        insider.withhold(confirm)
        insider.send_later(3.0, insider.others, confirm)
        return confirm

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if isinstance(message, m.Accusation) else ((to, message),)


@pytest.mark.parametrize("names", [False, True])
def test_an_accuser_that_crashes_still_shows_its_case(names: bool) -> None:
    swarm = make_swarm({5: NamesItself(names=names)}, founders=6, byzantine=1, steps=12, seed=3)
    notes = swarm.plot.notes
    assert swarm.run(400.0, lambda: "validator" in notes)
    later = swarm.world.now + 1.0
    crash_when(swarm, notes["validator"], lambda: swarm.world.now >= later)
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert get_bans(swarm) == {swarm.keys[5]: Rule.GRADIENT}, describe(swarm)
    assert {event.step for event in get_events(swarm, Banned)} == {notes["step"]}, describe(swarm)


# ---- A slow path one height below


@dataclass(kw_only=True, eq=False)
class AlarmBelow(Hushed):
    """Silent at REVEAL; when all cast final votes for want of it, an alarm calls them to the height below."""

    alarm: bool = True
    delay: float = 0.025

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Reveal) and "hushed" not in notes:
            notes.update({"hushed": True, "reveal": sign, "roster": insider.view.roster})
            return None
        first = isinstance(sign.body, m.Outcome) and not sign.body.final and "hushed" in notes
        if self.alarm and first and "shown" not in notes and sign.height == notes["reveal"].height:
            notes["shown"] = True
            below, astray = sign.height - 1, insider.seal(notes["reveal"], previous=OTHER)
            to = [key for key in notes["roster"] if key not in (insider.key, insider.plot.notes.get("spared"))]
            heard = (insider.heard[below, key] for key in notes["roster"])
            insider.send_later(self.delay, to, m.Alarm(below, 0, (*heard, astray)))
            for more in (0.3, 0.8):
                insider.send_later(self.delay + more, to, m.Gossip(below, 0, (m.Relay((astray,), ()),), ()))
        return sign

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        said = delivery.message
        body = open_body(said) if isinstance(said, Signed) else None
        if isinstance(body, m.Outcome) and body.final and body.ends and said.sender in insider.honest:
            insider.notes.setdefault("votes", {}).setdefault(body.view, []).append(said)
        return delivery


def test_final_votes_are_for_one_outcome_though_a_slow_path_below_opens() -> None:
    swarm = play({7: AlarmBelow(start=1)}, founders=8, byzantine=2, steps=4, links=EVEN)
    notes = get_notes(swarm, 7)
    assert notes["shown"]
    assert len(notes["votes"]) == 1


def test_who_settles_alone_what_all_have_voted_for_stays() -> None:
    """It crashes before anybody has heard of it."""
    attackers = {6: AlarmBelow(start=1, alarm=False), 7: AlarmBelow(start=1)}
    swarm = make_swarm(attackers, founders=8, byzantine=2, steps=6, links=EVEN)
    one = swarm.plot.notes["spared"] = swarm.keys[0]
    crash_when(swarm, one, lambda: get_peer(swarm, one).view.attempt > 0, lost=1.0)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 7)["shown"]
    assert_unharmed(swarm)


@dataclass(kw_only=True, eq=False)
class JoinTwoViews(Accuser):
    """Shows the COMMITs of one view together with the REVEALs of another that has the same step and attempt."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Commit) and sign.attempt and "held" not in notes:
            notes["held"] = sign.height
            return None
        if not isinstance(sign.body, m.Confirm) or sign.height < notes.get("held", sign.height):
            return sign
        pairs = ((insider.heard.get((notes["held"], key)), insider.find(Phase.REVEAL, key)) for key in insider.honest)
        proofs = [m.WrongReveal(*pair) for pair in pairs if None not in pair]
        return self.bring(insider, sign, *proofs)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        """Deaf to what would take it on from the COMMITs; it has them all the same."""
        said, held = delivery.message, insider.view.height == insider.notes.get("held")
        agreed = isinstance(said, Signed) and said.domain is Domain.AGREED
        deaf = held and (agreed or isinstance(said, m.Certificate))
        return None if deaf else super().on_delivery(insider, delivery)


def test_nobody_reveals_in_one_view_what_it_committed_to_in_another() -> None:
    """Whoever holds final votes that nobody went by shows them when all have committed."""
    swarm = make_swarm(
        {6: JoinTwoViews(start=1, stop=2), 7: AlarmBelow(start=1)}, founders=8, byzantine=2, steps=4, links=EVEN
    )
    insider = swarm.insiders[swarm.keys[7]]
    assert swarm.run(400.0, lambda: all(has_committed_again(swarm, key) for key in swarm.honest))
    epochs = [epoch for key in swarm.keys for epoch in get_peer(swarm, key).transcripts.values()]
    views = {digest: view for epoch in epochs for digest, view in epoch.outcomes.items()}
    for view, votes in insider.notes["votes"].items():
        chain = m.Chain((m.Link(encode_view(views[view]), tuple(votes)),))
        insider.send_later(0.3, swarm.keys[:7], chain)
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)


def has_committed_again(swarm: Swarm, key: bytes) -> bool:
    view = get_peer(swarm, key).view
    return view.attempt > 0 and view.height in swarm.world.get_disk(key).journal


# ---- Late again and again


def test_lateness_at_confirm_counts_every_time() -> None:
    swarm = play({4: LateAt(late=m.Confirm)}, founders=5, byzantine=1, steps=12)
    strikes: dict[int, int] = {}
    for _, event in swarm.events[swarm.keys[0]]:
        if isinstance(event, AttemptStarted) and swarm.keys[4] in event.view.roster:
            counts = {count.key: count.count for count in event.view.strikes}
            strikes[event.view.step] = counts.get(swarm.keys[4], 0)
    assert [*strikes.values()][:4] == [0, 0, 1, 2], describe(swarm)
    removed = {(event.key, event.step, event.reason) for event in get_events(swarm, Removed)}
    assert (swarm.keys[4], 3, "late too often") in removed, describe(swarm)
    assert {key for key, _, _ in removed} == {swarm.keys[4]}
    assert max([*strikes.values()]) == 2, "three suspend it, each time"
