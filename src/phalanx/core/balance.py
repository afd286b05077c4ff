"""The mathematics of CenteredClip: the point at which rows are in balance, each pulling no harder than ``tau``.

Given rows ``g_1 .. g_n``, row weights ``p_i`` and a radius ``tau``, the aggregate ``v`` solves

    sum_i p_i (g_i - v) min(1, tau / |g_i - v|) = 0.

It is the minimiser of the convex Huber loss ``sum_i p_i h(|g_i - v|)``, so it depends on the rows alone, not on a
starting point or a history. (Where rows lie on a line there can be a segment of minimisers; we take its middle.)
``tau = inf`` is the mean, ``tau -> 0`` the geometric median. Three facts make it cheap and exact:

1. *Re-weighting.* With ``a_i = p_i min(1, tau / |g_i - v|)`` the equation reads ``v = sum a_i g_i / sum a_i``.
   Repeating that assignment never increases the loss and usually converges in a few rounds.
2. *The Gram matrix is enough.* ``v`` is a weighted mean of the rows, so every distance and the residual follow from
   ``n x n`` inner products. The long rows are read twice: once for the Gram matrix, once to form ``v``. We write
   ``v = g_k + sum c_i e_i`` with unit vectors ``e_i = (g_i - g_k) / s_i`` about an inlying row ``g_k``: however large
   an attacker's row, its ``c_i`` is of the order of ``tau``, and nothing is lost next to it.
3. *Newton where re-weighting stalls* (``tau`` small, ``v`` next to a row). The loss has the Hessian
   ``A - sum_clipped a_i f_i f_i'`` with ``A = sum a_i`` and ``f_i`` the unit vector from ``v`` to ``g_i``, and its
   Newton step lies in the span of the rows: an ``n x n`` system. A bisection along the step keeps it safe.

Everything here works on a batch of Gram matrices at once, and on each as if it were alone; but for ``solve_short``,
which takes the rows of one small stack. How exact the matrices are, and what follows for the result, is the business of
``clipping.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]
Rows: TypeAlias = npt.NDArray[np.intp]

# The residual that the solver aims at, over tau * sum(p).
AIM = 1e-8
_FIRST_ROUNDS = 3
_QUICK = 0.2  # after those, re-weighting goes on while each round shrinks the residual at least this much
_NEWTON_ROUNDS = 100
_PATIENCE = 15  # Newton rounds without a smaller residual, before we conclude that rounding forbids it
_SMALL = 1e-3  # a slope or residual that a step has shrunk so far needs no better length
_BISECTIONS = 60
_SHORT_ROUNDS = 20
_FAR, _LARGEST_TO_SQUARE = 1e8, 1e140  # numbers up to which that does: over tau, and in all
TINY = 1e-300  # nothing is divided by less
# A smaller radius is taken for the least, which no two float32 rows that differ are within; a larger one is the mean.
LEAST_RADIUS, LARGEST_RADIUS = 1e-60, 1e300


def find_medoids(matrices: Array, tau: float, prior: Array) -> Rows:
    """For each stack the row with the smallest loss: an inlying start, within ``tau`` of the answer if any row is."""
    squares = matrices.diagonal(axis1=1, axis2=2)
    distances = np.sqrt(np.maximum(squares[:, :, None] + squares[:, None, :] - 2 * matrices, 0))
    # Very far rows count alike. Otherwise one of 1e36 would make all other losses equal, to the last digit, and an
    # attacker of 1e18 as good a start as any. Far is measured by the better half of the weight about a row.
    order = distances.argsort(axis=1)
    weight = np.take_along_axis(np.broadcast_to(prior[:, :, None], distances.shape), order, axis=1).cumsum(axis=1)
    half = (weight >= 0.5 * weight[:, -1:]).argmax(axis=1)[:, None]
    central = np.take_along_axis(np.take_along_axis(distances, order, axis=1), half, axis=1).min(axis=(1, 2))
    distances = np.minimum(distances, (1e12 * central + tau)[:, None, None])
    loss = np.matmul(prior[:, None, :], _losses(distances, tau))
    best: Rows = loss[:, 0].argmin(axis=1)
    return best


@dataclass(slots=True)
class Point:
    """One ``v = g_k + sum c_i e_i`` for each stack, and what the equation says of it."""

    c: Array
    along: Array  # <e_i, v - g_k>
    square: Array  # |v - g_k|^2
    distances: Array
    pulls: Array  # a_i
    weights: Array  # a_i / A: where re-weighting goes from here
    total: Array  # A
    error: Array  # sum a_i (g_i - v), as coefficients of the e_i
    residual: Array  # its norm


class Problem:
    """The equation for stacks of rows, each about its base row ``g_k``."""

    def __init__(self, matrices: Array, base: Rows, tau: float, prior: Array) -> None:
        stack = np.arange(len(matrices))
        column = matrices[stack, :, base]
        about = matrices - column[:, :, None] - column[:, None, :] + matrices[stack, base, base][:, None, None]
        squares = about.diagonal(axis1=1, axis2=2).copy()
        squares[stack, base] = 0
        self.sizes: Array = np.sqrt(np.maximum(squares, 0))  # s_i = |g_i - g_k|
        inverse = np.where(self.sizes > TINY, 1 / np.maximum(self.sizes, TINY), 0)
        self.cosines: Array = np.clip(about * inverse[:, :, None] * inverse[:, None, :], -1, 1)  # <e_i, e_j>
        self.tau, self.prior = tau, prior

    def at(self, c: Array) -> Point:
        along, square, distances, pulls = self._pulls_at(c)
        total = pulls.sum(axis=1)
        error = pulls * self.sizes - total[:, None] * c
        residual = (error * np.matmul(self.cosines, error[:, :, None])[:, :, 0]).sum(axis=1)
        residual = np.sqrt(np.maximum(residual, 0))
        return Point(c, along, square, distances, pulls, pulls / total[:, None], total, error, residual)

    def reweight(self, weights: Array) -> Array:
        pulls = self._pulls_at(weights * self.sizes)[3]
        reweighted: Array = pulls / pulls.sum(axis=1, keepdims=True)
        return reweighted

    def pulls(self, distances: Array, prior: Array) -> Array:
        pulls: Array = prior * (self.tau / np.maximum(distances, self.tau))
        return pulls

    def _pulls_at(self, c: Array) -> tuple[Array, Array, Array, Array]:
        along = np.matmul(self.cosines, c[:, :, None])[:, :, 0]
        square = (c * along).sum(axis=1)
        # In and across the direction of the row: no digits cancel where v is close to it.
        distances = np.sqrt((self.sizes - along) ** 2 + np.maximum(square[:, None] - along**2, 0))
        return along, square, distances, self.pulls(distances, self.prior)


def solve_balance(matrices: Array, base: Rows, start: Array, tau: float, prior: Array) -> tuple[Array, Point, int]:
    """The weights of each stack, what holds there, and the rounds: re-weighting while that is quick, then Newton.

    ``start`` holds weights from an earlier solution, or zeros to start at the base row.
    """
    problem = Problem(matrices, base, tau, prior)
    aim = AIM * tau * prior.sum(axis=1)
    weights, rounds, cold = start, 0, np.abs(start).max(axis=1, keepdims=True) == 0
    while cold.any() and rounds < _FIRST_ROUNDS:
        weights, rounds = np.where(cold, problem.reweight(weights), weights), rounds + 1
    point = problem.at(weights * problem.sizes)
    quick = point.residual > aim
    while quick.any():
        weights = np.where(quick[:, None], point.weights, weights)
        new = problem.at(weights * problem.sizes)
        quick &= (new.residual > aim) & (new.residual <= _QUICK * point.residual)
        point, rounds = new, rounds + 1
    stalled = point.residual > aim
    if stalled.any():
        best, used = _newton(problem, point, aim)
        # Rows that depend on each other leave c undetermined; a last re-weighting makes v a proper mean again.
        weights = np.where(stalled[:, None], best.weights, weights)
        point, rounds = problem.at(weights * problem.sizes), rounds + used
    middle = _middle_of_segment(problem, point, aim)
    if middle is not None:
        weights = np.where(np.isnan(middle), weights, middle)
        point = problem.at(weights * problem.sizes)
    return weights, point, rounds


def solve_short(rows: Array, tau: float, prior: Array) -> tuple[Array, Array, float, int] | None:
    """Weights, distances, residual and rounds of one stack of few short rows; None leaves it to :func:`solve_balance`.

    Calls cost more than arithmetic here, so there are as few as will do: ``v`` itself is at hand, no Gram matrix loses
    digits, and Newton's steps are taken whole. That is safe because the loss is convex: where the residual vanishes, it
    is least. The residual includes what rounding may add to it.
    """
    if not np.maximum.reduce(np.abs(rows), axis=None) <= min(_FAR * tau, _LARGEST_TO_SQUARE):  # or not a number
        return None
    squares = np.vecdot(rows, rows)
    between = np.sqrt(np.maximum(squares[:, None] + squares - 2 * (rows @ rows.T), 0))
    losses = _losses(between, tau) @ prior
    base = int(losses.argmin())
    about, total, before = rows - rows[base], float(np.add.reduce(prior)), math.inf
    pulls, jumped = prior * (tau / np.maximum(between[base], tau)), False
    for rounds in range(1, _SHORT_ROUNDS):
        weights = pulls / np.add.reduce(pulls)
        v = weights.dot(about)
        y = about - v
        distances = np.sqrt(np.vecdot(y, y))
        pulls = prior * (tau / np.maximum(distances, tau))
        error = pulls.dot(y)
        residual = math.sqrt(error.dot(error))
        if residual <= AIM * tau * total:
            break
        if rounds > _FIRST_ROUNDS and residual > _QUICK * before:
            y -= _newton_weights(y.dot(y.T), distances, pulls, np.add.reduce(pulls), tau).dot(y)
            pulls, jumped = prior * (tau / np.maximum(np.sqrt(np.vecdot(y, y)), tau)), True
        before = residual
    else:
        return None
    rounding = 2e-12 * float(pulls.dot(distances)) + 2e-15 * math.sqrt(v.dot(v)) * float(np.add.reduce(pulls))
    astray = jumped and float(_losses(distances, tau) @ prior) > float(losses[base])  # far out all is nearly flat
    if astray or _may_be_on_a_line(y, distances, tau, prior):
        return None
    return weights, distances, residual + rounding, rounds


def _losses(distances: Array, tau: float) -> Array:
    inside = np.minimum(distances, tau)
    losses: Array = inside * (distances - 0.5 * inside)
    return losses


def _may_be_on_a_line(y: Array, distances: Array, tau: float, prior: Array) -> bool:
    """Whether every row is clipped and all lie on one line through ``v``: other points may be in balance then."""
    if np.logical_or.reduce((distances < (1 - 1e-6) * tau) & (prior > 0)):
        return False
    nearest = int(distances.argmin())
    return bool(((np.abs(y @ y[nearest]) >= (1 - 1e-9) * distances[nearest] * distances) | (prior == 0)).all())


def _newton(problem: Problem, point: Point, aim: Array) -> tuple[Point, int]:
    """Newton's method on the stacks that have not converged, each step cut or stretched to where the loss is least.

    A smaller residual alone is no reason to go on: far out on the attackers' side it can be smaller than here.
    """
    best, idle = point, np.zeros(len(aim))
    for rounds in range(_NEWTON_ROUNDS):
        going = (best.residual > aim) & (idle < _PATIENCE)
        if not going.any():
            return best, rounds
        step = np.where(going[:, None], _newton_step(problem, point), 0)
        new = problem.at(point.c + step)
        poor = np.flatnonzero(going & ~(new.residual <= _SMALL * point.residual))
        for b in poor:
            step[b] *= _best_length(problem, point, step[b], int(b))
        point = problem.at(point.c + step) if len(poor) else new
        better = point.residual < best.residual
        best = point if better.all() else problem.at(np.where(better[:, None], point.c, best.c))
        idle = np.where(better, 0, idle + 1)
    return best, _NEWTON_ROUNDS


def _newton_step(problem: Problem, point: Point) -> Array:
    """The step ``sum x_i (g_i - v)`` as a change of ``c``.

    With ``f_i = max(|g_i - v|, tau)``, ``t_i = x_i f_i`` and ``F_ij = <g_i - v, g_j - v> / (f_i f_j)``, Newton's system
    reads ``A t_i - a_i (F t)_i = a_i f_i`` for a clipped row, and ``A t_i = a_i f_i`` for any other.
    """
    products = _products_about(problem, point)
    x = _newton_weights(products, point.distances, point.pulls, point.total, problem.tau)
    step: Array = x * problem.sizes - x.sum(axis=1, keepdims=True) * point.c
    return step


def _newton_weights(products: Array, distances: Array, pulls: Array, total: Array, tau: float) -> Array:
    """The ``x_i``, for one stack or for many, from ``<g_i - v, g_j - v>``, ``|g_i - v|``, ``a_i`` and ``A``."""
    scale = np.maximum(distances, tau)
    cosines = products / scale[..., :, None]
    cosines /= scale[..., None, :]
    np.minimum(np.maximum(cosines, -1, out=cosines), 1, out=cosines)
    # A hair of damping: where all rows lie on a line and are clipped, the loss is piecewise linear, the Hessian zero.
    hessian = (1 + 1e-12) * total[..., None, None] * _get_identity(cosines.shape[-1])
    cosines *= (pulls * (distances > tau))[..., :, None]
    hessian -= cosines
    weights: Array = _solve_each(hessian, pulls * scale) / scale
    return weights


@lru_cache(maxsize=16)
def _get_identity(size: int) -> Array:
    identity = np.eye(size)
    identity.setflags(write=False)
    return identity


def _products_about(problem: Problem, point: Point) -> Array:
    """``<g_i - v, g_j - v>``, grouped so that one huge row spoils no other's digits."""
    sizes, along = problem.sizes, point.along
    with_base = sizes[:, :, None] * (sizes[:, None, :] * problem.cosines - along[:, :, None])
    products: Array = with_base - (sizes * along)[:, None, :] + point.square[:, None, None]
    return products


