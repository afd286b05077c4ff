"""Agreed broadcast: all honest members see the same value in a slot, or all see that there is none.

*Fast path.* Everybody sends a signed message and names the root of the phase before. When all messages of a height are
here and name one root, the height is complete, and the one before it is settled: everybody signed that it saw the same.

*Slow path* (``slow``). Opened by more than ``bound`` timeouts that miss the same member, or by two roots that differ.
It is Dolev-Strong broadcast: ``bound + 1`` rounds of ``2 delta``, in round ``i`` an item is accepted with ``i``
signatures and passed on with one more. Two votes settle what follows, so that even when ``delta`` was broken two
quorums never settle different things. A member that has completed the next height does not join; it shows that height's
messages, an item like any other, and whoever accepts it is back on the fast path.

See docs/PROTOCOL.md, section 4, and docs/DEVIATIONS.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from phalanx.core import messages as m
from phalanx.core.clock import find_turn, note_letters
from phalanx.core.codec import encode
from phalanx.core.crypto import DIGEST_SIZE, Domain, compute_digest
from phalanx.core.effects import Broadcast, Heard, KeepMessages, Note, Send, Sign, Story
from phalanx.core.envelope import Letter
from phalanx.core.events import Halted, Resumed, SlowPath, Waiting
from phalanx.core.membership import Changes, View, compute_quorum, compute_roster_digest, find_replacements
from phalanx.core.messages import AgreedBody, Phase, Signed
from phalanx.core.peer import Lost, Peer
from phalanx.core.slowpath import (
    SEALING,
    Resolution,
    Seen,
    complete_alarm,
    compute_item_digest,
    compute_settlement_digest,
    get_successor,
    is_agreed,
    is_valid_alarm,
    misses,
    resolve,
    weigh_items,
)
from phalanx.core.transcript import Page, Transcript, Values, compute_values_root

_LONGEST_WAIT = 60
"""Deltas after which a slow path that found no way on tries again, whether or not anything has changed."""
_PATIENT_ROUNDS = 2
"""Rounds in which witnesses of attempts that are still checked are waited for: about :data:`_LONGEST_WAIT`."""


def agree(peer: Peer, phase: Phase, body: AgreedBody, work: float = 0.0) -> Story:
    """One agreed broadcast. Returns the letters of all members, the same for every honest member."""
    height, view, delta = peer.level + 1, peer.view, peer.config.delta
    transcript, page = peer.transcript, peer.page(height)
    transcript.heights[height] = phase
    if peer.member:
        message = yield Sign(height, view.step, view.attempt, phase, peer.root, body)
        if message is not None:
            peer.take(message)
            yield Broadcast(peer.audience, message)
    # What stands before the first COMMIT of a sealed view is certified: a wrong root there is the sender's own affair.
    checked = height > view.height or peer.riding
    page.root = peer.root if checked else None
    complaint: Signed | None = None
    again = enough = -math.inf
    asked: set[bytes] = set()
    pull_at = peer.entered + delta + work if peer.member else peer.time
    members, honest, root = len(view.roster), len(view.roster) - view.bound, {peer.root}
    while True:
        wrong = _find_difference(peer, page) if checked and page.roots != root else None
        if wrong is not None:
            if peer.member and height - 1 not in peer.alarms and _note_difference(peer, height - 1, wrong):
                yield from join_slow_path(peer)
                continue
        elif len(page.letters) >= members and all(key in page.letters for key in view.roster):
            break
        if peer.foremost >= height:  # whoever goes on holds what I miss
            yield from _ask_those_ahead(peer, height, asked, checked)
        if enough < peer.entered and len(page.letters) >= honest:
            enough = peer.time  # all honest messages may be here: what is missing is late, or kept back
            pull_at = min(pull_at, peer.time + find_turn(peer))
        if peer.time >= pull_at:
            early = enough >= peer.entered and peer.time < enough + delta
            yield from _pull(peer, height, work, checked, early)
            pull_at = peer.time + delta
        deadline = again
        if complaint is None:
            deadline = max(max(peer.entered + 4 * delta, peer.grace) + work, peer.awake)
        if peer.member and peer.time >= deadline:
            missing = _list_missing(
                peer, page, checked
            )  # a height that is settled is not opened again: its deniers are
            if complaint is None and missing:  # said once; then repeated, for those who did not hear it
                said = m.Timeout(missing, 0, None)
                complaint = yield Sign(height, view.step, view.attempt, phase, peer.root, said)
                peer.take(complaint)
                yield Note(Waiting(view.step, height, missing))
            if complaint is not None:
                yield Broadcast(peer.audience, complaint)
            again = deadline = peer.time + 4 * delta
        wake = min(pull_at, deadline) if peer.member else pull_at
        while True:  # most messages change nothing but a count
            yield from peer.listen(wake)
            count = len(page.letters)
            if count >= members or page.roots != root or peer.time >= wake or peer.foremost >= height:
                break
            if enough < peer.entered and count >= honest:
                break
    values = {key: page.letters[key] for key in view.roster}
    transcript.record(height, phase, values)
    if peer.member:
        note_letters(peer, height, phase, page)
    if peer.member:  # whoever starts again knows what its next message rests on
        yield KeepMessages(height, Heard.MESSAGES, tuple([letter.message for letter in values.values()]))
    peer.level, peer.root, peer.entered = height, compute_values_root(view.roster, values), peer.time
    if height > peer.recalled:
        peer.ask_at = math.inf
    peer.forget_heights()
    return values


def _list_missing(peer: Peer, page: Page, checked: bool) -> tuple[bytes, ...]:
    """Members of whom I have no letter, or, where roots are ``checked``, none that follows from mine."""
    letters, root = page.letters, peer.root
    wrong = checked and page.roots != {root}
    missing = (k for k in peer.view.roster if k not in letters or (wrong and letters[k].message.previous != root))
    return tuple(sorted(missing))


def _ask_those_ahead(peer: Peer, height: int, asked: set[bytes], checked: bool) -> Story:
    """Ask each member that has completed this height, once, for what I miss of it: the answer is a round trip away."""
    missing = _list_missing(peer, peer.page(height), checked)
    for key in peer.others:
        if missing and key not in asked and peer.ahead.get(key, -1) >= height:
            asked.add(key)
            yield Send(key, m.PullMessages(height, missing))


def _find_difference(peer: Peer, page: Page) -> Letter | None:
    """A member's letter that names another root than mine. Of two letters of a member mine is the one that does not."""
    for key, second in list(page.seconds.items()):
        if page.letters[key].message.previous != peer.root == second.message.previous:
            page.choose(key, second.digest)
    members = (page.letters[key] for key in peer.view.roster if key in page.letters)
    return next((letter for letter in members if letter.message.previous != peer.root), None)


