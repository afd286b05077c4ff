"""Pictures of a run, from its events, fit for a paper. No global state of matplotlib is touched."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from phalanx.events import Banned, Event
from phalanx.show.story import (
    Story,
    clean,
    describe_attack,
    describe_end,
    format_metric,
    format_peers,
    name_metric,
    tell,
)

# Okabe and Ito's colours, which people who see few colours can tell apart; lines also differ in their dashes.
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_DPI = 160
_TEXT, _SMALL, _TITLE = 15.0, 13.0, 17.0
_WIDE = 11.0  # inches
_CLOSE = 0.012  # of the axis: bans nearer than this share a label
_WIDE_RANGE = 50.0  # from here on, a loss is shown on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Theme:
    paper: str
    ink: str
    faint: str
    protected: str = _BLUE
    unprotected: str = _ORANGE


LIGHT = Theme("#ffffff", "#1a1a1a", "#8a8a8a")
DARK = Theme("#16181c", "#e8e8e8", "#8d939c", protected="#56B4E9", unprotected="#E69F00")


def plot_run(events: Iterable[Event], path: Path | IO[bytes], theme: Theme = LIGHT) -> None:
    """One run: metric, bans, loss and members over steps."""
    story = tell(events)
    canvas = _Canvas(theme, story.started.steps, [3.2, None, 2.0, 1.3], _label(story, story.started.steps))
    metric, bans, loss, members = canvas.axes
    _draw_metric(metric, story, theme.protected, "-", None)
    metric.set_ylabel(_plain(name_metric(story.started)), fontsize=_TEXT, parse_math=False)
    steps = sorted(story.steps)
    losses = [_number(story.steps[step].loss) for step in steps]
    loss.plot([step + 1 for step in steps], losses, color=theme.protected, linewidth=1.8)
    _set_loss_axis(loss, losses)
    members.step([step + 1 for step in steps], [story.steps[s].members for s in steps], color=_GREEN, linewidth=2.2)
    members.set_ylabel("members", fontsize=_TEXT)
    members.set_ylim(0, max([story.started.peers, *(x.members for x in story.steps.values())]) * 1.15)
    members.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    canvas.mark(bans, (metric, loss, members))
    canvas.finish(f"{describe_attack(story.started)}:", describe_end(story), path)


def plot_duel(
    unprotected: Iterable[Event], protected: Iterable[Event], path: Path | IO[bytes], theme: Theme = LIGHT
) -> None:
    """The same attack twice: what it does to a run without protection, and to one with it."""
    bare, safe = tell(unprotected), tell(protected)
    steps = max(bare.started.steps, safe.started.steps)
    canvas = _Canvas(theme, steps, [4.6, None], _label(safe, steps))
    metric, bans = canvas.axes
    _draw_metric(metric, safe, theme.protected, "-", f"protected ({safe.started.defense})")
    _draw_metric(metric, bare, theme.unprotected, (0, (4, 1.5)), f"unprotected ({bare.started.defense})")
    metric.set_ylabel(_shorten(safe.started.metric_name, 24), fontsize=_TEXT, parse_math=False)
    canvas.mark(bans, (metric,))
    canvas.add_legend(metric)
    name = _shorten(safe.started.metric_name, 24)
    finding = (
        f"{name} {format_metric(bare.started, bare.final_metric)} unprotected, "
        f"{format_metric(safe.started, safe.final_metric)} protected"
    )
    caught = (
        f" ({len(safe.caught)} of {len(safe.started.attackers)} attackers banned)" if safe.started.attackers else ""
    )
    canvas.finish(f"{describe_attack(safe.started)}:", finding + caught, path)


@dataclass(frozen=True, slots=True)
class _Label:
    """Bans at almost one step, or the beginning of the attack."""

    step: int
    text: str
    is_ban: bool = True


def _label(story: Story, steps: int) -> list[_Label]:
    """The beginning of the attack, if it begins, and all bans."""
    started = story.started
    labels = _label_bans(story.bans, steps)
    if started.attack is not None and started.byzantine and started.start is not None and started.start < steps:
        labels.insert(0, _Label(started.start, f"attack begins: {_shorten(started.attack, 28)}", is_ban=False))
    return labels


def _label_bans(bans: Sequence[Banned], steps: int) -> list[_Label]:
    """One label for bans that are too close to tell apart."""
    groups: list[list[Banned]] = []
    for ban in sorted(bans, key=lambda ban: ban.step):
        if groups and ban.step - groups[-1][0].step <= _CLOSE * steps:
            groups[-1].append(ban)
        else:
            groups.append([ban])
    return [_Label(group[0].step, f"{format_peers(x.peer for x in group)}: {_name_rules(group)}") for group in groups]


def _name_rules(bans: Sequence[Banned]) -> str:
    """The rule with its name; of several, only the ids."""
    rules = sorted({_shorten(ban.rule, 24) for ban in bans})
    return rules[0] if len(rules) == 1 else _shorten(", ".join(rule.split(" ")[0] for rule in rules), 24)


class _Canvas:
    """Axes above one another that share the steps; the one without a height of its own is for bans."""

    def __init__(self, theme: Theme, steps: int, heights: Sequence[float | None], labels: list[_Label]) -> None:
        self._theme, self._steps, self._labels = theme, max(steps, 1), labels
        self._lanes = _choose_lanes(labels, self._steps)
        strip = 0.34 * (max(self._lanes, default=0) + 1) + 0.12
        ratios = [strip if height is None else height for height in heights]
        self.figure = Figure(figsize=(_WIDE, sum(ratios) + 1.9), dpi=_DPI, facecolor=theme.paper, layout="constrained")
        FigureCanvasAgg(self.figure)
        self.axes: list[Axes] = list(
            self.figure.subplots(len(ratios), 1, sharex=True, gridspec_kw={"height_ratios": ratios, "hspace": 0.0})
        )
        for axes, height in zip(self.axes, heights, strict=True):
            self._dress(axes, is_strip=height is None)
        self.axes[-1].set_xlim(0, self._steps)
        last = self.axes[-1]
        last.tick_params(axis="x", bottom=True, labelbottom=True)
        last.set_xlabel("step", fontsize=_TEXT, color=theme.ink)
        last.xaxis.set_major_locator(MaxNLocator(10, integer=True, steps=[1, 2, 5, 10]))

    def _dress(self, axes: Axes, is_strip: bool) -> None:
        theme = self._theme
        axes.set_facecolor(theme.paper)
        axes.tick_params(labelsize=_SMALL, colors=theme.ink, bottom=False, labelbottom=False)
        axes.yaxis.label.set_color(theme.ink)
        for side, spine in axes.spines.items():
            spine.set_color(theme.faint)
            spine.set_visible(side in ("left", "bottom") and not is_strip)
        if is_strip:
            axes.set_yticks([])
            axes.set_ylim(-max(self._lanes, default=0) - 0.75, 0.75)
            name = "bans" if any(label.is_ban for label in self._labels) else "no bans"
            axes.set_ylabel(name, fontsize=_TEXT, color=theme.ink, rotation=0, ha="right", va="center")
        else:
            axes.grid(axis="y", color=theme.faint, alpha=0.25, linewidth=0.8)
            axes.set_axisbelow(True)

    def mark(self, strip: Axes, others: Sequence[Axes]) -> None:
        """A line through every axis at each label's step; in the strip, the label in its lane."""
        for label, lane in zip(self._labels, self._lanes, strict=True):
            color, dashes = (_PURPLE, "-") if label.is_ban else (self._theme.ink, (0, (1, 1.2)))
            for axes in others:
                axes.axvline(label.step, color=color, linestyle=dashes, linewidth=1.3, alpha=0.8, zorder=1)
            strip.plot([label.step] * 2, [0.75, -lane], color=color, linestyle=dashes, linewidth=1.3, alpha=0.8)
            marker = "x" if label.is_ban else ">"
            strip.plot([label.step], [-lane], marker=marker, color=color, markersize=8, markeredgewidth=2.0)
            left = _is_left(label, self._steps)
            strip.annotate(
                label.text,
                (label.step, -lane),
                xytext=(-9 if left else 9, 0),
                textcoords="offset points",
                ha="right" if left else "left",
                va="center",
                fontsize=_SMALL,
                color=self._theme.ink,
                annotation_clip=False,
                parse_math=False,
                bbox={"facecolor": self._theme.paper, "edgecolor": "none", "pad": 0.5},
            )

    def add_legend(self, axes: Axes) -> None:
        legend = axes.legend(loc="center right", fontsize=_TEXT, frameon=True, framealpha=0.85)
        legend.get_frame().set_facecolor(self._theme.paper)
        legend.get_frame().set_edgecolor("none")
        for text in legend.get_texts():
            text.set_color(self._theme.ink)
            text.set_parse_math(False)

    def finish(self, first: str, second: str, path: Path | IO[bytes]) -> None:
        """The finding as the title, in two lines; then the file."""
        title = f"{_plain(first)}\n{_plain(second)}"
        text = self.figure.suptitle(title, fontsize=_TITLE, color=self._theme.ink, x=0.02, ha="left", weight="bold")
        text.set_parse_math(False)
        kind = path.suffix[1:].lower() if isinstance(path, Path) else ""
        self.figure.savefig(path, format=kind if kind in ("svg", "pdf") else "png", facecolor=self._theme.paper)


