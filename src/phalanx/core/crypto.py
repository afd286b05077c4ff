"""Identities, signatures and hashes. One Ed25519 key is both the libp2p identity and the signer of messages.

Nothing is hashed or signed without a domain: a value made for one purpose never passes for another.
Hashes use BLAKE3 in its key-derivation mode, whose context string is that domain; signatures are prefixed with theirs.
"""

from __future__ import annotations

import os
import stat
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

import base58
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from phalanx.core.errors import LocalError

DIGEST_SIZE = 32
KEY_SIZE = 32
SIGNATURE_SIZE = 64

# libp2p's protobuf forms: key type Ed25519, then the bytes of the key.
_PRIVATE_PREFIX = bytes.fromhex("08011240")
_PUBLIC_PREFIX = bytes.fromhex("08011220")
# A peer id is the "identity" multihash (code 0, length 36) of the public protobuf.
_PEER_ID_PREFIX = bytes.fromhex("0024") + _PUBLIC_PREFIX

_SHORT = 4096  # bytes that are cheaper to copy than to hash in pieces
_LENGTHS = tuple(length.to_bytes(8, "little") for length in range(_SHORT + 1))
_PEER_ID_LENGTH = 52  # characters; decoding base58 takes time with the square of them

# y-coordinates of the points of small order, sign bit cleared, in every encoding that decoders accept. Under such a
# "key" one signature fits many messages, so that anybody could speak in its name.
_SMALL_ORDER = frozenset(
    bytes.fromhex(encoding)
    for encoding in (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0100000000000000000000000000000000000000000000000000000000000000",
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)


class Domain(StrEnum):
    """What a signature is for. A signature in one domain says nothing in another."""

    AGREED = "agreed"  # a message in a slot of the agreed broadcast
    TIMEOUT = "timeout"
    ENDORSEMENT = "endorsement"
    OUTCOME = "outcome"
    OPENING = "opening"
    TRIAL = "trial"
    JOIN = "join"


def compute_digest(purpose: str, *fields: bytes | bytearray | memoryview) -> bytes:
    """32 bytes that bind every field and its length to one purpose.

    A view counts as its bytes, whatever its shape; one with gaps is refused.
    """
    hasher = _get_hasher(purpose).copy()
    pieces: list[bytes] = []
    for field in fields:
        if type(field) is not bytes or (size := len(field)) > _SHORT:
            break
        pieces += (_LENGTHS[size], field)
    else:
        return hasher.update(b"".join(pieces)).digest()
    for field in fields:
        view = memoryview(field)
        hasher.update(view.nbytes.to_bytes(8, "little"))
        if view.nbytes:  # a view with a zero in its shape cannot be cast
            hasher.update(view.cast("B"))
    return hasher.digest()


@lru_cache(maxsize=1 << 13)
def recall_digest(purpose: str, *fields: bytes) -> bytes:
    """:func:`compute_digest` of short fields that are likely to be asked for again.

    A node of a commitment's tree is computed by its owner and by all who check a path through it. Where they live in
    one process, once is enough.
    """
    return compute_digest(purpose, *fields)


@cache
def _get_hasher(purpose: str) -> blake3:
    """What is copied to hash for this purpose: deriving its key takes as long as hashing something short."""
    return blake3(derive_key_context=f"phalanx 1 {purpose}")


def compute_commitment(run: bytes, step: int, attempt: int, owner: bytes, share: bytes, salt: bytes) -> bytes:
    """The commitment to a share of randomness. It names its owner: a copied one opens for nobody."""
    place = step.to_bytes(8, "little") + attempt.to_bytes(8, "little")
    return recall_digest("share commitment", run, place, owner, share, salt)


def is_usable_key(key: bytes) -> bool:
    """Whether ``key`` may stand for somebody: the right length, and not of small order.

    Whether it is a point of the curve at all shows when a signature is checked: none fits one that is not.
    """
    return len(key) == KEY_SIZE and key[:-1] + bytes([key[-1] & 0x7F]) not in _SMALL_ORDER


def verify_signature(key: bytes, domain: Domain, payload: bytes, signature: bytes) -> bool:
    if not is_usable_key(key):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed_bytes(domain, payload))
    except (InvalidSignature, ValueError):  # ValueError: the bytes are no point of the curve
        return False
    return True


