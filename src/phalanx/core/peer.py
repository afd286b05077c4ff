"""One peer: what it holds, and what it does with a message, whatever it is waiting for at the time.

Nothing here decides anything. Messages are checked, kept within limits, and given to whoever asks for them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from torch import Tensor

from phalanx.core import messages as m
from phalanx.core.assembly import Assembly, Rows
from phalanx.core.codec import encode
from phalanx.core.config import KEPT_STEPS, Config
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Broadcast, Effect, Finished, Leave, ReadState, Receive, Send, Sign, Story
from phalanx.core.envelope import Examiner, Letter
from phalanx.core.membership import (
    View,
    compute_duties,
    compute_quorum,
    compute_roster_digest,
    decode_view,
    encode_view,
    is_another_electorate,
)
from phalanx.core.merkle import hash_part, verify_path
from phalanx.core.messages import MAX_CHUNK, Message, Phase, Signed
from phalanx.core.partition import compute_part_sizes, join_parts
from phalanx.core.room import make_bytes
from phalanx.core.slowpath import Resolution, is_valid_alarm
from phalanx.core.transcript import Page, Transcript, Values, compute_values_root
from phalanx.core.wire import WIRE_TYPES, Piece, decode_tensor, view_bytes

_PAST_HEIGHTS = 64
_FUTURE_HEIGHTS = 4
_MOST_CASES = 1024
_MOST_JOINS = 256
_TICK = 1e-6
"""Seconds beyond a deadline, so that rounding never makes it look as if it had not come."""
_ASKED_AT_ONCE = 3
_ROUNDS = 8
_MOST_TRIALS = 4
_GOSSIP_BYTES = 1 << 22
_GOSSIP_BYTES_EACH = 1 << 18
"""What is kept of one member's gossip, and more for each member: four messages of each, and what comes with them."""
_SIGNED_BYTES = 400  # of a message beside its body
"""Of one member in one round of a slow path, before the message that goes beyond it."""
_STATE_BYTES = 64
"""No state has more bytes than this for each coordinate: parameters, and what optimizers keep of them."""
_ANSWERS = 64
"""Messages of one kind from one peer that are taken up within ``delta``."""


Follow: TypeAlias = "Callable[[Peer, Transcript, int, Resolution], View | None]"
"""Which view follows when a slow path at a height of an attempt ended so; None if too little is here to say."""


class Lost(Exception):  # noqa: N818
    """The attempt is over: the run goes on from this view.

    ``epoch`` is the attempt whose slow path led there, if this peer took part in it.
    """

    def __init__(self, view: View, messages: tuple[Signed, ...], epoch: Transcript | None = None) -> None:
        super().__init__()
        self.view, self.messages, self.epoch = view, messages, epoch

    @property
    def is_final(self) -> bool:
        """Whether the view can no longer be replaced: one that is only sealed may be, by a slow path."""
        return self.messages[0].domain is Domain.OUTCOME or find_phase(self.messages) is Phase.COMMIT


@dataclass(slots=True)
class Own:
    """What this peer made itself in one step: kept as long as somebody may want to check it."""

    seed: bytes
    """Of the batch whose gradient this is. Whatever else is here was made of that gradient."""
    tensors: dict[int, list[Tensor]] = field(default_factory=dict)
    """All parts, by attempt, before they are encoded: together they are the gradient, however it was cut."""
    parts: dict[int, list[Piece]] = field(default_factory=dict)
    """Their wire bytes: of long parts a view."""
    paths: dict[int, list[tuple[bytes, ...]]] = field(default_factory=dict)
    roots: dict[int, bytes] = field(default_factory=dict)


class Pile(list[m.Gossip]):
    """What one member sent in one round of a slow path, and about how many bytes that is."""

    weight = 0


@dataclass(slots=True)
class StateFetch:
    """A state that comes in chunks from one server."""

    step: int
    server: bytes
    size: int | None = None
    data: bytearray = field(default_factory=bytearray)


