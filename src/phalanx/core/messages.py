"""Everything that peers say to one another: one frozen type for each thing the protocol says.

Three families, in this order:

* *bodies*, which travel inside :class:`Signed`. Those of the agreed broadcast fill a slot ``(height, sender)``; the
  others (timeouts, endorsements, outcomes, openings, trials, join requests) have signature domains of their own.
* *direct* messages on an authenticated link: long bytes in chunks, and requests.
* *proofs*, which anybody can check offline. A complaint (a timeout, a part named missing) is never a proof.

Fields are positional on the wire, so their order is part of the format. Every length has a limit here, and the decoder
(``codec.py``) checks it before it takes memory. What a type cannot express, ``__post_init__`` refuses.
"""

from __future__ import annotations

import itertools
import math
from enum import IntEnum, StrEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from phalanx.core.crypto import DIGEST_SIZE, KEY_SIZE, SIGNATURE_SIZE, Domain

# Chosen together: a certificate of any phase, an alarm, or a quorum of outcomes fits one frame even for the largest
# roster, and even if all of it is garbage.
MAX_MEMBERS = 256
MAX_PROJECTIONS = 8
MAX_CASES = 64
MAX_BALLOTS = 4 * MAX_MEMBERS
MAX_OPENINGS = 1024
MAX_LINKS = 64
MAX_VIEW = 7 << 18
MAX_BODY = 60 * 1024
MAX_CHUNK = 1 << 20
MAX_MANIFEST = 1 << 16
MAX_FRAME = 1 << 24
MAX_PATH = (MAX_MEMBERS - 1).bit_length()

Digest: TypeAlias = Annotated[bytes, Meta(min_length=DIGEST_SIZE, max_length=DIGEST_SIZE)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=KEY_SIZE, max_length=KEY_SIZE)]
Signature: TypeAlias = Annotated[bytes, Meta(min_length=SIGNATURE_SIZE, max_length=SIGNATURE_SIZE)]
Secret: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]
Height: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Step: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Attempt: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Round: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
Index: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
Size: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Chunk: TypeAlias = Annotated[bytes, Meta(max_length=MAX_CHUNK)]
Path: TypeAlias = Annotated[tuple[Digest, ...], Meta(max_length=MAX_PATH)]
Indices: TypeAlias = Annotated[tuple[Index, ...], Meta(max_length=MAX_MEMBERS)]
Keys: TypeAlias = Annotated[tuple[Key, ...], Meta(max_length=MAX_MEMBERS)]
Held: TypeAlias = Annotated[bytes, Meta(max_length=2 * DIGEST_SIZE)]
Pairs: TypeAlias = Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=MAX_OPENINGS)]
Milliseconds: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Phase(IntEnum):
    """The agreed broadcasts of a step, in their order."""

    COMMIT = 1
    AGGREGATE = 2
    AGGREGATE_AGAIN = 3  # after parts named missing were opened
    REVEAL = 4
    REPORT = 5
    REPORT_AGAIN = 6  # after aggregates that some lacked were fetched
    CONFIRM = 7
    VOTE = 8
    SEAL = 9
    ABORT = 10
    WAIT = 11  # at the floor: who is back of those that are suspended


class Verdict(StrEnum):
    GUILTY = "guilty"
    INNOCENT = "innocent"
    NOT_RECEIVED = "not received"
    INCONCLUSIVE = "inconclusive"


class Rule(StrEnum):
    """What is checked. The ids are used in code, tests, events and documents alike."""

    REPORT = "V1"
    SUM = "V2"
    NORMS = "V3"
    GRADIENT = "V4"
    EQUIVOCATION = "E1"
    REVEAL = "E2"
    OPENING = "E3"
    MALFORMED = "E4"
    STATE = "E5"


class _Said(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=str.lower, gc=False):
    """Fields in order, behind the name of the type; nothing more, nothing less.

    No message can hold itself, so the garbage collector need not look at the many that are kept.
    """


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def _is_increasing(values: tuple[Any, ...]) -> bool:
    return len(values) < 2 or all(a < b for a, b in itertools.pairwise(values))


# ---- Bodies of the agreed broadcast, one phase each


class Commit(_Said, frozen=True):
    """COMMIT. The Merkle root over the parts of my gradient (a validator has none); a commitment, see ``Reveal``.

    ``view`` is the digest of the view that this attempt starts from. All members' commits are its certificate.
    """

    parts: Digest | None
    share: Digest
    view: Digest


