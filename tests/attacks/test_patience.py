"""Attackers that wait: honest until their moment, and then what their name says."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest
import torch
from arena import assert_safe, run_arena

from phalanx.attacks import ATTACKS, Attack, Insider, Plot, combine
from phalanx.attacks.base import change_body
from phalanx.attacks.patience import (
    BlockReturns,
    DrawAgain,
    HurryOthers,
    KeepShare,
    Moment,
    NameOthers,
    PatientGradient,
    ReturnFirst,
    SilentAtFloor,
    is_ripe,
)
from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.effects import Sign
from phalanx.core.membership import compute_floor
from phalanx.core.messages import Phase, Signed
from phalanx.network.ideal import make_signers

PATIENT = [name for name in ATTACKS if name.startswith("patient_")]


def make_insiders(n: int = 7, b: int = 2, out: int = 0, step: int = 100, safe: bool = False) -> list[Insider]:
    """The first ``b`` of ``n`` are attackers; of the others, ``out`` are not in the roster."""
    signers, _ = make_signers(n, 1, True)
    config = Config(
        founders=tuple(s.key for s in signers), byzantine=b, size=64, steps=500, partition_safe=safe
    ).check()
    plot = Plot()
    insiders = [Insider(signer, config, plot) for signer in signers[:b]]
    for insider in insiders:
        roster = config.founders[: n - out]
        insider.enter(msgspec.structs.replace(insider.view, roster=roster, order=roster, step=step, bound=b))
    return insiders


def make_sign(insider: Insider, phase: Phase, body: m.Body) -> Sign:
    view = insider.view
    return Sign(view.height, view.step, view.attempt, phase, view.previous, body)


# ---- Moments


@pytest.mark.parametrize(("safe", "least"), [(False, 6), (True, 7)])
def test_least_members(safe: bool, least: int) -> None:
    insider = make_insiders(n=8, safe=safe)[0]
    assert compute_floor(insider.config, insider.view.doubts) == least


@pytest.mark.parametrize(
    ("out", "ripe"),
    [
        (0, {Moment.ALWAYS}),
        (1, {Moment.ALWAYS, Moment.SOMEBODY_OUT, Moment.LEAST_MARGIN, Moment.AT_FLOOR}),
        (3, set(Moment)),
    ],
)
def test_moments(out: int, ripe: set[Moment]) -> None:
    insider = make_insiders(out=out)[0]
    assert {moment for moment in Moment if is_ripe(insider, moment)} == ripe


def test_the_least_margin_is_the_least_so_far() -> None:
    insider = make_insiders(out=3)[0]
    assert is_ripe(insider, Moment.LEAST_MARGIN)
    roster = insider.config.founders[:6]
    insider.enter(msgspec.structs.replace(insider.view, roster=roster, order=roster, step=101))
    assert not is_ripe(insider, Moment.LEAST_MARGIN)


def test_once_outnumbered_for_ever() -> None:
    insider = make_insiders(out=3)[0]
    assert is_ripe(insider, Moment.OUTNUMBERED)
    insider.enter(msgspec.structs.replace(insider.view, roster=insider.config.founders, step=101))
    assert is_ripe(insider, Moment.OUTNUMBERED)


# ---- In calm weather


@pytest.mark.parametrize("name", [name for name in PATIENT if name != "patient_redraw"])
def test_in_calm_weather_patient_attackers_are_honest(name: str) -> None:
    attack = ATTACKS[name]()
    arena = run_arena(attack, attack, seed=2, steps=5)
    assert_safe(arena)
    assert not arena.bans
    assert not arena.removed
    assert "cheats" not in arena.insiders[arena.attackers[0]].plot.notes


# ---- What each does


def test_some_cheat_and_others_stay_clean() -> None:
    attack = PatientGradient(moment=Moment.ALWAYS, some=True)
    insiders = make_insiders(b=3, n=9)
    gradient = torch.ones(4)
    changed = [bool((attack.on_gradient(x, 100, b"", gradient) != gradient).any()) for x in insiders]
    assert sum(changed) == 2
    assert len(insiders[0].plot.notes["cheats"]) == 2


def test_returns_are_blocked_but_for_friends() -> None:
    one, other = make_insiders(out=2)
    stranger = one.config.founders[-1]
    block = BlockReturns()
    joins = tuple(sorted((other.key, stranger)))
    confirm = block.on_body(
        one, make_sign(one, Phase.CONFIRM, m.Confirm(bytes(32), (), joins, (), False, False, (), m.NOTHING))
    )
    assert isinstance(confirm, Sign)
    assert confirm.body.joins == (other.key,)  # type: ignore[union-attr]
    trials = tuple(m.Listed(key, bytes(32)) for key in joins)
    aggregate = block.on_body(one, make_sign(one, Phase.AGGREGATE, m.Aggregate(bytes(32), (), (), trials)))
    assert isinstance(aggregate, Sign)
    assert [x.key for x in aggregate.body.trials] == [other.key]  # type: ignore[union-attr]
    ((to, _),) = block.on_message(one, (stranger, other.key), m.StateChunk(0, 1, 0, b"x"))
    assert to == (other.key,)


def test_honest_members_are_named_one_after_the_other() -> None:
    insider = make_insiders(out=1)[0]
    named = set()
    for step in range(100, 110):
        insider.enter(msgspec.structs.replace(insider.view, step=step))
        said = NameOthers().on_body(insider, make_sign(insider, Phase.AGGREGATE, m.Aggregate(bytes(32), (), (), ())))
        assert isinstance(said, Sign)
        named.update(said.body.missing)  # type: ignore[union-attr]
    assert {insider.view.roster[index] for index in named} == {*insider.duties.contributors} - insider.plot.keys


def test_timeouts_are_claimed_of_honest_members_only() -> None:
    insider = make_insiders(out=1)[0]
    commit = insider.seal(make_sign(insider, Phase.COMMIT, m.Commit(None, bytes(32), bytes(32))))
    mails = list(HurryOthers().on_message(insider, insider.others, commit))
    assert len(mails) == 2


def test_a_share_is_kept_back_if_a_friend_cheated_and_by_a_clean_one() -> None:
    insiders = make_insiders()
    reveal = m.Reveal(bytes(32), bytes(32))
    keeps = KeepShare()
    assert all(keeps.on_body(x, make_sign(x, Phase.REVEAL, reveal)) is not None for x in insiders)
    cheat = insiders[0]
    cheat.plot.notes["cheats"] = {cheat.key: {99}}
    kept = [keeps.on_body(x, make_sign(x, Phase.REVEAL, reveal)) is None for x in insiders]
    assert kept == [False, True]


@dataclass(kw_only=True, eq=False)
class CheatAlone(PatientGradient):
    """The first attacker cheats in every step, the others never do."""

    moment: Moment = Moment.ALWAYS
    some: bool = True


def test_a_clean_colluder_redraws_when_a_cheat_is_drawn_and_only_then() -> None:
    attack = combine(CheatAlone(), DrawAgain())
    arena = run_arena(attack, attack, seed=1, steps=12, limit=400.0)
    assert_safe(arena)
    notes = arena.insiders[arena.attackers[0]].plot.notes
    cheats = next(iter(notes["cheats"].values()))
    clean = [key for key in arena.attackers if key not in notes["cheats"]]
    assert 0 < notes["kept shares"] < len(cheats)
    assert not set(clean) & arena.bans.keys()
    assert set(clean) & arena.removed


def test_silence_at_the_floor() -> None:
    """One attacker says nothing, and the others go on: where all are needed, nobody can."""
    one, other = make_insiders(out=1)
    commit = one.seal(make_sign(one, Phase.COMMIT, m.Commit(None, bytes(32), bytes(32))))
    first, second = (list(SilentAtFloor().on_message(x, x.others, commit)) for x in (one, other))
    assert (len(first), len(second)) == (0, 1)
    assert not list(SilentAtFloor(all_of_us=True).on_message(other, other.others, commit))
    assert not SilentAtFloor().is_active(make_insiders(out=0)[0])


def test_one_hides_and_comes_back_at_once() -> None:
    attack = ReturnFirst(length=8.0, rest=40)
    insiders = make_insiders(out=1, step=80)
    quiet = []
    for insider in insiders:
        commit = insider.seal(make_sign(insider, Phase.COMMIT, m.Commit(None, bytes(32), bytes(32))))
        if not list(attack.on_message(insider, insider.others, commit)):
            quiet.append((insider, commit))
    ((hidden, commit),) = quiet
    assert attack.is_active(hidden)
    hidden.now = 8.0 * hidden.config.delta
    assert list(attack.on_message(hidden, hidden.others, commit)) == [(hidden.others, commit)]


def test_a_body_that_is_nobodys_business_stays() -> None:
    insider = make_insiders(out=1)[0]
    sign = make_sign(insider, Phase.VOTE, m.Vote((), ()))
    attacks: list[Attack] = [BlockReturns(), NameOthers(), KeepShare()]
    for attack in attacks:
        assert attack.on_body(insider, sign) is sign
    assert not isinstance(change_body(sign, ballots=()), Signed)
