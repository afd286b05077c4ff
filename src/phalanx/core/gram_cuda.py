"""The two passes of ``gram.py`` on a GPU, in float64 throughout: Hopper's tensor cores make that as fast as reading.

Triton comes with torch's CUDA builds. Each program sums a span of columns and writes its own result; nothing is
added atomically, so the same bytes in give the same bytes out.
"""

from __future__ import annotations

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


@triton.jit
def _gram_kernel(
    rows,
    centre,
    out,
    n,
    d,
    stack_stride,
    row_stride,
    CENTRED: tl.constexpr,
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
        if CENTRED:
            row = tl.load(first + tl.load(centre + stack) * row_stride + columns, mask=inside, other=0.0).to(tl.float64)
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


def compute_gram_cuda(stacks: Tensor, centre: npt.NDArray[np.intp] | None) -> Tensor:
    """Float64 Gram matrices ``(batch, n, n)`` on the device; see ``gram.compute_gram``."""
    batch, n, d = stacks.shape
    tile = max(16, triton.next_power_of_2(n))
    if tile > _LARGEST_TILE:
        return _compute_gram_blocks(stacks, centre)
    # Larger tiles take longer spans, so that the partial sums stay small beside a row.
    span = _SPAN * max(3 * (tile // 16) ** 2 // 8, 1)
    spans = triton.cdiv(d, span)
    partial = torch.empty((batch, spans, tile, tile), dtype=torch.float64, device=stacks.device)
    centres = stacks if centre is None else torch.from_numpy(centre).to(stacks.device, torch.int64)
    strides = stacks.stride(0), stacks.stride(1)
    shape = {"CENTRED": centre is not None, "SPAN": span, "TILE": tile, "BLOCK": max(16, 2048 // tile)}
    warps = 1 if tile == 16 else 4
    _gram_kernel[(spans, batch)](stacks, centres, partial, n, d, *strides, **shape, num_warps=warps, num_stages=2)
    out = torch.empty((batch, tile, tile), dtype=torch.float64, device=stacks.device)
    _sum_spans_kernel[(tile, batch)](partial, out, spans, TILE=tile, AT_ONCE=_SPANS_AT_ONCE)
    return out[:, :n, :n]


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
