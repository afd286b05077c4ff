"""Keys, signatures, digests and commitments: what an attacker can make must not pass."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import base58
import numpy as np
import pytest
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from examples import (
    ALICE,
    ATTEMPT,
    BOB,
    IDENTITY,
    ORDER,
    RUN,
    SALT,
    SHARE,
    STEP,
    multiply,
    pack_point,
    sign_with_nonce,
    small_order_encodings,
    torsion_generator,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import crypto
from phalanx.core.crypto import (
    Domain,
    Identity,
    compute_commitment,
    compute_digest,
    format_peer_id,
    is_usable_key,
    parse_peer_id,
    verify_signature,
)
from phalanx.core.errors import LocalError

SEED = bytes(range(32))
PAYLOAD = b"payload"
SIGNATURE = ALICE.sign(Domain.AGREED, PAYLOAD)
# R is the identity and S is 0: it "signs" every message for which the challenge times the key vanishes.
UNIVERSAL_SIGNATURE = pack_point(IDENTITY) + bytes(32)


SMALL_ORDER = small_order_encodings()


def library_accepts(key: bytes, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


# ---- Signatures


@pytest.mark.parametrize("domain", Domain)
def test_a_signature_verifies_in_its_domain_and_in_no_other(domain: Domain) -> None:
    signature = ALICE.sign(domain, PAYLOAD)
    assert [other for other in Domain if verify_signature(ALICE.key, other, PAYLOAD, signature)] == [domain]


def test_a_signature_is_ed25519_over_prefix_domain_zero_byte_and_payload() -> None:
    assert library_accepts(ALICE.key, b"phalanx/1/agreed\x00payload", SIGNATURE)
    assert not library_accepts(ALICE.key, PAYLOAD, SIGNATURE)


def test_domains_cannot_run_into_payloads() -> None:
    prefixes = [b"phalanx/1/" + domain.encode() + b"\x00" for domain in Domain]
    assert all(not a.startswith(b) for a in prefixes for b in prefixes if a is not b)
    assert all(prefix.count(b"\x00") == 1 for prefix in prefixes)


def test_a_signature_of_another_key_is_refused() -> None:
    assert not verify_signature(BOB.key, Domain.AGREED, PAYLOAD, SIGNATURE)


def test_a_signature_on_another_payload_is_refused() -> None:
    for payload in (b"", b"payloae", b"payload\x00", b"\x00payload"):
        assert not verify_signature(ALICE.key, Domain.AGREED, payload, SIGNATURE)


def test_a_signature_with_any_bit_flipped_is_refused() -> None:
    for bit in range(8 * len(SIGNATURE)):
        flipped = (int.from_bytes(SIGNATURE, "little") ^ 1 << bit).to_bytes(64, "little")
        assert not verify_signature(ALICE.key, Domain.AGREED, PAYLOAD, flipped)


@pytest.mark.parametrize("length", [0, 1, 31, 32, 63, 65, 96, 128, 10_000])
def test_a_signature_of_another_length_is_refused(length: int) -> None:
    assert not verify_signature(ALICE.key, Domain.AGREED, PAYLOAD, (SIGNATURE * 200)[:length])


def test_adding_the_group_order_to_s_makes_no_second_signature() -> None:
    s = int.from_bytes(SIGNATURE[32:], "little")
    for multiple in range(1, 16):
        if (moved := s + multiple * ORDER) < 1 << 256:
            malleated = SIGNATURE[:32] + moved.to_bytes(32, "little")
            assert not verify_signature(ALICE.key, Domain.AGREED, PAYLOAD, malleated)


def test_a_signer_can_sign_one_payload_in_many_ways() -> None:
    """Why a message is named by its content: nobody but the signer can, but the signer can."""
    data = b"phalanx/1/agreed\x00payload"
    for nonce in (3, 4, 5):
        other = sign_with_nonce(SEED, data, nonce)
        assert other != SIGNATURE
        assert verify_signature(ALICE.key, Domain.AGREED, PAYLOAD, other)


def test_a_signature_that_holds_only_up_to_the_cofactor_is_refused() -> None:
    """Implementations that multiply the equation by 8 accept these. All peers must give one answer: ours is no."""
    for multiple in range(1, 8):
        offset = multiply(multiple, torsion_generator())
        forged = sign_with_nonce(SEED, b"phalanx/1/agreed\x00payload", 3, offset)
        assert not verify_signature(ALICE.key, Domain.AGREED, PAYLOAD, forged)


def test_there_are_fourteen_encodings_of_small_order() -> None:
    assert len(SMALL_ORDER) == 14


@pytest.mark.parametrize("key", SMALL_ORDER, ids=bytes.hex)
def test_a_key_of_small_order_is_refused_where_the_library_accepts_it(key: bytes) -> None:
    payloads = [b"payload %d" % number for number in range(200)]
    fooled = [
        payload for payload in payloads if library_accepts(key, b"phalanx/1/agreed\x00" + payload, UNIVERSAL_SIGNATURE)
    ]
    assert fooled, "one signature fits messages that nobody ever signed"
    assert not any(verify_signature(key, Domain.AGREED, payload, UNIVERSAL_SIGNATURE) for payload in fooled)
    assert not is_usable_key(key)


@pytest.mark.parametrize("key", SMALL_ORDER, ids=bytes.hex)
def test_no_peer_id_names_a_key_of_small_order(key: bytes) -> None:
    with pytest.raises(LocalError) as caught:
        parse_peer_id(format_peer_id(key))
    assert caught.type is LocalError


@pytest.mark.parametrize("length", [0, 1, 31, 33, 64])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    key = (ALICE.key * 2)[:length]
    assert not is_usable_key(key)
    assert not verify_signature(key, Domain.AGREED, PAYLOAD, SIGNATURE)


def test_a_key_that_is_no_point_of_the_curve_verifies_nothing() -> None:
    not_points = [y for y in range(2, 40) if not library_loads(y.to_bytes(32, "little"))]
    for y in [*not_points, (1 << 256) - 1]:
        for signature in (SIGNATURE, UNIVERSAL_SIGNATURE):
            assert not verify_signature(y.to_bytes(32, "little"), Domain.AGREED, PAYLOAD, signature)


def library_loads(key: bytes) -> bool:
    try:
        return library_accepts(key, b"", bytes(64)) or True
    except ValueError:
        return False


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.binary(max_size=40), st.binary(max_size=80), st.binary(max_size=80))
def test_garbage_never_verifies_and_never_raises(key: bytes, payload: bytes, signature: bytes) -> None:
    assert not verify_signature(key, Domain.AGREED, payload, signature)
    assert not verify_signature(ALICE.key, Domain.AGREED, payload, signature)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200), st.sampled_from(Domain))
def test_whatever_is_signed_verifies(seed: bytes, payload: bytes, domain: Domain) -> None:
    identity = Identity(seed)
    assert is_usable_key(identity.key)
    assert verify_signature(identity.key, domain, payload, identity.sign(domain, payload))


# ---- Digests and commitments


def test_a_digest_is_blake3_keyed_by_its_purpose_over_lengths_and_fields() -> None:
    expected = blake3(b"\x02" + bytes(7) + b"ab" + bytes(8), derive_key_context="phalanx 1 test").digest()
    assert compute_digest("test", b"ab", b"") == expected


@settings(deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_different_fields_have_different_digests(first: list[bytes], second: list[bytes]) -> None:
    assert (compute_digest("test", *first) == compute_digest("test", *second)) == (first == second)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([b"ab", b"c"], [b"a", b"bc"]),
        ([b"abc"], [b"abc", b""]),
        ([], [b""]),
        ([b"a", b"b"], [b"b", b"a"]),
        ([b"ab"], [b"a", b"b"]),
        ([bytes(8)], [b"", b""]),
    ],
)
def test_fields_cannot_be_cut_in_another_way(first: list[bytes], second: list[bytes]) -> None:
    assert compute_digest("test", *first) != compute_digest("test", *second)


def test_the_same_fields_for_another_purpose_give_another_digest() -> None:
    assert compute_digest("part", b"x") != compute_digest("parts", b"x")


def test_bytes_and_views_of_them_have_one_digest() -> None:
    data = bytes(range(64))
    assert compute_digest("test", data) == compute_digest("test", memoryview(data))
    assert compute_digest("test", data) == compute_digest("test", memoryview(bytearray(data)))


@pytest.mark.parametrize("kind", ["B", "b", "H", "i", "f", "d", "q", "?"])
def test_a_view_counts_as_its_bytes_whatever_its_kind(kind: str) -> None:
    data = bytes(64)
    assert compute_digest("test", memoryview(data).cast(kind)) == compute_digest("test", data)


@pytest.mark.parametrize("shape", [(64,), (16, 4), (1, 64), (2, 4, 8), (64, 1, 1)], ids=str)
def test_a_view_counts_as_its_bytes_whatever_its_shape(shape: tuple[int, ...]) -> None:
    data = bytes(range(64))
    assert compute_digest("test", memoryview(data).cast("B", shape)) == compute_digest("test", data)
    for kind in (np.float16, np.float32, np.float64, ">f4"):
        floats = np.arange(64, dtype=kind).reshape(shape)
        assert compute_digest("test", floats.data) == compute_digest("test", floats.tobytes())


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)], ids=str)
def test_a_view_of_nothing_is_an_empty_field(shape: tuple[int, ...]) -> None:
    assert compute_digest("test", np.zeros(shape).data) == compute_digest("test", b"") != compute_digest("test")


def test_a_view_with_gaps_or_in_another_order_is_refused() -> None:
    """Its bytes in memory are not the field's bytes in order; nobody should have to guess which were hashed."""
    for view in (memoryview(bytes(64))[::2], np.ones((4, 4))[:, :2].data, np.asfortranarray(np.ones((2, 3))).data):
        with pytest.raises(TypeError):
            compute_digest("test", view)


