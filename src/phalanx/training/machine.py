"""What a peer trains with: the states of the last steps and the arithmetic on them (the effects' ``Machine``).

Peers of one process share a :class:`Workshop`. A gradient is a pure function of state and seed, and so is an update of
state and aggregate: each is computed once there, whoever asks, and states are held once, however many peers hold them.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from phalanx.core.config import KEPT_STEPS
from phalanx.core.crypto import compute_digest
from phalanx.core.effects import ComputeGradient, Effect
from phalanx.core.wire import view_bytes
from phalanx.network.machine import Machine
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import Optimizer, State, compute_state_digest, decode_state, encode_state

_RECENT_STATES = 3  # gradients at these are remembered: validators ask for those of the step before


class Workshop:
    """Gradients and updates of one task. ``history``: of how many past steps an attacker wants the parameters."""

    def __init__(self, gradients: Gradients, optimizer: Optimizer, history: int = 0) -> None:
        self.gradients, self.optimizer, self._history = gradients, optimizer, history
        self.start = optimizer.init(gradients.start)
        self.start_digest = compute_state_digest(self.start)
        self.parameters: dict[int, Tensor] = {}
        """Before each of the last ``history`` steps."""
        self._states: dict[bytes, State] = {self.start_digest: self.start}
        self._recent: deque[bytes] = deque([self.start_digest])
        self._gradients: dict[bytes, dict[tuple[bytes, bool], tuple[Tensor, float]]] = {}
        self._updates: dict[tuple[bytes, bytes], bytes] = {}

    def compute(self, state: bytes, seed: bytes, *, poisoned: bool = False) -> tuple[Tensor, float]:
        """The gradient at a state on a public batch, and the loss there."""
        known = self._gradients.setdefault(state, {})
        if (seed, poisoned) not in known:
            parameters = self._states[state].parameters
            known[seed, poisoned] = self.gradients.compute_with_loss(parameters, seed, poisoned=poisoned)
        return known[seed, poisoned]

    def find_loss(self, state: bytes, seed: bytes) -> float | None:
        """The loss that came with an honest gradient, if it was computed lately."""
        found = self._gradients.get(state, {}).get((seed, False))
        return found[1] if found is not None else None

    def measure_deviation(self, state: bytes, step: int, deviation: Tensor, gradient: Tensor) -> float:
        return self.optimizer.measure_deviation(self._states[state], deviation, gradient, step, self.gradients.sizes)

    def update(self, step: int, state: bytes, aggregate: Tensor) -> bytes:
        """The digest of the state that follows."""
        if self._history:
            self.parameters[step] = self._states[state].parameters
            self.parameters.pop(step - self._history - 1, None)
        asked = state, compute_digest("aggregate", view_bytes(aggregate))
        if asked not in self._updates:
            after = self.optimizer.update(self._states[state], aggregate, step)
            self._updates[asked] = self.add(after)
        return self._updates[asked]

    def add(self, state: State, digest: bytes | None = None) -> bytes:
        """Hold a state; its digest."""
        digest = compute_state_digest(state) if digest is None else digest
        if digest not in self._states:
            self._states[digest] = state
            self._recent.append(digest)
            while len(self._recent) > _RECENT_STATES:
                self._gradients.pop(self._recent.popleft(), None)
        return digest

    def get(self, digest: bytes) -> State:
        return self._states[digest]

    def forget(self, needed: set[bytes]) -> None:
        """Drop every state but these."""
        for digest in self._states.keys() - needed:
            del self._states[digest]
            self._gradients.pop(digest, None)
        self._updates = {asked: found for asked, found in self._updates.items() if asked[0] in needed}


class Trainer(Machine):
    """One peer's machine: which state it is in before each of the last steps."""

    def __init__(self, workshop: Workshop, gradient_time: float = 0.0) -> None:
        self._workshop, self._gradient_time = workshop, gradient_time
        self.digests: dict[int, bytes] = {0: workshop.start_digest}

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None:
        digest = self.digests.get(step)
        return self._workshop.compute(digest, seed)[0] if digest is not None else None

    def measure_deviation(self, step: int, deviation: Tensor, gradient: Tensor) -> float | None:
        digest = self.digests.get(step)
        return self._workshop.measure_deviation(digest, step, deviation, gradient) if digest is not None else None

    def apply(self, step: int, aggregate: Tensor) -> None:
        self.digests[step + 1] = self._workshop.update(step, self.digests[step], aggregate)
        for old in [old for old in self.digests if old < step - KEPT_STEPS]:
            del self.digests[old]

    def hash_state(self, step: int) -> bytes:
        return self.digests[step]

    def undo(self, step: int) -> None:
        for later in [later for later in self.digests if later > step]:
            del self.digests[later]

    def has_state(self, step: int, digest: bytes) -> bool:
        return self.digests.get(step) == digest

    def read_state(self, step: int) -> bytes | None:
        return encode_state(self._workshop.get(self.digests[step])) if step in self.digests else None

    def adopt_state(self, step: int, digest: bytes, data: bytes | bytearray) -> bool:
        start = self._workshop.start
        state = decode_state(data, len(start.parameters), len(start.slots), start.parameters.device)
        if state is None or compute_state_digest(state) != digest:
            return False
        self.digests = {step: self._workshop.add(state, digest)}
        return True

    def duration(self, effect: Effect | ComputeGradient) -> float:
        return self._gradient_time if isinstance(effect, ComputeGradient) else 0.0

    # ---- What only attackers ask for

    def compute_poisoned(self, step: int, seed: bytes) -> Tensor:
        return self._workshop.compute(self.digests[step], seed, poisoned=True)[0]

    def compute_earlier(self, step: int, seed: bytes, delay: int) -> Tensor:
        earlier = self._workshop.parameters.get(step - delay, self._workshop.start.parameters)
        return self._workshop.gradients.compute(earlier, seed)

    def find_deviation(self, step: int, direction: Tensor, gradient: Tensor) -> Tensor:
        shop = self._workshop
        state = shop.get(self.digests[step])
        return shop.optimizer.find_deviation(state, direction, gradient, step, shop.gradients.sizes)
