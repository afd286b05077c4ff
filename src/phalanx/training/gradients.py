"""Gradients as functions of parameters and a public seed, the same bits whoever computes them.

A validator recomputes what another peer claims to have computed, so nothing else may enter: no earlier call, no
generator of the process, no batch-norm statistics. From the 32-byte seed follow

* the rows of the batch, drawn with replacement from a BLAKE3 stream, without bias;
* a CPU generator for ``Task.augment``;
* the masks of dropout, drawn from a BLAKE3 stream on the CPU whatever the device, so that all devices drop the same;
* the state of PyTorch's global generators, for whatever else a model draws. They are put back afterwards.

"The same bits" holds on one platform, which :func:`describe_platform` names; the number of threads is part of it. On
CUDA, PyTorch's deterministic algorithms are switched on while computing, and TF32 is off; an operation that has no
deterministic form is refused with PyTorch's own words. State that a model keeps outside of its parameters and buffers,
or randomness from elsewhere, cannot be undone here; :meth:`Gradients.require_repeatable` finds most of it.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from phalanx.core.crypto import compute_digest
from phalanx.core.errors import LocalError
from phalanx.core.randomness import Stream, derive_seed
from phalanx.core.wire import view_bytes
from phalanx.training.allocation import drop_values
from phalanx.training.task import Batch, Task

# Batch-norm statistics are estimated from so many batches, which everybody draws from this seed.
STATISTICS_BATCHES = 32
_PUBLIC_SEED = bytes(32)

_WORD = 1 << 64
_HALF_WORD = 1 << 32
# What a dropped unit becomes under alpha dropout, negated: the lower end of SELU.
_ALPHA = 1.7580993408473766

# Models of so many parameters do not hold their memory between calls.
_LARGE = 1 << 24

# Generators and the choice of algorithms belong to the process: one computation at a time borrows them.
_process = threading.Lock()


class Gradients:
    """Computes gradients of one task. A parameter vector holds what is trained, in the order of ``named_parameters``.

    Parameters that are tied count once; those that are frozen keep their initial values, and buffers are set back to
    theirs before every call. The model's parameters are views of one flat tensor.
    """

    def __init__(self, task: Task, seed: int = 0, device: str = "cpu") -> None:
        self.task = task
        self._seed = seed
        self._device = _find_device(device)
        public = derive_seed(str(seed).encode(), "initial parameters")
        with _borrow_generators(public, self._device), self._blame("model"):
            model = task.model()
        if not isinstance(model, nn.Module):
            raise LocalError(f"task {task.name!r}: model() returned a {type(model).__name__}; expected an nn.Module")
        model = copy.deepcopy(model)  # it is taken apart here, and model() may give the same one to others
        _require_float32(task, model)
        self._model = model.to(self._device).train()
        self._trained = [p for p in model.parameters() if p.requires_grad]
        if not self._trained:
            raise LocalError(f"task {task.name!r}: the model has no parameters to train")
        self._flat = torch.cat([p.detach().reshape(-1) for p in self._trained])
        for parameter, piece in zip(
            self._trained, torch.split(self._flat, [p.numel() for p in self._trained]), strict=True
        ):
            parameter.data = piece.view(parameter.shape)
        self._rest = _remember(model)
        self._norms = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._test = task.test.to(self._device)
        self.size: int = self._flat.numel()
        """How many numbers are trained."""
        self.sizes: tuple[int, ...] = tuple(p.numel() for p in self._trained)
        """The same for each tensor, in order."""
        self.start: Tensor = self._flat.to("cpu", copy=True)
        """The initial parameters: float32, on the CPU, a function of ``seed`` only."""

    def compute(self, parameters: Tensor, seed: bytes, *, poisoned: bool = False) -> Tensor:
        """The gradient of the seed's batch at ``parameters``: float32, on the CPU.

        Parameters that the loss does not use have gradient zero. ``poisoned`` is what an attacker trains on.
        """
        return self.compute_with_loss(parameters, seed, poisoned=poisoned)[0]

    def compute_with_loss(self, parameters: Tensor, seed: bytes, *, poisoned: bool = False) -> tuple[Tensor, float]:
        """The gradient, and the loss that it belongs to."""
        with self._prepare(parameters, seed), torch.enable_grad():
            loss = self._compute_loss(seed, poisoned)
            if not loss.requires_grad:
                return torch.zeros(self.size), float(loss)
            return self._collect_gradient(loss).cpu(), float(loss.detach())

    def _collect_gradient(self, loss: Tensor) -> Tensor:
        """The gradient, each tensor's piece laid in its place as soon as it is known: it is never held twice."""
        flat = torch.zeros(self.size, device=self._device)
        places = {id(p): piece for p, piece in zip(self._trained, torch.split(flat, list(self.sizes)), strict=True)}

        def take(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None, "it has just been accumulated"
            places[id(parameter)].copy_((gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1))

        hooks = [p.register_post_accumulate_grad_hook(take) for p in self._trained]  # type: ignore[no-untyped-call]
        try:
            loss.backward(inputs=self._trained)  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in self._trained:
                parameter.grad = None
        return flat

    def compute_loss(self, parameters: Tensor, seed: bytes) -> float:
        """The loss whose gradient :meth:`compute` returns: the same batch, the same masks."""
        with self._prepare(parameters, seed), torch.no_grad():
            return float(self._compute_loss(seed))

    def evaluate(self, parameters: Tensor) -> float:
        """The metric on the test data, in evaluation mode, with batch-norm statistics estimated anew."""
        with self._prepare(parameters, _PUBLIC_SEED), torch.no_grad():
            self._estimate_statistics()
            self._model.eval()
            try:
                with self._blame("metric"):
                    return float(self.task.metric(self._model, self._test))
            finally:
                self._model.train()

    def make_state_dict(self, parameters: Tensor) -> dict[str, Tensor]:
        """What ``task.model().load_state_dict`` takes, with batch-norm statistics estimated anew; on the CPU."""
        with self._prepare(parameters, _PUBLIC_SEED), torch.no_grad():
            self._estimate_statistics()
            return {name: value.detach().to("cpu", copy=True) for name, value in self._model.state_dict().items()}

    def require_repeatable(self) -> None:
        """Compute some things twice, with other things in between; :class:`LocalError` if they differ.

        An honest peer whose gradients cannot be repeated would be banned: better to know before.
        """
        first = _name(self.compute(self.start, _PUBLIC_SEED))
        self.compute(self.start, derive_seed(_PUBLIC_SEED, "something else"))
        again = _name(self.compute(self.start, _PUBLIC_SEED))
        made_again = _name(Gradients(self.task, self._seed, str(self._device)).start)
        for what, one, two in (("gradient", first, again), ("model that is made", _name(self.start), made_again)):
            if one != two:
                raise LocalError(
                    f"task {self.task.name!r}: the {what} is another one the second time; is there a random draw from "
                    f"elsewhere than PyTorch, or state outside of parameters and buffers?"
                )

    @contextmanager
    def _prepare(self, parameters: Tensor, seed: bytes) -> Iterator[None]:
        """The model at ``parameters``, everything else in it as it was made, and the process's settings borrowed."""
        if parameters.shape != (self.size,) or parameters.dtype != torch.float32:
            got = f"shape {tuple(parameters.shape)} of {parameters.dtype}"
            raise ValueError(f"parameters: expected {self.size} numbers of float32, got {got}")
        with _borrow_generators(derive_seed(seed, "global generators"), self._device), _deterministic(self._device):
            with torch.no_grad():
                self._flat.copy_(parameters)
            for place, name, tensor, value in self._rest:
                if tensor is not None and value is not None:
                    tensor.data.copy_(value)
                place[name] = tensor
            try:
                yield
            finally:
                if self.size >= _LARGE:
                    drop_values(self._flat)

    def _compute_loss(self, seed: bytes, poisoned: bool = False) -> Tensor:
        batch = self._make_batch(seed, poisoned)
        with self._blame("loss"), SeededDropout(derive_seed(seed, "dropout"), self._device):
            loss = self.task.loss(self._model, batch)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            shape = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise LocalError(f"task {self.task.name!r}: the loss of a batch must be one number, got {shape}")
        return loss

    @contextmanager
    def _blame(self, what: str) -> Iterator[None]:
        """Say whose code failed: the task's, not ours."""
        try:
            yield
        except LocalError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise LocalError(f"task {self.task.name!r}: its {what} failed: {type(error).__name__}: {reason}") from error

    def _make_batch(self, seed: bytes, poisoned: bool) -> Batch:
        batch = self.task.train.select(draw_rows(seed, self.task.batch, len(self.task.train)))
        if poisoned:
            if self.task.poison is None:
                raise LocalError(f"task {self.task.name!r}: does not say what a poisoned batch is (Task.poison)")
            with self._blame("poison"):
                batch = self.task.poison(batch)
        if self.task.augment is not None:
            generator = Generator().manual_seed(_make_number(derive_seed(seed, "augmentation")))
            with self._blame("augment"):
                batch = self.task.augment(batch, generator)
        return tuple(t.to(self._device) for t in batch)

    def _estimate_statistics(self) -> None:
        """Run public training batches; batch norm takes the plain average over them, other norms use their momentum."""
        if not self._norms:
            return
        momenta = [norm.momentum for norm in self._norms]
        for norm in self._norms:
            norm.reset_running_stats()
            if isinstance(norm, _BatchNorm):
                norm.momentum = None
        try:
            for number in range(STATISTICS_BATCHES):
                self._compute_loss(derive_seed(_PUBLIC_SEED, "statistics", number.to_bytes(8, "little")))
        finally:
            for norm, momentum in zip(self._norms, momenta, strict=True):
                norm.momentum = momentum


def draw_rows(seed: bytes, count: int, bound: int) -> Tensor:
    """``count`` row numbers from 0 to ``bound - 1``, each equally likely, with replacement.

    The same as so many calls of ``Stream.draw_below``: 64-bit words, of which those above the last multiple of
    ``bound`` are skipped.
    """
    stream, last = Stream(derive_seed(seed, "rows")), _WORD - _WORD % bound - 1
    words = np.empty(0, dtype="<u8")
    while len(words) < count:
        more = np.frombuffer(stream.draw_bytes(8 * (count - len(words))), dtype="<u8")
        words = np.concatenate([words, more[more <= last]])
    return torch.from_numpy((words % bound).astype(np.int64))


# ---- Dropout


class SeededDropout(TorchFunctionMode):
    """While it is on, the masks of dropout are drawn from a stream on the CPU, whatever the device.

    It sees the dropout functions of ``torch.nn.functional``, hence PyTorch's dropout modules. Attention and recurrent
    layers with dropout inside draw from the generator of their device. On the CPU the seed determines that one too;
    elsewhere they are refused, since other devices would drop something else. What is computed a second time in the
    backward pass (``torch.utils.checkpoint``) would get other masks: there, do without dropout.
    """

    def __init__(self, seed: bytes, device: torch.device) -> None:
        super().__init__()
        self._stream = Stream(seed)
        self._refuses = device.type != "cpu"

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            dimensions, alpha = _DROPOUTS[func]
            return self._drop(dimensions, alpha, *args, **kwargs)
        if self._refuses and _drops_inside(func, args, kwargs):
            raise LocalError(f"{func.__name__} draws dropout on the device, where others cannot repeat it; set it to 0")
        return func(*args, **kwargs)

    def _drop(
        self,
        dimensions: int | None,
        alpha: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
    ) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        active = not alpha if training is None else training  # the defaults that PyTorch has
        if not active or p == 0 or input.numel() == 0:
            return input
        kept = self._draw_mask(_get_mask_shape(input, dimensions), p).to(input.device, input.dtype)
        if not alpha:
            kept *= 1 / (1 - p) if p < 1 else 0.0
            return input.mul_(kept) if inplace else input * kept
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p)) if p < 1 else 0.0
        shift = (kept - 1 + p) * (_ALPHA * scale)
        kept *= scale
        return input.mul_(kept).add_(shift) if inplace else input * kept + shift

    def _draw_mask(self, shape: tuple[int, ...], p: float) -> Tensor:
        words = np.frombuffer(self._stream.draw_bytes(4 * math.prod(shape)), dtype="<u4")
        return torch.from_numpy(words >= round(p * _HALF_WORD)).view(shape)


