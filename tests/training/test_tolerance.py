"""Tolerant mode by optimizer: what is measured, what an attacker inside gains, and what honest platforms differ by."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import task as small
from torch import Tensor

from phalanx import events
from phalanx.core.gap import SUSPENDED
from phalanx.core.wire import WIRE_TYPES
from phalanx.training.optimizers import OPTIMIZERS, TOLERANCES, Optimizer, State, make_optimizer
from phalanx.training.planning import make_settings
from phalanx.training.simulate import Result, simulate

SIZES = (40, 24, 8)
SIZE = sum(SIZES)
DEAD = slice(30, 40)  # of the first tensor: as the row of a word that never occurs
WEIGHT = 0.25  # of an attacker in the mean
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "rate": 0.1},
    "momentum": {"name": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": True},
    "adamw": {"name": "adamw", "rate": 0.01, "epsilon": 1e-6},
    "lamb": {"name": "lamb", "rate": 0.01},
    "restarted": {"name": "restarted", "rate": 0.1, "first_stage": 10},
}
ADAPTIVE = ("adamw", "lamb")

quick = settings(deadline=None, derandomize=True, max_examples=50)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.empty(size).normal_(generator=torch.Generator().manual_seed(seed))


def draw_gradient(seed: int) -> Tensor:
    gradient = 0.01 * normal(SIZE, seed)
    gradient[DEAD] = 0
    return gradient


def make(kind: str, steps: int = 200) -> tuple[Optimizer, State]:
    optimizer = make_optimizer(KINDS[kind], steps, SIZES)
    return optimizer, optimizer.init(normal(SIZE, 99))


def train(kind: str, steps: int, distance: float = 0.0) -> list[State]:
    """The states of a run, one of whose peers whispers at ``distance`` along one direction in all steps."""
    optimizer, state = make(kind)
    direction, states = normal(SIZE, 5), [state]
    for step in range(steps):
        gradient = draw_gradient(step)
        whisper = optimizer.find_deviation(state, direction, gradient, step, SIZES)
        states.append(state := optimizer.update(state, gradient + WEIGHT * distance * whisper, step))
    return states


# ---- What is measured


@quick
@given(kind=st.sampled_from(list(KINDS)), distance=st.floats(1e-6, 10), step=st.integers(0, 5), seed=st.integers(0, 99))
def test_the_most_that_an_attacker_gets_in_is_measured_as_such(
    kind: str, distance: float, step: int, seed: int
) -> None:
    optimizer, _ = make(kind)
    state, gradient = train(kind, step)[-1], draw_gradient(seed)
    whisper = distance * optimizer.find_deviation(state, normal(SIZE, seed + 1), gradient, step, SIZES)
    assert optimizer.measure_deviation(state, whisper.abs(), gradient, step, SIZES) == pytest.approx(distance, rel=1e-5)


@pytest.mark.parametrize("kind", ADAPTIVE)
@pytest.mark.parametrize("step", [0, 1, 50])
def test_adaptive_a_whisper_where_the_gradient_is_zero_is_large_from_the_first_step_on(kind: str, step: int) -> None:
    """What one norm over the gradient lets pass: a ten-thousandth of it, where it is zero."""
    optimizer, _ = make(kind)
    state, gradient = train(kind, step)[-1], draw_gradient(1000)
    off = torch.zeros(SIZE)
    off[DEAD] = 0.5e-4 * float(gradient.norm())
    assert optimizer.measure_deviation(state, off, gradient, step, SIZES) > 1


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_adaptive_relative_rounding_of_any_coordinate_is_small(kind: str) -> None:
    """In the first step, and for a word that was not seen for long: ``v`` before such a step says nothing."""
    optimizer, start = make(kind)
    gradient = draw_gradient(1)
    assert optimizer.measure_deviation(start, 1e-5 * gradient.abs(), gradient, 0, SIZES) < 1e-4
    state = train(kind, 100)[-1]
    gradient[DEAD] = 0.01
    assert optimizer.measure_deviation(state, 1e-5 * gradient.abs(), gradient, 100, SIZES) < 1e-3


@pytest.mark.parametrize("kind", ["sgd", "momentum", "restarted"])
def test_sums_are_measured_by_tensor_and_never_across(kind: str) -> None:
    optimizer, state = make(kind)
    gradient, off = draw_gradient(1), torch.zeros(SIZE)
    gradient[:40] *= 1000
    off[-8:] = gradient[-8:].abs()
    assert optimizer.measure_deviation(state, off, gradient, 0, SIZES) > 0.5
    assert float(off.norm() / gradient.norm()) < 1e-3


@pytest.mark.parametrize("kind", ["sgd", "momentum", "restarted"])
def test_sums_noise_in_a_tensor_whose_gradient_is_zero_is_forgiven(kind: str) -> None:
    optimizer, state = make(kind)
    gradient = draw_gradient(1)
    gradient[-8:] = 1e-9
    off = torch.zeros(SIZE)
    off[-8:] = 1e-9
    assert optimizer.measure_deviation(state, off, gradient, 0, SIZES) < TOLERANCES["sgd"][0]


def test_every_optimizer_has_a_tolerance() -> None:
    assert TOLERANCES.keys() == OPTIMIZERS.keys()
    assert all(0 < 10 * lower <= upper for lower, upper in TOLERANCES.values())


def test_adamw_has_a_larger_epsilon_where_platforms_differ() -> None:
    from phalanx.training.tasks import load_task

    task = load_task("pysource", {})
    assert make_settings(task, {}, None, 10, tolerant=True)[0]["epsilon"] == 1e-6
    assert make_settings(task, {"epsilon": 1e-7}, None, 10, tolerant=True)[0]["epsilon"] == 1e-7
    assert "epsilon" not in make_settings(task, {}, None, 10)[0]
    assert "epsilon" not in make_settings(task, {"name": "sgd"}, None, 10, tolerant=True)[0]


# ---- What an attacker inside gains


@pytest.mark.parametrize("distance", [1e-3, 0.03, 0.3])
def test_adamw_a_coordinate_moves_by_a_share_of_the_rate_each_step(distance: float) -> None:
    """``rate weight distance`` where the gradient is zero, however long it goes on; from the first step on."""
    steps, rate = 200, KINDS["adamw"]["rate"]
    honest, whispered = train("adamw", steps), train("adamw", steps, distance)
    for step in (1, 10, steps):
        moved = (whispered[step].parameters - honest[step].parameters)[DEAD].abs()
        assert float(moved.max()) <= 1.01 * rate * WEIGHT * distance * step
    assert float(moved.max()) >= 0.5 * rate * WEIGHT * distance * steps  # the bound is what an attacker gets


@pytest.mark.parametrize("distance", [1e-3, 0.03])
def test_lamb_a_coordinate_moves_by_that_times_the_trust(distance: float) -> None:
    """The trust of a tensor that is alive: its length beside its push, here below 10."""
    steps, rate = 200, KINDS["lamb"]["rate"]
    honest, whispered = train("lamb", steps), train("lamb", steps, distance)
    moved = (whispered[-1].parameters - honest[-1].parameters)[DEAD].abs()
    assert float(moved.max()) <= 10 * rate * WEIGHT * distance * steps


def test_lamb_lets_nobody_into_a_tensor_without_a_gradient() -> None:
    """LAMB makes any push as long as its tensor: however small, it would move it at the full rate."""
    optimizer, state = make("lamb")
    gradient, off = draw_gradient(0), torch.zeros(SIZE)
    gradient[-8:], off[-1] = 0, 1e-30
    assert optimizer.measure_deviation(state, off, gradient, 0, SIZES) > 1
    whisper = optimizer.find_deviation(state, normal(SIZE, 5), gradient, 0, SIZES)
    assert not whisper[-8:].any()
    pushed = optimizer.update(state, gradient + off, 0).parameters - optimizer.update(state, gradient, 0).parameters
    assert float(pushed[-8:].norm()) < 1e-6  # so short a push float32 loses; a longer one it does not:
    off[-1] = 1e-9
    pushed = optimizer.update(state, gradient + off, 0).parameters - optimizer.update(state, gradient, 0).parameters
    assert float(pushed[-8:].norm()) == pytest.approx(0.01 * float(state.parameters[-8:].norm()), rel=1e-3)
    assert optimizer.measure_deviation(state, off, gradient, 0, SIZES) > 1


@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_sgd_a_tensor_moves_by_a_share_of_its_gradients(kind: str) -> None:
    """``rate weight distance / (1 - momentum)`` of a gradient's length in each step."""
    steps, distance, settings = 200, 0.01, KINDS[kind]
    honest, whispered = train(kind, steps), train(kind, steps, distance)
    moved = (whispered[-1].parameters - honest[-1].parameters).split(SIZES)
    lengths = [
        sum(float(draw_gradient(step).split(SIZES)[place].norm()) for step in range(steps)) for place in range(3)
    ]
    share = settings["rate"] * WEIGHT * distance / (1 - settings.get("momentum", 0.0))
    for off, length in zip(moved, lengths, strict=True):
        assert float(off.norm()) <= 1.01 * share * length


