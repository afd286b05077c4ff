"""Recomputing what others committed to: what validators do, and everybody before a vote (docs/PROTOCOL.md, 7 to 9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.crypto import compute_commitment
from phalanx.core.effects import Begin, Broadcast, ComputeGradient, Effect, MeasureDeviation, Story
from phalanx.core.envelope import Examiner, Letter
from phalanx.core.justice import Case, get_accused
from phalanx.core.membership import View, compute_batch_seed, find_record, has_concluded
from phalanx.core.merkle import compute_paths, hash_part, verify_path
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.partition import compute_part_sizes, join_parts, split_parts
from phalanx.core.peer import Peer
from phalanx.core.transcript import Transcript
from phalanx.core.verification import (
    ACCUSER_MARGIN,
    LATER_MARGIN,
    compute_report,
    decode_aggregates,
    find_deviation,
    is_balanced,
    is_same_report,
    judge_distance,
    prepare_gradient,
    projection_seeds,
    read_part,
    read_parts,
    read_stack,
)
from phalanx.core.wire import WIRE_TYPES, Piece, Wire

Finding = tuple[Verdict, tuple[int, ...]]
"""A verdict on somebody's commit, and the parts for which its report is wrong."""


def fetch(peer: Peer, is_here: Callable[[], bool], ask: Callable[[], Iterable[Effect]], until: float) -> Story:
    """Ask again and again for what is missing, until it is here or the time has come."""
    again = peer.time
    while not is_here() and peer.time < until:
        if peer.time >= again:
            yield from ask()
            again = peer.time + peer.config.delta
        yield from peer.listen(min(until, again))


def compute_gradient(peer: Peer, step: int, seed: bytes, *, raw: bool = False) -> Story:
    """A gradient in its wire type, or ``raw``, as it was computed; None if the state is not here.

    The peer goes on listening meanwhile.
    """
    known = peer.find_gradient(step, seed)
    if known is None:
        ticket = yield Begin(ComputeGradient(step, seed))
        while ticket not in peer.finished:
            yield from peer.listen(peer.time + 1000 * peer.config.delta)
        value = peer.finished.pop(ticket)
        if value is None:
            return None
        known = value if raw else prepare_gradient(value, peer.config.cap, peer.wire)
        peer.gradients[step, seed] = known
    return known


def cut(gradient: Tensor, count: int, wire: Wire) -> list[Piece]:
    """A gradient's parts as they travel."""
    return wire.encode_parts(split_parts(gradient, count))


def read_aggregates(peer: Peer, transcript: Transcript) -> list[Tensor | None]:
    """The aggregates of an attempt, where they are here and what they should be."""
    view = transcript.view
    known = peer.readings.setdefault((view.step, view.attempt), [None] * len(view.roster))
    new = [part for part, read in enumerate(known) if read is None and peer.has_aggregate(transcript, part)]
    if new:
        sizes = compute_part_sizes(peer.config.size, len(view.roster))
        pieces, lengths = [peer.aggregates[view.step, view.attempt, part] for part in new], [sizes[x] for x in new]
        found = decode_aggregates(pieces, tuple(lengths), peer.wire, peer.config.cap)
        for part, read, size in zip(new, found, lengths, strict=True):
            # Bytes that are no aggregate count as zero, as with parts: V2 finds whose they are.
            known[part] = torch.zeros(size, dtype=peer.wire.dtype) if read is None else read
    return [*known]


