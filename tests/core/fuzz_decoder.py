"""Feeds the decoder what an attacker would: valid messages, damaged in many ways, and garbage.

    python tests/core/fuzz_decoder.py --messages 1000000 --seed 7

It checks that nothing but ``Malformed`` is ever raised, that whatever decodes encodes to the same bytes again, that a
stream is cut into the frames that were put in, that no input takes a second of processor time, and that memory does not
grow. A failure prints the input and the command that replays it. The suite runs a share (``test_fuzz_decoder.py``).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from examples import BODIES, LARGEST, MESSAGES, sign

from phalanx.core import codec, envelope
from phalanx.core.errors import Malformed
from phalanx.core.messages import MAX_CHUNK, MAX_FRAME, Signed, StateChunk

MAX_SECONDS = 1.0
MAX_GROWTH_MB = 30
WARM_UP = 2000
HANG_SECONDS = 120
# Headers of MessagePack and what they may claim.
LONG_HEADERS = (b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf")
HEADERS = (
    b"\xc0",
    b"\xc1",
    b"\xc2",
    b"\xc4",
    b"\xc5",
    b"\xca",
    b"\xcb",
    b"\xcc",
    b"\xcf",
    b"\xd3",
    b"\xd9",
    b"\xda",
    b"\xdc",
)
CLAIMS = (
    0,
    1,
    16,
    255,
    256,
    257,
    512,
    513,
    2048,
    65535,
    65536,
    1 << 20,
    1 << 24,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
)
NUMBERS = (0, 1, -1, 127, 128, 255, 256, 512, 1 << 16, 1 << 32, 1 << 48, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 5e-324, 1.7976931348623157e308)

SMALL = [codec.encode(value) for value in (*BODIES.values(), *MESSAGES.values())]
TREES = [msgspec.msgpack.decode(data) for data in SMALL]


@cache
def large() -> list[bytes]:
    """The longest bodies, each bare and signed, and a chunk as long as they come."""
    bodies = [codec.encode(body) for body in LARGEST.values()]
    signed = [codec.encode(sign(body)) for body in LARGEST.values()]
    return [*bodies, *signed, codec.encode(StateChunk(0, MAX_CHUNK, 0, bytes(MAX_CHUNK)))]


# ---- Damage


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def replace_bytes(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    data[start : start + rng.randrange(5)] = rng.randbytes(rng.randrange(5))


def set_header(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(HEADERS)[0]


def inflate_header(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    claim = rng.choice(LONG_HEADERS) + rng.choice(CLAIMS).to_bytes(4, "big")
    data[start : start + rng.choice((0, 1, 2, 5))] = claim


def edit_length(data: bytearray, rng: random.Random) -> None:
    """Move a byte that looks like a length of a string, list or byte string by a little."""
    places = [
        i for i, byte in enumerate(data[:400]) if 0x80 <= byte < 0xC0 or 0xC4 <= byte <= 0xC6 or 0xD9 <= byte < 0xE0
    ]
    if places:
        place = rng.choice(places)
        place = min(place + (data[place] >= 0xC0), len(data) - 1)
        data[place] = (data[place] + rng.choice((-2, -1, 1, 2, 16))) % 256


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 9))


def duplicate(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    piece = data[start : start + rng.randrange(1, 80)]
    data[start:start] = piece * rng.choice((1, 2, 40))


def splice(data: bytearray, rng: random.Random) -> None:
    other = rng.choice(SMALL)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other)) :]


def nest(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.choice((b"\x91", b"\x81", b"\x92", b"\xdc\x00\x01")) * rng.choice((1, 2, 50, 3000))


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits,
    replace_bytes,
    set_header,
    inflate_header,
    edit_length,
    truncate,
    extend,
    duplicate,
    splice,
    nest,
)


def any_value(rng: random.Random) -> Any:
    """A value that fits somewhere, or nowhere."""
    kind = rng.randrange(8)
    if kind == 0:
        return rng.choice((None, True, False))
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(FLOATS)
    if kind == 3:
        return rng.randbytes(rng.choice((0, 1, 31, 32, 33, 64, 300)))
    if kind == 4:
        return rng.choice(("", "x", "agreed", "guilty", "V1", "signed", "seal", "x" * 300, "\x00"))
    if kind == 5:
        return [any_value(rng) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {"x": 1}
    return rng.choice(TREES)


def damage_tree(tree: Any, rng: random.Random) -> Any:
    """A copy of an unpacked message with something wrong at one place of it."""
    if not isinstance(tree, list) or not tree or rng.randrange(6) == 0:
        return any_value(rng)
    copy, place = list(tree), rng.randrange(len(tree))
    action = rng.randrange(8)
    if action == 0:
        del copy[place]
    elif action == 1:
        copy.insert(place, copy[place])
    elif action == 2:
        copy.append(any_value(rng))
    elif action == 3:
        copy[place], copy[-1] = copy[-1], copy[place]
    else:
        copy[place] = damage_tree(copy[place], rng)
    return copy


def make_input(rng: random.Random) -> bytes:
    """One input: mostly a message with one or more kinds of damage."""
    kind = rng.randrange(1000)
    if kind < 50:
        return rng.randbytes(rng.randrange(200))
    if kind < 300:
        return msgspec.msgpack.encode(damage_tree(rng.choice(TREES), rng))
    data = bytearray(rng.choice(large()) if kind >= 997 else rng.choice(SMALL))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        rng.choice(DAMAGES)(data, rng)
    return bytes(data)


# ---- Checks


class Failure(Exception):  # noqa: N818
    """The decoder did what it must not."""


def check_decoder(decode: Callable[[bytes], Any], data: bytes) -> Any:
    """The value, or None if there is none. Anything but a canonical value or ``Malformed`` is a failure."""
    try:
        value = decode(data)
    except Malformed as error:
        if type(error) is not Malformed:
            raise Failure(f"a subclass of Malformed: {error!r}") from None
        return None
    except Exception as error:
        raise Failure(f"{type(error).__name__} instead of Malformed: {str(error)[:200]}") from error
    if codec.encode(value) != data:
        raise Failure("decoded, but encodes to other bytes")
    return value


def check_body(message: Signed) -> None:
    try:
        envelope.open_body(message)
    except Malformed:
        pass
    except Exception as error:
        raise Failure(f"{type(error).__name__} on opening the body: {str(error)[:200]}") from error


def check_frames(make_reader: Callable[[], Any], data: bytes, rng: random.Random) -> None:
    """The input as a stream, and framed behind a good message, in pieces: frames come out as they went in."""
    good = rng.choice(SMALL)
    framed = len(good).to_bytes(4, "big") + good + len(data).to_bytes(4, "big") + data
    for stream in (data, framed):
        expected = list(cut_frames(stream))
        reader, got, position = make_reader(), [], 0
        try:
            while position < len(stream):
                size = rng.choice((1, 3, 4, 5, 100, 1 << 20)) if len(stream) < 3000 else 1 << 20
                got += reader.feed(stream[position : position + size])
                position += size
            ending = None
        except Malformed:
            ending = Malformed
            if reads_on(reader):
                raise Failure("a stream went on behind a length out of bounds") from None
        except Exception as error:
            raise Failure(f"{type(error).__name__} in a stream: {str(error)[:200]}") from error
        if [*got, ending] != expected:
            raise Failure(f"a stream of {len(stream)} bytes gave other frames than it holds")


def reads_on(reader: Any) -> bool:
    try:
        list(reader.feed(b""))
    except Malformed:
        return False
    return True


def cut_frames(stream: bytes) -> Iterator[bytes | type[Malformed] | None]:
    """What a reader must give: the whole frames, then Malformed if a length is out of bounds, else None."""
    while len(stream) >= 4:
        size = int.from_bytes(stream[:4], "big")
        if not 0 < size <= MAX_FRAME:
            yield Malformed
            return
        if len(stream) < 4 + size:
            break
        yield stream[4 : 4 + size]
        stream = stream[4 + size :]
    yield None


def resident_megabytes() -> float:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except FileNotFoundError:  # not Linux: the most it ever was
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)


@dataclass
class Decoders:
    """What is fuzzed; tests plant faults here."""

    message: Callable[[bytes], Any] = codec.decode_message
    body: Callable[[bytes], Any] = codec.decode_body
    reader: Callable[[], Any] = codec.FrameReader


def fuzz_one(seed: int, index: int, decoders: Decoders) -> Counter[str]:
    rng = random.Random(f"{seed} {index}")
    data = make_input(rng)
    counts: Counter[str] = Counter(inputs=1, bytes=len(data))
    start = time.process_time()
    try:
        message = check_decoder(decoders.message, data)
        body = check_decoder(decoders.body, data)
        if isinstance(message, Signed):
            check_body(message)
        if (seconds := time.process_time() - start) > MAX_SECONDS:
            raise Failure(f"took {seconds:.1f} s")
        check_frames(decoders.reader, data, rng)
    except Failure:
        print(f"input {index}, {len(data)} bytes: {data.hex()}")
        print(f"replay: python tests/core/fuzz_decoder.py --seed {seed} --first {index} --messages 1")
        raise
    counts["messages"] = message is not None
    counts["bodies"] = body is not None
    return counts


def fuzz(seed: int, first: int, messages: int, decoders: Decoders | None = None, watch: bool = False) -> Counter[str]:
    """Run inputs ``first`` to ``first + messages - 1``; :class:`Failure` if one does harm.

    ``watch`` ends the process, and shows where it was, if an input hangs.
    """
    decoders = decoders or Decoders()
    counts: Counter[str] = Counter()
    large()
    warm = None
    for index in range(first, first + messages):
        counts.update(fuzz_one(seed, index, decoders))
        if index - first == WARM_UP:
            warm = resident_megabytes()
        if watch and index % 1000 == 0:
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    growth = resident_megabytes() - warm if warm is not None else 0.0
    if growth > MAX_GROWTH_MB:
        print(f"replay: python tests/core/fuzz_decoder.py --seed {seed} --first {first} --messages {messages}")
        raise Failure(f"memory grew by {growth:.1f} MB")
    print(f"memory grew by {growth:.1f} MB")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed the decoder damaged messages.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first input")
    options = parser.parse_args()
    print(f"seed {options.seed}, inputs {options.first} to {options.first + options.messages - 1}")
    start = time.monotonic()
    try:
        counts = fuzz(options.seed, options.first, options.messages, watch=True)
    except Failure as failure:
        print(f"FAILED: {failure}")
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(
        f"{counts['inputs']} inputs, {counts['bytes'] / 1e6:.0f} MB, in {time.monotonic() - start:.0f} s: "
        f"{counts['messages']} were messages, {counts['bodies']} were bodies, all others Malformed"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
