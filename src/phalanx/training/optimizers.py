"""Optimizers whose every bit is agreed: the same gradient moves all peers to the same state, on any machine.

An optimizer is two pure functions. ``init`` makes a state from parameters, ``update`` a new state from a state and a
gradient. The digest of the state is what peers certify, so its arithmetic is canonical:

* float32 numbers are multiplied, added, subtracted and divided one operation at a time. IEEE fixes each of these. A
  fused multiply-add rounds once instead of twice, so nothing here is fused: no ``alpha=``, no ``addcmul``, no ``lerp``.
* No tensor is divided by a number: a GPU multiplies by the reciprocal instead, and rounds otherwise.
* ``torch.sqrt`` of float32 is off by one bit for a sixth of all numbers where Intel's library computes it. The square
  root is taken in float64 and rounded. The root of a float32 number is never nearer than eight float64 roundings to
  the middle between two float32 numbers, so an error in the last bit of float64 cannot show.
* Numbers such as the rate are found in float64 (``schedules.py``) and rounded to float32 once.
* Norms are summed in float64 in lanes: an order that has nothing to do with threads, vector units or a GPU's blocks.

Numbers smaller than normal are kept: ``torch.set_flush_denormal(True)`` breaks the agreement.

A state is always finite. An update that would overflow raises :class:`LocalError` instead; as all peers compute alike,
all stop at the same step. Aggregates are no longer than the run's cap, so this takes a rate or a cap out of all reason.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from phalanx.core.crypto import compute_digest
from phalanx.core.errors import LocalError
from phalanx.core.room import make_room_like
from phalanx.core.verification import measure_tensors
from phalanx.core.wire import WIRE_TYPES, decode_tensor, view_bytes
from phalanx.training.schedules import SCHEDULES, Schedule, compute_power

_BLOCK = 1 << 17  # numbers that a CPU takes through all operations while they are in its cache
_LANES = 1 << 16  # part of the arithmetic: another number is another sum
_MOST_TRUST = 1e6
_TINY = 1e-30
_LEAST_PUSH = 1e-3  # of a coordinate on average, in a tensor that some batches touch; Adam's is up to 1
_LEAST_TENSOR = 1e-3
"""Of the whole gradient, a tensor's own counts as at least this share when somebody's deviation is measured."""
_GRADIENTS = frozenset(wire.dtype for wire in WIRE_TYPES.values())

Slots: TypeAlias = tuple[Tensor, ...]


# ---- State


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What an optimizer moves. All vectors are float32, of one length, on one device. None is ever written to."""

    parameters: Tensor
    slots: Slots
    """What the optimizer remembers, such as momentum."""


def encode_state(state: State) -> bytes:
    """The parameters, then the slots, as little-endian float32."""
    return b"".join(map(view_bytes, (state.parameters, *state.slots)))


class StateBytes:
    """What :func:`encode_state` returns, read piece by piece: without a copy of the whole."""

    def __init__(self, state: State) -> None:
        self._views = [view_bytes(vector) for vector in (state.parameters, *state.slots)]

    def __len__(self) -> int:
        return sum(map(len, self._views))

    def __getitem__(self, piece: slice) -> bytes:
        start, stop, _ = piece.indices(len(self))
        found = []
        for view in self._views:
            found.append(view[max(0, start) : max(0, stop)])
            start, stop = start - len(view), stop - len(view)
        return b"".join(found)


def decode_state(data: bytes | bytearray, size: int, slots: int, device: torch.device | str = "cpu") -> State | None:
    """The state of ``size`` parameters, or None if the bytes are too many or too few, or hold what is not finite."""
    values = decode_tensor(data, size * (1 + slots), torch.float32)
    if values is None or not _is_finite(values):
        return None
    parameters, *others = torch.split(values.to(device), size) if size else [values] * (1 + slots)
    return State(parameters, tuple(others))


def compute_state_digest(state: State) -> bytes:
    """32 bytes that bind every number, how many there are and how many slots."""
    return compute_digest("optimizer state", *map(view_bytes, (state.parameters, *state.slots)))


