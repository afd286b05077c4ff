"""The event log of a run: the only input of progress bars, plots and report.

One event is one line of JSON. Every line names the hash of the bytes of the line before it, so that no line can be
changed, taken out, put in or moved without breaking the chain. What the events and their fields mean, and what the
chain does not show, is in ``docs/EVENTS.md``; a test holds the two together.

Two runs with the same seed write the same bytes: times of the wall clock are left out unless they are asked for.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Annotated, BinaryIO, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta, Struct

from phalanx.core import messages as m
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.envelope import compute_message_digest, open_body
from phalanx.core.errors import LocalError, Malformed
from phalanx.core.events import Banned as BanNote
from phalanx.core.justice import get_accused
from phalanx.core.messages import Phase, Rule, Signed
from phalanx.core.peer import compute_case_digest

FIRST = "0" * 64
"""What the first line names as the hash of the line before it."""
MAX_LINE = 1 << 24

Hex: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Count: TypeAlias = Annotated[int, Meta(ge=0)]

RULES: dict[Rule, tuple[str, str]] = {
    Rule.REPORT: ("V1 report", "what it reported of its gradient is not what its committed bytes give"),
    Rule.SUM: ("V2 sum", "its aggregate is out of balance: it is not the clipped mean of the parts it was sent"),
    Rule.NORMS: ("V3 norms", "its aggregate is far from most gradients, and recomputing it gives another"),
    Rule.GRADIENT: ("V4 gradient", "its gradient or report is not what its public batch gives when recomputed"),
    Rule.EQUIVOCATION: ("E1 equivocation", "it signed two different messages for one slot"),
    Rule.REVEAL: ("E2 reveal", "the share it revealed does not open its commitment"),
    Rule.OPENING: ("E3 opening", "the part it opened is not the one it committed to"),
    Rule.MALFORMED: ("E4 malformed", "it signed something outside the schema or its limits"),
    Rule.STATE: ("E5 state", "its state is not the one that the majority sealed"),
}
"""Each rule's name, as events carry it, and a sentence for people."""
_SENTENCES = dict(RULES.values())


def format_rule(rule: Rule) -> str:
    """A rule as events carry it: ``V4 gradient``."""
    return RULES[rule][0]


def explain_rule(name: str) -> str:
    """What breaking this rule means, in one sentence; nothing for a rule of a newer version."""
    return _SENTENCES.get(name, "")


# ---- The events


