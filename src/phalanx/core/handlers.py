"""What a peer does with each kind of direct message, whatever it is waiting for at the time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary

from phalanx.core import messages as m
from phalanx.core.certificates import find_certificate, find_phase
from phalanx.core.crypto import Domain
from phalanx.core.effects import Broadcast, Effect, ReadState, Send, Sign, Story
from phalanx.core.membership import decode_view, encode_view, is_another_electorate
from phalanx.core.merkle import hash_part
from phalanx.core.messages import MAX_CHUNK, Phase
from phalanx.core.peer import FUTURE_HEIGHTS, KEPT_ROUNDS, Handler, Lost, Peer, Pile, compute_case_digest
from phalanx.core.slowpath import (
    complete_alarm,
    compute_item_digest,
    compute_settlement_digest,
    is_valid_alarm,
    weigh_items,
    weigh_messages,
)
from phalanx.core.transcript import Page, Values, compute_values_root
from phalanx.core.wire import Piece

_GOSSIP_BYTES = 1 << 22
_GOSSIP_BYTES_EACH = 1 << 18
"""What is kept of one member's gossip, and more for each member: four messages of each, and what comes with them."""
_STATE_BYTES = 64
"""No state has more bytes than this for each coordinate: parameters, and what optimizers keep of them."""
_STATE_RATE = 1 << 22
"""Bytes of state a second for all strangers together, and as many for all former members: more than the network sends
to strangers, where it is decided whose turn it is."""
_STATE_COST = 1 << 16
"""Bytes that a request for state counts at least, whatever the answer: 64 a second, more than the network takes."""
_ANSWERS = 64
"""Messages of one kind from one peer that are taken up within ``delta``."""

_OF_ONE_SENDER = 8
"""Messages that a certificate may hold of one sender: of an honest one there is one at a height."""


def _may_answer(peer: Peer, sender: bytes, kind: type, most: int = _ANSWERS, strangers: int = _ANSWERS) -> bool:
    return peer.may_take(sender, kind, most, strangers)


