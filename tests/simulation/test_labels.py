"""What somebody writes on its own message decides nothing for others: neither its phase nor the root that it names.

Nor does a message that is kept back undo what is settled; and whoever walks the chain counts as those did who made it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_notes, get_peer, is_out
from test_names import AlarmAndVote, has_voted_below
from test_roots import EVEN, OTHER, Hushed, leave
from test_seals import SealTooLateForOne, assert_others_go_on, crash_when, is_sealed
from test_strangers import make_swarm
from torch import Tensor

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.broadcast import is_own
from phalanx.core import messages as m
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Delivery, Sign
from phalanx.core.envelope import compute_message_digest, open_body
from phalanx.core.events import Removed
from phalanx.core.messages import Message, Phase, Signed
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm

UNEVEN = Links(delta=1.0, low=0.04, high=0.06)

# ---- A ban that changes no roster


@dataclass(kw_only=True, eq=False)
class QuietFrom(Hushed):
    """Nobody hears it from its ``first`` message of a kind on."""

    first: type

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, self.first):
            insider.notes["hushed"] = True
        return sign


@dataclass(kw_only=True, eq=False)
class WrongAndGone(QuietFrom):
    """Its gradient is wrong, but it is suspended as silent before anybody has seen that, and banned later: what it
    committed to in the attempt that died of its silence is checked in the next step."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return gradient + 1.0


def test_a_joiner_can_follow_past_a_ban_of_one_that_was_no_longer_a_member() -> None:
    """The ban lowers the quorum, and the next removal is settled by that."""
    settings = {"byzantine": 2, "steps": 40, "size": 64, "tau": 1.0, "cap": 100.0, "newcomer_probation": 6}
    attackers = {7: WrongAndGone(first=m.Reveal, start=1), 8: QuietFrom(first=m.Commit, start=6)}
    setup = Setup(founders=9, joiners=1, attackers=attackers, settings=settings | {"partition_safe": True})
    swarm = Swarm(setup, 2, replace(UNEVEN), keep_events=True)
    assert swarm.run(200.0, lambda: is_out(swarm, 8))
    assert [*get_bans(swarm)] == [swarm.keys[7]], describe(swarm)
    swarm.start(9)
    swarm.run(400.0, swarm.is_over)
    assert swarm.keys[9] in get_peer(swarm, swarm.keys[0]).view.roster, describe(swarm)
    assert_unharmed(swarm)


# ---- A certificate that comes too late


@dataclass(kw_only=True, eq=False)
class QuietAfterReport(Hushed):
    """Nobody hears it after its REPORT."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        sent = super().on_message(insider, to, message)
        if is_own(insider, message, (Phase.REPORT,)):
            insider.notes["hushed"] = True
        return sent


@dataclass(kw_only=True, eq=False)
class LateCertificate(AlarmAndVote):
    """Calls all to the height below its REPORT; in the second round there it shows all REPORTs, its own too."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        changed = super().on_body(insider, sign)
        if changed is None:
            below, astray = sign.height - 1, insider.seal(sign, previous=OTHER)
            heard = (insider.heard[below, key] for key in insider.view.roster)
            insider.send_later(1.0, insider.others, m.Alarm(below, 0, (*heard, astray)))
        return changed

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        notes, said = insider.notes, delivery.message
        timeout = isinstance(said, Signed) and said.domain is Domain.TIMEOUT and "kept" in notes
        body = open_body(said) if timeout and said.height == notes["kept"].height - 1 else None
        if isinstance(body, m.Timeout) and body.round == 1 and "shown" not in notes:
            notes["shown"] = True
            letters = [insider.heard[said.height + 1, key] for key in notes["roster"]]
            mine = insider.seal_again(
                said, m.Endorsement(1, compute_digest("item", *map(compute_message_digest, letters)))
            )
            for delay in (0.05, 0.3):
                gossip = m.Gossip(said.height, 1, (m.Relay(tuple(letters), (mine,)),), ())
                insider.send_later(delay, insider.others, gossip)
        return super().on_delivery(insider, delivery)


def test_a_certificate_of_the_next_height_does_not_undo_what_is_settled() -> None:
    """Two crash one after the other, the second when it has settled the height alone: so the round fails."""
    attackers = {6: QuietAfterReport(start=1), 7: LateCertificate(silent=m.Report, delay=0.0, start=1, alarm=False)}
    swarm = make_swarm(attackers, founders=8, steps=6, seed=7, links=UNEVEN)
    one, other = swarm.keys[0], swarm.keys[3]
    swarm.plot.notes["one"] = one
    crash_when(swarm, other, lambda: has_voted_below(swarm, other))
    crash_when(swarm, one, lambda: get_peer(swarm, one).view.attempt > 0, lost=1.0)
    swarm.run(200.0, swarm.is_over)
    assert_unharmed(swarm)


# ---- A SEAL by another name


