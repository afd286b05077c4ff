"""Parts cover the gradient once, in the order of the blocks, and none is empty."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.partition import BLOCK, _split_blocks, compute_part_sizes, join_parts, split_parts


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 40_000))
def test_splitting_and_joining_is_the_identity(count: int, extra: int) -> None:
    vector = torch.arange(count + extra, dtype=torch.float32)
    parts = split_parts(vector, count)
    assert tuple(len(part) for part in parts) == compute_part_sizes(len(vector), count)
    assert min(len(part) for part in parts) > 0
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(join_parts(parts), vector)


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(0, 30_000))
def test_short_vectors_are_cut_as_long_ones(count: int, extra: int) -> None:
    vector = torch.arange(count + extra)
    for part, same in zip(split_parts(vector, count), _split_blocks(vector, count), strict=True):
        assert torch.equal(part, same)


def test_blocks_go_round_robin() -> None:
    vector = torch.arange(5 * BLOCK + 10)
    first, second = split_parts(vector, 2)
    assert torch.equal(first, torch.cat([vector[i * BLOCK : (i + 1) * BLOCK] for i in (0, 2, 4)]))
    assert torch.equal(second, torch.cat([vector[i * BLOCK : (i + 1) * BLOCK] for i in (1, 3, 5)]))


@pytest.mark.parametrize(("size", "count"), [(3, 4), (0, 1), (5, 0), (5, -1)])
def test_a_part_without_coordinates_is_refused(size: int, count: int) -> None:
    with pytest.raises(ValueError, match="count"):
        split_parts(torch.zeros(size), count)


def test_parts_of_other_sizes_do_not_join() -> None:
    parts = split_parts(torch.arange(100.0), 3)
    with pytest.raises(ValueError, match="parts"):
        join_parts([parts[0], parts[1][:-1], parts[2]])


def test_no_part_is_more_than_a_block_larger_than_another() -> None:
    sizes = compute_part_sizes(11_170_000, 16)
    assert sum(sizes) == 11_170_000
    assert max(sizes) - min(sizes) <= BLOCK


def test_parts_of_a_strided_vector_are_contiguous_too() -> None:
    parts = split_parts(torch.arange(20.0)[::2], 3)
    assert all(part.is_contiguous() for part in parts)
    assert torch.equal(join_parts(parts), torch.arange(20.0)[::2])


def test_a_matrix_is_no_vector() -> None:
    with pytest.raises(ValueError, match="vector"):
        split_parts(torch.ones(4, 4), 2)
