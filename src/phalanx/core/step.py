"""One step of training together (the paper's BTARD-SGD, docs/PROTOCOL.md section 5). Read this file first.

``run_attempt`` goes through the phases once. It returns the view to go on from: of the next step, or of another attempt
at this one. When a slow path removes somebody in between, :class:`Lost` carries that view instead. ``run_peer`` is a
peer's whole life: attempts, one after another; a peer that is not (or no longer) a member follows them without a voice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec
import torch

from phalanx.core import messages as m
from phalanx.core.broadcast import agree, join_slow_path
from phalanx.core.checking import (
    ask_part,
    check_case,
    check_commit,
    compute_gradient,
    count_gradients,
    fetch,
    fetch_case,
    fetch_evidence,
    fetch_trial,
    find_fetch_time,
    is_kept,
    is_proven,
    make_charge,
    read_aggregates,
)
from phalanx.core.config import Config
from phalanx.core.crypto import compute_commitment, compute_digest
from phalanx.core.effects import (
    AdoptState,
    Apply,
    Broadcast,
    ComputeAggregate,
    ComputeGradient,
    ComputeReport,
    DrawSecret,
    Effect,
    Foresee,
    HashState,
    HasState,
    Heard,
    Keep,
    KeepMessages,
    Note,
    Send,
    Sign,
    Story,
    Undo,
)
from phalanx.core.envelope import Examiner
from phalanx.core.events import (
    AttemptStarted,
    Banned,
    Diverged,
    Jumped,
    Left,
    MarginLost,
    Removed,
    RunFinished,
    StepFinished,
    Synced,
)
from phalanx.core.justice import (
    UNKNOWN,
    Case,
    Decision,
    Offence,
    decide,
    decide_aggregates,
    decide_openings,
    decide_reports,
    find_distant,
    find_offenders,
    find_requests,
    find_served,
    follow_resolution,
    is_changed,
    is_received,
    make_agenda,
    make_closing_agenda,
    make_next,
    make_retry,
)
from phalanx.core.membership import (
    View,
    compute_batch_seed,
    compute_quorum,
    decode_view,
    encode_view,
    find_last,
    foresee_duties,
    is_another_electorate,
    make_genesis,
)
from phalanx.core.merkle import compute_paths, hash_part
from phalanx.core.messages import Message, Phase, Rule, Verdict
from phalanx.core.partition import join_parts, split_parts
from phalanx.core.peer import Lost, Own, Peer, StateFetch, compute_case_digest, send_aggregate, send_part
from phalanx.core.slowpath import Resolution
from phalanx.core.transcript import Transcript, Values
from phalanx.core.verification import (
    ACCUSER_MARGIN,
    compute_column,
    is_same_report,
    projection_seeds,
    read_stack,
)


def run_attempt(peer: Peer) -> Story:
    """All phases of one attempt, from the peer's view. Returns the next view and whether it still has to be sealed."""
    config, view, transcript = peer.config, peer.view, peer.transcript
    yield Note(AttemptStarted(view))
    own = yield from prepare_parts(peer)

    # COMMIT: to my parts, and to a share of randomness.
    share, salt = yield DrawSecret(view.height)
    hidden = compute_commitment(config.run, view.step, view.attempt, peer.key, share, salt)
    body = m.Commit(own.roots.get(view.attempt) if peer.contributes else None, hidden, view.digest)
    yield from agree(peer, Phase.COMMIT, body, work=config.gradient_time + find_arrival_time(config, view))
    yield from settle_view(peer)
    yield from find_way_back(peer)
    yield from keep_silent_without_parts(peer, own)
    offenders = find_offenders(config, transcript, Phase.COMMIT)
    if offenders.ends_attempt:
        return (yield from abort(peer, offenders))

    # Scatter, AGGREGATE, gather: part j goes to member j, who returns the clipped mean.
    yield from scatter(peer, own)
    patience = 4 * config.delta + config.transfer_time  # others may complete a height 3 delta after me
    aggregate = yield from aggregate_part(peer, patience)
    yield from agree(peer, Phase.AGGREGATE, aggregate, work=patience)
    transcript.served = find_served(transcript)
    offenders = find_offenders(config, transcript, Phase.AGGREGATE)
    if not offenders.banned and find_requests(transcript):
        unopened = yield from open_parts(peer, own, find_requests(transcript))
        yield from fetch_opened(peer, find_requests(transcript))
        aggregate = yield from aggregate_part(peer, 0)
        aggregate = msgspec.structs.replace(aggregate, unopened=unopened, trials=())
        yield from agree(peer, Phase.AGGREGATE_AGAIN, aggregate, work=find_opening_time(config, 2))
        offenders = find_offenders(config, transcript, Phase.AGGREGATE_AGAIN)
        if not offenders.banned:
            offenders = decide_openings(config, transcript)
    if offenders.ends_attempt:
        return (yield from abort(peer, offenders))

    # REVEAL: the shares make the randomness of the next step, unknown to all until now.
    yield from ask_early(peer)
    reveals = yield from agree(peer, Phase.REVEAL, m.Reveal(share, salt))
    offenders = find_offenders(config, transcript, Phase.REVEAL)
    if offenders.banned:
        return (yield from abort(peer, offenders))
    transcript.randomness = combine_shares(config, view, reveals)

    # REPORT: what my parts say of the aggregates, and what I found in the step before. Meanwhile the next gradient is
    # on its way.
    yield from gather(peer, patience)
    yield from apply_update(peer)
    findings, accusations = yield from check_targets(peer)
    yield from look_ahead(peer)
    report = yield from make_report(peer, own, findings)
    yield from agree(peer, Phase.REPORT, report, work=patience + find_check_time(peer))
    offenders = find_offenders(config, transcript, Phase.REPORT)
    if not offenders.banned:
        offenders = decide_aggregates(transcript)
    if not offenders.ends_attempt and is_lacking(transcript):
        yield from gather(peer, patience)
        report = yield from make_report(peer, own, findings)
        yield from agree(peer, Phase.REPORT_AGAIN, report, work=patience)
        offenders = find_offenders(config, transcript, Phase.REPORT_AGAIN)
        if not offenders.banned:
            offenders = decide_reports(transcript)
    if offenders.ends_attempt:
        return (yield from abort(peer, offenders))

    # CONFIRM: the new state, and what I hold against others.
    yield from apply_update(peer)
    state = (yield HashState(view.step + 1)) if peer.applied else UNKNOWN
    accusations += check_reports(peer)
    yield from confirm(peer, make_confirm(peer, state, accusations, blind=not can_check_reports(peer)))
    offenders = find_offenders(config, transcript, Phase.CONFIRM)
    if offenders.banned:
        return (yield from abort(peer, offenders))
    return (yield from conclude(peer, state))


