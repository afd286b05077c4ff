"""Turning the rules of blame against honest members: what only some have seen, or see too late, or let pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from phalanx.attacks.aggregation import FalseReport
from phalanx.attacks.base import Attack, Insider, Mail, bring_cases, change_body, note_case
from phalanx.attacks.broadcast import is_own
from phalanx.attacks.justice import Accuser, compute_suspect_digest
from phalanx.core import messages as m
from phalanx.core.effects import ComputeReport, Delivery, Sign
from phalanx.core.envelope import seal
from phalanx.core.messages import MAX_CASES, Message, Phase, Rule, Signed
from phalanx.core.partition import compute_part_sizes
from phalanx.core.verification import Projections, report_tolerance

# ---- Who let a lie pass


def make_charge(insider: Insider, accused: bytes, parts: tuple[int, ...]) -> m.Accusation | None:
    """V4 against the sender of what was said in this attempt, if I have it: of its gradient, or its report on parts."""
    said = [insider.find(phase, accused) for phase in (Phase.COMMIT, Phase.REPORT)]
    commit, report = (x if x is not None and x.run == insider.config.run else None for x in said)
    if commit is None or (parts and report is None):
        return None
    place = (insider.view.step, insider.view.attempt)
    return m.Accusation(Rule.GRADIENT, accused, *place, parts, commit, report if parts else None, (), ())


@dataclass(kw_only=True, eq=False)
class SelfAccuser(Accuser):
    """Lies in one REPORT, and accuses itself of it a step later: whoever let the lie pass would be to blame."""

    def note_lie(self, insider: Insider, *parts: int) -> None:
        """I am about to lie about these parts."""
        insider.notes[self, "lie"] = insider.view.step, insider.view.attempt, parts
        insider.notes["lied"] = True

    def has_lied(self, insider: Insider) -> bool:
        return (self, "lie") in insider.notes

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        step, attempt, parts = insider.notes.get((self, "lie"), (None, None, ()))
        here = (insider.view.step, insider.view.attempt) == (step, attempt)
        if here and isinstance(message, Signed) and is_own(insider, message, (Phase.REPORT,)):
            insider.notes[self, "charge"] = make_charge(insider, insider.key, parts)
        return ((to, message),)

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        charge = insider.notes.get((self, "charge"))
        if not isinstance(sign.body, m.Confirm) or charge is None or charge.step == insider.view.step:
            return sign
        insider.notes[self, "charge"] = None
        return self.bring(insider, sign, charge)


@dataclass(kw_only=True, eq=False)
class EdgeLie(SelfAccuser):
    """Lies about the aggregates of others by ``share`` tolerances, then accuses itself: some saw the lie, some not."""

    share: float = 1.5

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        if self.has_lied(insider):
            return projections
        count, mine = len(effect.parts), insider.index
        sizes = compute_part_sizes(insider.config.size, count)
        self.note_lie(insider, *(part for part in range(count) if part != mine))
        sums = (
            x + self.share * report_tolerance(effect.tau, sizes[at % count])[0] * (at % count != mine)
            for at, x in enumerate(projections.sums)
        )
        return replace(projections, sums=tuple(sums))


@dataclass(kw_only=True, eq=False)
class LateAccuser(Accuser):
    """Accuses a friend of the lie for which it was banned, as though honest members had let it pass then."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm):
            return sign
        view, notes = insider.view, insider.notes
        honest = tuple(place for place, key in enumerate(view.roster) if key not in insider.plot.keys)
        for friend in insider.friends:
            charge = make_charge(insider, friend, honest[:1])
            if charge is not None:
                notes[self, "charge", friend] = charge
        charges = [notes.pop((self, "charge", key), None) for key in view.banned]
        found = [charge for charge in charges if charge is not None]
        if found:
            notes["accused late"] = True
        return self.bring(insider, sign, *found[:MAX_CASES])


@dataclass(kw_only=True, eq=False)
class FalseReportOfLast(FalseReport):
    """The last contributor of the plot reports wrong sums, for its friends to make use of."""

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and insider.key in insider.crew[1:][-1:]


# ---- What one member alone has seen


@dataclass(kw_only=True, eq=False)
class ReportForOne(Attack):
    """Shows a wrong REPORT to one member, to have it accuse alone, and opens a slow path at CONFIRM; then silence."""

    def is_active(self, insider: Insider) -> bool:
        contributes = super().is_active(insider) and insider.key in insider.duties.contributors
        return contributes or (self, "shown") in insider.notes

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        # Of the own part: there is no honest aggregator to blame.
        return FalseReport(part=insider.index).on_report(insider, effect, projections)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if (self, "shown") in insider.notes:
            return ()
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.REPORT,)):
            return ((to, message),)
        insider.notes[self, "shown"] = insider.notes["report shown"] = True
        place = (message.height + 1, message.step, message.attempt, Phase.CONFIRM, bytes([7]) * 32)
        wrong = seal(
            insider.signer, insider.config.run, *place, m.Confirm(bytes(32), (), (), (), False, False, (), m.NOTHING)
        )
        insider.send_later(0.0, insider.honest[:1], wrong)
        insider.send_later(insider.config.delta, insider.honest[:1], message)
        return ()


