"""CenteredClip: what is promised of it, each promise checked by arithmetic that shares nothing with the code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

import phalanx
from phalanx import Clipped, centered_clip
from phalanx.core import clipping
from phalanx.core.balance import solve_short

Array = npt.NDArray[np.float64]

INF = float("inf")
PROMISE = 1e-6
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# From the smallest radius the promise covers to infinity, as multiples of the median distance of two rows.
FACTORS = [1e-6, 1e-4, 1e-2, 0.3, 0.7, 1.0, 10.0, 1e9, INF]
# The smallest stack of 16 rows that is formed in float32 first, and one block of its columns.
LONG, BLOCK = (1 << 21) // 16, 2048
FIELDS = ("aggregate", "weights", "distances", "residual")

quick = settings(deadline=None, derandomize=True, max_examples=150)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# --- What the result is held against ---


def measure(parts: Tensor, tau: float, found: Tensor, weights: Tensor | None = None) -> tuple[float, Tensor]:
    """``|sum p_i clip(g_i - v)| / (tau sum p_i)`` and the distances, in float64 about the row ``v`` leans on most.

    ``v`` itself is never formed: next to a row that is a million times longer than ``tau`` it would lose the digits
    that matter. The columns are read in blocks, so rows of any length fit.
    """
    found = found.cpu()
    prior = torch.ones(len(parts), dtype=torch.float64) if weights is None else weights.cpu().double()
    nearest = int(found.argmax())

    def offsets() -> Iterator[Tensor]:
        for block in parts.split(max((1 << 20) // len(parts), 1), dim=1):
            about = block.cpu().double()
            about = about - about[nearest]
            yield about - found @ about

    distances = torch.stack([(y * y).sum(1) for y in offsets()]).sum(0).sqrt()
    if tau == INF:
        return 0.0, distances
    pulls = prior * torch.where(distances > tau, tau / distances.clamp(min=tau), 1.0)
    square = sum(float(((pulls @ y) ** 2).sum()) for y in offsets())
    return square**0.5 / (tau * float(prior.sum())), distances


def assert_balanced(parts: Tensor, tau: float, result: Clipped, weights: Tensor | None = None) -> None:
    """The promise, and that the residual the function reports is a bound on the true one."""
    residual, _ = measure(parts, tau, result.weights, weights)
    assert residual <= PROMISE
    total = float(len(parts) if weights is None else weights.sum())
    if tau < INF:
        assert residual <= float(result.residual) / (tau * total) + 1e-9
    assert torch.isfinite(result.aggregate).all()


def median_distance(parts: Tensor) -> float:
    """Of two different rows; one if there are none, or if most coincide."""
    rows = parts.cpu()
    pairs = [(i, j) for i in range(len(rows)) for j in range(i)]
    distances = [float((rows[i].double() - rows[j].double()).norm()) for i, j in pairs]
    return float(np.median(distances)) or 1.0 if distances else 1.0


def loss(rows: Array, tau: float, v: Array, weights: Array) -> float:
    distances = np.linalg.norm(rows - v, axis=1)
    inside = np.minimum(distances, tau)
    return float(weights @ (inside * (distances - 0.5 * inside)))


def solve_slowly(rows: Array, tau: float, weights: Array | None = None) -> tuple[Array, float]:
    """Minimise the Huber loss over all of space: damped Newton with a ``d x d`` Hessian, from several starts.

    Returns the best point and the smallest eigenvalue of the Hessian there, which says how well it is determined.
    """
    weights = np.ones(len(rows)) if weights is None else weights
    origin = rows[np.argmin([loss(rows, tau, row, weights) for row in rows])].copy()
    rows = rows - origin

    def derivatives(v: Array) -> tuple[Array, Array]:
        y = rows - v
        distances = np.linalg.norm(y, axis=1)
        outside = distances > tau
        pulls = weights * np.where(outside, tau / np.maximum(distances, tau), 1)
        unit = np.where(outside[:, None], y / np.maximum(distances, tau)[:, None], 0)
        return -pulls @ y, pulls.sum() * np.eye(len(v)) - (pulls[:, None] * unit).T @ unit

    best, best_slope = np.zeros_like(origin), INF
    for start in (np.zeros_like(origin), np.average(rows, axis=0, weights=weights), np.median(rows, axis=0)):
        v = start
        for _ in range(300):
            gradient, hessian = derivatives(v)
            slope = float(np.linalg.norm(gradient))
            if slope < best_slope:
                best, best_slope = v, slope
            if slope <= 1e-13 * tau * weights.sum():
                break
            damping = 1e-10 * weights.sum() * min(1, tau / float(np.linalg.norm(rows, axis=1).max() + tau))
            step = -np.linalg.solve(hessian + damping * np.eye(len(v)), gradient)
            here, length = loss(rows, tau, v, weights), 1.0
            while length > 1e-12:
                there = v + length * step
                if loss(rows, tau, there, weights) <= here + 1e-4 * length * float(gradient @ step):
                    break
                if np.linalg.norm(derivatives(there)[0]) < 0.5 * slope:  # the loss has run out of digits
                    break
                length *= 0.5
            v = v + length * step
    return origin + best, float(np.linalg.eigvalsh(derivatives(best)[1])[0])


def assert_identical(a: Clipped, b: Clipped) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(a, field), getattr(b, field)), field


# --- Inputs ---

KINDS = ("gaussian", "attacked", "coinciding", "clustered", "scaled", "far from the origin")


def make_rows(kind: str, n: int, d: int, seed: int) -> Array:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((n, d))
    if kind == "attacked":
        rows += rng.standard_normal(d)
        rows[: (n - 1) // 2] *= -1000
    elif kind == "coinciding":
        rows[: n // 2] = rows[0]
    elif kind == "clustered":
        rows *= 1e-3
        rows[n // 2 :] += 1
    elif kind == "scaled":
        rows *= 10.0 ** rng.uniform(-3, 3, (n, 1))
    elif kind == "far from the origin":
        rows += 50 * rng.standard_normal(d)
    return rows


@st.composite
def stacks(draw: st.DrawFn, min_rows: int = 1, min_columns: int = 1, kinds: tuple[str, ...] = KINDS) -> Array:
    n, d = draw(st.integers(min_rows, 12)), draw(st.integers(min_columns, 6))
    return make_rows(draw(st.sampled_from(kinds)), n, d, draw(st.integers(0, 2**32 - 1)))


# Three rows or more of two columns or more, at random: not on a line, hence one balance point only.
general = stacks(min_rows=3, min_columns=2)
finite_factors = st.floats(-6, 3).map(lambda exponent: 10.0**exponent)


def make_attacked(d: int, kind: torch.dtype, seed: int = 0) -> Tensor:
    """Sixteen rows about a common vector; the first seven are a thousand times larger and opposite."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.empty(16, d).normal_(0, 0.01, generator=generator)
    rows += torch.empty(d).normal_(0, 0.01, generator=generator)
    rows[:7] *= -1000
    return rows.to(kind)


