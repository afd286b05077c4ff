"""Random streams: everybody draws the same, every choice is equally likely, Gaussians have the same bits anywhere."""

from __future__ import annotations

import random
from collections import Counter
from statistics import NormalDist

import numpy as np
import pytest
import torch
from blake3 import blake3
from examples import digest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import randomness
from phalanx.core.errors import LocalError
from phalanx.core.randomness import Stream, derive_seed, gaussian_table, gaussian_vector

SEED = bytes(range(32))
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
TABLE_DIGEST = "03fddd0ec98e825ed5a68928ff44a247adabb4117979bc88683d0af22acd6bef"
BLOCK = 1 << 19


def chi_square(counts: list[int]) -> float:
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 for count in counts) / expected


def bits_of(vector: torch.Tensor) -> bytes:
    return vector.cpu().numpy().astype("<f4").tobytes()


# ---- Streams


def test_a_stream_is_blake3s_long_output() -> None:
    expected = blake3(SEED, derive_key_context="phalanx 1 stream").digest(length=100)
    assert Stream(SEED).draw_bytes(100) == expected


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 200), max_size=10))
def test_a_stream_does_not_depend_on_how_it_is_cut(sizes: list[int]) -> None:
    stream = Stream(SEED)
    assert b"".join(stream.draw_bytes(size) for size in sizes) == Stream(SEED).draw_bytes(sum(sizes))


def test_streams_of_different_seeds_differ() -> None:
    seeds = [SEED, SEED[:-1], SEED + b"\x00", bytes(32), b"", derive_seed(SEED, "test")]
    assert len({Stream(seed).draw_bytes(16) for seed in seeds}) == len(seeds)


def test_seeds_for_different_purposes_and_fields_differ() -> None:
    derived = [
        derive_seed(SEED, "batch"),
        derive_seed(SEED, "batches"),
        derive_seed(SEED, "batch", b""),
        derive_seed(SEED, "batch", b"a", b"b"),
        derive_seed(SEED, "batch", b"ab"),
        derive_seed(SEED, "batch", b"b", b"a"),
        derive_seed(bytes(32), "batch"),
    ]
    assert len(set(derived)) == len(derived)
    assert {len(seed) for seed in derived} == {32}


# ---- Whole numbers


def test_known_draws() -> None:
    stream = Stream(SEED)
    assert [stream.draw_below(bound) for bound in (1, 2, 10, 1000, 1 << 32, 1 << 64)] == [
        0,
        0,
        7,
        713,
        2515174390,
        5979756284121293571,
    ]


@pytest.mark.parametrize(
    "bound", [1, 2, 3, 255, 256, 257, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 1, 1 << 64]
)
def test_a_draw_skips_words_above_the_last_whole_multiple(bound: int) -> None:
    """Against a plain reading of the rule: eight bytes at a time, least significant first."""
    words = iter(np.frombuffer(Stream(SEED).draw_bytes(8 * 400), "<u8").tolist())
    stream = Stream(SEED)
    for _ in range(100):
        word = next(word for word in words if word < (1 << 64) // bound * bound)
        assert stream.draw_below(bound) == word % bound


def test_words_are_really_skipped_for_bounds_just_over_half() -> None:
    bound = (1 << 63) + 1
    words = np.frombuffer(Stream(SEED).draw_bytes(8 * 1000), "<u8").tolist()
    assert 400 < sum(word >= bound for word in words) < 600


@pytest.mark.parametrize("bound", [2, 3, 6, 10, 16, 100])
def test_small_draws_are_even(bound: int) -> None:
    stream = Stream(digest_of(bound))
    counts = Counter(stream.draw_below(bound) for _ in range(20_000))
    assert set(counts) == set(range(bound))
    assert chi_square(list(counts.values())) < bound - 1 + 5 * (2 * (bound - 1)) ** 0.5 + 10


@pytest.mark.parametrize("bound", [(1 << 63) + 1, 3 << 62, (1 << 64) - 1])
def test_large_draws_are_even_where_a_remainder_alone_would_not_be(bound: int) -> None:
    stream, thirds = Stream(digest_of(bound)), [0, 0, 0]
    for _ in range(6000):
        thirds[3 * stream.draw_below(bound) // bound] += 1
    assert chi_square(thirds) < 20


def test_a_remainder_alone_would_be_caught() -> None:
    words = np.frombuffer(Stream(digest_of(3 << 62)).draw_bytes(8 * 6000), "<u8").tolist()
    thirds = Counter(3 * (word % (3 << 62)) // (3 << 62) for word in words)
    assert chi_square(list(thirds.values())) > 200


@pytest.mark.parametrize("bound", [0, -1, -(1 << 64), (1 << 64) + 1, 1 << 65])
def test_a_bound_outside_the_range_is_refused(bound: int) -> None:
    with pytest.raises(ValueError, match="bound"):
        Stream(SEED).draw_below(bound)


# ---- Samples


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=32), st.lists(st.integers(), unique=True, max_size=30), st.data())
def test_a_sample_has_no_repeats_and_comes_from_the_population(
    seed: bytes, population: list[int], data: st.DataObject
) -> None:
    before = list(population)
    count = data.draw(st.integers(0, len(population)))
    sample = Stream(seed).draw_sample(population, count)
    assert len(sample) == len(set(sample)) == count
    assert set(sample) <= set(population)
    assert population == before


def test_a_sample_of_all_is_a_shuffle() -> None:
    sample = Stream(SEED).draw_sample(range(100), 100)
    assert sorted(sample) == list(range(100))
    assert sample != list(range(100))


def test_a_longer_sample_starts_with_the_shorter() -> None:
    whole = Stream(SEED).draw_sample(range(50), 50)
    assert all(Stream(SEED).draw_sample(range(50), count) == whole[:count] for count in range(51))


def test_every_ordered_pair_is_equally_likely() -> None:
    stream = Stream(SEED)
    counts = Counter(tuple(stream.draw_sample(range(5), 2)) for _ in range(20_000))
    assert len(counts) == 20
    assert chi_square(list(counts.values())) < 60


def test_every_member_is_drawn_at_every_place() -> None:
    stream = Stream(SEED)
    samples = [stream.draw_sample(range(6), 6) for _ in range(6000)]
    for place in range(6):
        counts = Counter(sample[place] for sample in samples)
        assert len(counts) == 6
        assert chi_square(list(counts.values())) < 40


def test_repeated_members_are_drawn_as_often_as_they_occur() -> None:
    assert sorted(Stream(SEED).draw_sample("aab", 3)) == ["a", "a", "b"]


@pytest.mark.parametrize("count", [-1, 4, 100])
def test_a_sample_larger_than_the_population_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="count"):
        Stream(SEED).draw_sample(range(3), count)