def _solve_each(systems: Array, sides: Array) -> Array:
    """Solutions of the linear systems; zero for a singular one."""
    try:
        solutions = (
            np.linalg.solve(systems, sides) if sides.ndim == 1 else np.linalg.solve(systems, sides[..., None])[..., 0]
        )
        return solutions.astype(np.float64, copy=False)
    except np.linalg.LinAlgError:
        if systems.ndim == 2 or len(systems) == 1:
            return np.zeros_like(sides)
        each = zip(systems, sides, strict=True)
        return np.concatenate([_solve_each(system[None], side[None]) for system, side in each])


def _best_length(problem: Problem, point: Point, step: Array, b: int) -> float:
    """Where along ``step`` the loss of stack ``b`` is least: a bisection on its slope, which only ever rises."""
    products = problem.cosines[b] @ step
    size = math.sqrt(max(float(step @ products), 0))
    if not 0 < size < math.inf:
        return 0.0
    along = (problem.sizes[b] * products - float(point.c[b] @ products)) / size  # of g_i - v, in the step's direction
    across = np.maximum(point.distances[b] ** 2 - along**2, 0)

    def slope(length: float) -> float:
        ahead = along - length * size
        return -float((problem.pulls(np.sqrt(ahead**2 + across), problem.prior[b]) * ahead).sum())

    enough = _SMALL * abs(slope(0.0))
    low, high = 0.0, 1.0
    while (end := slope(high)) < -enough and high * size < LARGEST_RADIUS:
        low, high = high, 2 * high
    if end <= enough:
        return high
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        here = slope(middle)
        if abs(here) <= enough:
            return middle
        low, high = (middle, high) if here < 0 else (low, middle)
    return high


