"""Files in the place of memory: what a peer holds of the last steps only because somebody may ask for it.

A large model leaves several vectors of its length behind in every step. Written to files and mapped, they are bytes and
tensors like others, but their pages are the system's: it reads them when they are touched. The files have no names as
soon as they are mapped, so they end with whoever holds them last, and with the process however it ends.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any
from weakref import ref

import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.core.errors import WriteFailed
from phalanx.core.wire import Piece, decode_tensor, view_bytes
from phalanx.training.allocation import drop_pages
from phalanx.training.checkpoints import write_all

SHELVED_FROM = 1 << 26
"""Bytes: models from this size on need a shelf."""
_PAUSE = 0.1  # seconds


class Shelf:
    """A folder for such files. Any thread may use it.

    Pages that somebody has read count as this process's memory until the system wants them. A thread lets go of them
    a few times a second.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._mapped: list[ref[npt.NDArray[Any]]] = []
        self._lock = threading.Lock()
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise _complain(folder, error) from error
        self._closing = threading.Event()
        threading.Thread(target=self._tidy, name="shelf", daemon=True).start()

    def close(self) -> None:
        """Let pages be. What was put here can be read on."""
        self._closing.set()

    def _tidy(self) -> None:
        while not self._closing.wait(_PAUSE):
            self.rest()

    def put(self, data: Piece) -> Piece:
        """The same bytes, in a file; :class:`WriteFailed` if the disk does not take them. Nobody may write to them."""
        if not len(data):
            return data
        with self._lock:
            self._count += 1
            path = self._folder / f"{self._count}.bin"
        try:
            try:
                with open(path, "xb", buffering=0) as file:
                    write_all(file, data)
                found = torch.from_file(str(path), shared=False, size=len(data), dtype=torch.uint8)
            finally:
                path.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:
            raise _complain(path, error) from error
        array: npt.NDArray[Any] = found.numpy()
        with self._lock:
            self._mapped.append(ref(array))
        return array.data

    def put_tensor(self, vector: Tensor) -> Tensor:
        """The same numbers, in a file. A vector on a GPU stays where it is."""
        if vector.device.type != "cpu":
            return vector
        found = decode_tensor(self.put(view_bytes(vector)), vector.numel(), vector.dtype)
        assert found is not None
        return found

    def rest(self) -> None:
        """Let go of all pages that were read since the last time: they are in the files."""
        with self._lock:
            held = [array for array in (weak() for weak in self._mapped) if array is not None]
            self._mapped = [ref(array) for array in held]
        for array in held:
            drop_pages(array.ctypes.data, array.nbytes)

    @property
    def held(self) -> int:
        """Bytes of all files that somebody still holds."""
        with self._lock:
            return sum(array.nbytes for array in (weak() for weak in self._mapped) if array is not None)


def _complain(path: Path, error: Exception) -> WriteFailed:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return WriteFailed(f"{path}: what past steps left could not be written: {reason}")
