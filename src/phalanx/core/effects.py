"""What a peer asks of the world. The protocol is a generator that yields these; a driver carries them out.

The simulator and the network drive the same generator. Everything that could differ between them is here: clocks,
links, disks, private keys, and the arithmetic on a model's state. An attack is a filter on effects and their results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeAlias

from msgspec import Struct
from torch import Tensor

from phalanx.core.messages import Body, Message, Phase


class Receive(Struct, frozen=True, gc=False):
    """Wait for a message until ``until`` on the local clock.

    The result is a :class:`Delivery`; its ``message`` is None when the time came first.
    """

    until: float


class Delivery(Struct, frozen=True, gc=False):
    now: float
    """The local clock, in seconds. Only differences mean anything."""
    sender: bytes | None
    message: Message | Finished | Leave | None


class Begin(Struct, frozen=True):
    """Start a long computation beside everything else; the result is a ticket.

    What it yields arrives as a delivery of :class:`Finished`: small messages never wait behind a gradient.
    """

    work: ComputeGradient


class Foresee(Struct, frozen=True):
    """Gradients that will probably be asked for in the next step, unless this one comes to nothing.

    A driver may start on those that ``find`` lists while the step is being verified, and drops them if the state that
    they start from is undone. Whoever does nothing only loses time.
    """

    find: Callable[[], list[ComputeGradient]]


class Finished(Struct, frozen=True):
    ticket: int
    value: Any


class Leave(Struct, frozen=True):
    """The user wants to go: announce it, and say goodbye at the next step boundary."""


class Send(Struct, frozen=True, gc=False):
    """Give a message to one peer. The result is None; it may never arrive."""

    to: bytes
    message: Message


class Broadcast(Struct, frozen=True, gc=False):
    """Give a message to each of ``to``."""

    to: tuple[bytes, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign a body; the result is the :class:`Signed` message.

    For agreed bodies and for votes of the slow path the driver keeps a journal, on disk before the message is sent: at
    a height (for a vote: at that height, round and stage) where this key has signed before, the result is that earlier
    message, whatever is asked for now. So nothing, a crash included, makes an honest peer sign twice. If that message
    is of another step, attempt or phase the result is None: the peer has gone back farther than a crash can throw it,
    has nothing to say here, and will be missed.
    """

    height: int
    step: int
    attempt: int
    phase: Phase
    previous: bytes
    body: Body


class DrawSecret(Struct, frozen=True):
    """A share of randomness and its salt, 32 bytes each, that nobody else can know; always the same for one height."""

    height: int


class ComputeGradient(Struct, frozen=True):
    """The gradient at the state before ``step`` on the public batch of ``seed``: a float32 vector.

    A pure function of both, up to rounding between platforms. The driver keeps the states of the last steps; the
    result is None if that one is no longer, or not yet, here.
    """

    step: int
    seed: bytes


class ComputeAggregate(Struct, frozen=True):
    """CenteredClip of the rows, in the wire type."""

    rows: Tensor
    tau: float


class ComputeReport(Struct, frozen=True):
    """What my parts say of the aggregates (``verification.compute_report``). The result is a ``Projections``."""

    parts: tuple[Tensor, ...]
    aggregates: tuple[Tensor | None, ...]
    seeds: tuple[tuple[bytes, ...], ...]
    tau: float


class MeasureDeviation(Struct, frozen=True):
    """How far a deviation from the gradient could move the state before ``step``, as the optimizer sees it.

    The result is a share of what the gradient itself could, or None if that state is not here. A run's ``Tolerance`` is
    in these terms: one share for all the optimizer's ways to weigh coordinates.
    """

    step: int
    deviation: Tensor
    """Not negative, float32."""
    gradient: Tensor


class Apply(Struct, frozen=True):
    """Update the state before ``step`` with the aggregate.

    The state before stays; applying another aggregate for the same step replaces the update.
    """

    step: int
    aggregate: Tensor


class Undo(Struct, frozen=True):
    """Forget the update of ``step``."""

    step: int


class HashState(Struct, frozen=True):
    """The digest of the state before ``step``, which is here."""

    step: int


class HasState(Struct, frozen=True):
    """Whether the state before ``step`` is here and has this digest."""

    step: int
    digest: bytes


class Readable(Protocol):
    """Bytes, or what can be read like them piece by piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> bytes | bytearray | memoryview: ...


class ReadState(Struct, frozen=True):
    """The bytes of the state before ``step``, as a :class:`Readable`, or None if they are no longer kept."""

    step: int


class AdoptState(Struct, frozen=True):
    """Take these bytes as the state before ``step``; the result is whether they have the digest and make sense."""

    step: int
    digest: bytes
    data: bytes | bytearray


class Keep(Struct, frozen=True):
    """Write the view to disk: after a crash the peer starts again from the last one kept."""

    view: bytes
    height: int


class Heard(IntEnum):
    """What others said, and what is signed rests on."""

    MESSAGES = 1
    """The agreed messages of a height."""
    VOTES = 2
    """A quorum of first votes."""
    CASES = 3
    """The accusations and proofs that are voted on."""


class KeepMessages(Struct, frozen=True, gc=False):
    """Write what others said to disk, before anything is signed that rests on it: after a crash it is still known.

    It takes the place of what was kept before of this kind and height. What is below the height of the view that was
    kept last is no longer needed.
    """

    height: int
    kind: Heard
    messages: tuple[Message, ...]


class Note(Struct, frozen=True, gc=False):
    """Something worth knowing happened. It has no effect."""

    event: Any


Effect: TypeAlias = (
    Receive
    | Send
    | Broadcast
    | Sign
    | DrawSecret
    | Begin
    | Foresee
    | ComputeAggregate
    | ComputeReport
    | MeasureDeviation
    | Apply
    | Undo
    | HashState
    | HasState
    | ReadState
    | AdoptState
    | Keep
    | KeepMessages
    | Note
)
Story: TypeAlias = Generator[Effect, Any, Any]
"""A peer, or a part of what it does."""
