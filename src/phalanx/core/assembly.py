"""Long bytes that come in chunks, put where they will be read: nothing is copied again once it has come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from phalanx.core.messages import MAX_CHUNK
from phalanx.core.room import make_bytes
from phalanx.core.wire import Piece


class Assembly:
    """Bytes of which some are here. Chunks come in any order, and more than once."""

    def __init__(self, room: memoryview) -> None:
        self._room = room
        self._missing = set(range(0, len(room), MAX_CHUNK))

    def add(self, offset: int, data: Piece) -> Piece | None:
        """The whole, once the last chunk has come."""
        self._room[offset : offset + len(data)] = data
        self._missing.discard(offset)
        return None if self._missing else self._room


class Rows:
    """Everybody's row of one part, end to end: the matrix that will be clipped, taken up as it comes."""

    def __init__(self, owners: Sequence[bytes], length: int) -> None:
        self.matrix: npt.NDArray[np.uint8] = np.frombuffer(make_bytes(len(owners) * length), np.uint8)
        self.matrix = self.matrix.reshape(len(owners), length)
        self._rows: dict[bytes, memoryview] = dict(zip(owners, (row.data for row in self.matrix), strict=True))
        self._free = dict(self._rows)

    def take(self, owner: bytes) -> memoryview | None:
        """The row of an owner, given out once: what was verified there must not be written to again."""
        return self._free.pop(owner, None)

    def fill(self, pieces: dict[bytes, Piece]) -> bool:
        """Whether the matrix now holds these. A row that was given out holds what was put there and nothing else."""
        for owner, data in pieces.items():
            if len(data) != len(self._rows[owner]) or (owner not in self._free and data is not self._rows[owner]):
                return False
        for owner in list(self._free):
            self._free.pop(owner)[:] = pieces[owner]
        return True
