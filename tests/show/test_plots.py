"""Pictures: written, not blank, with labels that do not collide, and without touching matplotlib's global state."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.image import imread
from stories import make_ban, make_run, make_start

from phalanx.events import Event
from phalanx.show import plots
from phalanx.show.plots import DARK, LIGHT, plot_duel, plot_run
from phalanx.show.story import tell


def read_share_of_ink(path: Path) -> float:
    """The share of pixels that differ from the corner's."""
    pixels = imread(path)
    return float(np.mean(np.any(pixels != pixels[0, 0], axis=-1)))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_pictures_are_written_and_not_blank(tmp_path: Path, theme: plots.Theme) -> None:
    before = dict(matplotlib.rcParams), matplotlib.get_backend()
    plot_run(make_run(), tmp_path / "run.png", theme)
    plot_duel(make_run(bans=(), collapse=20), make_run(), tmp_path / "duel.png", theme)
    for name in ("run.png", "duel.png"):
        assert 0.01 < read_share_of_ink(tmp_path / name) < 0.5
    assert (dict(matplotlib.rcParams), matplotlib.get_backend()) == before


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_a_log_that_has_just_begun_can_be_drawn(tmp_path: Path, count: int) -> None:
    plot_run(make_run()[:count], tmp_path / "run.png")
    plot_duel(make_run()[:count], make_run()[:count], tmp_path / "duel.png")


def test_hostile_and_foreign_text_is_drawn_as_it_is(tmp_path: Path) -> None:
    hostile = "$\\frac{1$ 模型 \x1b\n_"
    started = make_start(task=hostile, attack=hostile, defense=hostile, metric_name=hostile)
    events = make_run(started, (make_ban(1, 30, hostile),))
    plot_run(events, tmp_path / "run.png")
    plot_duel(events, events, tmp_path / "duel.png")


def test_losses_that_overflow_or_are_missing_leave_a_gap(tmp_path: Path) -> None:
    plot_run(make_run(bans=(), collapse=20), tmp_path / "run.png")
    nothing: list[Event] = [make_start(steps=0)]
    plot_run(nothing, tmp_path / "nothing.png")


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.part", b"\x89PNG")])
def test_the_suffix_chooses_the_format_and_a_picture_is_the_rule(tmp_path: Path, name: str, magic: bytes) -> None:
    plot_run(make_run(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(magic)


@pytest.mark.parametrize("steps", [tuple(range(20, 60, 2)), (98, 99, 99, 99), (21, 21, 21), tuple(range(100)), (0, 99)])
def test_labels_of_bans_do_not_collide(steps: tuple[int, ...]) -> None:
    bans = [make_ban(place % 60, step) for place, step in enumerate(steps)]
    labels = plots._label(tell([make_start(64), *bans]), 100)
    assert not labels[0].is_ban
    lanes = plots._choose_lanes(labels, 100)
    spans = []
    for label in labels:
        width = plots._text_width(label.text, 100)
        left = plots._is_left(label, 100)
        spans.append((label.step - width, label.step) if left else (label.step, label.step + width))
    for (a, first), (b, second) in itertools.combinations(zip(lanes, spans, strict=True), 2):
        assert a != b or first[1] <= second[0] or second[1] <= first[0]


def test_bans_too_close_to_tell_apart_share_a_label() -> None:
    labels = plots._label_bans([make_ban(1, 30), make_ban(2, 30, "E1 equivocation"), make_ban(3, 60)], 100)
    assert [(label.step, label.text) for label in labels] == [(30, "peers 1, 2: E1, V4"), (60, "peer 3: V4 gradient")]
