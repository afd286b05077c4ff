"""What was signed is never forgotten nor changed: not by kills, full disks, damaged files, or a second process."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.codec import encode
from phalanx.core.crypto import Identity
from phalanx.core.effects import Heard, KeepMessages, Sign
from phalanx.core.envelope import seal
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.messages import (
    Body,
    Commit,
    Endorsement,
    Join,
    MalformedBody,
    Message,
    Opening,
    Outcome,
    Phase,
    Seal,
    Signed,
    Timeout,
    Trial,
)
from phalanx.network import disk as disk_module
from phalanx.network import journal as journal_module
from phalanx.network.ideal import make_signers
from phalanx.network.journal import Journal

RUN, OTHER_RUN, PREVIOUS = bytes(range(32)), bytes(32), bytes(range(32, 64))
ALICE, BOB = make_signers(2, 0, ideal=True)[0]
VIEW = b"a view"


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def make_effect(height: int, body: Body, phase: Phase = Phase.SEAL) -> Sign:
    return Sign(height, height, 0, phase, PREVIOUS, body)


def make_vote(round_: int, final: bool, number: int = 0) -> Outcome:
    return Outcome(round_, final, name(9), True, name(number))


def sign(journal: Journal, height: int, number: int = 0) -> Signed:
    """Have something agreed signed: what depends on ``number``."""
    message = journal.sign(ALICE, RUN, make_effect(height, Seal(name(number))))
    assert message is not None
    return message


def vote(journal: Journal, height: int, round_: int, final: bool, number: int = 0) -> Signed:
    message = journal.sign(ALICE, RUN, make_effect(height, make_vote(round_, final, number)))
    assert message is not None
    return message


def make_heard(height: int, number: int = 0) -> KeepMessages:
    """What two members agreed on at a height: what depends on ``number``."""
    return _keep(height, Heard.MESSAGES, Seal(name(number)))


def make_votes(height: int, round_: int = 0) -> KeepMessages:
    return _keep(height, Heard.VOTES, make_vote(round_, False))


def make_cases(height: int) -> KeepMessages:
    return KeepMessages(height, Heard.CASES, tuple(map(MalformedBody, make_messages(height, Seal(name(0))))))


def _keep(height: int, kind: Heard, body: Body) -> KeepMessages:
    return KeepMessages(height, kind, make_messages(height, body))


def make_messages(height: int, body: Body) -> tuple[Signed, ...]:
    return tuple(seal(signer, RUN, height, height, 0, Phase.SEAL, PREVIOUS, body) for signer in (ALICE, BOB))


def join(*heard: KeepMessages) -> list[Message]:
    return [message for effect in heard for message in effect.messages]


EARLIER, HEARD = make_heard(2), make_heard(1)


@contextmanager
def opened(path: Path, run: bytes = RUN) -> Iterator[Journal]:
    journal = Journal(path, run)
    try:
        yield journal
    finally:
        journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.bin"


# ---- Starting again


def test_a_height_has_one_message_whatever_is_asked_and_whenever(path: Path) -> None:
    with opened(path) as journal:
        first = sign(journal, 7)
        assert sign(journal, 7, 1) == first
    for number in range(2, 4):
        with opened(path) as journal:
            assert encode(sign(journal, 7, number)) == encode(first)
            assert sign(journal, 8 + number, number) != first


@pytest.mark.parametrize(
    "other",
    [
        Sign(7, 8, 0, Phase.SEAL, PREVIOUS, Seal(name(0))),
        Sign(7, 7, 1, Phase.SEAL, PREVIOUS, Seal(name(0))),
        Sign(7, 7, 0, Phase.COMMIT, PREVIOUS, Commit(None, name(3), name(4))),
    ],
    ids=["step", "attempt", "phase"],
)
def test_a_height_that_was_signed_for_another_place_has_nothing_to_say(path: Path, other: Sign) -> None:
    with opened(path) as journal:
        first = sign(journal, 7)
    data = path.read_bytes()
    for _ in range(2):
        with opened(path) as journal:
            assert journal.sign(ALICE, RUN, other) is None
            assert path.read_bytes() == data
            assert sign(journal, 7, 1) == first


def test_a_ballot_is_a_height_a_round_and_a_stage(path: Path) -> None:
    ballots = [(5, 0, False), (5, 0, True), (5, 1, False), (6, 0, False)]
    with opened(path) as journal:
        cast = [vote(journal, *ballot, number=number) for number, ballot in enumerate(ballots)]
        agreed = sign(journal, 5)
    assert len({encode(message) for message in (*cast, agreed)}) == 5
    with opened(path) as journal:
        assert [vote(journal, *ballot, number=9) for ballot in ballots] == cast
        assert sign(journal, 5, 9) == agreed
        assert vote(journal, 5, 1, True, 9) not in cast


@pytest.mark.parametrize(
    "body",
    [
        Timeout((name(1),), 0, None),
        Endorsement(0, name(1)),
        Join(name(1), 0),
        Opening(0, name(1), ()),
        Trial(name(1)),
    ],
    ids=lambda body: type(body).__name__,
)
def test_what_is_not_agreed_is_not_kept(path: Path, body: Body) -> None:
    with opened(path) as journal:
        agreed, size = sign(journal, 7), path.stat().st_size
        other = journal.sign(ALICE, RUN, make_effect(7, body))
        assert other is not None
        assert other.body == encode(body)
        assert sign(journal, 7, 1) == agreed
        journal.sign(ALICE, RUN, make_effect(8, body))
        assert path.stat().st_size == size
        assert sign(journal, 8, 1).height == 8
    with opened(path) as journal:
        assert sign(journal, 7, 1) == agreed


def test_what_cannot_be_signed_leaves_no_trace(path: Path) -> None:
    with opened(path) as journal:
        size = path.stat().st_size
        with pytest.raises(ValueError, match="body"):
            journal.sign(ALICE, RUN, make_effect(7, Seal(name(1)), Phase.COMMIT))
        assert path.stat().st_size == size
        assert journal.is_new
        assert sign(journal, 7, 2).body == encode(Seal(name(2)))


def test_the_last_view_is_kept(path: Path) -> None:
    with opened(path) as journal:
        assert journal.view is None
        journal.keep(b"first", 6)
        sign(journal, 7)
        journal.keep(VIEW, 8)
    with opened(path) as journal:
        assert journal.view == VIEW


def test_what_was_heard_is_kept_until_a_view_above_it_is(path: Path) -> None:
    below, above = make_heard(6), (make_heard(7), make_heard(8), make_votes(8), make_cases(9))
    with opened(path) as journal:
        assert journal.messages == []
        for effect in (below, *above):
            journal.keep_messages(effect)
        assert journal.messages == join(below, *above)
        journal.keep(VIEW, 7)
    for _ in range(2):
        with opened(path) as journal:
            assert journal.messages == join(*above)
    with opened(path) as journal:
        journal.keep(VIEW, 10)
        assert journal.messages == []
    with opened(path) as journal:
        assert journal.messages == []


def test_of_one_height_and_kind_what_was_heard_last_is_kept(path: Path) -> None:
    with opened(path) as journal:
        for effect in (make_heard(7), make_votes(7), make_cases(7), make_votes(7, 1)):
            journal.keep_messages(effect)
        assert journal.messages == join(make_heard(7), make_votes(7, 1), make_cases(7))
        journal.keep_messages(make_heard(7, 1))
    for _ in range(2):
        with opened(path) as journal:
            assert journal.messages == join(make_heard(7, 1), make_votes(7, 1), make_cases(7))


def test_a_journal_is_new_until_something_is_in_it(tmp_path: Path) -> None:
    for number, act in enumerate(
        [lambda j: sign(j, 1), lambda j: vote(j, 1, 0, False), lambda j: j.keep(VIEW, 0)]  # type: ignore[no-any-return]
    ):
        path = tmp_path / f"{number}.bin"
        with opened(path) as journal:
            assert journal.is_new
        with opened(path) as journal:
            assert journal.is_new
            act(journal)
            assert not journal.is_new
        with opened(path) as journal:
            assert not journal.is_new


def test_secrets_stay_and_are_this_journals_own(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with opened(one) as journal:
        drawn = [journal.draw_secret(height) for height in range(3)]
    with opened(one) as journal:
        assert [journal.draw_secret(height) for height in range(3)] == drawn
    with opened(other) as journal:
        elsewhere = [journal.draw_secret(height) for height in range(3)]
    assert len({secret for pair in (*drawn, *elsewhere) for secret in pair}) == 12


def test_the_file_is_nobody_elses(path: Path) -> None:
    before = os.umask(0)
    try:
        Journal(path, RUN).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)  # copied from somewhere
    Journal(path, RUN).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ---- Limits


def test_the_journal_is_bounded_as_a_simulated_disk_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (disk_module, journal_module):
        monkeypatch.setattr(module, "JOURNAL_HEIGHTS", 3)
        monkeypatch.setattr(module, "JOURNAL_VOTES", 2)

    def check(journal: Journal, signed: list[Signed]) -> None:
        for height in (0, 1, 2):
            with pytest.raises(LocalError, match="no longer"):
                sign(journal, height, 9)
            with pytest.raises(LocalError, match="no longer"):
                vote(journal, height, 0, False, 9)
        assert [sign(journal, height, 9) for height in (3, 4, 5)] == signed

    with opened(path) as journal:
        signed = [sign(journal, height) for height in range(6)][3:]
        votes = [vote(journal, height, 0, False) for height in range(5)][3:]
        check(journal, signed)
    with opened(path) as journal:
        check(journal, signed)
        assert [vote(journal, height, 0, False, 9) for height in (3, 4)] == votes


def test_tidying_keeps_all_that_counts_and_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_TIDY", 4000)
    monkeypatch.setattr(disk_module, "JOURNAL_HEIGHTS", 5)
    before = os.umask(0)
    try:
        with opened(path) as journal:
            first = path.stat().st_ino
            drawn = journal.draw_secret(3)
            votes = [vote(journal, 1, 0, final) for final in (False, True)]
            files, longest, signed = set(), 0, []
            for height in range(100):
                signed.append(sign(journal, height))
                journal.keep(VIEW + bytes([height]), height)
                journal.keep_messages(make_heard(height))
                journal.keep_messages(make_votes(height + 1))
                journal.keep_messages(make_cases(height))
                files.add(path.stat().st_ino)
                longest = max(longest, path.stat().st_size)
                with pytest.raises(LocalError, match="another process"):
                    Journal(path, RUN)
            assert files != {first}
            assert longest < 8200  # a vote holds a digest
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    with opened(path) as journal:
        assert journal.view == VIEW + bytes([99])
        assert journal.messages == join(make_votes(99), make_heard(99), make_votes(100), make_cases(99))
        assert journal.draw_secret(3) == drawn
        assert [sign(journal, height, 9) for height in range(95, 100)] == signed[95:]
        assert [vote(journal, 1, 0, final, 9) for final in (False, True)] == votes
        with pytest.raises(LocalError, match="no longer"):
            sign(journal, 3, 9)


def test_a_journal_that_cannot_shrink_is_not_written_anew_each_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_TIDY", 1000)
    with opened(path) as journal:
        files = []
        for height in range(100):
            sign(journal, height)
            files.append(path.stat().st_ino)
    changes = sum(one != other for one, other in itertools.pairwise(files))
    assert 1 <= changes <= 8


def test_a_kill_while_tidying_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the draft was like: it is written from its beginning, and is nobody else's."""
    with opened(path) as journal:
        signed = [sign(journal, height) for height in range(3)]
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(b"x" * 5000)
    draft.chmod(0o644)
    with opened(path) as journal:
        assert [sign(journal, height, 9) for height in range(3)] == signed
        monkeypatch.setattr(journal_module, "_TIDY", 10)
        signed.append(sign(journal, 3))
        assert not draft.exists()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with opened(path) as journal:
        assert [sign(journal, height, 9) for height in range(4)] == signed


