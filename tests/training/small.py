"""A task that takes no time: points in ten dimensions, three classes, a linear model."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.training.task import Batch, Data, Task, accuracy, classification_loss


def _draw(rows: int, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(3, 10, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(0, 3, (rows,), generator=generator)
    return Data((centres[labels] + torch.randn(rows, 10, generator=generator), labels))


def _flip(batch: Batch) -> Batch:
    return batch[0], 2 - batch[1]


task = Task(
    name="small",
    model=lambda: nn.Linear(10, 3),
    train=_draw(400, 1),
    test=_draw(200, 2),
    loss=classification_loss,
    metric=accuracy,
    batch=8,
    poison=_flip,
    recipe={"optimizer": "sgd", "rate": 0.2, "momentum": 0.9, "steps": 30},
)
