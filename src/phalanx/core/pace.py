"""The agreed pace: who costs the others time, and how much of it they put up with. Pure functions.

*What is seen.* Being last proves nothing: whoever sends its part to one victim just in time makes the victim late to
everybody. Each member can say two things of each other member ``k``, and says both in CONFIRM (:class:`Timing`):

* ``late[k]``: for how long ``k``'s inputs (agreed messages, parts, aggregates) came later than all put up with, that
  is, later than twice the median *and* than the ``(n - b_t)``-th of them, by more than a *hop*, what one message takes.
  The first so that a machine or a line half as fast as most is never late. The second so that the ``b_t`` slowest are
  measured against somebody honest, however many of them are slow together. The hop because a wait of two hops, which
  nobody can tell from chance, is no excuse below, so it must not make anybody late. Offsets run from when the member
  itself had completed the height before, so that nobody is charged twice for one delay. (A gradient's run from the
  REVEAL in which it could begin, a checker's from its REPORT.)
* ``waits[k]``: for how long it waited for ``k`` when all but ``b_t`` others were there, beyond a hop. That is what may
  have made the member itself late.

*What is agreed* (:func:`read_timings`). Up to ``b_t`` members lie. The ``(b_t + 1)``-th largest ``late[k]`` is *vouched
for*: an honest member saw ``k`` at least so late. The ``(b_t + 1)``-th smallest ``waits[k]`` is the *common* wait: what
``k`` cost everybody, whatever liars say.

*Whose fault it is* (:func:`judge`). A member's vouched lateness, less what it waited for others beyond their common
wait, is its own. The rest lies between it and those whom it names: one of the two is
slow, and nobody knows which. Such a pair gets a *rift*: from then on ``b_t + 1`` honest members and more stand between
the two (they forward to each what the other sends, and parts are opened at once), so whatever is late is late to all of
these, and vouched for. Hence nothing that passes a rift excuses anybody, and who still says that it misses what came
over one pays for the round that this takes. Rifts cost bytes, not time, so the first occasion is enough. But an honest
member has them with ``b_t`` attackers, and perhaps over one bad line; who has more pays for what follows itself.

*What is put up with* (:func:`settle_debts`). Charges add up to a debt, which shrinks in each step by a tenth of the
agreed step. A member that owes more than ``find_limit`` is suspended, and comes back when it owes no more. Debts shrink
outside as well, so a member that has cost an hour stays away until that hour, too, is a tenth of what the run took
since. One honest pause costs no more than the limit; a machine that pauses once too often is back as soon as one that
is silent too often, after ``LONGEST_STAY`` steps at most (:func:`limit_stay`).

What follows, for ``n >= 3 b_t + 1``, while messages arrive within ``delta`` (``tests/core/test_pace.py``):

* An honest member is charged no more than what an honest member saw of its own lateness, beyond twice the median, and
  nothing for what others kept from it; liars can add nothing. Only a claim of its own across a rift costs it more.
* Whatever ``b_t`` members do, each costs at most the limit, one step beyond it, and from then on a tenth of a step in
  each step, or one deadline in 40 steps, on top of twice the median.

All numbers are whole milliseconds: everybody computes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from phalanx.core.messages import Timing

Pair: TypeAlias = tuple[int, int]
"""Two places in the roster, the lower first."""

SHARE = 10
"""A debt shrinks by this part of a step."""
_MOST_EXCUSED = 4
"""Steps' worth of waiting for others that a member may name as its excuse in one step."""
_GROWTH = (5, 4)
"""The agreed step grows or falls by this factor in one step, no faster: or one step would make the next one cheap."""
LONGEST_STAY = 40
"""Steps that a member stays away at most if each step of its own cost no more than the limit."""
RIFT_STEPS = 100
"""For how many steps a rift lasts."""
_BAD_LINES = 1
"""Rifts that anybody may have beside those with attackers: lines between honest members are not all good."""
_MOST = (1 << 32) - 1


# ---- What one member sees


@dataclass(frozen=True, slots=True)
class Lags:
    """How late the inputs of one kind were at one height."""

    most: int
    """When all but the ``bound`` slowest were here."""
    late: Mapping[int, int]
    waits: Mapping[int, int]


