"""Attacks on randomness, accusations, votes and validators."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from phalanx.attacks.base import Attack, Insider, Mail, bring_cases, change_body, note_case
from phalanx.attacks.broadcast import is_own, turn
from phalanx.core import messages as m
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Delivery, Sign
from phalanx.core.envelope import open_body
from phalanx.core.errors import Malformed
from phalanx.core.membership import Suspect, draw_targets, find_last
from phalanx.core.messages import Message, Phase, Rule, Signed, Verdict

# ---- Randomness


@dataclass(kw_only=True, eq=False)
class WrongReveal(Attack):
    """A share that does not open its commitment."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, share=insider.random.randbytes(32)) if isinstance(sign.body, m.Reveal) else sign


@dataclass(kw_only=True, eq=False)
class CopiedCommitment(Attack):
    """The commitment of somebody else's share, if it came first; then the share as well. Else a random one."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body = sign.body
        if isinstance(body, m.Commit):
            victim = next((key for key in insider.honest if (sign.height, key) in insider.heard), None)
            insider.notes["victim"] = victim
            copied = open_body(insider.heard[sign.height, victim]) if victim is not None else None
            share = copied.share if isinstance(copied, m.Commit) else insider.random.randbytes(32)
            return change_body(sign, share=share)
        if isinstance(body, m.Reveal):
            heard = insider.heard.get((sign.height, insider.notes.get("victim") or b""))
            copied = open_body(heard) if heard is not None else None
            if isinstance(copied, m.Reveal):
                return change_body(sign, share=copied.share, salt=copied.salt)
        return sign


@dataclass(kw_only=True, eq=False)
class RushedReveal(Attack):
    """Reveals last, and not at all if the randomness would have a colluder checked."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.REVEAL,)):
            return ((to, message),)
        insider.notes["reveal"] = message
        insider.withhold(message)
        self._decide(insider, to)
        return ()

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, Signed) and delivery.message.phase is Phase.REVEAL:
            self._decide(insider, insider.others)
        return delivery

    def _decide(self, insider: Insider, to: tuple[bytes, ...]) -> None:
        mine, view = insider.notes.get("reveal"), insider.view
        if mine is None or (mine.step, mine.attempt) != (view.step, view.attempt):
            return
        held = {key: insider.heard.get((mine.height, key)) for key in view.roster}
        bodies = [open_body(x) for x in held.values() if x is not None]
        shares = [body.share for body in bodies if isinstance(body, m.Reveal)]
        if len(shares) < len(view.roster):
            return
        del insider.notes["reveal"]
        place = view.step.to_bytes(8, "little") + view.attempt.to_bytes(8, "little")
        randomness = compute_digest("randomness", insider.config.run, place, *shares)
        count = (1 + sum(record.step == view.step for record in view.attempts)) * insider.config.validators
        before = find_last(view, view.step - 1)
        drawn = draw_targets(randomness, before.contributors, count) if before is not None else ()
        if insider.plot.keys.isdisjoint(drawn):
            insider.send_later(0.0, to, mine)


# ---- Accusations


@dataclass(kw_only=True, eq=False)
class Accuser(Attack):
    """Shows the evidence of what it brings to whoever asks for it."""

    def bring(self, insider: Insider, sign: Sign, *cases: m.Accusation | m.Proof) -> Sign:
        """A CONFIRM that names these cases as well."""
        named = {note_case(insider, case): case for case in cases}
        insider.notes.update({(self, digest): case for digest, case in named.items()})
        return bring_cases(sign, named)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, sender = delivery.message, delivery.sender
        if isinstance(message, m.PullProof) and sender is not None:
            case = insider.notes.get((self, message.case))
            if case is not None and self.may_read(insider, sender):
                insider.send_later(0.0, (sender,), case)
        return delivery

    def may_read(self, insider: Insider, reader: bytes) -> bool:
        """Whether the evidence is shown to this one."""
        return True


@dataclass(kw_only=True, eq=False)
class FalseAccusation(Accuser):
    """Accuses an honest member of breaking ``rule`` in this step; gives its evidence to ``readers`` (None: to all)."""

    rule: Rule = Rule.REPORT
    readers: int | None = None

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        charge = self._make(insider) if isinstance(sign.body, m.Confirm) else None
        return self.bring(insider, sign, charge) if charge is not None else sign

    def _make(self, insider: Insider) -> m.Accusation | None:
        view = insider.view
        accused = [key for key in insider.duties.contributors if key not in insider.plot.keys]
        if not accused or insider.index is None:
            return None
        victim = insider.random.choice(accused)
        commit = insider.find(Phase.COMMIT, victim)
        report = insider.find(Phase.REPORT_AGAIN, victim) or insider.find(Phase.REPORT, victim)
        if commit is None or report is None:
            return None
        place, part = (victim, view.step, view.attempt), (insider.index,)
        if self.rule is Rule.REPORT:
            return m.Accusation(self.rule, *place, part, commit, report, (1.5,) * insider.config.projections, (2.5,))
        return m.Accusation(self.rule, *place, part if self.rule is Rule.MALFORMED else (), commit, None, (), ())

    def may_read(self, insider: Insider, reader: bytes) -> bool:
        return reader in insider.honest[: self.readers] or reader in insider.plot.keys


