"""The event log: what is written comes back, whatever was altered is found, and the documented schema is the real."""

from __future__ import annotations

import errno
import json
import math
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from phalanx import events as module
from phalanx.core import events as notes
from phalanx.core.envelope import compute_message_digest, seal
from phalanx.core.errors import LocalError
from phalanx.core.messages import NOTHING, Accusation, Ballot, Commit, Confirm, Equivocation, Phase, Rule, Verdict, Vote
from phalanx.core.peer import compute_case_digest
from phalanx.events import (
    FIRST,
    RULES,
    Banned,
    CheckpointWritten,
    Evaluated,
    Event,
    EventLog,
    Halted,
    Interrupted,
    Joined,
    Left,
    MarginLost,
    Removed,
    Resumed,
    RunFinished,
    RunStarted,
    SlowPathOpened,
    StepFinished,
    Waiting,
    WentOn,
    compute_line_hash,
    explain_rule,
    format_rule,
    make_banned,
    read_events,
)
from phalanx.network.ideal import make_signers

KEY, OTHER, DIGEST = "01" * 32, "02" * 32, "ab" * 32
ALL: list[Event] = [
    RunStarted(
        run=DIGEST,
        task="digits",
        peers=2,
        byzantine=1,
        attack="sign_flip",
        start=3,
        every=1,
        defense="phalanx",
        steps=10,
        validators=1,
        seed=-5,
        size=100,
        metric_name="accuracy",
        higher_is_better=True,
        keys=[KEY, OTHER],
        attackers=[1],
        software={"phalanx": "0.1.0"},
    ),
    Evaluated(0, 0.1),
    StepFinished(0, 0, 2, 2.25, None, 1600, 1.5, DIGEST),
    StepFinished(1, 0, 2, 2.25, None, 1600, 1.5, DIGEST, 3),
    SlowPathOpened(1, "COMMIT"),
    Banned(1, 0, 1, OTHER, "V4 gradient", "wrong", [DIGEST], 0, ["COMMIT of step 0 signed by peer 1"], 3, 4),
    Removed(1, 0, KEY, "silent"),
    Waiting(1, [1], [OTHER]),
    Halted(1, [0, 1], [KEY, OTHER], 1),
    WentOn(1),
    Joined(2, 2, "03" * 32),
    Left(3, 2, "03" * 32),
    MarginLost(3, 1),
    MarginLost(3, 0, 1),
    CheckpointWritten(4, "checkpoints/4", DIGEST),
    Interrupted(4),
    Resumed(4),
    RunFinished(10, 0.9, DIGEST),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def write(path: Path, events: list[Event] = ALL, **options: bool) -> str:
    with EventLog(path, **options) as log:
        for event in events:
            log.add(event)
        return log.head


# ---- What is written comes back


def test_every_event_comes_back_as_it_was(path: Path) -> None:
    assert {type(event) for event in ALL} == set(get_args(Event))
    write(path)
    assert read_events(path) == ALL


def test_a_line_is_plain_json_that_names_the_line_before(path: Path) -> None:
    head = write(path)
    previous = FIRST
    for line, event in zip(path.read_bytes().splitlines(keepends=True), ALL, strict=True):
        values = json.loads(line)
        names = [field.name for field in msgspec.structs.fields(event)]
        assert list(values) == ["type", *names, "time", "previous"]
        assert (values["type"], values["previous"], values["time"]) == (type(event).__name__, previous, None)
        previous = compute_line_hash(line)
    assert previous == head


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_null_in_memory_and_in_the_file(path: Path, value: float) -> None:
    event = StepFinished(0, 0, 2, value, value, 0, value, DIGEST)
    assert event.loss is None
    write(path, [event, Evaluated(1, value), RunFinished(1, value, DIGEST)])
    assert read_events(path) == [event, Evaluated(1, None), RunFinished(1, None, DIGEST)]
    assert not re.search(rb"nan|inf\b|Infinity", path.read_bytes(), re.IGNORECASE)


def test_numbers_of_numpy_are_numbers(path: Path) -> None:
    np = pytest.importorskip("numpy")
    write(path, [Evaluated(1, np.float64(0.5))])
    assert read_events(path) == [Evaluated(1, 0.5)]


def test_the_same_events_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_times_are_written_only_when_asked_for(path: Path) -> None:
    write(path, timed=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", json.loads(x)["time"]) for x in path.read_text().splitlines())
    assert read_events(path) == ALL


def test_an_event_is_there_as_soon_as_it_was_added(path: Path) -> None:
    log = EventLog(path)
    log.add(ALL[0])
    assert read_events(path) == ALL[:1]
    log.close()
    log.close()


@pytest.mark.parametrize(
    "event",
    [Evaluated(-1, 0.5), Joined(0, 0, "01"), Joined(0, 0, KEY.upper()[:-2] + "AB"), Removed(0, 0, b"\x01" * 32, "")],  # type: ignore[arg-type]
)
def test_what_could_not_be_read_back_is_refused_and_leaves_nothing(path: Path, event: Event) -> None:
    with EventLog(path) as log:
        log.add(ALL[0])
        with pytest.raises(msgspec.ValidationError):
            log.add(event)
        log.add(ALL[1])
    assert read_events(path) == ALL[:2]


def test_an_existing_file_is_never_overwritten(path: Path) -> None:
    write(path)
    before = path.read_bytes()
    with pytest.raises(LocalError, match="exists and is not overwritten"):
        EventLog(path)
    assert path.read_bytes() == before


def test_a_missing_log_cannot_be_read_or_resumed(path: Path) -> None:
    with pytest.raises(LocalError, match="nothing to resume"):
        EventLog(path, resume=True)
    with pytest.raises(LocalError, match="does not exist"):
        read_events(path)
    assert not path.exists()


# ---- Tampering is found


LAST = len(ALL) - 1


@pytest.mark.parametrize("place", range(LAST))
def test_a_changed_line_is_found(path: Path, place: int) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = lines[place].replace(b'"time":null', b'"time":"2026"')
    path.write_bytes(b"".join(lines))
    with pytest.raises(LocalError, match=rf"line {place + 2} does not follow .*get an unaltered copy"):
        read_events(path)


@pytest.mark.parametrize("place", range(LAST))
def test_a_deleted_line_is_found(path: Path, place: int) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[place]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LocalError, match=f"line {place + 1} does not follow"):
        read_events(path)


@pytest.mark.parametrize("place", range(LAST))
def test_an_inserted_line_is_found(path: Path, place: int) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    previous = json.loads(lines[place])["previous"]
    forged = json.dumps({"type": "Evaluated", "step": 1, "metric": 1.0, "time": None, "previous": previous})
    path.write_bytes(b"".join([*lines[:place], forged.encode() + b"\n", *lines[place:]]))
    with pytest.raises(LocalError, match=f"line {place + 2} does not follow"):
        read_events(path)


@pytest.mark.parametrize("place", range(LAST))
def test_reordered_lines_are_found(path: Path, place: int) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place], lines[place + 1] = lines[place + 1], lines[place]
    path.write_bytes(b"".join(lines))
    with pytest.raises(LocalError, match=f"line {place + 1} does not follow"):
        read_events(path)


