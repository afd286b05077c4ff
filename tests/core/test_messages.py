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
    HEIGHT,
    LARGEST,
    LARGEST_SETTLEMENT,
    MESSAGE_TYPES,
    MESSAGES,
    NAMED_TYPES,
    STEP,
    VIEW,
    digest_of,
    sign,
)
from examples import SIGNED as SIGNED_EXAMPLES
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import Raw, inspect

from phalanx.core import messages as m
from phalanx.core.codec import decode_body, decode_message, encode, encode_frame
from phalanx.core.crypto import DIGEST_SIZE, Domain
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
    elif isinstance(kind, inspect.TupleType):
        for index, item in enumerate(kind.item_types):
            yield from walk(item, raw[index], (*where, index))


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
    inspect.TupleType: "array",
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
    elif isinstance(kind, inspect.TupleType):
        for item in kind.item_types:
            yield from all_types(item, f"{name}()")


SCHEMA = [found for each in ALL_TYPES for found in all_types(inspect.type_info(each), each.__name__)]
STRUCTS = {kind.cls.__name__: kind.cls for _, kind in SCHEMA if isinstance(kind, inspect.StructType)}


def unlimited(kind: inspect.Type) -> str | None:
    """What makes a field of this type dangerous, if anything does."""
    if isinstance(kind, inspect.BytesType | inspect.StrType | inspect.VarTupleType):
        return None if kind.max_length is not None else "no max_length"
    if isinstance(kind, inspect.IntType):
        lower = kind.ge is not None or kind.gt is not None
        return None if lower and (kind.le is not None or kind.lt is not None) else "no bounds"
    harmless = (inspect.EnumType, inspect.BoolType, inspect.NoneType, inspect.FloatType)
    if isinstance(kind, (*harmless, inspect.StructType, inspect.UnionType, inspect.TupleType)):
        return None
    return f"a {type(kind).__name__}, for which these tests know no limit"


def test_every_length_and_every_whole_number_has_a_limit() -> None:
    assert {name: complaint for name, kind in SCHEMA if (complaint := unlimited(kind))} == {}


