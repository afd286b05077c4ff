"""Keys cost nothing: true proofs against strangers, and friends who are no members, to crowd out or to excuse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.attacks.aggregation import ShiftedAggregate
from phalanx.attacks.base import Attack, Insider, Mail, change_body, forge
from phalanx.attacks.broadcast import is_own
from phalanx.attacks.justice import Accuser
from phalanx.core import messages as m
from phalanx.core.crypto import SIGNATURE_SIZE, Domain, Signer
from phalanx.core.effects import Delivery, Sign
from phalanx.core.messages import MAX_CASES, Message, Phase, Signed
from phalanx.core.peer import compute_case_digest


def make_malformed(insider: Insider, signer: Signer, *words: bytes, height: int = 1) -> Signed:
    """Signed bytes that are no body; each time others, if the words are."""
    place = (insider.config.run, height, 0, 0, Phase.COMMIT, signer.key, bytes(32))
    return forge(signer, Signed(Domain.AGREED, *place, b"".join((b"\xc1", *words)), bytes(SIGNATURE_SIZE)))


def find_probationer(insider: Insider) -> bytes | None:
    """A friend on probation, in whose name the plot can sign."""
    candidates = [x.key for x in insider.view.candidates if x.key != insider.key]
    return next((key for key in candidates if key in insider.plot.signers), None)


# ---- Proofs of one's own making


@dataclass(kw_only=True, eq=False)
class FreeProofs(Accuser):
    """Brings ``count`` true proofs against strangers in each attempt, to crowd out the cases of others."""

    count: int = MAX_CASES
    keys: int = 1
    """How many strangers it takes, in turn; beginning with number ``first``."""
    first: int = 0

    def get_signer(self, insider: Insider, number: int) -> Signer | None:
        place = ("stranger", self.first + number % self.keys)
        if place not in insider.plot.notes:
            insider.plot.notes[place] = insider.plot.make_stranger(place[1])
        signer: Signer = insider.plot.notes[place]
        return signer

    def is_fit(self, digest: bytes) -> bool:
        """Whether a case of this digest is worth bringing."""
        return True

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm):
            return sign
        cases: list[m.MalformedBody] = []
        while len(cases) < self.count:
            number = insider.notes.get((self, "made"), 0)
            signer = self.get_signer(insider, number)
            if signer is None:
                return sign
            insider.notes[self, "made"] = number + 1
            case = m.MalformedBody(make_malformed(insider, signer, number.to_bytes(8, "little"), insider.key[:4]))
            if self.is_fit(compute_case_digest(case)):
                cases.append(case)
        return self.bring(insider, change_body(sign, accusations=()), *cases)


@dataclass(kw_only=True, eq=False)
class HalfShownProof(FreeProofs):
    """Shows its evidence to half of the honest members, so late that they cannot pass it on: votes may differ."""

    count: int = 1

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, notes = delivery.message, insider.notes
        if not isinstance(message, m.PullProof) or (self, message.case) not in notes:
            return delivery
        if (self, "shown", message.case) not in notes:
            notes[self, "shown", message.case] = notes["proof shown"] = True
            half = insider.honest[: (1 + len(insider.honest)) // 2]
            insider.send_later(1.8 * insider.config.delta, half, notes[self, message.case])
        return None


@dataclass(kw_only=True, eq=False)
class FirstInLine(FreeProofs):
    """When an honest member checks a friend it brings proofs that sort before those of others, and passes none on.

    Who is asked for all of them is asked for its own last, perhaps too late.
    """

    def is_active(self, insider: Insider) -> bool:
        plot = insider.plot.keys
        return super().is_active(insider) and any(
            check.target in plot and check.checker not in plot for check in insider.duties.checks
        )

    def is_fit(self, digest: bytes) -> bool:
        return digest[0] < 8

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if isinstance(message, m.Accusation) else ((to, message),)


# ---- Against a friend on probation


@dataclass(kw_only=True, eq=False)
class FriendProofs(FreeProofs):
    """Brings proofs against a friend who is on probation, or was: no stranger, so they may excuse its own lies."""

    def get_signer(self, insider: Insider, number: int) -> Signer | None:
        friend = note_friend(insider)
        return insider.plot.signers[friend] if friend is not None else None


@dataclass(kw_only=True, eq=False)
class ShiftWithFriend(ShiftedAggregate):
    """A moved aggregate in each attempt from when a friend is on probation, whom proofs can be brought against."""

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and note_friend(insider) is not None


def note_friend(insider: Insider) -> bytes | None:
    """A friend that is on probation, or has been."""
    friend = find_probationer(insider)
    if friend is not None:
        insider.notes["friend"] = friend
    found: bytes | None = insider.notes.get("friend")
    return found


@dataclass(kw_only=True, eq=False)
class SlowVote(FreeProofs):
    """Brings proofs against a friend on probation, and votes as late as if each took a gradient: some may not wait."""

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and find_probationer(insider) is not None

    def get_signer(self, insider: Insider, number: int) -> Signer | None:
        friend = find_probationer(insider)
        return insider.plot.signers[friend] if friend is not None else None

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        own = isinstance(message, Signed) and is_own(insider, message, (Phase.VOTE,))
        if not isinstance(message, Signed) or not own or (self, "late", message.height) in insider.notes:
            return ((to, message),)
        insider.notes[self, "late", message.height] = insider.notes["voted late"] = True
        insider.withhold(message)
        insider.send_later((1 + MAX_CASES) * insider.config.gradient_time, to, message)
        return ()


@dataclass(kw_only=True, eq=False)
class GivesUp(Attack):
    """Shows everybody a malformed message of a friend on probation: who was banned may make the bound fall."""

    phase: Phase = Phase.REVEAL
    """When it does so."""

    def find_friend(self, insider: Insider) -> bytes | None:
        return find_probationer(insider)

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        friend = self.find_friend(insider)
        if type(sign.body) is not m.BODY_OF_PHASE[self.phase] or friend is None or (self, friend) in insider.notes:
            return sign
        insider.notes[self, friend] = insider.notes["given up"] = True
        bad = make_malformed(insider, insider.plot.signers[friend], height=sign.height)
        insider.send_later(0.0, insider.honest, bad)
        return sign


@dataclass(kw_only=True, eq=False)
class GivesAway(GivesUp):
    """Shows everybody a malformed message of a friend who left, when no proof can be brought: it may be forgotten."""

    phase: Phase = Phase.VOTE

    def find_friend(self, insider: Insider) -> bytes | None:
        here = {*insider.view.roster, *insider.view.banned, *(x.key for x in insider.view.candidates)}
        return next((key for key in insider.plot.signers if key not in here), None)
