"""Attacks that turn what the rules allow against honest peers: nobody honest goes, and the run comes to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from torch import Tensor

from phalanx.attacks import ATTACKS, Attack, Insider, combine
from phalanx.attacks.aggregation import FalseReport, FriendsMissing, HiddenPart, PartForValidators
from phalanx.attacks.broadcast import Silent
from phalanx.attacks.framing import (
    AggregateForOne,
    EdgeLie,
    HalfShownCharge,
    LateAccuser,
    LateDenial,
    LateOpening,
    Override,
    ReportForOne,
    SelfAccuser,
)
from phalanx.attacks.gradients import NonFiniteParts
from phalanx.attacks.membership import CertificateForSome, Leave, OneByOne
from phalanx.attacks.slow_path import LongBodies, LongEndorsements, MixedItem, RevealForSome
from phalanx.core import messages as m
from phalanx.core.conclusion import make_confirm
from phalanx.core.config import Tolerance
from phalanx.core.effects import ComputeReport, Sign
from phalanx.core.events import AttemptStarted, Banned, Halted, Removed, RunFinished, StepFinished
from phalanx.core.membership import View
from phalanx.core.messages import Phase, Rule, Signed
from phalanx.core.peer import Peer, compute_case_digest
from phalanx.core.verification import Projections
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


# ---- Who let a lie about its aggregate pass


@pytest.mark.parametrize("share", [0.6, 1.0, 1.5, 2.5, 4.0, 10.0])
def test_nobody_honest_is_banned_for_a_lie_on_the_edge(share: float) -> None:
    swarm = play({6: EdgeLie(share=share)}, steps=6)
    assert get_notes(swarm, 6)["lied"]


def test_nobody_honest_is_banned_for_a_lie_of_one_who_vanishes() -> None:
    """The lie is in REPORT; without a CONFIRM of the liar the attempt is repeated, and nobody got to accuse."""
    swarm = play({6: combine(FalseReport(start=2), Silent(phases=(Phase.CONFIRM,), start=2))})
    assert is_out(swarm, 6)


def test_who_has_accused_a_liar_is_not_blamed_for_its_lie_later() -> None:
    swarm = play({5: LateAccuser(), 6: FalseReport(start=2)}, founders=9, byzantine=3)
    assert get_bans(swarm)[swarm.keys[6]] is Rule.REPORT
    assert get_notes(swarm, 5)["accused late"]


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


def test_who_alone_has_seen_a_report_is_not_banned_for_accusing() -> None:
    swarm = play({6: ReportForOne(start=1)})
    assert get_notes(swarm, 6)["report shown"]
    assert is_out(swarm, 6)


@pytest.mark.parametrize("after", [1.6, 2.6, 3.3, 3.6, 3.8])
def test_who_alone_has_an_aggregate_is_not_banned_for_accusing(after: float) -> None:
    swarm = play({6: AggregateForOne(start=1, after=after)}, links=QUICK)
    assert get_notes(swarm, 6)["aggregate shown"]


# ---- Parts that are hidden where results may differ a little

TOLERANT: dict[str, Any] = {"steps": 40, "rounding": 1e-6, "tolerance": Tolerance(1e-4, 1e-2), "seed": 3}


def test_a_wrong_aggregate_is_not_covered_by_a_part_that_nobody_may_see() -> None:
    honest = play({6: Attack()}, until=2000.0, **TOLERANT)
    swarm = play({6: HiddenPart(shift=5.0, start=1)}, until=2000.0, **TOLERANT)
    assert is_out(swarm, 6), describe(swarm)
    assert float((get_state(swarm) - get_state(honest)).norm()) < 1.0


def test_a_validator_is_not_banned_for_what_it_alone_was_shown() -> None:
    swarm = play({6: PartForValidators(start=1)}, until=2000.0, **TOLERANT)
    assert get_notes(swarm, 6)["shown to validators"]


# ---- Parts that come late


@pytest.mark.parametrize("early", [0.0, 0.2, 0.4, 0.6, 1.0, 2.0])
def test_an_aggregator_that_could_not_get_a_part_in_time_stays(early: float) -> None:
    swarm = play({6: LateOpening(start=1, stop=3, early=early)}, steps=5, links=QUICK)
    assert get_notes(swarm, 6)["opened late"]
    assert get_most_attempts(swarm) < 8


def test_late_parts_in_every_step_do_not_empty_the_roster() -> None:
    swarm = play({6: LateOpening(start=1)}, steps=12, links=QUICK, until=600.0, paired=1)
    assert get_notes(swarm, 6)["opened late"]
    assert get_most_attempts(swarm) < 8


def test_no_step_is_repeated_for_ever() -> None:
    swarm = play({4: LateDenial(start=1)}, founders=5, byzantine=1, steps=12, links=QUICK, until=600.0, paired=1)
    assert get_notes(swarm, 4)["opened late"]
    assert get_most_attempts(swarm) < 8


def get_most_attempts(swarm: Swarm) -> int:
    views: list[View] = [event.view for event in get_events(swarm, AttemptStarted)]
    return 1 + max(view.failed for view in views)


# ---- Evidence that not all have, in a slow path


def test_evidence_that_some_lack_does_not_halt_a_slow_path() -> None:
    links = Links(delta=1.0, low=0.2, high=0.22)
    swarm = play({4: HalfShownCharge(start=1)}, founders=5, byzantine=1, steps=6, links=links)
    assert get_notes(swarm, 4)["charge shown"]
    assert get_notes(swarm, 4)["opened at vote"]


# ---- A certificate instead of a message


@pytest.mark.parametrize("victims", [1, 2, 3, 4])
def test_who_goes_on_by_a_certificate_is_at_one_with_the_others(victims: int) -> None:
    attackers = {5: Leave(start=2), 6: CertificateForSome(start=2, victims=victims)}
    swarm = play(attackers, steps=6, links=QUICK)
    assert get_notes(swarm, 6)["certificate shown"]


@pytest.mark.parametrize("victims", [1, 2])
def test_who_goes_on_by_a_certificate_of_one_who_leaves_is_at_one_with_the_others(victims: int) -> None:
    attackers = {4: combine(Leave(start=2), CertificateForSome(start=2, victims=victims))}
    swarm = play(attackers, founders=5, byzantine=1, steps=6, links=QUICK)
    assert get_notes(swarm, 4)["certificate shown"]


# ---- An item of a slow path that mixes what does not belong together


def test_an_item_of_votes_and_something_else_breaks_nobody() -> None:
    swarm = play({4: MixedItem(start=1)}, founders=5, byzantine=1, steps=5, wire=True)
    assert get_notes(swarm, 4)["mixed"]


# ---- A case in the place of another


def test_an_accusation_does_not_replace_the_case_of_one_who_left() -> None:
    attackers = {6: Override(), 7: Override(), 8: Override(), 9: ATTACKS["hit_and_leave"](start=2)}
    tolerant: dict[str, Any] = {"rounding": 1e-6, "tolerance": Tolerance(1e-4, 1e-2)}  # there all look at what it left
    swarm = make_swarm(attackers, founders=14, byzantine=4, steps=10, seed=2, **tolerant)
    swarm.run(900.0, swarm.is_over)
    assert_unharmed(swarm)
    assert swarm.plot.notes["overridden"]
    assert get_bans(swarm).get(swarm.keys[9]) is Rule.GRADIENT, describe(swarm)


# ---- Gossip that is long


def weigh(thing: Any) -> int:
    """The bytes of all messages in it."""
    if isinstance(thing, msgspec.Struct):
        return len(msgspec.msgpack.encode(thing))
    if isinstance(thing, Mapping):
        return sum(map(weigh, thing.values()))
    return sum(map(weigh, thing)) if isinstance(thing, Iterable) and not isinstance(thing, bytes | str) else 0


def test_gossip_of_one_member_takes_little_memory_whatever_is_long_in_it() -> None:
    attack = LongEndorsements(start=1, count=60, length=250_000)
    swarm = make_swarm({3: attack}, founders=4, byzantine=1, steps=3, wire=True, links=QUICK)
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
    assert get_notes(swarm, 3)["long gossip"]
    assert_unharmed(swarm)
    assert most < 64 << 20


# ---- Many who name one another


@pytest.mark.long
def test_more_parts_unopened_than_a_message_holds_break_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.core.opening.ask_part", lambda *_: ())  # millions of requests that nobody could answer
    attackers = dict.fromkeys(range(35, 68), FriendsMissing())
    play(attackers, founders=68, byzantine=33, steps=1, size=256, links=STEADY, until=100.0)


# ---- Many who leave one by one


@pytest.mark.long
def test_more_suspects_than_a_vote_holds_break_nobody() -> None:
    attackers = dict.fromkeys(range(33, 64), OneByOne(start=2))
    play(attackers, founders=64, byzantine=31, steps=5, size=128, links=STEADY)


# ---- Long bodies in a slow path


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
        return super().is_active(insider) and insider.key in insider.crew[:-1]


@dataclass(kw_only=True, eq=False)
class LastLies(SelfAccuser):
    """The last of the plot lies about the aggregates of ``victims``, by ``share`` of tau."""

    share: float
    victims: int | None = None
    accuses: bool = False

    def is_active(self, insider: Insider) -> bool:
        return self.has_lied(insider) or (super().is_active(insider) and insider.key in insider.crew[-1:])

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        if self.has_lied(insider):
            return projections
        count = len(effect.parts)
        parts = sorted(map(insider.view.roster.index, insider.honest[: self.victims]))
        self.note_lie(insider, *parts)
        insider.plot.notes["lied"] = True
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
