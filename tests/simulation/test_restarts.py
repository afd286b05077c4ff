"""All members are stopped in the middle of a step, or crash one by one at the worst of moments.

What they signed, and what others signed that it rests on, is on their disks. So nobody honest goes for what it said
before the stop, nobody can say now that it said something else, and no two views follow one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_breaks import (
    STEADY,
    assert_unharmed,
    describe,
    get_bans,
    get_events,
    get_most_attempts,
    get_notes,
    get_peer,
    make_swarm,
)

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.base import change_body
from phalanx.core import messages as m
from phalanx.core.certificates import find_certificate
from phalanx.core.codec import decode_body
from phalanx.core.crypto import Domain
from phalanx.core.effects import Sign
from phalanx.core.events import Removed
from phalanx.core.membership import View
from phalanx.core.messages import Message, Phase, Rule, Signed
from phalanx.network.simulated import USUAL
from phalanx.simulation.swarm import Swarm

STEP = 2
"""The step in which members are stopped."""


def has_signed(swarm: Swarm, key: bytes, phase: Phase) -> bool:
    """Whether a member has said its word in a phase of the step."""
    said = swarm.world.get_disk(key).journal.values()
    return any((message.step, message.phase) == (STEP, phase) for message in said)


def run_to(swarm: Swarm, phase: Phase, count: int = 5) -> View:
    """Let the run go on until so many members have signed in a phase of the step; the view in which they did."""
    assert swarm.run(200.0, lambda: get_peer(swarm, swarm.keys[0]).view.step == STEP)
    view = get_peer(swarm, swarm.keys[0]).view
    assert swarm.run(200.0, lambda: sum(has_signed(swarm, key, phase) for key in swarm.keys) >= count)
    return view


def stop_all(swarm: Swarm, away: Collection[int] = ()) -> None:
    """A power cut: all disks are whole. Those who are ``away`` do not come back."""
    for key in swarm.keys:
        swarm.crash(key)
    for index, key in enumerate(swarm.keys):
        if index not in away:
            swarm.restart(key)
    for insider in swarm.insiders.values():
        insider.notes["stopped"] = (insider.view.step, insider.view.attempt)


def is_stopped(insider: Insider, step: int, attempt: int) -> bool:
    """Whether this is the attempt in which all were stopped, and they have begun again."""
    return bool(insider.notes.get("stopped") == (step, attempt))


# ---- One does not come back

PHASES = (Phase.COMMIT, Phase.AGGREGATE, Phase.REVEAL, Phase.REPORT, Phase.CONFIRM)
FIVE: dict[str, Any] = {"founders": 5, "byzantine": 1, "steps": 6, "links": STEADY}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_an_attacker_that_stays_away_after_a_stop_of_all_harms_nobody(phase: Phase, count: int) -> None:
    swarm = make_swarm({4: Attack()}, **FIVE)
    run_to(swarm, phase, count)
    stop_all(swarm, away=(4,))
    swarm.run(400.0, swarm.is_over)
    assert_unharmed(swarm)
    assert not get_bans(swarm), describe(swarm)
    assert swarm.keys[4] not in get_peer(swarm, swarm.keys[0]).view.roster


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_machine_that_stays_broken_after_a_stop_of_all_is_not_banned(phase: Phase, count: int) -> None:
    swarm = make_swarm({}, **FIVE)
    run_to(swarm, phase, count)
    stop_all(swarm, away=(3,))
    swarm.run(400.0, swarm.is_over)
    assert not get_bans(swarm), describe(swarm)
    assert {event.key for event in get_events(swarm, Removed)} == {swarm.keys[3]}, describe(swarm)
    assert swarm.finished == {*swarm.keys} - {swarm.keys[3]}, describe(swarm)


# ---- One says that it said something else


@dataclass(kw_only=True, eq=False)
class Rewrite(Attack):
    """After the stop it commits to another share than before."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Commit) or not is_stopped(insider, sign.step, sign.attempt):
            return sign
        insider.notes["rewritten"] = True
        changed = change_body(sign, share=bytes(32))
        return insider.seal(changed)


