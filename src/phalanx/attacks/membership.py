"""Leaving, coming back, and lying to those who come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from phalanx.attacks.base import Attack, Insider, Mail, change_body
from phalanx.core import messages as m
from phalanx.core.effects import Sign
from phalanx.core.membership import decode_view, encode_view
from phalanx.core.messages import Message, Signed


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