def _note_difference(peer: Peer, height: int, wrong: Letter) -> bool:
    """Raise an alarm with a message from everybody, and one that names another root; whether others will heed it."""
    epoch = peer.find_epoch(height)
    assert epoch is not None
    alarm = complete_alarm(epoch, m.Alarm(height, 0, (wrong.message,)))
    valid = is_valid_alarm(peer.run, peer.examiner, epoch, alarm)
    if valid:
        peer.alarms[height] = alarm
    return valid


def _pull(peer: Peer, height: int, work: float, checked: bool, early: bool) -> Story:
    """Ask for what is missing; if that takes long, also whether the run went on without me.

    ``early``: it may well be under way, so a few are asked. Nobody waits for one that only follows: it asks a few too.
    """
    missing = _list_missing(peer, peer.page(height), checked)
    asked = peer.others if peer.member and not early else peer.choose_some()
    if missing:
        yield Broadcast(asked, m.PullMessages(height, missing))
    patience = 8 * peer.config.delta + work if peer.member else peer.config.delta if peer.on_trial else 0.0
    if peer.time >= peer.entered + patience:
        yield Broadcast(asked, m.PullChain(peer.base.height))


# ---- Opening


def join_slow_path(peer: Peer) -> Story:
    """Join a slow path at the height that was completed last or at the next, if one is open."""
    _heed_another_root(peer)
    for height in (peer.level, peer.level + 1):
        epoch = peer.find_epoch(height)
        if epoch is None or peer.key not in epoch.view.roster or height not in epoch.heights:
            continue
        alarm = peer.alarms.get(height)
        if alarm is not None and not is_valid_alarm(peer.run, peer.examiner, epoch, alarm):
            del peer.alarms[height]  # I know better now what this height is
            alarm = None
        alarm = alarm or _gather_timeouts(peer, epoch, height)
        if alarm is not None and height not in epoch.settled:
            start, peer.join, peer.frozen = peer.now, None, peer.time
            try:
                epoch, height = yield from slow(peer, epoch, height, alarm)
            finally:
                peer.join, peer.frozen = join_slow_path, None
            peer.alarms.pop(height, None)
            epoch.settled.add(height)
            peer.pause(peer.now - start)
            peer.entered = peer.time
            return


def _heed_another_root(peer: Peer) -> None:
    """Before I have anything to say at the next height, look at what others name there.

    What the last height brought them differs if it is not what I would name. Then they may be in another phase than I,
    one that takes less time, and soon miss me.
    """
    height, view = peer.level, peer.view
    if not peer.member or height in peer.alarms or height + 1 in peer.transcript.heights:
        return
    epoch = peer.find_epoch(height)
    known = epoch is not None and epoch.heights.get(height) in epoch.phases and height not in epoch.settled
    if known and (height >= view.height or peer.riding):
        wrong = _find_difference(peer, peer.page(height + 1))
        if wrong is not None:
            _note_difference(peer, height, wrong)


def _gather_timeouts(peer: Peer, epoch: Transcript, height: int) -> m.Alarm | None:
    timeouts = peer.timeouts.get((height, 0))
    if not timeouts or len(timeouts) <= epoch.view.bound:
        return None
    named = Counter(key for x in timeouts.values() if isinstance(x.body, m.Timeout) for key in x.body.missing)
    missed = max(sorted(named), key=named.__getitem__, default=b"")  # no more than it takes to show that it is open
    said = [x.message for who, x in timeouts.items() if who in epoch.view.roster and misses(x, missed)]
    alarm = m.Alarm(height, 0, tuple(said[: epoch.view.bound + 1]))
    return alarm if is_valid_alarm(peer.run, peer.examiner, epoch, alarm) else None


# ---- Dolev-Strong


