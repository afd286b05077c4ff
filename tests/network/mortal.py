"""Peers that die: ``phalanx start --attack tests/network/mortal.py:NAME --start STEP`` kills its own process there.

Each dies in step STEP at the moment its name says, or the first time after that it comes to it: a validator, for
one, scatters nothing. Apart from that they are honest.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.attacks import Attack, Insider
from phalanx.core.effects import Apply, Broadcast, Effect, Send, Sign, Story
from phalanx.core.messages import AggregateChunk, PartChunk, Phase, Signed

Moment = Callable[[Effect], bool]


@dataclass(kw_only=True, eq=False)
class Mortal(Attack):
    """Dies when an effect is asked for (``after`` False) or when it has been carried out."""

    moment: Moment = lambda effect: False
    after: bool = False

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        dies = insider.view.step >= self.start and self.moment(effect)
        if dies and not self.after:
            die()
        result: Any = yield from super().on_effect(insider, effect)
        if dies:
            die()
        return result


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _signs(phase: Phase) -> Moment:
    return lambda effect: isinstance(effect, Sign) and effect.phase is phase


def _sends(phase: Phase) -> Moment:
    def is_it(effect: Effect) -> bool:
        message = effect.message if isinstance(effect, Send | Broadcast) else None
        return isinstance(message, Signed) and message.phase is phase

    return is_it


def _moves(kind: type) -> Moment:
    return lambda effect: isinstance(effect, Send | Broadcast) and isinstance(effect.message, kind)


before_commit = Mortal(moment=_signs(Phase.COMMIT))
commit_signed = Mortal(moment=_signs(Phase.COMMIT), after=True)
commit_sent = Mortal(moment=_sends(Phase.COMMIT), after=True)
scatter = Mortal(moment=_moves(PartChunk), after=True)
aggregate_signed = Mortal(moment=_signs(Phase.AGGREGATE), after=True)
gather = Mortal(moment=_moves(AggregateChunk), after=True)
reveal_signed = Mortal(moment=_signs(Phase.REVEAL), after=True)
reveal_sent = Mortal(moment=_sends(Phase.REVEAL), after=True)
report_signed = Mortal(moment=_signs(Phase.REPORT), after=True)
applied = Mortal(moment=lambda effect: isinstance(effect, Apply), after=True)
confirm_signed = Mortal(moment=_signs(Phase.CONFIRM), after=True)
confirm_sent = Mortal(moment=_sends(Phase.CONFIRM), after=True)
