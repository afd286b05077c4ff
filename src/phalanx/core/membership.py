"""The view: everything that peers must agree on between two attempts, and how one view follows from another.

A view names the members and their duties, the randomness, who is banned, who is on probation, and which state the step
starts from. Each follows from the one before by a pure function of agreed messages, and its digest is signed by the
members (in COMMIT, SEAL, ABORT or OUTCOME), so a newcomer can walk from the founders to the present.
"""

from __future__ import annotations

import math
from collections import Counter
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
from phalanx.core.pace import find_limit, may_return
from phalanx.core.randomness import Stream, derive_seed

FORGIVEN = 50
"""Steps served for which an absence, or a strike, is forgiven."""
LONGEST_ABSENCE = 40
"""Steps that a member is kept out at most, however often it was absent."""
_MOST_MISSED = 12  # commits of a probationer; one that is late once misses two
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


class Absences(_Record, frozen=True):
    """How often a member was suspended and has not been forgiven, and the steps that it has served since."""

    key: bytes
    count: int
    served: int


class Rift(_Record, frozen=True):
    """Since ``step`` nobody knows which of two members is slow: others stand between them (``pace.py``)."""

    step: int
    one: bytes
    other: bytes


class Suspension(_Record, frozen=True):
    """A member in good standing that is not in the roster: since which step, and from which it may be back."""

    key: bytes
    since: int
    ready: int


class Target(_Record, frozen=True):
    """A commit that somebody recomputes."""

    key: bytes
    step: int
    attempt: int


class Check(_Record, frozen=True):
    """``checker`` recomputes what ``target`` committed to in that attempt."""

    checker: bytes
    target: bytes
    step: int
    attempt: int


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
    given_up: bool = False
    """Too few are left that took part, and others were waited for in vain: those who are left judge it."""


class Suspect(_Record, frozen=True):
    """A commit that everyone recomputes: its sender was banned, left where bytes are needed, or the run is over."""

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
    """b_t: how many members may be Byzantine, the smaller of ``b`` and :attr:`doubts`."""
    doubts: int
    """How many of those who are or were members may be, if there were no limit: bans lower it, strangers raise it.
    Silence never does, however long it lasts."""
    randomness: bytes
    drawn: bytes | None
    """The randomness of the next step, once an attempt has revealed it: no retry draws it again."""
    state: bytes
    """The digest of the state before the step."""
    tau: float
    scales: tuple[float, ...]
    """The agreed scale of norms of the last steps, for automatic tau."""
    order: tuple[bytes, ...]
    """The roster as drawn for duties, once per step."""
    targets: tuple[Target, ...]
    """Commits that are checked in this step: of contributors of the last step but one, whom nobody knew when that
    step's reports were signed; and those that died with an attempt whose sender fell silent."""
    carried: tuple[Target, ...]
    """Targets of the next step that dead attempts have left: a retry draws more, not others."""
    trial_checks: tuple[Check, ...]
    banned: tuple[bytes, ...]
    strikes: tuple[Count, ...]
    absences: tuple[Absences, ...]
    suspended: tuple[Suspension, ...]
    owed: tuple[tuple[bytes, ...], ...]
    """Members that should have been suspended, alone or in pairs, when the roster was too small for it."""
    complaints: tuple[Complaint, ...]
    candidates: tuple[Candidate, ...]
    attempts: tuple[Committed, ...]
    """Attempts of the last steps: what may still be checked."""
    suspects: tuple[Suspect, ...]
    gaps: tuple[Gap, ...]
    """Tolerant: who was found between the thresholds lately, and by whom."""
    pace: int
    """The agreed duration of a step in milliseconds; 0: not known yet."""
    debts: tuple[Count, ...]
    """Milliseconds that members, suspended ones too, have cost the others and not made up for."""
    rifts: tuple[Rift, ...]


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
    """How many members' signatures settle a slow path."""
    n, most = len(view.roster), min(config.byzantine, view.doubts)
    return (n + most) // 2 + 1 if config.partition_safe else n // 2 + 1


