"""Room for long vectors, taken so that what one vector frees serves the next.

torch asks the C library for memory at multiples of 64 bytes. To find that, glibc looks for a piece longer by as much,
and gives back what it cuts off: when the vector is freed, its piece is too short for another of the same size, and the
next one lies elsewhere, in pages that the system has to clear first. That can take longer than the arithmetic. Asked
for some bytes more at any place, it finds the piece that was freed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # what torch's own vectors have
_SHORT = 1 << 15


def make_room(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A vector with nothing in it yet."""
    if size <= _SHORT or torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    length = size * dtype.itemsize
    taken = np.empty(length + _ALIGNMENT, np.uint8)
    start = -taken.ctypes.data % _ALIGNMENT
    return torch.from_numpy(taken[start : start + length]).view(dtype)


def make_room_like(vector: Tensor) -> Tensor:
    return make_room(vector.numel(), vector.dtype, vector.device)
