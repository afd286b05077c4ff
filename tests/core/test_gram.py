"""The two passes over long rows: right in float64, honest about float32, the same for every type and layout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from phalanx.core.gram import Gram, combine, compute_gram, is_narrow

Array = npt.NDArray[np.float64]

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
EPSILON = {torch.float64: 1e-15, torch.float32: 2**-20, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# The fewest columns of a stack of 16 rows that is formed in float32 at first, and how many one float32 sum covers.
LONG, BLOCK = (1 << 21) // 16, 2048


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def exact_gram(stacks: Tensor, centre: Array | None = None) -> Array:
    """In float64, and in pieces that numpy sums one by one: what blocks cannot get wrong together."""
    grams = []
    for index, rows in enumerate(stacks.cpu().double().numpy()):
        about = rows if centre is None else rows - rows[int(centre[index])]
        grams.append(sum(piece @ piece.T for piece in np.array_split(about, max(about.shape[1] // 500, 1), axis=1)))
    return np.stack(grams)


def assert_exact(gram: Gram, expected: Array) -> None:
    """Entry by entry, relative to the sizes of the two rows."""
    sizes = np.sqrt(expected.diagonal(axis1=1, axis2=2))
    allowed = gram.relative_error * sizes[:, :, None] * sizes[:, None, :]
    assert (np.abs(gram.matrices - expected) <= allowed).all()


# --- Wide ---


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 16, 1), (3, 5, 17), (2, 16, 8193), (1, 40, 20_000), (1, 130, 3000)])
def test_a_wide_gram_matrix_is_exact(shape: tuple[int, ...], kind: torch.dtype, device: str) -> None:
    stacks = normal(*shape).to(device, kind)
    centred = compute_gram(stacks, np.zeros(shape[0], dtype=np.intp))
    for gram, centre in ((compute_gram(stacks), None), (centred, np.zeros(shape[0]))):
        if gram.wide:
            assert not gram.measured_error.any()
            assert_exact(gram, exact_gram(stacks, centre))
    assert centred.wide


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_short_rows_are_wide(kind: torch.dtype, device: str) -> None:
    assert compute_gram(normal(1, 16, LONG - 1).to(device, kind)).wide


def test_many_short_stacks_are_wide(device: str) -> None:
    assert compute_gram(normal(20, 16, LONG // 10).to(device)).wide


def test_long_rows_of_float64_are_wide(device: str) -> None:
    stacks = normal(1, 16, LONG).double().to(device)
    gram = compute_gram(stacks)
    assert gram.wide
    assert_exact(gram, exact_gram(stacks))


# --- Centres ---


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_each_stack_is_centred_on_its_own_row(kind: torch.dtype, device: str) -> None:
    stacks = (normal(3, 5, 3000) + 50).to(device, kind)
    centre = np.array([4, 0, 2])
    gram = compute_gram(stacks, centre)
    assert_exact(gram, exact_gram(stacks, centre))
    for stack, row in enumerate(centre):
        assert not gram.matrices[stack, row].any()
        assert not gram.matrices[stack, :, row].any()


@pytest.mark.parametrize("n", [16, 129])
def test_a_centre_removes_the_cancellation(n: int, device: str) -> None:
    """Rows a millionth apart, a thousand away from the origin: about the origin nothing of the distances is left."""
    stacks = (1000 + 1e-3 * normal(1, n, 2000).double()).to(device)
    centre = np.array([3])
    expected = exact_gram(stacks, centre)
    np.testing.assert_allclose(compute_gram(stacks, centre).matrices, expected, rtol=1e-9, atol=1e-12 * expected.max())


def test_long_rows_about_a_centre_are_wide(device: str) -> None:
    stacks = (normal(1, 16, LONG) + 50).to(device)
    centre = np.array([7])
    gram = compute_gram(stacks, centre)
    assert gram.wide
    assert_exact(gram, exact_gram(stacks, centre))


# --- Narrow, on the CPU alone ---


def constant(rows: Tensor) -> Tensor:
    return (torch.linspace(0.1, 1, 16)[:, None] * 1.1).expand_as(rows).contiguous()


def constant_block(start: int) -> Callable[[Tensor], Tensor]:
    """Small numbers, but for one block of columns whose sums are all rounded the same way."""

    def change(rows: Tensor) -> Tensor:
        rows = rows * 1e-3
        rows[:, start : start + BLOCK] = constant(rows)[:, :BLOCK]
        return rows

    return change


def louder_block(rows: Tensor) -> Tensor:
    """Constant, but for one block of larger numbers that average out: the largest block is not the wrong one."""
    rows = 1.4 * rows
    rows[:, BLOCK:] = constant(rows)[:, BLOCK:]
    return rows


def ramp(rows: Tensor) -> Tensor:
    return constant(rows) * torch.linspace(0.5, 1.5, rows.shape[1])


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "gaussian": lambda rows: rows,
    "offset": lambda rows: rows + 50,
    "constant": constant,
    "ramp": ramp,
    "positive": torch.abs,
    "growing": lambda rows: rows.abs() * torch.logspace(-3, 3, rows.shape[1]),
    "shrinking": lambda rows: rows.abs() * torch.logspace(3, -3, rows.shape[1]),
    "very different rows": lambda rows: rows * torch.logspace(-6, 6, 16)[:, None],
    "a constant first block": constant_block(0),
    "a constant block in between": constant_block(20 * BLOCK),
    "a constant last block": constant_block(LONG - BLOCK),
    "a louder block": louder_block,
}


def test_long_float32_rows_are_narrow() -> None:
    gram = compute_gram(normal(1, 16, LONG))
    assert not gram.wide
    assert gram.measured_error.any()


@pytest.mark.parametrize(("n", "d"), [(16, LONG), (16, LONG - 1), (1, 1 << 21), (200, 1 << 14), (200, (1 << 14) - 1)])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_which_shapes_are_narrow_is_known_beforehand(n: int, d: int, kind: torch.dtype) -> None:
    assert compute_gram(normal(1, n, d).to(kind)).wide is not is_narrow(n, d, kind)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_long_rows_of_other_types_are_wide(kind: torch.dtype) -> None:
    assert compute_gram(normal(1, 16, LONG).to(kind)).wide


@pytest.mark.parametrize("d", [LONG, LONG + 1, LONG + BLOCK - 1])
def test_a_narrow_gram_matrix_is_right_to_float32(d: int) -> None:
    stacks = normal(2, 16, d)
    gram = compute_gram(stacks)
    assert not gram.wide
    expected = exact_gram(stacks)
    np.testing.assert_allclose(gram.matrices, expected, rtol=0, atol=1e-6 * expected.max())


@pytest.mark.parametrize("kind", TYPES[:3], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_the_stated_error_covers_the_actual_one(change: str, kind: torch.dtype) -> None:
    """As it is used: on ``|sum_i x_i g_i|^2`` for differences of rows, of a row and the mean, and for random ``x``.

    Rounding may use up half of what is promised, so a stated error may be too small by a factor of two.
    """
    stacks = CHANGES[change](normal(16, LONG + 100)).clamp(-6e4, 6e4).to(kind)[None]
    gram = compute_gram(stacks)
    expected = exact_gram(stacks)[0]
    sizes = np.sqrt(expected.diagonal())
    rows = np.eye(16)
    combinations = [a - b for a in rows for b in rows] + [a - 1 / 16 for a in rows]
    combinations += list(np.random.default_rng(0).standard_normal((50, 16)))
    for x in combinations:
        actual = abs(float(x @ (gram.matrices[0] - expected) @ x))
        stated = (
            float(np.abs(x @ gram.measured_error[0] @ x).max()) + gram.relative_error * float(np.abs(x) @ sizes) ** 2
        )
        assert actual <= 2 * stated


@pytest.mark.parametrize("scale", [1e-25, 1e-30, 1e-38, 1e18, 1e25, 1e37])
def test_numbers_whose_squares_float32_cannot_hold_are_wide(scale: float) -> None:
    stacks = (normal(1, 16, LONG).clamp(-8, 8) * scale).float()
    gram = compute_gram(stacks)
    assert gram.wide
    assert_exact(gram, exact_gram(stacks))


@pytest.mark.parametrize("scale", [1e-25, 1e25, 0.0])
def test_one_row_whose_squares_float32_cannot_hold_makes_all_wide(scale: float) -> None:
    stacks = normal(2, 16, LONG)
    stacks[1, 9] *= scale
    gram = compute_gram(stacks)
    assert gram.wide
    assert_exact(gram, exact_gram(stacks))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("d", [10, LONG, LONG + 10])
def test_a_number_that_is_not_finite_shows_in_the_square_of_its_row(d: int, value: float, device: str) -> None:
    stacks = torch.ones(1, 16, d, device=device)
    stacks[0, 5, -1] = value
    finite = np.isfinite(compute_gram(stacks).matrices[0].diagonal())
    assert finite.tolist() == [row != 5 for row in range(16)]


# --- Weighted sums ---


@pytest.mark.parametrize(
    ("kind", "wide"), [(kind, True) for kind in TYPES] + [(kind, False) for kind in TYPES[:3]], ids=str
)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 17), (2, 16, 2 * BLOCK), (2, 16, 40 * BLOCK + 5), (1, 200, 5000)])
def test_a_weighted_sum_is_right_to_its_type(
    shape: tuple[int, ...], kind: torch.dtype, wide: bool, device: str
) -> None:
    stacks = normal(*shape).to(device, kind)
    weights = torch.softmax(normal(*shape[:2], seed=1).double(), dim=1).to(device)
    total = combine(stacks, weights, wide=wide)
    assert (total.shape, total.dtype) == ((shape[0], shape[2]), kind)
    exact = torch.einsum("bn,bnd->bd", weights, stacks.double())
    size = torch.einsum("bn,bnd->bd", weights, stacks.double().abs())
    assert ((total.double() - exact).abs() <= EPSILON[kind] * size).all()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_wide_sum_is_the_exact_one_rounded_once(kind: torch.dtype, device: str) -> None:
    """Weights that are powers of two and few digits: nothing is lost before the last rounding."""
    stacks = torch.randint(-512, 512, (2, 8, 5000), generator=torch.Generator().manual_seed(0)).to(kind).to(device)
    weights = torch.tensor([[2.0**-k for k in range(8)], [2.0 ** (k - 8) for k in range(8)]]).double().to(device)
    exact = torch.einsum("bn,bnd->bd", weights, stacks.double())
    assert torch.equal(combine(stacks, weights, wide=True), exact.to(kind))


def test_a_wide_sum_keeps_what_a_huge_row_would_drown_in_float32(device: str) -> None:
    stacks = torch.tensor([[[1.0], [1e30], [-1e30]]], device=device)
    weights = torch.tensor([[1.0, 1e-25, 1e-25]], dtype=torch.float64, device=device)
    assert combine(stacks, weights, wide=True).item() == 1.0


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kind", TYPES[:3], ids=str)
def test_a_row_of_all_the_weight_is_copied(kind: torch.dtype, wide: bool, device: str) -> None:
    stacks = normal(2, 16, 3 * BLOCK + 7).to(device, kind)
    weights = torch.zeros(2, 16, dtype=torch.float64, device=device)
    weights[0, 3] = weights[1, 15] = 1
    assert torch.equal(combine(stacks, weights, wide=wide), torch.stack([stacks[0, 3], stacks[1, 15]]))


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("kind", TYPES[:3], ids=str)
def test_neither_pass_modifies_the_rows(kind: torch.dtype, wide: bool, device: str) -> None:
    stacks = normal(1, 16, LONG + 100).to(device, kind)
    kept = stacks.clone()
    compute_gram(stacks)
    combine(stacks, torch.full((1, 16), 1 / 16, dtype=torch.float64, device=device), wide=wide)
    assert torch.equal(stacks, kept)