@dataclass(kw_only=True, eq=False)
class EmptyAccusation(Attack):
    """Names ``count`` accusations that do not exist."""

    count: int = 1

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Confirm):
            made = tuple(insider.random.randbytes(32) for _ in range(self.count))
            return change_body(sign, accusations=made)
        return sign


# ---- Votes and findings


@dataclass(kw_only=True, eq=False)
class ShieldingVotes(Attack):
    """Colluders are innocent, everybody else is guilty."""

    steady: ClassVar[bool] = True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Vote):
            return sign
        suspects = {compute_suspect_digest(suspect): suspect.key for suspect in insider.view.suspects}
        about = {**insider.cases, **suspects}
        ballots = tuple(self._vote(insider, ballot, about) for ballot in sign.body.ballots)
        return change_body(sign, ballots=ballots)

    def _vote(self, insider: Insider, ballot: m.Ballot, about: dict[bytes, bytes]) -> m.Ballot:
        if ballot.case not in about:
            return turn(ballot)
        shielded = about[ballot.case] in insider.plot.keys
        return m.Ballot(ballot.case, Verdict.INNOCENT if shielded else Verdict.GUILTY)


def compute_suspect_digest(suspect: Suspect) -> bytes:
    """The name of the case of somebody who left (``justice.make_agenda``)."""
    place = suspect.step.to_bytes(8, "little") + suspect.attempt.to_bytes(8, "little")
    return compute_digest("suspect", suspect.key, place)


@dataclass(kw_only=True, eq=False)
class EmptyVotes(Attack):
    """Votes on nothing, or (``unreceived``) says that it got no evidence at all."""

    unreceived: bool = False

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Vote):
            return sign
        ballots = tuple(m.Ballot(x.case, Verdict.NOT_RECEIVED) for x in sign.body.ballots) if self.unreceived else ()
        return change_body(sign, ballots=ballots)


@dataclass(kw_only=True, eq=False)
class LyingValidator(FalseAccusation):
    """A validator that finds honest targets guilty, with a false accusation, and colluders innocent, with none."""

    rule: Rule = Rule.GRADIENT

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body = sign.body
        if isinstance(body, m.Report) and body.findings:
            findings = tuple(
                m.Finding(x.target, Verdict.INNOCENT if x.target in insider.plot.keys else Verdict.GUILTY)
                for x in body.findings
            )
            return change_body(sign, findings=findings)
        if isinstance(body, m.Confirm) and insider.key in insider.duties.validators:
            return super().on_body(insider, change_body(sign, accusations=()))
        return sign


@dataclass(kw_only=True, eq=False)
class IdleValidator(Attack):
    """A validator that accuses nobody, whatever it finds."""

    steady: ClassVar[bool] = True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Confirm):
            return change_body(sign, accusations=())
        if isinstance(sign.body, m.Report):
            return change_body(sign, findings=())
        return sign


@dataclass(kw_only=True, eq=False)
class NothingReceived(Attack):
    """Says of each probationer that it checks that it got nothing, to keep it out."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Report):
            return sign
        roster, findings = insider.view.roster, sign.body.findings
        lies = tuple(x if x.target in roster else m.Finding(x.target, Verdict.NOT_RECEIVED) for x in findings)
        insider.plot.notes["denied"] = insider.plot.notes.get("denied", 0) + (lies != findings)
        return change_body(sign, findings=lies)


@dataclass(kw_only=True, eq=False)
class SilentVote(Attack):
    """Keeps its VOTE back once, in the first attempt in which an honest member accuses: the charge may be forgotten."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        notes, here = insider.notes, (insider.view.step, insider.view.attempt)
        if not isinstance(sign.body, m.Vote) or "kept vote" in notes or notes.get((self, "charged")) != here:
            return sign
        notes["kept vote"] = True
        return None

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if isinstance(message, Signed) and message.sender in insider.honest and is_accusing(message):
            insider.notes[self, "charged"] = insider.view.step, insider.view.attempt
        return delivery


def is_accusing(message: Signed) -> bool:
    """Whether this is a CONFIRM with accusations."""
    if message.domain is not Domain.AGREED or message.phase is not Phase.CONFIRM:
        return False
    try:
        body = open_body(message)
    except Malformed:
        return False
    return isinstance(body, m.Confirm) and bool(body.accusations)