def _text_width(text: str, steps: int) -> float:
    """About how many steps wide a label is: letters of this size take 0.1 inch each."""
    inches = 0.108 * len(text) + 0.3
    return inches / (_WIDE - 1.6) * steps


def _is_left(label: _Label, steps: int) -> bool:
    """Whether the label stands left of its tick, since it would leave the picture on the right."""
    return label.step + _text_width(label.text, steps) > steps


def _choose_lanes(labels: Sequence[_Label], steps: int) -> list[int]:
    """For every label the first lane where it covers no other label, and if it can be no tick that goes further down.

    Those that stand right of their ticks are placed from the right, so that the ticks of the rest pass left of them.
    """
    left = [_is_left(label, steps) for label in labels]
    order = sorted(range(len(labels)), key=lambda k: (left[k], labels[k].step if left[k] else -labels[k].step))
    lanes: dict[int, int] = {}
    spans: dict[int, tuple[float, float]] = {}
    for k in order:
        step, width = labels[k].step, _text_width(labels[k].text, steps)
        low, high = spans[k] = (step - width, step) if left[k] else (step, step + width)
        taken = {lanes[o] for o in lanes if low < spans[o][1] and spans[o][0] < high}
        crossed = {lane for o in lanes if low < labels[o].step < high for lane in range(lanes[o])}
        free = [lane for lane in range(len(labels)) if lane not in taken]
        lanes[k] = next((lane for lane in free if lane not in crossed), free[0])
    return [lanes[k] for k in range(len(labels))]


