"""Signed messages: they mean something in one place of one run's history, and nothing anywhere else."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import msgspec
import pytest
from examples import (
    ALICE,
    ATTEMPT,
    BOB,
    BODIES,
    HEIGHT,
    ORDER,
    PHASE_OF_BODY,
    PREVIOUS,
    RUN,
    SIGNED,
    STEP,
    VIEW,
    digest_of,
    sign,
    sign_with_nonce,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import envelope
from phalanx.core import messages as m
from phalanx.core.codec import decode_message, encode
from phalanx.core.crypto import Domain, compute_digest, verify_signature
from phalanx.core.envelope import Examiner, Letter, compute_message_digest, is_authentic, open_body, seal
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
    "domain trial": change(MESSAGE, domain=Domain.TRIAL),
    "domain join": change(MESSAGE, domain=Domain.JOIN),
    "run": change(MESSAGE, run=PREVIOUS),
    "next height": change(MESSAGE, height=MESSAGE.height + 1),
    "height before": change(MESSAGE, height=MESSAGE.height - 1),
    "first height": change(MESSAGE, height=0),
    "height and step exchanged": change(MESSAGE, height=STEP, step=MESSAGE.height),
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
        message.height,
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
    first = seal(ALICE, RUN, HEIGHT, STEP, ATTEMPT, Phase.SEAL, digest_of(1), m.Seal(VIEW))
    second = seal(ALICE, RUN, HEIGHT, STEP, ATTEMPT, Phase.SEAL, digest_of(2), m.Seal(VIEW))
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
    content = msgspec.msgpack.encode((RUN, HEIGHT + 1, STEP, ATTEMPT, 1, ALICE.key, PREVIOUS, MESSAGE.body))
    assert compute_message_digest(MESSAGE) == compute_digest("message", b"agreed", content)


def test_moved_messages_have_other_names() -> None:
    names = {compute_message_digest(message) for message in [MESSAGE, *MOVED.values()]}
    assert len(names) == 1 + len(MOVED)


def test_many_signatures_on_one_content_do_not_look_like_many_messages() -> None:
    content = msgspec.msgpack.encode((RUN, HEIGHT + 1, STEP, ATTEMPT, 1, ALICE.key, PREVIOUS, MESSAGE.body))
    for nonce in (11, 12, 13):
        again = change(MESSAGE, signature=sign_with_nonce(bytes(range(32)), b"phalanx/1/agreed\x00" + content, nonce))
        assert again != MESSAGE
        assert is_authentic(again)
        assert compute_message_digest(again) == compute_message_digest(MESSAGE)


def test_a_slot_is_height_and_sender() -> None:
    assert MESSAGE.slot == m.Slot(HEIGHT + 1, ALICE.key)
    for name in ("next height", "height before", "first height", "sender"):
        assert MOVED[name].slot != MESSAGE.slot


@pytest.mark.parametrize("name", ["run", "domain timeout", "next step", "next attempt", "phase", "previous", "body"])
def test_a_slot_says_nothing_of_anything_else(name: str) -> None:
    assert MOVED[name].slot == MESSAGE.slot


def test_slots_are_in_the_order_of_heights_then_of_senders() -> None:
    slots = [m.Slot(height, digest_of(sender)) for height in (0, 1, 255, 256) for sender in (0, 1, 255, 256)]
    assert all(earlier < later for earlier, later in itertools.pairwise(slots))


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
    "a longer form": b"\xdc\x00\x04" + MESSAGE.body[1:],
    "a body of the format before": msgspec.msgpack.encode(["commit", None, digest_of(1)]),
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
    "a list without its limit": (
        Phase.ABORT,
        m.Abort(tuple(digest_of(index) for index in range(m.MAX_MEMBERS + 1)), VIEW),
    ),
    "a digest of another length": (Phase.COMMIT, m.Commit(None, b"short", VIEW)),
    "a view of another length": (Phase.SEAL, m.Seal(b"short")),
    "text for bytes": (Phase.COMMIT, m.Commit(None, "x" * 32, VIEW)),  # type: ignore[arg-type]
    "three in a pair": (Phase.VOTE, m.Vote((), ((1, 2, 3),))),  # type: ignore[arg-type]
    "a pair of nobody": (Phase.VOTE, m.Vote((), ((0, m.MAX_MEMBERS),))),
    "a round too many": (Phase.COMMIT, m.Endorsement(1 << 32, digest_of(1))),
}


@pytest.mark.parametrize(("phase", "body"), MISTAKES.values(), ids=MISTAKES)
def test_what_peers_would_refuse_is_not_signed(phase: Phase, body: Any) -> None:
    with pytest.raises((ValueError, Malformed)):
        seal(ALICE, RUN, HEIGHT, STEP, ATTEMPT, phase, PREVIOUS, body)


PLACES = {
    "a run of another length": (b"run", HEIGHT, STEP, ATTEMPT),
    "a negative height": (RUN, -1, STEP, ATTEMPT),
    "a height too far": (RUN, 1 << 48, STEP, ATTEMPT),
    "a negative step": (RUN, HEIGHT, -1, ATTEMPT),
    "a step too far": (RUN, HEIGHT, 1 << 48, ATTEMPT),
    "a negative attempt": (RUN, HEIGHT, STEP, -1),
    "an attempt too many": (RUN, HEIGHT, STEP, 1 << 48),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_place_that_does_not_exist_is_not_signed(place: tuple[bytes, int, int, int]) -> None:
    with pytest.raises((ValueError, Malformed)):
        seal(ALICE, *place, Phase.SEAL, PREVIOUS, m.Seal(VIEW))


@pytest.mark.parametrize("place", [(1 << 70, STEP), (HEIGHT, 1 << 70)], ids=["height", "step"])
def test_a_place_beyond_any_integer_is_no_crash(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="body"):
        seal(ALICE, RUN, *place, 0, Phase.SEAL, PREVIOUS, m.Seal(VIEW))


@pytest.mark.parametrize("thing", [m.PullManifest(), m.Relay((MESSAGE,), ()), MESSAGE], ids=lambda x: type(x).__name__)
def test_what_is_no_body_is_not_sealed(thing: Any) -> None:
    with pytest.raises(ValueError, match="body"):
        seal(ALICE, RUN, HEIGHT, STEP, ATTEMPT, Phase.SEAL, PREVIOUS, thing)


class Delegate:
    """Signs for Alice and counts."""

    def __init__(self) -> None:
        self.signed = 0

    @property
    def key(self) -> bytes:
        return ALICE.key

    def sign(self, domain: Domain, payload: bytes) -> bytes:
        self.signed += 1
        return ALICE.sign(domain, payload)


def test_any_signer_will_do() -> None:
    assert seal(Delegate(), RUN, HEIGHT + 1, STEP, ATTEMPT, Phase.COMMIT, PREVIOUS, open_body(MESSAGE)) == MESSAGE


@pytest.mark.parametrize(("phase", "body"), MISTAKES.values(), ids=MISTAKES)
def test_a_signer_is_not_asked_to_sign_what_peers_would_refuse(phase: Phase, body: Any) -> None:
    """It may remember what it signed, and would then refuse the right message at this height."""
    signer = Delegate()
    with pytest.raises((ValueError, Malformed)):
        seal(signer, RUN, HEIGHT, STEP, ATTEMPT, phase, PREVIOUS, body)
    assert signer.signed == 0


# ---- Opening messages once


class Verifier:
    """Checks signatures, and lists what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, Domain, bytes, bytes]] = []

    def __call__(self, key: bytes, domain: Domain, payload: bytes, signature: bytes) -> bool:
        self.asked.append((key, domain, payload, signature))
        return verify_signature(key, domain, payload, signature)