def make_long(kind: str, seed: int = 0) -> Tensor:
    """Sixteen rows long enough to be formed in float32 first, of a sort that float32 gets wrong if it is let to."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.empty(16, LONG + 100).normal_(generator=generator)
    levels = torch.rand(16, 1, generator=generator)
    if kind == "constant":  # every product of a sum is rounded the same way
        rows = levels.expand_as(rows).contiguous()
    elif kind == "almost equal constants":
        rows = (1 + 1e-3 * levels).expand_as(rows).contiguous()
    elif kind == "offset by 50 sigma":
        rows += 50
    elif kind == "around 1e-25":  # squares underflow
        rows *= 1e-25
    elif kind == "around 1e25":  # squares overflow
        rows *= 1e25
    elif kind == "of very different sizes":
        rows *= 10.0 ** torch.linspace(-12, 12, 16)[:, None]
    elif kind == "sparse":
        rows *= torch.rand(rows.shape, generator=generator) < 1e-4
    elif kind == "with one in a single column":
        rows = torch.zeros_like(rows)
        rows[torch.arange(16), torch.arange(16) * 1000] = 1
    elif kind == "with a zero row":
        rows[5] = 0
    elif kind == "half coinciding":
        rows[:8] = rows[0]
    elif kind == "next to each other":
        rows = rows[0] + 1e-4 * rows
    elif kind == "with a constant first block":  # all weight in few columns
        rows *= 1e-3
        rows[:, :BLOCK] = levels + 0.5
    elif kind == "zero but for a constant block":
        rows = torch.zeros_like(rows)
        rows[:, 20 * BLOCK : 21 * BLOCK] = levels + 0.5
    elif kind == "constant but for one louder block":  # the block that stands out is not the one that is wrong
        rows *= 1.4
        rows[:, 2 * BLOCK :] = levels + 0.5
        rows[:, :BLOCK] *= 1e-3
    return rows


LONG_KINDS = (
    "gaussian", "constant", "almost equal constants", "offset by 50 sigma", "around 1e-25", "around 1e25",
    "of very different sizes", "sparse", "with one in a single column", "with a zero row", "half coinciding",
    "next to each other", "with a constant first block", "zero but for a constant block",
    "constant but for one louder block",
)  # fmt: skip


# --- The balance, for every radius ---


@settings(quick, max_examples=400)
@given(rows=stacks(), factor=finite_factors)
def test_rows_are_in_balance_for_every_radius(rows: Array, factor: float) -> None:
    parts = torch.from_numpy(rows).float()
    tau = factor * median_distance(parts)
    assert_balanced(parts, tau, centered_clip(parts, tau))


@settings(quick, max_examples=400)
@given(
    rows=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 7), st.integers(1, 4)),
        elements=st.floats(-1000, 1000, width=32) | st.sampled_from([0.0, 1.0, -1.0]),
    ),
    factor=finite_factors,
)
def test_rows_are_in_balance_whatever_they_hold(rows: npt.NDArray[np.float32], factor: float) -> None:
    parts = torch.from_numpy(rows)
    tau = factor * median_distance(parts)
    assert_balanced(parts, tau, centered_clip(parts, tau))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("d", [1, 2, 1000, LONG, 300_000])
def test_seven_of_sixteen_rows_a_thousand_times_larger_and_opposite(
    d: int, kind: torch.dtype, factor: float, device: str
) -> None:
    parts = make_attacked(d, kind).to(device)
    tau = factor * median_distance(parts[7:])
    assert_balanced(parts, tau, centered_clip(parts, tau))


@pytest.mark.parametrize("factor", [1e-6, 0.3, 0.7, 1.0, 1.7, 1e3])
@pytest.mark.parametrize("kind", LONG_KINDS)
def test_long_rows_that_float32_arithmetic_gets_wrong(kind: str, factor: float, device: str) -> None:
    parts = make_long(kind).to(device)
    tau = factor * median_distance(parts)
    assert_balanced(parts, tau, centered_clip(parts, tau))


@pytest.mark.parametrize("seed", range(8))
def test_long_constant_rows_of_similar_size(seed: int, device: str) -> None:
    """On a line, where rounding leaves cosines of more than one: the solver cuts them, which adds to the error."""
    levels = 1 + 0.1 * torch.empty(16, 1).normal_(generator=torch.Generator().manual_seed(seed))
    parts = levels.expand(16, LONG).contiguous().to(device)
    for tau in (float((parts[-1] - parts[-2]).norm()), 1.3 * median_distance(parts)):
        assert_balanced(parts, tau, centered_clip(parts, tau))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", ["gaussian", "constant", "offset by 50 sigma", "sparse", "with a zero row"])
def test_long_rows_of_two_byte_numbers(rows: str, kind: torch.dtype, device: str) -> None:
    parts = make_long(rows).to(device, kind)
    for factor in (1e-3, 0.5):
        tau = factor * median_distance(parts)
        assert_balanced(parts, tau, centered_clip(parts, tau))


@pytest.mark.parametrize(("n", "d"), [(3, 10), (3, 100_000), (5, 999_999), (3, 10_000_000)])
def test_rows_of_any_length(n: int, d: int, device: str) -> None:
    parts = torch.empty(n, d).normal_(generator=torch.Generator().manual_seed(d)).to(device)
    tau = 0.3 * median_distance(parts)
    assert_balanced(parts, tau, centered_clip(parts, tau))


def test_rows_of_a_hundred_million_numbers(device: str) -> None:
    tile = torch.empty(3, 100_000).normal_(generator=torch.Generator().manual_seed(0)).half()
    parts = tile.repeat(1, 1000).to(device)
    tau = 0.3 * 1000**0.5 * median_distance(tile)
    assert_balanced(parts, tau, centered_clip(parts, tau))


@pytest.mark.parametrize("n", [2, 3, 16])
@pytest.mark.parametrize("d", [1, 3000, LONG])
@pytest.mark.parametrize("tau", [1e-12, 1e-6, 1.0, INF])
def test_rows_that_all_coincide_give_that_row(n: int, d: int, tau: float, device: str) -> None:
    row = torch.empty(d).normal_(generator=torch.Generator().manual_seed(n)).to(device)
    result = centered_clip(row.repeat(n, 1), tau)
    torch.testing.assert_close(result.aggregate, row, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_majority_that_coincides_holds_the_aggregate_within_reach(factor: float, device: str) -> None:
    """Nine rows at one point and seven elsewhere: past ``7/9 tau`` from the point, the nine would pull harder."""
    parts = make_attacked(1000, torch.float32)
    parts[7:] = parts[7]
    parts = parts.to(device)
    tau = factor * float((parts[0] - parts[7]).norm())
    result = centered_clip(parts, tau)
    assert_balanced(parts, tau, result)
    assert float(result.distances[7:].max()) <= (7 / 9 + 1e-5) * tau


@pytest.mark.parametrize("tau", [1e-30, 1.0, 1e30, INF])
@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 5, 1 << 21])
def test_one_row_is_its_own_aggregate(d: int, kind: torch.dtype, tau: float, device: str) -> None:
    parts = torch.empty(1, d).normal_(generator=torch.Generator().manual_seed(0)).to(device, kind)
    result = centered_clip(parts, tau)
    assert torch.equal(result.aggregate, parts[0])
    assert float(result.residual) == 0


@quick
@given(rows=stacks(), factor=finite_factors, seed=st.integers(0, 2**32 - 1))
def test_weighted_rows_are_in_balance(rows: Array, factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = 10.0 ** rng.uniform(-3, 3, len(rows))
    weights[1:] *= rng.random(len(rows) - 1) < 0.7
    parts = torch.from_numpy(rows).float()
    tau = factor * median_distance(parts)
    result = centered_clip(parts, tau, torch.from_numpy(weights))
    assert_balanced(parts, tau, result, torch.from_numpy(weights))


# --- Few short rows, which take a shorter way ---


def clip_the_long_way(parts: Tensor, tau: float) -> Clipped:
    return clipping._get_only(clipping._clip_stacks(parts[None], tau, np.ones((1, len(parts))), 0))


@settings(quick, max_examples=300)
@given(rows=general, factor=finite_factors)
def test_the_short_way_leads_to_the_same_point(rows: Array, factor: float) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    _, curvature = solve_slowly(rows, tau)
    short, long = centered_clip(torch.from_numpy(rows), tau), clip_the_long_way(torch.from_numpy(rows), tau)
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-8 * np.abs(rows).max()
    assert float((short.aggregate - long.aggregate).norm()) <= allowed
    np.testing.assert_allclose(short.distances, long.distances, rtol=0, atol=allowed)


@pytest.mark.parametrize(("n", "d"), [(7, 36), (16, 16), (32, 8), (64, 512)])
@pytest.mark.parametrize("kind", ["gaussian", "attacked", "coinciding", "scaled"])
def test_ordinary_rows_never_need_the_long_way(kind: str, n: int, d: int) -> None:
    for seed in range(5):
        rows = make_rows(kind, n, d, seed)
        for factor in (0.3, 0.7, 1.0, 3.0):
            tau = factor * float(torch.pdist(torch.from_numpy(rows[(n - 1) // 2 :])).median())
            assert solve_short(rows, tau, np.ones(n)) is not None


@pytest.mark.parametrize(
    ("rows", "tau"),
    [
        ([[0.0], [1.0]], 0.1),  # every point between them is in balance
        ([[0.0, 0.0], [3.0, 4.0]], 0.1),
        ([[1.0], [2.0], [1e30]], 1.0),  # beyond the digits of a float64
        ([[1.0], [2.0], [1e200]], 1e200),
        ([[1.0], [INF], [2.0]], 1.0),
        ([[1.0], [float("nan")], [2.0]], INF),
        ([[1.0], [1e154], [-1e154]], 1e300),  # the sum of two squares overflows
    ],
)
def test_the_short_way_is_not_taken_where_it_may_mislead(rows: list[list[float]], tau: float) -> None:
    assert solve_short(np.array(rows), min(tau, 1e300), np.ones(len(rows))) is None


@pytest.mark.parametrize(("n", "d"), [(64, 512), (64, 513), (65, 10), (1, 1 << 15), (1, 1 + (1 << 15))])
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_rows_are_in_balance_on_either_side_of_the_limit(n: int, d: int, kind: torch.dtype) -> None:
    parts = torch.from_numpy(make_rows("attacked", n, d, 0)).to(kind)
    for factor in (0.1, 1.0):
        tau = factor * median_distance(parts[-3:])
        assert_balanced(parts, tau, centered_clip(parts, tau))


# --- Agreement with a slow solver, and the two limits ---


@settings(quick, max_examples=100)
@given(rows=stacks(), factor=finite_factors)
def test_a_slow_solver_finds_no_smaller_loss(rows: Array, factor: float) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    best, _ = solve_slowly(rows, tau)
    result = centered_clip(torch.from_numpy(rows), tau)
    ones = np.ones(len(rows))
    found = result.weights.numpy() @ rows
    # Moving by |v - best| against a slope of at most the residual; the rest is rounding of the losses themselves.
    slack = PROMISE * tau * len(rows) * float(np.linalg.norm(found - best))
    least = loss(rows, tau, best, ones)
    assert loss(rows, tau, found, ones) <= least * (1 + 1e-9) + slack + 1e-14 * tau * np.abs(rows).sum()


@settings(quick, max_examples=100)
@given(rows=general, factor=finite_factors)
def test_a_slow_solver_finds_the_same_point(rows: Array, factor: float) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    best, curvature = solve_slowly(rows, tau)
    found = centered_clip(torch.from_numpy(rows), tau).weights.numpy() @ rows
    allowed = 2 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-9 * np.abs(rows).max()
    assert np.linalg.norm(found - best) <= allowed


@settings(quick, max_examples=50)
@given(rows=general, factor=finite_factors, seed=st.integers(0, 2**32 - 1))
def test_a_slow_solver_finds_the_same_weighted_point(rows: Array, factor: float, seed: int) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    weights = np.random.default_rng(seed).uniform(0.1, 10, len(rows))
    best, curvature = solve_slowly(rows, tau, weights)
    found = centered_clip(torch.from_numpy(rows), tau, torch.from_numpy(weights)).weights.numpy() @ rows
    allowed = 2 * PROMISE * min(tau, 1e3) * weights.sum() / curvature + 1e-9 * np.abs(rows).max()
    assert np.linalg.norm(found - best) <= allowed


@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 1000, LONG])
def test_an_infinite_radius_gives_the_mean(d: int, kind: torch.dtype, device: str) -> None:
    parts = make_attacked(d, kind).to(device)
    mean = parts.double().mean(0)
    error = (centered_clip(parts, INF).aggregate.double() - mean).abs()
    assert (error <= EPSILON[kind] * parts.double().abs().mean(0)).all()


@quick
@given(rows=stacks(), margin=st.floats(1e-3, 1e12))
def test_a_radius_that_reaches_every_row_gives_the_mean(rows: Array, margin: float) -> None:
    mean = rows.mean(0)
    tau = (1 + margin) * float(np.linalg.norm(rows - mean, axis=1).max()) or 1.0
    result = centered_clip(torch.from_numpy(rows), tau)
    np.testing.assert_allclose(result.aggregate.numpy(), mean, rtol=0, atol=1e-5 * np.abs(rows - mean).max() + 1e-12)


@quick
@given(rows=stacks(), factor=st.floats(1e-6, 1e-2))
def test_a_small_radius_gives_the_geometric_median(rows: Array, factor: float) -> None:
    """``tau G - n tau^2 / 2 <= L <= tau G`` with ``G`` the sum of distances: it is least but for ``n tau / 2``."""
    tau = factor * median_distance(torch.from_numpy(rows))
    median = np.median(rows, axis=0)
    for _ in range(500):  # Weiszfeld's iteration
        pulls = 1 / np.maximum(np.linalg.norm(rows - median, axis=1), 1e-12)
        median = pulls @ rows / pulls.sum()
    found = centered_clip(torch.from_numpy(rows), tau).weights.numpy() @ rows
    sums = [float(np.linalg.norm(rows - v, axis=1).sum()) for v in (found, median)]
    assert sums[0] <= sums[1] * (1 + 1e-6) + 0.5 * len(rows) * tau


# --- What no minority can do ---


@settings(quick, max_examples=300)
@given(data=st.data())
def test_no_minority_moves_the_aggregate_beyond_what_honest_rows_allow(data: st.DataObject) -> None:
    """``|v - c| <= max(r / sqrt(1 - s^2), r + s tau)`` for ``b < h`` attackers, any ``c``, ``r = max |g_i - c|`` over
    the ``h`` honest rows, and ``s = b / h``.

    Let ``R = |v - c| > r`` and ``u = (c - v) / R``. Attackers pull with ``b tau`` at most, so the pulls of the honest
    rows along ``u`` sum to ``b tau`` at most, and one of them is at most ``s tau``. Is that row clipped, it pulls along
    ``u`` with ``tau`` times the cosine of the angle at ``v`` between it and ``c``; seen from ``v``, the ball of radius
    ``r`` about ``c`` spans an angle of sine ``r / R``, so ``sqrt(1 - r^2/R^2) <= s``. Is it not clipped, it pulls with
    ``<g_i - v, u> >= R - r``, so ``R - r <= s tau``. What is left of the residual adds ``1e-6 n`` to ``b``.
    """
    honest = data.draw(stacks(min_rows=2, kinds=("gaussian", "coinciding", "clustered", "scaled")), label="honest")
    h, d = honest.shape
    b = data.draw(st.integers(1, h - 1), label="attackers")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    size = 10.0 ** data.draw(st.floats(-6, 30), label="size")
    attack = data.draw(st.sampled_from(["opposite", "together", "apart", "copies", "one huge"]), label="attack")
    evil = {
        "opposite": -size * honest[:b],
        "together": np.tile(size * rng.standard_normal(d), (b, 1)),
        "apart": size * rng.standard_normal((b, d)),
        "copies": np.tile(honest[0] + size * 1e-6, (b, 1)),
        "one huge": np.concatenate([honest[: b - 1], size * rng.standard_normal((1, d))]),
    }[attack]
    rows = rng.permutation(np.concatenate([honest, evil]).astype(np.float32).astype(np.float64))
    honest = honest.astype(np.float32).astype(np.float64)
    tau = data.draw(finite_factors, label="factor") * median_distance(torch.from_numpy(honest))

    found = centered_clip(torch.from_numpy(rows).float(), tau).weights.numpy() @ rows

    centre = honest.mean(0)
    r = float(np.linalg.norm(honest - centre, axis=1).max())
    share = (b + PROMISE * len(rows)) / h
    bound = max(r / (1 - share**2) ** 0.5, r + share * tau)
    assert np.linalg.norm(found - centre) <= bound * (1 + 1e-6) + 1e-6 * np.abs(honest).max()


SIZES = [1e3, 1e9, 1e15, 1e18, 1e21, 1e30, 1e37]
SHARES = [(2, 1, 1), (3, 2, 1), (5, 4, 2), (8, 7, 2), (5, 4, 5), (9, 7, 100)]  # honest rows, attackers, columns


def make_outliers(honest: int, attackers: int, d: int, size: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Stacks of honest rows, and the same followed by attackers that reach ``size``, apart or together."""
    for seed in range(20):
        rows = torch.from_numpy(make_rows("gaussian", honest + attackers, d, seed)).float()
        rows[honest:] *= size / float(rows.abs().max())
        if seed % 2:
            rows[honest:] = rows[-1].clone()
        yield rows[:honest], rows


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("honest", "attackers", "d"), SHARES)
def test_attackers_of_any_size_are_held_in_bounds(
    honest: int, attackers: int, d: int, size: float, device: str
) -> None:
    share = (attackers + PROMISE * (honest + attackers)) / honest
    for good, rows in make_outliers(honest, attackers, d, size):
        centre = good.double().mean(0)
        r = float((good - centre).norm(dim=1).max())
        for tau in (0.01, 1.0):
            moved = float((centered_clip(rows.to(device), tau).aggregate.cpu() - centre).norm())
            assert moved <= 1.001 * max(r / (1 - share**2) ** 0.5, r + share * tau)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("honest", "attackers", "d"), SHARES)
