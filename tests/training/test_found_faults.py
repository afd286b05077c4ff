"""Faults that a review of training found: each is made as it was found, and has to be answered well."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small import task
from torch import Tensor, nn

from phalanx import events
from phalanx.attacks import Attack, Insider, load_attack
from phalanx.core.errors import LocalError, RunHalted
from phalanx.training.gradients import Gradients
from phalanx.training.recorder import read_transcript
from phalanx.training.simulate import resume, simulate
from phalanx.training.task import Task
from phalanx.training.tasks import load_task

ATTACKED: dict[str, Any] = {"peers": 7, "byzantine": 2, "attack": "sign_flip", "start": 3, "steps": 12}


def test_a_model_that_is_made_once_and_given_twice() -> None:
    net = nn.Linear(10, 3)
    shared = dataclasses.replace(task, model=lambda: net)
    gradients = Gradients(shared)
    gradients.require_repeatable()
    other = gradients.start + 1
    assert not torch.equal(gradients.compute(gradients.start, bytes(32)), gradients.compute(other, bytes(32)))


def test_a_state_that_a_step_does_not_change_can_be_written(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return 0 * model(batch[0]).sum()

    still = dataclasses.replace(task, loss=loss, recipe={"optimizer": "sgd", "rate": 0.1})
    whole = simulate(still, peers=4, steps=8)
    simulate(still, peers=4, steps=8, out=tmp_path / "run", checkpoint_every=2, stop=lambda step: step >= 5)
    assert resume(tmp_path / "run", task=still).state_digest == whole.state_digest


def test_two_processes_do_not_work_on_one_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    caught: list[str] = []

    def meddle(event: events.Event) -> None:
        if isinstance(event, events.CheckpointWritten) and not caught:
            with pytest.raises(LocalError, match="another process works on this run") as error:
                resume(run, task=task)
            caught.append(str(error.value))

    simulate(task, peers=4, steps=8, out=run, checkpoint_every=3, on_event=meddle)
    assert caught
    events.read_events(run / "events.jsonl")


def test_messages_that_no_receiver_would_take_do_not_stop_a_run_from_being_resumed(tmp_path: Path) -> None:
    settings = {**ATTACKED, "peers": 8, "attack": "oversize", "start": 2}
    whole = simulate(task, **settings)
    simulate(task, **settings, out=tmp_path / "run", stop=lambda step: step >= 6)
    assert resume(tmp_path / "run", task=task).state_digest == whole.state_digest
    assert read_transcript(tmp_path / "run" / "transcript.bin")


def test_a_run_that_silent_attackers_halt_says_so_and_ends() -> None:
    silent = {**ATTACKED, "attack": "silent", "start": 2}
    with pytest.raises(RunHalted, match=r"halted: .* in step 2 .*missing: \d, \d.*unless peers >= 8"):
        simulate(task, **silent)
    assert simulate(task, **{**silent, "peers": 8}).steps == 12


@pytest.mark.parametrize("attack", ["random_gradient", "false_accusation_gradient"])
def test_attackers_draw_the_same_after_a_stop(tmp_path: Path, attack: str) -> None:
    settings = {**ATTACKED, "attack": attack}
    whole = simulate(task, **settings)
    simulate(task, **settings, out=tmp_path / "run", stop=lambda step: step >= 4)
    assert resume(tmp_path / "run", task=task).state_digest == whole.state_digest


class Broken(Attack):
    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        raise RuntimeError("a bug of its author")


def test_an_attack_that_breaks_says_so() -> None:
    with pytest.raises(LocalError, match=r"the attack of peer \d failed in step \d+: RuntimeError\('a bug"):
        simulate(task, **{**ATTACKED, "attack": Broken()})


def test_false_labels_need_a_task_that_knows_them() -> None:
    bare = dataclasses.replace(task, poison=None)
    for defense in ("phalanx", "mean"):
        with pytest.raises(LocalError, match="does not say what false labels are"):
            simulate(bare, **{**ATTACKED, "attack": "label_flip", "defense": defense})


def test_an_attack_s_own_start_counts() -> None:
    first = simulate(task, **{**ATTACKED, "attack": "sign_flip@5", "start": None}).events
    assert isinstance(first[0], events.RunStarted)
    assert first[0].start == 5
    assert min(event.offence_step for event in first if isinstance(event, events.Banned)) >= 5
    moved = load_attack("hit_and_leave@20")
    parts = moved.attacks  # type: ignore[attr-defined]
    assert [(part.start, part.stop) for part in parts] == [(20, 21), (20, 21)]


def test_who_left_is_not_active() -> None:
    result = simulate(task, peers=8, byzantine=2, attack="leave", steps=12)
    assert result.byzantine_active == 0
    assert {event.peer for event in result.events if isinstance(event, events.Left)} == {6, 7}


def test_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    for seed in (0, 1):
        simulate(task, **ATTACKED, seed=seed, out=tmp_path / str(seed), stop=lambda step: step >= 4)
    shutil.rmtree(tmp_path / "0" / "checkpoints")
    shutil.copytree(tmp_path / "1" / "checkpoints", tmp_path / "0" / "checkpoints")
    with pytest.raises(LocalError, match="the checkpoint of step 4 is of another run"):
        resume(tmp_path / "0", task=task)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"defense": "mean", "tau": "nan"}, "tau: expected a positive number"),
        ({"defense": "mean", "wire": "nope"}, "wire: 'nope' is not one of"),
        ({"steps": 10**20}, "steps: expected a whole number from 1"),
        ({"peers": 0}, "peers: expected a whole number from 1, got 0"),
        ({"peers": "4"}, "peers: expected a whole number from 1, got '4'"),
        ({"evaluate_every": 0}, "evaluate_every: expected a whole number from 1"),
        ({"checkpoint_every": -3}, "checkpoint_every: expected a whole number from 1"),
        ({"attack": "ipm_nan"}, "'nan' is not a number that ipm takes"),
        ({"attack": "delayed_0"}, "'0' is not a number that delayed takes"),
        ({"defense": "krum", "byzantine": 5}, "krum"),
        ({"tau": None}, "tau: expected 'auto' or a positive number"),
    ],
)
def test_a_start_that_fails_leaves_nothing_behind(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    with pytest.raises(LocalError) as error:
        simulate(task, **{**ATTACKED, **change}, out=tmp_path / "run")
    assert line in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_from_the_beginning() -> None:
    bad = dataclasses.replace(task, loss=lambda model, batch: model(batch[0]).sum() * float("nan"))
    with pytest.raises(LocalError, match="the gradient at the initial parameters is not finite"):
        simulate(bad, peers=4, steps=2)


def test_a_task_file_finds_its_neighbours_and_draws_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import torch\nrows = torch.ones(40, 4)\n")
    (tmp_path / "mine.py").write_text(
        "import torch, phalanx\nfrom torch import nn\nfrom neighbour import rows\n"
        "data = phalanx.Data((rows + torch.randn(40, 4), torch.randint(0, 2, (40,))))\n"
        "task = phalanx.Task(name='mine', model=lambda: nn.Linear(4, 2), train=data, test=data,\n"
        "    loss=phalanx.classification_loss, metric=phalanx.accuracy)\n"
    )
    (tmp_path / "quits.py").write_text("import sys\nsys.exit(0)\n")
    found = [load_task(f"{tmp_path / 'mine.py'}:task") for _ in range(2)]
    assert all(isinstance(x, Task) for x in found)
    assert found[0].digest == found[1].digest
    with pytest.raises(LocalError, match="cannot be run: SystemExit"):
        load_task(f"{tmp_path / 'quits.py'}:task")


def _fail(*_: Any) -> Any:
    raise ZeroDivisionError("first line\nsecond line")


@pytest.mark.parametrize("what", ["model", "loss", "metric", "augment"])
def test_what_fails_in_a_task_is_named_in_one_line(what: str) -> None:
    with pytest.raises(LocalError) as error:
        simulate(dataclasses.replace(task, **{what: _fail}), peers=4, steps=2)  # type: ignore[arg-type]
    assert str(error.value) == f"task 'small': its {what} failed: ZeroDivisionError: first line"


def test_a_task_that_fails_in_mid_run_is_named_too(tmp_path: Path) -> None:
    seen = 0

    def metric(model: nn.Module, data: Any) -> Any:
        nonlocal seen
        seen += 1
        return 0.5 if seen < 4 else None

    with pytest.raises(LocalError, match="its metric failed: TypeError"):
        simulate(dataclasses.replace(task, metric=metric), peers=4, steps=8, out=tmp_path / "run", checkpoint_every=2)
    assert (tmp_path / "run" / "checkpoints" / "000002").is_dir()
