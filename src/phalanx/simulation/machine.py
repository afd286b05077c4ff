"""A model small enough to run a hundred peers in one process: a bowl whose gradient is noisy, as real ones are."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.core.config import KEPT_STEPS
from phalanx.core.crypto import compute_digest
from phalanx.core.effects import ComputeGradient, Effect
from phalanx.core.randomness import gaussian_vector
from phalanx.core.wire import decode_tensor, encode_tensor
from phalanx.network.machine import Machine

_RATE = 0.25
_NOISE = 0.3


def compute_state_digest(state: Tensor) -> bytes:
    return compute_digest("state", encode_tensor(state))


def make_start(size: int) -> Tensor:
    """The state before step 0."""
    return torch.linspace(-1, 1, size, dtype=torch.float32)


class Bowl(Machine):
    """Gradients of ``|x|^2 / 2`` plus noise that the seed determines; plain gradient descent.

    ``rounding`` is the relative error that this platform makes and others do not (zero: all compute alike).
    """

    def __init__(self, size: int, gradient_time: float = 0.0, rounding: float = 0.0, platform: bytes = b"") -> None:
        start = make_start(size)
        self.states: dict[int, Tensor] = {0: start}
        self.digests: dict[int, bytes] = {0: compute_state_digest(start)}
        self._size, self._gradient_time = size, gradient_time
        self._rounding, self._platform = rounding, platform

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None:
        if step not in self.states:
            return None
        gradient = self.states[step] + _NOISE * gaussian_vector(seed, self._size)
        if self._rounding:
            own = gaussian_vector(compute_digest("platform", self._platform, seed), self._size)
            gradient = gradient * (1 + self._rounding * own)
        return gradient

    def apply(self, step: int, aggregate: Tensor) -> None:
        self.states[step + 1] = after = self.states[step] - _RATE * aggregate
        self.digests[step + 1] = compute_state_digest(after)
        for old in [old for old in self.states if old < step - KEPT_STEPS]:
            del self.states[old], self.digests[old]

    def hash_state(self, step: int) -> bytes:
        return self.digests[step]

    def undo(self, step: int) -> None:
        for later in [later for later in self.states if later > step]:
            del self.states[later], self.digests[later]

    def has_state(self, step: int, digest: bytes) -> bool:
        return self.digests.get(step) == digest

    def read_state(self, step: int) -> bytes | None:
        return encode_tensor(self.states[step]) if step in self.states else None

    def adopt_state(self, step: int, digest: bytes, data: bytes | bytearray) -> bool:
        state = decode_tensor(data, self._size, torch.float32)
        if state is None or compute_state_digest(state) != digest:
            return False
        self.states, self.digests = {step: state}, {step: digest}
        return True

    def duration(self, effect: Effect | ComputeGradient) -> float:
        return self._gradient_time if isinstance(effect, ComputeGradient) else 0.0