def test_attackers_of_any_size_leave_the_promise_unbroken(
    honest: int, attackers: int, d: int, size: float, device: str
) -> None:
    for _, rows in make_outliers(honest, attackers, d, size):
        for tau in (0.01, 1.0):
            assert_balanced(rows, tau, centered_clip(rows.to(device), tau))


def test_attackers_a_thousand_times_larger_move_the_aggregate_less_than_the_mean_by_far(device: str) -> None:
    parts = make_attacked(1000, torch.float32).to(device)
    honest = parts[7:].mean(0)
    moved = float((centered_clip(parts, 0.1).aggregate - honest).norm())
    assert moved < 1e-2 * float((parts.mean(0) - honest).norm())


def test_an_outlier_weighs_next_to_nothing(device: str) -> None:
    parts = make_attacked(1000, torch.float32).to(device)
    result = centered_clip(parts, 0.1)
    assert float(result.weights[:7].max()) < 1e-2 * float(result.weights[7:].min())


# --- What must not matter ---


@quick
@given(rows=general, factor=finite_factors, seed=st.integers(0, 2**32 - 1))
def test_the_order_of_rows_does_not_matter(rows: Array, factor: float, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(rows))
    tau = factor * median_distance(torch.from_numpy(rows))
    _, curvature = solve_slowly(rows, tau)
    found = centered_clip(torch.from_numpy(rows), tau)
    again = centered_clip(torch.from_numpy(rows[order]), tau)
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-9 * np.abs(rows).max()
    assert np.linalg.norm(found.aggregate - again.aggregate) <= allowed
    np.testing.assert_allclose(found.distances[order], again.distances, rtol=0, atol=allowed)


