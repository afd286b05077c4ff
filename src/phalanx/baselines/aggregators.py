"""Aggregators for a trusted server that sees every gradient: what Phalanx is compared with.

Each takes rows ``(n, d)``, one for each peer, and ``byzantine`` (``f``), how many of them may lie. It returns a vector
``(d,)`` in the type of the rows. They are pure, and the order of the rows matters only for rounding and for ties.

A trusted server sees at once which rows are not finite and drops them. Whoever sent one was lying, so that fewer of the
others can be. If none is left, the result is zero: no step.

They compute in float64 and round once; only ``allreduce`` adds in float32, as peers do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from phalanx.core.clipping import centered_clip
from phalanx.core.errors import LocalError
from phalanx.core.partition import join_parts, split_parts

Baseline: TypeAlias = Callable[[Tensor, int], Tensor]

TAU = 1.0
"""How far ``server_clip`` lets one peer pull, unless told otherwise: ``partial(server_clip, tau=...)``."""

_NEAR = 1e-6  # the geometric median is found to this share of the distance to the nearest half of the rows
_COLUMNS = 1 << 14
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def mean(rows: Tensor, byzantine: int) -> Tensor:
    """The average. One liar moves it anywhere."""
    kept, _ = _read(rows, byzantine)
    if not len(kept):
        return _zero(rows)
    return kept.double().mean(0).to(rows.dtype)


def allreduce(rows: Tensor, byzantine: int) -> Tensor:
    """The average as peers find it without a server: each averages one part of all the gradients (a butterfly).

    They add in float32 (float64, if the rows are that), row after row; it is the mean but for that rounding.
    """
    kept, _ = _read(rows, byzantine)
    if not len(kept):
        return _zero(rows)
    wide = kept.to(torch.promote_types(rows.dtype, torch.float32))
    parts = min(len(kept), rows.shape[1])  # a part has a coordinate at least
    shares = [split_parts(row * (1 / len(kept)), parts) for row in wide]  # first divided, so that no sum overflows
    averages = [sum(pieces[1:], start=pieces[0]) for pieces in zip(*shares, strict=True)]
    return join_parts(averages).to(rows.dtype)


def median(rows: Tensor, byzantine: int) -> Tensor:
    """The median of each coordinate; of an even number of rows, the mean of the middle two (as numpy has it)."""
    kept, _ = _read(rows, byzantine)
    if not len(kept):
        return _zero(rows)
    ordered, n = kept.double().sort(0).values, len(kept)
    # Halves are added, not a sum halved: the middle two may be as large as numbers get.
    return (ordered[(n - 1) // 2] * 0.5 + ordered[n // 2] * 0.5).to(rows.dtype)


def trimmed_mean(rows: Tensor, byzantine: int) -> Tensor:
    """The mean of each coordinate without its ``f`` smallest and ``f`` largest (Yin et al. 2018)."""
    kept, liars = _read(rows, byzantine)
    if len(rows) <= 2 * byzantine:
        need = f"expected {2 * byzantine + 1} rows or more, or fewer liars"
        raise LocalError(f"trimmed_mean: {len(rows)} rows less {byzantine} on each side leave none; {need}")
    if not len(kept):
        return _zero(rows)
    ordered = kept.double().sort(0).values
    return ordered[liars : len(kept) - liars].mean(0).to(rows.dtype)


def geometric_median(rows: Tensor, byzantine: int) -> Tensor:
    """The point with the least sum of distances to the rows (RFA, Pillutla et al. 2019), to convergence.

    It is CenteredClip with a radius so small that no row is inside: all pull with the same force. If the median is a
    row itself, the result is within that radius of it, a millionth of how far the rows are from one another. Of an even
    number of rows on a line it is one of many medians.
    """
    kept, _ = _read(rows, byzantine)
    if not len(kept):
        return _zero(rows)
    if len(kept) == 1:
        return kept[0].clone()
    values = kept.double()
    size = values.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    values = values / size
    # For each row, the distance within which it has half of the others. Only a majority can make one small.
    reach = _compute_square_distances(values).sqrt_().sort(1).values[:, len(kept) // 2]
    closest = int(reach.argmin())
    if reach[closest] == 0:
        return kept[closest].clone()  # more than half of the rows are this one
    found = centered_clip(values, _NEAR * float(reach[closest])).aggregate
    return (found * size).to(rows.dtype)


def krum(rows: Tensor, byzantine: int) -> Tensor:
    """The row whose ``n - f - 2`` nearest others are nearest, by squares (Blanchard et al. 2017); the first of equals.

    Its guarantee needs ``n >= 2 f + 3``. Without, it is computed all the same as long as one neighbour is left.
    """
    kept, scores, _ = _score("krum", rows, byzantine)
    return kept[int(scores.argmin())].clone() if len(kept) else _zero(rows)


def multi_krum(rows: Tensor, byzantine: int) -> Tensor:
    """The mean of the ``n - f`` rows with the best scores of Krum."""
    kept, scores, liars = _score("multi_krum", rows, byzantine)
    if not len(kept):
        return _zero(rows)
    best = scores.argsort(stable=True)[: len(kept) - liars]
    return kept[best].double().mean(0).to(rows.dtype)


def _score(name: str, rows: Tensor, byzantine: int) -> tuple[Tensor, Tensor, int]:
    """The finite rows, for each the sum of squared distances to its nearest others, and how many liars are left."""
    kept, liars = _read(rows, byzantine)
    if len(rows) < byzantine + 3:
        need = f"expected {byzantine + 3} rows or more, or fewer liars"
        raise LocalError(f"{name}: {len(rows)} rows less {byzantine} liars, the row and one more leave none; {need}")
    neighbours = max(0, len(kept) - liars - 2)
    squares = _compute_square_distances(kept)
    squares.fill_diagonal_(-1.0)  # a row is no neighbour of its own: it comes first and is left out
    return kept, squares.sort(1).values[:, 1 : neighbours + 1].sum(1), liars


def _compute_square_distances(rows: Tensor) -> Tensor:
    """``|g_i - g_j|^2`` in float64, from differences: products would cancel where a liar is far away."""
    n = len(rows)
    squares = torch.zeros(n, n, dtype=torch.float64, device=rows.device)
    for piece in torch.split(rows, _COLUMNS, dim=1):
        wide = piece.double()
        for i in range(n - 1):
            squares[i, i + 1 :] += (wide[i + 1 :] - wide[i]).square_().sum(1)
    return squares + squares.T


def server_clip(rows: Tensor, byzantine: int, tau: float = TAU) -> Tensor:
    """CenteredClip of whole gradients (Karimireddy et al. 2021), by a server that all trust, to convergence.

    Its fixed point does not depend on where one starts, so there is no start to choose.
    """
    if not (isinstance(tau, int | float) and tau > 0):
        raise LocalError(f"server_clip: tau = {tau!r}; expected a number above 0")
    kept, _ = _read(rows, byzantine)
    if not len(kept):
        return _zero(rows)
    return centered_clip(kept, tau).aggregate


BASELINES: dict[str, Baseline] = {
    "mean": mean,
    "allreduce": allreduce,
    "median": median,
    "geometric_median": geometric_median,
    "krum": krum,
    "multi_krum": multi_krum,
    "trimmed_mean": trimmed_mean,
    "server_clip": server_clip,
}


def get_baseline(name: str, tau: float | None = None) -> Baseline:
    """The aggregator of this name; ``tau`` is for ``server_clip`` alone."""
    if name not in BASELINES:
        raise LocalError(f"aggregator {name!r}: expected one of {', '.join(BASELINES)}")
    if tau is None:
        return BASELINES[name]
    if name != "server_clip":
        raise LocalError(f"aggregator {name}: tau = {tau!r}; expected none: only server_clip has one")
    return partial(server_clip, tau=tau)


def _read(rows: Tensor, byzantine: int) -> tuple[Tensor, int]:
    """The rows that are finite, and how many liars may be left among them."""
    if not isinstance(rows, Tensor) or rows.ndim != 2 or 0 in rows.shape or rows.dtype not in _TYPES:
        got = f"shape {tuple(rows.shape)} of {rows.dtype}" if isinstance(rows, Tensor) else type(rows).__name__
        raise LocalError(f"rows: expected floating point numbers of shape (n, d), none of it 0, got {got}")
    n = len(rows)
    if isinstance(byzantine, bool) or not isinstance(byzantine, int) or not 0 <= byzantine < n:
        raise LocalError(
            f"byzantine = {byzantine!r}; expected a whole number from 0 to {n - 1}, below the number of rows"
        )
    finite = torch.isfinite(rows.detach()).all(1)
    dropped = n - int(finite.sum())
    return (rows.detach()[finite] if dropped else rows.detach()), max(0, byzantine - dropped)


def _zero(rows: Tensor) -> Tensor:
    return torch.zeros(rows.shape[1], dtype=rows.dtype, device=rows.device)
