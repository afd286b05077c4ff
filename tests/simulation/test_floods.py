"""What one peer can make others keep, compute or send has limits, and those who come are not crowded out.

Floods of messages, keys that keep places they do not use, and chains that are longer than a message.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_breaks import STEADY, assert_unharmed, get_events, get_notes, get_peer
from test_strangers import make_swarm, play

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.base import change_body
from phalanx.core import handlers
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Effect, Sign
from phalanx.core.events import AttemptStarted, Removed, SlowPath
from phalanx.core.messages import MAX_LINKS, Message, Phase, Signed
from phalanx.network.simulated import USUAL
from phalanx.simulation.swarm import Swarm

FIVE: dict[str, Any] = {"founders": 5, "byzantine": 1}


def is_join(message: Message) -> bool:
    return isinstance(message, Signed) and message.domain is Domain.JOIN


def is_commit(message: Message) -> bool:
    return isinstance(message, Signed) and message.phase is Phase.COMMIT


# ---- Gossip while there is nothing to gossip about


@dataclass(kw_only=True, eq=False)
class ManyGossips(Attack):
    """Sends the first honest member much gossip at once, with one item in each or none."""

    count: int
    items: int

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        said = next(reversed(insider.heard.values()))
        items = (m.Relay((said,), ()),) * self.items
        for _ in range(self.count):
            insider.send_later(0.0, insider.honest[:1], m.Gossip(insider.view.height + 1, 0, items, ()))
        insider.notes["flooded"] = True
        return ()


def count_gossip(swarm: Swarm, key: bytes, sender: bytes) -> int:
    return sum(len(piles.get(sender, ())) for piles in get_peer(swarm, key).gossip.values())


def test_gossip_that_says_nothing_is_not_kept() -> None:
    swarm = make_swarm({4: ManyGossips(start=1, stop=2, count=500, items=0)}, steps=3, **FIVE)
    kept = 0

    def watch() -> bool:
        nonlocal kept
        kept = max(kept, count_gossip(swarm, swarm.keys[0], swarm.keys[4]))
        return swarm.is_over()

    swarm.run(400.0, watch)
    assert get_notes(swarm, 4)["flooded"]
    assert_unharmed(swarm)
    assert kept == 0


def test_each_message_of_gossip_is_weighed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again with each that comes after it: a flood would cost its square."""
    weighed, weigh = 0, handlers.weigh_items

    def count(items: Iterable[m.Relay]) -> int:
        nonlocal weighed
        weighed += 1
        return weigh(items)

    monkeypatch.setattr(handlers, "weigh_items", count)
    swarm = play({4: ManyGossips(start=1, stop=2, count=500, items=1)}, steps=3, **FIVE)
    assert get_notes(swarm, 4)["flooded"]
    assert 500 <= weighed < 1000


# ---- Places that are taken and not used


@dataclass(kw_only=True, eq=False)
class LeavesAndAsks(Attack):
    """Leaves in good order; then it asks to come back, and does nothing else."""

    at: int

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, leaving=True) if isinstance(sign.body, m.Confirm) and sign.step == self.at else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return ((to, message),) if insider.index is not None or is_join(message) else ()


def test_members_that_ask_to_come_back_and_do_not_show_up_are_out_for_longer_each_time() -> None:
    """They take no place of a newcomer, and what they can hold up grows with the logarithm of the steps."""
    attackers = {6: LeavesAndAsks(at=1), 7: LeavesAndAsks(at=2)}
    swarm = play(attackers, founders=8, joiners=1, steps=60, newcomer_probation=12)
    views = [event.view for event in get_events(swarm, AttemptStarted)]
    assert swarm.keys[8] in views[-1].roster
    assert {swarm.keys[8]} == {candidate.key for view in views for candidate in view.candidates}
    for key in swarm.keys[6:8]:
        gone = sorted({event.step for event in get_events(swarm, Removed) if event.key == key})
        assert len(gone) > 1, "they do come back"
        for count, (first, second) in enumerate(itertools.pairwise(gone), 1):
            assert second - first >= (1, 4, 8, 16, 32)[count - 1]
    assert len({(event.step, event.attempt) for event in get_events(swarm, SlowPath)}) <= 10


# ---- A chain that is longer than a message