# ---- Files that are not what they were


def split(data: bytes) -> list[bytes]:
    """The records of a file, or of what is appended to one."""
    records = []
    while data:
        end = journal_module._HEADER + int.from_bytes(data[: journal_module._LENGTH], "big")
        assert end <= len(data)
        records.append(data[:end])
        data = data[end:]
    return records


def read_tags(data: bytes) -> str:
    return " ".join(msgspec.msgpack.decode(record[journal_module._HEADER :])[0] for record in split(data))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[int], list[Any]]:
    """A small journal: its bytes, where its records end, and what it serves from each of these ends on.

    What was heard is in the middle of it, where it came with the vote, and at its end, where it came with the closing.
    """
    path = tmp_path_factory.mktemp("sample") / "journal.bin"
    with opened(path) as journal:
        sizes = [path.stat().st_size]
        one = sign(journal, 0)
        sizes.append(path.stat().st_size)
        journal.keep_messages(EARLIER)
        assert path.stat().st_size == sizes[-1]
        cast = vote(journal, 0, 0, True)
        sizes.append(path.stat().st_size)
        two = sign(journal, 1)
        sizes.append(path.stat().st_size)
        journal.keep(VIEW, 1)
        sizes.append(path.stat().st_size)
        journal.keep_messages(HEARD)
        assert path.stat().st_size == sizes[-1]
    data = path.read_bytes()
    assert read_tags(data) == "opened said heard said said kept heard"
    ends = list(itertools.accumulate(map(len, split(data))))
    assert [*ends[:2], *ends[3:6]] == sizes
    states = [
        ([None, None, None], None, []),
        ([one, None, None], None, []),
        ([one, None, None], None, join(EARLIER)),
        ([one, cast, None], None, join(EARLIER)),
        ([one, cast, two], None, join(EARLIER)),
        ([one, cast, two], VIEW, join(EARLIER)),
        ([one, cast, two], VIEW, join(EARLIER, HEARD)),
    ]
    return data, ends, states


