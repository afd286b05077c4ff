"""Attackers that wait for bad weather: they behave until honest members are out, and act when it costs them least.

What they wait for is a :class:`Moment`. The rules that they wait to see broken are in docs/THREAT_MODEL.md: honest
members that are out must neither let a cheat go unpunished nor keep the others from coming back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch import Tensor

from phalanx.attacks.aggregation import CoveredAggregate, FalseComplaints
from phalanx.attacks.base import Attack, Insider, Mail, change_body
from phalanx.attacks.broadcast import PrematureTimeouts, is_own
from phalanx.attacks.justice import IdleValidator, LyingValidator, ShieldingVotes
from phalanx.core import messages as m
from phalanx.core.crypto import compute_digest
from phalanx.core.effects import ComputeAggregate, ComputeReport, Delivery, Sign
from phalanx.core.envelope import open_body
from phalanx.core.membership import compute_floor, draw_targets, find_last
from phalanx.core.messages import Message, Phase, Signed
from phalanx.core.verification import Projections

_LEARNED = 30
"""Steps after which the plot knows how many members are usually out."""
_CHECKED = 3
"""Steps for which a cheat may still be drawn."""


class Moment(Enum):
    """What patient attackers wait for."""

    ALWAYS = "always"
    OUTNUMBERED = "outnumbered"
    """Honest members are no more than the bound: nobody can be convicted. From then on for ever."""
    LEAST_MARGIN = "least margin"
    """The roster is as close to its floor as it ever was, and some honest member is out."""
    AT_FLOOR = "at the floor"
    """One member less, and the run has to wait."""
    SOMEBODY_OUT = "somebody out"
    """An honest founder is not in the roster."""


def is_ripe(insider: Insider, moment: Moment) -> bool:
    """Whether the plot's moment has come, as far as this attacker knows; found once for each view."""
    if moment is Moment.ALWAYS:
        return True
    if moment is Moment.OUTNUMBERED and insider.plot.notes.get("begun"):
        return True
    held = insider.notes.get(moment)
    if held is None or held[0] is not insider.view:
        held = insider.notes[moment] = insider.view, _find_ripe(insider, moment)
    return bool(held[1])


def _find_ripe(insider: Insider, moment: Moment) -> bool:
    view, notes = insider.view, insider.plot.notes
    if insider.key not in view.roster:
        return False
    margin = len(view.roster) - compute_floor(insider.config, view.doubts)
    out = set(insider.config.founders) - {*view.roster, *view.banned} - insider.plot.keys
    if moment is Moment.OUTNUMBERED:
        notes["begun"] = len(insider.honest) <= view.bound
        return bool(notes["begun"])
    if moment is Moment.LEAST_MARGIN:
        seen = notes.setdefault("margins", {})
        seen[view.step] = min(margin, seen.get(view.step, margin))
        least = min(value for step, value in seen.items() if step >= view.step - 10 * _LEARNED)
        return view.step >= _LEARNED and bool(out) and margin <= least
    return margin <= 0 if moment is Moment.AT_FLOOR else bool(out)


@dataclass(kw_only=True, eq=False)
class Patient(Attack):
    """Honest until its moment; a base for attacks that wait."""

    moment: Moment = Moment.LEAST_MARGIN

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and is_ripe(insider, self.moment)


def get_rank(insider: Insider) -> int:
    """My place among the attackers, so that they can share the work without a word."""
    return sorted(insider.plot.keys).index(insider.key)


def is_cheat(insider: Insider) -> bool:
    """Whether this one cheats while others stay clean: every other attacker does, and one that is alone."""
    return get_rank(insider) % 2 == 0


def note_cheat(insider: Insider, step: int) -> None:
    """Put on the plot's record that this attacker was wrong in a step."""
    insider.plot.notes.setdefault("cheats", {}).setdefault(insider.key, set()).add(step)


def list_cheats(insider: Insider, step: int) -> set[bytes]:
    """The attackers that were wrong in this step."""
    cheats: dict[bytes, set[int]] = insider.plot.notes.get("cheats", {})
    return {key for key, steps in cheats.items() if step in steps}


# ---- Cheating when it is cheapest


@dataclass(kw_only=True, eq=False)
class PatientGradient(Patient):
    """A wrong gradient, at its moment; with ``some``, only of every other attacker, so that the rest stay clean."""

    some: bool = False

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        if self.some and not is_cheat(insider):
            return gradient
        note_cheat(insider, step)
        return -10 * gradient


