"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from stories import KEYS, make_ban, make_run, make_start

from phalanx.events import (
    Evaluated,
    Halted,
    Interrupted,
    Joined,
    Left,
    MarginLost,
    Removed,
    Resumed,
    RunFinished,
    StepFinished,
    Waiting,
    WentOn,
)
from phalanx.show.progress import Duel, Progress


def make_console(terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=120, highlight=False), file


def test_without_a_terminal_there_is_a_line_for_each_tenth_and_each_ban(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for event in make_run():
            progress.on_event(event)
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert "\x1b" not in err
    assert lines[0] == "digits: 3 of 8 peers attack from step 20; defense: phalanx"
    assert [line.split()[1] for line in lines if line.startswith("step") and "/" in line.split()[1]] == [
        f"{step}/100" for step in range(10, 101, 10)
    ]
    bans = [line for line in lines if " banned, accused by" in line]
    assert [line.split(" (")[0] for line in bans] == ["step 27: peer 4", "step 31: peer 1", "step 58: peer 6"]
    assert all(line.endswith("5 of 7 votes") for line in bans)
    assert lines[-1].startswith("finished: step 100/100  loss ")
    assert lines[-1].endswith("5 members  3 banned")


def test_on_a_terminal_there_is_a_bar_and_bans_above_it() -> None:
    console, file = make_console(terminal=True)
    with Progress(console) as progress:
        for event in make_run():
            progress.on_event(event)
    text = file.getvalue()
    assert "━" in text
    assert "step 100/100" in text
    assert "peer 4 (12D3.." in text


@pytest.mark.parametrize("terminal", [True, False])
def test_hostile_text_is_neither_markup_nor_control(terminal: bool) -> None:
    console, file = make_console(terminal)
    hostile = "[red]x[/nonsense]\x1b]0;title\x07\n"
    with Progress(console) as progress:
        progress.on_event(make_start(task=hostile, defense=hostile, metric_name=hostile))
        progress.on_event(make_ban(1, 30, hostile, reason=hostile, exhibits=[hostile]))
        for event in make_run(make_start(metric_name=hostile))[1:]:
            progress.on_event(event)
    assert "[red]x[/nonsense]" in file.getvalue()
    assert "\x1b]0" not in file.getvalue()
    assert "\x07" not in file.getvalue()


def test_who_comes_and_goes_is_told() -> None:
    console, file = make_console(terminal=False)
    with Progress(console) as progress:
        progress.on_event(make_start())
        progress.on_event(Removed(3, 2, KEYS[2], "silent"))
        progress.on_event(Joined(4, 9, KEYS[9]))
        progress.on_event(Left(5, 9, KEYS[9]))
        progress.on_event(MarginLost(6, 1))
        progress.on_event(Interrupted(7))
    text = file.getvalue()
    for words in ("removed: silent", "joined", "left", "1 missing", "interrupted at step 7"):
        assert words in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_halt_is_told_with_its_reason_and_its_end(terminal: bool) -> None:
    console, file = make_console(terminal)
    with Progress(console) as progress:
        track = progress._board.tracks[0]
        progress.on_event(make_start())
        progress.on_event(Halted(3, [2], [KEYS[2]], 0))
        assert track.numbers.endswith("0 banned  halted")
        progress.on_event(WentOn(3))
        assert "halted" not in track.numbers
        progress.on_event(Halted(4, [2], [KEYS[2]], 1))
        progress.on_event(StepFinished(4, 0, 8, 1.0, None, 0, 0.0, "ab" * 32))
        assert "halted" not in track.numbers
    text = " ".join(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).split())
    assert "step 3: the run halts: more members are silent (peer 2) than the roster can spare (0); it goes on" in text
    assert "when they are back" in text
    assert "step 3: the run goes on" in text
    assert "step 4: the run halts: messages took longer than delta" in text


@pytest.mark.parametrize(
    ("margin", "words"),
    [
        (None, "too few members for all validators, 2 missing"),
        (0, "no member may fall silent any more, then the run waits"),
        (1, "one more member may fall silent, then the run waits"),
        (2, "2 more members may fall silent, then the run waits"),
    ],
)
def test_what_the_run_can_spare_is_told(margin: int | None, words: str) -> None:
    console, file = make_console(terminal=False)
    with Progress(console) as progress:
        progress.on_event(make_start())
        progress.on_event(StepFinished(4, 0, 8, 1.0, None, 0, 0.0, "ab" * 32, margin))
        numbers = progress._board.tracks[0].numbers
        progress.on_event(MarginLost(5, 2, margin))
        progress.on_event(Waiting(6, [1, 3], [KEYS[1], KEYS[3]]))
    text = " ".join(file.getvalue().split())
    assert f"step 5: {words}" in text
    assert "step 6: waiting for peers 1, 3" in text
    assert (f"{margin} may be away" in numbers) == (margin is not None)


def test_a_roster_below_its_floor_spares_nobody() -> None:
    console, _ = make_console(terminal=False)
    with Progress(console) as progress:
        progress.on_event(make_start())
        progress.on_event(StepFinished(4, 0, 8, 1.0, None, 0, 0.0, "ab" * 32, -1))
        assert "0 may be away" in progress._board.tracks[0].numbers


def test_two_losses_have_two_names() -> None:
    console, file = make_console(terminal=False)
    with Progress(console) as progress:
        progress.on_event(make_start(steps=1, metric_name="loss"))
        progress.on_event(StepFinished(0, 0, 8, 2.5, None, 0, 0.0, "ab" * 32))
        progress.on_event(Evaluated(1, 1.5))
        progress.on_event(RunFinished(1, 1.5, "ab" * 32))
    assert "loss 2.5  test loss 1.5" in file.getvalue()


def test_a_resumed_run_goes_on_where_it_was() -> None:
    events = make_run()
    console, file = make_console(terminal=False)
    with Progress(console) as progress:
        progress.catch_up(events[:150])
        progress.on_event(Resumed(90))
        for event in events[-16:]:
            progress.on_event(event)
    lines = file.getvalue().splitlines()
    assert lines[0] == "resumed at step 90"
    assert lines[-1].startswith("finished: step 100/100")
    assert lines[-1].endswith("3 banned")


@pytest.mark.parametrize("terminal", [True, False])
def test_without_a_beginning_there_is_still_progress(terminal: bool) -> None:
    console, file = make_console(terminal)
    with Progress(console) as progress:
        for event in make_run()[1:]:
            progress.on_event(event)
    assert "step 100" in file.getvalue()


def test_a_loss_that_is_not_a_number_is_said_to_be_none() -> None:
    console, file = make_console(terminal=False)
    with Progress(console) as progress:
        progress.on_event(make_start(steps=1))
        progress.on_event(StepFinished(0, 0, 8, float("nan"), None, 0, 0.0, "ab" * 32))
        progress.on_event(RunFinished(1, float("inf"), "ab" * 32))
    assert "loss not a number  accuracy not a number" in file.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_duel_shows_both_runs(terminal: bool) -> None:
    console, file = make_console(terminal)
    with Duel(console=console) as duel:
        pairs = zip(make_run(make_start(defense="mean"), (), 20), make_run(bans=()), strict=True)
        for bare, safe in pairs:
            duel.unprotected.on_event(bare)
            duel.protected.on_event(safe)
    lines = [line for line in file.getvalue().splitlines() if "step 100/100" in line]
    assert any("unprotected" in line and "accuracy 15.0%" in line for line in lines)
    assert any(line.startswith("protected") and "accuracy 96.6%" in line for line in lines)
