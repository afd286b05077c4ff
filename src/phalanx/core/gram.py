"""The two passes over long rows that CenteredClip needs: their Gram matrix, and a weighted sum of them.

Both read the rows in blocks, so the workspace is a few megabytes whatever the length. Sums across blocks are always
float64. Within a block the arithmetic is *wide* (float64) or, for long float32 rows on a CPU, *narrow* (float32), which
is three times faster; a narrow Gram matrix comes with its error, measured by forming some of its blocks both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array: TypeAlias = npt.NDArray[np.float64]

# Up to this many rows a GPU guesses the weights before the host has seen the Gram matrix.
MOST_ROWS_TO_GUESS = 32

# Numbers that are converted at once, and columns that one float64 product sums.
_CONVERTED = 1 << 17
_WIDE_COLUMNS = 8192
# Products of float32 numbers are exact in float64; this bounds the error of summing them, for up to 10^8 columns.
_WIDE_ERROR = 4e-12

# Narrow arithmetic: from how many numbers and blocks on it pays, how many columns one float32 product sums, how many
# numbers go into one call, the error assumed beyond what is measured, and how many blocks of a call are sampled.
_NARROW_FROM = 1 << 21
_NARROW_BLOCKS = 8
_NARROW_COLUMNS = 2048
_NARROW_CALL = 1 << 24
_NARROW_ERROR = 2e-8
_NARROW_SAMPLES = 2
# A row with a smaller square than this may have lost numbers to underflow in float32.
_NARROW_LEAST_SQUARE = 1e-20


@dataclass(frozen=True, slots=True)
class Gram:
    """Inner products of the rows of each stack, on the host, and how exact they are."""

    matrices: Array
    """(batch, n, n)"""
    measured_error: Array
    """(batch, 2, n, n): two estimates of the error, as matrices; zero if wide"""
    relative_error: float
    """a bound on whatever else is wrong with an entry, relative to the norms of its two rows"""
    wide: bool


def compute_gram(stacks: Tensor, centre: npt.NDArray[np.intp] | None = None) -> Gram:
    """The Gram matrix of each stack of ``(batch, n, d)``, about its row ``centre[b]`` if given (then always wide)."""
    if stacks.is_cuda:
        from phalanx.core.gram_cuda import compute_gram_cuda

        matrices = compute_gram_cuda(stacks, centre).cpu().numpy()
        return make_wide(matrices)
    if centre is None and is_narrow(stacks.shape[1], stacks.shape[2], stacks.dtype):
        narrow, errors = zip(*(_narrow_gram(rows) for rows in stacks), strict=True)
        matrices = np.stack(narrow)
        if np.isfinite(matrices).all() and matrices.diagonal(axis1=1, axis2=2).min() > _NARROW_LEAST_SQUARE:
            return Gram(matrices, np.stack(errors), _NARROW_ERROR, wide=False)
    centres = [None] * len(stacks) if centre is None else centre.tolist()
    matrices = np.stack([_wide_gram(rows, row).numpy() for rows, row in zip(stacks, centres, strict=True)])
    return make_wide(matrices)


def is_narrow(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether a CPU sums a stack of this shape in float32 (at first, and unless its numbers forbid it)."""
    long = rows * columns >= _NARROW_FROM and columns >= _NARROW_BLOCKS * _NARROW_COLUMNS
    return dtype == torch.float32 and long


def make_wide(matrices: Array) -> Gram:
    """Matrices that were summed in float64."""
    return Gram(matrices, np.zeros((len(matrices), 2, *matrices.shape[1:])), _WIDE_ERROR, wide=True)


