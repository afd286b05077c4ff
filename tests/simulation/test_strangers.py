"""Keys that are nobody's cost nothing, and what they are used for harms nobody: no crowded agenda, no excuse, no crash.

Nor is a cheat excused by leaving, by silence or by what only some were shown; and who is new gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_breaks import STEADY, assert_unharmed, describe, get_bans, get_events, get_notes, get_peer
from torch import Tensor

from phalanx.attacks import Attack, Insider, Mail, combine
from phalanx.attacks.aggregation import CoveredAggregate, ShiftedAggregate
from phalanx.attacks.base import change_body, forge, note_case
from phalanx.attacks.broadcast import is_own
from phalanx.attacks.gradients import SignFlip
from phalanx.attacks.membership import Leave
from phalanx.core import messages as m
from phalanx.core.config import Tolerance
from phalanx.core.crypto import Domain, Signer
from phalanx.core.effects import ComputeAggregate, Delivery, Sign
from phalanx.core.envelope import open_body, seal
from phalanx.core.events import AttemptStarted
from phalanx.core.membership import encode_view
from phalanx.core.messages import MAX_CASES, Message, Phase, Rule, Signed, Verdict
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm


def make_swarm(
    attackers: Mapping[int, Attack],
    *,
    founders: int = 7,
    joiners: int = 0,
    strangers: int = 0,
    seed: int = 1,
    links: Links = STEADY,
    rounding: float = 0.0,
    wire: bool = False,
    **settings: Any,
) -> Swarm:
    """A swarm whose joiners begin after a second. Attackers have the keys of strangers, who never begin."""
    usual = {"byzantine": 2, "steps": 10, "size": 64, "tau": 1.0, "cap": 100.0}
    setup = Setup(
        founders=founders,
        joiners=joiners + strangers,
        settings=usual | settings,
        attackers=attackers,
        rounding=rounding,
        wire=wire,
    )
    swarm = Swarm(setup, seed, replace(links), keep_events=True)
    swarm.plot.notes["strangers"] = swarm.signers[founders + joiners :]
    for index in range(founders, founders + joiners):
        swarm.world.at(1.0, lambda index=index: swarm.start(index))  # type: ignore[misc]
    return swarm


def play(attackers: Mapping[int, Attack], *, until: float = 400.0, **options: Any) -> Swarm:
    """Run to the end, where honest peers are unharmed."""
    swarm = make_swarm(attackers, **options)
    swarm.run(until, swarm.is_over)
    assert_unharmed(swarm)
    return swarm


def make_malformed(insider: Insider, signer: Signer, *words: bytes, height: int = 1) -> Signed:
    """Signed bytes that are no body; each time others, if the words are."""
    place = (insider.config.run, height, 0, 0, Phase.COMMIT, signer.key, bytes(32))
    return forge(signer, Signed(Domain.AGREED, *place, b"".join((b"\xc1", *words)), bytes(64)))


@dataclass(kw_only=True, eq=False)
class FreeProofs(Attack):
    """Brings ``count`` true proofs against strangers in each attempt."""

    count: int = MAX_CASES
    keys: int = 1
    """How many of the strangers it takes, in turn; beginning with the one at ``first``."""
    first: int = 0

    def get_signer(self, insider: Insider, number: int) -> Signer:
        signer: Signer = insider.plot.notes["strangers"][self.first + number % self.keys]
        return signer

    def is_fit(self, digest: bytes) -> bool:
        """Whether a case of this digest is worth bringing."""
        return True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm):
            return sign
        digests: list[bytes] = []
        number = insider.notes.get("number", 0)
        while len(digests) < self.count:
            signer = self.get_signer(insider, number)
            case = m.MalformedBody(make_malformed(insider, signer, number.to_bytes(8, "little"), insider.key[:4]))
            number += 1
            digest = note_case(insider, case)
            if self.is_fit(digest):
                insider.notes["case", digest] = case
                digests.append(digest)
        insider.notes["number"] = number
        return change_body(sign, accusations=tuple(digests))

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, m.PullProof) and delivery.sender is not None:
            case = insider.notes.get(("case", delivery.message.case))
            if case is not None:
                insider.send_later(0.0, (delivery.sender,), case)
        return delivery


@dataclass(kw_only=True, eq=False)
class Moved(ShiftedAggregate):
    """A wrong aggregate; it accuses nobody of covering it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, accusations=()) if isinstance(sign.body, m.Confirm) else sign