@dataclass(kw_only=True, eq=False)
class AggregateForOne(Attack):
    """Gives its aggregate to one member only, ``after`` so many deltas, and lies about it: that one accuses alone."""

    after: float = 3.6

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and insider.key in insider.duties.contributors

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, m.AggregateChunk) or message.part != insider.index:
            return ((to, message),)
        if len(to) > 1:
            insider.notes.setdefault((self, message.step, message.attempt), []).append(message)
        return ()

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        config, view = insider.config, insider.view
        for chunk in insider.notes.pop((self, view.step, view.attempt), ()):
            insider.send_later(self.after * config.delta + config.transfer_time, insider.honest[:1], chunk)
            insider.notes["aggregate shown"] = True
        return FalseReport(part=insider.index).on_report(insider, effect, projections)


@dataclass(kw_only=True, eq=False)
class HalfShownCharge(Attack):
    """Shows the evidence of an accusation to all honest members but one, and opens a slow path at VOTE: it may halt."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        victim = next((key for key in insider.duties.contributors if key not in insider.plot.keys), None)
        if not isinstance(sign.body, m.Confirm) or (self, "charge") in insider.notes or victim is None:
            return sign
        charge = make_charge(insider, victim, ())
        if charge is None:
            return sign
        insider.notes[self, "charge"] = charge
        return bring_cases(sign, {note_case(insider, charge): charge})

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        notes, delta, honest = insider.notes, insider.config.delta, insider.honest
        if (self, "opened") in notes:
            return ()
        charged = (self, "charge") in notes
        if not charged or not isinstance(message, Signed) or not is_own(insider, message, (Phase.VOTE,)):
            return ((to, message),)
        notes[self, "opened"] = notes["opened at vote"] = True
        place = (message.height + 1, message.step + 1, message.attempt, Phase.COMMIT, bytes([9]) * 32)
        wrong = seal(insider.signer, insider.config.run, *place, m.Commit(bytes(32), bytes(32), bytes(32)))
        insider.send_later(0.0, honest[:1], wrong)
        insider.send_later(4.0 * delta, honest[1:2], message)
        insider.send_later(4.05 * delta, honest[:1], message)
        return ()

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        charge = insider.notes.get((self, "charge"))
        if isinstance(delivery.message, m.PullProof) and charge is not None and (self, "shown") not in insider.notes:
            insider.notes[self, "shown"] = insider.notes["charge shown"] = True
            # The last one has then asked for the last time.
            insider.send_later(1.1 * insider.config.delta, insider.honest[:-1], charge)
        return delivery


# ---- Who lacks a part


@dataclass(kw_only=True, eq=False)
class LateOpening(Attack):
    """Withholds a part from one aggregator, and opens it to all others ``early`` deltas before it is too late."""

    early: float = 0.4

    def is_active(self, insider: Insider) -> bool:
        contributes = insider.key in insider.duties.contributors
        return super().is_active(insider) and contributes and len(insider.honest) > 0

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        here, victim = (insider.view.step, insider.view.attempt), insider.honest[0]
        if isinstance(message, m.PartChunk):
            place = (insider.key, insider.view.roster.index(victim), *here)
            if (message.owner, message.part, message.step, message.attempt) != place:
                return ((to, message),)
            if len(to) > 1:
                self._open_late(insider, message)
            return ()
        if isinstance(message, Signed) and is_own(insider, message, (Phase.AGGREGATE,)):
            insider.withhold(message)
            insider.notes[self, "mine", here] = to, message
            self._send_last(insider)
            return ()
        return ((to, message),)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, Signed):
            self._send_last(insider)
        return delivery

    def _open_late(self, insider: Insider, message: m.PartChunk) -> None:
        notes, config, here = insider.notes, insider.config, (insider.view.step, insider.view.attempt)
        if (self, "sent", here) not in notes or (self, "opened", here) in notes:
            return
        notes[self, "opened", here] = notes["opened late"] = True
        at = notes[self, "sent", here] + (6.05 - self.early) * config.delta + config.transfer_time
        insider.send_later(at - insider.now, insider.honest[1:], message)

    def _send_last(self, insider: Insider) -> None:
        """Its own message goes out when those of all others are here, so that it knows when their time is up."""
        notes, here = insider.notes, (insider.view.step, insider.view.attempt)
        if (self, "mine", here) not in notes or (self, "sent", here) in notes:
            return
        if all(insider.find(Phase.AGGREGATE, key) for key in insider.view.roster):
            wait = 0.3 * insider.config.delta
            notes[self, "sent", here] = insider.now + wait
            insider.send_later(wait, *notes[self, "mine", here])


@dataclass(kw_only=True, eq=False)
class LateDenial(LateOpening):
    """Denies to have a part as well: more are to blame than there are attackers, and the step may never end."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        owner = next((key for key in insider.duties.contributors if key != insider.key), None)
        if isinstance(sign.body, m.Aggregate) and owner is not None:
            return change_body(sign, result=None, missing=(insider.view.roster.index(owner),))
        return sign


# ---- A case in the place of another


@dataclass(kw_only=True, eq=False)
class Override(Attack):
    """The first of the plot accuses by the names that the cases of those who left have: it may bury them."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        first = next((key for key in insider.view.roster if key in insider.plot.keys), None)
        cases = [compute_suspect_digest(suspect) for suspect in insider.view.suspects]
        if not isinstance(sign.body, m.Confirm) or first != insider.key or not cases:
            return sign
        insider.plot.notes["overridden"] = True
        return change_body(sign, accusations=tuple(cases[:8]))