@pytest.mark.parametrize("place", range(LAST))
@pytest.mark.parametrize("ending", [b"", b"\n"])
def test_a_truncated_line_is_found(path: Path, place: int, ending: bytes) -> None:
    write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[place] = lines[place][: len(lines[place]) // 2] + ending
    path.write_bytes(b"".join(lines))
    with pytest.raises(LocalError, match=f"line {place + 1} is no event"):
        read_events(path)
    with pytest.raises(LocalError, match=f"line {place + 1} is no event"):
        EventLog(path, resume=True)


@pytest.mark.parametrize(
    "content", [b"\n", b"{}\n", b"[]\n", b"\xff\xff\n", b"null\n", b'{"type":"Evaluated"}\n', b"\0\n"]
)
def test_what_is_no_event_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LocalError, match="line 1 is no event"):
        read_events(path)


def test_fields_outside_the_schema_are_refused_with_their_line(path: Path) -> None:
    path.write_text(json.dumps({"type": "Evaluated", "step": "one", "metric": 1, "previous": FIRST}) + "\n")
    with pytest.raises(LocalError, match="line 1 is no Evaluated event"):
        read_events(path)


def test_a_line_without_end_takes_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 100)
    path.write_bytes(b"x" * 1000)
    with pytest.raises(LocalError, match="line 1 is longer than 100 bytes"):
        read_events(path)
    path.unlink()
    with EventLog(path) as log, pytest.raises(ValueError, match="readers take 100"):
        log.add(ALL[0])


