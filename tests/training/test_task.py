"""Tasks: what data is, what its digest binds, and how a task is found; every wrong input is one clear line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.core.errors import LocalError
from phalanx.training.task import Data, Task, accuracy, classification_loss
from phalanx.training.tasks import TASKS, load_task

INPUTS = torch.arange(24, dtype=torch.float32).view(6, 4)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])

TASK_FILE = """
import torch
from torch import nn
from phalanx.training.task import Data, Task, accuracy, classification_loss

def make(rows="6", nothing=""):
    data = Data((torch.zeros(int(rows), 4), torch.zeros(int(rows), dtype=torch.int64)))
    return Task(
        name="mine",
        model=lambda: nn.Linear(4, 3),
        train=data,
        test=data,
        loss=classification_loss,
        metric=accuracy,
    )

mine = make()
number = 5

def wrong():
    return number
"""


def make_task() -> Task:
    data = Data((INPUTS, LABELS))
    return Task(
        name="small", model=lambda: nn.Linear(4, 3), train=data, test=data, loss=classification_loss, metric=accuracy
    )


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_task.py"
    path.write_text(TASK_FILE)
    return path


# ---- Data


def test_rows_belong_together() -> None:
    data = Data((INPUTS, LABELS))
    inputs, labels = data.select(torch.tensor([4, 0, 4]))
    assert len(data) == 6
    assert torch.equal(inputs, INPUTS[[4, 0, 4]])
    assert labels.tolist() == [1, 0, 1]


def test_rows_that_do_not_fit_into_memory_are_one_line() -> None:
    wide = Data((torch.zeros(1, 1).expand(1, 1 << 50),))
    with pytest.raises(LocalError, match="batch: 2 rows do not fit into memory; take fewer"):
        wide.select(torch.tensor([0, 0]))


def test_selected_rows_are_copies() -> None:
    data = Data((INPUTS.clone(),))
    before = data.digest
    data.select(torch.tensor([0]))[0].fill_(-1)
    assert Data(data.tensors).digest == before


@given(st.integers(1, 10))
@settings(deadline=None, derandomize=True)
def test_chunks_are_all_rows_in_order(rows: int) -> None:
    chunks = list(Data((INPUTS, LABELS)).chunks(rows))
    assert torch.equal(torch.cat([inputs for inputs, _ in chunks]), INPUTS)
    assert torch.equal(torch.cat([labels for _, labels in chunks]), LABELS)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64, torch.bfloat16, torch.bool])
def test_the_digest_of_data_changes_with_one_byte(dtype: torch.dtype) -> None:
    values = torch.zeros(5, 3, dtype=dtype)
    before = Data((values, LABELS[:5])).digest
    assert Data((values.clone(), LABELS[:5])).digest == before
    values[3, 1] = 1
    assert Data((values, LABELS[:5])).digest != before


def test_the_digest_of_data_binds_types_shapes_and_order() -> None:
    versions = [
        Data((torch.zeros(4, 2),)),
        Data((torch.zeros(4, 2, dtype=torch.int32),)),
        Data((torch.zeros(2, 4),)),
        Data((torch.zeros(8),)),
        Data((torch.zeros(4), torch.zeros(4))),
        Data((torch.zeros(4), torch.ones(4))),
        Data((torch.ones(4), torch.zeros(4))),
    ]
    assert len({data.digest for data in versions}) == len(versions)


def test_the_digest_of_data_does_not_depend_on_layout() -> None:
    values = torch.rand(4, 5)
    assert Data((values.T.contiguous().T,)).digest == Data((values,)).digest


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((), "one or more tensors"),
        ((torch.tensor(1.0),), "one or more tensors"),
        ((torch.zeros(3), torch.zeros(4)), r"same number of rows, and at least one, got \[3, 4\]"),
        ((torch.zeros(0, 2),), "at least one"),
        (torch.zeros(3, 2), r"expected a tuple of tensors, got a Tensor; write Data\(\(tensor,\)\)"),
        ((np.zeros((3, 2)),), "expected tensors, got numpy.ndarray; torch.as_tensor makes one of it"),
    ],
)
def test_data_without_rows_of_one_length_is_refused(tensors: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        Data(tensors)


# ---- Tasks


def test_the_digest_of_a_task_binds_name_data_and_batch() -> None:
    task, other = make_task(), Data((INPUTS + 1, LABELS))
    versions = [
        task,
        replace(task, name="other"),
        replace(task, batch=33),
        replace(task, train=other),
        replace(task, test=other),
    ]
    assert make_task().digest == task.digest
    assert len({version.digest for version in versions}) == len(versions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "expected a name"),
        ({"batch": 0}, "whole number from 1, got 0"),
        ({"batch": 1.5}, "whole number from 1, got 1.5"),
        ({"train": INPUTS}, "train is a Tensor; expected Data"),
        ({"test": INPUTS}, "test is a Tensor; expected Data"),
    ],
)
def test_a_task_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        replace(make_task(), **change)  # type: ignore[arg-type]


def test_accuracy_counts_over_all_chunks() -> None:
    inputs = torch.eye(3).repeat(200, 1)
    labels = torch.arange(600) % 3
    labels[:60] = (labels[:60] + 1) % 3
    assert accuracy(nn.Identity(), Data((inputs, labels))) == 0.9


def test_the_loss_is_cross_entropy() -> None:
    model = nn.Linear(4, 3)
    expected = nn.functional.cross_entropy(model(INPUTS), LABELS)
    assert torch.equal(classification_loss(model, (INPUTS, LABELS)), expected)


# ---- Finding one


def test_digits_needs_nothing() -> None:
    assert load_task("digits").name == "digits"


def test_a_file_draws_the_same_numbers_each_time(tmp_path: Path) -> None:
    """And leaves the generators as they were."""
    file = tmp_path / "drawn.py"
    drawn = "torch.randn(int(rows), 4) + random.random() + np.random.rand()"
    file.write_text("import random\nimport numpy as np" + TASK_FILE.replace("torch.zeros(int(rows), 4)", drawn))
    np.random.seed(1)
    expected = np.random.rand()
    np.random.seed(1)
    first, second = (load_task(f"{file}:mine").train.tensors[0] for _ in range(2))
    assert torch.equal(first, second)
    assert np.random.rand() == expected


def test_a_file_names_a_task(task_file: Path) -> None:
    assert load_task(f"{task_file}:mine").name == "mine"


def test_a_file_names_a_function(task_file: Path) -> None:
    assert len(load_task(f"{task_file}:make").train) == 6
    assert len(load_task(f"{task_file}:make", {"rows": "3"}).train) == 3


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(LocalError, match=f"'mnist': not one of {', '.join(TASKS)}, and no FILE.py:NAME") as caught:
        load_task("mnist")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(LocalError, match=r"there is no file 'nowhere.py'"):
        load_task("nowhere.py:task")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absent", {}, "has no 'absent'; it has mine"),
        ("number", {}, "a int; expected a Task, or a function that makes one"),
        ("wrong", {}, "returned a int; expected a Task"),
        ("mine", {"data": "x"}, "takes no options, got data"),
        ("make", {"data": "x"}, "has no option 'data'; it has rows, nothing"),
        ("make", {"rows": "many"}, "calling it failed: ValueError"),
        ("make", {"rows": "0"}, "at least one"),
        ("wrong", {"data": "x"}, "has no option 'data'; it has none"),
    ],
)
def test_a_wrong_name_or_option_in_a_file_is_one_line(
    task_file: Path, name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(LocalError, match=message) as caught:
        load_task(f"{task_file}:{name}", options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["import does_not_exist", "def (", "raise ValueError('no')"])
def test_a_file_that_cannot_be_run_says_why(tmp_path: Path, source: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(LocalError, match="cannot be run: "):
        load_task(f"{path}:task")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"data": "x"}, "'digits': has no option 'data'; it has none"),
        ("pysource", {"model": "x"}, "'pysource': has no option 'model'; it has none"),
        ("cifar10", {"model": "x", "data": "."}, "'cifar10': has no option 'model'; it has data"),
        ("cifar10", {}, "'cifar10': needs the option data"),
        ("text", {}, "'text': needs the option data"),
    ],
)
def test_wrong_options_of_our_tasks(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(LocalError, match=message):
        load_task(name, options)
