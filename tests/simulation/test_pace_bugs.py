"""Bugs planted into the rules of the pace: each is seen, by a rule's own test or in a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "core"), str(HERE.parent.parent / "experiments")]

import pace as experiment  # noqa: E402
import test_pace as rules  # noqa: E402
from planted_bugs import Edit, planted  # noqa: E402


def see_slow_commit() -> None:
    """A member that is always a little too slow goes in the end."""
    swarm = experiment.run_swarm(0.5, "too_slow_commit", 1, False, 75, 1)
    rosters = experiment.list_steps(swarm)[1]
    assert any(not roster & swarm.byzantine for roster in rosters)


BUGS: dict[str, tuple[Edit, Callable[[], None]]] = {
    "nobody is excused": (
        Edit("_find_excuses", "return {other: wait", "return {} if reading else {other: wait"),
        rules.test_a_victim_is_not_charged_and_stands_apart_from_whom_it_names,
    ),
    "liars alone vouch": (
        Edit(
            "read_timings",
            "(late[place][key] for place in others), reverse=True), bound)",
            "(late[place][key] for place in others), reverse=True), bound - 1)",
        ),
        rules.test_what_one_more_than_the_liars_saw_is_vouched_for,
    ),
    "one delay is paid twice": (
        Edit("Stopwatch.add_inputs", "lag - since.get(key, 0)", "lag"),
        rules.test_parts_count_only_where_messages_were_not_as_late_meanwhile,
    ),
    "debts are forgotten from step to step": (
        Edit("_note_pace", "debts=pace.debts", "debts=view.debts"),
        see_slow_commit,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name: str) -> None:
    edit, look = BUGS[name]
    look()
    with planted([edit]), pytest.raises(AssertionError):
        look()
