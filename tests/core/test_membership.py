"""Views: who checks whom, how the bound, suspects, probation and tau move, and that bytes and views are one."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.config import KEPT_STEPS, AutomaticTau, Config
from phalanx.core.crypto import compute_digest
from phalanx.core.membership import (
    Candidate,
    Changes,
    Check,
    Committed,
    Complaint,
    Count,
    Pair,
    Suspect,
    View,
    compute_batch_seed,
    compute_duties,
    compute_quorum,
    decode_view,
    draw_targets,
    encode_view,
    find_targets,
    finish_step,
    make_genesis,
    note_commits,
    note_targets,
    remove_members,
    retry_step,
)

properties = settings(derandomize=True, deadline=None, max_examples=150)


def make_key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def make_config(members: int = 7, byzantine: int = 2, **fields: Any) -> Config:
    founders = tuple(make_key(number) for number in range(1, members + 1))
    return Config(founders=founders, byzantine=byzantine, **{"size": 1000, "steps": 10**6, **fields}).check()


def change(view: View, **fields: Any) -> View:
    return msgspec.structs.replace(view, **fields)


def go(config: Config, view: View, changes: Changes | None = None, **fields: Any) -> View:
    """The view of the next step, in which nothing more happened than is said."""
    usual: dict[str, Any] = {
        "height": view.height + 6,
        "previous": bytes(32),
        "randomness": compute_digest("randomness of a test", view.randomness),
        "state": bytes(32),
        "scale": None,
        "complaints": (),
        "served": (),
        "joins": (),
    }
    return finish_step(config, view, changes or Changes(), **{**usual, **fields})


def ban(*keys: bytes) -> Changes:
    return Changes(banned=frozenset(keys))


def remove(*keys: bytes) -> Changes:
    return Changes(removed=frozenset(keys))


def part(*pairs: tuple[bytes, bytes]) -> Changes:
    """Those go together who kept naming each other."""
    gone = frozenset(key for pair in pairs for key in pair)
    return Changes(removed=gone, pairs=frozenset(Pair(*sorted(pair)) for pair in pairs))


# ---- Duties


@st.composite
def draw_views(draw: st.DrawFn) -> tuple[Config, View]:
    """A swarm from which some have gone since duties and targets were drawn."""
    members, validators, outages = draw(st.integers(4, 12)), draw(st.integers(1, 3)), draw(st.integers(0, 1))
    room = (members - 1 - validators - outages) // 2
    if room < 0:
        validators, outages, room = 1, 0, (members - 2) // 2
    config = make_config(members, draw(st.integers(0, room)), validators=validators, outages=outages)
    view = make_genesis(config)
    order = draw(st.permutations(config.founders))
    targets = draw(st.lists(st.sampled_from(config.founders), max_size=4, unique=True))
    left = draw(st.lists(st.sampled_from(config.founders), min_size=2, unique=True))
    roster = tuple(key for key in config.founders if key in left)
    trials = tuple(
        Check(draw(st.sampled_from(config.founders)), make_key(99), -1) for _ in range(draw(st.integers(0, 2)))
    )
    fields = {"order": tuple(order), "targets": tuple(targets), "roster": roster, "trial_checks": trials}
    bound = draw(st.integers(0, config.byzantine))
    return config, change(view, **fields, bound=bound, doubts=bound, within=bound)


@given(draw_views())
@properties
def test_duties(drawn: tuple[Config, View]) -> None:
    config, view = drawn
    duties = compute_duties(config, view)
    room = len(view.roster) - 2 * view.bound - 1 - config.outages
    assert len(duties.validators) == max(1, min(config.validators, room))
    assert duties.margin == config.validators - len(duties.validators)
    assert len(set(duties.validators)) == len(duties.validators)
    assert set(duties.validators) | set(duties.contributors) == set(view.roster)
    assert not set(duties.validators) & set(duties.contributors)
    assert list(duties.contributors) == [key for key in view.roster if key in duties.contributors]
    for check in duties.checks:
        assert check.checker != check.target
        assert check.checker in view.roster
        assert check.target in view.targets or check in view.trial_checks
    regular = [check for check in duties.checks if check not in view.trial_checks]
    assert {check.checker for check in regular} <= set(duties.validators)
    assert len({check.target for check in regular}) == len(regular), "one validator for each target"
    alone = duties.validators if len(duties.validators) == 1 else ()
    assert set(view.targets) - {check.target for check in regular} <= set(alone), "nobody checks itself"


@given(draw_views())
@properties
def test_validator_that_is_gone_is_replaced_by_the_next_drawn(drawn: tuple[Config, View]) -> None:
    config, view = drawn
    config = msgspec.structs.replace(config, validators=1)
    view = change(view, roster=config.founders, targets=view.targets[:1], trial_checks=())
    waiting = [key for key in view.order if key not in view.targets]
    for number, validator in enumerate(waiting[:-1]):
        left = tuple(key for key in config.founders if key not in waiting[:number])
        duties = compute_duties(config, change(view, roster=left))
        assert duties.validators == (validator,)
        assert duties.checks == tuple(Check(validator, target, view.step - 2) for target in view.targets)


@pytest.mark.parametrize(("members", "byzantine", "validators"), [(4, 1, 1), (5, 1, 1), (5, 1, 2), (5, 0, 2)])
def test_odds_of_being_checked_by_an_honest_validator(members: int, byzantine: int, validators: int) -> None:
    """``m (n-b) / (n (n-1))`` for every member, exactly: over all that can be drawn, each equally likely."""
    config = make_config(members, byzantine, validators=validators)
    genesis = make_genesis(config)
    byzantine_keys = set(config.founders[:byzantine])
    member = config.founders[0]
    others = set(config.founders) - byzantine_keys - {member}
    checked = cases = 0
    for checking_before in itertools.combinations(config.founders, validators):
        contributors = [key for key in config.founders if key not in checking_before]
        for targets in itertools.permutations(contributors, validators):
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
        duties = compute_duties(config, view)
        for check in duties.checks:
            checked[check.target] += check.checker not in byzantine
        randomness = compute_digest("drawn", view.randomness)
        targets = draw_targets(randomness, duties.contributors, config.validators)
        view = change(go(config, note_targets(view, targets), randomness=randomness), attempts=())
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


def test_retry_draws_more_targets_not_others() -> None:
    config = make_config()
    view = note_targets(make_genesis(config), config.founders[:1])
    view = retry_step(config, view, remove(config.founders[6]), 9, bytes(32))
    view = note_targets(view, config.founders[1:3])
    assert go(config, view).targets == config.founders[:3]
    assert go(config, view).carried == ()


def test_targets_are_drawn_by_the_step_after_theirs() -> None:
    """Whoever contributes to a step knows only after its reports whether it will be checked."""
    config = make_config(validators=2)
    view = note_commits(make_genesis(config), config.founders[:4], ())
    assert find_targets(config, view, make_key(5), 1) == (), "nobody contributed before the first step"
    view = note_commits(go(config, view), config.founders[3:], ())
    drawn = find_targets(config, view, make_key(5), 1)
    assert drawn == draw_targets(make_key(5), config.founders[:4], 2)
    assert len(find_targets(config, view, make_key(5), 2)) == 4, "another attempt draws more"
    checks = compute_duties(config, go(config, note_targets(view, drawn))).checks
    assert {(check.target, check.step) for check in checks} == {(key, 0) for key in drawn}


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


def test_bans_lower_the_bound_and_removals_do_not() -> None:
    config = make_config()
    view = make_genesis(config)
    one, two, three = config.founders[:3]
    assert go(config, view, remove(one)).bound == 2
    assert go(config, view, ban(one)).bound == 1
    assert go(config, view, ban(one, two, three)).bound == 0, "never below zero"
    assert remove_members(config, go(config, view, ban(one)), ban(one)).bound == 1, "nobody is banned twice"


def test_ban_of_somebody_who_was_removed_lowers_the_bound_and_that_of_a_stranger_does_not() -> None:
    config = make_config()
    view = go(config, make_genesis(config), remove(config.founders[0]))
    assert go(config, view, ban(config.founders[0])).bound == 1
    assert go(config, view, ban(make_key(99))).bound == 2


def test_admission_of_strangers_raises_the_bound_up_to_b() -> None:
    config = make_config()
    view = go(config, make_genesis(config), ban(*config.founders[:2]))
    assert view.bound == 0
    view = admit(config, view, make_key(50))
    assert (view.bound, len(view.roster)) == (1, 6)
    view = admit(config, view, make_key(51), make_key(52))
    assert (view.bound, len(view.roster)) == (2, 8)


def test_return_of_a_former_member_does_not_raise_the_bound() -> None:
    config = make_config()
    view = go(config, make_genesis(config), ban(config.founders[0]))
    view = go(config, view, remove(config.founders[1]))
    view = admit(config, view, config.founders[1])
    assert config.founders[1] in view.roster
    assert view.bound == 1


@given(st.lists(st.tuples(st.sampled_from(["ban", "remove", "admit", "return", "ban gone"]), st.integers(0, 30))))
@properties
def test_bound_is_never_below_what_may_be_byzantine(actions: list[tuple[str, int]]) -> None:
    """If bans hit only Byzantine peers, and at most ``b`` Byzantine peers that are not banned were ever members at
    once, the bound is at least the number of those in the roster. All who are banned here were Byzantine."""
    config = make_config(7, 2)
    view, strangers = make_genesis(config), itertools.count(100)
    for action, choice in actions:
        before, gone = view, [count.key for count in view.absences if count.key not in view.roster]
        member = view.roster[choice % len(view.roster)]
        if action == "ban" and len(view.roster) > 3:
            view = go(config, view, ban(member))
        elif action == "remove" and len(view.roster) > 3:
            view = go(config, view, remove(member))
        elif action == "admit":
            view = admit(config, view, make_key(next(strangers)))
        elif action == "return" and gone:
            view = admit(config, view, gone[choice % len(gone)])
        elif action == "ban gone" and gone:
            view = go(config, view, ban(gone[choice % len(gone)]))
        banned, new = {*view.banned} - {*before.banned}, {*view.roster} - {*before.roster} - {*gone}
        expected = max(0, before.doubts - len(banned)) + len(new)
        assert view.doubts == expected
        assert view.bound == min(2, expected)
        assert action != "return" or {*view.roster} > {*before.roster} or not gone, "nobody waits who raises nothing"
        assert not set(view.roster) & set(view.banned)
        assert len(set(view.roster)) == len(view.roster)
        assert sorted(view.order) == sorted(view.roster)


@pytest.mark.parametrize("pairs", range(1, 4))
def test_pairs_lower_the_bound_as_far_as_honest_members_must_be_more(pairs: int) -> None:
    """Each takes one of either kind along: were the bound to stay, the honest ones left could decide nothing."""
    config = make_config(9, 3, validators=2)
    view = go(config, make_genesis(config), part(*zip(config.founders[:pairs], config.founders[3:], strict=False)))
    honest = 6 - pairs
    assert 3 - pairs <= view.bound < honest
    assert view.bound == min(3, (9 - 2 * pairs - 1) // 2)
    assert view.doubts == 3, "they may come back"


def test_a_pair_does_not_lower_a_bound_that_the_roster_bears() -> None:
    """It may be that neither could reach the other, and both are honest."""
    config = make_config(9, 2)
    view = go(config, make_genesis(config), part(config.founders[:2]))
    assert (view.bound, len(view.pairs)) == (2, 1)
    assert go(config, view, ban(config.founders[0])).pairs == (), "the one that was Byzantine is known"


def test_one_of_a_pair_waits_for_the_other_where_the_majority_is_at_stake() -> None:
    config = make_config(6, 2)
    one, other = config.founders[:2]
    view = go(config, make_genesis(config), part((one, other)))
    assert (len(view.roster), view.bound) == (4, 1)
    waiting = admit(config, view, one)
    assert waiting.roster == view.roster
    assert [candidate.key for candidate in waiting.candidates] == [one]
    alone = go(config, waiting, served={one}, joins=[other])
    assert alone.roster == view.roster
    assert {candidate.key for candidate in alone.candidates} == {one, other}, "who waits keeps nobody out"
    candidates = tuple(change(c, served=c.term) for c in alone.candidates)
    both = go(config, change(alone, candidates=candidates), served={one, other})
    assert set(both.roster) == set(config.founders)
    assert (both.bound, both.pairs, both.candidates) == (2, (), ())


def test_one_of_a_pair_comes_back_alone_where_there_is_room() -> None:
    config = make_config(7, 2)
    view = go(config, make_genesis(config), part(config.founders[:2]))
    view = admit(config, view, config.founders[0])
    assert (len(view.roster), view.bound, view.pairs) == (6, 2, ())
    assert len(admit(config, view, config.founders[1]).roster) == 7


def test_who_left_alone_lends_its_place_to_nobody() -> None:
    """It comes back; one of a pair that comes with it waits for its own partner, or a stranger."""
    config = make_config(6, 2)
    one, other, third = config.founders[:3]
    view = go(config, go(config, make_genesis(config), part((one, other))), remove(third))
    assert one not in admit(config, view, one).roster
    assert {*admit(config, view, one, third).roster} - {*view.roster} == {third}
    assert {*admit(config, view, one, other).roster} - {*view.roster} == {one, other}
    view = admit(config, view, third)
    assert {*admit(config, view, one, make_key(50), make_key(51)).roster} >= {one, make_key(50), make_key(51)}


def test_pairs_count_also_where_many_strangers_came() -> None:
    """Each of them may be Byzantine, but never more than ``b`` at once: of these, each pair takes one away."""
    config = make_config(8, 3)
    view = make_genesis(config)
    for place, key in enumerate(config.founders[6:]):
        view = admit(config, go(config, view, remove(key)), make_key(50 + place))
    assert (view.doubts, view.within, view.bound) == (5, 3, 3)
    view = go(config, view, part(view.roster[:2], view.roster[2:4]))
    assert (view.within, view.bound, len(view.roster)) == (1, 1, 4)
    assert admit(config, view, config.founders[0]).roster == view.roster


@pytest.mark.parametrize("safe", [False, True])
def test_those_who_do_not_fit_together_are_let_in_one_by_one(safe: bool) -> None:
    config = make_config(10, 3, partition_safe=safe)
    one, other, third, fourth, fifth, *_ = config.founders
    view = go(config, make_genesis(config), part((one, other), (third, fourth)))
    view = go(config, view, remove(fifth))
    assert {*admit(config, view, one, other, third).roster} - {*view.roster} >= {one, other}
    assert {*admit(config, view, one, other, third, fourth).roster} - {*view.roster} == {one, other, third, fourth}
    assert fifth in admit(config, view, one, third, fifth).roster


def test_who_was_removed_alone_comes_back_however_few_are_left() -> None:
    config = make_config(8, 3)
    view = go(config, make_genesis(config), remove(*config.founders[:5]))
    assert admit(config, view, config.founders[0]).roster == (*view.roster, config.founders[0])


def test_a_stranger_waits_while_a_pair_is_out_where_it_could_make_attackers_half() -> None:
    config = make_config(6, 2)
    view = go(config, make_genesis(config), part(config.founders[:2]))
    assert (len(view.roster), view.bound) == (4, 1)
    assert admit(config, view, make_key(50)).roster == view.roster
    assert len(admit(config, view, make_key(50), make_key(51)).roster) == 6
    assert len(admit(config, view, make_key(50), config.founders[0]).roster) == 6


def test_without_pairs_strangers_come_however_few_are_left() -> None:
    config = make_config(6, 2)
    view = go(config, go(config, make_genesis(config), ban(config.founders[0])), remove(*config.founders[1:4]))
    assert (len(view.roster), view.bound) == (2, 1)
    assert len(admit(config, view, make_key(50)).roster) == 3


def test_who_waits_to_be_let_in_and_does_not_serve_on_is_forgotten() -> None:
    config = make_config(6, 2)
    one, other = config.founders[:2]
    view = admit(config, go(config, make_genesis(config), part((one, other))), one)
    for _ in range(20):
        assert one not in view.roster
        view = go(config, view)
    assert view.candidates == ()


def test_who_waits_long_may_miss_a_step_now_and_then() -> None:
    config = make_config(6, 2)
    one, other = config.founders[:2]
    view = admit(config, go(config, make_genesis(config), part((one, other))), one)
    for step in range(1000):
        view = go(config, view, served={one} if step % 5 else set())
        assert [candidate.key for candidate in view.candidates] == [one]


def test_only_who_has_served_in_this_very_step_is_let_in() -> None:
    """Or computation for one step at a time would let in all who waited."""
    config = make_config(6, 2)
    one, other = config.founders[:2]
    view = admit(config, go(config, make_genesis(config), part((one, other))), one)
    done = tuple(Candidate(key, view.step - 6, 5, 6) for key in (one, other))
    view = change(view, candidates=done)
    assert go(config, view, served={one}).roster == view.roster
    assert {*go(config, view, served={one, other}).roster} == {*config.founders}


@given(st.integers(0, 2**32), st.booleans(), st.integers(0, 1), st.integers(5, 13))
@properties
def test_attackers_who_take_others_along_never_become_half(seed: int, safe: bool, outages: int, members: int) -> None:
    """Attackers pair off, leave, come back and come as others when they like, though never more than ``b`` at once.
    Honest members go in pairs with them, or ``c`` alone; those who come back come in any order, together or not."""
    byzantine = min((members - 1 - outages) // 3 if safe else members, (members - 2 - outages) // 2)
    config = make_config(members, byzantine, partition_safe=safe, outages=outages)
    attackers, honest = {*config.founders[:byzantine]}, {*config.founders[byzantine:]}
    view, fresh, alone, random = make_genesis(config), itertools.count(100), set[bytes](), Random(seed)
    for _ in range(60):
        inside, rest = [[key for key in view.roster if key in kind] for kind in (attackers, honest)]
        move = random.choice(("pair", "pair", "pair", "leave", "ban", "two", "out", "come", "come", "come", "come"))
        if move == "pair" and inside:
            count = random.randint(1, min(2, len(inside), len(rest) - 1))
            view = go(config, view, part(*zip(inside[:count], random.sample(rest, count), strict=True)))
        elif move == "leave" and inside:
            view = go(config, view, remove(inside[0]))
        elif move == "ban" and inside and not random.randrange(4):
            view = go(config, view, ban(inside[0]))
        elif move == "two" and len(inside) > 1:
            view = go(config, view, part((inside[0], inside[1])))
        elif move == "out" and len(alone) < outages and len(rest) > 1:
            alone.add(rest[0])
            view = go(config, view, remove(rest[0]))
        elif move == "come":
            out = [*sorted(attackers - {*view.roster, *view.banned}), make_key(next(fresh))]
            back = [*sorted(honest - {*view.roster}), make_key(next(fresh))]
            plot = random.sample(out, random.randint(0, min(len(out), byzantine - len(inside))))
            others = [key for key in back if random.random() < 0.4]
            view = admit(config, view, *plot, *others)
            attackers |= {*plot} & {*view.roster}
            honest |= {*others} & {*view.roster}
            alone -= {*view.roster}
        there = sum(key in attackers for key in view.roster)
        left = len(view.roster) - there
        assert there <= view.within
        assert there <= view.bound < left - (outages - len(alone))
        assert 2 * there < len(view.roster)
        assert left + len(alone) >= compute_quorum(config, view), "honest members are enough"


# ---- Suspects


def test_whoever_goes_leaves_its_commits_behind_also_if_it_is_banned() -> None:
    config = make_config()
    view, (one, two, *_) = make_genesis(config), config.founders
    view = go(config, note_commits(view, config.founders[1:], ()))
    view = note_commits(view, config.founders[:5], ())
    assert remove_members(config, view, remove(one)).suspects == (Suspect(one, 1, 0),)
    assert remove_members(config, view, remove(two)).suspects == (Suspect(two, 0, 0), Suspect(two, 1, 0))
    assert remove_members(config, view, ban(two)).suspects == (Suspect(two, 0, 0), Suspect(two, 1, 0))
    both = remove_members(config, view, remove(one, two))
    assert remove_members(config, both, ban(one)).suspects == both.suspects
    cleared = remove_members(config, both, Changes(), acquitted=[Suspect(two, 0, 0)])
    assert cleared.suspects == (Suspect(one, 1, 0), Suspect(two, 1, 0))


def test_every_attempt_of_a_step_is_suspect() -> None:
    config = make_config()
    view = note_commits(make_genesis(config), config.founders, ())
    view = retry_step(config, view, remove(config.founders[6]), 9, bytes(32))
    assert (view.attempt, view.failed) == (9, 1)
    view = note_commits(view, config.founders[:6], ())
    view = remove_members(config, view, remove(config.founders[0]))
    assert Suspect(config.founders[0], 0, 0) in view.suspects
    assert Suspect(config.founders[0], 0, 9) in view.suspects


def test_what_is_no_longer_kept_is_no_longer_suspect() -> None:
    config = make_config()
    view = note_commits(make_genesis(config), config.founders, ())
    view = go(config, view, remove(config.founders[0]))
    for _ in range(KEPT_STEPS - 1):
        assert [suspect.step for suspect in view.suspects] == [0]
        view = go(config, view)
    assert go(config, view).suspects == ()
    assert go(config, view).attempts == ()


def test_all_contributors_of_the_last_step_are_suspect() -> None:
    config = make_config(steps=1)
    view = note_commits(make_genesis(config), config.founders[1:], ())
    view = go(config, view, remove(config.founders[6]))
    assert {suspect.key for suspect in view.suspects if suspect.step == 0} == set(config.founders[1:])


# ---- Probation


def join(config: Config, view: View, key: bytes) -> View:
    return go(config, view, joins=[key])


def test_probation_terms_grow_with_absences() -> None:
    config = make_config(probation=5, newcomer_probation=7)
    view, key = make_genesis(config), config.founders[0]
    assert join(config, view, make_key(99)).candidates[0].term == 7, "of somebody who never was a member"
    terms = []
    for absences in range(1, 6):
        view = join(config, go(config, view, remove(key)), key)
        assert view.absences == (Count(key, absences),)
        terms.append(view.candidates[0].term)
        for _ in range(terms[-1]):
            assert key not in view.roster
            view = go(config, view, served={key})
        assert key in view.roster
    assert terms == [5, 10, 20, 40, 80]


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


def test_parts_are_never_empty() -> None:
    config = make_config(7, size=8)
    view = admit(config, make_genesis(config), *map(make_key, range(50, 55)))
    assert len(view.roster) == 8


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


def test_strikes_and_complaints_go_with_their_owners() -> None:
    config = make_config(complaint_window=3)
    view, (one, two, three, *_) = make_genesis(config), config.founders
    view = go(config, view, Changes(late=frozenset({one, two})), complaints=[Complaint(0, one, two)])
    view = go(config, view, Changes(late=frozenset({one})))
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
    view = remove_members(config, view, Changes(frozenset({make_key(3)}), frozenset({make_key(2)}), frozenset()))
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
    assert data[:3] == b"\xdc\x00\x1a", "an array of 26 fields, step 0 first"
    assert data[3] == 0
    longer = data[:3] + b"\xcc\x00" + data[4:]
    assert msgspec.msgpack.decode(longer, type=View) == view
    assert decode_view(longer) is None


def test_every_field_is_in_the_bytes() -> None:
    view = make_genesis(make_config())
    others: dict[str, Any] = {
        "tau": 2.0,
        "scales": (1.0,),
        "trial_checks": (Check(make_key(1), make_key(2), 3),),
        "strikes": (Count(make_key(1), 1),),
        "absences": (Count(make_key(1), 1),),
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
