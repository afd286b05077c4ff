"""Bytes to messages and back: one encoding, one error, and a stream cut in the same places however it arrives."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from examples import ALICE, BODIES, MESSAGES, digest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import messages as m
from phalanx.core.codec import FrameReader, decode_body, decode_message, encode, encode_frame
from phalanx.core.errors import Malformed
from phalanx.core.messages import MAX_BODY, MAX_CHUNK, MAX_FRAME

DECODERS = [decode_message, decode_body]
both_decoders = pytest.mark.parametrize("decode", DECODERS, ids=["message", "body"])
pack = msgspec.msgpack.encode


def assert_malformed(act: Callable[[], Any], match: str | None = None) -> None:
    with pytest.raises(Malformed, match=match) as caught:
        act()
    assert caught.type is Malformed


# ---- Decoding

NOT_MESSAGES = {
    "nothing": b"",
    "nil": b"\xc0",
    "the byte that MessagePack never uses": b"\xc1",
    "true": b"\xc3",
    "a number": b"\x07",
    "a negative number": b"\xff",
    "a float": pack(1.0),
    "NaN": pack(math.nan),
    "text": pack("commit"),
    "bytes": pack(b"commit"),
    "an empty array": b"\x90",
    "an empty map": b"\x80",
    "an extension": b"\xd4\x05\x00",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "a list of nothing": pack([None]),
    "a list in a list": pack([[["commit"]]]),
    "fields without a name": pack([digest_of(1), digest_of(2)]),
    "an array of four billion": b"\xdd\xff\xff\xff\xff",
    "a map of four billion": b"\xdf\xff\xff\xff\xff",
    "a text of four billion": b"\xdb\xff\xff\xff\xff",
    "bytes of four billion": b"\xc6\xff\xff\xff\xff",
    "an extension of four billion": b"\xc9\xff\xff\xff\xff\x05",
    "four billion fields": b"\xdd\xff\xff\xff\xff" + pack("seal"),
    "four billion fields of a message": b"\xdd\xff\xff\xff\xff" + pack("pullmanifest"),
    "JSON": b'["seal"]',
    "a pickle": b"\x80\x04\x95\x0a\x00\x00\x00\x00\x00\x00\x00\x8c\x04seal\x94.",
    "arrays nested as deep as fits": b"\x91" * MAX_BODY,
    "maps nested as deep as fits": b"\x81" * MAX_BODY,
    "zeros": bytes(1000),
    "a name of a hundred thousand letters": pack(["a" * 100_000]),
}


@both_decoders
@pytest.mark.parametrize("data", NOT_MESSAGES.values(), ids=NOT_MESSAGES)
def test_what_is_no_message_is_malformed(decode: Callable[[bytes], Any], data: bytes) -> None:
    assert_malformed(lambda: decode(data))


@both_decoders
@pytest.mark.parametrize("byte", range(256), ids=hex)
def test_no_single_byte_is_a_message(decode: Callable[[bytes], Any], byte: int) -> None:
    assert_malformed(lambda: decode(bytes([byte])))
    assert_malformed(lambda: decode(bytes([byte]) * 200))


@both_decoders
def test_input_over_the_limit_is_refused_unread(decode: Callable[[bytes], Any]) -> None:
    limit = MAX_FRAME if decode is decode_message else MAX_BODY
    assert_malformed(lambda: decode(bytes(limit + 1)), f"at most {limit}")
    valid = encode(m.PullManifest() if decode is decode_message else m.Seal(digest_of(1)))
    assert_malformed(lambda: decode(valid + bytes(limit)), f"at most {limit}")


def test_the_longest_chunk_fits_into_a_frame() -> None:
    path = tuple(digest_of(index) for index in range(m.MAX_PATH))
    chunk = m.PartChunk(
        (1 << 48) - 1, 65535, ALICE.key, m.MAX_MEMBERS - 1, path, (1 << 48) - 1, 1 << 47, bytes(MAX_CHUNK)
    )
    frame = encode_frame(chunk)
    assert decode_message(frame[4:]) == chunk
    assert len(frame) < MAX_FRAME


@both_decoders
@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.binary(max_size=200))
def test_garbage_is_malformed_or_canonical(decode: Callable[[bytes], Any], data: bytes) -> None:
    try:
        value = decode(data)
    except Malformed:
        return
    assert encode(value) == data


MessagePack = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=40)
    | st.sampled_from([name.split(".")[0].lower() for name in (*BODIES, *MESSAGES)]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@both_decoders
@settings(deadline=None, derandomize=True, max_examples=300)
@given(value=MessagePack)
def test_other_messagepack_is_malformed_or_canonical(decode: Callable[[bytes], Any], value: Any) -> None:
    data = pack(value)
    try:
        decoded = decode(data)
    except Malformed:
        return
    assert encode(decoded) == data


def test_an_error_carries_no_other_error_with_it() -> None:
    """A chain of exceptions would keep what the decoder had read so far alive, and say more in logs than is asked."""
    with pytest.raises(Malformed) as caught:
        decode_message(b"\x91\xa1\xff")
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


LONG_COMPLAINTS = {
    "a tag": (decode_message, pack(["x" * 1_000_000])),
    "a tag of a body": (decode_body, pack(["x" * 200_000])),
    "a domain": (decode_message, pack(["signed", "\x1b[2J" * 500_000, *range(9)])),
    "a verdict": (decode_body, pack(["vote", [[digest_of(1), "x" * 200_000]], []])),
}


@pytest.mark.parametrize(("decode", "data"), LONG_COMPLAINTS.values(), ids=LONG_COMPLAINTS)
def test_what_the_error_says_is_short(decode: Callable[[bytes], Any], data: bytes) -> None:
    """It goes into logs and events: a peer must not be able to fill them with one message."""
    with pytest.raises(Malformed) as caught:
        decode(data)
    assert len(str(caught.value)) <= 300


def test_what_the_error_says_moves_no_cursor_and_adds_no_line() -> None:
    with pytest.raises(Malformed) as caught:
        decode_message(pack(["\x1b[2J\n2026-01-01 banned: somebody"]))
    assert str(caught.value).isprintable()


def test_decoding_a_large_body_takes_memory_in_proportion() -> None:
    data = encode(m.Vote(tuple(m.Ballot(digest_of(index), m.Verdict.GUILTY) for index in range(m.MAX_BALLOTS)), ()))
    tracemalloc.start()
    try:
        decode_body(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data)


# ---- Frames

FRAMES = [encode(message) for message in MESSAGES.values()]
STREAM = b"".join(len(frame).to_bytes(4, "big") + frame for frame in FRAMES)


def feed_all(pieces: list[bytes]) -> list[bytes]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)]


def test_a_frame_is_a_length_and_the_message() -> None:
    assert b"".join(map(encode_frame, MESSAGES.values())) == STREAM


def test_a_message_too_long_for_a_frame_is_not_sent() -> None:
    chunk = m.StateChunk(0, MAX_FRAME, 0, bytes(MAX_FRAME))
    with pytest.raises(ValueError, match="frame"):
        encode_frame(chunk)


def test_a_stream_given_at_once_gives_its_frames() -> None:
    assert feed_all([STREAM]) == FRAMES


def test_a_stream_given_byte_by_byte_gives_its_frames() -> None:
    assert feed_all([bytes([byte]) for byte in STREAM]) == FRAMES


@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 64, 1000])
def test_a_stream_given_in_equal_pieces_gives_its_frames(size: int) -> None:
    assert feed_all([STREAM[start : start + size] for start in range(0, len(STREAM), size)]) == FRAMES


@settings(deadline=None, derandomize=True)
@given(st.lists(st.binary(min_size=1, max_size=30), max_size=8), st.lists(st.integers(0, 300), max_size=20))
def test_any_split_gives_the_same_frames(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    assert feed_all([stream[a:b] for a, b in itertools.pairwise(edges)]) == frames


def test_nothing_comes_before_a_frame_is_whole() -> None:
    reader = FrameReader()
    assert list(reader.feed(STREAM[: 4 + len(FRAMES[0]) - 1])) == []
    assert list(reader.feed(b"")) == []
    assert list(reader.feed(STREAM[4 + len(FRAMES[0]) - 1 :][:1])) == FRAMES[:1]


def test_the_largest_frame_passes() -> None:
    largest = bytes(MAX_FRAME)
    assert feed_all([MAX_FRAME.to_bytes(4, "big"), largest, b"\x00\x00\x00\x01x"]) == [largest, b"x"]


@pytest.mark.parametrize("size", [0, MAX_FRAME + 1, 2 * MAX_FRAME, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_a_length_outside_the_limits_ends_the_stream_with_its_header(size: int) -> None:
    header = size.to_bytes(4, "big")
    reader = FrameReader()
    assert list(reader.feed(header[:3])) == []
    assert_malformed(lambda: list(reader.feed(header[3:])), f"a frame of {size} bytes")


def test_good_frames_before_a_bad_length_are_delivered_first() -> None:
    reader, got = FrameReader(), []

    def read() -> None:
        for frame in reader.feed(STREAM + bytes(4)):
            got.append(frame)

    assert_malformed(read)
    assert got == FRAMES


@pytest.mark.parametrize("header", [bytes(4), b"\xff" * 4], ids=bytes.hex)
def test_a_stream_that_was_malformed_stays_so(header: bytes) -> None:
    """Its frame borders are lost: whatever looks like a frame later may be the inside of one."""
    reader = FrameReader()
    assert list(reader.feed(STREAM)) == FRAMES
    assert_malformed(lambda: list(reader.feed(header + STREAM)))
    for data in (STREAM, b"", STREAM[:1], STREAM):
        assert_malformed(lambda data=data: reader.feed(data), "a frame of")


def test_a_malformed_stream_ends_for_every_open_iteration() -> None:
    reader = FrameReader()
    first, second = reader.feed(STREAM), reader.feed(bytes(4))
    assert next(first) == FRAMES[0]
    assert_malformed(lambda: list(second))
    assert_malformed(lambda: next(first))


def test_a_reader_of_a_malformed_stream_holds_nothing() -> None:
    reader, rest = FrameReader(), bytes(1 << 20)
    tracemalloc.start()
    try:
        for _ in range(20):
            assert_malformed(lambda: list(reader.feed(rest)))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100_000


@pytest.mark.parametrize("limit", [1, 100, 1 << 16, MAX_FRAME])
def test_a_smaller_limit_holds_for_strangers(limit: int) -> None:
    frame = limit.to_bytes(4, "big") + bytes(limit)
    assert list(FrameReader(limit).feed(frame * 2)) == [bytes(limit)] * 2
    for size in (limit + 1, MAX_FRAME + 1, 0):
        reader = FrameReader(limit=limit)
        assert_malformed(lambda reader=reader, size=size: list(reader.feed(size.to_bytes(4, "big"))), f"1 to {limit} ")
        assert_malformed(lambda reader=reader: reader.feed(frame), f"1 to {limit} ")


@pytest.mark.parametrize("limit", [-1, 0, MAX_FRAME + 1, 1 << 32])
def test_a_limit_that_no_frame_could_have_is_our_own_mistake(limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        FrameReader(limit)


def test_a_reader_takes_no_memory_for_a_frame_that_is_only_announced() -> None:
    tracemalloc.start()
    try:
        readers = [FrameReader() for _ in range(100)]
        for reader in readers:
            assert list(reader.feed(MAX_FRAME.to_bytes(4, "big"))) == []
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_reader_holds_no_more_than_one_frame() -> None:
    """A peer that sends frames for ever, in pieces that never end with one, fills no memory."""
    frame = (1 << 16).to_bytes(4, "big") + bytes(1 << 16)
    endless = frame * 3
    reader, position = FrameReader(), 0
    tracemalloc.start()
    try:
        for _ in range(500):
            piece = endless[position : position + 50_000]
            position = (position + 50_000) % len(frame)
            for _ in reader.feed(piece):
                pass
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300_000
    assert peak < 600_000


def test_a_caller_that_stops_early_gets_the_other_frames_with_the_next_bytes() -> None:
    reader = FrameReader()
    for first in reader.feed(STREAM):
        assert first == FRAMES[0]
        break
    assert list(reader.feed(STREAM[:100])) == FRAMES[1:]
    assert list(reader.feed(STREAM[100:])) == FRAMES


def test_a_caller_that_takes_no_frame_loses_none() -> None:
    reader = FrameReader()
    reader.feed(STREAM[:10])
    assert list(reader.feed(STREAM[10:])) == FRAMES


def test_two_open_iterations_share_the_frames_between_them() -> None:
    reader = FrameReader()
    first = reader.feed(STREAM)
    got = [next(first)]
    got += reader.feed(b"")
    got += first
    assert got == FRAMES


def test_frames_are_bytes_of_their_own() -> None:
    data = bytearray(STREAM)
    reader = FrameReader()
    frames = list(reader.feed(bytes(data)))
    assert all(type(frame) is bytes for frame in frames)
    data[:] = bytes(len(data))
    list(reader.feed(STREAM))
    assert frames == FRAMES
