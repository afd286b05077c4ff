"""Leaving, coming back, lying on probation, and lying to those who come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec
from torch import Tensor

from phalanx.attacks.base import Attack, Insider, Mail, change_body
from phalanx.attacks.broadcast import is_own
from phalanx.core import messages as m
from phalanx.core.crypto import Domain
from phalanx.core.effects import Broadcast, Delivery, Effect, Sign
from phalanx.core.membership import decode_view, encode_view
from phalanx.core.messages import Message, Phase, Signed


@dataclass(kw_only=True, eq=False)
class Leave(Attack):
    """Announces that it leaves."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return change_body(sign, leaving=True) if isinstance(sign.body, m.Confirm) else sign


@dataclass(kw_only=True, eq=False)
class Absent(Attack):
    """Sends nothing for ``steps`` steps, then behaves (and asks to join again)."""

    steps: int = 3

    def is_active(self, insider: Insider) -> bool:
        return super().is_active(insider) and insider.view.step < self.start + self.steps

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return ()


@dataclass(kw_only=True, eq=False)
class SilentTarget(Attack):
    """Falls silent for ``steps`` steps whenever an honest validator is about to check it; comes back as a joiner."""

    steps: int = 3

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        step = insider.view.step
        if insider.notes.get("hides until", -1) > step:
            return ()
        for check in insider.duties.checks:
            if check.target == insider.key and check.checker not in insider.plot.keys:
                insider.notes["hides until"] = step + self.steps
                return ()
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class LongLeave(Attack):
    """Leaves, and asks to join again when ``steps`` have passed: all may have forgotten it."""

    steps: int = 11

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        goes = isinstance(sign.body, m.Confirm) and sign.step == self.start
        return change_body(sign, leaving=True) if goes else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        joins = isinstance(message, Signed) and message.domain is Domain.JOIN
        return () if joins and not self.may_return(insider) else ((to, message),)

    def may_return(self, insider: Insider) -> bool:
        return insider.view.step >= self.start + self.steps


@dataclass(kw_only=True, eq=False)
class ReturnForNewcomer(LongLeave):
    """Leaves, and asks to join again when a friend with a new key has come in (and, ``after_ban``, another is banned).

    The bound on attackers should not be lower than those who are then here.
    """

    after_ban: bool = False

    def may_return(self, insider: Insider) -> bool:
        banned = not insider.plot.keys.isdisjoint(insider.view.banned)
        return has_newcomer(insider) and (banned or not self.after_ban)


def has_newcomer(insider: Insider) -> bool:
    """Whether one of the plot that is no founder is a member."""
    return any(key in insider.plot.keys and key not in insider.config.founders for key in insider.view.roster)


@dataclass(kw_only=True, eq=False)
class Sacrifice(Attack):
    """Lets itself be banned once a friend with a new key is a member: the bound should not fall for it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        spoils = isinstance(sign.body, m.Reveal) and has_newcomer(insider)
        return insider.seal_bytes(sign, b"\xc1") if spoils else sign


@dataclass(kw_only=True, eq=False)
class OneByOne(Attack):
    """The first contributor of the plot starts each attempt from a view of its own: they go one by one, to be many."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        first = insider.crew[:1] == (insider.key,)
        return change_body(sign, view=bytes(32)) if isinstance(sign.body, m.Commit) and first else sign


# ---- Probation


@dataclass(kw_only=True, eq=False)
class TrialOfOtherStep(Attack):
    """On probation it commits to nothing that it computed, and says that this was in another step."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Trial):
            return sign
        insider.notes["other step"] = True
        return replace(sign, step=sign.step + 7, body=m.Trial(b"x" * 32))


@dataclass(kw_only=True, eq=False)
class LastTrial(Attack):
    """On probation it serves in two steps only, after it ``missed`` so many: first with nothing, then a wrong gradient.

    It may be dropped while it is checked, and whoever checks it be blamed.
    """

    missed: int = 12

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return -gradient if insider.index is None else gradient

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if insider.index is not None:
            return ((to, message),)
        if isinstance(message, Signed) and message.domain is Domain.TRIAL:
            since = next((x.since for x in insider.view.candidates if x.key == insider.key), None)
            served = None if since is None else message.step - since - self.missed
            if served == 0:
                return ((to, insider.seal_again(message, m.Trial(b"x" * 32))),)
            return ((to, message),) if served == 1 else ()
        if isinstance(message, m.PartChunk):
            insider.plot.notes[_name_part(message)] = message
            return ()
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class ShowsParts(Attack):
    """Shows who checks a probationer of the plot what that committed to and did not send itself."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message, sender = delivery.message, delivery.sender
        if isinstance(message, m.PullPart) and message.owner not in insider.view.roster and sender is not None:
            part = insider.plot.notes.get(_name_part(message))
            if part is not None:
                insider.send_later(0.0, (sender,), part)
        return delivery


def _name_part(message: m.PartChunk | m.PullPart) -> tuple[str, int, int, bytes, int]:
    return "part on trial", message.step, message.attempt, message.owner, message.part


# ---- Views, states and chains


@dataclass(kw_only=True, eq=False)
class CertificateForSome(Attack):
    """Sends its SEAL to nobody but shows ``victims`` the certificate that it completes; then silence.

    They go on in a view that the others should not be without.
    """

    victims: int = 1

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if (self, "spent") in insider.notes:
            return ()
        if isinstance(message, Signed) and is_own(insider, message, (Phase.SEAL,)):
            insider.notes[self, "spent"] = insider.notes[self, "seal"] = message
            return ()
        return ((to, message),)

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        kept = insider.notes.pop((self, "seal"), None)
        if kept is not None:
            insider.notes["certificate shown"] = True
            seals = tuple(x for (height, _), x in insider.heard.items() if height == kept.height)
            yield Broadcast(insider.honest[: self.victims], m.Chain((m.Link(encode_view(insider.view), seals),)))


@dataclass(kw_only=True, eq=False)
class WrongSeal(Attack):
    """Seals (or aborts to) a view that nobody else has: the certificate of the change then lacks a signature."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if isinstance(sign.body, m.Seal | m.Abort):
            return change_body(sign, view=insider.random.randbytes(32))
        return sign


@dataclass(kw_only=True, eq=False)
class WrongState(Attack):
    """Serves joiners a state that is not the certified one; ``endless``: one that never ends."""

    endless: bool = False

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.StateChunk):
            data = insider.random.randbytes(len(message.data))
            size = (1 << 40) if self.endless else message.size
            message = m.StateChunk(message.step, size, message.offset, data)
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class WrongChain(Attack):
    """Shows those who ask a history with another roster, under signatures that are good for something else."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Chain):
            links = tuple(m.Link(self._change(insider, link.view), link.messages) for link in message.links)
            message = m.Chain(links)
        return ((to, message),)

    @staticmethod
    def _change(insider: Insider, data: bytes) -> bytes:
        view = decode_view(data)
        if view is None:
            return data
        roster = tuple(sorted(insider.plot.keys))
        return encode_view(msgspec.structs.replace(view, roster=roster, bound=0, state=insider.random.randbytes(32)))
