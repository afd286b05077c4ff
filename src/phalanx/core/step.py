"""One step of training together (the paper's BTARD-SGD, docs/PROTOCOL.md section 5). Read this file first.

``run_attempt`` goes through the phases once. It returns the view to go on from: of the next step, or of another attempt
at this one. When a slow path removes somebody in between, :class:`Lost` carries that view instead. How an attempt ends
is in ``conclusion.py``, and how a peer goes from one to the next in ``life.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec
import torch

from phalanx.core import messages as m
from phalanx.core.broadcast import agree
from phalanx.core.checking import (
    ask_part,
    check_case,
    check_commit,
    compute_gradient,
    fetch,
    fetch_trial,
    find_arrival_time,
    find_fetch_time,
    make_charge,
    read_aggregates,
)
from phalanx.core.clock import find_turn, note_aggregates, note_parts
from phalanx.core.conclusion import abort, conclude, confirm, find_vote_time, make_confirm, settle_view, wait
from phalanx.core.config import Config
from phalanx.core.crypto import compute_commitment, compute_digest
from phalanx.core.effects import (
    Apply,
    Broadcast,
    ComputeAggregate,
    ComputeGradient,
    ComputeReport,
    DrawSecret,
    Effect,
    Foresee,
    HashState,
    Note,
    Sign,
    Story,
)
from phalanx.core.events import AttemptStarted
from phalanx.core.handlers import pass_on, send_aggregate, send_part
from phalanx.core.justice import (
    UNKNOWN,
    decide_aggregates,
    decide_openings,
    decide_reports,
    find_offenders,
    find_requests,
    find_served,
    is_stuck,
    make_closing_agenda,
)
from phalanx.core.membership import View, compute_batch_seed, foresee_duties, is_enough
from phalanx.core.merkle import compute_paths, hash_part
from phalanx.core.messages import Phase, Rule, Verdict
from phalanx.core.opening import fetch_opened, find_opening_time, open_parts
from phalanx.core.pace import find_opening
from phalanx.core.partition import join_parts, split_parts
from phalanx.core.peer import Own, Peer
from phalanx.core.transcript import Transcript, Values
from phalanx.core.verification import ACCUSER_MARGIN, compute_column, is_same_report, projection_seeds, read_stack


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
    peer.clock.committed = peer.time
    peer.clock.watch.begin()
    yield from settle_view(peer)
    yield from find_way_back(peer)
    yield from keep_silent_without_parts(peer, own)
    offenders = find_offenders(config, transcript, Phase.COMMIT)
    if offenders.ends_attempt and not is_stuck(config, view, offenders):
        return (yield from abort(peer, offenders))

    # Scatter, AGGREGATE, gather: part j goes to member j, who returns the clipped mean.
    yield from pass_on(peer)
    yield from scatter(peer, own)
    patience = 4 * config.delta + config.transfer_time  # others may complete a height 3 delta after me
    aggregate = yield from aggregate_part(peer, patience)
    yield from agree(peer, Phase.AGGREGATE, aggregate, work=patience)
    yield from pass_on(peer)
    transcript.served = find_served(transcript)
    offenders = find_offenders(config, transcript, Phase.AGGREGATE)
    requests, opened_at = find_requests(transcript), peer.time
    while not offenders.banned and requests:
        unopened = yield from open_parts(peer, own, requests)
        yield from fetch_opened(peer, requests)
        aggregate = yield from aggregate_part(peer, 0)
        aggregate = msgspec.structs.replace(aggregate, unopened=unopened, trials=())
        yield from agree(peer, Phase.AGGREGATE_AGAIN, aggregate, work=find_opening_time(config, 2))
        offenders = find_offenders(config, transcript, Phase.AGGREGATE_AGAIN)
        if not offenders.banned:
            offenders = decide_openings(config, transcript)
        if not is_stuck(config, view, offenders):
            break
        ending = yield from wait(peer, offenders)
        if ending is not None:
            return ending
    if offenders.ends_attempt:
        return (yield from abort(peer, offenders))
    yield from pass_on(peer)
    if peer.member:
        note_parts(peer, requests, opened_at)
    aggregated_at = peer.time
    peer.clock.watch.begin()

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
    if peer.member:
        note_aggregates(peer, aggregated_at)
    offenders = find_offenders(config, transcript, Phase.REPORT)
    if not offenders.banned:
        offenders = decide_aggregates(transcript)
    stuck = is_stuck(config, view, offenders)
    while stuck or (not offenders.ends_attempt and is_lacking(transcript)):
        ending = (yield from wait(peer, offenders)) if stuck else None
        if ending is not None:
            return ending
        yield from gather(peer, patience)
        report = yield from make_report(peer, own, findings)
        yield from agree(peer, Phase.REPORT_AGAIN, report, work=patience)
        offenders = find_offenders(config, transcript, Phase.REPORT_AGAIN)
        if not offenders.banned:
            offenders = decide_reports(transcript)
        stuck = is_stuck(config, view, offenders)
        if not stuck:
            break
    if offenders.ends_attempt:
        return (yield from abort(peer, offenders))

    # CONFIRM: the new state, and what I hold against others.
    yield from apply_update(peer)
    state = (yield HashState(view.step + 1)) if peer.applied else UNKNOWN
    yield from recover_rows(peer, patience)
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
    if own is None or own.seed != seed:
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
            to = (view.roster[part], *peer.apart.get(view.roster[part], ()))
            yield from send_part(peer, to, (view.step, view.attempt, peer.key, part), data)


def aggregate_part(peer: Peer, patience: float) -> Story:
    """My part of everybody's gradient, clipped and sent to all; or whose parts I did not get."""
    view = peer.view
    if not peer.member:
        return m.Aggregate(None, (0,), (), ())
    places = [(view.step, view.attempt, key, peer.index) for key in peer.duties.contributors]
    wanted, looked = [place for place in places if not peer.has_part(place)], peer.arrivals
    until, known = peer.entered + patience, -1
    times = [peer.entered + patience / 2]  # what was lost on the way, or with my memory, is sent again
    while wanted:
        if looked != peer.arrivals:
            looked = peer.arrivals
            wanted = [place for place in wanted if place not in peer.parts or not peer.has_part(place)]
        if patience and known != len(wanted):
            known, opening = len(wanted), find_opening_times(peer, places)
            if opening is not None:  # the others are here: these are late
                until = min(peer.entered + patience, opening[1])
                times = sorted({opening[0], *(x for x in times if peer.entered + patience / 2 >= x > peer.time)})
        if not wanted or peer.time >= max(until, peer.awake):
            break
        if times and peer.time >= times[0]:
            times = [x for x in times if x > peer.time]
            for lost in wanted:
                if not times or not peer.is_coming(lost):
                    yield from ask_part(peer, lost, (lost[2],))
        yield from peer.listen(min([max(until, peer.awake), *times]))
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


