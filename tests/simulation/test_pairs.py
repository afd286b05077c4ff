"""Attackers who take honest members along, one for one, do not become the majority of those who are left.

Each of a pair that goes may come back, and nobody knows which of the two was Byzantine: what counts is how many are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec
import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events
from test_strangers import make_swarm

from phalanx.attacks import Attack, Insider
from phalanx.attacks.base import Mail, change_body
from phalanx.core import messages as m
from phalanx.core.effects import Broadcast, Effect, Sign
from phalanx.core.envelope import seal
from phalanx.core.events import AttemptStarted, Halted, Removed
from phalanx.core.membership import View, compute_roster_digest, encode_view
from phalanx.core.messages import Message, Phase, Signed
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
        body = m.Outcome(0, True, (), (victim,), (), False, forged.digest)
        name = compute_roster_digest(view.roster)
        place = (insider.config.run, view.height, view.step, view.attempt, Phase.COMMIT, name)
        votes = tuple(seal(insider.plot.signers[key], *place, body) for key in crew)
        chain = m.Chain((m.Link(encode_view(forged), votes),))
        yield Broadcast(tuple(key for key in insider.config.founders if key != insider.key), chain)


def run_to_end(attack: Attack, founders: int, byzantine: int, steps: int, **options: object) -> Swarm:
    """Attackers are the last founders. Nobody honest is banned, and all come to the end."""
    attackers = dict.fromkeys(range(founders - byzantine, founders), attack)
    swarm = make_swarm(attackers, founders=founders, byzantine=byzantine, steps=steps, **options)  # type: ignore[arg-type]
    swarm.run(600.0, swarm.is_over)
    assert_unharmed(swarm, paired=founders)
    assert not get_events(swarm, Halted)
    return swarm


def list_views(swarm: Swarm) -> list[View]:
    return [event.view for event in get_events(swarm, AttemptStarted)]


@pytest.mark.parametrize(("members", "byzantine"), [(8, 3), (9, 3), (16, 7)])
def test_those_who_are_left_go_on_when_the_last_attackers_fall_silent(members: int, byzantine: int) -> None:
    """Two pairs go; with the bound of before, those who are left could not even say that somebody is silent."""
    honest = members - byzantine
    rest = tuple((byzantine - 2 - less, honest - 2) for less in range(byzantine - 2))
    attack = TakeAlong(start=1, plan={(byzantine, honest): 2}, silent=rest)
    swarm = run_to_end(attack, members, byzantine, 25 - 2 * byzantine - 2)
    views = list_views(swarm)
    assert any(len(view.roster) == honest - 2 for view in views), "the silent ones are gone"
    assert any(len(view.pairs) == 2 for view in views)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_attackers_who_choose_who_comes_back_get_no_quorum(seed: int) -> None:
    """(3, 5) -> (1, 3) -> (3, 3) -> (2, 2) -> (3, 2): with three of five they would ban whom they like."""
    attack = TakeOver(start=1, plan={(3, 5): 2, (3, 3): 1})
    swarm = run_to_end(attack, 8, 3, 60, seed=seed, probation=6)
    assert not swarm.plot.notes.get("forged"), describe(swarm)
    assert not get_bans(swarm)
    for view in list_views(swarm):
        inside = sum(key in swarm.byzantine for key in view.roster)
        assert inside <= view.bound < len(view.roster) - inside


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_who_comes_back_first_does_not_take_one_after_another_along(seed: int) -> None:
    attack = TakeAlong(start=1, plan={(2, 4): 1, (2, 3): 1}, silent=((1, 2), (2, 2)))
    swarm = run_to_end(attack, 6, 2, 100, seed=seed, probation=6)
    assert sum(len(view.pairs) == 1 for view in list_views(swarm)) > 0


@pytest.mark.parametrize("seed", [4, 5])
def test_with_the_safe_quorum_one_attacker_does_not_come_back_alone(seed: int) -> None:
    attack = TakeAlong(start=1, plan={(1, 3): 1}, silent=((1, 2),))
    swarm = run_to_end(attack, 4, 1, 80, seed=seed, probation=6, partition_safe=True)
    assert any(len(view.pairs) == 1 for view in list_views(swarm))


@dataclass(kw_only=True, eq=False)
class NamesItself(Attack):
    """Says that it lacks a part of its own."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        first = isinstance(sign.body, m.Aggregate) and sign.phase is Phase.AGGREGATE
        if first and insider.key in insider.duties.contributors:
            return change_body(sign, result=None, missing=(insider.index,))
        return sign


@pytest.mark.parametrize(("members", "byzantine"), [(4, 1), (7, 2), (16, 7)])
def test_who_keeps_naming_itself_goes_alone(members: int, byzantine: int) -> None:
    swarm = make_swarm({members - 1: NamesItself(start=1)}, founders=members, byzantine=byzantine, steps=10)
    swarm.run(600.0, swarm.is_over)
    assert_unharmed(swarm)
    assert {(event.key, event.reason) for event in get_events(swarm, Removed)} == {
        (swarm.keys[-1], "keeps naming itself")
    }
    assert not any(view.pairs for view in list_views(swarm))
