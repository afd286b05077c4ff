"""Views: who checks whom, the floor, who goes and how fast it is back, how the bound, suspects, probation and tau move,
and that bytes and views are one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core import justice
from phalanx.core.config import KEPT_STEPS, AutomaticTau, Config, Tolerance
from phalanx.core.crypto import compute_digest
from phalanx.core.membership import (
    FORGIVEN,
    LONGEST_ABSENCE,
    Absences,
    Candidate,
    Changes,
    Check,
    Committed,
    Complaint,
    Count,
    Suspect,
    Suspension,
    Target,
    View,
    change_members,
    compute_batch_seed,
    compute_duties,
    compute_floor,
    compute_margin,
    compute_quorum,
    decode_view,
    draw_targets,
    encode_view,
    find_replacements,
    find_targets,
    finish_step,
    foresee_duties,
    is_enough,
    make_genesis,
    note_commits,
    note_draw,
    note_withheld_share,
    retry_step,
)
from phalanx.core.transcript import Transcript

properties = settings(derandomize=True, deadline=None, max_examples=150)


def make_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def make_config(members: int = 7, byzantine: int = 2, **fields: Any) -> Config:
    founders = tuple(make_key(number) for number in range(1, members + 1))
    return Config(founders=founders, byzantine=byzantine, **{"size": 1000, "steps": 10**6, **fields}).check()


def change(view: View, **fields: Any) -> View:
    return msgspec.structs.replace(view, **fields)


def go(
    config: Config, view: View, changes: Changes | None = None, randomness: bytes | None = None, **fields: Any
) -> View:
    """The view of the next step, in which nothing more happened than is said."""
    usual: dict[str, Any] = {
        "height": view.height + 6,
        "previous": bytes(32),
        "state": bytes(32),
        "scale": None,
        "complaints": (),
        "served": (),
        "joins": (),
    }
    view = note_draw(view, randomness or compute_digest("randomness of a test", view.randomness), ())
    return finish_step(config, view, changes or Changes(), **{**usual, **fields})


def go_as_usual(config: Config, view: View, changes: Changes | None = None, **fields: Any) -> View:
    """The same with commits and draws."""
    view = note_commits(view, compute_duties(config, view).contributors, ())
    randomness = compute_digest("drawn", view.randomness)
    attempts = sum(record.step == view.step for record in view.attempts)
    view = note_draw(view, randomness, find_targets(config, view, randomness, attempts))
    return go(config, view, changes, **fields)


def retry(config: Config, view: View, changes: Changes) -> View:
    return retry_step(config, view, changes, view.height + 3, bytes(32))


def ban(*keys: bytes) -> Changes:
    return Changes(banned=frozenset(keys))


def remove(*keys: bytes) -> Changes:
    return Changes(removed=frozenset(keys))


def strike(*keys: bytes) -> Changes:
    return Changes(late=frozenset(keys))


def part(*pairs: tuple[bytes, ...]) -> Changes:
    """Those go together who kept naming each other."""
    gone = frozenset(key for pair in pairs for key in pair)
    return Changes(removed=gone, pairs=frozenset((min(pair), max(pair)) for pair in pairs))


def list_suspended(view: View) -> set[bytes]:
    return {member.key for member in view.suspended}


def there(view: View, roster: tuple[bytes, ...], step: int = 0) -> View:
    """The view two steps later, with a first step that these took part in."""
    record = Committed(step, 0, roster, roster, (), doubts=view.doubts)
    return change(view, step=step + 2, attempts=(*view.attempts, record))


# ---- Duties


@st.composite
def draw_views(draw: st.DrawFn) -> tuple[Config, View]:
    """A swarm from which some have gone since duties and targets were drawn, and to which some have come back."""
    members, validators = draw(st.integers(4, 12)), draw(st.integers(1, 3))
    room = (members - 1 - validators) // 2
    if room < 0:
        validators, room = 1, (members - 2) // 2
    config = make_config(members, draw(st.integers(0, room)), validators=validators)
    order = draw(st.permutations(config.founders))
    then = draw(st.lists(st.sampled_from(config.founders), min_size=2, unique=True))
    view = there(make_genesis(config), tuple(sorted(then)))
    targets = draw(st.lists(st.sampled_from(sorted(then)), max_size=6))
    left = draw(st.lists(st.sampled_from(config.founders), min_size=2, unique=True))
    roster = tuple(key for key in config.founders if key in left)
    trials = tuple(
        Check(draw(st.sampled_from(config.founders)), make_key(99), 1, 0) for _ in range(draw(st.integers(0, 2)))
    )
    bound = draw(st.integers(0, config.byzantine))
    return config, change(
        view,
        order=tuple(order),
        targets=tuple(Target(key, 0, 0) for key in targets),
        roster=roster,
        trial_checks=trials,
        bound=bound,
        doubts=bound,
    )


@given(draw_views())
@properties
def test_duties(drawn: tuple[Config, View]) -> None:
    config, view = drawn
    duties = compute_duties(config, view)
    room = len(view.roster) - 2 * view.bound - 1
    assert len(duties.validators) == max(1, min(config.validators, room))
    assert duties.margin == config.validators - len(duties.validators)
    assert len(set(duties.validators)) == len(duties.validators)
    assert set(duties.validators) | set(duties.contributors) == set(view.roster)
    assert not set(duties.validators) & set(duties.contributors)
    assert list(duties.contributors) == [key for key in view.roster if key in duties.contributors]
    regular = [check for check in duties.checks if check not in view.trial_checks]
    for check in duties.checks:
        assert check.checker != check.target
        assert check.checker in view.roster
        assert check in regular or check in view.trial_checks
    assert len(set(regular)) == len(regular), "two checks of one commit are by two members"
    wanted = Counter(view.targets)
    able = set(view.roster) & set(view.attempts[0].roster)
    for target, count in wanted.items():
        found = [check for check in regular if Target(check.target, check.step, check.attempt) == target]
        assert len(found) == min(count, len(able - {target.key})), "every target is checked, as often as it is drawn"
        assert {check.checker for check in found} <= able, "who was not there checks nothing"
    assert {Target(check.target, check.step, check.attempt) for check in regular} <= set(view.targets)
    first = [check.checker for check in regular[: len(duties.validators)]]
    assert len(set(first)) == len(first), "first each validator has one"


@given(draw_views())
@properties
def test_validator_that_is_gone_is_replaced_by_the_next_drawn(drawn: tuple[Config, View]) -> None:
    config, view = drawn
    config = msgspec.structs.replace(config, validators=1)
    record = msgspec.structs.replace(view.attempts[0], roster=config.founders)
    view = change(view, roster=config.founders, targets=view.targets[:1], trial_checks=(), attempts=(record,))
    waiting = [key for key in view.order if key not in {target.key for target in view.targets}]
    for number, validator in enumerate(waiting[:-1]):
        left = tuple(key for key in config.founders if key not in waiting[:number])
        duties = compute_duties(config, change(view, roster=left))
        assert duties.validators == (validator,)
        assert duties.checks == tuple(Check(validator, target.key, 0, 0) for target in view.targets)


def test_surplus_targets_go_to_whoever_has_least_to_do() -> None:
    """After a share was withheld everybody is checked twice: 2 (n - m) gradients more, spread over all."""
    config = make_config(9, 2, validators=2)
    view = there(make_genesis(config), config.founders)
    view = change(view, targets=tuple(Target(key, 0, 0) for key in config.founders for _ in range(2)))
    duties = compute_duties(config, view)
    assert len(duties.checks) == 18
    load = Counter(check.checker for check in duties.checks) + Counter(duties.contributors)
    assert max(load.values()) - min(load[key] for key in config.founders) <= 1


def test_a_member_that_missed_an_attempt_does_not_check_it() -> None:
    config = make_config(8, 2)
    back, *others = config.founders
    view = go_as_usual(config, make_genesis(config), remove(back))
    assert list_suspended(view) == {back}
    view = go_as_usual(config, view, joins=[back])
    assert back in view.roster
    for number in range(200):  # the step that it missed is being checked, in whatever order
        view = change(view, order=tuple(Random(number).sample(view.roster, len(view.roster))))
        everybody = tuple(Target(key, 1, 0) for key in others)
        duties = compute_duties(config, change(view, targets=everybody))
        assert len(duties.checks) == len(everybody)
        assert back not in {check.checker for check in duties.checks}
        duties = compute_duties(config, change(view, targets=tuple(Target(key, 0, 0) for key in others)))
        assert len(duties.checks) == len(others)


def test_a_member_that_is_just_back_checks_no_probationer_of_the_step_before() -> None:
    config, stranger = make_config(8, 2, probation=3, probation_checks=40), make_key(99)
    back = config.founders[0]
    view = go(config, make_genesis(config), remove(back), joins=[stranger])
    view = go(config, view, served={stranger}, joins=[back])
    assert back in view.roster
    assert {check.checker for check in view.trial_checks} == set(config.founders[1:])


def test_duties_are_foreseen() -> None:
    config = make_config(8, 2, validators=2)
    view = make_genesis(config)
    for number in range(12):
        if number % 4 == 2:
            view = retry(
                config, note_commits(view, compute_duties(config, view).contributors, ()), remove(view.roster[0])
            )
        view = note_commits(view, compute_duties(config, view).contributors, ())
        randomness = compute_digest("drawn", view.randomness)
        attempts = sum(record.step == view.step for record in view.attempts)
        before = change(view, attempts=view.attempts[:-1])  # as a peer knows it that has not finished its attempt
        foreseen = foresee_duties(config, before, randomness, ())
        view = go(config, note_draw(view, randomness, find_targets(config, view, randomness, attempts)))
        assert compute_duties(config, view) == foreseen
        if len(view.roster) < 8:
            view = go(config, view, joins=list_suspended(view))


@pytest.mark.parametrize(("members", "byzantine", "validators"), [(4, 1, 1), (5, 1, 1), (5, 1, 2), (5, 0, 2)])
def test_odds_of_being_checked_by_an_honest_validator(members: int, byzantine: int, validators: int) -> None:
    """``m (n-b) / (n (n-1))`` for every member, exactly: over all that can be drawn, each equally likely."""
    config = make_config(members, byzantine, validators=validators)
    genesis = there(make_genesis(config), config.founders)
    byzantine_keys = set(config.founders[:byzantine])
    member = config.founders[0]
    others = set(config.founders) - byzantine_keys - {member}
    checked = cases = 0
    for checking_before in itertools.combinations(config.founders, validators):
        contributors = [key for key in config.founders if key not in checking_before]
        for drawn in itertools.permutations(contributors, validators):
            targets = tuple(Target(key, 0, 0) for key in drawn)
            for order in itertools.permutations(config.founders):
                duties = compute_duties(config, change(genesis, order=order, targets=targets))
                checked += any(check.target == member and check.checker in others for check in duties.checks)
                cases += 1
    n, b, m = members, max(byzantine, 1), validators  # a member's checkers are the others: it counts as one of b
    assert Fraction(checked, cases) == Fraction(m * (n - b), n * (n - 1))


def test_odds_of_being_checked_as_drawn() -> None:
    """The same along a run, from the stream that peers draw from."""
    config = make_config(7, 2, validators=2)
    byzantine = set(config.founders[:2])
    view, steps = make_genesis(config), 4000
    checked = dict.fromkeys(config.founders, 0)
    for _ in range(steps):
        for check in compute_duties(config, view).checks:
            checked[check.target] += check.checker not in byzantine
        view = go_as_usual(config, view)
    n, b, m = 7, 2, 2
    for key, count in checked.items():
        odds = m * (n - b - (key not in byzantine)) / (n * (n - 1))
        assert abs(count - steps * odds) < 4 * math.sqrt(steps * odds * (1 - odds)), key


def test_targets_are_different_contributors() -> None:
    contributors = tuple(make_key(number) for number in range(9))
    for number in range(50):
        drawn = draw_targets(make_key(number), contributors, 4)
        assert len(set(drawn)) == 4
        assert set(drawn) <= set(contributors)
    assert set(draw_targets(make_key(0), contributors, 100)) == set(contributors), "no more than there are"


def make_targets(keys: tuple[bytes, ...], step: int = 0, attempt: int = 0) -> tuple[Target, ...]:
    return tuple(Target(key, step, attempt) for key in keys)


def test_retry_draws_more_targets_not_others() -> None:
    config = make_config()
    view = note_draw(make_genesis(config), make_key(5), make_targets(config.founders[:1]))
    view = retry(config, view, remove(config.founders[6]))
    view = note_draw(view, make_key(6), make_targets(config.founders[:3]))
    assert go(config, view).targets == make_targets(config.founders[:3])
    assert go(config, view).carried == ()


def test_randomness_that_was_revealed_is_not_drawn_again() -> None:
    """Who dislikes it and lets the attempt die finds the same order, batches and places in the next."""
    config = make_config()
    first = note_draw(make_genesis(config), make_key(5), ())
    assert first.drawn == make_key(5)
    again = retry(config, first, remove(config.founders[6]))
    again = note_draw(again, make_key(6), ())
    assert again.drawn == make_key(5)
    view = go(config, again, randomness=make_key(7))
    assert view.randomness == make_key(5)
    assert view.drawn is None, "of the step after it nothing is known"
    assert go(config, view, randomness=make_key(7)).randomness == make_key(7)


def test_a_step_is_not_finished_before_its_randomness_is_known() -> None:
    config = make_config()
    with pytest.raises(AssertionError, match="randomness"):
        finish_step(
            config,
            make_genesis(config),
            Changes(),
            height=6,
            previous=bytes(32),
            state=bytes(32),
            scale=None,
            complaints=(),
            served=(),
            joins=(),
        )


def test_targets_are_drawn_by_the_step_after_theirs() -> None:
    """Whoever contributes to a step knows only after its reports whether it will be checked."""
    config = make_config(validators=2)
    view = note_commits(make_genesis(config), config.founders[:4], ())
    assert find_targets(config, view, make_key(5), 1) == (), "nobody contributed before the first step"
    view = note_commits(go(config, view), config.founders[3:], ())
    drawn = find_targets(config, view, make_key(5), 1)
    assert drawn == make_targets(draw_targets(make_key(5), config.founders[:4], 2))
    assert len(find_targets(config, view, make_key(5), 2)) == 4, "another attempt draws more"
    checks = compute_duties(config, go(config, note_draw(view, make_key(5), drawn))).checks
    assert {(check.target, check.step) for check in checks} == {(target.key, 0) for target in drawn}


def test_a_suspended_member_is_drawn_as_if_it_were_there() -> None:
    config = make_config(8, 2)
    view = go_as_usual(config, make_genesis(config))
    view = retry(config, view, remove(config.founders[0]))
    drawn = {find_targets(config, view, make_key(number), 1)[0].key for number in range(200)}
    assert drawn == {*view.attempts[0].contributors}, "everybody that contributed, whether it is here or not"
    gone = view.attempts[0].contributors[0]
    view = go(config, note_draw(retry(config, view, remove(gone)), make_key(1), make_targets((gone,))))
    assert view.suspects == (), "and nobody else has to look at it"
    assert [check.target for check in compute_duties(config, view).checks] == [gone]


def test_the_commit_of_an_attempt_that_died_of_its_senders_silence_is_checked() -> None:
    config = make_config(8, 2)
    gone, idle, *others = config.founders
    view = note_commits(make_genesis(config), (gone, *others), ())
    view = retry(config, view, remove(gone, idle))
    assert view.carried == (Target(gone, 0, 0),), "whoever committed to nothing is not checked"
    view = note_commits(view, tuple(others), ())
    view = go(config, view)
    assert view.targets == (Target(gone, 0, 0),)
    (check,) = compute_duties(config, view).checks
    assert (check.target, check.step, check.attempt) == (gone, 0, 0)


def test_the_commit_of_who_is_banned_is_suspect_and_no_target() -> None:
    config = make_config(8, 2)
    view = retry(config, note_commits(make_genesis(config), config.founders, ()), ban(config.founders[0]))
    assert view.carried == ()
    assert view.suspects == (Suspect(config.founders[0], 0, 0),)
    view = note_draw(make_genesis(config), make_key(1), make_targets(config.founders[:2]))
    assert go(config, view, ban(config.founders[0])).targets == make_targets(config.founders[1:2])


def test_a_withheld_share_has_everybody_checked_twice() -> None:
    """Whoever kept it back knew who would be drawn; now it is everybody, each by two members."""
    config = make_config(8, 2)
    assert note_withheld_share(make_genesis(config)) == make_genesis(config), "nobody contributed before the first step"
    view = go_as_usual(config, make_genesis(config))
    before = view.attempts[-1]
    view = note_commits(view, compute_duties(config, view).contributors, ())
    died = view.attempts[-1].contributors
    view = note_draw(view, make_key(3), make_targets(before.contributors[:1]))
    view = retry(config, note_withheld_share(view), remove(died[0]))
    everybody = Counter(make_targets(before.contributors))
    assert Counter(view.carried) == everybody + everybody + Counter([Target(died[0], 1, 0)])
    twice = note_withheld_share(view)
    assert Counter(twice.carried) == Counter(view.carried), "another one changes nothing"
    view = note_commits(view, compute_duties(config, view).contributors, ())
    randomness = make_key(4)
    view = go(config, note_draw(view, randomness, find_targets(config, view, randomness, 2)))
    checks = Counter((check.target, check.step) for check in compute_duties(config, view).checks)
    assert checks == Counter({**dict.fromkeys(((key, 0) for key in before.contributors), 2), (died[0], 1): 1})
    for key in before.contributors:
        checkers = {check.checker for check in compute_duties(config, view).checks if check.target == key}
        assert len(checkers - {died[0]}) >= 2


def test_batches_differ_by_run_randomness_step_and_peer() -> None:
    config, other = make_config(), make_config(seed=b"x" * 32)
    places = itertools.product((config, other), (bytes(32), b"r" * 32), (0, 1), config.founders[:2])
    assert len({compute_batch_seed(*place) for place in places}) == 16


def test_quorum() -> None:
    for members, byzantine in ((4, 1), (7, 2), (10, 3), (16, 5)):
        usual, safe = make_config(members, byzantine), make_config(members, byzantine, partition_safe=True)
        view = make_genesis(usual)
        assert 2 * compute_quorum(usual, view) > members
        assert 2 * compute_quorum(safe, view) - members > byzantine, "two quorums share an honest member"
        assert compute_quorum(safe, view) <= members - byzantine, "the honest ones are enough"


# ---- The bound


def admit(config: Config, view: View, *keys: bytes) -> View:
    """Let candidates serve their last step."""
    done = tuple(Candidate(key, view.step, 5, 4) for key in sorted(keys))
    return go(config, change(view, candidates=done), served=set(keys))


def come_back(config: Config, view: View, *keys: bytes) -> View:
    return go(config, view, joins=keys)


def test_bans_lower_the_bound_and_silence_does_not() -> None:
    config = make_config(9, 2)
    view = make_genesis(config)
    one, two, three = config.founders[:3]
    assert go(config, view, remove(one)).bound == 2
    assert go(config, view, remove(one)).doubts == 2
    assert go(config, view, part((one, two))).doubts == 2
    assert go(config, view, ban(one)).bound == 1
    assert go(config, view, ban(one, two, three)).bound == 0, "never below zero"
    assert change_members(config, go(config, view, ban(one)), ban(one)).bound == 1, "nobody is banned twice"


def test_silence_never_lowers_the_bound_however_long_it_lasts() -> None:
    config = make_config(9, 2)
    view = go(config, make_genesis(config), remove(*config.founders[:3]))
    for _ in range(500):
        view = go(config, view)
        assert (view.bound, view.doubts, len(view.roster)) == (2, 2, 6)
        assert list_suspended(view) == set(config.founders[:3])


def test_ban_of_somebody_who_is_suspended_lowers_the_bound_and_that_of_a_stranger_does_not() -> None:
    config = make_config()
    view = go(config, make_genesis(config), remove(config.founders[0]))
    banned = go(config, view, ban(config.founders[0]))
    assert banned.bound == 1
    assert banned.suspended == ()
    assert config.founders[0] not in come_back(config, banned, config.founders[0]).roster
    assert go(config, view, ban(make_key(99))).bound == 2


def test_admission_of_strangers_raises_the_bound_up_to_b() -> None:
    config = make_config()
    view = go(config, make_genesis(config), ban(*config.founders[:2]))
    assert view.bound == 0
    view = admit(config, view, make_key(50))
    assert (view.bound, len(view.roster)) == (1, 6)
    view = admit(config, view, make_key(51), make_key(52))
    assert (view.bound, view.doubts, len(view.roster)) == (2, 3, 8)


def test_return_of_a_suspended_member_does_not_raise_the_bound() -> None:
    config = make_config()
    view = go(config, make_genesis(config), ban(config.founders[0]))
    view = go(config, view, remove(config.founders[1]))
    view = come_back(config, view, config.founders[1])
    assert config.founders[1] in view.roster
    assert (view.bound, view.doubts) == (1, 1)


@given(st.lists(st.tuples(st.sampled_from(["ban", "remove", "admit", "return", "ban gone"]), st.integers(0, 30))))
@properties
def test_bound_is_never_below_what_may_be_byzantine(actions: list[tuple[str, int]]) -> None:
    """If bans hit only Byzantine peers, and at most ``b`` Byzantine peers that are not banned were ever members at
    once, the bound is at least the number of those in the roster. All who are banned here were Byzantine."""
    config = make_config(7, 2)
    view, strangers = make_genesis(config), itertools.count(100)
    for action, choice in actions:
        before, gone = view, sorted(list_suspended(view))
        member = view.roster[choice % len(view.roster)]
        if action == "ban" and len(view.roster) > 3:
            view = go(config, view, ban(member))
        elif action == "remove":
            view = go(config, view, remove(member))
        elif action == "admit":
            view = admit(config, view, make_key(next(strangers)))
        elif action == "return" and gone:
            view = come_back(config, view, gone[choice % len(gone)])
        elif action == "ban gone" and gone:
            view = go(config, view, ban(gone[choice % len(gone)]))
        banned, new = {*view.banned} - {*before.banned}, {*view.roster} - {*before.roster} - {*gone}
        expected = max(0, before.doubts - len(banned)) + len(new)
        assert view.doubts == expected
        assert view.bound == min(2, expected)
        assert not set(view.roster) & set(view.banned)
        assert not set(view.roster) & list_suspended(view)
        assert not set(view.banned) & list_suspended(view)
        assert len(set(view.roster)) == len(view.roster)
        assert sorted(view.order) == sorted(view.roster)


# ---- The floor


@pytest.mark.parametrize(
    ("byzantine", "validators", "doubts", "usual", "safe"),
    [
        (3, 1, 3, 8, 10),
        (3, 2, 3, 9, 10),
        (3, 5, 3, 12, 12),
        (3, 1, 1, 4, 4),
        (3, 1, 9, 8, 10),
        (3, 1, 0, 2, 2),
        (0, 1, 0, 2, 2),
        (7, 1, 7, 16, 22),
    ],
)
def test_floor(byzantine: int, validators: int, doubts: int, usual: int, safe: int) -> None:
    """``2 b_t + 1 + m``, with the safe quorum at least ``3 b_t + 1``; ``b_t`` is what bans and strangers left of b."""
    config = make_config(3 * byzantine + 9, byzantine, validators=validators)
    assert compute_floor(config, doubts) == usual
    assert compute_floor(msgspec.structs.replace(config, partition_safe=True), doubts) == safe


def test_margin_is_what_the_roster_has_above_the_floor_and_grows_with_bans() -> None:
    config = make_config(9, 3)
    view = make_genesis(config)
    assert compute_margin(config, view) == 1
    assert compute_margin(config, go(config, view, remove(config.founders[0]))) == 0
    assert compute_margin(config, go(config, view, ban(config.founders[0]))) == 2
    assert compute_margin(config, go(config, view, ban(*config.founders[:3]))) == 4


def test_silence_stops_at_the_floor_and_what_is_owed_is_paid_when_the_margin_allows() -> None:
    config = make_config(8, 3)
    one, two, three = config.founders[:3]
    view = go(config, make_genesis(config), remove(one))
    assert (view.roster, view.suspended, view.owed) == (config.founders, (), ((one,),))
    assert go(config, view).owed == ((one,),), "it is not forgotten"
    assert go(config, view, remove(one)).owed == ((one,),), "nor put on record twice"
    later = go(config, view, ban(two))
    assert (len(later.roster), list_suspended(later), later.owed) == (6, {one}, ())
    gone = go(config, view, ban(one))
    assert (len(gone.roster), gone.owed) == (7, ()), "who is banned owes nothing more"
    assert go(config, gone, remove(three)).owed == ()
    both = go(config, view, remove(two))
    assert {*both.owed} == {(one,), (two,)}
    paid = go(config, both, ban(three))
    assert {*paid.owed} | {(key,) for key in list_suspended(paid)} == {(one,), (two,)}
    assert (len(paid.owed), len(paid.roster)) == (1, 6), "a ban makes room for one"


def test_a_debt_is_paid_when_others_come_back() -> None:
    config = make_config(9, 3)
    one, two = config.founders[:2]
    view = go(config, go(config, make_genesis(config), remove(one)), remove(two))
    assert (list_suspended(view), view.owed) == ({one}, ((two,),))
    view = come_back(config, view, one)
    assert (len(view.roster), view.owed) == (9, ((two,),))
    view = go(config, view)
    assert (list_suspended(view), view.owed) == ({two}, ())


def test_the_oldest_debt_is_paid_first() -> None:
    config = make_config(8, 3)
    first, other, *_, last = sorted(config.founders)
    view = go(config, make_genesis(config), remove(last))
    both = go(config, view, remove(first))
    assert both.owed == ((last,), (first,)), "not in the order of keys"
    assert list_suspended(go(config, both, ban(other))) == {last}


def test_who_says_goodbye_at_the_floor_stays_and_owes_nothing() -> None:
    config = make_config(8, 3)
    one = config.founders[0]
    view = go(config, make_genesis(config), Changes(removed=frozenset({one}), leaving=frozenset({one})))
    assert (view.roster, view.owed) == (config.founders, ())


def test_strikes_suspend_and_stop_at_the_floor() -> None:
    one = make_key(1)
    for members, margin in ((8, 0), (9, 1)):
        config = make_config(members, 3)
        view = make_genesis(config)
        for count in range(1, 3):
            view = go(config, view, strike(one))
            assert view.strikes == (Count(one, count),)
            assert one in view.roster
        view = go(config, view, strike(one))
        assert (one in view.roster) == (not margin)
        assert view.owed == (() if margin else ((one,),))
        assert (view.strikes == ()) == bool(margin), "who is suspended for them starts anew"


def test_strikes_are_forgiven() -> None:
    config = make_config(9, 3)
    view = go(config, go(config, make_genesis(config), strike(make_key(1))), strike(make_key(1), make_key(2)))
    while view.step < FORGIVEN:
        assert view.strikes == (Count(make_key(1), 2), Count(make_key(2), 1))
        view = go(config, view)
    assert view.strikes == (Count(make_key(1), 1),)
    for _ in range(FORGIVEN):
        view = go(config, view)
    assert view.strikes == ()


def test_a_ban_goes_below_the_floor_and_nothing_else_then_does() -> None:
    """Where strangers have raised the doubts, a ban takes a member and not the doubt of it."""
    config = make_config(8, 3)
    view = admit(config, make_genesis(config), make_key(50))
    assert (len(view.roster), view.doubts, compute_margin(config, view)) == (9, 4, 1)
    view = go(config, view, ban(*config.founders[:1]))
    assert (len(view.roster), view.doubts, compute_margin(config, view)) == (8, 3, 0)
    view = admit(config, view, make_key(51), make_key(52))
    view = go(config, view, ban(*view.roster[:2]))
    assert compute_margin(config, view) == 0
    assert go(config, view, remove(view.roster[0])).roster == view.roster


def test_the_floor_is_not_that_of_the_roster_that_is_left() -> None:
    """It rests on how many may be Byzantine, and that does not shrink with the members."""
    config = make_config(16, 5)
    view = make_genesis(config)
    for key in config.founders:
        view = go(config, view, remove(key))
        assert len(view.roster) >= 12
    assert (len(view.roster), len(view.owed)) == (12, 12)


def test_of_every_attempt_that_is_checked_enough_stay_to_judge_it() -> None:
    """Members that came later do not make up for those who were there."""
    config = make_config(9, 2)  # the floor is 6, and 5 judges
    view = go(config, make_genesis(config), remove(*config.founders[6:]))
    assert len(view.roster) == 6
    view = note_commits(view, view.roster, ())
    view = come_back(config, view, *config.founders[6:])
    assert len(view.roster) == 9
    view = go(config, view, remove(config.founders[0]))
    assert len(view.roster) == 8
    view = go(config, view, remove(config.founders[1]))
    assert (len(view.roster), view.owed) == (8, ((config.founders[1],),)), "of the six who were there five must stay"
    assert len(go(config, view, remove(config.founders[6])).roster) == 7, "the others may go"
    while any(record.step == 1 for record in view.attempts):
        view = go(config, view)
        assert config.founders[1] in view.roster or not any(record.step == 1 for record in view.attempts)
    view = go(config, view)
    assert (config.founders[1] in view.roster, view.owed) == (False, ())


def test_judges_of_an_attempt_are_counted_by_what_may_be_byzantine_now() -> None:
    config = make_config(9, 2)
    record = Committed(0, 0, config.founders[:6], (), (), doubts=2)
    late = config.founders[6:]
    assert not is_enough(config, [record], (*config.founders[:4], *late), 2)
    assert is_enough(config, [record], (*config.founders[:5], *late), 2)
    assert is_enough(config, [record], (*config.founders[:3], *late), 1)
    younger = msgspec.structs.replace(record, doubts=1)
    assert is_enough(config, [younger], (*config.founders[:3], *late), 2), "one that came later did not cheat then"
    assert not is_enough(config, [younger], (*config.founders[:2], *late), 2)
    assert not is_enough(config, [], config.founders[:5], 2)
    assert is_enough(config, [], config.founders[:6], 2)


# ---- Pairs


def test_a_pair_goes_together_or_not_at_all() -> None:
    one, other, third = map(make_key, (1, 2, 3))
    for members, margin in ((8, 0), (9, 1), (10, 2), (11, 3)):
        config = make_config(members, 3)
        view = go(config, make_genesis(config), part((one, other)))
        assert {one, other} & {*view.roster} == ({one, other} if margin < 2 else set())
        assert view.owed == (((one, other),) if margin < 2 else ())
        assert view.bound == 3
        if margin == 1:
            later = go(config, view, ban(third))
            assert (list_suspended(later), later.owed) == ({one, other}, ()), "together, when there is room for both"
            alone = go(config, view, remove(one))
            assert (list_suspended(alone), alone.owed) == ({one}, ()), "who goes anyway takes nobody along"


def test_each_of_a_pair_comes_back_by_itself() -> None:
    config = make_config(10, 3)
    view = go(config, make_genesis(config), part((make_key(1), make_key(2))))
    view = come_back(config, view, make_key(1))
    assert make_key(1) in view.roster
    assert list_suspended(view) == {make_key(2)}


def test_of_several_pairs_as_many_go_as_there_is_room_for() -> None:
    config = make_config(12, 4)  # the floor is 10
    pairs = [(make_key(1), make_key(7)), (make_key(2), make_key(8)), (make_key(3), make_key(9))]
    view = go(config, make_genesis(config), part(*pairs))
    assert len(view.roster) == 10
    assert len(view.owed) == 2
    assert {*view.owed} | {tuple(sorted(list_suspended(view)))} == {*pairs}


# ---- Coming back


def test_the_first_absence_ends_at_the_next_boundary() -> None:
    config = make_config(9, 2)
    key = config.founders[0]
    view = go(config, make_genesis(config), remove(key))
    assert view.suspended == (Suspension(key, 0, 0),)
    assert view.absences == (Absences(key, 1, 0),)
    assert key in come_back(config, view, key).roster
    assert key not in go(config, view).roster, "only if it shows that it is there"
    assert come_back(config, view, key).suspended == ()
    again = retry(config, note_commits(make_genesis(config), config.founders, ()), remove(key))
    assert key in come_back(config, again, key).roster, "a boundary later, not a step"


def test_further_absences_last_longer_and_at_most_forty_steps() -> None:
    config = make_config(9, 2)
    view, key = make_genesis(config), config.founders[0]
    waits = []
    for count in range(1, 9):
        began = view.step
        view = go(config, view, remove(key))
        assert view.absences == (Absences(key, count, 0),)
        assert key not in view.roster
        while key not in view.roster:
            view = come_back(config, view, key)
        waits.append(view.step - began)
        assert view.absences == (Absences(key, count, 0),), "being away is not served"
    assert waits == [2, 4, 8, 16, 32, 40, 40, 40]
    assert LONGEST_ABSENCE == 40


def test_fifty_served_steps_forgive_one_absence() -> None:
    config = make_config(9, 2)
    key = config.founders[0]
    view = change(make_genesis(config), absences=(Absences(key, 2, 0),))
    for served in range(FORGIVEN):
        assert view.absences == (Absences(key, 2, served),)
        view = go(config, view)
    assert view.absences == (Absences(key, 1, 0),)
    for _ in range(FORGIVEN):
        view = go(config, view)
    assert view.absences == ()
    view = go(config, change(view, absences=(Absences(key, 1, FORGIVEN - 1),)), remove(key))
    assert view.absences == (Absences(key, 2, 0),), "an absence interrupts the steps served"


def test_who_comes_back_serves_no_probation_and_takes_no_place_of_strangers() -> None:
    config, stranger = make_config(9, 2, admissions=1), make_key(99)
    key = config.founders[0]
    view = go(config, make_genesis(config), remove(key))
    view = go(config, view, joins=[key, stranger])
    assert key in view.roster
    assert [candidate.key for candidate in view.candidates] == [stranger]
    view = go(config, go(config, make_genesis(config), remove(key)), remove(key), joins=[key])
    assert view.candidates == (), "nor does a suspended member become a candidate"


def test_the_roster_never_outgrows_the_parts_of_a_gradient() -> None:
    config = make_config(7, size=8)
    view = admit(config, make_genesis(config), *map(make_key, range(50, 55)))
    assert len(view.roster) == 8
    config = make_config(9, 2, size=9)
    view = go(config, make_genesis(config), remove(*config.founders[:2]))
    view = admit(config, view, make_key(50))
    view = come_back(config, view, *config.founders[:2])
    assert len(view.roster) == 9
    assert len(list_suspended(view)) == 1


def test_a_stranger_that_stays_away_longer_than_its_term_is_one_again_and_a_founder_never_is() -> None:
    config, stranger = make_config(9, 2, newcomer_probation=7), make_key(50)
    view = admit(config, make_genesis(config), stranger)
    view = go(config, view, remove(stranger, config.founders[0]))
    since = view.step - 1
    while view.step - since <= 7:
        assert list_suspended(view) == {stranger, config.founders[0]}
        assert stranger in come_back(config, view, stranger).roster
        view = go(config, view)
    assert stranger not in come_back(config, view, stranger).roster
    view = go(config, view)
    assert list_suspended(view) == {config.founders[0]}
    assert [record.key for record in view.absences] == [config.founders[0]]
    view = come_back(config, view, stranger)
    assert stranger not in view.roster
    assert [(candidate.key, candidate.term) for candidate in view.candidates] == [(stranger, 7)]
    for _ in range(300):
        view = go(config, view)
    assert config.founders[0] in come_back(config, view, config.founders[0]).roster


@given(st.integers(0, 2**32))
@properties
def test_returns_are_never_slower_than_the_schedule(seed: int) -> None:
    """Whoever asks at every boundary is back ``2**count`` steps after it went, at most forty; after its first absence
    at the next boundary."""
    random, config = Random(seed), make_config(12, 2)
    view = make_genesis(config)
    honest: dict[bytes, int] = dict.fromkeys(config.founders, 0)
    left: dict[bytes, int] = {}
    for _ in range(120):
        before = view
        gone = random.sample(view.roster, random.choice((0, 0, 0, 1, 2)))
        if random.random() < 0.3:
            view = retry(config, note_commits(view, view.roster, ()), remove(*gone))
        else:
            view = go(config, view, remove(*gone), joins=[*list_suspended(view)])
        for key in {*before.roster} - {*view.roster}:
            left[key] = before.step
            honest[key] = next(record.count for record in view.absences if record.key == key)
        for member in view.suspended:
            assert member.since == left[member.key]
            wait = 0 if honest[member.key] == 1 else min(LONGEST_ABSENCE, 2 ** honest[member.key])
            assert member.ready == member.since + wait
            late = view.step > before.step and member.key in list_suspended(before)
            assert not late or view.step < member.ready, "it could have been back"


# ---- A run that waits


def suspend(config: Config, view: View, *keys: bytes) -> View:
    return go(config, view, remove(*keys))


def test_where_enough_stay_nobody_is_let_in_out_of_turn() -> None:
    config = make_config(9, 3)
    view = make_genesis(config)
    silent = remove(config.founders[0])
    assert find_replacements(config, view, silent, config.founders, False, 0) == frozenset()
    assert find_replacements(config, view, Changes(), (), False, 0) == frozenset()


def test_a_run_that_waits_lets_in_who_shows_that_it_is_there() -> None:
    config = make_config(9, 3)
    one, two, three = config.founders[:3]
    view = suspend(config, make_genesis(config), one)
    assert compute_margin(config, view) == 0
    assert find_replacements(config, view, remove(two), (), False, 0) is None, "nobody is there: it waits"
    assert find_replacements(config, view, remove(two), {three, make_key(99)}, False, 0) is None
    assert find_replacements(config, view, remove(two), {one}, False, 0) == {one}
    assert find_replacements(config, view, remove(two, three), {one}, False, 0) is None, "one does not replace two"
    after = retry(config, view, Changes(removed=frozenset({two}), coming=frozenset({one})))
    assert (one in after.roster, list_suspended(after), after.owed) == (True, {two}, ())
    assert len(after.roster) == 8
    banned = find_replacements(config, view, ban(two), (), False, 0)
    assert banned == frozenset(), "a ban lowers the floor with the roster"


def test_who_comes_to_a_run_that_waits_need_not_have_served_its_absence() -> None:
    config = make_config(9, 3)
    one, two = config.founders[:2]
    view = change(make_genesis(config), absences=(Absences(one, 4, 0),))
    view = suspend(config, view, one)
    assert view.suspended == (Suspension(one, 0, 32),)
    assert find_replacements(config, view, remove(two), {one}, False, 0) == {one}


def test_two_that_take_turns_pay_for_it_with_rounds() -> None:
    """Who was suspended in this very step, and not for the first time, is let in by a later round only."""
    config = make_config(9, 3)
    one, two = config.founders[:2]
    for count in range(1, 5):
        records = (Absences(one, count - 1, 0),) if count > 1 else ()
        view = retry(config, change(make_genesis(config), absences=records), remove(one))
        assert view.absences == (Absences(one, count, 0),)
        rounds = [round_ for round_ in range(9) if find_replacements(config, view, remove(two), {one}, False, round_)]
        assert rounds == [*range(2 * (count - 1), 9)]
        later = change(view, step=1)
        assert find_replacements(config, later, remove(two), {one}, False, 0) == {one}


def test_witnesses_are_waited_for_and_then_given_up() -> None:
    """Attackers that were members while few were cannot halt the run for ever when all others are back."""
    config = make_config(8, 2)
    one, two, three, four = config.founders[:4]
    thin = suspend(config, suspend(config, make_genesis(config), one), two)
    thin = note_commits(thin, thin.roster, ())
    assert len(thin.attempts[-1].roster) == compute_floor(config, 2) == 6
    view = go(config, thin, joins=(one, two))
    assert len(view.roster) == 8
    assert find_replacements(config, view, remove(three), (), False, 0) == frozenset(), "5 of the 6 are left"
    assert find_replacements(config, view, remove(three, four), (), False, 9) is None, "4 are waited for"
    assert find_replacements(config, view, remove(three, four), (), False, 0, True) == frozenset()
    assert find_replacements(config, view, remove(one, three, four), (), False, 9, True) is None, "the floor stays"
    silent = frozenset({three, four})
    kept = retry(config, view, Changes(removed=silent))
    assert (len(kept.roster), len(kept.owed)) == (7, 1)
    assert not any(record.given_up for record in kept.attempts)
    after = retry(config, view, Changes(removed=silent, patient=True))
    assert (list_suspended(after), after.owed) == ({three, four}, ())
    assert [record.given_up for record in after.attempts] == [True], "those who are left judge it"
    assert len(retry(config, after, remove(one)).roster) == 6, "the floor is not given up"
    again = change(after, roster=(*after.roster, three))
    assert len(retry(config, again, remove(one)).roster) == 6, "and nobody waits for them again"
    untouched = retry(config, view, Changes(removed=frozenset({three}), patient=True))
    assert not any(record.given_up for record in untouched.attempts), "nothing is given up for nothing"


def test_a_replacement_does_not_judge_what_it_missed() -> None:
    """So it does not help where those who were there would be too few."""
    config = make_config(9, 3)
    one, two, three = config.founders[:3]
    view = suspend(config, make_genesis(config), one)
    view = note_commits(view, view.roster, ())
    assert len(view.attempts[-1].roster) == 8
    assert find_replacements(config, view, remove(two), {one}, False, 0) == {one}, "7 judges of an attempt by 8"
    view = change(view, suspended=(*view.suspended, Suspension(make_key(60), 0, 0)))
    assert find_replacements(config, view, remove(two, three), {one, make_key(60)}, False, 0) is None
    view = change(view, attempts=())
    assert find_replacements(config, view, remove(two, three), {one, make_key(60)}, False, 0) == {one, make_key(60)}
    assert find_replacements(config, view, remove(two, three), {one, make_key(60)}, True, 0) is None, "this one stands"


def test_only_suspended_members_come() -> None:
    config = make_config(9, 3)
    view = retry(config, make_genesis(config), Changes(coming=frozenset({make_key(99)})))
    assert view.roster == config.founders


def test_who_comes_and_is_banned_at_once_stays_out() -> None:
    config = make_config(9, 3)
    one = config.founders[0]
    view = suspend(config, make_genesis(config), one)
    view = retry(config, view, Changes(banned=frozenset({one}), coming=frozenset({one})))
    assert one not in view.roster
    assert view.suspended == ()
    assert view.banned == (one,)


# ---- Both sides


@given(st.integers(0, 2**32), st.booleans(), st.integers(4, 16), st.integers(1, 2))
@properties
def test_no_sequence_of_moves_brings_the_roster_below_the_floor(
    seed: int, safe: bool, members: int, validators: int
) -> None:
    """Silence, pairs, strikes, goodbyes, retries, returns, waits, bans of attackers, strangers of either kind, in any
    order. Attackers choose, though never more than ``b`` of them are members or suspended, and honest peers fall silent
    as they like."""
    random = Random(seed)
    most = (members - 1) // 3 if safe else (members - 1 - validators) // 2
    if most < 0 or members < 2 * most + 1 + validators:
        return
    byzantine = random.randint(min(1, most), most)
    config = make_config(members, byzantine, validators=validators, partition_safe=safe)
    attackers = {*random.sample(config.founders, byzantine)}
    view, fresh = make_genesis(config), itertools.count(100)
    for _ in range(80):
        before = view
        absent = list_suspended(view)
        inside = [key for key in view.roster if key in attackers]
        rest = [key for key in view.roster if key not in attackers]
        move = random.choice(
            ("silence", "silence", "pair", "strike", "leave", "ban", "back", "back", "wait", "stranger")
        )
        if random.random() < 0.7:
            view = note_commits(view, view.roster, ())
        changes, joins, candidates = Changes(), list[bytes](), list[bytes]()
        if move == "silence":
            changes = remove(*random.sample(view.roster, random.randint(1, min(4, len(view.roster)))))
        elif move == "pair" and inside and rest:
            pairs = zip(random.sample(inside, len(inside)), random.sample(rest, len(rest)), strict=False)
            changes = part(*itertools.islice(pairs, random.randint(1, 2)))
        elif move == "strike":
            changes = strike(*random.sample(view.roster, random.randint(1, 3) if len(view.roster) > 2 else 1))
        elif move == "leave":
            gone = frozenset(random.sample(view.roster, random.randint(1, len(view.roster))))
            changes = Changes(removed=gone, leaving=gone)
        elif move == "ban" and inside + sorted(absent & attackers) and random.random() < 0.3:
            changes = ban(random.choice(inside + sorted(absent & attackers)))
        elif move == "back":
            joins = [key for key in sorted(absent) if random.random() < 0.7]
        elif move == "wait":
            silent = remove(*random.sample(view.roster, random.randint(1, min(3, len(view.roster)))))
            present = {key for key in absent if random.random() < 0.7}
            coming = find_replacements(config, view, silent, present, False, random.randint(0, 8))
            if coming is None:
                continue  # it waits
            changes = Changes(removed=silent.removed, coming=coming)
        elif move == "stranger":
            kept = len(attackers - {*view.banned})
            for _ in range(random.randint(1, 2)):
                key = make_key(next(fresh))
                candidates.append(key)
                if kept < byzantine and random.random() < 0.5:
                    attackers.add(key)
                    kept += 1
        if candidates:
            done = tuple(Candidate(key, view.step, 5, 4) for key in candidates)
            view = go(config, change(view, candidates=done), served={*candidates})
            view = change(view, candidates=())
        elif not joins and random.random() < 0.4:
            view = retry(config, view, changes)
        else:
            view = go(config, view, changes, joins=joins)
        # ---- What holds whatever they do
        bound, roster, banned = min(byzantine, view.doubts), {*view.roster}, {*view.banned}
        assert view.bound == bound
        floor = compute_floor(config, view.doubts)
        went = {*before.roster} - roster - banned
        assert not went or len(roster) >= floor, "nothing but a ban brings them below the floor"
        assert view.doubts <= before.doubts or len(roster) >= floor, "nor does a stranger"
        assert len(banned) > 0 or len(roster) >= floor
        honest = roster - attackers
        assert len(roster & attackers) <= bound < len(honest)
        assert len(honest) >= compute_quorum(config, view), "honest members are enough"
        for record in view.attempts:
            needed = min(byzantine, record.doubts, view.doubts)
            assert len(honest.intersection(record.roster)) > needed, "they can convict who cheated then"
        suspended = list_suspended(view)
        struck = {count.key for count in before.strikes if count.count >= 2}
        assert not suspended & roster
        assert not suspended & banned
        assert {*config.founders} <= roster | suspended | banned, "no founder is ever lost"
        for pair in changes.pairs:
            other_debts = {key for group in before.owed for key in group if group != pair}
            if {*pair} - roster - struck - other_debts:  # who goes alone anyway takes nobody along
                assert not {*pair} & roster, "together or not at all"
        for group in view.owed:
            assert {*group} <= roster, "who has gone owes nothing"
            assert not is_enough(config, view.attempts, roster - {*group}, view.doubts) or view.step > before.step
        absences = {record.key: record.count for record in view.absences}
        earlier = {record.key: record.count for record in before.absences}
        for key in went - {*changes.coming}:
            assert absences[key] == earlier.get(key, 0) + 1, "one absence for one suspension"


# ---- Suspects


def test_who_is_banned_leaves_its_commits_behind_and_in_exact_mode_nobody_else() -> None:
    for tolerance in (None, Tolerance(1e-6, 1e-3)):
        config = make_config(9, 2, tolerance=tolerance)
        view, (one, two, *_) = make_genesis(config), config.founders
        view = go(config, note_commits(view, config.founders[1:], ()))
        view = note_commits(view, config.founders[:5], ())
        left = (Suspect(two, 0, 0), Suspect(two, 1, 0))
        assert change_members(config, view, ban(two)).suspects == left
        suspended = change_members(config, view, remove(two)).suspects
        assert suspended == (() if tolerance is None else left), "its bytes may be gone before anybody is drawn"
        both = change_members(config, view, ban(one, two))
        assert both.suspects == (Suspect(one, 1, 0), *left)
        cleared = change_members(config, both, Changes(), acquitted=[Suspect(two, 0, 0)])
        assert cleared.suspects == (Suspect(one, 1, 0), Suspect(two, 1, 0))


def test_every_attempt_of_a_step_is_suspect() -> None:
    config = make_config()
    view = note_commits(make_genesis(config), config.founders, ())
    view = retry_step(config, view, remove(config.founders[6]), 9, bytes(32))
    assert (view.attempt, view.failed) == (9, 1)
    view = note_commits(view, config.founders[:6], ())
    view = change_members(config, view, ban(config.founders[0]))
    assert view.suspects == (Suspect(config.founders[0], 0, 0), Suspect(config.founders[0], 0, 9))


def test_what_is_no_longer_kept_is_no_longer_suspect() -> None:
    config = make_config()
    view = note_commits(make_genesis(config), config.founders, ())
    view = go(config, view, ban(config.founders[0]))
    for _ in range(KEPT_STEPS - 1):
        assert [suspect.step for suspect in view.suspects] == [0]
        view = go(config, view)
    assert go(config, view).suspects == ()
    assert go(config, view).attempts == ()


def test_all_contributors_of_the_last_step_are_suspect_also_who_is_suspended() -> None:
    config = make_config(steps=1)
    view = note_commits(make_genesis(config), config.founders[1:], ())
    view = go(config, view, remove(config.founders[6]))
    assert config.founders[6] not in view.roster
    assert {suspect.key for suspect in view.suspects if suspect.step == 0} == set(config.founders[1:])


# ---- Probation


def join(config: Config, view: View, key: bytes) -> View:
    return go(config, view, joins=[key])


def make_low() -> tuple[Config, View]:
    """Two founders are banned and two suspended: two are left, of whom none is in doubt. A stranger would be."""
    config = make_config(6, 2)
    view = go(config, make_genesis(config), ban(*config.founders[:2]))
    view = go(config, view, remove(*config.founders[2:4]))
    assert (len(view.roster), view.doubts) == (2, 0)
    return config, view


def test_a_stranger_that_raises_the_doubts_is_admitted_only_if_the_floor_holds_then() -> None:
    """It adds one member, and may raise the floor by two."""
    config, view = make_low()
    waiting = admit(config, view, make_key(50))
    assert (waiting.roster, waiting.doubts) == (view.roster, 0)
    assert [candidate.key for candidate in waiting.candidates] == [make_key(50)]
    assert admit(config, view, make_key(50), make_key(51)).roster == view.roster, (
        "nor do two that would doubt each other"
    )
    larger = come_back(config, view, config.founders[2])
    larger = admit(config, larger, make_key(50))
    assert (len(larger.roster), larger.doubts) == (4, 1)
    assert compute_margin(config, larger) == 0


def test_a_stranger_waits_until_the_floor_bears_it_and_serves_on_meanwhile() -> None:
    config, view = make_low()
    view = admit(config, view, make_key(50))
    for _ in range(30):
        view = go(config, view, served={make_key(50)})
        assert make_key(50) not in view.roster
    assert [candidate.key for candidate in view.candidates] == [make_key(50)]
    view = go(config, view, served={make_key(50)}, joins=[config.founders[2], make_key(51)])
    assert {make_key(50), config.founders[2]} <= {*view.roster}
    assert [candidate.key for candidate in view.candidates] == [make_key(51)], "who waits keeps nobody out"


def test_judges_of_kept_attempts_keep_strangers_out_too() -> None:
    """A stranger raises what a verdict on the last steps takes."""
    config = make_config(8, 2)
    view = go(config, make_genesis(config), ban(*config.founders[:2]))
    record = Committed(view.step, 0, (*view.roster[:2], *map(make_key, range(60, 64))), (), (), doubts=2)
    kept = change(view, attempts=(record,))
    assert is_enough(config, kept.attempts, kept.roster, 0)
    assert admit(config, kept, make_key(50)).roster == kept.roster
    assert len(admit(config, view, make_key(50)).roster) == 7


def test_who_waits_to_be_let_in_and_does_not_serve_on_is_forgotten() -> None:
    config, view = make_low()
    view = admit(config, view, make_key(50))
    for _ in range(20):
        assert make_key(50) not in view.roster
        view = go(config, view)
    assert view.candidates == ()


def test_who_waits_long_may_miss_a_step_now_and_then() -> None:
    config, view = make_low()
    view = admit(config, view, make_key(50))
    for step in range(1000):
        view = go(config, view, served={make_key(50)} if step % 5 else set())
        assert [candidate.key for candidate in view.candidates] == [make_key(50)]


def test_only_who_has_served_in_this_very_step_is_let_in() -> None:
    """Or computation for one step at a time would let in all who waited."""
    config = make_config(9, 2)
    one, other = make_key(50), make_key(51)
    view = make_genesis(config)
    view = change(view, candidates=tuple(Candidate(key, view.step - 6, 5, 6) for key in (one, other)))
    assert go(config, view).roster == view.roster
    assert {*go(config, view, served={one}).roster} - {*view.roster} == {one}
    assert {*go(config, view, served={one, other}).roster} - {*view.roster} == {one, other}


@pytest.mark.parametrize(("members", "byzantine", "validators"), [(4, 1, 1), (7, 2, 1), (16, 7, 1), (16, 3, 4)])
def test_newcomers_serve_longer_than_a_cheating_member_survives(members: int, byzantine: int, validators: int) -> None:
    for admissions in (1, 3):
        config = make_config(members, byzantine, validators=validators, admissions=admissions)
        survives = members * (members - 1) / (validators * (members - byzantine))
        assert config.newcomer_term >= 4 * admissions * survives
        assert config.newcomer_term >= config.probation
        view = join(config, make_genesis(config), make_key(99))
        assert view.candidates[0].term == config.newcomer_term


def test_only_steps_that_count_are_served_and_places_are_given_back() -> None:
    config, key = make_config(newcomer_probation=9), make_key(99)
    view = join(config, make_genesis(config), key)
    assert view.candidates == (Candidate(key, 1, 9, 0),)
    view = go(config, go(config, view, served={key}))
    assert view.candidates == (Candidate(key, 1, 9, 1),)
    for _ in range(12):
        assert view.candidates
        view = go(config, view)
    assert view.candidates == (), "who has missed more than twelve steps gives its place to another"


def test_probationers_are_few_not_members_and_never_banned_keys() -> None:
    config = make_config(admissions=2)
    view = go(config, make_genesis(config), ban(config.founders[0]))
    asked = [*config.founders, *map(make_key, range(50, 60))]
    view = go(config, view, joins=asked)
    assert len(view.candidates) == 2
    assert not {candidate.key for candidate in view.candidates} & set(config.founders)
    assert go(config, view, joins=asked).candidates == view.candidates


def test_nobody_crowds_others_out() -> None:
    """Whose turn it is, the randomness decides: one key among many gets in about as often as any other."""
    config, keys = make_config(admissions=1), [make_key(number) for number in range(50, 60)]
    got = [
        go(config, make_genesis(config), joins=keys, randomness=make_key(number)).candidates[0].key
        for number in range(1000)
    ]
    assert all(60 < got.count(key) < 140 for key in keys)


def test_every_probationer_is_checked_in_every_step_it_serves() -> None:
    config, key = make_config(probation=3, probation_checks=2), make_key(99)
    view = go(config, join(config, make_genesis(config), key), served={key})
    assert [check.target for check in view.trial_checks] == [key, key]
    assert all(check.checker in view.roster for check in view.trial_checks)
    assert go(config, view).trial_checks == ()


# ---- Tau

FLOOR, CEILING, FACTOR = 0.1, 50.0, 1.25
AUTO = AutomaticTau(multiple=1.5, start=1.0, floor=FLOOR, ceiling=CEILING, step_factor=FACTOR, memory=4)


@given(st.lists(st.one_of(st.none(), st.just(math.nan), st.floats(min_value=0)), max_size=60))
@properties
def test_tau_moves_within_its_factor_and_its_limits(scales: list[float | None]) -> None:
    config = make_config(tau=AUTO)
    view = make_genesis(config)
    assert view.tau == 1.0
    for scale in scales:
        after = go(config, view, scale=scale)
        assert view.tau / FACTOR * (1 - 1e-12) <= after.tau <= view.tau * FACTOR * (1 + 1e-12)
        assert FLOOR <= after.tau <= CEILING
        assert len(after.scales) <= AUTO.memory
        if scale is None or not math.isfinite(scale):
            assert (after.tau, after.scales) == (view.tau, view.scales)
        view = after


@pytest.mark.parametrize(("scale", "end"), [(2.0, 3.0), (1e9, CEILING), (0.0, FLOOR), (1e-3, FLOOR)])
def test_tau_comes_to_a_multiple_of_the_scale(scale: float, end: float) -> None:
    config = make_config(tau=AUTO)
    view = make_genesis(config)
    for _ in range(40):
        view = go(config, view, scale=scale)
    assert view.tau == pytest.approx(end)


def test_one_outlier_moves_tau_as_little_as_the_median() -> None:
    config = make_config(tau=AUTO)
    view = make_genesis(config)
    for scale in (2.0, 2.0, 2.0, 1e9, 2.0, 2.0, 2.0, 1e9, 2.0, 2.0, 2.0, 2.0, 2.0):
        view = go(config, view, scale=scale)
        assert view.tau <= 3.0
    assert view.tau == pytest.approx(3.0)


def test_fixed_tau_stays() -> None:
    config = make_config(tau=3.0)
    view = go(config, make_genesis(config), scale=1e9)
    assert (view.tau, view.scales) == (3.0, ())


# ---- Other bookkeeping


def test_whoever_takes_one_along_takes_nobody_else() -> None:
    config = make_config(9, complaints=1)
    one, two, three, *_ = config.founders
    transcript = Transcript(make_genesis(config), compute_duties(config, make_genesis(config)))
    decision = justice.Decision()
    with pytest.MonkeyPatch.context() as patch:
        fresh = [Complaint(0, one, two), Complaint(0, one, three)]
        patch.setattr(justice, "find_complaints", lambda *_: (fresh, frozenset()))
        justice._decide_complaints(config, transcript, decision)
    assert decision.pairs == {(one, two)}
    assert {*decision.removed} == {one, two}


def test_strikes_and_complaints_go_with_their_owners() -> None:
    config = make_config(9, complaint_window=3)
    view, (one, two, three, *_) = make_genesis(config), config.founders
    view = go(config, view, strike(one, two), complaints=[Complaint(0, one, two)])
    view = go(config, view, strike(one))
    assert view.strikes == (Count(one, 2), Count(two, 1))
    assert view.complaints == (Complaint(0, one, two),)
    assert go(config, view, remove(one)).strikes == (Count(two, 1),)
    assert go(config, view, remove(two)).complaints == ()
    assert go(config, view, remove(three)).complaints == (), "and are forgotten when the window has passed"


def test_two_views_never_share_a_step_and_an_attempt() -> None:
    config = make_config()
    first = make_genesis(config)
    second = go(config, first)
    again = retry_step(config, first, remove(config.founders[0]), 3, bytes(32))
    assert len({(view.step, view.attempt) for view in (first, second, again, go(config, again))}) == 4


# ---- Bytes


@given(draw_views(), st.floats(allow_nan=False), st.integers(0, 2**40))
@properties
def test_bytes_of_a_view_give_that_view(drawn: tuple[Config, View], tau: float, step: int) -> None:
    config, view = drawn
    view = note_commits(change(view, tau=tau, step=step, scales=(tau,)), config.founders, (make_key(9),))
    view = change_members(config, view, Changes(frozenset({make_key(3)}), frozenset({make_key(2)}), frozenset()))
    view = note_withheld_share(note_draw(view, make_key(7), ()))
    data = encode_view(view)
    assert decode_view(data) == view
    assert encode_view(decode_view(data) or view) == data


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data + b"\x00"])
def test_other_bytes_are_no_view(damage: Any) -> None:
    assert decode_view(damage(encode_view(make_genesis(make_config())))) is None


def test_other_encoding_of_a_view_is_no_view() -> None:
    """A digest must name one view: integers in more bytes than needed would give it a second one."""
    view = make_genesis(make_config())
    data = encode_view(view)
    assert data[:3] == b"\xdc\x00\x1e", "an array of 30 fields, step 0 first"
    assert data[3] == 0
    longer = data[:3] + b"\xcc\x00" + data[4:]
    assert msgspec.msgpack.decode(longer, type=View) == view
    assert decode_view(longer) is None


def test_every_field_is_in_the_bytes() -> None:
    view = make_genesis(make_config())
    others: dict[str, Any] = {
        "tau": 2.0,
        "scales": (1.0,),
        "drawn": make_key(1),
        "targets": (Target(make_key(1), 2, 3),),
        "carried": (Target(make_key(1), 2, 3),),
        "trial_checks": (Check(make_key(1), make_key(2), 3, 4),),
        "strikes": (Count(make_key(1), 1),),
        "absences": (Absences(make_key(1), 1, 2),),
        "suspended": (Suspension(make_key(1), 1, 2),),
        "owed": ((make_key(1), make_key(2)),),
        "complaints": (Complaint(1, make_key(1), make_key(2)),),
        "candidates": (Candidate(make_key(1), 1, 1, 1),),
        "attempts": (Committed(1, 1, (), (), ()),),
        "suspects": (Suspect(make_key(1), 1, 1),),
    }
    seen = {encode_view(view)}
    for name in View.__struct_fields__:
        value = getattr(view, name)
        other = others.get(name, value + 1 if isinstance(value, int) else None)
        if other is None:
            other = (make_key(99),) if isinstance(value, tuple) else b"x" * 32
        seen.add(encode_view(change(view, **{name: other})))
    assert len(seen) == 1 + len(View.__struct_fields__)