def combine(stacks: Tensor, weights: Tensor, *, wide: bool) -> Tensor:
    """``weights[b] @ stacks[b]`` for every stack, summed in float64 (float32 if not wide), in the rows' type."""
    if stacks.is_cuda:
        from phalanx.core.gram_cuda import combine_cuda

        return combine_cuda(stacks, weights)
    out = torch.empty((stacks.shape[0], stacks.shape[2]), dtype=stacks.dtype, device=stacks.device)
    for rows, factors, result in zip(stacks, weights, out, strict=True):
        if wide or rows.dtype != torch.float32:
            for columns in _column_blocks(rows, _CONVERTED // len(rows)):
                result[columns] = factors @ _converted(rows, columns)
            continue
        narrow_factors, done = factors.to(torch.float32), 0
        for columns, blocks in _narrow_blocks(rows):
            sums = result[columns].view(len(blocks), 1, _NARROW_COLUMNS)
            torch.bmm(narrow_factors.expand(len(blocks), 1, -1), blocks, out=sums)
            done = columns.stop
        result[done:] = narrow_factors @ rows[:, done:]
    return out


def _wide_gram(rows: Tensor, centre: int | None = None) -> Tensor:
    total = torch.zeros((len(rows), len(rows)), dtype=torch.float64, device=rows.device)
    for columns in _column_blocks(rows, min(_CONVERTED // len(rows), _WIDE_COLUMNS)):
        block = _converted(rows, columns)
        if centre is not None:
            block = block - block[centre]
        total.addmm_(block, block.T)
    return total


def _narrow_gram(rows: Tensor) -> tuple[Array, Array]:
    """The Gram matrix from float32 blocks, and two estimates of its error."""
    total = torch.zeros((len(rows), len(rows)), dtype=torch.float64, device=rows.device)
    errors = torch.zeros((2, *total.shape), dtype=torch.float64, device=rows.device)
    done = 0
    for columns, blocks in _narrow_blocks(rows):
        products = torch.bmm(blocks, blocks.transpose(1, 2))
        total += products.sum(0, dtype=torch.float64)
        errors += _measured_errors(blocks, products)
        done = columns.stop
    rest = rows[:, done:]
    total += rest @ rest.T
    return total.numpy(), errors.numpy()


def _measured_errors(blocks: Tensor, products: Tensor) -> Tensor:
    """Two estimates of the error of a call: from the block in which the rows have the largest share of their squares,
    and from a few that are evenly spread, both scaled up to what it would be if all blocks erred alike.

    Rounding errors of ordinary rows average out over the blocks; those of rows that repeat a value do not.
    """
    squares = products.diagonal(dim1=1, dim2=2)
    shares = squares / squares.sum(0).clamp_min(_NARROW_LEAST_SQUARE)
    heaviest = int(shares.sum(1).argmax())
    spread = sorted({(2 * i + 1) * len(blocks) // (2 * _NARROW_SAMPLES) for i in range(_NARROW_SAMPLES)})
    sampled = blocks[[heaviest, *spread]].to(torch.float64)
    errors = products[[heaviest, *spread]] - torch.bmm(sampled, sampled.transpose(1, 2))
    scale = shares[heaviest].double().clamp_min(1e-3 / len(blocks)).rsqrt()
    return torch.stack([errors[0] * (scale[:, None] * scale), errors[1:].sum(0) * (len(blocks) / len(spread))])


def _narrow_blocks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """All whole blocks of columns, as views ``(count, n, _NARROW_COLUMNS)``."""
    width = max(_NARROW_CALL // (len(rows) * _NARROW_COLUMNS), 1) * _NARROW_COLUMNS
    whole = rows.shape[1] // _NARROW_COLUMNS * _NARROW_COLUMNS
    for columns in _column_blocks(rows[:, :whole], width):
        yield columns, rows[:, columns].view(len(rows), -1, _NARROW_COLUMNS).transpose(0, 1)


def _converted(rows: Tensor, columns: slice) -> Tensor:
    """A float64 copy, even of float64: how rows lie in memory must not change the bits."""
    return rows[:, columns].to(torch.float64, memory_format=torch.contiguous_format, copy=True)


def _column_blocks(rows: Tensor, width: int) -> Iterator[slice]:
    length, width = rows.shape[1], max(width, 1)
    return (slice(at, min(at + width, length)) for at in range(0, length, width))
