"""Messages as bytes, and back. One value has one encoding, and the decoder has one error: :class:`Malformed`.

Messages are MessagePack arrays: the type's name, then its fields in order. The decoder checks every length against the
schema before it takes memory, then encodes what it read and compares: whatever MessagePack can write in several ways
(a longer integer, an integer for a float) is accepted in one of them only.

On a stream each message is a frame: its length in four bytes, most significant first, then its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

import msgspec

from phalanx.core.errors import Malformed
from phalanx.core.messages import MAX_BODY, MAX_FRAME, Body, Message

T = TypeVar("T")

_HEADER = 4
_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_body_decoder: msgspec.msgpack.Decoder[Body] = msgspec.msgpack.Decoder(Body)


def encode(value: Message | Body) -> bytes:
    """The one encoding of a message or body."""
    return _encoder.encode(value)


def decode_message(data: bytes) -> Message:
    """The message in a frame, or :class:`Malformed`. Bodies inside it stay packed."""
    return _decode(_message_decoder, data, MAX_FRAME)


@lru_cache(maxsize=64)
def decode_body(data: bytes) -> Body:
    """The body in an envelope, or :class:`Malformed`. Who signs one reads it, and soon reads it again as any other."""
    return _decode(_body_decoder, data, MAX_BODY)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes, limit: int) -> T:
    if len(data) > limit:
        raise Malformed(f"{len(data)} bytes where at most {limit} are allowed")
    try:
        value = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Malformed(_shorten(str(error))) from None
    if _encoder.encode(value) != data:
        raise Malformed("not in canonical form")
    return value


def _shorten(complaint: str) -> str:
    """Complaints repeat what was sent: no longer than a line of a log, and nothing that a terminal would obey."""
    text = complaint if len(complaint) <= 200 else f"{complaint[:120]} ... {complaint[-60:]}"
    return text if text.isprintable() else ascii(text)


def encode_frame(message: Message) -> bytes:
    """A message ready for a stream."""
    data = encode(message)
    if len(data) > MAX_FRAME:
        raise ValueError(f"message: {len(data)} bytes, more than a frame's {MAX_FRAME}")
    return len(data).to_bytes(_HEADER, "big") + data


class FrameReader:
    """Cuts a stream into frames. It holds no more than one frame beyond what it was last given.

    ``limit`` is the longest frame it takes: less than ``MAX_FRAME`` for those from whom nothing long is expected.
    """

    def __init__(self, limit: int = MAX_FRAME) -> None:
        if not 0 < limit <= MAX_FRAME:
            raise ValueError(f"limit: {limit}, where 1 to {MAX_FRAME} are allowed")
        self._limit = limit
        self._buffer = bytearray()
        self._complaint: str | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take the next bytes of the stream; yield the frames that are whole. :class:`Malformed` ends the stream.

        The bytes are taken at once. Frames that the caller does not take come with those of the next call. After a
        length outside the limits nobody knows where the next frame starts: the reader drops what it holds, and every
        later call raises :class:`Malformed` again.
        """
        if self._complaint is not None:
            raise Malformed(self._complaint)
        self._buffer += data
        return self._take_frames()

    def _take_frames(self) -> Iterator[bytes]:
        while len(self._buffer) >= _HEADER:
            size = int.from_bytes(self._buffer[:_HEADER], "big")
            if not 0 < size <= self._limit:
                self._complaint = f"a frame of {size} bytes where 1 to {self._limit} are allowed"
                self._buffer = bytearray()
                break
            end = _HEADER + size
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_HEADER:end])
            del self._buffer[:end]
            yield frame
        if self._complaint is not None:  # found just now, or through another iterator while this one was open
            raise Malformed(self._complaint)