class _Event(Struct, frozen=True, tag=True, tag_field="type"):
    """What happened, in plain JSON. A number that is not finite is null, in memory as in the file."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and (type(value) is not float or not math.isfinite(value)):
                msgspec.structs.force_setattr(self, name, float(value) if math.isfinite(value) else None)


class RunStarted(_Event, frozen=True):
    """The first event: what runs, who takes part, and who will cheat."""

    run: Hex
    task: str
    peers: Count
    byzantine: Count
    attack: str | None
    start: Count | None
    every: Count | None
    defense: str
    steps: Count
    validators: Count
    seed: int
    size: Count
    metric_name: str
    higher_is_better: bool
    keys: list[Hex]
    attackers: list[Count]
    software: dict[str, str]
    number_bytes: Annotated[float, Meta(gt=0)] = 4
    clock: Literal["virtual", "wall"] = "virtual"


class Resumed(_Event, frozen=True):
    """The run goes on from a checkpoint. What the log says of later steps before this line was undone."""

    step: Count


class StepFinished(_Event, frozen=True):
    """A step is final."""

    step: Count
    attempt: Count
    members: Count
    loss: float | None
    tau: float | None
    bytes_sent: Count
    seconds: float | None
    state: Hex
    margin: int | None = None


class Evaluated(_Event, frozen=True):
    """The model was measured."""

    step: Count
    metric: float | None


class Banned(_Event, frozen=True):
    """A peer is out for ever, with the evidence."""

    step: Count
    offence_step: Count
    peer: Count
    key: Hex
    rule: str
    reason: str
    evidence: list[Hex]
    accuser: Count | None
    exhibits: list[str] = []
    votes: Count | None = None
    voters: Count | None = None


class Removed(_Event, frozen=True):
    """A peer is suspended: silent, late or at odds with others. It is back as soon as it shows that it is there."""

    step: Count
    peer: Count
    key: Hex
    reason: str


class Joined(_Event, frozen=True):
    """A peer became a member."""

    step: Count
    peer: Count
    key: Hex


class Left(_Event, frozen=True):
    """A member left because it wanted to."""

    step: Count
    peer: Count
    key: Hex


class SlowPathOpened(_Event, frozen=True):
    """Messages were missing or contradicted one another: the members agree the long way."""

    step: Count
    phase: str


class Halted(_Event, frozen=True):
    """The members cannot settle who is out: the run stands still rather than goes on with too few."""

    step: Count
    silent: list[Count]
    keys: list[Hex]
    allowed: Count


class Waiting(_Event, frozen=True):
    """Past its deadline a member still misses messages of others."""

    step: Count
    silent: list[Count]
    keys: list[Hex]


class WentOn(_Event, frozen=True):
    """The run, which had halted, moves again."""

    step: Count


class MarginLost(_Event, frozen=True):
    """Few more members may fall silent before the run waits for them."""

    step: Count
    missing: Count
    margin: Count | None = None


class CheckpointWritten(_Event, frozen=True):
    """The state is on disk, and the run can be resumed from it."""

    step: Count
    path: str
    state: Hex


class Interrupted(_Event, frozen=True):
    """The run was stopped from outside, in good order."""

    step: Count


class RunFinished(_Event, frozen=True):
    """The last step was checked by everybody."""

    step: Count
    metric: float | None
    state: Hex


Event: TypeAlias = (
    RunStarted
    | Resumed
    | StepFinished
    | Evaluated
    | Banned
    | Removed
    | Joined
    | Left
    | SlowPathOpened
    | Halted
    | Waiting
    | WentOn
    | MarginLost
    | CheckpointWritten
    | Interrupted
    | RunFinished
)


# ---- The file


class _Link(Struct, frozen=True):
    """What every line has, also one of a newer version: its type, and the hash of the line before it."""

    type: str
    previous: Hex


_TYPES = frozenset(kind.__name__ for kind in get_args(Event))
_LINKS = msgspec.json.Decoder(_Link)
_EVENTS: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def compute_line_hash(line: bytes) -> str:
    """The name of a line, its newline included."""
    return compute_digest("event log line", line).hex()


class EventLog:
    """A log that is being written: append-only, one whole line at a time."""

    def __init__(self, path: Path, *, resume: bool = False, timed: bool = False) -> None:
        """Begin a log at ``path``, or with ``resume`` go on with the one that is there.

        An existing file is never overwritten. One that is resumed is verified first; a last line that was cut off in
        the middle, as by a crash or a full disk, is dropped. With ``timed``, lines carry the time of the wall clock.
        """
        self._timed = timed
        self._end = FIRST, 0
        self._torn = False
        if not resume:
            try:
                self._file = open(path, "xb", buffering=0)  # noqa: SIM115
            except FileExistsError:
                raise LocalError(f"{path} exists and is not overwritten; resume its run, or choose another") from None
            return
        try:
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
        except FileNotFoundError:
            raise LocalError(f"{path} does not exist: there is nothing to resume; start the run anew") from None
        try:
            with open(path, "rb") as lines:
                _, head, size = _read(lines, path)
            self._end = head, size
            self._repair()
        except BaseException:
            self._file.close()
            raise

    @property
    def head(self) -> str:
        """The hash of the last line: who knows it can tell whether the log was cut short."""
        return self._end[0]

    def add(self, event: Event) -> None:
        """Write one event. After an ``OSError`` everything before it is still there, and it may be tried again."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds") if self._timed else None
        tail = msgspec.json.encode({"time": time, "previous": self.head})
        line = msgspec.json.encode(event)[:-1] + b"," + tail[1:] + b"\n"
        _EVENTS.decode(line)  # what could not be read back is a bug in the writer, and better found here
        if len(line) > MAX_LINE:
            raise ValueError(f"an event of {len(line)} bytes; readers take {MAX_LINE}")
        if self._torn:
            self._repair()
        self._torn = True
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._end = compute_line_hash(line), self._end[1] + len(line)  # in one go, whenever we are interrupted
        self._torn = False

    def _repair(self) -> None:
        """Drop what comes after the last whole line."""
        self._file.truncate(self._end[1])
        self._file.seek(self._end[1])

    def close(self) -> None:
        """Put the log on the disk for good. Closing twice is fine."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path, *, head: str | None = None) -> list[Event]:
    """All events of a log whose chain holds; otherwise :class:`LocalError` with the line where it breaks.

    A last line without its end is not there yet, and left out. Events of a newer version are skipped, their place in
    the chain verified like any other. Who knows the hash of the last line passes it as ``head``: then a log that was
    cut short is refused too.
    """
    try:
        with open(path, "rb") as lines:
            events, last, _ = _read(lines, path)
    except FileNotFoundError:
        raise LocalError(f"{path} does not exist; a run writes its events.jsonl into the directory of --out") from None
    if head is not None and head != last:
        raise LocalError(f"{path} does not end in line {head}: lines at its end are missing or more; get it anew")
    return events


class LogFollower:
    """Reads a log that another process is writing, again and again, without looking at its chain."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def read(self) -> list[Event]:
        """The events of the whole lines that came since the last call; none if there is no file yet."""
        try:
            with open(self._path, "rb") as lines:
                lines.seek(self._at)
                data = lines.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [_EVENTS.decode(line) for line in whole.splitlines() if _LINKS.decode(line).type in _TYPES]


