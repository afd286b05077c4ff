"""Examples shared by the tests, the golden vectors and the fuzzer. Everything here is deterministic.

At the end stands a little arithmetic on Ed25519's curve, enough to forge what an attacker would.
"""

from __future__ import annotations

import hashlib
from typing import get_args

from phalanx.core import envelope
from phalanx.core import messages as m
from phalanx.core.crypto import Identity, compute_commitment
from phalanx.core.merkle import compute_path, compute_root, hash_part
from phalanx.core.messages import Phase, Rule, Signed, Verdict
from phalanx.core.slowpath import compute_settlement_digest

ALICE = Identity(bytes(range(32)))
BOB = Identity(bytes(range(32, 64)))
CAROL = Identity(bytes(range(64, 96)))
KEYS = tuple(sorted((ALICE.key, BOB.key, CAROL.key)))

RUN = bytes(range(100, 132))
PREVIOUS = bytes(range(132, 164))
SHARE = bytes(range(164, 196))
SALT = bytes(range(196, 228))
HEIGHT, STEP, ATTEMPT = 12340, 1234, 2
VIEW = bytes(range(40, 72))

PARTS = tuple(bytes([index]) * 48 for index in range(5))
DIGESTS = tuple(hash_part(part) for part in PARTS)
ROOT = compute_root(DIGESTS)

BODY_TYPES: tuple[type, ...] = get_args(m.Body)
MESSAGE_TYPES: tuple[type, ...] = get_args(m.Message)
NAMED_TYPES: tuple[type, ...] = (*BODY_TYPES, *MESSAGE_TYPES, m.Relay)
"""Those with their name on the wire. A relay travels in gossip alone."""


def digest_of(number: int) -> bytes:
    """32 bytes that grow with ``number``: a stand-in for any digest or key."""
    return number.to_bytes(32, "big")


# ---- Bodies, by name; the part before the dot is the type's name

SETTLEMENT = m.Settlement(
    (
        m.SlotOutcome(HEIGHT, KEYS[0], digest_of(1), False),
        m.SlotOutcome(HEIGHT, KEYS[1], None, False),
        m.SlotOutcome(HEIGHT + 1, KEYS[0], None, True),
    ),
    KEYS[1:],
    False,
)
_SHARE = compute_commitment(RUN, STEP, ATTEMPT, ALICE.key, SHARE, SALT)

BODIES: dict[str, m.Body] = {
    "Commit.contributor": m.Commit(ROOT, _SHARE, VIEW),
    "Commit.validator": m.Commit(None, _SHARE, VIEW),
    "Aggregate.result": m.Aggregate(
        digest_of(7), (), (), (m.Listed(digest_of(2), digest_of(6)), m.Listed(digest_of(3), digest_of(6)))
    ),
    "Aggregate.missing": m.Aggregate(None, (0, 3, 255), (), ()),
    "Aggregate.unopened": m.Aggregate(digest_of(7), (), ((0, 4), (3, 0), (3, 255)), ()),
    "Reveal": m.Reveal(SHARE, SALT),
    "Report.contributor": m.Report((0.5, 0.0, -1e-300, 0.0), (3.0, 0.0), (1,), ()),
    "Report.validator": m.Report(
        (), (), (2, 255), (m.Finding(KEYS[0], Verdict.INNOCENT), m.Finding(KEYS[1], Verdict.INCONCLUSIVE))
    ),
    "Confirm.full": m.Confirm(
        digest_of(1),
        (digest_of(3), digest_of(2)),
        KEYS[:2],
        KEYS[1:],
        True,
        True,
        KEYS[:1],
        m.Timing(1234, 56, 78, (0, 9), (10, 0), (0, 4)),
    ),
    "Confirm.empty": m.Confirm(digest_of(1), (), (), (), False, False, (), m.NOTHING),
    "Vote": m.Vote(tuple(m.Ballot(digest_of(i), verdict) for i, verdict in enumerate(Verdict)), ((1, 2), (2, 1))),
    "Seal": m.Seal(VIEW),
    "Abort": m.Abort(KEYS[:2], VIEW),
    "Wait": m.Wait(KEYS[:2]),
    "Timeout.first": m.Timeout(KEYS, 0, None),
    "Timeout.later": m.Timeout((), 2, digest_of(8)),
    "Endorsement": m.Endorsement(1, digest_of(9)),
    "Outcome.first": m.Outcome(1, False, compute_settlement_digest(SETTLEMENT), True, VIEW),
    "Outcome.final": m.Outcome(1, True, compute_settlement_digest(SETTLEMENT), True, VIEW),
    "Opening": m.Opening(3, DIGESTS[3], compute_path(DIGESTS, 3)),
    "Trial": m.Trial(ROOT),
    "Join.stranger": m.Join(digest_of(11), 0),
    "Join.returning": m.Join(digest_of(11), 3),
}

