"""What is kept of a run: events, transcript, checkpoints. All of it in one folder, or only the events in memory."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec
from torch import Tensor

from phalanx import events
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.memory import Epoch
from phalanx.events import Event, EventLog
from phalanx.training.checkpoints import Checkpoint, write_checkpoint
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import State, compute_state_digest

EVENTS = "events.jsonl"
TRANSCRIPT = "transcript.bin"
_HEADER = 8


class Recorder:
    """Takes down what happens. ``stop(step)`` says whether the run should be interrupted before ``step``."""

    def __init__(
        self,
        gradients: Gradients,
        *,
        steps: int,
        evaluate_every: int,
        checkpoint_every: int,
        out: Path | None = None,
        resume: bool = False,
        on_event: Callable[[Event], None] | None = None,
        stop: Callable[[int], bool] | None = None,
        timed: bool = False,
        holds_state: bool = True,
    ) -> None:
        self._holds_state = holds_state
        self._lock = _lock(out) if out is not None else None
        self._events: list[Event] = []
        self.state: State | None = None
        """Of the last checkpoint."""
        self.metric: float | None = None
        self.interrupted = False
        self._gradients, self._steps = gradients, steps
        self._evaluate_every, self._checkpoint_every = evaluate_every, checkpoint_every
        self._out, self._on_event = out, on_event
        self._stop = stop or (lambda step: False)
        self._stopping = False
        self._log: EventLog | None = None
        self._transcript: FileIO | None = None
        if out is not None:
            self._log = EventLog(out / EVENTS, resume=resume, timed=timed)
            self._transcript = _open_transcript(out / TRANSCRIPT)

    @property
    def events(self) -> list[Event]:
        """All that was taken down so far. Where there is a folder it is read from there: a long run has millions."""
        return self._events if self._out is None else events.read_events(self._out / EVENTS)

    @property
    def log_head(self) -> str | None:
        return self._log.head if self._log is not None else None

    def close(self) -> None:
        try:
            if self._transcript is not None:
                self._transcript.close()
            if self._log is not None:
                self._log.close()
            if self._lock is not None:
                self._lock.close()
        except OSError as error:
            raise WriteFailed(f"{self._out}: could not be written: {error.strerror or error}") from error

    def add(self, event: Event) -> None:
        if self._log is not None:
            try:
                self._log.add(event)
            except OSError as error:
                raise WriteFailed(f"{self._out}/{EVENTS}: could not be written: {error.strerror or error}") from error
        else:
            self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def write_transcript(self, epochs: Sequence[Epoch]) -> None:
        """The attempts of a step that is final: each with its length before it."""
        if self._transcript is None:
            return
        try:
            for epoch in epochs:
                data = msgspec.msgpack.encode(epoch)
                rest = memoryview(len(data).to_bytes(_HEADER, "little") + data)
                while rest:
                    rest = rest[self._transcript.write(rest) :]
        except OSError as error:
            raise WriteFailed(f"{self._out}/{TRANSCRIPT}: could not be written: {error.strerror or error}") from error

    def evaluate(self, step: int, parameters: Tensor) -> None:
        """Measure the model when it is time: after ``step`` steps."""
        if self.is_evaluation_due(step):
            self.add_metric(step, self._gradients.evaluate(parameters))

    def is_evaluation_due(self, step: int) -> bool:
        return step % self._evaluate_every == 0 or step >= self._steps

    def add_metric(self, step: int, metric: float) -> None:
        self.metric = metric
        self.add(events.Evaluated(step, metric))

    def wants_to_stop(self, step: int) -> bool:
        self._stopping = self._stopping or self._stop(step)
        return self._stopping

    def is_checkpoint_due(self, step: int) -> bool:
        return self.wants_to_stop(step) or (self._out is not None and step % self._checkpoint_every == 0)

    def release(self, checkpoint: Checkpoint) -> None:
        """Nothing is left to do: the run has been at its end before. It may have been killed before it said so."""
        self.state = checkpoint.states[checkpoint.step]
        told = self.events
        if not any(isinstance(event, events.RunFinished) for event in told):
            measured = [event.metric for event in told if isinstance(event, events.Evaluated)]
            digest = compute_state_digest(self.state).hex()
            self.add(events.RunFinished(checkpoint.step, measured[-1] if measured else None, digest))

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        step, state = checkpoint.step, checkpoint.states[checkpoint.step]
        if self._holds_state:
            self.state = state
        digest = compute_state_digest(state).hex()
        if self._out is not None:
            model = self._gradients.make_state_dict(state.parameters)
            folder = write_checkpoint(self._out, checkpoint, model)
            self.add(events.CheckpointWritten(step, folder.relative_to(self._out).as_posix(), digest))
        if step >= self._steps:
            self.add(events.RunFinished(step, self.metric, digest))
        elif self._stopping:
            self.interrupted = True
            self.add(events.Interrupted(step))


def _lock(out: Path) -> FileIO:
    """A hold on a run's folder, for as long as the file is open."""
    file = open(out / ".lock", "ab", buffering=0)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LocalError(f"{out}: another process works on this run; wait for it, or stop it") from None
    return file


def _open_transcript(path: Path) -> FileIO:
    """A transcript to go on with, without a record that was cut off in the middle."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115
    with open(path, "rb") as records:
        end = max((records.tell() for _ in _read_records(records)), default=0)
    file.truncate(end)
    return file


def read_transcript(path: Path) -> list[Epoch]:
    """All whole records of a transcript; one that was cut off in the middle ends it."""
    with open(path, "rb") as records:
        return [msgspec.msgpack.decode(data, type=Epoch) for data in _read_records(records)]


def _read_records(records: BinaryIO) -> Iterator[bytes]:
    while len(header := records.read(_HEADER)) == _HEADER:
        size = int.from_bytes(header, "little")
        data = records.read(size)
        if len(data) < size:
            return
        yield data
