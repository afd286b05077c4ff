"""CenteredClip: the mean that no minority can move far (PROTOCOL section 6).

Given rows ``g_1 .. g_n`` and a radius ``tau``, the aggregate ``v`` solves

    sum_i p_i (g_i - v) min(1, tau / |g_i - v|) = 0,

the point at which the rows, each pulling no harder than ``tau``, are in balance (``p_i`` are optional
row weights, 1 by default). It is the minimiser of the convex Huber loss ``sum_i p_i h(|g_i - v|)``, so it
depends on the rows alone, not on a starting point or a history. ``tau = inf`` is the mean, ``tau -> 0``
the geometric median. Three facts make it cheap and exact:

1. *Re-weighting.* With ``a_i = p_i min(1, tau / |g_i - v|)`` the equation reads ``v = sum a_i g_i / sum a_i``.
   Repeating that assignment never increases the loss and usually converges in a few rounds.
2. *The Gram matrix is enough.* ``v`` is a weighted mean of the rows, ``v = g_k + sum_i u_i (g_i - g_k)``, so every
   distance and the residual follow from the ``n x n`` inner products of ``g_i - g_k``. The long rows are
   read twice: once for the Gram matrix, once to form ``v``.
3. *Newton where re-weighting stalls* (``tau`` small, ``v`` next to a row). The loss has the Hessian
   ``A - sum_clipped a_i y_i y_i' / |y_i|^2`` with ``y_i = g_i - v`` and ``A = sum a_i``, and its Newton step lies in
   the span of the ``y_i``: an ``n x n`` system. A bisection along the step keeps it safe.

Rounding in the Gram matrix is the only thing that can spoil a distance, and it is bounded: an entry is off by at
most ``error * |g_i| |g_j|``, hence ``|g_i - v|^2`` by at most ``error * (sum_j |e_i - w|_j |g_j|)^2``. When
that bound, carried through to the residual, is not far below what we promise, the Gram matrix is formed again in
float64 around the row nearest to ``v``, which removes the cancellation. That is how the result stays exact
when attackers are a thousand times larger than everyone else, or ``tau`` a millionth of the spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.core.gram import Gram, combine, compute_gram

Array: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.intp]

# The promise is |sum clip| <= PROMISE * tau * n. The solver aims far below it; rounding may use up half of it.
PROMISE = 1e-6
_AIM = 1e-8
_ROUNDING_SHARE = 0.5
_FIRST_ROUNDS = 3
_QUICK = 0.2  # after those, re-weighting goes on while each round shrinks the residual at least this much
_NEWTON_ROUNDS = 100
_BISECTIONS = 60
_RECENTRINGS = 4
_TINY, _HUGE = 1e-300, 1e150  # distances are clamped to these: nothing divides by zero or overflows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Clipped:
    """What :func:`centered_clip` found. For a batch, every field but ``iterations`` has a leading batch axis."""

    aggregate: Tensor
    """``v``, in the type and on the device of the input."""
    weights: Tensor
    """float64, summing to one: ``v = weights @ parts`` before rounding. A row far away has next to none."""
    distances: Tensor
    """float64: ``|g_i - v|``."""
    residual: Tensor
    """float64: a bound on ``|sum_i p_i clip(g_i - v)|`` for the unrounded ``v``, rounding of the solver included."""
    iterations: int
    """Rounds of re-weighting and of Newton, over all stacks."""


def centered_clip(parts: Tensor, tau: float, weights: Tensor | None = None) -> Clipped:
    """Aggregate the rows of ``parts`` so that none pulls harder than ``tau``.

    ``parts`` is one stack of rows ``(n, d)`` or a batch of stacks ``(batch, n, d)`` in float32, bfloat16, float16 or
    float64, on CPU or CUDA. ``weights`` are non-negative row weights of shape ``(n,)`` or ``(batch, n)``. The function
    is pure and deterministic: the same bytes in give the same bytes out on one platform.

    Raises ``ValueError`` or ``TypeError``, naming the argument, if one is empty, misshapen, non-finite or out of range.
    """
    stacks, tau, prior = _checked(parts, tau, weights)
    with torch.no_grad():
        # A GPU wants all stacks at once. Either way each is solved as if it were alone, to the last bit.
        together = len(stacks) if parts.is_cuda else 1
        groups = [slice(start, start + together) for start in range(0, len(stacks), together)]
        results = [_clip_stacks(stacks[group], tau, prior[group]) for group in groups]
    result = results[0] if len(results) == 1 else _concatenate(results)
    if parts.ndim == 3:
        return result
    return Clipped(result.aggregate[0], result.weights[0], result.distances[0], result.residual[0], result.iterations)


def _concatenate(results: list[Clipped]) -> Clipped:
    return Clipped(
        torch.cat([result.aggregate for result in results]),
        torch.cat([result.weights for result in results]),
        torch.cat([result.distances for result in results]),
        torch.cat([result.residual for result in results]),
        sum(result.iterations for result in results),
    )


def _checked(parts: Tensor, tau: float, weights: Tensor | None) -> tuple[Tensor, float, Array]:
    """The arguments as ``(batch, n, d)``, a float and ``(batch, n)``, or an error that names the wrong one."""
    if not isinstance(parts, Tensor):
        raise TypeError(f"parts: expected a torch.Tensor of rows, got {type(parts).__name__}")
    if parts.ndim not in (2, 3):
        raise ValueError(f"parts: expected shape (n, d) or (batch, n, d), got {tuple(parts.shape)}")
    if parts.dtype not in _DTYPES:
        raise TypeError(f"parts: expected float32, bfloat16, float16 or float64, got {parts.dtype}")
    if parts.numel() == 0:
        raise ValueError(f"parts: empty, shape {tuple(parts.shape)}")
    try:
        radius = float(tau)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"tau: expected one number, got {type(tau).__name__}") from None
    if not radius > 0:
        raise ValueError(f"tau: expected a positive number, got {radius}")
    radius = min(radius, _HUGE)
    stacks = parts.detach().reshape((-1, *parts.shape[-2:]))
    shape = tuple(stacks.shape[:2])
    if weights is None:
        return stacks, radius, np.ones(shape)
    prior = np.asarray(torch.as_tensor(weights).detach().to("cpu", torch.float64).numpy())
    if prior.shape not in ((shape[1],), tuple(parts.shape[:-1])):
        raise ValueError(f"weights: expected shape {tuple(parts.shape[:-1])} to match parts, got {prior.shape}")
    prior = np.array(np.broadcast_to(prior, shape))
    if not np.isfinite(prior).all() or (prior < 0).any():
        raise ValueError("weights: expected finite numbers, none negative")
    if not (prior.sum(axis=1) > 0).all():
        raise ValueError("weights: expected a positive one among the rows of each stack")
    return stacks, radius, prior


def _clip_stacks(stacks: Tensor, tau: float, prior: Array) -> Clipped:
    """Solve; where rounding in the Gram matrix could break the promise, form it anew around the nearest row."""
    scale = prior.max(axis=1)
    prior = prior / scale[:, None]
    gram = _finite_gram(stacks, None)
    base = _medoids(gram.matrices, tau, prior)
    weights, point, rounds = _solve(gram.matrices, base, np.zeros_like(prior), tau, prior)
    distances = point.distances
    doubt = _rounding_bound(gram, weights, point, tau, prior)
    bound = point.residual + doubt
    wide = gram.wide
    for b in np.flatnonzero(doubt > _ROUNDING_SHARE * PROMISE * tau * prior.sum(axis=1)):
        one, wide = slice(b, b + 1), True
        for _ in range(_RECENTRINGS):
            nearest = distances[one].argmin(axis=1)
            gram = _finite_gram(stacks[one], nearest)
            weights[one], point, used = _solve(gram.matrices, nearest, weights[one], tau, prior[one])
            doubt = _rounding_bound(gram, weights[one], point, tau, prior[one])
            distances[one], bound[one], rounds = point.distances, point.residual + doubt, rounds + used
            if (doubt <= _ROUNDING_SHARE * PROMISE * tau * prior[one].sum(axis=1)).all():
                break
    # One small copy to the device, and none after the long sum has started there.
    small = torch.from_numpy(np.stack([weights, distances])).to(stacks.device)
    aggregate = combine(stacks, small[0], wide=wide)
    return Clipped(aggregate, small[0], small[1], torch.from_numpy(bound * scale), rounds)


def _finite_gram(stacks: Tensor, centre: Rows | None) -> Gram:
    gram = compute_gram(stacks, centre)
    finite = np.isfinite(gram.matrices.diagonal(axis1=1, axis2=2))
    if not finite.all():
        row = np.argwhere(~finite)[0, 1]
        raise ValueError(f"parts: row {row} holds values that are not finite, or too large for their squares to be")
    return gram


def _medoids(matrices: Array, tau: float, prior: Array) -> Rows:
    """For each stack the row with the smallest loss: an inlying start, within ``tau`` of the answer if any row is."""
    squares = matrices.diagonal(axis1=1, axis2=2)
    distances = np.sqrt(np.maximum(squares[:, :, None] + squares[:, None, :] - 2 * matrices, 0))
    inside = np.minimum(distances, tau)
    loss = np.matmul(prior[:, None, :], inside * (distances - 0.5 * inside))
    best: Rows = loss[:, 0].argmin(axis=1)
    return best


def _rounding_bound(gram: Gram, weights: Array, point: _Point, tau: float, prior: Array) -> Array:
    """How far rounding of the Gram matrices may move the residual (see the module's docstring)."""
    offsets = np.eye(weights.shape[1]) - weights[:, None, :]  # g_i - v, as a combination of rows
    sizes = np.sqrt(gram.matrices.diagonal(axis1=1, axis2=2))
    reach = np.abs(offsets * sizes[:, None, :]).sum(axis=2)
    squares = point.distances**2
    slack = gram.relative_error * reach**2  # on |g_i - v|^2
    if not gram.wide:
        slack += np.abs((np.matmul(offsets, gram.measured_error) * offsets).sum(axis=2))
    clipped = squares + slack > tau**2
    relative = slack / np.maximum(np.maximum(2 * squares, slack), _TINY)  # on |g_i - v|, at most 1
    direct = math.sqrt(gram.relative_error) * np.abs(point.error * sizes).sum(axis=1)  # on the residual's own norm
    bound: Array = np.where(clipped, prior * relative, 0).sum(axis=1) * tau + direct
    return bound


@dataclass(slots=True)
class _Point:
    """One ``v = g_k + sum u_i (g_i - g_k)`` for each stack, and what the equation says of it."""

    u: Array
    products: Array  # <g_i - g_k, v - g_k>
    square: Array  # |v - g_k|^2
    distances: Array
    pulls: Array  # a_i
    total: Array  # A = sum a_i
    error: Array  # sum_i a_i (g_i - v), as a combination of the g_i - g_k
    residual: Array  # its norm


@dataclass(slots=True)
class _Problem:
    """The equation for stacks of rows about a base row ``g_k`` each: ``about[i, j] = <g_i - g_k, g_j - g_k>``."""

    about: Array
    tau: float
    prior: Array

    def at(self, u: Array) -> _Point:
        products, square, pulls, distances = self._pulls_at(u)
        total = pulls.sum(axis=1)
        error = pulls - total[:, None] * u
        residual = (error * np.matmul(self.about, error[:, :, None])[:, :, 0]).sum(axis=1)
        return _Point(u, products, square, distances, pulls, total, error, np.sqrt(np.maximum(residual, 0)))

    def reweight(self, u: Array) -> Array:
        _, _, pulls, _ = self._pulls_at(u)
        reweighted: Array = pulls / pulls.sum(axis=1, keepdims=True)
        return reweighted

    def _pulls_at(self, u: Array) -> tuple[Array, Array, Array, Array]:
        products = np.matmul(self.about, u[:, :, None])[:, :, 0]
        square = (u * products).sum(axis=1)
        squares = self.about.diagonal(axis1=1, axis2=2) - 2 * products + square[:, None]
        distances = np.sqrt(np.maximum(squares, 0))
        return products, square, self.pulls(self.prior, distances), distances

    def pulls(self, prior: Array, distances: Array) -> Array:
        pulls: Array = prior * (self.tau / np.maximum(distances, self.tau))
        return pulls


def _solve(matrices: Array, base: Rows, start: Array, tau: float, prior: Array) -> tuple[Array, _Point, int]:
    """The weights of each stack, what holds there, and the rounds: re-weighting while that is quick, then Newton."""
    stack = np.arange(len(matrices))
    column = matrices[stack, :, base]
    about = matrices - column[:, :, None] - column[:, None, :] + matrices[stack, base, base][:, None, None]
    problem = _Problem(about, tau, prior)
    aim = _AIM * tau * prior.sum(axis=1)

    u, rounds = start, _FIRST_ROUNDS
    for _ in range(_FIRST_ROUNDS):
        u = problem.reweight(u)
    point = problem.at(u)
    quick = point.residual > aim
    while quick.any():
        new = problem.at(np.where(quick[:, None], point.pulls / point.total[:, None], point.u))
        quick &= (new.residual > aim) & (new.residual <= _QUICK * point.residual)
        point, rounds = new, rounds + 1
    stalled = point.residual > aim
    if stalled.any():
        best = point
        for _ in range(_NEWTON_ROUNDS):
            point = _newton(problem, point, aim)
            worse = point.residual > best.residual
            best = problem.at(np.where(worse[:, None], best.u, point.u)) if worse.any() else point
            rounds += 1
            if (best.residual <= aim).all():
                break
        # Rows that depend on each other leave u undetermined; a last re-weighting makes it a proper mean again.
        point = problem.at(np.where(stalled[:, None], best.pulls / best.total[:, None], best.u))

    weights = point.u.copy()
    weights[stack, base] = 0
    weights[stack, base] = 1 - weights.sum(axis=1)
    return weights, point, rounds


def _newton(problem: _Problem, point: _Point, aim: Array) -> _Point:
    """A Newton step of each stack that needs one, cut where its loss stops falling if it did not halve the residual."""
    step = np.where((point.residual > aim)[:, None], _newton_step(problem, point), 0)
    new = problem.at(point.u + step)
    poor = np.flatnonzero((new.residual > 0.5 * point.residual) & (point.residual > aim))
    if len(poor) == 0:
        return new
    for b in poor:
        step[b] *= _best_length(problem, point, step[b], int(b))
    return problem.at(point.u + step)


def _newton_step(problem: _Problem, point: _Point) -> Array:
    """``(A - D K) x = a``, ``K`` the Gram matrix about ``v``: the step ``sum x_i (g_i - v)``, as a change of ``u``."""
    gram = problem.about - point.products[:, :, None] - point.products[:, None, :] + point.square[:, None, None]
    curved = np.where(point.distances > problem.tau, point.pulls / np.maximum(point.distances, _TINY) ** 2, 0)
    # A hair of damping: where all rows lie on a line and are clipped, the loss is piecewise linear, the Hessian zero.
    hessian = (1 + 1e-12) * point.total[:, None, None] * np.eye(gram.shape[1]) - curved[:, :, None] * gram
    try:
        x = np.linalg.solve(hessian, point.pulls[:, :, None])[:, :, 0]
    except np.linalg.LinAlgError:
        x = point.pulls / point.total[:, None]
    step: Array = x - x.sum(axis=1, keepdims=True) * point.u
    return step


def _best_length(problem: _Problem, point: _Point, step: Array, b: int) -> float:
    """Where along ``step`` the loss of stack ``b`` is least: a bisection on its slope, which only ever rises."""
    products = problem.about[b] @ step
    square = float(step @ products)
    if not square > 0:
        return 0.0
    along = products - float(step @ point.products[b])  # <g_i - v, step>
    squares = point.distances[b] ** 2
    low, high = 0.0, 2 * float(point.distances[b].max()) / math.sqrt(square)
    for _ in range(_BISECTIONS):
        length = 0.5 * (low + high)
        distances = np.sqrt(np.maximum(squares - 2 * length * along + length**2 * square, 0))
        slope = float((problem.pulls(problem.prior[b], distances) * (length * square - along)).sum())
        low, high = (length, high) if slope < 0 else (low, length)
    return low if low > 0 else high