def check_commit(
    peer: Peer,
    transcript: Transcript,
    target: bytes,
    accusing: bool = False,
    named: Collection[int] = (),
) -> Story:
    """V4: recompute ``target``'s gradient of that attempt, its root, and its reports: on all parts, ``named`` at least.

    The verdict is on the gradient; wrong reports are beside it. Who is about to accuse allows for more rounding than
    those who will vote: else a report on the edge could be wrong for one and right for the others. Reports count only
    where the step was taken: in an attempt that died some may hold a report, or an aggregate, that others never saw,
    and nobody could say what it held against it.
    """
    view, count = transcript.view, len(transcript.view.roster)
    root = peer.get_commitment(transcript, target)
    if root is None:
        return Verdict.NOT_RECEIVED, ()
    seed = compute_batch_seed(peer.config, view.randomness, view.step, target)
    is_new = (view.step, seed) not in peer.gradients
    tolerant = peer.config.tolerance is not None and target != peer.key  # it compares with what has not been rounded
    found = yield from compute_gradient(peer, view.step, seed, raw=tolerant)
    if found is None:  # the state is no longer here: that says nothing of what was shown
        return Verdict.INCONCLUSIVE, ()
    mine = cut(prepare_gradient(found, peer.config.cap, peer.wire) if tolerant else found, count, peer.wire)
    if is_new and (view.step, seed) in peer.gradients:
        peer.gradients[view.step, seed] = found = peer.put_away_vector(found)
    parts, verdict = dict(enumerate(mine)), Verdict.INNOCENT
    same, paths = compute_paths([hash_part(part) for part in mine])
    if same == root and peer.config.tolerance is not None:  # others may come to other bytes, and ask me for these
        for part, data in enumerate(mine):
            peer.parts[view.step, view.attempt, target, part] = (peer.put_away(data), paths[part])
    if same != root:
        if peer.config.tolerance is None:
            return Verdict.GUILTY, ()
        parts = yield from _fetch_parts(peer, transcript, target)
        verdict = yield from _compare(peer, view.step, parts, found, count)
        if len(parts) < count:
            return verdict, ()
    if target not in transcript.duties.contributors or not has_concluded(peer.view, view.step, view.attempt):
        return verdict, ()  # nothing came of what it reported
    if not transcript.is_reported or any(read_aggregates(peer, transcript)[part] is None for part in named):
        return (verdict if verdict is Verdict.GUILTY else Verdict.NOT_RECEIVED), ()
    margin = LATER_MARGIN * (ACCUSER_MARGIN if accusing else 1.0)
    return verdict, _find_wrong_reports(peer, transcript, target, parts, margin)


def make_charge(
    transcript: Transcript, accused: bytes, wrong: tuple[int, ...], commit: Letter | None = None
) -> m.Accusation:
    """V4: a gradient that is not what its seed gives, or a report that is not what its gradient gives."""
    view = transcript.view
    commit = commit or transcript.phases[Phase.COMMIT][accused]
    report = (transcript.reports or {}).get(accused) if wrong else None
    quoted = report.message if report is not None else None
    return m.Accusation(Rule.GRADIENT, accused, view.step, view.attempt, wrong, commit.message, quoted, (), ())


def _compare(peer: Peer, step: int, parts: dict[int, Piece], raw: Tensor, count: int) -> Story:
    """Tolerant: the committed bytes against my own gradient. Those that are not here convict and clear nobody."""
    assert peer.config.tolerance is not None
    gradient = prepare_gradient(raw, peer.config.cap, WIRE_TYPES["float32"])
    deviations = []
    for part, ours in enumerate(split_parts(gradient, count)):
        theirs, valid = read_part(parts[part], len(ours), peer.wire, peer.config.cap) if part in parts else (ours, True)
        if not valid:
            return Verdict.GUILTY
        deviations.append(find_deviation(theirs, ours, peer.wire))
    distance = yield MeasureDeviation(step, join_parts(deviations), gradient)
    if distance is None:  # the state is no longer here
        return Verdict.INCONCLUSIVE
    verdict = judge_distance(distance, peer.config.tolerance)
    return verdict if verdict is Verdict.GUILTY or len(parts) == count else Verdict.NOT_RECEIVED


def find_arrival_time(config: Config, view: View) -> float:
    """Seconds that a member needs that is new: somebody may have kept the last step from it, and served it no state."""
    before = view.attempts[-1].roster if view.attempts else view.roster
    return 6 * config.delta + config.transfer_time if set(view.roster) - set(before) else 0.0


def find_fetch_time(config: Config) -> float:
    """Seconds that a check may wait for the target's bytes: only a tolerant one needs them."""
    return 9 * config.delta + 2 * config.transfer_time if config.tolerance is not None else 0.0


def _fetch_parts(peer: Peer, transcript: Transcript, owner: bytes) -> Story:
    """The committed bytes: from the aggregators that got them, then also from their owner and from who accuses it."""
    view, delta = transcript.view, peer.config.delta
    places = [(view.step, view.attempt, owner, part) for part in range(len(view.roster))]
    later = peer.time + delta + peer.config.transfer_time  # the owner could not serve all of it to everybody

    def ask() -> Iterable[Effect]:
        for place in places:
            if not peer.has_part(place):
                more = (owner, *sorted(peer.bearers.get(place[:3], ()))) if peer.time >= later else ()
                yield from ask_part(peer, place, (view.roster[place[3]], *more))

    # Whoever is accused of one thing in many ways is waited for once.
    until = peer.waits.setdefault((view.step, view.attempt, owner), peer.time + find_fetch_time(peer.config) - delta)
    yield from fetch(peer, lambda: all(map(peer.has_part, places)), ask, until)
    return {place[3]: data for place in places if (data := peer.get_part(place)) is not None}