@dataclass(kw_only=True, eq=False)
class Cover(CoveredAggregate):
    """Its report makes the sums right for all in the plot; its own aggregate is true."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        return result

    def _find_covered(self, insider: Insider) -> list[int]:
        view, notes = insider.view, insider.plot.notes
        return [part for part in range(len(view.roster)) if ("moved", view.step, view.attempt, part) in notes]


# ---- A trial that bears another step


@dataclass(kw_only=True, eq=False)
class OtherStep(Attack):
    """On probation it commits to nothing that it computed, and says that this was in another step."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Trial):
            return sign
        insider.notes["lied"] = True
        place = (sign.height, sign.step + 7, sign.attempt, sign.phase, sign.previous)
        return seal(insider.signer, insider.config.run, *place, m.Trial(b"x" * 32))


def test_a_trial_of_another_step_breaks_no_checker() -> None:
    swarm = play({5: OtherStep()}, founders=5, joiners=1, byzantine=1, steps=12)
    assert get_notes(swarm, 5)["lied"]
    assert not any(swarm.keys[5] in event.view.roster for event in get_events(swarm, AttemptStarted))


# ---- More accusations than fit


def test_proofs_against_a_stranger_do_not_excuse_a_wrong_aggregate() -> None:
    """Who has named more liars than fit is spared for its sums; strangers are no such liars."""
    attack = combine(ShiftedAggregate(start=1), FreeProofs(start=1))
    swarm = play({15: attack}, founders=16, strangers=1, byzantine=1, steps=4, until=60.0)
    assert [*get_bans(swarm)] == [swarm.keys[15]], describe(swarm)


def has_friend(insider: Insider) -> bool:
    """Whether a friend is on probation, or has been."""
    for candidate in insider.view.candidates:
        if candidate.key in insider.plot.keys:
            insider.notes["friend"] = candidate.key
    return "friend" in insider.notes


@dataclass(kw_only=True, eq=False)
class MovedWithFriend(ShiftedAggregate):
    """A wrong aggregate in each attempt from when a friend is on probation."""

    def is_active(self, insider: Insider) -> bool:
        return has_friend(insider)


@dataclass(kw_only=True, eq=False)
class FriendProofs(FreeProofs):
    """From then on proofs against this friend, which are no stranger's."""

    def is_active(self, insider: Insider) -> bool:
        return has_friend(insider)

    def get_signer(self, insider: Insider, number: int) -> Signer:
        return insider.plot.signers[insider.notes["friend"]]


def test_proofs_against_a_friend_do_not_excuse_a_wrong_aggregate() -> None:
    attackers = {15: combine(MovedWithFriend(), FriendProofs()), 16: Attack()}
    swarm = play(attackers, founders=16, joiners=1, byzantine=1, steps=8, until=60.0)
    assert get_bans(swarm) == {swarm.keys[15]: Rule.SUM, swarm.keys[16]: Rule.MALFORMED}, describe(swarm)


# ---- Who let a wrong report pass


def test_proofs_against_strangers_do_not_save_an_accomplice() -> None:
    """If more go than there can be attackers then no accomplice goes; strangers do not count."""
    attackers = {
        5: combine(Cover(start=1, stop=2), Leave(start=2)),
        6: combine(Moved(start=1, stop=2), FreeProofs(start=2, count=3, keys=30)),
    }
    swarm = play(attackers, strangers=30)
    assert swarm.keys[6] in get_bans(swarm), describe(swarm)
    assert {*get_bans(swarm)} == {swarm.keys[5], swarm.keys[6]}, describe(swarm)