def test_a_commitment_opens_for_nothing_but_what_it_names() -> None:
    committed = (RUN, STEP, ATTEMPT, ALICE.key, SHARE, SALT)
    commitment = compute_commitment(*committed)
    assert compute_commitment(*committed) == commitment
    others = (SALT, STEP + 1, ATTEMPT + 1, BOB.key, SALT, SHARE)
    for place, other in enumerate(others):
        changed = [*committed[:place], other, *committed[place + 1 :]]
        assert compute_commitment(*changed) != commitment


def test_a_copied_commitment_does_not_open_for_who_copied_it() -> None:
    copied = compute_commitment(RUN, STEP, ATTEMPT, ALICE.key, SHARE, SALT)
    assert compute_commitment(RUN, STEP, ATTEMPT, BOB.key, SHARE, SALT) != copied


def test_step_and_attempt_do_not_run_into_each_other() -> None:
    assert compute_commitment(RUN, 1, 0, ALICE.key, SHARE, SALT) != compute_commitment(
        RUN, 0, 1, ALICE.key, SHARE, SALT
    )
    assert compute_commitment(RUN, 256, 0, ALICE.key, SHARE, SALT) != compute_commitment(
        RUN, 0, 256, ALICE.key, SHARE, SALT
    )


def test_share_and_salt_do_not_run_into_each_other() -> None:
    whole = SHARE + SALT
    commitments = {compute_commitment(RUN, 0, 0, ALICE.key, whole[:cut], whole[cut:]) for cut in range(len(whole) + 1)}
    assert len(commitments) == len(whole) + 1


