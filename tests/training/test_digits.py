"""The digits: a fixed split, a small model, and a recipe that learns."""

from __future__ import annotations

import torch
from torch import Generator

from phalanx.core.randomness import derive_seed
from phalanx.training.gradients import Gradients
from phalanx.training.tasks import load_task
from phalanx.training.tasks.digits import flip_labels, make_model, shift_images

TASK = load_task("digits")


def test_the_split_is_fixed_and_covers_all_images() -> None:
    assert (len(TASK.train), len(TASK.test)) == (1437, 360)
    assert load_task("digits").digest == TASK.digest
    images = torch.cat([TASK.train.tensors[0], TASK.test.tensors[0]])
    assert images.dtype == torch.float32
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert len(torch.unique(TASK.test.tensors[1])) == 10


def test_the_model_is_as_large_as_it_says() -> None:
    assert sum(p.numel() for p in make_model().parameters()) == 12_370


def test_the_poison_turns_classes_around() -> None:
    images, labels = TASK.train.select(torch.arange(20))
    assert torch.equal(flip_labels((images, labels))[1], 9 - labels)


def test_images_move_by_at_most_one_pixel() -> None:
    image = torch.zeros(200, 1, 8, 8)
    image[:, 0, 3, 4] = 1
    labels = torch.arange(200)
    moved, same = shift_images((image, labels), Generator().manual_seed(0))
    assert moved.shape == image.shape
    assert torch.equal(same, labels)
    places = {tuple(place) for place in moved.nonzero()[:, 2:].tolist()}
    assert places == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}


def test_a_few_steps_of_the_recipe_learn() -> None:
    gradients = Gradients(TASK)
    parameters = gradients.start.clone()
    velocity = torch.zeros_like(parameters)
    for step in range(150):
        seeds = [derive_seed(b"digits", "test", bytes([step, peer])) for peer in range(2)]
        velocity = 0.9 * velocity + sum(gradients.compute(parameters, seed) for seed in seeds) / 2
        parameters = parameters - 0.05 * velocity
    assert gradients.evaluate(gradients.start) < 0.3
    assert gradients.evaluate(parameters) > 0.85