def find_opening_times(peer: Peer, places: Iterable[tuple[int, int, bytes, int]]) -> tuple[float, float] | None:
    """When missing parts of my row are asked for again, and when I say that they are missing."""
    came = [0.0 if x[2] == peer.key else peer.part_times.get(x, math.inf) - peer.entered for x in places]
    here = [max(0, round(1000 * offset)) for offset in came if offset < math.inf]
    opening = find_opening(here, len(came), peer.view.bound, peer.clock.watch.hop, peer.view.pace)
    if opening is None:
        return None
    return peer.entered + opening[0] / 1000, peer.entered + opening[1] / 1000


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
        soon = min(until, peer.time + min(peer.config.delta, 2 * find_turn(peer)))
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
    for check in dict.fromkeys(peer.duties.checks):
        if check.checker != peer.key or check.target in view.banned:
            continue
        transcript = peer.transcripts.get((check.step, check.attempt))
        if transcript is None:
            continue
        yield from fetch_trial(peer, transcript, check.target)
        verdict, wrong = yield from check_commit(peer, transcript, check.target, accusing=True)
        guilty = verdict is Verdict.GUILTY
        if findings.get(check.target) is not Verdict.GUILTY:
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


# ---- Before CONFIRM


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
    randomness = view.drawn or randomness
    if (peer.key in duties.contributors or peer.is_on_trial_in(step)) and step < config.steps:
        found.append(ComputeGradient(step, compute_batch_seed(config, randomness, step, peer.key)))
    for check in duties.checks:
        epoch = peer.transcripts.get((check.step, check.attempt))
        if check.checker == peer.key and epoch is not None:
            past = epoch.view
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


def recover_rows(peer: Peer, patience: float) -> Story:
    """Get the rows of my part again if they went with my memory; where the run cannot do without me, however long."""
    if can_check_reports(peer):
        return
    view = peer.view
    staying = {*view.roster} - {peer.key}
    spared = is_enough(peer.config, view.attempts, staying, view.doubts)
    places = [(view.step, view.attempt, key, peer.index) for key in peer.duties.contributors]

    def ask() -> Iterable[Effect]:
        for place in places:
            if not peer.has_part(place):
                yield from ask_part(peer, place, (place[2],))

    until = peer.time + patience / 2 if spared else math.inf
    yield from fetch(peer, lambda: can_check_reports(peer), ask, until)


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