def _signed_bytes(domain: Domain, payload: bytes) -> bytes:
    return b"phalanx/1/" + domain.encode() + b"\x00" + payload


def format_peer_id(key: bytes) -> str:
    """A public key as libp2p prints it: ``12D3KooW...``."""
    return base58.b58encode(_PEER_ID_PREFIX + key).decode()


def parse_peer_id(text: str) -> bytes:
    """The public key in a peer id, or :class:`LocalError`."""
    try:
        raw = base58.b58decode(text) if len(text) == _PEER_ID_LENGTH else b""
    except ValueError:
        raw = b""
    key = raw[len(_PEER_ID_PREFIX) :]
    if raw[: len(_PEER_ID_PREFIX)] != _PEER_ID_PREFIX or not is_usable_key(key) or format_peer_id(key) != text:
        raise LocalError(f"{text[:80]!r} is not the id of an Ed25519 peer; expected something like 12D3KooW...")
    return key


class Signer(Protocol):
    """Who can sign in the name of ``key``."""

    @property
    def key(self) -> bytes: ...

    def sign(self, domain: Domain, payload: bytes) -> bytes: ...


class Identity:
    """A private key. It prints as its peer id and leaves the process only through :meth:`save`."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self._seed = seed
        self.key: bytes = self._private.public_key().public_bytes_raw()
        """The public key: this peer's name in every message."""

    @classmethod
    def generate(cls) -> Identity:
        return cls(os.urandom(32))

    @property
    def peer_id(self) -> str:
        return format_peer_id(self.key)

    def sign(self, domain: Domain, payload: bytes) -> bytes:
        return self._private.sign(_signed_bytes(domain, payload))

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"

    def save(self, path: Path) -> None:
        """Write the key to a new file that only its owner may read, in the form that libp2p reads."""
        if path.is_dir():
            raise LocalError(f"{path} is a directory; name a file in it")
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise LocalError(f"{path} exists and is not overwritten: a lost key cannot be made again") from None
        except OSError as error:
            raise LocalError(f"cannot write {path}: {error.strerror}") from None
        try:
            _fill_file(handle, path, _PRIVATE_PREFIX + self._seed + self.key)
        except OSError as error:
            raise LocalError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file; refuse one that others own or can read, or that is no Ed25519 key in libp2p's form."""
        try:
            raw = _read_private(path, len(_PRIVATE_PREFIX) + 64 + 1)
        except FileNotFoundError:
            raise LocalError(f"{path} does not exist; make a key with: phalanx keygen {path}") from None
        except OSError as error:
            raise LocalError(f"cannot read {path}: {error.strerror}") from None
        if len(raw) != len(_PRIVATE_PREFIX) + 64 or not raw.startswith(_PRIVATE_PREFIX):
            raise LocalError(f"{path} is not an Ed25519 key in libp2p's form (68 bytes starting 08 01 12 40)")
        identity = cls(raw[4:36])
        if identity.key != raw[36:]:
            raise LocalError(f"{path} is damaged: its public key does not belong to its private key")
        return identity


def _fill_file(handle: int, path: Path, data: bytes) -> None:
    """Write a file that was just made, to the disk; leave none behind if that ends early, for whatever reason."""
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # The file's name is in its directory: without this, a power cut could lose it.
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except BaseException:  # also when interrupted: half a key would stand in the way of the next attempt
        path.unlink(missing_ok=True)
        raise


def _read_private(path: Path, size: int) -> bytes:
    """Up to ``size`` bytes of a regular file that is this user's alone; :class:`LocalError` if it is not."""
    # O_NONBLOCK: opening a pipe would otherwise wait for somebody who writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise LocalError(f"{path} is not a regular file; a key is kept in one")
        if status.st_uid != os.geteuid():
            raise LocalError(f"{path} belongs to another user; run as its owner, or make a key of your own")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LocalError(f"{path} can be read by others; make it yours alone with: chmod 600 {path}")
        return os.read(handle, size)
    finally:
        os.close(handle)
