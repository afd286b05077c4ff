"""Attackers who take honest members along, one for one, do not become the majority of those who are left.

A pair goes together or not at all, never below the floor, and each of the two comes back by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events
from test_strangers import make_swarm

from phalanx.attacks import Attack, Insider
from phalanx.attacks.base import Mail, change_body
from phalanx.attacks.broadcast import Malformed
from phalanx.core import messages as m
from phalanx.core.effects import Broadcast, Effect, Sign
from phalanx.core.envelope import seal
from phalanx.core.events import AttemptStarted, Halted, Removed, StepFinished
from phalanx.core.membership import View, compute_floor, compute_roster_digest, encode_view
from phalanx.core.messages import Message, Phase, Signed
from phalanx.simulation.checkers import Agreement, Bounds, Checkers, Floor, Innocence, Returns
from phalanx.simulation.swarm import Swarm


def count_members(insider: Insider) -> tuple[int, int]:
    """Attackers and honest peers among the members."""
    return sum(key in insider.plot.keys for key in insider.view.roster), len(insider.honest)


@dataclass(kw_only=True, eq=False)
class TakeAlong(Attack):
    """In rosters of these kinds, so many attackers name one honest member each in every step; in others they are good.

    They sponsor no member that comes back but their friends.
    """

    plan: Mapping[tuple[int, int], int]
    silent: tuple[tuple[int, int], ...] = ()
    """Rosters in which the first attacker says nothing."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, crew = sign.body, self._list_crew(insider)
        if isinstance(body, m.Confirm):
            return change_body(sign, joins=tuple(key for key in body.joins if key in insider.plot.keys))
        count = self.plan.get(count_members(insider), 0)
        named = dict(zip(crew[:count], insider.honest, strict=False))
        fits = all(key in insider.duties.contributors for key in named.values())
        if insider.key in named and fits and isinstance(body, m.Aggregate) and sign.phase is Phase.AGGREGATE:
            return change_body(sign, result=None, missing=(insider.view.roster.index(named[insider.key]),))
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        first = self._list_crew(insider)[:1] == [insider.key]
        return () if first and count_members(insider) in self.silent else ((to, message),)

    def _list_crew(self, insider: Insider) -> list[bytes]:
        return [key for key in insider.view.roster if key in insider.plot.keys]


@dataclass(kw_only=True, eq=False)
class TakeOver(TakeAlong):
    """When attackers have the quorum, they settle a view in which an honest member is banned."""

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        view, crew = insider.view, self._list_crew(insider)
        if count_members(insider) != (3, 2) or crew[0] != insider.key or insider.plot.notes.get("forged"):
            return
        insider.plot.notes["forged"] = True
        victim, height = insider.honest[0], view.height + 3
        forged = msgspec.structs.replace(
            view,
            attempt=height,
            height=height,
            failed=view.failed + 1,
            previous=bytes(32),
            roster=tuple(key for key in view.roster if key != victim),
            banned=tuple(sorted({*view.banned, victim})),
            order=tuple(key for key in view.order if key != victim),
        )
        body = m.Outcome(0, True, bytes(32), True, forged.digest)
        name = compute_roster_digest(view.roster)
        place = (insider.config.run, view.height, view.step, view.attempt, Phase.COMMIT, name)
        votes = tuple(seal(insider.plot.signers[key], *place, body) for key in crew)
        chain = m.Chain((m.Link(encode_view(forged), votes),))
        yield Broadcast(tuple(key for key in insider.config.founders if key != insider.key), chain)


def run_to_end(attack: Attack, founders: int, byzantine: int, steps: int, **options: object) -> Swarm:
    """Attackers are the last founders. Nobody honest is banned, and all come to the end."""
    attackers = dict.fromkeys(range(founders - byzantine, founders), attack)
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=steps, **options)  # type: ignore[arg-type]
    watch = Checkers(swarm, (Floor, Returns, Bounds, Innocence, Agreement))
    swarm.run(900.0, swarm.is_over)
    watch.finish()
    assert not watch.violations
    assert_unharmed(swarm, paired=founders)
    return swarm


def list_views(swarm: Swarm) -> list[View]:
    return [event.view for event in get_events(swarm, AttemptStarted)]


def assert_floor(swarm: Swarm) -> None:
    """Nothing that attackers do but being banned brings the members below the floor."""
    for view in list_views(swarm):
        inside = sum(key in swarm.byzantine for key in view.roster)
        assert view.bound == min(swarm.config.byzantine, view.doubts)
        assert len(view.roster) >= compute_floor(swarm.config, view.doubts)
        assert inside <= view.bound < len(view.roster) - inside


@pytest.mark.parametrize(("members", "byzantine"), [(8, 2), (11, 3)])
def test_pairs_stop_at_the_floor_and_those_who_are_left_go_on(members: int, byzantine: int) -> None:
    """As many attackers as there are name one honest member each. With ``3 b + 1 + m`` founders one pair has room."""
    honest = members - byzantine
    attack = TakeAlong(start=1, plan={(byzantine, honest): byzantine})
    swarm = run_to_end(attack, members, byzantine, 25, seed=4)
    assert not get_bans(swarm)
    assert not get_events(swarm, Halted)
    assert_floor(swarm)
    views = list_views(swarm)
    assert min(len(view.roster) for view in views) == compute_floor(swarm.config, byzantine) + byzantine % 2
    assert {len(pair) for view in views for pair in view.owed} == {2}, "the other pairs are on record, as pairs"
    for event in get_events(swarm, Removed):
        assert event.reason == "a pair that keeps naming each other"