def _may_send_bytes(peer: Peer, sender: bytes, kind: type) -> bool:
    members = len(peer.view.roster)
    return _may_answer(peer, sender, kind, _ANSWERS + members * members // 2, 2 * members)


def _on_part(peer: Peer, sender: bytes, message: m.PartChunk) -> Iterable[Effect]:
    is_news = peer.store_part(sender, message)
    return pass_on(peer) if is_news and sender == message.owner in peer.bypass else ()


def _on_aggregate(peer: Peer, sender: bytes, message: m.AggregateChunk) -> Iterable[Effect]:
    is_news = peer.store_aggregate(sender, message)
    return pass_on(peer) if is_news and sender in peer.bypass else ()


def pass_on(peer: Peer) -> Story:
    """Send what is between two members that have a rift, once, if it is what its owner has committed to."""
    view = peer.view
    for key, other in peer.relayed:
        step, part = (view.step, view.attempt), view.roster.index(key)
        mine = (*step, key, view.roster.index(other))
        if mine not in peer.passed and mine in peer.parts:
            data = peer.get_part(mine)
            if data is not None:
                peer.passed.add(mine)
                yield from send_part(peer, (other,), mine, data)
        said, held = (peer.transcript.aggregates or {}).get(key), peer.aggregates.get((*step, part))
        result = said.body.result if said is not None and isinstance(said.body, m.Aggregate) else None
        if held is not None and (*step, part, other) not in peer.passed and hash_part(held) == result:
            peer.passed.add((*step, part, other))
            yield from send_aggregate((other,), *step, part, held)


def _on_certificate(peer: Peer, sender: bytes, message: m.Certificate) -> Story:
    if sender not in peer.circle or not _may_answer(peer, sender, m.Certificate):
        return
    if peer.now - peer.forgers.get(sender, -math.inf) < peer.config.delta:
        return
    known, count = peer.forgeries, Counter[bytes]()
    messages = []
    for signed in message.messages:
        count[signed.sender] += 1
        if count[signed.sender] > _OF_ONE_SENDER:  # who signs without end would have us check without end
            continue
        messages.append(signed)
        yield from peer.take(signed)
        if peer.forgeries > known:  # nobody honest passes on what it has not checked
            peer.forgers[sender] = peer.now
            return
    if peer.seeking is not None:
        height, root, roster = peer.seeking
        letters: Values = {}
        for signed in messages:
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


class _Budget:
    """Bytes of state, for those who are no members or candidates: as many at once as come together in ``delta``."""

    __slots__ = ("since", "spent")

    def __init__(self) -> None:
        self.since, self.spent = 0.0, 0.0

    def may_ask(self, peer: Peer) -> bool:
        """Whether something is left, which a request then takes a little of."""
        config = peer.config
        rate = max(_STATE_RATE, 8 * config.size / max(config.transfer_time, 1.0))
        self.spent = max(0.0, self.spent - rate * (peer.now - self.since))
        self.since = peer.now
        if self.spent >= rate * config.delta:
            return False
        self.spent += _STATE_COST
        return True

    def pay(self, size: int) -> None:
        self.spent += max(0, size - _STATE_COST)


_budgets: WeakKeyDictionary[Peer, tuple[_Budget, _Budget]] = WeakKeyDictionary()
"""Each peer's, for strangers and for former members. They outlast attempts: a quick run gives strangers no more."""


def _find_budget(peer: Peer, sender: bytes) -> _Budget | None:
    """What a state is paid from; None for members and candidates, who need not wait for others."""
    if sender in peer.circle:
        return None
    return _budgets.setdefault(peer, (_Budget(), _Budget()))[
        any(absence.key == sender for absence in peer.view.absences)
    ]


def _on_pull_state(peer: Peer, sender: bytes, message: m.PullState) -> Story:
    if message.step > peer.view.step:
        return
    budget = _find_budget(peer, sender)
    if not (budget.may_ask(peer) if budget is not None else _may_answer(peer, sender, m.PullState)):
        return
    data = yield ReadState(message.step)
    if data is not None and message.offset < len(data):
        piece = bytes(data[message.offset : message.offset + MAX_CHUNK])
        if budget is not None:
            budget.pay(len(piece))
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


def _on_pull_settlement(peer: Peer, sender: bytes, message: m.PullSettlement) -> Story:
    found = peer.settlements.get(message.settlement) if sender in peer.circle else None
    if found is not None and _may_answer(peer, sender, m.PullSettlement):
        yield Send(sender, found)


def _on_settlement(peer: Peer, sender: bytes, message: m.Settlement) -> Story:
    digest = compute_settlement_digest(message)
    if ("settlement", peer.view.step, digest) in peer.asked:
        peer.settlements[digest] = message
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
    if epoch is None:
        return
    message = complete_alarm(epoch, message)
    if not is_valid_alarm(peer.run, peer.examiner, epoch, message):
        one = message.evidence[0] if len(message.evidence) == 1 else None
        about = one is not None and one.domain is Domain.AGREED and one.height == message.height + 1
        if about and message.height == peer.level + 1 and peer.member:  # whether it names another root I cannot tell
            yield Send(sender, m.PullMessages(message.height, tuple(sorted(epoch.view.roster))))
        return
    if peer.key in peer.absent:
        if epoch is peer.transcript and peer.holding and not peer.leaving:
            yield from ask_back(peer, message.round)
        return
    if message.height >= peer.level:
        held = peer.alarms.get(message.height)
        if held is None or held.round < message.round:
            peer.alarms[message.height] = message
    elif (sender, message.height, message.round) not in peer.answered_alarms:
        peer.answered_alarms.add((sender, message.height, message.round))
        yield from answer_alarm(peer, sender, message)


def ask_back(peer: Peer, round_: int) -> Story:
    """Tell all members that I am there and hold the state, so that they let me in."""
    view = peer.view
    join = yield Sign(view.height, view.step, view.attempt, Phase.COMMIT, bytes(32), m.Join(view.digest, round_))
    yield Broadcast(peer.others, join)


def answer_alarm(peer: Peer, sender: bytes, alarm: m.Alarm) -> Story:
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
    yield Send(sender, m.Gossip(alarm.height, alarm.round, (relay,), ()))


def _on_gossip(peer: Peer, sender: bytes, message: m.Gossip) -> Story:
    near = peer.level - 1 <= message.height <= peer.level + FUTURE_HEIGHTS
    if near and (message.items or message.held) and sender in peer.circle:
        places = [place for place, queues in peer.gossip.items() if sender in queues]
        place = (message.height, message.round)
        if place not in places and len(places) >= KEPT_ROUNDS:  # of what one member sends the latest rounds are kept
            oldest = min(places)
            del peer.gossip[oldest][sender]
            if not peer.gossip[oldest]:
                del peer.gossip[oldest]
        pile = peer.gossip.setdefault(place, {}).setdefault(sender, Pile())
        weight = weigh_items(message.items) + sum(map(len, message.held))
        held = sum(x[sender].weight for x in peer.gossip.values() if sender in x)
        if held + weight <= _GOSSIP_BYTES + len(peer.circle) * _GOSSIP_BYTES_EACH:
            pile.append(message)
            pile.weight += weight
    yield from ()


HANDLERS: dict[type, Handler] = {
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
    m.PullSettlement: _on_pull_settlement,
    m.Settlement: _on_settlement,
    m.PullChain: _on_pull_chain,
    m.Accusation: _on_case,
    m.Equivocation: _on_case,
    m.WrongReveal: _on_case,
    m.WrongOpening: _on_case,
    m.MalformedBody: _on_case,
}
