"""The golden vectors of ``tests/vectors``: a change in the format breaks the test that bears the vector's name.

The second half checks them against the rules of their README alone, written down once more with none of the package's
code: what stands there is enough to write another implementation.
"""

from __future__ import annotations

import runpy
import struct
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from statistics import NormalDist
from typing import Any

import base58
import msgspec
import numpy as np
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from examples import BODIES, BODY_TYPES, MESSAGE_TYPES, MESSAGES, NAMED_TYPES, SIGNED

from phalanx.core.codec import FrameReader, decode_body, decode_message, encode
from phalanx.core.crypto import Domain, Identity, is_usable_key, parse_peer_id, verify_signature
from phalanx.core.envelope import compute_message_digest, is_authentic

HERE = Path(__file__).parent.parent / "vectors"
Vectors = dict[str, bytes]


def read(group: str) -> Vectors:
    vectors: Vectors = {}
    for line in (HERE / f"{group}.txt").read_text(encoding="ascii").splitlines():
        name, data = line.split(" ")
        assert name not in vectors
        vectors[name] = b"" if data == "-" else bytes.fromhex(data)
    return vectors


GENERATOR = runpy.run_path(str(HERE / "generate.py"))
GROUPS: dict[str, Callable[[], Vectors]] = GENERATOR["GROUPS"]
SCHEMA: dict[str, str] = GENERATOR["schema"]()
STORED_SCHEMA = dict(line.split(" ", 1) for line in (HERE / "schema.txt").read_text(encoding="ascii").splitlines())
STORED = {group: read(group) for group in GROUPS}
COMPUTED = {group: compute() for group, compute in GROUPS.items()}
KEYS, SIGNATURES, COMMITMENTS = STORED["keys"], STORED["signatures"], STORED["commitments"]
MERKLE, STREAMS, VECTORS = STORED["merkle"], STORED["streams"], STORED["messages"]

PAYLOADS = {name.removesuffix(".payload"): data for name, data in SIGNATURES.items() if name.endswith(".payload")}


def by_name(vectors: Vectors) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", vectors)


@pytest.mark.parametrize(
    ("group", "name"),
    [(group, name) for group in GROUPS for name in STORED[group] | COMPUTED[group]],
)
def test_the_bytes_are_those_of_the_vector(group: str, name: str) -> None:
    assert name in STORED[group], "a new vector: run tests/vectors/generate.py"
    assert name in COMPUTED[group], "this vector is not computed any more"
    assert COMPUTED[group][name].hex() == STORED[group][name].hex()


@pytest.mark.parametrize("name", STORED_SCHEMA | SCHEMA)
def test_fields_their_order_and_their_limits_are_those_of_the_schema(name: str) -> None:
    assert SCHEMA.get(name) == STORED_SCHEMA.get(name)


def test_every_file_is_a_group_and_every_group_a_file() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == {*GROUPS, "schema"}


def test_every_type_of_message_has_a_vector() -> None:
    named = {name.split(".")[0] for name in VECTORS}
    assert {kind.__name__ for kind in (*BODY_TYPES, *MESSAGE_TYPES)} <= named


def test_every_type_and_every_digest_is_in_the_readme() -> None:
    page = (HERE / "README.md").read_text(encoding="utf-8")
    for kind in NAMED_TYPES:
        assert f"\n| `{kind.__name__.lower()}` |" in page
    for domain in Domain:
        assert f"`{domain}`" in page


@by_name(BODIES)
def test_a_stored_body_gives_the_example_back(name: str) -> None:
    assert decode_body(VECTORS[name]) == BODIES[name]


@by_name(MESSAGES)
def test_a_stored_message_gives_the_example_back(name: str) -> None:
    assert decode_message(VECTORS[name]) == MESSAGES[name]


@by_name(SIGNED)
def test_a_stored_signed_message_is_authentic(name: str) -> None:
    message = decode_message(VECTORS[name])
    assert is_authentic(message)
    assert message.signature == SIGNATURES[f"{name}.signature"]
    assert compute_message_digest(message) == SIGNATURES[f"{name}.digest"]


def test_the_stored_frame_gives_its_message_back() -> None:
    (frame,) = FrameReader().feed(VECTORS["frame.PullManifest"])
    assert decode_message(frame) == MESSAGES["PullManifest"]


