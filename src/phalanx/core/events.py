"""What a peer tells the outside: facts for people, plots and checkers. Nothing reads them back into the protocol."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.membership import View
from phalanx.core.messages import Accusation, Phase, Proof, Rule, Signed


@dataclass(frozen=True, slots=True)
class StepFinished:
    """A step is final: its state can never be undone."""

    step: int
    view: View
    """The view of the next step."""


@dataclass(frozen=True, slots=True)
class AttemptStarted:
    view: View


@dataclass(frozen=True, slots=True)
class Banned:
    """For ever, with the messages that show why."""

    key: bytes
    rule: Rule
    step: int
    """The step of the offence."""
    at: int
    """The step in which the verdict was executed."""
    reason: str
    evidence: tuple[Signed, ...]
    case: Accusation | Proof | None


@dataclass(frozen=True, slots=True)
class Removed:
    """Suspended: a member in good standing that is back as soon as it shows that it is there."""

    key: bytes
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """This peer said goodbye, and the others are known to go on without it: nobody needs it any more."""

    view: View


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last step was checked by everybody; its state may be released."""

    view: View


@dataclass(frozen=True, slots=True)
class Jumped:
    """The run went on without this peer, to this view: who went meanwhile is in it."""

    view: View


@dataclass(frozen=True, slots=True)
class SlowPath:
    step: int
    attempt: int
    height: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Halted:
    """A slow path found no way on: too few members can be reached, and this peer waits for these."""

    step: int
    height: int
    missing: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Waiting:
    """Past its deadline this peer still misses messages of these members at this height."""

    step: int
    height: int
    missing: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    step: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """E5: the majority's state is not mine."""

    step: int


@dataclass(frozen=True, slots=True)
class Synced:
    """A joiner holds the certified state."""

    step: int
    state: bytes


@dataclass(frozen=True, slots=True)
class MarginLost:
    """Few more members may fall silent before the run waits for them."""

    step: int
    margin: int
    """How many may."""
