"""Merkle roots and paths: a proof fits one place of one list, and nothing else passes for one."""

from __future__ import annotations

import pytest
from examples import digest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.crypto import compute_digest
from phalanx.core.merkle import compute_path, compute_root, hash_part, verify_path

COUNTS = range(1, 71)


def digests_of(count: int) -> list[bytes]:
    return [digest_of(1000 + index) for index in range(count)]


def leaf(index: int, digest: bytes) -> bytes:
    return compute_digest("merkle leaf", index.to_bytes(8, "little"), digest)


def node(left: bytes, right: bytes) -> bytes:
    return compute_digest("merkle node", left, right)


def finish(count: int, top: bytes) -> bytes:
    return compute_digest("merkle root", count.to_bytes(8, "little"), top)


def root_by_definition(digests: list[bytes]) -> bytes:
    """Bottom up instead of top down: pair neighbours in every layer, carry an odd last one up unchanged."""
    layer = [leaf(index, digest) for index, digest in enumerate(digests)]
    while len(layer) > 1:
        paired = [node(left, right) for left, right in zip(layer[::2], layer[1::2], strict=False)]
        layer = paired + ([layer[-1]] if len(layer) % 2 else [])
    return finish(len(digests), layer[0])


@pytest.mark.parametrize("count", COUNTS)
def test_every_part_has_a_path_to_the_root(count: int) -> None:
    digests = digests_of(count)
    root = compute_root(digests)
    for index in range(count):
        path = compute_path(digests, index)
        assert len(path) <= (count - 1).bit_length()
        assert verify_path(root, count, index, digests[index], path)


@pytest.mark.parametrize("count", COUNTS)
def test_the_root_is_that_of_the_tree_built_from_below(count: int) -> None:
    assert compute_root(digests_of(count)) == root_by_definition(digests_of(count))


@pytest.mark.parametrize("count", COUNTS)
def test_a_path_fits_no_other_index(count: int) -> None:
    digests = digests_of(count)
    root = compute_root(digests)
    for index in range(count):
        path = compute_path(digests, index)
        for other in {*range(-2, count + 3), index + 64, index + (1 << 64)} - {index}:
            assert not verify_path(root, count, other, digests[index], path)


@pytest.mark.parametrize("count", COUNTS)
def test_a_path_fits_no_other_count(count: int) -> None:
    digests = digests_of(count)
    root = compute_root(digests)
    for index in range(count):
        path = compute_path(digests, index)
        for other in {*range(-1, 2 * count + 3)} - {count}:
            assert not verify_path(root, other, index, digests[index], path)


@pytest.mark.parametrize("count", COUNTS)
def test_a_path_proves_no_other_digest(count: int) -> None:
    digests = digests_of(count)
    root = compute_root(digests)
    for index in range(count):
        path = compute_path(digests, index)
        for digest in (*digests[:index], *digests[index + 1 :], digest_of(0), *path, root):
            assert not verify_path(root, count, index, digest, path)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 64, 70])
def test_a_damaged_path_is_refused(count: int) -> None:
    digests = digests_of(count)
    root = compute_root(digests)
    for index in range(count):
        path = compute_path(digests, index)
        damaged = [(*path, digest_of(0)), (digest_of(0), *path), (*path, *path, root), path + path[-1:] * 40]
        damaged += [path[1:], path[:-1]] if path else []
        damaged += [path[::-1]] if len(path) > 1 else []
        for step in range(len(path)):
            flipped = bytes([path[step][0] ^ 1]) + path[step][1:]
            for other in (flipped, b"", path[step][:-1], path[step] + b"\x00", path[step] * 2):
                damaged.append((*path[:step], other, *path[step + 1 :]))
        for bad in damaged:
            assert bad == path or not verify_path(root, count, index, digests[index], bad)