def test_who_knows_the_last_hash_finds_a_missing_end_and_a_changed_last_line(path: Path) -> None:
    head = write(path)
    whole = path.read_bytes()
    assert read_events(path, head=head) == ALL
    lines = whole.splitlines(keepends=True)
    for altered in (lines[:-1], [*lines[:-1], lines[-1][:-1]], [*lines[:-1], lines[-1].replace(b"0.9", b"0.8")]):
        path.write_bytes(b"".join(altered))
        with pytest.raises(LocalError, match="does not end in line"):
            read_events(path, head=head)


def test_events_of_a_newer_version_are_skipped_but_chained(path: Path) -> None:
    write(path, ALL[:1])
    first = path.read_bytes()
    new = json.dumps({"type": "Teleported", "where": [1], "time": None, "previous": compute_line_hash(first)})
    more = json.dumps(
        {"type": "Interrupted", "step": 3, "mood": "calm", "previous": compute_line_hash(new.encode() + b"\n")}
    )
    path.write_bytes(first + new.encode() + b"\n" + more.encode() + b"\n")
    write(path, [ALL[1]], resume=True)
    assert read_events(path) == [ALL[0], Interrupted(3), ALL[1]]
    path.write_bytes(path.read_bytes().replace(b"Teleported", b"Telephoned"))
    with pytest.raises(LocalError, match="line 3 does not follow"):
        read_events(path)


# ---- Crashes and full disks


def test_a_resumed_log_is_the_log_of_one_that_never_stopped(tmp_path: Path) -> None:
    write(tmp_path / "whole")
    write(tmp_path / "parts", ALL[:5])
    write(tmp_path / "parts", ALL[5:], resume=True)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("left", [1, 20, -1])
def test_a_torn_last_line_is_left_out_when_reading_and_dropped_when_resuming(path: Path, left: int) -> None:
    write(path)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:left])
    assert read_events(path) == ALL[:-1]
    write(path, ALL[-1:], resume=True)
    assert path.read_bytes() == whole


def test_a_log_torn_in_its_first_line_begins_anew(path: Path) -> None:
    path.write_bytes(b'{"type":"Run')
    write(path, resume=True)
    assert read_events(path) == ALL


class FullDisk:
    """Takes some bytes, then no more."""

    def __init__(self, file: object, room: int) -> None:
        self._file, self.room = file, room

    def write(self, data: memoryview) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        return self._file.write(data[:taken])  # type: ignore[attr-defined, no-any-return]

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def test_a_full_disk_loses_nothing_that_was_written(path: Path) -> None:
    log = EventLog(path)
    log.add(ALL[0])
    disk = FullDisk(log._file, 30)
    log._file = disk  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            log.add(ALL[1])
    assert read_events(path) == ALL[:1]
    disk.room = 1 << 20
    log.add(ALL[1])
    log.close()
    assert read_events(path) == ALL[:2]


def test_a_log_left_by_a_full_disk_is_repaired_on_resume(path: Path) -> None:
    log = EventLog(path)
    log.add(ALL[0])
    log._file = FullDisk(log._file, 30)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        log.add(ALL[1])
    log.close()
    write(path, ALL[1:], resume=True)
    assert read_events(path) == ALL


# ---- Documents and code


def test_the_documented_schema_is_the_real_one() -> None:
    text = (Path(__file__).parent.parent / "docs" / "EVENTS.md").read_text()
    sections = re.split(r"^### (\w+)\n", text, flags=re.MULTILINE)[1:]
    documented = {
        name: re.findall(r"^\| `(\w+)` \|", body, re.MULTILINE)
        for name, body in zip(sections[::2], sections[1::2], strict=True)
    }
    assert documented == {
        kind.__name__: [field.name for field in msgspec.structs.fields(kind)] for kind in get_args(Event)
    }
    for name, body in zip(sections[::2], sections[1::2], strict=True):
        assert getattr(module, name).__doc__ in body


