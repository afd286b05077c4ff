"""How many members a run can spare is said before it begins: in words on stderr, in numbers with ``--json``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx import cli
from phalanx.core.crypto import Identity
from phalanx.show.story import describe_floor
from phalanx.training.planning import find_floor

SMALL = f"{Path(__file__).parent / 'training' / 'small.py'}:task"
WAITS = "one silent attacker can make it wait"


@pytest.mark.parametrize(
    ("byzantine", "validators", "quorum", "floor"),
    [
        (0, 1, "majority", 2),
        (3, 1, "majority", 8),
        (7, 1, "majority", 16),
        (3, 1, "partition-safe", 10),
        (1, 4, "partition-safe", 7),
    ],
)
def test_the_floor_is_the_protocols(byzantine: int, validators: int, quorum: str, floor: int) -> None:
    assert find_floor(byzantine, validators, quorum) == floor


@pytest.mark.parametrize(
    ("peers", "byzantine", "words"),
    [
        (2, 0, "while 2 of its 2 members can be reached: none may be away"),
        (5, 0, "while 2 of its 5 members can be reached: 3 may be away"),
        (16, 3, "8 may be away; attackers cannot halt it while at most 5 honest members are"),
        (12, 3, "4 may be away; attackers cannot halt it while at most 1 honest member is"),
        (11, 3, "3 may be away; attackers cannot halt it alone"),
        (10, 3, "2 may be away, and then one silent attacker can make it wait; with 11 members attackers alone could"),
        (8, 3, "none may be away, and one silent attacker can make it wait; with 11 members attackers alone could not"),
    ],
)
def test_what_is_said_of_it(peers: int, byzantine: int, words: str) -> None:
    text = describe_floor(peers, byzantine, find_floor(byzantine, 1))
    assert words in text
    assert (WAITS in text) == (peers < 3 * byzantine + 1 + 1), "n < 3b + 1 + m"


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["phalanx", *words, "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code


@pytest.mark.parametrize(("byzantine", "waits"), [(1, False), (2, True)])
def test_init_says_how_many_may_be_away(
    byzantine: int,
    waits: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    founders = [f"--founder={Identity.generate().peer_id}" for _ in range(6)]
    run(monkeypatch, "init", str(tmp_path / "run.toml"), "--task", SMALL, *founders, "--byzantine", str(byzantine))
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["floor"], found["margin"]) == (2 * byzantine + 2, 6 - 2 * byzantine - 2)
    assert found.keys() >= {"file", "run", "peers", "steps"}
    assert len(err.splitlines()) == 1
    assert (WAITS in err) == waits


@pytest.mark.parametrize(("defense", "floor"), [("phalanx", 4), ("mean", None)])
def test_simulate_says_how_many_may_be_away(
    defense: str, floor: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ["--peers", "4", "--byzantine", "1", "--steps", "2", "--defense", defense]
    run(monkeypatch, "simulate", "--task", SMALL, *numbers)
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["floor"], found["margin"]) == (floor, 0 if floor else None)
    assert err.count(WAITS) == (1 if floor else 0)