@pytest.mark.parametrize(
    "rows", [[[0.0], [1.0]], [[0.0, 0.0], [3.0, 4.0]], [[0.0], [1.0], [5.0], [6.0]], [[0.0], [0.0], [1.0], [1.0]]]
)
def test_the_order_of_rows_does_not_matter_where_many_points_are_in_balance(rows: list[list[float]]) -> None:
    """On a line, any point with as many rows ahead as behind, none within ``tau``, balances: which one is a choice."""
    there, back = centered_clip(torch.tensor(rows), 0.1), centered_clip(torch.tensor(rows[::-1]), 0.1)
    torch.testing.assert_close(there.aggregate, back.aggregate, rtol=0, atol=1e-5)


def test_a_mirror_image_where_many_points_are_in_balance() -> None:
    rows = torch.tensor([[0.0], [1.0]])
    there, back = centered_clip(rows, 0.1), centered_clip(1 - rows, 0.1)
    torch.testing.assert_close(there.aggregate, 1 - back.aggregate, rtol=0, atol=1e-5)


@quick
@given(rows=general, factor=finite_factors, seed=st.integers(0, 2**32 - 1), length=st.floats(0, 100))
def test_translation_moves_the_aggregate_along(rows: Array, factor: float, seed: int, length: float) -> None:
    shift = length * np.random.default_rng(seed).standard_normal(rows.shape[1])
    tau = factor * median_distance(torch.from_numpy(rows))
    _, curvature = solve_slowly(rows, tau)
    found = centered_clip(torch.from_numpy(rows), tau).aggregate.numpy()
    moved = centered_clip(torch.from_numpy(rows + shift), tau).aggregate.numpy()
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-8 * (np.abs(rows).max() + length)
    assert np.linalg.norm(found + shift - moved) <= allowed