@pytest.mark.parametrize(
    "annotation", [bytes, str, int, tuple[int, ...], tuple[int, int], list[int], dict[str, int], Any, msgspec.Raw]
)
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
    assert config.tag == (name.lower() if STRUCTS[name] in NAMED_TYPES else None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_messages_cannot_be_changed_and_can_be_hashed(name: str) -> None:
    example = EXAMPLES[name]
    for field in example.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(example, field, None)
    assert hash(example) == hash(decoder_of(name)(encode(example)))


def test_no_two_types_share_a_tag() -> None:
    tags = [each.__struct_config__.tag for each in NAMED_TYPES]
    assert len(set(tags)) == len(tags) == len(set(NAMED_TYPES))


@pytest.mark.parametrize("kind", [kind for kind in STRUCTS.values() if kind not in ALL_TYPES])
def test_what_travels_inside_others_is_nothing_alone(kind: type) -> None:
    inner = next(each for each in structs_in(tuple(EXAMPLES.values())) if type(each) is kind)
    for decode in (decode_message, decode_body):
        assert_malformed(decode, pack(inner))
        assert_malformed(decode, pack([kind.__name__.lower(), *msgspec.structs.astuple(inner)]))


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
            free = (type(body), field.name) not in {(m.Aggregate, "result"), (m.Timeout, "prepared")}
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
            yield from ((wrong, "enum") for wrong in ([0, 12, 255, -1] if issubclass(part.cls, int) else names))


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


STRUCT_OR_PAIR = inspect.StructType | inspect.TupleType


@every_shape
def test_a_missing_or_an_extra_field_is_refused(name: str) -> None:
    raw = unpack(name)
    for where, kind in places(name):
        value = value_at(raw, where)
        if any(isinstance(part, STRUCT_OR_PAIR) for part in parts_of(kind)) and value is not None:
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
    assert_malformed(decode_body, pack(["vote", [[digest_of(1), raw]], []]))
    assert_malformed(decode_message, pack(["signed", raw, *unpack("Signed.Seal")[2:]]))
    assert_malformed(decode_message, pack(["accusation", raw, *unpack("Accusation.report")[2:]]))


# ---- What types cannot express

HERE, PART = [STEP, 0], [STEP, 0, digest_of(1), 0, []]
V1, V4, E4 = (unpack(f"Accusation.{name}") for name in ("report", "gradient", "malformed"))
INFINITY, NAN = math.inf, math.nan
ONE, TWO, THREE = digest_of(1), digest_of(2), digest_of(3)


def outcome(round_: Any = 0, final: Any = True, settlement: Any = ONE, ends: Any = True, view: Any = ONE) -> list[Any]:
    return ["outcome", round_, final, settlement, ends, view]


def settlement(slots: Any = (), out: Any = (), stands: Any = True) -> list[Any]:
    return ["settlement", slots, out, stands]


def accusation(raw: list[Any], **fields: Any) -> list[Any]:
    """An unpacked accusation with other fields."""
    return [raw[0], *(fields.get(name, was) for name, was in zip(m.Accusation.__struct_fields__, raw[1:], strict=True))]


REFUSED_BODIES: dict[str, list[Any]] = {
    "commit: no view": ["commit", None, ONE, None],
    "aggregate: neither a result nor missing parts": ["aggregate", None, [], [], []],
    "aggregate: both a result and missing parts": ["aggregate", ONE, [1], [], []],
    "aggregate: missing not increasing": ["aggregate", None, [2, 1], [], []],
    "aggregate: missing repeated": ["aggregate", None, [1, 1], [], []],
    "aggregate: unopened in place of missing": ["aggregate", None, [], [[1, 1]], []],
    "aggregate: unopened not increasing": ["aggregate", ONE, [], [[2, 1], [1, 2]], []],
    "aggregate: unopened parts of one owner not increasing": ["aggregate", ONE, [], [[1, 2], [1, 1]], []],
    "aggregate: unopened repeated": ["aggregate", ONE, [], [[1, 2], [1, 2]], []],
    "aggregate: unopened owner 256": ["aggregate", ONE, [], [[256, 0]], []],
    "aggregate: unopened part 256": ["aggregate", ONE, [], [[0, 256]], []],
    "aggregate: unopened part below 0": ["aggregate", ONE, [], [[0, -1]], []],
    "aggregate: unopened without a part": ["aggregate", ONE, [], [[1]], []],
    "aggregate: unopened with more than a part": ["aggregate", ONE, [], [[1, 1, 1]], []],
    "aggregate: trials not increasing": ["aggregate", ONE, [], [], [[TWO, ONE], [ONE, TWO]]],
    "aggregate: trials repeated": ["aggregate", ONE, [], [], [[ONE, ONE], [ONE, TWO]]],
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
    "report: lacking not increasing, of a validator": ["report", [], [], [2, 1], []],
    "report: lacking repeated, of a validator": ["report", [], [], [1, 1], []],
    "report: lacking no part of any roster": ["report", [], [], [256], []],
    "report: more sums for a part than there are projections": ["report", [0.0] * 9, [0.0], [], []],
    "report: sums without norms": ["report", [1.0], [], [], []],
    "report: a lacking part with a sum": ["report", [1.0], [0.0], [0], []],
    "report: a lacking part with a sum of its last projection": ["report", [0.0] * 3 + [1.0], [0.0] * 2, [1], []],
    "report: a lacking part with a norm": ["report", [0.0], [1.0], [0], []],
    "report: norms minus zero, which equals zero and is encoded otherwise": ["report", [0.0], [-0.0], [], []],
    "report: two findings on one target": ["report", [], [], [], [[ONE, "guilty"], [ONE, "innocent"]]],
    "report: findings not increasing": ["report", [], [], [], [[TWO, "guilty"], [ONE, "guilty"]]],
    "confirm: accusations repeated": ["confirm", ONE, [TWO, TWO], [], [], False],
    "confirm: accusations repeated with another between": ["confirm", ONE, [TWO, ONE, TWO], [], [], False],
    "confirm: joins not increasing": ["confirm", ONE, [], [TWO, ONE], [], False],
    "confirm: joins repeated": ["confirm", ONE, [], [ONE, ONE], [], False],
    "confirm: leaving 0": ["confirm", ONE, [], [], [], 0],
    "confirm: leaving 1": ["confirm", ONE, [], [], [], 1],
    "confirm: late not increasing": ["confirm", ONE, [], [], [TWO, ONE], False],
    "vote: ballots not increasing": ["vote", [[TWO, "guilty"], [ONE, "guilty"]], []],
    "vote: ballots repeated": ["vote", [[ONE, "guilty"], [ONE, "guilty"]], []],
    "vote: two ballots on one case": ["vote", [[ONE, "guilty"], [ONE, "innocent"]], []],
    "vote: unopened not increasing": ["vote", [], [[2, 1], [1, 2]]],
    "vote: unopened repeated": ["vote", [], [[1, 2], [1, 2]]],
    "vote: unopened with more than a part": ["vote", [], [[1, 1, 1]]],
    "seal: no view": ["seal", None],
    "abort: not increasing": ["abort", [TWO, ONE], ONE],
    "abort: repeated": ["abort", [ONE, ONE], ONE],
    "abort: no view": ["abort", [ONE], None],
    "timeout: nobody": ["timeout", [], 0, None],
    "timeout: not increasing": ["timeout", [ONE, THREE, TWO], 0, None],
    "timeout: repeated": ["timeout", [ONE, TWO, TWO], 0, None],
    "timeout: missing in a later round": ["timeout", [ONE], 1, None],
    "timeout: missing in the last round": ["timeout", [ONE], (1 << 32) - 1, ONE],
    "timeout: prepared in the first round": ["timeout", [ONE], 0, TWO],
    "timeout: prepared in the first round, and nobody missing": ["timeout", [], 0, TWO],
    "timeout: a round before the first": ["timeout", [], -1, None],
    "timeout: a round too many": ["timeout", [], 1 << 32, None],
    "endorsement: a round before the first": ["endorsement", -1, ONE],
    "endorsement: a round too many": ["endorsement", 1 << 32, ONE],
    "outcome: a round before the first": outcome(round_=-1),
    "outcome: a round too many": outcome(round_=1 << 32),
    "outcome: final 1": outcome(final=1),
    "outcome: ends 0": outcome(ends=0),
    "outcome: no settlement": outcome(settlement=None),
    "outcome: a settlement of 31 bytes": outcome(settlement=ONE[1:]),
    "outcome: no view": outcome(view=None),
    "opening: part 256": ["opening", 256, ONE, []],
    "opening: path of 9": ["opening", 0, ONE, [ONE] * 9],
    "trial: no parts": ["trial", None],
    "join: a platform, as of old": ["join", ONE, "x86-64"],
    "join: no view": ["join", None, 0],
    "join: a round before the first": ["join", ONE, -1],
    "join: a round too many": ["join", ONE, 1 << 32],
    "join: a round that is no whole number": ["join", ONE, 1.0],
}
REFUSED_MESSAGES: dict[str, list[Any]] = {
    "partchunk: beyond its size": ["partchunk", *PART, 10, 1, bytes(10)],
    "partchunk: starts behind its end": ["partchunk", *PART, 10, 11, b""],
    "partchunk: bytes of an empty part": ["partchunk", *PART, 0, 0, b"x"],
    "aggregatechunk: beyond its size": ["aggregatechunk", *HERE, 0, 10, 1, bytes(10)],
    "aggregatechunk: starts behind its end": ["aggregatechunk", *HERE, 0, 10, (1 << 48) - 1, b""],
    "statechunk: beyond its size": ["statechunk", STEP, 10, 1, bytes(10)],
    "statechunk: starts behind its end": ["statechunk", STEP, 0, 1, b""],
    "settlement: a double slot with a value": settlement([[1, ONE, ONE, True]]),
    "settlement: two values": settlement([[1, ONE, [ONE, TWO], False]]),
    "settlement: a height below 0": settlement([[-1, ONE, None, False]]),
    "settlement: a height too far": settlement([[1 << 48, ONE, None, False]]),
    "settlement: two outcomes of one slot": settlement([[1, ONE, None, False], [1, ONE, TWO, False]]),
    "settlement: owners not increasing": settlement([[1, TWO, None, False], [1, ONE, None, False]]),
    "settlement: heights not increasing": settlement([[2, ONE, None, False], [1, TWO, None, False]]),
    "settlement: out not increasing": settlement(out=[TWO, ONE]),
    "settlement: out repeated": settlement(out=[TWO, TWO]),
    "settlement: stands 0": settlement(stands=0),
    "settlement: more slots than two heights have": settlement(
        [[1, bytes([x, y, *bytes(30)]), None, False] for x in range(3) for y in range(171)]
    ),
    "gossip: without what its sender holds": ["gossip", 0, 0, []],
    "gossip: three digests of one member": ["gossip", HEIGHT, 0, [], [ONE + TWO + ONE]],
    "gossip: held by more than two rosters": ["gossip", HEIGHT, 0, [], [b""] * (2 * m.MAX_MEMBERS + 1)],
    "gossip: a relay of nothing": ["gossip", HEIGHT, 0, [["relay", [], []]], []],
    "gossip: a relay without its name": ["gossip", HEIGHT, 0, [unpack("Gossip")[3][0][1:]], []],
    "gossip: a message outside a relay": ["gossip", HEIGHT, 0, [unpack("Signed.Seal")], []],
    "gossip: a height below 0": ["gossip", -1, 0, [], []],
    "gossip: a round too many": ["gossip", HEIGHT, 1 << 32, [], []],
    "alarm: a height too far": ["alarm", 1 << 48, 0, []],
    "alarm: a round before the first": ["alarm", HEIGHT, -1, []],
    "alarm: a relay for evidence": ["alarm", HEIGHT, 0, unpack("Gossip")[3]],
    "chain: a link with a name": ["chain", [["link", b"view", []]]],
    "chain: a link without messages": ["chain", [[b"view"]]],
    "pullmessages: of nobody": ["pullmessages", HEIGHT, []],
    "pullmessages: a sender repeated": ["pullmessages", HEIGHT, [ONE, ONE]],
    "pullmessages: senders not increasing": ["pullmessages", HEIGHT, [TWO, ONE]],
    "pullmessages: a height below 0": ["pullmessages", -1, [ONE]],
    "pullmessages: a height too far": ["pullmessages", 1 << 48, [ONE]],
    "pullchain: a height below 0": ["pullchain", -1],
    "pullchain: a height too far": ["pullchain", 1 << 48],
    "accusation: a rule that is not voted on": accusation(V1, rule="V2"),
    "accusation: a rule that has a proof": accusation(V1, rule="E1"),
    "accusation: no such rule": accusation(V1, rule="V9"),
    "accusation: parts not increasing": accusation(V1, parts=[1, 0]),
    "accusation: parts repeated": accusation(V1, parts=[1, 1]),
    "accusation: sums NaN": accusation(V1, sums=[0.0, NAN]),
    "accusation: sums infinite": accusation(V1, sums=[INFINITY, 0.0]),
    "accusation: norms NaN": accusation(V1, norms=[0.0, NAN]),
    "accusation: norms infinite": accusation(V1, norms=[INFINITY, 0.0]),
    "accusation: V1 with no norms": accusation(V1, norms=[]),
    "accusation: V1 with a norm too few": accusation(V1, norms=[1.0]),
    "accusation: V1 with a norm too many": accusation(V1, norms=[1.0] * 3),
    "accusation: V1 with no sums": accusation(V1, sums=[]),
    "accusation: V1 with a sum too few": accusation(V1, sums=[1.0]),
    "accusation: V1 with sums that do not divide": accusation(V1, sums=[1.0] * 3),
    "accusation: V1 with a report of fewer parts": accusation(V1, parts=[0]),
    "accusation: V1 that is really V4": accusation(V1, rule="V4"),
    "accusation: V1 that is really E4": accusation(V1, rule="E4"),
    "accusation: V1 without a report": accusation(V1, report=None),
    "accusation: V1 without parts": accusation(V1, parts=[], sums=[], norms=[]),
    "accusation: V4 that is really V1": accusation(V4, rule="V1"),
    "accusation: V4 with sums": accusation(V4, sums=[1.0]),
    "accusation: V4 with norms": accusation(V4, norms=[1.0]),
    "accusation: E4 without parts": accusation(E4, parts=[]),
    "accusation: E4 with sums": accusation(E4, sums=[1.0]),
    "accusation: E4 with norms": accusation(E4, norms=[1.0]),
}


@pytest.mark.parametrize("raw", REFUSED_BODIES.values(), ids=REFUSED_BODIES)
def test_a_body_that_makes_no_sense_is_refused(raw: list[Any]) -> None:
    assert_malformed(decode_body, pack(raw))


@pytest.mark.parametrize("raw", REFUSED_MESSAGES.values(), ids=REFUSED_MESSAGES)
def test_a_message_that_makes_no_sense_is_refused(raw: list[Any]) -> None:
    assert_malformed(decode_message, pack(raw))


# Close to what is refused above, and fine.
ALLOWED_BODIES: dict[str, list[Any]] = {
    "aggregate: missing and unopened": ["aggregate", None, [0], [[0, 0]], []],
    "aggregate: unopened that grows in the owner alone": ["aggregate", ONE, [], [[0, 255], [1, 0]], []],
    "aggregate: unopened that grows in the part alone": ["aggregate", ONE, [], [[1, 0], [1, 1]], []],
    "report: nothing": ["report", [], [], [], []],
    "report: lacking, of a validator": ["report", [], [], [0, 255], []],
    "report: all lacking": ["report", [0.0] * 2, [0.0] * 2, [0, 1], []],
    "vote: on nothing": ["vote", [], []],
    "vote: unopened alone": ["vote", [], [[1, 1]]],
    "timeout: a later round": ["timeout", [], 1, None],
    "timeout: a later round, prepared": ["timeout", [], (1 << 32) - 1, ONE],
    "outcome: a first vote of the last round": outcome((1 << 32) - 1, final=False),
}
ALLOWED_MESSAGES: dict[str, list[Any]] = {
    "gossip: nothing": ["gossip", 0, 0, [], []],
    "gossip: held by two rosters": ["gossip", 0, 0, [], [ONE + TWO] * 2 * m.MAX_MEMBERS],
    "settlement: empty": settlement(),
    "settlement: one member in a slot and out": settlement([[1, ONE, None, False]], [ONE]),
    "settlement: heights that grow while owners do not": settlement([[1, TWO, None, False], [2, ONE, None, False]]),
    "settlement: heights far apart": settlement([[0, ONE, None, False], [(1 << 48) - 1, ONE, None, False]]),
    "alarm: nothing": ["alarm", (1 << 48) - 1, (1 << 32) - 1, []],
    "chain: nothing": ["chain", []],
    "chain: an empty view": ["chain", [[b"", []]]],
    "pullmessages: of one": ["pullmessages", 0, [ONE]],
    "accusation: V1 with one projection": accusation(V1, sums=[1.0] * 2),
    "accusation: V1 with all projections": accusation(V1, sums=[1.0] * 2 * m.MAX_PROJECTIONS),
    "accusation: V4 with a report": accusation(V4, report=V1[7]),
    "accusation: V4 with parts": accusation(V4, parts=[0, 255]),
    "accusation: E4 with a report": accusation(E4, report=V1[7]),
}


@pytest.mark.parametrize("raw", ALLOWED_BODIES.values(), ids=ALLOWED_BODIES)
def test_a_body_close_to_nonsense_is_accepted(raw: list[Any]) -> None:
    assert encode(decode_body(pack(raw))) == pack(raw)


@pytest.mark.parametrize("raw", ALLOWED_MESSAGES.values(), ids=ALLOWED_MESSAGES)
def test_a_message_close_to_nonsense_is_accepted(raw: list[Any]) -> None:
    assert encode(decode_message(pack(raw))) == pack(raw)


MISUSES: dict[str, Callable[[], Any]] = {
    "either a result": lambda: m.Aggregate(None, (), (), ()),
    "missing: not increasing": lambda: m.Aggregate(None, (1, 1), (), ()),
    "unopened: not increasing": lambda: m.Aggregate(ONE, (), ((1, 1), (1, 1)), ()),
    "trials: not increasing": lambda: m.Aggregate(ONE, (), (), (m.Listed(ONE, ONE), m.Listed(ONE, TWO))),
    "sums: not finite": lambda: m.Report((NAN,), (0.0,), (), ()),
    "norms: negative": lambda: m.Report((0.0,), (-1.0,), (), ()),
    "sums: not a multiple": lambda: m.Report((0.0,) * 3, (0.0,) * 2, (), ()),
    "lacking: not increasing": lambda: m.Report((0.0,) * 2, (0.0,) * 2, (1, 0), ()),
    "lacking: no such part": lambda: m.Report((0.0,), (0.0,), (1,), ()),
    "lacking: entries not zero": lambda: m.Report((1.0,), (0.0,), (0,), ()),
    "findings: not increasing": lambda: m.Report((), (), (), (m.Finding(ONE, Verdict.GUILTY),) * 2),
    "accusations: repeated": lambda: m.Confirm(ONE, (TWO, TWO), (), (), False, False, (), m.NOTHING),
    "joins: not increasing": lambda: m.Confirm(ONE, (), (TWO, ONE), (), False, False, (), m.NOTHING),
    "ballots: not increasing": lambda: m.Vote((m.Ballot(ONE, Verdict.GUILTY), m.Ballot(ONE, Verdict.INNOCENT)), ()),
    "culprits: not increasing": lambda: m.Abort((TWO, ONE), VIEW),
    "joins of WAIT: not increasing": lambda: m.Wait((TWO, ONE)),
    "missing: none": lambda: m.Timeout((), 0, None),
    "or in a later round": lambda: m.Timeout((ONE,), 1, None),
    "prepared: in the first round": lambda: m.Timeout((ONE,), 0, TWO),
    "double: with a value": lambda: m.SlotOutcome(1, ONE, ONE, True),
    "slots: not increasing": lambda: m.Settlement((m.SlotOutcome(1, ONE, None, False),) * 2, (), True),
    "out: not increasing": lambda: m.Settlement((), (TWO, ONE), True),
    "charged: more than are accused": lambda: m.Confirm(ONE, (), (), (), False, False, (ONE,), m.NOTHING),
    "late: zeros": lambda: m.Timing(1, 1, 1, (0, 0), (), ()),
    "late: not increasing": lambda: m.Confirm(ONE, (), (), (TWO, ONE), False, False, (), m.NOTHING),
    "beyond the part": lambda: m.PartChunk(0, 0, ONE, 0, (), 1, 1, b"x"),
    "beyond the aggregate": lambda: m.AggregateChunk(0, 0, 0, 1, 1, b"x"),
    "beyond the state": lambda: m.StateChunk(0, 1, 1, b"x"),
    "senders: none": lambda: m.PullMessages(0, ()),
    "only V1, V4 and E4": lambda: m.Accusation(Rule.STATE, ONE, 0, 0, (), sign(m.Seal(VIEW)), None, (), ()),
    "sums, norms: not finite": lambda: accuse(COMMIT, REPORT, sums=(NAN,)),
    "V1: needs a report": lambda: accuse(COMMIT, None),
    "V1: not the sums and norms": lambda: accuse(COMMIT, REPORT, norms=()),
    "sums, norms: only with V1": lambda: accuse(COMMIT, None, Rule.GRADIENT, norms=(1.0,)),
    "E4: needs at least one part": lambda: accuse(COMMIT, None, Rule.MALFORMED, parts=()),
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
# Where a message may stand.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "run": {"run": ONE},
    "height": {"height": COMMIT.height + 100},
    "step": {"step": STEP + 1},
    "attempt": {"attempt": ATTEMPT + 1},
    "sender": {"sender": BOB.key},
}
OTHER_DOMAINS = [domain for domain in Domain if domain is not Domain.AGREED]


def accuse(commit: m.Signed, report: m.Signed | None, rule: Rule = Rule.REPORT, **fields: Any) -> m.Accusation:
    right = ((0.5,), (1.0,)) if rule is Rule.REPORT else ((), ())
    named = {"accused": ALICE.key, "step": STEP, "attempt": ATTEMPT, "parts": (0,), "sums": right[0], "norms": right[1]}
    return m.Accusation(rule, **(named | fields), commit=commit, report=report)


# How each proof is made of its two messages, and two that go together.
PAIRS: dict[str, tuple[Callable[[Any, Any], m.Message], m.Signed, m.Signed]] = {
    "equivocation": (m.Equivocation, COMMIT, OTHER_COMMIT),
    "wrong reveal": (m.WrongReveal, COMMIT, REVEAL),
    "wrong opening": (m.WrongOpening, COMMIT, OPENING),
    "accusation of a report": (accuse, COMMIT, REPORT),
    "accusation of a gradient": (lambda commit, report: accuse(commit, report, Rule.GRADIENT), COMMIT, REPORT),
    "accusation of parts": (lambda commit, report: accuse(commit, report, Rule.MALFORMED), COMMIT, REPORT),
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
    """Equivocation is about one height, whatever else the messages say; the others about one attempt."""
    make, first, second = PAIRS[pair]
    for messages in (
        (change(first, **ELSEWHERE[place]), second),
        (first, change(second, **ELSEWHERE[place])),
    ):
        if place in ({"step", "attempt"} if pair == "equivocation" else {"height"}):
            make(*messages)
        else:
            assert_no_proof(make, *messages)


@every_pair
@pytest.mark.parametrize("domain", OTHER_DOMAINS)
def test_messages_of_other_domains_form_no_proof(pair: str, domain: Domain) -> None:
    make, first, second = PAIRS[pair]
    if domain is Domain.TRIAL and pair.startswith("accusation"):
        make(change(first, domain=domain), second)  # whoever is on trial can be accused of its commit
    else:
        assert_no_proof(make, change(first, domain=domain), second)
    assert_no_proof(make, change(first, domain=domain), change(second, domain=domain))
    if domain is not second.domain:
        assert_no_proof(make, first, change(second, domain=domain))


def test_an_agreed_message_is_no_opening() -> None:
    assert_no_proof(m.WrongOpening, COMMIT, change(OPENING, domain=Domain.AGREED))


PHASES_OF_SECOND = {
    "wrong reveal": {Phase.REVEAL},
    "accusation of a report": {Phase.REPORT, Phase.REPORT_AGAIN},
    "accusation of a gradient": {Phase.REPORT, Phase.REPORT_AGAIN},
    "accusation of parts": {Phase.REPORT, Phase.REPORT_AGAIN},
}


@pytest.mark.parametrize("phase", Phase)
@every_pair
def test_messages_of_other_phases_form_no_proof(pair: str, phase: Phase) -> None:
    make, first, second = PAIRS[pair]
    if phase is not Phase.COMMIT and pair != "equivocation":
        assert_no_proof(make, change(first, phase=phase), second)
    moved = change(second, phase=phase)
    if phase in PHASES_OF_SECOND.get(pair, Phase):  # equivocation is possible in all, an opening has none of its own
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


def test_e1_two_signatures_on_one_content_are_no_equivocation() -> None:
    assert_no_proof(m.Equivocation, COMMIT, COMMIT)
    for signature in (bytes(64), b"\xff" * 64, REVEAL.signature):
        assert_no_proof(m.Equivocation, COMMIT, change(COMMIT, signature=signature))


# Another content of the same sender at the same height. Its labels are part of the content.
CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "body": {"body": OTHER_COMMIT.body},
    "no body": {"body": b""},
    "previous": {"previous": ONE},
    "step": {"step": STEP + 1},
    "attempt": {"attempt": ATTEMPT + 1},
    "phase": {"phase": Phase.AGGREGATE},
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_e1_two_contents_at_one_height_are_equivocation(name: str) -> None:
    other = change(COMMIT, **CONTRADICTIONS[name])
    proof = m.Equivocation(COMMIT, other)
    assert decode_message(encode(proof)) == proof
    m.Equivocation(other, COMMIT)


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("place", ["run", "height", "sender"])
def test_e1_contents_in_two_slots_or_runs_are_no_equivocation(name: str, place: str) -> None:
    assert_no_proof(m.Equivocation, COMMIT, change(COMMIT, **CONTRADICTIONS[name], **ELSEWHERE[place]))


def test_e1_is_possible_in_every_phase_and_between_any_two() -> None:
    for phase in Phase:
        m.Equivocation(change(COMMIT, phase=phase), change(OTHER_COMMIT, phase=phase))
        m.Equivocation(COMMIT, change(REVEAL, phase=phase, height=COMMIT.height))


def test_e1_what_an_honest_peer_signs_in_an_attempt_is_no_equivocation() -> None:
    signed = [sign(LARGEST[body], phase=phase) for phase, body in m.BODY_OF_PHASE.items()]
    for first in signed:
        for second in signed:
            assert_no_proof(m.Equivocation, first, second)


@pytest.mark.parametrize("field", [{"accused": BOB.key}, {"step": STEP + 1}, {"attempt": ATTEMPT + 1}], ids=str)
@pytest.mark.parametrize("rule", [Rule.REPORT, Rule.GRADIENT, Rule.MALFORMED])
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


def test_v1_says_what_is_right_for_each_of_its_parts() -> None:
    for parts in ((0,), (3, 200), tuple(range(m.MAX_MEMBERS))):
        count = len(parts)
        for projections in (1, 2, m.MAX_PROJECTIONS):
            accuse(COMMIT, REPORT, parts=parts, sums=(0.5,) * count * projections, norms=(1.0,) * count)
        for sums, norms in ((0, count), (count, 0), (count + 1, count + 1), (count, count + 1), (2 * count, 2 * count)):
            with pytest.raises(ValueError, match="V1: not the sums and norms of its parts"):
                accuse(COMMIT, REPORT, parts=parts, sums=(0.5,) * sums, norms=(1.0,) * norms)


def test_v1_has_no_more_sums_than_there_are_projections() -> None:
    for parts in ((0,), (3, 200)):
        sums = (0.5,) * len(parts) * (m.MAX_PROJECTIONS + 1)
        with pytest.raises(ValueError, match="V1: not the sums and norms of its parts"):
            accuse(COMMIT, REPORT, parts=parts, sums=sums, norms=(1.0,) * len(parts))


@pytest.mark.parametrize("norm", [-1.0, -5e-324, -0.0])
def test_v1_states_no_norm_that_a_report_could_not_hold(norm: float) -> None:
    with pytest.raises(ValueError, match="norms"):
        accuse(COMMIT, REPORT, norms=(norm,))


@pytest.mark.parametrize("rule", [Rule.GRADIENT, Rule.MALFORMED])
def test_v4_and_e4_state_no_sums_and_no_norms(rule: Rule) -> None:
    accuse(COMMIT, REPORT, rule)
    for wrong in ({"sums": (0.0,)}, {"norms": (0.0,)}, {"sums": (0.0,), "norms": (0.0,)}):
        with pytest.raises(ValueError, match="only with V1"):
            accuse(COMMIT, REPORT, rule, **wrong)


def test_e4_needs_a_part_and_no_report() -> None:
    for report in (None, REPORT):
        accuse(COMMIT, report, Rule.MALFORMED)
        with pytest.raises(ValueError, match="E4: needs at least one part"):
            accuse(COMMIT, report, Rule.MALFORMED, parts=())


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule not in (Rule.REPORT, Rule.GRADIENT, Rule.MALFORMED)])
def test_what_has_a_proof_or_shows_itself_is_not_voted_on(rule: Rule) -> None:
    with pytest.raises(ValueError, match="rule: only V1, V4 and E4"):
        accuse(COMMIT, REPORT, rule)