@pytest.mark.parametrize("phase", PHASES[1:], ids=lambda phase: phase.name)
def test_who_rewrites_its_past_after_a_stop_of_all_is_banned(phase: Phase) -> None:
    swarm = make_swarm({4: Rewrite()}, **FIVE)
    run_to(swarm, phase)
    stop_all(swarm)
    swarm.run(400.0, swarm.is_over)
    assert get_notes(swarm, 4)["rewritten"]
    assert_unharmed(swarm)
    assert get_bans(swarm) == {swarm.keys[4]: Rule.EQUIVOCATION}, describe(swarm)


# ---- Many have lost the rows of their parts


@dataclass(kw_only=True, eq=False)
class KeepsParts(Attack):
    """After the stop it says all that it said before, but sends nobody its parts again."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and is_stopped(insider, message.step, message.attempt):
            insider.notes["kept parts"] = True
            return ()
        return ((to, message),)


def test_members_that_cannot_check_their_parts_cause_no_storm_of_messages() -> None:
    sent: Counter[int] = Counter()  # in each second, which is delta

    def route(now: float, *_: object) -> float | None:
        sent[int(now)] += 1
        return USUAL

    settings = {**FIVE, "links": replace(STEADY, route=route)}
    calm = make_swarm({4: Attack()}, **settings)
    calm.run(400.0, calm.is_over)
    most = 2 * max(sent.values())
    sent.clear()
    swarm = make_swarm({4: KeepsParts()}, **settings)
    run_to(swarm, Phase.REPORT)
    stop_all(swarm)
    swarm.run(400.0, lambda: swarm.is_over() or max(sent.values()) > most)
    assert max(sent.values()) <= most
    assert_unharmed(swarm)
    assert get_most_attempts(swarm) <= 3


# ---- A quorum is bound, and its members crash


def is_final_vote(message: Message) -> bool:
    if not isinstance(message, Signed) or message.domain is not Domain.OUTCOME:
        return False
    body = decode_body(message.body)
    return isinstance(body, m.Outcome) and body.final


def find_successors(swarm: Swarm, view: View) -> set[View]:
    """The views after this one that anybody can show a certificate for."""
    links = [link for key in swarm.keys for link in get_peer(swarm, key).links]
    return {later for later, by in links if find_certificate(swarm.config, swarm.examiner, view, later, by)}


def test_who_is_bound_by_its_vote_is_so_after_a_crash() -> None:
    """One member alone sees the final votes of all; the others crash and come back, then settle with the one left out.

    No more than one of five is out at any moment, and nobody is false.
    """
    kept_back = False

    def route(_: float, sender: bytes, to: bytes, message: Message) -> float | None:
        shows = sender == first and isinstance(message, m.Certificate | m.Chain)
        return None if kept_back and (shows or (is_final_vote(message) and to != first)) else USUAL

    swarm = make_swarm({}, partition_safe=True, **{**FIVE, "links": replace(STEADY, route=route)})
    first, second, third, left_out, last = swarm.keys
    before = run_to(swarm, Phase.AGGREGATE)
    kept_back = True
    swarm.partition({left_out}, {first, second, third, last})
    assert swarm.run(100.0, lambda: get_peer(swarm, first).view != before)
    swarm.partition({left_out}, {first}, {second, third, last})
    kept_back = False
    swarm.run(swarm.world.now + 10.0)
    for key in (second, third, last):
        swarm.crash(key)
        swarm.restart(key)
        swarm.run(swarm.world.now + 5.0)
    swarm.partition({first}, {second, third, left_out, last})
    swarm.run(swarm.world.now + 100.0)
    assert len(find_successors(swarm, before)) == 1, describe(swarm)
    swarm.heal()
    assert swarm.run(swarm.world.now + 100.0, swarm.is_over), describe(swarm)
    assert len(find_successors(swarm, before)) == 1, describe(swarm)
    assert {event.key for event in get_events(swarm, Removed)} == {left_out}, describe(swarm)
    assert swarm.finished == {*swarm.keys}, describe(swarm)