def run_closing(peer: Peer) -> Story:
    """After the last step: everybody checks its contributors before the final state is released."""
    yield Note(AttemptStarted(peer.view))
    yield from check_last_reports(peer)
    body = make_confirm(peer, peer.view.state, [])
    yield from confirm(peer, body, work=find_vote_time(peer, make_closing_agenda(peer.view)))
    yield from settle_view(peer)
    offenders = find_offenders(peer.config, peer.transcript, Phase.CONFIRM)
    if offenders.banned:
        return (yield from abort(peer, offenders))
    return (yield from conclude(peer, peer.view.state))


def check_last_reports(peer: Peer) -> Story:
    """After the last step no later CONFIRM can say whose lies an aggregator let pass: it is said in this one."""
    for case in make_closing_agenda(peer.view) if peer.member else ():
        yield from check_case(peer, case, peer.time)


# ---- COMMIT


def prepare_parts(peer: Peer) -> Story:
    """My gradient, cut for this roster. It is computed once per step, whatever the attempt."""
    view = peer.view
    seed = compute_batch_seed(peer.config, view.randomness, view.step, peer.key)
    own = peer.own.get(view.step)
    if own is None or own.seed != seed:  # what was made from a state that was undone since is no longer of use
        own = peer.own[view.step] = Own(seed)
    on_trial = peer.is_on_trial_in(view.step)
    if not peer.contributes and not on_trial:
        return own
    if view.attempt not in own.parts:
        gradient = yield from compute_gradient(peer, view.step, seed)
        parts = split_parts(gradient, len(view.roster))
        peer.gradients.pop((view.step, seed), None)
        del gradient
        own.tensors[view.attempt] = [peer.put_away_vector(part) for part in parts]
        own.parts[view.attempt] = peer.wire.encode_parts(own.tensors[view.attempt])
        digests = [hash_part(part) for part in own.parts[view.attempt]]
        own.roots[view.attempt], own.paths[view.attempt] = compute_paths(digests)
    if on_trial:
        body = m.Trial(own.roots[view.attempt])
        trial = yield Sign(view.height, view.step, view.attempt, Phase.COMMIT, view.previous, body)
        yield Broadcast(peer.others, trial)
    return own


def find_arrival_time(config: Config, view: View) -> float:
    """Seconds that a member needs that is new: somebody may have kept the last step from it, and served it no state."""
    before = view.attempts[-1].roster if view.attempts else view.roster
    return 6 * config.delta + config.transfer_time if set(view.roster) - set(before) else 0.0


# ---- AGGREGATE


def find_way_back(peer: Peer) -> Story:
    """If most members start from another view than mine, I missed something: take theirs (:class:`Lost` brings it)."""
    commits = peer.transcript.phases[Phase.COMMIT].values()
    views = Counter(x.body.view for x in commits if isinstance(x.body, m.Commit))
    digest, count = views.most_common(1)[0] if views else (peer.view.digest, 0)
    peer.astray = 2 * count > len(commits) and digest != peer.view.digest
    ask = Broadcast(peer.others, m.PullChain(peer.base.height - 1))
    yield from fetch(peer, lambda: not peer.astray, lambda: (ask,), math.inf)


def keep_silent_without_parts(peer: Peer, own: Own) -> Story:
    """If my gradient is not the one that I committed to before I was started again, I can show nothing.

    Whatever I say now is wrong: I am missed, and removed (:class:`Lost` ends this).
    """
    body = peer.transcript.phases[Phase.COMMIT][peer.key].body if peer.contributes and peer.revived else None
    if isinstance(body, m.Commit) and body.parts != own.roots.get(peer.view.attempt):
        ask = Broadcast(peer.others, m.PullChain(peer.base.height))
        yield from fetch(peer, lambda: False, lambda: (ask,), math.inf)


