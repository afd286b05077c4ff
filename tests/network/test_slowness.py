"""One of several real processes uses every deadline: it is told so with numbers, and the others go on without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import events
from phalanx.swarm import Attackers, run_swarm

START, STEPS = 6, 40


@pytest.mark.long
def test_who_uses_every_deadline_is_suspended_and_told_so(tmp_path: Path) -> None:
    heard: list[events.Event] = []
    found = run_swarm(
        task="digits",
        peers=6,
        byzantine=1,
        attackers=Attackers(attack="every_deadline", start=START),
        seed=0,
        out=tmp_path / "swarm",
        settings={"steps": STEPS, "delta": 1.0, "gradient_time": 3.0, "transfer_time": 1.0},
        kills=[],
        joins=[],
        on_event=heard.append,
        should_stop=lambda: False,
    )
    assert found.finished
    assert found.digests_equal
    removed = [event for event in heard if isinstance(event, events.Removed)]
    started = next(event for event in heard if isinstance(event, events.RunStarted))
    assert {event.peer for event in removed} == {*started.attackers}, removed
    first = min(removed, key=lambda event: event.step)
    assert "too slow: it cost" in first.reason
    assert first.step <= START + 2
    assert not any(isinstance(event, events.Banned) for event in heard)
