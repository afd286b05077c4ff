"""Messages that name another root, come late, or reach some only: to whom they are shown, and when.

The run goes on, nobody honest goes for it, and whoever does so in every step pays. Nor does a crash halt it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer, is_out
from test_strangers import make_swarm, play

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.broadcast import is_own
from phalanx.attacks.justice import FalseAccusation
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Delivery, Sign
from phalanx.core.events import Banned, Removed, RunFinished
from phalanx.core.messages import Message, Phase, Rule, Signed
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Swarm

SMALL: dict[str, Any] = {"founders": 5, "byzantine": 1, "steps": 4}
EVEN = Links(delta=1.0, low=0.0499, high=0.0501)
OTHER = bytes([7]) * 32
"""A root that nobody has."""


def speak_late(insider: Insider, message: Signed, delays: Iterable[float]) -> None:
    """Put a message into the slow path that opens for want of it."""
    gossip = m.Gossip(message.height, 0, (m.Relay((message,), ()),), ())
    for delay in delays:
        insider.send_later(delay, insider.others, gossip)


@dataclass(kw_only=True, eq=False)
class Hushed(Attack):
    """Once it is hushed nobody hears it, but for what it has put off."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if insider.notes.get("hushed") else ((to, message),)


# ---- Late, and then astray


@dataclass(kw_only=True, eq=False)
class LateThenAstray(Hushed):
    """Late at REVEAL, so that this height is settled by a slow path; then its REPORT names another root."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Reveal) and not sign.attempt:
            insider.notes["hushed"] = True
            reveal = insider.seal(sign)
            speak_late(insider, reveal, (3.5, 4.3, 4.6))
            return reveal
        if isinstance(sign.body, m.Report) and not sign.attempt:
            report = insider.seal(sign, previous=OTHER)
            for delay in (9.5, 9.7):
                insider.send_later(delay, insider.honest, report)
            return report
        return sign


def test_who_is_late_at_one_height_and_astray_at_the_next_goes() -> None:
    swarm = play({4: LateThenAstray(start=1, stop=2)}, **SMALL)
    assert is_out(swarm, 4), describe(swarm)


# ---- Two roots at one height


@dataclass(kw_only=True, eq=False)
class TwoRoots(Attack):
    """Its message of one phase goes to some, and one that names another root to the others."""

    phase: Phase
    right: int | None = None
    """To so many honest members; None: to all of them, and not to those who are none."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if sign.phase is self.phase and isinstance(sign.body, m.Report | m.Reveal):
            insider.notes["astray"] = insider.seal(sign, previous=OTHER)
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not is_own(insider, message, (self.phase,)):
            return ((to, message),)
        some = (*insider.honest[: self.right], *insider.friends)
        astray = tuple(key for key in to if key not in some)
        return (tuple(key for key in to if key in some), message), (astray, insider.notes["astray"])


@pytest.mark.parametrize(("founders", "byzantine", "right"), [(5, 1, 1), (5, 1, 3), (7, 2, 4)])
def test_two_roots_at_one_height_cost_nobody_but_their_sender(founders: int, byzantine: int, right: int) -> None:
    attack = TwoRoots(phase=Phase.REPORT, right=right, start=1, stop=2)
    swarm = play({founders - 1: attack}, founders=founders, byzantine=byzantine, steps=4)
    assert get_bans(swarm) == {swarm.keys[-1]: Rule.EQUIVOCATION}, describe(swarm)


def test_a_probationer_that_is_shown_another_root_gets_in() -> None:
    swarm = play({4: TwoRoots(phase=Phase.REVEAL)}, founders=5, joiners=1, byzantine=1, steps=30)
    assert swarm.keys[5] in get_peer(swarm, swarm.keys[0]).view.roster, describe(swarm)


# ---- Late in every step


@dataclass(kw_only=True, eq=False)
class LateAt(Attack):
    """Late with one kind of message: it is silent until the slow path for want of that has settled its height."""

    late: type

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes, here = insider.notes, (sign.step, sign.attempt)
        if not isinstance(sign.body, self.late) or notes.get("late") == here:
            return sign
        message = insider.seal(sign)
        notes.update({"late": here, "height": sign.height, "said": message, "held": []})
        speak_late(insider, message, [3.6 + 0.25 * place for place in range(8)])
        return message

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, message = insider.notes, delivery.message
        agreed = isinstance(message, Signed) and message.domain is Domain.AGREED and message.sender == delivery.sender
        if agreed and notes.get("height") is not None and message.height > notes["height"]:
            notes["height"] = None
            for held in notes["held"]:
                for mail in self.on_message(insider, *held):
                    insider.send_later(0.0, *mail)
        return delivery

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes = insider.notes
        if notes.get("height") is None:
            return ((to, message),)
        if isinstance(message, m.PartChunk) or (is_own(insider, message) and message != notes["said"]):
            notes["held"].append((to, message))
        return ()