@dataclass(kw_only=True, eq=False)
class SealNamedCommit(SealTooLateForOne):
    """As that, and its SEAL says that it is a COMMIT."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Seal) or "hushed" in insider.notes:
            return sign
        insider.notes.update({"hushed": True, "seal": sign, "others": insider.others})
        named = insider.seal(replace(sign, phase=Phase.COMMIT, body=m.Commit(None, bytes(32), bytes(32))))
        some = (key for key in insider.others if key != insider.plot.notes["victim"])
        insider.send_later(4 - 2.6 * self.delay, some, named)
        return named


def test_who_crashes_goes_back_to_a_seal_that_the_first_member_calls_a_commit() -> None:
    """Two crash one after the other, between SEAL and COMMIT."""
    swarm = make_swarm({0: SealNamedCommit()}, founders=6, byzantine=1, steps=8, links=EVEN)
    swarm.plot.notes["victim"], leaver = swarm.keys[3], leave(swarm, 5)
    for key in swarm.keys[1:3]:
        crash_when(swarm, key, lambda key=key: is_sealed(swarm, key, 5))  # type: ignore[misc]
        swarm.run(swarm.world.now + 0.5)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 0)["complaint"]
    assert_others_go_on(swarm, [leaver])


# ---- Two ABORTs after a message that is not what it should be


@dataclass(kw_only=True, eq=False)
class TwoAborts(Attack):
    """Its ABORT right after ``notes["height"]`` names another root to the victims alone."""

    late: bool = False
    """Whether they get it a second after the others, and nobody hears it afterwards."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if not isinstance(sign.body, m.Abort) or notes.get("height") != sign.height - 1 or "right" in notes:
            return sign
        notes["right"], notes["astray"] = insider.seal(sign), insider.seal(sign, previous=OTHER)
        return notes["right"]

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes, victims = insider.notes, insider.plot.notes["victims"]
        if notes.get("hushed"):
            return ()
        if message != notes.get("right"):
            return ((to, message),)
        rest = tuple(key for key in to if key not in victims)
        if not self.late:
            return ((tuple(key for key in to if key in victims), notes["astray"]), (rest, message))
        notes["hushed"] = True
        insider.send_later(1.0, victims, notes["astray"])
        return ((rest, message),)


@dataclass(kw_only=True, eq=False)
class RevealNamedSeal(TwoAborts):
    """Its REVEAL says that it is a SEAL."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Reveal) or "height" in insider.notes:
            return super().on_body(insider, sign)
        insider.notes["height"] = sign.height
        return insider.seal(replace(sign, phase=Phase.SEAL, body=m.Seal(bytes(32))))


@dataclass(kw_only=True, eq=False)
class CommitOfOtherRoot(TwoAborts):
    """Its COMMIT after a SEAL names another root."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes = insider.notes
        if isinstance(sign.body, m.Seal):
            notes.setdefault("seal", sign.height)
        if not isinstance(sign.body, m.Commit) or notes.get("seal") != sign.height - 1:
            return super().on_body(insider, sign)
        notes["height"] = sign.height
        return insider.seal(sign, previous=OTHER)


@pytest.mark.parametrize(("founders", "byzantine", "victims"), [(6, 1, 1), (8, 2, 2), (11, 3, 4)])
def test_a_reveal_that_calls_itself_a_seal_costs_nobody_but_its_sender(
    founders: int, byzantine: int, victims: int
) -> None:
    attackers = {founders - index: Attack() for index in range(2, byzantine + 1)}
    attackers[founders - 1] = RevealNamedSeal(start=1)
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=6, links=EVEN)
    swarm.plot.notes["victims"] = swarm.keys[:victims]
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, founders - 1)["astray"]
    assert_unharmed(swarm)
    assert is_out(swarm, founders - 1), describe(swarm)


@pytest.mark.parametrize(("founders", "byzantine"), [(6, 1), (9, 2)])
def test_a_commit_of_another_root_costs_nobody_but_its_sender(founders: int, byzantine: int) -> None:
    attackers = {founders - index: Attack() for index in range(2, byzantine + 1)}
    attackers[founders - 1] = CommitOfOtherRoot()
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=8, links=EVEN)
    swarm.plot.notes["victims"], leaver = swarm.keys[:byzantine], leave(swarm, 2)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, founders - 1)["astray"]
    assert_others_go_on(swarm, [leaver])
    assert is_out(swarm, founders - 1), describe(swarm)


@pytest.mark.parametrize("links", [EVEN, Links(delta=1.0, low=0.1, high=0.6)])
def test_a_reveal_that_calls_itself_a_seal_does_not_divide_the_members(links: Links) -> None:
    """Another attacker is silent at ABORT, so that those who are not misled stay there."""
    attackers = {6: QuietFrom(first=m.Abort, start=1), 7: RevealNamedSeal(late=True, start=1)}
    swarm = make_swarm(attackers, founders=8, steps=6, links=links)
    swarm.plot.notes["victims"] = swarm.keys[:2]
    swarm.run(200.0, swarm.is_over)
    assert get_notes(swarm, 7)["astray"]
    assert_unharmed(swarm)


def test_a_reveal_that_calls_itself_a_seal_does_not_divide_the_members_while_one_is_out() -> None:
    swarm = make_swarm({5: RevealNamedSeal(late=True, start=1)}, founders=6, byzantine=1, steps=6, links=EVEN)
    swarm.plot.notes["victims"] = swarm.keys[:1]
    assert swarm.run(200.0, lambda: "right" in get_notes(swarm, 5))
    swarm.crash(swarm.keys[4])
    swarm.run(200.0, swarm.is_over)
    assert {*swarm.keys[:4]} <= swarm.finished, describe(swarm)
    gone = get_bans(swarm).keys() | {event.key for event in get_events(swarm, Removed)}
    assert gone == {*swarm.keys[4:]}, describe(swarm)
