"""The arithmetic of verification: what bytes mean, what reports say, and how far apart two honest answers can be.

Pure functions, no state. Rules V1 to V4 (docs/PROTOCOL.md, section 7) come down to three quantities for contributor
``i`` and part ``j``, all in float64:

* ``clip(x) = x min(1, tau / |x|)`` of ``x = g_i[j] - a[j]``, the part minus the aggregate;
* ``norm = |x|``;
* ``s = <z, clip(x)>`` for a Gaussian vector ``z`` that nobody could know before the aggregate was fixed.

The aggregate balances ``sum_i clip(g_i - a) = 0``, hence ``sum_i s_i = 0`` but for rounding. On CPUs each of these
numbers has the same bits wherever it is computed: products first, then numpy's pairwise sums of ``_CHUNK`` at a time.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.core.clipping import PROMISE
from phalanx.core.config import Tolerance
from phalanx.core.gram import is_narrow
from phalanx.core.messages import Verdict
from phalanx.core.randomness import Stream, derive_seed, gaussian_table, gaussian_vector
from phalanx.core.wire import WIRE_TYPES, Piece, Wire, widen

Array: TypeAlias = npt.NDArray[np.float64]
# Where a norm is this close to its limit, it is summed exactly: all peers must agree on which side it is.
_CLOSE = 1e-9
# Where a sum in float32 is below this share of the squared limit, it is enough, for limits that float32 can square.
_CLEAR = 0.98
_LEAST_CLEAR, _LARGEST_CLEAR = 1e-10, 1e18
# V1: float64 sums in any order agree to about 1e-13 on this scale.
_REPORT_TOLERANCE = 1e-10
# Who accuses must be surer than who votes. Otherwise a report at the very edge of the tolerance, wrong by one order of
# summation and right by another, would get an honest accuser banned.
ACCUSER_MARGIN = 2.0
LATER_MARGIN = 4.0
"""Of V4 for reports: whom it blames for a lie that was let pass has surely seen it, being twice as strict."""
# V2: how many standard deviations of <z, e> the bound allows.
_SIGMAS = 6.0
_TINY = 1e-30
_LARGEST_RADIUS = 1e300

_CHUNK = 1 << 16
_FLOAT32 = WIRE_TYPES["float32"]
_FROM_START = np.zeros(1, dtype=np.intp)
_SMALL = 1 << 15  # up to so many numbers, times projections, short parts are handled together and their z kept


# ---- What bytes mean


def prepare_gradient(vector: Tensor, cap: float, wire: Wire) -> Tensor:
    """The one form in which a gradient is committed to: finite, no longer than ``cap``, as the wire type holds it.

    One that is not finite as float32 becomes zero: whoever validates gets the same, so an overflow is nobody's guilt.
    Numbers beyond the type's range are brought to its edge. The norm is summed in one order on every CPU. (What rounds
    in blocks does so when the gradient has been cut and is encoded.)
    A vector that is in this form already is returned itself.
    """
    values, dtype = vector.detach().cpu().float(), wire.dtype
    if dtype is torch.float32 and _is_clearly_within(values, cap):
        return values.to(vector.device)
    square = _square(values)
    if not math.isfinite(square):
        return torch.zeros(len(values), dtype=dtype, device=vector.device)
    norm = math.sqrt(square)
    if norm <= cap and dtype is torch.float32:
        return values.to(vector.device)
    scale, largest = cap / norm if norm > cap else 1.0, torch.finfo(dtype).max
    out = torch.empty(len(values), dtype=dtype)
    for columns in _chunks(len(values)):
        out[columns] = (values[columns].double() * scale).clamp(-largest, largest)
    return out.to(vector.device)


def read_part(data: Piece, size: int, wire: Wire, cap: float) -> tuple[Tensor, bool]:
    """What everybody takes committed bytes to mean, and whether they were valid.

    Bytes of the wrong length, with a number that is not finite (or said otherwise than it should be: ``Blocks``), or
    longer than an honest part can be, count as the zero vector: the committed gradient is then defined all the same,
    and the aggregate with it.
    """
    return read_parts([data], (size,), wire, cap)[0]


def read_parts(pieces: Sequence[Piece], sizes: tuple[int, ...], wire: Wire, cap: float) -> list[tuple[Tensor, bool]]:
    """:func:`read_part` of each."""
    limits = [_longest(cap, size, wire) for size in sizes]
    found = _read_within(pieces, sizes, wire, limits)
    return [
        (torch.zeros(size, dtype=wire.dtype), False) if part is None else (part, True)
        for part, size in zip(found, sizes, strict=True)
    ]


def read_stack(
    pieces: Sequence[Piece], size: int, wire: Wire, cap: float, matrix: npt.NDArray[np.uint8] | None = None
) -> tuple[Tensor, list[bool]]:
    """:func:`read_part` of each, as the rows of one matrix; and which of them were valid.

    ``matrix`` has the pieces as its rows, if they lie so; it is not written to.
    """
    length, limit = wire.count_bytes(size), _longest(cap, size, wire)
    fit = [len(data) == length for data in pieces]
    if matrix is not None:
        stack = wire.view_rows(matrix)
    else:
        nothing = b"" if all(fit) else bytes(length)
        stack = wire.decode_rows([data if fits else nothing for data, fits in zip(pieces, fit, strict=True)], size)
    valid = [fits and within for fits, within in zip(fit, _are_within(stack, limit), strict=True)]
    if not all(valid):
        stack = stack.clone() if matrix is not None else stack
        stack[torch.tensor(valid).logical_not()] = 0
    return stack, valid


def _are_within(stack: Tensor, limit: float) -> list[bool]:
    """Whether each row is finite and no longer than ``limit``."""
    if not 0 < stack.numel() <= _SMALL:
        return [_is_within_limit(row, limit) for row in stack]
    wide = _wide(stack)
    squares: list[float] = _add_up(wide * wide).tolist()
    return [_is_within(row, square, limit) for row, square in zip(wide, squares, strict=True)]


def read_aggregate(data: Piece, size: int, wire: Wire, cap: float) -> Tensor | None:
    """An aggregate; None if the bytes cannot be one.

    A weighted mean of valid parts is no longer than the longest, but for the rounding of its own numbers.
    """
    return decode_aggregates([data], (size,), wire, cap)[0]


def decode_aggregates(pieces: Sequence[Piece], sizes: tuple[int, ...], wire: Wire, cap: float) -> list[Tensor | None]:
    """:func:`read_aggregate` of each."""
    return _read_within(pieces, sizes, wire, [_longest_aggregate(cap, size, wire) for size in sizes])


def _read_within(
    pieces: Sequence[Piece], sizes: tuple[int, ...], wire: Wire, limits: Sequence[float]
) -> list[Tensor | None]:
    """The vectors in these bytes; None for bytes of the wrong length, or what is not finite or beyond its limit."""
    fit = [len(data) == wire.count_bytes(size) for data, size in zip(pieces, sizes, strict=True)]
    together = wire.seamless and len(pieces) > 1 and sum(sizes) <= _SMALL  # calls cost more than arithmetic
    if together and all(fit) and min(sizes) > 0:
        data = b"".join(pieces)
        whole, wide = wire.decode(data, sum(sizes)), wire.decode_wide(data)
        assert whole is not None
        squares: list[float] = np.add.reduceat(wide * wide, _starts(sizes)).tolist()
        each = zip(torch.split_with_sizes(whole, sizes), squares, limits, strict=True)
        return [vector if _is_within(vector, square, limit) else None for vector, square, limit in each]
    vectors = [wire.decode(data, size) for data, size in zip(pieces, sizes, strict=True)]
    return [
        vector if vector is not None and _is_within_limit(vector, limit) else None
        for vector, limit in zip(vectors, limits, strict=True)
    ]


@lru_cache(maxsize=64)
def _longest(cap: float, size: int, wire: Wire) -> float:
    """The norm up to which a part is valid: the cap, and what rounding adds (near zero, an absolute error)."""
    return wire.slack * cap + wire.least * math.sqrt(size)


@lru_cache(maxsize=64)
def _longest_aggregate(cap: float, size: int, wire: Wire) -> float:
    # 1e-4 is for float32 sums of up to 256 rows.
    return _longest(cap, size, wire) * (1 + 2 * wire.roundoff + 1e-4) + wire.least * math.sqrt(size)


def _is_within_limit(vector: Tensor, limit: float) -> bool:
    """:func:`_is_within` for a long vector: most are so short that float32 can tell, at a fraction of the price."""
    return _is_clearly_within(vector, limit) or _is_within(vector, _square(vector), limit)


def _is_clearly_within(vector: Tensor, limit: float) -> bool:
    """Whether even a sum in float32, whose error is below half a percent in every chunk, says so.

    It does not where a number is not finite or squares overflow. Squares too small for float32 do not matter.
    """
    if vector.dtype is not torch.float32 or limit < _LEAST_CLEAR:
        return False
    return sum(float(torch.dot(piece, piece)) for piece in _pieces(vector)) <= _CLEAR * min(limit, _LARGEST_CLEAR) ** 2


def _is_within(vector: Tensor | Array, square: float, limit: float) -> bool:
    """Whether the vector is finite and no longer than ``limit``, with the same answer on every platform.

    ``square`` is ``|vector|^2`` as summed in any order. Squares of wire numbers are exact in float64, and ``fsum``
    rounds their exact sum: it decides where it is close.
    """
    allowed = min(limit * limit, sys.float_info.max)
    if not math.isfinite(square):
        return False
    if abs(square - allowed) <= _CLOSE * allowed:
        values = map(_wide, _pieces(vector)) if isinstance(vector, Tensor) else (vector,)
        square = math.fsum(itertools.chain.from_iterable((x * x).tolist() for x in values))
    return square <= allowed


def _square(vector: Tensor) -> float:
    """``|vector|^2``; inf or nan where a number is not finite."""
    total, room = 0.0, np.empty(min(_CHUNK, vector.numel()))
    for piece in _pieces(vector):
        x = room[: piece.numel()]
        _fill(x, piece)
        total += float(_add_up(np.multiply(x, x, out=x)))
    return total


def _pieces(vector: Tensor) -> Iterable[Tensor]:
    size = vector.numel()
    return (vector,) if 0 < size <= _CHUNK else (vector[columns] for columns in _chunks(size))


def _chunks(size: int) -> Iterator[slice]:
    return (slice(at, min(at + _CHUNK, size)) for at in range(0, size, _CHUNK))


def _add_up(values: Array) -> Array:
    """Sums along the last axis, in the order in which ``reduceat`` sums one part among many."""
    sums: Array = np.add.reduceat(values, _FROM_START, axis=-1)[..., 0]
    return sums


def _wide(t: Tensor) -> Array:
    return widen(_get_numbers(t))


def _fill(out: Array, numbers: Tensor) -> None:
    """Put numbers where there is room for them, as :func:`_wide` makes them."""
    with np.errstate(invalid="ignore"):
        out[:] = _get_numbers(numbers)


def _subtract(one: Tensor, other: Tensor) -> Array:
    """The difference of what :func:`_wide` makes of both."""
    with np.errstate(invalid="ignore"):
        difference: Array = np.subtract(_get_numbers(one), _get_numbers(other), dtype=np.float64)
        return difference


def _get_numbers(t: Tensor) -> npt.NDArray[np.floating]:
    """In four bytes or more. Of short vectors numpy makes less ado, but it does not know bfloat16."""
    t = t.cpu()
    return (t.float() if t.itemsize == 2 else t).numpy()


# ---- Reports


@dataclass(frozen=True, slots=True)
class Projections:
    """A contributor's report: ``sums`` of the first ``z`` for all parts, then of the second, and so on."""

    sums: tuple[float, ...]
    norms: tuple[float, ...]


