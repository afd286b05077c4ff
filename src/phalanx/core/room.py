"""Room for long vectors. In a process that keeps it, what one vector frees serves the next of the same size.

A step makes and frees a dozen vectors as long as the model or a part of it. Fresh memory has to be cleared by the
system first, page by page, and that takes longer than the arithmetic. The C library could keep what is freed
(``training.allocation``), but not in one piece: torch wants memory at multiples of 64 bytes, for which glibc takes a
longer piece and cuts it; others take what is left; and after some steps no piece is long enough.
"""

from __future__ import annotations

from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 64  # what torch's own vectors have
_SHORT = 1 << 17  # bytes: below, the C library does well
_FORGOTTEN = 256  # after so many other rooms, a size is no longer in use


class _Stock:
    """Rooms that are free, by their size. Any thread may give one back, at any moment: nothing here takes a lock."""

    def __init__(self) -> None:
        self.is_kept = False
        self._free: dict[int, list[_Bytes]] = {}
        self._used: dict[int, int] = {}
        self._clock = 0

    def take(self, length: int) -> _Bytes:
        self._clock += 1
        self._used[length] = self._clock
        if self._clock % _FORGOTTEN == 0:
            self.drop([size for size, used in list(self._used.items()) if used <= self._clock - _FORGOTTEN])
        try:
            return self._free[length].pop()
        except (KeyError, IndexError):
            return np.empty(length, np.uint8)

    def give_back(self, room: _Bytes) -> None:
        if self.is_kept and len(room) in self._used:
            self._free.setdefault(len(room), []).append(room)

    def drop(self, sizes: list[int]) -> None:
        for size in sizes:
            self._used.pop(size, None)
            self._free.pop(size, None)


_STOCK = _Stock()


def keep_rooms(kept: bool) -> None:
    """From now on, whether rooms that are no longer used are kept for later ones."""
    _STOCK.is_kept = kept
    if not kept:
        _STOCK.drop(list(_STOCK._used))


def make_room(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A vector with nothing in it yet."""
    length = size * dtype.itemsize
    if length <= _SHORT or torch.device(device).type != "cpu":
        return torch.empty(size, dtype=dtype, device=device)
    taken = _STOCK.take(length + _ALIGNMENT) if _STOCK.is_kept else np.empty(length + _ALIGNMENT, np.uint8)
    start = -taken.ctypes.data % _ALIGNMENT
    lent = taken[start : start + length]
    if _STOCK.is_kept:  # the vector, and all that lies in it, holds on to `lent`, and nothing else does
        finalize(lent, _STOCK.give_back, taken).atexit = False
    return torch.from_numpy(lent).view(dtype)


def reserve_rooms(size: int, dtype: torch.dtype, count: int) -> None:
    """Take so much memory now, rather than when somebody waits for it: there is room for ``count`` such vectors."""
    for room in [make_room(size, dtype) for _ in range(count)]:
        room.zero_()


def make_room_like(vector: Tensor) -> Tensor:
    return make_room(vector.numel(), vector.dtype, vector.device)


def make_bytes(length: int) -> memoryview:
    """The same for bytes."""
    return make_room(length, torch.uint8).numpy().data