PHASE_OF_BODY = {body: phase for phase, body in reversed(m.BODY_OF_PHASE.items())}


def sign(body: m.Body, identity: Identity = ALICE, phase: Phase | None = None) -> Signed:
    """Signed in the phase where it belongs. Every phase has a height of its own, as in an attempt without mishaps."""
    phase = phase or PHASE_OF_BODY.get(type(body), Phase.COMMIT)
    return envelope.seal(identity, RUN, HEIGHT + phase, STEP, ATTEMPT, phase, PREVIOUS, body)


SIGNED: dict[str, Signed] = {f"Signed.{name}": sign(body) for name, body in BODIES.items()}
_COMMIT = SIGNED["Signed.Commit.contributor"]
_ENDORSEMENT = m.Endorsement(0, envelope.compute_message_digest(_COMMIT))
_SEALS = (sign(BODIES["Seal"], BOB), sign(BODIES["Seal"], CAROL))
_TIMEOUTS = (sign(BODIES["Timeout.first"], BOB), sign(BODIES["Timeout.first"], CAROL))

MESSAGES: dict[str, m.Message] = {
    **SIGNED,
    "PartChunk": m.PartChunk(STEP, ATTEMPT, ALICE.key, 3, compute_path(DIGESTS, 3), 48, 16, PARTS[3][16:]),
    "AggregateChunk": m.AggregateChunk(STEP, ATTEMPT, 4, 10, 0, b"0123456789"),
    "StateChunk": m.StateChunk(STEP, 1 << 40, 1 << 33, b"state"),
    "Gossip": m.Gossip(
        HEIGHT + 1,
        0,
        (m.Relay((_COMMIT,), (sign(_ENDORSEMENT, BOB), sign(_ENDORSEMENT, CAROL))), m.Relay(_TIMEOUTS, ())),
        (digest_of(1), b"", digest_of(2) + digest_of(3), b"", b"", digest_of(4)),
    ),
    "Settlement": SETTLEMENT,
    "PullSettlement": m.PullSettlement(compute_settlement_digest(SETTLEMENT)),
    "Alarm": m.Alarm(HEIGHT + 1, 0, _TIMEOUTS),
    "Manifest": m.Manifest(b'[run]\nname = "example"\n'),
    "Certificate": m.Certificate(_SEALS),
    "Chain": m.Chain((m.Link(b"a view", _SEALS), m.Link(b"the next", ()))),
    "PullMessages": m.PullMessages(HEIGHT, KEYS[:2]),
    "PullPart": m.PullPart(STEP, ATTEMPT, BOB.key, 1, 1 << 20),
    "PullAggregate": m.PullAggregate(STEP, ATTEMPT, 1, 1 << 20),
    "PullState": m.PullState((1 << 48) - 1, (1 << 48) - 1),
    "PullProof": m.PullProof(digest_of(12)),
    "PullChain": m.PullChain((1 << 48) - 1),
    "PullManifest": m.PullManifest(),
    "Equivocation": m.Equivocation(SIGNED["Signed.Aggregate.result"], SIGNED["Signed.Aggregate.missing"]),
    "WrongReveal": m.WrongReveal(_COMMIT, sign(m.Reveal(SALT, SHARE))),
    "WrongOpening": m.WrongOpening(_COMMIT, sign(m.Opening(3, DIGESTS[2], compute_path(DIGESTS, 3)))),
    "MalformedBody": m.MalformedBody(SIGNED["Signed.Seal"]),
    "Accusation.report": m.Accusation(
        Rule.REPORT,
        ALICE.key,
        STEP,
        ATTEMPT,
        (0, 1),
        _COMMIT,
        SIGNED["Signed.Report.contributor"],
        (0.25, 0.0, 1e-300, 0.0),
        (2.0, 0.0),
    ),
    "Accusation.gradient": m.Accusation(Rule.GRADIENT, ALICE.key, STEP, ATTEMPT, (), _COMMIT, None, (), ()),
    "Accusation.malformed": m.Accusation(Rule.MALFORMED, ALICE.key, STEP, ATTEMPT, (4,), _COMMIT, None, (), ()),
}

# ---- The longest body of every type

_MANY_KEYS = tuple(digest_of((1 << 255) + index) for index in range(m.MAX_MEMBERS))
_MANY_PAIRS = tuple((owner, part) for owner in range(248, 256) for part in range(128, 256))
_LONGEST_VERDICT = max(Verdict, key=len)

