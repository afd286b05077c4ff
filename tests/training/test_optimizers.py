"""Optimizers agree with the textbooks to rounding, and with themselves to the last bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core.errors import LocalError
from phalanx.training import optimizers
from phalanx.training.optimizers import (
    METHODS,
    OPTIMIZERS,
    Optimizer,
    Restarted,
    State,
    compute_state_digest,
    decode_state,
    encode_state,
    make_optimizer,
)
from phalanx.training.schedules import Schedule, compute_cosine, compute_power

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
STEPS = 50
SIZES = (1000, 1, 0, 37, 3962)
SIZE = sum(SIZES)
LARGEST = torch.finfo(torch.float32).max

KINDS: dict[str, dict[str, Any]] = {
    "plain sgd": {"name": "sgd", "rate": 0.1},
    "sgd": {"name": "sgd", "rate": 0.1, "momentum": 0.9, "weight_decay": 1e-3},
    "nesterov": {"name": "sgd", "rate": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "warmup": 5},
    "adamw": {"name": "adamw", "rate": 0.01, "weight_decay": 0.1, "schedule": "cosine", "floor": 0.1},
    "lamb": {"name": "lamb", "rate": 0.01, "weight_decay": 0.1, "schedule": "cosine", "warmup": 3},
    "restarted": {"name": "restarted", "rate": 0.1, "first_stage": 7},
}
SLICEABLE = [name for name in KINDS if name != "lamb"]

quick = settings(deadline=None, derandomize=True, max_examples=50)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def make(kind: str) -> Optimizer:
    return make_optimizer(KINDS[kind], STEPS, SIZES)


def draw(size: int, seed: int, scale: float = 1.0) -> Tensor:
    """Numbers that every machine finds alike: random bits times a power of two, with no logarithm in them."""
    whole = np.random.Generator(np.random.Philox(seed)).integers(-(2**23), 2**23, size)
    return torch.from_numpy((whole * 2.0**-22 * scale).astype(np.float32))


def run(optimizer: Optimizer, steps: int = STEPS, size: int = SIZE, device: str = "cpu", seed: int = 0) -> State:
    """Gradients of a bowl, plus noise."""
    state = optimizer.init(draw(size, 1_000_000 * seed).to(device))
    for step in range(steps):
        noise = draw(size, 1_000_000 * seed + step + 1, 0.25).to(device)
        state = optimizer.update(state, state.parameters * 0.5 + noise, step)
    return state


def get_vectors(state: State) -> tuple[Tensor, ...]:
    return (state.parameters, *state.slots)


def same_bits(one: State, other: State) -> bool:
    return encode_state(one) == encode_state(other)


# ---- Against others


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"name": "sgd"}, lambda p: torch.optim.SGD(p, lr=0.05)),
        ({"name": "sgd", "momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
        (
            {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        ),
        ({"name": "adamw"}, lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.0)),
        (
            {"name": "adamw", "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6},
            lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6),
        ),
    ],
)
def test_agrees_with_torch(
    ours: dict[str, Any], theirs: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> None:
    optimizer = make_optimizer({"rate": 0.05, **ours}, STEPS)
    state = optimizer.init(draw(1000, 0))
    parameter = torch.nn.Parameter(draw(1000, 0).double())
    other = theirs([parameter])
    for step in range(STEPS):
        gradient = draw(1000, step + 1)
        state = optimizer.update(state, gradient, step)
        parameter.grad = gradient.double()
        other.step()
    torch.testing.assert_close(state.parameters.double(), parameter.detach(), rtol=1e-5, atol=1e-5)


def test_lamb_agrees_with_the_paper() -> None:
    rate, beta1, beta2, epsilon, decay, sizes = 0.02, 0.9, 0.99, 1e-6, 0.05, (300, 1, 99)
    optimizer = make_optimizer(
        {"name": "lamb", "rate": rate, "beta2": beta2, "epsilon": epsilon, "weight_decay": decay}, STEPS, sizes
    )
    state = optimizer.init(draw(400, 0))
    x = draw(400, 0).double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for step in range(STEPS):
        gradient = draw(400, step + 1)
        state = optimizer.update(state, gradient, step)
        g = gradient.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        r = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + epsilon)
        u = r + decay * x
        x = torch.cat([p - rate * p.norm() / q.norm() * q for p, q in zip(x.split(sizes), u.split(sizes), strict=True)])
    torch.testing.assert_close(state.parameters.double(), x, rtol=2e-5, atol=2e-5)


def test_lamb_trusts_a_tensor_of_zeros_and_one_that_nothing_pushes() -> None:
    optimizer = make_optimizer({"name": "lamb", "rate": 0.5}, 10, (2, 2))
    state = optimizer.init(torch.tensor([0.0, 0.0, 3.0, 4.0]))
    after = optimizer.update(state, torch.tensor([1.0, -1.0, 0.0, 0.0]), 0)
    torch.testing.assert_close(after.parameters, torch.tensor([-0.5, 0.5, 3.0, 4.0]), rtol=0, atol=2e-6)


def test_lamb_survives_a_push_that_all_but_vanishes() -> None:
    optimizer = make_optimizer({"name": "lamb", "rate": 0.5}, 10, (2,))
    after = optimizer.update(optimizer.init(torch.tensor([1e10, 1e10])), torch.tensor([1e-45, 0.0]), 0)
    assert torch.isfinite(after.parameters).all()


# ---- To the last bit


def test_threads_do_not_matter(kind: str, two_threads: None) -> None:
    size = 300_000  # long enough to be shared among threads
    optimizer = make_optimizer(KINDS[kind], STEPS, (200_001, size - 200_001))
    two = run(optimizer, 3, size)
    torch.set_num_threads(1)
    assert same_bits(run(optimizer, 3, size), two)


@pytest.mark.skipif(len(DEVICES) == 1, reason="needs a GPU")
def test_a_gpu_finds_the_same_bits(kind: str) -> None:
    size = 300_000
    optimizer = make_optimizer(KINDS[kind], STEPS, (200_001, size - 200_001))
    assert same_bits(run(optimizer, STEPS, size, "cuda"), run(optimizer, STEPS, size))


@pytest.mark.skipif(len(DEVICES) == 1, reason="needs a GPU")
@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-25, 1e-10, 1e10, 1e18])
def test_a_gpu_finds_the_same_bits_of_extreme_numbers(kind: str, scale: float) -> None:
    optimizer, start, gradient = make(kind), draw(SIZE, 0, scale), draw(SIZE, 1, scale)
    found = []
    for device in DEVICES:
        state = optimizer.init(start.to(device))
        for step in range(3):
            state = optimizer.update(state, gradient.to(device), step)
        found.append(compute_state_digest(state))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", SLICEABLE)
@settings(quick, max_examples=20)
@given(cuts=st.lists(st.integers(0, 400), max_size=6).map(sorted), seed=st.integers(0, 99))
def test_slices_of_a_vector_move_like_the_whole(kind: str, cuts: list[int], seed: int) -> None:
    optimizer, start = make(kind), draw(400, seed)
    gradients = [draw(400, 1000 * (seed + 1) + step) for step in range(5)]
    edges = [0, *cuts, 400]

    def move(piece: slice) -> State:
        state = optimizer.init(start[piece])
        for step, gradient in enumerate(gradients):
            state = optimizer.update(state, gradient[piece], step)
        return state

    whole, pieces = move(slice(None)), [move(slice(a, b)) for a, b in itertools.pairwise(edges)]
    for index, vector in enumerate(get_vectors(whole)):
        joined = torch.cat([get_vectors(piece)[index] for piece in pieces])
        assert torch.equal(vector.view(torch.int32), joined.view(torch.int32))


@pytest.mark.parametrize("block", [1, 7, 1 << 10])
def test_blocks_do_not_matter(kind: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(make(kind), 3)
    monkeypatch.setattr(optimizers, "_BLOCK", block)
    assert same_bits(run(make(kind), 3), whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("plain sgd", "8b1c6c901e74e0023bd946d073f0554df8441fc6dcfc805ba5a35448fb13515e"),
        ("sgd", "55c16f5c33cf2bfd1330d5f30b1b0e237d50d8dfdb7bd9ae6f69745ff641dda7"),
        ("nesterov", "b5b867e05774ca304080b73c4cf9419c9b0af9d905179b7fb06c359d58a66d0d"),
        ("adamw", "17f5f36a365ed8e32e96a4a78f997e3ccab2a6326f619ff2f1abfd2aeffb9630"),
        ("lamb", "6efc96d50cb6f123976d23c14730cf0989056717ed2c72321793d32705cc758f"),
        ("restarted", "5f72e278bfe5179747492d8ef7beaf06cceea8fa89dae83deca3bb07d0033d2a"),
    ],
)
def test_golden_digest(kind: str, digest: str, device: str) -> None:
    """Whoever changes one of these changes the arithmetic: peers of before and after cannot train together."""
    assert compute_state_digest(run(make(kind), device=device)).hex() == digest


def test_golden_digest_of_long_norms() -> None:
    optimizer = make_optimizer(KINDS["lamb"], STEPS, (65_535, 131_073, 70_000))
    state = run(optimizer, 3, 266_608)
    assert compute_state_digest(state).hex() == "a9a478a716657ae96979f75537eee29e313673d193989d35c3124858e3c4e100"


def test_the_square_root_is_that_of_ieee() -> None:
    """All mantissas at an odd and an even exponent, in the middle and at the ends of the range."""
    for first in (0, 0x00800000, 0x3F800000, 0x7E800000):
        numbers = np.arange(first, first + (1 << 24), dtype=np.uint32).view(np.float32)
        found = optimizers._sqrt(torch.from_numpy(numbers)).numpy()
        assert np.array_equal(found.view(np.uint32), np.sqrt(numbers).view(np.uint32))


@quick
@given(st.integers(0, 200_000), st.integers(0, 99))
def test_sums_of_squares_are_exact_to_float64(size: int, seed: int) -> None:
    values = draw(size, seed)
    assert math.isclose(optimizers._sum_squares(values), math.fsum((values.double() ** 2).tolist()), rel_tol=1e-14)


def test_sums_of_squares_follow_their_definition() -> None:
    values = draw(200_000, 0)
    squares = np.zeros(4 * 65_536)
    squares[:200_000] = values.double().numpy() ** 2
    lanes = np.zeros(65_536)
    for row in squares.reshape(4, -1):
        lanes = lanes + row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    assert optimizers._sum_squares(values).item() == lanes[0]


# ---- Pure functions


def test_nothing_is_written_to(kind: str) -> None:
    optimizer = make(kind)
    parameters, gradient = draw(SIZE, 1), draw(SIZE, 2)
    state = optimizer.init(parameters)
    for step in range(STEPS):
        before = [vector.clone() for vector in (parameters, gradient, *get_vectors(state))]
        after = optimizer.update(state, gradient, step)
        assert all(map(torch.equal, before, (parameters, gradient, *get_vectors(state))))
        assert same_bits(optimizer.update(state, gradient, step), after)
        places = {vector.data_ptr() for vector in (gradient, *get_vectors(state))}
        assert not places & {vector.data_ptr() for vector in get_vectors(after)}
        state = after


def test_the_model_that_parameters_came_from_may_change() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    state = make_optimizer({"name": "sgd", "rate": 0.1}, 1).init(model.weight.flatten())
    before = state.parameters.clone()
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(state.parameters, before)
    assert not state.parameters.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shorter_wire_types_are_widened(kind: str, dtype: torch.dtype) -> None:
    optimizer, gradient = make(kind), draw(SIZE, 2).to(dtype)
    state = optimizer.init(draw(SIZE, 1))
    assert same_bits(optimizer.update(state, gradient, 0), optimizer.update(state, gradient.float(), 0))


def test_slots_are_named(kind: str) -> None:
    optimizer = make(kind)
    state = run(optimizer, 2)
    assert len(state.slots) == len(optimizer.slot_names)
    assert {(vector.shape, vector.dtype) for vector in get_vectors(state)} == {((SIZE,), torch.float32)}


@pytest.mark.parametrize(
    ("gradient", "slots", "step"),
    [
        (torch.zeros(3), 1, 0),
        (torch.zeros(4).double(), 1, 0),
        (torch.zeros(1, 4), 1, 0),
        (torch.zeros(4), 0, 0),
        (torch.zeros(4), 2, 0),
        (torch.zeros(4), 1, -1),
    ],
)
def test_misuse_is_refused(gradient: Tensor, slots: int, step: int) -> None:
    optimizer = make("sgd")
    with pytest.raises(ValueError, match="expected"):
        optimizer.update(State(torch.zeros(4), (torch.zeros(4),) * slots), gradient, step)


@pytest.mark.parametrize("parameters", [torch.zeros(2, 2), torch.zeros(4).double(), torch.zeros(4).bfloat16()])
def test_parameters_of_another_kind_are_refused(parameters: Tensor) -> None:
    with pytest.raises(ValueError, match="expected a vector of float32"):
        make("sgd").init(parameters)


# ---- Overflow


@pytest.mark.parametrize("size", [1.0, 1e10, 1e18, 1e19, 1e30, LARGEST])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_state_is_finite_or_refused(kind: str, size: float, sign: int) -> None:
    optimizer = make(kind)
    state = optimizer.init(torch.full((SIZE,), 1e3))
    gradient = torch.zeros(SIZE)
    gradient[::3] = sign * size
    refused = False
    for step in range(STEPS):
        try:
            state = optimizer.update(state, gradient, step)
        except LocalError as error:
            refused = True
            assert str(error).startswith(f"step {step}: the update overflows (")  # noqa: PT017
            break
        assert all(torch.isfinite(vector).all() for vector in get_vectors(state))
    # The largest cap that a run would have is far below.
    assert not refused or size > 1e18


@pytest.mark.parametrize("place", [0, 1, 17, 4095, 4999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found(place: int, value: float) -> None:
    values = torch.zeros(5000)
    assert optimizers._is_finite(values)
    values[place] = value
    assert not optimizers._is_finite(values)
    with pytest.raises(LocalError, match="not all finite"):
        make("sgd").init(values)


def test_a_second_moment_beyond_float32_is_refused() -> None:
    optimizer = make("adamw")
    with pytest.raises(LocalError, match=r"step 0: the update overflows \(second_moment\); lower"):
        optimizer.update(optimizer.init(torch.zeros(2)), torch.tensor([LARGEST, 0.0]), 0)


# ---- Bytes and digests


@pytest.mark.parametrize("device", DEVICES)
def test_states_round_trip(kind: str, device: str) -> None:
    state = run(make(kind), 3, device=device)
    back = decode_state(encode_state(state), SIZE, len(state.slots), device)
    assert back is not None
    assert same_bits(back, state)
    assert back.parameters.device == state.parameters.device
    assert compute_state_digest(back) == compute_state_digest(state)


@quick
@given(st.integers(0, 9), st.integers(0, 3), st.binary(max_size=100))
def test_other_lengths_are_refused(size: int, slots: int, data: bytes) -> None:
    state = decode_state(data, size, slots)
    assert (state is None) or len(data) == 4 * size * (1 + slots)
    assert state is None or encode_state(state) == data


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3, 4, 11])
def test_bytes_that_are_not_finite_are_refused(value: float, place: int) -> None:
    values = np.zeros(12, "<f4")
    assert decode_state(values.tobytes(), 4, 2) is not None
    values[place] = value
    assert decode_state(values.tobytes(), 4, 2) is None


def test_bytes_are_parameters_then_slots() -> None:
    state = decode_state(np.arange(6, dtype="<f4").tobytes(), 2, 2)
    assert state is not None
    assert [vector.tolist() for vector in get_vectors(state)] == [[0, 1], [2, 3], [4, 5]]


def test_digests_bind_sizes_and_slots() -> None:
    zeros = torch.zeros(6)
    states = [
        State(zeros, ()),
        State(zeros[:3], (zeros[:3],)),
        State(zeros[:2], (zeros[:2], zeros[:2])),
        State(zeros[:5], ()),
        State(-zeros, ()),
        State(zeros[:0], ()),
        State(zeros[:0], (zeros[:0],)),
    ]
    assert len({compute_state_digest(state) for state in states}) == len(states)


@quick
@given(st.integers(0, 11), st.integers(0, 31))
def test_digests_bind_every_bit(place: int, bit: int) -> None:
    values = draw(12, 0)
    changed = values.clone().view(torch.int32)
    changed[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    states = [State(v[:4], (v[4:8], v[8:])) for v in (values, changed.view(torch.float32))]
    assert compute_state_digest(states[0]) != compute_state_digest(states[1])


# ---- Restarts


def test_stages_double() -> None:
    optimizer = make_optimizer({"name": "restarted", "rate": 0.1, "first_stage": 3}, 100)
    assert isinstance(optimizer, Restarted)
    found = [optimizer.get_stage(step) for step in range(22)]
    expected = [(stage, place, 3 << stage) for stage in range(3) for place in range(3 << stage)]
    assert found == [*expected, (3, 0, 24)]


def test_restarts_from_the_average() -> None:
    rate, first, steps = 0.25, 4, 4 + 8 + 5
    optimizer = make_optimizer({"name": "restarted", "rate": rate, "first_stage": first}, steps)
    state = optimizer.init(draw(10, 0))
    x, seen = draw(10, 0).double(), []
    for step in range(steps):
        gradient = draw(10, step + 1)
        state = optimizer.update(state, gradient, step)
        stage = 0 if step < 4 else 1 if step < 12 else 2
        x = x - rate / 2**stage * gradient.double()
        seen.append(x)
        if step in (3, 11, steps - 1):
            x, seen = torch.stack(seen).mean(0), []
        torch.testing.assert_close(state.parameters.double(), x, rtol=1e-5, atol=1e-6)


def test_the_average_does_not_stand_still_in_a_long_stage() -> None:
    steps = 20_000
    optimizer = make_optimizer({"name": "restarted", "rate": 1e-4, "first_stage": steps}, steps)
    state, none, jump = optimizer.init(torch.ones(4)), torch.zeros(4), torch.full((4,), -5.0)
    for step in range(steps):
        state = optimizer.update(state, jump if step == steps // 2 else none, step)
    # Without the remainder it stays at 1: a ten-thousandth of the jump is less than half of the last bit.
    np.testing.assert_allclose(state.parameters.numpy(), 1 + 5e-4 / 2, rtol=1e-6)


def test_restarts_beat_plain_sgd_at_the_same_rate() -> None:
    steps = 20 * (2**6 - 1)
    restarted = make_optimizer({"name": "restarted", "rate": 0.5, "first_stage": 20}, steps)
    plain = make_optimizer({"name": "sgd", "rate": 0.5}, steps)
    distances = [run(optimizer, steps, 50).parameters.norm() for optimizer in (restarted, plain)]
    assert distances[0] < 0.1 * distances[1]


# ---- Schedules


@quick
@given(st.floats(0, 1))
def test_the_cosine(x: float) -> None:
    assert abs(compute_cosine(x) - math.cos(math.pi * x)) < 1e-15


def test_the_cosine_at_its_corners() -> None:
    assert compute_cosine(0.0) == 1.0
    assert compute_cosine(1.0) == -1.0
    assert compute_cosine(0.2).hex() == "0x1.9e3779b97f4a8p-1"


@quick
@given(st.floats(0, 0.999999), st.integers(0, 10**6))
def test_powers(base: float, exponent: int) -> None:
    # Every squaring doubles the relative error that is there.
    assert math.isclose(compute_power(base, exponent), base**exponent, rel_tol=3e-16 * (exponent + 1), abs_tol=1e-300)


def test_small_powers_are_exact() -> None:
    assert [compute_power(0.5, k) for k in range(5)] == [1, 0.5, 0.25, 0.125, 0.0625]
    assert math.isclose(compute_power(0.9, 10), float(Fraction(0.9) ** 10), rel_tol=1e-15)
    assert compute_power(0.999, 1000).hex() == "0x1.788526411edacp-2"


def test_warmup_and_cosine() -> None:
    schedule = Schedule("cosine", 14, 4, 0.1)
    shares = [schedule.compute_share(step) for step in range(16)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4] == 1.0
    assert shares[4:15] == sorted(shares[4:15], reverse=True)
    assert math.isclose(shares[9], 0.55)
    assert shares[14:] == [0.1, 0.1]


def test_a_constant_schedule() -> None:
    assert {Schedule("constant", 5).compute_share(step) for step in range(9)} == {1.0}
    assert [Schedule("constant", 5, 2).compute_share(step) for step in range(4)] == [0.5, 1, 1, 1]


@quick
@given(
    st.sampled_from(["constant", "cosine"]), st.integers(1, 1000), st.integers(0, 1000), st.floats(0, 1), st.integers(0)
)
def test_shares_are_between_nothing_and_all(kind: str, steps: int, warmup: int, floor: float, step: int) -> None:
    warmup = min(warmup, steps)
    assert 0 <= Schedule(kind, steps, warmup, floor).compute_share(step) <= 1


def test_the_schedule_is_applied() -> None:
    optimizer = make_optimizer({"name": "sgd", "rate": 1.0, "warmup": 4}, 10)
    state = optimizer.init(torch.zeros(1))
    assert [optimizer.update(state, torch.ones(1), step).parameters.item() for step in range(5)] == [
        -0.25,
        -0.5,
        -0.75,
        -1.0,
        -1.0,
    ]


# ---- Settings


def test_the_methods_of_the_paper() -> None:
    assert set(METHODS) == {"btard-sgd", "btard-clipped-sgd", "restarted-btard-sgd"}
    assert {method.optimizer for method in METHODS.values()} <= set(OPTIMIZERS)
    assert METHODS["btard-clipped-sgd"].needs == ("lambda",)


def test_whole_numbers_will_do() -> None:
    optimizer = make_optimizer({"name": "adamw", "rate": 1, "weight_decay": 0, "floor": 1, "schedule": "cosine"}, 5)
    assert optimizer.slot_names == ("first_moment", "second_moment")


SGD = {"name": "sgd", "rate": 0.1}
ADAMW = {"name": "adamw", "rate": 0.1}
RESTARTED = {"name": "restarted", "rate": 0.1, "first_stage": 3}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "optimizer: name = None; expected one of sgd, adamw, lamb, restarted"),
        ({"name": "adam"}, "optimizer: name = 'adam'; expected one of sgd, adamw, lamb, restarted"),
        ({"name": ["sgd"]}, "optimizer: name = ['sgd']; expected one of sgd, adamw, lamb, restarted"),
        (
            {**SGD, "beta1": 0.9},
            "optimizer sgd: unknown setting 'beta1'; expected rate, weight_decay, momentum, nesterov, schedule, "
            "warmup, floor",
        ),
        (
            {**ADAMW, "steps": 3},
            "optimizer adamw: unknown setting 'steps'; expected rate, weight_decay, beta1, beta2, epsilon, schedule, "
            "warmup, floor",
        ),
        ({**RESTARTED, "floor": 0}, "optimizer restarted: unknown setting 'floor'; expected rate, first_stage"),
        ({"name": "sgd"}, "optimizer sgd: rate is missing; expected a number from 1e-12 to 1e+06"),
        (
            {"name": "restarted", "rate": 1},
            "optimizer restarted: first_stage is missing; expected a whole number of steps from 1 to 10, the length of "
            "the run",
        ),
        ({**SGD, "rate": 0}, "optimizer sgd: rate = 0; expected a number from 1e-12 to 1e+06"),
        ({**SGD, "rate": -1.0}, "optimizer sgd: rate = -1.0; expected a number from 1e-12 to 1e+06"),
        ({**SGD, "rate": math.nan}, "optimizer sgd: rate = nan; expected a number from 1e-12 to 1e+06"),
        ({**SGD, "rate": math.inf}, "optimizer sgd: rate = inf; expected a number from 1e-12 to 1e+06"),
        ({**SGD, "rate": "0.1"}, "optimizer sgd: rate = '0.1'; expected a number from 1e-12 to 1e+06"),
        ({**SGD, "rate": True}, "optimizer sgd: rate = True; expected a number from 1e-12 to 1e+06"),
        ({**SGD, "momentum": 1.0}, "optimizer sgd: momentum = 1.0; expected a number from 0 to 0.9999"),
        ({**SGD, "weight_decay": -1}, "optimizer sgd: weight_decay = -1; expected a number from 0 to 1000"),
        ({**SGD, "nesterov": 1}, "optimizer sgd: nesterov = 1; expected True or False"),
        ({**SGD, "nesterov": True}, "optimizer sgd: nesterov = True without momentum; expected momentum above 0"),
        ({**SGD, "schedule": "linear"}, "optimizer sgd: schedule = 'linear'; expected one of constant, cosine"),
        ({**SGD, "schedule": None}, "optimizer sgd: schedule = None; expected one of constant, cosine"),
        ({**SGD, "floor": 1.5}, "optimizer sgd: floor = 1.5; expected a number from 0 to 1"),
        (
            {**SGD, "warmup": 11},
            "optimizer sgd: warmup = 11; expected a whole number of steps from 0 to 10, the length of the run",
        ),
        (
            {**SGD, "warmup": 1.0},
            "optimizer sgd: warmup = 1.0; expected a whole number of steps from 0 to 10, the length of the run",
        ),
        (
            {**RESTARTED, "first_stage": 0},
            "optimizer restarted: first_stage = 0; expected a whole number of steps from 1 to 10, the length of "
            "the run",
        ),
        ({**ADAMW, "beta1": 1}, "optimizer adamw: beta1 = 1; expected a number from 0 to 0.9999"),
        ({**ADAMW, "beta2": 1}, "optimizer adamw: beta2 = 1; expected a number from 0 to 0.999999"),
        ({**ADAMW, "epsilon": 0}, "optimizer adamw: epsilon = 0; expected a number from 1e-12 to 1"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(LocalError) as caught:
        make_optimizer(given, 10)
    assert str(caught.value) == line


def test_a_run_has_steps() -> None:
    with pytest.raises(LocalError, match="optimizer sgd: steps = 0; expected 1 or more"):
        make_optimizer(SGD, 0)


@pytest.mark.parametrize(
    ("sizes", "got"), [(None, "none"), ((3, 4), "sizes that add up to 7"), ((), "sizes that add up to 0")]
)
def test_lamb_wants_the_sizes_of_tensors(sizes: tuple[int, ...] | None, got: str) -> None:
    optimizer = make_optimizer({"name": "lamb", "rate": 0.1}, 10, sizes)
    with pytest.raises(LocalError) as caught:
        optimizer.init(torch.zeros(8))
    assert str(caught.value) == f"optimizer lamb: expected the sizes of tensors of 8 numbers, got {got}"