class Peer:
    """The memory of one peer."""

    def __init__(self, config: Config, key: bytes, examiner: Examiner, view: View, follow: Follow) -> None:
        self.follow = follow
        self.join: Callable[[Peer], Story] | None = None
        """Takes part in a slow path that others opened, whatever this peer was waiting for."""
        self.store: Callable[[Piece], Piece] | None = None
        """Where models are large: puts long bytes away, to where they take no memory until somebody reads them."""
        self.paused = 0.0
        """Seconds spent in slow paths: no deadline runs meanwhile."""
        self.time = 0.0
        """The clock of the fast path: it stands still in slow paths."""
        self.config, self.key, self.run, self.examiner = config, key, config.run, examiner
        self.wire = WIRE_TYPES[config.wire]
        self.now = 0.0
        self.links: list[tuple[View, tuple[Signed, ...]]] = []
        """The views at which the roster changed, and who signed them."""
        self.pages: dict[int, Page] = {}
        self.transcripts: dict[tuple[int, int], Transcript] = {}
        self.own: dict[int, Own] = {}
        self.parts: dict[tuple[int, int, bytes, int], tuple[Piece, m.Path]] = {}
        self.arrivals = 0
        """Grows with every chunk that comes, so that nobody looks again for what cannot be here yet."""
        self._turn = sum(key)  # peers that ask at the same time should not all ask the same members
        self.ahead: dict[bytes, int] = {}
        """Up to which height each member has shown that it holds everything."""
        self.foremost = -1
        """The highest of these."""
        self.verified: set[tuple[Any, ...]] = set()
        """Which of the parts and aggregates held are known to be what they should be."""
        self.readings: dict[tuple[int, int, int], Tensor | None] = {}
        self.rows: tuple[Tensor, list[bool]] | None = None
        """What the aggregates, and in this attempt the parts that I aggregate, say: read once."""
        self.aggregates: dict[tuple[int, int, int], Piece] = {}
        self.state: StateFetch | None = None
        self.openings: dict[tuple[int, int, bytes, int], Letter] = {}
        self.trials: dict[int, dict[bytes, dict[bytes, Letter]]] = {}
        """Commits of probationers by height, sender and digest."""
        self.timeouts: dict[tuple[int, int], dict[bytes, Letter]] = {}
        self.votes: dict[tuple[int, int, bool], dict[bytes, Letter]] = {}
        self.finals: dict[int, tuple[Signed, ...]] = {}
        """Final votes of slow paths that are settled."""
        self.alarms: dict[int, m.Alarm] = {}
        """Valid openings of slow paths that this peer has not joined yet."""
        self.gossip: dict[tuple[int, int], dict[bytes, Pile]] = {}
        self.cases: dict[bytes, m.Accusation | m.Proof] = {}
        self.proofs: dict[bytes, bytes] = {}
        """Accused key to the digest of a proof against it that nobody has acted on yet."""
        self.charges: list[m.Accusation] = []
        """What I found about those who left, for my next CONFIRM."""
        self.lacking: set[bytes] = set()
        """Cases that a slow path cannot end without."""
        self.joins: dict[bytes, Letter] = {}
        self.asked: set[tuple[Any, ...]] = set()
        self.answers: dict[tuple[bytes, type], tuple[float, int]] = {}
        self.partial: dict[tuple[Any, ...], Assembly] = {}
        self.waits: dict[tuple[int, int, bytes], float] = {}
        """Until when I wait for the bytes behind somebody's commit, in this round of checks."""
        self.bearers: dict[tuple[int, int, bytes], set[bytes]] = {}
        """Who accuses it, in this vote."""
        self.answered_alarms: set[tuple[int, int]] = set()
        self.gradients: dict[tuple[int, bytes], Tensor] = {}
        """What was computed lately for others, by step and seed."""
        self.finished: dict[int, Any] = {}
        self.adopted: Lost | None = None
        self.astray = False
        """Most members start from another view at this height than I do."""
        self.seeking: tuple[int, bytes, tuple[bytes, ...]] | None = None
        """A height whose messages this peer lacks, the root that they have, and whose they are."""
        self.sought: Values | None = None
        self.base = view
        """The last view that all members are known to have started from: certificates are walked from here."""
        self.leaving = False
        self.revived = False
        """Whether I was here before, and signed what I may no longer be able to show."""
        self.late: set[bytes] = set()
        """Who earned a strike in a slow path that I have not told of in a CONFIRM yet."""
        self.reluctant: set[bytes] = set()
        """Members whose aggregates I had to ask others for while I was on trial."""
        self.failures: dict[bytes, int] = {}
        """How often a server of states did not come through."""
        self.enter(view)

    # ---- Where we are

    def enter(self, view: View, *, riding: bool = False) -> None:
        """Start from a view. ``riding``: what led to it is complete, but settled only by the attempt's COMMIT."""
        self.view = view
        self.riding = riding
        self.duties = compute_duties(self.config, view)
        self.level = view.height - 1
        self.root = view.previous
        self.entered = self.time
        self.grace = self.time
        self.member = self.key in view.roster
        self.contributes = self.key in self.duties.contributors
        self.on_trial = any(candidate.key == self.key for candidate in view.candidates)
        """Members send me everything unasked, and I show them what I can do."""
        self.index = view.roster.index(self.key) if self.member else -1
        self.sizes = compute_part_sizes(self.config.size, len(view.roster))
        self.transcript = Transcript(view, self.duties)
        self.transcripts[view.step, view.attempt] = self.transcript
        here = {*view.roster, *(c.key for c in view.candidates)}
        self.circle = {*here, *(k for a in view.attempts for k in a.roster)}
        self.audience = tuple(key for key in (*view.roster, *(c.key for c in view.candidates)) if key != self.key)
        self.others = tuple(key for key in view.roster if key != self.key)
        self.banned = frozenset(view.banned)
        """Whose messages are not even looked at: answering them would let a cheat spend our bandwidth."""
        self.answers.clear()
        self.rows = None
        self.bench: Rows | None = None
        """Where long rows of the part that I aggregate are put as they come."""
        self.applied = False
        """Whether this attempt's update was."""
        self.ahead = {key: height for key, height in self.ahead.items() if key in view.roster}
        self.foremost = max(self.ahead.values(), default=-1)
        self.astray = False
        self.answered_alarms.clear()
        _drop(self.joins, [key for key in self.joins if key in here or key in view.banned])
        self.adopted = None
        self.finished.clear()
        self._forget()

    def _forget(self) -> None:
        step, height = self.view.step, self.view.height
        table: dict[Any, Any]
        old = step - KEPT_STEPS
        oldest = height - _PAST_HEIGHTS
        self.verified = {place for place in self.verified if place[0] >= old}
        for table in (self.parts, self.aggregates, self.openings, self.transcripts, self.gradients, self.readings):
            _drop(table, [place for place in table if place[0] < old])
        _drop(self.own, [place for place in self.own if place < old])
        for table in (self.pages, self.trials, self.alarms, self.finals):
            _drop(table, [place for place in table if place < oldest])
        for table in (self.timeouts, self.votes, self.gossip):
            _drop(table, [place for place in table if place[0] < oldest])
        for accused in [accused for accused in self.proofs if accused in self.view.banned]:
            del self.proofs[accused]
        if len(self.cases) > _MOST_CASES:
            needed = {*self.proofs.values(), *map(compute_case_digest, self.charges)}
            _drop(
                self.cases, [digest for digest in self.cases if digest not in needed][: len(self.cases) - _MOST_CASES]
            )
        self.asked = {request for request in self.asked if request[1] >= old}
        self.partial = {place: assembly for place, assembly in self.partial.items() if place[1] >= old}

    def page(self, height: int) -> Page:
        page = self.pages.get(height)
        if page is None:
            page = self.pages[height] = Page()
        return page

    def is_on_trial_in(self, step: int) -> bool:
        """Whether I show what I can do in this step, or the next.

        Gradients may take nearly all the time of a step: who came too late in the step before would do so for ever.
        It lets one pass, follows without computing, and is in time for the one after.
        """
        own, before = self.own.get(step - 1), [t for t in self.transcripts.values() if t.view.step == step - 1]
        last = max(before, key=lambda t: t.view.height, default=None)
        missed = own is not None and last is not None and last.view.attempt in own.roots and self.key not in last.served
        return self.on_trial and not missed

    def choose_some(self) -> tuple[bytes, ...]:
        """A few members to ask for something that most of them have, others each time."""
        start = self._turn % len(self.others) if self.others else 0
        self._turn += _ASKED_AT_ONCE
        return (self.others[start:] + self.others[:start])[:_ASKED_AT_ONCE]

    def find_epoch(self, height: int) -> Transcript | None:
        """The attempt that a height belongs to."""
        known = [t for t in self.transcripts.values() if t.view.height <= height]
        return max(known, key=lambda t: t.view.height) if known else None

    # ---- Receiving

    def pause(self, seconds: float) -> None:
        """Leave a slow path: what it took does not count."""
        self.paused += seconds
        self.time = self.now - self.paused

    def listen(self, until: float) -> Story:
        """Wait for one message until ``until`` on :attr:`time`; join a slow path if one has opened."""
        return self.receive(until + self.paused + _TICK)

    def receive(self, until: float) -> Story:
        """Wait for one message and take care of it; :class:`Lost` when one shows that the run went on elsewhere."""
        delivery = yield Receive(until)
        self.now = now = delivery.now
        self.time = now - self.paused
        message = delivery.message
        if message is not None and delivery.sender not in self.banned:
            if type(message) is Signed:
                replies = self.take(message, delivery.sender)
                if replies:
                    yield from replies
            elif type(message) is Finished:
                self.finished[message.ticket] = message.value
            elif type(message) is Leave:
                self.leaving = True
            else:
                handler = _HANDLERS.get(type(message))
                if handler is not None:
                    yield from handler(self, delivery.sender, message)
            if self.adopted is not None:
                raise self.adopted
            if (self.alarms or self.timeouts) and self.join is not None:
                yield from self.join(self)

    def take(self, message: Signed, sender: bytes | None = None) -> Iterable[Any]:
        """Keep a signed message if it can be of use. Nothing is unpacked before its signature was checked."""
        if message.run != self.run:
            return ()
        domain, height = message.domain, message.height
        if domain is Domain.JOIN:
            return self._take_join(message, sender)
        if message.sender not in self.circle:
            return ()
        start = self.view.height
        if height < start - _PAST_HEIGHTS or (height > self.level + _FUTURE_HEIGHTS and height > start):
            return ()
        letter = self.examiner.examine(message)
        if letter is None:
            return ()
        if domain is Domain.AGREED:
            page = self.pages.get(height) or self.page(height)
            if page.add(letter):
                self._place(message.sender, height - 1)
                if letter.body is None and message.sender not in self.view.banned:
                    self.keep_proof(message.sender, m.MalformedBody(message))
                if message.sender in page.seconds:
                    return self._take_equivocation(page, message.sender)
        elif domain is Domain.TIMEOUT and isinstance(letter.body, m.Timeout):
            if letter.body.round > 0 and height in self.finals:  # it was settled: whoever missed that can see it
                return (Send(message.sender, m.Certificate(self.finals[height])),)
            self._drop_rounds(self.timeouts, height, message.sender, letter.body.round)
            self.timeouts.setdefault((height, letter.body.round), {}).setdefault(message.sender, letter)
        elif domain is Domain.OUTCOME and isinstance(letter.body, m.Outcome):
            self._drop_rounds(self.votes, height, message.sender, letter.body.round)
            self.votes.setdefault((height, letter.body.round, letter.body.final), {}).setdefault(message.sender, letter)
        elif domain is Domain.TRIAL and isinstance(letter.body, m.Trial):
            held = self.trials.setdefault(height, {}).setdefault(message.sender, {})
            if len(held) < _MOST_TRIALS or ("trial", self.view.step, letter.digest) in self.asked:
                held[letter.digest] = letter
        elif domain is Domain.OPENING and isinstance(letter.body, m.Opening) and self._is_current(message):
            place = (message.step, message.attempt, message.sender, letter.body.part)
            self.openings.setdefault(place, letter)
        return ()

    def recall(self, messages: Iterable[Message]) -> None:
        """Know again what was kept on disk, however far it is ahead of the view."""
        for message in messages:
            if isinstance(message, m.Accusation | m.Proof):
                self.cases[compute_case_digest(message)] = message
            if not isinstance(message, Signed):
                continue
            letter = self.examiner.examine(message) if message.run == self.run else None
            if letter is not None and message.domain is Domain.AGREED:
                self.page(message.height).add(letter)
            elif letter is not None and isinstance(letter.body, m.Outcome):
                ballot = (message.height, letter.body.round, letter.body.final)
                self.votes.setdefault(ballot, {})[message.sender] = letter

    def _place(self, key: bytes, height: int) -> None:
        """Note that a member has done what it does only when it holds every message up to ``height``."""
        if height > self.ahead.get(key, -1):
            self.ahead[key] = height
            if height > self.foremost:
                self.foremost = height

    def _is_current(self, message: Signed) -> bool:
        return (message.step, message.attempt) == (self.view.step, self.view.attempt)

    @staticmethod
    def _drop_rounds(table: dict[Any, dict[bytes, Letter]], height: int, sender: bytes, round_: int) -> None:
        """Of the rounds of a slow path, a sender has the last few to fill, and no more."""
        rounds = sorted(place[1] for place, letters in table.items() if place[0] == height and sender in letters)
        for place in list(table):
            if place[0] == height and rounds and place[1] < max(rounds[-1], round_) - _ROUNDS:
                table[place].pop(sender, None)
                if not table[place]:
                    del table[place]

    def _take_equivocation(self, page: Page, key: bytes) -> Iterable[Any]:
        if key in self.proofs or key in self.view.banned:
            return ()
        first, second = page.letters[key].message, page.seconds[key].message
        self.keep_proof(key, m.Equivocation(first, second))
        return (Broadcast(self.others, second), Broadcast(self.others, first))

    def keep_proof(self, accused: bytes, proof: m.Proof) -> None:
        digest = compute_case_digest(proof)
        self.cases[digest] = proof
        self.proofs.setdefault(accused, digest)

    def _take_join(self, message: Signed, sender: bytes | None) -> Iterable[Any]:
        key = message.sender
        view = self.view
        if key in self.joins or key in view.roster or key in view.banned:
            return ()
        letter = self.examiner.examine(message)
        if letter is None or letter.body is None:
            return ()
        self.joins[key] = letter
        if len(self.joins) > _MOST_JOINS:  # chance decides, so that nobody can crowd others out
            worst = max(self.joins, key=lambda key: compute_digest("join", view.randomness, key))
            del self.joins[worst]
            if worst == key:
                return ()
        return (Broadcast(self.others, message),)  # whoever knows one member is known to all

    # ---- Long bytes

    def store_part(self, sender: bytes, chunk: m.PartChunk) -> None:
        if sender not in self.circle:
            return
        self.arrivals += 1
        place = (chunk.step, chunk.attempt, chunk.owner, chunk.part)
        here = sender == chunk.owner and (chunk.step, chunk.attempt) == (self.view.step, self.view.attempt)
        if here:  # parts are sent once COMMIT is complete
            self._place(sender, self.view.height)
        due = here and chunk.part == self.index and sender in self.duties.contributors
        if not due and ("part", *place, sender) not in self.asked:
            return
        data = self._assemble("part", sender, chunk)
        if data is None:
            return
        held = self.parts.get(place)
        if held is None or not self.has_part(place):
            self.parts[place] = (self.put_away(data), chunk.path)

    def put_away(self, data: Piece) -> Piece:
        """Bytes that will be read a few times at most: as they are, or from the shelf."""
        return self.store(data) if self.store is not None else data

    def put_away_vector(self, vector: Tensor) -> Tensor:
        if self.store is None:
            return vector
        found = decode_tensor(self.store(view_bytes(vector)), vector.numel(), vector.dtype)
        assert found is not None
        return found

    def has_part(self, place: tuple[int, int, bytes, int]) -> bool:
        """Whether the bytes held are those that their owner committed to."""
        return self.get_part(place) is not None

    def get_part(self, place: tuple[int, int, bytes, int]) -> Piece | None:
        """A part that fits its owner's commitment."""
        step, attempt, owner, part = place
        transcript = self.transcripts.get((step, attempt))
        if transcript is None:
            return None
        if owner == self.key:
            mine = self.own.get(step)
            return mine.parts[attempt][part] if mine and attempt in mine.parts else None
        held = self.parts.get(place)
        if held is None or place in self.verified:
            return held[0] if held is not None else None
        root = self.get_commitment(transcript, owner)
        if root is None:
            return None
        data, path = held
        if not verify_path(root, len(transcript.view.roster), part, hash_part(data), path):
            del self.parts[place]  # nobody should have to find that out again
            return None
        self.verified.add(place)
        return data

    def find_gradient(self, step: int, seed: bytes) -> Tensor | None:
        """A gradient that I have computed lately. My own is held in its parts alone."""
        own = self.own.get(step)
        if own is not None and own.tensors and own.seed == seed:
            return join_parts(next(iter(own.tensors.values())))
        return self.gradients.get((step, seed))

    def forget_gradients(self) -> None:
        """The state that I am at was another: what was computed from it is not what others compute."""
        self.gradients.clear()
        self.own = {step: own for step, own in self.own.items() if step < self.view.step}

    def get_path(self, place: tuple[int, int, bytes, int]) -> m.Path:
        step, attempt, owner, part = place
        return self.own[step].paths[attempt][part] if owner == self.key else self.parts[place][1]

    def get_commitment(self, transcript: Transcript, owner: bytes) -> bytes | None:
        """The Merkle root of the owner's parts in that attempt."""
        letter = transcript.phases.get(Phase.COMMIT, {}).get(owner) or self.get_trial(transcript, owner)
        return letter.body.parts if letter is not None and isinstance(letter.body, m.Commit | m.Trial) else None

    def get_trial(self, transcript: Transcript, owner: bytes) -> Letter | None:
        """The commit of a probationer that a majority has listed: it may have sent others, to me as well."""
        letters = self.trials.get(transcript.view.height, {}).get(owner, {})
        return letters.get(transcript.served.get(owner, b""))

    def store_aggregate(self, sender: bytes, chunk: m.AggregateChunk) -> None:
        self.arrivals += 1
        place = (chunk.step, chunk.attempt, chunk.part)
        transcript = self.transcripts.get((chunk.step, chunk.attempt))
        if transcript is None or chunk.part >= len(transcript.view.roster):
            return
        owner = transcript.view.roster[chunk.part]
        if sender != owner and ("aggregate", *place, sender) not in self.asked:
            return
        data = self._assemble("aggregate", sender, chunk)
        if data is not None and (place not in self.aggregates or not self.has_aggregate(transcript, chunk.part)):
            self.aggregates[place] = self.put_away(data)

    def has_aggregate(self, transcript: Transcript, part: int) -> bool:
        place = (transcript.view.step, transcript.view.attempt, part)
        if place in self.verified:
            return True
        data = self.aggregates.get(place)
        letter = (transcript.aggregates or {}).get(transcript.view.roster[part])
        if data is None or letter is None or not isinstance(letter.body, m.Aggregate):
            return False
        if hash_part(data) != letter.body.result:
            del self.aggregates[place]
            return False
        self.verified.add(place)
        return True

    def _assemble(self, kind: str, sender: bytes, chunk: m.PartChunk | m.AggregateChunk) -> Piece | None:
        """The whole, once all chunks are here; no more than the part's true size is ever kept."""
        transcript = self.transcripts.get((chunk.step, chunk.attempt))
        if transcript is None or chunk.part >= len(transcript.view.roster):
            return None
        sizes = compute_part_sizes(self.config.size, len(transcript.view.roster))
        if chunk.size != self.wire.count_bytes(sizes[chunk.part]):
            return None
        if len(chunk.data) == chunk.size:
            return chunk.data
        if chunk.offset % MAX_CHUNK or not 0 < len(chunk.data) == min(MAX_CHUNK, chunk.size - chunk.offset):
            return None
        owner = (chunk.owner,) if isinstance(chunk, m.PartChunk) else ()
        place = (kind, chunk.step, chunk.attempt, *owner, chunk.part, sender)
        assembly = self.partial.get(place)
        if assembly is None:
            assembly = self.partial[place] = Assembly(self._find_room(sender, chunk))
        data = assembly.add(chunk.offset, chunk.data)
        if data is not None:
            del self.partial[place]
        return data

    def _find_room(self, sender: bytes, chunk: m.PartChunk | m.AggregateChunk) -> memoryview:
        """Where a chunk's whole is put together: the parts that I aggregate, in the matrix of their rows."""
        here = (chunk.step, chunk.attempt, chunk.part) == (self.view.step, self.view.attempt, self.index)
        if here and isinstance(chunk, m.PartChunk) and sender == chunk.owner and self.store is None:
            if self.bench is None and self.wire.seamless:
                self.bench = Rows(self.duties.contributors, chunk.size)
            room = self.bench.take(sender) if self.bench is not None else None
            if room is not None:
                return room
        return make_bytes(chunk.size)

    # ---- Certificates

    def seek(self, height: int, root: bytes, roster: tuple[bytes, ...]) -> None:
        """Look out for the messages of a height that have this root; they will be in :attr:`sought`."""
        self.seeking, self.sought = (height, root, roster), None

    def remember_link(self, view: View, messages: tuple[Signed, ...]) -> None:
        """Keep the certificate of a view with another roster, for those who follow the chain."""
        # A slow path at the height of a SEAL or ABORT replaces the view that was being sealed.
        self.links = [link for link in self.links if link[0].height <= messages[0].height]
        if not self.links or view.height > self.links[-1][0].height:
            self.links.append((view, messages))


