"""Breaks at the floor and around REVEAL that a reader found: free denials, shares that stray, members gone blind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from torch import Tensor

from phalanx.attacks import Attack, Insider, combine
from phalanx.attacks.base import Mail, change_body
from phalanx.attacks.broadcast import is_own
from phalanx.attacks.justice import IdleValidator, ShieldingVotes
from phalanx.core import messages as m
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Delivery, Sign
from phalanx.core.envelope import open_body, seal
from phalanx.core.events import Banned, StepFinished
from phalanx.core.membership import (
    Target,
    _draw_order,
    compute_floor,
    compute_margin,
    draw_targets,
    find_last,
    make_genesis,
)
from phalanx.core.messages import Message, Phase, Signed
from phalanx.network.simulated import Links
from phalanx.simulation.checkers import Checkers
from phalanx.simulation.swarm import Setup, Swarm
from phalanx.simulation.weather import Stalls, Weather


def make_swarm(n: int, b: int, attack: Attack | None, steps: int = 40, seed: int = 1, **settings: Any) -> Swarm:
    usual = {"byzantine": b, "steps": steps, "gradient_time": 1.0, "transfer_time": 1.0}
    attackers = {n - 1 - number: attack for number in range(b)} if attack is not None else {}
    setup = Setup(founders=n, settings={**usual, **settings}, compute_time=0.3, attackers=attackers)
    return Swarm(setup, seed, Links(delta=0.9, low=0.02, high=0.1), keep_events=True)


def list_banned(swarm: Swarm) -> set[bytes]:
    return {e.key for events in swarm.events.values() for _, e in events if isinstance(e, Banned)}


def count_steps(swarm: Swarm) -> int:
    steps = (e.step + 1 for events in swarm.events.values() for _, e in events if isinstance(e, StepFinished))
    return max(steps, default=0)


# ---- Denials at the floor


@dataclass(kw_only=True, eq=False)
class Deny(Attack):
    """At the floor, says in ``phase`` that it lacks what all could get."""

    phase: Phase

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        view, body = insider.view, sign.body
        if compute_margin(insider.config, view) > 0 or insider.key != min(insider.plot.keys.intersection(view.roster)):
            return sign
        other = next(i for i, k in enumerate(view.roster) if k in insider.duties.contributors and k != insider.key)
        if isinstance(body, m.Aggregate) and self.phase is Phase.AGGREGATE:
            return change_body(sign, result=None, missing=(other,))
        if isinstance(body, m.Report) and self.phase is Phase.REPORT:
            parts = max(1, len(body.norms))
            sums = tuple(0.0 if at % parts == other else x for at, x in enumerate(body.sums))
            norms = tuple(0.0 if at == other else x for at, x in enumerate(body.norms))
            return change_body(sign, sums=sums, norms=norms, lacking=(other,))
        if isinstance(body, m.Confirm) and self.phase is Phase.VOTE:
            return change_body(sign, accusations=(compute_digest("no such case"),))
        return sign


def cut_off(swarm: Swarm, key: bytes, deltas: float) -> None:
    """Let one peer hiccup once, from the third step on."""
    Weather(swarm, Stalls(rate=1.0, lengths=(deltas, deltas), peers=(key,), most=1), clears=4)


@pytest.mark.parametrize("phase", [Phase.AGGREGATE, Phase.REPORT, Phase.VOTE])
def test_a_denial_at_the_floor_lets_in_a_member_that_is_back_and_the_run_goes_on(phase: Phase) -> None:
    """Said again for ever, nobody was let in: one attacker halted a run of five with all honest members well."""
    swarm = make_swarm(5, 1, Deny(phase=phase, start=2))
    cut_off(swarm, swarm.keys[0], 20.0)
    checkers = Checkers(swarm)
    swarm.run(2000.0, swarm.is_over)
    assert count_steps(swarm) == 40, "the run came to its end"
    assert not list_banned(swarm)
    checkers.finish()
    assert not [str(violation) for violation in checkers.violations if violation.rule != "few disputes"]


def test_a_wait_that_nobody_ends_keeps_no_more_than_a_few_heights() -> None:
    """Nobody is suspended that could come in, so the members wait; they neither hurry nor remember it all."""
    swarm = make_swarm(4, 1, Deny(phase=Phase.REPORT, start=2))
    swarm.run(3000.0)
    peer = swarm.get_peer(swarm.keys[0])
    assert peer is not None
    assert count_steps(swarm) == 2
    assert len(peer.view.roster) == compute_floor(swarm.config, peer.view.doubts)
    assert 100 < peer.level < 3000 / 2, "no more than one WAIT and one REPORT_AGAIN within four delta"
    assert len(peer.pages) <= 150
    assert len(peer.transcript.heights) <= 150


# ---- Shares


@dataclass(kw_only=True, eq=False)
class Cheat(Attack):
    """Sends wrong gradients, and lets its colluders know."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        insider.plot.notes.setdefault("wrong", {}).setdefault(step, set()).add(insider.key)
        return -10 * gradient