def _middle_of_segment(problem: Problem, point: Point, aim: Array) -> Array | None:
    """Weights of the middle of the minimisers, for stacks where those form a segment; nan for others, None if all are.

    That is so where every row is clipped and all lie on one line through ``v``, as many ahead as behind. Any point
    between the nearest two, no closer than ``tau`` to either, is then in balance.
    """
    counts = problem.prior > 0
    clipped = ((point.distances > (1 - 1e-6) * problem.tau) | ~counts).all(axis=1)  # v stops at the segment's end
    if not clipped.any():
        return None
    stack, distances = np.arange(len(counts)), np.where(counts, point.distances, np.inf)
    nearest = distances.argmin(axis=1)
    size, along = problem.sizes[stack, nearest, None], point.along[stack, nearest, None]
    products = size * (problem.sizes * problem.cosines[stack, nearest] - along)  # as in _products_about
    products = products - problem.sizes * point.along + point.square[:, None]
    limit = point.distances[stack, nearest, None] * point.distances
    line = (~counts | (np.abs(products) >= (1 - 1e-9) * limit)).all(axis=1)
    behind = np.where(products < 0, distances, np.inf).min(axis=1)
    found = clipped & line & np.isfinite(behind)
    if not found.any():
        return None
    share = np.where(found, 0.5 - 0.5 * np.where(found, behind, 0) / distances[stack, nearest], 0)
    c = point.c * (1 - share[:, None])
    c[stack, nearest] += share * problem.sizes[stack, nearest]
    weights = problem.at(c).weights
    found &= problem.at(weights * problem.sizes).residual <= aim
    return np.where(found[:, None], weights, np.nan) if found.any() else None
