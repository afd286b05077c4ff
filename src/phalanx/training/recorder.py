"""What is kept of a run: events, transcript, checkpoints. All of it in one folder, or only the events in memory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import msgspec
from torch import Tensor

from phalanx import events
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.memory import Epoch
from phalanx.core.messages import Signed
from phalanx.events import Event, EventLog
from phalanx.training.checkpoints import FOLDER, Checkpoint, find_latest, write_checkpoint
from phalanx.training.gradients import Gradients
from phalanx.training.optimizers import State, compute_state_digest

EVENTS = "events.jsonl"
TRANSCRIPT = "transcript.bin"
_HEADER = 8
_AT_ONCE = 1 << 20


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
        self.said: dict[bytes, Signed] = {}
        """The last message of each member in the transcript as it was found."""
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
            try:
                require_records(out)
                self._log = _open_log(out / EVENTS, resume, timed)
                self._transcript, self.said = _open_transcript(out / TRANSCRIPT)
            except BaseException:
                self.close()
                raise

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

    def require_run(self, run: bytes) -> None:
        """What was found in the folder is of this run."""
        told = self.events
        strange = [EVENTS] if told and getattr(told[0], "run", None) != run.hex() else []
        strange += [TRANSCRIPT] if any(message.run != run for message in self.said.values()) else []
        if strange and self._out is not None:
            raise LocalError(
                f"{self._out / strange[0]}: of another run; put this run's own back, or choose another folder"
            )

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


# ---- What is there already


def require_records(out: Path, past: str | None = None) -> None:
    """Log and transcript begin together, before anything happens: where there is a past, both are there."""
    past = past or find_past(out)
    for name in (EVENTS, TRANSCRIPT):
        if past is not None and not os.path.lexists(out / name):
            raise LocalError(
                f"{out / name}: missing, though there is {past}; put it back, or go on without what it held after: "
                f"touch {out / name}"
            )


def find_past(out: Path) -> str | None:
    """What in a folder shows that a run was here, in words; None if nothing does."""
    if find_latest(out) is not None:
        return f"a checkpoint in {out / FOLDER}"
    held = (out / name for name in (EVENTS, TRANSCRIPT))
    return next((f"something in {path}" for path in held if path.is_file() and path.stat().st_size), None)


def _lock(out: Path) -> FileIO:
    """A hold on a run's folder, for as long as the file is open."""
    file = _open(out / ".lock", "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LocalError(f"{out}: another process works on this run; wait for it, or stop it") from None
    return file


def _open(path: Path, mode: str) -> FileIO:
    try:
        file = FileIO(path, mode.replace("b", ""))
    except OSError as error:
        raise _make_unusable(path, error) from None
    return file


def _make_unusable(path: Path, error: OSError) -> LocalError:
    return LocalError(
        f"{path}: {error.strerror or error}; expected a file that this user may read and write: "
        "put it right, or choose another folder"
    )


def _open_log(path: Path, resume: bool, timed: bool) -> EventLog:
    """The event log of a run, to go on with or new."""
    try:
        if resume:
            _require_log(path)
        return EventLog(path, resume=resume, timed=timed)
    except OSError as error:
        raise _make_unusable(path, error) from None


def _require_log(path: Path) -> None:
    """What is cut off at the end of a log is dropped; something else altogether should not be."""
    with open(path, "rb") as lines:
        if lines.read(1) not in (b"", b"{"):
            raise LocalError(f"{path}: not an event log; put the run's own back, or choose another folder")


def _open_transcript(path: Path) -> tuple[FileIO, dict[bytes, Signed]]:
    """A transcript to go on with, without a record that was cut off in the middle, and each member's last message."""
    file, end = _open(path, "ab"), 0
    said: dict[bytes, Signed] = {}
    try:
        with open(path, "rb") as records:
            for epoch, end in _read_epochs(path, records):  # noqa: B007
                for message in (message for phase in epoch.said for message in phase.messages):
                    if message.sender not in said or said[message.sender].height <= message.height:
                        said[message.sender] = message
        file.truncate(end)
    except BaseException:
        file.close()
        raise
    return file, said


def read_transcript(path: Path) -> list[Epoch]:
    """All whole records of a transcript; one that was cut off in the middle ends it."""
    try:
        with open(path, "rb") as records:
            return [epoch for epoch, _ in _read_epochs(path, records)]
    except OSError as error:
        raise LocalError(f"{path}: {error.strerror or error}; expected the transcript of a run") from None


def _read_epochs(path: Path, records: BinaryIO) -> Iterator[tuple[Epoch, int]]:
    """The records, and where each ends.

    A kill cuts the last one off, and a power cut may leave zeros in its place. Anything else is damage, a length
    included: whatever follows would be taken for cut off, and lost.
    """
    size, at = os.fstat(records.fileno()).st_size, 0
    while at + _HEADER <= size:
        length = int.from_bytes(records.read(_HEADER), "little")
        start = at + _HEADER
        data = records.read(min(length, size - start))
        try:
            epoch = msgspec.msgpack.decode(data, type=Epoch)
        except msgspec.ValidationError:
            raise _make_damaged(path, at) from None
        except msgspec.DecodeError as error:
            cut_off = length > size - start and "truncated" in str(error)
            if cut_off or (length == 0 and _has_only_zeros(records)):
                return
            raise _make_damaged(path, at) from None
        if length > size - start:  # it is whole, so this is not its length
            raise _make_damaged(path, at)
        at = start + length
        yield epoch, at


def _has_only_zeros(rest: BinaryIO) -> bool:
    while data := rest.read(_AT_ONCE):
        if data.strip(b"\0"):
            return False
    return True


def _make_damaged(path: Path, at: int) -> LocalError:
    return LocalError(
        f"{path}: damaged at byte {at}, where the record of an attempt should be; put an unaltered copy in its place, "
        f"or give up what follows with: truncate -s {at} {path}"
    )