@quick
@given(rows=general, factor=finite_factors, seed=st.integers(0, 2**32 - 1))
def test_rotation_turns_the_aggregate_along(rows: Array, factor: float, seed: int) -> None:
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((rows.shape[1], rows.shape[1])))[0]
    tau = factor * median_distance(torch.from_numpy(rows))
    _, curvature = solve_slowly(rows, tau)
    found = centered_clip(torch.from_numpy(rows), tau).aggregate.numpy()
    turned = centered_clip(torch.from_numpy(rows @ turn), tau).aggregate.numpy()
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-8 * np.abs(rows).max()
    assert np.linalg.norm(found @ turn - turned) <= allowed


@quick
@given(rows=general, factor=finite_factors, exponent=st.integers(-20, 20))
def test_scaling_rows_and_radius_scales_the_aggregate(rows: Array, factor: float, exponent: int) -> None:
    tau, scale = factor * median_distance(torch.from_numpy(rows)), 2.0**exponent
    _, curvature = solve_slowly(rows, tau)
    found = centered_clip(torch.from_numpy(rows), tau).aggregate.numpy()
    scaled = centered_clip(torch.from_numpy(rows * scale), tau * scale).aggregate.numpy()
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-8 * np.abs(rows).max()
    assert np.linalg.norm(found - scaled / scale) <= allowed


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("d", [1000, LONG])
def test_columns_exchanged_and_negated_are_exchanged_and_negated_in_the_aggregate(
    d: int, kind: torch.dtype, device: str
) -> None:
    """A rotation that no input type rounds."""
    parts = make_attacked(d, kind).to(device)
    columns = torch.randperm(d, generator=torch.Generator().manual_seed(1)).to(device)
    signs = torch.where(columns % 3 == 0, -1, 1).to(kind)
    there = centered_clip(parts, 0.1).aggregate
    back = centered_clip(parts[:, columns] * signs, 0.1).aggregate * signs
    gap = (there[columns].double() - back.double()).norm()
    assert gap <= 2 * EPSILON[kind] * there.double().norm()


# --- Row weights ---


@quick
@given(rows=general, factor=finite_factors)
def test_weight_two_equals_the_row_listed_twice(rows: Array, factor: float) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    twice = np.concatenate([rows, rows[:1]])
    _, curvature = solve_slowly(twice, tau)
    weights = torch.ones(len(rows), dtype=torch.float64)
    weights[0] = 2
    found = centered_clip(torch.from_numpy(rows), tau, weights).aggregate.numpy()
    listed = centered_clip(torch.from_numpy(twice), tau).aggregate.numpy()
    allowed = 4 * PROMISE * min(tau, 1e3) * len(twice) / curvature + 1e-8 * np.abs(rows).max()
    assert np.linalg.norm(found - listed) <= allowed