def test_a_node_does_not_pass_for_a_leaf() -> None:
    """The classic second preimage: a list of two whose "digests" are the four-leaf tree's two inner nodes."""
    digests = digests_of(4)
    root = compute_root(digests)
    leaves = [leaf(index, digest) for index, digest in enumerate(digests)]
    inner = [node(leaves[0], leaves[1]), node(leaves[2], leaves[3])]
    assert root == finish(4, node(inner[0], inner[1]))
    for forged in (inner, [inner[0], digests[2], digests[3]], [*leaves[:2], inner[1]], leaves):
        assert compute_root(forged) != root
    for index in range(2):
        assert not verify_path(root, 2, index, inner[index], (inner[1 - index],))
        assert not verify_path(root, 4, index, inner[index], (inner[1 - index],))


@pytest.mark.parametrize("count", COUNTS)
def test_repeating_the_last_part_changes_the_root(count: int) -> None:
    digests = digests_of(count)
    longer = [digests + digests[-1:] * extra for extra in range(4)]
    assert len({compute_root(each) for each in longer}) == 4


@pytest.mark.parametrize("count", COUNTS)
def test_a_last_part_cannot_be_proved_behind_the_end(count: int) -> None:
    digests = digests_of(count)
    root, path = compute_root(digests), compute_path(digests, count - 1)
    assert not verify_path(root, count, count, digests[-1], path)
    assert not verify_path(root, count + 1, count, digests[-1], path)
    assert not verify_path(root, count + 1, count, digests[-1], (*path, digests[-1]))


def test_all_lists_of_equal_parts_have_different_roots() -> None:
    assert len({compute_root([digest_of(1)] * count) for count in COUNTS}) == len(COUNTS)


def test_equal_parts_at_two_places_have_proofs_that_cannot_be_exchanged() -> None:
    digests = [digest_of(1)] * 8
    root = compute_root(digests)
    for index in range(8):
        fits = [other for other in range(8) if verify_path(root, 8, other, digest_of(1), compute_path(digests, index))]
        assert fits == [index]


def test_the_order_of_parts_matters() -> None:
    digests = digests_of(7)
    for index in range(6):
        swapped = [*digests]
        swapped[index], swapped[index + 1] = swapped[index + 1], swapped[index]
        assert compute_root(swapped) != compute_root(digests)


def test_the_root_of_one_part_is_not_its_digest() -> None:
    digest = digest_of(1)
    assert compute_root([digest]) not in (digest, leaf(0, digest))
    assert compute_path([digest], 0) == ()
    assert not verify_path(digest, 1, 0, digest, ())


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64])
def test_a_digest_of_another_length_is_refused(length: int) -> None:
    digest = bytes(length)
    assert not verify_path(finish(1, leaf(0, digest)), 1, 0, digest, ())


@pytest.mark.parametrize("root", [b"", bytes(31), bytes(32), bytes(33)], ids=len)
def test_another_root_is_refused(root: bytes) -> None:
    digests = digests_of(5)
    assert not verify_path(root, 5, 2, digests[2], compute_path(digests, 2))


def test_a_count_of_zero_or_less_proves_nothing() -> None:
    for count in (0, -1, -5):
        assert not verify_path(finish(0, leaf(0, digest_of(1))), count, 0, digest_of(1), ())


def test_an_empty_list_has_no_root() -> None:
    with pytest.raises(ValueError, match="at least one"):
        compute_root([])


@pytest.mark.parametrize(("count", "index"), [(0, 0), (1, 1), (1, -1), (5, 5), (5, -1), (5, 100)])
def test_there_is_no_path_to_a_part_that_is_not_there(count: int, index: int) -> None:
    with pytest.raises(IndexError):
        compute_path(digests_of(count), index)


def test_a_part_is_hashed_under_a_name_of_its_own() -> None:
    data = bytes(40)
    assert hash_part(data) == hash_part(memoryview(data)) == compute_digest("part", data)
    assert hash_part(data) != hash_part(data + b"\x00")
    assert hash_part(b"") != hash_part(b"\x00")


@settings(deadline=None, derandomize=True)
@given(st.data(), st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=40))
def test_a_proof_is_accepted_exactly_where_it_belongs(data: st.DataObject, digests: list[bytes]) -> None:
    index = data.draw(st.integers(0, len(digests) - 1))
    claimed = data.draw(st.integers(0, len(digests) - 1))
    root, path = compute_root(digests), compute_path(digests, index)
    assert verify_path(root, len(digests), claimed, digests[index], path) == (claimed == index)