# ---- The floor


def compute_floor(config: Config, doubts: int) -> int:
    """F: nothing but a ban brings the members that go on below this number.

    With ``b_t`` Byzantine members among them, those that contribute are honest for the most part, honest members are
    enough for every quorum, and more than ``b_t``: they can convict, and let others back in.
    """
    most = min(config.byzantine, doubts)
    floor = 2 * most + 1 + config.validators
    return max(floor, 3 * most + 1) if config.partition_safe else floor


def compute_margin(config: Config, view: View) -> int:
    """How many members may fall silent before the run waits for them."""
    return len(view.roster) - compute_floor(config, view.doubts)


def is_enough(config: Config, attempts: Iterable[Committed], members: Collection[bytes], doubts: int) -> bool:
    """Whether these members may go on without the others.

    Of each attempt that is still checked enough must be present to convict those that cheated in it.
    """
    if len(members) < compute_floor(config, doubts):
        return False
    here = set(members)
    return all(record.given_up or _has_witnesses(config, record, here, doubts) for record in attempts)


def _has_witnesses(config: Config, record: Committed, members: Collection[bytes], doubts: int) -> bool:
    needed = 2 * min(config.byzantine, record.doubts, doubts) + 1
    return sum(key in members for key in record.roster) >= needed


def find_replacements(
    config: Config,
    view: View,
    changes: Changes,
    present: Collection[bytes],
    stands: bool,
    round_: int,
    patient: bool = False,
) -> frozenset[bytes] | None:
    """Which suspended members come in so that the others can go on without those that go; None if it is not enough.

    ``present`` have shown that they are there and hold the state. Where the roster is large enough nobody has to come.
    A member that was suspended in this very step, and not for the first time, is let in only in a later round: two
    attackers that take turns would pay nothing.
    ``patient``: witnesses of attempts that are still checked were waited for in vain, and the floor is enough.
    Attackers that were members while few others were could otherwise halt the run by their silence when all are back.
    No verdict is ever passed by as few as may be Byzantine, so all that may be lost is a conviction.
    """
    members = {*view.roster} - changes.out
    record = Committed(view.step, view.attempt, view.roster, (), (), doubts=view.doubts)
    attempts = (*view.attempts, record) if stands else view.attempts
    doubts = max(0, view.doubts - len(changes.banned & {*view.roster}))
    counts = {record.key: record.count for record in view.absences}
    there = [member for member in view.suspended if member.key in present]
    earlier = {member.key for member in there if member.since < view.step}
    again = {member.key for member in there if round_ >= 2 * (counts.get(member.key, 1) - 1)}
    room = max(0, min(config.size, MAX_MEMBERS) - len(members))
    chosen = [frozenset(sorted(able)[:room]) for able in (set[bytes](), earlier, earlier | again)]
    ways = [*((coming, attempts) for coming in chosen[:2]), *((coming, ()) for coming in chosen[:2] if patient)]
    ways += [(chosen[2], () if patient else attempts)]
    return next((coming for coming, checked in ways if is_enough(config, checked, members | coming, doubts)), None)


def is_another_electorate(before: View, after: View) -> bool:
    """Whether others sign for the next view, or another number of them settle it: whoever walks the chain must know."""
    return (set(before.roster), before.bound, before.doubts) != (set(after.roster), after.bound, after.doubts)


# ---- Duties


@dataclass(frozen=True, slots=True)
class Duties:
    validators: tuple[bytes, ...]
    contributors: tuple[bytes, ...]
    """All others, but for those that are spared to check probationers."""
    checks: tuple[Check, ...]
    margin: int
    """Validators that the shrunken roster no longer affords."""


