"""Long bytes come together whatever the order, and what was verified is never written to again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core import messages as m
from phalanx.core.assembly import Assembly, Rows
from phalanx.core.config import Config
from phalanx.core.envelope import Examiner
from phalanx.core.handlers import HANDLERS, cut_chunks
from phalanx.core.membership import make_genesis
from phalanx.core.messages import MAX_CHUNK
from phalanx.core.partition import compute_part_sizes
from phalanx.core.peer import Own, Peer
from phalanx.core.room import make_bytes
from phalanx.core.step import read_rows
from phalanx.core.wire import WIRE_TYPES
from phalanx.network.ideal import make_signers

SIGNERS, VERIFY = make_signers(4, 1, ideal=True)
KEYS = tuple(signer.key for signer in SIGNERS)


@given(st.data(), st.integers(1, 4 * MAX_CHUNK // 1000))
def test_chunks_come_in_any_order_and_more_than_once(data: st.DataObject, thousands: int) -> None:
    length = 1000 * thousands
    whole = np.random.default_rng(length).bytes(length)
    offsets = list(range(0, length, MAX_CHUNK))
    order = data.draw(st.permutations(offsets))
    repeats = data.draw(st.lists(st.sampled_from(order[:-1]), max_size=3)) if len(offsets) > 1 else []
    assembly = Assembly(make_bytes(length))
    for offset in (*repeats, *order[:-1]):
        assert assembly.add(offset, whole[offset : offset + MAX_CHUNK]) is None
    last = order[-1]
    assert assembly.add(last, whole[last : last + MAX_CHUNK]) == whole


def test_a_row_is_given_out_once() -> None:
    rows = Rows([b"a", b"b"], 8)
    row = rows.take(b"a")
    assert row is not None
    assert rows.take(b"a") is None
    assert rows.take(b"stranger") is None


def test_rows_are_filled_with_what_came_elsewhere() -> None:
    rows = Rows([b"a", b"b", b"c"], 8)
    row = rows.take(b"b")
    assert row is not None
    row[:] = b"bbbbbbbb"
    assert rows.fill({b"a": b"aaaaaaaa", b"b": row, b"c": b"cccccccc"})
    assert rows.matrix.tobytes() == b"aaaaaaaabbbbbbbbcccccccc"
    assert rows.take(b"a") is None, "the matrix is in use"


def test_a_row_that_was_given_out_is_not_written_to() -> None:
    """Whoever it was given to may still write: then what it holds may be anything, whatever it was."""
    rows = Rows([b"a", b"b"], 8)
    row = rows.take(b"a")
    assert row is not None
    row[:] = b"abababab"
    assert not rows.fill({b"a": b"abababab", b"b": b"bbbbbbbb"})
    assert bytes(row) == b"abababab"


# ---- In a peer


def make_peer(wire: str) -> Peer:
    size = 3 * MAX_CHUNK  # numbers: parts take more than one chunk in every wire type
    config = Config(founders=KEYS, byzantine=1, size=size, steps=10, state=bytes(32), wire=wire, cap=10.0).check()
    view = make_genesis(config)
    peer = Peer(config, KEYS[0], Examiner(VERIFY), view, lambda *_: view, HANDLERS)
    peer.store = None
    return peer


def take(peer: Peer, parts: dict[bytes, bytes]) -> None:
    """Let everybody's part come to this peer, who made one itself, and be verified."""
    for key, data in parts.items():
        if key == peer.key:
            peer.own[0] = Own(b"seed", parts={0: [data]})
        else:
            send(peer, key, data)
            peer.verified.add((0, 0, key, 0))


def send(peer: Peer, owner: bytes, data: bytes) -> None:
    for at in range(0, len(data), MAX_CHUNK):
        chunk = m.PartChunk(0, 0, owner, 0, (), len(data), at, bytes(data[at : at + MAX_CHUNK]))
        peer.store_part(owner, chunk)


def make_parts(peer: Peer, seed: int) -> dict[bytes, bytes]:
    size = compute_part_sizes(peer.config.size, 4)[0]
    generator = torch.Generator().manual_seed(seed)
    vectors = {key: 1e-3 * torch.randn(size, generator=generator) for key in peer.duties.contributors}
    return {key: peer.wire.encode(vector.to(peer.wire.dtype)) for key, vector in vectors.items()}


@pytest.mark.parametrize("wire", WIRE_TYPES)
def test_what_was_verified_stays_whatever_its_owner_sends_later(wire: str) -> None:
    peer = make_peer(wire)
    parts, others = make_parts(peer, 1), make_parts(peer, 2)
    take(peer, parts)
    for key, data in others.items():
        send(peer, key, data)
    rows, valid = read_rows(peer)
    for key, data in others.items():
        send(peer, key, data)
    assert all(valid)
    assert all(peer.get_part((0, 0, key, 0)) == data for key, data in parts.items())
    for row, data in zip(rows, parts.values(), strict=True):
        expected = peer.wire.decode(data, len(row))
        assert expected is not None
        assert torch.equal(row, expected)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
def test_bytes_that_are_no_numbers_count_as_zero_and_stay_as_they_were_sent(wire: str) -> None:
    peer = make_peer(wire)
    parts = make_parts(peer, 1)
    culprit = next(key for key in parts if key != peer.key)
    parts[culprit] = b"\xff" * len(parts[culprit])
    take(peer, parts)
    rows, valid = read_rows(peer)
    assert valid == [key != culprit for key in parts]
    assert [bool(row.any()) for row in rows] == valid
    assert peer.parts[0, 0, culprit, 0][0] == parts[culprit], "it is the evidence"


def test_parts_that_come_lie_as_the_matrix_that_is_clipped() -> None:
    peer = make_peer("float32")
    take(peer, make_parts(peer, 1))
    rows, _ = read_rows(peer)
    assert peer.bench is not None
    assert rows.data_ptr() == peer.bench.matrix.ctypes.data


def test_strangers_reserve_nothing() -> None:
    peer = make_peer("float32")
    stranger, size = bytes([7]) * 32, peer.wire.count_bytes(peer.sizes[0])
    peer.store_part(stranger, m.PartChunk(0, 0, stranger, 0, (), size, 0, bytes(MAX_CHUNK)))
    assert not peer.partial
    assert not peer.parts


def test_a_chunk_of_nothing_is_refused() -> None:
    peer = make_peer("float32")
    owner = next(key for key in peer.duties.contributors if key != peer.key)
    size = peer.wire.count_bytes(peer.sizes[0])
    assert size % MAX_CHUNK == 0, "so that there could be one more chunk, of no bytes"
    peer.store_part(owner, m.PartChunk(0, 0, owner, 0, (), size, size, b""))
    assert not peer.partial


def test_what_does_not_fit_its_commitment_is_dropped() -> None:
    """Else everybody who looks for it would hash it again."""
    peer = make_peer("float32")
    part = peer.duties.contributors.index(next(key for key in peer.duties.contributors if key != peer.key))
    owner = peer.duties.contributors[part]
    send(peer, owner, make_parts(peer, 1)[owner])
    place = (0, 0, owner, 0)
    assert not peer.has_part(place)
    assert place in peer.parts, "its commitment is not here yet"
    peer.get_commitment = lambda transcript, key: bytes(32)  # type: ignore[method-assign]
    assert not peer.has_part(place)
    assert place not in peer.parts


def test_chunks_on_their_way_cannot_be_written_to() -> None:
    for _, piece in cut_chunks(bytearray(2 * MAX_CHUNK)):
        with pytest.raises(TypeError):
            piece[0] = 1  # type: ignore[index]
