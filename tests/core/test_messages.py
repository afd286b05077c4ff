"""Every message type: what it refuses, and that nothing in it can grow without a limit.

Most tests walk the schema itself, so that a field added tomorrow is attacked like those of today: every place in every
example is replaced by something wrong, and the decoder must answer :class:`Malformed`, nothing else.
"""

from __future__ import annotations

import copy
import math
import re
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from examples import (
    ALICE,
    ATTEMPT,
    BOB,
    BODIES,
    BODY_TYPES,
    LARGEST,
    MESSAGE_TYPES,
    MESSAGES,
    STEP,
    digest_of,
    sign,
)
from examples import SIGNED as SIGNED_EXAMPLES
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import Raw, inspect

from phalanx.core import messages as m
from phalanx.core.codec import decode_body, decode_message, encode, encode_frame
from phalanx.core.crypto import Domain
from phalanx.core.errors import Malformed
from phalanx.core.messages import Phase, Rule, Verdict

pack = msgspec.msgpack.encode
change = msgspec.structs.replace
ALL_TYPES = (*BODY_TYPES, *MESSAGE_TYPES)
EXAMPLES: dict[str, Any] = {**BODIES, **MESSAGES}
Where = tuple[int, ...]


def decoder_of(name: str) -> Callable[[bytes], Any]:
    return decode_body if name in BODIES else decode_message


def assert_malformed(decode: Callable[[bytes], Any], data: bytes, match: str | None = None) -> None:
    with pytest.raises(Malformed, match=match) as caught:
        decode(data)
    assert caught.type is Malformed


# ---- Walking the schema


def walk(kind: inspect.Type, raw: Any, where: Where = ()) -> Iterator[tuple[Where, inspect.Type]]:
    """Every place in an unpacked message: how to reach it, and its type. Of a list, only the first element."""
    yield where, kind
    if isinstance(kind, inspect.UnionType) and raw is not None:
        (kind,) = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
    if isinstance(kind, inspect.StructType):
        tagged = kind.tag is not None
        for index, field in enumerate(kind.fields, start=int(tagged)):
            yield from walk(field.type, raw[index], (*where, index))
    elif isinstance(kind, inspect.VarTupleType) and raw:
        yield from walk(kind.item_type, raw[0], (*where, 0))


def unpack(name: str) -> Any:
    return msgspec.msgpack.decode(encode(EXAMPLES[name]))


def replaced(raw: Any, where: Where, value: Any) -> bytes:
    if not where:
        return pack(value)
    raw = copy.deepcopy(raw)
    inner = raw
    for index in where[:-1]:
        inner = inner[index]
    inner[where[-1]] = value
    return pack(raw)


def value_at(raw: Any, where: Where) -> Any:
    for index in where:
        raw = raw[index]
    return raw


def places(name: str) -> list[tuple[Where, inspect.Type]]:
    return list(walk(inspect.type_info(type(EXAMPLES[name])), unpack(name)))


every_example = pytest.mark.parametrize("name", EXAMPLES)
# Envelopes differ in their packed bodies only: one of them is enough for attacks on every place.
every_shape = pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in list(SIGNED_EXAMPLES)[1:]])

KINDS: dict[str, Any] = {
    "nil": None,
    "bool": True,
    "int": 1,
    "float": 1.5,
    "str": "x",
    "bytes": b"x",
    "array": [],
    "map": {},
    "ext": msgspec.msgpack.Ext(5, b"x"),
    "timestamp": msgspec.msgpack.Ext(-1, bytes(4)),
}
KINDS_OF_TYPE: dict[type, str] = {
    inspect.NoneType: "nil",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.VarTupleType: "array",
    inspect.StructType: "array",
}


def kinds_of(kind: inspect.Type) -> set[str]:
    if isinstance(kind, inspect.UnionType):
        return {each for part in kind.types for each in kinds_of(part)}
    if isinstance(kind, inspect.EnumType):
        return {"int" if issubclass(kind.cls, int) else "str"}
    return {KINDS_OF_TYPE[type(kind)]}