@by_name(PAYLOADS)
def test_a_stored_signature_verifies(name: str) -> None:
    domain, signature = Domain(name.split(".")[0]), SIGNATURES[f"{name}.signature"]
    assert verify_signature(KEYS["counting.public"], domain, PAYLOADS[name], signature)


@by_name({name: data for name, data in SIGNATURES.items() if name.startswith("refused.")})
def test_what_is_stored_as_refused_is_refused(name: str) -> None:
    if ".key." in name:
        assert not is_usable_key(SIGNATURES[name])
    else:
        payload = SIGNATURES["agreed.counting.payload"]
        assert not verify_signature(KEYS["counting.public"], Domain.AGREED, payload, SIGNATURES[name])


@pytest.mark.parametrize("name", sorted({name.split(".")[0] for name in KEYS}))
def test_a_stored_key_file_loads(name: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEYS[f"{name}.file"])
    path.chmod(0o600)
    identity = Identity.load(path)
    assert identity.key == KEYS[f"{name}.public"] == parse_peer_id(KEYS[f"{name}.peer_id"].decode())


# ---- The README's rules, once more

RUN, PREVIOUS, SHARE, SALT = (bytes(range(start, start + 32)) for start in (100, 132, 164, 196))
ALICE, BOB = (Ed25519PrivateKey.from_private_bytes(bytes(range(start, start + 32))) for start in (0, 32))
SEED = bytes(range(32))


def little(number: int) -> bytes:
    return struct.pack("<Q", number)


def digest(purpose: str, *fields: bytes) -> bytes:
    material = b"".join(little(len(field)) + field for field in fields)
    return blake3(material, derive_key_context=f"phalanx 1 {purpose}").digest()


def pack(value: Any) -> bytes:
    """MessagePack in its shortest form, as far as messages need it."""
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        if value < 128:
            return bytes([value])
        size = next(size for size in (1, 2, 4, 8) if value < 1 << 8 * size)
        return bytes([0xCC + (1, 2, 4, 8).index(size)]) + value.to_bytes(size, "big")
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return header(len(value), (1, 0xC4), (2, 0xC5), (4, 0xC6)) + value
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 | len(data)]) if len(data) < 32 else header(len(data), (1, 0xD9), (2, 0xDA))) + data
    items = b"".join(map(pack, value))
    return (bytes([0x90 | len(value)]) if len(value) < 16 else header(len(value), (2, 0xDC), (4, 0xDD))) + items


def header(length: int, *forms: tuple[int, int]) -> bytes:
    size, code = next(form for form in forms if length < 1 << 8 * form[0])
    return bytes([code]) + length.to_bytes(size, "big")


def plain(value: Any) -> Any:
    """A message as plain lists and values."""
    if isinstance(value, msgspec.Struct):
        named = [type(value).__name__.lower()] if type(value) in NAMED_TYPES else []
        return named + [plain(getattr(value, field)) for field in value.__struct_fields__]
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, IntEnum):
        return int(value)
    return str(value) if isinstance(value, str) else value


@by_name(BODIES | MESSAGES)
def test_messages_follow_from_the_readme(name: str) -> None:
    assert pack(plain((BODIES | MESSAGES)[name])) == VECTORS[name]
    assert encode((BODIES | MESSAGES)[name]) == VECTORS[name]


def test_a_frame_follows_from_the_readme() -> None:
    message = VECTORS["PullManifest"]
    assert VECTORS["frame.PullManifest"] == struct.pack(">I", len(message)) + message


@by_name(SIGNED)
def test_signed_messages_follow_from_the_readme(name: str) -> None:
    _, domain, *content, signature = plain(SIGNED[name])
    body = VECTORS[name.removeprefix("Signed.")]
    phase = content[4]
    assert content == [RUN, 12340 + phase, 1234, 2, phase, ALICE.public_key().public_bytes_raw(), PREVIOUS, body]
    signed = b"phalanx/1/" + domain.encode() + b"\x00" + pack(content)
    assert signature == ALICE.sign(signed) == SIGNATURES[f"{name}.signature"]
    assert digest("message", domain.encode(), pack(content)) == SIGNATURES[f"{name}.digest"]


