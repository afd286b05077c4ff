"""Ideal signatures do what Ed25519 does in a simulation, and cannot be forged in it."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.core.crypto import Domain, is_usable_key
from phalanx.core.envelope import Examiner, seal
from phalanx.core.messages import Commit, Phase, Seal, Signed
from phalanx.network import ideal as ideal_module
from phalanx.network.ideal import IdealScheme, IdentityExaminer, make_signers

RUN, PREVIOUS = bytes(range(32)), bytes(range(32, 64))
BOTH = pytest.mark.parametrize("ideal", [True, False], ids=["ideal", "real"])


@BOTH
def test_a_signature_holds_for_its_key_domain_and_payload_only(ideal: bool) -> None:
    (alice, bob), verify = make_signers(2, 7, ideal)
    signature = alice.sign(Domain.AGREED, b"payload")
    assert len(alice.key) == 32
    assert len(signature) == 64
    assert verify(alice.key, Domain.AGREED, b"payload", signature)
    assert not verify(bob.key, Domain.AGREED, b"payload", signature)
    assert not verify(alice.key, Domain.TIMEOUT, b"payload", signature)
    assert not verify(alice.key, Domain.AGREED, b"payloaf", signature)
    assert not verify(alice.key, Domain.AGREED, b"payload", signature[:-1] + bytes([signature[-1] ^ 1]))
    assert not verify(alice.key, Domain.AGREED, b"payload", signature[:-1])
    assert not verify(alice.key, Domain.AGREED, b"payload", b"")
    assert not verify(alice.key[:-1], Domain.AGREED, b"payload", signature)
    assert not verify(b"", Domain.AGREED, b"payload", signature)


@BOTH
def test_the_seed_determines_the_signers(ideal: bool) -> None:
    keys = [signer.key for signer in make_signers(5, 1, ideal)[0]]
    assert keys == [signer.key for signer in make_signers(5, 1, ideal)[0]]
    assert keys[:3] == [signer.key for signer in make_signers(3, 1, ideal)[0]]
    assert len({*keys, *(signer.key for signer in make_signers(5, 2, ideal)[0])}) == 10
    assert all(is_usable_key(key) for key in keys)


@BOTH
def test_the_examiner_takes_either_kind(ideal: bool) -> None:
    (alice, bob), verify = make_signers(2, 7, ideal)
    message = seal(alice, RUN, 3, 1, 0, Phase.SEAL, PREVIOUS, Seal(bytes(32)))
    letter = Examiner(verify).examine(message)
    assert letter is not None
    assert letter.body == Seal(bytes(32))
    for forged in forge(message, bob.key):
        assert Examiner(verify).examine(forged) is None


def forge(message: Signed, other: bytes) -> list[Signed]:
    change = msgspec.structs.replace
    return [
        change(message, sender=other),
        change(message, height=4),
        change(message, run=bytes(32)),
        change(message, domain=Domain.ENDORSEMENT),
        change(message, body=msgspec.msgpack.encode(Commit(None, bytes(32), bytes(32)))),
        change(message, signature=bytes(64)),
    ]


def test_without_the_secret_no_token_is_good() -> None:
    scheme, other = IdealScheme(b"secret"), IdealScheme(b"Secret")
    signer = scheme.signer(b"alice")
    assert scheme.verify(signer.key, Domain.AGREED, b"", signer.sign(Domain.AGREED, b""))
    imitation = other.signer(b"alice")
    assert imitation.key != signer.key
    assert not scheme.verify(signer.key, Domain.AGREED, b"", imitation.sign(Domain.AGREED, b""))
    assert not scheme.verify(imitation.key, Domain.AGREED, b"", imitation.sign(Domain.AGREED, b""))


def test_nothing_prints_the_secret() -> None:
    scheme = IdealScheme(b"do not print")
    assert "do not print" not in repr(scheme) + repr(scheme.signer(b"alice"))


def test_one_kind_refuses_the_other() -> None:
    (ideal,), verify_ideal = make_signers(1, 7, True)
    (real,), verify_real = make_signers(1, 7, False)
    assert not verify_real(ideal.key, Domain.AGREED, b"", ideal.sign(Domain.AGREED, b""))
    assert not verify_ideal(real.key, Domain.AGREED, b"", real.sign(Domain.AGREED, b""))


# ---- Examining by identity

(ALICE, BOB), VERIFY = make_signers(2, 7, True)


class Counting:
    """A verifier that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, key: bytes, domain: Domain, payload: bytes, signature: bytes) -> bool:
        self.asked += 1
        return VERIFY(key, domain, payload, signature)


def make_message(height: int = 3) -> Signed:
    return seal(ALICE, RUN, height, 1, 0, Phase.SEAL, PREVIOUS, Seal(bytes(32)))


def make_no_body() -> Signed:
    """What Alice signed though it is no body."""
    message = msgspec.structs.replace(make_message(), body=b"\xc1", signature=bytes(64))
    fields = ("run", "height", "step", "attempt", "phase", "sender", "previous", "body")
    content = msgspec.msgpack.encode(tuple(getattr(message, name) for name in fields))
    return msgspec.structs.replace(message, signature=ALICE.sign(message.domain, content))


def test_an_examiner_by_identity_says_what_any_examiner_says() -> None:
    message, no_body = make_message(), make_no_body()
    copies = [msgspec.structs.replace(message), msgspec.structs.replace(no_body)]
    by_identity, by_content = IdentityExaminer(VERIFY), Examiner(VERIFY)
    for _ in range(3):
        for one in [message, no_body, *copies, *forge(message, BOB.key), *forge(no_body, BOB.key)]:
            assert by_identity.examine(one) == by_content.examine(one)
    letter = by_identity.examine(no_body)
    assert letter is not None
    assert letter.body is None


def test_what_is_known_is_not_opened_again() -> None:
    message, verify = make_message(), Counting()
    forged, copy = msgspec.structs.replace(message, height=4), msgspec.structs.replace(message)
    examiner = IdentityExaminer(verify)
    letter = examiner.examine(message)
    assert letter is not None
    assert examiner.examine(message) is examiner.examine(copy) is letter
    assert examiner.examine(forged) is None
    assert examiner.examine(forged) is None
    assert verify.asked == 2


def test_an_identity_is_never_taken_for_another() -> None:
    """Messages that are dropped leave their ids to the next; those that the examiner knows it holds."""
    examiner = IdentityExaminer(VERIFY)
    for height in range(1000):
        message = make_message(height)
        forged = msgspec.structs.replace(message, height=height + 1)
        assert examiner.examine(forged) is None
        letter = examiner.examine(message)
        assert letter is not None
        assert letter.message.height == height
        del message, forged


@pytest.mark.parametrize("limit", ["_REMEMBERED", "_REMEMBERED_BYTES"])
def test_the_examiner_by_identity_is_bounded_and_right_beyond(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(make_message().body)
    monkeypatch.setattr(ideal_module, limit, 5 if limit == "_REMEMBERED" else 5 * size)
    examiner, messages = IdentityExaminer(VERIFY), [make_message(height) for height in range(20)]
    for message in [*messages, *messages]:
        letter = examiner.examine(message)
        assert letter is not None
        assert letter.message == message
        assert len(examiner._known) <= 5
        assert examiner._known_bytes == size * len(examiner._known)
