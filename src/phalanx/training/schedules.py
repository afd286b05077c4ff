"""How the learning rate moves, as pure functions of the step.

All peers must find the same number, to the last bit. A mathematical library may round a cosine or a power one way here
and another way there; so these use nothing but float64 additions, multiplications and divisions, which IEEE fixes.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULES = ("constant", "cosine")

_PI = 3.141592653589793
_COSINE_TERMS = 12  # the first one left out is below 1e-19 up to a quarter of a turn


@dataclass(frozen=True, slots=True)
class Schedule:
    """A share of the full rate for each step: up in a line over ``warmup`` steps, then level, or down along a cosine.

    Step ``warmup - 1`` is the first at the full rate. The cosine reaches ``floor`` at ``steps``, just after the last
    step, and stays there.
    """

    kind: str
    steps: int
    warmup: int = 0
    floor: float = 0.0

    def compute_share(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        if step >= self.steps:
            return self.floor
        progress = (step - self.warmup) / (self.steps - self.warmup)
        return self.floor + (1 - self.floor) * 0.5 * (1 + compute_cosine(progress))


def compute_cosine(half_turns: float) -> float:
    """``cos(pi * half_turns)`` for 0 to 1, to about 1e-16, by its series."""
    if half_turns > 0.5:
        return -compute_cosine(1 - half_turns)
    square = (_PI * half_turns) * (_PI * half_turns)
    total = 1.0
    for term in range(_COSINE_TERMS, 0, -1):
        total = 1 - square * total / ((2 * term - 1) * (2 * term))
    return total


def compute_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by repeated squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
