"""The arithmetic of verification: honest peers always pass, and what liars can still do is as small as published."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.core import verification
from phalanx.core.clipping import centered_clip
from phalanx.core.config import Tolerance
from phalanx.core.gram import is_narrow
from phalanx.core.messages import Report, Verdict
from phalanx.core.partition import split_parts
from phalanx.core.randomness import derive_seed, gaussian_vector
from phalanx.core.verification import (
    ACCUSER_MARGIN,
    balance_bound,
    compute_column,
    compute_report,
    decode_aggregates,
    find_deviation,
    is_balanced,
    is_same_report,
    judge_distance,
    measure_tensors,
    prepare_gradient,
    projection_seeds,
    read_aggregate,
    read_part,
    read_parts,
    read_stack,
    report_tolerance,
    shift_bound,
    sum_bound,
)
from phalanx.core.wire import WIRE_TYPES, Wire

INF, NAN = math.inf, math.nan
FLOAT32, BFLOAT16 = WIRE_TYPES["float32"], WIRE_TYPES["bfloat16"]
ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11, "int8": 32**0.5 / 127}
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
RANDOMNESS = b"r" * 32

quick = settings(deadline=None, derandomize=True, max_examples=100)
wire_types = st.sampled_from(list(WIRE_TYPES.values()))
seeds_of_data = st.integers(0, 2**32 - 1)


@pytest.fixture(params=WIRE_TYPES)
def wire(request: pytest.FixtureRequest) -> Wire:
    return WIRE_TYPES[request.param]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def fit(vector: Tensor, wire: Wire) -> Tensor:
    """The vector as others read it."""
    return wire.round(vector.to(wire.dtype))


def norm(t: Tensor) -> float:
    return math.sqrt(math.fsum(x * x for x in t.double().tolist()))


def clip(x: Tensor, tau: float) -> Tensor:
    return x * min(1.0, tau / max(float(x.norm()), 1e-300))


def imbalance(rows: Tensor, aggregate: Tensor, tau: float) -> Tensor:
    """``sum_i clip(g_i - a)``, as the paper writes it."""
    return torch.stack([clip(row.double() - aggregate.double(), tau) for row in rows]).sum(0)


# --- Gradients ---


@settings(quick, max_examples=300)
@given(
    wire=wire_types,
    size=st.integers(1, 300),
    scale=st.floats(-45, 38),
    exponent=st.floats(-6, 9),
    count=st.integers(1, 9),
    seed=seeds_of_data,
)
def test_what_is_prepared_is_valid_in_every_part(
    wire: Wire, size: int, scale: float, exponent: float, count: int, seed: int
) -> None:
    cap = 10.0**exponent
    vector = (normal(size, seed=seed).double() * 10.0**scale).float()
    prepared = prepare_gradient(vector, cap, wire)
    assert prepared.dtype == wire.dtype
    assert torch.isfinite(prepared).all()
    assert torch.equal(prepared, prepare_gradient(vector, cap, wire))
    for part in split_parts(prepared, min(count, size)):
        read, valid = read_part(wire.encode(part), len(part), wire, cap)
        assert valid
        assert torch.equal(read, wire.round(part))


def test_a_short_gradient_is_only_rounded(wire: Wire) -> None:
    vector = normal(100)
    assert torch.equal(fit(prepare_gradient(vector, 100.0, wire), wire), fit(vector, wire))
    assert torch.equal(fit(prepare_gradient(vector, INF, wire), wire), fit(vector, wire))


def test_a_long_gradient_keeps_its_direction(wire: Wire) -> None:
    vector = normal(1000)
    prepared = fit(prepare_gradient(vector, 2.0, wire), wire).double()
    expected = vector.double() * (2 / norm(vector))
    assert norm(prepared - expected) <= 2 * ROUNDOFF[wire.name] * 2
    assert abs(norm(prepared) - 2) <= 2 * ROUNDOFF[wire.name] * 2


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_gradient_that_is_not_finite_becomes_zero(value: float, wire: Wire) -> None:
    vector = normal(100_000)
    vector[-1] = value
    assert torch.equal(prepare_gradient(vector, 1.0, wire), torch.zeros(100_000, dtype=wire.dtype))


def test_numbers_beyond_the_range_of_the_type_are_brought_to_its_edge(wire: Wire) -> None:
    vector = torch.tensor([3.4e38, -3.4e38, 1.0])
    prepared = fit(prepare_gradient(vector, INF, wire), wire)
    assert torch.isfinite(prepared).all()
    assert float(prepared[0]) == -float(prepared[1]) >= min(3.37e38, torch.finfo(wire.dtype).max)


def test_the_largest_gradient_is_scaled_to_the_smallest_cap(wire: Wire) -> None:
    prepared = fit(prepare_gradient(torch.full((1000,), 3.4e38), 1e-3, wire), wire)
    assert abs(norm(prepared) - 1e-3) <= ROUNDOFF[wire.name] * 1e-3 + 1000**0.5 * 2**-25 * (wire.name == "float16")


def test_a_gradient_keeps_its_device_and_is_left_alone(device: str) -> None:
    vector = (10 * normal(70_000)).to(device).requires_grad_()
    kept = vector.detach().clone()
    prepared = prepare_gradient(vector, 1.0, BFLOAT16)
    assert prepared.device == vector.device
    assert not prepared.requires_grad
    assert torch.equal(vector.detach(), kept)
    assert torch.equal(prepared.cpu(), prepare_gradient(kept.cpu(), 1.0, BFLOAT16))


# --- Parts and aggregates as bytes mean them ---


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("size", [1, 16, 70_000])
def test_a_part_with_a_number_that_is_not_finite_counts_as_zero(value: float, size: int, wire: Wire) -> None:
    vector = torch.zeros(size, dtype=wire.dtype)
    vector[-1] = value
    part, valid = read_part(wire.encode(vector), size, wire, 1e9)
    assert not valid
    assert torch.equal(part, torch.zeros(size, dtype=wire.dtype))
    assert read_aggregate(wire.encode(vector), size, wire, 1e9) is None


@pytest.mark.parametrize("count", [1, 3])
def test_a_signalling_nan_is_no_reason_to_warn(count: int, wire: Wire) -> None:
    floats = {"float32": b"\x01\x00\x80\x7f", "float16": b"\x01\x7c", "bfloat16": b"\x81\x7f"}
    bits = floats.get(wire.name, b"\xff\x80")
    for part, valid in read_parts([bits] * count, (1,) * count, wire, 1.0):
        assert not valid
        assert torch.equal(part, torch.zeros(1, dtype=wire.dtype))


@pytest.mark.parametrize("size", [1, 16, 70_000])
def test_a_part_that_is_too_long_counts_as_zero(size: int, wire: Wire) -> None:
    vector = normal(size)
    for length, expected in ((1.0, True), (wire.slack - 0.005, True), (wire.slack + 0.01, False), (1000.0, False)):
        sent = fit(vector * (3 * length / norm(vector)), wire)
        part, valid = read_part(wire.encode(sent), size, wire, 3.0)
        assert valid is expected
        assert torch.equal(part, sent if expected else torch.zeros_like(sent))


def make_even(length: float, size: int, wire: Wire) -> Tensor:
    return fit(length * torch.ones(size, dtype=torch.float64) / math.sqrt(max(size, 1)), wire)


@pytest.mark.parametrize("sizes", [(5,), (5, 4, 4), (20_000, 20_000), (1, 0, 3)])
def test_many_at_once_are_read_as_each_alone(sizes: tuple[int, ...], wire: Wire) -> None:
    """Also where some are not finite, too long, next to the limit, or of the wrong length."""
    for scale in (0.5, 1.0, wire.slack, 1.0004 * wire.slack, 3.0, NAN, INF):
        parts = [make_even(scale, size, wire) for size in sizes]
        parts[0] = torch.zeros_like(parts[0])
        pieces = wire.encode_parts(parts)
        assert pieces == [wire.encode(part) for part in parts]
        for data in (pieces, [*pieces[:-1], bytes(pieces[-1]) + b"x"]):
            each = zip(data, sizes, strict=True)
            alone = [(read_part(x, size, wire, 1.0), read_aggregate(x, size, wire, 1.0)) for x, size in each]
            found, aggregates = read_parts(data, sizes, wire, 1.0), decode_aggregates(data, sizes, wire, 1.0)
            assert [valid for _, valid in found] == [valid for (_, valid), _ in alone]
            for (part, _), aggregate, ((one, _), other) in zip(found, aggregates, alone, strict=True):
                assert torch.equal(part, one)
                assert (aggregate is None) == (other is None)
                assert aggregate is None or other is None or torch.equal(aggregate, other)


@pytest.mark.parametrize("size", [5, 20_000])
def test_rows_of_a_stack_are_read_as_each_alone(size: int, wire: Wire) -> None:
    """Also where some are not finite, too long, next to the limit, or of the wrong length."""
    scales = (0.0, 0.5, 1.0, wire.slack, 1.0004 * wire.slack, 3.0, NAN, INF)
    rows = [make_even(scale, size, wire) for scale in scales]
    pieces = [*map(wire.encode, rows), wire.encode(rows[1]) + b"x", b""]
    for count in (1, 2, len(pieces)):
        stack, valid = read_stack(pieces[:count], size, wire, 1.0)
        alone = [read_part(piece, size, wire, 1.0) for piece in pieces[:count]]
        assert valid == [fine for _, fine in alone]
        assert torch.equal(stack, torch.stack([row for row, _ in alone]))


def test_an_aggregate_that_is_too_long_is_none(wire: Wire) -> None:
    vector = normal(1000)
    too_long = wire.slack * (1 + 2 * wire.roundoff) + 0.03
    for length, expected in ((1.0, True), (wire.slack - 0.001, True), (too_long, False), (1e4, False)):
        sent = fit(vector * (3 * length / norm(vector)), wire)
        found = read_aggregate(wire.encode(sent), 1000, wire, 3.0)
        assert (found is not None) is expected


@quick
@given(wire=wire_types, size=st.integers(1, 40), count=st.integers(1, 9), exponent=st.floats(-5, 4), seed=seeds_of_data)
def test_the_aggregate_of_valid_parts_is_always_valid(
    wire: Wire, size: int, count: int, exponent: float, seed: int
) -> None:
    """Even if all are equal, as long as can be, and too small for the type to round well."""
    cap = 10.0**exponent
    row = fit(prepare_gradient(1e9 * normal(size, seed=seed), 0.999 * wire.slack * cap, wire), wire)
    for _ in range(2):
        if not read_part(wire.encode(row), size, wire, cap)[1]:
            row = fit(prepare_gradient(row.float(), cap, wire), wire)
    result = centered_clip(row.repeat(count, 1), cap).aggregate
    assert read_aggregate(wire.encode(result), size, wire, cap) is not None


def test_a_norm_next_to_its_limit_is_judged_by_the_exact_sum() -> None:
    """However the squares are ordered: a plain sum would put some orders on one side and some on the other."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(4096).astype(np.float32) * (10 ** rng.uniform(-6, 0, 4096)).astype(np.float32)
    square = math.fsum(float(x) ** 2 for x in values)
    for steps in range(-4, 5):
        allowed = square * (1 + steps * 2.0**-52)
        limit = math.sqrt(allowed)
        expected = square <= limit * limit
        for _ in range(5):
            vector = torch.from_numpy(rng.permutation(values))
            assert verification._is_within(vector, verification._square(vector), limit) is expected


