"""Every baseline is what its paper says, and breaks where it should."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.baselines.aggregators import (
    BASELINES,
    Baseline,
    geometric_median,
    get_baseline,
    krum,
    mean,
    median,
    multi_krum,
    server_clip,
    trimmed_mean,
)
from phalanx.core.errors import LocalError

Array = npt.NDArray[np.float64]

NAMES = ["mean", "allreduce", "median", "geometric_median", "krum", "multi_krum", "trimmed_mean", "server_clip"]
ROBUST = [name for name in NAMES if name not in ("mean", "allreduce")]
NAN, INF = math.nan, math.inf

quick = settings(deadline=None, derandomize=True, max_examples=60)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def draw(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d))).to(dtype)


def shapes() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """n, f, d and a seed such that all baselines are defined."""
    return st.integers(5, 14).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, (n - 3) // 2), st.integers(2, 9), st.integers(0, 10**6))
    )


# ---- References, as one would write them on a blackboard


def reference(name: str, rows: Array, f: int) -> Array:
    n = len(rows)
    result: Array
    if name in ("mean", "allreduce"):
        result = np.mean(rows, axis=0)
    elif name == "median":
        result = np.median(rows, axis=0)
    elif name == "trimmed_mean":
        result = np.array([np.mean(sorted(column)[f : n - f]) for column in rows.T])
    elif name == "krum":
        result = rows[np.argmin(krum_scores(rows, f))]
    elif name == "multi_krum":
        result = np.mean(rows[np.argsort(krum_scores(rows, f))[: n - f]], axis=0)
    elif name == "geometric_median":
        result = np.mean(rows, axis=0)
        for _ in range(20_000):
            weights = 1 / np.maximum(np.linalg.norm(rows - result, axis=1), 1e-12)
            result = weights @ rows / weights.sum()
    else:
        result = np.mean(rows, axis=0)
        for _ in range(5_000):
            offsets = rows - result
            norms = np.linalg.norm(offsets, axis=1, keepdims=True)
            result = result + np.mean(offsets * np.minimum(1, 1 / np.maximum(norms, 1e-300)), axis=0)
    return result


def krum_scores(rows: Array, f: int) -> list[float]:
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(float(np.sum((row - other) ** 2)) for j, other in enumerate(rows) if j != i)
        scores.append(sum(distances[: len(rows) - f - 2]))
    return scores


@pytest.mark.parametrize(("n", "f", "d"), [(5, 1, 3), (16, 7, 11), (16, 0, 4), (9, 3, 1000), (3, 0, 2), (11, 4, 1)])
def test_is_what_its_paper_says(name: str, n: int, f: int, d: int) -> None:
    rows = draw(n, d, seed=n)
    expected = reference(name, rows.numpy(), f)
    np.testing.assert_allclose(BASELINES[name](rows, f).numpy(), expected, rtol=1e-5, atol=3e-5)


@quick
@given(shapes())
def test_exact_ones_are_exact(shape: tuple[int, int, int, int]) -> None:
    n, f, d, seed = shape
    rows = draw(n, d, seed)
    for name in ("mean", "allreduce", "median", "krum", "multi_krum", "trimmed_mean"):
        np.testing.assert_allclose(BASELINES[name](rows, f), reference(name, rows.numpy(), f), rtol=1e-12, atol=1e-13)


@quick
@given(shapes())
def test_the_geometric_median_is_one(shape: tuple[int, int, int, int]) -> None:
    """Unit vectors towards the rows add up to nothing, or to no more than a row that it is at can hold."""
    n, f, d, seed = shape
    rows = draw(n, d, seed)
    offsets = rows - geometric_median(rows, f)
    distances = offsets.norm(dim=1)
    away = distances > 1e-5
    force = (offsets[away] / distances[away, None]).sum(0).norm()
    assert force <= n - int(away.sum()) + 1e-4


def test_median_of_an_even_number_is_between_the_middle_two() -> None:
    rows = torch.tensor([[0.0, 5.0], [1.0, 6.0], [3.0, 7.0], [100.0, 8.0]])
    assert median(rows, 1).tolist() == [2.0, 6.5]


def test_krum_returns_a_row_and_of_equals_the_first() -> None:
    rows = torch.tensor([[5.0], [1.0], [1.0], [0.0], [0.0], [9.0]])
    assert krum(rows, 1).tolist() == [1.0]
    assert krum(torch.tensor([[3.0], [2.0], [1.0]]), 0).tolist() in ([3.0], [2.0], [1.0])


def test_krum_without_its_guarantee() -> None:
    rows = draw(16, 5)
    assert any(torch.equal(krum(rows, 7), row) for row in rows)


def test_server_clip_takes_tau() -> None:
    rows = torch.tensor([[0.0], [0.0], [0.0], [100.0]])
    assert get_baseline("server_clip", tau=0.3)(rows, 1).item() == pytest.approx(0.1, rel=1e-5)
    assert partial(server_clip, tau=3.0)(rows, 1).item() == pytest.approx(1.0, rel=1e-5)
    assert server_clip(rows, 1, tau=1e9).item() == pytest.approx(25.0)


# ---- Invariances


@quick
@given(shapes())
def test_the_order_of_rows_does_not_matter(shape: tuple[int, int, int, int]) -> None:
    n, f, d, seed = shape
    rows = draw(n, d, seed)
    order = np.random.default_rng(seed + 1).permutation(n)
    for name, aggregate in BASELINES.items():
        torch.testing.assert_close(aggregate(rows[order], f), aggregate(rows, f), rtol=1e-5, atol=1e-5, msg=name)


@quick
@given(shapes(), st.floats(-100, 100))
def test_moves_with_the_rows(shape: tuple[int, int, int, int], by: float) -> None:
    n, f, d, seed = shape
    rows, shift = draw(n, d, seed), by * draw(1, d, seed + 1)[0]
    for name, aggregate in BASELINES.items():
        torch.testing.assert_close(
            aggregate(rows + shift, f), aggregate(rows, f) + shift, rtol=1e-5, atol=1e-5, msg=name
        )


@quick
@given(shapes(), st.sampled_from([-1.0, 1e-20, 0.25, 7.0, 1e20]))
def test_grows_with_the_rows(shape: tuple[int, int, int, int], factor: float) -> None:
    n, f, d, seed = shape
    rows = draw(n, d, seed)
    for name, aggregate in BASELINES.items():
        scaled = partial(server_clip, tau=abs(factor)) if name == "server_clip" else aggregate
        torch.testing.assert_close(
            scaled(rows * factor, f) / factor, aggregate(rows, f), rtol=1e-5, atol=1e-5, msg=name
        )


@quick
@given(shapes())
def test_stays_between_the_rows(shape: tuple[int, int, int, int]) -> None:
    n, f, d, seed = shape
    rows = draw(n, d, seed)
    low, high = rows.min(0).values - 1e-9, rows.max(0).values + 1e-9
    for aggregate in BASELINES.values():
        found = aggregate(rows, f)
        assert ((low <= found) & (found <= high)).all()


def test_rows_that_agree(name: str) -> None:
    row = draw(1, 6, dtype=torch.float32)
    torch.testing.assert_close(BASELINES[name](row.expand(7, 6), 2), row[0])


def test_a_majority_that_agrees_is_the_geometric_median() -> None:
    rows = draw(9, 4)
    rows[:5] = rows[0]
    assert torch.equal(geometric_median(rows, 4), rows[0])


@quick
@given(shapes(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_shorter_types_are_as_good_as_their_rounding(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    n, f, d, seed = shape
    rows = draw(n, d, seed, dtype)
    for name, aggregate in BASELINES.items():
        found = aggregate(rows, f)
        assert found.dtype == dtype
        error = 2 * torch.finfo(dtype).eps
        wide = aggregate(rows.double(), f)
        torch.testing.assert_close(found.double(), wide, rtol=error, atol=max(error, 1e-5), msg=name)


def test_nothing_is_written_to(name: str) -> None:
    rows = draw(7, 5)
    rows[2, 2] = NAN
    before = rows.clone()
    first = BASELINES[name](rows, 2)
    first.zero_()
    assert torch.equal(rows.nan_to_num(5.0), before.nan_to_num(5.0))


@pytest.mark.parametrize("columns", [1, 3, 16_384, 40_000])
def test_long_rows(name: str, columns: int) -> None:
    rows = draw(6, columns)
    if name in ("geometric_median", "server_clip"):
        assert BASELINES[name](rows, 1).shape == (columns,)
    else:
        np.testing.assert_allclose(BASELINES[name](rows, 1), reference(name, rows.numpy(), 1), rtol=1e-9, atol=1e-12)


# ---- Where they break


@pytest.mark.parametrize("size", [1e3, 1e10, 1e30, 3e38])
def test_one_liar_moves_the_mean_and_no_other(name: str, size: float) -> None:
    rows = draw(11, 6, dtype=torch.float32)
    honest = rows[1:].mean(0)
    rows[0] = size
    moved = float((BASELINES[name](rows, 1).double() - honest).norm())
    if name in ROBUST:
        assert moved < 3
    else:
        assert moved > size / 11


@pytest.mark.parametrize("name", ROBUST)
def test_seven_of_sixteen_liars_at_one_place_far_away(name: str) -> None:
    rows = draw(16, 6, dtype=torch.float32) * 0.1
    rows[:7] = 1e20
    moved = float(BASELINES[name](rows, 7).norm())
    # Krum prefers rows that agree to the last bit, and seven neighbours are one more than the liars have.
    assert moved < 10


def test_liars_who_are_the_majority_win() -> None:
    rows = torch.zeros(9, 3)
    rows[:5] = 1e6
    for name in ("median", "geometric_median", "krum"):
        assert BASELINES[name](rows, 3).tolist() == [1e6] * 3


# ---- Rows that are not finite


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_is_dropped(name: str, value: float) -> None:
    rows = draw(9, 5)
    broken = rows.clone()
    broken[3, 4] = value
    rest = rows[[0, 1, 2, 4, 5, 6, 7, 8]]
    torch.testing.assert_close(BASELINES[name](broken, 2), BASELINES[name](rest, 1))


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_more_broken_rows_than_liars(name: str, left: int) -> None:
    rows = draw(8, 5)
    rows[left:] = NAN
    found = BASELINES[name](rows, 1)
    assert torch.isfinite(found).all()
    if left == 0:
        assert found.tolist() == [0.0] * 5
    if left == 1:
        torch.testing.assert_close(found, rows[0])


def test_zeros_and_numbers_below_normal(name: str) -> None:
    assert BASELINES[name](torch.zeros(5, 3), 1).tolist() == [0.0] * 3
    assert torch.isfinite(BASELINES[name](draw(5, 3).float() * 1e-44, 1)).all()


# ---- What is refused


def test_the_names() -> None:
    assert list(BASELINES) == NAMES
    for name in NAMES:
        found: Baseline = get_baseline(name)
        assert found is BASELINES[name]


@pytest.mark.parametrize(
    ("rows", "got"),
    [
        (torch.zeros(3), "shape (3,) of torch.float32"),
        (torch.zeros(0, 3), "shape (0, 3) of torch.float32"),
        (torch.zeros(3, 0), "shape (3, 0) of torch.float32"),
        (torch.zeros(3, 3, dtype=torch.int64), "shape (3, 3) of torch.int64"),
        ([[1.0]], "list"),
    ],
)
def test_rows_of_another_kind_are_refused(name: str, rows: Tensor, got: str) -> None:
    with pytest.raises(LocalError) as caught:
        BASELINES[name](rows, 0)
    assert str(caught.value) == f"rows: expected floating point numbers of shape (n, d), none of it 0, got {got}"


@pytest.mark.parametrize("byzantine", [-1, 5, 1.0, True])
def test_impossible_numbers_of_liars_are_refused(name: str, byzantine: int) -> None:
    line = f"byzantine = {byzantine!r}; expected a whole number from 0 to 4, below the number of rows"
    with pytest.raises(LocalError) as caught:
        BASELINES[name](draw(5, 2), byzantine)
    assert str(caught.value) == line


def test_too_few_rows_are_refused() -> None:
    for aggregate in (krum, multi_krum):
        aggregate(draw(6, 2), 3)
        with pytest.raises(LocalError) as caught:
            aggregate(draw(5, 2), 3)
        assert str(caught.value) == (
            f"{aggregate.__name__}: 5 rows less 3 liars, the row and one more leave none; "
            "expected 6 rows or more, or fewer liars"
        )
    trimmed_mean(draw(7, 2), 3)
    with pytest.raises(LocalError) as caught:
        trimmed_mean(draw(6, 2), 3)
    assert str(caught.value) == (
        "trimmed_mean: 6 rows less 3 on each side leave none; expected 7 rows or more, or fewer liars"
    )


@pytest.mark.parametrize("tau", [0, -1.0, NAN, "1"])
def test_a_radius_is_positive(tau: float) -> None:
    with pytest.raises(LocalError) as caught:
        server_clip(draw(3, 2), 0, tau=tau)
    assert str(caught.value) == f"server_clip: tau = {tau!r}; expected a number above 0"


def test_other_names_are_refused() -> None:
    with pytest.raises(LocalError) as caught:
        get_baseline("bulyan")
    assert str(caught.value) == f"aggregator 'bulyan': expected one of {', '.join(NAMES)}"
    with pytest.raises(LocalError) as caught:
        get_baseline("mean", tau=1.0)
    assert str(caught.value) == "aggregator mean: tau = 1.0; expected none: only server_clip has one"


def test_krum_and_multi_krum_leave_a_far_liar_out() -> None:
    rows = draw(9, 4)
    rows[4] += 1e8
    assert float(krum(rows, 1).norm()) < 10
    assert float(multi_krum(rows, 1).norm()) < 10
    torch.testing.assert_close(multi_krum(rows, 1), mean(rows[[0, 1, 2, 3, 5, 6, 7, 8]], 0))