@lru_cache(maxsize=16)
def projection_seeds(randomness: bytes, parts: int, projections: int) -> tuple[tuple[bytes, ...], ...]:
    """The seeds of the Gaussian vectors: ``result[j][k]`` is that of the ``k``-th for part ``j``."""
    numbers = [index.to_bytes(8, "little") for index in range(max(parts, projections))]
    return tuple(
        tuple(derive_seed(randomness, "projection", numbers[j], numbers[k]) for k in range(projections))
        for j in range(parts)
    )


def compute_report(
    parts: Sequence[Tensor], aggregates: Sequence[Tensor | None], seeds: Sequence[tuple[bytes, ...]], tau: float
) -> Projections:
    """What one contributor's parts say of the aggregates; zeros where there is no aggregate."""
    sizes = tuple(part.numel() for part in parts)
    if not len(parts) == len(aggregates) == len(seeds):
        raise ValueError(f"{len(parts)} parts, {len(aggregates)} aggregates and {len(seeds)} seeds")
    # A part minus itself is zero, and so is all that follows from it.
    others = [part if a is None else a for part, a in zip(parts, aggregates, strict=True)]
    if tuple(other.numel() for other in others) != sizes:
        raise ValueError("aggregates: not of the sizes of the parts")
    if sizes and min(sizes) > 0 and sum(sizes) * len(seeds[0]) <= _SMALL:
        x, starts = _subtract(torch.cat(list(parts)), torch.cat(others)), _starts(sizes)
        norms = np.sqrt(np.add.reduceat(x * x, starts))
        sums = np.add.reduceat(_joined_vectors(tuple(seeds), sizes) * x, starts, axis=1)
    else:
        columns = [_measure([part], a, keys) for part, a, keys in zip(parts, others, seeds, strict=True)]
        sums = np.concatenate([dots for dots, _ in columns], axis=1)
        norms = np.sqrt(np.concatenate([squares for _, squares in columns]))
    sums = sums * _clip_factors(norms, tau) + 0.0  # no negative zeros
    return Projections(tuple(sums.ravel().tolist()), tuple(norms.tolist()))