@dataclass(slots=True)
class _Exchange:
    """One round-based exchange: what was accepted, and where it goes."""

    peer: Peer
    epoch: Transcript
    height: int
    round: int
    seen: Seen = field(default_factory=Seen)
    accepted: set[bytes] = field(default_factory=set)
    offers: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    """What each member says it holds at its start."""
    known: dict[bytes, Letter] = field(default_factory=dict)
    """Letters of this height by digest, accepted or not."""
    supports: dict[bytes, Values] = field(default_factory=dict)
    """What each member itself put in for this height: the first letter of each sender."""
    certificate: list[Letter] | None = None
    prepared: list[Letter] | None = None
    shown: set[bytes] = field(default_factory=set)
    """Which prepared outcomes came with their votes."""

    def offer(self, letters: Sequence[Letter]) -> bool:
        """Take an item; whether it was news that others should have."""
        first, roster = letters[0], self.epoch.view.roster
        if len(letters) == 1 and first.message.domain is Domain.AGREED:
            page = {self.height: self.seen.here, self.height + 1: self.seen.next}.get(first.message.height)
            return page is not None and first.message.sender in roster and page.add(first)
        if len(letters) == 1 and isinstance(first.body, m.Join):
            return self._is_present(first) and self.seen.joins.setdefault(first.message.sender, first) is first
        if isinstance(first.body, m.Outcome):
            return self._is_prepared(letters) and self.note_prepared(letters)
        if self.certificate is None and self._is_complete(letters):
            self.certificate = list(letters)
            return True
        return False

    def _is_present(self, letter: Letter) -> bool:
        """Whether a suspended member says that it is there: in this round, or the one before, and holds the state."""
        body, view = letter.body, self.epoch.view
        suspended = any(member.key == letter.message.sender for member in view.suspended)
        return suspended and isinstance(body, m.Join) and body.view == view.digest and body.round >= self.round - 1

    def note_prepared(self, letters: Sequence[Letter]) -> bool:
        """Take a quorum of first votes, and go by the latest; whether it was new."""
        name = _name_outcome(letters[0])
        if name in self.shown:
            return False
        self.shown.add(name)
        if self.prepared is None or self._get_rank(letters[0]) > self._get_rank(self.prepared[0]):
            self.prepared = list(letters)
        return True

    @property
    def is_bound(self) -> bool:
        """Whether this height may be settled already: what others show of the next one comes too late then."""
        return self.prepared is not None and self.prepared[0].message.height == self.height

    def _get_rank(self, vote: Letter) -> tuple[bool, int]:
        """Votes of this height come after those of the next: nobody goes up again before this one is settled."""
        assert isinstance(vote.body, m.Outcome)
        return vote.message.height == self.height, vote.body.round

    def note_gossip(self, member: bytes, gossip: m.Gossip) -> bool:
        """What a member holds and put in; whether it has said so for the first time.

        What it puts in comes in one message or several: what it passes on bears an endorsement, this does not.
        """
        letters: Values = {}
        for relay in gossip.items if member in self.epoch.view.roster else ():
            message = relay.messages[0]
            own = message.height == self.height and message.domain is Domain.AGREED and not relay.endorsements
            if own and message.run == self.peer.run and message.sender not in self.supports.get(member, ()):
                letter = self.peer.examiner.examine(message)
                if letter is not None:
                    self.known[letter.digest] = letter
                    letters.setdefault(message.sender, letter)
        if letters:
            self.note_support(member, letters)
        roster = self.epoch.view.roster
        fresh = len(gossip.held) == 2 * len(roster) and member in roster and member not in self.offers
        if fresh:
            self.offers[member] = gossip.held
        return fresh

    def describe(self) -> tuple[bytes, ...]:
        """What I hold, for those who hold more."""
        return tuple(
            b"".join(letter.digest for letter in page.get_all(key))
            for page in (self.seen.here, self.seen.next)
            for key in self.epoch.view.roster
        )

    def find_lacking(self, member: bytes) -> list[Letter]:
        """Letters that the member does not hold and that I am to show it: the first ``bound + 1`` that hold one do.

        One of them is honest, as nobody counts that does not say that it holds it.
        """
        roster, bound = self.epoch.view.roster, self.epoch.view.bound
        start, count = roster.index(member), len(roster)
        before = [roster[(start + turn) % count] for turn in range(1, (roster.index(self.peer.key) - start) % count)]
        found = []
        for offset, page in ((0, self.seen.here), (count, self.seen.next)):
            for place, key in enumerate(roster, offset):
                for letter in page.get_all(key):
                    if not _is_listed(letter, self.offers[member][place]):
                        claims = sum(k in self.offers and _is_listed(letter, self.offers[k][place]) for k in before)
                        found += [letter] if claims <= bound else []
        return found

    def find_audience(self, letters: Sequence[Letter], others: Sequence[bytes]) -> tuple[bytes, ...]:
        """Who may not hold an item."""
        first = letters[0]
        if len(letters) > 1 and first.message.domain is Domain.AGREED:  # those who are past it know
            return tuple(key for key in others if self.peer.ahead.get(key, -1) <= self.height)
        if first.message.domain is not Domain.AGREED:
            return tuple(others)
        roster = self.epoch.view.roster
        place = roster.index(first.message.sender) + len(roster) * (first.message.height - self.height)
        holding = {key for key, held in self.offers.items() if _is_listed(first, held[place])}
        if len(holding) > self.epoch.view.bound:  # one of them is honest, and shows it to all that lack it
            return ()
        return tuple(key for key in others if key not in holding)

    def note_offers(self) -> None:
        """Whoever has named a root holds what it follows from: what each says it holds is what it stands on."""
        roster = self.epoch.view.roster
        for held in self.offers.values():
            letters = [self.known.get(digests[:DIGEST_SIZE]) for digests in held[: len(roster)]]
            values = {x.message.sender: x for x in letters if x is not None}
            if tuple(values) == roster:
                self.seen.supports[compute_values_root(roster, values)] = values

    def note_known(self, letter: Letter) -> None:
        if is_agreed(letter, self.height):
            self.known[letter.digest] = letter

    def note_support(self, member: bytes, letters: Values) -> None:
        roster, held = self.epoch.view.roster, self.supports.setdefault(member, {})
        held |= letters
        self.known |= {letter.digest: letter for letter in letters.values()}
        if all(key in held for key in roster):
            values = {key: held[key] for key in roster}
            self.seen.supports[compute_values_root(roster, values)] = values

    def _is_complete(self, letters: Sequence[Letter]) -> bool:
        """Whether these are all messages of the next height: then nobody honest is left behind at this one."""
        sealing = self.epoch.sealing if self.epoch.heights.get(self.height) in SEALING else None
        roster = sealing.roster if sealing is not None else self.epoch.view.roster
        roots = {x.message.sender: x.message.previous for x in letters if is_agreed(x, self.height + 1)}
        if not set(roster) <= roots.keys():
            return False
        if sealing is None:
            return len({roots[key] for key in roster}) == 1
        # Who names another root in a COMMIT takes part in it all the same, and is removed for it later.
        return sum(roots[key] == sealing.previous for key in roster) >= len(roster) - sealing.bound

    def _is_prepared(self, letters: Sequence[Letter]) -> bool:
        if not all(isinstance(x.body, m.Outcome) for x in letters):
            return False
        bodies = {_core(x) for x in letters}
        place = letters[0].message.height
        if place not in (self.height, self.height + 1):  # whoever came down from the next height brings what it holds
            return False
        view = _get_electorate(self.peer, self.epoch, place)
        signers = {x.message.sender for x in letters if x.message.height == place} & set(view.roster)
        rounds = {x.body.round if isinstance(x.body, m.Outcome) and not x.body.final else -1 for x in letters}
        return (
            len(bodies) == 1
            and len(rounds) == 1
            and len({x.message.height for x in letters}) == 1
            and (letters[0].message.height > self.height or 0 <= min(rounds) < self.round)
            and len(signers) >= compute_quorum(self.peer.config, view)
        )