def scatter(peer: Peer, own: Own) -> Story:
    view = peer.view
    if not peer.contributes:
        return
    parts = own.parts[view.attempt]
    for turn in range(len(parts)):  # not all to the first member first
        part = (peer.index + 1 + turn) % len(parts)
        data = parts[part]
        if view.roster[part] != peer.key:
            yield from send_part(peer, (view.roster[part],), (view.step, view.attempt, peer.key, part), data)


def aggregate_part(peer: Peer, patience: float) -> Story:
    """My part of everybody's gradient, clipped and sent to all; or whose parts I did not get."""
    view = peer.view
    if not peer.member:
        return m.Aggregate(None, (0,), (), ())
    places = [(view.step, view.attempt, key, peer.index) for key in peer.duties.contributors]
    wanted, looked = [place for place in places if not peer.has_part(place)], peer.arrivals
    ask_at = peer.entered + patience / 2  # what was lost on the way, or with my memory, is sent again
    while wanted:
        if looked != peer.arrivals:
            looked = peer.arrivals
            wanted = [place for place in wanted if place not in peer.parts or not peer.has_part(place)]
        if not wanted or peer.time >= peer.entered + patience:
            break
        if peer.time >= ask_at:
            ask_at = math.inf
            for lost in wanted:
                yield from ask_part(peer, lost, (lost[2],))
        yield from peer.listen(min(ask_at, peer.entered + patience))
    trials = tuple(list_trials(peer))
    if wanted:
        missing = tuple(sorted(view.roster.index(place[2]) for place in wanted))
        return m.Aggregate(None, missing, (), trials)
    place = (view.step, view.attempt, peer.index)
    if place not in peer.aggregates:
        result = yield ComputeAggregate(read_rows(peer)[0], view.tau)
        peer.aggregates[place] = peer.put_away(peer.wire.encode_parts([result])[0])
        forget_rows(peer)
    data = peer.aggregates[place]
    said = peer.transcript.phases.get(Phase.AGGREGATE, {}).get(peer.key)
    if said is not None and isinstance(said.body, m.Aggregate) and said.body.result not in (None, hash_part(data)):
        first = min(view.roster.index(key) for key in peer.duties.contributors)
        return m.Aggregate(None, (first,), (), trials)  # I was started again, and what I said before I cannot show
    yield from send_aggregate(peer.audience, *place, data)
    return m.Aggregate(hash_part(data), (), (), trials)


def list_trials(peer: Peer) -> Iterable[m.Listed]:
    """The first commit to this attempt that each probationer showed me."""
    view, sent = peer.view, peer.trials.get(peer.view.height, {})
    for key in sorted(candidate.key for candidate in view.candidates if candidate.key in sent):
        for digest, letter in sent[key].items():
            if (letter.message.step, letter.message.attempt) == (view.step, view.attempt):
                yield m.Listed(key, digest)
                break


def read_rows(peer: Peer) -> tuple[torch.Tensor, list[bool]]:
    """Everybody's row of the part that I aggregate, all of which are here; and whose bytes mean anything."""
    if peer.rows is None:
        view, contributors = peer.view, peer.duties.contributors
        pieces = {key: peer.get_part((view.step, view.attempt, key, peer.index)) or b"" for key in contributors}
        matrix = peer.bench.matrix if peer.bench is not None and peer.bench.fill(pieces) else None
        peer.rows = read_stack([*pieces.values()], peer.sizes[peer.index], peer.wire, peer.config.cap, matrix)
    return peer.rows


def forget_rows(peer: Peer) -> None:
    """Where memory is what lacks, the parts are read again when they are needed."""
    if peer.store is not None:
        peer.rows = None


def open_parts(peer: Peer, own: Own, requests: set[tuple[int, int]]) -> Story:
    """Broadcast the parts that aggregators miss; collect those of others. Returns what did not come."""
    view = peer.view
    for owner, part in sorted(requests):
        if view.roster[owner] == peer.key and peer.contributes:
            data, path = own.parts[view.attempt][part], own.paths[view.attempt][part]
            body = m.Opening(part, hash_part(data), path)
            opening = yield Sign(peer.level, view.step, view.attempt, Phase.AGGREGATE, peer.root, body)
            yield Broadcast(peer.others, opening)
            yield from send_part(peer, peer.others, (view.step, view.attempt, peer.key, part), data)
    places = {(view.step, view.attempt, view.roster[i], j): (i, j) for i, j in requests}

    def ask() -> Iterable[Effect]:
        for place in places:
            if not peer.has_part(place):
                yield from ask_part(peer, place, peer.others)

    peer.asked |= {("part", *place, key) for place in places for key in (place[2],)}
    until = peer.entered + find_opening_time(peer.config, 1)
    yield from fetch(peer, lambda: all(map(peer.has_part, places)), ask, until)
    find_wrong_openings(peer)
    unopened = sorted(pair for place, pair in places.items() if not peer.has_part(place))
    return tuple(unopened[: m.MAX_OPENINGS])  # everybody names the same ones