@pytest.mark.parametrize("name", SIGNED)
def test_an_authentic_message_is_opened(name: str) -> None:
    message = decode_message(encode(SIGNED[name]))
    assert isinstance(message, Signed)
    body = BODIES[name.removeprefix("Signed.")]
    assert Examiner().examine(message) == Letter(message, compute_message_digest(message), body)


FORGERIES: dict[str, Signed] = {
    **MOVED,
    "signature of another": change(MESSAGE, signature=sign(BODIES["Commit.contributor"], BOB).signature),
    "signature of nobody": change(MESSAGE, signature=bytes(64)),
    "signature too short": change(MESSAGE, signature=MESSAGE.signature[:63]),
    "signature with a bit flipped": change(
        MESSAGE, signature=MESSAGE.signature[:-1] + bytes([MESSAGE.signature[-1] ^ 1])
    ),
    "sender for whom anybody could sign": change(MESSAGE, sender=bytes(32), signature=b"\x01" + bytes(63)),
}


@pytest.mark.parametrize("message", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_nothing(message: Signed) -> None:
    assert Examiner().examine(message) is None


@pytest.mark.parametrize("message", FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_stays_nothing_beside_what_is_authentic(message: Signed) -> None:
    examiner = Examiner()
    assert examiner.examine(MESSAGE) is not None
    assert examiner.examine(message) is None
    assert examiner.examine(MESSAGE) == Letter(MESSAGE, compute_message_digest(MESSAGE), open_body(MESSAGE))
    assert examiner.examine(message) is None


@pytest.mark.parametrize("body", NOT_BODIES.values(), ids=NOT_BODIES)
def test_a_signed_message_without_a_body_is_a_letter_without_one(body: bytes) -> None:
    """Its sender answers for it (E4), so that it must not look like a forgery."""
    message = resign(change(MESSAGE, body=body))
    assert Examiner().examine(message) == Letter(message, compute_message_digest(message), None)


def test_a_body_out_of_its_phase_or_domain_is_a_letter_without_one() -> None:
    for moved in (MOVED["phase"], MOVED["domain trial"], change(SIGNED["Signed.Trial"], domain=Domain.AGREED)):
        message = resign(moved)
        assert Examiner().examine(message) == Letter(message, compute_message_digest(message), None)


def test_a_forgery_without_a_body_is_nothing() -> None:
    assert Examiner().examine(change(MESSAGE, body=b"\xc1")) is None


def test_a_message_is_checked_once() -> None:
    verifier = Verifier()
    examiner = Examiner(verifier)
    again = decode_message(encode(MESSAGE))
    assert isinstance(again, Signed)
    letter = examiner.examine(MESSAGE)
    assert all(examiner.examine(message) is letter for message in (MESSAGE, again, MESSAGE))
    assert len(verifier.asked) == 1


def test_a_forgery_and_a_message_without_a_body_are_checked_once() -> None:
    verifier = Verifier()
    examiner = Examiner(verifier)
    forged, empty = MOVED["body"], resign(MOVED["no body"])
    for _ in range(3):
        assert examiner.examine(forged) is None
        assert examiner.examine(empty) == Letter(empty, compute_message_digest(empty), None)
    assert len(verifier.asked) == 2


def test_what_is_checked_is_the_senders_signature_on_the_content() -> None:
    verifier = Verifier()
    Examiner(verifier).examine(MESSAGE)
    content = msgspec.msgpack.encode((RUN, HEIGHT + 1, STEP, ATTEMPT, 1, ALICE.key, PREVIOUS, MESSAGE.body))
    assert verifier.asked == [(ALICE.key, Domain.AGREED, content, MESSAGE.signature)]


def test_two_signatures_on_one_content_are_two_letters_of_one_name() -> None:
    content = msgspec.msgpack.encode((RUN, HEIGHT + 1, STEP, ATTEMPT, 1, ALICE.key, PREVIOUS, MESSAGE.body))
    again = change(MESSAGE, signature=sign_with_nonce(bytes(range(32)), b"phalanx/1/agreed\x00" + content, 11))
    examiner = Examiner()
    first, second = examiner.examine(MESSAGE), examiner.examine(again)
    assert first is not None
    assert second is not None
    assert first.message != second.message
    assert (first.digest, first.body) == (second.digest, second.body)


def test_another_examiner_remembers_nothing_of_this_one() -> None:
    believing, doubting = Examiner(lambda *_: True), Examiner(lambda *_: False)
    assert believing.examine(MESSAGE) is not None
    assert doubting.examine(MESSAGE) is None
    assert believing.examine(MOVED["body"]) is not None


def test_what_was_seen_long_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "_REMEMBERED", 3)
    verifier = Verifier()
    examiner = Examiner(verifier)
    messages = [SIGNED["Signed.Seal"], MOVED["body"], resign(MOVED["no body"]), MESSAGE]
    letters = [examiner.examine(message) for message in messages]
    assert [examiner.examine(message) for message in messages[1:]] == letters[1:]
    assert len(verifier.asked) == 4
    assert examiner.examine(messages[0]) == letters[0]
    assert len(verifier.asked) == 5


@pytest.mark.parametrize("answer", [True, False], ids=["authentic", "forged"])
def test_an_examiner_takes_no_memory_for_ever(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelope, "_REMEMBERED", 500)
    examiner, held = Examiner(lambda *_: answer), []
    tracemalloc.start()
    try:
        for start in range(0, 5000, 1000):
            for height in range(start, start + 1000):
                examiner.examine(change(MESSAGE, height=height))
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < 1.1 * held[0]


def test_an_examiner_remembers_the_messages_of_the_largest_roster_for_some_heights() -> None:
    assert envelope._REMEMBERED >= 16 * m.MAX_MEMBERS


def test_an_examiner_does_not_keep_what_is_forged() -> None:
    examiner = Examiner()
    tracemalloc.start()
    try:
        for height in range(100):
            assert examiner.examine(change(MESSAGE, height=height, body=bytes(m.MAX_BODY))) is None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10 * m.MAX_BODY