def _is_listed(letter: Letter, held: bytes) -> bool:
    return letter.digest in (held[:DIGEST_SIZE], held[DIGEST_SIZE:])


class _Below(Exception):  # noqa: N818
    """A slow path is open at the height before: that one comes first."""


class _Later(Exception):  # noqa: N818
    """Others are in a later round already: those who were apart find together in it."""

    def __init__(self, alarm: m.Alarm) -> None:
        super().__init__()
        self.alarm = alarm


def slow(peer: Peer, epoch: Transcript, height: int, alarm: m.Alarm) -> Story:
    """Run the slow path at a height until it is settled: return to the fast path, or raise :class:`Lost`.

    Returns the height that was settled, and its attempt: the one before, if others needed that first.
    """
    prepared = _recall_prepared(peer, epoch, height)
    halted = False
    while True:
        try:
            round_, others = alarm.round, _others(peer, epoch)
            yield Note(SlowPath(epoch.view.step, epoch.view.attempt, height, epoch.heights[height]))
            while True:
                yield from _spread_alarm(peer, epoch, alarm)
                exchange = _Exchange(peer, epoch, height, round_)
                if prepared is not None:
                    exchange.note_prepared(prepared)
                yield from _exchange_items(exchange, others)
                if exchange.certificate is not None and not exchange.is_bound:
                    # An equivocator may have given me another letter before: those who went on stand on these.
                    peer.page(height + 1).settled |= {x.message.sender: x.digest for x in exchange.certificate}
                    for letter in exchange.certificate:
                        peer.take(letter.message)
                    yield from _catch_up(peer, epoch, height, exchange.certificate[0].message.previous)
                    return epoch, height
                final = _find_final(peer, epoch, height) or _find_departure(peer, epoch, height + 1)
                core = _choose(exchange) if final is None else None
                if final is None and core is None and peer.lacking:
                    yield from _fetch_lacking(peer, others)
                    core = _choose(exchange)
                if core is not None:
                    final, mine = yield from _vote(exchange, core)
                    prepared = mine or prepared
                if final is not None:
                    if halted:
                        yield Note(Resumed(epoch.view.step))
                    yield from _settle(exchange, final, others)
                    return epoch, height
                if not halted:
                    here = peer.page(height).letters
                    missing = tuple(sorted(key for key in epoch.view.roster if key not in here))
                    yield Note(Halted(epoch.view.step, height, missing))
                    halted = True
                yield from _await_round(exchange, alarm, prepared, core is not None, others)
        except _Later as later:
            alarm = later.alarm
        except _Below:
            height -= 1
            lower = peer.find_epoch(height)
            assert lower is not None
            epoch, alarm = lower, peer.alarms[height]
        prepared = _recall_prepared(peer, epoch, height) or prepared  # I may just have voted for it


def _look_below(peer: Peer, height: int) -> None:
    """Those who lag need this height's predecessor settled first; they cannot come here."""
    below = height - 1
    if below not in peer.alarms or below < peer.level:
        return
    epoch = peer.find_epoch(below)
    if epoch is not None and below in epoch.heights and below not in epoch.settled:
        raise _Below


def _look_ahead(peer: Peer, epoch: Transcript, height: int, round_: int) -> None:
    """More than ``bound`` members say that a later round was needed: one of them is honest."""
    for (place, later), timeouts in peer.timeouts.items():
        if place == height and later > round_:
            signers = tuple(x.message for who, x in timeouts.items() if who in epoch.view.roster)
            if len(signers) > epoch.view.bound:
                raise _Later(m.Alarm(height, later, signers))


