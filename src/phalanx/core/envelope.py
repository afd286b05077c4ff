"""Signing a body into its slot, and checking that somebody did. No message means anything in another run, step,
attempt, phase or domain, or after another history: all of that is under the signature.

A message is identified by what was signed, not by the signature: a signer can make many signatures on one content, and
that must not look like many messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from phalanx.core.codec import decode_body, decode_message, encode
from phalanx.core.crypto import SIGNATURE_SIZE, Domain, Signer, compute_digest, verify_signature
from phalanx.core.errors import Malformed
from phalanx.core.messages import BODY_OF_PHASE, DOMAIN_OF_BODY, Body, Phase, Signed

Verify: TypeAlias = Callable[[bytes, Domain, bytes, bytes], bool]
"""Whether the key made this signature in this domain on this payload."""

_REMEMBERED = 1 << 14
_REMEMBERED_BYTES = 1 << 27


class Letter(msgspec.Struct, frozen=True, gc=False):
    """A message whose signature was checked and whose body was unpacked."""

    message: Signed
    digest: bytes
    body: Body | None
    """None if the sender signed what is no body (E4)."""


class Examiner:
    """Opens messages, each once: what was seen lately is remembered, also that it was a forgery."""

    def __init__(self, verify: Verify = verify_signature) -> None:
        self._verify = verify
        self._seen: OrderedDict[bytes, Letter | None] = OrderedDict()
        self._held = 0

    def examine(self, message: Signed) -> Letter | None:
        """The opened message, or None if its sender did not sign it."""
        content = _content(message)
        digest = compute_digest("message", message.domain.encode(), content)
        seen = digest + message.signature
        if seen not in self._seen:
            self._seen[seen] = letter = self._open(message, content, digest)
            self._held += _weigh(letter)
            while len(self._seen) > _REMEMBERED or self._held > _REMEMBERED_BYTES:
                self._held -= _weigh(self._seen.popitem(last=False)[1])
            return letter
        return self._seen[seen]

    def _open(self, message: Signed, content: bytes, digest: bytes) -> Letter | None:
        if not self._verify(message.sender, message.domain, content, message.signature):
            return None
        try:
            return Letter(message, digest, open_body(message))
        except Malformed:
            return Letter(message, digest, None)


def _weigh(letter: Letter | None) -> int:
    """What a letter holds; of a forgery nothing is kept but its name."""
    return len(letter.message.body) if letter is not None else 0


def seal(
    identity: Signer, run: bytes, height: int, step: int, attempt: int, phase: Phase, previous: bytes, body: Body
) -> Signed:
    """``body``, signed by ``identity`` for one place in one run's history.

    What a peer would refuse raises ``ValueError`` instead: signed, it would be proof against us (E4).
    """
    if type(body) not in DOMAIN_OF_BODY:
        raise ValueError(f"body: a {type(body).__name__} is none")
    domain = DOMAIN_OF_BODY[type(body)]
    unsigned = Signed(
        domain, run, height, step, attempt, phase, identity.key, previous, encode(body), bytes(SIGNATURE_SIZE)
    )
    try:
        if decode_message(encode(unsigned)) != unsigned:
            raise Malformed("changed by its encoding")
        open_body(unsigned)
    except (Malformed, OverflowError) as error:
        raise ValueError(f"body: {error}") from None
    return msgspec.structs.replace(unsigned, signature=identity.sign(domain, _content(unsigned)))


def is_authentic(message: Signed) -> bool:
    """Whether the sender signed exactly this."""
    return verify_signature(message.sender, message.domain, _content(message), message.signature)


def open_body(message: Signed) -> Body:
    """The body of an authentic message; :class:`Malformed` if it is none, or not one of its domain or phase."""
    body = decode_body(message.body)
    if DOMAIN_OF_BODY[type(body)] != message.domain:
        raise Malformed(f"a {type(body).__name__} signed as {message.domain}")
    if message.domain is Domain.AGREED and BODY_OF_PHASE[message.phase] is not type(body):
        raise Malformed(f"a {type(body).__name__} in phase {message.phase.name}")
    return body


def compute_message_digest(message: Signed) -> bytes:
    """The name of a message: a digest of its content, whatever the signature."""
    return compute_digest("message", message.domain.encode(), _content(message))


def _content(message: Signed) -> bytes:
    return msgspec.msgpack.encode(
        (
            message.run,
            message.height,
            message.step,
            message.attempt,
            message.phase,
            message.sender,
            message.previous,
            message.body,
        )
    )
