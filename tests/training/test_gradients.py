"""Gradients are functions of parameters and a seed: the same bits, whatever happened before or in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import task as SMALL  # noqa: N812
from torch import Generator, Tensor, nn
from torch.nn import functional

import phalanx.training.gradients as module
from phalanx.core.errors import LocalError
from phalanx.core.randomness import Stream, derive_seed
from phalanx.training.gradients import Gradients, SeededDropout, describe_platform, draw_rows
from phalanx.training.task import Batch, Data, Task, accuracy, classification_loss
from phalanx.training.tasks import load_task

SEED, OTHER = bytes(32), bytes(range(32))
CPU = torch.device("cpu")
INPUTS = torch.randn(50, 6, generator=Generator().manual_seed(1))
DATA = Data((INPUTS, (INPUTS[:, 0] > 0).long()))


def make_task(model: Callable[[], nn.Module], **changes: Any) -> Task:
    fields: dict[str, Any] = {"loss": classification_loss, "metric": accuracy, "batch": 8} | changes
    return Task(name="small", model=model, train=DATA, test=DATA, **fields)


def make_layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), *between, nn.ReLU(), nn.Linear(5, 2))


def is_same(one: Tensor, two: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), two.view(torch.int32))


def add_noise(batch: Batch, generator: Generator) -> Batch:
    return batch[0] + torch.randn(batch[0].shape, generator=generator), batch[1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": make_layers,
    "dropout": lambda: make_layers(nn.Dropout(0.5)),
    "alpha": lambda: make_layers(nn.AlphaDropout(0.3)),
    "norm": lambda: make_layers(nn.BatchNorm1d(5)),
    "noise": lambda: make_layers(Noise()),
    "attention": lambda: make_layers(Attention()),
    "counts": lambda: make_layers(Counting()),
}


class Noise(nn.Module):
    """Draws from PyTorch's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


class Attention(nn.Module):
    """Draws dropout inside of PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(5, 1, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attend(x[None], x[None], x[None], need_weights=False)[0]
        return found[0]


class Counting(nn.Module):
    """Changes one buffer in place, puts another in the place of a second, and moves a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced + 1
        self.frozen.data += 1
        return x * (self.calls + self.replaced + self.frozen)


# ---- Purity


@pytest.mark.parametrize("augment", [None, add_noise], ids=["as it is", "augmented"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_parameters_and_seed_give_the_same_bits(name: str, augment: Any) -> None:
    task = make_task(MODELS[name], augment=augment)
    gradients = Gradients(task)
    first = gradients.compute(gradients.start, SEED)
    assert first.dtype == torch.float32
    assert first.shape == (gradients.size,)
    assert bool(first.any())
    gradients.compute(gradients.start + 1, OTHER)
    gradients.evaluate(gradients.start)
    gradients.make_state_dict(gradients.start)
    loss = gradients.compute_loss(gradients.start, SEED)
    torch.rand(5)
    assert is_same(gradients.compute(gradients.start, SEED), first)
    assert gradients.compute_loss(gradients.start, SEED) == loss
    assert is_same(Gradients(task).compute(gradients.start, SEED), first)
    gradients.require_repeatable()


@pytest.mark.parametrize("name", MODELS)
def test_global_generators_are_neither_used_nor_changed(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate()
    gradients = Gradients(make_task(MODELS[name], augment=add_noise))
    first = gradients.compute(gradients.start, SEED)
    gradients.compute_loss(gradients.start, SEED)
    value = gradients.evaluate(gradients.start)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.manual_seed(2)
    again = Gradients(make_task(MODELS[name], augment=add_noise))
    assert is_same(again.start, gradients.start)
    assert is_same(again.compute(again.start, SEED), first)
    assert again.evaluate(again.start) == value


def test_an_error_leaves_generators_and_mode_as_they_were() -> None:
    def fail(model: nn.Module, data: Data) -> float:
        torch.rand(3)
        raise RuntimeError("no")

    gradients = Gradients(make_task(MODELS["norm"], metric=fail))
    first, before = gradients.compute(gradients.start, SEED), torch.get_rng_state()
    with pytest.raises(LocalError, match="its metric failed: RuntimeError: no"):
        gradients.evaluate(gradients.start)
    assert torch.equal(torch.get_rng_state(), before)
    assert is_same(gradients.compute(gradients.start, SEED), first)


@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(["compute", "loss", "poison", "evaluate"]), st.binary(min_size=32, max_size=32)))
)
def test_no_order_of_calls_matters(calls: list[tuple[str, bytes]]) -> None:
    task = make_task(lambda: make_layers(nn.BatchNorm1d(5), nn.Dropout(0.2)), poison=lambda b: (b[0], 1 - b[1]))
    gradients, fresh = Gradients(task), Gradients(task)
    expected = fresh.compute(fresh.start, SEED)
    for what, seed in calls:
        if what == "evaluate":
            gradients.evaluate(gradients.start * 2)
        elif what == "loss":
            gradients.compute_loss(gradients.start, seed)
        else:
            gradients.compute(gradients.start * 3, seed, poisoned=what == "poison")
    assert is_same(gradients.compute(gradients.start, SEED), expected)