def test_v4_needs_neither_a_report_nor_a_part() -> None:
    for report, parts in ((None, (0,)), (REPORT, ()), (None, ())):
        accuse(COMMIT, report, Rule.GRADIENT, parts=parts)


UNTIED: dict[str, list[Any]] = {
    "equivocation of nobody": ["equivocation", *[msgspec.msgpack.decode(encode(COMMIT))] * 2],
    "equivocation in two slots": ["equivocation", *(msgspec.msgpack.decode(encode(each)) for each in (COMMIT, REVEAL))],
    "wrong reveal of no reveal": ["wrongreveal", *[msgspec.msgpack.decode(encode(COMMIT))] * 2],
    "wrong opening of no opening": ["wrongopening", *[msgspec.msgpack.decode(encode(COMMIT))] * 2],
    "accusation of another": accusation(V4, accused=ONE),
    "accusation without its report": accusation(V1, report=None),
}


@pytest.mark.parametrize("raw", UNTIED.values(), ids=UNTIED)
def test_the_decoder_refuses_messages_that_form_no_proof(raw: list[Any]) -> None:
    assert_malformed(decode_message, pack(raw))


# ---- Certificates fit into frames


def longest(body: m.Body) -> m.Signed:
    """A signed message with every number as long as it gets. (The signature's length never changes.)"""
    return change(sign(body), height=(1 << 48) - 1, step=(1 << 48) - 1, attempt=(1 << 16) - 1)


