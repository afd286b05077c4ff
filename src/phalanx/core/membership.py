"""The view: everything that peers must agree on between two attempts, and how one view follows from another.

A view names the members and their duties, the randomness, who is banned, who is on probation, and which state the step
starts from. Each follows from the one before by a pure function of agreed messages, and its digest is signed by the
members (in COMMIT, SEAL, ABORT or OUTCOME), so a newcomer can walk from the founders to the present.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import median

import msgspec
from msgspec import Struct

from phalanx.core.config import KEPT_STEPS, AutomaticTau, Config
from phalanx.core.crypto import compute_digest
from phalanx.core.gap import Gap, compute_window, note_gaps
from phalanx.core.messages import MAX_CASES, MAX_MEMBERS
from phalanx.core.randomness import Stream, derive_seed

_MOST_MISSED = 12  # commits of a probationer; who is late once misses two
_MOST_DOUBLINGS = 20  # of a former member's probation
_MOST_ABSENCES = 2  # of a former member that comes before strangers
_MOST_BANNED = 1024  # beyond, only members are put on record
_MOST_SUSPECTS = 256  # of a run's last steps; beyond, those of the last two, for which nobody has been drawn


class _Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    pass


class Count(_Record, frozen=True):
    key: bytes
    count: int


class Complaint(_Record, frozen=True):
    """In ``step``, ``namer`` said that it lacked a part of ``named``."""

    step: int
    namer: bytes
    named: bytes


class Candidate(_Record, frozen=True):
    """Somebody on probation: since when, how many steps it has to serve, and how many of its commits counted."""

    key: bytes
    since: int
    term: int
    served: int


class Pair(_Record, frozen=True):
    """Two who left together because they kept naming each other: one of them is Byzantine, and nobody knows which."""

    one: bytes
    other: bytes


class Check(_Record, frozen=True):
    """``checker`` recomputes what ``target`` committed to in ``step``."""

    checker: bytes
    target: bytes
    step: int


class Caught(_Record, frozen=True):
    """Whose wrong report on a part was found in the attempt itself."""

    key: bytes
    part: int


class Committed(_Record, frozen=True):
    """An attempt whose COMMIT was complete: who took part, who contributed, and who was on trial."""

    step: int
    attempt: int
    roster: tuple[bytes, ...]
    contributors: tuple[bytes, ...]
    trials: tuple[bytes, ...]
    excused: tuple[bytes, ...] = ()
    """Members that could not have all they held against others decided."""
    caught: tuple[Caught, ...] = ()
    bound: int = 0
    doubts: int = 0


class Suspect(_Record, frozen=True):
    """Somebody left after this commit: everyone recomputes it."""

    key: bytes
    step: int
    attempt: int


class View(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, dict=True):
    """What an attempt starts from."""

    @cached_property
    def digest(self) -> bytes:
        return compute_digest("view", encode_view(self))

    step: int
    attempt: int
    """The height at which the last attempt began that followed a failed one, or 0. A member signs one COMMIT at a
    height, so no two views that it takes part in have one step and attempt."""
    failed: int
    """How many attempts of the whole run have failed before this one."""
    height: int
    """Of the attempt's COMMIT."""
    previous: bytes
    """What the attempt's COMMIT names as the root before it."""
    roster: tuple[bytes, ...]
    bound: int
    """b_t: how many members may still be Byzantine."""
    doubts: int
    """How many of those who are or were members may be, if there were no limit: bans lower it, strangers raise it."""
    within: int
    """How many members may be, if one of each pair that went was: pairs lower it, whoever comes may raise it."""
    randomness: bytes
    state: bytes
    """The digest of the state before the step."""
    tau: float
    scales: tuple[float, ...]
    """The agreed scale of norms of the last steps, for automatic tau."""
    order: tuple[bytes, ...]
    """The roster as drawn for duties, once per step."""
    targets: tuple[bytes, ...]
    """Contributors of the last step but one whom the validators check: nobody knew them when that step's reports were
    signed."""
    carried: tuple[bytes, ...]
    """Contributors of the step before whom a dead attempt's randomness has drawn: a retry draws more, not others."""
    trial_checks: tuple[Check, ...]
    banned: tuple[bytes, ...]
    strikes: tuple[Count, ...]
    absences: tuple[Count, ...]
    """Former members, and how often each was removed."""
    complaints: tuple[Complaint, ...]
    pairs: tuple[Pair, ...]
    """Pairs of which neither is back."""
    candidates: tuple[Candidate, ...]
    attempts: tuple[Committed, ...]
    """Attempts of the last steps: what may still be checked."""
    suspects: tuple[Suspect, ...]
    gaps: tuple[Gap, ...] = ()
    """Tolerant: who was found between the thresholds lately, and by whom."""