@by_name(PAYLOADS)
def test_signatures_follow_from_the_readme(name: str) -> None:
    signed = b"phalanx/1/" + name.split(".")[0].encode() + b"\x00" + PAYLOADS[name]
    assert ALICE.sign(signed) == SIGNATURES[f"{name}.signature"]


@pytest.mark.parametrize("name", sorted({name.split(".")[0] for name in KEYS}))
def test_keys_follow_from_the_readme(name: str) -> None:
    seed, public = KEYS[f"{name}.seed"], KEYS[f"{name}.public"]
    assert Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() == public
    assert KEYS[f"{name}.file"] == bytes.fromhex("08011240") + seed + public
    assert KEYS[f"{name}.peer_id"] == base58.b58encode(bytes.fromhex("002408011220") + public)


@by_name({name: data for name, data in COMMITMENTS.items() if name.startswith("share.")})
def test_commitments_follow_from_the_readme(name: str) -> None:
    _, step, attempt, owner = name.split(".")
    key = {"alice": ALICE, "bob": BOB}[owner].public_key().public_bytes_raw()
    place = little(int(step)) + little(int(attempt))
    assert digest("share commitment", RUN, place, key, SHARE, SALT) == COMMITMENTS[name]


def test_digests_follow_from_the_readme() -> None:
    assert digest("test") == COMMITMENTS["digest.no_fields"]
    assert digest("test", b"") == COMMITMENTS["digest.empty_field"]
    assert digest("test", b"ab", b"c") == COMMITMENTS["digest.two_fields"]
    assert digest("part", b"") == MERKLE["part.empty"]
    assert digest("part", bytes(range(100))) == MERKLE["part.counting"]


def tree(leaves: list[bytes], index: int) -> tuple[bytes, bytes]:
    """The top of a tree, and the path of one of its leaves."""
    if len(leaves) == 1:
        return leaves[0], b""
    half = max(1 << bit for bit in range(10) if 1 << bit < len(leaves))
    left, left_path = tree(leaves[:half], min(index, half - 1))
    right, right_path = tree(leaves[half:], max(index - half, 0))
    path = left_path + right if index < half else right_path + left
    return digest("merkle node", left, right), path


@by_name({name: data for name, data in MERKLE.items() if name.startswith("path.")})
def test_merkle_trees_follow_from_the_readme(name: str) -> None:
    count, index = map(int, name.split(".")[1:])
    leaves = [digest("merkle leaf", little(i), digest("part", bytes([i]))) for i in range(count)]
    top, path = tree(leaves, index)
    assert path == MERKLE[name]
    assert digest("merkle root", little(count), top) == MERKLE[f"root.{count}"]


def stream(size: int) -> bytes:
    return blake3(SEED, derive_key_context="phalanx 1 stream").digest(length=size)


def words() -> list[int]:
    return np.frombuffer(stream(8 * 100), "<u8").tolist()


@by_name({name: data for name, data in STREAMS.items() if name.startswith("below.")})
def test_numbers_follow_from_the_readme(name: str) -> None:
    bound = int(name.split(".")[1])
    draws = [word % bound for word in words() if word < 2**64 // bound * bound][:8]
    assert b"".join(map(little, draws)) == STREAMS[name]


def test_streams_and_samples_follow_from_the_readme() -> None:
    assert stream(100) == STREAMS["bytes"]
    assert digest("seed for test", SEED) == STREAMS["seed"]
    assert digest("seed for test", SEED, b"ab", b"c") == STREAMS["seed.fields"]
    entries = list(range(100))
    for i, word in enumerate(words()[:20]):  # all so far below 2**64 that none is skipped
        j = word % (100 - i)
        entries[i], entries[i + j] = entries[i + j], entries[i]
    assert bytes(entries[:20]) == STREAMS["sample"]


def test_gaussian_vectors_follow_from_the_readme() -> None:
    quantiles = [NormalDist().inv_cdf((index + 0.5) / 65536) for index in range(65536)]
    table = np.array(quantiles, dtype="<f4")
    assert blake3(table.tobytes()).digest() == STREAMS["gaussian.table"]
    assert table[:16].tobytes() == STREAMS["gaussian.table.first"]
    values = table[np.frombuffer(stream(2_000_000), "<u2")].tobytes()
    assert values[: 4 * 32] == STREAMS["gaussian"]
    assert blake3(values).digest() == STREAMS["gaussian.1000000"]