def frame_of(message: m.Signed, count: int) -> bytes:
    return encode_frame(m.Certificate((message,) * count))


def one_projection() -> m.Report:
    return change(LARGEST[m.Report], sums=LARGEST[m.Report].sums[: m.MAX_MEMBERS])  # type: ignore[attr-defined]


def assert_settles(message: m.Signed, count: int) -> None:
    """So many of a message fit a frame, whatever they travel in: as a certificate, behind a view, as an item."""
    messages = (message,) * count
    endorsements = (longest(LARGEST[m.Endorsement]),) * m.MAX_MEMBERS
    held = (bytes(2 * DIGEST_SIZE),) * (2 * m.MAX_MEMBERS)
    for frame in (
        encode_frame(m.Certificate(messages)),
        encode_frame(m.Chain((m.Link(bytes(m.MAX_VIEW), messages),))),
        encode_frame(m.Gossip((1 << 48) - 1, (1 << 32) - 1, (m.Relay(messages, endorsements),), held)),
    ):
        decode_message(frame[4:])


AGREED = [LARGEST[kind] for kind in dict.fromkeys(m.BODY_OF_PHASE.values())]


@pytest.mark.parametrize(
    "body", [*AGREED, one_projection()], ids=lambda body: f"{type(body).__name__}-{len(encode(body))}"
)
def test_a_certificate_of_the_largest_roster_fits_a_frame(body: m.Body) -> None:
    assert_settles(longest(body), m.MAX_MEMBERS)


