"""What a peer in a process of its own trains with: the states of the last steps, and the arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

from torch import Tensor

from phalanx.core.clipping import centered_clip
from phalanx.core.config import KEPT_STEPS
from phalanx.core.effects import ComputeGradient, Effect
from phalanx.core.verification import Projections, compute_report
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import Optimizer, State, compute_state_digest, decode_state, encode_state


class Solo:
    """The effects' ``Machine``. All but gradients is computed where it is asked for; those in any one thread."""

    def __init__(self, gradients: Gradients, optimizer: Optimizer, history: int = 0) -> None:
        self._gradients, self.optimizer, self._history = gradients, optimizer, history
        self.start = optimizer.init(gradients.start)
        self.start_digest = compute_state_digest(self.start)
        self.states: dict[int, tuple[bytes, State]] = {0: (self.start_digest, self.start)}
        """Before each of the last steps, with its digest."""
        self.losses: dict[tuple[int, bytes], float] = {}
        """Of the batches of the last steps, by step and seed."""
        self._past: dict[int, Tensor] = {}
        """The parameters before the last ``history`` steps: what the attack ``delayed`` wants."""
        self._busy = Lock()  # a model computes one gradient at a time

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None:
        work = self.prepare_gradient(step, seed)
        return work() if work is not None else None

    def prepare_gradient(self, step: int, seed: bytes) -> Callable[[], Tensor] | None:
        """A function that computes a gradient at the state as it is now, in whatever thread."""
        held = self.states.get(step)
        if held is None:
            return None
        parameters = held[1].parameters

        def compute() -> Tensor:
            with self._busy:
                gradient, loss = self._gradients.compute_with_loss(parameters, seed)
            self.losses[step, seed] = loss
            return gradient

        return compute

    def evaluate(self, parameters: Tensor) -> float:
        with self._busy:
            return self._gradients.evaluate(parameters)

    def compute_aggregate(self, rows: Tensor, tau: float) -> Tensor:
        return centered_clip(rows, tau).aggregate

    def compute_report(
        self, parts: tuple[Tensor, ...], aggregates: tuple[Tensor | None, ...], seeds: Any, tau: float
    ) -> Projections:
        return compute_report(parts, aggregates, seeds, tau)

    def apply(self, step: int, aggregate: Tensor) -> bytes:
        _, before = self.states[step]
        after = self.optimizer.update(before, aggregate, step)
        digest = compute_state_digest(after)
        self.states[step + 1] = digest, after
        if self._history:
            self._past[step] = before.parameters
            self._past.pop(step - self._history - 1, None)
        self._forget(step - KEPT_STEPS)
        return digest

    def undo(self, step: int) -> None:
        for later in [later for later in self.states if later > step]:
            del self.states[later]

    def has_state(self, step: int, digest: bytes) -> bool:
        return step in self.states and self.states[step][0] == digest

    def read_state(self, step: int) -> bytes | None:
        held = self.states.get(step)
        return encode_state(held[1]) if held is not None else None

    def adopt_state(self, step: int, digest: bytes, data: bytes) -> bool:
        start = self.start
        state = decode_state(data, len(start.parameters), len(start.slots), start.parameters.device)
        if state is None or compute_state_digest(state) != digest:
            return False
        self.states = {step: (digest, state)}
        return True

    def duration(self, effect: Effect | ComputeGradient) -> float:
        return 0.0

    def _forget(self, oldest: int) -> None:
        self.states = {step: held for step, held in self.states.items() if step >= oldest}
        self.losses = {place: loss for place, loss in self.losses.items() if place[0] >= oldest}

    # ---- What only attackers ask for

    def compute_poisoned(self, step: int, seed: bytes) -> Tensor:
        with self._busy:
            return self._gradients.compute(self.states[step][1].parameters, seed, poisoned=True)

    def compute_earlier(self, step: int, seed: bytes, delay: int) -> Tensor:
        with self._busy:
            return self._gradients.compute(self._past.get(step - delay, self.start.parameters), seed)