def _drop(table: dict[Any, Any], places: Iterable[Any]) -> None:
    for place in places:
        del table[place]


def find_certificate(
    config: Config, examiner: Examiner, before: View, view: View, messages: Iterable[Signed]
) -> tuple[Signed, ...] | None:
    """Those of the messages with which the roster of ``before`` says that ``view`` follows; None if it does not.

    A quorum of final votes says so; or SEAL, ABORT or COMMIT of one height from *every* member, since one that is not
    complete may still be replaced by a slow path. Of these all but ``bound`` have to name the view: a Byzantine member
    may sign for a view of its own.

    Whoever leaves out a link, so that the roster seems not to have changed, must not have a smaller quorum accepted:
    votes bear their roster, COMMIT comes from the view's own, and who sealed an attempt is on record in the view.
    """
    rosters = {compute_roster_digest(before.roster): (before.roster, compute_quorum(config, before))}
    for record in before.attempts[-1:]:
        sealed = (record.roster, compute_quorum(config, record))
        rosters.setdefault(compute_roster_digest(record.roster), sealed)
    whole: dict[int, dict[bytes, tuple[Signed, bool]]] = {}
    votes: dict[tuple[int, int, bytes], dict[bytes, Signed]] = {}
    for message in messages:
        if message.run != config.run or message.height < before.height - 1:
            continue
        letter = examiner.examine(message)
        body = letter.body if letter is not None else None
        if letter is not None and message.domain is Domain.AGREED and message.sender in before.roster:
            named = isinstance(body, m.Seal | m.Abort | m.Commit) and body.view == view.digest
            if named and _find_roster(view, message) not in (before.roster, None):
                continue
            whole.setdefault(message.height, {})[message.sender] = (message, named)
        elif isinstance(body, m.Outcome) and body.final and body.view == view.digest:
            # Those who sealed this view may have replaced it by another, in a slow path at the height before.
            roster, _ = rosters.get(message.previous, ((), 0))
            if message.sender in roster and (roster == before.roster or message.height == before.height - 1):
                votes.setdefault((message.height, body.round, message.previous), {})[message.sender] = message
    for place, ballots in votes.items():
        if len(ballots) >= rosters[place[2]][1]:
            return tuple(ballots.values())
    quorum = compute_quorum(config, before)
    for said in whole.values():
        naming = sum(named for _, named in said.values())
        if len(said) == len(before.roster) and naming >= max(len(before.roster) - before.bound, quorum):
            return tuple(message for message, _ in said.values())
    return None