def test_all_of_the_largest_outcomes_fit_a_frame() -> None:
    assert_settles(longest(LARGEST[m.Outcome]), m.MAX_MEMBERS)


def test_a_vote_is_short_however_many_slots_it_settles() -> None:
    """What a slow path settles is shown to those who lack it; a vote names it by its digest."""
    assert len(encode(LARGEST[m.Outcome])) < 100
    assert len(encode_frame(LARGEST_SETTLEMENT)) < m.MAX_FRAME // 64
    assert len(encode(LARGEST_SETTLEMENT)) > 40_000


@pytest.mark.parametrize("body", AGREED, ids=lambda body: type(body).__name__)
def test_an_alarm_of_two_messages_and_those_of_all_members_fits_a_frame(body: m.Body) -> None:
    encode_frame(m.Alarm((1 << 48) - 1, (1 << 32) - 1, (longest(body),) * (m.MAX_MEMBERS + 2)))


def test_an_alarm_of_as_many_timeouts_as_it_holds_fits_a_frame() -> None:
    encode_frame(m.Alarm((1 << 48) - 1, (1 << 32) - 1, (longest(LARGEST[m.Timeout]),) * 2 * m.MAX_MEMBERS))


@pytest.mark.parametrize("body", LARGEST.values(), ids=lambda body: type(body).__name__)
def test_an_item_of_one_message_with_all_endorsements_fits_a_frame(body: m.Body) -> None:
    assert_settles(longest(body), 1)


