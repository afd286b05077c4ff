"""Handwritten digits, 8x8 pixels, from scikit-learn: a task that needs no download and takes milliseconds a step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Generator, nn

from phalanx.core.randomness import Stream, derive_seed
from phalanx.training.task import Batch, Data, Task, accuracy, classification_loss

_SPLIT = derive_seed(b"digits", "split")


def make_task() -> Task:
    train, test = load_digits()
    return Task(
        name="digits",
        model=make_model,
        train=train,
        test=test,
        loss=classification_loss,
        metric=accuracy,
        batch=64,
        augment=shift_images,
        poison=flip_labels,
        recipe={
            "optimizer": "sgd",
            "rate": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 1e-3,
            "schedule": "cosine",
            "steps": 400,
        },
    )


def load_digits() -> tuple[Data, Data]:
    """1,797 images in [0, 1]; of a fixed shuffle, every fifth is for testing."""
    from sklearn import datasets  # type: ignore[import-untyped]

    found = datasets.load_digits()
    images = torch.from_numpy((found.images / 16).astype(np.float32)[:, None])
    labels = torch.from_numpy(found.target.astype(np.int64))
    order = torch.tensor(Stream(_SPLIT).draw_sample(range(len(labels)), len(labels)))
    is_test = torch.arange(len(labels)) % 5 == 0
    everything = Data((images, labels))
    return Data(everything.select(order[~is_test])), Data(everything.select(order[is_test]))


def make_model() -> nn.Module:
    """Two convolutions and a linear layer: 12,370 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 40, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(40 * 4 * 4, 10),
    )


def shift_images(batch: Batch, generator: Generator) -> Batch:
    """Each image moved by up to one pixel in both directions."""
    images, labels = batch
    padded = nn.functional.pad(images[:, 0], (1, 1, 1, 1))
    rows, columns = torch.randint(3, (2, len(images), 1), generator=generator) + torch.arange(8)
    which = torch.arange(len(images))[:, None, None]
    return padded[which, rows[:, :, None], columns[:, None, :]][:, None], labels


def flip_labels(batch: Batch) -> Batch:
    """Class ``l`` becomes ``9 - l``."""
    images, labels = batch
    return images, 9 - labels
