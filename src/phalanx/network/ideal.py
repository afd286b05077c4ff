"""Ideal signatures: tokens that nobody without the scheme's secret can make, at a fraction of Ed25519's price.

A simulation spends most of its time on signatures if they are real. What it studies is what peers do with messages that
cannot be forged, and for that a keyed hash serves as well, as long as the secret stays with the simulator: everybody in
it may ask whether a token is good, nobody can make one for another key. Outside one process this is no signature.
"""

from __future__ import annotations

from collections import OrderedDict

from blake3 import blake3

from phalanx.core.crypto import KEY_SIZE, SIGNATURE_SIZE, Domain, Identity, Signer, compute_digest, verify_signature
from phalanx.core.envelope import Examiner, Letter, Verify
from phalanx.core.messages import Signed
from phalanx.core.randomness import derive_seed

_REMEMBERED = 1 << 14
_REMEMBERED_BYTES = 1 << 27


class IdealScheme:
    """Issues signers and checks what they signed."""

    __slots__ = ("_hasher", "_secret")

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._hasher = blake3(key=derive_seed(secret, "ideal tokens"))

    def signer(self, name: bytes) -> Signer:
        """The signer of this name, the same each time. Its key does not tell the name."""
        return _IdealSigner(self, derive_seed(self._secret, "ideal key", name))

    def verify(self, key: bytes, domain: Domain, payload: bytes, signature: bytes) -> bool:
        """In the place of ``crypto.verify_signature``."""
        return len(key) == KEY_SIZE and self._token(key, domain, payload) == signature

    def _token(self, key: bytes, domain: Domain, payload: bytes) -> bytes:
        hasher = self._hasher.copy()
        hasher.update(key + domain.encode() + b"\x00" + payload)  # the key's length is fixed, no domain has a zero
        return hasher.digest(length=SIGNATURE_SIZE)

    def __repr__(self) -> str:
        return "IdealScheme()"


class _IdealSigner:
    """Signs in the name of one key."""

    __slots__ = ("_scheme", "key")

    def __init__(self, scheme: IdealScheme, key: bytes) -> None:
        self._scheme = scheme
        self.key = key

    def sign(self, domain: Domain, payload: bytes) -> bytes:
        return self._scheme._token(self.key, domain, payload)

    def __repr__(self) -> str:
        return f"IdealSigner({self.key[:4].hex()})"


def make_signers(count: int, seed: int, ideal: bool) -> tuple[list[Signer], Verify]:
    """``count`` signers that the seed determines, and the function that checks what they sign."""
    signers = [_make_signer(number.to_bytes(8, "little"), seed, ideal) for number in range(count)]
    return signers, IdealScheme(_make_secret(seed)).verify if ideal else verify_signature


def make_stranger(number: int, seed: int, ideal: bool) -> Signer:
    """A signer beside those of :func:`make_signers`: anybody can make as many keys as he likes."""
    return _make_signer(b"stranger" + number.to_bytes(8, "little"), seed, ideal)


def _make_signer(name: bytes, seed: int, ideal: bool) -> Signer:
    secret = _make_secret(seed)
    return IdealScheme(secret).signer(name) if ideal else Identity(derive_seed(secret, "identity", name))


def _make_secret(seed: int) -> bytes:
    return compute_digest("signers of a simulation", str(seed).encode())


class IdentityExaminer(Examiner):
    """Answers as any examiner does, at once for a message it has in its hands: in a simulation one reaches all peers.

    A message never changes, and while it is held here no other has its ``id``.
    """

    def __init__(self, verify: Verify = verify_signature) -> None:
        super().__init__(verify)
        self._known: OrderedDict[int, tuple[Signed, Letter | None]] = OrderedDict()
        self._known_bytes = 0

    def examine(self, message: Signed) -> Letter | None:
        known = self._known.get(id(message))
        if known is not None:
            return known[1]
        letter = super().examine(message)
        self._known[id(message)] = message, letter
        self._known_bytes += len(message.body)
        while len(self._known) > _REMEMBERED or self._known_bytes > _REMEMBERED_BYTES:
            _, (oldest, _) = self._known.popitem(last=False)
            self._known_bytes -= len(oldest.body)
        return letter
