"""The digits, at a walking pace: a peer that is started again takes seconds, and the run should not be over by then."""

from __future__ import annotations

import time
from dataclasses import replace

from torch import Tensor, nn

from phalanx.training.task import Batch, Task
from phalanx.training.tasks import digits

PAUSE = 0.3


def make_task() -> Task:
    task = digits.make_task()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(PAUSE)
        return task.loss(model, batch)

    return replace(task, loss=loss)