# ---- Peer ids

KNOWN_PEER_IDS = {
    # the keys 1 and 2 that development chains built on libp2p start their first two nodes with
    "0000000000000000000000000000000000000000000000000000000000000001": (
        "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
    ),
    "0000000000000000000000000000000000000000000000000000000000000002": (
        "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"
    ),
}


@pytest.mark.parametrize(("seed", "peer_id"), KNOWN_PEER_IDS.items())
def test_peer_ids_print_as_libp2p_prints_them(seed: str, peer_id: str) -> None:
    identity = Identity(bytes.fromhex(seed))
    assert identity.peer_id == peer_id
    assert parse_peer_id(peer_id) == identity.key


def test_the_private_key_of_the_libp2p_specification_has_its_public_key() -> None:
    seed = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
    public = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert Identity(seed).key == public


@settings(deadline=None, derandomize=True)
@given(st.binary(min_size=32, max_size=32).filter(is_usable_key))
def test_a_peer_id_gives_its_key_back(key: bytes) -> None:
    text = format_peer_id(key)
    assert parse_peer_id(text) == key
    assert len(text) == 52
    assert text.startswith("12D3KooW")


PEER_ID = ALICE.peer_id
# Strings that are not exactly the id of an Ed25519 peer.
NOT_PEER_IDS = {
    "empty": "",
    "an RSA peer": "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    "a CID": "bafzbeie5745rpv2m6tjyuugywy4d5ewrqgqqhfnf445he3omzpjbx5xqxe",
    "a multiaddress": "/p2p/" + PEER_ID,
    "trailing newline": PEER_ID + "\n",
    "trailing space": PEER_ID + " ",
    "leading space": " " + PEER_ID,
    "leading 1": "1" + PEER_ID,
    "trailing 1": PEER_ID + "1",
    "first character lost": PEER_ID[1:],
    "last character lost": PEER_ID[:-1],
    "twice": PEER_ID * 2,
    "a character outside base58": "0" + PEER_ID[1:],
    "letter l": PEER_ID[:-1] + "l",
    "not ASCII": PEER_ID[:-1] + "é",
    "a zero byte": PEER_ID + "\x00",
    "hexadecimal": ALICE.key.hex(),
    "only ones": "1" * 52,
    "one byte short": base58.b58encode(bytes.fromhex("002408011220") + ALICE.key[:-1]).decode(),
    "one byte long": base58.b58encode(bytes.fromhex("002408011220") + ALICE.key + b"\x00").decode(),
    "another multihash": base58.b58encode(bytes.fromhex("122408011220") + ALICE.key).decode(),
    "another length": base58.b58encode(bytes.fromhex("002508011220") + ALICE.key).decode(),
    "a secp256k1 key": base58.b58encode(bytes.fromhex("002408021220") + ALICE.key).decode(),
    "no protobuf": base58.b58encode(bytes.fromhex("0020") + ALICE.key).decode(),
}


