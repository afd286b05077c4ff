"""CenteredClip: the mean that no minority can move far (docs/PROTOCOL.md, section 6).

The mathematics is in ``balance.py``.
 This file checks the arguments and vouches for the result. Rounding in the Gram matrix is the only thing that can spoil
a distance, and it is known: if an entry is off by at most ``error * |g_i| |g_j|``, then ``|g_i - v|^2`` is off by at
most ``error * (sum_j |e_i - w|_j |g_j|)^2``, where ``w`` are the weights of the rows in ``v``. When that, carried
through to the residual, could use up half of what we promise, the Gram matrix is formed again in float64 around the row
nearest to ``v``, which removes the cancellation. That is how the result stays exact when attackers are a thousand times
larger than everyone else, or ``tau`` a millionth of the spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from phalanx.core.balance import (
    AIM,
    LARGEST_RADIUS,
    LEAST_RADIUS,
    TINY,
    Array,
    Point,
    Rows,
    find_medoids,
    solve_balance,
    solve_short,
)
from phalanx.core.gram import MOST_ROWS_TO_GUESS, Gram, combine, compute_gram, make_wide

if TYPE_CHECKING:
    from phalanx.core.gram_cuda import Guess

# The promise is |sum clip| <= PROMISE * tau * n; the solver aims far below it, rounding may use up half of it.
PROMISE = 1e-6
_ROUNDING_SHARE = 0.5
_RECENTRINGS = 4
_MOVING_ERROR = 4e-15
_TOGETHER = 4096  # stacks that a GPU takes at once
_SHORT_ROWS, _SHORT_NUMBERS = 64, 1 << 15  # up to here the calls cost more than the arithmetic

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class Clipped:
    """What :func:`centered_clip` found. For a batch, every field but ``iterations`` has a leading batch axis."""

    aggregate: Tensor
    """``v``, in the type and on the device of the input."""
    weights: Tensor
    """float64, summing to one: ``v = weights @ parts`` before rounding. A row far away has next to none."""
    distances: Tensor
    """float64: ``|g_i - v|``, as exact as the balance needs; for a row well inside ``tau`` it may be off."""
    residual: Tensor
    """float64: a bound on ``|sum_i p_i clip(g_i - v)|`` for the unrounded ``v``, rounding of the solver included, for
    ``tau`` from a millionth of the median distance of two rows. For a much smaller one it may say too little."""
    iterations: int
    """Rounds of re-weighting and of Newton, over all stacks."""


def centered_clip(parts: Tensor, tau: float, weights: Tensor | None = None) -> Clipped:
    """Aggregate the rows of ``parts`` so that none pulls harder than ``tau``.

    ``parts`` is one stack of rows ``(n, d)`` or a batch of stacks ``(batch, n, d)`` in float32, bfloat16, float16 or
    float64, on CPU or CUDA. ``weights`` are non-negative row weights of shape ``(n,)`` or ``(batch, n)``. The function
    is pure and deterministic: the same bytes in give the same bytes out on one platform.

    Raises ``ValueError`` or ``TypeError``, naming the argument, if one is empty, misshapen, non-finite or out of range.
    """
    rows, tau, prior = _checked(parts, tau, weights)
    if not parts.is_cuda:
        if parts.ndim == 2:
            return _clip_stack(rows, tau, prior[0], 0)
        return _join([_clip_stack(stack, tau, prior[index], index) for index, stack in enumerate(rows)], torch.stack)
    # A GPU wants all stacks at once. Either way each is solved as if it were alone, to the last bit.
    stacks = rows.reshape((-1, *rows.shape[-2:]))
    groups = [slice(start, start + _TOGETHER) for start in range(0, len(stacks), _TOGETHER)]
    results = [_clip_stacks(stacks[group], tau, prior[group], group.start) for group in groups]
    result = results[0] if len(results) == 1 else _join(results, torch.cat)
    return result if parts.ndim == 3 else _get_only(result)


def _clip_stack(rows: Tensor, tau: float, prior: Array, number: int) -> Clipped:
    """One stack on the host; one of few short rows in the shortest way, unless it needs more care."""
    if len(prior) <= _SHORT_ROWS and rows.numel() <= _SHORT_NUMBERS:
        wide = _make_wide_array(rows)
        scale = float(np.maximum.reduce(prior))
        found = solve_short(wide, tau, prior / scale)
        if found is not None and found[2] * scale <= _ROUNDING_SHARE * PROMISE * tau * float(np.add.reduce(prior)):
            weights, distances, residual, rounds = found
            v = weights.dot(wide)
            if rows.dtype is torch.float32:  # other types are rounded as torch does it
                v = v.astype(np.float32)
            aggregate = torch.from_numpy(v)
            if aggregate.dtype is not rows.dtype:
                aggregate = aggregate.to(rows.dtype)
            bound = torch.from_numpy(np.array(residual * scale))
            return Clipped(aggregate, torch.from_numpy(weights), torch.from_numpy(distances), bound, rounds)
    return _get_only(_clip_stacks(rows[None], tau, prior[None], number))


def _make_wide_array(rows: Tensor) -> Array:
    """The rows in float64 without gaps. Of short ones numpy makes less ado, but it does not know bfloat16."""
    if rows.dtype is torch.bfloat16:
        rows = rows.float()
    with np.errstate(invalid="ignore"):  # what is not a number is refused later
        return rows.numpy().astype(np.float64, order="C")


def _get_only(batch: Clipped) -> Clipped:
    return Clipped(batch.aggregate[0], batch.weights[0], batch.distances[0], batch.residual[0], batch.iterations)


def _join(results: list[Clipped], join: Callable[[list[Tensor]], Tensor]) -> Clipped:
    return Clipped(
        join([result.aggregate for result in results]),
        join([result.weights for result in results]),
        join([result.distances for result in results]),
        join([result.residual for result in results]),
        sum(result.iterations for result in results),
    )


def _checked(parts: Tensor, tau: float, weights: Tensor | None) -> tuple[Tensor, float, Array]:
    """The rows without gaps in them, a float and ``(batch, n)``, or an error that names the wrong argument."""
    if not isinstance(parts, Tensor):
        raise TypeError(f"parts: expected a torch.Tensor of rows, got {type(parts).__name__}")
    if parts.ndim not in (2, 3):
        raise ValueError(f"parts: expected shape (n, d) or (batch, n, d), got {tuple(parts.shape)}")
    if parts.dtype not in _DTYPES:
        raise TypeError(f"parts: expected float32, bfloat16, float16 or float64, got {parts.dtype}")
    if parts.layout != torch.strided or parts.is_meta:
        raise TypeError(f"parts: expected a dense tensor with values, got {parts.layout} on {parts.device}")
    if parts.numel() == 0:
        raise ValueError(f"parts: empty, shape {tuple(parts.shape)}")
    rows = parts.detach()
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return rows, _checked_radius(tau), _checked_prior(parts, weights)


def _checked_radius(tau: float) -> float:
    if type(tau) is float and tau > 0:
        return min(max(tau, LEAST_RADIUS), LARGEST_RADIUS)
    try:
        number = tau.item() if isinstance(tau, Tensor | np.ndarray | np.generic) else tau
        radius = float(number + 0)  # a string has no sum
    except OverflowError:
        radius = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"tau: expected one number, got {tau!r}") from None
    if not radius > 0:
        raise ValueError(f"tau: expected a positive number, got {radius}")
    return min(max(radius, LEAST_RADIUS), LARGEST_RADIUS)


def _checked_prior(parts: Tensor, weights: Tensor | None) -> Array:
    stacks, n = parts.shape[0] if parts.ndim == 3 else 1, parts.shape[-2]
    if weights is None:
        return np.ones((stacks, n))
    try:
        values = weights.detach().cpu().double().numpy() if isinstance(weights, Tensor) else np.asarray(weights)
        if np.iscomplexobj(values) or (isinstance(weights, Tensor) and weights.is_complex()):
            raise TypeError
        given = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError("weights: expected real numbers, one for each row") from None
    if given.shape not in ((n,), tuple(parts.shape[:-1])):
        raise ValueError(f"weights: expected shape {tuple(parts.shape[:-1])} to match parts, got {given.shape}")
    if not np.isfinite(given).all() or (given < 0).any():
        raise ValueError("weights: expected finite numbers, none negative")
    full = np.broadcast_to(given, (stacks, n))
    if not (full.max(axis=1) > 0).all():
        raise ValueError("weights: expected a positive one among the rows of each stack")
    return np.array(full)


def _clip_stacks(stacks: Tensor, tau: float, prior: Array, first: int) -> Clipped:
    """Solve; where rounding in the Gram matrix could break the promise, form it anew around the nearest row.

    ``first`` is the number of the first of these stacks in the batch, for complaints.
    """
    scale = prior.max(axis=1)
    prior = prior / scale[:, None]
    guess: Guess | None = None
    if stacks.is_cuda and stacks.shape[1] <= MOST_ROWS_TO_GUESS:
        from phalanx.core.gram_cuda import guess_cuda

        guess = guess_cuda(stacks, tau, 0.5 * AIM * tau, prior)
        gram = make_wide(guess.matrices)
    else:
        gram = compute_gram(stacks)
    _refuse_non_finite(gram, first)
    base, start = find_medoids(gram.matrices, tau, prior), np.zeros_like(prior)
    if guess is not None:
        start[base == guess.bases] = guess.weights[base == guess.bases]
    weights, point, rounds = solve_balance(gram.matrices, base, start, tau, prior)
    weights = weights.copy()
    distances = point.distances
    doubt = _rounding_bound(gram, base, weights, point, tau, prior)
    bound = point.residual + doubt
    wide = gram.wide
    for b in np.flatnonzero(doubt > _ROUNDING_SHARE * PROMISE * tau * prior.sum(axis=1)):
        one, wide = slice(b, b + 1), True
        for _ in range(_RECENTRINGS):
            nearest = distances[one].argmin(axis=1)
            gram = compute_gram(stacks[one], nearest)
            weights[one], point, used = solve_balance(gram.matrices, nearest, weights[one], tau, prior[one])
            doubt = _rounding_bound(gram, nearest, weights[one], point, tau, prior[one])
            distances[one], bound[one], rounds = point.distances, point.residual + doubt, rounds + used
            if (doubt <= _ROUNDING_SHARE * PROMISE * tau * prior[one].sum(axis=1)).all():
                break
    small = torch.from_numpy(np.stack([weights, distances])).to(stacks.device)
    if guess is not None and np.array_equal(weights, guess.weights):
        aggregate, rounds = guess.aggregate, rounds + guess.rounds
    else:
        aggregate = combine(stacks, small[0], wide=wide)
    return Clipped(aggregate, small[0], small[1], torch.from_numpy(bound * scale), rounds)


def _refuse_non_finite(gram: Gram, first: int) -> None:
    finite = np.isfinite(gram.matrices.diagonal(axis1=1, axis2=2))
    if not finite.all():
        stack, row = np.argwhere(~finite)[0]
        where = f"row {row} of stack {first + stack}"
        raise ValueError(f"parts: {where} holds values that are not finite, or too large for their squares to be")


def _rounding_bound(gram: Gram, base: Rows, weights: Array, point: Point, tau: float, prior: Array) -> Array:
    """How far rounding of the Gram matrices, and of moving them to the base row, may move the residual."""
    offsets = np.eye(weights.shape[1]) - weights[:, None, :]  # g_i - v, as a combination of rows
    sizes = np.sqrt(gram.matrices.diagonal(axis1=1, axis2=2))
    reach = np.abs(offsets * sizes[:, None, :]).sum(axis=2)
    squares = point.distances**2
    slack = gram.relative_error * reach**2  # on |g_i - v|^2
    moved = np.take_along_axis(sizes, base[:, None], axis=1)
    slack += np.where(moved > 0, _MOVING_ERROR * (reach + moved * np.abs(offsets).sum(axis=2)) ** 2, 0)
    if not gram.wide:
        # Not the measured error alone: where rows lie on a line, the solver has also cut cosines to one.
        corrected = gram.matrices[:, None] - gram.measured_error
        measured = (np.matmul(offsets[:, None], corrected) * offsets[:, None]).sum(axis=3)
        slack += np.abs(measured - squares[:, None]).max(axis=1)
    clipped = np.sqrt(squares + slack) > tau
    relative = slack / np.maximum(np.maximum(2 * squares, slack), TINY)  # on |g_i - v|, at most 1
    direct = math.sqrt(gram.relative_error) * np.abs(point.error).sum(axis=1)  # on the residual's own norm
    bound: Array = np.where(clipped, prior * relative, 0).sum(axis=1) * tau + direct
    return bound