def find_opening_time(config: Config, rounds: int) -> float:
    """Seconds until a part that was opened is here: 3 delta until all know that it is asked for, and a round trip."""
    return rounds * (6 * config.delta + config.transfer_time)


def fetch_opened(peer: Peer, requests: set[tuple[int, int]]) -> Story:
    """What was opened so late that only others have it is still to be had from them: the more time is mine alone."""
    view = peer.view
    mine = [(view.step, view.attempt, view.roster[i], j) for i, j in requests if peer.member and j == peer.index]

    def ask() -> Iterable[Effect]:
        for place in mine:
            if not peer.has_part(place):
                yield from ask_part(peer, place, peer.others)

    until = peer.entered + find_opening_time(peer.config, 2)
    yield from fetch(peer, lambda: all(map(peer.has_part, mine)), ask, until)


def find_wrong_openings(peer: Peer) -> None:
    """E3: a signed opening that does not lead to the committed root is a proof."""
    commits = peer.transcript.phases[Phase.COMMIT]
    for (step, attempt, owner, _), letter in peer.openings.items():
        if (step, attempt) == (peer.view.step, peer.view.attempt) and owner in commits and owner not in peer.proofs:
            proof = m.WrongOpening(commits[owner].message, letter.message)
            if is_proven(peer.run, peer.examiner, proof):
                peer.keep_proof(owner, proof)


# ---- REVEAL and REPORT


def combine_shares(config: Config, view: View, reveals: Values) -> bytes:
    shares = [x.body.share for x in reveals.values() if isinstance(x.body, m.Reveal)]
    place = view.step.to_bytes(8, "little") + view.attempt.to_bytes(8, "little")
    return compute_digest("randomness", config.run, place, *shares)


def ask_early(peer: Peer) -> Story:
    """A member might send its aggregate to members only. Who is on trial and waited for it would be late every time."""
    view = peer.view
    for part, owner in enumerate(view.roster if peer.on_trial else ()):
        if owner in peer.reluctant and not peer.has_aggregate(peer.transcript, part):
            yield from ask_aggregate(peer, (view.step, view.attempt, part), peer.choose_some())


def ask_aggregate(peer: Peer, place: tuple[int, int, int], whom: tuple[bytes, ...]) -> Iterable[Effect]:
    peer.asked |= {("aggregate", *place, key) for key in whom}
    yield Broadcast(whom, m.PullAggregate(*place, 0))


def gather(peer: Peer, patience: float) -> Story:
    """Wait for the aggregates; ask others for those that their aggregators kept back."""
    transcript, until = peer.transcript, peer.entered + patience
    view = transcript.view
    wanted = set(range(len(view.roster)))

    looked, asked = -1, False

    def is_here() -> bool:
        nonlocal looked
        if looked == peer.arrivals:
            return not wanted
        looked = peer.arrivals
        here = {part for part in wanted if peer.has_aggregate(transcript, part)}
        wanted.difference_update(here)
        if here:
            read_aggregates(peer, transcript)  # while others are under way
        return not wanted

    def ask() -> Iterable[Effect]:
        """First a few, as each sends it all; a member then asks everybody, since its report has to be in time."""
        nonlocal asked
        everybody = peer.others if peer.member and asked else None
        asked = True
        for part in sorted(wanted):
            yield from ask_aggregate(peer, (view.step, view.attempt, part), everybody or peer.choose_some())
        if not peer.member:  # those it asks may be past the steps that they keep: then it starts from where they are
            yield Broadcast(peer.choose_some(), m.PullChain(peer.base.height))

    in_time = peer.member or peer.key in transcript.served
    yield from ask_early(peer)
    if in_time and not is_here():  # what is under way should not be asked for
        soon = min(until, peer.time + peer.config.delta)
        while peer.time < soon and not is_here():
            yield from peer.listen(soon)
        if peer.on_trial:
            peer.reluctant |= {view.roster[part] for part in wanted}
    yield from fetch(peer, is_here, ask, until)


def find_check_time(peer: Peer) -> float:
    """Seconds that the busiest member needs before REPORT for what it checks of the step before."""
    config = peer.config
    load: dict[bytes, float] = {}
    for check in peer.duties.checks:
        trial = check.step == peer.view.step - 1  # its commit may have been sent to others only
        fetching = find_fetch_time(config) + (2 * config.delta if trial else 0.0)
        load[check.checker] = load.get(check.checker, 0.0) + config.gradient_time + fetching
    return max(load.values(), default=0.0)


def check_targets(peer: Peer) -> Story:
    """A validator's work: recompute what its targets committed to."""
    view = peer.view
    findings: dict[bytes, Verdict] = {}
    accusations: list[m.Accusation] = []
    for check in peer.duties.checks:
        if check.checker != peer.key or check.target in findings or check.target in view.banned:
            continue
        last = find_last(view, check.step)
        transcript = peer.transcripts.get((last.step, last.attempt)) if last is not None else None
        if transcript is None:
            continue
        yield from fetch_trial(peer, transcript, check.target)
        verdict, wrong = yield from check_commit(peer, transcript, check.target, accusing=True)
        guilty = verdict is Verdict.GUILTY
        findings[check.target] = Verdict.GUILTY if wrong else verdict
        agreed = transcript.phases.get(Phase.COMMIT, {}).get(check.target)
        commit = agreed or peer.get_trial(transcript, check.target)
        if commit is not None and (guilty or wrong):
            accusations.append(make_charge(transcript, check.target, () if guilty else wrong, commit))
    return tuple(m.Finding(key, findings[key]) for key in sorted(findings))[: m.MAX_MEMBERS], accusations