def test_who_is_late_at_confirm_is_removed_for_it_in_the_end() -> None:
    swarm = play({4: LateAt(late=m.Confirm)}, founders=5, byzantine=1, steps=12)
    assert is_out(swarm, 4), describe(swarm)


# ---- One victim that is shown another root


@dataclass(kw_only=True, eq=False)
class AstrayForOne(LateAt):
    """Late at one height; what it says at the next names another root for one victim, and is right for the others."""

    next: type

    def is_active(self, insider: Insider) -> bool:
        votes = bool(insider.view.suspects)
        return super().is_active(insider) and (votes or self.next is not m.Vote)

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, self.next) and insider.notes.get("height") == sign.height - 1:
            victim = next(key for key in reversed(insider.honest) if key in insider.duties.contributors)
            insider.notes["astray"], insider.notes["victim"] = insider.seal(sign, previous=OTHER), victim
        return super().on_body(insider, sign)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        victim, astray = insider.notes.get("victim"), insider.notes.get("astray")
        for keys, said in super().on_message(insider, to, message):
            hidden = victim in keys and isinstance(said, Signed | m.Certificate | m.Chain)
            yield tuple(key for key in keys if not hidden or key != victim), said
            if hidden and is_own(insider, said) and said.height == astray.height:
                yield (victim,), astray


def test_who_is_shown_another_root_after_a_slow_path_is_not_removed() -> None:
    first, second = (AstrayForOne(late=m.Reveal, next=m.Report, start=step, stop=step + 2) for step in (1, 3))
    swarm = play({5: first, 6: second}, steps=8)
    assert all("astray" in insider.notes for insider in swarm.insiders.values())


def test_who_is_shown_another_root_in_a_vote_is_not_removed() -> None:
    """There is a vote on one that left."""
    swarm = make_swarm({6: AstrayForOne(late=m.Confirm, next=m.Vote, start=1)}, byzantine=1, steps=12)
    leaver = leave(swarm, 0)
    swarm.run(400.0, swarm.is_over)
    assert "astray" in get_notes(swarm, 6)
    assert_all_go_on(swarm, leaver)


def leave(swarm: Swarm, index: int, when: float = 0.6) -> bytes:
    """Have an honest member say goodbye."""
    key = swarm.keys[index]
    swarm.world.at(when, lambda: swarm.leave(key))
    return key


def assert_all_go_on(swarm: Swarm, leaver: bytes) -> None:
    """Nobody honest is banned or removed, and all but the one that left come to one end."""
    text = describe(swarm)
    assert not [key for key in get_bans(swarm) if key in swarm.honest], text
    removed = {event.key: event.reason for event in get_events(swarm, Removed) if event.key in swarm.honest}
    assert removed == {leaver: "left"}, text
    assert {*swarm.honest} - {leaver} <= swarm.finished, text
    ends = {event.view.digest for event in get_events(swarm, RunFinished)}
    assert len(ends) == 1, text
    assert leaver not in get_peer(swarm, swarm.keys[2]).view.roster, text


# ---- A roster that changes


@dataclass(kw_only=True, eq=False)
class AstrayCommit(Hushed):
    """When the roster changes: a SEAL too late for one, then for some a COMMIT that names another root.

    The others get an alarm of the SEAL's height instead: they may go back to what the first have settled.
    """

    some: int
    delay: float = 0.05

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Seal) and "seal" not in notes:
            notes.update({"hushed": True, "seal": sign, "victim": insider.honest[1]})
            seal = insider.seal(sign)
            rest = (key for key in insider.honest if key != notes["victim"])
            insider.send_later(4 - 2.6 * self.delay, rest, seal)
            return seal
        if isinstance(sign.body, m.Commit) and "seal" in notes and notes["seal"].height == sign.height - 1:
            notes["commit"] = insider.seal(sign, previous=OTHER)
            return notes["commit"]
        return sign

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        said, notes = delivery.message, insider.notes
        timeout = isinstance(said, Signed) and said.domain is Domain.TIMEOUT and said.sender == notes.get("victim")
        if timeout and "shown" not in notes and said.height == notes["seal"].height:
            notes["shown"] = True
            some = [key for key in insider.honest if key != notes["victim"]][: self.some]
            rest = [key for key in insider.honest if key not in some]
            mine = insider.seal(notes["seal"], m.Timeout((insider.key,), 0, None))
            insider.send_later(4 * self.delay, some, notes["commit"])
            insider.send_later(4.1 * self.delay, rest, m.Alarm(said.height, 0, (said, mine)))
            gossip = m.Gossip(said.height, 0, (m.Relay((notes["commit"],), ()),), ())
            for delay in (0.3, 0.8):
                insider.send_later(4 * self.delay + delay, rest, gossip)
        return delivery


@pytest.mark.parametrize("some", [1, 3])
def test_a_commit_with_another_root_after_a_seal_does_not_divide_the_members(some: int) -> None:
    swarm = make_swarm({6: AstrayCommit(some=some)}, byzantine=1, steps=8, links=EVEN)
    leaver = leave(swarm, 5)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 6)["shown"]
    assert_all_go_on(swarm, leaver)


