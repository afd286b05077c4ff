"""Keys that are nobody's cost nothing, and what they are used for harms nobody: no crowded agenda, no excuse, no crash.

Nor is a cheat excused by leaving, by silence or by what only some were shown; and who is new gets in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_breaks import STEADY, assert_unharmed, describe, get_bans, get_events, get_notes, get_peer, is_out

from phalanx.attacks import Attack, Insider, Mail, combine
from phalanx.attacks.aggregation import Cover, QuietShift, ShiftedAggregate
from phalanx.attacks.base import change_body
from phalanx.attacks.broadcast import is_own
from phalanx.attacks.gradients import SignFlip
from phalanx.attacks.justice import NothingReceived, SilentVote
from phalanx.attacks.membership import (
    LastTrial,
    Leave,
    LongLeave,
    ReturnForNewcomer,
    Sacrifice,
    ShowsParts,
    TrialOfOtherStep,
)
from phalanx.attacks.strangers import (
    FirstInLine,
    FreeProofs,
    FriendProofs,
    GivesAway,
    GivesUp,
    HalfShownProof,
    ShiftWithFriend,
    SlowVote,
)
from phalanx.core import messages as m
from phalanx.core.config import Tolerance
from phalanx.core.effects import Sign
from phalanx.core.events import AttemptStarted, Waiting
from phalanx.core.membership import encode_view
from phalanx.core.messages import Message, Phase, Rule, Signed
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
    swarm.plot.make_stranger = swarm.signers[founders + joiners :].__getitem__
    for index in range(founders, founders + joiners):
        swarm.world.at(1.0, lambda index=index: swarm.start(index))  # type: ignore[misc]
    return swarm


def play(attackers: Mapping[int, Attack], *, until: float = 400.0, **options: Any) -> Swarm:
    """Run to the end, where honest peers are unharmed."""
    swarm = make_swarm(attackers, **options)
    swarm.run(until, swarm.is_over)
    assert_unharmed(swarm)
    return swarm


# ---- A trial that bears another step


def test_a_trial_of_another_step_breaks_no_checker() -> None:
    swarm = play({5: TrialOfOtherStep()}, founders=5, joiners=1, byzantine=1, steps=12)
    assert get_notes(swarm, 5)["other step"]
    assert not any(swarm.keys[5] in event.view.roster for event in get_events(swarm, AttemptStarted))


# ---- More accusations than fit


def test_proofs_against_a_stranger_do_not_excuse_a_wrong_aggregate() -> None:
    """Who has named more liars than fit is spared for its sums; strangers are no such liars."""
    attack = combine(ShiftedAggregate(start=1), FreeProofs(start=1))
    swarm = play({15: attack}, founders=16, strangers=1, byzantine=1, steps=4, until=60.0)
    assert [*get_bans(swarm)] == [swarm.keys[15]], describe(swarm)


def test_proofs_against_a_friend_do_not_excuse_a_wrong_aggregate() -> None:
    attackers = {15: combine(ShiftWithFriend(), FriendProofs()), 16: Attack()}
    swarm = play(attackers, founders=16, joiners=1, byzantine=1, steps=8, until=60.0)
    assert get_bans(swarm) == {swarm.keys[15]: Rule.SUM, swarm.keys[16]: Rule.MALFORMED}, describe(swarm)


# ---- Who let a wrong report pass


def test_proofs_against_strangers_do_not_save_an_accomplice() -> None:
    """If more go than there can be attackers then no accomplice goes; strangers do not count."""
    attackers = {
        5: combine(Cover(start=1, stop=2), Leave(start=2)),
        6: combine(QuietShift(start=1, stop=2), FreeProofs(start=2, count=3, keys=30)),
    }
    swarm = play(attackers, strangers=30, seed=7)  # the cover is drawn
    assert swarm.keys[6] in get_bans(swarm), describe(swarm)
    assert {*get_bans(swarm)} == {swarm.keys[5], swarm.keys[6]}, describe(swarm)


@pytest.mark.parametrize("silent", [7, 8])
def test_a_charge_is_not_forgotten_in_an_attempt_that_fails(silent: int) -> None:
    """The accomplice itself is silent, or a third attacker."""
    cover, moved = combine(Cover(start=1, stop=2), Leave(start=2)), QuietShift(start=1, stop=2)
    attackers: dict[int, Attack] = {6: cover, 7: moved, 8: Attack()}
    attackers[silent] = combine(attackers[silent], SilentVote(start=3))
    swarm = play(attackers, founders=11, byzantine=3, steps=6, seed=9)  # the cover is drawn
    assert get_notes(swarm, silent)["kept vote"]
    assert {*get_bans(swarm)} == {swarm.keys[6], swarm.keys[7]}, describe(swarm)


def test_who_leaves_at_once_is_an_accomplice_all_the_same() -> None:
    cover = combine(Cover(start=1, stop=2), Leave(start=2, stop=3))
    swarm = play({5: cover, 6: combine(QuietShift(start=1, stop=2), Leave(start=1, stop=2))})
    assert {*get_bans(swarm)} == {swarm.keys[5], swarm.keys[6]}, describe(swarm)


def test_an_accusation_that_some_cannot_see_saves_no_wrong_aggregate() -> None:
    """Whether its bearer is right nobody can say: it goes, and the step is taken again without it."""
    cover = combine(Cover(start=1, stop=2), Leave(start=2, stop=3))
    swarm = play({5: cover, 6: combine(QuietShift(start=1, stop=2), HalfShownProof(start=1, stop=2))}, strangers=1)
    assert get_notes(swarm, 6)["proof shown"]
    assert is_out(swarm, 6), describe(swarm)
    assert {event.view.failed for event in get_events(swarm, AttemptStarted) if event.view.step == 1} == {0, 1}


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


def test_checkers_that_deny_what_they_got_do_not_keep_a_joiner_out() -> None:
    attackers = dict.fromkeys((5, 6), NothingReceived())
    swarm = play(attackers, joiners=1, steps=60, until=2000.0, **TOLERANT)
    assert swarm.plot.notes["denied"] > 5
    assert swarm.keys[7] in get_peer(swarm, swarm.keys[0]).view.roster


# ---- Evidence that others push out

LEFT = 1
"""The step in which one leaves."""


def test_a_proof_is_kept_until_it_is_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many other proofs come in between; with so little room those of one step are enough."""
    monkeypatch.setattr("phalanx.core.peer._MOST_CASES", 100)
    early, crowd = FreeProofs(start=LEFT + 3, count=1), FreeProofs(start=LEFT + 4)  # the first: so that there is a vote
    teller = combine(crowd, GivesAway(start=LEFT + 3, stop=LEFT + 4))  # when no proof against it can be brought
    attackers = {7: LongLeave(start=LEFT), 8: teller, 9: early, 10: crowd, 11: crowd}
    swarm = play(attackers, founders=13, strangers=1, byzantine=5, steps=20, until=3000.0)
    assert get_notes(swarm, 8)["given up"]
    assert get_bans(swarm).get(swarm.keys[7]) is Rule.MALFORMED, describe(swarm)