def _draw_metric(axes: Axes, story: Story, color: str, dashes: object, label: str | None) -> None:
    steps = sorted(story.metrics)
    values = [_number(story.metrics[step]) for step in steps]
    axes.plot(
        steps,
        values,
        color=color,
        linestyle=dashes,
        linewidth=2.6,
        label=_plain(label) if label is not None else None,
        marker="o" if len(steps) <= 30 else None,
        markersize=4,
    )
    if "accuracy" in story.started.metric_name.lower() and all(0 <= x <= 1 for x in values if math.isfinite(x)):
        axes.set_ylim(0, 1.03)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f}%"))
    if not steps:
        axes.text(0.5, 0.5, "not evaluated yet", transform=axes.transAxes, ha="center", fontsize=_TEXT)


def _set_loss_axis(axes: Axes, losses: Sequence[float]) -> None:
    axes.set_ylabel("loss", fontsize=_TEXT)
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite and min(finite) > 0 and max(finite) > _WIDE_RANGE * min(finite):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _plain(text: str) -> str:
    """Letters that the font has: a missing one would be a warning and a box."""
    return "".join(letter if " " <= letter <= "~" or "\xa1" <= letter <= "\xff" else "?" for letter in text)


def _shorten(text: str, limit: int) -> str:
    return _plain(clean(text, limit))