def compute_column(
    rows: Tensor | Sequence[Tensor], aggregate: Tensor, seeds: tuple[bytes, ...], tau: float
) -> tuple[Array, Array]:
    """What all contributors should report of one part: sums ``(projections, n)`` and norms ``(n,)``.

    Aggregator ``j`` holds everybody's part ``j``; this is what it recomputes for V1.
    """
    size = aggregate.numel()
    _require_sizes(rows, size)
    if 0 < size <= _CHUNK and len(rows) * size * len(seeds) <= _SMALL:
        x = _subtract(rows if isinstance(rows, Tensor) else torch.stack(list(rows)), aggregate)
        squares = _add_up(x * x)
        sums = _add_up(_get_vectors(seeds, size)[:, None] * x)
    else:
        sums, squares = _measure(rows, aggregate, seeds)
    norms: Array = np.sqrt(squares)
    return sums * _clip_factors(norms, tau) + 0.0, norms


def _require_sizes(rows: Tensor | Sequence[Tensor], size: int) -> None:
    found = {rows.shape[1:]} if isinstance(rows, Tensor) else {row.shape for row in rows}
    if found != {(size,)}:
        raise ValueError(f"rows: expected vectors of {size} like the aggregate, got {found or 'none'}")


def _clip_factors(norms: Array, tau: float) -> Array:
    tau = min(tau, _LARGEST_RADIUS)
    factors: Array = tau / np.maximum(norms, tau)
    return factors