@dataclass(kw_only=True, eq=False)
class SilentVote(Attack):
    """Once it does not send its VOTE: in the first attempt in which an honest member accuses."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes, view = insider.notes, insider.view
        if sign.phase is not Phase.VOTE or "silent" in notes or notes.get("charged") != (view.step, view.attempt):
            return sign
        notes["silent"] = True
        return None

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if isinstance(message, Signed) and message.sender in insider.honest and message.phase is Phase.CONFIRM:
            body = open_body(message) if message.domain is Domain.AGREED else None
            if isinstance(body, m.Confirm) and body.accusations:
                insider.notes["charged"] = insider.view.step, insider.view.attempt
        return delivery


@pytest.mark.parametrize("silent", [7, 8])
def test_a_charge_is_not_forgotten_in_an_attempt_that_fails(silent: int) -> None:
    """The accomplice itself is silent, or a third attacker."""
    cover, moved = combine(Cover(start=1, stop=2), Leave(start=2)), Moved(start=1, stop=2)
    attackers: dict[int, Attack] = {6: cover, 7: moved, 8: Attack()}
    attackers[silent] = combine(attackers[silent], SilentVote(start=3))
    swarm = play(attackers, founders=9, byzantine=3)
    assert get_notes(swarm, silent)["silent"]
    assert {*get_bans(swarm)} == {swarm.keys[6], swarm.keys[7]}, describe(swarm)


@dataclass(kw_only=True, eq=False)
class HalfShownProof(FreeProofs):
    """Shows its evidence to three honest members, so late that they cannot pass it on."""

    count: int = 1

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, notes = delivery.message, insider.notes
        if not isinstance(message, m.PullProof) or ("case", message.case) not in notes:
            return delivery
        if ("shown", message.case) not in notes:
            notes["shown", message.case] = notes["shown"] = True
            insider.send_later(1.8 * insider.config.delta, insider.honest[:3], notes["case", message.case])
        return None


def test_who_leaves_at_once_is_an_accomplice_all_the_same() -> None:
    cover = combine(Cover(start=1, stop=2), Leave(start=2, stop=3))
    swarm = play({5: cover, 6: combine(Moved(start=1, stop=2), Leave(start=1, stop=2))})
    assert {*get_bans(swarm)} == {swarm.keys[5], swarm.keys[6]}, describe(swarm)


def test_an_accusation_that_some_cannot_see_excuses_no_accomplice() -> None:
    cover = combine(Cover(start=1, stop=2), Leave(start=2, stop=3))
    swarm = play({5: cover, 6: combine(Moved(start=1, stop=2), HalfShownProof(start=1, stop=2))}, strangers=1)
    assert get_notes(swarm, 6)["shown"]
    assert {*get_bans(swarm)} == {swarm.keys[5], swarm.keys[6]}, describe(swarm)


# ---- The list of the banned


def test_proofs_against_strangers_do_not_make_the_view_long() -> None:
    """A view that is too long cannot be read by who joins."""
    steps, when, half = 60, 36, 2100
    attackers = {5 + place: FreeProofs(keys=half, first=1 + place * half) for place in range(2)}
    swarm = make_swarm(attackers, strangers=1 + 2 * half, steps=steps, newcomer_probation=6, wire=True)
    founders = swarm.honest
    swarm.run(400.0, lambda: min(get_peer(swarm, key).view.step for key in founders) >= when)
    assert len(encode_view(get_peer(swarm, founders[0]).view)) < 4096
    swarm.start(7)
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert {*get_bans(swarm)} == swarm.byzantine
    assert swarm.keys[7] in get_peer(swarm, founders[0]).view.roster


# ---- Who is on probation where results may differ a little

TOLERANT: dict[str, Any] = {"rounding": 1e-6, "tolerance": Tolerance(1e-4, 1e-2)}


@dataclass(kw_only=True, eq=False)
class NothingReceived(Attack):
    """Says of each probationer that it checks that it got nothing."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Report):
            return sign
        roster, findings = insider.view.roster, sign.body.findings
        lies = tuple(x if x.target in roster else m.Finding(x.target, Verdict.NOT_RECEIVED) for x in findings)
        insider.plot.notes["lies"] = insider.plot.notes.get("lies", 0) + (lies != findings)
        return change_body(sign, findings=lies)


def test_checkers_that_deny_what_they_got_do_not_keep_a_joiner_out() -> None:
    attackers = dict.fromkeys((5, 6), NothingReceived())
    swarm = play(attackers, joiners=1, steps=60, until=2000.0, **TOLERANT)
    assert swarm.plot.notes["lies"] > 5
    assert swarm.keys[7] in get_peer(swarm, swarm.keys[0]).view.roster


# ---- Evidence that others push out

LEFT = 1
"""The step in which one leaves."""


