"""CIFAR-10 with a ResNet-18. ``data`` is a folder that holds the images in one of two forms:

* the binary version of the authors: ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, each 10,000
  records of a label and 3,072 bytes;
* ``cifar10_jpeg.npz``, every image a JPEG file: for ``train`` and ``test`` the arrays ``_jpeg`` (uint8, all files
  joined), ``_offsets`` (int64, where each begins, and the end) and ``_labels`` (uint8). This needs Pillow.

Images stay bytes until the model, whose first layer normalises them.
"""

from __future__ import annotations

import io
import itertools
import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.npyio import NpzFile
from torch import Generator, Tensor, nn

from phalanx.core.errors import LocalError
from phalanx.training.files import read_file
from phalanx.training.task import Batch, Data, Task, accuracy, classification_loss

Bytes = npt.NDArray[np.uint8]

PACKED = "cifar10_jpeg.npz"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILE = "test_batch.bin"
_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_MOST_BYTES = 1 << 26
_MOST_PACKED = 1 << 29
"""Of a file of records, and of what an archive holds when it is unpacked."""
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)


def make_task(data: str) -> Task:
    train, test = load_images(Path(data))
    return Task(
        name="cifar10",
        model=ResNet18,
        train=train,
        test=test,
        loss=classification_loss,
        metric=accuracy,
        batch=32,
        augment=crop_and_flip,
        poison=flip_labels,
        recipe={
            "optimizer": "sgd",
            "rate": 0.2,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 5e-4,
            "schedule": "cosine",
            "warmup": 200,
            "steps": 3000,
        },
    )


def crop_and_flip(batch: Batch, generator: Generator) -> Batch:
    """Each image moved by up to four pixels, black coming in at the edges, and every other one mirrored."""
    images, labels = batch
    count, side = len(images), images.shape[-1]
    padded = nn.functional.pad(images, (4, 4, 4, 4))
    rows, columns = torch.randint(9, (2, count, 1), generator=generator) + torch.arange(side)
    mirrored = torch.randint(2, (count, 1), generator=generator).bool()
    columns = torch.where(mirrored, columns.flip(1), columns)
    which, channels = torch.arange(count)[:, None, None, None], torch.arange(3)[:, None, None]
    return padded[which, channels, rows[:, None, :, None], columns[:, None, None, :]], labels


def flip_labels(batch: Batch) -> Batch:
    """Class ``l`` becomes ``9 - l``."""
    images, labels = batch
    return images, 9 - labels


# ---- The model


class ResNet18(nn.Module):
    """ResNet-18 for images of 32x32: a 3x3 stem and no pooling before the end. 11,173,962 parameters."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", 255 * torch.tensor(_MEAN).view(1, 3, 1, 1))
        self.register_buffer("deviation", 255 * torch.tensor(_DEVIATION).view(1, 3, 1, 1))
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks, wide = [], 64
        for width, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            blocks.append(_Block(wide, width, stride))
            wide = width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(wide, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - self.mean) / self.deviation
        scores: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return scores


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.skip = nn.Sequential(nn.Conv2d(before, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.skip(x))


# ---- The images


def load_images(folder: Path) -> tuple[Data, Data]:
    """Training and test images, uint8, with labels."""
    if not folder.is_dir():
        raise LocalError(f"data: {folder} is no folder; {_describe()}")
    if (folder / PACKED).is_file():
        return _load_packed(folder / PACKED)
    if (folder / TRAIN_FILES[0]).is_file():
        train = np.concatenate([_read_records(folder / name) for name in TRAIN_FILES])
        return _split_records(train, folder), _split_records(_read_records(folder / TEST_FILE), folder)
    raise LocalError(f"data: no images in {folder}; {_describe()}")


def _describe() -> str:
    return (
        f"expected a folder with {TRAIN_FILES[0]} to {TRAIN_FILES[-1]} and {TEST_FILE} (30,730,000 bytes each) "
        f"or {PACKED}"
    )


def _make_data(images: Bytes, labels: Bytes, where: str) -> Data:
    if len(labels) == 0 or labels.max() > 9:
        raise LocalError(f"data: {where} is damaged: expected images with labels from 0 to 9")
    return Data((torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))))


def _read_records(path: Path) -> Bytes:
    try:
        raw = np.frombuffer(read_file(path, _MOST_BYTES, "data:"), dtype=np.uint8)
    except LocalError as error:
        raise LocalError(f"{error}; {_describe()}") from None
    if len(raw) == 0 or len(raw) % _RECORD:
        raise LocalError(
            f"data: {path} is damaged: expected records of {_RECORD} bytes (30,730,000 in all), got {len(raw)} bytes"
        )
    return raw.reshape(-1, _RECORD)


def _split_records(records: Bytes, folder: Path) -> Data:
    return _make_data(records[:, 1:].reshape(-1, *_SHAPE).copy(), records[:, 0], str(folder))


def _load_packed(path: Path) -> tuple[Data, Data]:
    try:
        with io.BytesIO(read_file(path, _MOST_PACKED, "data:")) as file:
            with zipfile.ZipFile(file) as archive:
                if sum(entry.file_size for entry in archive.infolist()) > _MOST_PACKED:
                    raise ValueError(f"more than {_MOST_PACKED:,} bytes when unpacked")
            arrays = np.load(file, allow_pickle=False)
            if not isinstance(arrays, NpzFile):
                raise ValueError("no archive of arrays")
            train, test = (_decode(arrays, which, path) for which in ("train", "test"))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise LocalError(f"data: {path} is damaged: {error}; {_describe()}") from None
    return train, test


def _decode(arrays: NpzFile, which: str, path: Path) -> Data:
    """One of the two sets. Its order is by class, which does not matter: rows are drawn at random."""
    found = {}
    for name, kind in (("jpeg", np.uint8), ("offsets", np.int64), ("labels", np.uint8)):
        key = f"{which}_{name}"
        if key not in arrays or arrays[key].dtype != kind or arrays[key].ndim != 1:
            raise LocalError(f"data: {path}: expected an array {key} of {kind.__name__} with one dimension")
        found[name] = arrays[key]
    joined, offsets, labels = found["jpeg"].tobytes(), found["offsets"].tolist(), found["labels"]
    bounds = list(itertools.pairwise(offsets))
    if len(bounds) != len(labels) or any(not 0 <= start < end <= len(joined) for start, end in bounds):
        raise LocalError(f"data: {path}: {which}_offsets do not fit {len(labels)} labels and {len(joined)} bytes")
    images = np.empty((len(bounds), *_SHAPE), dtype=np.uint8)
    for number, (start, end) in enumerate(bounds):
        images[number] = _decode_image(joined[start:end], f"{path}: image {number} of {which}")
    return _make_data(images, labels, str(path))


def _decode_image(data: bytes, what: str) -> Bytes:
    try:
        from PIL import Image
    except ImportError:
        raise LocalError("task 'cifar10': JPEG images need another package: pip install -e '.[images]'") from None
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            if image.size != _SHAPE[1:]:
                raise LocalError(f"data: {what} is {image.size[0]}x{image.size[1]}; expected 32x32")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (OSError, SyntaxError, ValueError) as error:
        raise LocalError(f"data: {what} is damaged: {error}") from None