def _measure(rows: Tensor | Sequence[Tensor], aggregate: Tensor, seeds: tuple[bytes, ...]) -> tuple[Array, Array]:
    """``<z, g_i - a>`` for each ``z`` and row, and ``|g_i - a|^2``: long rows, in chunks, each ``z`` drawn once."""
    streams, count = [Stream(seed) for seed in seeds], len(rows)
    sums, squares = np.zeros((len(seeds), count)), np.zeros(count)
    room = np.empty((len(seeds) + 3, min(_CHUNK, aggregate.numel())))  # fresh memory costs more than the arithmetic
    for columns in _chunks(aggregate.numel()):
        width = columns.stop - columns.start
        vectors, (about, x, products) = room[:-3, :width], room[-3:, :width]
        for stream, vector in zip(streams, vectors, strict=True):
            _draw(stream, vector)
        if aggregate.is_cuda:
            z, centre = torch.from_numpy(vectors).to(aggregate.device), aggregate[columns].double()
            for i in range(count):
                y = rows[i][columns].double() - centre
                found = torch.cat([z @ y, (y @ y)[None]]).cpu().numpy()
                sums[:, i] += found[:-1]
                squares[i] += found[-1]
            continue
        _fill(about, aggregate[columns])
        for i in range(count):
            _fill(x, rows[i][columns])
            np.subtract(x, about, out=x)
            squares[i] += _add_up(np.multiply(x, x, out=products))
            for k, vector in enumerate(vectors):
                sums[k, i] += _add_up(np.multiply(vector, x, out=products))
    return sums, squares


def _draw(stream: Stream, out: Array) -> None:
    """The next numbers of what ``gaussian_vector`` returns at once."""
    places = np.frombuffer(stream.draw_bytes(2 * len(out)), "<u2").astype(np.int32)
    torch.index_select(_wide_table(), 0, torch.from_numpy(places), out=torch.from_numpy(out))


@cache
def _wide_table() -> Tensor:
    return torch.from_numpy(gaussian_table().astype(np.float64))


