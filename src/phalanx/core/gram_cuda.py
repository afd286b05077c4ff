"""The two passes of ``gram.py`` on a GPU, in float64 throughout: Hopper's tensor cores make that as fast as reading.

Between the passes the host solves an ``n x n`` problem. Waiting for it would take longer than the passes, so the GPU
re-weights by itself and goes on with what it finds (:func:`guess_cuda`); the host checks that meanwhile, and
corrects it if need be. Triton comes with torch's CUDA builds. Nothing is added atomically, and no stack
depends on the others in its batch: the same bytes in give the same bytes out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

_SPAN = 8192
_SPANS_AT_ONCE = 64
_COMBINE_BLOCK = 1024
_CONVERTED = 1 << 20
_LARGEST_TILE = 128  # a larger one would no longer fit a multiprocessor
_GUESS_ROUNDS = 64


@triton.jit
def _gram_kernel(
    rows,
    centre,
    out,
    n,
    d,
    stack_stride,
    row_stride,
    LOOK_UP: tl.constexpr,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span, stack = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tl.arange(0, TILE)
    first = rows + stack * stack_stride
    total = tl.zeros((TILE, TILE), tl.float64)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, d), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < d
        mask = (index[:, None] < n) & inside[None, :]
        block = tl.load(first + index[:, None].to(tl.int64) * row_stride + columns[None, :], mask=mask, other=0.0)
        block = block.to(tl.float64)
        if LOOK_UP:
            middle = tl.load(centre + stack)
            if middle >= 0:
                row = tl.load(first + middle * row_stride + columns, mask=inside, other=0.0).to(tl.float64)
                block = tl.where(mask, block - row[None, :], 0.0)
        total = tl.dot(block, tl.trans(block), total, out_dtype=tl.float64)
    place = (stack * tl.num_programs(0) + span) * TILE * TILE
    tl.store(out + place + index[:, None] * TILE + index[None, :], total)


@triton.jit
def _sum_spans_kernel(partial, out, spans, TILE: tl.constexpr, AT_ONCE: tl.constexpr):
    # torch.sum may add in another order for another batch; this does not.
    row, stack = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, spans, AT_ONCE):
        span = start + tl.arange(0, AT_ONCE)
        place = ((stack * spans + span[:, None]) * TILE + row) * TILE + index[None, :]
        total += tl.sum(tl.load(partial + place, mask=span[:, None] < spans, other=0.0), axis=0)
    tl.store(out + (stack * TILE + row) * TILE + index, total)


@triton.jit
def _combine_kernel(rows, weights, out, n, d, stack_stride, row_stride, BLOCK: tl.constexpr):
    stack = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < d
    total = tl.zeros((BLOCK,), tl.float64)
    row = rows + stack * stack_stride + columns
    for i in range(n):
        total += tl.load(weights + stack * n + i) * tl.load(row, mask=inside, other=0.0).to(tl.float64)
        row += row_stride
    tl.store(out + stack * d + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _guess_kernel(gram, prior, limits, weights, bases, n, ROUNDS: tl.constexpr, TILE: tl.constexpr):
    # As in balance.py, one stack a program, but for its care for the largest rows: the host looks at the base again.
    stack = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, TILE)
    same = i[:, None] == i[None, :]
    tau, aim = tl.load(limits), tl.load(limits + 1)
    p = tl.load(prior + stack * n + i, mask=i < n, other=0.0)
    g = tl.load(gram + (stack * TILE + i[:, None]) * TILE + i[None, :])
    squares = tl.sum(tl.where(same, g, 0.0), axis=1)
    distances = tl.sqrt(tl.maximum(squares[:, None] + tl.sum(tl.where(same, g, 0.0), axis=0)[None, :] - 2 * g, 0.0))
    inside = tl.minimum(distances, tau)
    loss = tl.sum(p[:, None] * inside * (distances - 0.5 * inside), axis=0)
    base = tl.argmin(tl.where(i < n, loss, float("inf")), axis=0)
    column = tl.sum(tl.where(i[None, :] == base, g, 0.0), axis=1)
    row = tl.sum(tl.where(i[:, None] == base, g, 0.0), axis=0)
    about = g - column[:, None] - row[None, :] + tl.sum(tl.where(i == base, squares, 0.0))
    own = tl.where(same & (i[:, None] != base) & (i[:, None] < n), tl.maximum(about, 0.0), 0.0)
    sizes, across = tl.sqrt(tl.sum(own, axis=1)), tl.sqrt(tl.sum(own, axis=0))
    inverse, inverse_across = 1 / tl.maximum(sizes, 1e-300), 1 / tl.maximum(across, 1e-300)
    real = (sizes[:, None] > 1e-300) & (across[None, :] > 1e-300)
    cosines = tl.where(real, about * inverse[:, None] * inverse_across[None, :], 0.0)
    w = tl.zeros((TILE,), tl.float64)
    used, left = 0, ROUNDS
    while left > 0:
        c = w * sizes
        c_across = tl.sum(tl.where(same, c[:, None], 0.0), axis=0)
        along = tl.sum(cosines * c_across[None, :], axis=1)
        beside = tl.maximum(tl.sum(c * along) - along * along, 0.0)
        distance = tl.sqrt((sizes - along) * (sizes - along) + beside)
        pulls = p * (tau / tl.maximum(distance, tau))
        total = tl.sum(pulls)
        error = pulls * sizes - total * c
        error_across = tl.sum(tl.where(same, error[:, None], 0.0), axis=0)
        residual = tl.sum(error * tl.sum(cosines * error_across[None, :], axis=1))
        left -= 1
        if (residual <= aim * aim * tl.sum(p) * tl.sum(p)) & (used > 0):
            left = 0
        else:
            w = pulls / total
            used += 1
    tl.store(weights + stack * n + i, w, mask=i < n)
    tl.store(bases + 2 * stack, base)
    tl.store(bases + 2 * stack + 1, used)


@dataclass(frozen=True, slots=True)
class Guess:
    """What the GPU found by itself; all but the aggregate are on the host."""

    matrices: npt.NDArray[np.float64]
    bases: npt.NDArray[np.intp]
    weights: npt.NDArray[np.float64]
    rounds: int
    aggregate: Tensor


def guess_cuda(stacks: Tensor, tau: float, aim: float, prior: npt.NDArray[np.float64]) -> Guess:
    """Gram matrices, and where re-weighting leads: until the residual is ``aim * sum(prior)``, or for 64 rounds.

    The long sum that forms the aggregate is still under way when this returns.
    """
    batch, n, _ = stacks.shape
    given = torch.from_numpy(np.concatenate([prior.ravel(), [tau, aim]])).to(stacks.device)
    matrices = _compute_gram_tiles(stacks, None)
    tile = matrices.shape[1]
    found = torch.empty(batch * (tile * tile + n + 2), dtype=torch.float64, device=stacks.device)
    flat, weights, bases = found.split([batch * tile * tile, batch * n, 2 * batch])  # type: ignore[no-untyped-call]
    flat.copy_(matrices.view(-1))
    limits = given[batch * n :]
    _guess_kernel[(batch,)](matrices, given, limits, weights, bases, n, ROUNDS=_GUESS_ROUNDS, TILE=tile, num_warps=1)
    on_host = torch.empty(found.shape, dtype=torch.float64, pin_memory=True)
    on_host.copy_(found, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    aggregate = combine_cuda(stacks, weights.view(batch, n))
    copied.synchronize()
    values = on_host.numpy().copy()
    flat_host, weights_host, bases_host = np.split(values, [batch * tile * tile, batch * (tile * tile + n)])
    tiles = flat_host.reshape(batch, tile, tile)[:, :n, :n]
    base_and_rounds = bases_host.astype(np.intp).reshape(batch, 2)
    rounds = int(base_and_rounds[:, 1].max())
    return Guess(tiles, base_and_rounds[:, 0], weights_host.reshape(batch, n), rounds, aggregate)


def compute_gram_cuda(stacks: Tensor, centre: npt.NDArray[np.intp] | None) -> Tensor:
    """Float64 Gram matrices ``(batch, n, n)`` on the device; see ``gram.compute_gram``."""
    n = stacks.shape[1]
    return _compute_gram_blocks(stacks, centre) if n > _LARGEST_TILE else _compute_gram_tiles(stacks, centre)[:, :n, :n]


def _compute_gram_tiles(stacks: Tensor, centre: npt.NDArray[np.intp] | None) -> Tensor:
    """The Gram matrices in tiles of a power of two, zero beyond ``n``."""
    batch, n, d = stacks.shape
    tile = max(16, triton.next_power_of_2(n))
    # Larger tiles take longer spans, so that the partial sums stay small beside a row.
    span = _SPAN * max(3 * (tile // 16) ** 2 // 8, 1)
    spans = triton.cdiv(d, span)
    partial = torch.empty((batch, spans, tile, tile), dtype=torch.float64, device=stacks.device)
    # Triton cannot multiply 16-bit numbers, made float64 on the way, unless a branch hides where they come from.
    look_up = centre is not None or stacks.element_size() == 2
    centres = (
        torch.from_numpy(np.full(batch, -1) if centre is None else centre).to(stacks.device) if look_up else stacks
    )
    strides = stacks.stride(0), stacks.stride(1)
    shape = {"LOOK_UP": look_up, "SPAN": span, "TILE": tile, "BLOCK": max(16, 2048 // tile)}
    warps = 1 if tile == 16 else 4
    _gram_kernel[(spans, batch)](stacks, centres, partial, n, d, *strides, **shape, num_warps=warps, num_stages=2)
    out = torch.empty((batch, tile, tile), dtype=torch.float64, device=stacks.device)
    _sum_spans_kernel[(tile, batch)](partial, out, spans, TILE=tile, AT_ONCE=_SPANS_AT_ONCE)
    return out


def _compute_gram_blocks(stacks: Tensor, centre: npt.NDArray[np.intp] | None) -> Tensor:
    batch, n, d = stacks.shape
    total = torch.zeros((batch, n, n), dtype=torch.float64, device=stacks.device)
    width = max(_CONVERTED // n, 1)
    for b in range(batch):
        for start in range(0, d, width):
            block = stacks[b, :, start : start + width].to(torch.float64)
            if centre is not None:
                block = block - block[int(centre[b])]
            total[b].addmm_(block, block.T)
    return total


def combine_cuda(stacks: Tensor, weights: Tensor) -> Tensor:
    """``weights[b] @ stacks[b]`` in float64, rounded to the type of the rows."""
    batch, n, d = stacks.shape
    out = torch.empty((batch, d), dtype=stacks.dtype, device=stacks.device)
    _combine_kernel[(triton.cdiv(d, _COMBINE_BLOCK), batch)](
        stacks, weights.contiguous(), out, n, d, stacks.stride(0), stacks.stride(1), BLOCK=_COMBINE_BLOCK, num_warps=4
    )
    return out