def test_parameters_that_are_given_are_not_changed() -> None:
    gradients = Gradients(make_task(make_layers))
    given_parameters = gradients.start.clone()
    result = gradients.compute(given_parameters, SEED)
    kept = result.clone()
    gradients.compute(given_parameters + 1, OTHER)
    assert is_same(given_parameters, gradients.start)
    assert is_same(result, kept)


def test_it_works_where_gradients_are_switched_off() -> None:
    gradients = Gradients(make_task(make_layers))
    with torch.no_grad():
        assert is_same(gradients.compute(gradients.start, SEED), gradients.compute(gradients.start, SEED))
        assert bool(gradients.compute(gradients.start, SEED).any())


def test_the_start_depends_on_the_seed_only() -> None:
    task = make_task(make_layers)
    assert is_same(Gradients(task, 3).start, Gradients(task, 3).start)
    assert not torch.equal(Gradients(task, 3).start, Gradients(task, 4).start)


def test_what_cannot_be_repeated_is_found() -> None:
    task = make_task(make_layers, augment=lambda batch, _: (batch[0] * random.random(), batch[1]))
    with pytest.raises(LocalError, match="the gradient is another one the second time"):
        Gradients(task).require_repeatable()

    def make() -> nn.Module:
        model = make_layers()
        nn.init.constant_(model[0].bias, random.random())  # type: ignore[index]
        return model

    with pytest.raises(LocalError, match="the model that is made is another one"):
        Gradients(make_task(make)).require_repeatable()


# ---- What the seed determines


def test_other_seeds_give_other_batches_masks_and_noise() -> None:
    every_row = replace(make_task(make_layers), train=Data((INPUTS[:1], DATA.tensors[1][:1])))
    for task, differs in (
        (make_task(make_layers), True),
        (every_row, False),  # only one row to draw: nothing is random
        (replace(every_row, model=MODELS["dropout"]), True),
        (replace(every_row, model=MODELS["noise"]), True),
        (replace(every_row, augment=add_noise), True),
    ):
        gradients = Gradients(task)
        same = is_same(gradients.compute(gradients.start, SEED), gradients.compute(gradients.start, OTHER))
        assert same is not differs


def test_the_loss_is_that_of_the_same_batch_and_masks() -> None:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        value = classification_loss(model, batch)
        seen.append(float(value.detach()))
        return value

    gradients = Gradients(make_task(MODELS["dropout"], loss=loss, augment=add_noise))
    gradients.compute(gradients.start, SEED)
    value = gradients.compute_loss(gradients.start, SEED)
    assert seen == [value, value]


@settings(deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 200), st.integers(1, 1 << 62))
def test_rows_are_in_range_and_those_of_the_stream(seed: bytes, count: int, bound: int) -> None:
    stream = Stream(derive_seed(seed, "rows"))
    assert draw_rows(seed, count, bound).tolist() == [stream.draw_below(bound) for _ in range(count)]


def test_words_above_the_last_multiple_are_skipped() -> None:
    bound = (1 << 63) - 1 - (1 << 62)  # a fifth of all words or more are skipped, several times
    stream = Stream(derive_seed(SEED, "rows"))
    assert draw_rows(SEED, 50, bound).tolist() == [stream.draw_below(bound) for _ in range(50)]


def test_every_row_is_equally_likely() -> None:
    counts = Counter(draw_rows(SEED, 70_000, 7).tolist())
    assert sorted(counts) == list(range(7))
    assert sum((count - 10_000) ** 2 / 10_000 for count in counts.values()) < 22.5  # chi-square, 1 in 1000


# ---- The gradient itself


def test_the_gradient_of_the_digits_is_what_autograd_says() -> None:
    task = replace(load_task("digits"), augment=None)
    gradients = Gradients(task, 5)
    model = task.model()
    nn.utils.vector_to_parameters(gradients.start, model.parameters())
    loss = task.loss(model, task.train.select(draw_rows(SEED, task.batch, len(task.train))))
    loss.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(gradients.compute(gradients.start, SEED), expected)
    assert gradients.compute_loss(gradients.start, SEED) == pytest.approx(float(loss.detach()))


