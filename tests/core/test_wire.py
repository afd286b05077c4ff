"""How vectors travel: every wire type says a vector in one way, and what is not said so is none."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core import wire as module
from phalanx.core.verification import read_aggregate, read_part, read_stack
from phalanx.core.wire import BLOCK, WIRE_TYPES, Wire, decode_tensor, encode_tensor, view_bytes

INF, NAN = math.inf, math.nan
INT8 = WIRE_TYPES["int8"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

quick = settings(deadline=None, derandomize=True, max_examples=200)
seeds_of_data = st.integers(0, 2**32 - 1)


@pytest.fixture(params=FLOATS, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=WIRE_TYPES)
def wire(request: pytest.FixtureRequest) -> Wire:
    return WIRE_TYPES[request.param]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


# --- All types ---


def test_the_names_are_those_of_the_table() -> None:
    assert {name: wire.name for name, wire in WIRE_TYPES.items()} == {name: name for name in WIRE_TYPES}


@pytest.mark.parametrize(
    ("name", "one"), [("float32", "0000803f"), ("bfloat16", "803f"), ("float16", "003c"), ("int8", "7920c0")]
)
def test_bytes_of_one_and_minus_two(name: str, one: str) -> None:
    """Little-endian; for int8 they are 32 and -64 times 2^-5."""
    wire = WIRE_TYPES[name]
    data = wire.encode(torch.tensor([1.0, -2.0], dtype=wire.dtype))
    assert data.hex().startswith(one)
    if name == "float32":
        assert data == struct.pack("<2f", 1.0, -2.0)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 1000, 70_000])
def test_a_vector_takes_as_many_bytes_as_are_counted(size: int, wire: Wire) -> None:
    vector = wire.round(normal(size).to(wire.dtype))
    data = wire.encode(vector)
    assert len(data) == wire.count_bytes(size)
    assert len(data) == pytest.approx(size * wire.number_bytes, abs=1)
    for piece in (data, bytearray(data), memoryview(data)):
        read = wire.decode(piece, size)
        assert read is not None
        assert read.dtype == wire.dtype
        assert torch.equal(read, vector)
        assert wire.encode(read) == data
    for wrong in (data + b"\0", data[:-1], b""):
        assert wrong == data or wire.decode(wrong, size) is None


def test_zero_bytes_are_the_zero_vector(wire: Wire) -> None:
    assert wire.encode(torch.zeros(100, dtype=wire.dtype)) == bytes(wire.count_bytes(100))


@pytest.mark.parametrize("sizes", [(), (5,), (5, 0, 33), (20_000, 30_000)])
def test_parts_are_encoded_as_each_alone(sizes: tuple[int, ...], wire: Wire) -> None:
    parts = [normal(size, seed=size).to(wire.dtype) for size in sizes]
    assert wire.encode_parts(parts) == [wire.encode(part) for part in parts]


@pytest.mark.parametrize("size", [1, 33, 20_000])
def test_rows_are_decoded_as_each_alone(size: int, wire: Wire) -> None:
    rows = [wire.round(normal(size, seed=seed).to(wire.dtype)) for seed in range(3)]
    stack = wire.decode_rows([wire.encode(row) for row in rows], size)
    assert stack.is_contiguous()
    assert torch.equal(stack, torch.stack(rows))


def test_strided_vectors_are_encoded_like_their_numbers(wire: Wire, device: str) -> None:
    vector = normal(200).to(device, wire.dtype)
    assert wire.encode(vector[::2]) == wire.encode(vector[::2].clone())
    assert wire.encode(vector) == wire.encode(vector.cpu())
    data = wire.encode(vector)
    again = wire.decode(memoryview(data), 200)
    assert again is not None
    assert torch.equal(again, wire.round(vector).cpu())
    again += 1  # memory of its own
    assert wire.encode(vector) == data


@pytest.mark.parametrize("length", [0, 1, 3, 5, 19, 79, 81, 160])
def test_bytes_of_the_wrong_length_are_no_vector(length: int, wire: Wire) -> None:
    assert wire.decode(bytes(length), 20) is None
    assert read_aggregate(bytes(length), 20, wire, 1.0) is None
    part, valid = read_part(bytes(length), 20, wire, 1.0)
    assert not valid
    assert torch.equal(part, torch.zeros(20, dtype=wire.dtype))


@pytest.mark.parametrize("wrong", [torch.ones(2, 2), torch.ones(2).double(), torch.ones(2).int(), torch.ones(())])
def test_only_vectors_of_a_wire_type_are_encoded(wrong: Tensor, wire: Wire) -> None:
    with pytest.raises(ValueError, match=r"^t: "):
        wire.encode(wrong)


# --- Floating point ---


@quick
@given(dtype=st.sampled_from(FLOATS), size=st.integers(0, 50), seed=seeds_of_data)
def test_a_vector_survives_the_wire_bit_for_bit(dtype: torch.dtype, size: int, seed: int) -> None:
    data = np.random.default_rng(seed).bytes(size * dtype.itemsize)
    decoded = decode_tensor(data, size, dtype)
    assert decoded is not None
    assert decoded.dtype == dtype
    assert decoded.shape == (size,)
    assert encode_tensor(decoded) == data


@pytest.mark.parametrize("size", [0, 5, 70_000])
def test_a_view_shows_what_is_encoded(size: int, dtype: torch.dtype) -> None:
    vector = normal(2 * size).to(dtype)
    for shown in (vector, vector[::2]):
        assert view_bytes(shown) == encode_tensor(shown)
    view, encoded = view_bytes(vector), encode_tensor(vector)
    vector += 1
    assert view == encode_tensor(vector)
    assert (view == encoded) == (size == 0)


def test_a_vector_lies_in_a_bytearray_and_beside_bytes(dtype: torch.dtype) -> None:
    data = encode_tensor(normal(100).to(dtype))
    kept, shared = bytes(bytearray(data)), bytearray(data)
    for held, follows in ((data, False), (shared, True)):
        vector = decode_tensor(held, 100, dtype)
        assert vector is not None
        vector += 1
        assert (held == encode_tensor(vector)) is follows
    assert data == kept


# --- Eight bits, in blocks ---


def encode_by_definition(numbers: list[float]) -> bytes:
    """In exact arithmetic, block by block."""
    exponents, codes = [], []
    for at in range(0, len(numbers), BLOCK):
        block = [Fraction(x) for x in numbers[at : at + BLOCK]]
        k = -126
        while k < 121 and max(map(abs, block)) > 127 * Fraction(2) ** k:
            k += 1
        exponents.append(k + 126)
        codes += [max(-127, min(127, round(x / Fraction(2) ** k))) for x in block]  # halves to even
    return bytes(exponents) + struct.pack(f"{len(codes)}b", *codes)


def decode_by_definition(data: bytes, size: int) -> list[float]:
    blocks = len(data) - size
    codes = struct.unpack(f"{size}b", data[blocks:])
    return [float(code * Fraction(2) ** (data[place // BLOCK] - 126)) for place, code in enumerate(codes)]


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
scaled = st.builds(
    lambda exponent, codes: [float(np.float32(code * 2.0**exponent)) for code in codes],
    st.integers(-149, 119),
    st.lists(st.integers(-260, 260).map(lambda x: x / 2), min_size=1, max_size=70),
)
vectors = st.lists(finite, min_size=1, max_size=70) | scaled


@settings(quick, max_examples=600)
@given(numbers=vectors)
def test_encoding_is_as_defined_and_idempotent(numbers: list[float]) -> None:
    data = INT8.encode(torch.tensor(numbers))
    assert data == encode_by_definition(numbers)
    read = INT8.decode(data, len(numbers))
    assert read is not None
    assert read.tolist() == decode_by_definition(data, len(numbers)), "exact in float32"
    assert INT8.encode(read) == data
    assert torch.equal(INT8.round(torch.tensor(numbers)), read)
    assert torch.equal(INT8.round(read), read)


@settings(quick, max_examples=600)
@given(numbers=vectors)
def test_rounding_stays_within_its_bound(numbers: list[float]) -> None:
    vector = torch.tensor(numbers)
    error = (INT8.round(vector).double() - vector.double()).norm()
    bound = INT8.roundoff * float(vector.double().norm()) + INT8.least * math.sqrt(len(numbers))
    assert float(error) <= bound


@settings(quick, max_examples=600)
@given(
    exponents=st.lists(st.integers(0, 255), min_size=3, max_size=3),
    largest=st.lists(st.integers(0, 128), min_size=3, max_size=3),
    last=st.integers(1, BLOCK),
    seed=seeds_of_data,
)
def test_bytes_mean_a_vector_if_and_only_if_it_is_encoded_so(
    exponents: list[int], largest: list[int], last: int, seed: int
) -> None:
    """Blocks that are not what encoding gives are nan, whole; those beside them are read."""
    rng, size = np.random.default_rng(seed), 2 * BLOCK + last
    codes = np.concatenate([rng.integers(-top, min(top, 127) + 1, BLOCK) for top in largest])[:size].astype(np.int8)
    data = bytes(exponents) + codes.tobytes()
    read = INT8.decode(data, size)
    assert read is not None
    for place, start in enumerate(range(0, size, BLOCK)):
        block, own = read[start : start + BLOCK], codes[start : start + BLOCK]
        within = exponents[place] <= 247 and -128 not in own
        minimal = exponents[place] == 0 or int(np.abs(own.astype(int)).max()) >= 64
        assert bool(block.isfinite().all()) == (within and minimal)
        assert bool(block.isnan().all()) != (within and minimal)
        if within:
            said = bytes([exponents[place]]) + own.tobytes()
            meant = torch.tensor(decode_by_definition(said, len(own)))
            assert (INT8.encode(meant) == said) == minimal
            assert not minimal or torch.equal(block, meant)
    assert read_part(data, size, INT8, 1e300)[1] == bool(read.isfinite().all())


BOUNDARIES = [
    ([127.0], 126, [127]),
    ([127.0 + 2**-17], 127, [64]),  # 63.5 and a hair, in units of 2
    ([63.5], 125, [127]),
    ([63.5 + 2**-18], 126, [64]),
    ([64.0], 126, [64]),
    ([64.0, 0.5, 1.5, 2.5, -0.5, -1.5], 126, [64, 0, 2, 2, 0, -2]),
    ([64.0, 0.5 + 2**-20, 0.5 - 2**-20], 126, [64, 1, 0]),
    ([0.0, -0.0], 0, [0, 0]),
    ([2.0**-126, 2.0**-127, 2.0**-127 + 2.0**-149, 2.0**-149], 0, [1, 0, 1, 0]),
    ([127 * 2.0**-126], 0, [127]),
    ([127 * 2.0**-126 + 2.0**-142], 1, [64]),
    ([127 * 2.0**121, 1.0], 247, [127, 0]),
    ([3.4028234663852886e38, -3.4028234663852886e38, 2.0**121], 247, [127, -127, 1]),
]


@pytest.mark.parametrize(("numbers", "exponent", "codes"), BOUNDARIES)
def test_boundaries(numbers: list[float], exponent: int, codes: list[int]) -> None:
    data = INT8.encode(torch.tensor(numbers))
    assert list(data[:1]) == [exponent]
    assert list(struct.unpack(f"{len(numbers)}b", data[1:])) == codes
    read = INT8.decode(data, len(numbers))
    assert read is not None
    assert INT8.encode(read) == data


NONSENSE = [
    ("a code of -128", bytes([126]) + b"\x80" + bytes(4)),
    ("an exponent that is not the least", bytes([126, 63, 63, 0, 0, 0])),
    ("zeros with an exponent", bytes([1, 0, 0, 0, 0, 0])),
    ("an exponent beyond float32", bytes([248, 64, 0, 0, 0, 0])),
]


@pytest.mark.parametrize("data", [data for _, data in NONSENSE], ids=[name for name, _ in NONSENSE])
def test_e4_bytes_in_another_form_count_as_the_zero_vector(data: bytes) -> None:
    right = bytes([126, 64, 1, 2, 3, 4])
    assert read_part(right, 5, INT8, 100.0)[1]
    part, valid = read_part(data, 5, INT8, 1e300)
    assert not valid
    assert torch.equal(part, torch.zeros(5))
    assert read_aggregate(data, 5, INT8, 1e300) is None
    stack, fine = read_stack([right, data], 5, INT8, 100.0)
    assert fine == [True, False]
    assert torch.equal(stack, torch.tensor([[64.0, 1, 2, 3, 4], [0, 0, 0, 0, 0]]))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [1, 40, 70_000])
def test_numbers_that_are_not_finite_are_said_as_such(value: float, size: int, device: str) -> None:
    vector = normal(size)
    vector[-1] = value
    read = INT8.decode(INT8.encode(vector.to(device)), size)
    assert read is not None
    assert bool(read[-1].isnan())
    whole = (size - 1) // BLOCK * BLOCK
    assert torch.equal(read[:whole], INT8.round(vector[:whole]))


@pytest.mark.parametrize("size", [31, 32, 100, 1000])
def test_chunks_do_not_change_the_bytes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vector = normal(size)
    data, read = INT8.encode(vector), INT8.round(vector)
    monkeypatch.setattr(module, "_CHUNK", 2 * BLOCK)
    assert INT8.encode(vector) == data
    assert torch.equal(INT8.round(vector), read)