# ---- Evidence that comes last


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


def test_proofs_cost_a_vote_no_time() -> None:
    """Nothing is to be computed for them, so nobody waits for that."""
    attackers = {6: SlowVote()} | dict.fromkeys((7, 8, 9), Attack())
    swarm = play(attackers, joiners=3, byzantine=1, steps=8, gradient_time=10.0, until=400.0)
    assert get_notes(swarm, 6)["voted late"]
    late = [(time, event.step) for time, event in swarm.events[swarm.keys[0]] if isinstance(event, Waiting)]
    started = {
        event.view.step: time
        for time, event in reversed(swarm.events[swarm.keys[0]])
        if isinstance(event, AttemptStarted)
    }
    assert [step for _, step in late][:2] == [3, 4], "it comes back at once after the first time"
    assert all(time - started[step] < 30.0 for time, step in late if step < 8), "two gradients, not one for each proof"


# ---- A bound that falls though somebody new came


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


@dataclass(kw_only=True, eq=False)
class GivesUpSuspended(GivesUp):
    """Shows everybody a malformed message of a friend that is suspended, once it is a member itself."""

    def find_friend(self, insider: Insider) -> bytes | None:
        gone = [x.key for x in insider.view.suspended if x.key in insider.plot.keys]
        return gone[0] if gone and insider.key in insider.view.roster else None


@pytest.mark.parametrize("harm", [Timeouts(), Complaints()])
def test_the_bound_does_not_fall_below_those_who_came_by_a_ban_of_an_old_key(harm: Attack) -> None:
    attackers = {4: LongLeave(start=1, steps=10**6), 5: combine(GivesUpSuspended(), harm)}
    swarm = play(attackers, founders=5, joiners=1, byzantine=1, steps=40, newcomer_probation=12)
    assert get_bans(swarm) == {swarm.keys[4]: Rule.MALFORMED}, describe(swarm)
    assert get_peer(swarm, swarm.keys[0]).view.bound == 1


def test_the_bound_remembers_who_came_when_it_was_as_high_as_may_be() -> None:
    attackers = {5: combine(ReturnForNewcomer(start=1, after_ban=True), Timeouts()), 6: Sacrifice(), 7: Timeouts()}
    swarm = play(attackers, joiners=1, steps=45, newcomer_probation=12)
    view = get_peer(swarm, swarm.keys[0]).view
    assert [*get_bans(swarm)] == [swarm.keys[6]], describe(swarm)
    assert {swarm.keys[5], swarm.keys[7]} <= {*view.roster}
    assert view.bound == 2


# ---- A probationer that is dropped while it is checked


@pytest.mark.parametrize("missed", [12, 14])
def test_who_checks_a_probationer_that_is_dropped_is_not_banned_for_it(missed: int) -> None:
    """So many may be missed where few deny what they got, or where many do."""
    settings = TOLERANT | {"newcomer_probation": 5, "probation": 5}
    attackers = {6: ShowsParts(), 7: LastTrial(missed=missed)}
    play(attackers, joiners=1, byzantine=1, steps=22, **settings)