def make_report(peer: Peer, own: Own, findings: tuple[m.Finding, ...]) -> Story:
    view, transcript, count = peer.view, peer.transcript, len(peer.view.roster)
    assert transcript.randomness is not None
    aggregates = read_aggregates(peer, transcript)
    lacking = tuple(part for part, aggregate in enumerate(aggregates) if aggregate is None)
    if not peer.contributes:
        return m.Report((), (), lacking, findings)
    parts = tuple(map(peer.wire.round, own.tensors[view.attempt]))
    seeds = projection_seeds(transcript.randomness, count, peer.config.projections)
    result = yield ComputeReport(parts, tuple(aggregates), seeds, view.tau)
    return m.Report(result.sums, result.norms, lacking, findings)


def is_lacking(transcript: Transcript) -> bool:
    return any(isinstance(x.body, m.Report) and x.body.lacking for x in transcript.phases[Phase.REPORT].values())


# ---- CONFIRM and what follows


def look_ahead(peer: Peer) -> Story:
    """If the step was taken, let the machine start on what the next one will ask of it."""
    if peer.applied:
        yield Foresee(lambda: find_next_gradients(peer))


def find_next_gradients(peer: Peer) -> list[ComputeGradient]:
    """What this peer computes next if nothing more happens in this step: its gradient, and those that it checks."""
    config, transcript, view = peer.config, peer.transcript, peer.view
    randomness, step, found = transcript.randomness, peer.view.step + 1, []
    assert randomness is not None
    duties = foresee_duties(config, view, randomness, transcript.served)
    if (peer.key in duties.contributors or peer.is_on_trial_in(step)) and step < config.steps:
        found.append(ComputeGradient(step, compute_batch_seed(config, randomness, step, peer.key)))
    for check in duties.checks:
        past = next((x.view for x in peer.transcripts.values() if x.view.step == check.step), None)
        if check.checker == peer.key and past is not None:  # all attempts at a step have one randomness
            seed = compute_batch_seed(config, past.randomness, past.step, check.target)
            found.append(ComputeGradient(past.step, seed))
    return found


def apply_update(peer: Peer) -> Story:
    """Take the step, if all aggregates are here; it can be undone until it is final."""
    if peer.applied:
        return
    aggregates = read_aggregates(peer, peer.transcript)
    if any(aggregate is None for aggregate in aggregates):  # a follower may come too late; the state can be fetched
        return
    whole = join_parts([aggregate for aggregate in aggregates if aggregate is not None])
    yield Apply(peer.view.step, whole.to(torch.float32))
    peer.applied = True


def can_check_reports(peer: Peer) -> bool:
    """Whether the rows of my part are here, if somebody may lie about it. They may be gone with my memory."""
    view = peer.view
    if not peer.member or not view.bound:
        return True
    places = [(view.step, view.attempt, key, peer.index) for key in peer.duties.contributors]
    return peer.rows is not None or all(map(peer.has_part, places))


def check_reports(peer: Peer) -> list[m.Accusation]:
    """V1: recompute what everybody reported of my part. E4: name the rows that were no numbers."""
    view, transcript, config = peer.view, peer.transcript, peer.config
    if not peer.member or not peer.duties.contributors:
        return []
    aggregate = read_aggregates(peer, transcript)[peer.index]
    reports, commits = transcript.reports or {}, transcript.phases[Phase.COMMIT]
    places = [(view.step, view.attempt, key, peer.index) for key in peer.duties.contributors]
    if aggregate is None or (peer.rows is None and not all(map(peer.has_part, places))):
        return []
    rows, validity = read_rows(peer)
    seeds = projection_seeds(transcript.randomness or b"", len(view.roster), config.projections)[peer.index]
    sums, norms = compute_column(rows, aggregate, seeds, view.tau)
    forget_rows(peer)
    columns, distances = [tuple(column) for column in sums.T.tolist()], norms.tolist()
    size, count, found = peer.sizes[peer.index], len(view.roster), []
    for place, (key, valid) in enumerate(zip(peer.duties.contributors, validity, strict=True)):
        if key == peer.key:
            continue
        commit, report = commits[key], reports[key]
        if not valid:
            charge = m.Accusation(
                Rule.MALFORMED, key, view.step, view.attempt, (peer.index,), commit.message, None, (), ()
            )
            found.append(charge)
        body = report.body
        if not isinstance(body, m.Report) or not body.norms or peer.index in body.lacking:
            continue
        right, norm = columns[place], distances[place]
        said = body.sums[peer.index :: count]
        if not all(
            is_same_report(claim, body.norms[peer.index], true, norm, view.tau, size, ACCUSER_MARGIN)
            for claim, true in zip(said, right, strict=True)
        ):
            found.append(
                m.Accusation(
                    Rule.REPORT,
                    key,
                    view.step,
                    view.attempt,
                    (peer.index,),
                    commit.message,
                    report.message,
                    right,
                    (norm,),
                )
            )
    return found


