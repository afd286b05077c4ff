"""The floor in whole runs: who waits for whom, who is let in, and what silence buys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from test_breaks import assert_unharmed, describe, get_bans, get_events, get_peer
from test_strangers import make_swarm
from torch import Tensor

from phalanx.attacks import Attack, Insider
from phalanx.attacks.base import Mail, change_body
from phalanx.attacks.gradients import WrongGradient
from phalanx.core import messages as m
from phalanx.core.effects import Sign
from phalanx.core.events import AttemptStarted, Halted, Removed, Resumed, SlowPath, StepFinished, Waiting
from phalanx.core.justice import find_voters
from phalanx.core.membership import (
    Committed,
    Target,
    View,
    compute_duties,
    compute_floor,
    compute_margin,
    find_record,
    make_genesis,
)
from phalanx.core.messages import Message, Phase, Rule, Signed
from phalanx.core.transcript import Transcript
from phalanx.simulation.checkers import Checkers
from phalanx.simulation.swarm import Swarm


@dataclass(kw_only=True, eq=False)
class Mute(Attack):
    """Says nothing at all."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return ()


def watch(swarm: Swarm) -> Checkers:
    return Checkers(swarm)


def list_views(swarm: Swarm, number: int = 0) -> list[View]:
    return [event.view for _, event in swarm.events[swarm.keys[number]] if isinstance(event, AttemptStarted)]


# ---- Waiting


