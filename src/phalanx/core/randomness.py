"""Deterministic random streams: from one public seed everybody draws the same validators, batches and vectors.

A stream is BLAKE3's extendable output, so it is the same on every platform, and cheap. Choices are unbiased. Gaussian
vectors look up 16 bits of the stream at a time in a fixed table of 65,536 quantiles: no arithmetic, hence the same bits
on a CPU and on a GPU. The table's values are symmetric, of magnitude up to 4.33, with variance 0.99998.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import TypeVar

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from phalanx.core.crypto import compute_digest
from phalanx.core.errors import LocalError

T = TypeVar("T")

_TABLE_SIZE = 1 << 16
_TABLE_DIGEST = "03fddd0ec98e825ed5a68928ff44a247adabb4117979bc88683d0af22acd6bef"
_VALUES_AT_ONCE = 1 << 19
_SHORT = 1 << 15  # up to so many values, the calls cost more than what they do
_WORD = 1 << 64
_STREAMS = blake3(derive_key_context="phalanx 1 stream")  # copied for each: deriving the key takes longer


def derive_seed(seed: bytes, purpose: str, *fields: bytes) -> bytes:
    """A seed for one purpose, unrelated to those for others."""
    return compute_digest(f"seed for {purpose}", seed, *fields)


class Stream:
    """A sequence of draws that the seed alone determines."""

    def __init__(self, seed: bytes) -> None:
        self._hasher = _STREAMS.copy().update(seed)
        self._position = 0

    def draw_bytes(self, count: int) -> bytes:
        data = self._hasher.digest(length=count, seek=self._position)
        self._position += count
        return data

    def draw_below(self, bound: int) -> int:
        """A whole number from 0 to ``bound - 1``, each equally likely: words above the last multiple are skipped."""
        if not 0 < bound <= _WORD:
            raise ValueError(f"bound: expected 1 to 2**64, got {bound}")
        limit = _WORD - _WORD % bound
        while (word := int.from_bytes(self.draw_bytes(8), "little")) >= limit:
            pass
        return word % bound

    def draw_sample(self, population: Sequence[T], count: int) -> list[T]:
        """``count`` different members of the population in random order (the first steps of a Fisher-Yates shuffle)."""
        if not 0 <= count <= len(population):
            raise ValueError(f"count: expected 0 to {len(population)}, got {count}")
        pool = list(population)
        for i in range(count):
            j = i + self.draw_below(len(pool) - i)
            pool[i], pool[j] = pool[j], pool[i]
        return pool[:count]


def gaussian_vector(seed: bytes, size: int, device: torch.device | str = "cpu") -> Tensor:
    """``size`` float32 numbers, close to independent standard normal; the same bits on every device."""
    if size < 0:
        raise ValueError(f"size: expected a whole number from 0, got {size}")
    stream = Stream(seed)
    if size <= _SHORT and device == "cpu":
        return torch.from_numpy(gaussian_table()[np.frombuffer(stream.draw_bytes(2 * size), dtype="<u2")])
    out = torch.empty(size, dtype=torch.float32, device=device)
    table = None if out.device.type == "cpu" else torch.from_numpy(gaussian_table().copy()).to(device)
    for start in range(0, size, _VALUES_AT_ONCE):
        block = out[start : start + _VALUES_AT_ONCE]
        places = np.frombuffer(stream.draw_bytes(2 * len(block)), dtype="<u2")
        if table is None:
            np.take(gaussian_table(), places, out=block.numpy(), mode="wrap")
        else:
            index = torch.from_numpy(places.astype(np.int32)).to(device)
            torch.index_select(table, 0, index, out=block)
    return out


@cache
def gaussian_table() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The quantiles of the standard normal at ``(i + 1/2) / 65536``, rounded to float32; read-only."""
    normal = NormalDist()
    lower = np.array([normal.inv_cdf((i + 0.5) / _TABLE_SIZE) for i in range(_TABLE_SIZE // 2)], dtype="<f4")
    table = np.concatenate([lower, -lower[::-1]])
    table.setflags(write=False)
    if blake3(table.tobytes()).hexdigest() != _TABLE_DIGEST:
        raise LocalError("this platform computes other Gaussian quantiles than its peers and cannot take part")
    return table