def test_all_the_items_of_a_round_with_all_endorsements_do_not_fit_a_frame() -> None:
    """Why gossip is cut by its bytes, not by its items alone."""
    item = m.Relay((longest(LARGEST[m.Timeout]),), (longest(LARGEST[m.Endorsement]),) * m.MAX_MEMBERS)
    with pytest.raises(ValueError, match="frame"):
        encode_frame(m.Gossip(HEIGHT, 0, (item,) * m.MAX_MEMBERS, ()))


def test_as_many_of_the_largest_links_as_a_chain_holds_do_not_fit_a_frame() -> None:
    """Why a chain is cut by its bytes, not by its links alone."""
    link = m.Link(bytes(m.MAX_VIEW), (longest(LARGEST[m.Abort]),) * m.MAX_MEMBERS)
    with pytest.raises(ValueError, match="frame"):
        encode_frame(m.Chain((link,) * m.MAX_LINKS))


def test_proofs_and_accusations_of_the_longest_bodies_fit_a_frame() -> None:
    first, second = (change(longest(BODIES["Reveal"]), body=bytes([byte]) * m.MAX_BODY) for byte in (0, 1))
    encode_frame(m.Equivocation(first, second))
    commit, report = change(first, phase=Phase.COMMIT), change(second, phase=Phase.REPORT)
    parts, right = tuple(range(m.MAX_MEMBERS)), (0.1,) * m.MAX_MEMBERS
    encode_frame(
        m.Accusation(
            Rule.REPORT, ALICE.key, first.step, first.attempt, parts, commit, report, right * m.MAX_PROJECTIONS, right
        )
    )


