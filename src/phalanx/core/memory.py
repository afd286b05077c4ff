"""What a peer has to remember of the last steps to go on after a stop as if there had been none.

A view alone starts a peer again, but it could no longer check what others committed to before: an attacker would cheat
right before every stop. :func:`remember` takes down what such checks need; :func:`recall` gives it to a new peer.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from phalanx.core import messages as m
from phalanx.core.codec import decode_message, encode
from phalanx.core.envelope import Letter
from phalanx.core.errors import Malformed
from phalanx.core.membership import compute_duties, decode_view, encode_view, find_last
from phalanx.core.merkle import compute_paths, hash_part
from phalanx.core.messages import Phase, Signed
from phalanx.core.peer import Own, Peer, compute_case_digest
from phalanx.core.transcript import Transcript


class _Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Said(_Record, frozen=True):
    """What all members said at one height."""

    height: int
    phase: Phase
    messages: tuple[Signed, ...]


class Epoch(_Record, frozen=True):
    """One attempt of a past step, as agreed."""

    view: bytes
    said: tuple[Said, ...]
    randomness: bytes | None
    served: dict[bytes, bytes]
    trials: tuple[Signed, ...]


class Aggregate(_Record, frozen=True):
    step: int
    attempt: int
    part: int
    data: bytes


class Link(_Record, frozen=True):
    """A view with another roster, and the messages that certify it."""

    view: bytes
    messages: tuple[Signed, ...]


class Shown(_Record, frozen=True):
    """The bytes that a peer committed to."""

    step: int
    attempt: int
    seed: bytes
    parts: tuple[bytes, ...]


class Memory(_Record, frozen=True):
    """The same for all honest members that start from this view."""

    view: bytes
    epochs: tuple[Epoch, ...]
    aggregates: tuple[Aggregate, ...]
    links: tuple[Link, ...]


class Notes(_Record, frozen=True):
    """What one peer alone knows, and has still to say."""

    cases: tuple[m.Accusation | m.Proof, ...]
    proofs: dict[bytes, bytes]
    charges: tuple[m.Accusation, ...]
    joins: tuple[Signed, ...]
    late: tuple[bytes, ...]
    shown: tuple[Shown, ...] = ()
    """Of the last two steps, where whoever checks them has to see them."""


def remember(peer: Peer, *, aggregates: bool = True) -> Memory:
    """The memory of a peer that has just entered its view; without aggregates, others have to be asked for them."""
    here = (peer.view.step, peer.view.attempt)
    past = {place: epoch for place, epoch in sorted(peer.transcripts.items()) if place < here}
    return Memory(
        view=encode_view(peer.view),
        epochs=tuple(take_down(peer, epoch) for epoch in past.values()),
        aggregates=tuple(
            Aggregate(*place, bytes(data))
            for place, data in sorted(peer.aggregates.items())
            if aggregates and place[:2] in past
        ),
        links=tuple(Link(encode_view(view), messages) for view, messages in peer.links),
    )


def take_down(peer: Peer, transcript: Transcript) -> Epoch:
    """An attempt as it can be read by others, an auditor among them."""
    said = (
        Said(height, phase, tuple(letter.message for letter in transcript.phases[phase].values()))
        for height, phase in sorted(transcript.heights.items())
        if phase in transcript.phases
    )
    trials = (peer.get_trial(transcript, key) for key in sorted(transcript.served))
    return Epoch(
        view=encode_view(transcript.view),
        said=tuple(said),
        randomness=transcript.randomness,
        served=dict(sorted(transcript.served.items())),
        trials=tuple(letter.message for letter in trials if letter is not None),
    )


def remember_notes(peer: Peer) -> Notes:
    cases = {digest: case for digest, case in peer.cases.items() if _is_sound(case)}
    return Notes(
        cases=tuple(cases.values()),
        proofs={accused: digest for accused, digest in sorted(peer.proofs.items()) if digest in cases},
        charges=tuple(peer.charges),
        joins=tuple(letter.message for letter in peer.joins.values()),
        late=tuple(sorted(peer.late)),
        shown=tuple(_find_shown(peer)) if peer.config.tolerance is not None else (),
    )


def _find_shown(peer: Peer) -> Iterator[Shown]:
    for step in (peer.view.step - 2, peer.view.step - 1):
        record, own = find_last(peer.view, step), peer.own.get(step)
        if record is not None and own is not None and record.attempt in own.parts:
            yield Shown(step, record.attempt, own.seed, tuple(map(bytes, own.parts[record.attempt])))


def _is_sound(case: m.Accusation | m.Proof) -> bool:
    """Whether anybody could receive this; an attacker may hold what nobody would take from it."""
    try:
        decode_message(encode(case))
    except Malformed:
        return False
    return True


def recall(peer: Peer, memory: Memory, notes: Notes | None = None) -> None:
    """Let a peer that was made from the memory's view know the rest of it."""
    for epoch in memory.epochs:
        view = decode_view(epoch.view)
        assert view is not None, "a memory holds whole views"
        transcript = Transcript(view, compute_duties(peer.config, view))
        transcript.randomness, transcript.served = epoch.randomness, dict(epoch.served)
        for said in epoch.said:
            letters = (_open(peer, message) for message in said.messages)
            transcript.record(said.height, said.phase, {letter.message.sender: letter for letter in letters})
        for letter in (_open(peer, message) for message in epoch.trials):
            peer.trials.setdefault(view.height, {}).setdefault(letter.message.sender, {})[letter.digest] = letter
        peer.transcripts.setdefault((view.step, view.attempt), transcript)
    peer.aggregates.update({(x.step, x.attempt, x.part): x.data for x in memory.aggregates})
    for link in memory.links:
        linked = decode_view(link.view)
        assert linked is not None
        peer.remember_link(linked, link.messages)
    if notes is None:
        return
    peer.cases.update({compute_case_digest(case): case for case in notes.cases})
    peer.proofs.update(notes.proofs)
    peer.charges.extend(notes.charges)
    peer.joins.update({message.sender: _open(peer, message) for message in notes.joins})
    peer.late.update(notes.late)
    for shown in notes.shown:
        own = peer.own.setdefault(shown.step, Own(shown.seed))
        own.parts[shown.attempt] = list(shown.parts)
        digests = [hash_part(part) for part in shown.parts]
        own.roots[shown.attempt], own.paths[shown.attempt] = compute_paths(digests)


def _open(peer: Peer, message: Signed) -> Letter:
    letter = peer.examiner.examine(message)
    assert letter is not None, "a memory holds messages that were checked before"
    return letter