@pytest.mark.parametrize("text", NOT_PEER_IDS.values(), ids=NOT_PEER_IDS)
def test_what_is_no_peer_id_is_refused(text: str) -> None:
    with pytest.raises(LocalError) as caught:
        parse_peer_id(text)
    assert caught.type is LocalError


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=60))
def test_no_text_crashes_the_parser_of_peer_ids(text: str) -> None:
    try:
        key = parse_peer_id(text)
    except LocalError:
        return
    assert format_peer_id(key) == text


def test_a_text_that_is_too_long_for_a_peer_id_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """300,000 characters take half a minute to decode; all ids have 52."""

    def refuse(text: str) -> bytes:
        raise AssertionError(f"decoding {len(text)} characters")

    monkeypatch.setattr(crypto.base58, "b58decode", refuse)
    with pytest.raises(LocalError):
        parse_peer_id("2" * 1000)


# ---- Key files

FILE = bytes.fromhex("08011240") + SEED + ALICE.key


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "peer.key"


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def assert_load_refuses(path: Path) -> str:
    with pytest.raises(LocalError) as caught:
        Identity.load(path)
    assert caught.type is LocalError
    assert str(path) in str(caught.value)
    return str(caught.value)


def assert_save_refuses(path: Path) -> str:
    with pytest.raises(LocalError) as caught:
        ALICE.save(path)
    assert caught.type is LocalError
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("umask")
def test_a_key_file_belongs_to_its_owner_alone_whatever_the_umask(path: Path) -> None:
    ALICE.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_file_is_what_libp2p_reads(path: Path) -> None:
    ALICE.save(path)
    assert path.read_bytes() == FILE
    assert len(FILE) == 68


def test_a_saved_key_is_loaded_again(path: Path) -> None:
    identity = Identity.generate()
    identity.save(path)
    loaded = Identity.load(path)
    assert loaded.key == identity.key
    assert loaded.sign(Domain.JOIN, PAYLOAD) == identity.sign(Domain.JOIN, PAYLOAD)


