"""Files that a peer reads: regular ones, of a size that is known beforehand."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from phalanx.core.errors import LocalError


def read_file(path: Path, most: int, what: str) -> bytes:
    """What is in a regular file of at most ``most`` bytes; :class:`LocalError`, which begins with ``what``, if not.

    A device or a pipe has no end, or keeps its reader waiting: none is read, and none is waited for.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise LocalError(f"{what} {path} is not a regular file; expected one")
            data = file.read(most + 1)
    except ValueError:  # a name with a NUL
        raise LocalError(f"{what} {str(path)!r} is no name of a file") from None
    except OSError as error:
        raise LocalError(f"{what} cannot read {path}: {error.strerror}; expected a file") from None
    if len(data) > most:
        raise LocalError(f"{what} {path} has more than {most:,} bytes; expected a smaller file")
    return data
