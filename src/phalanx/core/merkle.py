"""One digest for a list of parts, and short proofs that a part is in it (RFC 6962's tree, with BLAKE3).

The root binds the number of leaves and a leaf its place, so a proof fits one position of one list only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from phalanx.core.crypto import DIGEST_SIZE, compute_digest, recall_digest

_SHORT = 1024


def hash_part(data: bytes | bytearray | memoryview) -> bytes:
    """The digest of a part's bytes as they travel."""
    if type(data) is bytes and len(data) <= _SHORT:
        return recall_digest("part", data)
    return compute_digest("part", data)


def compute_root(digests: Sequence[bytes]) -> bytes:
    """The root over the parts' digests."""
    leaves = _leaves(digests)
    return _finish(len(leaves), _subtree(leaves))


def compute_path(digests: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """The digests that, with the one at ``index``, give the root: nearest first."""
    if not 0 <= index < len(digests):
        raise IndexError(f"index {index} of {len(digests)} parts")
    return compute_paths(digests)[1][index]


def compute_paths(digests: Sequence[bytes]) -> tuple[bytes, list[tuple[bytes, ...]]]:
    """The root, and the path of every part."""
    leaves = _leaves(digests)
    paths: list[list[bytes]] = [[] for _ in leaves]
    top = _climb(leaves, paths, 0, len(leaves))
    return _finish(len(leaves), top), [tuple(path) for path in paths]


def _climb(leaves: Sequence[bytes], paths: Sequence[list[bytes]], low: int, high: int) -> bytes:
    """The node above some leaves; their paths get what they need to come to it."""
    if high - low == 1:
        return leaves[low]
    middle = low + _middle(high - low)
    left, right = _climb(leaves, paths, low, middle), _climb(leaves, paths, middle, high)
    for path in paths[low:middle]:
        path.append(right)
    for path in paths[middle:high]:
        path.append(left)
    return _node(left, right)


def verify_path(root: bytes, count: int, index: int, digest: bytes, path: Sequence[bytes]) -> bool:
    """Whether ``digest`` is at ``index`` of the ``count`` parts under ``root``."""
    if not 0 <= index < count or len(digest) != DIGEST_SIZE:
        return False
    turns = _get_turns(count, index)
    if len(path) != len(turns):
        return False
    node = _leaf(index, digest)
    for other, right in zip(path, turns, strict=True):
        node = _node(other, node) if right else _node(node, other)
    return _finish(count, node) == root


@lru_cache(maxsize=1024)
def _get_turns(count: int, index: int) -> tuple[bool, ...]:
    """Where the path of a part comes from the left, at each level: from the leaf up."""
    turns, low, high = [], 0, count
    while high - low > 1:
        middle = low + _middle(high - low)
        turns.append(index >= middle)
        low, high = (middle, high) if index >= middle else (low, middle)
    return tuple(reversed(turns))


def _leaves(digests: Sequence[bytes]) -> list[bytes]:
    if not digests:
        raise ValueError("digests: expected at least one")
    return [_leaf(index, digest) for index, digest in enumerate(digests)]


def _leaf(index: int, digest: bytes) -> bytes:
    return recall_digest("merkle leaf", index.to_bytes(8, "little"), digest)


def _node(left: bytes, right: bytes) -> bytes:
    return recall_digest("merkle node", left, right)


def _finish(count: int, top: bytes) -> bytes:
    return recall_digest("merkle root", count.to_bytes(8, "little"), top)


def _middle(count: int) -> int:
    """The largest power of two below ``count``."""
    return 1 << ((count - 1).bit_length() - 1)


def _subtree(leaves: Sequence[bytes]) -> bytes:
    if len(leaves) == 1:
        return leaves[0]
    middle = _middle(len(leaves))
    return _node(_subtree(leaves[:middle]), _subtree(leaves[middle:]))
