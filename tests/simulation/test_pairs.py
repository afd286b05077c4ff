"""Attackers who take honest members along, one for one, do not become the majority of those who are left.

That is possible only in tolerant mode, where a checker says that it was not shown a gradient. A pair goes together or
not at all, never below the floor, and each of the two comes back by itself. Who says that a part is missing takes
nobody along: others stand between the two from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events
from test_strangers import TOLERANT, make_swarm

from phalanx.attacks import Attack, Insider
from phalanx.attacks.base import change_body
from phalanx.attacks.broadcast import Malformed
from phalanx.core import messages as m
from phalanx.core.effects import Broadcast, Effect, Sign
from phalanx.core.envelope import seal
from phalanx.core.events import AttemptStarted, Halted, Removed, StepFinished
from phalanx.core.membership import View, compute_floor, compute_roster_digest, encode_view
from phalanx.core.messages import Phase, Signed, Verdict
from phalanx.simulation.checkers import Agreement, Bounds, Checkers, Floor, Innocence, Returns
from phalanx.simulation.swarm import Swarm


def count_members(insider: Insider) -> tuple[int, int]:
    """Attackers and honest peers among the members."""
    return sum(key in insider.plot.keys for key in insider.view.roster), len(insider.honest)


@dataclass(kw_only=True, eq=False)
class TakeAlong(Attack):
    """In rosters of these kinds, so many attackers are at odds with one honest member each; in others they are good.

    They sponsor no member that comes back but their friends. They say that a gradient was not shown to them, or
    (``parts``) that a part is missing.
    """

    plan: Mapping[tuple[int, int], int]
    parts: bool = False
    grudge: bool = False
    """Each attacker is at odds with the same member for ever."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, crew = sign.body, self._list_crew(insider)
        if isinstance(body, m.Confirm):
            return change_body(sign, joins=tuple(key for key in body.joins if key in insider.plot.keys))
        count = self.plan.get(count_members(insider), 0)
        named = dict(zip(crew[:count], insider.honest, strict=False))
        if insider.key not in named:
            return sign
        if isinstance(body, m.Report) and not self.parts:
            denied = sorted(x.target for x in body.findings if x.target in insider.honest)[:1]
            if denied and self.grudge:
                denied = [key for key in denied if key == insider.notes.setdefault("victim", key)]
            lies = {key: m.Finding(key, Verdict.NOT_RECEIVED) for key in denied}
            return change_body(sign, findings=tuple(lies.get(x.target, x) for x in body.findings))
        fits = all(key in insider.duties.contributors for key in named.values())
        if self.parts and fits and isinstance(body, m.Aggregate) and sign.phase is Phase.AGGREGATE:
            return change_body(sign, result=None, missing=(insider.view.roster.index(named[insider.key]),))
        return sign

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
    options = {"founders": founders, "byzantine": byzantine, "steps": steps} | options
    swarm = make_swarm(attackers, **options)  # type: ignore[arg-type]
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


QUICK: dict[str, Any] = {**TOLERANT, "validators": 3, "complaints": 1}
"""Each complaint has a pair suspended, and there are many checks."""


@pytest.mark.parametrize(("members", "byzantine"), [(10, 2), (13, 3)])
def test_pairs_stop_at_the_floor_and_those_who_are_left_go_on(members: int, byzantine: int) -> None:
    """As many attackers as there are take one honest member along each. One pair has room."""
    plan = {(x, honest): x for x in range(1, byzantine + 1) for honest in range(members)}
    swarm = run_to_end(TakeAlong(start=1, plan=plan, grudge=True), members, byzantine, 25, seed=4, **QUICK)
    assert not get_bans(swarm)
    assert not get_events(swarm, Halted)
    assert_floor(swarm)
    views = list_views(swarm)
    assert min(len(view.roster) for view in views) == compute_floor(swarm.config, byzantine) + byzantine % 2
    assert {len(pair) for view in views for pair in view.owed} == {2}, "the other pairs are on record, as pairs"
    for event in get_events(swarm, Removed):
        assert event.reason == "a pair that keeps naming each other"


@pytest.mark.parametrize(("members", "byzantine"), [(8, 2), (10, 3), (18, 7)])
def test_no_pair_goes_where_there_is_no_margin(members: int, byzantine: int) -> None:
    attack = TakeAlong(start=1, plan={(byzantine, members - byzantine): byzantine})
    swarm = run_to_end(attack, members, byzantine, 14, **QUICK)
    assert not get_events(swarm, Removed)
    assert {view.roster for view in list_views(swarm)} == {swarm.config.founders}
    owed = list_views(swarm)[-1].owed
    assert owed
    for one, other in owed:
        assert (one in swarm.byzantine) != (other in swarm.byzantine)


