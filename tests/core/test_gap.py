"""Who is suspended for gradients between the two thresholds of tolerant mode."""

from __future__ import annotations

import pytest

from phalanx.core.gap import Gap, compute_window, find_gaps, find_suspended, note_gaps
from phalanx.core.messages import Finding, Verdict

KEYS = [bytes([number]) * 32 for number in range(8)]
TARGET = KEYS[7]


def make_gaps(*checkers: int, target: bytes = TARGET, step: int = 5) -> list[Gap]:
    return [Gap(step, KEYS[number], target) for number in checkers]


def test_more_distinct_checkers_than_may_be_byzantine_suspend() -> None:
    assert find_suspended(make_gaps(0, 1, 2), bound=2) == {TARGET}


def test_as_many_checkers_as_may_be_byzantine_suspend_nobody() -> None:
    assert find_suspended(make_gaps(0, 1), bound=2) == set()


def test_one_checker_suspends_nobody_however_often_it_says_so() -> None:
    said = [gap for step in range(50) for gap in make_gaps(0, step=step)]
    assert find_suspended(said, bound=1) == set()
    tally = note_gaps((), said, step=50, window=100, roster=KEYS)
    assert tally == (Gap(49, KEYS[0], TARGET),)


def test_own_findings_do_not_count() -> None:
    assert find_suspended([*make_gaps(0), Gap(5, TARGET, TARGET)], bound=1) == set()


def test_more_in_the_gap_than_may_be_byzantine_are_platforms() -> None:
    found = [gap for target in KEYS[5:] for gap in make_gaps(0, 1, 2, target=target)]
    assert find_suspended(found, bound=2) == set()
    assert find_suspended(found[:6], bound=2) == set(KEYS[5:7])


def test_without_byzantine_members_nobody_is_suspended() -> None:
    assert find_suspended(make_gaps(0, 1, 2), bound=0) == set()


@pytest.mark.parametrize("verdict", [Verdict.INNOCENT, Verdict.GUILTY, Verdict.NOT_RECEIVED])
def test_other_verdicts_are_no_gap(verdict: Verdict) -> None:
    findings = {KEYS[0]: (Finding(TARGET, verdict),)}
    assert find_gaps(3, findings, {(KEYS[0], TARGET)}) == []


def test_only_checkers_that_were_drawn_count() -> None:
    findings = {key: (Finding(TARGET, Verdict.INCONCLUSIVE),) for key in KEYS[:2]}
    assert find_gaps(3, findings, {(KEYS[0], TARGET), (KEYS[1], KEYS[2])}) == [Gap(3, KEYS[0], TARGET)]


def test_findings_expire_and_go_with_whoever_goes() -> None:
    old, new = make_gaps(0, step=1), make_gaps(1, 2, step=9)
    assert note_gaps(old, new, step=10, window=8, roster=KEYS) == tuple(new)
    assert note_gaps(old, new, step=10, window=9, roster=KEYS) == (*old, *new)
    assert note_gaps(old, new, step=10, window=9, roster=KEYS[1:]) == tuple(new)
    assert note_gaps(old, new, step=10, window=9, roster=KEYS[:7]) == ()


def test_a_tally_has_a_limit() -> None:
    roster = [bytes([a, b]) * 16 for a in range(1, 71) for b in range(1)]
    gaps = [Gap(place, a, b) for place, (a, b) in enumerate((a, b) for a in roster for b in roster)]
    tally = note_gaps((), gaps, step=5000, window=5000, roster=roster)
    assert len(tally) == 4096
    assert tally[-1].step == 4899


def test_window_is_long_enough_for_every_member_to_be_checked_several_times() -> None:
    assert compute_window(7, 1, 1) == 56
    assert compute_window(16, 7, 2) == 256
