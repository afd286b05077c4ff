"""Signed messages: they mean something in one place of one run's history, and nothing anywhere else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from examples import (
    ALICE,
    ATTEMPT,
    BOB,
    BODIES,
    ORDER,
    PHASE_OF_BODY,
    PREVIOUS,
    RUN,
    SIGNED,
    STEP,
    digest_of,
    sign,
    sign_with_nonce,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import messages as m
from phalanx.core.codec import decode_message, encode
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import compute_message_digest, is_authentic, open_body, seal
from phalanx.core.errors import Malformed
from phalanx.core.messages import BODY_OF_PHASE, DOMAIN_OF_BODY, Phase, Signed

MESSAGE = SIGNED["Signed.Commit.contributor"]
change = msgspec.structs.replace

# Every field that says where a message belongs, moved elsewhere.
MOVED: dict[str, Signed] = {
    "domain timeout": change(MESSAGE, domain=Domain.TIMEOUT),
    "domain endorsement": change(MESSAGE, domain=Domain.ENDORSEMENT),
    "domain outcome": change(MESSAGE, domain=Domain.OUTCOME),
    "domain opening": change(MESSAGE, domain=Domain.OPENING),
    "domain join": change(MESSAGE, domain=Domain.JOIN),
    "run": change(MESSAGE, run=PREVIOUS),
    "next step": change(MESSAGE, step=STEP + 1),
    "first step": change(MESSAGE, step=0),
    "next attempt": change(MESSAGE, attempt=ATTEMPT + 1),
    "step and attempt exchanged": change(MESSAGE, step=ATTEMPT, attempt=STEP),
    "phase": change(MESSAGE, phase=Phase.AGGREGATE),
    "sender": change(MESSAGE, sender=BOB.key),
    "previous": change(MESSAGE, previous=RUN),
    "run and previous exchanged": change(MESSAGE, run=PREVIOUS, previous=RUN),
    "body": change(MESSAGE, body=encode(BODIES["Commit.validator"])),
    "body with a byte more": change(MESSAGE, body=MESSAGE.body + b"\x00"),
    "body with a byte less": change(MESSAGE, body=MESSAGE.body[:-1]),
    "no body": change(MESSAGE, body=b""),
}


def resign(message: Signed) -> Signed:
    """The message as its sender would have signed it, whatever it says."""
    content = (
        message.run,
        message.step,
        message.attempt,
        message.phase,
        message.sender,
        message.previous,
        message.body,
    )
    return change(message, signature=ALICE.sign(message.domain, msgspec.msgpack.encode(content)))


def assert_malformed(message: Signed, match: str | None = None) -> None:
    with pytest.raises(Malformed, match=match) as caught:
        open_body(message)
    assert caught.type is Malformed


# ---- Authenticity


@pytest.mark.parametrize("name", SIGNED)
def test_what_was_sealed_is_authentic_and_opens(name: str) -> None:
    message = decode_message(encode(SIGNED[name]))
    assert isinstance(message, Signed)
    assert is_authentic(message)
    assert open_body(message) == BODIES[name.removeprefix("Signed.")]
    assert message.domain == DOMAIN_OF_BODY[type(open_body(message))]


@pytest.mark.parametrize("message", MOVED.values(), ids=MOVED)
def test_a_message_moved_elsewhere_is_not_authentic(message: Signed) -> None:
    assert message != MESSAGE
    assert not is_authentic(message)


def test_every_field_is_under_the_signature() -> None:
    fields = set(Signed.__struct_fields__)
    moved = {field for field in fields for other in MOVED.values() if getattr(other, field) != getattr(MESSAGE, field)}
    assert moved == fields - {"signature"}


def test_a_message_says_something_only_after_one_history() -> None:
    first = seal(ALICE, RUN, STEP, ATTEMPT, Phase.SEAL, digest_of(1), m.Seal())
    second = seal(ALICE, RUN, STEP, ATTEMPT, Phase.SEAL, digest_of(2), m.Seal())
    assert not is_authentic(change(first, signature=second.signature))
    assert compute_message_digest(first) != compute_message_digest(second)


def test_a_signature_of_somebody_else_is_not_the_senders() -> None:
    assert not is_authentic(change(MESSAGE, signature=sign(BODIES["Commit.contributor"], BOB).signature))


def test_a_signature_that_covers_the_body_alone_is_not_enough() -> None:
    for data in (MESSAGE.body, compute_message_digest(MESSAGE), encode(change(MESSAGE, signature=bytes(64)))):
        assert not is_authentic(change(MESSAGE, signature=ALICE.sign(Domain.AGREED, data)))


@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(64), bytes(65), b"\xff" * 64, MESSAGE.signature + b"\x00"])
def test_a_forged_signature_is_not_authentic(signature: bytes) -> None:
    assert not is_authentic(change(MESSAGE, signature=signature))


def test_a_signature_with_the_group_order_added_is_not_authentic() -> None:
    response = int.from_bytes(MESSAGE.signature[32:], "little") + ORDER
    assert not is_authentic(change(MESSAGE, signature=MESSAGE.signature[:32] + response.to_bytes(32, "little")))


@pytest.mark.parametrize("sender", [bytes(32), b"\x01" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f"], ids=bytes.hex)
def test_a_sender_for_whom_anybody_could_sign_is_not_authentic(sender: bytes) -> None:
    universal = b"\x01" + bytes(63)
    for step in range(50):
        assert not is_authentic(change(MESSAGE, sender=sender, step=step, signature=universal))


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.binary(max_size=100), st.sampled_from(Domain), st.sampled_from(Phase))
def test_a_body_may_be_any_bytes_as_far_as_the_signature_goes(body: bytes, domain: Domain, phase: Phase) -> None:
    assert is_authentic(resign(change(MESSAGE, body=body, domain=domain, phase=phase)))


# ---- Names of messages


def test_a_message_is_named_by_its_domain_and_content() -> None:
    content = msgspec.msgpack.encode((RUN, STEP, ATTEMPT, 1, ALICE.key, PREVIOUS, MESSAGE.body))
    assert compute_message_digest(MESSAGE) == compute_digest("message", b"agreed", content)


def test_moved_messages_have_other_names() -> None:
    names = {compute_message_digest(message) for message in [MESSAGE, *MOVED.values()]}
    assert len(names) == 1 + len(MOVED)


def test_many_signatures_on_one_content_do_not_look_like_many_messages() -> None:
    content = msgspec.msgpack.encode((RUN, STEP, ATTEMPT, 1, ALICE.key, PREVIOUS, MESSAGE.body))
    for nonce in (11, 12, 13):
        again = change(MESSAGE, signature=sign_with_nonce(bytes(range(32)), b"phalanx/1/agreed\x00" + content, nonce))
        assert again != MESSAGE
        assert is_authentic(again)
        assert compute_message_digest(again) == compute_message_digest(MESSAGE)


def test_a_slot_is_step_attempt_phase_and_sender() -> None:
    assert MESSAGE.slot == m.Slot(STEP, ATTEMPT, Phase.COMMIT, ALICE.key)


def test_a_slot_says_nothing_of_run_or_domain() -> None:
    for other in (MOVED["run"], MOVED["domain timeout"]):
        assert other.slot == MESSAGE.slot


# ---- Bodies in their places


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("name", [name for name, body in BODIES.items() if type(body) in PHASE_OF_BODY])
def test_an_agreed_body_opens_in_its_phase_and_in_no_other(name: str, phase: Phase) -> None:
    message = resign(change(SIGNED[f"Signed.{name}"], phase=phase))
    assert is_authentic(message)
    if BODY_OF_PHASE[phase] is type(BODIES[name]):
        assert open_body(message) == BODIES[name]
    else:
        assert_malformed(message, "in phase")


@pytest.mark.parametrize("domain", Domain)
@pytest.mark.parametrize("name", BODIES)
def test_a_body_opens_in_its_domain_and_in_no_other(name: str, domain: Domain) -> None:
    message = resign(change(SIGNED[f"Signed.{name}"], domain=domain))
    assert is_authentic(message)
    if DOMAIN_OF_BODY[type(BODIES[name])] is domain:
        assert open_body(message) == BODIES[name]
    else:
        assert_malformed(message, "signed as")


NOT_BODIES: dict[str, bytes] = {
    "nothing": b"",
    "nil": b"\xc0",
    "a body with a tail": MESSAGE.body + b"\x00",
    "half a body": MESSAGE.body[: len(MESSAGE.body) // 2],
    "a message": encode(m.PullManifest()),
    "an envelope": encode(SIGNED["Signed.Seal"]),
    "a body packed twice": msgspec.msgpack.encode(MESSAGE.body),
    "a report of NaN": msgspec.msgpack.encode(["report", [float("nan")], [0.0], [], []]),
    "a report of whole numbers": msgspec.msgpack.encode(["report", [1], [1], [], []]),
    "a longer form": b"\xdc\x00\x03" + MESSAGE.body[1:],
}


@pytest.mark.parametrize("body", NOT_BODIES.values(), ids=NOT_BODIES)
def test_an_authentic_message_can_still_be_malformed(body: bytes) -> None:
    """Which is rule E4's proof: the signature holds and the body is none."""
    message = resign(change(MESSAGE, body=body))
    assert is_authentic(message)
    assert_malformed(message)
    assert_malformed(decode_message(encode(m.MalformedBody(message))).message)  # type: ignore[union-attr]


