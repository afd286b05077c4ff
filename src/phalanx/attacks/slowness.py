"""Attacks on the pace: nothing here is ever wrong, it only costs the others time.

No rule of the broadcast is broken: each message is in time for its deadline. What a step takes is all that changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from statistics import median_low

from phalanx.attacks.base import Attack, Insider, Mail, change_body
from phalanx.attacks.broadcast import ALL_PHASES, is_own
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.effects import Delivery, Effect, Heard, KeepMessages, Note, Sign, Story
from phalanx.core.envelope import open_body
from phalanx.core.events import AttemptStarted
from phalanx.core.messages import MAX_CASES, Message, Phase, Rule, Signed

_MARGIN = 0.4
"""Deltas before a deadline at which a message is still in time, whatever links and clocks do."""

# ---- When others give up waiting


def find_patience(insider: Insider, phase: Phase) -> float:
    """Seconds from the completion of the height before until others complain that my message is missing."""
    config, delta = insider.config, insider.config.delta
    gather = 4 * delta + config.transfer_time
    checks = Counter(check.checker for check in insider.duties.checks)
    work = {
        Phase.COMMIT: config.gradient_time,
        Phase.AGGREGATE: gather,
        Phase.AGGREGATE_AGAIN: 2 * (6 * delta + config.transfer_time),
        Phase.REPORT: gather + config.gradient_time * max(checks.values(), default=0),
        Phase.REPORT_AGAIN: gather,
        Phase.VOTE: config.gradient_time + 2 * config.transfer_time + 12 * delta,
    }
    return 4 * delta + work.get(phase, 0.0)


def note_completion(insider: Insider, effect: Effect) -> None:
    """Remember when the last height was complete for me: the clocks of all others run from about then."""
    started = isinstance(effect, Note) and isinstance(effect.event, AttemptStarted)
    if started or (isinstance(effect, KeepMessages) and effect.kind is Heard.MESSAGES):
        insider.notes["completed"] = insider.now


def get_completion(insider: Insider) -> float:
    """When the last height was complete for the others: not before they had my own message of it."""
    completed = insider.notes.get("completed", insider.now)
    return float(max(completed, insider.notes.get("released", completed)))


def hold_back(insider: Insider, to: tuple[bytes, ...], message: Message, until: float) -> Iterable[Mail]:
    """Send a message at ``until``, or now if that has passed. What I hold back nobody gets from me by asking."""
    if until <= insider.now:
        return ((to, message),)
    if isinstance(message, Signed):
        insider.withhold(message)
    insider.send_later(until - insider.now, to, message)
    return ()


# ---- Slow to all


@dataclass(kw_only=True, eq=False)
class EveryDeadline(Attack):
    """Each agreed message, and each part, at ``share`` of the time that others wait for it: by default just in time.

    With ``turns`` the attackers take turns, step by step: one of them is slow, the others are as fast as they can be.
    """

    share: float = 1.0
    turns: bool = False
    phases: Collection[Phase] = ALL_PHASES
    parts: bool = True

    def is_active(self, insider: Insider) -> bool:
        crew = sorted(insider.plot.keys)
        mine = not self.turns or crew[insider.view.step % len(crew)] == insider.key
        return mine and super().is_active(insider)

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        note_completion(insider, effect)
        return (yield from super().on_effect(insider, effect))

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        margin = _MARGIN * insider.config.delta
        if isinstance(message, Signed) and is_own(insider, message, self.phases):
            if insider.notes.get("held", -1) >= message.height:  # said again: only when it was said once
                return ((to, message),)
            insider.notes["held"] = message.height
            wait = self.share * find_patience(insider, message.phase) - margin
            until = max(insider.now, get_completion(insider) + wait)
            insider.notes["released"] = until
            return hold_back(insider, to, message, until)
        if self.parts and isinstance(message, m.PartChunk) and message.owner == insider.key:
            wait = self.share * (4 * insider.config.delta + insider.config.transfer_time) - margin
            return hold_back(insider, to, message, get_completion(insider) + wait)
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class SlowCommit(Attack):
    """COMMIT at ``factor`` times the median of the others, counted from the REVEAL before it; else as fast as any."""

    factor: float = 1.9

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        if isinstance(effect, KeepMessages) and effect.kind is Heard.MESSAGES:
            said = [x for x in effect.messages if isinstance(x, Signed) and x.phase is Phase.REVEAL]
            if said:
                insider.notes["revealed"] = insider.now
        return (yield from super().on_effect(insider, effect))

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.COMMIT,)):
            return ((to, message),)
        if "revealed" not in insider.notes or insider.notes.get("held", -1) >= message.height:
            return ((to, message),)
        insider.notes["held"] = message.height
        insider.withhold(message)
        insider.notes["mine"] = (to, message)
        self._release(insider)
        return ()

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if isinstance(message, Signed) and message.phase is Phase.COMMIT and message.sender in insider.others:
            insider.notes.setdefault(("commits", message.height), {}).setdefault(message.sender, delivery.now)
            self._release(insider)
        return delivery

    def _release(self, insider: Insider) -> None:
        """Once the median is known: not before, so that it is never exceeded."""
        to, message = insider.notes.get("mine", ((), None))
        if message is None:
            return
        came = insider.notes.get(("commits", message.height), {})
        if 2 * len(came) > len(insider.others):
            del insider.notes["mine"]
            insider.notes.pop(("commits", message.height), None)
            since = insider.notes["revealed"]
            due = since + self.factor * (median_low(sorted(came.values())) - since)
            insider.send_later(max(0.0, due - insider.now), to, message)


# ---- Slow to one


@dataclass(kw_only=True, eq=False)
class SlowToOne(Attack):
    """To one honest member ``parts`` and ``aggregates`` just in time, and ``letters`` only when others have gone on.

    To all others in time: they see nothing but a victim that is late. With ``turns`` each step has another victim.
    """

    parts: bool = True
    aggregates: bool = True
    letters: bool = False
    turns: bool = False

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        note_completion(insider, effect)
        return (yield from super().on_effect(insider, effect))

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        honest = insider.honest
        victim = honest[insider.view.step % len(honest) if self.turns else 0]
        insider.plot.notes.setdefault("victims", set()).add(victim)
        if victim not in to:
            return ((to, message),)
        config = insider.config
        part = self.parts and isinstance(message, m.PartChunk) and message.owner == insider.key
        if part or (self.aggregates and isinstance(message, m.AggregateChunk)):
            wait = 4 * config.delta + config.transfer_time - _MARGIN * config.delta
        elif self.letters and is_own(insider, message):
            wait = 3 * config.delta
        else:
            return ((to, message),)
        insider.send_later(wait, (victim,), message)
        return ((tuple(key for key in to if key != victim), message),)


# ---- Rounds that nobody needed


@dataclass(kw_only=True, eq=False)
class FalseLacking(Attack):
    """REPORT lacks an aggregate that is here, so that all report again; then it is not lacking after all."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body = sign.body
        if not isinstance(body, m.Report) or sign.phase is not Phase.REPORT or not insider.honest:
            return sign
        count, part = len(insider.view.roster), insider.view.roster.index(insider.honest[0])
        sums = tuple(0.0 if place % count == part else value for place, value in enumerate(body.sums))
        norms = tuple(0.0 if place == part else value for place, value in enumerate(body.norms))
        return change_body(sign, sums=sums, norms=norms, lacking=tuple(sorted({*body.lacking, part})))