_ORDER = {Rule.REPORT: 0, Rule.GRADIENT: 1}
"""Of accusations, where not all fit the agenda: who does not name those who lie about its part may be taken for one."""


def make_confirm(peer: Peer, state: bytes, accusations: list[m.Accusation], *, blind: bool = False) -> m.Confirm:
    view = peer.view
    digests = []
    charges = [charge for charge in (*accusations, *peer.charges) if is_kept(view, charge.step, charge.attempt)]
    for charge in sorted(charges, key=lambda charge: _ORDER.get(charge.rule, 2)):
        digest = compute_case_digest(charge)
        peer.cases[digest] = charge
        digests.append(digest)
    digests += [digest for accused, digest in sorted(peer.proofs.items()) if accused in peer.circle]
    known = {*view.roster, *view.banned, *(candidate.key for candidate in view.candidates)}
    joins = sorted(key for key in peer.joins if key not in known)
    if len(joins) > m.MAX_CASES:  # everybody lists the same ones
        joins = sorted(sorted(joins, key=lambda key: compute_digest("join", view.randomness, key))[: m.MAX_CASES])
    late = tuple(sorted(key for key in peer.late if key in view.roster))
    return m.Confirm(state, tuple(dict.fromkeys(digests))[: m.MAX_CASES], tuple(joins), late, peer.leaving, blind)


def confirm(peer: Peer, body: m.Confirm, work: float = 0.0) -> Story:
    """CONFIRM. Whoever accuses must be able to show its evidence, also after a crash."""
    peer.late -= {*body.late}  # who is late from now on is in my next
    if peer.member and body.accusations:
        cases = tuple(peer.cases[digest] for digest in body.accusations)
        yield KeepMessages(peer.level + 1, Heard.CASES, cases)
    return (yield from agree(peer, Phase.CONFIRM, body, work))


def conclude(peer: Peer, state: bytes) -> Story:
    """VOTE if there is something to vote on, decide, and SEAL if the roster changes."""
    config, transcript = peer.config, peer.transcript
    agenda = make_agenda(config, transcript)
    if agenda:
        ballots, unopened = yield from make_ballots(peer, agenda)
        held = tuple(peer.cases[case.digest] for case in agenda if case.digest in peer.cases)
        if peer.member and held:  # whoever votes must be able to show on what
            yield KeepMessages(peer.level + 1, Heard.CASES, held)
        yield from agree(peer, Phase.VOTE, m.Vote(ballots, unopened), work=find_vote_time(peer, agenda))
        offenders = find_offenders(config, transcript, Phase.VOTE)
        if offenders.banned:
            return (yield from abort(peer, offenders))
        for case in agenda:
            if case.accusers and is_received(config, transcript, case):
                yield from fetch_case(peer, case, math.inf)
    decision = decide(config, transcript, agenda, peer.cases)
    voted = {case.digest for case in agenda}
    peer.charges = [charge for charge in peer.charges if compute_case_digest(charge) not in voted]
    if not peer.member:
        peer.late.clear()
    view = make_next(config, transcript, decision, peer.level + 1, peer.root)
    if not is_changed(peer.view, view):
        return view, True
    view = msgspec.structs.replace(view, height=peer.level + 2)
    transcript.offences, transcript.removals = decision.banned, decision.removed
    if peer.member and decision.state is not None and decision.state != state:
        yield Note(Diverged(peer.view.step))
    yield from seal(peer, Phase.SEAL, m.Seal(view.digest), view)
    yield from announce(peer, decision)
    return view, False


def find_vote_time(peer: Peer, agenda: tuple[Case, ...]) -> float:
    """Seconds that the verdicts on an agenda may take."""
    config = peer.config
    each = config.gradient_time + find_fetch_time(config)
    return (1 + count_gradients(peer, agenda)) * each + 2 * config.transfer_time + 12 * config.delta


def make_ballots(peer: Peer, agenda: tuple[Case, ...]) -> Story:
    """My verdict on every case; for V3, everybody's part is opened first."""
    view, config = peer.view, peer.config
    unopened: tuple[tuple[int, int], ...] = ()
    if any(case.part is not None for case in agenda):
        distant = find_distant(config, peer.transcript)
        requests = {(view.roster.index(key), part) for key in peer.duties.contributors for part in distant}
        unopened = yield from open_parts(peer, peer.own.get(view.step) or Own(b""), requests)
    yield from fetch_evidence(peer, agenda)
    peer.waits.clear()
    peer.bearers = find_bearers(peer, agenda)
    until = peer.time
    ballots = []
    for case in agenda:
        verdict = (yield from check_case(peer, case, until)) if peer.member else Verdict.NOT_RECEIVED
        ballots.append(m.Ballot(case.digest, verdict))
    peer.bearers = {}
    return tuple(ballots), unopened


