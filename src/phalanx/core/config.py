"""What is fixed for a whole run, and which numbers fit together (docs/PROTOCOL.md, sections 1, 3 and 6)."""

from __future__ import annotations

import math
from functools import cached_property

from msgspec import Struct, msgpack

from phalanx.core.crypto import compute_digest
from phalanx.core.errors import LocalError
from phalanx.core.messages import MAX_CASES, MAX_MEMBERS, MAX_PROJECTIONS
from phalanx.core.wire import WIRE_TYPES

KEPT_STEPS = 3
"""Parameters, gradients and messages of so many steps are kept: what may still be checked."""


_RANGES: dict[str, tuple[float, float]] = {
    "steps": (0, 10**9),
    "delta": (1e-3, 1e6),
    "gradient_time": (0, 1e7),
    "transfer_time": (0, 1e7),
    "probation": (1, 10**6),
    "newcomer_probation": (0, 10**6),
    "probation_checks": (0, 10**3),
    "strikes": (1, 10**6),
    "complaints": (1, 10**6),
    "complaint_window": (1, 10**6),
}
"""Numbers beyond these are slips, or somebody's bait; seconds are real time, a million of them eleven days."""


class AutomaticTau(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``tau`` as a multiple of the agreed scale of norms over the last ``memory`` steps (section 6)."""

    multiple: float
    start: float
    floor: float
    ceiling: float
    step_factor: float = 1.25
    memory: int = 8


class Tolerance(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Distances between recomputed gradients: up to ``lower`` fine, above ``upper`` guilty (section 9).

    They are shares, of what the optimizer says: a tensor's gradient, or what a coordinate's push is divided by.
    """

    lower: float
    upper: float


class Config(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The numbers of a run. Its digest names the run, so peers with other numbers never understand one another."""

    founders: tuple[bytes, ...]
    byzantine: int
    """b: members that may do anything, together."""
    validators: int = 1
    """m: members that check others instead of computing, each step."""
    size: int
    """d: coordinates of a gradient."""
    steps: int
    wire: str = "float32"
    tau: float | AutomaticTau = 1.0
    cap: float = 1e3
    """No part of a gradient is longer than this; a longer one counts as nothing."""
    delta_max: float = 1e6
    """V3: a part whose aggregate most contributors find farther than this is opened."""
    projections: int = 1
    delta: float = 1.0
    """Seconds within which a message between honest peers arrives."""
    gradient_time: float = 1.0
    transfer_time: float = 1.0
    """Seconds allowed for a gradient, and for moving the parts."""
    partition_safe: bool = False
    tolerance: Tolerance | None = None
    strikes: int = 3
    complaints: int = 3
    complaint_window: int = 20
    probation: int = 12
    """T: the least number of steps that a newcomer computes without weight before it is a member."""
    newcomer_probation: int = 0
    """The number itself; 0: as long as :attr:`newcomer_term` says."""
    probation_checks: int = 1
    """Checks of every probationer in every step."""
    admissions: int = 1
    """Candidates on probation at the same time, at most."""
    seed: bytes = bytes(32)
    state: bytes = bytes(32)
    """The digest of the state before step 0."""

    @cached_property
    def run(self) -> bytes:
        return compute_digest("run", msgpack.encode(self))

    @property
    def newcomer_term(self) -> int:
        """Steps after which a newcomer is a member.

        An attacker can spend all its computation on candidates and let its members cheat, each until it is caught:
        ``n (n - 1) / (m (n - b))`` steps on average. Probation has to last several times longer, or it gains members
        faster than it loses them (``experiments/sybils.py``).
        """
        n, b, m = len(self.founders), self.byzantine, self.validators
        rule = math.ceil(4 * self.admissions * n * (n - 1) / (m * (n - b)))
        return self.newcomer_probation or max(self.probation, rule)

    def check(self) -> Config:
        """This configuration, or :class:`LocalError` with the number to change."""
        n, b, m = len(self.founders), self.byzantine, self.validators
        _require(n <= MAX_MEMBERS, f"{n} founders, but a roster holds at most {MAX_MEMBERS}")
        _require(len(set(self.founders)) == n, "founders: a key is listed twice")
        _require(b >= 0, "byzantine: expected a whole number from 0")
        _require(m >= 1, "validators: expected at least 1; without validators nobody checks a gradient")
        _require(
            n >= 2 * b + 1 + m,
            f"{n} members with byzantine={b} leave room for validators = {max(n - 2 * b - 1, 0)}, not {m}: "
            + _advise(n, b, m),
        )
        _require(
            not self.partition_safe or 3 * b < n,
            f'quorum "partition-safe" needs 3 byzantine < members: lower byzantine to {(n - 1) // 3}, '
            f"or take {3 * b + 1} members",
        )
        most = MAX_CASES - m
        _require(
            1 <= self.admissions <= most,
            f"admissions: expected 1 to {most}; whoever checks them all says so in one message",
        )
        _require(self.size >= n, f"size: a gradient of {self.size} coordinates cannot be cut into {n} parts")
        _require(self.wire in WIRE_TYPES, f"wire: {self.wire!r} is not one of {', '.join(WIRE_TYPES)}")
        _require(1 <= self.projections <= MAX_PROJECTIONS, f"projections: expected 1 to {MAX_PROJECTIONS}")
        for name in ("cap", "delta_max", "delta"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, f"{name}: expected a positive number, got {value}")
        for name in ("gradient_time", "transfer_time"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"{name}: expected a number from 0, got {value}")
        for name, (low, high) in _RANGES.items():  # a manifest may come from anybody
            value = getattr(self, name)
            _require(low <= value <= high, f"{name}: expected a number from {low:g} to {high:g}, got {value}")
        _require(
            self.probation * self.probation_checks >= 5,
            "probation: probation steps times checks per step must be at least 5",
        )
        if isinstance(self.tau, AutomaticTau):
            auto = self.tau
            _require(0 < auto.floor <= auto.start <= auto.ceiling < math.inf, "tau: expected floor <= start <= ceiling")
            _require(auto.step_factor > 1 and auto.memory >= 1, "tau: step_factor above 1 and memory from 1 expected")
            _require(
                auto.multiple > 0 and auto.multiple * b < n - m - b,
                f"tau: multiple {auto.multiple} lets {b} attackers push it up without end; "
                f"expected less than {(n - m - b) / max(b, 1):.3g}",
            )
        else:
            _require(math.isfinite(self.tau) and self.tau > 0, f"tau: expected a positive number, got {self.tau}")
        if self.tolerance is not None:
            _require(0 < self.tolerance.lower < self.tolerance.upper, "tolerance: expected 0 < lower < upper")
            _require(self.tolerance.upper < math.inf, "tolerance: expected an upper that is finite")
        return self


def _advise(n: int, b: int, m: int) -> str:
    """One number that would help if it was lower, if there is one, or more members."""
    most = {"byzantine": (n - 1 - m) // 2, "validators": n - 2 * b - 1}
    lower = [f"lower {name} to {value}" for name, value in most.items() if value >= (name == "validators")]
    return ", or ".join([*lower[:1], f"take {2 * b + 1 + m} members"])


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise LocalError(complaint)