def _others(peer: Peer, epoch: Transcript) -> tuple[bytes, ...]:
    return tuple(key for key in epoch.view.roster if key != peer.key)


def _spread_alarm(peer: Peer, epoch: Transcript, alarm: m.Alarm) -> Story:
    """Show why a slow path is open to those who may not know: also to suspended members, which may be needed.

    Where a letter names another root, that letter is enough for those who have named the root that I have: they hold
    what I hold. All others may hold other letters of an equivocator, and are shown mine.
    """
    view, said = epoch.view, peer.timeouts.get((alarm.height, alarm.round), {})
    absent = (*(x.key for x in view.suspended), *(x.key for x in view.candidates))
    hearers = [key for key in (*view.roster, *absent) if key not in said and key != peer.key]
    mine = [x for x in alarm.evidence if x.domain is Domain.AGREED and x.height == alarm.height]
    alike: list[bytes] = []
    if mine:
        letters = {x.sender: letter for x in mine if (letter := peer.examiner.examine(x)) is not None}
        root = compute_values_root(view.roster, letters)
        beyond = peer.page(alarm.height + 1).letters
        alike = [key for key in hearers if key in beyond and beyond[key].message.previous == root]
    rest = tuple(key for key in hearers if key not in alike)
    if alike:
        told = tuple(x for x in alarm.evidence if x not in mine)
        yield Broadcast(tuple(alike), m.Alarm(alarm.height, alarm.round, told))
    if rest and alarm.evidence:
        yield Broadcast(rest, alarm)


def _exchange_items(exchange: _Exchange, others: tuple[bytes, ...]) -> Story:
    """``bound + 1`` rounds: put in what I hold, accept what has enough signatures, pass it on with mine."""
    peer, height, round_ = exchange.peer, exchange.height, exchange.round
    view, length = exchange.epoch.view, 2 * peer.config.delta
    if round_ > 0:
        yield from _say_failed(peer, exchange.epoch, height, round_, exchange.prepared, others)
    begin = peer.now + peer.config.delta / 4  # what is under way to all need not be passed on by all
    while peer.now < begin and _find_final(peer, exchange.epoch, height) is None:
        yield from peer.receive(begin)
        _look_below(peer, height)
        _look_ahead(peer, exchange.epoch, height, round_)
    own: list[m.Relay] = []
    exchange.note_support(peer.key, peer.page(height).letters)
    for letter in _held(peer, view.roster, height):
        exchange.note_known(letter)  # also the second of two: what I say I hold, nobody shows me
        if exchange.offer([letter]):
            exchange.accepted.add(compute_item_digest([letter]))
            if isinstance(letter.body, m.Join):  # its sender has no voice: mine is the first
                own.append((yield from _endorse(exchange, [letter], ())))
    if exchange.prepared is not None:
        own.append((yield from _endorse(exchange, exchange.prepared, ())))
    held = exchange.describe()
    for items in _split(own):
        yield Broadcast(others, m.Gossip(height, round_, items, held))
        held = ()
    start = peer.now
    end = start + max(2, view.bound + 1) * length  # what one holds at its start all have in the second round
    due, unshown = start + 0.75 * length, list[bytes]()
    while True:
        queues = peer.gossip.get((height, round_), {})
        number = int((peer.now - start) / length) + 1
        for sender in list(queues):
            for gossip in queues.pop(sender):
                if exchange.note_gossip(sender, gossip):
                    unshown.append(sender)
                for relay in gossip.items:
                    letters = _accept(exchange, relay, number)
                    if letters and exchange.offer(letters):
                        passed = yield from _endorse(exchange, letters, relay.endorsements)
                        audience = exchange.find_audience(letters, others)
                        if audience:
                            yield Broadcast(audience, m.Gossip(height, round_, (passed,), ()))
        if unshown and (peer.now >= due or len(exchange.offers) >= len(others)):
            for member in unshown:
                yield from _show(exchange, member)
            unshown.clear()
        outrun = exchange.certificate is not None and not exchange.is_bound
        if outrun or peer.now >= end or _find_final(peer, exchange.epoch, height) is not None:
            return
        if _find_departure(peer, exchange.epoch, height + 1) is not None:
            return
        yield from peer.receive(min(end, due) if unshown else end)
        _look_below(peer, height)
        _look_ahead(peer, exchange.epoch, height, round_)


def _show(exchange: _Exchange, member: bytes) -> Story:
    """Show a member what I hold and it does not."""
    relays = []
    for letter in exchange.find_lacking(member):
        relays.append((yield from _endorse(exchange, [letter], ())))
    for items in _split(relays) if relays else ():
        yield Send(member, m.Gossip(exchange.height, exchange.round, items, ()))


def _split(items: Sequence[m.Relay]) -> list[tuple[m.Relay, ...]]:
    """Items in as many groups as they need, so that each fits a frame."""
    groups: list[list[m.Relay]] = [[]]
    weight = 0
    for item in items:
        weight += weigh_items((item,))
        if weight > m.MAX_FRAME // 4 and groups[-1]:
            groups.append([])
            weight = weigh_items((item,))
        groups[-1].append(item)
    return [tuple(group) for group in groups]


def _held(peer: Peer, roster: Sequence[bytes], height: int) -> list[Letter]:
    pages = [peer.page(height), peer.page(height + 1)]
    letters = [letter for page in pages for key in roster for letter in page.get_all(key)]
    return letters + [peer.joins[key] for key in sorted(peer.absent) if key in peer.joins]