def ask_part(peer: Peer, place: tuple[int, int, bytes, int], whom: Iterable[bytes]) -> Iterable[Effect]:
    targets = tuple(dict.fromkeys(key for key in whom if key != peer.key))
    peer.asked |= {("part", *place, key) for key in targets}
    yield Broadcast(targets, m.PullPart(*place, 0))


def _find_wrong_reports(
    peer: Peer, transcript: Transcript, target: bytes, parts: dict[int, Piece], margin: float = 1.0
) -> tuple[int, ...]:
    view, count = transcript.view, len(transcript.view.roster)
    letter = (transcript.reports or {}).get(target)
    if letter is None or not isinstance(letter.body, m.Report) or transcript.randomness is None:
        return ()
    if (len(letter.body.norms), len(letter.body.sums)) != (count, count * peer.config.projections):
        return ()  # not of a contributor, or the attempt died of it
    sizes = compute_part_sizes(peer.config.size, count)
    pieces = [parts.get(part, b"") for part in range(count)]
    tensors = [tensor for tensor, _ in read_parts(pieces, sizes, peer.wire, peer.config.cap)]
    aggregates = read_aggregates(peer, transcript)
    seeds = projection_seeds(transcript.randomness, count, peer.config.projections)
    right = compute_report(tensors, aggregates, seeds, view.tau)
    body = letter.body
    return tuple(
        part
        for part in range(count)
        if part in parts
        and aggregates[part] is not None
        and part not in body.lacking
        and not all(
            is_same_report(
                body.sums[at], body.norms[part], right.sums[at], right.norms[part], view.tau, sizes[part], margin
            )
            for at in range(part, count * peer.config.projections, count)
        )
    )


def fetch_trial(peer: Peer, transcript: Transcript, target: bytes) -> Story:
    """The commit of a probationer as the majority has listed it, in case it sent me another."""
    digest = transcript.served.get(target)
    if digest is None or peer.get_trial(transcript, target) is not None:
        return
    peer.asked.add(("trial", peer.view.step, digest))
    pull = Broadcast(peer.others, m.PullMessages(transcript.view.height, (target,)))
    until = peer.time + 2 * peer.config.delta
    yield from fetch(peer, lambda: peer.get_trial(transcript, target) is not None, lambda: (pull,), until)


# ---- Ballots


def check_case(peer: Peer, case: Case, until: float) -> Story:
    """My ballot on a case, by recomputing what it is about."""
    if case.suspect is not None:
        transcript = peer.transcripts.get((case.suspect.step, case.suspect.attempt))
        if transcript is None:  # I was not here, or forgot
            return Verdict.INCONCLUSIVE
        yield from fetch_trial(peer, transcript, case.suspect.key)
        verdict, wrong = yield from check_commit(peer, transcript, case.suspect.key, accusing=True)
        if wrong:  # whoever let its lies pass is still here: the next CONFIRM says so
            peer.charges.append(make_charge(transcript, case.suspect.key, wrong))
        return Verdict.GUILTY if wrong else verdict
    if case.part is not None:
        return _check_part(peer, case.part)
    charge = peer.cases.get(case.digest)
    if charge is None:
        return Verdict.NOT_RECEIVED
    tried = (key for record in peer.view.attempts for key in record.trials)
    if get_accused(charge) not in {*peer.circle, *tried}:  # a key that is nobody's costs nothing
        return Verdict.INNOCENT
    if not isinstance(charge, m.Accusation):
        return Verdict.GUILTY if is_proven(peer.config.run, peer.examiner, charge) else Verdict.INNOCENT
    if charge.rule is Rule.GRADIENT and not case.charge:
        return Verdict.NOT_RECEIVED  # who wants a gradient computed says so
    return (yield from _check_accusation(peer, charge, case.accusers, until))


def count_gradients(peer: Peer, agenda: Sequence[Case]) -> int:
    """How many gradients the ballots need. Of a case that I do not have others may know that it needs one."""
    found: set[object] = set()
    for case in agenda:
        charge = peer.cases.get(case.digest)
        if case.suspect is not None:
            found.add((case.suspect.key, case.suspect.step, case.suspect.attempt))
        elif isinstance(charge, m.Accusation):
            found |= {(charge.accused, charge.step, charge.attempt)} if case.charge else set()
        elif case.charge and charge is None:
            found.add(case.digest)
    return len(found)