@dataclass(kw_only=True, eq=False)
class SealForOne(Hushed):
    """When the roster changes its SEAL goes to one alone, just before the deadline; then silence."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Seal) or insider.notes.get("hushed"):
            return sign
        insider.notes["hushed"] = True
        seal = insider.seal(sign)
        insider.send_later(3.7, (insider.plot.notes["one"],), seal)
        return seal


@pytest.mark.parametrize(("founders", "byzantine"), [(6, 1), (9, 2)])
def test_who_leaves_stays_until_nobody_needs_it(founders: int, byzantine: int) -> None:
    attackers = dict.fromkeys(range(founders - byzantine, founders), SealForOne())
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=8)
    swarm.plot.notes["one"] = leaver = leave(swarm, 1)
    swarm.run(400.0, swarm.is_over)
    assert all(insider.notes["hushed"] for insider in swarm.insiders.values())
    assert_all_go_on(swarm, leaver)


def test_who_crashes_when_it_alone_knows_the_new_roster_comes_back() -> None:
    swarm = make_swarm({6: SealForOne()}, byzantine=1, steps=8)
    swarm.plot.notes["one"] = one = swarm.keys[0]
    leaver = leave(swarm, 5)
    assert swarm.run(400.0, lambda: len(get_peer(swarm, one).view.roster) == 6)
    swarm.crash(one, 0.0)
    swarm.world.at(swarm.world.now + 0.05, lambda: swarm.restart(one))
    swarm.run(swarm.world.now + 0.1)
    swarm.run(400.0, swarm.is_over)
    assert_all_go_on(swarm, leaver)


# ---- What is voted on, and a crash


@dataclass(kw_only=True, eq=False)
class ShownOnce(FalseAccusation):
    """Accuses falsely, shows ``readers`` the charge at the last moment, and nobody any more when some have crashed."""

    rule: Rule = Rule.GRADIENT
    delay: float = 0.0

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, sender, notes = delivery.message, delivery.sender, insider.notes
        case = notes.get((self, message.case)) if isinstance(message, m.PullProof) else None
        hides = "crash" in insider.plot.notes or ("shown", sender) in notes
        if case is not None and sender is not None and not hides and self.may_read(insider, sender):
            notes["shown", sender] = True
            insider.send_later(self.delay, (sender,), case)
        return delivery

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if isinstance(message, m.Accusation) else ((to, message),)


def test_what_is_voted_on_outlasts_a_power_cut() -> None:
    """All members stop right after the vote, and come back."""
    swarm = make_swarm({4: ShownOnce(start=2, stop=3)}, founders=5, byzantine=1, steps=6)
    assert swarm.run(400.0, lambda: has_voted(swarm, swarm.keys[0]))
    swarm.plot.notes["crash"] = True
    for key in swarm.keys:
        swarm.crash(key, 0.0)
        swarm.world.at(swarm.world.now + 0.5, lambda key=key: swarm.restart(key))  # type: ignore[misc]
    swarm.run(swarm.world.now + 1.0)
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert swarm.keys[4] in get_bans(swarm), describe(swarm)


def has_voted(swarm: Swarm, key: bytes) -> bool:
    peer = get_peer(swarm, key)
    return peer.view.step == 2 and Phase.VOTE in peer.transcript.phases


def test_what_is_voted_on_outlasts_a_crash_of_all_who_hold_it() -> None:
    """They crash one after the other as soon as they have voted, and come back at once."""
    attack = ShownOnce(start=2, stop=3, readers=2, delay=0.9)
    swarm = make_swarm({4: attack}, founders=5, byzantine=1, steps=6, seed=2, links=EVEN)
    for key in swarm.keys[:2]:
        assert swarm.run(400.0, lambda key=key: has_signed_vote(swarm, key))  # type: ignore[misc]
        swarm.plot.notes["crash"] = True
        swarm.crash(key, 0.0)
        swarm.world.at(swarm.world.now + 0.01, lambda key=key: swarm.restart(key))  # type: ignore[misc]
        swarm.run(swarm.world.now + 0.012)
    swarm.run(400.0, swarm.is_over)
    assert {*swarm.honest} <= swarm.finished, describe(swarm)  # a crash may be an absence
    assert get_bans(swarm) == {swarm.keys[4]: Rule.GRADIENT}, describe(swarm)
    assert {event.reason for event in get_events(swarm, Banned)} == {"a false accusation"}


def has_signed_vote(swarm: Swarm, key: bytes) -> bool:
    """Whether it has voted on what it was shown: it and one more hold that."""
    peer = get_peer(swarm, key)
    return (
        peer.view.step == 2
        and key in peer.page(peer.level + 1).letters
        and Phase.VOTE in peer.transcript.heights.values()
    )