def _accept(exchange: _Exchange, relay: m.Relay, number: int) -> list[Letter] | None:
    """The letters of an item that has the signatures that round ``number`` asks for."""
    peer = exchange.peer
    letters = []
    for message in relay.messages:
        letter = peer.examiner.examine(message) if message.run == peer.run else None
        if letter is None:
            return None
        letters.append(letter)
        exchange.note_known(letter)
    item = compute_item_digest(letters)
    if item in exchange.accepted:
        return None
    signers = {relay.messages[0].sender} if len(relay.messages) == 1 else set()
    for endorsement in relay.endorsements:
        letter = peer.examiner.examine(endorsement) if endorsement.run == peer.run else None
        body = letter.body if letter is not None else None
        here = endorsement.height == exchange.height
        if here and isinstance(body, m.Endorsement) and (body.round, body.item) == (exchange.round, item):
            signers.add(endorsement.sender)
    if len(signers & set(exchange.epoch.view.roster)) < number:
        return None
    exchange.accepted.add(item)
    return letters


def _endorse(exchange: _Exchange, letters: Sequence[Letter], endorsements: tuple[Signed, ...]) -> Story:
    view = exchange.epoch.view
    body = m.Endorsement(exchange.round, compute_item_digest(letters))
    mine = yield Sign(exchange.height, view.step, view.attempt, Phase.COMMIT, bytes(32), body)
    return m.Relay(tuple(x.message for x in letters), (*endorsements[: m.MAX_MEMBERS - 1], mine))


def _catch_up(peer: Peer, epoch: Transcript, height: int, root: bytes) -> Story:
    """Everybody is past this height: get its messages until they have the root that was named."""
    if peer.level >= height or epoch.heights.get(height) in SEALING:
        return
    peer.seek(height, root, epoch.view.roster)
    again = peer.now
    while peer.sought is None:
        if peer.now >= again:
            again = peer.now + peer.config.delta
            yield Broadcast(peer.others, m.PullMessages(height, tuple(sorted(epoch.view.roster))))
        yield from peer.receive(again)
    peer.page(height).letters.update(peer.sought)
    peer.seeking = None


# ---- Settling


def _choose(exchange: _Exchange) -> m.Outcome | None:
    """What to vote for: what may have been settled in an earlier round, or else the conclusion from what was seen."""
    peer, epoch = exchange.peer, exchange.epoch
    if exchange.round > 0:
        # Two quorums share an honest member: if an earlier round was settled, one of these says what is prepared. Its
        # word counts only together with the votes behind it, or they could be late and it would go unheeded.
        said = peer.timeouts.get((exchange.height, exchange.round), {})
        status = [x.body for who, x in said.items() if who in epoch.view.roster]
        heard = [x for x in status if isinstance(x, m.Timeout) and (x.prepared is None or x.prepared in exchange.shown)]
        if len(heard) < compute_quorum(peer.config, epoch.view):
            return None
    resolution = _resolve(exchange)
    view = peer.follow(peer, epoch, exchange.height, resolution) if resolution is not None else None
    if view is not None:
        epoch.outcomes[view.digest] = view
    if exchange.prepared is not None:
        body = exchange.prepared[0].body
        assert isinstance(body, m.Outcome)
        return msgspec.structs.replace(body, round=0, final=False)
    if resolution is None or view is None:
        return None
    settlement = m.Settlement(resolution.slots, tuple(sorted(resolution.out)), resolution.stands)
    digest = compute_settlement_digest(settlement)
    peer.settlements[digest] = settlement
    return m.Outcome(0, False, digest, bool(resolution.out), view.digest)


def _resolve(exchange: _Exchange) -> Resolution | None:
    peer, epoch = exchange.peer, exchange.epoch
    view = epoch.view
    exchange.note_offers()

    # Where the next view is being sealed, what it has decided is behind it: a ban may have lowered the floor.
    base = (epoch.sealing if epoch.heights.get(exchange.height) in SEALING else None) or view
    patient = exchange.round >= _PATIENT_ROUNDS

    def choose(banned: frozenset[bytes], removed: frozenset[bytes], stands: bool) -> frozenset[bytes] | None:
        changes = Changes(banned, removed)
        return find_replacements(peer.config, base, changes, exchange.seen.joins, stands, exchange.round, patient)

    return resolve(
        exchange.height,
        view.roster,
        view.bound,
        exchange.seen,
        choose,
        get_successor(epoch, exchange.height),
        patient,
    )


def _name_outcome(vote: Letter) -> bytes:
    return compute_digest("outcome", _core(vote))


def _core(letter: Letter) -> bytes:
    """What a vote is for, whatever its round and stage."""
    assert isinstance(letter.body, m.Outcome)
    return encode(msgspec.structs.replace(letter.body, round=0, final=False))