def test_a_frame_full_of_small_messages_takes_memory_in_proportion() -> None:
    small = change(COMMIT, body=b"")
    count = m.MAX_FRAME // (1000 * len(encode(small)))
    data = encode(m.Gossip(0, 0, (m.Relay((small,), (small,) * (count - 2)),) * 1000, ()))
    assert m.MAX_FRAME // 2 < len(data) <= m.MAX_FRAME
    tracemalloc.start()
    try:
        decode_message(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(data)


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
PAIR = st.tuples(INDEX, INDEX)
COMMON: dict[str, st.SearchStrategy[Any]] = {
    "height": SIZE,
    "step": SIZE,
    "round": st.integers(0, (1 << 32) - 1),
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
    lacking = draw(increasing(st.sampled_from(range(parts)), most=parts) if parts else increasing(INDEX))
    sums = [0.0 if index % parts in lacking else draw(FINITE) for index in range(parts * projections)]
    norms = [0.0 if index in lacking else abs(draw(FINITE)) for index in range(parts)]
    findings = [m.Finding(key, draw(VERDICT)) for key in draw(increasing(KEY))]
    return m.Report(tuple(sums), tuple(norms), lacking, tuple(findings))


VALUE = st.one_of(st.tuples(KEY, st.just(False)), st.tuples(st.none(), st.booleans()))


@st.composite
def settlements(draw: st.DrawFn) -> m.Settlement:
    slots = draw(increasing(st.tuples(SIZE, KEY)))
    values = [m.SlotOutcome(height, key, *draw(VALUE)) for height, key in slots]
    return draw(some(m.Settlement, slots=st.just(tuple(values)), out=increasing(KEY), stands=st.booleans()))


@st.composite
def proofs(draw: st.DrawFn) -> m.Message:
    """A proof or an accusation: messages of one sender in one attempt of one run."""
    first = draw(some(m.Signed, domain=st.just(Domain.AGREED), phase=st.just(Phase.COMMIT)))

    def follow(phase: Phase, domain: Domain = Domain.AGREED) -> m.Signed:
        """Another message of this sender in this attempt."""
        other = draw(SIGNED)
        return change(other, domain=domain, run=first.run, phase=phase, sender=first.sender, **attempt)

    attempt = {"step": first.step, "attempt": first.attempt}
    kind = draw(st.sampled_from((m.Equivocation, m.WrongReveal, m.WrongOpening, m.Accusation)))
    if kind is m.Equivocation:
        second = change(draw(SIGNED), domain=Domain.AGREED, run=first.run, height=first.height, sender=first.sender)
        assume((first.previous, first.body) != (second.previous, second.body))
        return m.Equivocation(first, second)
    if kind is m.WrongReveal:
        return m.WrongReveal(first, follow(Phase.REVEAL))
    if kind is m.WrongOpening:
        return m.WrongOpening(first, follow(draw(st.sampled_from(Phase)), Domain.OPENING))
    rule = draw(st.sampled_from((Rule.REPORT, Rule.GRADIENT, Rule.MALFORMED)))
    parts = draw(increasing(INDEX, least=int(rule is not Rule.GRADIENT)))
    report = follow(draw(st.sampled_from((Phase.REPORT, Phase.REPORT_AGAIN))))
    absent = rule is not Rule.REPORT and draw(st.booleans())
    sums, norms = draw(right_of(len(parts))) if rule is Rule.REPORT else ((), ())
    return m.Accusation(
        rule, first.sender, first.step, first.attempt, parts, first, None if absent else report, sums, norms
    )


def right_of(parts: int) -> st.SearchStrategy[tuple[tuple[float, ...], tuple[float, ...]]]:
    """Sums and norms for so many parts."""
    sums = st.integers(1, m.MAX_PROJECTIONS).flatmap(lambda count: st.tuples(*[FINITE] * parts * count))
    return st.tuples(sums, st.tuples(*[FINITE.map(abs)] * parts))


LISTED = st.builds(lambda keys: tuple(m.Listed(key, ONE) for key in keys), increasing(KEY))
LAGS = st.lists(st.integers(0, 2**32 - 1), max_size=6).map(lambda x: tuple(x) if any(x) else ())
BODY = st.one_of(
    some(m.Commit, parts=st.none() | KEY),
    some(m.Aggregate, missing=st.just(()), unopened=increasing(PAIR), trials=LISTED),
    some(
        m.Aggregate,
        result=st.none(),
        missing=increasing(INDEX, least=1),
        unopened=increasing(PAIR),
        trials=LISTED,
    ),
    some(m.Reveal),
    reports(),
    some(
        m.Confirm,
        accusations=increasing(KEY),
        joins=increasing(KEY),
        late=increasing(KEY),
        leaving=st.booleans(),
        blind=st.booleans(),
        charged=st.just(()),
        timing=st.builds(m.Timing, *(st.integers(0, 2**32 - 1),) * 3, LAGS, LAGS, LAGS),
    ),
    increasing(KEY).flatmap(
        lambda cases: some(
            m.Vote,
            ballots=st.tuples(*(some(m.Ballot, case=st.just(c), verdict=VERDICT) for c in cases)),
            unopened=increasing(PAIR),
        )
    ),
    some(m.Seal),
    some(m.Abort, culprits=increasing(KEY)),
    some(m.Wait, joins=increasing(KEY)),
    some(m.Timeout, missing=increasing(KEY, least=1), round=st.just(0), prepared=st.none()),
    some(m.Timeout, missing=st.just(()), round=st.integers(1, (1 << 32) - 1), prepared=st.none() | KEY),
    some(m.Endorsement),
    some(m.Outcome, final=st.booleans(), ends=st.booleans()),
    some(m.Opening),
    some(m.Trial),
    some(m.Join),
)
SIGNED = some(m.Signed)
SIGNEDS = st.lists(SIGNED, max_size=3).map(tuple)
RELAY = some(m.Relay, messages=st.lists(SIGNED, min_size=1, max_size=2).map(tuple), endorsements=SIGNEDS)
HELD = st.binary(max_size=2 * DIGEST_SIZE)
LINK = some(m.Link, view=st.binary(max_size=100), messages=SIGNEDS)
MESSAGE = st.one_of(
    SIGNED,
    chunks(m.PartChunk),
    chunks(m.AggregateChunk),
    chunks(m.StateChunk),
    some(m.Gossip, items=st.lists(RELAY, max_size=2).map(tuple), held=st.lists(HELD, max_size=4).map(tuple)),
    settlements(),
    some(m.PullSettlement),
    some(m.Alarm, evidence=SIGNEDS),
    some(m.Manifest, text=st.binary(max_size=300)),
    some(m.Certificate, messages=SIGNEDS),
    some(m.Chain, links=st.lists(LINK, max_size=2).map(tuple)),
    some(m.PullMessages, senders=increasing(KEY, least=1)),
    some(m.PullPart),
    some(m.PullAggregate),
    some(m.PullState),
    some(m.PullProof),
    some(m.PullChain),
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