@dataclass(kw_only=True, eq=False)
class PatientAggregate(Patient, CoveredAggregate):
    """A moved aggregate whose sums its own report makes right, at its moment."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        if insider.key not in insider.duties.contributors:  # a validator reports nothing: it cannot cover its own
            return result
        return super().on_aggregate(insider, effect, result)

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        said = super().on_report(insider, effect, projections)
        if said != projections:
            note_cheat(insider, insider.view.step)
        return said

    def _find_covered(self, insider: Insider) -> list[int]:
        return [insider.index] if insider.index is not None else []


@dataclass(kw_only=True, eq=False)
class PatientShield(ShieldingVotes):
    """Colluders are innocent and everybody else is guilty, once somebody in the plot has cheated."""

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and bool(insider.plot.notes.get("cheats"))


@dataclass(kw_only=True, eq=False)
class PatientIdle(IdleValidator):
    """A validator that accuses nobody, once somebody in the plot has cheated."""

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and bool(insider.plot.notes.get("cheats"))


# ---- Keeping others out


@dataclass(kw_only=True, eq=False)
class BlockReturns(Patient):
    """Sponsors nobody but friends, lists no trials, and serves no state to honest peers that want to come back."""

    moment: Moment = Moment.SOMEBODY_OUT
    steady: ClassVar[bool] = True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, friends = sign.body, insider.plot.keys
        if isinstance(body, m.Confirm):
            return change_body(sign, joins=tuple(key for key in body.joins if key in friends))
        if isinstance(body, m.Aggregate) and body.trials:
            return change_body(sign, trials=tuple(trial for trial in body.trials if trial.key in friends))
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.StateChunk | m.Chain | m.AggregateChunk):
            here = {*insider.view.roster, *insider.plot.keys}
            to = tuple(key for key in to if key in here)
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class NameOthers(Patient, FalseComplaints):
    """Names a part of one honest member after the other missing while others are out: two may go together."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, roster = sign.body, insider.view.roster
        honest = [key for key in insider.duties.contributors if key not in insider.plot.keys]
        if not honest or not isinstance(body, m.Aggregate) or sign.phase is not Phase.AGGREGATE:
            return sign
        victim = honest[(insider.view.step + get_rank(insider)) % len(honest)]
        return change_body(sign, result=None, missing=(roster.index(victim),))


@dataclass(kw_only=True, eq=False)
class HurryOthers(Patient, PrematureTimeouts):
    """Claims at each phase that honest members are missing, while others really are."""

    count: int | None = 1


@dataclass(kw_only=True, eq=False)
class AccuseOthers(Patient, LyingValidator):
    """As a validator it accuses an honest target while others are out, and spares colluders."""


# ---- Randomness


@dataclass(kw_only=True, eq=False)
class KeepShare(Attack):
    """Keeps its REVEAL back whenever a colluder cheated in the step that is about to be drawn from."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Reveal) or not _is_keeper(insider):
            return sign
        insider.plot.notes["kept shares"] = insider.plot.notes.get("kept shares", 0) + 1
        return None


@dataclass(kw_only=True, eq=False)
class DrawAgain(Attack):
    """Reveals last, and not at all if the randomness draws a colluder that cheated: a clean one pays for the retry."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.REVEAL,)) or not _is_keeper(insider):
            return ((to, message),)
        insider.notes["share"] = message
        insider.withhold(message)
        self._decide(insider)
        return ()

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, Signed) and delivery.message.phase is Phase.REVEAL:
            self._decide(insider)
        return delivery

    def _decide(self, insider: Insider) -> None:
        mine, view = insider.notes.get("share"), insider.view
        if mine is None or (mine.step, mine.attempt) != (view.step, view.attempt):
            return
        held = [insider.heard.get((mine.height, key)) for key in view.roster]
        bodies = [open_body(x) for x in held if x is not None]
        shares = [body.share for body in bodies if isinstance(body, m.Reveal)]
        if len(shares) < len(view.roster):
            return
        del insider.notes["share"]
        place = view.step.to_bytes(8, "little") + view.attempt.to_bytes(8, "little")
        randomness = compute_digest("randomness", insider.config.run, place, *shares)
        count = (1 + sum(record.step == view.step for record in view.attempts)) * insider.config.validators
        before = find_last(view, view.step - 1)
        drawn = set(draw_targets(randomness, before.contributors, count) if before is not None else ())
        cheats = list_cheats(insider, view.step - 1)
        if drawn & cheats and not cheats.intersection(view.carried):  # who is carried over is checked in any case
            insider.plot.notes["kept shares"] = insider.plot.notes.get("kept shares", 0) + 1
        else:
            insider.send_later(0.0, insider.others, mine)


def _is_keeper(insider: Insider) -> bool:
    """Whether it falls to me to keep a share back: a cheat is to be covered, and of the clean ones I am the first."""
    step = insider.view.step
    if not list_cheats(insider, step - 1):
        return False
    recent = set().union(*(list_cheats(insider, step - back) for back in range(_CHECKED + 1)))
    here = [key for key in insider.view.roster if key in insider.plot.keys]
    clean = [key for key in here if key not in recent]
    return (clean or here)[:1] == [insider.key]


# ---- Silence, and coming back


@dataclass(kw_only=True, eq=False)
class SilentAtFloor(Patient):
    """Says nothing while the roster is at its floor, where nobody may go: one (or ``all_of_us``) holds up the run."""

    moment: Moment = Moment.AT_FLOOR
    all_of_us: bool = False

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        first = [key for key in insider.view.roster if key in insider.plot.keys][:1] == [insider.key]
        if not first and not self.all_of_us:
            return ((to, message),)
        insider.plot.notes["silent"] = True
        return ()


@dataclass(kw_only=True, eq=False)
class ReturnFirst(Patient):
    """Falls silent for ``length`` deltas when honest members are out, and asks to come back before they do.

    One attacker at a time, each at most once in ``rest`` steps.
    """

    moment: Moment = Moment.SOMEBODY_OUT
    length: float = 8.0
    rest: int = 40

    def is_active(self, insider: Insider) -> bool:
        return self._is_hiding(insider) or super().is_active(insider)

    def _is_hiding(self, insider: Insider) -> bool:
        until: float = insider.notes.get((self, "hides until"), 0.0)
        return insider.now < until

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes, step = insider.notes, insider.view.step
        if self._is_hiding(insider):
            return ()
        turn = step // self.rest % max(1, len(insider.plot.keys)) == get_rank(insider)
        if turn and is_own(insider, message) and step >= notes.get((self, "rests until"), 0):
            notes[self, "rests until"] = step + self.rest
            notes[self, "hides until"] = insider.now + self.length * insider.config.delta
            return ()
        return ((to, message),)
