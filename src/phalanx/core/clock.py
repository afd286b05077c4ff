"""What a peer measures of the others' time, for its next CONFIRM (``pace.py`` says what follows from it).

A height whose slow path went to its end is not measured: that is paid for by a strike or an absence. :attr:`Peer.time`
stands still there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median_low

from phalanx.core import messages as m
from phalanx.core.checking import find_arrival_time, find_fetch_time
from phalanx.core.config import Config
from phalanx.core.messages import Phase, Verdict
from phalanx.core.pace import Lags, measure
from phalanx.core.peer import Peer
from phalanx.core.transcript import Page

_SOON = 8
"""In a part of ``delta`` so small a message that nothing held up is here: nothing is asked for sooner."""
_LONGER = 1.25
"""How many times longer than before gradients may take without being taken for waits."""
_AGAIN = (Phase.AGGREGATE_AGAIN, Phase.REPORT_AGAIN)


def note_letters(peer: Peer, height: int, phase: Phase, page: Page) -> None:
    """Add how late the agreed messages of a height were. ``peer.entered`` is still when the height before was here."""
    clock, view = peer.clock, peer.view
    if phase is Phase.COMMIT:  # the next gradient began with the last REVEAL
        clock.begun, clock.revealed = clock.revealed, None
    if phase is Phase.WAIT or not peer.transcript.is_measured(height, height - 1):
        clock.watch.partial = True  # a wait at the floor is no pace
        return
    begins = _find_begins(peer) if phase is Phase.COMMIT else {}
    offsets = {
        place: max(0.0, page.times[key] - begins.get(key, peer.entered))
        for place, key in enumerate(view.roster)
        if key != peer.key and key in page.times
    }
    slack = _find_vote_slack(peer.config) if phase is Phase.VOTE else 0.0
    if phase is Phase.COMMIT:
        if offsets and begins:
            clock.usual = _move_usual(peer, median_low(offsets.values()), min(begins.values()))
        elif offsets:
            clock.usual = clock.usual or median_low(offsets.values())
        allowed = _find_arrivals(peer)
        clock.arriving = frozenset()
    else:
        allowed = _find_allowed(peer, page) if phase is Phase.REPORT else {}
    reference = None
    if phase is Phase.COMMIT:  # those who have a gradient to compute, and I if I have
        said = page.times.get(peer.key)  # not after a restart
        mine = {peer.index: max(0.0, said - begins.get(peer.key, peer.entered))} if said is not None else {}
        known = offsets | mine
        places = (view.roster.index(key) for key in peer.duties.contributors)
        reference = [known[place] for place in places if place in known]
    lags = _measure(peer, offsets, allowed, slack, reference)
    clock.watch.add(view.roster, lags, again=phase in _AGAIN)
    if phase is Phase.REVEAL and offsets:
        clock.watch.hop = min(round(1000 * median_low(offsets.values())), round(1000 * peer.config.delta))
    if phase is Phase.REVEAL:
        clock.revealed = peer.time
    elif phase is Phase.REPORT:
        busy = {check.checker for check in peer.duties.checks}
        clock.reported = {key: time for key, time in page.times.items() if key in busy}


def note_parts(peer: Peer, opened: Iterable[tuple[int, int]], since: float) -> None:
    """Add how late the parts were that I got: mine, those that I pass on, and since a later time those opened."""
    view, step = peer.view, (peer.view.step, peer.view.attempt)
    if not peer.transcript.is_measured(view.height, view.height + 1, peer.level):
        return
    begin = peer.clock.committed
    owed = [(key, peer.index, begin) for key in peer.duties.contributors]
    owed += [(view.roster[owner], part, since) for owner, part in opened]
    passed = [(x, view.roster.index(other), begin) for x, other in peer.relayed if x in peer.duties.contributors]

    def find_offsets(parts: Iterable[tuple[bytes, int, float]]) -> dict[int, float]:
        offsets: dict[int, float] = {}
        for owner, part, start in parts:
            if owner != peer.key:
                place, here = (*step, owner, part), view.roster.index(owner)
                came = peer.part_times.get(place, peer.time) if peer.has_part(place) else peer.time
                offsets[here] = max(offsets.get(here, 0.0), came - start)
        return offsets

    mine, lags = _measure(peer, find_offsets(owed)), _measure(peer, find_offsets([*owed, *passed]))
    # What I only pass on does not keep me.
    peer.clock.watch.add_inputs(view.roster, Lags(lags.most, lags.late, mine.waits), parts=True)


def note_aggregates(peer: Peer, since: float) -> None:
    """Add how late the aggregates were."""
    view = peer.view
    if not peer.transcript.is_measured(peer.level, peer.level - 1):
        return
    came = {
        part: peer.aggregate_times.get((view.step, view.attempt, part), peer.time)
        for part, key in enumerate(view.roster)
        if key != peer.key
    }
    offsets = {part: max(0.0, time - since) for part, time in came.items()}
    peer.clock.watch.add_inputs(view.roster, _measure(peer, offsets))


def find_turn(peer: Peer) -> float:
    """Seconds after which letters that are late are asked for, once most are here: four times what one takes."""
    delta = peer.config.delta
    return min(delta, max(delta / _SOON, 4 * peer.clock.watch.hop / 1000))


def _find_vote_slack(config: Config) -> float:
    """Seconds that a member may need before VOTE for evidence, or bytes, that others did not have to wait for."""
    return 2 * config.delta + config.transfer_time + find_fetch_time(config)


def _measure(
    peer: Peer,
    offsets: Mapping[int, float],
    allowed: Mapping[int, float] | None = None,
    slack: float = 0.0,
    reference: Iterable[float] | None = None,
) -> Lags:
    whole = {place: round(1000 * offset) for place, offset in offsets.items()}
    hop = peer.clock.watch.hop + round(1000 * slack)
    others = [round(1000 * offset) for offset in reference] if reference is not None else None
    return measure(whole, peer.view.bound, hop, {key: round(1000 * x) for key, x in (allowed or {}).items()}, others)


def _find_begins(peer: Peer) -> dict[bytes, float]:
    """When each member could begin with its gradient: in a retry, and after a restart, when the attempt began.

    A machine that checked others was busy until its report came. Gradients that had been computed long before the
    attempt began do not make others that come later look early.
    """
    view, clock = peer.view, peer.clock
    if clock.begun is None or any(record.step == view.step for record in view.attempts):
        return {}
    begin = max(clock.begun, peer.entered - _LONGER * clock.usual) if clock.usual else clock.begun
    ready = (key for key in view.roster if key not in clock.arriving)
    return {key: max(begin, clock.reported.get(key, begin)) for key in ready}


def _move_usual(peer: Peer, middle: float, begin: float) -> float:
    """The median time of a gradient, as far as it shows: not where gradients were ready before the attempt began."""
    usual, hidden = peer.clock.usual, middle <= peer.entered - begin + 2 * peer.clock.watch.hop / 1000
    return min(usual, middle) if hidden and usual else middle


def _find_arrivals(peer: Peer) -> dict[int, float]:
    """From when on the first COMMIT of members that are new is late: they may have to fetch what others kept back."""
    due = 2 * peer.clock.usual + find_arrival_time(peer.config, peer.view)
    return {place: due for place, key in enumerate(peer.view.roster) if key in peer.clock.arriving}


def _find_allowed(peer: Peer, page: Page) -> dict[int, float]:
    """From when on after REVEAL a checker's report is late: it takes twice as long for each gradient as most."""
    view, clock, config = peer.view, peer.clock, peer.config
    load = Counter(check.checker for check in peer.duties.checks)
    retry = any(record.step == view.step for record in view.attempts)
    begin = clock.begun if clock.begun is not None and not retry else clock.committed
    # Where members came or went, machines had begun with what they would otherwise have had to do.
    changed = not view.attempts or view.attempts[-1].roster != view.roster
    trials = Counter(check.checker for check in peer.duties.checks if check.step == view.step - 1)
    allowed: dict[int, float] = {}
    for key, checks in load.items():
        if key not in view.roster:
            continue
        gradients = checks + (key in peer.duties.contributors) + changed
        due = begin + 2 * gradients * clock.usual
        body = page.letters[key].body if key in page.letters else None
        lacking = isinstance(body, m.Report) and any(x.verdict is Verdict.NOT_RECEIVED for x in body.findings)
        # What it has to fetch others may keep from it for a while.
        fetching = checks * find_fetch_time(config) + 2 * config.delta * (checks if lacking else trials[key])
        allowed[view.roster.index(key)] = max(0.0, due - peer.entered) + fetching
    return allowed