def encode_view(view: View) -> bytes:
    return msgspec.msgpack.encode(view)


_decoder = msgspec.msgpack.Decoder(View)


def decode_view(data: bytes) -> View | None:
    """The view in these bytes, or None. Whoever calls knows their digest from a certificate."""
    try:
        view = _decoder.decode(data)
    except msgspec.DecodeError:
        return None
    return view if encode_view(view) == data else None


def compute_roster_digest(roster: Sequence[bytes]) -> bytes:
    """The name of a roster: final votes bear it, so that they count in no other."""
    return compute_digest("roster", *roster)


def compute_quorum(config: Config, view: View | Committed) -> int:
    """How many members' signatures settle a slow path.

    What is safe while ``delta`` is broken does not rest on pairs: two who could not reach each other went together.
    """
    n, most = len(view.roster), min(config.byzantine, view.doubts)
    return (n + most) // 2 + 1 if config.partition_safe else n // 2 + 1


def compute_bound(config: Config, members: int, doubts: int, within: int) -> int:
    """b_t: how many members may be Byzantine, as far as rules with votes go.

    Where pairs have gone it gives way, but only as far as it must for honest members to be more: two who could not
    reach each other may both have been honest.
    """
    return min(config.byzantine, doubts, max((members - 1) // 2, within))


def compute_margin(config: Config, members: int, doubts: int, within: int) -> int:
    """How many honest members there are beyond those that the rules need, at least."""
    margin = members - 2 * within - 2 - config.outages
    most = min(config.byzantine, doubts)
    return min(margin, margin + 1 - most) if config.partition_safe else margin


def is_another_electorate(before: View, after: View) -> bool:
    """Whether others sign for the next view, or another number of them settle it: whoever walks the chain must know."""
    return (set(before.roster), before.bound, before.doubts) != (set(after.roster), after.bound, after.doubts)


# ---- Duties


@dataclass(frozen=True, slots=True)
class Duties:
    validators: tuple[bytes, ...]
    contributors: tuple[bytes, ...]
    checks: tuple[Check, ...]
    margin: int
    """Validators that the shrunken roster no longer affords."""


def compute_duties(config: Config, view: View) -> Duties:
    """Who validates whom, and who contributes. A validator that is gone is replaced by the next drawn."""
    needed = 2 * view.bound + 1 + config.outages
    return _assign_duties(
        config.validators, needed, view.step, view.roster, view.order, view.targets, view.trial_checks
    )


@lru_cache(maxsize=16)
def _assign_duties(
    wanted: int,
    needed: int,
    step: int,
    roster: tuple[bytes, ...],
    drawn: tuple[bytes, ...],
    targets: tuple[bytes, ...],
    trial_checks: tuple[Check, ...],
) -> Duties:
    """Every peer foresees its duties and then has them, and in one process many peers want the same ones."""
    members = set(roster)
    order = [key for key in drawn if key in members]
    count = max(1, min(wanted, len(order) - needed))
    count = min(count, len(order) - 1)  # one that is alone has nobody to check, and nobody else to compute
    validators: list[bytes] = []
    checks = [check for check in trial_checks if check.checker in members]
    for place, target in enumerate(targets):
        if len(validators) < count:
            free = [key for key in order if key != target and key not in validators]
            if free:
                validators.append(free[0])
                checks.append(Check(free[0], target, step - 2))
                continue
        others = [key for key in validators if key != target]
        if others:
            checks.append(Check(others[place % len(others)], target, step - 2))
    validators += [key for key in order if key not in validators][: count - len(validators)]
    contributors = tuple(key for key in roster if key not in validators)
    return Duties(tuple(validators), contributors, tuple(checks), wanted - count)


@lru_cache(maxsize=16)
def draw_targets(randomness: bytes, contributors: tuple[bytes, ...], count: int) -> tuple[bytes, ...]:
    stream = Stream(derive_seed(randomness, "targets"))
    return tuple(stream.draw_sample(contributors, min(count, len(contributors))))


def find_targets(config: Config, view: View, randomness: bytes, attempts: int) -> tuple[bytes, ...]:
    """Whom the randomness of the view's step draws from those who contributed to the step before it.

    Of several attempts at a step each draws more. Were they drawn from those who contribute to this step, attackers
    would know who of them is not checked before they report, and let that one lie for all.
    """
    before = find_last(view, view.step - 1)
    return draw_targets(randomness, before.contributors, attempts * config.validators) if before is not None else ()


def foresee_duties(config: Config, view: View, randomness: bytes, served: Collection[bytes]) -> Duties:
    """The duties of the next step if this attempt succeeds and nobody comes or goes."""
    drawn = find_targets(config, view, randomness, 1 + sum(record.step == view.step for record in view.attempts))
    return _assign_duties(
        config.validators,
        2 * view.bound + 1 + config.outages,
        view.step + 1,
        view.roster,
        _draw_order(randomness, view.roster),
        tuple(dict.fromkeys((*view.carried, *drawn))),
        _draw_trial_checks(randomness, view.roster, sorted(served), config.probation_checks, view.step),
    )


def compute_batch_seed(config: Config, randomness: bytes, step: int, peer: bytes) -> bytes:
    """The public batch that ``peer`` works on in ``step``."""
    return derive_seed(randomness, "batch", config.run, step.to_bytes(8, "little"), peer)


# ---- From one view to the next


def make_genesis(config: Config) -> View:
    randomness = derive_seed(config.run, "genesis", config.seed)
    return View(
        step=0,
        attempt=0,
        failed=0,
        height=0,
        previous=config.run,
        roster=config.founders,
        bound=config.byzantine,
        doubts=config.byzantine,
        within=config.byzantine,
        randomness=randomness,
        state=config.state,
        tau=config.tau.start if isinstance(config.tau, AutomaticTau) else config.tau,
        scales=(),
        order=_draw_order(randomness, config.founders),
        targets=(),
        carried=(),
        trial_checks=(),
        banned=(),
        strikes=(),
        absences=(),
        complaints=(),
        pairs=(),
        candidates=(),
        attempts=(),
        suspects=(),
    )


@lru_cache(maxsize=16)
def _draw_order(randomness: bytes, roster: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """In one process many peers want the same one."""
    return tuple(Stream(derive_seed(randomness, "duties")).draw_sample(roster, len(roster)))


@dataclass(frozen=True, slots=True)
class Changes:
    """Who goes, and why it matters later."""

    banned: frozenset[bytes] = frozenset()
    removed: frozenset[bytes] = frozenset()
    late: frozenset[bytes] = frozenset()
    pairs: frozenset[Pair] = frozenset()
    """Of those who are removed."""

    @property
    def out(self) -> frozenset[bytes]:
        return self.banned | self.removed


def remove_members(config: Config, view: View, changes: Changes, acquitted: Collection[Suspect] = ()) -> View:
    """The view without those who go. Their commits of the last steps become suspect.

    Also of those who are banned: for whom they lied shows only if somebody looks.
    """
    if not (changes.banned or changes.removed or changes.late or acquitted):
        return view
    gone = changes.out
    was_member = set(view.roster) | {count.key for count in view.absences}
    going = [key for key in view.roster if key in gone]
    leaving = [key for key in going if key not in changes.banned]
    suspects = {suspect for suspect in view.suspects if suspect not in acquitted}
    for attempt in view.attempts:
        suspects |= {Suspect(key, attempt.step, attempt.attempt) for key in going if key in attempt.contributors}
    fresh = [key for key in changes.banned if key in was_member and key not in view.banned]
    # A key that was never a member costs nothing, and neither does another: of such keys a limited number is kept.
    strangers = sorted(changes.banned - was_member - {*view.banned})[: max(0, _MOST_BANNED - len(view.banned))]
    roster = tuple(key for key in view.roster if key not in gone)
    doubts = max(0, view.doubts - len(fresh))
    pairs = {pair for pair in (*view.pairs, *changes.pairs) if not {pair.one, pair.other} & changes.banned}
    within = max(0, min(view.within - len(pairs - {*view.pairs}), doubts - len(pairs)))
    return msgspec.structs.replace(
        view,
        roster=roster,
        bound=compute_bound(config, len(roster), doubts, within),
        doubts=doubts,
        within=within,
        banned=tuple(sorted({*view.banned, *fresh, *strangers})),
        strikes=_count(view.strikes, changes.late, gone),
        absences=_count(view.absences, leaving, changes.banned),
        complaints=tuple(c for c in view.complaints if c.namer not in gone and c.named not in gone),
        pairs=tuple(sorted(pairs)),
        candidates=tuple(c for c in view.candidates if c.key not in gone),
        suspects=tuple(sorted(suspects)),
    )


def retry_step(
    config: Config, view: View, changes: Changes, height: int, previous: bytes, acquitted: Collection[Suspect] = ()
) -> View:
    """The same step once more, without those who go: same parameters and gradients, new slices and shares."""
    view = remove_members(config, view, changes, acquitted)
    return msgspec.structs.replace(view, attempt=height, failed=view.failed + 1, height=height, previous=previous)


def note_commits(view: View, contributors: tuple[bytes, ...], trials: tuple[bytes, ...]) -> View:
    """The view with this attempt's COMMIT on record: from now on whoever leaves has it checked."""
    record = Committed(view.step, view.attempt, view.roster, contributors, trials, bound=view.bound, doubts=view.doubts)
    return msgspec.structs.replace(view, attempts=(*view.attempts, record))


def find_record(view: View, step: int, attempt: int) -> Committed | None:
    return next((record for record in view.attempts if (record.step, record.attempt) == (step, attempt)), None)


def find_last(view: View, step: int) -> Committed | None:
    """The last attempt at a step: the one that took it, if the step is past."""
    return next((record for record in reversed(view.attempts) if record.step == step), None)


def has_concluded(view: View, step: int, attempt: int) -> bool:
    """Whether this attempt took its step. Of others not all members know all that was said."""
    last = [record.attempt for record in view.attempts if record.step == step]
    return step < view.step and last[-1:] == [attempt]


def note_ending(view: View, excused: Iterable[bytes], caught: Iterable[tuple[bytes, int]]) -> View:
    """The view with what its last attempt left undecided, and whom it caught."""
    *others, last = view.attempts
    pairs = tuple(Caught(*pair) for pair in sorted(caught))
    last = msgspec.structs.replace(last, excused=tuple(sorted(excused)), caught=pairs)
    return msgspec.structs.replace(view, attempts=(*others, last))


def note_targets(view: View, targets: Iterable[bytes]) -> View:
    """The view with targets that this attempt's randomness has drawn, whether or not the attempt dies."""
    return msgspec.structs.replace(view, carried=tuple(dict.fromkeys((*view.carried, *targets))))


def finish_step(
    config: Config,
    view: View,
    changes: Changes,
    *,
    height: int,
    previous: bytes,
    randomness: bytes,
    state: bytes,
    scale: float | None,
    complaints: Sequence[Complaint],
    served: Collection[bytes],
    joins: Sequence[bytes],
    unshown: Collection[bytes] = (),
    acquitted: Collection[Suspect] = (),
    gaps: Collection[Gap] = (),
) -> View:
    """The view of the next step."""
    view = remove_members(config, view, changes, acquitted)
    step = view.step + 1
    if step >= config.steps:  # nobody will be drawn any more to check the last steps: everybody does
        last = {record.step: record for record in view.attempts}
        everybody = {
            Suspect(key, record.step, record.attempt)
            for record in last.values()
            if record.step >= step - 2 or len(last) * len(view.roster) <= _MOST_SUSPECTS
            for key in record.contributors
            if key in view.roster
        }
        view = msgspec.structs.replace(view, suspects=tuple(sorted({*view.suspects, *everybody})))
    view, graduates = _advance_candidates(config, view, served, unshown, joins, randomness, step)
    roster = view.roster + tuple(graduates)
    doubts, within, pairs = _raise_doubts(config, view, graduates)
    scales, tau = _move_tau(config, view, scale)
    here = {*roster, *(candidate.key for candidate in view.candidates)}
    tried = [key for key in sorted(served) if key in here]
    return msgspec.structs.replace(
        view,
        step=step,
        height=height,
        previous=previous,
        roster=roster,
        # Whoever is new may be Byzantine: what bans have proven of others says nothing of it.
        bound=compute_bound(config, len(roster), doubts, within),
        doubts=doubts,
        within=within,
        randomness=randomness,
        state=state,
        tau=tau,
        scales=scales,
        order=_draw_order(randomness, roster),
        targets=view.carried,
        carried=(),
        trial_checks=_draw_trial_checks(randomness, roster, tried, config.probation_checks, step - 1),
        complaints=tuple(
            c for c in (*view.complaints, *complaints) if c.step > step - config.complaint_window and c.namer in roster
        ),
        gaps=note_gaps(view.gaps, gaps, step=step, window=_find_window(config, roster), roster=roster),
        pairs=pairs,
        attempts=tuple(a for a in view.attempts if a.step > step - 1 - KEPT_STEPS),
        suspects=tuple(s for s in view.suspects if s.step > step - 1 - KEPT_STEPS),
    )


def _find_window(config: Config, roster: Sequence[bytes]) -> int:
    return compute_window(len(roster), config.byzantine, config.validators)


def _draw_trial_checks(
    randomness: bytes, roster: tuple[bytes, ...], tried: Sequence[bytes], count: int, step: int
) -> tuple[Check, ...]:
    """Who recomputes what those on probation committed to, each ``count`` times."""
    if not tried:
        return ()
    checkers = Stream(derive_seed(randomness, "trials"))
    return tuple(Check(checkers.draw_sample(roster, 1)[0], key, step) for key in tried for _ in range(count))


def _advance_candidates(
    config: Config,
    view: View,
    served: Collection[bytes],
    unshown: Collection[bytes],
    joins: Sequence[bytes],
    randomness: bytes,
    step: int,
) -> tuple[View, list[bytes]]:
    """Count the steps served; let in whoever is done; put on probation as many of those who asked as may be.

    A step whose bytes its checker did not get does not count. Checkers may lie, but most are honest: who shows what it
    computes gets on, though it misses some, and who does not falls behind.
    """
    if not view.candidates and not joins:
        return view, []
    staying: list[Candidate] = []
    gone: list[Candidate] = []
    honest = max(1, len(view.roster) - view.bound)
    advanced = [
        msgspec.structs.replace(c, served=c.served + (c.key in served) - (c.key in unshown)) for c in view.candidates
    ]
    done = [candidate.key for candidate in advanced if candidate.served >= candidate.term]
    graduates = _choose_graduates(config, view, [key for key in done if key in served], randomness)
    for candidate in advanced:
        spell = max(candidate.term, candidate.served)  # who waits to be let in may wait long
        denied = spell * view.bound // honest if config.tolerance is not None else 0
        here = step - candidate.since - candidate.served <= _MOST_MISSED * (spell // candidate.term) + denied
        if candidate.key not in graduates:
            (staying if here else gone).append(candidate)  # who does not show up gives way to others
    taken = {*view.roster, *view.banned, *graduates, *(c.key for c in staying)}
    waiting = sorted({key for key in joins if key not in taken})
    stream = Stream(derive_seed(randomness, "admission"))
    absences = {count.key: count.count for count in view.absences}
    absences |= {candidate.key: absences[candidate.key] + 1 for candidate in gone if candidate.key in absences}
    drawn = stream.draw_sample(waiting, len(waiting))
    # Former members first, a key that computed is worth more; but not those who keep going, or do not show up.
    drawn.sort(key=lambda key: absences.get(key, _MOST_ABSENCES + 1) > _MOST_ABSENCES)
    serving = sum(candidate.key not in done for candidate in staying)  # who waits to be let in keeps nobody out
    places = min(config.admissions - serving, MAX_CASES - config.validators - len(staying))
    for key in drawn[: max(0, places)]:
        # Twice as long each time: who is removed rather than banned for what it did can do it a few times, not often.
        former = config.probation << min(absences.get(key, 1) - 1, _MOST_DOUBLINGS)
        term = former if key in absences else config.newcomer_term
        staying.append(Candidate(key, step, term, 0))
    counts = tuple(Count(key, count) for key, count in sorted(absences.items()))
    return msgspec.structs.replace(view, candidates=tuple(sorted(staying)), absences=counts), graduates


def _choose_graduates(config: Config, view: View, done: Sequence[bytes], randomness: bytes) -> list[bytes]:
    """Whom to let in of those whose probation is over. The others serve on until more come, or one they left with.

    While a pair is out, one of it, or a stranger, may be one attacker more: if that one came back first each time,
    attackers could take one honest member after another along until they are the majority.
    """
    room = max(0, min(config.size, MAX_MEMBERS) - len(view.roster))
    drawn = Stream(derive_seed(randomness, "graduates")).draw_sample(done, len(done))[:room]

    def fits(keys: Sequence[bytes]) -> bool:
        doubts, within, _ = _raise_doubts(config, view, keys)
        whole = sum(pair.one in keys and pair.other in keys for pair in view.pairs)
        margin = compute_margin(config, len(view.roster) + len(keys), doubts, within)
        return margin >= 0 or within - view.within <= whole  # a whole pair is worth what it costs

    if not view.pairs or fits(drawn):
        return sorted(drawn)
    wholes = [key for pair in view.pairs if pair.one in drawn and pair.other in drawn for key in (pair.one, pair.other)]
    units = [wholes[i : i + 2] for i in range(0, len(wholes), 2)] + [[key] for key in drawn if key not in wholes]
    chosen: list[bytes] = []
    for unit in units:
        chosen += unit if fits([*chosen, *unit]) else []
    apart = {key for pair in view.pairs for key in (pair.one, pair.other)} - {*wholes}
    crowd = [key for key in drawn if key not in apart]  # strangers may fit together where none does alone
    return sorted(crowd if fits(crowd) and len(crowd) > len(chosen) else chosen)


def _raise_doubts(config: Config, view: View, coming: Sequence[bytes]) -> tuple[int, int, tuple[Pair, ...]]:
    """How many may be Byzantine once these are in: of all, and of the members; and which pairs are still out.

    Whoever comes may be one. But no more members may be than are left if each pair that is out has one, and no more
    than ``b``.
    """
    known = {count.key for count in view.absences}
    doubts = view.doubts + sum(key not in known for key in coming)
    pairs = tuple(pair for pair in view.pairs if pair.one not in coming and pair.other not in coming)
    within = max(0, min(config.byzantine, view.within + len(coming), doubts - len(pairs)))
    return doubts, within, pairs


def _move_tau(config: Config, view: View, scale: float | None) -> tuple[tuple[float, ...], float]:
    if not isinstance(config.tau, AutomaticTau):
        return (), view.tau
    auto = config.tau
    if scale is None or not math.isfinite(scale):
        return view.scales, view.tau
    scales = (*view.scales, scale)[-auto.memory :]
    aim = auto.multiple * median(scales)
    tau = min(max(aim, view.tau / auto.step_factor), view.tau * auto.step_factor)
    return scales, min(max(tau, auto.floor), auto.ceiling)


def _count(counts: Sequence[Count], more: Iterable[bytes], gone: Collection[bytes]) -> tuple[Count, ...]:
    table = {count.key: count.count for count in counts if count.key not in gone}
    for key in more:
        if key not in gone:
            table[key] = table.get(key, 0) + 1
    return tuple(Count(key, count) for key, count in sorted(table.items()))