def find_phase(messages: Iterable[Signed]) -> Phase:
    """The phase of most of these: of one height, and so of all honest members."""
    return Counter(message.phase for message in messages).most_common(1)[0][0]


def _find_roster(view: View, message: Signed) -> tuple[bytes, ...] | None:
    """Whose agreed messages these are, as far as the view that they name tells."""
    if message.phase is Phase.COMMIT:
        return view.roster
    records = (x.roster for x in view.attempts if (x.step, x.attempt) == (message.step, message.attempt))
    return next(records, None)


def compute_case_digest(case: m.Accusation | m.Proof) -> bytes:
    return compute_digest("case", encode(case))


# ---- What each kind of direct message does


def _may_answer(peer: Peer, sender: bytes, kind: type, most: int = _ANSWERS, strangers: int = _ANSWERS) -> bool:
    """Whether this kind of message has not come too often within ``delta``. No kind uses up what another may need.

    Keys are free, so all that are outside the circle share ``strangers``.
    """
    if sender not in peer.circle:
        sender, most = b"", strangers
    since, count = peer.answers.get((sender, kind), (-math.inf, 0))
    if peer.now - since >= peer.config.delta:
        since, count = peer.now, 0
    peer.answers[sender, kind] = (since, count + 1)
    return count < most


def _may_send_bytes(peer: Peer, sender: bytes, kind: type) -> bool:
    members = len(peer.view.roster)
    return _may_answer(peer, sender, kind, _ANSWERS + members * members // 2, 2 * members)


def _on_part(peer: Peer, sender: bytes, message: m.PartChunk) -> Iterable[Effect]:
    peer.store_part(sender, message)
    return ()


def _on_aggregate(peer: Peer, sender: bytes, message: m.AggregateChunk) -> Iterable[Effect]:
    peer.store_aggregate(sender, message)
    return ()


def _on_certificate(peer: Peer, sender: bytes, message: m.Certificate) -> Story:
    if sender not in peer.circle or not _may_answer(peer, sender, m.Certificate):
        return
    for signed in message.messages:
        yield from peer.take(signed)
    if peer.seeking is not None:
        height, root, roster = peer.seeking
        letters: Values = {}
        for signed in message.messages:
            letter = peer.examiner.examine(signed) if signed.height == height and signed.run == peer.run else None
            if letter is not None:
                letters.setdefault(signed.sender, letter)
        if all(key in letters for key in roster) and compute_values_root(roster, letters) == root:
            peer.sought = {key: letters[key] for key in roster}


def _on_pull_messages(peer: Peer, sender: bytes, message: m.PullMessages) -> Story:
    if not _may_answer(peer, sender, m.PullMessages):
        return
    page = peer.pages.get(message.height, Page())
    trials = [letters for key, letters in peer.trials.get(message.height, {}).items() if key in message.senders]
    found = tuple(x[key].message for x in (page.letters, page.seconds) for key in message.senders if key in x)
    found += tuple(letter.message for letters in trials for letter in letters.values())
    if found:
        yield Send(sender, m.Certificate(found[: m.MAX_MEMBERS]))


def _on_pull_part(peer: Peer, sender: bytes, message: m.PullPart) -> Story:
    place = (message.step, message.attempt, message.owner, message.part)
    transcript = peer.transcripts.get((message.step, message.attempt))
    if transcript is None or message.part >= len(transcript.view.roster):
        return
    if sender not in peer.circle or not _may_send_bytes(peer, sender, m.PullPart):
        return  # parts are for those who check them
    data = peer.get_part(place)
    if data is not None:
        yield from send_part(peer, (sender,), place, data)


def send_part(peer: Peer, to: tuple[bytes, ...], place: tuple[int, int, bytes, int], data: Piece) -> Story:
    """A part with the path that ties it to its commitment."""
    step, attempt, owner, part = place
    path, size = peer.get_path(place), len(data)
    for at, piece in cut_chunks(data):
        yield Broadcast(to, m.PartChunk(step, attempt, owner, part, path, size, at, piece))


def _on_pull_aggregate(peer: Peer, sender: bytes, message: m.PullAggregate) -> Story:
    transcript = peer.transcripts.get((message.step, message.attempt))
    if transcript is None or message.part >= len(transcript.view.roster):
        return
    if not _may_send_bytes(peer, sender, m.PullAggregate):
        return
    if peer.has_aggregate(transcript, message.part):
        data = peer.aggregates[message.step, message.attempt, message.part]
        yield from send_aggregate((sender,), message.step, message.attempt, message.part, data)


def send_aggregate(to: tuple[bytes, ...], step: int, attempt: int, part: int, data: Piece) -> Story:
    size = len(data)
    for at, piece in cut_chunks(data):
        yield Broadcast(to, m.AggregateChunk(step, attempt, part, size, at, piece))


def cut_chunks(data: Piece) -> Iterable[tuple[int, bytes]]:
    """The chunks that these bytes travel in, and where each begins."""
    if len(data) <= MAX_CHUNK:
        return ((0, bytes(data)),)
    view = memoryview(data).toreadonly()
    # What is on its way is encoded before it is sent: until then a view of it is as good as the bytes.
    return ((at, cast(bytes, view[at : at + MAX_CHUNK])) for at in range(0, len(data), MAX_CHUNK))


def _on_pull_state(peer: Peer, sender: bytes, message: m.PullState) -> Story:
    if message.step > peer.view.step or not _may_answer(peer, sender, m.PullState):
        return
    data = yield ReadState(message.step)
    if data is not None and message.offset < len(data):
        piece = bytes(data[message.offset : message.offset + MAX_CHUNK])
        yield Send(sender, m.StateChunk(message.step, len(data), message.offset, piece))


def _on_state(peer: Peer, sender: bytes, message: m.StateChunk) -> Story:
    """The next chunk from the one server that was asked; nothing else is kept."""
    fetch, most = peer.state, _STATE_BYTES * peer.config.size + MAX_CHUNK
    if fetch is None or message.size > most:
        return
    if (sender, message.step, message.offset) == (fetch.server, fetch.step, len(fetch.data)):
        fetch.size = message.size
        fetch.data += message.data
    yield from ()


def _on_pull_proof(peer: Peer, sender: bytes, message: m.PullProof) -> Story:
    case = peer.cases.get(message.case) if sender in peer.circle else None
    if case is not None and _may_answer(peer, sender, m.PullProof, 2 * m.MAX_BALLOTS):
        yield Send(sender, case)


def _on_case(peer: Peer, sender: bytes, message: m.Accusation | m.Proof) -> Story:
    digest = compute_case_digest(message)
    if ("case", peer.view.step, digest) in peer.asked:  # nothing that nobody asked for
        peer.cases[digest] = message
    yield from ()


def _on_pull_chain(peer: Peer, sender: bytes, message: m.PullChain) -> Story:
    if not _may_answer(peer, sender, m.PullChain, 4, 16):
        return
    links = [link for link in peer.links if link[0].height > message.height]
    begun = [epoch for epoch in peer.transcripts.values() if Phase.COMMIT in epoch.phases]
    latest = max(begun, key=lambda epoch: epoch.view.height, default=None)  # mine, or while gradients are made the last
    if latest is not None and latest.view.height > max([message.height, *(link[0].height for link in links)]):
        links.append((latest.view, tuple(letter.message for letter in latest.phases[Phase.COMMIT].values())))
    found: list[m.Link] = []
    weight = 0
    for view, messages in links[: m.MAX_LINKS]:
        link = m.Link(encode_view(view), messages)
        weight += len(link.view) + weigh_messages(messages)
        if found and weight > m.MAX_FRAME // 2:
            break  # whoever needs more asks again
        found.append(link)
    if found:
        yield Send(sender, m.Chain(tuple(found)))


def _on_chain(peer: Peer, sender: bytes, message: m.Chain) -> Story:
    """Walk from the view we are in to the latest that is certified, each by the roster of the one before."""
    if sender not in peer.circle or not _may_answer(peer, sender, m.Chain, 8):
        return
    view, adopted = peer.base, None
    for link in message.links:
        later = decode_view(link.view)
        if later is None or later.height < view.height or later == view:
            continue
        certificate = find_certificate(peer.config, peer.examiner, view, later, link.messages)
        if certificate is None and later.height > peer.view.height:  # those who started with me may have settled it
            certificate = find_certificate(peer.config, peer.examiner, peer.view, later, link.messages)
        if certificate is None:
            break
        if view is not peer.base and not peer.member:  # whoever goes on from a view has settled it
            peer.base = view
        if is_another_electorate(view, later):
            peer.remember_link(later, certificate)
        for signed in certificate:  # whoever has to show later what it goes by must hold it
            yield from peer.take(signed)
        epoch = peer.transcripts.get((view.step, view.attempt))
        view, adopted = later, Lost(later, certificate)
        if epoch is not None and not adopted.is_final:  # as if I had sealed it myself: it may still be disputed
            epoch.heights[certificate[0].height] = find_phase(certificate)
            epoch.sealing = later
        if adopted.is_final and not peer.member:
            peer.base = later
    if adopted is not None and adopted.view != peer.view:
        above = adopted.view.height > peer.view.height
        if above or (peer.astray and adopted.view.height == peer.view.height):
            peer.adopted = adopted


def _on_alarm(peer: Peer, sender: bytes, message: m.Alarm) -> Story:
    """Somebody opens a slow path. Whoever is past it shows why it is needless; the others join (``broadcast.py``)."""
    if sender not in peer.circle or not _may_answer(peer, sender, m.Alarm, 16):
        return
    if message.height in peer.finals:
        yield Send(sender, m.Certificate(peer.finals[message.height]))
        return
    for signed in message.evidence:
        yield from peer.take(signed)
    epoch = peer.find_epoch(message.height)
    if epoch is None or not is_valid_alarm(peer.run, peer.examiner, epoch, message):
        return
    if message.height >= peer.level:
        held = peer.alarms.get(message.height)
        if held is None or held.round < message.round:
            peer.alarms[message.height] = message
    elif (message.height, message.round) not in peer.answered_alarms:
        peer.answered_alarms.add((message.height, message.round))
        yield from answer_alarm(peer, message)


def answer_alarm(peer: Peer, alarm: m.Alarm) -> Story:
    """All messages of the next height are the proof that this one is settled."""
    here, epoch = peer.find_epoch(alarm.height), peer.find_epoch(alarm.height + 1)
    page = peer.pages.get(alarm.height + 1)
    if here is None or peer.key not in here.view.roster or epoch is None or page is None:
        return  # a member that leaves knows it as well as any other
    letters = [page.letters[key] for key in epoch.view.roster if key in page.letters]
    if len(letters) < len(epoch.view.roster):
        return
    item = compute_item_digest(letters)
    endorsement = yield Sign(
        alarm.height, peer.view.step, peer.view.attempt, Phase.COMMIT, bytes(32), m.Endorsement(alarm.round, item)
    )
    relay = m.Relay(tuple(letter.message for letter in letters), (endorsement,))
    peer.grace = peer.time + 3 * peer.config.delta
    yield Broadcast(peer.others, m.Gossip(alarm.height, alarm.round, (relay,)))


def compute_item_digest(letters: Iterable[Letter]) -> bytes:
    """The name of an item of the slow path."""
    return compute_digest("item", *(letter.digest for letter in letters))


def weigh_messages(messages: Iterable[Signed]) -> int:
    """About as many bytes as these messages have, on the wire or in memory."""
    return sum(_SIGNED_BYTES + len(message.body) for message in messages)


def weigh_items(items: Iterable[m.Relay]) -> int:
    return sum(weigh_messages(relay.messages) + weigh_messages(relay.endorsements) for relay in items)


def _on_gossip(peer: Peer, sender: bytes, message: m.Gossip) -> Story:
    near = peer.level - 1 <= message.height <= peer.level + _FUTURE_HEIGHTS
    if near and message.items and sender in peer.circle:
        places = [place for place, queues in peer.gossip.items() if sender in queues]
        place = (message.height, message.round)
        if place not in places and len(places) >= _ROUNDS:  # of what one member sends the latest rounds are kept
            oldest = min(places)
            del peer.gossip[oldest][sender]
            if not peer.gossip[oldest]:
                del peer.gossip[oldest]
        pile = peer.gossip.setdefault(place, {}).setdefault(sender, Pile())
        held, weight = sum(x[sender].weight for x in peer.gossip.values() if sender in x), weigh_items(message.items)
        if held + weight <= _GOSSIP_BYTES + len(peer.circle) * _GOSSIP_BYTES_EACH:
            pile.append(message)
            pile.weight += weight
    yield from ()


_HANDLERS: dict[type, Callable[[Peer, Any, Any], Iterable[Effect]]] = {
    m.PartChunk: _on_part,
    m.AggregateChunk: _on_aggregate,
    m.StateChunk: _on_state,
    m.Certificate: _on_certificate,
    m.Chain: _on_chain,
    m.Gossip: _on_gossip,
    m.Alarm: _on_alarm,
    m.PullMessages: _on_pull_messages,
    m.PullPart: _on_pull_part,
    m.PullAggregate: _on_pull_aggregate,
    m.PullState: _on_pull_state,
    m.PullProof: _on_pull_proof,
    m.PullChain: _on_pull_chain,
    m.Accusation: _on_case,
    m.Equivocation: _on_case,
    m.WrongReveal: _on_case,
    m.WrongOpening: _on_case,
    m.MalformedBody: _on_case,
}