@quick
@given(rows=general, factor=finite_factors, size=st.floats(0, 1e20))
def test_rows_of_weight_zero_are_ignored(rows: Array, factor: float, size: float) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    _, curvature = solve_slowly(rows, tau)
    ignored = np.full((2, rows.shape[1]), size)
    ignored[1] *= -1
    weights = torch.tensor([0.0] + [1.0] * len(rows) + [0.0])
    found = centered_clip(torch.from_numpy(np.concatenate([ignored[:1], rows, ignored[1:]])), tau, weights)
    alone = centered_clip(torch.from_numpy(rows), tau)
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-8 * np.abs(rows).max()
    assert np.linalg.norm(found.aggregate - alone.aggregate) <= allowed
    assert found.weights[0] == found.weights[-1] == 0


def test_a_row_of_weight_zero_in_the_middle_of_all_others_has_none() -> None:
    for seed in range(50):
        rows = make_rows("gaussian", 8, 3, seed)
        rows[0] *= 0.01
        weights = np.random.default_rng(seed).uniform(0.1, 1, 8)
        weights[0] = 0
        result = centered_clip(torch.from_numpy(rows).float(), 0.5, torch.from_numpy(weights))
        assert result.weights[0] == 0


@quick
@given(rows=general, factor=finite_factors, scale=st.floats(1e-6, 1e6))
def test_only_the_ratio_of_weights_matters(rows: Array, factor: float, scale: float) -> None:
    tau = factor * median_distance(torch.from_numpy(rows))
    _, curvature = solve_slowly(rows, tau)
    plain = centered_clip(torch.from_numpy(rows), tau).aggregate.numpy()
    scaled = centered_clip(torch.from_numpy(rows), tau, torch.full((len(rows),), scale)).aggregate.numpy()
    allowed = 4 * PROMISE * min(tau, 1e3) * len(rows) / curvature + 1e-8 * np.abs(rows).max()
    assert np.linalg.norm(plain - scaled) <= allowed


def test_weights_of_one_equal_no_weights(device: str) -> None:
    parts = make_attacked(100, torch.float32).to(device)
    assert_identical(centered_clip(parts, 0.1), centered_clip(parts, 0.1, torch.ones(16)))


def test_one_row_of_weights_serves_a_whole_batch(device: str) -> None:
    parts = torch.stack([make_attacked(100, torch.float32, seed) for seed in range(3)]).to(device)
    weights = torch.arange(1.0, 17.0, device=device)
    assert_identical(centered_clip(parts, 0.1, weights), centered_clip(parts, 0.1, weights.expand(3, 16)))


# --- The fields of the result ---


@settings(quick, max_examples=300)
@given(rows=stacks(), factor=finite_factors, seed=st.integers(0, 2**32 - 1))
def test_weights_are_not_negative_and_sum_to_one(rows: Array, factor: float, seed: int) -> None:
    weights = np.random.default_rng(seed).uniform(0, 1, len(rows))
    weights[1:] *= weights[1:] > 0.3
    tau = factor * median_distance(torch.from_numpy(rows))
    for prior in (None, torch.from_numpy(weights)):
        found = centered_clip(torch.from_numpy(rows).float(), tau, prior).weights
        assert float(found.min()) >= 0
        assert abs(float(found.sum()) - 1) <= 1e-14


@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 1000, LONG + 1])
def test_the_aggregate_is_the_weighted_sum_of_the_rows_rounded(d: int, kind: torch.dtype, device: str) -> None:
    parts = make_attacked(d, kind).to(device)
    for tau in (1e-3, 0.1, 10.0):
        result = centered_clip(parts, tau)
        exact = result.weights @ parts.double()
        error = (result.aggregate.double() - exact).abs()
        # Half a unit in the last place of the result; float32 sums of long rows also round along the way.
        assert (error <= EPSILON[kind] * (result.weights @ parts.double().abs()) + 1e-7 * (kind == torch.float16)).all()


@quick
@given(rows=stacks(kinds=("gaussian", "attacked", "clustered")), factor=finite_factors)
def test_distances_are_those_to_the_aggregate(rows: Array, factor: float) -> None:
    parts = torch.from_numpy(rows)
    tau = factor * median_distance(parts)
    result = centered_clip(parts, tau)
    _, distances = measure(parts, tau, result.weights)
    torch.testing.assert_close(result.distances, distances, rtol=1e-6, atol=2e-6 * float(np.abs(rows).max()))


@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("batch", [(), (1,), (3,)])
def test_the_result_has_the_shape_type_and_device_of_the_input(
    batch: tuple[int, ...], kind: torch.dtype, device: str
) -> None:
    parts = torch.ones((*batch, 4, 5), dtype=kind, device=device)
    result = centered_clip(parts, 1.0)
    assert (result.aggregate.shape, result.aggregate.dtype) == ((*batch, 5), kind)
    assert (result.weights.shape, result.weights.dtype) == ((*batch, 4), torch.float64)
    assert (result.distances.shape, result.distances.dtype) == ((*batch, 4), torch.float64)
    assert (result.residual.shape, result.residual.dtype) == (batch, torch.float64)
    assert result.aggregate.device == result.weights.device == result.distances.device == parts.device


def test_the_radius_may_be_an_integer_or_a_tensor_of_one_number(device: str) -> None:
    parts = make_attacked(50, torch.float32).to(device)
    expected = centered_clip(parts, 2.0)
    assert_identical(expected, centered_clip(parts, 2))
    assert_identical(expected, centered_clip(parts, torch.tensor(2.0)))  # type: ignore[arg-type]


def test_the_package_offers_the_function() -> None:
    assert phalanx.centered_clip is centered_clip


# --- Same bytes in, same bytes out ---


def make_batch(d: int, kind: torch.dtype) -> Tensor:
    """Stacks that need very different work: under attack, at ease, far from the origin, coinciding, much smaller."""
    generator = torch.Generator().manual_seed(0)
    calm = torch.empty(3, 16, d).normal_(0, 0.01, generator=generator)
    calm[1] += 0.5
    calm[2] *= 0.01
    stuck = calm[0].clone()
    stuck[:9] = stuck[9]
    return torch.stack([make_attacked(d, torch.float32), *calm, stuck]).to(kind)


@pytest.mark.parametrize("tau", [1e-5, 0.1, 3.0, INF])
@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("d", [1, 50, LONG])
def test_a_batch_is_bit_for_bit_its_stacks_one_by_one(d: int, kind: torch.dtype, tau: float, device: str) -> None:
    parts = make_batch(d, kind).to(device)
    batch = centered_clip(parts, tau)
    for index, stack in enumerate(parts):
        alone = centered_clip(stack, tau)
        for field in FIELDS:
            assert torch.equal(getattr(batch, field)[index], getattr(alone, field)), (index, field)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_every_stack_of_a_batch_is_in_balance(kind: torch.dtype, device: str) -> None:
    parts = make_batch(500, kind).to(device)
    for tau in (1e-5, 0.1, 3.0):
        result = centered_clip(parts, tau)
        for index, stack in enumerate(parts):
            assert measure(stack, tau, result.weights[index])[0] <= PROMISE
            assert float(result.residual[index]) <= PROMISE * tau * 16