@dataclass(kw_only=True, eq=False)
class QuietComplaints(Attack):
    """AGGREGATE misses a part that is here, of one member after another: each pair stays below what removes it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Aggregate) or sign.phase is not Phase.AGGREGATE or sign.body.missing:
            return sign
        victim = self._choose(insider)
        if victim is None:
            return sign
        return change_body(sign, result=None, missing=(insider.view.roster.index(victim),))

    def _choose(self, insider: Insider) -> bytes | None:
        """A contributor with whom I am not at odds too often, if I may be at odds with one more."""
        config, view = insider.config, insider.view
        since = view.step - config.complaint_window
        recent = [x for x in view.complaints if x.step > since and insider.key in (x.namer, x.named)]
        counts = Counter(x.named if x.namer == insider.key else x.namer for x in recent)
        new = len(counts) < view.bound
        for key in insider.duties.contributors:
            if key not in insider.plot.keys and counts[key] < config.complaints - 1 and (new or key in counts):
                return key
        return None


@dataclass(kw_only=True, eq=False)
class ManyAccusations(Accuser):
    """Once: wrong gradients, it says, of ``count`` honest commits of the steps that are kept. All are recomputed."""

    count: int = 56

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm) or insider.notes.get(self) or insider.view.step < self.start + 3:
            return sign
        view = insider.view
        kept = {(view.step, view.attempt), *((record.step, record.attempt) for record in view.attempts)}
        charges = []
        for (_, key), said in sorted(insider.heard.items(), key=lambda item: item[0], reverse=True):
            place = (said.step, said.attempt)
            if said.phase is Phase.COMMIT and key not in insider.plot.keys and place in kept:
                body = open_body(said)
                if isinstance(body, m.Commit) and body.parts is not None:
                    charges.append(m.Accusation(Rule.GRADIENT, key, *place, (), said, None, (), ()))
        insider.notes[self] = len(charges)
        return self.bring(insider, sign, *charges[: min(self.count, MAX_CASES)])
