"""How a vector travels: the wire types, and which numbers their bytes can say.

A gradient is committed to as it is sent, so rounding to the wire type comes before the commitment: whoever validates
rounds alike, and nothing about the bytes is approximate. What rounding does to an *aggregate*, V2 must forgive
(``verification.balance_bound``); hence ``roundoff`` and ``least`` here.

float32, bfloat16 and float16 hold one number after the other. int8 holds blocks of 32 numbers with one scale each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Piece: TypeAlias = bytes | bytearray | memoryview
"""The bytes of a part or an aggregate. Who holds them reads them only."""

_SHORT = 1 << 15  # up to so many numbers, calls cost more than arithmetic
# The types in which numpy holds the numbers, on the wire and here; for bfloat16, which it does not know, their bits.
_LITTLE = {torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2"}
_NATIVE = {torch.float32: np.float32, torch.float16: np.float16, torch.bfloat16: np.uint16}


# ---- Floating point


def encode_tensor(t: Tensor) -> bytes:
    """The numbers of a vector in a floating-point wire type, as little-endian bytes."""
    return _get_numbers(t).tobytes()


def view_bytes(t: Tensor) -> memoryview:
    """What :func:`encode_tensor` copies. Where the vector has its numbers in that form, these are they: a view."""
    return np.ascontiguousarray(_get_numbers(t)).view(np.uint8).data


def _get_numbers(t: Tensor) -> npt.NDArray[Any]:
    """The numbers as they are on the wire, without a copy if they are so here."""
    little = _LITTLE.get(t.dtype)
    if t.ndim != 1 or little is None:
        kinds = "float32, bfloat16, float16"
        raise ValueError(f"t: expected a vector of {kinds}, got shape {tuple(t.shape)} of {t.dtype}")
    values = t.detach().cpu()
    if t.dtype is torch.bfloat16:
        values = values.view(torch.uint16)
    return values.numpy().astype(little, copy=False)


def decode_tensor(data: Piece, size: int, dtype: torch.dtype) -> Tensor | None:
    """The vector of ``size`` numbers, or None if the bytes are too many or too few for it.

    It lies where the bytes are, if this machine holds numbers so; of what nobody can write to, such as ``bytes``, it is
    a copy.
    """
    if len(data) != size * dtype.itemsize:
        return None
    if size == 0:
        return torch.empty(0, dtype=dtype)
    numbers = np.frombuffer(data, _LITTLE[dtype])
    return _make_tensor(numbers.astype(_NATIVE[dtype], copy=not numbers.flags.writeable), dtype)


def _make_tensor(numbers: npt.NDArray[Any], dtype: torch.dtype) -> Tensor:
    """The numbers where they are, as torch sees them."""
    tensor = torch.from_numpy(numbers)
    return tensor.view(dtype) if dtype is torch.bfloat16 else tensor


def widen(numbers: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """From four bytes or more: then a signalling nan, which anybody can send, is an ordinary one afterwards."""
    with np.errstate(invalid="ignore"):
        return numbers.astype(np.float64)


@dataclass(frozen=True, eq=False)
class Wire:
    """A wire type. Here those of floating point, in which vectors are held as they are sent."""

    name: str
    dtype: torch.dtype
    """In which a vector is held."""
    roundoff: float
    least: float
    """Rounding moves a vector ``v`` of finite float32 numbers by at most ``roundoff |v| + least sqrt(size)``."""
    slack: float = 1.02
    """Rounding may lengthen a gradient that was scaled to the cap; by less than this factor, but for ``least``."""
    seamless: bool = True
    """Whether the bytes of vectors laid end to end are their bytes laid end to end."""

    @property
    def number_bytes(self) -> float:
        """What a number takes; in blocks, on average."""
        return self.dtype.itemsize

    def count_bytes(self, size: int) -> int:
        return size * self.dtype.itemsize

    def encode(self, vector: Tensor) -> bytes:
        """The bytes of a vector; of numbers that are not finite, bytes that decode to such numbers."""
        return encode_tensor(vector)

    def encode_parts(self, parts: Sequence[Tensor]) -> list[Piece]:
        """:meth:`encode` of each, of short ones at once; of long ones :func:`view_bytes`, to spare the copy."""
        ends = list(itertools.accumulate(part.numel() * part.itemsize for part in parts))
        if not ends or ends[-1] > 4 * _SHORT:
            return [view_bytes(part) for part in parts]
        data = encode_tensor(torch.cat(list(parts)) if len(parts) > 1 else parts[0])
        return [data[start:end] for start, end in itertools.pairwise((0, *ends))]

    def decode(self, data: Piece, size: int) -> Tensor | None:
        """The vector of ``size`` numbers, or None if the bytes are too many or too few for it."""
        return decode_tensor(data, size, self.dtype)

    def decode_wide(self, data: bytes) -> npt.NDArray[np.float64]:
        """The numbers in these bytes as float64, without a tensor in between. For types that are seamless."""
        numbers = np.frombuffer(data, _LITTLE[self.dtype])
        if self.dtype is torch.bfloat16:  # the upper half of a float32
            return widen((numbers.astype(np.uint32) << 16).view(np.float32))
        return widen(numbers.astype(np.float32, copy=False))

    def decode_rows(self, pieces: Sequence[Piece], size: int) -> Tensor:
        """Vectors of one size as the rows of a matrix. All pieces have the length they should have."""
        if len(pieces) * size <= _SHORT:
            joined = np.frombuffer(b"".join(pieces), _LITTLE[self.dtype])
            return _make_tensor(joined.astype(_NATIVE[self.dtype]).reshape(-1, size), self.dtype)
        numbers = np.empty((len(pieces), size), _NATIVE[self.dtype])
        for row, data in zip(numbers, pieces, strict=True):
            row[:] = np.frombuffer(data, _LITTLE[self.dtype])
        return _make_tensor(numbers, self.dtype)

    def view_rows(self, matrix: npt.NDArray[np.uint8]) -> Tensor:
        """Vectors whose bytes are the rows of a matrix: where they lie, if this machine holds numbers so."""
        numbers = matrix.view(_LITTLE[self.dtype]).astype(_NATIVE[self.dtype], copy=False)
        return _make_tensor(numbers, self.dtype)

    def round(self, vector: Tensor) -> Tensor:
        """What others read of a vector that is held here."""
        return vector

    def find_reaches(self, vector: Tensor) -> Tensor:
        """How far from each number of a vector that was read, at most, lie the numbers that round to it: float64."""
        return vector.double().abs().mul_(self.roundoff).add_(self.least / 2)


# ---- Eight bits, in blocks

# A block's bytes say `code * 2^(exponent - 126)`. From 248 on, even a code of 64 would be beyond float32.
BLOCK: Final = 32
_SHIFT, _LAST = 126, 247
_CHUNK = 1 << 16
_SCALES = np.array([2.0 ** (x - _SHIFT) if x <= _LAST else math.nan for x in range(256)], dtype=np.float32)
_INVERSES = torch.tensor([2.0 ** (_SHIFT - x) for x in range(_LAST + 1)])


@dataclass(frozen=True, eq=False)
class Blocks(Wire):
    """One exponent byte for every 32 numbers (the last block may be shorter), then one signed code for each number.

    All exponents come first. With exponent byte ``x`` the unit of a block is ``2^k``, ``k = x - 126``, and a number is
    ``code * 2^k``. ``k`` is the least with ``top <= 127 * 2^k``, where ``top`` is the largest magnitude of the block,
    but at least -126; codes are ``number / 2^k`` rounded to the nearest, halves to even. Beyond ``127 * 2^121`` numbers
    are brought to that edge.

    *Decoded numbers are exact in float32, and normal:* seven bits times a power of two from 2^-126 to 2^121.

    *Encoding is idempotent, and bytes are canonical if and only if no code is -128, ``x <= 247``, and ``x`` is 0 or
    some code has a magnitude of 64 or more.* What encoding gives is canonical: codes are from -127 to 127, and where
    ``x > 0``, ``k`` is least, so ``top > 127 * 2^(k-1)``, or ``top / 2^k > 63.5``, which rounds to 64 or more. And of
    canonical bytes the decoded block has ``top = c * 2^k`` with ``c <= 127``, so ``k`` will do; where ``x > 0``,
    ``c >= 64 > 63.5``, so ``k - 1`` will not; hence encoding finds the same ``k``, and ``number / 2^k`` is each code
    again. All other bytes decode to nan: there is one way to say a vector, and what is not said so is no vector.

    *Rounding:* with ``x > 0``, each number moves by ``2^k / 2 < top / 127`` at most (at the upper edge by
    ``top / 128``), a block by less than ``sqrt(32) / 127`` of its length; with ``x = 0`` by ``2^-127`` a number.

    Vectors are held as float32, those that were read on the grid. Blocks are cut within a part, so a gradient is
    rounded when it has been cut, and another cut rounds it otherwise: it must be kept as it was.
    """

    @property
    def number_bytes(self) -> float:
        return 1 + 1 / BLOCK

    def count_bytes(self, size: int) -> int:
        return size + -(-size // BLOCK)

    def encode(self, vector: Tensor) -> bytes:
        return self._pack(vector).tobytes()

    def encode_parts(self, parts: Sequence[Tensor]) -> list[Piece]:
        return [self._pack(part).data for part in parts]

    def _pack(self, vector: Tensor) -> npt.NDArray[np.uint8]:
        if vector.ndim != 1 or vector.dtype is not torch.float32:
            raise ValueError(f"t: expected a vector of float32, got shape {tuple(vector.shape)} of {vector.dtype}")
        vector, size = vector.detach(), vector.numel()
        out = np.empty(self.count_bytes(size), dtype=np.uint8)
        exponents, codes = out[: len(out) - size], out[len(out) - size :].view(np.int8)
        for columns in _chunks(size):
            values = vector[columns]
            width, rest = len(values), -len(values) % BLOCK
            blocks = (torch.nn.functional.pad(values, (0, rest)) if rest else values.contiguous()).view(-1, BLOCK)
            found, scaled = _quantize(blocks)
            start = columns.start // BLOCK
            exponents[start : start + len(blocks)] = found.cpu().numpy()
            codes[columns] = scaled.view(-1)[:width].cpu().numpy()
        return out

    def decode(self, data: Piece, size: int) -> Tensor | None:
        if len(data) != self.count_bytes(size):
            return None
        room = np.empty(-(-size // BLOCK) * BLOCK, dtype=np.float32)
        _unpack(data, size, room)
        return torch.from_numpy(room[:size])

    def decode_rows(self, pieces: Sequence[Piece], size: int) -> Tensor:
        room = np.empty((len(pieces), -(-size // BLOCK) * BLOCK), dtype=np.float32)
        for row, data in zip(room, pieces, strict=True):
            _unpack(data, size, row)
        return torch.from_numpy(np.ascontiguousarray(room[:, :size]))

    def round(self, vector: Tensor) -> Tensor:
        found = self.decode(self._pack(vector).data, vector.numel())
        assert found is not None
        return found.to(vector.device)

    def find_reaches(self, vector: Tensor) -> Tensor:
        """Half of its block's unit, which the largest number of a block tells."""
        blocks = torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK)).view(-1, BLOCK)
        units = 2.0 ** (_quantize(blocks)[0].double() - _SHIFT)
        return (units / 2).repeat_interleave(BLOCK)[: len(vector)]


