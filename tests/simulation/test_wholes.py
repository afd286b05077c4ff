"""A slow path is over as soon as all members say that they hold what was missing; liars gain nothing by that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from test_breaks import describe, get_bans, get_events, get_peer

from phalanx.attacks import ATTACKS, Attack, Insider, Mail, combine, load_attack
from phalanx.core.crypto import Domain
from phalanx.core.effects import Delivery
from phalanx.core.envelope import open_body
from phalanx.core.events import Removed, SlowPath, StepFinished
from phalanx.core.messages import Message, Signed
from phalanx.network.simulated import USUAL, Links
from phalanx.simulation.checkers import Checkers
from phalanx.simulation.swarm import Setup, Swarm

DELTA = 1.0
VICTIM = 0


class Play:
    """A swarm of eight in which one honest member is cut off in a step, and back when a slow path has opened."""

    def __init__(self, attackers: dict[int, Attack] | None = None, after: float = 1.0, seed: int = 3, **more: object):
        self.until = -1.0
        settings = {"byzantine": 2, "steps": 8, "delta": DELTA, "transfer_time": 1.0, **more}
        setup = Setup(founders=8, settings=settings, compute_time=0.3, attackers=attackers or {})
        self.swarm = Swarm(setup, seed, Links(delta=0.9, low=0.02, high=0.1, route=self.route), keep_events=True)
        self.checkers = Checkers(self.swarm)
        other = self.swarm.keys[1]
        assert self.swarm.run(500.0, lambda: get_peer(self.swarm, other).view.step >= 3)
        self.until = 1e9
        opened = lambda: any(isinstance(event, SlowPath) for _, event in self.swarm.events[other])  # noqa: E731
        assert self.swarm.run(500.0, opened)
        self.opened = self.swarm.world.now
        self.until = self.opened + after
        self.step = get_peer(self.swarm, other).view.step
        self.swarm.run(1500.0, self.swarm.is_over)
        self.checkers.finish()
        ends = [time for time, event in self.swarm.events[other] if isinstance(event, StepFinished)]
        self.took = min(time for time in ends if time > self.opened) - self.opened

    def route(self, now: float, sender: bytes, to: bytes, message: Message) -> float:
        if self.until > now and self.swarm.keys[VICTIM] in (sender, to):
            return min(self.until - now, 1e4) + 0.05 if self.until < 1e8 else 12.0
        return USUAL

    def assert_unharmed(self) -> None:
        assert self.checkers.violations == [], describe(self.swarm)
        assert self.swarm.is_over(), describe(self.swarm)
        assert not {event.key for event in get_events(self.swarm, Removed)} & {*self.swarm.honest}, describe(self.swarm)


def is_whole(message: Message) -> bool:
    return isinstance(message, Signed) and message.domain is Domain.ENDORSEMENT


@dataclass(kw_only=True, eq=False)
class NeverWhole(Attack):
    """Does not say what it holds, or only to one member."""

    to_one: bool = False

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not is_whole(message):
            return ((to, message),)
        insider.plot.notes["kept back"] = True
        return ((insider.honest[-1:], message),) if self.to_one else ()


@dataclass(kw_only=True, eq=False)
class SilentBeyond(Attack):
    """Says nothing on the fast path for a while after a slow path, as if it had not heard of its end."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        agreed = isinstance(message, Signed) and message.domain is Domain.AGREED
        if agreed and insider.plot.notes.pop("kept back", None):
            insider.plot.notes["kept back"] = insider.notes["held"] = True
            insider.send_later(7 * DELTA, to, message)
            return ()
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class AlwaysWhole(Attack):
    """Says to each member that it holds what that member holds."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if isinstance(message, Signed) and is_whole(message) and message.sender in insider.honest:
            body = open_body(message)
            assert body is not None
            insider.plot.notes["echoed"] = True
            insider.send_later(0.0, (message.sender,), insider.seal_again(message, body))
        return delivery


def test_a_slow_path_is_over_when_what_was_missing_has_come() -> None:
    play = Play()
    play.assert_unharmed()
    assert play.took < 4 * DELTA, "three rounds alone take six"
    view = get_peer(play.swarm, play.swarm.keys[1]).view
    assert {count.key for count in view.strikes} == {play.swarm.keys[VICTIM]}, "it costs a strike all the same"


def test_one_that_keeps_back_what_it_holds_delays_the_end_and_no_more() -> None:
    """Unless it goes on, which shows what it holds as well, the slow path takes all its rounds."""
    silent = combine(NeverWhole(), SilentBeyond())
    plain, longer = Play({7: NeverWhole()}), Play({7: silent})
    plain.assert_unharmed()
    longer.assert_unharmed()
    assert plain.swarm.plot.notes["kept back"]
    assert longer.took > 6 * DELTA


@pytest.mark.parametrize("after", [0.3, 1.0, 1.5])
def test_one_that_says_what_it_holds_to_one_member_puts_nobody_out(after: float) -> None:
    play = Play(dict.fromkeys((6, 7), NeverWhole(to_one=True)), after)
    play.assert_unharmed()
    assert play.swarm.plot.notes["kept back"]


@pytest.mark.parametrize("phase", ["commit", "aggregate", "reveal", "report", "confirm"])
@pytest.mark.parametrize("seed", [1, 2])
def test_an_equivocator_that_agrees_with_everybody_is_banned(phase: str, seed: int) -> None:
    """It gives two values, and says to each that it holds the same as they."""
    for name in {f"equivocate_{phase}", f"equivocate_{phase}_to_each"} & {*ATTACKS}:
        attackers = {6: AlwaysWhole(), 7: combine(load_attack(f"{name}@3"), AlwaysWhole())}
        setup = Setup(founders=8, settings={"byzantine": 2, "steps": 8}, attackers=attackers)
        swarm = Swarm(setup, seed, keep_events=True)
        checkers = Checkers(swarm)
        swarm.run(900.0, swarm.is_over)
        checkers.finish()
        assert checkers.violations == []
        assert swarm.is_over(), describe(swarm)
        assert get_bans(swarm).keys() == {swarm.keys[7]}
