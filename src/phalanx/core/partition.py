"""Cutting a gradient into one part for each member, and putting the aggregates together again.

Blocks of coordinates go to the parts in turn, so that every part samples all layers and none is special. A block holds
4,096 coordinates, or fewer where the gradient is so short that some part would get none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from phalanx.core.room import make_room, make_room_like

BLOCK = 4096
_SHORT = 1 << 15  # up to so many numbers, one look-up in a table costs less than handling the parts one by one


@lru_cache(maxsize=64)
def compute_part_sizes(size: int, count: int) -> tuple[int, ...]:
    """How many coordinates each of ``count`` parts of a gradient of ``size`` has."""
    block = _block(size, count)
    whole, rest = divmod(size, block)
    sizes = [block * len(range(part, whole, count)) for part in range(count)]
    sizes[whole % count] += rest
    return tuple(sizes)


def split_parts(vector: Tensor, count: int) -> list[Tensor]:
    """The parts of ``vector``: a copy, in which they lie end to end."""
    if vector.ndim != 1:
        raise ValueError(f"vector: expected one dimension, got shape {tuple(vector.shape)}")
    vector, size = vector.contiguous(), vector.numel()
    if size <= _SHORT and vector.device.type == "cpu":
        places, _ = _get_places(size, count)
        return list(torch.split_with_sizes(vector.index_select(0, places), compute_part_sizes(size, count)))
    return _split_blocks(vector, count)


def _split_blocks(vector: Tensor, count: int) -> list[Tensor]:
    block = _block(len(vector), count)
    whole = len(vector) // block
    blocks, rest = vector[: whole * block].view(whole, block), vector[whole * block :]
    parts = make_room_like(vector).split_with_sizes(compute_part_sizes(len(vector), count))
    for index, part in enumerate(parts):
        own = len(range(index, whole, count)) * block
        part[:own].view(-1, block).copy_(blocks[index::count])
        if index == whole % count:
            part[own:] = rest
    return list(parts)


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """The vector whose parts these are; raises ``ValueError`` if their sizes do not fit together."""
    sizes, count = tuple(part.numel() for part in parts), len(parts)
    size = sum(sizes)
    if sizes != compute_part_sizes(size, count):
        raise ValueError(f"parts: sizes {list(sizes)} are not those of a vector of {size}")
    if size <= _SHORT and parts[0].device.type == "cpu":
        return torch.cat(list(parts)).index_select(0, _get_places(size, count)[1])
    block = _block(size, count)
    whole = size // block
    vector = make_room(size, parts[0].dtype, parts[0].device)
    blocks = vector[: whole * block].view(whole, block)
    for index, part in enumerate(parts):
        own = len(range(index, whole, count)) * block
        blocks[index::count] = part[:own].view(-1, block)
        if index == whole % count:
            vector[whole * block :] = part[own:]
    return vector


@lru_cache(maxsize=16)
def _get_places(size: int, count: int) -> tuple[Tensor, Tensor]:
    """Where in a vector the numbers of its parts are, end to end; and where in those the numbers of the vector are."""
    places = torch.cat(_split_blocks(torch.arange(size), count))
    return places, places.argsort()


def _block(size: int, count: int) -> int:
    if not 1 <= count <= size:
        raise ValueError(f"count: a gradient of {size} coordinates cannot be cut into {count} parts")
    return min(BLOCK, size // count)