# How many dimensions a channel has that is dropped as a whole (0: all but two, None: no channels), and whether "alpha".
_DROPOUTS: dict[Callable[..., Any], tuple[int | None, bool]] = {
    functional.dropout: (None, False),
    functional.dropout1d: (1, False),
    functional.dropout2d: (2, False),
    functional.dropout3d: (3, False),
    functional.alpha_dropout: (None, True),
    functional.feature_alpha_dropout: (0, True),
}
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _get_mask_shape(input: Tensor, dimensions: int | None) -> tuple[int, ...]:
    """One number for each that is dropped: as PyTorch does it, also for inputs without a dimension for the batch."""
    if dimensions is None:
        return tuple(input.shape)
    single = dimensions in (1, 3) and input.ndim == dimensions + 1
    kept = 1 if single else 2
    return (*input.shape[:kept], *[1] * (input.ndim - kept))


def _drops_inside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is functional.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0) > 0)
    if func is functional.multi_head_attention_forward:
        return bool(kwargs.get("training", True) and kwargs.get("dropout_p", args[10] if len(args) > 10 else 0) > 0)
    if func in _RECURRENT:  # the probability is the only float, and whether one trains follows it
        return any(isinstance(p, float) and p > 0 and training for p, training in itertools.pairwise(args))
    return False