@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 50, LONG + 100])
def test_repeated_calls_give_the_same_bytes_whatever_comes_between(d: int, kind: torch.dtype, device: str) -> None:
    parts, other = make_attacked(d, kind).to(device), make_attacked(777, torch.float32, seed=1).to(device)
    first = centered_clip(parts, 0.1)
    for tau in (1e-3, 0.1, 7.0):
        centered_clip(other, tau)
        assert_identical(first, centered_clip(parts, 0.1))


def layouts(parts: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same numbers, otherwise placed in memory."""
    n, d = parts.shape
    for offset in (1, 3, 5):
        shifted = parts.new_empty(n * d + offset)[offset:].view(n, d)
        yield f"shifted by {offset}", shifted.copy_(parts)
    yield "columns of a wider tensor", parts.new_empty(n, d + 3)[:, 1 : d + 1].copy_(parts)
    yield "every other row", parts.new_empty(2 * n, d)[::2].copy_(parts)
    yield "every other column", parts.new_empty(n, 2 * d)[:, ::2].copy_(parts)
    yield "transposed", parts.new_empty(d, n).T.copy_(parts)
    yield "a stack of a batch", parts.new_empty(3, n, d)[1].copy_(parts)


@pytest.mark.parametrize("tau", [1e-3, 0.1])
@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("n", "d"), [(5, 17), (16, 131), (16, 500), (16, LONG + 100)])
def test_the_place_of_the_rows_in_memory_does_not_matter(
    n: int, d: int, kind: torch.dtype, tau: float, device: str
) -> None:
    parts = make_attacked(d, kind)[-n:].contiguous().to(device)
    expected = centered_clip(parts, tau)
    differing = []
    for name, same in layouts(parts):
        assert torch.equal(same, parts)
        result = centered_clip(same, tau)
        if not all(torch.equal(getattr(expected, field), getattr(result, field)) for field in FIELDS):
            differing.append(name)
    assert differing == []


def test_a_row_repeated_by_stride_zero_is_a_row(device: str) -> None:
    parts = torch.ones(1, 100, device=device).expand(5, 100)
    assert torch.equal(centered_clip(parts, 0.1).aggregate, parts[0])


@pytest.mark.parametrize("d", [50, LONG])
def test_the_input_is_not_modified(d: int, device: str) -> None:
    parts, weights = make_attacked(d, torch.float32).to(device), torch.arange(1.0, 17.0)
    kept, kept_weights = parts.clone(), weights.clone()
    centered_clip(parts, 0.1, weights)
    assert torch.equal(parts, kept)
    assert torch.equal(weights, kept_weights)


def test_the_result_shares_no_memory_with_the_input(device: str) -> None:
    parts = torch.ones(1, 4, device=device)
    result = centered_clip(parts, 1.0)
    parts.zero_()
    assert torch.equal(result.aggregate, torch.ones(4, device=device))


def test_the_global_random_state_is_left_alone(device: str) -> None:
    before = torch.get_rng_state()
    centered_clip(make_attacked(50, torch.float32).to(device), 0.1)
    assert torch.equal(before, torch.get_rng_state())


def test_parts_that_require_grad_give_a_result_without(device: str) -> None:
    parts = make_attacked(50, torch.float32).to(device)
    weights = torch.arange(1.0, 17.0)
    expected = centered_clip(parts, 0.1, weights)
    result = centered_clip(parts.clone().requires_grad_(), 0.1, weights.clone().requires_grad_())
    assert_identical(expected, result)
    assert not any(getattr(result, field).requires_grad for field in FIELDS)


# --- Invalid arguments ---

GOOD = torch.ones(4, 5)


@pytest.mark.parametrize(
    "parts",
    [None, [[1.0, 2.0]], np.ones((4, 5)), GOOD.int(), GOOD.bool(), GOOD.to(torch.complex64)],
    ids=["None", "list", "numpy", "int", "bool", "complex"],
)
def test_parts_that_are_no_tensor_of_floats_are_refused(parts: Any) -> None:
    with pytest.raises(TypeError, match=r"^parts: "):
        centered_clip(parts, 1.0)


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)])
def test_parts_that_are_neither_a_stack_nor_a_batch_are_refused(shape: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match=r"^parts: .*shape"):
        centered_clip(torch.ones(shape, device=device), 1.0)


@pytest.mark.parametrize("shape", [(0, 5), (4, 0), (0, 0), (0, 4, 5), (2, 0, 5), (2, 4, 0)])
def test_empty_parts_are_refused(shape: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match=r"^parts: empty"):
        centered_clip(torch.ones(shape, device=device), 1.0)


@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
@pytest.mark.parametrize("kind", [*TYPES, torch.float64], ids=str)
@pytest.mark.parametrize("d", [1, 5, LONG + 1])
def test_parts_with_one_number_that_is_not_finite_are_refused(
    d: int, kind: torch.dtype, value: float, device: str
) -> None:
    parts = torch.ones(16, d, dtype=kind, device=device)
    parts[9, -1] = value
    with pytest.raises(ValueError, match=r"^parts: .*row 9 "):
        centered_clip(parts, 1.0)


def test_parts_with_infinities_of_either_sign_in_every_row_are_refused(device: str) -> None:
    parts = torch.tensor([[INF, -INF], [-INF, INF]], device=device)
    with pytest.raises(ValueError, match=r"^parts: .*finite"):
        centered_clip(parts, 1.0)


def test_a_batch_with_one_stack_that_is_not_finite_is_refused(device: str) -> None:
    parts = torch.ones(3, 4, 5, device=device)
    parts[2, 1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"^parts: .*row 1 "):
        centered_clip(parts, 1.0)


def test_a_row_of_weight_zero_must_be_finite_all_the_same(device: str) -> None:
    parts = torch.ones(3, 4, device=device)
    parts[1] = INF
    with pytest.raises(ValueError, match=r"^parts: .*row 1 "):
        centered_clip(parts, 1.0, torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_the_largest_numbers_of_a_type_are_finite(kind: torch.dtype, device: str) -> None:
    parts = torch.full((3, 1000), torch.finfo(kind).max, device=device, dtype=kind)
    parts[0] *= -1
    result = centered_clip(parts, 1.0)
    assert torch.isfinite(result.aggregate).all()


@pytest.mark.parametrize("tau", [0, 0.0, -0.0, -1e-300, -1, -INF, float("nan")])
def test_a_radius_that_is_not_positive_is_refused(tau: float, device: str) -> None:
    with pytest.raises(ValueError, match=r"^tau: "):
        centered_clip(GOOD.to(device), tau)


@pytest.mark.parametrize("tau", [None, "wide", 1j, [1.0], torch.ones(2)], ids=str)
def test_a_radius_that_is_no_number_is_refused(tau: Any) -> None:
    with pytest.raises(TypeError, match=r"^tau: "):
        centered_clip(GOOD, tau)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (5,), (4, 1), (1, 4), (4, 5)])
def test_weights_that_do_not_match_the_rows_are_refused(shape: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match=r"^weights: .*shape"):
        centered_clip(GOOD.to(device), 1.0, torch.ones(shape))


@pytest.mark.parametrize("shape", [(), (2,), (5,), (4, 2), (1, 4), (3, 4), (2, 4, 1), (2, 4, 5)])
def test_weights_that_do_not_match_the_batch_are_refused(shape: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match=r"^weights: .*shape"):
        centered_clip(torch.ones(2, 4, 5, device=device), 1.0, torch.ones(shape))


@pytest.mark.parametrize("value", [-1.0, -1e-30, float("nan"), INF, -INF])
def test_weights_that_are_negative_or_not_finite_are_refused(value: float, device: str) -> None:
    with pytest.raises(ValueError, match=r"^weights: "):
        centered_clip(GOOD.to(device), 1.0, torch.tensor([1.0, value, 1.0, 1.0]))


def test_weights_that_are_all_zero_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"^weights: "):
        centered_clip(GOOD.to(device), 1.0, torch.zeros(4))


def test_weights_that_are_all_zero_in_one_stack_are_refused(device: str) -> None:
    weights = torch.ones(3, 4)
    weights[2] = 0
    with pytest.raises(ValueError, match=r"^weights: "):
        centered_clip(torch.ones(3, 4, 5, device=device), 1.0, weights)


# --- Memory ---

MEMORY_PROBE = """
import ctypes, re, sys, torch
from phalanx import centered_clip

device, kind = sys.argv[1], getattr(torch, sys.argv[2])
torch.set_num_threads(1)  # on a busy machine, thousands of short calls would wait for each other's threads

def peak():
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

n, d, width = 64, 10_000_000, 50_000
tile = torch.empty(n, width).normal_(generator=torch.Generator().manual_seed(0)).to(device, kind)
for tau in (1e-3, 10.0):  # load and set up whatever is loaded and set up once
    centered_clip(tile, tau)
ctypes.CDLL(None).malloc_trim(0)  # nothing freed is left over for the call to use unseen
parts = torch.empty(n, d, dtype=kind, device=device)
parts.view(n, -1, width).copy_(tile[:, None])
parts[: n // 2 - 1] *= -100
if device == "cuda":
    torch.cuda.reset_peak_memory_stats()
before = peak()
result = centered_clip(parts, 10.0)
print((peak() - before) / parts[0].nbytes)
"""


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_the_memory_beyond_the_input_is_less_than_one_row_and_a_half(kind: str, device: str) -> None:
    """64 rows of ten million, in a process of its own: the peak of its memory hardly rises, the result included."""
    command = [sys.executable, "-c", MEMORY_PROBE, device, kind]
    probe = subprocess.run(command, capture_output=True, text=True, check=False)
    assert probe.returncode == 0, probe.stderr
    rows = float(probe.stdout)
    assert 0.9 < rows < 1.5


def test_a_smaller_residual_on_the_far_side_of_the_attackers_is_no_way_out() -> None:
    """Between the honest rows and the attackers the pulls leave 0.2; among the honest rows, before balance, 0.6."""
    rows = torch.tensor([[9.0908e27], [2.7418e27], [1.2621], [1.7715], [2.8732]])
    result = centered_clip(rows, 0.00197)
    assert_balanced(rows, 0.00197, result)
    assert 1.2 < float(result.aggregate) < 2.9


@pytest.mark.parametrize("seed", range(40))
def test_attackers_of_two_sizes_cannot_hide_the_honest_rows_from_each_other(seed: int, device: str) -> None:
    """Beside a row of 1e36, one of 1e18 is as close to everybody as an honest one, to all digits of a float64."""
    generator = torch.Generator().manual_seed(seed)
    rows, direction = torch.randn(7, 8, generator=generator), torch.randn(8, generator=generator)
    rows[0], rows[1], rows[2] = -1e18 * direction, 1e36 * direction, -1e18 * direction
    result = centered_clip(rows.to(device), 1.0)
    assert_balanced(rows, 1.0, result)
    assert float((result.aggregate.cpu() - rows[3:].mean(0)).norm()) < 10


@pytest.mark.parametrize("tau", [1e-30, 1e-160, 1e-300, 5e-324])
def test_a_radius_of_next_to_nothing_gives_the_geometric_median(tau: float) -> None:
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    expected = centered_clip(rows, 1e-9).aggregate
    torch.testing.assert_close(centered_clip(rows, tau).aggregate, expected)


@pytest.mark.parametrize("weights", [[0.1, 0.2, 0.3], (0.1, 0.2, 0.3), np.array([0.3, 0.2, 0.1])[::-1]])
def test_weights_keep_all_their_digits_however_they_are_given(weights: Any) -> None:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    exact = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert_identical(centered_clip(rows, 0.5, weights), centered_clip(rows, 0.5, exact))


@pytest.mark.parametrize(
    "tau", [np.float32(0.5), torch.tensor(0.5), torch.tensor(0.5, requires_grad=True), np.array(0.5)]
)
def test_a_radius_may_be_any_real_scalar(tau: Any) -> None:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert_identical(centered_clip(rows, tau), centered_clip(rows, 0.5))


@pytest.mark.parametrize("tau", [np.complex128(1 + 1j), torch.tensor(1j), 1j])
def test_a_complex_radius_is_refused(tau: Any) -> None:
    with pytest.raises(TypeError, match=r"^tau: "):
        centered_clip(torch.ones(2, 2), tau)
