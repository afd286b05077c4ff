"""What a peer in a process of its own trains with: the states of the last steps, and the arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import torch
from torch import Tensor

from phalanx.core.config import KEPT_STEPS
from phalanx.core.effects import ComputeGradient, Effect
from phalanx.core.room import reserve_rooms
from phalanx.network.machine import Machine
from phalanx.training.allocation import keep_freed_memory
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import Optimizer, State, StateBytes, compute_state_digest, decode_state
from phalanx.training.shelf import Shelf


class Solo(Machine):
    """The effects' ``Machine``. All but gradients is computed where it is asked for; those in any one thread."""

    def __init__(
        self, gradients: Gradients, optimizer: Optimizer, history: int = 0, start: State | None = None
    ) -> None:
        """``start`` is the state before step 0, if the run goes on from another one's."""
        self._gradients, self.optimizer, self._history = gradients, optimizer, history
        self.start = start if start is not None else optimizer.init(gradients.start)
        gradients.start = self.start.parameters  # the same numbers, held once
        self.start_digest = compute_state_digest(self.start)
        self.states: dict[int, State] = {0: self.start}
        """Before each of the last steps."""
        self._digests: dict[int, bytes] = {0: self.start_digest}
        """Of those states; of the newest once somebody has asked for it."""
        self.losses: dict[tuple[int, bytes], float] = {}
        """Of the batches of the last steps, by step and seed."""
        self._past: dict[int, Tensor] = {}
        """The parameters before the last ``history`` steps: what the attack ``delayed`` wants."""
        self._busy = Lock()  # a model computes one gradient at a time
        self._shelf: Shelf | None = None
        self._shelved: set[int] = set()
        """Which of the states are in files."""

    def reserve_memory(self) -> None:
        """Take the memory now that states and gradients of the steps that are kept will need, and keep it."""
        keep_freed_memory()
        start = self.start
        if start.parameters.device.type == "cpu":
            reserve_rooms(len(start.parameters), torch.float32, (KEPT_STEPS + 3) * (2 + len(start.slots)))

    def use_shelf(self, shelf: Shelf) -> None:
        """From now on, states before the current step are in files: what undoing, checking and joining need."""
        self._shelf = shelf
        start = self._put_away(self.start)
        for step in [step for step, held in self.states.items() if held is self.start]:
            self.states[step] = start
            self._shelved.add(step)
        self.start = start
        self._gradients.start = start.parameters

    def _put_away(self, state: State) -> State:
        assert self._shelf is not None
        return State(self._shelf.put_tensor(state.parameters), tuple(map(self._shelf.put_tensor, state.slots)))

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None:
        work = self.prepare_gradient(step, seed)
        return work() if work is not None else None

    def prepare_gradient(self, step: int, seed: bytes) -> Callable[[], Tensor] | None:
        """A function that computes a gradient at the state as it is now, in whatever thread."""
        held = self.states.get(step)
        if held is None:
            return None
        parameters = held.parameters

        def compute() -> Tensor:
            with self._busy:
                gradient, loss = self._gradients.compute_with_loss(parameters, seed)
            self.losses[step, seed] = loss
            return gradient

        return compute

    def evaluate(self, parameters: Tensor) -> float:
        with self._busy:
            return self._gradients.evaluate(parameters)

    def measure_deviation(self, step: int, deviation: Tensor, gradient: Tensor) -> float | None:
        held, sizes = self.states.get(step), self._gradients.sizes
        if held is None:
            return None
        return self.optimizer.measure_deviation(held, deviation, gradient, step, sizes)

    def apply(self, step: int, aggregate: Tensor) -> None:
        before = self.states[step]
        self.undo(step)
        after = self.optimizer.update(before, aggregate, step)
        if self._shelf is not None and step not in self._shelved:
            self.states[step] = before = self._put_away(before)
            self._shelved.add(step)
        self.states[step + 1] = after
        if self._history:
            self._past[step] = before.parameters
            self._past.pop(step - self._history - 1, None)
        self._keep_only(range(step - KEPT_STEPS, step + 2))

    def undo(self, step: int) -> None:
        self._keep_only(range(step + 1))

    def hash_state(self, step: int) -> bytes:
        if step not in self._digests:
            self._digests[step] = compute_state_digest(self.states[step])
        return self._digests[step]

    def has_state(self, step: int, digest: bytes) -> bool:
        return step in self.states and self.hash_state(step) == digest

    def read_state(self, step: int) -> StateBytes | None:
        held = self.states.get(step)
        return StateBytes(held) if held is not None else None

    def adopt_state(self, step: int, digest: bytes, data: bytes | bytearray) -> bool:
        start = self.start
        state = decode_state(data, len(start.parameters), len(start.slots), start.parameters.device)
        if state is None or compute_state_digest(state) != digest:
            return False
        self.return_to(step, state, digest)
        return True

    def return_to(self, step: int, state: State, digest: bytes) -> None:
        """Hold this state before ``step``, and no other. Nobody looks whether the digest is its own."""
        self.states, self._digests = {step: state}, {step: digest}
        self._shelved.clear()

    def duration(self, effect: Effect | ComputeGradient) -> float:
        return 0.0

    def _keep_only(self, steps: range) -> None:
        self.states = {step: held for step, held in self.states.items() if step in steps}
        self._digests = {step: digest for step, digest in self._digests.items() if step in steps}
        self._shelved &= self.states.keys()
        losses = list(self.losses.items())  # the gradients' thread may be adding one
        self.losses = {place: loss for place, loss in losses if place[0] >= steps.start}

    # ---- What only attackers ask for

    def compute_poisoned(self, step: int, seed: bytes) -> Tensor:
        with self._busy:
            return self._gradients.compute(self.states[step].parameters, seed, poisoned=True)

    def compute_earlier(self, step: int, seed: bytes, delay: int) -> Tensor:
        with self._busy:
            return self._gradients.compute(self._past.get(step - delay, self.start.parameters), seed)

    def find_deviation(self, step: int, direction: Tensor, gradient: Tensor) -> Tensor:
        return self.optimizer.find_deviation(self.states[step], direction, gradient, step, self._gradients.sizes)