def find_bearers(peer: Peer, agenda: tuple[Case, ...]) -> dict[tuple[int, int, bytes], set[bytes]]:
    """Who says that a commit is wrong, and so has its bytes, by step, attempt and sender."""
    found: dict[tuple[int, int, bytes], set[bytes]] = {}
    for case in agenda:
        charge = peer.cases.get(case.digest)
        if isinstance(charge, m.Accusation) and charge.rule is Rule.GRADIENT:
            found.setdefault((charge.step, charge.attempt, charge.accused), set()).update(case.accusers)
    return found


def abort(peer: Peer, decision: Decision) -> Story:
    """End this attempt together, without the culprits."""
    view = make_retry(peer.config, peer.transcript, decision, peer.level + 2, peer.root)
    peer.transcript.offences, peer.transcript.removals = decision.banned, decision.removed
    culprits = tuple(sorted((*decision.banned, *decision.removed)))
    yield from seal(peer, Phase.ABORT, m.Abort(culprits, view.digest), view)
    yield from announce(peer, decision)
    return view, False


def seal(peer: Peer, phase: Phase, body: m.Seal | m.Abort, view: View) -> Story:
    peer.transcript.sealing = view
    letters = yield from agree(peer, phase, body)
    if is_another_electorate(peer.view, view):
        peer.remember_link(view, tuple(letter.message for letter in letters.values()))


def announce(peer: Peer, decision: Decision) -> Story:
    """Tell the outside who went, and why."""
    at = peer.view.step
    for key, offence in decision.banned.items():
        yield Note(Banned(key, offence.rule, offence.step, at, offence.reason, offence.evidence, offence.case))
    for key, reason in decision.removed.items():
        yield Note(Removed(key, at, reason))


def follow(peer: Peer, transcript: Transcript, height: int, resolution: Resolution) -> View | None:
    """The view after a slow path at ``height``."""
    config, phase = peer.config, transcript.heights[height]
    concluded = transcript.sealing if phase in (Phase.SEAL, Phase.ABORT) else None
    if concluded is None and resolution.stands and resolution.values is not None:
        closed = Transcript(
            transcript.view,
            transcript.duties,
            {**transcript.phases, phase: resolution.values},
            {**transcript.heights, height: phase},
            randomness=transcript.randomness,
        )
        agenda = make_agenda(config, closed)
        needed = {case.digest for case in agenda if case.accusers and is_received(config, closed, case)}
        peer.lacking = needed - peer.cases.keys()
        if peer.lacking:
            return None
        decision = decide(config, closed, agenda, peer.cases)
        transcript.offences, transcript.removals = decision.banned, decision.removed
        concluded = make_next(config, closed, decision, height + 1, bytes(32))
    return follow_resolution(config, transcript, height, resolution, concluded)


# ---- A peer's life


def run_peer(
    config: Config, key: bytes, examiner: Examiner, kept: bytes | None = None, heard: Iterable[Message] = ()
) -> Story:
    """Take part until the run ends. ``kept`` and ``heard`` are on disk if this peer has been here before."""
    peer = make_peer(config, key, examiner, kept, heard)
    return run_made_peer(peer, returning=kept is not None or key not in config.founders)


def make_peer(
    config: Config, key: bytes, examiner: Examiner, kept: bytes | None = None, heard: Iterable[Message] = ()
) -> Peer:
    """A peer before its life begins: at the view kept, or with the founders; it knows the messages it ``heard``.

    Set :attr:`Peer.revived` if it has signed anything before.
    """
    view = (decode_view(kept) if kept is not None else None) or make_genesis(config)
    peer = Peer(config, key, examiner, view, follow)
    peer.recall(heard)
    return peer


def run_made_peer(peer: Peer, returning: bool) -> Story:
    """A peer's life. One that is ``returning`` asks first how far the others are."""
    config, view = peer.config, peer.view
    yield from peer.receive(float("-inf"))  # what time is it?
    peer.enter(view)
    peer.join = join_slow_path
    riding = settled = False
    while True:
        try:
            settled = False
            if returning:
                returning = False
                yield from catch_up(peer)
            yield from prepare(peer)
            if peer.view.step < config.steps:
                view, riding = yield from run_attempt(peer)
            elif peer.view.suspects:
                view, riding = yield from run_closing(peer)
            else:
                return (yield from linger(peer))
        except Lost as lost:
            view, riding, settled = lost.view, False, lost.is_final
            if peer.riding and view.step >= peer.view.step:
                yield Note(StepFinished(peer.view.step - 1, view))
            if is_another_electorate(peer.view, view):
                peer.remember_link(view, lost.messages)
            yield from announce_lost(peer, lost)
        before = peer.view
        peer.enter(view, riding=riding)
        if view.step <= before.step:
            yield Undo(view.step)
        if settled:
            peer.base = view
            yield Keep(encode_view(view), view.height)
        if not riding and view.step > before.step:
            yield Note(StepFinished(view.step - 1, view))
        if peer.duties.margin:
            yield Note(MarginLost(view.step, peer.duties.margin))