def test_nobody_is_drawn_from_nobody() -> None:
    assert Stream(SEED).draw_sample([], 0) == []


# ---- Gaussian vectors


def test_the_table_is_the_published_one() -> None:
    table = gaussian_table()
    assert table.dtype == np.dtype("<f4")
    assert blake3(table.tobytes()).hexdigest() == TABLE_DIGEST


def test_the_table_is_symmetric_increasing_and_of_unit_variance() -> None:
    table = gaussian_table().astype(np.float64)
    assert np.array_equal(table, -table[::-1])
    assert np.all(np.diff(table) > 0)
    assert 4.32 < table.max() < 4.33
    assert (table**2).mean() == pytest.approx(0.99998, abs=0.000005)
    assert (table**4).mean() == pytest.approx(3, abs=0.002)


def test_twelve_correct_digits_are_enough_for_the_table() -> None:
    """No quantile lies so close to the middle between two float32 that another library could round it otherwise."""
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((index + 0.5) / 65536) for index in range(65536)])
    for error in (-1e-12, 0, 1e-12):
        assert np.array_equal((quantiles * (1 + error)).astype("<f4"), gaussian_table())


def test_the_table_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        gaussian_table()[0] = 0


def test_a_platform_with_another_table_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "_TABLE_DIGEST", "00" * 32)
    with pytest.raises(LocalError) as caught:
        gaussian_table.__wrapped__()
    assert caught.type is LocalError


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_a_vector_is_the_stream_looked_up_in_the_table(size: int, device: str) -> None:
    places = np.frombuffer(Stream(SEED).draw_bytes(2 * size), "<u2")
    vector = gaussian_vector(SEED, size, device)
    assert (vector.dtype, vector.shape, vector.device.type) == (torch.float32, (size,), device)
    assert bits_of(vector) == gaussian_table()[places].tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_a_longer_vector_starts_with_the_shorter(device: str) -> None:
    whole = bits_of(gaussian_vector(SEED, 2 * BLOCK + 10, device))
    for size in (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 9):
        assert bits_of(gaussian_vector(SEED, size, device)) == whole[: 4 * size]


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_have_the_moments_of_a_normal(device: str) -> None:
    size = 1 << 20
    values = gaussian_vector(SEED, size, device).double()
    error = size**-0.5
    assert abs(values.mean().item()) < 5 * error
    assert abs((values**2).mean().item() - 1) < 5 * error * 2**0.5
    assert abs((values**3).mean().item()) < 5 * error * 15**0.5
    assert abs((values**4).mean().item() - 3) < 5 * error * 96**0.5
    assert abs((values > 0).double().mean().item() - 0.5) < 2.5 * error
    assert abs((values[1:] * values[:-1]).mean().item()) < 5 * error


def test_vectors_of_different_seeds_are_unrelated() -> None:
    size = 1 << 18
    first, second = gaussian_vector(SEED, size).double(), gaussian_vector(derive_seed(SEED, "other"), size).double()
    assert abs((first @ second).item()) / size < 5 * size**-0.5


def test_one_seed_gives_one_vector_and_leaves_other_randomness_alone() -> None:
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    assert bits_of(gaussian_vector(SEED, 100)) == bits_of(gaussian_vector(SEED, 100))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == states[2]


def test_two_vectors_share_no_memory() -> None:
    first, second = gaussian_vector(SEED, 10), gaussian_vector(SEED, 10)
    first.zero_()
    assert second.abs().sum() > 0
    assert gaussian_vector(SEED, 10).equal(second)


@pytest.mark.parametrize("size", [-1, -100])
def test_a_negative_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        gaussian_vector(SEED, size)