def _vote(exchange: _Exchange, core: m.Outcome) -> Story:
    """Two votes. Returns a quorum of final votes and one of first votes, where there is one."""
    peer, epoch, height, round_ = exchange.peer, exchange.epoch, exchange.height, exchange.round
    view, delta, others = epoch.view, peer.config.delta, _others(peer, epoch)
    quorum, wanted = compute_quorum(peer.config, view), encode(core)
    firsts: list[Letter] | None = None
    roster = compute_roster_digest(view.roster)
    for final in (False, True):
        body = msgspec.structs.replace(core, round=round_, final=final)
        vote = yield Sign(height, view.step, view.attempt, epoch.heights[height], roster, body)
        peer.take(vote)
        yield Broadcast(others, vote)
        end = peer.now + 3 * delta
        while True:
            _look_below(peer, height)
            _look_ahead(peer, epoch, height, round_)
            settled = _find_final(peer, epoch, height)
            if settled is not None:
                return settled, firsts
            votes = [
                x
                for who, x in peer.votes.get((height, round_, final), {}).items()
                if who in view.roster and _core(x) == wanted
            ]
            if len(votes) >= quorum:
                break
            if peer.now >= end:
                return None, firsts
            yield from peer.receive(end)
        if not final:
            firsts = votes[:quorum]
            yield KeepMessages(height, Heard.VOTES, tuple(x.message for x in firsts))
    raise AssertionError("a quorum of final votes was not found")


def _recall_prepared(peer: Peer, epoch: Transcript, height: int) -> list[Letter] | None:
    """The latest quorum of first votes that I hold. I may have cast a final vote for it, and crashed."""
    places = [ballot for ballot in peer.votes if ballot[0] in (height, height + 1) and not ballot[2]]
    for place, round_, final in sorted(places, key=lambda ballot: (ballot[0] == height, ballot[1]), reverse=True):
        found = _find_quorum(peer, _get_electorate(peer, epoch, place), peer.votes[place, round_, final])
        if found is not None:
            return found
    return None


def _get_electorate(peer: Peer, epoch: Transcript, height: int) -> View:
    """The view whose members vote at a height: of this attempt, or, if it was the last of it, of the next."""
    later = peer.find_epoch(height)
    if later is not None and later.view.height > epoch.view.height:
        return later.view
    sealing = epoch.sealing if epoch.heights.get(height - 1) in SEALING else None
    return sealing or epoch.view


def _find_final(peer: Peer, epoch: Transcript, height: int) -> list[Letter] | None:
    """A quorum of final votes of one round for one outcome, if it is here."""
    view = _get_electorate(peer, epoch, height)
    for (place, _, final), votes in peer.votes.items():
        found = _find_quorum(peer, view, votes) if place == height and final else None
        if found is not None:
            return found
    return None


def _find_quorum(peer: Peer, view: View, votes: Values) -> list[Letter] | None:
    """As many of one ballot's votes for one outcome as settle it, if they are here."""
    quorum, groups = compute_quorum(peer.config, view), dict[bytes, list[Letter]]()
    for who, letter in votes.items() if len(votes) >= quorum else ():
        if who in view.roster:
            groups.setdefault(_core(letter), []).append(letter)
    return next((group[:quorum] for group in groups.values() if len(group) >= quorum), None)


def _find_departure(peer: Peer, epoch: Transcript, height: int) -> list[Letter] | None:
    """Final votes at the next height that put somebody out: whoever cast them came down from there too late."""
    final = _find_final(peer, epoch, height)
    return final if final is not None and isinstance(final[0].body, m.Outcome) and final[0].body.ends else None


def _settle(exchange: _Exchange, final: list[Letter], others: tuple[bytes, ...]) -> Story:
    """Go on as the final votes say: on the fast path with the letters seen, or from a new view."""
    peer, epoch = exchange.peer, exchange.epoch
    settled, messages = final[0].body, tuple(x.message for x in final)
    assert isinstance(settled, m.Outcome)
    peer.finals[messages[0].height] = messages
    yield from _share_final(exchange, final, settled)
    if not settled.ends:
        yield from _take_slots(peer, exchange, settled)
        _note_late(peer, exchange.height)  # only now the letters that came all the same are on my page
        return
    for page in (exchange.seen.here, exchange.seen.next):  # two of one sender are evidence
        for letter in (*page.letters.values(), *page.seconds.values()):
            peer.take(letter.message)
    known = (x.outcomes[settled.view] for x in peer.transcripts.values() if settled.view in x.outcomes)
    view = next(known, None)  # of this attempt, or of the next, if those who came down from there had settled it
    if view is not None:
        raise Lost(view, messages, epoch)
    while True:  # somebody who voted has the view; when it comes, Lost is raised
        yield Broadcast(peer.choose_some(), m.PullChain(peer.base.height))
        end = peer.now + peer.config.delta
        while peer.now < end:
            yield from peer.receive(end)


def _share_final(exchange: _Exchange, final: list[Letter], settled: m.Outcome) -> Story:
    """Everybody sends its own final vote to all. Show a quorum to those that may lack one: who stays and cast none."""
    peer, place = exchange.peer, final[0].message.height
    known = peer.settlements.get(settled.settlement)
    gone = known.out if known is not None else ()
    staying = {key for key in _get_electorate(peer, exchange.epoch, place).roster if key not in gone} - {peer.key}
    end = peer.now + peer.config.delta

    def find_rest() -> set[bytes]:
        voted = (who for (at, _, is_final), votes in peer.votes.items() if at == place and is_final for who in votes)
        return staying.difference(voted)

    while peer.now < end and find_rest():
        yield from peer.receive(end)
    rest = tuple(sorted(find_rest()))
    if rest:
        yield Broadcast(rest, m.Certificate(tuple(letter.message for letter in final)))


