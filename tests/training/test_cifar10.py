"""CIFAR-10: both forms of the data give the same images, damage is named, and the model is the one it says."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator

from phalanx.core.errors import LocalError
from phalanx.training.gradients import Gradients
from phalanx.training.tasks import load_task
from phalanx.training.tasks.cifar10 import PACKED, TEST_FILE, TRAIN_FILES, ResNet18, crop_and_flip, flip_labels

RANDOM = np.random.default_rng(0)


def write_records(folder: Path, rows: int = 2) -> None:
    for name in (*TRAIN_FILES, TEST_FILE):
        records = RANDOM.integers(0, 256, (rows, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(rows) % 10
        (folder / name).write_bytes(records.tobytes())


def encode(colour: tuple[int, int, int], size: tuple[int, int] = (32, 32), form: str = "JPEG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return file.getvalue()


def make_arrays(rows: int = 4) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for which in ("train", "test"):
        files = [encode((40 * number, 100, 200)) for number in range(rows)]
        arrays[f"{which}_jpeg"] = np.frombuffer(b"".join(files), dtype=np.uint8)
        arrays[f"{which}_offsets"] = np.cumsum([0, *map(len, files)], dtype=np.int64)
        arrays[f"{which}_labels"] = np.arange(rows, dtype=np.uint8)
    return arrays


def write_packed(folder: Path, **changes: Any) -> None:
    arrays = make_arrays() | changes
    np.savez(folder / PACKED, **{name: array for name, array in arrays.items() if array is not None})


# ---- Data


def test_binary_files_are_read(tmp_path: Path) -> None:
    write_records(tmp_path)
    task = load_task("cifar10", {"data": str(tmp_path)})
    images, labels = task.train.tensors
    assert images.shape == (10, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 1] * 5
    raw = (tmp_path / TRAIN_FILES[1]).read_bytes()
    assert bytes(images[2].flatten().tolist()) == raw[1:3073]
    assert len(task.test) == 2


def test_packed_images_are_decoded(tmp_path: Path) -> None:
    write_packed(tmp_path)
    task = load_task("cifar10", {"data": str(tmp_path)})
    images, labels = task.train.tensors
    assert images.shape == (4, 3, 32, 32)
    assert labels.tolist() == [0, 1, 2, 3]
    means = images[2].float().mean((1, 2))
    assert (means - torch.tensor([80.0, 100.0, 200.0])).abs().max() < 3


def test_nothing_is_written_beside_the_data(tmp_path: Path) -> None:
    write_packed(tmp_path)
    load_task("cifar10", {"data": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == [PACKED]


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_missing_data_says_what_was_expected(tmp_path: Path, folder: str) -> None:
    with pytest.raises(
        LocalError, match=r"data_batch_1.bin to data_batch_5.bin and test_batch.bin \(30,730,000"
    ) as caught:
        load_task("cifar10", {"data": str(tmp_path / folder)})
    assert str(tmp_path / folder) in str(caught.value)
    assert PACKED in str(caught.value)


@pytest.mark.parametrize("name", [TRAIN_FILES[3], TEST_FILE])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    write_records(tmp_path)
    content = (tmp_path / name).read_bytes()
    for damaged in (content[:-1], b""):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(
            LocalError, match=rf"{name} is damaged: expected records of 3073 bytes .*{len(damaged)} bytes"
        ):
            load_task("cifar10", {"data": str(tmp_path)})
    (tmp_path / name).unlink()
    with pytest.raises(LocalError, match=f"cannot read .*{name}: No such file"):
        load_task("cifar10", {"data": str(tmp_path)})


def test_a_label_above_nine_is_refused(tmp_path: Path) -> None:
    write_records(tmp_path)
    content = (tmp_path / TRAIN_FILES[0]).read_bytes()
    (tmp_path / TRAIN_FILES[0]).write_bytes(b"\x0a" + content[1:])
    with pytest.raises(LocalError, match="labels from 0 to 9"):
        load_task("cifar10", {"data": str(tmp_path)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_jpeg": None}, "expected an array train_jpeg of uint8 with one dimension"),
        ({"test_labels": np.zeros(4, dtype=np.int32)}, "expected an array test_labels of uint8"),
        ({"train_offsets": np.zeros((5, 1), dtype=np.int64)}, "expected an array train_offsets of int64"),
        ({"train_labels": np.zeros(3, dtype=np.uint8)}, "train_offsets do not fit 3 labels"),
        ({"train_labels": np.full(4, 10, dtype=np.uint8)}, "labels from 0 to 9"),
        ({"test_offsets": np.array([0, 5, 3, 8, 9])}, "test_offsets do not fit"),
        ({"test_offsets": np.array([-1, 5, 6, 8, 9])}, "test_offsets do not fit"),
        ({"test_offsets": np.array([0, 5, 6, 8, 1 << 40])}, "test_offsets do not fit"),
        ({"train_jpeg": np.zeros(1 << 16, dtype=np.uint8)}, "image 0 of train is damaged"),
        ({"train_labels": np.array([{}] * 4, dtype=object)}, "is damaged: Object arrays cannot be loaded"),
    ],
)
def test_damaged_packed_data_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_packed(tmp_path, **changes)
    with pytest.raises(LocalError, match=message):
        load_task("cifar10", {"data": str(tmp_path)})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (encode((1, 2, 3), (31, 32)), "image 0 of test is 31x32; expected 32x32"),
        (encode((1, 2, 3), form="PNG"), "image 0 of test is damaged"),
        (encode((1, 2, 3))[:300], "image 0 of test is damaged"),
    ],
)
def test_an_image_of_another_kind_is_refused(tmp_path: Path, file: bytes, message: str) -> None:
    write_packed(
        tmp_path,
        test_jpeg=np.frombuffer(file, dtype=np.uint8),
        test_offsets=np.array([0, len(file)]),
        test_labels=np.zeros(1, dtype=np.uint8),
    )
    with pytest.raises(LocalError, match=message):
        load_task("cifar10", {"data": str(tmp_path)})


def make_single_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off", make_single_array()])
def test_a_packed_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / PACKED).write_bytes(content)
    with pytest.raises(LocalError, match=f"{PACKED} is damaged"):
        load_task("cifar10", {"data": str(tmp_path)})


def test_a_packed_file_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    write_packed(tmp_path)
    content = bytearray((tmp_path / PACKED).read_bytes())
    content[600] ^= 1
    (tmp_path / PACKED).write_bytes(content)
    with pytest.raises(LocalError, match="is damaged"):
        load_task("cifar10", {"data": str(tmp_path)})


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_packed(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(LocalError, match=r"\.\[images\]"):
        load_task("cifar10", {"data": str(tmp_path)})


# ---- Model and batches


def test_the_model_is_a_resnet_18() -> None:
    model = ResNet18().eval()
    assert sum(p.numel() for p in model.parameters()) == 11_173_962
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 10)


def test_a_gradient_can_be_repeated(tmp_path: Path) -> None:
    write_records(tmp_path)
    task = load_task("cifar10", {"data": str(tmp_path)})
    gradients = Gradients(task)
    first = gradients.compute(gradients.start, bytes(32))
    assert gradients.size == 11_173_962
    assert torch.equal(gradients.compute(gradients.start, bytes(32)), first)


def test_crops_come_from_the_padded_image() -> None:
    images = torch.from_numpy(RANDOM.integers(1, 256, (64, 3, 32, 32), dtype=np.uint8))
    labels = torch.arange(64)
    out, same = crop_and_flip((images, labels), Generator().manual_seed(0))
    again, _ = crop_and_flip((images, labels), Generator().manual_seed(0))
    assert out.dtype == torch.uint8
    assert torch.equal(out, again)
    assert torch.equal(same, labels)
    padded = torch.nn.functional.pad(images, (4, 4, 4, 4))
    seen = set()
    for number in range(64):
        places = [
            (row, column, mirrored)
            for row in range(9)
            for column in range(9)
            for mirrored in (False, True)
            if torch.equal(
                out[number].flip(2) if mirrored else out[number],
                padded[number, :, row : row + 32, column : column + 32],
            )
        ]
        assert len(places) == 1
        seen.update(places)
    assert {row for row, _, _ in seen} == {column for _, column, _ in seen} == set(range(9))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_the_poison_turns_classes_around() -> None:
    labels = torch.arange(10)
    assert flip_labels((labels, labels))[1].tolist() == list(range(9, -1, -1))