def fetch_cases(peer: Peer, cases: Sequence[Case], until: float) -> Story:
    """Side by side: no case, however empty, costs another its time."""

    def ask() -> Iterable[Effect]:
        for case in cases:
            if case.digest not in peer.cases:
                peer.asked.add(("case", peer.view.step, case.digest))
                yield Broadcast(peer.others, m.PullProof(case.digest))

    yield from fetch(peer, lambda: all(case.digest in peer.cases for case in cases), ask, until)


def fetch_evidence(peer: Peer, agenda: Sequence[Case]) -> Story:
    """Everything that the ballots need: first the cases, then the parts that they are about."""
    delta = peer.config.delta
    charged = [case for case in agenda if case.accusers]
    yield from fetch_cases(peer, charged, peer.time + 2 * delta)
    wanted = {}
    for case in charged:
        charge = peer.cases.get(case.digest)
        if isinstance(charge, m.Accusation) and charge.rule is not Rule.GRADIENT:
            transcript = peer.transcripts.get((charge.step, charge.attempt))
            for part in charge.parts:
                if transcript is not None and part < len(transcript.view.roster):
                    holders = (transcript.view.roster[part], *case.accusers, charge.accused)
                    wanted[charge.step, charge.attempt, charge.accused, part] = holders

    def ask_parts() -> Iterable[Effect]:
        for place, holders in wanted.items():
            if not peer.has_part(place):
                yield from ask_part(peer, place, holders)

    until = peer.time + 2 * delta + peer.config.transfer_time
    yield from fetch(peer, lambda: all(map(peer.has_part, wanted)), ask_parts, until)


def _check_part(peer: Peer, part: int) -> Verdict:
    """V3: recompute the balance of an opened part."""
    transcript = peer.transcript
    view, duties = transcript.view, peer.duties
    rows = [peer.get_part((view.step, view.attempt, key, part)) for key in duties.contributors]
    aggregate = read_aggregates(peer, transcript)[part]
    if aggregate is None or any(row is None for row in rows):
        return Verdict.NOT_RECEIVED
    stack, _ = read_stack([row or b"" for row in rows], peer.sizes[part], peer.wire, peer.config.cap)
    fine = is_balanced(stack, aggregate, view.tau, peer.wire, peer.config.cap)
    return Verdict.INNOCENT if fine else Verdict.GUILTY


def _check_accusation(peer: Peer, charge: m.Accusation, accusers: Sequence[bytes], until: float) -> Story:
    """Whether an accusation is true. What it quotes must be what was agreed."""
    transcript = peer.transcripts.get((charge.step, charge.attempt))
    if not is_kept(peer.view, charge.step, charge.attempt):
        return Verdict.INNOCENT  # nothing of that attempt can be charged any more
    if transcript is None or Phase.COMMIT not in transcript.phases:
        return Verdict.INCONCLUSIVE  # the charge is here, but not what it is about
    if not _quotes_agreed(peer, transcript, charge):
        return Verdict.INNOCENT
    if charge.rule is Rule.GRADIENT:
        count = len(transcript.view.roster)
        named = tuple(part for part in charge.parts if part < count)
        verdict, wrong = yield from check_commit(peer, transcript, charge.accused, named=named)
        if not charge.parts:
            return verdict
        if verdict is Verdict.GUILTY and peer.config.tolerance is not None and not wrong:
            owned = ((charge.step, charge.attempt, charge.accused, part) for part in range(count))
            verdict = verdict if all(map(peer.has_part, owned)) else Verdict.NOT_RECEIVED
        if not wrong and verdict in (Verdict.NOT_RECEIVED, Verdict.INCONCLUSIVE):
            return verdict
        return Verdict.GUILTY if set(charge.parts) <= set(wrong) else Verdict.INNOCENT
    count = len(transcript.view.roster)
    if any(part >= count for part in charge.parts):
        return Verdict.INNOCENT
    places = [(charge.step, charge.attempt, charge.accused, part) for part in charge.parts]

    def ask() -> Iterable[Effect]:
        for place in places:
            if not peer.has_part(place):
                holders = (transcript.view.roster[place[3]], *accusers, charge.accused)
                yield from ask_part(peer, place, holders)

    yield from fetch(peer, lambda: all(map(peer.has_part, places)), ask, until)
    if not all(map(peer.has_part, places)):
        return Verdict.NOT_RECEIVED
    parts = {place[3]: peer.get_part(place) or b"" for place in places}
    if charge.rule is Rule.MALFORMED:
        sizes = compute_part_sizes(peer.config.size, count)
        bad = all(not read_part(data, sizes[part], peer.wire, peer.config.cap)[1] for part, data in parts.items())
        return Verdict.GUILTY if bad else Verdict.INNOCENT
    return _check_report(peer, transcript, charge, parts)


