"""Whoever plants a bug in the core is found out by the checkers; the same runs are clean without it."""

from __future__ import annotations

import pytest
from planted_bugs import BUGS, UNIT_BUGS, Edit, check_run, find_unit, find_violation, planted

from phalanx.core.membership import compute_quorum


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    found, tried = find_violation(BUGS[name])
    assert found is not None, "no checker noticed"
    assert [check_run(run) for run in tried] == [None] * len(tried), "the runs are not clean without the bug"


@pytest.mark.parametrize("name", UNIT_BUGS)
def test_a_planted_bug_breaks_its_unit(name: str) -> None:
    unit = find_unit(UNIT_BUGS[name].unit)
    with planted(UNIT_BUGS[name].edits), pytest.raises(AssertionError):
        unit()
    unit()


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 58
    assert len(UNIT_BUGS) >= 20
    assert len({edit.function for bug in BUGS.values() for edit in bug.edits}) >= 30, "in many places"


def test_a_bug_says_when_the_code_has_changed() -> None:
    edit = Edit("compute_quorum", "something that is not there", "")
    with pytest.raises(LookupError, match=r"membership\.compute_quorum has changed"), planted((edit,)):
        pass


def test_a_bug_says_when_its_place_is_gone() -> None:
    with (
        pytest.raises(LookupError, match="one function compute_nothing, found 0"),
        planted((Edit("compute_nothing", "", ""),)),
    ):
        pass


def test_a_bug_is_taken_out_again() -> None:
    sound = compute_quorum.__code__
    with planted(BUGS["half is a quorum"].edits):
        assert compute_quorum.__code__ is not sound
    assert compute_quorum.__code__ is sound