def test_the_poisoned_gradient_is_that_of_the_poisoned_batch() -> None:
    task = make_task(make_layers, poison=lambda batch: (batch[0], 1 - batch[1]))
    flipped = replace(task, train=Data((INPUTS, 1 - DATA.tensors[1])))
    poisoned = Gradients(task).compute(Gradients(task).start, SEED, poisoned=True)
    assert is_same(poisoned, Gradients(flipped).compute(Gradients(task).start, SEED))
    assert not is_same(poisoned, Gradients(task).compute(Gradients(task).start, SEED))


def test_without_a_poison_there_is_no_poisoned_gradient() -> None:
    gradients = Gradients(make_task(make_layers))
    with pytest.raises(LocalError, match="does not say what a poisoned batch is"):
        gradients.compute(gradients.start, SEED, poisoned=True)


class Odd(nn.Module):
    """One layer used twice, one never, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Linear(6, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.frozen(self.tied(self.first(x)))
        return scores


def test_tied_count_once_unused_are_zero_frozen_are_left_out() -> None:
    gradients = Gradients(make_task(Odd))
    assert gradients.size == (6 * 6 + 6) + (3 * 2 + 2)
    gradient = gradients.compute(gradients.start, SEED)
    assert not gradient[42:].any()
    assert gradient[:42].all()
    state = gradients.make_state_dict(gradients.start + 1)
    assert torch.equal(state["tied.weight"], state["first.weight"])
    assert torch.equal(state["first.weight"].reshape(-1), gradients.start[:36] + 1)
    before = gradients.make_state_dict(gradients.start)
    assert torch.equal(state["frozen.weight"], before["frozen.weight"])


def test_a_tied_gradient_is_the_sum_of_both_uses() -> None:
    gradients = Gradients(make_task(Odd))
    model = Odd()
    model.load_state_dict(gradients.make_state_dict(gradients.start))
    classification_loss(model, DATA.select(draw_rows(SEED, 8, 50))).backward()
    assert model.first.weight.grad is not None
    torch.testing.assert_close(gradients.compute(gradients.start, SEED)[:36].view(6, 6), model.first.weight.grad)


def test_a_loss_that_uses_no_parameters_has_gradient_zero() -> None:
    gradients = Gradients(make_task(make_layers, loss=lambda model, batch: batch[0].mean()))
    assert not gradients.compute(gradients.start, SEED).any()


def test_sparse_gradients_are_filled_in() -> None:
    rows = Data((torch.tensor([1, 3]), torch.tensor([0, 1])))
    task = replace(make_task(lambda: nn.Embedding(5, 2, sparse=True)), train=rows, test=rows)
    gradient = Gradients(task).compute(torch.zeros(10), SEED).view(5, 2)
    assert gradient[[1, 3]].all()
    assert not gradient[[0, 2, 4]].any()


def test_a_gradient_that_is_not_finite_is_returned() -> None:
    gradients = Gradients(make_task(make_layers))
    assert not gradients.compute(torch.full_like(gradients.start, 1e30), SEED).isfinite().all()


# ---- Wrong input


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (make_task(lambda: make_layers().double()), "parameter 0.weight is torch.float64; only float32 is trained"),
        (make_task(lambda: nn.LazyLinear(2)), "parameter weight has no size yet"),
        (make_task(nn.ReLU), "the model has no parameters to train"),
        (make_task(lambda: "model"), r"model\(\) returned a str; expected an nn.Module"),  # type: ignore[arg-type, return-value]
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_cannot_be_trained_is_refused(task: Task, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        Gradients(task)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: model(batch[0]), r"must be one number, got shape \(8, 2\)"),
        (lambda model, batch: 0.5, "must be one number, got a float"),
    ],
)
def test_a_loss_that_is_not_one_number_is_refused(loss: Any, message: str) -> None:
    gradients = Gradients(make_task(make_layers, loss=loss))
    with pytest.raises(LocalError, match=message):
        gradients.compute(gradients.start, SEED)


@pytest.mark.parametrize("device", ["tpu", "meta", "cuda:63", "nonsense", ""])
def test_an_unknown_device_is_refused(device: str) -> None:
    with pytest.raises(LocalError, match=f"device '{device}': "):
        Gradients(make_task(make_layers), device=device)


def test_parameters_of_another_size_or_type_are_a_mistake() -> None:
    gradients = Gradients(make_task(make_layers))
    for wrong in (gradients.start[:-1], gradients.start.double(), gradients.start[None]):
        with pytest.raises(ValueError, match="parameters: expected 47 numbers of float32"):
            gradients.compute(wrong, SEED)


# ---- Batch norm and state dicts


@pytest.mark.parametrize("name", ["plain", "norm", "dropout"])
def test_a_state_dict_loads_strictly_and_has_the_same_metric(name: str) -> None:
    task = make_task(MODELS[name], metric=lambda model, data: float(classification_loss(model, data.tensors).detach()))
    gradients = Gradients(task)
    state = gradients.make_state_dict(gradients.start)
    model = task.model()
    model.load_state_dict(state, strict=True)
    assert task.metric(model.eval(), task.test) == gradients.evaluate(gradients.start)
    kept = {key: value.clone() for key, value in state.items()}
    gradients.compute(gradients.start + 1, OTHER)
    assert all(torch.equal(state[key], kept[key]) for key in kept)


def test_statistics_are_the_plain_average_over_public_batches() -> None:
    def make() -> nn.Module:
        norm = nn.BatchNorm1d(6)
        assert norm.running_mean is not None
        assert norm.num_batches_tracked is not None
        norm.running_mean += 7  # what a model comes with does not matter
        norm.num_batches_tracked += 5
        return nn.Sequential(norm, nn.Linear(6, 2))

    gradients = Gradients(make_task(make))
    state = gradients.make_state_dict(gradients.start)
    seeds = [derive_seed(bytes(32), "statistics", number.to_bytes(8, "little")) for number in range(32)]
    batches = torch.stack([DATA.select(draw_rows(seed, 8, 50))[0] for seed in seeds])
    assert state["0.num_batches_tracked"] == 32
    torch.testing.assert_close(state["0.running_mean"], batches.mean((0, 1)))
    torch.testing.assert_close(state["0.running_var"], batches.var(1).mean(0))
    gradients.compute(gradients.start, SEED)
    again = gradients.make_state_dict(gradients.start)
    assert all(torch.equal(state[key], again[key]) for key in state)


def test_statistics_do_not_leak_into_gradients() -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            assert self.norm.running_mean is not None
            x = self.norm(x) + self.norm.running_mean  # what the last batches were
            scores: Tensor = self.layer(x)
            return scores

    gradients = Gradients(make_task(Leaky))
    first = gradients.compute(gradients.start, SEED)
    gradients.compute(gradients.start, OTHER)
    gradients.evaluate(gradients.start)
    assert is_same(gradients.compute(gradients.start, SEED), first)


# ---- Dropout


@pytest.mark.parametrize(
    ("drop", "shape", "kept_together"),
    [
        (functional.dropout, (40, 30), ()),
        (functional.dropout1d, (40, 30, 4), (2,)),
        (functional.dropout2d, (40, 30, 2, 2), (2, 3)),
        (functional.dropout3d, (40, 30, 2, 2, 2), (2, 3, 4)),
        (functional.dropout1d, (500, 4), (1,)),
        (functional.dropout3d, (500, 2, 2, 2), (1, 2, 3)),
    ],
)
def test_dropout_drops_what_pytorch_drops(drop: Any, shape: tuple[int, ...], kept_together: tuple[int, ...]) -> None:
    with SeededDropout(SEED, CPU):
        out = drop(torch.ones(shape), p=0.25)
    values = torch.unique(out)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.75]))
    assert abs(float((out == 0).float().mean()) - 0.25) < 0.07
    if kept_together:
        first = out[(..., *[slice(0, 1)] * len(kept_together))]
        assert torch.equal(out, first.expand(shape))
        assert not torch.equal(out[:1].expand(shape), out)


@pytest.mark.parametrize("drop", [functional.alpha_dropout, functional.feature_alpha_dropout])
def test_alpha_dropout_keeps_mean_and_variance(drop: Any) -> None:
    x = torch.randn(400, 500, generator=Generator().manual_seed(0))
    with SeededDropout(SEED, CPU):
        out = drop(x, p=0.3, training=True)
        same = drop(x, p=0.3)
    assert same is x
    assert abs(float(out.mean())) < 0.02
    assert abs(float(out.var()) - 1) < 0.03


@pytest.mark.parametrize("drop", [functional.dropout, functional.alpha_dropout])
def test_dropout_in_place_and_at_its_ends(drop: Any) -> None:
    x = torch.ones(10, 10)
    with SeededDropout(SEED, CPU):
        assert drop(x, p=0.0, training=True) is x
        assert drop(x, p=0.5, training=False) is x
        assert torch.equal(drop(x, p=1.0, training=True), torch.zeros(10, 10))
        with pytest.raises(ValueError, match="between 0 and 1"):
            drop(x, p=1.5, training=True)
    with SeededDropout(SEED, CPU):
        out = drop(x.clone(), p=0.5, training=True)
    with SeededDropout(SEED, CPU):
        assert drop(x, p=0.5, training=True, inplace=True) is x
    assert torch.equal(x, out)


def test_a_mask_is_read_off_the_stream() -> None:
    words = np.frombuffer(Stream(SEED).draw_bytes(400), dtype="<u4")
    with SeededDropout(SEED, CPU):
        out = nn.Dropout(0.25)(torch.ones(100))
    assert (out.numpy() != 0).tolist() == (words >= 1 << 30).tolist()


def test_each_layer_gets_its_own_mask() -> None:
    with SeededDropout(SEED, CPU):
        first, second = functional.dropout(torch.ones(100)), functional.dropout(torch.ones(100))
    with SeededDropout(OTHER, CPU):
        third = functional.dropout(torch.ones(100))
    assert not torch.equal(first, second)
    assert not torch.equal(first, third)


def test_dropout_inside_of_fused_layers_is_refused_on_a_gpu() -> None:
    x = torch.ones(1, 3, 4)
    fused: list[Callable[[float], Any]] = [
        lambda p: functional.scaled_dot_product_attention(x, x, x, dropout_p=p),
        lambda p: nn.MultiheadAttention(4, 2, dropout=p)(x, x, x),
        lambda p: nn.LSTM(4, 4, 2, dropout=p)(x),
        lambda p: nn.GRU(4, 4, 2, dropout=p)(x),
        lambda p: nn.RNN(4, 4, 2, dropout=p)(x),
    ]
    for call in fused:
        with SeededDropout(SEED, torch.device("cuda")):
            call(0.0)
            with pytest.raises(LocalError, match="draws dropout on the device"):
                call(0.5)
        with SeededDropout(SEED, CPU):
            call(0.5)


# ---- Platform


def test_a_platform_is_described_in_one_line() -> None:
    text = describe_platform("cpu")
    assert torch.__version__ in text
    assert f"{torch.get_num_threads()} threads" in text
    assert "\n" not in text
    with pytest.raises(LocalError, match="device 'abacus'"):
        describe_platform("abacus")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["plain", "dropout", "alpha", "norm", "counts"])
def test_a_gpu_repeats_its_bits_and_is_close_to_a_cpu(name: str) -> None:
    task = make_task(MODELS[name], augment=add_noise)
    here, there = Gradients(task), Gradients(task, device="cuda")
    assert is_same(here.start, there.start)
    found = there.compute(there.start, SEED)
    assert is_same(there.compute(there.start, SEED), found)
    torch.testing.assert_close(found, here.compute(here.start, SEED), rtol=1e-3, atol=1e-5)
    assert not torch.are_deterministic_algorithms_enabled()


# ---- Pieces laid in their places


class _Odd(nn.Module):
    """Tied, frozen, unused and sparse parameters, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 10, sparse=True)
        self.first, self.second, self.unused = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(torch.arange(len(x)) % 3)
        return self.first(self.second(x).relu() * self.frozen + rows).relu()


