"""Commands that make a run again, or go on with it."""

import json
import shlex
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from phalanx.cli import app
from phalanx.core.errors import LocalError
from phalanx.run import format_command
from phalanx.training.manifest import read_manifest

SMALL = f"{Path(__file__).parent / 'small.py'}:task"


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--clip 0.7",
        "--method btard-sgd",
        "--method btard-clipped-sgd --clip 0.3",
        "--method restarted-btard-sgd",
        "--wire int8 --tau 0.4 --byzantine 1 --attack sign_flip --start 1",
    ],
)
def test_the_command_makes_the_same_run_again(options: str, tmp_path: Path) -> None:
    words = ["simulate", "--task", SMALL, "--peers", "4", "--steps", "2", *options.split()]
    CliRunner().invoke(app, [*words, "--out", str(tmp_path / "first")])
    first = read_manifest(tmp_path / "first" / "manifest.toml")
    again = shlex.split(format_command(first))[1:]
    CliRunner().invoke(app, [*again, "--out", str(tmp_path / "second")])
    second = read_manifest(tmp_path / "second" / "manifest.toml")
    assert second.seed == first.seed
    assert second == first


# ---- Going on


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *words])


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    out = tmp_path / "a run"
    result = run("--task", SMALL, "--peers", "4", "--steps", "4", "--tau", "1", "--stop-at", "2", "--out", str(out))
    assert result.exit_code == 130
    assert f"go on with: phalanx simulate --out '{out}' --resume\n" in result.stderr
    return out


@pytest.mark.parametrize("tau", ["1", "1.0", "1e0"])
def test_the_options_of_a_run_may_be_given_again(stopped: Path, tau: str) -> None:
    result = run("--out", str(stopped), "--resume", "--tau", tau, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 4


@pytest.mark.parametrize("tau", ["2", "auto", "much"])
def test_another_option_is_refused(stopped: Path, tau: str) -> None:
    result = run("--out", str(stopped), "--resume", "--tau", tau)
    assert isinstance(result.exception, LocalError)
    assert f"--tau {tau}: the run in {stopped} has 1.0" in str(result.exception)


@pytest.mark.parametrize("at", [1, 2])
def test_a_run_that_is_there_already_stops_at_once(stopped: Path, at: int) -> None:
    result = run("--out", str(stopped), "--resume", "--stop-at", str(at), "--json")
    assert result.exit_code == 130
    assert f"--stop-at {at}: the run in {stopped} is at step 2 already" in result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["steps"], found["interrupted"]) == (2, True)
    assert run("--out", str(stopped), "--resume").exit_code == 0


def test_a_run_at_its_end_says_that_nothing_is_left(stopped: Path) -> None:
    run("--out", str(stopped), "--resume")
    before = (stopped / "events.jsonl").read_bytes()
    result = run("--out", str(stopped), "--resume")
    assert result.exit_code == 0
    assert "nothing is left to do" in result.stderr
    assert (stopped / "events.jsonl").read_bytes() == before


def test_a_budget_of_attackers_without_an_attack() -> None:
    result = run("--task", SMALL, "--peers", "4", "--byzantine", "1", "--steps", "2", "--json")
    assert result.exit_code == 0
    assert "nobody attacked" in result.stderr
    assert "still in" not in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["byzantine_active"] == 0