def test_a_pair_that_is_owed_goes_when_somebody_is_banned() -> None:
    """Eleven founders may not lose two; when an attacker is banned the floor falls by two, and the pair goes."""
    grudge = TakeAlong(start=1, plan={(3, 8): 1})
    cheat = Malformed(start=12)
    swarm = make_swarm({8: grudge, 9: grudge, 10: cheat}, founders=11, byzantine=3, steps=20, **QUICK)
    swarm.run(900.0, swarm.is_over)
    assert_unharmed(swarm, paired=1)
    assert [*get_bans(swarm)] == [swarm.keys[10]], describe(swarm)
    views = list_views(swarm)
    assert any(len(view.owed) == 1 and len(view.roster) == 11 for view in views), "before"
    gone = {event.key for event in get_events(swarm, Removed)}
    assert len(gone) == 2
    assert len(gone & swarm.byzantine) == 1
    assert {event.reason for event in get_events(swarm, Removed)} == {"a pair that keeps naming each other"}


@pytest.mark.parametrize(("members", "byzantine"), [(6, 2), (8, 2), (8, 3), (11, 3), (16, 7)])
def test_who_says_that_a_part_is_missing_takes_nobody_along(members: int, byzantine: int) -> None:
    """With a margin as without: others stand between the two, and only the namers owe for it."""
    plan = {(byzantine, members - byzantine): byzantine}
    swarm = run_to_end(TakeAlong(start=1, plan=plan, parts=True), members, byzantine, 25, seed=4)
    assert not get_events(swarm, Removed)
    views = list_views(swarm)
    assert {view.roster for view in views} == {swarm.config.founders}
    assert not any(view.failed or view.owed for view in views)
    pairs = {(rift.one in swarm.byzantine, rift.other in swarm.byzantine) for view in views for rift in view.rifts}
    assert pairs == {(False, True)} or pairs == {(True, False)} or pairs == {(False, True), (True, False)}
    assert {debt.key for view in views for debt in view.debts} == swarm.byzantine
    calm = run_to_end(Attack(), members, byzantine, 25, seed=4)
    assert swarm.world.now < 1.3 * calm.world.now


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_attackers_who_choose_who_comes_back_get_no_quorum(seed: int) -> None:
    """They sponsor nobody but their friends: ``b_t + 1`` honest sponsors are enough for all others."""
    plan = {(3, honest): 3 for honest in range(5, 9)} | {(2, honest): 2 for honest in range(4, 9)}
    attack = TakeOver(start=1, plan=plan)
    swarm = run_to_end(attack, 11, 3, 60, seed=seed, **QUICK | {"validators": 1})
    assert get_events(swarm, Removed)
    assert not swarm.plot.notes.get("forged"), describe(swarm)
    assert not get_bans(swarm)
    assert_floor(swarm)
    last = list_views(swarm)[-1]
    away = {x.key: x for x in last.suspended if x.key in swarm.honest}
    assert all(x.ready > last.step or x.since + 1 == last.step for x in away.values()), "whoever may be back is"


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_who_comes_back_first_does_not_take_one_after_another_along(seed: int) -> None:
    """An attacker that takes one honest member along each time that it is back is away four, eight, .. steps itself."""
    plan = {(attackers, honest): 1 for attackers in (1, 2) for honest in range(4, 7)}
    swarm = run_to_end(TakeAlong(start=1, plan=plan), 8, 2, 100, seed=seed, **QUICK | {"validators": 1})
    assert get_events(swarm, Removed)
    assert_floor(swarm)
    for key in swarm.byzantine:
        gone = sorted({event.step for event in get_events(swarm, Removed) if event.key == key})
        for count, (first, second) in enumerate(itertools.pairwise(gone), 1):
            assert second - first >= min(40, 2**count), "away"
    for key in swarm.honest:  # never one after another: on average few are out
        out = sum(
            key not in view.roster
            for view in (event.view for _, event in swarm.events[key] if isinstance(event, StepFinished))
        )
        assert out <= 45


@pytest.mark.parametrize("seed", [4, 5])
def test_with_the_safe_quorum_the_floor_is_higher(seed: int) -> None:
    plan = {(2, 6): 1, (2, 7): 1, (1, 6): 1}
    settings = QUICK | {"validators": 1, "partition_safe": True}
    swarm = run_to_end(TakeAlong(start=1, plan=plan), 9, 2, 60, seed=seed, **settings)
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


def test_who_keeps_naming_itself_goes_alone() -> None:
    """Each step costs the others a round: that adds up."""
    swarm = make_swarm({4: NamesItself(start=1)}, founders=5, byzantine=1, steps=250)
    swarm.run(600.0, lambda: bool(get_events(swarm, Removed)))
    assert {event.key for event in get_events(swarm, Removed)} == {swarm.keys[4]}
    assert all(event.reason.startswith("too slow") for event in get_events(swarm, Removed))
    assert {debt.key for view in list_views(swarm) for debt in view.debts} == {swarm.keys[4]}


@pytest.mark.parametrize(("members", "byzantine"), [(4, 1), (6, 2), (8, 3)])
def test_who_keeps_naming_itself_is_borne_with_at_the_floor(members: int, byzantine: int) -> None:
    """No attempt is lost by it."""
    swarm = make_swarm({members - 1: NamesItself(start=1)}, founders=members, byzantine=byzantine)
    swarm.run(600.0, swarm.is_over)
    assert_unharmed(swarm)
    assert not get_events(swarm, Removed)
    views = list_views(swarm)
    assert not any(view.failed for view in views)