def test_pieces_are_what_autograd_returns_at_once() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0]).square().mean()

    gradients = Gradients(replace(SMALL, model=_Odd, loss=loss))
    found = gradients.compute(gradients.start, bytes(32))
    with gradients._prepare(gradients.start, bytes(32)):
        pieces = torch.autograd.grad(gradients._compute_loss(bytes(32)), gradients._trained, allow_unused=True)
    expected = [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for p, g in zip(gradients._trained, pieces, strict=True)
    ]
    flat = torch.cat([piece.reshape(-1) for piece in expected])
    assert torch.equal(found.view(torch.int32), flat.view(torch.int32))
    assert all(p.grad is None for p in gradients._trained)


def test_a_loss_that_uses_no_parameter_has_gradient_zero() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return torch.ones(3, requires_grad=True).sum()

    gradients = Gradients(replace(SMALL, loss=loss))
    assert torch.equal(gradients.compute(gradients.start, bytes(32)), torch.zeros(gradients.size))


def test_a_large_model_gives_its_memory_back_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Gradients(SMALL).compute(Gradients(SMALL).start, bytes(32))
    monkeypatch.setattr(module, "_LARGE", 1)
    gradients = Gradients(SMALL)
    for _ in range(2):
        assert torch.equal(gradients.compute(gradients.start, bytes(32)), expected)