def parts_of(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


# ---- What the schema promises


def all_types(kind: inspect.Type, name: str) -> Iterator[tuple[str, inspect.Type]]:
    yield name, kind
    if isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from all_types(each, name)
    elif isinstance(kind, inspect.StructType):
        for field in kind.fields:
            yield from all_types(field.type, f"{kind.cls.__name__}.{field.name}")
    elif isinstance(kind, inspect.VarTupleType):
        yield from all_types(kind.item_type, f"{name}[]")


SCHEMA = [found for each in ALL_TYPES for found in all_types(inspect.type_info(each), each.__name__)]
STRUCTS = {kind.cls.__name__: kind.cls for _, kind in SCHEMA if isinstance(kind, inspect.StructType)}


def unlimited(kind: inspect.Type) -> str | None:
    """What makes a field of this type dangerous, if anything does."""
    if isinstance(kind, inspect.BytesType | inspect.StrType | inspect.VarTupleType):
        return None if kind.max_length is not None else "no max_length"
    if isinstance(kind, inspect.IntType):
        lower = kind.ge is not None or kind.gt is not None
        return None if lower and (kind.le is not None or kind.lt is not None) else "no bounds"
    harmless = (inspect.StructType, inspect.UnionType, inspect.EnumType, inspect.BoolType, inspect.NoneType)
    if isinstance(kind, (*harmless, inspect.FloatType)):
        return None
    return f"a {type(kind).__name__}, for which these tests know no limit"


def test_every_length_and_every_whole_number_has_a_limit() -> None:
    assert {name: complaint for name, kind in SCHEMA if (complaint := unlimited(kind))} == {}


@pytest.mark.parametrize("annotation", [bytes, str, int, tuple[int, ...], list[int], dict[str, int], Any, msgspec.Raw])
def test_a_field_without_a_limit_would_be_noticed(annotation: Any) -> None:
    planted = msgspec.defstruct("Planted", [("field", annotation)])
    assert any(unlimited(kind) for _, kind in all_types(inspect.type_info(planted), "Planted"))


@pytest.mark.parametrize("name", STRUCTS)
def test_every_type_is_a_frozen_array_without_room_for_more(name: str) -> None:
    config = STRUCTS[name].__struct_config__
    assert config.frozen
    assert config.array_like
    assert config.forbid_unknown_fields
    assert STRUCTS[name].__struct_defaults__ == (), "a field with a default can be left out"
    assert config.tag == (name.lower() if STRUCTS[name] in ALL_TYPES else None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_cannot_be_changed_and_can_be_hashed(name: str) -> None:
    example = EXAMPLES[name]
    for field in example.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(example, field, None)
    assert hash(example) == hash(decoder_of(name)(encode(example)))


def test_no_two_types_share_a_tag() -> None:
    tags = [each.__struct_config__.tag for each in ALL_TYPES]
    assert len(set(tags)) == len(tags) == len(BODY_TYPES) + len(MESSAGE_TYPES)


def test_every_type_has_an_example() -> None:
    assert {type(example) for example in BODIES.values()} == set(BODY_TYPES)
    assert {type(example) for example in MESSAGES.values()} == set(MESSAGE_TYPES)
    assert all(name.split(".")[0] == type(example).__name__ for name, example in EXAMPLES.items())


def test_every_phase_has_a_body_and_every_body_a_domain() -> None:
    assert set(m.BODY_OF_PHASE) == set(Phase)
    assert set(m.DOMAIN_OF_BODY) == set(BODY_TYPES)
    assert set(m.DOMAIN_OF_BODY.values()) == set(Domain)


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    if isinstance(value, tuple):
        for item in value:
            yield from structs_in(item)
    elif isinstance(value, msgspec.Struct):
        yield value
        yield from structs_in(msgspec.structs.astuple(value))


def test_examples_fill_every_field() -> None:
    """A list that is empty in all examples, or an option that is never taken, would escape the attacks below."""
    filled, absent = set(), set()
    for example in structs_in(tuple(EXAMPLES.values())):
        for field in example.__struct_fields__:
            value = getattr(example, field)
            if value != ():
                (absent if value is None else filled).add((type(example), field))
    for kind in STRUCTS.values():
        for field in inspect.type_info(kind).fields:
            assert (kind, field.name) in filled
            assert isinstance(field.type, inspect.UnionType) == ((kind, field.name) in absent)


# ---- What comes back


@every_example
def test_every_example_comes_back(name: str) -> None:
    assert decoder_of(name)(encode(EXAMPLES[name])) == EXAMPLES[name]


@pytest.mark.parametrize("body", LARGEST.values(), ids=lambda body: type(body).__name__)
def test_the_largest_body_fits_and_comes_back(body: m.Body) -> None:
    data = encode(body)
    assert len(data) <= m.MAX_BODY
    assert decode_body(data) == body
    signed = sign(body)
    assert decode_message(encode(signed)) == signed


def test_the_largest_bodies_are_the_largest() -> None:
    assert set(LARGEST) == set(BODY_TYPES)
    for body in LARGEST.values():
        raw = msgspec.msgpack.decode(encode(body))
        for index, field in enumerate(inspect.type_info(type(body)).fields, start=1):
            limits = {getattr(part, "max_length", None) for part in parts_of(field.type)} - {None}
            free = (type(body), field.name) not in {(m.Report, "lacking"), (m.Aggregate, "result")}
            assert not limits or not free or len(raw[index]) in limits, f"{type(body).__name__}.{field.name}"


# ---- Attacks on every place of every message


@every_shape
def test_a_value_of_another_kind_is_refused(name: str) -> None:
    for where, kind in places(name):
        for other in KINDS.keys() - kinds_of(kind):
            assert_malformed(decoder_of(name), replaced(unpack(name), where, KINDS[other]))


def over_limit(kind: inspect.Type, value: Any) -> Iterator[tuple[Any, str]]:
    """Values just over the limit of their type, or far over it, and what the decoder says of them."""
    for part in parts_of(kind):
        most = getattr(part, "max_length", None)
        if isinstance(part, inspect.BytesType):
            yield bytes(most + 1), f"<= {most}"
        elif isinstance(part, inspect.StrType):
            yield "x" * (most + 1), f"<= {most}"
        elif isinstance(part, inspect.VarTupleType):
            yield (value or [None])[:1] * (most + 1), f"<= {most}"
        elif isinstance(part, inspect.IntType):
            highest = part.le if part.le is not None else part.lt - 1
            yield from ((over, f"<= {highest}") for over in (highest + 1, 1 << 63, (1 << 64) - 1))
        elif isinstance(part, inspect.EnumType):
            names = ["", "x", "AGREED", "guilty ", "V1\x00", "x" * 300]
            yield from ((wrong, "enum") for wrong in ([0, 11, 255, -1] if issubclass(part.cls, int) else names))


def under_limit(kind: inspect.Type) -> Iterator[tuple[Any, str]]:
    for part in parts_of(kind):
        least = getattr(part, "min_length", None)
        if isinstance(part, inspect.BytesType) and least:
            yield from ((bytes(length), f">= {least}") for length in (0, 1, least - 1))
        elif isinstance(part, inspect.VarTupleType) and least:
            yield [], f">= {least}"
        elif isinstance(part, inspect.IntType):
            lowest = part.ge if part.ge is not None else part.gt + 1
            yield from ((under, f">= {lowest}") for under in (lowest - 1, -(1 << 31), -(1 << 63)))


@every_shape
def test_a_value_over_its_limit_is_refused(name: str) -> None:
    raw = unpack(name)
    for where, kind in places(name):
        for wrong, complaint in over_limit(kind, value_at(raw, where)):
            assert_malformed(decoder_of(name), replaced(raw, where, wrong), complaint)


@every_shape
def test_a_value_under_its_limit_is_refused(name: str) -> None:
    for where, kind in places(name):
        for wrong, complaint in under_limit(kind):
            assert_malformed(decoder_of(name), replaced(unpack(name), where, wrong), complaint)


@every_shape
def test_a_header_that_claims_four_billion_takes_no_memory(name: str) -> None:
    headers = {"bytes": b"\xc6", "str": b"\xdb", "array": b"\xdd"}
    forged = [
        replaced(unpack(name), where, Raw(headers[each] + claim.to_bytes(4, "big")))
        for where, kind in places(name)
        for each in headers.keys() & kinds_of(kind)
        for claim in (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000)
    ]
    tracemalloc.start()
    try:
        for data in forged:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            assert_malformed(decoder_of(name), data)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 100_000
    finally:
        tracemalloc.stop()


def other_forms(value: Any) -> Iterator[bytes]:
    """The ways to write a value in MessagePack that are longer than need be, or of another type."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        for size, codes in ((1, (0xCC, 0xD0)), (2, (0xCD, 0xD1)), (4, (0xCE, 0xD2)), (8, (0xCF, 0xD3))):
            if value < 1 << 8 * size - 1:
                yield from (bytes([code]) + value.to_bytes(size, "big") for code in codes)
    elif isinstance(value, float):
        yield b"\xca" + struct.pack(">f", value)
        if value == int(value):
            yield pack(int(value))
    elif isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        codes = (0xD9, 0xDA, 0xDB) if isinstance(value, str) else (0xC4, 0xC5, 0xC6)
        for size, code in zip((1, 2, 4), codes, strict=True):
            if len(data) < 1 << 8 * size:
                yield bytes([code]) + len(data).to_bytes(size, "big") + data
    else:
        items = b"".join(map(pack, value))
        yield b"\xdc" + len(value).to_bytes(2, "big") + items
        yield b"\xdd" + len(value).to_bytes(4, "big") + items


@every_shape
def test_no_value_can_be_written_in_two_ways(name: str) -> None:
    raw = unpack(name)
    forms = {replaced(raw, where, Raw(form)) for where, _ in places(name) for form in other_forms(value_at(raw, where))}
    for data in forms - {encode(EXAMPLES[name])}:
        assert_malformed(decoder_of(name), data, "canonical")


@every_shape
def test_a_missing_or_an_extra_field_is_refused(name: str) -> None:
    raw = unpack(name)
    for where, kind in places(name):
        value = value_at(raw, where)
        if any(isinstance(part, inspect.StructType) for part in parts_of(kind)) and value is not None:
            for longer in ([*value, None], [*value, value[-1]], [*value, *value]):
                assert_malformed(decoder_of(name), replaced(raw, where, longer))
            for count in range(len(value)):
                assert_malformed(decoder_of(name), replaced(raw, where, value[:count]))


@every_shape
def test_nesting_of_any_depth_is_refused(name: str) -> None:
    for where, _ in places(name):
        for bomb in (b"\x91", b"\x81", b"\x92\x01", b"\xdd\x00\x00\x00\x01", b"\x81\x01"):
            for depth in (2, 5_000):
                assert_malformed(decoder_of(name), replaced(unpack(name), where, Raw(bomb * depth)))


# ---- Attacks on whole messages


@every_example
def test_every_truncation_is_refused(name: str) -> None:
    data = encode(EXAMPLES[name])
    for length in range(len(data)):
        assert_malformed(decoder_of(name), data[:length])


@every_example
def test_trailing_bytes_are_refused(name: str) -> None:
    data = encode(EXAMPLES[name])
    for tail in (b"\x00", b"\xc0", b"\xc1", b"\x90", data, bytes(1000)):
        assert_malformed(decoder_of(name), data + tail)


@every_example
def test_leading_bytes_are_refused(name: str) -> None:
    data = encode(EXAMPLES[name])
    for head in (b"\x00", b"\xc0", b"\xc1", b"\x90", b"\x91", len(data).to_bytes(4, "big")):
        assert_malformed(decoder_of(name), head + data)


@every_example
def test_a_map_of_the_fields_is_refused(name: str) -> None:
    example = EXAMPLES[name]
    fields = dict(zip(example.__struct_fields__, unpack(name)[1:], strict=True))
    assert_malformed(decoder_of(name), pack({"type": unpack(name)[0], **fields}))
    assert_malformed(decoder_of(name), pack(dict(enumerate(unpack(name)))))


@every_example
def test_an_unknown_tag_is_refused(name: str) -> None:
    tag, *fields = unpack(name)
    wrong = [tag.upper(), tag.title(), tag + " ", tag[:-1], tag + "\x00", "", "unknown", "x" * 1000]
    for other in [*wrong, tag.encode(), 0, None, [tag], {tag: tag}, Raw(b"\xa1\xff"), Raw(b"\xa3\xed\xa0\x80")]:
        assert_malformed(decoder_of(name), pack([other, *fields]))


@every_example
def test_a_body_is_no_message_and_a_message_no_body(name: str) -> None:
    other = decode_message if name in BODIES else decode_body
    assert_malformed(other, encode(EXAMPLES[name]))


@pytest.mark.parametrize("text", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80", b"ok\xfe"])
def test_invalid_utf_8_is_refused(text: bytes) -> None:
    raw = Raw(bytes([0xA0 | len(text)]) + text)
    assert_malformed(decode_body, pack(["join", digest_of(1), raw]))
    assert_malformed(decode_body, pack(["vote", [[digest_of(1), raw]]]))
    assert_malformed(decode_message, pack(["signed", raw, *unpack("Signed.Seal")[2:]]))
    assert_malformed(decode_message, pack(["accusation", raw, *unpack("Accusation.report")[2:]]))


# ---- What types cannot express

HERE, PART = [STEP, 0], [STEP, 0, digest_of(1), 0, []]
INFINITY, NAN = math.inf, math.nan
ONE, TWO, THREE = digest_of(1), digest_of(2), digest_of(3)

REFUSED_BODIES: dict[str, list[Any]] = {
    "aggregate: neither a result nor missing parts": ["aggregate", None, []],
    "aggregate: both a result and missing parts": ["aggregate", ONE, [1]],
    "aggregate: missing not increasing": ["aggregate", None, [2, 1]],
    "aggregate: missing repeated": ["aggregate", None, [1, 1]],
    "report: sums NaN": ["report", [NAN], [1.0], [], []],
    "report: sums infinite": ["report", [INFINITY], [1.0], [], []],
    "report: sums negative infinite": ["report", [-INFINITY], [1.0], [], []],
    "report: the last of many sums NaN": ["report", [0.0] * 99 + [NAN], [1.0], [], []],
    "report: norms NaN": ["report", [1.0], [NAN], [], []],
    "report: norms infinite": ["report", [1.0], [INFINITY], [], []],
    "report: norms negative": ["report", [1.0], [-1.0], [], []],
    "report: norms barely negative": ["report", [1.0], [-5e-324], [], []],
    "report: sums fewer than norms": ["report", [1.0], [1.0, 1.0], [], []],
    "report: sums not a multiple of norms": ["report", [1.0] * 3, [1.0, 1.0], [], []],
    "report: lacking not increasing": ["report", [0.0] * 3, [0.0] * 3, [2, 1], []],
    "report: lacking repeated": ["report", [0.0] * 3, [0.0] * 3, [1, 1], []],
    "report: lacking no such part": ["report", [0.0] * 3, [0.0] * 3, [3], []],
    "report: lacking where there are no parts": ["report", [], [], [0], []],
    "report: more sums for a part than there are projections": ["report", [0.0] * 9, [0.0], [], []],
    "report: sums without norms": ["report", [1.0], [], [], []],
    "report: a lacking part with a sum": ["report", [1.0], [0.0], [0], []],
    "report: a lacking part with a sum of its last projection": ["report", [0.0] * 3 + [1.0], [0.0] * 2, [1], []],
    "report: a lacking part with a norm": ["report", [0.0], [1.0], [0], []],
    "report: norms minus zero, which equals zero and is encoded otherwise": ["report", [0.0], [-0.0], [], []],
    "report: two findings on one target": ["report", [], [], [], [[ONE, "guilty"], [ONE, "innocent"]]],
    "report: findings not increasing": ["report", [], [], [], [[TWO, "guilty"], [ONE, "guilty"]]],
    "confirm: accusations repeated": ["confirm", ONE, [TWO, TWO], [], False],
    "confirm: accusations repeated with another between": ["confirm", ONE, [TWO, ONE, TWO], [], False],
    "confirm: joins not increasing": ["confirm", ONE, [], [TWO, ONE], False],
    "confirm: joins repeated": ["confirm", ONE, [], [ONE, ONE], False],
    "confirm: leaving 0": ["confirm", ONE, [], [], 0],
    "confirm: leaving 1": ["confirm", ONE, [], [], 1],
    "vote: ballots not increasing": ["vote", [[TWO, "guilty"], [ONE, "guilty"]]],
    "vote: ballots repeated": ["vote", [[ONE, "guilty"], [ONE, "guilty"]]],
    "vote: two ballots on one case": ["vote", [[ONE, "guilty"], [ONE, "innocent"]]],
    "abort: nobody": ["abort", []],
    "abort: not increasing": ["abort", [TWO, ONE]],
    "abort: repeated": ["abort", [ONE, ONE]],
    "timeout: nobody": ["timeout", []],
    "timeout: not increasing": ["timeout", [ONE, THREE, TWO]],
    "timeout: repeated": ["timeout", [ONE, TWO, TWO]],
    "outcome: values not increasing": ["outcome", [[1, ONE, [TWO, ONE]]], []],
    "outcome: values repeated": ["outcome", [[1, ONE, [ONE, ONE]]], []],
    "outcome: three values": ["outcome", [[1, ONE, [ONE, TWO, THREE]]], []],
    "outcome: no such phase": ["outcome", [[0, ONE, []]], []],
    "outcome: a phase too many": ["outcome", [[11, ONE, []]], []],
    "outcome: two outcomes of one slot": ["outcome", [[1, ONE, []], [1, ONE, [TWO]]], []],
    "outcome: owners not increasing": ["outcome", [[1, TWO, []], [1, ONE, []]], []],
    "outcome: phases not increasing": ["outcome", [[2, ONE, []], [1, TWO, []]], []],
    "outcome: out not increasing": ["outcome", [], [TWO, ONE]],
    "outcome: out repeated": ["outcome", [], [TWO, TWO]],
    "opening: part 256": ["opening", 256, ONE, []],
    "opening: path of 9": ["opening", 0, ONE, [ONE] * 9],
    "join: a platform that moves the cursor": ["join", ONE, "\x1b[2J"],
    "join: a platform of two lines": ["join", ONE, "cpu\n2026-01-01 banned: somebody"],
    "join: a platform with a letter outside ASCII": ["join", ONE, "x86\u202e46"],
    "join: a platform that deletes": ["join", ONE, "cpu\x7f"],
}
REFUSED_MESSAGES: dict[str, list[Any]] = {
    "partchunk: beyond its size": ["partchunk", *PART, 10, 1, bytes(10)],
    "partchunk: starts behind its end": ["partchunk", *PART, 10, 11, b""],
    "partchunk: bytes of an empty part": ["partchunk", *PART, 0, 0, b"x"],
    "aggregatechunk: beyond its size": ["aggregatechunk", *HERE, 0, 10, 1, bytes(10)],
    "aggregatechunk: starts behind its end": ["aggregatechunk", *HERE, 0, 10, (1 << 48) - 1, b""],
    "statechunk: beyond its size": ["statechunk", STEP, 10, 1, bytes(10)],
    "statechunk: starts behind its end": ["statechunk", STEP, 0, 1, b""],
    "pullmessages: none": ["pullmessages", []],
    "pullmessages: a slot repeated": ["pullmessages", [[1, 0, 1, ONE]] * 2],
    "pullmessages: slots not increasing": ["pullmessages", [[1, 0, 2, ONE], [1, 0, 1, ONE]]],
    "accusation: a rule that is not voted on": ["accusation", "V2", *unpack("Accusation.report")[2:]],
    "accusation: a rule that has a proof": ["accusation", "E1", *unpack("Accusation.report")[2:]],
    "accusation: no such rule": ["accusation", "V9", *unpack("Accusation.report")[2:]],
    "accusation: parts not increasing": [*unpack("Accusation.report")[:5], [2, 1], *unpack("Accusation.report")[6:]],
    "accusation: parts repeated": [*unpack("Accusation.report")[:5], [1, 1], *unpack("Accusation.report")[6:]],
}


@pytest.mark.parametrize("raw", REFUSED_BODIES.values(), ids=REFUSED_BODIES)
def test_a_body_that_makes_no_sense_is_refused(raw: list[Any]) -> None:
    assert_malformed(decode_body, pack(raw))


@pytest.mark.parametrize("raw", REFUSED_MESSAGES.values(), ids=REFUSED_MESSAGES)
def test_a_message_that_makes_no_sense_is_refused(raw: list[Any]) -> None:
    assert_malformed(decode_message, pack(raw))


MISUSES: dict[str, Callable[[], Any]] = {
    "either a result": lambda: m.Aggregate(None, ()),
    "missing: not increasing": lambda: m.Aggregate(None, (1, 1)),
    "sums: not finite": lambda: m.Report((NAN,), (0.0,), (), ()),
    "norms: negative": lambda: m.Report((0.0,), (-1.0,), (), ()),
    "sums: not a multiple": lambda: m.Report((0.0,) * 3, (0.0,) * 2, (), ()),
    "lacking: not increasing": lambda: m.Report((0.0,) * 2, (0.0,) * 2, (1, 0), ()),
    "lacking: no such part": lambda: m.Report((0.0,), (0.0,), (1,), ()),
    "lacking: entries not zero": lambda: m.Report((1.0,), (0.0,), (0,), ()),
    "findings: not increasing": lambda: m.Report((), (), (), (m.Finding(ONE, Verdict.GUILTY),) * 2),
    "accusations: repeated": lambda: m.Confirm(ONE, (TWO, TWO), (), False),
    "joins: not increasing": lambda: m.Confirm(ONE, (), (TWO, ONE), False),
    "ballots: not increasing": lambda: m.Vote((m.Ballot(ONE, Verdict.GUILTY), m.Ballot(ONE, Verdict.INNOCENT))),
    "culprits: none": lambda: m.Abort(()),
    "missing: none": lambda: m.Timeout(()),
    "values: not increasing": lambda: m.SlotOutcome(Phase.COMMIT, ONE, (TWO, ONE)),
    "slots: not increasing": lambda: m.Outcome((m.SlotOutcome(Phase.COMMIT, ONE, ()),) * 2, ()),
    "out: not increasing": lambda: m.Outcome((), (TWO, ONE)),
    "platform: not printable": lambda: m.Join(ONE, "\t"),
    "beyond the part": lambda: m.PartChunk(0, 0, ONE, 0, (), 1, 1, b"x"),
    "beyond the aggregate": lambda: m.AggregateChunk(0, 0, 0, 1, 1, b"x"),
    "beyond the state": lambda: m.StateChunk(0, 1, 1, b"x"),
    "only V1 and V4": lambda: m.Accusation(Rule.STATE, ONE, 0, 0, (), sign(m.Seal()), None),
}


@pytest.mark.parametrize("complaint", MISUSES)
def test_our_own_nonsense_is_refused_where_it_is_made(complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        MISUSES[complaint]()


# ---- What ties the messages of a proof together

COMMIT, REVEAL, REPORT, OPENING = (
    sign(BODIES[name]) for name in ("Commit.contributor", "Reveal", "Report.contributor", "Opening")
)
OTHER_COMMIT = sign(BODIES["Commit.validator"])
# A message of the same content elsewhere: no proof may join the two.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "run": {"run": ONE},
    "step": {"step": STEP + 1},
    "attempt": {"attempt": ATTEMPT + 1},
    "sender": {"sender": BOB.key},
}
OTHER_DOMAINS = [domain for domain in Domain if domain is not Domain.AGREED]


def accuse(commit: m.Signed, report: m.Signed | None, rule: Rule = Rule.REPORT, **fields: Any) -> m.Accusation:
    named = {"accused": ALICE.key, "step": STEP, "attempt": ATTEMPT, "parts": (0,)} | fields
    return m.Accusation(rule, **named, commit=commit, report=report)


# How each proof is made of its two messages, and two that go together.
PAIRS: dict[str, tuple[Callable[[Any, Any], m.Message], m.Signed, m.Signed]] = {
    "equivocation": (m.Equivocation, COMMIT, OTHER_COMMIT),
    "wrong reveal": (m.WrongReveal, COMMIT, REVEAL),
    "wrong opening": (m.WrongOpening, COMMIT, OPENING),
    "accusation of a report": (accuse, COMMIT, REPORT),
    "accusation of a gradient": (lambda commit, report: accuse(commit, report, Rule.GRADIENT), COMMIT, REPORT),
}
every_pair = pytest.mark.parametrize("pair", PAIRS)


def assert_no_proof(make: Callable[..., m.Message], *messages: m.Signed) -> None:
    with pytest.raises(ValueError, match=": "):
        make(*messages)


@every_pair
def test_messages_that_go_together_form_a_proof(pair: str) -> None:
    make, first, second = PAIRS[pair]
    proof = make(first, second)
    assert decode_message(encode(proof)) == proof


@every_pair
@pytest.mark.parametrize("place", ELSEWHERE)
def test_messages_of_different_places_form_no_proof(pair: str, place: str) -> None:
    make, first, second = PAIRS[pair]
    assert_no_proof(make, change(first, **ELSEWHERE[place]), second)
    assert_no_proof(make, first, change(second, **ELSEWHERE[place]))


@every_pair
@pytest.mark.parametrize("domain", OTHER_DOMAINS)
def test_messages_of_other_domains_form_no_proof(pair: str, domain: Domain) -> None:
    make, first, second = PAIRS[pair]
    assert_no_proof(make, change(first, domain=domain), second)
    assert_no_proof(make, change(first, domain=domain), change(second, domain=domain))
    if domain is not second.domain:
        assert_no_proof(make, first, change(second, domain=domain))


def test_an_agreed_message_is_no_opening() -> None:
    assert_no_proof(m.WrongOpening, COMMIT, change(OPENING, domain=Domain.AGREED))


PHASES_OF_SECOND = {
    "equivocation": {Phase.COMMIT},
    "wrong reveal": {Phase.REVEAL},
    "accusation of a report": {Phase.REPORT, Phase.REPORT_AGAIN},
    "accusation of a gradient": {Phase.REPORT, Phase.REPORT_AGAIN},
}


@pytest.mark.parametrize("phase", Phase)
@every_pair
def test_messages_of_other_phases_form_no_proof(pair: str, phase: Phase) -> None:
    make, first, second = PAIRS[pair]
    if phase is not Phase.COMMIT:
        assert_no_proof(make, change(first, phase=phase), second)
    moved = change(second, phase=phase)
    if phase in PHASES_OF_SECOND.get(pair, Phase):  # an opening has no phase of its own
        make(first, moved)
    else:
        assert_no_proof(make, first, moved)


@every_pair
def test_messages_in_exchanged_places_form_no_proof(pair: str) -> None:
    make, first, second = PAIRS[pair]
    if pair == "equivocation":
        make(second, first)
    else:
        assert_no_proof(make, second, first)


def test_a_message_does_not_contradict_itself() -> None:
    assert_no_proof(m.Equivocation, COMMIT, COMMIT)
    assert_no_proof(m.Equivocation, COMMIT, change(COMMIT, signature=bytes(64)))


def test_two_histories_are_equivocation_and_two_phases_are_not() -> None:
    m.Equivocation(COMMIT, change(COMMIT, previous=ONE))
    assert_no_proof(m.Equivocation, REPORT, change(REPORT, phase=Phase.REPORT_AGAIN))


def test_equivocation_is_possible_in_every_phase() -> None:
    for phase in Phase:
        m.Equivocation(change(COMMIT, phase=phase), change(OTHER_COMMIT, phase=phase))


@pytest.mark.parametrize("field", [{"accused": BOB.key}, {"step": STEP + 1}, {"attempt": ATTEMPT + 1}], ids=str)
@pytest.mark.parametrize("rule", [Rule.REPORT, Rule.GRADIENT])
def test_a_commit_of_somebody_else_or_of_another_attempt_accuses_nobody(rule: Rule, field: dict[str, Any]) -> None:
    for report in (REPORT, None):
        with pytest.raises(ValueError, match="commit: not of the accused"):
            accuse(COMMIT, report, Rule.GRADIENT, **field)
    with pytest.raises(ValueError, match="commit: not of the accused"):
        accuse(COMMIT, REPORT, rule, **field)


def test_v1_needs_a_report_and_a_part() -> None:
    for report, parts in ((None, (0,)), (REPORT, ()), (None, ())):
        with pytest.raises(ValueError, match="V1: needs"):
            accuse(COMMIT, report, parts=parts)


def test_v4_needs_neither_a_report_nor_a_part() -> None:
    for report, parts in ((None, (0,)), (REPORT, ()), (None, ())):
        accuse(COMMIT, report, Rule.GRADIENT, parts=parts)


UNTIED: dict[str, list[Any]] = {
    "equivocation of nobody": ["equivocation", *[msgspec.msgpack.decode(encode(COMMIT))] * 2],
    "equivocation in two slots": ["equivocation", *(msgspec.msgpack.decode(encode(each)) for each in (COMMIT, REVEAL))],
    "wrong reveal of no reveal": ["wrongreveal", *[msgspec.msgpack.decode(encode(COMMIT))] * 2],
    "wrong opening of no opening": ["wrongopening", *[msgspec.msgpack.decode(encode(COMMIT))] * 2],
    "accusation of another": [*unpack("Accusation.gradient")[:2], ONE, *unpack("Accusation.gradient")[3:]],
    "accusation without its report": [*unpack("Accusation.report")[:-1], None],
}


@pytest.mark.parametrize("raw", UNTIED.values(), ids=UNTIED)
def test_the_decoder_refuses_messages_that_form_no_proof(raw: list[Any]) -> None:
    assert_malformed(decode_message, pack(raw))


# ---- Certificates fit into frames


def longest(body: m.Body) -> m.Signed:
    """A signed message with every number as long as it gets. (The signature's length never changes.)"""
    return change(sign(body), step=(1 << 48) - 1, attempt=(1 << 16) - 1)


def frame_of(message: m.Signed, count: int) -> bytes:
    return encode_frame(m.Certificate((message,) * count))


def one_projection() -> m.Report:
    return change(LARGEST[m.Report], sums=LARGEST[m.Report].sums[: m.MAX_MEMBERS])  # type: ignore[attr-defined]


def outcome_of(equivocators: int, out: int) -> m.Outcome:
    """An outcome of two phases for the largest roster: these equivocated in both, the others said one thing."""
    whole = LARGEST[m.Outcome]
    assert isinstance(whole, m.Outcome)
    slots = [
        slot if index % m.MAX_MEMBERS < equivocators else change(slot, values=slot.values[:1])
        for index, slot in enumerate(whole.slots)
    ]
    return m.Outcome(tuple(slots), whole.out[:out])


AGREED = [LARGEST[kind] for kind in dict.fromkeys(m.BODY_OF_PHASE.values())]


@pytest.mark.parametrize(
    "body", [*AGREED, one_projection()], ids=lambda body: f"{type(body).__name__}-{len(encode(body))}"
)
def test_a_certificate_of_the_largest_roster_fits_a_frame(body: m.Body) -> None:
    frame = frame_of(longest(body), m.MAX_MEMBERS)
    assert len(decode_message(frame[4:]).messages) == m.MAX_MEMBERS  # type: ignore[union-attr]


def test_a_majority_of_the_largest_outcomes_fits_a_frame() -> None:
    frame_of(longest(LARGEST[m.Outcome]), m.MAX_MEMBERS // 2 + 1)


@pytest.mark.parametrize("attackers", [0, 1, 40, 84, (m.MAX_MEMBERS - 1) // 3])
def test_a_partition_safe_quorum_of_outcomes_fits_a_frame(attackers: int) -> None:
    """Only attackers equivocate, and no more are out than the attackers and those honest who may be: with one validator
    ``c <= n - 2b - 2``."""
    honest_out = m.MAX_MEMBERS - 2 * attackers - 2
    frame_of(longest(outcome_of(attackers, attackers + honest_out)), (m.MAX_MEMBERS + attackers) // 2 + 1)


def test_all_of_the_largest_outcomes_do_not_fit_a_frame() -> None:
    """Why a certificate holds a quorum of them and no more."""
    with pytest.raises(ValueError, match="frame"):
        frame_of(longest(LARGEST[m.Outcome]), m.MAX_MEMBERS)


def test_a_relay_with_all_endorsements_and_a_proof_of_the_longest_bodies_fit_a_frame() -> None:
    endorsement = longest(LARGEST[m.Endorsement])
    for body in LARGEST.values():
        encode_frame(m.Relay(longest(body), (endorsement,) * m.MAX_MEMBERS))
    first, second = (change(COMMIT, body=bytes([byte]) * m.MAX_BODY) for byte in (0, 1))
    encode_frame(m.Equivocation(first, second))


# ---- Everything that can be said comes back


def bytes_of(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


def increasing(elements: st.SearchStrategy[Any], least: int = 0, most: int = 6) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, min_size=least, max_size=most, unique=True).map(lambda values: tuple(sorted(values)))


KEY = bytes_of(32)
INDEX = st.integers(0, m.MAX_MEMBERS - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False).map(lambda value: value + 0.0)
VERDICT = st.sampled_from(Verdict)
SIZE = st.integers(0, (1 << 48) - 1)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "step": SIZE,
    "attempt": st.integers(0, (1 << 16) - 1),
    "phase": st.sampled_from(Phase),
    "domain": st.sampled_from(Domain),
    "signature": bytes_of(64),
    "body": st.binary(max_size=300),
    "part": INDEX,
    "offset": SIZE,
    "path": st.lists(KEY, max_size=m.MAX_PATH).map(tuple),
}


def some(kind: type, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Any instance: fields are named here, or after what they are, or are 32 bytes."""
    names = kind.__struct_fields__
    return st.builds(kind, **{name: fields.get(name, COMMON.get(name, KEY)) for name in names})


@st.composite
def chunks(draw: st.DrawFn, kind: type) -> Any:
    data = draw(st.binary(max_size=100))
    offset = draw(st.integers(0, (1 << 47)))
    size = offset + len(data) + draw(st.integers(0, 1 << 40))
    return draw(some(kind, data=st.just(data), offset=st.just(offset), size=st.just(size)))


@st.composite
def reports(draw: st.DrawFn) -> m.Report:
    parts, projections = draw(st.integers(0, 5)), draw(st.integers(0, m.MAX_PROJECTIONS))
    lacking = draw(increasing(st.sampled_from(range(parts)), most=parts)) if parts else ()
    sums = [0.0 if index % parts in lacking else draw(FINITE) for index in range(parts * projections)]
    norms = [0.0 if index in lacking else abs(draw(FINITE)) for index in range(parts)]
    findings = [m.Finding(key, draw(VERDICT)) for key in draw(increasing(KEY))]
    return m.Report(tuple(sums), tuple(norms), lacking, tuple(findings))


@st.composite
def outcomes(draw: st.DrawFn) -> m.Outcome:
    slots = draw(increasing(st.tuples(COMMON["phase"], KEY)))
    values = [m.SlotOutcome(phase, key, draw(increasing(KEY, most=2))) for phase, key in slots]
    return m.Outcome(tuple(values), draw(increasing(KEY)))


@st.composite
def proofs(draw: st.DrawFn) -> m.Message:
    """A proof or an accusation: messages of one sender in one attempt of one run."""
    first = draw(some(m.Signed, domain=st.just(Domain.AGREED), phase=st.just(Phase.COMMIT)))

    def follow(phase: Phase, domain: Domain = Domain.AGREED) -> m.Signed:
        other = draw(SIGNED)
        return change(
            first, domain=domain, phase=phase, previous=other.previous, body=other.body, signature=other.signature
        )

    kind = draw(st.sampled_from((m.Equivocation, m.WrongReveal, m.WrongOpening, m.Accusation)))
    if kind is m.Equivocation:
        second = follow(Phase.COMMIT)
        assume((first.previous, first.body) != (second.previous, second.body))
        return m.Equivocation(first, second)
    if kind is m.WrongReveal:
        return m.WrongReveal(first, follow(Phase.REVEAL))
    if kind is m.WrongOpening:
        return m.WrongOpening(first, follow(draw(st.sampled_from(Phase)), Domain.OPENING))
    rule = draw(st.sampled_from((Rule.REPORT, Rule.GRADIENT)))
    parts = draw(increasing(INDEX, least=int(rule is Rule.REPORT)))
    report = follow(draw(st.sampled_from((Phase.REPORT, Phase.REPORT_AGAIN))))
    absent = rule is Rule.GRADIENT and draw(st.booleans())
    return m.Accusation(rule, first.sender, first.step, first.attempt, parts, first, None if absent else report)


BODY = st.one_of(
    some(m.Commit, parts=st.none() | KEY),
    some(m.Aggregate, missing=st.just(())),
    some(m.Aggregate, result=st.none(), missing=increasing(INDEX, least=1)),
    some(m.Reveal),
    reports(),
    some(m.Confirm, accusations=increasing(KEY), joins=increasing(KEY), leaving=st.booleans()),
    increasing(KEY).flatmap(
        lambda cases: some(
            m.Vote, ballots=st.tuples(*(some(m.Ballot, case=st.just(c), verdict=VERDICT) for c in cases))
        )
    ),
    some(m.Seal),
    some(m.Abort, culprits=increasing(KEY, least=1)),
    some(m.Timeout, missing=increasing(KEY, least=1)),
    some(m.Endorsement),
    outcomes(),
    some(m.Opening),
    some(m.Join, platform=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=256)),
)
SIGNED = some(m.Signed)
SIGNEDS = st.lists(SIGNED, max_size=3).map(tuple)
MESSAGE = st.one_of(
    SIGNED,
    chunks(m.PartChunk),
    chunks(m.AggregateChunk),
    chunks(m.StateChunk),
    some(m.Relay, message=SIGNED, endorsements=SIGNEDS),
    some(m.Manifest, text=st.binary(max_size=300)),
    some(m.Certificate, messages=SIGNEDS),
    some(m.PullMessages, slots=increasing(some(m.Slot), least=1)),
    some(m.PullPart),
    some(m.PullAggregate),
    some(m.PullState),
    some(m.PullProof),
    some(m.PullCertificate),
    some(m.PullManifest),
    some(m.MalformedBody, message=SIGNED),
    proofs(),
)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(BODY)
def test_every_body_comes_back_from_its_one_encoding(body: m.Body) -> None:
    data = encode(body)
    assert decode_body(data) == body
    assert encode(decode_body(data)) == data
    assert_malformed(decode_message, data)


@settings(deadline=None, derandomize=True, max_examples=400)
@given(MESSAGE)
def test_every_message_comes_back_from_its_one_encoding(message: m.Message) -> None:
    data = encode(message)
    assert decode_message(data) == message
    assert encode(decode_message(data)) == data
    assert_malformed(decode_body, data)