class Listed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """A probationer, and the digest of the ``Trial`` that it sent me."""

    key: Key
    message: Digest


class Aggregate(_Said, frozen=True):
    """AGGREGATE, and again. The digest of my part's aggregate, or whose parts I did not get (indices in the roster).

    ``trials`` names the commits of probationers that I have. The second time, ``unopened`` lists the pairs ``(owner,
    part)`` that should have been opened and did not reach me.
    """

    result: Digest | None
    missing: Indices
    unopened: Pairs
    trials: Annotated[tuple[Listed, ...], Meta(max_length=MAX_CASES)]

    def __post_init__(self) -> None:
        _require((self.result is None) == bool(self.missing), "either a result or missing parts")
        _require(_is_increasing(self.missing), "missing: not increasing")
        _require(_is_increasing(self.unopened), "unopened: not increasing")
        _require(_is_increasing(tuple(trial.key for trial in self.trials)), "trials: not increasing")


class Reveal(_Said, frozen=True):
    """REVEAL. The share of randomness and the salt that open the commitment of COMMIT."""

    share: Secret
    salt: Secret


class Finding(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a validator found about a contributor of the previous step."""

    target: Key
    verdict: Verdict


class Report(_Said, frozen=True):
    """REPORT, and again. For all parts ``j``: ``sums[j] = <z[j], clip(g[j] - a[j])>``, ``norms[j] = |g[j] - a[j]|``.

    With more than one ``z``, ``sums`` holds those of the first for all parts, then of the second. ``lacking`` names the
    aggregates I do not have; their entries are zero. A validator has no sums and norms, but findings.
    """

    sums: Annotated[tuple[float, ...], Meta(max_length=MAX_MEMBERS * MAX_PROJECTIONS)]
    norms: Annotated[tuple[float, ...], Meta(max_length=MAX_MEMBERS)]
    lacking: Indices
    findings: Annotated[tuple[Finding, ...], Meta(max_length=MAX_MEMBERS)]

    def __post_init__(self) -> None:
        _require(all(map(math.isfinite, self.sums)), "sums: not finite")
        _require(
            all(map(math.isfinite, self.norms)) and -1.0 not in map(math.copysign, itertools.repeat(1.0), self.norms),
            "norms: negative or not finite",
        )
        parts = len(self.norms)
        _require(
            len(self.sums) in range(0, MAX_PROJECTIONS * parts + 1, max(parts, 1)),
            "sums: not a multiple of the number of parts",
        )
        _require(_is_increasing(self.lacking), "lacking: not increasing")
        if parts:
            _require(all(index < parts for index in self.lacking), "lacking: no such part")
            _require(
                not any(any(self.sums[j::parts]) or self.norms[j] for j in self.lacking), "lacking: entries not zero"
            )
        _require(_is_increasing(tuple(finding.target for finding in self.findings)), "findings: not increasing")


class Timing(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member measured since its last CONFIRM, by places in the roster (``core/pace.py``).

    Nothing at all: three empty tuples.
    """

    step: Milliseconds
    """How long the heights took, each without the ``b_t`` slowest."""
    rounds: Milliseconds
    """How long of that AGGREGATE_AGAIN and REPORT_AGAIN took."""
    hop: Milliseconds
    """What one message takes: the median of REVEAL."""
    late: Annotated[tuple[Milliseconds, ...], Meta(max_length=MAX_MEMBERS)]
    waits: Annotated[tuple[Milliseconds, ...], Meta(max_length=MAX_MEMBERS)]
    parts: Annotated[tuple[Milliseconds, ...], Meta(max_length=MAX_MEMBERS)]
    """How much of ``late`` parts were, which nobody has to wait for others with."""

    def __post_init__(self) -> None:
        for name, numbers in (("late", self.late), ("waits", self.waits), ("parts", self.parts)):
            _require(not numbers or any(numbers), f"{name}: zeros, where nothing is written as nothing")

    def fits(self, members: int) -> bool:
        """Whether this can be said of a roster of so many."""
        return all(len(numbers) in (0, members) for numbers in (self.late, self.waits, self.parts))


NOTHING = Timing(0, 0, 0, (), (), ())


class Confirm(_Said, frozen=True):
    """CONFIRM. The digest of the new state; digests of accusations; keys that asked to join; who was late in a slow
    path since my last CONFIRM; whether I leave.

    ``blind``: what others said of my part I could not check, since its rows went with my memory. ``charged``: whom the
    last of the accusations say to have computed a wrong gradient (V4); these are heard one by one. ``timing``: how long
    I waited for whom.
    """

    state: Digest
    accusations: Annotated[tuple[Digest, ...], Meta(max_length=MAX_CASES)]
    joins: Annotated[tuple[Key, ...], Meta(max_length=MAX_CASES)]
    late: Keys
    leaving: bool
    blind: bool
    charged: Annotated[tuple[Key, ...], Meta(max_length=MAX_CASES)]
    timing: Timing

    @property
    def charges(self) -> tuple[tuple[Key, Digest], ...]:
        """The gradient charges, in the order in which they are heard: whom, and the case."""
        cases = self.accusations[len(self.accusations) - len(self.charged) :]
        return tuple(zip(self.charged, cases, strict=True))

    def __post_init__(self) -> None:
        _require(len(set(self.accusations)) == len(self.accusations), "accusations: repeated")
        _require(len(self.charged) <= len(self.accusations), "charged: more than are accused")
        _require(_is_increasing(self.joins), "joins: not increasing")
        _require(_is_increasing(self.late), "late: not increasing")


class Ballot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A vote on one accusation."""

    case: Digest
    verdict: Verdict


class Vote(_Said, frozen=True):
    """VOTE. One ballot for each open case; what should have been opened for V3 and did not reach me."""

    ballots: Annotated[tuple[Ballot, ...], Meta(max_length=MAX_BALLOTS)]
    unopened: Pairs

    def __post_init__(self) -> None:
        _require(_is_increasing(tuple(ballot.case for ballot in self.ballots)), "ballots: not increasing")
        _require(_is_increasing(self.unopened), "unopened: not increasing")


class Seal(_Said, frozen=True):
    """SEAL. The view that the sealed step leads to; the root of what it rests on stands in the envelope."""

    view: Digest


class Abort(_Said, frozen=True):
    """ABORT. Who ends this attempt, by a wrong share or an aggregate that few hold; the view without them."""

    culprits: Keys
    view: Digest

    def __post_init__(self) -> None:
        _require(_is_increasing(self.culprits), "culprits: not increasing")


class Wait(_Said, frozen=True):
    """WAIT. The suspended members that have shown me that they are there, while the floor lets nobody go."""

    joins: Keys

    def __post_init__(self) -> None:
        _require(_is_increasing(self.joins), "joins of WAIT: not increasing")


AgreedBody: TypeAlias = Commit | Aggregate | Reveal | Report | Confirm | Vote | Seal | Abort | Wait

BODY_OF_PHASE: dict[Phase, type[AgreedBody]] = {
    Phase.COMMIT: Commit,
    Phase.AGGREGATE: Aggregate,
    Phase.AGGREGATE_AGAIN: Aggregate,
    Phase.REVEAL: Reveal,
    Phase.REPORT: Report,
    Phase.REPORT_AGAIN: Report,
    Phase.CONFIRM: Confirm,
    Phase.VOTE: Vote,
    Phase.SEAL: Seal,
    Phase.ABORT: Abort,
    Phase.WAIT: Wait,
}


# ---- Other signed bodies, each with a domain of its own


class Timeout(_Said, frozen=True):
    """My deadline for the envelope's height has passed, these members' messages are missing: a complaint, no proof.

    With ``round`` above zero: the slow path's previous round brought no quorum; ``prepared`` is the digest of the
    outcome for which I hold a quorum of first votes, if any.
    """

    missing: Keys
    round: Round
    prepared: Digest | None

    def __post_init__(self) -> None:
        _require(_is_increasing(self.missing), "missing: not increasing")
        _require(bool(self.missing) == (self.round == 0), "missing: none, or in a later round")
        _require(self.round > 0 or self.prepared is None, "prepared: in the first round")


class Endorsement(_Said, frozen=True):
    """Slow path: I saw this item (``Relay``) in time. Never evidence of equivocation."""

    round: Round
    item: Digest


class SlotOutcome(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the slow path settled on for one slot: no value, one, or more than one.

    Of more than one it says no more than that: each member may have seen other ones.
    """

    height: Height
    owner: Key
    value: Digest | None
    double: bool

    def __post_init__(self) -> None:
        _require(self.value is None or not self.double, "double: with a value")


class Outcome(_Said, frozen=True):
    """A vote on how a slow path ends: on the digest of its ``Settlement``, and on the view that follows.

    Two votes settle it: a quorum of first votes lets a member cast the second, a quorum of second votes is final.
    """

    round: Round
    final: bool
    settlement: Digest
    ends: bool
    """Whether somebody goes, so that the attempt is over."""
    view: Digest


class Opening(_Said, frozen=True):
    """The digest of one of my committed parts and its Merkle path, for all to check; its bytes follow."""

    part: Index
    digest: Digest
    path: Path


class Trial(_Said, frozen=True):
    """A probationer's COMMIT: the Merkle root over the parts of its gradient. It counts if a majority lists it."""

    parts: Digest


class Join(_Said, frozen=True):
    """Somebody asks to be let in: a candidate, or a suspended member that is there again.

    ``view`` is the digest of the view whose state the sender holds. ``round`` is that of a slow path in which members
    wait for more of them, or 0.
    """

    view: Digest
    round: Round


OtherBody: TypeAlias = Timeout | Endorsement | Outcome | Opening | Trial | Join
Body: TypeAlias = AgreedBody | OtherBody

DOMAIN_OF_BODY: dict[type[Body], Domain] = {
    **dict.fromkeys(BODY_OF_PHASE.values(), Domain.AGREED),
    Timeout: Domain.TIMEOUT,
    Endorsement: Domain.ENDORSEMENT,
    Outcome: Domain.OUTCOME,
    Opening: Domain.OPENING,
    Trial: Domain.TRIAL,
    Join: Domain.JOIN,
}


class Signed(_Said, frozen=True):
    """The envelope of every body. The signature covers the domain and every other field (``envelope.py``)."""

    domain: Domain
    run: Digest
    height: Height
    """How many agreed broadcasts the run had before this one: a sender signs one message at each height, no more."""
    step: Step
    attempt: Attempt
    phase: Phase
    sender: Key
    previous: Digest
    """The root of the previous phase's messages."""
    body: Annotated[bytes, Meta(max_length=MAX_BODY)]
    """An encoded body: unpacked only after the signature was checked."""
    signature: Signature

    @property
    def slot(self) -> Slot:
        """The place in the agreed broadcast, and that alone: it says nothing of the run or of the domain.

        Who compares slots has made sure that both messages are of one run and in the domain AGREED. Elsewhere a sender
        may well sign twice at one height, such as an endorsement for each item.
        """
        return Slot(self.height, self.sender)


class Slot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """The place of an agreed message: nobody may sign two."""

    height: Height
    sender: Key


# ---- Direct messages: long bytes, and requests for what is missing


class PartChunk(_Said, frozen=True):
    """scatter: bytes of ``owner``'s part ``part`` from ``offset`` on, and the path that ties it to the commitment."""

    step: Step
    attempt: Attempt
    owner: Key
    part: Index
    path: Path
    size: Size
    offset: Size
    data: Chunk

    def __post_init__(self) -> None:
        _require(self.offset + len(self.data) <= self.size, "data: beyond the part's size")


class AggregateChunk(_Said, frozen=True):
    """gather: bytes of the aggregate of part ``part`` from ``offset`` on."""

    step: Step
    attempt: Attempt
    part: Index
    size: Size
    offset: Size
    data: Chunk

    def __post_init__(self) -> None:
        _require(self.offset + len(self.data) <= self.size, "data: beyond the aggregate's size")


class StateChunk(_Said, frozen=True):
    """Bytes of the certified state after ``step``, for a joiner."""

    step: Step
    size: Size
    offset: Size
    data: Chunk

    def __post_init__(self) -> None:
        _require(self.offset + len(self.data) <= self.size, "data: beyond the state's size")


class Relay(_Said, frozen=True):
    """An item of the slow path with the endorsements gathered for it.

    An item is one agreed message or timeout, all messages of the next height, or a quorum of first votes.
    """

    messages: Annotated[tuple[Signed, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    endorsements: Annotated[tuple[Signed, ...], Meta(max_length=MAX_MEMBERS)]


class Gossip(_Said, frozen=True):
    """Items of one round of the slow path at ``height``.

    ``held`` says what the sender holds at its start: for each member in the order of the roster the digests of its
    letters, first for this height, then for the next. Whoever holds more shows it.
    """

    height: Height
    round: Round
    items: Annotated[tuple[Relay, ...], Meta(max_length=4 * MAX_MEMBERS)]
    held: Annotated[tuple[Held, ...], Meta(max_length=2 * MAX_MEMBERS)]


class Settlement(_Said, frozen=True):
    """How a slow path ended: what fills its slots, who is out, and whether the step that was being confirmed stands."""

    slots: Annotated[tuple[SlotOutcome, ...], Meta(max_length=2 * MAX_MEMBERS)]
    out: Keys
    stands: bool

    def __post_init__(self) -> None:
        _require(_is_increasing(tuple((slot.height, slot.owner) for slot in self.slots)), "slots: not increasing")
        _require(_is_increasing(self.out), "out: not increasing")


class Alarm(_Said, frozen=True):
    """What opens the slow path at ``height``: enough timeouts, or two messages that contradict one another.

    Beside the two stands one message of that height from every member: proof that the height before it is settled.
    """

    height: Height
    round: Round
    evidence: Annotated[tuple[Signed, ...], Meta(max_length=2 * MAX_MEMBERS)]


class Manifest(_Said, frozen=True):
    """The run's manifest in its canonical bytes."""

    text: Annotated[bytes, Meta(max_length=MAX_MANIFEST)]


class Certificate(_Said, frozen=True):
    """The messages that settle a phase: all of the next phase, naming its root, or a quorum of outcomes.

    Of outcomes no more than the quorum: all of them, at their largest, would not fit a frame.
    """

    messages: Annotated[tuple[Signed, ...], Meta(max_length=MAX_MEMBERS)]


class Link(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A view in its canonical bytes, and messages of a quorum of the roster before it that name its digest."""

    view: Annotated[bytes, Meta(max_length=MAX_VIEW)]
    messages: Annotated[tuple[Signed, ...], Meta(max_length=MAX_MEMBERS)]


class Chain(_Said, frozen=True):
    """Views that follow one another, each certified by the roster of the one before."""

    links: Annotated[tuple[Link, ...], Meta(max_length=MAX_LINKS)]


class PullMessages(_Said, frozen=True):
    height: Height
    senders: Keys

    def __post_init__(self) -> None:
        _require(bool(self.senders) and _is_increasing(self.senders), "senders: none, or not increasing")


class PullPart(_Said, frozen=True):
    step: Step
    attempt: Attempt
    owner: Key
    part: Index
    offset: Size


class PullAggregate(_Said, frozen=True):
    step: Step
    attempt: Attempt
    part: Index
    offset: Size


class PullState(_Said, frozen=True):
    step: Step
    offset: Size


class PullProof(_Said, frozen=True):
    case: Digest


class PullChain(_Said, frozen=True):
    """The views that follow the one that started at this height."""

    height: Height


class PullSettlement(_Said, frozen=True):
    """What a quorum has voted for and the sender cannot tell itself."""

    settlement: Digest


class PullManifest(_Said, frozen=True):
    """The one request that a peer of another run may make."""


# ---- Proofs and accusations
#
# Each says here what ties its messages together, so that messages of unrelated places never form a proof. That is
# structure only: whether the senders signed (``envelope.is_authentic``), and whether the bodies show what is claimed,
# the verifier checks.


def _is_agreed(message: Signed, *phases: Phase) -> bool:
    return message.domain == Domain.AGREED and message.phase in phases


def _attempt_of(message: Signed) -> tuple[bytes, int, int, bytes]:
    """Whose message of which attempt it is: messages of one sender that may contradict one another share this."""
    return message.run, message.step, message.attempt, message.sender


def _labelled(message: Signed) -> tuple[int, int, Phase, bytes, bytes]:
    """What of a message's content its slot and run leave open."""
    return message.step, message.attempt, message.phase, message.previous, message.body


class Equivocation(_Said, frozen=True):
    """E1: two signed messages in one slot, of different content. A second signature on one content is no offence."""

    first: Signed
    second: Signed

    def __post_init__(self) -> None:
        first, second = self.first, self.second
        _require(first.domain == second.domain == Domain.AGREED, "equivocation: not agreed messages")
        _require(first.run == second.run and first.slot == second.slot, "equivocation: not in one slot of one run")
        _require(_labelled(first) != _labelled(second), "equivocation: the same content")


class WrongReveal(_Said, frozen=True):
    """E2: a revealed share that does not open its owner's commitment."""

    commit: Signed
    reveal: Signed

    def __post_init__(self) -> None:
        _require(_is_agreed(self.commit, Phase.COMMIT), "commit: not an agreed message of COMMIT")
        _require(_is_agreed(self.reveal, Phase.REVEAL), "reveal: not an agreed message of REVEAL")
        _require(_attempt_of(self.commit) == _attempt_of(self.reveal), "reveal: not of the commit's sender and attempt")


class WrongOpening(_Said, frozen=True):
    """E3: an opening whose path does not lead to the committed root."""

    commit: Signed
    opening: Signed

    def __post_init__(self) -> None:
        _require(_is_agreed(self.commit, Phase.COMMIT), "commit: not an agreed message of COMMIT")
        _require(self.opening.domain == Domain.OPENING, "opening: signed for another purpose")
        _require(
            _attempt_of(self.commit) == _attempt_of(self.opening), "opening: not of the commit's sender and attempt"
        )


class MalformedBody(_Said, frozen=True):
    """E4: a signed message whose body is outside the schema or its limits."""

    message: Signed


class Accusation(_Said, frozen=True):
    """V1, V4 and E4: ``accused``'s report or gradient is not what its committed bytes, or its public seed, give.

    Its digest travels in CONFIRM. Voters pull the bytes it names, recompute, and vote. V1 is about a report: it names
    the parts for which it is wrong, and what is right there (``sums``, ``norms``, in the order of a report of these
    parts alone). V4 may be about the gradient alone. E4 is about parts that hold no finite numbers of allowed size.
    """

    rule: Rule
    accused: Key
    step: Step
    attempt: Attempt
    parts: Annotated[tuple[Index, ...], Meta(max_length=MAX_MEMBERS)]
    commit: Signed
    report: Signed | None
    sums: Annotated[tuple[float, ...], Meta(max_length=MAX_MEMBERS * MAX_PROJECTIONS)]
    norms: Annotated[tuple[float, ...], Meta(max_length=MAX_MEMBERS)]

    def __post_init__(self) -> None:
        _require(self.rule in (Rule.REPORT, Rule.GRADIENT, Rule.MALFORMED), "rule: only V1, V4 and E4 are voted on")
        _require(all(map(math.isfinite, (*self.sums, *self.norms))), "sums, norms: not finite")
        _require(all(math.copysign(1, norm) > 0 for norm in self.norms), "norms: negative")
        _require(_is_increasing(self.parts), "parts: not increasing")
        _require(
            _is_agreed(self.commit, Phase.COMMIT) or self.commit.domain == Domain.TRIAL,
            "commit: not an agreed message of COMMIT, nor a trial",
        )
        _require(
            _attempt_of(self.commit)[1:] == (self.step, self.attempt, self.accused),
            "commit: not of the accused at that attempt",
        )
        if self.report is not None:
            _require(
                _is_agreed(self.report, Phase.REPORT, Phase.REPORT_AGAIN), "report: not an agreed message of REPORT"
            )
            _require(_attempt_of(self.report) == _attempt_of(self.commit), "report: not of the commit's attempt")
        if self.rule is Rule.REPORT:
            _require(self.report is not None and bool(self.parts), "V1: needs a report and at least one part")
            _require(
                len(self.norms) == len(self.parts)
                and len(self.sums) in range(len(self.parts), MAX_PROJECTIONS * len(self.parts) + 1, len(self.parts)),
                "V1: not the sums and norms of its parts",
            )
        else:
            _require(not self.sums and not self.norms, "sums, norms: only with V1")
        if self.rule is Rule.MALFORMED:
            _require(bool(self.parts), "E4: needs at least one part")


Proof: TypeAlias = Equivocation | WrongReveal | WrongOpening | MalformedBody
Direct: TypeAlias = (
    PartChunk
    | AggregateChunk
    | StateChunk
    | Gossip
    | Settlement
    | Alarm
    | Manifest
    | Certificate
    | Chain
    | PullMessages
    | PullPart
    | PullAggregate
    | PullState
    | PullProof
    | PullChain
    | PullSettlement
    | PullManifest
)
Message: TypeAlias = Signed | Direct | Proof | Accusation
"""What a frame on the wire may hold."""