# ---- Our own mistakes would be proofs against us

MISTAKES: dict[str, tuple[Phase, Any]] = {
    "a body in another phase": (Phase.COMMIT, m.Reveal(digest_of(1), digest_of(2))),
    "whole numbers for floats": (Phase.REPORT, m.Report((0,), (0,), (), ())),
    "a list without its limit": (Phase.ABORT, m.Abort(tuple(digest_of(index) for index in range(m.MAX_MEMBERS + 1)))),
    "a digest of another length": (Phase.COMMIT, m.Commit(None, b"short")),
    "text for bytes": (Phase.COMMIT, m.Commit(None, "x" * 32)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("phase", "body"), MISTAKES.values(), ids=MISTAKES)
def test_what_peers_would_refuse_is_not_signed(phase: Phase, body: Any) -> None:
    with pytest.raises((ValueError, Malformed)):
        seal(ALICE, RUN, STEP, ATTEMPT, phase, PREVIOUS, body)


PLACES = {
    "a run of another length": (b"run", STEP, ATTEMPT),
    "a negative step": (RUN, -1, ATTEMPT),
    "a step too far": (RUN, 1 << 48, ATTEMPT),
    "a negative attempt": (RUN, STEP, -1),
    "an attempt too many": (RUN, STEP, 1 << 16),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_place_that_does_not_exist_is_not_signed(place: tuple[bytes, int, int]) -> None:
    with pytest.raises((ValueError, Malformed)):
        seal(ALICE, *place, Phase.SEAL, PREVIOUS, m.Seal())


def test_a_step_beyond_any_integer_is_no_crash() -> None:
    with pytest.raises(ValueError, match="body"):
        seal(ALICE, RUN, 1 << 70, 0, Phase.SEAL, PREVIOUS, m.Seal())


def test_what_is_no_body_is_not_sealed() -> None:
    with pytest.raises(ValueError, match="body"):
        seal(ALICE, RUN, 1, 0, Phase.SEAL, PREVIOUS, m.PullManifest())