def _note_late(peer: Peer, height: int) -> None:
    """Those that were missed in time and that came all the same: by me, or by more members than may lie.

    If others say so too, that is a strike. If I missed half of them or more, it was my line.
    """
    timeouts, members, letters = peer.timeouts.get((height, 0), {}), peer.view.roster, peer.page(height).letters
    bodies = {who: x.body for who, x in timeouts.items() if who in members and isinstance(x.body, m.Timeout)}
    mine = bodies[peer.key].missing if peer.key in bodies else ()
    named = Counter(key for who, body in bodies.items() for key in body.missing if key != who)
    late = {key for key, count in named.items() if count > max(1, peer.view.bound)}
    late |= {*mine} if 2 * len(mine) < len(members) else set()
    peer.late |= {key for key in late if key in letters}


def _take_slots(peer: Peer, exchange: _Exchange, settled: m.Outcome) -> Story:
    """Hold the letters that the outcome names, asking for them if need be."""
    page, digest, again = peer.page(exchange.height), settled.settlement, peer.now
    while digest not in peer.settlements:
        if peer.now >= again:
            again = peer.now + peer.config.delta
            peer.asked.add(("settlement", peer.view.step, digest))
            yield Broadcast(_others(peer, exchange.epoch), m.PullSettlement(digest))
        yield from peer.receive(again)
    slots = peer.settlements[digest].slots
    wanted = {slot.owner: slot.value for slot in slots if slot.height == exchange.height}
    page.settled = {key: value for key, value in wanted.items() if value is not None}
    for seen in (exchange.seen.here, exchange.seen.next):
        for letter in seen.letters.values():
            peer.take(letter.message)
    again = peer.now
    while lacking := tuple(sorted(key for key, value in page.settled.items() if not page.choose(key, value))):
        if peer.now >= again:
            again = peer.now + peer.config.delta
            yield Broadcast(peer.others, m.PullMessages(exchange.height, lacking))
        yield from peer.receive(again)


def _ask_lacking(peer: Peer, others: tuple[bytes, ...]) -> Story:
    for digest in sorted(peer.lacking - peer.cases.keys()):
        peer.asked.add(("case", peer.view.step, digest))
        yield Broadcast(others, m.PullProof(digest))


def _fetch_lacking(peer: Peer, others: tuple[bytes, ...]) -> Story:
    """The cases without which I cannot tell how the step ends: a round trip, while others vote."""
    yield from _ask_lacking(peer, others)
    end = peer.now + 2 * peer.config.delta
    while peer.now < end and peer.lacking - peer.cases.keys():
        yield from peer.receive(end)


def _say_failed(
    peer: Peer, epoch: Transcript, height: int, round_: int, prepared: list[Letter] | None, others: tuple[bytes, ...]
) -> Story:
    """The round before ``round_`` brought no quorum; this is what I hold of it."""
    name = _name_outcome(prepared[0]) if prepared is not None else None
    body = m.Timeout((), round_, name)
    timeout = yield Sign(height, epoch.view.step, epoch.view.attempt, epoch.heights[height], bytes(32), body)
    peer.take(timeout)
    yield Broadcast(others, timeout)


def _await_round(
    exchange: _Exchange, alarm: m.Alarm, prepared: list[Letter] | None, is_open: bool, others: tuple[bytes, ...]
) -> Story:
    """Wait until another round may bring more, and say so until enough do; then they begin it together.

    ``is_open``: the last round lacked only votes. Otherwise nothing is repeated before somebody comes whom it missed.
    """
    peer, epoch, height, round_ = exchange.peer, exchange.epoch, exchange.height, exchange.round
    delta = peer.config.delta
    missed = {key for key in epoch.view.roster if key not in exchange.seen.here.letters}
    patience, said = peer.now + _LONGEST_WAIT * delta, is_open
    while True:
        if not said and (peer.now >= patience or _is_hopeful(exchange)):
            said = True
            found = [letter.message for key, letter in peer.page(height).letters.items() if key in missed]
            if found:
                yield Broadcast(others, m.Certificate(tuple(found)))
        if said:
            yield from _say_failed(peer, epoch, height, round_ + 1, prepared, others)
        else:  # for those who come back
            yield from _spread_alarm(peer, epoch, alarm)
        yield Broadcast(peer.choose_some(), m.PullChain(peer.base.height))
        yield from _ask_lacking(peer, others)
        end, known = peer.now + 4 * delta, _count_held(peer, height)
        while peer.now < end and (said or known == _count_held(peer, height)):
            _look_below(peer, height)
            _look_ahead(peer, epoch, height, round_)
            if _find_final(peer, epoch, height) is not None:
                raise _Later(m.Alarm(height, round_, ()))
            yield from peer.receive(end)
            _take_gossip(peer, height, round_)


def _count_held(peer: Peer, height: int) -> tuple[int, int]:
    """Grows when somebody comes that a round may have missed."""
    rounds = (x.body.round + 1 for x in peer.joins.values() if isinstance(x.body, m.Join))
    return len(peer.page(height).letters), sum(rounds)


def _take_gossip(peer: Peer, height: int, round_: int) -> None:
    """Letters that one who comes late puts into a round that is over."""
    for pile in peer.gossip.pop((height, round_), {}).values():
        for relay in (relay for gossip in pile for relay in gossip.items):
            if len(relay.messages) == 1 and relay.messages[0].domain is Domain.AGREED:
                peer.take(relay.messages[0])


def _is_hopeful(exchange: _Exchange) -> bool:
    """Whether the next round would end if all held what I hold."""
    peer, height, round_ = exchange.peer, exchange.height, exchange.round + 1
    trial = _Exchange(peer, exchange.epoch, height, round_)
    trial.note_support(peer.key, peer.page(height).letters)
    for letter in _held(peer, exchange.epoch.view.roster, height):
        trial.offer([letter])
    return _resolve(trial) is not None