def read_back(path: Path, data: bytes) -> tuple[list[Signed | None], bytes | None, list[Message]] | None:
    """What a journal of these bytes would serve (None where it would sign anew); None if it says it is damaged."""
    path.write_bytes(data)
    try:
        with patch.object(os, "fsync"), opened(path) as journal:  # nobody pulls a plug here
            disk = journal._disk
            signed = [disk.journal.get(0), disk.votes.get((0, 0, True)), disk.journal.get(1)]
            return signed, journal.view, journal.messages
    except LocalError as error:
        if "damaged" not in str(error):
            raise
        return None


def test_a_file_cut_off_anywhere_gives_a_prefix_or_is_refused(path: Path, sample: Any) -> None:
    data, ends, states = sample
    assert read_back(path, data) == states[-1]
    for size in range(len(data)):
        whole = sum(end <= size for end in ends)
        held = read_back(path, data[:size])
        if whole == 0:
            assert held is None  # the first record is whole before the file has its name
        else:
            assert held == states[whole - 1]
            assert path.stat().st_size == ends[whole - 1]


def test_a_journal_goes_on_after_what_was_cut_off(path: Path, sample: Any) -> None:
    data, ends, states = sample
    for size in range(ends[0], ends[-1], 17):
        path.write_bytes(data[:size])
        with opened(path) as journal:
            heard = journal.messages
            journal.keep_messages(make_heard(3))
            first, later = sign(journal, 0, 5), [sign(journal, height, 5) for height in (1, 2)]
        with opened(path) as journal:
            assert sign(journal, 0, 6) == first
            assert [sign(journal, height, 6) for height in (1, 2)] == later
            assert journal.messages == [*heard, *join(make_heard(3))]
        if size >= ends[1]:
            assert first == states[-1][0][0]