def compute_duties(config: Config, view: View) -> Duties:
    """Who validates whom, and who contributes. A validator that is gone is replaced by the next drawn."""
    trials = [Target(check.target, check.step, check.attempt) for check in view.trial_checks[:1]]
    (there,) = _find_witnesses(view, trials) or (view.roster,)
    return _assign_duties(
        config.validators,
        _count_needed(config, view),
        view.roster,
        view.order,
        view.targets,
        view.trial_checks,
        _find_witnesses(view, view.targets),
        there,
    )


def _count_needed(config: Config, view: View) -> tuple[int, int]:
    """How many contributors validators leave at least, and how many those leave that check probationers.

    The second are never fewer. With fewer than ``(multiple + 1) b`` contributors attackers could push an automatic tau
    up without end: :meth:`Config.check` sees to that for validators only.
    """
    needed = 2 * view.bound + 1
    multiple = config.tau.multiple if isinstance(config.tau, AutomaticTau) else 1.0
    return needed, max(needed, math.floor((multiple + 1) * view.bound) + 1)


def _find_witnesses(view: View, targets: Iterable[Target]) -> tuple[tuple[bytes, ...], ...]:
    """For each target, the members of its attempt: one that came back since checks nothing that it missed."""
    records = (find_record(view, target.step, target.attempt) for target in targets)
    return tuple(record.roster if record is not None else () for record in records)


@lru_cache(maxsize=16)
def _assign_duties(
    wanted: int,
    needed: tuple[int, int],
    roster: tuple[bytes, ...],
    drawn: tuple[bytes, ...],
    targets: tuple[Target, ...],
    trial_checks: tuple[Check, ...],
    witnesses: tuple[tuple[bytes, ...], ...],
    there: tuple[bytes, ...],
) -> Duties:
    """Every peer foresees its duties and then has them, and in one process many peers want the same ones.

    Each of the first targets gets a validator, the first in the drawn order that is not the target itself; further ones
    go to the member that has least to do. A member that checks a probationer contributes nothing, where enough others
    do: with two gradients to compute, it would keep everybody waiting. Where they are too few, it is the one that the
    randomness drew, beside its own gradient.
    """
    members = set(roster)
    order = [key for key in drawn if key in members]
    count = max(1, min(wanted, len(order) - needed[0]))
    count = min(count, len(order) - 1)  # one that is alone has nobody to check, and nobody else to compute
    validators: list[bytes] = []
    checks: list[Check] = []
    more: list[tuple[Target, list[bytes]]] = []
    for target, present in zip(targets, witnesses, strict=True):
        able = [key for key in order if key != target.key and key in present]
        free = [key for key in able if key not in validators]
        if len(validators) < count and free:
            validators.append(free[0])
            checks.append(Check(free[0], target.key, target.step, target.attempt))
        else:
            more.append((target, able))
    validators += [key for key in order if key not in validators][: count - len(validators)]
    tried = {check.target for check in trial_checks}
    rest = [key for key in order if key not in validators]
    idle = [key for key in rest if key not in tried and key in there]
    spared = idle[: max(0, min(len(trial_checks), len(rest) - needed[1]))]
    checkers = spared + [check.checker for check in trial_checks[len(spared) :]]
    trials = [Check(key, x.target, x.step, x.attempt) for key, x in zip(checkers, trial_checks, strict=True)]
    checks += [check for check in trials if check.checker in members and check.checker != check.target]
    load = Counter(key for key in rest if key not in spared)
    load.update(check.checker for check in checks)
    for target, able in more:
        taken = {check.checker for check in checks if (check.target, check.step) == (target.key, target.step)}
        free = [key for key in able if key not in taken]
        if free:
            checker = min(free, key=load.__getitem__)
            load[checker] += 1
            checks.append(Check(checker, target.key, target.step, target.attempt))
    contributors = tuple(key for key in roster if key not in validators and key not in spared)
    return Duties(tuple(validators), contributors, tuple(checks), wanted - count)


@lru_cache(maxsize=16)
def draw_targets(randomness: bytes, contributors: tuple[bytes, ...], count: int) -> tuple[bytes, ...]:
    stream = Stream(derive_seed(randomness, "targets"))
    return tuple(stream.draw_sample(contributors, min(count, len(contributors))))


