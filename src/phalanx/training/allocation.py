"""Where long vectors get their memory.

Every step makes and frees a dozen vectors as long as the model. By default the C library returns freed memory of that
size to the system at once, and the system clears each page anew when it is touched: that takes longer than the
arithmetic on it.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_GROWTH = 1 << 26  # bytes that the heap grows by


def keep_freed_memory() -> bool:
    """From now on, memory that this process frees serves its next vectors. Returns whether the C library can do so.

    The process then holds what it needed at its peak until it ends.
    """
    try:
        configure = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc: all is as it was
        return False
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: _GROWTH}
    return all(configure(name, value) == 1 for name, value in settings.items())