@dataclass(kw_only=True, eq=False)
class LeavesForLong(Attack):
    """Leaves, and asks to join again when all have long forgotten it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, leaving=True) if isinstance(sign.body, m.Confirm) and sign.step == LEFT else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        joins = isinstance(message, Signed) and message.domain is Domain.JOIN
        return () if joins and insider.view.step < LEFT + 11 else ((to, message),)


@dataclass(kw_only=True, eq=False)
class GivesAway(Attack):
    """Shows everybody a malformed message of the one who left, when no proof against it can be brought."""

    left: int = 7

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Vote) and sign.step == LEFT + 3:
            signer = insider.plot.signers[insider.config.founders[self.left]]
            insider.send_later(0.0, insider.honest, make_malformed(insider, signer, height=sign.height))
            insider.notes["shown"] = True
        return sign


def test_a_proof_is_kept_until_it_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many other proofs come in between; with so little room those of one step are enough."""
    monkeypatch.setattr("phalanx.core.peer._MOST_CASES", 100)
    early, crowd = FreeProofs(start=LEFT + 3, count=1), FreeProofs(start=LEFT + 4)  # the first: so that there is a vote
    attackers = {7: LeavesForLong(), 8: combine(crowd, GivesAway()), 9: early, 10: crowd, 11: crowd}
    swarm = play(attackers, founders=12, strangers=1, byzantine=5, steps=20, until=3000.0)
    assert get_notes(swarm, 8)["shown"]
    assert get_bans(swarm).get(swarm.keys[7]) is Rule.MALFORMED, describe(swarm)


# ---- Evidence that comes last


@dataclass(kw_only=True, eq=False)
class FirstInLine(FreeProofs):
    """Whenever an honest member checks a friend it brings proofs that sort before those of others, and passes none on.

    Who is asked for all of them is asked for its own last.
    """

    def is_active(self, insider: Insider) -> bool:
        plot = insider.plot.keys
        return super().is_active(insider) and any(
            check.target in plot and check.checker not in plot for check in insider.duties.checks
        )

    def is_fit(self, digest: bytes) -> bool:
        return digest[0] < 8

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if isinstance(message, m.Accusation) else ((to, message),)


def test_an_accuser_can_show_its_evidence_after_that_of_all_others() -> None:
    byzantine: set[bytes] = set()
    links = Links(delta=1.0, route=lambda _, *ends: 0.01 if byzantine.intersection(ends[:2]) else 0.9)
    crowd = FirstInLine(start=2)
    attackers = {7: combine(SignFlip(start=1), crowd)} | dict.fromkeys(range(8, 12), crowd)
    swarm = make_swarm(attackers, founders=12, strangers=1, byzantine=5, steps=12, links=links)
    byzantine |= swarm.byzantine
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert {*get_bans(swarm)} == swarm.byzantine


# ---- Votes on proofs


@dataclass(kw_only=True, eq=False)
class SlowVote(FreeProofs):
    """Brings proofs against a friend on probation, and votes as late as if each took a gradient."""

    def is_active(self, insider: Insider) -> bool:
        return any(x.key in insider.plot.keys for x in insider.view.candidates)

    def get_signer(self, insider: Insider, number: int) -> Signer:
        friend = next(x.key for x in insider.view.candidates if x.key in insider.plot.keys)
        return insider.plot.signers[friend]

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        own = isinstance(message, Signed) and is_own(insider, message, (Phase.VOTE,))
        if not isinstance(message, Signed) or not own or ("late", message.height) in insider.notes:
            return ((to, message),)
        insider.notes["late", message.height] = insider.notes["late"] = True
        insider.withhold(message)
        insider.send_later((1 + MAX_CASES) * insider.config.gradient_time, to, message)
        return ()


def test_proofs_cost_a_vote_no_time() -> None:
    """Nothing is to be computed for them, so nobody waits for that."""
    attackers = {6: SlowVote()} | dict.fromkeys((7, 8, 9), Attack())
    swarm = play(attackers, joiners=3, byzantine=1, steps=8, gradient_time=10.0, until=200.0)
    assert get_notes(swarm, 6)["late"]


# ---- A bound that falls though somebody new came


@dataclass(kw_only=True, eq=False)
class Returns(Attack):
    """Leaves in step 1, and asks to join again when a friend with a new key is a member, and ``lost`` is banned."""

    lost: int | None = None

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, leaving=True) if isinstance(sign.body, m.Confirm) and sign.step == 1 else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        view, founders = insider.view, insider.config.founders
        ready = has_newcomer(insider) and (self.lost is None or founders[self.lost] in view.banned)
        joins = isinstance(message, Signed) and message.domain is Domain.JOIN
        return () if joins and not ready else ((to, message),)


def has_newcomer(insider: Insider) -> bool:
    """Whether one of the plot that is no founder is a member."""
    return any(key in insider.plot.keys and key not in insider.config.founders for key in insider.view.roster)


