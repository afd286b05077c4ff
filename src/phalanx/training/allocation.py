"""Where long vectors get their memory, and when they give it back.

Every step makes and frees a dozen vectors as long as the model. By default the C library returns freed memory of that
size to the system at once, and the system clears each page anew when it is touched: that takes longer than the
arithmetic on it. Where models are so large that memory is what lacks, it should be returned all the same.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

from torch import Tensor

from phalanx.core.room import keep_rooms

# From glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
_GROWTH = 1 << 26  # bytes that the heap grows by
_ALONE = 1 << 18  # bytes from which on a piece of memory is the system's own, and goes back to it when freed


def keep_freed_memory() -> bool:
    """From now on, memory that this process frees serves its next vectors. Returns whether the C library can do so.

    The process then holds what it needed at its peak until it ends.
    """
    keep_rooms(True)
    return _configure({_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _GROWTH})


def return_freed_memory() -> bool:
    """From now on, whatever is as long as a chunk or longer goes back to the system when it is freed.

    Left alone, the C library learns from the first chunks to take such memory from its heaps, where one that is still
    in use keeps all that were freed before it.
    """
    keep_rooms(False)
    trim_heaps()
    return _configure({_MMAP_THRESHOLD: _ALONE})


def trim_heaps() -> None:
    """Give the system what was freed so far."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _configure(settings: dict[int, int]) -> bool:
    try:
        configure = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc: all is as it was
        return False
    return all(configure(name, value) == 1 for name, value in settings.items())


def drop_pages(address: int, size: int) -> None:
    """Let the system have the whole pages of this range: those of a file are read again when they are touched, others
    are zeros then."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if length > 0 and advice is not None:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), advice)


def drop_values(vector: Tensor) -> None:
    """Let the system have a vector's memory until it is written to again. What it holds is then undefined."""
    if vector.device.type == "cpu" and vector.is_contiguous():
        drop_pages(vector.data_ptr(), vector.numel() * vector.itemsize)