@lru_cache(maxsize=64)
def _joined_vectors(seeds: tuple[tuple[bytes, ...], ...], sizes: tuple[int, ...]) -> Array:
    """The Gaussian vectors of short parts end to end, ``(projections, total)``; in one process many peers want them."""
    joined: Array = np.concatenate([_get_vectors(keys, size) for keys, size in zip(seeds, sizes, strict=True)], axis=1)
    joined.setflags(write=False)
    return joined


@lru_cache(maxsize=256)
def _get_vectors(seeds: tuple[bytes, ...], size: int) -> Array:
    """Those of one part: a contributor wants them for its report, an aggregator once more for V1."""
    vectors = np.array([gaussian_vector(seed, size).numpy() for seed in seeds], dtype=np.float64)
    vectors.setflags(write=False)
    return vectors


@lru_cache(maxsize=64)
def _starts(sizes: tuple[int, ...]) -> npt.NDArray[np.intp]:
    return np.cumsum((0, *sizes[:-1]))


# ---- How far apart two honest answers can be


def report_tolerance(tau: float, size: int) -> tuple[float, float]:
    """V1: by how much a reported sum may be off, absolutely, and a norm, relatively.

    ``|<z, clip(x)>| <= |z| tau``, and ``|z|`` is about ``sqrt(size)``; on that scale float64 sums in any order, on a
    CPU or a GPU, agree a thousand times better than this.
    """
    return _REPORT_TOLERANCE * tau * math.sqrt(size), _REPORT_TOLERANCE


def is_same_report(
    claimed_sum: float,
    claimed_norm: float,
    true_sum: float,
    true_norm: float,
    tau: float,
    size: int,
    margin: float = 1.0,
) -> bool:
    """V1: whether a report is what was recomputed, within ``margin`` times the tolerance.

    Voters use a margin of one. Whoever accuses uses ``ACCUSER_MARGIN``, so that no voter can see it otherwise.
    """
    absolute, relative = report_tolerance(tau, size)
    same_sum = abs(claimed_sum - true_sum) <= margin * absolute
    return same_sum and abs(claimed_norm - true_norm) <= margin * relative * true_norm


@lru_cache(maxsize=64)
def sum_bound(tau: float, count: int, size: int, wire: Wire, cap: float) -> float:
    """V2: ``eps``, which ``|sum_i s_i|`` of an honest aggregator over ``count`` contributors does not exceed.

    Let ``v`` be what CenteredClip found, ``a = v + e`` what was sent, and ``E = sum_i clip(g_i - a)``.

    * CenteredClip promises ``|sum_i clip(g_i - v)| <= 1e-6 tau n``, and ``clip`` moves no more than its argument, so
      ``|E| <= 1e-6 tau n + n |e|``: see :func:`balance_bound`.
    * ``z`` was drawn after ``a`` was fixed. Its numbers are independent, of variance 0.99998 and close to normal, so
      ``<z, E>`` is about ``N(0, |E|^2)``, and beyond six standard deviations once in 5e8 even if ``|E|`` is as large
      as it can be. Usually it is far smaller.
    * What is summed is not ``<z, E>`` but what ``n`` contributors say, and each may be off by what V1 lets pass: liars
      within the tolerance must not be able to frame an honest aggregator.
    """
    return _SIGMAS * balance_bound(tau, count, size, wire, cap) + _unseen(tau, count, size)


def balance_bound(tau: float, count: int, size: int, wire: Wire, cap: float) -> float:
    """How large ``|sum_i clip(g_i - a)|`` can be for an honest aggregate ``a``: no ``z``, and nothing left to chance.

    Rounding ``v`` to the wire type gives ``|e| <= u |v| + least sqrt(size)`` with the unit roundoff ``u`` (of int8, for
    a block), and ``|v|`` is at most the norm of a valid part. (A hair more, since float64 becomes a shorter type by way
    of float32.) Long rows that are held as float32 are summed in float32: ``n + 1`` roundings of that type more, of
    partial sums no longer than a part.
    """
    longest, root = _longest(cap, size, wire), math.sqrt(size)
    error = wire.roundoff * longest + wire.least * root
    if not is_narrow(count, size, wire.dtype):
        error *= 1 + 2**-12
    else:
        error += (count + 1) * (_FLOAT32.roundoff * longest + _FLOAT32.least * root)
    return count * (PROMISE * tau + error)