@dataclass(kw_only=True, eq=False)
class GivesUp(Attack):
    """Shows everybody a malformed message of the friend with the old key as soon as that is on probation."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        friends = [x.key for x in insider.view.candidates if x.key in insider.plot.keys and x.key != insider.key]
        if isinstance(sign.body, m.Reveal) and friends and "shown" not in insider.notes:
            insider.notes["shown"] = True
            bad = make_malformed(insider, insider.plot.signers[friends[0]], height=sign.height)
            insider.send_later(0.0, insider.honest, bad)
        return sign


def is_outnumbering(insider: Insider) -> bool:
    """Whether more of the plot are members than the bound says."""
    return sum(key in insider.plot.keys for key in insider.view.roster) > insider.view.bound


@dataclass(kw_only=True, eq=False)
class Timeouts(Attack):
    """Says that an honest member was silent, if the word of the plot is more than the bound."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        yield to, message
        if is_outnumbering(insider) and isinstance(message, Signed) and is_own(insider, message, (Phase.REVEAL,)):
            yield to, insider.seal_again(message, m.Timeout(insider.honest[:1], 0, None))


@dataclass(kw_only=True, eq=False)
class Complaints(Attack):
    """Says that an honest member opened nothing, if the word of the plot is more than the bound."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not is_outnumbering(insider) or not isinstance(sign.body, m.Aggregate):
            return sign
        owner = next(i for i, key in enumerate(insider.view.roster) if key in insider.duties.contributors)
        if sign.phase is Phase.AGGREGATE:
            return change_body(sign, result=None, missing=(owner,))
        return change_body(sign, unopened=((owner, insider.index),))


@pytest.mark.parametrize("harm", [Timeouts(), Complaints()])
def test_the_bound_does_not_fall_below_those_who_came_by_a_ban_of_an_old_key(harm: Attack) -> None:
    attackers = {4: Returns(), 5: combine(GivesUp(), harm)}
    swarm = play(attackers, founders=5, joiners=1, byzantine=1, steps=40, newcomer_probation=12)
    assert get_bans(swarm) == {swarm.keys[4]: Rule.MALFORMED}, describe(swarm)
    assert get_peer(swarm, swarm.keys[0]).view.bound == 1


@dataclass(kw_only=True, eq=False)
class Sacrifice(Attack):
    """Lets itself be banned once a friend with a new key is a member."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return insider.seal_bytes(sign, b"\xc1") if sign.phase is Phase.REVEAL and has_newcomer(insider) else sign


def test_the_bound_remembers_who_came_when_it_was_as_high_as_may_be() -> None:
    attackers = {5: combine(Returns(lost=6), Timeouts()), 6: Sacrifice(), 7: Timeouts()}
    swarm = play(attackers, joiners=1, steps=45, newcomer_probation=12)
    view = get_peer(swarm, swarm.keys[0]).view
    assert [*get_bans(swarm)] == [swarm.keys[6]], describe(swarm)
    assert {swarm.keys[5], swarm.keys[7]} <= {*view.roster}
    assert view.bound == 2


# ---- A probationer that is dropped while it is checked


@dataclass(kw_only=True, eq=False)
class LastTrial(Attack):
    """Serves in two steps only, after it ``missed`` so many: first with nothing, then with a wrong gradient."""

    missed: int

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return -gradient

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, Signed) and message.domain is Domain.TRIAL:
            since = next((x.since for x in insider.view.candidates if x.key == insider.key), None)
            served = None if since is None else message.step - since - self.missed
            if served == 0:
                return ((to, insider.seal_again(message, m.Trial(b"x" * 32))),)
            return ((to, message),) if served == 1 else ()
        if isinstance(message, m.PartChunk):
            insider.plot.notes.setdefault("parts", {})[message.step, message.attempt, message.part] = message
            return ()
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class ShowsParts(Attack):
    """Shows who checks a probationer in the plot what it committed to."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, sender = delivery.message, delivery.sender
        if isinstance(message, m.PullPart) and message.owner not in insider.view.roster and sender is not None:
            part = insider.plot.notes.get("parts", {}).get((message.step, message.attempt, message.part))
            if part is not None:
                insider.plot.notes["shown"] = True
                insider.send_later(0.0, (sender,), part)
        return delivery


@pytest.mark.parametrize("missed", [12, 14])
def test_who_checks_a_probationer_that_is_dropped_is_not_banned_for_it(missed: int) -> None:
    """So many may be missed where few deny what they got, or where many do."""
    settings = TOLERANT | {"newcomer_probation": 5, "probation": 5}
    attackers = {6: ShowsParts(), 7: LastTrial(missed=missed)}
    play(attackers, joiners=1, byzantine=1, steps=22, **settings)