def test_an_owner_may_forbid_itself_to_write(path: Path) -> None:
    assert Identity.load(write(path, FILE, 0o400)).key == ALICE.key


def test_generated_identities_differ() -> None:
    assert len({Identity.generate().key for _ in range(20)}) == 20


def test_a_key_is_never_overwritten(path: Path) -> None:
    BOB.save(path)
    before = path.read_bytes()
    assert "not overwritten" in assert_save_refuses(path)
    assert path.read_bytes() == before


def test_not_even_an_empty_file_is_overwritten(path: Path) -> None:
    path.touch()
    assert_save_refuses(path)
    assert path.read_bytes() == b""


def test_a_key_is_not_written_through_a_link(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    path.symlink_to(target)
    assert_save_refuses(path)
    assert not target.exists()
    write(target, b"something else")
    assert_save_refuses(path)
    assert target.read_bytes() == b"something else"


def test_a_key_is_not_written_over_a_directory_or_into_none(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    assert_save_refuses(path)
    assert_save_refuses(tmp_path / "no such directory" / "peer.key")


@pytest.mark.parametrize("call", ["fsync", "fdopen"])
def test_a_write_that_fails_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    real = getattr(os, call)

    def fail(*arguments: object) -> None:
        if call == "fdopen":
            real(*arguments).close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(crypto.os, call, fail)
    assert "No space left" in assert_save_refuses(path)
    assert not path.exists()


@pytest.mark.parametrize("call", ["fsync", "close", "open"])
def test_a_failure_on_the_directory_leaves_no_file(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The second call is that on the directory; of os.close, the first (the file closes itself)."""
    real, calls = getattr(os, call), []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        if call == "close":
            real(*arguments)
        if len(calls) == (1 if call == "close" else 2):
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(crypto.os, call, fail)
    assert "Input/output error" in assert_save_refuses(path)
    assert not path.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, RuntimeError])
@pytest.mark.parametrize("calls_before", [0, 1], ids=["file", "directory"])
def test_an_interrupted_write_leaves_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], calls_before: int
) -> None:
    real, calls = os.fsync, []

    def interrupt(handle: int) -> None:
        if len(calls) == calls_before:
            raise error
        calls.append(handle)
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(crypto.os, "fsync", interrupt)
        with pytest.raises(error):
            ALICE.save(path)
    assert not path.exists()
    ALICE.save(path)
    assert Identity.load(path).key == ALICE.key


def test_the_file_and_then_its_directory_are_written_to_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, synced = os.fsync, []

    def note(handle: int) -> None:
        status = os.fstat(handle)
        synced.append((stat.S_IFMT(status.st_mode), status.st_ino, status.st_size if len(synced) == 0 else None))
        real(handle)

    monkeypatch.setattr(crypto.os, "fsync", note)
    ALICE.save(path)
    assert synced == [(stat.S_IFREG, path.stat().st_ino, 68), (stat.S_IFDIR, path.parent.stat().st_ino, None)]


def test_a_key_is_saved_in_the_directory_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ALICE.save(Path("peer.key"))
    assert Identity.load(Path("peer.key")).key == ALICE.key


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files where the system lists them")
def test_no_file_stays_open(path: Path, tmp_path: Path) -> None:
    before = open_files()
    ALICE.save(path)
    Identity.load(path)
    for refused in (tmp_path, write(tmp_path / "other", FILE, 0o644), write(tmp_path / "short", b"")):
        assert_load_refuses(refused)
    assert open_files() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610, 0o601, 0o620, 0o602, 0o666, 0o777, 0o444], ids=oct)
def test_a_key_file_open_to_others_is_refused(path: Path, mode: int) -> None:
    assert f"chmod 600 {path}" in assert_load_refuses(write(path, FILE, mode))


NOT_KEY_FILES = {
    "empty": b"",
    "only the prefix": FILE[:4],
    "the public half lost": FILE[:36],
    "one byte short": FILE[:-1],
    "one byte long": FILE + b"\x00",
    "a newline": FILE + b"\n",
    "the old form with the public key twice": bytes.fromhex("08011260") + SEED + ALICE.key * 2,
    "RSA": b"\x08\x00" + FILE[2:],
    "a secp256k1 key": b"\x08\x02" + FILE[2:],
    "a public key": bytes.fromhex("08011220") + ALICE.key,
    "another length": bytes.fromhex("08011241") + FILE[4:],
    "hexadecimal": FILE.hex().encode(),
    "text": b"-----BEGIN PRIVATE KEY-----\n" + bytes(40),
}


@pytest.mark.parametrize("data", NOT_KEY_FILES.values(), ids=NOT_KEY_FILES)
def test_what_is_no_key_file_is_refused(path: Path, data: bytes) -> None:
    assert "libp2p's form" in assert_load_refuses(write(path, data))


def test_a_key_file_whose_halves_do_not_match_is_refused(path: Path) -> None:
    for public in (BOB.key, bytes(32), ALICE.key[::-1], ALICE.key[:-1] + bytes([ALICE.key[-1] ^ 0x80])):
        assert "damaged" in assert_load_refuses(write(path, FILE[:36] + public))


def test_a_missing_key_file_is_named_together_with_the_command_that_makes_one(path: Path) -> None:
    assert f"phalanx keygen {path}" in assert_load_refuses(path)


def test_a_directory_is_no_key_file(path: Path) -> None:
    path.mkdir(mode=0o700)
    assert "not a regular file" in assert_load_refuses(path)


def test_a_pipe_is_refused_without_waiting_for_its_writer(path: Path) -> None:
    os.mkfifo(path, 0o600)
    assert "not a regular file" in assert_load_refuses(path)


@pytest.mark.parametrize("device", ["/dev/null", "/dev/zero"])
def test_a_device_is_no_key_file(path: Path, device: str) -> None:
    assert "not a regular file" in assert_load_refuses(Path(device))
    path.symlink_to(device)
    assert "not a regular file" in assert_load_refuses(path)


def test_a_key_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, FILE)
    monkeypatch.setattr(crypto.os, "geteuid", lambda: path.stat().st_uid + 1)
    assert "belongs to another user" in assert_load_refuses(path)


def test_what_is_refused_is_not_read(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("read")

    monkeypatch.setattr(crypto.os, "read", refuse)
    assert_load_refuses(tmp_path)
    assert_load_refuses(write(path, FILE, 0o644))
    monkeypatch.setattr(crypto.os, "geteuid", lambda: path.stat().st_uid + 1)
    assert_load_refuses(write(path, FILE))


def test_a_key_file_is_not_inherited_by_other_programs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, inheritable = os.fstat, []

    def note(handle: int) -> os.stat_result:
        inheritable.append(os.get_inheritable(handle))
        return real(handle)

    ALICE.save(path)
    monkeypatch.setattr(crypto.os, "fstat", note)
    Identity.load(path)
    assert inheritable == [False]


def test_a_link_to_ones_own_key_file_is_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(write(tmp_path / "target", FILE))
    assert Identity.load(path).key == ALICE.key


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33), bytes(64)], ids=len)
def test_a_seed_of_another_length_is_refused(seed: bytes) -> None:
    with pytest.raises(ValueError, match="32"):
        Identity(seed)


def test_an_identity_prints_as_its_peer_id_and_never_its_seed() -> None:
    for text in (repr(ALICE), str(ALICE), f"{ALICE}", repr([ALICE])):
        assert ALICE.peer_id in text
        assert SEED.hex() not in text
        assert repr(SEED)[2:-1] not in text


def test_no_error_about_a_key_file_prints_its_seed(path: Path) -> None:
    for data in (FILE[:36] + BOB.key, FILE + b"\n", b"\x08\x02" + FILE[2:]):
        text = assert_load_refuses(write(path, data))
        assert SEED.hex() not in text
        assert repr(SEED)[2:-1] not in text


def test_an_identity_cannot_be_pickled() -> None:
    with pytest.raises(TypeError):
        pickle.dumps(ALICE)