def _read(lines: BinaryIO, path: Path) -> tuple[list[Event], str, int]:
    """The events, the hash of the last whole line, and where it ends."""
    events: list[Event] = []
    previous, size, number = FIRST, 0, 0
    while line := lines.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise _broken(path, number, f"is longer than {MAX_LINE} bytes")
        if not line.endswith(b"\n"):
            break
        try:
            link = _LINKS.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _broken(path, number, f"is no event ({error})") from None
        if link.previous != previous:
            raise _broken(
                path, number, "does not follow the line before it: one of the two was changed, or some between"
            )
        if link.type in _TYPES:
            try:
                events.append(_EVENTS.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _broken(path, number, f"is no {link.type} event ({error})") from None
        previous = compute_line_hash(line)
        size += len(line)
    return events, previous, size


def _broken(path: Path, number: int, complaint: str) -> LocalError:
    return LocalError(
        f"{path}: line {number} {complaint}. The log was altered after it was written: "
        f"get an unaltered copy, or run again"
    )


# ---- From what a peer says to what the log holds


def make_banned(note: BanNote, peers: MutableMapping[bytes, int]) -> Banned:
    """The log's event for a ban that a peer tells of. ``peers`` gives every key's index in the run.

    A key that was never a member, but cheated on probation, gets the next one.

    The messages that the case rests on come first, then those of the trial: who accused, and who voted how.
    """
    charge = [] if note.case is None else [x for x in _list_values(note.case) if isinstance(x, Signed)]
    evidence = {compute_message_digest(message).hex(): message for message in (*charge, *note.evidence)}
    ballots: dict[bytes, m.Verdict] = {}
    accusers: set[int] = set()
    if note.case is not None:
        case = compute_case_digest(note.case)
        for message in note.evidence:
            body = _open(message)
            if isinstance(body, m.Vote) and message.sender != get_accused(note.case):
                for ballot in body.ballots:
                    if ballot.case == case:
                        ballots[message.sender] = ballot.verdict
            elif isinstance(body, m.Confirm) and case in body.accusations and message.sender != note.key:
                accusers |= {peers[message.sender]} if message.sender in peers else set()
    return Banned(
        step=note.at,
        offence_step=note.step,
        peer=peers.setdefault(note.key, len(peers)),
        key=note.key.hex(),
        rule=format_rule(note.rule),
        reason=_explain(note, peers, bool(ballots)),
        evidence=list(evidence),
        accuser=min(accusers, default=None),
        exhibits=[_describe(message, peers) for message in evidence.values()],
        votes=max(Counter(ballots.values()).values()) if ballots else None,
        voters=len(ballots) or None,
    )


def _explain(note: BanNote, peers: Mapping[bytes, int], voted: bool) -> str:
    """The reason as a sentence that needs no other: what the vote was on, and whom an accusation was about."""
    if note.case is None or not voted:
        return note.reason
    accused = get_accused(note.case)
    if accused == note.key:
        return f"{RULES[note.rule][1]}; {note.reason}"
    who = f"peer {peers[accused]}" if accused in peers else f"key {accused.hex()}"
    return f"{note.reason} ({who} was accused)"


def _list_values(case: m.Accusation | m.Proof) -> list[object]:
    return [getattr(case, name) for name in case.__struct_fields__]


def _open(message: Signed) -> m.Body | None:
    try:
        return open_body(message)
    except Malformed:
        return None


def _describe(message: Signed, peers: Mapping[bytes, int]) -> str:
    """``COMMIT of step 56 signed by peer 3``."""
    what = Phase(message.phase).name if message.domain is Domain.AGREED else message.domain.value
    who = f"peer {peers[message.sender]}" if message.sender in peers else f"key {message.sender.hex()}"
    return f"{what} of step {message.step} signed by {who}"