@pytest.mark.parametrize(("members", "byzantine"), [(6, 2), (8, 3), (16, 7)])
def test_no_pair_goes_where_there_is_no_margin(members: int, byzantine: int) -> None:
    attack = TakeAlong(start=1, plan={(byzantine, members - byzantine): byzantine})
    swarm = run_to_end(attack, members, byzantine, 14)
    assert not get_events(swarm, Removed)
    assert {view.roster for view in list_views(swarm)} == {swarm.config.founders}
    owed = list_views(swarm)[-1].owed
    assert owed
    for one, other in owed:
        assert (one in swarm.byzantine) != (other in swarm.byzantine)


def test_a_pair_that_is_owed_goes_when_somebody_is_banned() -> None:
    """Nine founders may not lose two; when an attacker is banned the floor falls by two, and the pair goes together."""
    grudge = TakeAlong(start=1, plan={(3, 6): 1})
    cheat = Malformed(start=8)
    swarm = make_swarm({6: grudge, 7: grudge, 8: cheat}, founders=9, byzantine=3, steps=14)
    swarm.run(900.0, swarm.is_over)
    assert_unharmed(swarm, paired=1)
    assert [*get_bans(swarm)] == [swarm.keys[8]], describe(swarm)
    views = list_views(swarm)
    assert any(len(view.owed) == 1 and len(view.roster) == 9 for view in views), "before"
    gone = {event.key for event in get_events(swarm, Removed)}
    assert len(gone) == 2
    assert len(gone & swarm.byzantine) == 1
    assert {event.reason for event in get_events(swarm, Removed)} == {"a pair that keeps naming each other"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_attackers_who_choose_who_comes_back_get_no_quorum(seed: int) -> None:
    """They sponsor nobody but their friends: ``b_t + 1`` honest sponsors are enough for all others."""
    plan = {(3, honest): 3 for honest in range(5, 9)} | {(2, honest): 2 for honest in range(4, 9)}
    attack = TakeOver(start=1, plan=plan)
    swarm = run_to_end(attack, 11, 3, 60, seed=seed)
    assert not swarm.plot.notes.get("forged"), describe(swarm)
    assert not get_bans(swarm)
    assert_floor(swarm)
    last = list_views(swarm)[-1]
    away = {x.key: x for x in last.suspended if x.key in swarm.honest}
    assert all(x.ready > last.step for x in away.values()), "whoever may be back is"


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_who_comes_back_first_does_not_take_one_after_another_along(seed: int) -> None:
    """An attacker that takes one honest member along each time that it is back is away four, eight, .. steps itself."""
    plan = {(attackers, honest): 1 for attackers in (1, 2) for honest in range(4, 7)}
    swarm = run_to_end(TakeAlong(start=1, plan=plan), 8, 2, 100, seed=seed)
    assert_floor(swarm)
    for key in swarm.byzantine:
        gone = sorted({event.step for event in get_events(swarm, Removed) if event.key == key})
        for count, (first, second) in enumerate(itertools.pairwise(gone), 1):
            assert second - first >= min(40, 2**count) + 2, "away, and three complaints"
    for key in swarm.honest:  # never one after another: on average few are out
        out = sum(
            key not in view.roster
            for view in (event.view for _, event in swarm.events[key] if isinstance(event, StepFinished))
        )
        assert out <= 45


@pytest.mark.parametrize("seed", [4, 5])
def test_with_the_safe_quorum_the_floor_is_higher(seed: int) -> None:
    plan = {(2, 6): 1, (2, 7): 1, (1, 6): 1}
    swarm = run_to_end(TakeAlong(start=1, plan=plan), 9, 2, 40, seed=seed, partition_safe=True)
    assert_floor(swarm)
    assert min(len(view.roster) for view in list_views(swarm)) == 7


@dataclass(kw_only=True, eq=False)
class NamesItself(Attack):
    """Says that it lacks a part of its own."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        first = isinstance(sign.body, m.Aggregate) and sign.phase is Phase.AGGREGATE
        if first and insider.key in insider.duties.contributors:
            return change_body(sign, result=None, missing=(insider.index,))
        return sign


@pytest.mark.parametrize(("members", "byzantine"), [(5, 1), (8, 2), (17, 7)])
def test_who_keeps_naming_itself_goes_alone(members: int, byzantine: int) -> None:
    swarm = make_swarm({members - 1: NamesItself(start=1)}, founders=members, byzantine=byzantine, steps=10)
    swarm.run(600.0, swarm.is_over)
    assert_unharmed(swarm)
    assert {(event.key, event.reason) for event in get_events(swarm, Removed)} == {
        (swarm.keys[-1], "keeps naming itself")
    }


@pytest.mark.parametrize(("members", "byzantine"), [(4, 1), (6, 2), (8, 3)])
def test_who_keeps_naming_itself_is_borne_with_at_the_floor(members: int, byzantine: int) -> None:
    """No attempt is lost by it."""
    swarm = make_swarm({members - 1: NamesItself(start=1)}, founders=members, byzantine=byzantine)
    swarm.run(600.0, swarm.is_over)
    assert_unharmed(swarm)
    assert not get_events(swarm, Removed)
    views = list_views(swarm)
    assert not any(view.failed for view in views)