def _quantize(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The exponent byte of each row, and the codes of its numbers: -128 for what is not finite."""
    tops = blocks.abs().amax(1)
    # A float32 is 1.f * 2^(e-127), with e above the 23 bits of f. It is at most 127 * 2^(e-133) if f, so far down, is
    # at most 0x7E0000; if not, adding 0x1FFFF carries into e.
    exponents = (((tops.view(torch.int32) + 0x1FFFF) >> 23) - (133 - _SHIFT)).clamp_(0, _LAST)
    scaled = blocks * _INVERSES.to(blocks.device)[exponents, None]
    codes = scaled.round_().clamp_(-127, 127)
    if not bool(torch.isfinite(tops).all()):
        codes = codes.where(torch.isfinite(blocks), -128.0)
    return exponents.to(torch.uint8), codes.to(torch.int8)


def _unpack(data: Piece, size: int, room: npt.NDArray[np.float32]) -> None:
    """Decode into ``room``, which holds whole blocks; blocks that are not canonical become nan."""
    whole = np.frombuffer(data, np.uint8)
    exponents, codes = whole[: len(whole) - size], whole[len(whole) - size :].view(np.int8)
    room[size:] = 0
    for columns in _chunks(size):
        room[columns] = codes[columns]
        start, stop = columns.start // BLOCK, -(-columns.stop // BLOCK)
        blocks, bytes_ = room[start * BLOCK : stop * BLOCK].reshape(-1, BLOCK), exponents[start:stop]
        tops = torch.from_numpy(blocks).abs().amax(1).numpy()
        scales = np.where((tops < 128) & ((tops >= 64) | (bytes_ == 0)), _SCALES[bytes_], np.float32(math.nan))
        blocks *= scales[:, None]


def _chunks(size: int) -> Iterator[slice]:
    return (slice(at, min(at + _CHUNK, size)) for at in range(0, size, _CHUNK))


# ---- All of them


def _make_floating(name: str, dtype: torch.dtype) -> Wire:
    """With ``p`` significant bits, one of them implied, neighbours above 1 are ``2^(1-p)`` apart and the nearest is at
    most half of that away: 2^-24 for float32, 2^-8 for bfloat16, 2^-11 for float16. Near zero, neighbours are the
    smallest positive number apart.
    """
    info = torch.finfo(dtype)
    return Wire(name, dtype, roundoff=info.eps / 2, least=info.smallest_normal * info.eps)


WIRE_TYPES: Final[dict[str, Wire]] = {
    "float32": _make_floating("float32", torch.float32),
    "bfloat16": _make_floating("bfloat16", torch.bfloat16),
    "float16": _make_floating("float16", torch.float16),
    "int8": Blocks("int8", torch.float32, math.sqrt(BLOCK) / 127, 2.0**-_SHIFT, slack=1.05, seamless=False),
}
