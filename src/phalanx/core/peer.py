"""One peer: what it holds, and how it takes in what comes.

Nothing here decides anything. Messages are checked, kept within limits, and given to whoever asks for them
(``handlers.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from phalanx.core import messages as m
from phalanx.core.assembly import Assembly, Rows
from phalanx.core.certificates import find_certificate, find_phase
from phalanx.core.codec import encode
from phalanx.core.config import KEPT_STEPS, Config
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Broadcast, Effect, Finished, Leave, Receive, Send, Story
from phalanx.core.envelope import Examiner, Letter
from phalanx.core.membership import View, compute_duties, make_genesis
from phalanx.core.merkle import hash_part, verify_path
from phalanx.core.messages import MAX_CHUNK, Message, Phase, Signed
from phalanx.core.pace import Stopwatch, find_relays
from phalanx.core.partition import compute_part_sizes, join_parts
from phalanx.core.room import make_bytes
from phalanx.core.slowpath import Resolution
from phalanx.core.transcript import Page, Transcript, Values
from phalanx.core.wire import WIRE_TYPES, Piece, decode_tensor, view_bytes

_PAST_HEIGHTS = 64
FUTURE_HEIGHTS = 4
_MOST_CASES = 1024
_MOST_SETTLEMENTS = 32
_MOST_LINKS = 32
"""Of the chain of views, before links are left out that a later COMMIT makes needless."""
_MOST_JOINS = 256
_PASSED_JOINS, _NEW_JOINS = 16, 64
"""Requests to join that are passed on within ``delta``: those of one member, and those of all strangers together."""
_TICK = 1e-6
"""Seconds beyond a deadline, so that rounding never makes it look as if it had not come."""
_ASKED_AT_ONCE = 3
KEPT_ROUNDS = 8
"""Of a slow path, from one sender."""
_MOST_TRIALS = 4


Follow: TypeAlias = "Callable[[Peer, Transcript, int, Resolution], View | None]"
"""Which view follows when a slow path at a height of an attempt ended so; None if too little is here to say."""
Handler: TypeAlias = "Callable[[Peer, Any, Any], Iterable[Effect]]"
"""What a peer does with a sender's message of one kind."""


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


@dataclass(slots=True)
class Clock:
    """What ``clock.py`` knows of the others' time. Nothing of it is on disk."""

    watch: Stopwatch
    """What was measured since the last CONFIRM."""
    revealed: float | None = None
    """When this step's REVEAL was complete: then gradients of the next begin."""
    begun: float | None = None
    """When the step's gradients began."""
    committed: float = 0.0
    """When COMMIT was complete: then parts are sent."""
    usual: float = 0.0
    """The median time of a gradient in this step."""
    reported: dict[bytes, float] = field(default_factory=dict)
    """When the report of each member came that had others to check."""
    arriving: frozenset[bytes] = frozenset()
    """Members that are new in this view: what they lack they have to fetch first."""