def test_every_rule_has_its_documented_name_and_a_sentence() -> None:
    text = (Path(__file__).parent.parent / "docs" / "PROTOCOL.md").read_text()
    assert set(RULES) == set(Rule)
    for rule in Rule:
        assert f"| {format_rule(rule)} |" in text
        assert format_rule(rule).startswith(rule.value)
        assert explain_rule(format_rule(rule))
    assert explain_rule("V9 unheard of") == ""


# ---- From a peer's word to the log


def make_trial(verdict: Verdict) -> tuple[notes.Banned, dict[bytes, int]]:
    """Peer 3 is accused by peer 1; all but peer 2 vote ``verdict``."""
    signers, _ = make_signers(4, 1, ideal=True)
    run, root = bytes(32), bytes(32)
    zero = bytes(32)
    commit = seal(signers[3], run, 5, 1, 0, Phase.COMMIT, root, Commit(zero, zero, zero))
    charge = Accusation(Rule.GRADIENT, signers[3].key, 1, 0, (), commit, None, (), ())
    case = compute_case_digest(charge)
    said = []
    for place, signer in enumerate(signers):
        confirm = Confirm(zero, (case,) if place == 1 else (), (), (), False, False, (), NOTHING)
        said.append(seal(signer, run, 20, 2, 0, Phase.CONFIRM, root, confirm))
    for place, signer in enumerate(signers):
        vote = Vote((Ballot(case, Verdict.NOT_RECEIVED if place == 2 else verdict),), ())
        said.append(seal(signer, run, 21, 2, 0, Phase.VOTE, root, vote))
    guilty = verdict is Verdict.GUILTY
    banned, reason = (signers[3].key, "convicted by vote") if guilty else (signers[1].key, "a false accusation")
    note = notes.Banned(banned, Rule.GRADIENT, 1, 2, reason, tuple(said), charge)
    return note, {signer.key: place for place, signer in enumerate(signers)}


def test_a_conviction_names_the_offence_first_then_accuser_and_votes() -> None:
    note, peers = make_trial(Verdict.GUILTY)
    event = make_banned(note, peers)
    assert isinstance(note.case, Accusation)
    assert (event.step, event.offence_step, event.peer, event.rule) == (2, 1, 3, "V4 gradient")
    assert event.key == note.key.hex()
    assert event.evidence[0] == compute_message_digest(note.case.commit).hex()
    assert event.exhibits[:2] == ["COMMIT of step 1 signed by peer 3", "CONFIRM of step 2 signed by peer 0"]
    assert len(event.evidence) == len(event.exhibits) == 9
    assert (event.accuser, event.votes, event.voters) == (1, 2, 3)  # the accused has no vote
    assert event.reason == f"{explain_rule('V4 gradient')}; convicted by vote"


def test_a_false_accusation_says_who_was_accused() -> None:
    event = make_banned(*make_trial(Verdict.INNOCENT))
    assert (event.peer, event.accuser, event.votes) == (1, None, 2)
    assert event.reason == "a false accusation (peer 3 was accused)"


def test_a_proof_needs_neither_accuser_nor_votes() -> None:
    (signer,), _ = make_signers(1, 1, ideal=True)
    first, second = (
        seal(signer, bytes(32), 5, 1, 0, Phase.COMMIT, bytes(32), Commit(None, bytes([x]) * 32, bytes(32)))
        for x in (1, 2)
    )
    note = notes.Banned(signer.key, Rule.EQUIVOCATION, 1, 1, "signed two", (first, second), Equivocation(first, second))
    event = make_banned(note, {signer.key: 0})
    assert (event.rule, event.reason, event.accuser, event.votes) == ("E1 equivocation", "signed two", None, None)
    assert event.evidence == [compute_message_digest(message).hex() for message in (first, second)]


def test_a_stranger_that_cheats_on_probation_gets_the_next_index() -> None:
    """Its key was never in a roster: a log that does not know it must not bring the peer down."""
    note, peers = make_trial(Verdict.GUILTY)
    del peers[note.key]
    assert make_banned(note, peers).peer == 3
    assert peers[note.key] == 3