def _is_finite(values: Tensor) -> bool:
    if not values.numel():
        return True
    least, most = torch.aminmax(values)  # both are nan if any number is
    return math.isfinite(least.item()) and math.isfinite(most.item())


# ---- Optimizers


@dataclass(frozen=True, kw_only=True)
class Optimizer(ABC):
    """The numbers of an optimizer, and its two functions."""

    rate: float

    @property
    @abstractmethod
    def slot_names(self) -> tuple[str, ...]:
        """What each slot holds."""

    @abstractmethod
    def _move(self, state: State, gradient: Tensor, step: int) -> State:
        """The update itself; it may overflow."""

    def init(self, parameters: Tensor) -> State:
        """The state before step 0: a copy of the parameters, and slots of zeros."""
        if parameters.ndim != 1 or parameters.dtype != torch.float32:
            got = f"shape {tuple(parameters.shape)} of {parameters.dtype}"
            raise ValueError(f"parameters: expected a vector of float32, got {got}")
        copy = parameters.detach().clone()
        if not _is_finite(copy):
            raise LocalError("the parameters to start from are not all finite; expected finite numbers")
        return State(copy, tuple(torch.zeros_like(copy) for _ in self.slot_names))

    def update(self, state: State, gradient: Tensor, step: int) -> State:
        """The state after step ``step``, counted from 0. Nothing is written to; the gradient must be finite.

        A gradient in a shorter wire type is widened, which is exact. Raises :class:`LocalError` if the new state would
        not be finite.
        """
        if gradient.shape != state.parameters.shape or gradient.dtype not in _GRADIENTS:
            got = f"shape {tuple(gradient.shape)} of {gradient.dtype}"
            raise ValueError(f"gradient: expected {len(state.parameters)} numbers in a wire type, got {got}")
        if len(state.slots) != len(self.slot_names):
            raise ValueError(f"state: expected {len(self.slot_names)} slots, got {len(state.slots)}")
        if step < 0:
            raise ValueError(f"step: expected 0 or more, got {step}")
        with torch.no_grad():
            after = self._move(state, gradient.float(), step)
        for name, values in zip(("parameters", *self.slot_names), (after.parameters, *after.slots), strict=True):
            if not _is_finite(values):
                raise LocalError(f"step {step}: the update overflows ({name}); lower the rate or the cap on gradients")
        return after

    def measure_deviation(
        self, state: State, deviation: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> float:
        """How far a deviation from a peer's gradient could move this state, as a share of what the gradient could.

        Where updates are sums of gradients: the deviation's length beside the gradient's, for each tensor of ``sizes``.
        """
        return measure_tensors(deviation, gradient, sizes, _LEAST_TENSOR)

    def find_deviation(
        self, state: State, direction: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> Tensor:
        """The most that an attacker gets in along ``direction``: what :meth:`measure_deviation` says is 1."""
        least, found = _LEAST_TENSOR * float(gradient.double().norm()), []
        for d, g in zip(torch.split(direction, list(sizes)), torch.split(gradient, list(sizes)), strict=True):
            found.append(d * (max(float(g.double().norm()), least) / max(float(d.double().norm()), _TINY)))
        return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class _Scheduled(Optimizer, ABC):
    """An optimizer whose rate follows a schedule."""

    schedule: Schedule
    weight_decay: float = 0.0

    def _compute_rate(self, step: int) -> float:
        return self.rate * self.schedule.compute_share(step)


@dataclass(frozen=True, kw_only=True)
class Sgd(_Scheduled):
    """``u <- momentum u + g``, ``x <- x - rate u``, where ``g`` is the gradient plus ``weight_decay x``.

    With ``nesterov`` it is ``x <- x - rate (g + momentum u)``. As in ``torch.optim.SGD``.
    """

    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def _move(self, state: State, gradient: Tensor, step: int) -> State:
        rate, decay, momentum = map(_single, (self._compute_rate(step), self.weight_decay, self.momentum))
        after = _make_room(state)
        for block in _blocks(gradient):
            x, g = state.parameters[block], gradient[block]
            if decay:
                g = (x * decay).add_(g)
            push = g
            if momentum:
                u = torch.mul(state.slots[0][block], momentum, out=after.slots[0][block]).add_(g)
                push = (u * momentum).add_(g) if self.nesterov else u
            torch.sub(x, push * rate, out=after.parameters[block])
        return after


@dataclass(frozen=True, kw_only=True)
class AdamW(_Scheduled):
    """Adam with decoupled decay, as in ``torch.optim.AdamW``.

    ``m <- beta1 m + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``, both divided by ``1 - beta^t`` at the ``t``-th
    step, and ``x <- (1 - rate weight_decay) x - rate m / (sqrt(v) + epsilon)``.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("first_moment", "second_moment")

    def _move(self, state: State, gradient: Tensor, step: int) -> State:
        rate = self._compute_rate(step)
        keep = _single(1 - rate * self.weight_decay)
        scale = _single(rate / (1 - compute_power(self.beta1, step + 1)))
        after = _make_room(state)
        for block in _blocks(gradient):
            push = self._compute_push(state.slots, gradient, after.slots, block, step).mul_(scale)
            torch.sub(state.parameters[block] * keep, push, out=after.parameters[block])
        return after

    def _compute_push(self, old: Slots, gradient: Tensor, new: Slots, block: slice, step: int) -> Tensor:
        """Fill a block of the new moments. Returns ``m / (sqrt(v) + epsilon)``, where only ``v`` is corrected."""
        beta1, rest1, beta2, rest2 = map(_single, (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2))
        correction = _single(1 / math.sqrt(1 - compute_power(self.beta2, step + 1)))
        g = gradient[block]
        m = torch.mul(old[0][block], beta1, out=new[0][block]).add_(g * rest1)
        v = torch.mul(old[1][block], beta2, out=new[1][block]).add_((g * g).mul_(rest2))
        return m / _sqrt(v).mul_(correction).add_(_single(self.epsilon))

    def measure_deviation(
        self, state: State, deviation: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> float:
        """The largest share of what a coordinate's push is divided by: that much of a step it can move, and no more."""
        shares = (
            float((deviation[block].double() / self._compute_divisor(state, gradient, block, step)).max())
            for block in _blocks(gradient)
        )
        return max(shares, default=0.0)

    def find_deviation(
        self, state: State, direction: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> Tensor:
        divisors = [self._compute_divisor(state, gradient, block, step) for block in _blocks(gradient)]
        return (torch.cat(divisors) * direction.sign()).float()

    def _compute_divisor(self, state: State, gradient: Tensor, block: slice, step: int) -> Tensor:
        """``sqrt(v) + epsilon``, with the ``v`` that the gradient alone would leave: float64.

        From the ``v`` before it, all coordinates of the first step, and in any step those of a word that was long not
        seen, would be judged by ``epsilon`` alone; there, honest platforms differ by more. Where the gradient is zero
        this is ``epsilon`` and what earlier gradients left.
        """
        g, v = gradient[block].double(), state.slots[1][block].to(gradient.device).double()
        v = v.mul_(self.beta2).add_(g.mul_(g).mul_(1 - self.beta2))
        return v.div_(1 - compute_power(self.beta2, step + 1)).sqrt_().add_(self.epsilon)


@dataclass(frozen=True, kw_only=True)
class Lamb(AdamW):
    """LAMB (arXiv 1904.00962): Adam's push, with the decay in it, made as long as the tensor it moves.

    For each tensor ``x`` of the model ``u = m / (sqrt(v) + epsilon) + weight_decay x`` with ``m`` and ``v`` as in Adam,
    and ``x <- x - rate (|x| / |u|) u``. The ratio is one where either norm is zero, and never above a million.
    """

    epsilon: float = 1e-6
    sizes: tuple[int, ...] | None = None

    def init(self, parameters: Tensor) -> State:
        if self.sizes is None or sum(self.sizes) != parameters.numel():
            got = "none" if self.sizes is None else f"sizes that add up to {sum(self.sizes)}"
            raise LocalError(
                f"optimizer lamb: expected the sizes of tensors of {parameters.numel()} numbers, got {got}"
            )
        return super().init(parameters)

    def _move(self, state: State, gradient: Tensor, step: int) -> State:
        assert self.sizes is not None, "init checks the sizes"
        decay, correction = _single(self.weight_decay), _single(1 / (1 - compute_power(self.beta1, step + 1)))
        after, push = _make_room(state), make_room_like(gradient)
        for block in _blocks(gradient):
            u = self._compute_push(state.slots, gradient, after.slots, block, step).mul_(correction)
            torch.add(u, state.parameters[block] * decay, out=push[block])
        sizes = list(self.sizes)
        tensors = list(zip(torch.split(state.parameters, sizes), torch.split(push, sizes), strict=True))
        squares = torch.stack([_sum_squares(values) for pair in tensors for values in pair]).tolist()
        ratios = map(_compute_trust, squares[::2], squares[1::2])
        for (x, u), out, ratio in zip(tensors, torch.split(after.parameters, sizes), ratios, strict=True):
            torch.sub(x, u * _single(self._compute_rate(step) * ratio), out=out)
        return after

    def measure_deviation(
        self, state: State, deviation: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> float:
        """As for Adam; but a push is made as long as its tensor however short it is, so where it is tiny more is at
        stake, and where a tensor has none any deviation is beyond measure."""
        shares = [
            float((deviation[piece].double() / self._compute_divisor(state, gradient, piece, step)).max()) / share
            if share
            else math.inf
            for piece, share in self._find_shares(state, gradient, step)
            if bool(deviation[piece].any())
        ]
        return max(shares, default=0.0)

    def find_deviation(
        self, state: State, direction: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> Tensor:
        found = super().find_deviation(state, direction, gradient, step, sizes)
        for piece, share in self._find_shares(state, gradient, step):
            found[piece] *= share
        return found

    def _find_shares(self, state: State, gradient: Tensor, step: int) -> Iterator[tuple[slice, float]]:
        """Each tensor's place, and its push as a share of the least that a tensor usually has: 1 at most."""
        assert self.sizes is not None, "init checks the sizes"
        rest, start = 1 - compute_power(self.beta1, step + 1), 0
        for size in self.sizes:
            piece = slice(start, start := start + size)
            m = state.slots[0][piece].to(gradient.device).double() * self.beta1
            m += gradient[piece].double() * (1 - self.beta1)
            push = m.div_(self._compute_divisor(state, gradient, piece, step)).div_(rest)
            push += state.parameters[piece].to(gradient.device).double() * self.weight_decay
            yield piece, min(1.0, float(push.norm()) / (_LEAST_PUSH * math.sqrt(max(size, 1))))


@dataclass(frozen=True, kw_only=True)
class Restarted(Optimizer):
    """Restarted-BTARD-SGD (arXiv 2106.11257, appendix), for strongly convex losses: SGD in stages.

    Stage ``t = 1, 2, ...`` makes ``first_stage 2^(t-1)`` steps of plain SGD at ``rate / 2^(t-1)``. The next one starts
    from the average of the iterates of this one: so in the paper, where noise and not curvature sets the numbers. The
    run ends its last stage early if it must, and its result is that stage's average. Best are
    ``first_stage (2^r - 1)`` steps for ``r`` stages.

    Averaged are the iterates that the stage's gradients made, not the one it started from: no gradient is for nothing.
    The average carries what rounding took from it in a slot of its own; without, it would stand still in long stages.
    """

    first_stage: int
    steps: int

    @property
    def slot_names(self) -> tuple[str, ...]:
        return ("average", "remainder")

    def get_stage(self, step: int) -> tuple[int, int, int]:
        """The stage of a step, from 0, the step's place in it, from 0, and the stage's length."""
        stage = (step // self.first_stage + 1).bit_length() - 1
        length = self.first_stage << stage
        return stage, step - (length - self.first_stage), length

    def _move(self, state: State, gradient: Tensor, step: int) -> State:
        stage, place, length = self.get_stage(step)
        is_last = place == length - 1 or step == self.steps - 1
        rate, share = _single(self.rate / (1 << stage)), _single(1 / (place + 1))
        after = _make_room(state)
        for block in _blocks(gradient):
            x = torch.sub(state.parameters[block], gradient[block] * rate, out=after.parameters[block])
            average, remainder = after.slots[0][block], after.slots[1][block]
            if place == 0:
                average.copy_(x)
                remainder.zero_()
            else:
                old = state.slots[0][block]
                change = (x - old).mul_(share).add_(state.slots[1][block])
                torch.add(old, change, out=average)
                torch.sub(change, average - old, out=remainder)
            if is_last:
                x.copy_(average)
        return after


@dataclass(frozen=True, kw_only=True)
class Continued(Optimizer):
    """Another optimizer that has made ``before`` steps in earlier runs: its schedule goes on where it stood.

    What takes a step is passed on here with the steps before it, method by method; a test sees that none is left out.
    """

    inner: Optimizer
    before: int

    @property
    def slot_names(self) -> tuple[str, ...]:
        return self.inner.slot_names

    def init(self, parameters: Tensor) -> State:
        return self.inner.init(parameters)

    def _move(self, state: State, gradient: Tensor, step: int) -> State:
        return self.inner._move(state, gradient, self.before + step)

    def measure_deviation(
        self, state: State, deviation: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> float:
        return self.inner.measure_deviation(state, deviation, gradient, self.before + step, sizes)

    def find_deviation(
        self, state: State, direction: Tensor, gradient: Tensor, step: int, sizes: Sequence[int]
    ) -> Tensor:
        return self.inner.find_deviation(state, direction, gradient, self.before + step, sizes)


# ---- Arithmetic


def _single(number: float) -> float:
    """The nearest float32; inf if there is none."""
    with np.errstate(over="ignore"):
        return float(np.float32(number))


def _blocks(vector: Tensor) -> Iterator[slice]:
    """Pieces to go through one after the other. On a GPU it is one piece. Numbers do not depend on it."""
    width = max(1, len(vector)) if vector.is_cuda else _BLOCK
    return (slice(at, at + width) for at in range(0, len(vector), width))


def _make_room(state: State) -> State:
    return State(make_room_like(state.parameters), tuple(map(make_room_like, state.slots)))


def _sqrt(values: Tensor) -> Tensor:
    """The square root as IEEE wants it, whatever library stands behind ``torch.sqrt``."""
    return values.double().sqrt_().float()


def _sum_squares(values: Tensor) -> Tensor:
    """``|values|^2`` in float64, the same everywhere: each lane adds up every 65,536th square, then halves are added.

    Fewer lanes do for a short vector. The others would hold zeros, and zeros change no sum.
    """
    lanes = min(_LANES, 1 << max(0, len(values) - 1).bit_length())
    sums = torch.zeros(lanes, dtype=torch.float64, device=values.device)
    for at in range(0, len(values), lanes):
        wide = values[at : at + lanes].double()
        sums[: len(wide)] += wide.mul_(wide)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = sums[:half] + sums[half:]
    return sums[0]


def _compute_trust(square_size: float, square_push: float) -> float:
    if square_size == 0 or square_push == 0:
        return 1.0
    return min(math.sqrt(square_size) / math.sqrt(square_push), _MOST_TRUST)


# ---- Settings


@dataclass(frozen=True, slots=True)
class Method:
    """One of the paper's methods: the optimizer it runs, and what a run must say besides."""

    optimizer: str
    meaning: str
    needs: tuple[str, ...] = ()


METHODS: dict[str, Method] = {
    "btard-sgd": Method("sgd", "SGD on the aggregate of the gradients"),
    "btard-clipped-sgd": Method(
        "sgd", "the same; every peer first scales its gradient to norm at most lambda", needs=("lambda",)
    ),
    "restarted-btard-sgd": Method("restarted", "stages of SGD, each from the average of the one before"),
}

OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": Sgd, "adamw": AdamW, "lamb": Lamb, "restarted": Restarted}

TOLERANCES: dict[str, tuple[float, float]] = {
    "sgd": (1e-4, 1e-2),
    "restarted": (1e-4, 1e-2),
    "adamw": (0.03, 0.3),
    "lamb": (0.03, 0.3),
}
"""LOWER and UPPER of a ``Tolerance`` that suits an optimizer: LOWER is about twice what honest platforms differ by or
more (``experiments/tolerance.py``), UPPER at least ten times LOWER. What they are shares of, ``measure_deviation``
says."""

_SCHEDULE = ("schedule", "warmup", "floor")
_GIVEN = ("steps", "sizes")  # fields that are no settings

_RANGES: dict[str, tuple[float, float]] = {
    "rate": (1e-12, 1e6),
    "momentum": (0, 0.9999),
    "weight_decay": (0, 1e3),
    "beta1": (0, 0.9999),
    "beta2": (0, 0.999999),
    "epsilon": (1e-12, 1),
    "floor": (0, 1),
}


def make_optimizer(settings: Mapping[str, Any], steps: int, sizes: Sequence[int] | None = None) -> Optimizer:
    """The optimizer that a run's settings describe; :class:`LocalError` says which of them cannot be.

    ``name`` and ``rate`` are required; the optimizer's class names the others. ``schedule``, ``warmup`` (steps) and
    ``floor`` (a share of the rate) are in :class:`Schedule`. ``steps`` is the length of the run. ``sizes`` are the
    lengths of the model's tensors in the order in which they are laid end to end: LAMB needs them.
    """
    name = settings.get("name")
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise LocalError(f"optimizer: name = {name!r}; expected one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    if steps < 1:
        raise LocalError(f"optimizer {name}: steps = {steps}; expected 1 or more")
    known = [f.name for f in fields(kind) if f.name not in (*_GIVEN, *_SCHEDULE)]
    scheduled = issubclass(kind, _Scheduled)
    known += _SCHEDULE if scheduled else ()
    values = {key: value for key, value in settings.items() if key != "name"}
    for key, value in values.items():
        if key not in known:
            raise LocalError(f"optimizer {name}: unknown setting {key!r}; expected {', '.join(known)}")
        _require_valid(name, key, value, steps)
    for key in ("rate", "first_stage"):
        if key in known and key not in values:
            raise LocalError(f"optimizer {name}: {key} is missing; expected {_describe(key, steps)}")
    if values.get("nesterov") and not values.get("momentum"):
        raise LocalError(f"optimizer {name}: nesterov = True without momentum; expected momentum above 0")
    arguments: dict[str, Any] = {key: value for key, value in values.items() if key not in _SCHEDULE}
    if scheduled:
        shape = {key: values[key] for key in ("warmup", "floor") if key in values}
        arguments["schedule"] = Schedule(values.get("schedule", "constant"), steps, **shape)
    if kind is Restarted:
        arguments["steps"] = steps
    if kind is Lamb and sizes is not None:
        arguments["sizes"] = tuple(sizes)
    return kind(**arguments)


def _require_valid(name: str, key: str, value: Any, steps: int) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "nesterov":
        valid = isinstance(value, bool)
    elif key == "schedule":
        valid = isinstance(value, str) and value in SCHEDULES
    elif key in ("warmup", "first_stage"):
        valid = isinstance(value, int) and is_number and (key == "first_stage") <= value <= steps
    else:
        low, high = _RANGES[key]
        valid = is_number and low <= value <= high
    if not valid:
        raise LocalError(f"optimizer {name}: {key} = {value!r}; expected {_describe(key, steps)}")


def _describe(key: str, steps: int) -> str:
    if key == "nesterov":
        return "True or False"
    if key == "schedule":
        return f"one of {', '.join(SCHEDULES)}"
    if key in ("warmup", "first_stage"):
        return f"a whole number of steps from {int(key == 'first_stage')} to {steps}, the length of the run"
    low, high = _RANGES[key]
    return f"a number from {low:g} to {high:g}"