# ---- Swarms


def play(optimizer: dict[str, Any], attack: str = "none", **settings: Any) -> Result:
    attackers = {"byzantine": 1, "attack": attack} if attack != "none" else {}
    return simulate(
        small, peers=5, optimizer=optimizer, tolerance=TOLERANCES[optimizer["name"]], **attackers, **settings
    )


@pytest.mark.parametrize("kind", ["momentum", "adamw", "lamb"])
def test_v4_a_whisper_above_upper_is_convicted(kind: str) -> None:
    upper = TOLERANCES[KINDS[kind]["name"]][1]
    result = play(KINDS[kind], f"whisper_{1.1 * upper:g}", steps=30)
    assert (result.byzantine_banned, result.honest_banned, result.honest_removed) == (1, 0, 0)


@pytest.mark.parametrize("kind", ["momentum", "adamw", "lamb"])
def test_v4_a_whisper_in_the_gap_is_suspended(kind: str) -> None:
    upper = TOLERANCES[KINDS[kind]["name"]][1]
    result = play(KINDS[kind], f"whisper_{0.9 * upper:g}", steps=40)
    assert (result.byzantine_banned, result.honest_banned, result.honest_removed) == (0, 0, 0)
    assert SUSPENDED in {event.reason for event in result.events if isinstance(event, events.Removed)}


