"""What a driver asks of the model: the arithmetic on its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from phalanx.core.clipping import centered_clip
from phalanx.core.effects import (
    AdoptState,
    Apply,
    ComputeAggregate,
    ComputeGradient,
    ComputeReport,
    Effect,
    HashState,
    HasState,
    MeasureDeviation,
    Readable,
    ReadState,
    Undo,
)
from phalanx.core.verification import Projections, compute_report, measure_tensors


class Machine(Protocol):
    """The arithmetic on a model's state. It is on the peer's disk: a crash leaves it as it is.

    A machine that has something to lose in a crash has a method ``crash()`` as well.
    """

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None: ...

    def compute_aggregate(self, rows: Tensor, tau: float) -> Tensor:
        return centered_clip(rows, tau).aggregate

    def compute_report(
        self,
        parts: tuple[Tensor, ...],
        aggregates: tuple[Tensor | None, ...],
        seeds: tuple[tuple[bytes, ...], ...],
        tau: float,
    ) -> Projections:
        return compute_report(parts, aggregates, seeds, tau)

    def measure_deviation(self, step: int, deviation: Tensor, gradient: Tensor) -> float | None:
        """Where the gradient itself moves the state: its length beside the gradient's."""
        return measure_tensors(deviation, gradient, (len(gradient),))

    def apply(self, step: int, aggregate: Tensor) -> None: ...

    def undo(self, step: int) -> None: ...

    def hash_state(self, step: int) -> bytes: ...

    def has_state(self, step: int, digest: bytes) -> bool: ...

    def read_state(self, step: int) -> Readable | None: ...

    def adopt_state(self, step: int, digest: bytes, data: bytes | bytearray) -> bool: ...

    def duration(self, effect: Effect | ComputeGradient) -> float:
        """How long this takes, in virtual seconds. Nothing of it shows before the time is over."""
        ...


COMPUTATIONS: dict[type, Callable[[Machine, Any], Any]] = {
    ComputeAggregate: lambda machine, effect: machine.compute_aggregate(effect.rows, effect.tau),
    ComputeReport: lambda machine, effect: machine.compute_report(
        effect.parts, effect.aggregates, effect.seeds, effect.tau
    ),
    MeasureDeviation: lambda machine, effect: machine.measure_deviation(effect.step, effect.deviation, effect.gradient),
    Apply: lambda machine, effect: machine.apply(effect.step, effect.aggregate),
    Undo: lambda machine, effect: machine.undo(effect.step),
    HashState: lambda machine, effect: machine.hash_state(effect.step),
    HasState: lambda machine, effect: machine.has_state(effect.step, effect.digest),
    ReadState: lambda machine, effect: machine.read_state(effect.step),
    AdoptState: lambda machine, effect: machine.adopt_state(effect.step, effect.digest, effect.data),
}
