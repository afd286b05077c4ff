"""The report's command makes the same run again."""

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli import app
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
        "--wire int8 --tau 0.4 --byzantine 1 --attack sign_flip --start 2",
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
