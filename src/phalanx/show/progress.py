"""Progress of a run on stderr, from its events: a live bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from phalanx.events import (
    Banned,
    Evaluated,
    Event,
    Halted,
    Interrupted,
    Joined,
    Left,
    MarginLost,
    Removed,
    Resumed,
    RunFinished,
    RunStarted,
    StepFinished,
    Waiting,
    WentOn,
)
from phalanx.show.story import (
    clean,
    describe_attack,
    describe_ban,
    describe_halt,
    describe_margin,
    format_metric,
    format_peer,
    format_peers,
    name_metric,
)

_LINES = 10  # of a run, apart from bans, where there is no terminal
_STRETCH = 50  # steps between lines if nobody said how many there will be


class Track:
    """What is known of one run so far, as one line of text."""

    def __init__(self, name: str, say: Callable[[str, str], None], refresh: Callable[[Track], None]) -> None:
        self.name = name
        self.started: RunStarted | None = None
        self.done = 0
        self.last: StepFinished | None = None
        self.metric: str | None = None
        self.members: int | None = None
        self.banned: set[int] = set()
        self.finished = False
        self.halted = False
        self._said = 0
        self._say = say
        self._refresh = refresh

    @property
    def steps(self) -> int:
        return self.started.steps if self.started is not None else 0

    @property
    def numbers(self) -> str:
        """Loss, metric, members and bans, and whether all stands still."""
        words = []
        if self.last is not None and self.last.loss is not None:
            words.append(f"loss {self.last.loss:.4g}")
        elif self.last is not None and not (self.started is not None and self.started.clock == "wall"):
            words.append("loss not a number")  # where peers tell their own story, who validates has none
        if self.metric is not None and self.started is not None:
            words.append(f"{name_metric(self.started)} {self.metric}")
        if self.members is not None:
            words.append(f"{self.members} members")
        if self.last is not None and self.last.margin is not None:
            words.append(f"{max(self.last.margin, 0)} may be away")
        words.append(f"{len(self.banned)} banned")
        if self.halted:
            words.append("halted")
        return "  ".join(words)

    def catch_up(self, events: Iterable[Event]) -> None:
        """Take events of the past in silence."""
        say, refresh = self._say, self._refresh
        self._say, self._refresh = lambda text, style: None, lambda track: None
        for event in events:
            self.on_event(event)
        self._say, self._refresh = say, refresh
        self.finished = False
        self.is_due()

    def on_event(self, event: Event) -> None:
        """Take an event; say what cannot wait, and show the rest in the bar."""
        if isinstance(event, RunStarted):
            self.started = event
            self.members = event.peers
            self.tell(f"{clean(event.task, 60)}: {describe_attack(event)}; defense: {clean(event.defense, 60)}")
        elif isinstance(event, StepFinished):
            self.done, self.last, self.members, self.halted = event.step + 1, event, event.members, False
        elif isinstance(event, Evaluated) and self.started is not None:
            self.metric = format_metric(self.started, event.metric)
        elif isinstance(event, Banned):
            self.banned.add(event.peer)
            self.tell(describe_ban(event), "bold red")
        elif isinstance(event, Removed):
            self.tell(
                f"step {event.step}: {format_peer(event.peer, event.key)} removed: {clean(event.reason)}", "yellow"
            )
        elif isinstance(event, Joined):
            self.tell(f"step {event.step}: {format_peer(event.peer, event.key)} joined")
        elif isinstance(event, Left):
            self.tell(f"step {event.step}: {format_peer(event.peer, event.key)} left")
        elif isinstance(event, Halted):
            self.halted = True
            again = "they are back" if len(event.silent) > event.allowed else "they come"
            self.tell(f"step {event.step}: the run halts: {describe_halt(event)}; it goes on when {again}", "yellow")
        elif isinstance(event, WentOn):
            self.halted = False
            self.tell(f"step {event.step}: the run goes on")
        elif isinstance(event, MarginLost):
            self.tell(f"step {event.step}: {describe_margin(event)}", "yellow")
        elif isinstance(event, Waiting):
            self.tell(f"step {event.step}: waiting for {format_peers(event.silent)}", "yellow")
        elif isinstance(event, Resumed):
            self.done = event.step
            self.tell(f"resumed at step {event.step}")
        elif isinstance(event, Interrupted):
            self.tell(f"interrupted at step {event.step}", "yellow")
        elif isinstance(event, RunFinished):
            self.finished = True
            if self.started is not None:
                self.metric = format_metric(self.started, event.metric)
        self._refresh(self)

    def is_due(self) -> bool:
        """Whether a tenth of the run has passed since the last line."""
        tenth = self.done * _LINES // self.steps if self.steps else self.done // _STRETCH
        if self.finished or tenth != self._said:
            self._said = tenth
            return True
        return False

    def tell(self, text: str, style: str = "") -> None:
        self._say(f"{self.name}: {text}" if self.name else text, style)


class _Board:
    """The bars of one or more runs, or their lines."""

    def __init__(self, names: tuple[str, ...], console: Console | None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=self._console,
            disable=not self._live,
        )
        self.tracks = tuple(Track(name, self._say, self._refresh) for name in names)
        self._tasks = {id(track): self._bars.add_task(track.name, total=None, text="") for track in self.tracks}

    def open(self) -> None:
        self._bars.start()

    def close(self) -> None:
        self._bars.stop()

    def _say(self, text: str, style: str) -> None:
        # A file gets whole lines, to search in; a terminal breaks them between words.
        self._console.print(Text(text, style=style if self._live else ""), soft_wrap=not self._live)

    def _refresh(self, track: Track) -> None:
        done = f"step {track.done}" + (f"/{track.steps}" if track.steps else "")
        if self._live:
            task = self._tasks[id(track)]
            completed = min(track.done, track.steps or track.done)
            self._bars.update(task, total=track.steps or None, completed=completed, text=f"{done}  {track.numbers}")
        elif track.is_due():
            track.tell(f"{'finished: ' if track.finished else ''}{done}  {track.numbers}")


class Progress:
    """One run: ``with Progress() as progress``, then every event to :meth:`on_event`."""

    def __init__(self, console: Console | None = None) -> None:
        self._board = _Board(("",), console)

    def on_event(self, event: Event) -> None:
        self._board.tracks[0].on_event(event)

    def catch_up(self, events: Iterable[Event]) -> None:
        """Take what was told before, as of a run that is resumed, without telling it again."""
        self._board.tracks[0].catch_up(events)

    def __enter__(self) -> Progress:
        self._board.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.close()


class Duel:
    """Two runs side by side: give each one's events to ``unprotected.on_event`` and ``protected.on_event``."""

    def __init__(
        self, unprotected: str = "unprotected", protected: str = "protected", console: Console | None = None
    ) -> None:
        self._board = _Board((unprotected, protected), console)
        self.unprotected, self.protected = self._board.tracks

    def __enter__(self) -> Duel:
        self._board.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._board.close()