def find_targets(config: Config, view: View, randomness: bytes, attempts: int) -> tuple[Target, ...]:
    """Whom the randomness of the view's step draws from those who contributed to the step before it.

    Of several attempts at a step each draws more. Were they drawn from those who contribute to this step, attackers
    would know who of them is not checked before they report, and let that one lie for all. Those that were suspended
    since are drawn as if they were here: a ban reaches them.
    """
    before = find_last(view, view.step - 1)
    if before is None:
        return ()
    drawn = draw_targets(randomness, before.contributors, attempts * config.validators)
    return tuple(Target(key, before.step, before.attempt) for key in drawn)


def foresee_duties(config: Config, view: View, randomness: bytes, served: Collection[bytes]) -> Duties:
    """The duties of the next step if this attempt succeeds and nobody comes or goes."""
    drawn = find_targets(config, view, randomness, 1 + sum(record.step == view.step for record in view.attempts))
    following, targets = view.drawn or randomness, _add_targets(view.carried, drawn)
    return _assign_duties(
        config.validators,
        _count_needed(config, view),
        view.roster,
        _draw_order(following, view.roster),
        targets,
        _draw_trial_checks(following, view, sorted(served), config.probation_checks, view.roster),
        _find_witnesses(view, targets),
        view.roster,
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
        randomness=randomness,
        drawn=None,
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
        suspended=(),
        owed=(),
        complaints=(),
        candidates=(),
        attempts=(),
        suspects=(),
        gaps=(),
        pace=0,
        debts=(),
        rifts=(),
    )