@dataclass(kw_only=True, eq=False)
class Guest(Attack):
    """Honest in all it computes; leaves once it is a member, and does not come back."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, leaving=True) if isinstance(sign.body, m.Confirm) else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if insider.index is not None:
            insider.notes["was here"] = True
        return () if insider.notes.get("was here") and is_join(message) else ((to, message),)


def test_who_joins_after_more_changes_than_a_message_holds_becomes_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no later COMMIT has made links needless."""
    monkeypatch.setattr("phalanx.core.peer._MOST_LINKS", 10**6)
    guests, last = range(5, 5 + MAX_LINKS), 5 + MAX_LINKS
    settings: dict[str, Any] = {"newcomer_probation": 5, "probation": 5, "admissions": 3, "steps": 2000}
    swarm = make_swarm(dict.fromkeys(guests, Guest()), strangers=len(guests) + 1, **FIVE, **settings)
    waiting, here, step = [*guests], list[int](), 0
    first = get_peer(swarm, swarm.keys[0])

    def has_long_chain() -> bool:
        """Guests come and go, a few at a time, and one in each step at most."""
        nonlocal here, step
        if first.view.step > step:
            step = first.view.step
            gone = [i for i in here if get_notes(swarm, i).get("was here") and swarm.keys[i] not in first.view.roster]
            for index in gone:
                swarm.world.stop(swarm.keys[index])
            here = [index for index in here if index not in gone]
            if len(here) < 3 and waiting:
                here.append(waiting.pop(0))
                swarm.start(here[-1])
        return len(first.links) > MAX_LINKS + 5

    assert swarm.run(2000.0, has_long_chain)
    swarm.start(last)
    newcomer = get_peer(swarm, swarm.keys[last])
    swarm.run(2000.0, lambda: newcomer.member or first.view.step > step + 60)
    assert newcomer.member, f"at step {newcomer.view.step} of {first.view.step}"


# ---- The last step of a probation


@dataclass(kw_only=True, eq=False)
class KeepsLastStep(Attack):
    """What it says in the last step of a probation, and the state after it, it keeps from who is on probation."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return tuple(((key,), message) for key in to if not self.is_kept(insider, key, message))

    def is_kept(self, insider: Insider, key: bytes, message: Message) -> bool:
        if is_graduating(insider, key):
            insider.notes["kept back"] = True
            return True
        return is_fresh(insider, key) and isinstance(message, m.StateChunk | m.Chain | m.Certificate)


def is_graduating(insider: Insider, key: bytes) -> bool:
    """Whether this is the last step of its probation."""
    return any(x.key == key and x.served + 1 >= x.term for x in insider.view.candidates)


def is_fresh(insider: Insider, key: bytes) -> bool:
    """Whether a member was none in the step before."""
    view = insider.view
    return key in view.roster and bool(view.attempts) and key not in view.attempts[-1].roster


@pytest.mark.parametrize("attacker", range(5))
def test_a_graduate_that_is_kept_from_its_last_step_stays_a_member(attacker: int) -> None:
    """Its links are as slow as is allowed just then."""
    newcomer = 5

    def route(_: float, sender: bytes, to: bytes, message: Message) -> float | None:
        insider, key = swarm.insiders[swarm.keys[attacker]], swarm.keys[newcomer]
        slow = is_fresh(insider, key) or (is_graduating(insider, key) and not is_commit(message))
        return 0.99 if slow and key in (sender, to) else USUAL

    links = replace(STEADY, route=route)
    swarm = make_swarm({attacker: KeepsLastStep()}, joiners=1, steps=24, newcomer_probation=12, links=links, **FIVE)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, attacker)["kept back"]
    assert_unharmed(swarm)
    assert swarm.keys[newcomer] in get_peer(swarm, swarm.honest[0]).view.roster


# ---- Keys that nobody knows ask for bytes


@dataclass(kw_only=True, eq=False)
class Asks(Attack):
    """Never asks to join, but asks the first member for all parts, aggregates and states, again and again."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if isinstance(message, Signed) else ((to, message),)

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        view = insider.view
        for record in view.attempts[-2:]:
            place = (record.step, record.attempt)
            for part in range(len(record.roster)):
                for owner in record.contributors:
                    insider.send_later(0.0, view.roster[:1], m.PullPart(*place, owner, part, 0))
                    insider.send_later(0.0, view.roster[:1], m.PullAggregate(*place, part, 0))
                    insider.send_later(0.0, view.roster[:1], m.PullState(view.step, 0))
        return ()


def count_sent(strangers: int) -> Counter[type]:
    """What strangers get from the first member, by kind."""
    sent: Counter[type] = Counter()

    def route(_: float, sender: bytes, to: bytes, message: Message) -> float | None:
        if sender == swarm.keys[0] and to in swarm.byzantine:
            sent[type(message)] += 1
        return USUAL

    keys = range(8, 8 + strangers)
    swarm = make_swarm(
        dict.fromkeys(keys, Asks()), founders=8, joiners=strangers, steps=6, links=replace(STEADY, route=route)
    )
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    return sent


def test_a_stranger_gets_no_parts_and_all_strangers_share_what_one_may_have() -> None:
    one, many = count_sent(1), count_sent(6)
    assert m.PartChunk not in one + many
    for kind in (m.AggregateChunk, m.StateChunk):
        assert 0 < many[kind] < 2 * one[kind]