def is_kept(view: View, step: int, attempt: int) -> bool:
    """Whether what was said in this attempt can still be charged."""
    return (step, attempt) == (view.step, view.attempt) or find_record(view, step, attempt) is not None


def _quotes_agreed(peer: Peer, transcript: Transcript, charge: m.Accusation) -> bool:
    commit = transcript.phases.get(Phase.COMMIT, {}).get(charge.accused)
    if commit is None:
        listed, quoted = transcript.served.get(charge.accused), peer.examiner.examine(charge.commit)
        if quoted is None or quoted.digest != listed or charge.report is not None:
            return False
        # It may have been kept from me: what all others listed counts all the same.
        peer.trials.setdefault(transcript.view.height, {}).setdefault(charge.accused, {})[quoted.digest] = quoted
        return True
    report = (transcript.reports or {}).get(charge.accused)
    return _is_same(peer.examiner, commit, charge.commit) and (
        charge.report is None or _is_same(peer.examiner, report, charge.report)
    )


def _is_same(examiner: Examiner, letter: Letter | None, message: m.Signed) -> bool:
    quoted = examiner.examine(message)
    return letter is not None and quoted is not None and letter.digest == quoted.digest


def _check_report(peer: Peer, transcript: Transcript, charge: m.Accusation, parts: dict[int, Piece]) -> Verdict:
    """V1: guilty if the report is wrong for every part named, and what the accuser says instead is right."""
    view, count, width = transcript.view, len(transcript.view.roster), len(charge.parts)
    letter = (transcript.reports or {}).get(charge.accused)
    if letter is None or not isinstance(letter.body, m.Report) or transcript.randomness is None:
        return Verdict.INNOCENT
    if len(charge.sums) != width * peer.config.projections:
        return Verdict.INNOCENT
    sizes = compute_part_sizes(peer.config.size, count)
    aggregates = read_aggregates(peer, transcript)
    wrong = set(_find_wrong_reports(peer, transcript, charge.accused, parts))
    if any(aggregates[part] is None for part in charge.parts):
        return Verdict.NOT_RECEIVED
    seeds = projection_seeds(transcript.randomness, count, peer.config.projections)
    for place, part in enumerate(charge.parts):
        tensor = read_part(parts[part], sizes[part], peer.wire, peer.config.cap)[0]
        right = compute_report([tensor], [aggregates[part]], (seeds[part],), view.tau)
        claimed = charge.sums[place::width]
        if part not in wrong or not all(
            is_same_report(claim, charge.norms[place], true, right.norms[0], view.tau, sizes[part])
            for claim, true in zip(claimed, right.sums, strict=True)
        ):
            return Verdict.INNOCENT
    return Verdict.GUILTY


def is_proven(run: bytes, examiner: Examiner, proof: m.Proof) -> bool:
    """Whether a proof holds. Anybody can check this offline, with nothing but the run's name."""
    messages = [getattr(proof, name) for name in proof.__struct_fields__]
    letters = [examiner.examine(message) for message in messages]
    if any(message.run != run for message in messages) or any(letter is None for letter in letters):
        return False
    first, last = letters[0], letters[-1]
    assert first is not None
    assert last is not None
    if isinstance(proof, m.Equivocation):
        return first.digest != last.digest
    if isinstance(proof, m.MalformedBody):
        return first.body is None
    if not isinstance(first.body, m.Commit):
        return False
    if isinstance(proof, m.WrongReveal):
        if not isinstance(last.body, m.Reveal):
            return False
        message, body = last.message, last.body
        opened = compute_commitment(run, message.step, message.attempt, message.sender, body.share, body.salt)
        return opened != first.body.share
    if not isinstance(last.body, m.Opening) or first.body.parts is None:
        return False
    return not _is_opening(first.body.parts, last.body)


def _is_opening(root: bytes, opening: m.Opening) -> bool:
    """Whether some number of parts makes the path fit: how many there were is not in the proof."""
    return any(
        verify_path(root, count, opening.part, opening.digest, opening.path)
        for count in range(opening.part + 1, m.MAX_MEMBERS + 1)
    )