def test_no_flipped_bit_goes_unnoticed(path: Path, sample: Any) -> None:
    """Not in the last record either, nor in a length, which could pass for a record that was cut off."""
    data, _, _ = sample
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        assert read_back(path, bytes(damaged)) is None, f"byte {place}"
    assert path.read_bytes() == bytes(damaged), "what is damaged is left for its owner to look at"


@settings(max_examples=150, deadline=None)
@given(choice=st.data())
def test_no_other_damage_changes_a_message(
    choice: st.DataObject, sample: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Bytes lost, repeated, zeroed or made up anywhere: what is served was signed, or nothing is."""
    data, _, states = sample
    start = choice.draw(st.integers(0, len(data)))
    end = choice.draw(st.integers(start, len(data)))
    instead = choice.draw(st.sampled_from([b"", bytes(end - start), 2 * data[start:end]]) | st.binary(max_size=40))
    held = read_back(tmp_path_factory.getbasetemp() / "journal.bin", data[:start] + instead + data[end:])
    assert held is None or held in states, "not a prefix"


def test_no_record_passes_in_the_place_of_another(path: Path, sample: Any) -> None:
    data, _, _ = sample
    first, one, earlier, vote_, two, kept, heard = split(data)
    assert len(one) == len(two)
    assert len(earlier) == len(heard)
    for order in (
        [first, two, earlier, vote_, one, kept, heard],  # changed places
        [first, one, heard, vote_, two, kept, earlier],
        [first, one, vote_, earlier, two, kept, heard],
        [first, earlier, one, vote_, two, kept, heard],
        [first, one, earlier, vote_, two, heard, kept],
        [first, earlier, vote_, two, kept],  # one lost
        [first, one, vote_, two, kept, heard],
        [first, one, vote_, two, kept],
        [first, one, earlier, vote_, two, heard],
        [first, one, one, earlier, vote_, two, kept],  # one twice
        [first, one, earlier, earlier, vote_, two, kept],
        [first, one, earlier, vote_, two, kept, heard, heard],
        [first, one, earlier, vote_, two, kept, earlier],
        [first, one, earlier, vote_, two, kept, one],
        [one, earlier, vote_, two, kept],
    ):
        assert read_back(path, b"".join(order)) is None


def test_a_journal_holds_what_was_signed_and_what_it_is_past(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "JOURNAL_HEIGHTS", 3)
    monkeypatch.setattr(journal_module, "JOURNAL_HEIGHTS", 3)
    other = make_messages(7, Seal(name(9)))[0]
    with opened(path) as journal:
        messages = [sign(journal, height) for height in range(4, 8)]
        assert all(map(journal.holds, messages)), "the first was cut, and nothing is signed there any more"
        assert not journal.holds(other)
    with opened(path.with_name("older.bin")) as journal:
        assert not any(map(journal.holds, messages))


def test_the_journal_of_another_key_is_refused_when_it_is_opened(path: Path) -> None:
    with opened(path) as journal:
        sign(journal, 7)
    with pytest.raises(LocalError, match="the journal of another key; choose another folder"):
        Journal(path, RUN, BOB.key)
    Journal(path, RUN, ALICE.key).close()


@pytest.mark.parametrize("content", [b"", b"\n", b"not a journal at all, but something dear to its owner\n" * 9])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    """An empty one above all: that is what a power cut makes of files, and it would be a clean slate."""
    path.write_bytes(content)
    with pytest.raises(LocalError, match="damaged"):
        Journal(path, RUN)
    assert path.read_bytes() == content


def test_a_device_is_no_journal() -> None:
    with pytest.raises(LocalError, match="regular file"):
        Journal(Path("/dev/full"), RUN)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"nowhere.*No such file"):
        Journal(tmp_path / "nowhere" / "journal.bin", RUN)


def test_the_journal_of_another_run_is_refused_and_left_alone(path: Path) -> None:
    with opened(path) as journal:
        sign(journal, 7)
    data = path.read_bytes()
    with pytest.raises(LocalError, match="another run"):
        Journal(path, OTHER_RUN)
    assert path.read_bytes() == data


def test_the_journal_of_another_key_is_refused(path: Path) -> None:
    with opened(path) as journal:
        signed = sign(journal, 7)
        with pytest.raises(LocalError, match="another key"):
            journal.sign(BOB, RUN, make_effect(8, Seal(name(0))))
    with opened(path) as journal:
        for height in (7, 8):
            with pytest.raises(LocalError, match="another key"):
                journal.sign(BOB, RUN, make_effect(height, Seal(name(0))))
        assert sign(journal, 7, 9) == signed


# ---- Two at once


def test_a_journal_in_use_is_refused(path: Path) -> None:
    with opened(path) as journal:
        sign(journal, 7)
        with pytest.raises(LocalError, match="another process"):
            Journal(path, RUN)
        assert sign(journal, 8).height == 8
    Journal(path, RUN).close()


def test_who_opened_a_file_that_was_just_replaced_does_not_get_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the owner tidied and ended: the lock would be on a file without a name."""
    journal = Journal(path, RUN)
    flock = journal_module.fcntl.flock

    def tidy_first(file: Any, operation: int) -> None:
        monkeypatch.undo()
        journal._tidy()
        journal.close()
        flock(file, operation)

    monkeypatch.setattr(journal_module.fcntl, "flock", tidy_first)
    with pytest.raises(LocalError, match="another process"):
        Journal(path, RUN)
    Journal(path, RUN).close()


def test_of_two_that_begin_at_once_one_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_anew = journal_module._write_anew
    made = []

    def begin_before(path: Path, *rest: Any) -> Any:
        monkeypatch.undo()
        made.append(Journal(path, RUN))
        return write_anew(path, *rest)

    monkeypatch.setattr(journal_module, "_write_anew", begin_before)
    with pytest.raises(LocalError, match="another process"):
        Journal(path, RUN)
    signed = sign(made[0], 7)
    made[0].close()
    with opened(path) as journal:
        assert sign(journal, 7, 9) == signed


# ---- Disks that fail


@contextmanager
def limited(size: int) -> Iterator[None]:
    """No file of this process grows beyond this: writes are short first, then fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def check_after_failure(path: Path, journal: Journal, signed: Signed) -> None:
    """Nothing is signed with this journal any more; the next start knows what was said, and goes on."""
    data = path.read_bytes()
    journal.keep_messages(make_heard(7))  # it waits for a signature, and there is none any more
    for height in (7, 8, 9):
        with pytest.raises(WriteFailed, match="start this peer again"):
            sign(journal, height, 1)
    with pytest.raises(WriteFailed, match="start this peer again"):
        vote(journal, 7, 0, False)
    with pytest.raises(WriteFailed, match="start this peer again"):
        journal.keep(VIEW, 7)
    journal.close()
    assert path.read_bytes() == data
    with opened(path) as journal:
        assert journal.messages == []
        assert sign(journal, 7, 2) == signed
        again = sign(journal, 8, 2)
    with opened(path) as journal:
        assert sign(journal, 8, 3) == again


@pytest.mark.parametrize("room", [0, 1, 4, 19, 20, 21, 100])
def test_a_disk_that_takes_a_part_of_a_record_has_not_taken_it(path: Path, room: int) -> None:
    journal = Journal(path, RUN)
    signed = sign(journal, 7)
    with limited(path.stat().st_size + room), pytest.raises(WriteFailed, match=r"journal\.bin"):
        sign(journal, 8)
    check_after_failure(path, journal, signed)


def test_a_full_disk_signs_nothing(path: Path) -> None:
    journal = Journal(path, RUN)
    signed = sign(journal, 7)
    full = os.open("/dev/full", os.O_WRONLY)
    held = os.dup(journal._file.fileno())
    try:
        os.dup2(full, journal._file.fileno())
        with pytest.raises(WriteFailed, match="No space left"):
            sign(journal, 8)
    finally:
        os.close(full)
        os.close(held)
    check_after_failure(path, journal, signed)


def test_a_disk_that_cannot_make_it_safe_signs_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written and not made safe is taken back: in memory it would look safe after a restart."""
    journal = Journal(path, RUN)
    signed, size = sign(journal, 7), path.stat().st_size

    def fail(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        with pytest.raises(WriteFailed, match="Input/output error"):
            sign(journal, 8)
    assert path.stat().st_size == size
    check_after_failure(path, journal, signed)


def test_an_interrupted_write_signs_nothing_more(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(path, RUN)
    signed = sign(journal, 7)

    def interrupt(handle: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sign(journal, 8, 2)
    check_after_failure(path, journal, signed)


@pytest.mark.parametrize("failing", ["replace", "_sync_folder"])
def test_tidying_that_fails_signs_nothing_more(path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """Once the new file has its name, nothing may be written to the old one: it has none."""
    journal = Journal(path, RUN)
    signed = sign(journal, 7)

    def fail(*anything: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "_TIDY", 10)
        patch.setattr(*((Path, failing) if failing == "replace" else (journal_module, failing)), fail)
        with pytest.raises(WriteFailed, match="No space left"):
            sign(journal, 8, 2)
    assert os.listdir(path.parent) == [path.name]
    check_after_failure(path, journal, signed)


def test_a_journal_that_cannot_be_begun_leaves_nothing(path: Path) -> None:
    with limited(40), pytest.raises(LocalError, match=r"journal\.bin"):
        Journal(path, RUN)
    assert os.listdir(path.parent) == []


def test_a_closed_journal_signs_nothing(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.close()
    for _ in range(2):
        with pytest.raises((ValueError, WriteFailed)):
            sign(journal, 7)
    with opened(path) as journal:
        assert journal.is_new


def test_it_is_on_the_disk_before_it_is_returned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a start found, too: the process before may have been killed between writing and making it safe."""
    synced: list[int] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def sync(handle: int) -> None:
            synced.append(os.fstat(handle).st_size)
            real(handle)

        monkeypatch.setattr(os, name, sync)

    watch("fdatasync")
    watch("fsync")
    with opened(path) as journal:
        for height in range(3):
            sign(journal, height)
            assert synced[-1] == path.stat().st_size
            vote(journal, height, 0, False)
            assert synced[-1] == path.stat().st_size
            journal.keep(VIEW, height)
            assert synced[-1] == path.stat().st_size
    synced.clear()
    with opened(path):
        assert path.stat().st_size in synced


def test_what_was_heard_is_on_the_disk_before_the_next_signature_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written and made safe with what is signed next: so it costs no time of its own."""
    done: list[str] = []
    write, sync = journal_module._write, os.fdatasync

    def watch_write(file: Any, data: bytes) -> None:
        done.append(read_tags(data))
        write(file, data)

    def watch_sync(handle: int) -> None:
        done.append("safe")
        sync(handle)

    with opened(path) as journal:
        monkeypatch.setattr(journal_module, "_write", watch_write)
        monkeypatch.setattr(os, "fdatasync", watch_sync)
        data = path.read_bytes()
        journal.keep_messages(make_heard(7))
        assert done == []
        assert path.read_bytes() == data
        sign(journal, 8)
        assert done == ["heard said", "safe"]
        journal.keep_messages(make_votes(8))
        journal.keep_messages(make_cases(8))
        assert done[2:] == []
        vote(journal, 8, 0, True)
        assert done[2:] == ["heard heard said", "safe"]
        journal.keep_messages(make_heard(8))
        assert done[4:] == []
        journal.keep(VIEW, 8)
        assert done[4:] == ["heard kept", "safe"]
        sign(journal, 9)
        assert done[6:] == ["said", "safe"], "each is written once"
        journal.keep_messages(make_heard(9))
        assert done[8:] == []
    assert done[8:] == ["heard", "safe"]
    assert read_tags(path.read_bytes()) == "opened heard said heard heard said heard kept said heard"
    with opened(path) as journal:
        assert journal.messages == join(make_votes(8), make_cases(8), make_heard(8), make_heard(9))


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("room", [0, 30])
@pytest.mark.parametrize(
    "act",
    [lambda j: sign(j, 8), lambda j: vote(j, 7, 0, False), lambda j: j.keep(VIEW, 7)],
    ids=["sign", "vote", "keep"],
)
def test_a_disk_that_cannot_take_what_was_heard_signs_nothing(path: Path, act: Any, room: int, takes: bool) -> None:
    """Nor one that takes all of it, but only a part of what was to be written with it."""
    journal = Journal(path, RUN)
    signed, size = sign(journal, 7), path.stat().st_size
    journal.keep_messages(make_heard(7))
    with (
        limited(size + room + takes * len(journal._waiting)),
        pytest.raises(WriteFailed, match=r"journal\.bin"),
    ):
        act(journal)
    assert path.stat().st_size == size
    check_after_failure(path, journal, signed)


@pytest.mark.parametrize("room", [0, 1, 19, 20, 100])
def test_a_disk_that_cannot_take_what_was_heard_lets_the_peer_end(path: Path, room: int) -> None:
    journal = Journal(path, RUN)
    signed = sign(journal, 7)
    journal.keep_messages(make_heard(7))
    with limited(path.stat().st_size + room):
        journal.close()
    with opened(path) as journal:
        assert journal.messages == []
        assert sign(journal, 7, 1) == signed
        again = sign(journal, 8, 1)
    with opened(path) as journal:
        assert sign(journal, 8, 2) == again


def test_a_power_cut_finds_nothing_in_the_file_that_is_not_safe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Least of all what was heard alone: zeros in its place would pass for damage, and cost the peer its key."""
    safe: list[bytes] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def sync(handle: int) -> None:
            real(handle)
            if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
                safe.append(os.pread(handle, 1 << 20, 0))

        monkeypatch.setattr(os, name, sync)

    watch("fdatasync")
    watch("fsync")
    cut = path.with_name("cut.bin")
    heard: list[Message] = []
    with opened(path) as journal:
        for height, act in enumerate(
            [
                lambda: sign(journal, 0),
                lambda: vote(journal, 0, 0, True),
                lambda: sign(journal, 1),
                lambda: journal.keep(VIEW, 0),
            ]
        ):
            for effect in (make_heard(height), make_votes(height)):
                journal.keep_messages(effect)
                assert path.read_bytes() == safe[-1]
            journal.sign(ALICE, RUN, make_effect(height, Timeout((name(1),), 0, None)))
            assert path.read_bytes() == safe[-1]
            cut.write_bytes(path.read_bytes())
            with opened(cut) as other:  # it lacks what was heard, and goes on
                assert other.messages == heard
                sign(other, 5)
            count = len(safe)
            act()
            assert path.read_bytes() == safe[-1] != safe[-2]
            assert len(safe) == count + 1
            heard += join(make_heard(height), make_votes(height))
        assert journal.messages == heard


def test_zeros_that_a_power_cut_leaves_are_noticed(path: Path) -> None:
    """In what was heard as in what was signed after it: and what was signed is never served without it."""
    with opened(path) as journal:
        begun = path.stat().st_size
        journal.keep_messages(HEARD)
        assert path.stat().st_size == begun
        signed = sign(journal, 0)
    data = path.read_bytes()
    assert read_tags(data) == "opened heard said"
    assert read_back(path, data) == ([signed, None, None], None, join(HEARD))
    for start in range(begun, len(data)):
        for end in (start + 1, min(start + 64, len(data)), len(data)):
            zeroed = data[:start] + bytes(end - start) + data[end:]
            assert zeroed == data or read_back(path, zeroed) is None, f"bytes {start} to {end}"


# ---- Death


SIGNING = """
import os, sys
from pathlib import Path
from phalanx.core.crypto import Identity
from phalanx.core.effects import Heard, KeepMessages, Sign
from phalanx.core.messages import Phase, Seal
from phalanx.network.journal import Journal

run, start, path = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
identity, journal = Identity(bytes(range(32))), Journal(path, run)
for height in range(start, 1 << 30):
    message = journal.sign(identity, run, Sign(height, 0, 0, Phase.SEAL, bytes(32), Seal(os.urandom(32))))
    os.write(1, height.to_bytes(4, "big") + message.body[-32:])
    journal.keep_messages(KeepMessages(height, Heard.MESSAGES, (message,)))
    if height % 3 == 0:
        journal.keep(os.urandom(50), height)
"""

HEARING = """
import os, signal, sys
from pathlib import Path
from phalanx.core.codec import decode_message
from phalanx.core.crypto import Identity
from phalanx.core.effects import Heard, KeepMessages, Sign
from phalanx.core.messages import Phase, Seal
from phalanx.network.journal import Journal

run, path, heard = bytes.fromhex(sys.argv[1]), Path(sys.argv[2]), map(bytes.fromhex, sys.argv[3:])
identity, journal = Identity(bytes(range(32))), Journal(path, run)
for height, message in enumerate(heard):
    said = journal.sign(identity, run, Sign(height, 0, 0, Phase.SEAL, bytes(32), Seal(os.urandom(32))))
    os.write(1, said.body[-32:])
    journal.keep_messages(KeepMessages(height, Heard.MESSAGES, (decode_message(message),)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_everything_said_before_a_kill_is_found_again(path: Path) -> None:
    """``kill -9`` of a process that signs, and says afterwards what: wherever it was just then."""
    said: dict[int, bytes] = {}
    for start in (0, 5):  # the second goes through heights of the first, which it does not remember by itself
        command = [sys.executable, "-c", SIGNING, RUN.hex(), str(start), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            count = 0
            while len(line := process.stdout.read(36)) == 36:
                height, digest = int.from_bytes(line[:4], "big"), line[4:]
                assert said.setdefault(height, digest) == digest, f"two messages at height {height}"
                count += 1
                if count == 20:
                    with pytest.raises(LocalError, match="another process"):
                        Journal(path, RUN)
                    process.kill()
        assert process.returncode == -signal.SIGKILL
        assert count >= 20
    identity = Identity(bytes(range(32)))
    with opened(path) as journal:  # the lock went with its owner
        for height, digest in said.items():
            message = journal.sign(identity, RUN, Sign(height, 0, 0, Phase.SEAL, PREVIOUS, Seal(name(0))))
            assert message is not None
            assert message.body[-32:] == digest
        for heard in journal.messages:
            assert isinstance(heard, Signed)
            assert heard.body[-32:] == said[heard.height]


def test_what_was_heard_last_before_a_kill_is_lacking_and_the_peer_signs_on(path: Path) -> None:
    heard = [make_heard(height).messages[0] for height in range(3)]
    command = [sys.executable, "-c", HEARING, RUN.hex(), str(path), *(encode(message).hex() for message in heard)]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(process.stdout) == 3 * 32
    assert read_tags(path.read_bytes()) == "opened said heard said heard said"
    identity = Identity(bytes(range(32)))

    def sign_again(journal: Journal, height: int, number: int) -> bytes:
        effect = Sign(height, 0, 0, Phase.SEAL, PREVIOUS, Seal(name(number)))
        message = journal.sign(identity, RUN, effect)
        assert message is not None
        return message.body[-32:]

    with opened(path) as journal:
        assert journal.messages == heard[:2]
        assert b"".join(sign_again(journal, height, 0) for height in range(3)) == process.stdout
        journal.keep_messages(make_heard(2))
        assert sign_again(journal, 3, 0) == name(0)
    with opened(path) as journal:
        assert journal.messages == [*heard[:2], *join(make_heard(2))]
        assert sign_again(journal, 3, 1) == name(0)