def shift_bound(
    tau: float,
    count: int,
    size: int,
    wire: Wire,
    cap: float,
    projections: int = 1,
    probability: float = 1e-3,
) -> float:
    """V2: an aggregate with ``|sum_i clip(g_i - a)|`` above this passes with at most this probability.

    Let ``E`` be that sum. It passes if every ``|<z, E> + lies| <= eps``, where liars who stay within V1's tolerance
    shift the sum by ``l`` at most. ``<z, E> / |E|`` is about standard normal, of density at most ``1 / sqrt(2 pi)``, so
    one projection lets it pass with probability at most ``sqrt(2 / pi) (eps + l) / |E|``, and ``k`` with the ``k``-th
    power of that. This is a probability, not a wall: one projection lets half of this bound pass twice as often, and
    anything below ``eps / 6`` always. Who shifts step after step is caught after a few.
    """
    allowed = sum_bound(tau, count, size, wire, cap) + _unseen(tau, count, size)
    return math.sqrt(2 / math.pi) * allowed / math.pow(probability, 1 / projections)


def _unseen(tau: float, count: int, size: int) -> float:
    """By how much the reports of one part may be off together, and nobody is accused."""
    return count * ACCUSER_MARGIN * report_tolerance(tau, size)[0]


def is_balanced(rows: Tensor | Sequence[Tensor], aggregate: Tensor, tau: float, wire: Wire, cap: float) -> bool:
    """V3: whether the aggregate of opened rows is right, by the deterministic part of V2's bound.

    All must come to the same answer, so the order of summation is fixed, and nothing is left to a library for matrices.
    """
    count, size = len(rows), aggregate.numel()
    _require_sizes(rows, size)
    squares = np.zeros(count)
    for columns in _chunks(size):
        about = _wide(aggregate[columns])
        for i in range(count):
            x = _wide(rows[i][columns]) - about
            squares[i] += _add_up(x * x)
    factors, square = _clip_factors(np.sqrt(squares), tau), 0.0
    for columns in _chunks(size):
        about, total = _wide(aggregate[columns]), np.zeros(columns.stop - columns.start)
        for i in range(count):
            total += factors[i] * (_wide(rows[i][columns]) - about)
        square += float(_add_up(total * total))
    # Beyond the bound, a hair for float64 itself.
    return math.sqrt(square) <= balance_bound(tau, count, size, wire, cap) * (1 + 1e-6)


def find_deviation(claimed: Tensor, mine: Tensor, wire: Wire) -> Tensor:
    """V4 in tolerant mode: how far each committed number is from what my own could have been rounded to.

    ``mine`` is what I computed, before it was rounded to the wire type. A number that another platform moved by a hair
    over the edge between two codes is no farther than that hair; a code more, where mine is in the middle, is half of
    one. What is beyond the type's range counts as its edge. The result is float32.
    """
    if claimed.shape != mine.shape:
        raise ValueError("claimed: not of the size of mine")
    largest, found = torch.finfo(wire.dtype).max, torch.empty(len(mine))
    reaches = wire.find_reaches(claimed)
    for columns in _chunks(len(mine)):
        off = claimed[columns].double().sub_(mine[columns].double().clamp_(-largest, largest)).abs_()
        found[columns] = off.sub_(reaches[columns]).clamp_(min=0)
    return found


def measure_tensors(deviation: Tensor, gradient: Tensor, sizes: Sequence[int], floor: float = 0.0) -> float:
    """How long a deviation is relative to the gradient, in that tensor of the model where it is longest.

    A tensor's gradient counts as at least ``floor`` of the whole: where it is zero but for rounding, any two platforms
    differ by all of it.
    """
    offs, lengths, start = [], [], 0
    for size in sizes:
        piece = slice(start, start := start + size)
        offs.append(math.sqrt(_square(deviation[piece])))
        lengths.append(math.sqrt(_square(gradient[piece])))
    least = max(floor * math.hypot(*lengths), _TINY)
    return max((off / max(length, least) for off, length in zip(offs, lengths, strict=True)), default=0.0)


def judge_distance(distance: float, tolerance: Tolerance) -> Verdict:
    """V4 in tolerant mode: platforms round differently, so in between nobody is guilty and nobody is cleared."""
    if math.isnan(distance):
        return Verdict.INCONCLUSIVE  # then it is I who cannot tell
    if distance <= tolerance.lower:
        return Verdict.INNOCENT
    return Verdict.INCONCLUSIVE if distance <= tolerance.upper else Verdict.GUILTY