@dataclass(kw_only=True, eq=False)
class StraySharer(Attack):
    """Waits for all other shares; if a cheat would be drawn, its own REVEAL names another root."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        mine = isinstance(message, Signed) and is_own(insider, message, (Phase.REVEAL,))
        if not mine or message in insider.notes.get("sent", ()):
            return ((to, message),)
        insider.notes["share"] = message
        insider.withhold(message)
        self._decide(insider)
        return ()

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        self._decide(insider)
        return delivery

    def _decide(self, insider: Insider) -> None:
        mine, view = insider.notes.get("share"), insider.view
        if mine is None or (mine.step, mine.attempt) != (view.step, view.attempt):
            return
        heard = [mine if key == insider.key else insider.heard.get((mine.height, key)) for key in view.roster]
        if any(message is None for message in heard):
            return
        del insider.notes["share"]
        place = view.step.to_bytes(8, "little") + view.attempt.to_bytes(8, "little")
        shares = [body.share for body in map(open_body, heard) if isinstance(body, m.Reveal)]
        randomness = compute_digest("randomness", insider.config.run, place, *shares)
        before = find_last(view, view.step - 1)
        drawn = draw_targets(randomness, before.contributors, insider.config.validators) if before else ()
        if insider.plot.notes.get("wrong", {}).get(view.step - 1, set()).intersection(drawn):
            labels = (mine.height, mine.step, mine.attempt, mine.phase, compute_digest("another root"))
            body = open_body(mine)
            assert body is not None
            stray = seal(insider.signer, insider.config.run, *labels, body)
            insider.plot.notes["strayed"] = insider.plot.notes.get("strayed", 0) + 1
            insider.send_later(0.0, insider.others, stray)
        else:
            insider.notes.setdefault("sent", set()).add(mine)
            insider.send_later(0.0, insider.others, mine)


def test_a_share_that_names_another_root_has_the_whole_step_before_checked() -> None:
    """Like a share that is withheld. A colluder that did so whenever a cheat was drawn let it live 20 times longer."""
    usual = (IdleValidator(start=2), ShieldingVotes(start=2))
    attackers = {15: combine(Cheat(start=2), *usual), 14: combine(StraySharer(start=2), *usual)}
    settings = {"byzantine": 5, "steps": 150, "gradient_time": 1.0}
    setup = Setup(founders=16, settings=settings, compute_time=0.3, attackers=attackers)
    swarm = Swarm(setup, 2, Links(delta=0.9, low=0.02, high=0.1), keep_events=True)
    cheat = swarm.keys[15]
    swarm.run(1e6, lambda: swarm.is_over() or cheat in list_banned(swarm))
    assert 1 <= swarm.plot.notes["strayed"] <= 2, "it buys the steps in which the verdict is under way, no more"
    assert cheat in list_banned(swarm)
    views = [e.view for _, e in swarm.events[swarm.keys[0]] if isinstance(e, StepFinished)]
    most = max(views, key=lambda view: len(view.targets))
    before = find_last(most, most.step - 2)
    assert before is not None
    everybody = {Target(key, before.step, before.attempt) for key in before.contributors}
    assert everybody <= set(most.targets)
    assert all(most.targets.count(target) == 2 for target in everybody)


def test_who_leaves_moves_no_other_duty() -> None:
    """Attackers that said goodbye could draw another order, until one of them was to check the cheat."""
    swarm = make_swarm(8, 2, None)
    randomness, roster = compute_digest("some randomness"), make_genesis(swarm.config).roster
    order = _draw_order(randomness, roster)
    for gone in roster:
        left = tuple(key for key in roster if key != gone)
        assert _draw_order(randomness, left) == tuple(key for key in order if key != gone)


# ---- Blind


@dataclass(kw_only=True, eq=False)
class BlindBeside(Attack):
    """Once the victim has lost its rows, lies about its part, keeps its own from it, and says that it is blind too."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes, view, body = insider.plot.notes, insider.view, sign.body
        if notes.get("at") != (view.step, view.attempt) or insider.key != min(insider.plot.keys):
            return sign
        if isinstance(body, m.Report) and body.norms:
            place, parts = view.roster.index(notes["victim"]), len(view.roster)
            return change_body(sign, sums=tuple(x + 5.0 * (at % parts == place) for at, x in enumerate(body.sums)))
        return change_body(sign, blind=True) if isinstance(body, m.Confirm) else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes, view = insider.plot.notes, insider.view
        if notes.get("at") != (view.step, view.attempt):
            return ((to, message),)
        if isinstance(message, m.PartChunk) and notes.get("down"):
            to = tuple(key for key in to if key != notes["victim"])
        mine = isinstance(message, Signed) and is_own(insider, message, (Phase.REPORT,))
        if mine and insider.key == min(insider.plot.keys) and "late" not in insider.notes:
            insider.notes["late"] = True
            insider.withhold(message)
            insider.send_later(3.5, insider.others, message)  # the victim is back before it
            return ()
        return ((to, message),)


def test_a_member_that_lost_its_rows_is_never_banned_because_others_say_they_did_too() -> None:
    """One above the floor the run could spare each blind member, not both: then neither counted as blind, for V2."""
    swarm = make_swarm(8, 2, BlindBeside(start=0), steps=16)
    victim, notes = swarm.keys[0], swarm.plot.notes
    notes["victim"] = victim
    swarm.world.at(0.5, lambda: swarm.crash(swarm.keys[1]))

    class Trip:
        """Lets the victim crash right after its REPORT of the sixth step, and start again."""

        def on_note(self, time: float, key: bytes, event: Any) -> None:
            if isinstance(event, StepFinished) and event.step == 5 and "at" not in notes:
                assert compute_margin(swarm.config, event.view) == 1
                notes["at"] = (event.view.step, event.view.attempt)

        def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
            phase = msgspec.msgpack.decode(payload)[4] if domain is Domain.AGREED and key == victim else None
            if phase == Phase.REPORT and "at" in notes and "down" not in notes:
                notes["down"] = True
                swarm.world.at(swarm.world.now + 0.15, lambda: swarm.crash(victim, 0.0))
                swarm.world.at(swarm.world.now + 0.35, lambda: swarm.restart(victim))

    swarm.observers.append(Trip())
    swarm.run(2000.0, swarm.is_over)
    assert notes.get("down")
    assert not {key for key in list_banned(swarm) if swarm.is_honest(key)}
    assert count_steps(swarm) == 16
