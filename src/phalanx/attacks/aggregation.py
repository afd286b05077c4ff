"""Lies about parts, aggregates and reports; and keeping them back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx.attacks.base import Attack, Insider, Mail, change_body
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import ComputeAggregate, ComputeReport, Delivery, Sign
from phalanx.core.envelope import open_body
from phalanx.core.messages import Message, Signed
from phalanx.core.partition import compute_part_sizes, join_parts, split_parts
from phalanx.core.verification import Projections, compute_column, report_tolerance
from phalanx.core.wire import WIRE_TYPES


@dataclass(kw_only=True, eq=False)
class ShiftedAggregate(Attack):
    """An aggregate moved by ``shift`` in every coordinate."""

    shift: float = 1.0

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        moved = WIRE_TYPES[insider.config.wire].round(result + self.shift)
        view = insider.view
        insider.plot.notes["moved", view.step, view.attempt, insider.index] = effect.rows, moved, insider.duties
        return moved


@dataclass(kw_only=True, eq=False)
class CoveredAggregate(ShiftedAggregate):
    """A moved aggregate, and reports that make the sums right again: the aggregator's own, or a colluder's.

    Aggregators in the plot accuse nobody, or they would give each other away.
    """

    by_colluder: bool = False

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        sums, count = list(projections.sums), len(effect.parts)
        for part in self._find_covered(insider):
            made = insider.plot.notes.get(("moved", insider.view.step, insider.view.attempt, part))
            if made is None:
                continue
            rows, aggregate, _ = made
            columns, _ = compute_column(rows, aggregate, effect.seeds[part], effect.tau)
            for place in range(len(effect.seeds[part])):
                sums[place * count + part] -= float(columns[place].sum())
        return Projections(tuple(sums), projections.norms)

    def _find_covered(self, insider: Insider) -> list[int]:
        roster = insider.view.roster
        liars = [key for key in insider.duties.contributors if key in insider.plot.keys]
        found = []
        for part, key in enumerate(roster):
            if key in insider.plot.keys:
                fitting = [liar for liar in liars if (liar != key) == self.by_colluder]
                if fitting[:1] == [insider.key]:
                    found.append(part)
        return found

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Confirm):
            return change_body(sign, accusations=())
        return sign


@dataclass(kw_only=True, eq=False)
class QuietShift(ShiftedAggregate):
    """A moved aggregate, and no accusation of those who cover it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, accusations=()) if isinstance(sign.body, m.Confirm) else sign


@dataclass(kw_only=True, eq=False)
class Cover(CoveredAggregate):
    """The first contributor of the plot makes the sums right for all the others; its own aggregate stays as it is."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        return result

    def _find_covered(self, insider: Insider) -> list[int]:
        return [*range(len(insider.view.roster))] if insider.crew[:1] == (insider.key,) else []


@dataclass(kw_only=True, eq=False)
class HiddenPart(CoveredAggregate):
    """Covers its moved aggregate by its own report, and shows nobody its gradient there: nobody could recompute it."""

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        contributes = insider.key in insider.duties.contributors
        return super().on_aggregate(insider, effect, result) if contributes else result

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if is_own_part(insider, message) else ((to, message),)


def is_own_part(insider: Insider, message: Message) -> bool:
    """Whether these are bytes of my gradient in the part that I aggregate: nobody else holds them."""
    return isinstance(message, m.PartChunk) and (message.owner, message.part) == (insider.key, insider.index)


@dataclass(kw_only=True, eq=False)
class PartForValidators(Attack):
    """A gradient that is wrong in the part that nobody else holds; only validators see it, so they accuse alone."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        parts = [part.clone() for part in split_parts(gradient, len(insider.view.roster))]
        if insider.index is not None:
            parts[insider.index] *= -5
        return join_parts(parts)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if is_own_part(insider, message):
            checkers = {check.checker for check in insider.duties.checks if check.target == insider.key}
            to = tuple(key for key in to if key in checkers and len(to) == 1)
            insider.notes["shown to validators"] = insider.notes.get("shown to validators", 0) + len(to)
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class FalseReport(Attack):
    """Reported sums or norms that are off by a factor of ``tau``, for all parts or one."""

    sums: float = 1.0
    norms: float = 0.0
    part: int | None = None

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        count = len(effect.parts)
        here = [self.part in (None, at % count) for at in range(len(projections.sums))]
        sums = (x + self.sums * effect.tau * hit for x, hit in zip(projections.sums, here, strict=True))
        norms = (x + self.norms * effect.tau * hit for x, hit in zip(projections.norms, here, strict=False))
        return Projections(tuple(sums), tuple(norms))


