"""Writes the golden vectors beside this file: ``python tests/vectors/generate.py``. README.md states their format.

Do this only when the format is meant to change, and say so: peers of the two formats cannot talk to one another.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from blake3 import blake3
from msgspec import inspect

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "core"))

import examples  # noqa: E402

from phalanx.core.codec import encode, encode_frame  # noqa: E402
from phalanx.core.crypto import Domain, Identity, compute_commitment, compute_digest  # noqa: E402
from phalanx.core.envelope import compute_message_digest  # noqa: E402
from phalanx.core.merkle import compute_path, compute_root, hash_part  # noqa: E402
from phalanx.core.randomness import Stream, derive_seed, gaussian_table, gaussian_vector  # noqa: E402

SEED = bytes(range(32))
SEEDS = {
    "counting": SEED,
    "zero": bytes(32),
    "one": (1).to_bytes(32, "big"),
    "libp2p": bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"),
    "rfc8032": bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"),
}
PAYLOADS = {"empty": b"", "counting": bytes(range(100))}
TREE_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 64, 70)
BOUNDS = (1, 2, 3, 10, 1000, 2**32, 2**63 + 1, 2**64)

Vectors = dict[str, bytes]


def keys() -> Vectors:
    vectors: Vectors = {}
    for name, seed in SEEDS.items():
        identity = Identity(seed)
        vectors[f"{name}.seed"] = seed
        vectors[f"{name}.public"] = identity.key
        vectors[f"{name}.file"] = bytes.fromhex("08011240") + seed + identity.key
        vectors[f"{name}.peer_id"] = identity.peer_id.encode()
    return vectors


def signatures() -> Vectors:
    vectors: Vectors = {}
    for domain in Domain:
        for name, payload in PAYLOADS.items():
            vectors[f"{domain}.{name}.payload"] = payload
            vectors[f"{domain}.{name}.signature"] = examples.ALICE.sign(domain, payload)
    for name, message in examples.SIGNED.items():
        vectors[f"{name}.signature"] = message.signature
        vectors[f"{name}.digest"] = compute_message_digest(message)
    return vectors | refused()


def refused() -> Vectors:
    """What must not verify: signatures on the counting payload in the domain agreed, and keys."""
    payload = b"phalanx/1/agreed\x00" + PAYLOADS["counting"]
    signature = examples.ALICE.sign(Domain.AGREED, PAYLOADS["counting"])
    moved = int.from_bytes(signature[32:], "little") + examples.ORDER
    return {
        "refused.order_added": signature[:32] + moved.to_bytes(32, "little"),
        "refused.up_to_cofactor": examples.sign_with_nonce(SEED, payload, 3, examples.torsion_generator()),
        **{f"refused.key.{index}": key for index, key in enumerate(examples.small_order_encodings())},
    }


def commitments() -> Vectors:
    vectors: Vectors = {
        "digest.no_fields": compute_digest("test"),
        "digest.empty_field": compute_digest("test", b""),
        "digest.two_fields": compute_digest("test", b"ab", b"c"),
    }
    for step, attempt in ((0, 0), (1, 0), (0, 1), (1234, 2), (2**48 - 1, 2**16 - 1)):
        for name, owner in (("alice", examples.ALICE), ("bob", examples.BOB)):
            vectors[f"share.{step}.{attempt}.{name}"] = compute_commitment(
                examples.RUN, step, attempt, owner.key, examples.SHARE, examples.SALT
            )
    return vectors


def merkle() -> Vectors:
    vectors: Vectors = {"part.empty": hash_part(b""), "part.counting": hash_part(bytes(range(100)))}
    for count in TREE_SIZES:
        digests = [hash_part(bytes([index])) for index in range(count)]
        vectors[f"root.{count}"] = compute_root(digests)
        for index in sorted({0, count // 2, count - 1}):
            vectors[f"path.{count}.{index}"] = b"".join(compute_path(digests, index))
    return vectors


def streams() -> Vectors:
    stream = Stream(SEED)
    vectors: Vectors = {
        "bytes": stream.draw_bytes(100),
        "seed": derive_seed(SEED, "test"),
        "seed.fields": derive_seed(SEED, "test", b"ab", b"c"),
        "sample": bytes(Stream(SEED).draw_sample(range(100), 20)),
        "gaussian.table": blake3(gaussian_table().tobytes()).digest(),
        "gaussian.table.first": gaussian_table()[:16].tobytes(),
        "gaussian": gaussian_vector(SEED, 32).numpy().astype("<f4").tobytes(),
        "gaussian.1000000": blake3(gaussian_vector(SEED, 1_000_000).numpy().astype("<f4").tobytes()).digest(),
    }
    for bound in BOUNDS:
        stream = Stream(SEED)
        vectors[f"below.{bound}"] = np.array([stream.draw_below(bound) for _ in range(8)], dtype="<u8").tobytes()
    return vectors


def messages() -> Vectors:
    vectors = {name: encode(value) for name, value in {**examples.BODIES, **examples.MESSAGES}.items()}
    return vectors | {"frame.PullManifest": encode_frame(examples.MESSAGES["PullManifest"])}


GROUPS = {
    "keys": keys,
    "signatures": signatures,
    "commitments": commitments,
    "merkle": merkle,
    "streams": streams,
    "messages": messages,
}


def schema() -> dict[str, str]:
    """Every type with its fields in order, and what each may hold."""
    kinds = [inspect.type_info(kind) for kind in (*examples.BODY_TYPES, *examples.MESSAGE_TYPES)]
    lines: dict[str, str] = {}
    while kinds:
        kind = kinds.pop(0)
        fields = [f"{field.name}: {describe(field.type)}" for field in kind.fields]
        lines[kind.cls.__name__] = "; ".join(fields) or "nothing"
        kinds += [inner for field in kind.fields for inner in structs_in(field.type) if inner.cls.__name__ not in lines]
    return lines


def describe(kind: inspect.Type) -> str:
    match kind:
        case inspect.BytesType(min_length=least, max_length=most):
            return f"{least or 0} to {most} bytes"
        case inspect.StrType(min_length=least, max_length=most):
            return f"{least or 0} to {most} characters"
        case inspect.VarTupleType(item_type=item, min_length=least, max_length=most):
            return f"{least or 0} to {most} of ({describe(item)})"
        case inspect.TupleType(item_types=items):
            return " and ".join(describe(item) for item in items)
        case inspect.IntType(ge=least, lt=beyond, le=most):
            return f"whole number {least} to {most if beyond is None else beyond - 1}"
        case inspect.EnumType(cls=names):
            return "one of " + ", ".join(str(name.value) for name in names)
        case inspect.UnionType(types=types):
            return " or ".join(describe(each) for each in types)
        case inspect.StructType(cls=struct):
            return struct.__name__
    return {inspect.FloatType: "number", inspect.BoolType: "yes or no", inspect.NoneType: "absent"}[type(kind)]


def structs_in(kind: inspect.Type) -> list[inspect.StructType]:
    match kind:
        case inspect.StructType():
            return [kind]
        case inspect.VarTupleType(item_type=item):
            return structs_in(item)
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            return [struct for each in types for struct in structs_in(each)]
    return []


def main() -> None:
    (HERE / "schema.txt").write_text("".join(f"{name} {line}\n" for name, line in schema().items()), encoding="ascii")
    for group, compute in GROUPS.items():
        lines = [f"{name} {data.hex() or '-'}\n" for name, data in compute().items()]
        (HERE / f"{group}.txt").write_text("".join(lines), encoding="ascii")
        print(f"{group}.txt: {len(lines)} vectors")


if __name__ == "__main__":
    main()
