"""What is trained: a model, public data, a loss and a metric. A task file is a few lines:

    from torch import nn
    from phalanx.training.task import Data, Task, accuracy, classification_loss

    task = Task(
        name="mine",
        model=lambda: nn.Linear(4, 3),
        train=Data((inputs, labels)),
        test=Data((test_inputs, test_labels)),
        loss=classification_loss,
        metric=accuracy,
    )

Gradients must be recomputable, so all of these are pure functions: what is random in them comes from the generator
given to ``augment``, from dropout, or from PyTorch's own generators, which are seeded for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from phalanx.core.crypto import compute_digest
from phalanx.core.errors import LocalError

Batch: TypeAlias = tuple[Tensor, ...]

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Data:
    """Public data: tensors of one length. Row ``i`` of each belong together."""

    tensors: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        given: Any = self.tensors
        if not isinstance(given, tuple | list):
            raise LocalError(f"data: expected a tuple of tensors, got a {type(given).__name__}; write Data((tensor,))")
        for value in given:
            if not isinstance(value, Tensor):
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise LocalError(f"data: expected tensors, got {kind}; torch.as_tensor makes one of it")
        if not self.tensors or any(t.ndim == 0 for t in self.tensors):
            raise LocalError("data: expected one or more tensors with rows")
        lengths = [len(t) for t in self.tensors]
        if len(set(lengths)) != 1 or lengths[0] == 0:
            raise LocalError(f"data: expected tensors with the same number of rows, and at least one, got {lengths}")

    def __len__(self) -> int:
        return len(self.tensors[0])

    def select(self, indices: Tensor) -> Batch:
        """The rows with these numbers, copied."""
        try:
            return tuple(t.index_select(0, indices) for t in self.tensors)
        except (RuntimeError, MemoryError) as error:
            if "memory" not in str(error):
                raise
            raise LocalError(f"batch: {len(indices)} rows do not fit into memory; take fewer") from None

    def chunks(self, rows: int = _ROWS_AT_ONCE) -> Iterator[Batch]:
        """All rows in order, so many at a time."""
        return zip(*(torch.split(t, rows) for t in self.tensors), strict=True)

    def to(self, device: torch.device | str) -> Data:
        return Data(tuple(t.to(device) for t in self.tensors))

    @cached_property
    def digest(self) -> str:
        """A hash of the content: types, shapes and bytes."""
        fields: list[bytes | memoryview] = []
        for t in self.tensors:
            values = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            fields += [str(t.dtype).encode(), repr(tuple(t.shape)).encode(), values.data]
        return compute_digest("task data", *fields).hex()


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One thing to train. What peers must have in common is in its ``digest``, but for the code of the functions."""

    name: str
    model: Callable[[], nn.Module]
    train: Data
    test: Data
    loss: Callable[[nn.Module, Batch], Tensor]
    """The mean loss of a batch."""
    metric: Callable[[nn.Module, Data], float]
    """How good a model in evaluation mode is on test data."""
    metric_name: str = "accuracy"
    higher_is_better: bool = True
    batch: int = 32
    """Rows of one peer's batch."""
    augment: Callable[[Batch, Generator], Batch] | None = None
    """What is done to a batch before the loss; a pure function of the batch and of what it draws."""
    poison: Callable[[Batch], Batch] | None = None
    """What the attack ``label_flip`` trains on instead."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Settings that work: ``optimizer``, ``rate``, ``steps``, ``schedule``, ``tau`` and the like."""

    def __post_init__(self) -> None:
        if not self.name:
            raise LocalError("task: expected a name")
        for which, data in (("train", self.train), ("test", self.test)):
            if not isinstance(data, Data):
                raise LocalError(f"task {self.name!r}: {which} is a {type(data).__name__}; expected Data")
        if type(self.batch) is not int or self.batch < 1:
            raise LocalError(f"task {self.name!r}: batch: expected a whole number from 1, got {self.batch!r}")

    @cached_property
    def digest(self) -> str:
        """A hash of the name, the data and the batch size: what peers compare before they start."""
        fields = (self.name, self.train.digest, self.test.digest, str(self.batch))
        return compute_digest("task", *(text.encode() for text in fields)).hex()


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of a batch of inputs and labels."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """The share of inputs whose label has the highest score."""
    right = 0
    for inputs, labels in data.chunks():
        right += int((model(inputs).argmax(-1) == labels).sum())
    return right / len(data)