# ---- The process


@contextmanager
def _borrow_generators(seed: bytes, device: torch.device) -> Iterator[None]:
    """The global generators in a state that the seed determines; afterwards they are as they were."""
    with _process, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(_make_number(seed))
        if device.type == "cuda":
            torch.cuda.manual_seed(_make_number(seed))
        yield


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Algorithms that give the same bits every time. On the CPU they do so anyway.

    Without TF32: with it, a gradient can be several percent away from what a CPU finds.
    """
    if device.type == "cpu":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, precision = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True)
    matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            yield
    finally:
        matmul.allow_tf32 = precision
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def describe_platform(device: str = "cpu") -> str:
    """One line for all that decides the bits of a gradient, besides the task: exact validation needs it to be equal."""
    parts = [
        f"torch {torch.__version__}",
        platform.machine(),
        _find_processor(),
        str(torch.backends.cpu.get_cpu_capability()),
        f"{torch.get_num_threads()} threads",
    ]
    where = _find_device(device)
    if where.type == "cuda":
        name, cudnn = torch.cuda.get_device_name(where), torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        parts += [name, f"CUDA {torch.version.cuda}", f"cuDNN {cudnn}"]
    return ", ".join(parts)


def _find_processor() -> str:
    """The processor's name. Libraries for matrices choose their code by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def _find_device(device: str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda"):
        raise LocalError(f"device {device!r}: expected cpu, cuda or cuda:NUMBER")
    if found.type == "cuda":
        if (found.index or 0) >= (count := torch.cuda.device_count()):
            raise LocalError(f"device {device!r}: PyTorch sees {count} CUDA devices on this machine")
        # cuBLAS is deterministic only with a workspace of a fixed size, and asks for it here.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return found


# ---- The model


def _require_float32(task: Task, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise LocalError(f"task {task.name!r}: parameter {name} has no size yet; use no lazy layers")
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise LocalError(f"task {task.name!r}: parameter {name} is {parameter.dtype}; only float32 is trained")


def _remember(model: nn.Module) -> list[tuple[dict[str, Any], str, Tensor | None, Tensor | None]]:
    """Where a model keeps buffers and frozen parameters, under which name, which tensors they are, and their values."""
    found: list[tuple[dict[str, Any], str, Tensor | None, Tensor | None]] = []
    for module in model.modules():
        frozen = {name: p for name, p in module._parameters.items() if p is not None and not p.requires_grad}
        for place, tensors in ((module._buffers, module._buffers), (module._parameters, frozen)):
            for name, t in tensors.items():
                found.append((cast(dict[str, Any], place), name, t, None if t is None else t.detach().clone()))
    return found


def _name(vector: Tensor) -> bytes:
    return compute_digest("vector", view_bytes(vector))


def _make_number(seed: bytes) -> int:
    """What PyTorch's generators take as a seed. (Those on the CPU use 32 bits of it.)"""
    return int.from_bytes(seed[:8], "little") >> 1