# --- Reports ---


def test_seeds_name_part_and_projection() -> None:
    seeds = projection_seeds(RANDOMNESS, 3, 2)
    assert len(seeds) == 3
    assert len({seed for keys in seeds for seed in keys}) == 6
    assert seeds[2][1] == derive_seed(RANDOMNESS, "projection", (2).to_bytes(8, "little"), (1).to_bytes(8, "little"))
    assert projection_seeds(RANDOMNESS, 2, 3)[1][0] == seeds[1][0]


def expected_report(
    parts: Sequence[Tensor], aggregates: Sequence[Tensor | None], seeds: Sequence[tuple[bytes, ...]], tau: float
) -> tuple[list[float], list[float]]:
    """By the definition, every sum exact."""
    sums, norms = [], []
    for k in range(len(seeds[0])):
        for part, aggregate, keys in zip(parts, aggregates, seeds, strict=True):
            x = torch.zeros_like(part).double() if aggregate is None else part.double() - aggregate.double()
            z = gaussian_vector(keys[k], len(part)).double()
            factor = min(1.0, tau / norm(x)) if norm(x) else 1.0
            sums.append(math.fsum((z * x).tolist()) * factor)
            if k == 0:
                norms.append(norm(x))
    return sums, norms


@quick
@given(
    wire=wire_types,
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    projections=st.integers(1, 3),
    scale=st.floats(-6, 4),
    tau=st.floats(-3, 3).map(lambda x: 10.0**x),
    seed=seeds_of_data,
)
def test_a_report_is_what_the_definition_says(
    wire: Wire, sizes: list[int], projections: int, scale: float, tau: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    parts = [fit(torch.from_numpy(rng.standard_normal(size) * 10**scale), wire) for size in sizes]
    aggregates = [
        fit(torch.from_numpy(rng.standard_normal(size)), wire) if rng.random() < 0.8 else None for size in sizes
    ]
    seeds = projection_seeds(rng.bytes(32), len(sizes), projections)
    report = compute_report(parts, aggregates, seeds, tau)
    sums, norms = expected_report(parts, aggregates, seeds, tau)
    assert len(report.sums) == projections * len(parts)
    for index, (found, expected) in enumerate(zip(report.sums, sums, strict=True)):
        j = index % len(parts)
        assert is_same_report(found, report.norms[j], expected, norms[j], tau, sizes[j], margin=1e-3)


@pytest.mark.parametrize("chunk", [7, 64, 1 << 16])
def test_long_parts_give_the_same_bits_as_short_ones(chunk: int, wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum for each part where it fits a chunk; but for the order of summation, the same where it does not."""
    sizes = [1, 5, 64, 50]
    parts = [fit(normal(size, seed=size), wire) for size in sizes]
    aggregates = [None, *(fit(normal(size, seed=size + 1), wire) for size in sizes[1:])]
    seeds = projection_seeds(RANDOMNESS, 4, 2)
    at_once = compute_report(parts, aggregates, seeds, 3.0)
    monkeypatch.setattr(verification, "_SMALL", 0)
    monkeypatch.setattr(verification, "_CHUNK", chunk)
    in_chunks = compute_report(parts, aggregates, seeds, 3.0)
    if chunk >= 64:
        assert in_chunks == at_once
    np.testing.assert_allclose(in_chunks.sums, at_once.sums, rtol=0, atol=1e-13)
    np.testing.assert_allclose(in_chunks.norms, at_once.norms, rtol=1e-14)


def test_really_long_parts(wire: Wire, device: str) -> None:
    part, aggregate = fit(normal(200_001), wire), fit(normal(200_001, seed=1), wire)
    seeds = projection_seeds(RANDOMNESS, 1, 2)
    report = compute_report([part.to(device)], [aggregate.to(device)], seeds, 3.0)
    sums, norms = expected_report([part], [aggregate], seeds, 3.0)
    for found, expected in zip(report.sums, sums, strict=True):
        assert is_same_report(found, report.norms[0], expected, norms[0], 3.0, 200_001, margin=1e-3)


@pytest.mark.parametrize("size", [1, 16, 500, 70_000])
@pytest.mark.parametrize("as_list", [True, False])
def test_a_column_has_the_bits_of_the_reports(size: int, as_list: bool, wire: Wire) -> None:
    rows = torch.stack([fit(row, wire) for row in normal(5, size) * torch.logspace(-2, 3, 5)[:, None]])
    aggregate = fit(normal(size, seed=1), wire)
    seeds = projection_seeds(RANDOMNESS, 4, 2)
    sums, norms = compute_column(list(rows) if as_list else rows, aggregate, seeds[3], 2.0)
    assert sums.shape == (2, 5)
    assert norms.shape == (5,)
    for i, row in enumerate(rows):
        others = [torch.ones(9, dtype=wire.dtype)] * 3
        report = compute_report([*others, row], [*others, aggregate], seeds, 2.0)
        assert report.norms[3] == norms[i]
        assert [report.sums[3], report.sums[7]] == sums[:, i].tolist()


@pytest.mark.parametrize("size", [16, 70_000])
def test_a_column_and_reports_agree_on_every_device(size: int, wire: Wire, device: str) -> None:
    rows, aggregate = torch.stack([fit(row, wire) for row in normal(5, size)]), fit(normal(size, seed=1), wire)
    seeds = projection_seeds(RANDOMNESS, 1, 2)
    sums, norms = compute_column(rows.to(device), aggregate.to(device), seeds[0], 2.0)
    for i, row in enumerate(rows):
        report = compute_report([row], [aggregate], seeds, 2.0)
        for k in range(2):
            assert is_same_report(sums[k, i], norms[i], report.sums[k], report.norms[0], 2.0, size, margin=1e-3)


@pytest.mark.parametrize("size", [1, 16, 70_000])
def test_without_an_aggregate_a_report_holds_positive_zeros(size: int, wire: Wire) -> None:
    """As a report message asks of the parts it lacks."""
    parts = [fit(normal(size, seed=seed), wire) for seed in range(8)]
    report = compute_report(parts, [None] * 8, projection_seeds(RANDOMNESS, 8, 2), 1.0)
    assert [math.copysign(1, x) for x in (*report.sums, *report.norms)] == [1.0] * 24
    assert not any(report.sums)
    assert not any(report.norms)
    Report(report.sums, report.norms, tuple(range(8)), ())


def test_a_part_that_equals_the_aggregate_reports_positive_zeros() -> None:
    part = normal(16)
    for seed in range(20):
        seeds = projection_seeds(bytes([seed]) * 32, 1, 1)
        report = compute_report([part[:1]], [part[:1].clone()], seeds, 1.0)
        assert math.copysign(1, report.sums[0]) == math.copysign(1, report.norms[0]) == 1


def test_an_invalid_part_reports_what_the_zero_vector_does(wire: Wire) -> None:
    aggregate, seeds = fit(normal(16), wire), projection_seeds(RANDOMNESS, 1, 1)
    zero, valid = read_part(b"nonsense", 16, wire, 1.0)
    assert not valid
    assert compute_report([zero], [aggregate], seeds, 1.0).norms == (norm(aggregate),)


def test_reports_of_the_largest_numbers_are_finite(wire: Wire) -> None:
    part = torch.full((1000,), torch.finfo(wire.dtype).max, dtype=wire.dtype)
    report = compute_report([part], [-part], projection_seeds(RANDOMNESS, 1, 1), 1.0)
    assert all(map(math.isfinite, (*report.sums, *report.norms)))
    assert abs(report.sums[0]) < 10


def test_an_infinite_radius_clips_nothing() -> None:
    part, aggregate, seeds = normal(16), normal(16, seed=1), projection_seeds(RANDOMNESS, 1, 1)
    assert compute_report([part], [aggregate], seeds, INF) == compute_report([part], [aggregate], seeds, 1e9)


def test_sizes_that_do_not_match_are_refused() -> None:
    rows, seeds = normal(3, 4), projection_seeds(RANDOMNESS, 2, 1)
    with pytest.raises(ValueError, match="sizes of the parts"):
        compute_report([rows[0], rows[1, :3]], [rows[0, :3], rows[1]], seeds, 1.0)
    with pytest.raises(ValueError, match="2 parts, 1 aggregates"):
        compute_report([rows[0], rows[1]], [rows[0]], seeds, 1.0)
    for wrong in (rows, list(rows), [rows[0], rows[1, :3]], []):
        with pytest.raises(ValueError, match=r"^rows: "):
            compute_column(wrong, rows[0, :3] if len(wrong) == 3 else rows[0], seeds[0], 1.0)
        with pytest.raises(ValueError, match=r"^rows: "):
            is_balanced(wrong, rows[0, :3] if len(wrong) == 3 else rows[0], 1.0, FLOAT32, 1.0)


# --- V1 ---


@quick
@given(tau=st.floats(1e-6, 1e6), size=st.integers(1, 10**8), sign=st.sampled_from([-1, 1]))
def test_v1_passes_rounding_and_nothing_more(tau: float, size: int, sign: int) -> None:
    absolute, relative = report_tolerance(tau, size)
    true_sum, true_norm = 0.7 * tau * math.sqrt(size), 3.0
    assert is_same_report(true_sum, true_norm, true_sum, true_norm, tau, size)
    assert is_same_report(true_sum + 0.9 * sign * absolute, true_norm, true_sum, true_norm, tau, size)
    assert is_same_report(true_sum, true_norm * (1 + 0.9 * sign * relative), true_sum, true_norm, tau, size)
    assert not is_same_report(true_sum + 1.1 * sign * absolute, true_norm, true_sum, true_norm, tau, size)
    assert not is_same_report(true_sum, true_norm * (1 + 1.1 * sign * relative), true_sum, true_norm, tau, size)


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
def test_v1_no_report_that_is_not_finite_is_right(wrong: float) -> None:
    assert not is_same_report(wrong, 1.0, 1.0, 1.0, 1.0, 16)
    assert not is_same_report(1.0, wrong, 1.0, 1.0, 1.0, 16)


def test_v1_a_norm_of_zero_must_be_zero() -> None:
    assert is_same_report(0.0, 0.0, 0.0, 0.0, 1.0, 16)
    assert not is_same_report(0.0, 1e-12, 0.0, 0.0, 1.0, 16)


def test_v1_whoever_accuses_convinces_a_voter_that_sums_otherwise() -> None:
    absolute, _ = report_tolerance(1.0, 16)
    rounding = 1e-3 * absolute
    for excess in np.linspace(0.5, 3, 251):
        accused = not is_same_report(excess * absolute, 1.0, 0.0, 1.0, 1.0, 16, margin=ACCUSER_MARGIN)
        convicted = not is_same_report(excess * absolute, 1.0, rounding, 1.0, 1.0, 16)
        assert convicted or not accused


# --- V2, from both sides ---


def make_rows(kind: str, count: int, size: int, wire: Wire, seed: int, cap: float) -> Tensor:
    """Valid rows about a common vector; in most kinds a minority attacks."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, size)) + rng.standard_normal(size)
    attackers = (count - 1) // 2
    if kind == "opposite":
        rows[:attackers] *= -1000
    elif kind == "together":
        rows[:attackers] = 1000 * rng.standard_normal(size)
    elif kind == "coinciding":
        rows[: count // 2] = rows[0]
    elif kind == "tiny":
        rows *= 1e-6
    elif kind == "far":
        rows += 500 * rng.standard_normal(size)
    return torch.stack([fit(prepare_gradient(torch.from_numpy(row).float(), cap, wire), wire) for row in rows])


KINDS = ("honest", "opposite", "together", "coinciding", "tiny", "far")


@settings(quick, max_examples=600)
@given(
    wire=wire_types,
    kind=st.sampled_from(KINDS),
    count=st.integers(1, 16),
    size=st.integers(1, 60),
    factor=st.floats(-6, 3).map(lambda x: 10.0**x),
    cap=st.floats(0, 5).map(lambda x: 10.0**x),
    seed=seeds_of_data,
)
def test_v2_v3_an_honest_aggregator_never_fails(
    wire: Wire, kind: str, count: int, size: int, factor: float, cap: float, seed: int
) -> None:
    rows = make_rows(kind, count, size, wire, seed, cap)
    wide = rows.double()
    typical = float(torch.pdist(wide).median()) if count > 1 else 1.0
    tau = factor * (typical or 1.0)
    aggregate = read_aggregate(wire.encode(centered_clip(rows, tau).aggregate), size, wire, cap)
    assert aggregate is not None
    assert float(imbalance(rows, aggregate, tau).norm()) <= balance_bound(tau, count, size, wire, cap)
    assert is_balanced(rows, aggregate, tau, wire, cap)
    eps = sum_bound(tau, count, size, wire, cap)
    keys = projection_seeds(seed.to_bytes(32, "little"), 1, 8)
    reports = [compute_report([row], [aggregate], keys, tau) for row in rows]
    for k in range(8):
        assert abs(math.fsum(report.sums[k] for report in reports)) <= eps


@pytest.mark.parametrize("factor", [1e-3, 0.3, 1.0])
@pytest.mark.parametrize("kind", ["honest", "opposite", "constant"])
@pytest.mark.parametrize("name", ["float32", "int8"])
def test_v2_v3_an_honest_aggregator_never_fails_where_rows_are_summed_in_float32(
    name: str, kind: str, factor: float
) -> None:
    wire = WIRE_TYPES[name]
    count, size = 16, (1 << 21) // 16
    assert is_narrow(count, size, torch.float32)
    rows = normal(count, size) if kind != "constant" else (1 + 0.1 * normal(count, 1)).expand(count, size).contiguous()
    if kind == "opposite":
        rows[:7] *= -1000
    rows = torch.stack([fit(row, wire) for row in rows])
    cap = max(norm(row) for row in rows)
    tau = factor * float((rows[-1] - rows[-2]).norm())
    aggregate = fit(centered_clip(rows, tau).aggregate, wire)
    assert is_balanced(rows, aggregate, tau, wire, cap)
    sums, _ = compute_column(rows, aggregate, projection_seeds(RANDOMNESS, 1, 4)[0], tau)
    assert np.abs(sums.sum(axis=1)).max() <= sum_bound(tau, count, size, wire, cap)


@pytest.mark.parametrize(("count", "size", "cap"), [(16, 16, 10.0), (7, 1000, 3.0), (5, 1, 1.0)])
def test_v2_liars_within_v1_cannot_frame_an_honest_aggregator(count: int, size: int, cap: float, wire: Wire) -> None:
    """Everybody, if need be, lies by all that no accuser objects to, in the direction that hurts."""
    for seed in range(10):
        rows = make_rows("opposite", count, size, wire, seed, cap)
        tau = 0.3 * cap
        aggregate = fit(centered_clip(rows, tau).aggregate, wire)
        sums, norms = compute_column(rows, aggregate, projection_seeds(bytes([seed]) * 32, 1, 1)[0], tau)
        honest = float(sums.sum())
        lie = math.copysign(ACCUSER_MARGIN * (1 - 1e-6) * report_tolerance(tau, size)[0], honest)
        claimed = [s + lie for s in sums[0]]
        for s, claim, length in zip(sums[0], claimed, norms, strict=True):
            assert is_same_report(claim, length, s, length, tau, size, margin=ACCUSER_MARGIN)
        assert abs(math.fsum(claimed)) <= sum_bound(tau, count, size, wire, cap)


def test_v2_the_tolerance_of_reports_fits_under_the_bound_even_at_the_worst_residual(wire: Wire) -> None:
    worst = 6 * balance_bound(0.1, 16, 1000, wire, 1.0)
    lies = 16 * ACCUSER_MARGIN * report_tolerance(0.1, 1000)[0]
    assert sum_bound(0.1, 16, 1000, wire, 1.0) == worst + lies


def shifted(rows: Tensor, aggregate: Tensor, tau: float, direction: Tensor, target: float) -> Tensor | None:
    """The aggregate, moved along ``direction`` until the imbalance is ``target``; None if it never is."""
    if float(imbalance(rows, aggregate.double() + 1e9 * direction, tau).norm()) < target:
        return None
    low, high = 0.0, 1e9
    for _ in range(200):
        middle = 0.5 * (low + high)
        found = float(imbalance(rows, aggregate.double() + middle * direction, tau).norm())
        low, high = (middle, high) if found < target else (low, middle)
    return aggregate.double() + high * direction


@pytest.mark.parametrize("projections", [1, 2])
@pytest.mark.parametrize("size", [1, 16, 200])
def test_v2_a_shift_beyond_the_bound_is_caught(projections: int, size: int, wire: Wire) -> None:
    """Ten times the bound passes with a chance of 1e-4: in 500 draws of ``z``, hardly ever."""
    count, cap, passed, tried = 9, {"float32": 2.0, "float16": 1e-3, "bfloat16": 1e-5, "int8": 1e-6}[wire.name], 0, 0
    tau = 1.0
    eps = sum_bound(tau, count, size, wire, cap)
    target = 10 * shift_bound(tau, count, size, wire, cap, projections)
    rows = torch.stack([fit(prepare_gradient(row, cap, wire), wire) for row in normal(count, size)])
    aggregate = fit(centered_clip(rows, tau).aggregate, wire)
    direction = normal(size, seed=1).double()
    moved = shifted(rows, aggregate, tau, direction / direction.norm(), target)
    assert moved is not None, "the bound is beyond what the radius allows: the test says nothing"
    for draw in range(500):
        keys = projection_seeds(draw.to_bytes(32, "little"), 1, projections)[0]
        sums, _ = compute_column(rows.double(), moved, keys, tau)
        tried += 1
        passed += bool((np.abs(sums.sum(axis=1)) <= eps).all())
    assert tried == 500
    assert passed <= 2


@pytest.mark.parametrize("projections", [1, 3])
def test_v2_the_published_probability_is_about_right(projections: int) -> None:
    """At a bound for 0.2 some pass, but no more than that, and at a hundredth of it all do."""
    count, size, cap, tau = 9, 16, 2.0, 1.0
    eps = sum_bound(tau, count, size, FLOAT32, cap)
    bound = shift_bound(tau, count, size, FLOAT32, cap, projections, 0.2)
    imbalances = normal(size).double()
    imbalances *= bound / imbalances.norm()
    passed = small = 0
    for draw in range(2000):
        keys = projection_seeds(draw.to_bytes(32, "little"), 1, projections)[0]
        products = [abs(float(gaussian_vector(key, size).double() @ imbalances)) for key in keys]
        passed += max(products) <= eps
        small += max(products) / 100 <= eps
    assert 0.1 < passed / 2000 < 0.23
    assert small == 2000


def test_the_bounds_follow_the_wire_type(wire: Wire) -> None:
    """Unit roundoff is 2^-24, 2^-8 and 2^-11, and a little over 4 percent for blocks of 8 bits."""
    unit = ROUNDOFF[wire.name]
    exact = torch.linspace(1, 2, 10_001, dtype=torch.float64)
    if wire.name == "int8":  # the worst block: just too long for the smaller unit, all others on the edge
        exact = torch.tensor([63.5 + 2**-17, *[0.5 - 2**-24] * 31], dtype=torch.float64)
        errors = float((fit(exact, wire).double() - exact).norm() / exact.norm()), 0.0
    else:
        errors = tuple(((fit(exact, wire).double() - exact) / exact).abs().tolist())
    assert 0.9 * unit < max(errors) <= unit == wire.roundoff
    assert sum_bound(1e-12, 1, 1, wire, 1.0) == pytest.approx(6 * unit * wire.slack, rel=1e-3)
    assert sum_bound(1.0, 10, 1, wire, 1e-20) == pytest.approx(6 * (1e-5 + 10 * wire.least), rel=1e-3)


# --- V3 ---


@pytest.mark.parametrize("size", [1, 16, 70_000])
def test_v3_a_wrong_aggregate_is_out_of_balance(size: int, wire: Wire) -> None:
    rows = make_rows("honest", 5, size, wire, 0, 1e3 * size)
    typical = float((rows[0].double() - rows[1].double()).norm()) or 1.0
    right, cap, tau = fit(centered_clip(rows, typical).aggregate, wire), max(map(norm, rows)), typical
    assert is_balanced(rows, right, tau, wire, cap)
    assert is_balanced(list(rows), right, tau, wire, cap)
    step = 1.01 * 2 * balance_bound(tau, 5, size, wire, cap)  # most rows are unclipped: each follows a shift
    wrong = right.double()
    wrong[0] += step
    assert not is_balanced(rows.double(), wrong, tau, wire, 0.0)
    assert not is_balanced(rows, fit(right.double() + typical, wire), tau, wire, cap)


@pytest.mark.parametrize("chunk", [3, 1 << 16])
def test_v3_chunks_do_not_change_the_answer(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_CHUNK", chunk)
    rows = make_rows("opposite", 7, 50, FLOAT32, 0, 1e5)
    aggregate = centered_clip(rows, 3.0).aggregate
    bound = balance_bound(3.0, 7, 50, FLOAT32, 1e3)
    exact = float(imbalance(rows, aggregate + 1e-2, 3.0).norm())
    for factor in (0.99, 1.01):  # the bound grows in proportion to the cap, but for what CenteredClip may leave
        cap = 1e3 * (factor * exact - 7 * 3e-6) / (bound - 7 * 3e-6)
        assert is_balanced(rows, aggregate + 1e-2, 3.0, FLOAT32, cap) is (factor > 1)


# --- V4, tolerant ---


TOLERANCE = Tolerance(1e-3, 1e-1)


@quick
@given(
    wire=wire_types,
    size=st.integers(1, 200),
    scale=st.floats(-7, 3).map(lambda x: 10.0**x),
    noise=st.floats(-9, -2).map(lambda x: 10.0**x),
    seed=seeds_of_data,
)
def test_v4_rounding_to_the_wire_type_is_no_deviation(
    wire: Wire, size: int, scale: float, noise: float, seed: int
) -> None:
    """Two platforms differ by a hair; what one commits to is, for the other, never farther off than that hair."""
    mine, other = scale * normal(size, seed=seed), noise * scale * normal(size, seed=seed + 1)
    theirs = fit(mine + other, wire)
    off = find_deviation(theirs, mine, wire).double()
    hair = (mine + other - mine).abs().double()
    assert bool((off <= hair * (1 + 1e-6) + 1e-45).all())
    assert not find_deviation(fit(mine, wire), mine, wire).any()


@pytest.mark.parametrize("wire", WIRE_TYPES.values(), ids=list(WIRE_TYPES))
def test_v4_a_code_where_mine_is_zero_is_a_deviation(wire: Wire) -> None:
    """Next to large numbers too: what rounds to zero on all platforms lends nobody a code."""
    mine, code = torch.zeros(64), 2.0**-6  # the unit of an int8 block up to 1
    mine[0] = 1.0
    theirs = fit(mine, wire).clone()
    theirs[5] = code
    off = find_deviation(theirs, mine, wire)
    assert code / 2 <= float(off[5]) <= code
    assert int(off.count_nonzero()) == 1


def test_v4_numbers_beyond_the_wire_type_are_at_its_edge() -> None:
    mine, wire = torch.tensor([1e6, -1e6]), WIRE_TYPES["float16"]
    theirs = prepare_gradient(mine, 1e9, wire)
    assert not find_deviation(theirs, mine, wire).any()


def test_v4_vectors_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="size of mine"):
        find_deviation(torch.ones(5), torch.ones(4), FLOAT32)


@quick
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    relative=st.floats(-6, 2).map(lambda x: 10.0**x),
    seed=seeds_of_data,
)
def test_v4_the_tensor_that_is_farthest_off_counts(sizes: list[int], relative: float, seed: int) -> None:
    gradient, deviation = normal(sum(sizes), seed=seed), torch.zeros(sum(sizes))
    place = seed % len(sizes)
    piece = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
    deviation[piece] = gradient[piece].abs() * relative
    expected = norm(deviation[piece]) / norm(gradient[piece])
    assert measure_tensors(deviation, gradient, sizes) == pytest.approx(expected, rel=1e-9)


def test_v4_a_tensor_counts_as_a_share_of_the_whole() -> None:
    gradient, deviation = torch.tensor([3.0, 4.0, 0.0]), torch.tensor([0.0, 0.0, 0.01])
    assert measure_tensors(deviation, gradient, (2, 1), floor=1e-3) == pytest.approx(2.0)
    assert measure_tensors(deviation, gradient, (3,)) == pytest.approx(2e-3)
    assert measure_tensors(deviation, gradient, (2, 1)) > 1e20


def test_v4_zero_gradients() -> None:
    zero, other = torch.zeros(5), torch.full((5,), 1e-20)
    assert measure_tensors(zero, zero, (5,)) == 0
    assert measure_tensors(other, zero, (5,)) > 1
    assert measure_tensors(torch.zeros(0), torch.zeros(0), ()) == 0


def test_v4_long_vectors_are_compared_whole() -> None:
    mine = normal(200_001)
    claimed = mine.clone()
    claimed[-1] += 1000
    assert measure_tensors(find_deviation(claimed, mine, FLOAT32), mine, (200_001,)) > 1


@pytest.mark.parametrize(
    ("distance", "verdict"),
    [
        (0.0, Verdict.INNOCENT),
        (1e-3, Verdict.INNOCENT),
        (1.1e-3, Verdict.INCONCLUSIVE),
        (1e-1, Verdict.INCONCLUSIVE),
        (0.11, Verdict.GUILTY),
        (INF, Verdict.GUILTY),
        (NAN, Verdict.INCONCLUSIVE),
    ],
)
def test_v4_two_thresholds(distance: float, verdict: Verdict) -> None:
    assert judge_distance(distance, TOLERANCE) is verdict