@pytest.mark.parametrize(("founders", "byzantine"), [(4, 1), (6, 2), (16, 7)])
def test_one_silent_attacker_at_the_floor_is_waited_for(founders: int, byzantine: int) -> None:
    """Each member says for whom it waits, from its own deadline on; nothing is repeated, and nobody goes."""
    swarm = make_swarm({founders - 1: Mute(start=2)}, founders=founders, byzantine=byzantine, steps=6)
    checkers = watch(swarm)
    swarm.run(150.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    assert not get_events(swarm, Removed)
    silent = (swarm.keys[founders - 1],)
    for key in swarm.honest:
        events = [event for _, event in swarm.events[key]]
        assert get_peer(swarm, key).view.step == 2
        assert not any(event.view.failed for event in events if isinstance(event, AttemptStarted))
        assert {event.missing for event in events if isinstance(event, Waiting)} == {silent}
        assert {event.missing for event in events if isinstance(event, Halted)} == {silent}


@pytest.mark.parametrize(
    ("founders", "byzantine", "safe"), [(5, 1, False), (8, 2, False), (11, 3, False), (5, 1, True), (9, 2, True)]
)
def test_silent_attackers_do_not_halt_a_run_of_enough_members(founders: int, byzantine: int, safe: bool) -> None:
    """``n >= 3 b + 1 + m``: all of them may be silent, at any time. With the safe quorum it takes ``4 b + 1``."""
    attackers = {founders - 1 - number: Mute(start=1 + number) for number in range(byzantine)}
    options: dict[str, Any] = {"byzantine": byzantine, "steps": 8, "partition_safe": safe}
    swarm = make_swarm(attackers, founders=founders, **options)
    checkers = watch(swarm)
    swarm.run(600.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    assert_unharmed(swarm)
    assert not get_events(swarm, Halted)
    assert {x.key for x in list_views(swarm)[-1].suspended} == swarm.byzantine


def test_a_run_that_waits_goes_on_when_who_is_missed_is_back() -> None:
    swarm = make_swarm({}, founders=4, byzantine=1, steps=6)
    checkers = watch(swarm)
    assert swarm.run(50.0, lambda: get_peer(swarm, swarm.keys[0]).view.step == 2)
    swarm.crash(swarm.keys[3])
    swarm.run(swarm.world.now + 100.0)
    assert {get_peer(swarm, key).view.step for key in swarm.keys[:3]} == {2}
    assert len(get_events(swarm, Halted)) == 3
    swarm.restart(swarm.keys[3])
    swarm.run(swarm.world.now + 100.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    assert_unharmed(swarm)
    assert len(get_events(swarm, Resumed)) >= 3
    assert not get_events(swarm, Removed)


def test_a_run_that_waits_lets_in_a_suspended_member_in_the_place_of_who_is_silent() -> None:
    """Two sets of members that follow each other: one more may be silent for each that is back."""
    swarm = make_swarm({7: Attack(), 8: Mute(start=6)}, founders=9, byzantine=3, steps=10)
    checkers = watch(swarm)
    assert swarm.run(50.0, lambda: get_peer(swarm, swarm.keys[0]).view.step == 2)
    swarm.crash(swarm.keys[1])
    assert swarm.run(400.0, lambda: get_peer(swarm, swarm.keys[0]).view.step >= 5)
    assert compute_margin(swarm.config, get_peer(swarm, swarm.keys[0]).view) == 0
    swarm.run(swarm.world.now + 100.0)
    assert get_peer(swarm, swarm.keys[0]).view.step == 6, "it waits for the attacker"
    swarm.restart(swarm.keys[1])
    swarm.run(swarm.world.now + 400.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    last = list_views(swarm)[-1]
    assert last.step == 10
    assert [x.key for x in last.suspended] == [swarm.keys[8]], describe(swarm)
    assert min(len(view.roster) for view in list_views(swarm)) == compute_floor(swarm.config, 3)


# ---- Coming back


@dataclass(kw_only=True, eq=False)
class Sponsor(Attack):
    """Says of every suspended member that it is back, whether it is or not."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm):
            return sign
        absent = {member.key for member in insider.view.suspended}
        insider.plot.notes["sponsored"] = insider.plot.notes.get("sponsored", 0) + len(absent)
        return change_body(sign, joins=tuple(sorted({*sign.body.joins, *absent})))


@dataclass(kw_only=True, eq=False)
class Deny(Attack):
    """Says of no member that it is back."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, joins=()) if isinstance(sign.body, m.Confirm) else sign


def test_attackers_cannot_bring_back_who_is_not_there() -> None:
    """``b_t`` sponsors are not enough."""
    swarm = make_swarm({7: Sponsor(), 8: Sponsor()}, founders=9, byzantine=2, steps=12)
    assert swarm.run(50.0, lambda: get_peer(swarm, swarm.keys[0]).view.step == 2)
    swarm.crash(swarm.keys[1])
    swarm.run(400.0, lambda: get_peer(swarm, swarm.keys[0]).view.step >= 10)
    assert swarm.plot.notes["sponsored"] > 6
    away = [view for view in list_views(swarm) if view.step > 2]
    assert away
    assert all(swarm.keys[1] not in view.roster for view in away)


def test_attackers_cannot_keep_out_who_is_there() -> None:
    """``b_t + 1`` sponsors are, never a majority: at the first boundary it is back."""
    swarm = make_swarm({7: Deny(), 8: Deny()}, founders=9, byzantine=2, steps=14)
    assert swarm.run(50.0, lambda: get_peer(swarm, swarm.keys[0]).view.step == 2)
    swarm.crash(swarm.keys[1], 0.0)
    assert swarm.run(400.0, lambda: get_peer(swarm, swarm.keys[0]).view.step == 5)
    swarm.restart(swarm.keys[1])
    swarm.run(600.0, swarm.is_over)
    back = [view.step for view in list_views(swarm) if view.step > 4 and swarm.keys[1] in view.roster]
    assert back, describe(swarm)
    assert back[0] <= 7, describe(swarm)
    assert {*swarm.honest} <= swarm.finished


def test_who_comes_back_checks_nothing_that_it_missed() -> None:
    swarm = make_swarm({}, founders=9, byzantine=2, steps=24, validators=2)
    checkers = watch(swarm)
    for start, number in ((2, 1), (6, 2), (10, 3), (14, 4)):
        assert swarm.run(400.0, lambda start=start: get_peer(swarm, swarm.keys[0]).view.step >= start)  # type: ignore[misc]
        swarm.crash(swarm.keys[number], 0.0)
        swarm.run(swarm.world.now + 14.0)
        swarm.restart(swarm.keys[number])
    swarm.run(600.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    returned = 0
    for view in list_views(swarm):
        for check in compute_duties(swarm.config, view).checks:
            record = find_record(view, check.step, check.attempt)
            assert record is not None
            assert check.checker in record.roster
            returned += not {*view.roster} <= {*record.roster}
    assert returned > 3, "there was somebody who might have"


def test_who_comes_back_does_not_vote_on_what_it_missed() -> None:
    swarm = make_swarm({}, founders=9, byzantine=2)
    genesis = make_genesis(swarm.config)
    record = Committed(0, 0, genesis.roster[1:], (), (), doubts=2)
    now = make_view(genesis, step=1, attempts=(record,))
    transcript = Transcript(now, compute_duties(swarm.config, now))
    assert find_voters(transcript, 0, 0) == {*genesis.roster[1:]}
    assert find_voters(transcript, 1, 0) == {*genesis.roster}


def make_view(view: View, **fields: Any) -> View:
    return msgspec.structs.replace(view, **fields)


# ---- What silence buys


@dataclass(kw_only=True, eq=False)
class Withhold(Attack):
    """Keeps its share back once, in the step ``at``."""

    at: int

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        hides = isinstance(sign.body, m.Reveal) and sign.step == self.at and "withheld" not in insider.notes
        if hides:
            insider.notes["withheld"] = True
        return None if hides else sign


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_withheld_share_has_everybody_of_the_step_before_checked_twice(seed: int) -> None:
    """A cheat of that step that the share would have drawn, or not, is found whoever is drawn."""
    attackers = {6: WrongGradient(start=3, stop=4), 7: Withhold(at=4)}
    swarm = make_swarm(attackers, founders=8, byzantine=2, steps=8, seed=seed)
    checkers = watch(swarm)
    swarm.run(400.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    views = {(view.step, view.attempt): view for view in list_views(swarm)}
    after = next(view for view in views.values() if view.step == 5)
    before = next(record for record in after.attempts if record.step == 3)
    wanted = Counter({Target(key, 3, before.attempt): 2 for key in before.contributors})
    assert Counter(target for target in after.targets if target.step == 3) == wanted
    checks = Counter((check.target, check.step) for check in compute_duties(swarm.config, after).checks)
    assert all(checks[key, 3] == 2 for key in before.contributors)
    if swarm.keys[6] in before.contributors:
        assert get_bans(swarm) == {swarm.keys[6]: Rule.GRADIENT}, describe(swarm)
    assert {event.key for event in get_events(swarm, Removed)} == {swarm.keys[7]}


def test_a_withheld_share_of_the_first_seed() -> None:
    test_a_withheld_share_has_everybody_of_the_step_before_checked_twice(1)


@dataclass(kw_only=True, eq=False)
class SilentAt(Attack):
    """Keeps one message back, once."""

    phase: Phase
    at: int

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        hides = sign.phase is self.phase and sign.step == self.at and "hid" not in insider.notes
        if hides:
            insider.notes["hid"] = True
        return None if hides else sign


@pytest.mark.parametrize("phase", [Phase.REPORT, Phase.CONFIRM])
def test_a_retry_does_not_draw_the_randomness_again(phase: Phase) -> None:
    """Whoever has seen whom it draws cannot have it drawn anew."""
    swarm = make_swarm({7: SilentAt(phase=phase, at=3)}, founders=8, byzantine=2, steps=8)
    drawn: dict[tuple[int, int], bytes] = {}

    def look() -> bool:
        peer = get_peer(swarm, swarm.keys[0])
        for place, transcript in peer.transcripts.items():
            if transcript.randomness is not None:
                drawn[place] = transcript.randomness
        return swarm.is_over()

    swarm.run(400.0, look)
    assert_unharmed(swarm)
    attempts = [place for place in drawn if place[0] == 3]
    assert len(attempts) == 2
    following = next(view for view in list_views(swarm) if view.step == 4)
    assert following.randomness == drawn[min(attempts)] != drawn[max(attempts)]


@pytest.mark.parametrize("phase", [Phase.AGGREGATE, Phase.REVEAL, Phase.REPORT, Phase.CONFIRM])
def test_what_was_committed_to_in_an_attempt_that_died_is_checked(phase: Phase) -> None:
    """Its sender falls silent before the step is taken: the cheat did no harm, and is punished all the same."""
    banned = 0
    for seed in (1, 2, 3):
        attack = WrongThenSilent(phase=phase, at=3)
        swarm = make_swarm({7: attack}, founders=8, byzantine=2, steps=9, seed=seed)
        swarm.run(400.0, swarm.is_over)
        assert_unharmed(swarm)
        first = next(view for view in list_views(swarm) if view.step == 3)
        cheats = swarm.keys[7] in compute_duties(swarm.config, first).contributors
        checkers = {
            check.checker
            for view in list_views(swarm)
            for check in compute_duties(swarm.config, view).checks
            if (check.target, check.step, check.attempt) == (swarm.keys[7], 3, first.attempt)
        }
        assert bool(checkers) == cheats
        assert (get_bans(swarm) == {swarm.keys[7]: Rule.GRADIENT}) == cheats, describe(swarm)
        banned += cheats
    assert banned


@dataclass(kw_only=True, eq=False)
class WrongThenSilent(WrongGradient):
    """A wrong gradient in one step, and one message of that step kept back."""

    phase: Phase
    at: int

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return super().on_gradient(insider, step, seed, gradient) if step == self.at else gradient

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        hides = sign.phase is self.phase and sign.step == self.at and "hid" not in insider.notes
        if hides:
            insider.notes["hid"] = True
        return None if hides else sign


def test_one_hiccup_of_everybody_in_turn_costs_nobody_its_place() -> None:
    """Ten honest members, each out for a while: all are members at the end, and one absence is on record for each."""
    swarm = make_swarm({}, founders=10, byzantine=2, steps=90)
    checkers = watch(swarm)
    for number in range(10):
        other = swarm.keys[(number + 1) % 10]
        start = 2 + 3 * number
        assert swarm.run(900.0, lambda other=other, start=start: get_peer(swarm, other).view.step >= start)  # type: ignore[misc]
        swarm.crash(swarm.keys[number], 0.0)
        swarm.run(swarm.world.now + 15.0)
        swarm.restart(swarm.keys[number])
    swarm.run(900.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    assert not get_bans(swarm)
    last = list_views(swarm)[-1]
    assert {*last.roster} == {*swarm.keys}
    assert all(record.count == 1 for record in last.absences)
    finished = [event.view for _, event in swarm.events[swarm.keys[0]] if isinstance(event, StepFinished)]
    assert min(len(view.roster) for view in finished) >= compute_floor(swarm.config, 2)


@pytest.mark.parametrize("after", [3.0, 5.0, 6.0, 7.0])
def test_one_that_comes_back_while_its_removal_is_settled_learns_of_it_at_once(after: float) -> None:
    """It once waited in the old view for as long as a gradient may take, and then for timeouts: thirty deltas."""
    swarm = make_swarm({}, founders=10, byzantine=2, steps=40)
    late, other = swarm.keys[9], swarm.keys[0]
    assert swarm.run(900.0, lambda: get_peer(swarm, other).view.step >= 3)
    swarm.crash(late, 0.0)
    slow = lambda: any(isinstance(event, SlowPath) for _, event in swarm.events[other])  # noqa: E731
    assert swarm.run(900.0, slow)
    swarm.run(swarm.world.now + after)
    swarm.restart(late)
    assert swarm.run(900.0, lambda: late not in get_peer(swarm, other).view.roster), "too late for the slow path"
    gone = swarm.world.now
    assert swarm.run(900.0, lambda: late in get_peer(swarm, other).view.roster)
    assert swarm.world.now - gone <= 10 * swarm.config.delta


def test_attackers_that_were_members_while_few_were_do_not_halt_the_run_when_all_are_back() -> None:
    """Of attempts at the floor fewer than ``2 b_t + 1`` are left without them, which are waited for, not for ever."""
    start = 5
    swarm = make_swarm(dict.fromkeys((6, 7), Mute(start=start)), founders=8, byzantine=2, steps=12)
    checkers = watch(swarm)
    other = swarm.keys[2]
    assert swarm.run(900.0, lambda: get_peer(swarm, other).view.step >= 2)
    for key in swarm.keys[:2]:
        swarm.crash(key, 0.0)
    assert swarm.run(900.0, lambda: not {*swarm.keys[:2]} & {*get_peer(swarm, other).view.roster})
    for key in swarm.keys[:2]:
        swarm.restart(key)
    assert swarm.run(900.0, lambda: {*swarm.keys} == {*get_peer(swarm, other).view.roster})
    view = get_peer(swarm, other).view
    assert any(len(record.roster) == compute_floor(swarm.config, 2) for record in view.attempts), "and they are checked"
    assert view.step <= start
    swarm.run(2000.0, swarm.is_over)
    checkers.finish()
    assert checkers.violations == []
    assert swarm.is_over()
    assert {*list_views(swarm, 2)[-1].roster} == {*swarm.keys[:6]}