LARGEST_SETTLEMENT = m.Settlement(
    tuple(m.SlotOutcome((1 << 48) - before, key, digest_of(1), False) for before in (2, 1) for key in _MANY_KEYS),
    _MANY_KEYS,
    True,
)
LARGEST: dict[type, m.Body] = {
    m.Commit: BODIES["Commit.contributor"],
    m.Aggregate: m.Aggregate(
        None,
        tuple(range(m.MAX_MEMBERS)),
        _MANY_PAIRS,
        tuple(m.Listed(key, digest_of(0)) for key in _MANY_KEYS[: m.MAX_CASES]),
    ),
    m.Reveal: BODIES["Reveal"],
    m.Report: m.Report(
        (0.0,) * (m.MAX_MEMBERS * m.MAX_PROJECTIONS),
        (0.0,) * m.MAX_MEMBERS,
        tuple(range(m.MAX_MEMBERS)),
        tuple(m.Finding(key, _LONGEST_VERDICT) for key in _MANY_KEYS[: m.MAX_MEMBERS]),
    ),
    m.Confirm: m.Confirm(
        digest_of(0),
        _MANY_KEYS[: m.MAX_CASES],
        _MANY_KEYS[: m.MAX_CASES],
        _MANY_KEYS,
        True,
        True,
        _MANY_KEYS[: m.MAX_CASES],
        m.Timing(*((1 << 32) - 1,) * 3, *(((1 << 32) - 1,) * m.MAX_MEMBERS,) * 3),
    ),
    m.Vote: m.Vote(tuple(m.Ballot(digest_of(index), _LONGEST_VERDICT) for index in range(m.MAX_BALLOTS)), _MANY_PAIRS),
    m.Seal: BODIES["Seal"],
    m.Abort: m.Abort(_MANY_KEYS, VIEW),
    m.Wait: m.Wait(_MANY_KEYS),
    m.Timeout: m.Timeout(_MANY_KEYS, 0, None),
    m.Endorsement: m.Endorsement((1 << 32) - 1, digest_of(9)),
    m.Outcome: m.Outcome((1 << 32) - 1, True, digest_of(1), True, VIEW),
    m.Opening: m.Opening(m.MAX_MEMBERS - 1, digest_of(0), _MANY_KEYS[: m.MAX_PATH]),
    m.Trial: BODIES["Trial"],
    m.Join: m.Join(digest_of(0), (1 << 32) - 1),
}


# ---- Ed25519 by hand (RFC 8032, section 5.1), for signatures that no library would make

FIELD = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, FIELD) % FIELD
Point = tuple[int, int]
IDENTITY: Point = (0, 1)


def add(a: Point, b: Point) -> Point:
    product = _D * a[0] * b[0] * a[1] * b[1] % FIELD
    x = (a[0] * b[1] + b[0] * a[1]) * pow(1 + product, -1, FIELD) % FIELD
    y = (a[1] * b[1] + a[0] * b[0]) * pow(1 - product, -1, FIELD) % FIELD
    return x, y


def multiply(scalar: int, point: Point) -> Point:
    total = IDENTITY
    while scalar:
        if scalar & 1:
            total = add(total, point)
        point, scalar = add(point, point), scalar >> 1
    return total


def point_at(y: int) -> Point | None:
    """The point with this y and an even x, if there is one."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, FIELD) % FIELD
    x = pow(square, (FIELD + 3) // 8, FIELD)
    if x * x % FIELD != square:
        x = x * pow(2, (FIELD - 1) // 4, FIELD) % FIELD
    if x * x % FIELD != square:
        return None
    return (FIELD - x if x & 1 else x), y


def pack_point(point: Point) -> bytes:
    return (point[1] | (point[0] & 1) << 255).to_bytes(32, "little")


BASE = point_at(4 * pow(5, -1, FIELD) % FIELD) or IDENTITY


def torsion_generator() -> Point:
    """A point of order 8: what is left of any point once its part of large order is gone."""
    for y in range(2, 100):
        if (point := point_at(y)) and multiply(4, candidate := multiply(ORDER, point)) != IDENTITY:
            return candidate
    raise AssertionError


def small_order_encodings() -> list[bytes]:
    """All encodings that decoders accept of the eight points whose order divides 8, computed from the curve."""
    point, found = IDENTITY, set()
    for _ in range(8):
        x, y = point
        for value in (y, y + FIELD):
            for sign in (0, 1):
                if value < 1 << 255 and (sign == x & 1 or x == 0):
                    found.add((value | sign << 255).to_bytes(32, "little"))
        point = add(point, torsion_generator())
    assert point == IDENTITY
    return sorted(found)


def sign_with_nonce(seed: bytes, data: bytes, nonce: int, offset: Point = IDENTITY) -> bytes:
    """A signature with a nonce of one's choice, its R moved by ``offset``."""
    hashed = bytearray(hashlib.sha512(seed).digest()[:32])
    hashed[0] &= 248
    hashed[31] = hashed[31] & 127 | 64
    secret = int.from_bytes(hashed, "little")
    commitment = pack_point(add(multiply(nonce, BASE), offset))
    challenge = hashlib.sha512(commitment + pack_point(multiply(secret, BASE)) + data).digest()
    response = (nonce + int.from_bytes(challenge, "little") * secret) % ORDER
    return commitment + response.to_bytes(32, "little")