@lru_cache(maxsize=16)
def _draw_order(randomness: bytes, roster: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """By a lot of each, so that whoever goes moves nobody else; in one process many peers want the same order."""
    return tuple(sorted(roster, key=lambda key: derive_seed(randomness, "duties", key)))


@dataclass(frozen=True, slots=True)
class Changes:
    """Who goes and who comes between two attempts."""

    banned: frozenset[bytes] = frozenset()
    removed: frozenset[bytes] = frozenset()
    """To be suspended, as far as the floor allows."""
    late: frozenset[bytes] = frozenset()
    """Members that earned a strike."""
    pairs: frozenset[tuple[bytes, bytes]] = frozenset()
    """Of those to be suspended: who goes with whom, or not at all."""
    leaving: frozenset[bytes] = frozenset()
    """Of those to be suspended: who asked for it. If the floor forbids it now, it asks again."""
    coming: frozenset[bytes] = frozenset()
    """Suspended members that come in at once, so that a run that waits can go on."""
    patient: bool = False
    """Whether the run has waited so long for witnesses of its attempts that those who are left are enough."""

    @property
    def out(self) -> frozenset[bytes]:
        return self.banned | self.removed


def change_members(config: Config, view: View, changes: Changes, acquitted: Collection[Suspect] = ()) -> View:
    """The view without those who go, as far as the floor allows, and with those who come.

    What was banned becomes suspect: for whom it lied shows only if somebody looks. In tolerant mode the commits of
    those that are suspended do too, as their bytes may be gone before anybody is drawn to check them.
    """
    if not (changes.out or changes.late or changes.coming or acquitted or view.owed):
        return view
    absent = {member.key for member in view.suspended}
    was_member = {*view.roster, *absent}
    coming = changes.coming & absent
    fresh = [key for key in changes.banned if key in was_member and key not in view.banned]
    # A key that was never a member costs nothing, and neither does another: of such keys a limited number is kept.
    strangers = sorted(changes.banned - was_member - {*view.banned})[: max(0, _MOST_BANNED - len(view.banned))]
    doubts = max(0, view.doubts - len(fresh))
    strikes = _count(view.strikes, changes.late, changes.banned)
    staying = tuple(key for key in view.roster if key not in changes.banned) + tuple(sorted(coming))
    if changes.patient:
        view = _give_up(config, view, {*staying} - changes.removed, doubts)
    going, owed = _choose_going(config, view, changes, staying, doubts, strikes)
    gone = {*going, *changes.banned}
    checked = [key for key in view.roster if key in (gone if config.tolerance is not None else changes.banned)]
    suspects = {suspect for suspect in view.suspects if suspect not in acquitted}
    for attempt in view.attempts:
        suspects |= {Suspect(key, attempt.step, attempt.attempt) for key in checked if key in attempt.contributors}
    roster = tuple(key for key in staying if key not in gone)
    absences, suspended = _suspend(view, going, {*changes.banned, *coming})
    return msgspec.structs.replace(
        view,
        roster=roster,
        bound=min(config.byzantine, doubts),
        doubts=doubts,
        banned=tuple(sorted({*view.banned, *fresh, *strangers})),
        strikes=tuple(count for count in strikes if count.key not in gone),
        absences=absences,
        suspended=suspended,
        owed=owed,
        complaints=tuple(c for c in view.complaints if c.namer not in gone and c.named not in gone),
        debts=tuple(debt for debt in view.debts if debt.key not in changes.banned),
        rifts=tuple(rift for rift in view.rifts if rift.one not in gone and rift.other not in gone),
        candidates=tuple(c for c in view.candidates if c.key not in gone),
        suspects=tuple(sorted(suspects)),
    )


def _give_up(config: Config, view: View, members: Collection[bytes], doubts: int) -> View:
    """The view in which nobody is waited for as a witness of attempts that too few of these members took part in."""
    attempts = (
        record if _has_witnesses(config, record, members, doubts) else msgspec.structs.replace(record, given_up=True)
        for record in view.attempts
    )
    return msgspec.structs.replace(view, attempts=tuple(attempts))


def _choose_going(
    config: Config, view: View, changes: Changes, staying: tuple[bytes, ...], doubts: int, strikes: Sequence[Count]
) -> tuple[list[bytes], tuple[tuple[bytes, ...], ...]]:
    """Who is suspended now, pairs together; and who would be if the roster was larger.

    What a slow path has agreed on comes first: it has made sure that enough stay. Then what is owed longest.
    """
    paired = {key for pair in changes.pairs for key in pair}
    often = {count.key for count in strikes if count.count >= config.strikes}
    alone = [(key,) for key in sorted(changes.removed - paired)]
    struck = [(key,) for key in sorted(often)]
    members, going, owed = {*staying}, list[bytes](), list[tuple[bytes, ...]]()
    for group in dict.fromkeys((*alone, *view.owed, *sorted(changes.pairs), *struck)):
        if not {*group} <= members:
            continue  # one of them has gone already: it takes nobody along
        if is_enough(config, view.attempts, members - {*group}, doubts):
            members -= {*group}
            going += group
        elif not {*group} <= changes.leaving:
            owed.append(group)
    debts = sorted(owed, key=lambda group: group not in view.owed)
    return going, tuple(group for group in debts if {*group} <= members)


def _suspend(
    view: View, going: Sequence[bytes], no_longer: Collection[bytes]
) -> tuple[tuple[Absences, ...], tuple[Suspension, ...]]:
    """The records once these are suspended, and others no longer are: back after the first absence at once, later
    after 4, 8, 16, 32 and at most 40 steps."""
    records = {record.key: record for record in view.absences}
    out = {member.key: member for member in view.suspended if member.key not in no_longer}
    for key in going:
        count = records[key].count + 1 if key in records else 1
        wait = 0 if count == 1 else min(LONGEST_ABSENCE, 2**count)
        records[key] = Absences(key, count, 0)
        out[key] = Suspension(key, view.step, view.step + wait)
    known = tuple(record for key, record in sorted(records.items()) if key not in view.banned)
    return known, tuple(out[key] for key in sorted(out))


def retry_step(
    config: Config, view: View, changes: Changes, height: int, previous: bytes, acquitted: Collection[Suspect] = ()
) -> View:
    """The same step once more, without those who go: same parameters and gradients, new slices and shares.

    What a member committed to in the attempt that died of its silence joins the targets.
    """
    before = view
    view = change_members(config, view, changes, acquitted)
    died = find_record(view, view.step, view.attempt)
    gone = {*before.roster} - {*view.roster} - {*view.banned}
    left = (
        [Target(key, died.step, died.attempt) for key in died.contributors if key in gone] if died is not None else []
    )
    return msgspec.structs.replace(
        view,
        attempt=height,
        failed=view.failed + 1,
        height=height,
        previous=previous,
        carried=_add_targets(view.carried, left),
    )


def note_commits(view: View, contributors: tuple[bytes, ...], trials: tuple[bytes, ...]) -> View:
    """The view with this attempt's COMMIT on record: from now on it may be checked."""
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


def note_draw(view: View, randomness: bytes, targets: Iterable[Target]) -> View:
    """The view with what this attempt's randomness has drawn, whether or not the attempt dies."""
    return msgspec.structs.replace(
        view, drawn=view.drawn or randomness, carried=_add_targets(view.carried, tuple(targets))
    )


def note_withheld_share(view: View) -> View:
    """The view after a share was withheld: everybody that contributed to the step before is checked, twice.

    Its owner knew the outcome that it kept from the others. Were only others drawn instead, it could let a cheat live.
    """
    before = find_last(view, view.step - 1)
    if before is None:
        return view
    everybody = tuple(Target(key, before.step, before.attempt) for key in before.contributors)
    others = tuple(target for target in view.carried if target not in everybody)
    return msgspec.structs.replace(view, carried=(*others, *everybody, *everybody))


def _add_targets(targets: tuple[Target, ...], more: Iterable[Target]) -> tuple[Target, ...]:
    return (*targets, *(target for target in dict.fromkeys(more) if target not in targets))


def finish_step(
    config: Config,
    view: View,
    changes: Changes,
    *,
    height: int,
    previous: bytes,
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
    assert view.drawn is not None, "a step is finished once its randomness is known"
    randomness = view.drawn
    view = change_members(config, view, changes, acquitted)
    step = view.step + 1
    if step >= config.steps:  # nobody will be drawn any more to check the last steps: everybody does
        last = {record.step: record for record in view.attempts}
        everybody = {
            Suspect(key, record.step, record.attempt)
            for record in last.values()
            if record.step >= step - 2 or len(last) * len(view.roster) <= _MOST_SUSPECTS
            for key in record.contributors
            if key not in view.banned
        }
        view = msgspec.structs.replace(view, suspects=tuple(sorted({*view.suspects, *everybody})))
    witnesses = view.roster
    view = _let_in(config, _forgive(config, view), joins, step)
    view, graduates = _advance_candidates(config, view, served, unshown, joins, randomness, step)
    roster, doubts = view.roster + tuple(graduates), view.doubts + len(graduates)
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
        bound=min(config.byzantine, doubts),
        doubts=doubts,
        randomness=randomness,
        drawn=None,
        state=state,
        tau=tau,
        scales=scales,
        order=_draw_order(randomness, roster),
        targets=tuple(target for target in view.carried if target.key not in view.banned),
        carried=(),
        trial_checks=_draw_trial_checks(randomness, view, tried, config.probation_checks, witnesses),
        complaints=tuple(
            c for c in (*view.complaints, *complaints) if c.step > step - config.complaint_window and c.namer in roster
        ),
        gaps=note_gaps(view.gaps, gaps, step=step, window=_find_window(config, roster), roster=roster),
        attempts=tuple(a for a in view.attempts if a.step > step - 1 - KEPT_STEPS),
        suspects=tuple(s for s in view.suspects if s.step > step - 1 - KEPT_STEPS),
    )


def _find_window(config: Config, roster: Sequence[bytes]) -> int:
    return compute_window(len(roster), config.byzantine, config.validators)


def _forgive(config: Config, view: View) -> View:
    """The view once its members have served a step more; a stranger that has stayed away too long is one again.

    It could otherwise keep places while what it computes buys others. Founders are the promise that ``b`` is.
    """
    members = {*view.roster}
    served = (msgspec.structs.replace(x, served=x.served + (x.key in members)) for x in view.absences)
    records = (Absences(x.key, x.count - 1, 0) if x.served >= FORGIVEN else x for x in served)
    strikes = view.strikes
    if (view.step + 1) % FORGIVEN == 0:
        strikes = tuple(Count(x.key, x.count - 1) for x in strikes if x.count > 1)
    here = {
        x.key for x in view.suspended if x.key in config.founders or view.step - x.since <= config.newcomer_term
    } | members
    return msgspec.structs.replace(
        view,
        absences=tuple(x for x in records if x.count > 0 and x.key in here),
        suspended=tuple(x for x in view.suspended if x.key in here),
        strikes=strikes,
    )


def _let_in(config: Config, view: View, joins: Collection[bytes], step: int) -> View:
    """The view with the suspended members that have shown that they are there, and whose time has come."""
    room = max(0, min(config.size, MAX_MEMBERS) - len(view.roster))
    debts, limit = {debt.key: debt.count for debt in view.debts}, compute_limit(config, view)
    ready = (x.key for x in view.suspended if step >= x.ready and may_return(debts.get(x.key, 0), limit))
    back = tuple(key for key in ready if key in joins)[:room]
    if not back:
        return view
    out = tuple(x for x in view.suspended if x.key not in back)
    return msgspec.structs.replace(view, roster=view.roster + back, suspended=out)


def compute_limit(config: Config, view: View) -> int:
    """Milliseconds that a member may owe."""
    return find_limit(config.delta, config.transfer_time, view.pace)


def _draw_trial_checks(
    randomness: bytes, view: View, tried: Sequence[bytes], count: int, witnesses: tuple[bytes, ...]
) -> tuple[Check, ...]:
    """Who recomputes what those on probation committed to in the view's attempt, each ``count`` times, if nobody can be
    spared for it."""
    if not tried:
        return ()

    def draw(key: bytes, number: int) -> bytes:
        lot = derive_seed(randomness, "trials", key, number.to_bytes(8, "little"))
        return min(witnesses, key=lambda checker: derive_seed(lot, "checker", checker))

    return tuple(Check(draw(key, number), key, view.step, view.attempt) for key in tried for number in range(count))


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
        if here and candidate.key not in graduates:  # one that does not show up gives way to others
            staying.append(candidate)
    absent = {member.key for member in view.suspended}
    taken = {*view.roster, *absent, *view.banned, *graduates, *(c.key for c in staying)}
    waiting = sorted({key for key in joins if key not in taken})
    stream = Stream(derive_seed(randomness, "admission"))
    drawn = stream.draw_sample(waiting, len(waiting))
    serving = sum(candidate.key not in done for candidate in staying)  # who waits to be let in keeps nobody out
    places = min(config.admissions - serving, MAX_CASES - config.validators - len(staying))
    staying += [Candidate(key, step, config.newcomer_term, 0) for key in drawn[: max(0, places)]]
    return msgspec.structs.replace(view, candidates=tuple(sorted(staying))), graduates


def _choose_graduates(config: Config, view: View, done: Sequence[bytes], randomness: bytes) -> list[bytes]:
    """Whom to let in of those whose probation is over: a stranger adds one member, and may raise the floor by two.

    The others serve on until the roster is larger.
    """
    room = max(0, min(config.size, MAX_MEMBERS) - len(view.roster))
    chosen: list[bytes] = []
    for key in Stream(derive_seed(randomness, "graduates")).draw_sample(done, len(done))[:room]:
        members = {*view.roster, *chosen, key}
        if is_enough(config, view.attempts, members, view.doubts + len(chosen) + 1):
            chosen.append(key)
    return sorted(chosen)


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
