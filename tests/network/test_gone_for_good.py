"""A member is gone for good: the others go on in a new run from the last certified checkpoint, with real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from crowd import LONG

from phalanx import events
from phalanx.cli import main
from phalanx.core.crypto import Identity
from phalanx.events import read_events
from phalanx.swarm import Attackers, Swarm
from phalanx.training.checkpoints import find_latest
from phalanx.training.manifest import read_network_manifest
from phalanx.training.recorder import EVENTS

PACED = Path(__file__).with_name("paced.py")
STEPS, STOPPED = 70, 8
WORDS = ["--threads", "1", "--delta", "2", "--gradient-time", "6", "--transfer-time", "2"]
WORDS += ["--probation", "5", "--newcomer-probation", "5", "--steps", str(STEPS), "--optimizer", "schedule=cosine"]


def init(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    monkeypatch.setattr("sys.argv", ["phalanx", "init", *words, "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert not end.value.code, err
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def kill_from(swarm: Swarm, step: int) -> bool:
    """Kill all, once all have come so far. Whether they have."""
    if min(process.step for process in swarm.processes) < step:
        return False
    for process in swarm.processes:
        process.kill()
    return True


def test_two_members_and_a_new_founder_go_on_and_another_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Swarm(tmp_path / "old", 3, Attackers(), [], [], lambda event: None)
    founders = [word for founder in old.founders for word in ("--founder", founder)]
    init(monkeypatch, capsys, str(tmp_path / "old" / "run.toml"), "--task", f"{PACED}:make_task", *founders, *WORDS)
    old.run(LONG, lambda: kill_from(old, STOPPED))

    folders = [process.folder / "run" for process in old.processes]
    latest = [int(path.name) for path in map(find_latest, folders) if path is not None]
    assert len(latest) == 3
    at = min(latest)  # perhaps not all were in one step
    identities = [process.identity for process in old.processes[:2]] + [Identity.generate()]
    new = Swarm(tmp_path / "new", 3, Attackers(), [], [(3, 1)], lambda event: None, identities=identities)
    founders = [word for founder in new.founders for word in ("--founder", founder)]
    written = []
    for place, folder in enumerate(folders[:2]):  # either of them can
        path = tmp_path / "new" / "run.toml" if place == 0 else tmp_path / "again.toml"
        told = init(monkeypatch, capsys, str(path), "--continue", str(folder), "--at", str(at), *founders)
        written.append((path.read_bytes(), Path(str(told["state"])).read_bytes()))
    assert written[0] == written[1]
    manifest = read_network_manifest(tmp_path / "new" / "run.toml")
    held = {event.step: event for event in old.processes[0].told if isinstance(event, events.StepFinished)}
    assert manifest.network.state == held[at - 1].state, "the state that the old members agreed on"
    assert manifest.run.steps == STEPS - at

    found = new.sum_up(new.run(LONG, lambda: False))
    assert found.finished, found.reason
    assert found.digests_equal
    assert found.joined == [3], "it fetched the state from the members"
    assert new.processes[3].finished is not None
    assert found.result.steps == STEPS - at
    assert found.result.honest_banned == found.result.honest_removed == 0
    before = read_events(folders[0] / EVENTS)
    measured = [event.metric for event in before if isinstance(event, events.Evaluated)]
    losses = [event.loss for event in before if isinstance(event, events.StepFinished) and event.loss is not None]
    later = [event for event in new.merged if isinstance(event, events.StepFinished)]
    first = [event.loss for event in later[:3] if event.loss is not None]
    assert first
    assert sum(first) / len(first) < losses[0], "it did not begin anew"
    assert measured[-1] is not None
    assert found.result.final_metric is not None
    assert found.result.final_metric >= measured[-1] - 0.02
    chains = [
        {event.step: event.state for event in process.told if isinstance(event, events.StepFinished)}
        for process in new.processes
    ]
    for chain in chains[1:]:
        assert all(chains[0][step] == state for step, state in chain.items() if step in chains[0])