class Peer:
    """The memory of one peer."""

    def __init__(
        self,
        config: Config,
        key: bytes,
        examiner: Examiner,
        view: View,
        follow: Follow,
        handlers: Mapping[type, Handler],
    ) -> None:
        self.follow, self.handlers = follow, handlers
        self.join: Callable[[Peer], Story] | None = None
        """Takes part in a slow path that others opened, whatever this peer was waiting for."""
        self.store: Callable[[Piece], Piece] | None = None
        """Where models are large: puts long bytes away, to where they take no memory until somebody reads them."""
        self.paused = 0.0
        """Seconds spent in slow paths: no deadline runs meanwhile."""
        self.time = 0.0
        """The clock of the fast path: when a slow path is over, it goes on from where that began."""
        self.frozen: float | None = None
        """In a slow path, when it began."""
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
        self.readings: dict[tuple[int, int], list[Tensor | None]] = {}
        self.rows: tuple[Tensor, list[bool]] | None = None
        """What the aggregates, and in this attempt the parts that I aggregate, say: read once."""
        self.aggregates: dict[tuple[int, int, int], Piece] = {}
        self.state: StateFetch | None = None
        self.openings: dict[tuple[int, int, bytes, int], Letter] = {}
        self.trials: dict[int, dict[bytes, dict[bytes, Letter]]] = {}
        """Commits of probationers by height, sender and digest."""
        self.timeouts: dict[tuple[int, int], dict[bytes, Letter]] = {}
        self.votes: dict[tuple[int, int, bool], dict[bytes, Letter]] = {}
        self.settlements: dict[bytes, m.Settlement] = {}
        """How slow paths may end, by digest: those that I came to, or asked for."""
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
        self.entered = -math.inf
        self.answers: dict[tuple[bytes, type], tuple[float, int]] = {}
        """By link and kind: since when messages are counted, and how many came."""
        self.forgeries = 0
        self.forgers: dict[bytes, float] = {}
        """Who passed on what nobody signed, and when."""
        self.partial: dict[tuple[Any, ...], Assembly] = {}
        self.waits: dict[tuple[int, int, bytes], float] = {}
        """Until when I wait for the bytes behind somebody's commit, in this round of checks."""
        self.bearers: dict[tuple[int, int, bytes], set[bytes]] = {}
        """Who accuses it, in this vote."""
        self.answered_alarms: set[tuple[bytes, int, int]] = set()
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
        self.awake = -math.inf
        """After my machine stood still: when what was sent to me meanwhile is here. I miss nobody before."""
        self.ask_at = math.inf
        """When to ask next whether the others go on without me: once I am back, until I hear something new."""
        self.recalled = -1
        """Up to which height I may know messages from before I came back."""
        self.late: set[bytes] = set()
        """Who earned a strike in a slow path that I have not told of in a CONFIRM yet."""
        self.reluctant: set[bytes] = set()
        """Members whose aggregates I had to ask others for while I was on trial."""
        self.failures: dict[bytes, int] = {}
        """How often a server of states did not come through."""
        self.clock = Clock(Stopwatch(hop=int(1000 * config.delta)))
        self.part_times: dict[tuple[int, int, bytes, int], float] = {}
        self.aggregate_times: dict[tuple[int, int, int], float] = {}
        """When parts and aggregates first were here as a whole."""
        self.view = view
        self.enter(view)

    # ---- Where we are

    def enter(self, view: View, *, riding: bool = False) -> None:
        """Start from a view. ``riding``: what led to it is complete, but settled only by the attempt's COMMIT."""
        before = self.view.roster
        self.view = view
        self.riding = riding
        self.duties = compute_duties(self.config, view)
        self.level = view.height - 1
        self.root = view.previous
        self.entered = max(self.time, self.entered)
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
        self.absent = {member.key for member in view.suspended}
        """Suspended members."""
        self.circle = {*here, *self.absent, *(k for a in view.attempts for k in a.roster)}
        self.holding = False
        """Whether I hold the state that the view starts from."""
        self.recent = {transcript.view.digest for transcript in self.transcripts.values()}
        followers = (*(c.key for c in view.candidates), *filter(self.is_back, sorted(self.absent)))
        self.audience = tuple(key for key in (*view.roster, *followers) if key != self.key)
        self.others = tuple(key for key in view.roster if key != self.key)
        self.banned = frozenset(view.banned)
        """Whose messages are not even looked at: answering them would let a cheat spend our bandwidth."""
        _drop(self.forgers, [key for key in self.forgers if key not in self.circle])
        _drop(self.answers, [link for link in self.answers if link[1] is not m.Join or link[0] not in {b"", *here}])
        self.rows = None
        self.bench: Rows | None = None
        """Where long rows of the part that I aggregate are put as they come."""
        self.applied = False
        """Whether this attempt's update was."""
        self.ahead = {key: height for key, height in self.ahead.items() if key in view.roster}
        self.foremost = max(self.ahead.values(), default=-1)
        self.astray = False
        self.clock.arriving |= {*view.roster} - {*before}
        self._stand_between()
        self.answered_alarms.clear()
        _drop(self.joins, [key for key in self.joins if key in here or key in view.banned])
        self.adopted = None
        self.finished.clear()
        self._forget()

    def _stand_between(self) -> None:
        """Know the rifts: what I pass on, and from whom I take what another should send me."""
        view, place = self.view, (self.view.step, self.view.attempt)
        self.bypass: dict[bytes, list[bytes]] = {}
        """Members between whom I stand: whose messages I pass on to whom."""
        self.relayed: list[tuple[bytes, bytes]] = []
        """The same, as pairs."""
        self.passed: set[tuple[Any, ...]] = set()
        """What of this attempt I have passed on."""
        self.apart: dict[bytes, tuple[bytes, ...]] = {}
        """From whom I have a rift, and who stands between us."""
        for rift in view.rifts if self.member else ():
            relays = find_relays(view.roster, rift.one, rift.other, view.bound)
            for key, other in ((rift.one, rift.other), (rift.other, rift.one)):
                mine, part = view.roster.index(other), view.roster.index(key)
                if self.key in relays:
                    self.bypass.setdefault(key, []).append(other)
                    self.relayed.append((key, other))
                    self.asked.add(("part", *place, key, mine, key))
                elif self.key == other:
                    self.apart[key] = relays
                    self.asked |= {("part", *place, key, mine, relay) for relay in relays}
                    self.asked |= {("aggregate", *place, part, relay) for relay in relays}

    def _forget(self) -> None:
        step, height = self.view.step, self.view.height
        table: dict[Any, Any]
        old = step - KEPT_STEPS
        oldest = height - _PAST_HEIGHTS
        self.verified = {place for place in self.verified if place[0] >= old}
        times = (self.part_times, self.aggregate_times)
        kept = (self.parts, self.aggregates, self.openings, self.transcripts, self.gradients, self.readings)
        for table in (*kept, *times):
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
        _drop(self.settlements, list(self.settlements)[: max(0, len(self.settlements) - _MOST_SETTLEMENTS)])
        self.asked = {request for request in self.asked if request[1] >= old}
        self.partial = {place: assembly for place, assembly in self.partial.items() if place[1] >= old}

    def forget_heights(self) -> None:
        """In an attempt that goes on and on, while it waits: what is said again and again is not all kept."""
        oldest = self.level - _PAST_HEIGHTS
        if oldest > self.view.height and oldest % _PAST_HEIGHTS == 0:
            for table in (self.pages, self.transcript.heights):
                _drop(table, [height for height in table if self.view.height < height < oldest])

    def is_back(self, key: bytes) -> bool:
        """Whether a suspended member has shown lately that it is there and holds the state."""
        letter = self.joins.get(key)
        return letter is not None and isinstance(letter.body, m.Join) and letter.body.view in self.recent

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

    @property
    def stamp(self) -> float:
        """When something came, on the clock of the fast path."""
        return self.time if self.frozen is None else self.frozen

    def pause(self, seconds: float) -> None:
        """Leave a slow path: what it took does not count."""
        self.paused += seconds
        self.time = self.now - self.paused

    def listen(self, until: float) -> Story:
        """Wait for one message until ``until`` on :attr:`time`; join a slow path if one has opened."""
        return self.receive(until + self.paused + _TICK)

    def receive(self, until: float) -> Story:
        """Wait for one message and take care of it; :class:`Lost` when one shows that the run went on elsewhere."""
        due = until if until < self.ask_at else self.ask_at
        overslept = due + self.config.delta / 2 if due > self.now else math.inf
        delivery = yield Receive(due)
        self.now = now = delivery.now
        self.time = now - self.paused
        if now > overslept:
            self.awake = self.time + self.config.delta
        if now >= self.ask_at:
            self.ask_at = now + self.config.delta
            yield Broadcast(self.choose_some(), m.PullChain(self.base.height))
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
                handler = self.handlers.get(type(message))
                if handler is not None:
                    yield from handler(self, delivery.sender, message)
            if self.adopted is not None:
                raise self.adopted
            if (self.alarms or self.timeouts) and self.join is not None:
                yield from self.join(self)

    def may_take(self, sender: bytes, kind: type, most: int, strangers: int) -> bool:
        """Whether this kind of message has not come too often within ``delta``. No kind uses up what another may need.

        Keys are free, so all that are outside the circle share ``strangers``.
        """
        if sender not in self.circle:
            sender, most = b"", strangers
        since, count = self.answers.get((sender, kind), (-math.inf, 0))
        if self.now - since >= self.config.delta:
            since, count = self.now, 0
        self.answers[sender, kind] = (since, count + 1)
        return count < most

    def take(self, message: Signed, sender: bytes | None = None) -> Iterable[Any]:
        """Keep a signed message if it can be of use. Nothing is unpacked before its signature was checked.

        ``sender`` is the one whose link it came by, if it came alone.
        """
        if message.run != self.run:
            return ()
        domain, height = message.domain, message.height
        if domain is Domain.JOIN:
            return self._take_join(message, sender) if sender is not None else ()
        if message.sender not in self.circle:
            return ()
        start = self.view.height
        if height < start - _PAST_HEIGHTS or (height > self.level + FUTURE_HEIGHTS and height > start):
            return ()
        letter = self.examiner.examine(message)
        if letter is None:
            self.forgeries += 1
            return ()
        if domain is Domain.AGREED:
            page = self.pages.get(height) or self.page(height)
            if page.add(letter):
                page.times.setdefault(message.sender, self.stamp)
                self._place(message.sender, height - 1)
                if letter.body is None and message.sender not in self.view.banned:
                    self.keep_proof(message.sender, m.MalformedBody(message))
                if message.sender in page.seconds:
                    return self._take_equivocation(page, message.sender)
                if sender == message.sender in self.bypass and height >= self.level:
                    return (Broadcast(tuple(self.bypass[sender]), message),)
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
                self.recalled = max(self.recalled, message.height)
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
            if place[0] == height and rounds and place[1] < max(rounds[-1], round_) - KEPT_ROUNDS:
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

    def _take_join(self, message: Signed, sender: bytes) -> Iterable[Any]:
        """A request to join, from who asks or from a member that passes it on: keys are free, and each goes to all."""
        key = message.sender
        view = self.view
        if key in self.absent:
            return self._take_return(message, sender)
        if key in self.joins or key in view.roster or key in view.banned:
            return ()
        if sender != key and not (sender in view.roster and self.may_take(sender, m.Join, _PASSED_JOINS, 0)):
            return ()
        letter = self.examiner.examine(message)
        if letter is None or letter.body is None:
            return ()
        self.joins[key] = letter
        if len(self.joins) > _MOST_JOINS:  # chance decides, so that nobody can crowd others out
            strangers = (key for key in self.joins if key not in self.absent)
            worst = max(strangers, key=lambda key: compute_digest("join", view.randomness, key))
            del self.joins[worst]
            if worst == key:
                return ()
        if sender == key and not self.may_take(sender, m.Join, _PASSED_JOINS, _NEW_JOINS):
            return ()
        return (Broadcast(self.others, message),)  # whoever knows one member is known to all

    def _take_return(self, message: Signed, sender: bytes) -> Iterable[Any]:
        """A suspended member says that it is back. It tells every member itself, so nobody passes it on."""
        if sender != message.sender or not self.may_take(sender, m.Join, _PASSED_JOINS, 0):
            return ()
        letter, held = self.examiner.examine(message), self.joins.get(sender)
        if letter is None or not isinstance(letter.body, m.Join):
            return ()
        known = held.body.round if held is not None and isinstance(held.body, m.Join) else 0
        if held is None or (message.height, letter.body.round) >= (held.message.height, known):
            self.joins[sender] = letter
        return ()

    # ---- Long bytes

    def store_part(self, sender: bytes, chunk: m.PartChunk) -> bool:
        """Keep a chunk of a part; whether the part is here now and was not before."""
        if sender not in self.circle:
            return False
        self.arrivals += 1
        place = (chunk.step, chunk.attempt, chunk.owner, chunk.part)
        here = sender == chunk.owner and (chunk.step, chunk.attempt) == (self.view.step, self.view.attempt)
        if here:  # parts are sent once COMMIT is complete
            self._place(sender, self.view.height)
        due = here and chunk.part == self.index and sender in self.duties.contributors
        if not due and ("part", *place, sender) not in self.asked:
            return False
        data = self._assemble("part", sender, chunk)
        if data is None:
            return False
        held = self.parts.get(place)
        if held is None or not self.has_part(place):
            self.parts[place] = (self.put_away(data), chunk.path)
            self.part_times.setdefault(place, self.stamp)
            return True
        return False

    def is_coming(self, place: tuple[int, int, bytes, int]) -> bool:
        """Whether some of a part's bytes are here already, from its owner."""
        step, attempt, owner, part = place
        return ("part", step, attempt, owner, part, owner) in self.partial

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
            self.part_times.pop(place, None)
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

    def forget_later(self, step: int) -> None:
        """The update of this step was undone: what was computed from the state after it is of no use any more."""
        _drop(self.own, [later for later in self.own if later > step])
        _drop(self.gradients, [place for place in self.gradients if place[0] > step])

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

    def store_aggregate(self, sender: bytes, chunk: m.AggregateChunk) -> bool:
        """Keep a chunk of an aggregate; whether it is here now and was not before."""
        self.arrivals += 1
        place = (chunk.step, chunk.attempt, chunk.part)
        transcript = self.transcripts.get((chunk.step, chunk.attempt))
        if transcript is None or chunk.part >= len(transcript.view.roster):
            return False
        owner = transcript.view.roster[chunk.part]
        if sender != owner and ("aggregate", *place, sender) not in self.asked:
            return False
        data = self._assemble("aggregate", sender, chunk)
        if data is not None and (place not in self.aggregates or not self.has_aggregate(transcript, chunk.part)):
            self.aggregates[place] = self.put_away(data)
            self.aggregate_times.setdefault(place, self.stamp)
            return True
        return False

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
            self.aggregate_times.pop(place, None)
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

    def shorten_links(self, view: View, letters: Values) -> None:
        """Leave out links where the view's COMMIT has a quorum of an earlier roster behind it: a chain stays short."""
        if len(self.links) <= _MOST_LINKS:
            return
        messages = tuple(letter.message for letter in letters.values())
        for place, before in enumerate([make_genesis(self.config), *(link[0] for link in self.links[:-1])]):
            if find_certificate(self.config, self.examiner, before, view, messages) is not None:
                self.links[place:] = [(view, messages)]
                return


def _drop(table: dict[Any, Any], places: Iterable[Any]) -> None:
    for place in places:
        del table[place]


def compute_case_digest(case: m.Accusation | m.Proof) -> bytes:
    return compute_digest("case", encode(case))