@pytest.mark.parametrize(
    ("kind", "wire"), [("momentum", "int8"), *(("adamw", wire) for wire in WIRE_TYPES), ("lamb", "bfloat16")]
)
def test_v4_a_whisper_below_lower_is_let_pass_and_honest_peers_are(kind: str, wire: str) -> None:
    lower = TOLERANCES[KINDS[kind]["name"]][0]
    for attack in ("none", f"whisper_{0.4 * lower:g}"):
        result = play(KINDS[kind], attack, steps=8, wire=wire)
        assert not [event for event in result.events if isinstance(event, events.Banned | events.Removed)]


# ---- The experiment, in short


@pytest.fixture(scope="module")
def experiment() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments" / "tolerance.py"
    spec = importlib.util.spec_from_file_location("experiment_tolerance", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd", "sgd on text"])
def test_honest_platforms_are_below_lower(experiment: ModuleType, name: str) -> None:
    found = experiment.measure_spread(name, 4, peers=1)
    assert found["verdicts"].keys() == {"innocent"}, found


def test_what_the_experiment_calls_a_fault(experiment: ModuleType) -> None:
    usual = {"works": 0.01, "honest_banned": 0, "members": 0}
    rows = {"backdoor sgd, nobody": usual, "backdoor sgd, 0.9 upper": {**usual, "works": 0.9}}
    assert experiment.find_faults(rows) == []
    rows["backdoor sgd, 0.9 upper"]["members"] = 1
    assert len(experiment.find_faults(rows)) == 1
    assert len(experiment.find_faults({"spread sgd": {"verdicts": {"innocent": 9, "guilty": 1}}})) == 1


def test_the_page_names_tests_that_are_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "THREAT_MODEL.md").read_text()
    named = re.findall(r"`training/test_tolerance\.py::(test_\w+)`", page)
    assert named
    assert set(named) <= globals().keys()