def measure(
    offsets: Mapping[int, int],
    bound: int,
    hop: int,
    allowed: Mapping[int, int] | None = None,
    reference: Collection[int] | None = None,
) -> Lags:
    """The lags of the others' inputs, from their ``offsets`` in milliseconds by place in the roster.

    ``hop`` is what one message takes. ``allowed`` says from when on an input is late if that is later than for others:
    of a member that has work to do which others have not. ``reference``: what they are measured against, if not against
    each other: where some have nothing to compute, those who have.
    """
    arrived = sorted(offsets.values() if reference is None else reference)
    place = len(arrived) - bound - 1
    if place < 0:  # whoever is slow, nobody honest is known to be faster
        return Lags(0, {}, {})
    most, usual = arrived[place], 2 * arrived[min(len(arrived) // 2, place)]  # of few, the upper may be a liar's
    due = {key: max(most, usual, (allowed or {}).get(key, 0)) + hop for key in offsets}
    return Lags(
        most,
        {key: offset - due[key] for key, offset in offsets.items() if offset > due[key]},
        {key: offset - most - hop for key, offset in offsets.items() if offset > most + hop},
    )


def find_opening(offsets: Iterable[int], contributors: int, bound: int, hop: int, pace: int) -> tuple[int, int] | None:
    """When a part that is not here is asked for again, and when in the open, in milliseconds.

    None: not before more have come. ``offsets`` are those of the parts that are here, the own one included. A member
    may be three times a link behind others without knowing, kept there by attackers, and nobody should be named for
    that; and what was lost on the way is sent again first.
    """
    arrived = sorted(offsets)
    if not pace or len(arrived) < max(1, contributors - bound):
        return None
    middle = arrived[min(contributors // 2, len(arrived) - 1)]
    turn = max(4 * middle, 4 * hop, pace // SHARE)
    return arrived[-1] + turn, arrived[-1] + 2 * turn


@dataclass(slots=True)
class Stopwatch:
    """Adds up what one member sees between two CONFIRMs. Keys, since rosters change; the peer alone writes here."""

    step: int = 0
    rounds: int = 0
    hop: int = 0
    partial: bool = False
    """Whether some height was not measured: then nobody knows how long the step would have taken."""
    late: dict[bytes, int] = field(default_factory=dict)
    waits: dict[bytes, int] = field(default_factory=dict)
    parts: dict[bytes, int] = field(default_factory=dict)
    _since: tuple[dict[bytes, int], dict[bytes, int]] = field(default_factory=lambda: ({}, {}))
    """What of these agreed messages have added since the last parts or aggregates."""

    def add(self, roster: Sequence[bytes], lags: Lags, *, again: bool = False) -> None:
        """Take the lags of the agreed messages of a height: they say how long the step takes."""
        self.step += lags.most
        self.rounds += lags.most if again else 0
        for total, since, numbers in zip((self.late, self.waits), self._since, (lags.late, lags.waits), strict=True):
            for place, lag in numbers.items():
                for table in (total, since):
                    table[roster[place]] = table.get(roster[place], 0) + lag

    def begin(self) -> None:
        """From now on parts, or aggregates, are under way as well."""
        self._since = ({}, {})

    def add_inputs(self, roster: Sequence[bytes], lags: Lags, *, parts: bool = False) -> None:
        """Take the lags of what was under way since :meth:`begin`, as far as messages were not as late meanwhile."""
        for total, since, numbers in zip((self.late, self.waits), self._since, (lags.late, lags.waits), strict=True):
            for place, lag in numbers.items():
                key = roster[place]
                more = max(0, lag - since.get(key, 0))
                total[key] = total.get(key, 0) + more
                if parts and total is self.late:
                    self.parts[key] = self.parts.get(key, 0) + more

    def read(self, roster: Sequence[bytes]) -> Timing:
        """What to say in CONFIRM."""
        tables = (self.late, self.waits, self.parts)
        numbers = (tuple(min(_MOST, table.get(key, 0)) for key in roster) for table in tables)
        said = (x if any(x) else () for x in numbers)
        step = 0 if self.partial else min(_MOST, self.step)
        return Timing(step, min(_MOST, self.rounds), min(_MOST, self.hop), *said)


# ---- What all agree on


@dataclass(frozen=True, slots=True)
class Reading:
    """What the timings of a step say that an honest member stands for."""

    step: int
    rounds: int
    hop: int
    late: tuple[int, ...]
    """Vouched for."""
    common: tuple[int, ...]
    """What the member cost everybody."""
    waits: tuple[tuple[int, ...], ...]
    """By whom, for whom: claims of one member each."""
    parts: tuple[int, ...]
    """How much of what is vouched for parts were."""


def read_timings(timings: Sequence[Timing], bound: int) -> Reading:
    """Of one timing from each member, in the roster's order."""
    count = len(timings)
    late = [x.late or (0,) * count for x in timings]
    waits = tuple(x.waits or (0,) * count for x in timings)
    parts = [x.parts or (0,) * count for x in timings]
    vouched, common, held = [], [], []
    for key in range(count):
        others = [place for place in range(count) if place != key]
        vouched.append(_get(sorted((late[place][key] for place in others), reverse=True), bound))
        common.append(_get(sorted(waits[place][key] for place in others), bound))
        held.append(_get(sorted((parts[place][key] for place in others), reverse=True), bound))
    middle = (count - 1) // 2
    rounds, hop = (sorted(said)[middle] for said in zip(*((x.rounds, x.hop) for x in timings), strict=True))
    steps = sorted(x.step for x in timings if x.step)
    step = steps[(len(steps) - 1) // 2] if 2 * len(steps) > count else 0
    return Reading(step, rounds, hop, tuple(vouched), tuple(common), waits, tuple(held))


def _get(ordered: Sequence[int], place: int) -> int:
    return ordered[place] if place < len(ordered) else 0


def move_pace(pace: int, step: int) -> int:
    """The agreed step of the view that follows: up and down slowly, or limits would be moved on purpose.

    0: most members could not measure the last one.
    """
    if not pace or not step:
        return pace or step
    grown, fallen = (pace * one // other for one, other in (_GROWTH, _GROWTH[::-1]))
    return min(max(step, fallen), grown + 1)


def find_leak(pace: int) -> int:
    """What one member may cost in each step, for ever."""
    return pace // SHARE


def find_limit(delta: float, transfer_time: float, pace: int) -> int:
    """What one member may owe: AGGREGATE or REPORT at its deadline, all that one pause can cost; and a step."""
    return int(1000 * (8 * delta + transfer_time)) + pace


# ---- Whose fault it is


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from one step for whom, by place in the roster."""

    charges: Mapping[int, int]
    rifts: frozenset[Pair]
    """New ones."""


def judge(reading: Reading, bound: int, pace: int, rifts: Collection[Pair], claims: Collection[Pair]) -> Judgement:
    """Charges and new rifts. ``claims`` are pairs of who says that it misses a part or an aggregate, and whose.

    Who is named by more members than may lie pays for the round. A member that has rifts with more members than may be
    Byzantine pays for what lies between it and others.
    """
    grace, estranged = pace // SHARE, find_estranged(rifts, bound) or frozenset()
    charges, fresh = dict[int, int](), set[Pair]()
    for key, vouched in enumerate(reading.late):
        excuses = _find_excuses(reading, key, rifts) if vouched > grace and key not in estranged else {}
        across = sum(wait for other, wait in excuses.items() if make_pair(key, other) in rifts)
        known = sum(excuses.values()) - across + min(across, max(0, vouched - reading.parts[key]))
        excused = min(known, _MOST_EXCUSED * pace, vouched)
        if vouched > excused:
            charges[key] = charges.get(key, 0) + vouched - excused
        for other in sorted(excuses, key=lambda other: (-excuses[other], other)):
            # No more than are needed, and none where an honest member saw whose fault it is: a rift counts for both.
            if excused > 0 and reading.late[other] <= grace and make_pair(key, other) not in rifts:
                fresh.add(make_pair(key, other))
            excused -= excuses[other]
    cost = min(reading.rounds, pace)  # no more, since others may draw it out
    paying: set[int] = set()
    counts = Counter(named for _, named in {*claims})
    naming = Counter(namer for namer, _ in {*claims})
    for namer, named in sorted(claims):
        pair = make_pair(namer, named)
        if naming[namer] > bound + _BAD_LINES:  # it was its own line
            paying.add(namer)
            continue
        # An honest member saw that it was late, or says so.
        if namer == named or reading.late[named] > grace or counts[named] > bound:
            paying.add(named)
        elif pair in rifts:  # all but a few have had in time what it says is missing
            paying.add(namer)
        elif {namer, named} & estranged:
            paying |= {namer, named} & estranged
        else:
            fresh.add(pair)
    for key in paying:
        charges[key] = charges.get(key, 0) + cost
    return Judgement(charges, frozenset(fresh))


def _find_excuses(reading: Reading, key: int, rifts: Collection[Pair]) -> dict[int, int]:
    """How much longer than all others a member says it waited for whom, where that is more than chance: than a hop.

    Across a rift, no longer than an honest member saw parts late, and it excuses no parts: of two that would excuse
    each other one has to pay for those.
    """
    beyond = {other: wait - reading.common[other] for other, wait in enumerate(reading.waits[key]) if other != key}
    for other in beyond:
        if make_pair(key, other) in rifts:
            beyond[other] = min(reading.waits[key][other], reading.parts[other])
    return {other: wait for other, wait in beyond.items() if wait > reading.hop}


def make_pair(one: int, other: int) -> Pair:
    return (one, other) if one <= other else (other, one)


def find_relays(roster: Sequence[bytes], one: bytes, other: bytes, bound: int) -> tuple[bytes, ...]:
    """The members that stand between two that have a rift: at least ``bound + 1`` of them are honest."""
    start = roster.index(min(one, other))
    between = (key for key in (*roster[start:], *roster[:start]) if key not in (one, other))
    return tuple(between)[: 2 * bound + 1]


def find_estranged(rifts: Collection[Pair], bound: int) -> frozenset[int] | None:
    """Members with rifts to more members than may be Byzantine; None: these are too many themselves.

    Then it was no member: messages took longer than usual, and all rifts are to be forgotten.
    """
    left, found = {pair for pair in rifts if pair[0] != pair[1]}, set[int]()
    while True:
        counts = dict[int, int]()
        for pair in left:
            for key in pair:
                counts[key] = counts.get(key, 0) + 1
        worst = max(counts, key=lambda key: (counts[key], -key), default=None)
        if worst is None or counts[worst] <= bound + _BAD_LINES:
            return frozenset(found)
        if len(found) == bound:
            return None
        found.add(worst)
        left = {pair for pair in left if worst not in pair}


# ---- What is put up with


def settle_debts(debts: Mapping[bytes, int], charges: Mapping[bytes, int], leak: int) -> dict[bytes, int]:
    """What each owes after a step, members and others, where that is anything."""
    owed = {key: debts.get(key, 0) + charges.get(key, 0) - leak for key in sorted({*debts, *charges})}
    return {key: min(debt, _MOST) for key, debt in owed.items() if debt > 0}


def find_debtors(debts: Mapping[bytes, int], roster: Collection[bytes], limit: int, bound: int) -> tuple[bytes, ...]:
    """Members that owe more than the limit, the most indebted first; no more at once than may be Byzantine."""
    over = sorted((key for key in debts if key in roster and debts[key] > limit), key=lambda key: (-debts[key], key))
    return tuple(over[:bound])


def limit_stay(debt: int, charge: int, limit: int, leak: int, absences: int) -> int:
    """What a member owes once it is suspended for it: what it cost in this step alone, or what it makes up for soon.

    One honest pause costs no more than the limit. Who pauses once too often stays away for 10 steps, then 20, then 40,
    as each return costs the others time too; ``absences`` counts this one, and those that are not forgiven.
    """
    stay = min(LONGEST_STAY, 5 << min(absences, 8))
    return max(limit + stay * leak, min(debt, charge))


def may_return(debt: int, limit: int) -> bool:
    """Whether a member that was suspended for its debt has sat out enough of it."""
    return debt <= limit


def tell_debt(charge: int, debt: int, limit: int) -> str:
    """The reason of a suspension, with its numbers."""
    return (
        f"too slow: it cost {charge / 1000:.1f} s in this step beyond twice the median, "
        f"{debt / 1000:.1f} s in all, and {limit / 1000:.1f} s are put up with"
    )