def settle_view(peer: Peer) -> Story:
    """COMMIT is complete: everybody starts from this view, and what the step before led to is settled for ever."""
    fresh, peer.base = peer.base != peer.view, peer.view
    if fresh:
        yield Keep(encode_view(peer.view), peer.view.height)
    if peer.riding:
        peer.riding = False
        yield Note(StepFinished(peer.view.step - 1, peer.view))
    if peer.leaving and not peer.member:
        if is_needed(peer):  # whoever has all these goes on, and disputes nothing
            letters = next(iter(peer.transcript.phases.values()))
            yield Broadcast(peer.others, m.Certificate(tuple(letter.message for letter in letters.values())))
            yield from fetch(peer, lambda: False, tuple, peer.time + find_slow_time(peer))
        yield Note(Left(peer.view))


def is_needed(peer: Peer) -> bool:
    """Whether those who stay may lack a quorum without me if the seal of my leaving is disputed."""
    epoch = peer.find_epoch(peer.view.height - 1)
    if epoch is None or peer.key not in epoch.view.roster:
        return False
    staying = sum(key in peer.view.roster for key in epoch.view.roster)
    return staying - epoch.view.bound - peer.config.outages < compute_quorum(peer.config, epoch.view)


def find_slow_time(peer: Peer) -> float:
    """Seconds in which whoever opens a slow path has settled it."""
    return (8 + 2 * (peer.view.bound + 2)) * peer.config.delta


def announce_lost(peer: Peer, lost: Lost) -> Story:
    """Who is missing in the view that a slow path led to, and why."""
    view, epoch = lost.view, lost.epoch
    if epoch is None:
        yield Note(Jumped(view))
        return
    for key in sorted(set(view.banned) - set(epoch.view.banned)):
        offence = epoch.offences.get(key) or find_equivocation(peer, epoch, key, lost)
        yield Note(Banned(key, offence.rule, offence.step, view.step, offence.reason, offence.evidence, offence.case))
    for key in sorted(set(epoch.view.roster) - set(view.roster) - set(view.banned)):
        yield Note(Removed(key, view.step, epoch.removals.get(key, "silent, late or astray")))


def find_equivocation(peer: Peer, epoch: Transcript, key: bytes, lost: Lost) -> Offence:
    """The two messages that a slow path brought to light; without them, what its quorum signed."""
    pages = [page for height, page in sorted(peer.pages.items()) if height >= epoch.view.height and key in page.seconds]
    case = m.Equivocation(pages[-1].letters[key].message, pages[-1].seconds[key].message) if pages else None
    evidence = (case.first, case.second) if case is not None else lost.messages
    return Offence(Rule.EQUIVOCATION, epoch.view.step, "signed two messages at one height", evidence, case)


def catch_up(peer: Peer) -> Story:
    """Ask for the views that followed the one I know; :class:`Lost` brings the latest."""
    yield Broadcast(peer.others, m.PullChain(peer.base.height))
    end = peer.time + 2 * peer.config.delta
    while peer.time < end:
        yield from peer.listen(end)


def prepare(peer: Peer) -> Story:
    """Hold the state that the view starts from; ask to join if I am not in."""
    view = peer.view
    if not peer.member and not peer.leaving and key_may_ask(peer):
        join = yield Sign(view.height, view.step, view.attempt, Phase.COMMIT, bytes(32), m.Join(view.previous, "any"))
        yield Broadcast(peer.others, join)
    if (yield HasState(view.step, view.state)):
        return
    while True:
        server = min(peer.others, key=lambda key: (peer.failures.get(key, 0), compute_digest("server", peer.key, key)))
        peer.failures[server] = peer.failures.get(server, 0) + 1  # taken back below if it serves well
        data = yield from fetch_state(peer, server)
        if data is not None and (yield AdoptState(view.step, view.state, data)):
            peer.failures[server] = 0
            peer.forget_gradients()
            yield Note(Synced(view.step, view.state))
            return
        yield Broadcast(peer.others, m.PullChain(peer.base.height))  # we may be too late for this one


def key_may_ask(peer: Peer) -> bool:
    view = peer.view
    return peer.key not in view.banned and all(candidate.key != peer.key for candidate in view.candidates)


def fetch_state(peer: Peer, server: bytes) -> Story:
    """The state in chunks from one member; what it is worth shows when it is whole."""
    peer.state = state = StateFetch(peer.view.step, server)
    soon = peer.time + 4 * peer.config.delta
    until = soon + peer.config.transfer_time
    while peer.time < (until if state.size is not None else soon):
        got = len(state.data)
        if state.size is not None and got >= state.size:
            peer.state = None  # whoever takes the bytes holds them: nothing more may come
            return state.data
        yield Send(server, m.PullState(state.step, got))
        end = min(until, peer.time + 2 * peer.config.delta)
        while peer.time < end and len(state.data) == got and state.size != got:
            yield from peer.listen(end)
    return None


def linger(peer: Peer) -> Story:
    """The run is over: answer those who are not as far."""
    if not peer.member and peer.base != peer.view:  # what is only sealed may be replaced: those who voted would know
        end = peer.time + find_slow_time(peer)
        yield from fetch(
            peer, lambda: False, lambda: (Broadcast(peer.choose_some(), m.PullChain(peer.base.height)),), end
        )
    yield Note(RunFinished(peer.view))
    end = peer.time + 60 * peer.config.delta
    while peer.time < end:
        yield from peer.listen(end)
    return peer.view