@dataclass(kw_only=True, eq=False)
class Framing(Attack):
    """Sums that are off by nearly as much as V1 lets pass, all in one direction, against one honest aggregator."""

    share: float = 0.4
    """Of the tolerance; honest aggregators accuse from half of it on, voters convict from all of it."""

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        count, view = len(effect.parts), insider.view
        target = view.roster.index(insider.honest[view.step % len(insider.honest)])
        size = compute_part_sizes(insider.config.size, count)[target]
        off = self.share * report_tolerance(effect.tau, size)[0]
        sums = (x + off * (at % count == target) for at, x in enumerate(projections.sums))
        return replace(projections, sums=tuple(sums))


@dataclass(kw_only=True, eq=False)
class NonFiniteAggregate(Attack):
    """An aggregate that holds no numbers."""

    value: float = float("nan")

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        return torch.full_like(result, self.value)


@dataclass(kw_only=True, eq=False)
class WithheldParts(Attack):
    """Parts that do not reach ``count`` honest aggregators (None: all); opened when asked for, or not."""

    count: int | None = None
    opens: bool = True

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and message.owner == insider.key:
            asked = insider.notes.get(("opened", message.step, message.attempt, message.part))
            roster = insider.view.roster
            if not self.opens and to != roster[message.part : message.part + 1]:  # not scattered, but asked for
                return
            if not asked:
                left = insider.honest[: self.count]
                to = tuple(key for key in to if key not in left)
        elif isinstance(message, Signed) and message.sender == insider.key and message.domain is Domain.OPENING:
            if not self.opens:
                return
            body = open_body(message)
            if isinstance(body, m.Opening):
                insider.notes["opened", message.step, message.attempt, body.part] = True
        yield to, message


@dataclass(kw_only=True, eq=False)
class WrongOpenings(WithheldParts):
    """Parts withheld, and when they are asked for, other ones opened."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Opening):
            return change_body(sign, digest=insider.random.randbytes(32))
        return sign


@dataclass(kw_only=True, eq=False)
class WithheldAggregate(Attack):
    """An aggregate that does not reach ``count`` honest members (None: all), nor those who ask for it."""

    count: int | None = None

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.AggregateChunk):
            left = insider.honest[: self.count]
            to = tuple(key for key in to if key not in left)
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class FalseComplaints(Attack):
    """Says that parts of ``count`` honest contributors are missing (None: of everybody, colluders spared).

    When they were opened it has them after all, or (``stubborn``) goes on to deny it.
    """

    count: int | None = 1
    stubborn: bool = False

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, roster = sign.body, insider.view.roster
        if not isinstance(body, m.Aggregate):
            return sign
        again = sign.phase is m.Phase.AGGREGATE_AGAIN
        honest = [key for key in insider.duties.contributors if key not in insider.plot.keys][: self.count]
        missing = tuple(sorted(roster.index(key) for key in honest))
        if missing and (not again or self.stubborn):
            return change_body(sign, result=None, missing=missing)
        return sign


@dataclass(kw_only=True, eq=False)
class FriendsMissing(Attack):
    """Says that the parts of all in the plot are missing, which open none: as many pairs to settle as can be."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        missing = tuple(sorted(map(insider.view.roster.index, insider.crew)))
        if isinstance(sign.body, m.Aggregate) and missing:
            return change_body(sign, result=None, missing=missing)
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and to != insider.view.roster[message.part : message.part + 1]:
            return ()
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class Deaf(Attack):
    """Drops everything of one kind that it hears: a slow reader that asks and asks again."""

    kind: type = m.PartChunk

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        return None if isinstance(delivery.message, self.kind) else delivery
