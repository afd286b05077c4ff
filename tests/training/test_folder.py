"""A peer's own folder: whatever is wrong with it is one line with the file's name, and nobody signs anything twice."""

from __future__ import annotations

import errno
import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from village import Village, make_member

from phalanx import events
from phalanx.core.codec import encode
from phalanx.core.crypto import Identity
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.network.journal import _HEADER, _LENGTH, Journal
from phalanx.training.checkpoints import read_checkpoint, write_safely
from phalanx.training.manifest import read_network_manifest
from phalanx.training.member import Outcome
from phalanx.training.recorder import read_transcript

STEPS = 4


@pytest.fixture(scope="module")
def village(tmp_path_factory: pytest.TempPathFactory) -> Village:
    """Three peers at the end of a run."""
    village = Village(tmp_path_factory.mktemp("village"), steps=STEPS)
    assert all(isinstance(found, Outcome) and found.finished for found in village.run())
    return village


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Village:
    """The same keys in another run."""
    village = Village(tmp_path_factory.mktemp("other"), steps=STEPS + 1)
    assert all(isinstance(found, Outcome) and found.finished for found in village.run())
    return village


@pytest.fixture
def folder(village: Village, tmp_path: Path) -> Path:
    """A copy of the first peer's."""
    return Path(shutil.copytree(village.get_folder(0), tmp_path / "peer"))


def start(village: Village, folder: Path, place: int = 0, **settings: Any) -> None:
    """Begin to be a peer, up to where it would go to the network."""
    member = make_member(village.manifest, village.keys[place], folder, **settings)
    member._recorder.close()
    member._journal.close()


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_refused(village: Village, folder: Path, words: str, place: int = 0) -> None:
    """The peer does not start, says why in one line, and every file is as it was."""
    before, heard = read_all(folder), list[events.Event]()
    with pytest.raises(LocalError, match=words) as refusal:
        start(village, folder, place, on_event=heard.append)
    assert "\n" not in str(refusal.value)
    assert read_all(folder) == before
    assert heard == [], "the refusal is the only line"
    gc.collect()


def split_journal(data: bytes) -> list[int]:
    """Where each record ends."""
    ends, at = [], 0
    while at < len(data):
        at += _HEADER + int.from_bytes(data[at : at + _LENGTH], "big")
        ends.append(at)
    return ends


# ---- The journal of this folder's past


def test_a_folder_as_it_was_left_is_gone_on_with(village: Village, folder: Path) -> None:
    start(village, folder)


@pytest.mark.parametrize("left", ["events.jsonl", "transcript.bin", "checkpoints"])
def test_a_past_without_a_journal_is_refused(village: Village, folder: Path, left: str) -> None:
    """Whatever it is that shows the past. The peer would sign again what it signed, and be banned for it."""
    for path in folder.iterdir():
        if path.name not in (left, "manifest.toml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / ".lock").touch()
    check_refused(
        village, folder, rf"journal\.bin: missing, though there is .*{left}.*signs twice.*put its journal back"
    )


def test_a_link_to_nowhere_is_no_missing_journal(village: Village, folder: Path) -> None:
    (folder / "journal.bin").unlink()
    (folder / "journal.bin").symlink_to(folder / "gone")
    with pytest.raises(LocalError, match=r"journal\.bin"):
        start(village, folder)
    assert not (folder / "gone").exists()


def test_a_new_journal_in_a_folder_with_a_past_is_refused(village: Village, folder: Path) -> None:
    run = read_checkpoint(folder / "checkpoints" / f"{STEPS:06d}").run
    (folder / "journal.bin").unlink()
    Journal(folder / "journal.bin", run).close()
    check_refused(village, folder, r"journal\.bin: not the latest.*put the latest back, or take a new key")


def test_an_older_journal_is_refused_wherever_it_ends(village: Village, folder: Path) -> None:
    """Unless all that this peer signed, as far as the other files tell, is in it."""
    whole = (folder / "journal.bin").read_bytes()
    key = Identity.load(village.keys[0]).key
    epochs = read_transcript(folder / "transcript.bin")
    own = {encode(x) for epoch in epochs for said in epoch.said for x in said.messages if x.sender == key}
    assert len(own) > 5 * STEPS
    run, refused = read_checkpoint(folder / "checkpoints" / f"{STEPS:06d}").run, 0
    for end in split_journal(whole):
        (folder / "journal.bin").write_bytes(whole[:end])
        journal = Journal(folder / "journal.bin", run, key)
        held = {encode(message) for message in journal._disk.journal.values()}
        journal.close()
        if own <= held:
            start(village, folder)
        else:
            check_refused(village, folder, r"journal\.bin: not the latest: this peer signed at height \d+ \(step \d\)")
            refused += 1
    assert refused > 5 * STEPS


@pytest.mark.parametrize("lost", ["transcript.bin", "checkpoints"])
def test_one_file_is_enough_to_tell_an_older_journal(village: Village, folder: Path, lost: str) -> None:
    path = folder / lost
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"")
    data = (folder / "journal.bin").read_bytes()
    (folder / "journal.bin").write_bytes(data[: split_journal(data)[8]])
    check_refused(village, folder, r"journal\.bin: not the latest")


def test_the_journal_of_another_peer_is_refused(village: Village, folder: Path) -> None:
    shutil.copy(village.get_folder(1) / "journal.bin", folder / "journal.bin")
    check_refused(village, folder, r"journal\.bin: the journal of another key")


def test_the_folder_of_another_peer_is_refused(village: Village, folder: Path) -> None:
    check_refused(village, folder, "the checkpoint of another peer", place=1)
    shutil.rmtree(folder / "checkpoints")
    check_refused(village, folder, "the journal of another key", place=1)


@pytest.mark.parametrize(
    ("kind", "at"),
    [(events.StepFinished, 0), (events.StepFinished, 2), (events.Evaluated, 1), (events.CheckpointWritten, 2)],
)
def test_whoever_was_killed_starts_again(tmp_path: Path, kind: type[events.Event], at: int) -> None:
    """All at the same event, in the middle of writing it down: nobody's files are taken for another past."""
    village = Village(tmp_path, steps=STEPS)

    def die(event: events.Event) -> None:
        if isinstance(event, kind) and getattr(event, "step", 0) >= at:
            raise RuntimeError("killed")

    assert {str(found) for found in village.run(on_event=die, evaluate_every=1)} == {"killed"}
    outcomes = village.run()
    assert all(isinstance(found, Outcome) and found.finished and not found.banned for found in outcomes), outcomes


# ---- Files that are damaged, missing, or something else


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garble(path: Path) -> None:
    path.write_bytes(b"\xc1\x93 something else\n" * 50)


def nest(path: Path) -> None:
    path.write_bytes(b"x = " + b"[" * 20_000 if path.suffix == ".toml" else b"\x91" * 20_000)


def make_directory(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.mkdir()


def make_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def flip_length(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1] ^= 0x40
    path.write_bytes(data)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("journal.bin", empty, "damaged at byte 0.*take a new key"),
    ("journal.bin", garble, "damaged at byte 0"),
    ("journal.bin", flip_length, "damaged at byte 0"),
    ("journal.bin", make_directory, "could not be opened: Is a directory; expected this peer's journal"),
    ("events.jsonl", remove, "missing, though there is .*put it back, or .*touch"),
    ("events.jsonl", garble, "not an event log; put the run's own back"),
    ("events.jsonl", nest, "not an event log; put the run's own back"),
    ("events.jsonl", flip_length, "line 1 is no event.*get an unaltered copy"),
    ("events.jsonl", make_directory, "Is a directory; expected a file"),
    ("transcript.bin", remove, "missing, though there is .*put it back, or .*touch"),
    ("transcript.bin", garble, "damaged at byte 0.*truncate -s 0"),
    ("transcript.bin", nest, "damaged at byte 0"),
    ("transcript.bin", flip_length, "damaged at byte 0"),
    ("transcript.bin", make_directory, "Is a directory; expected a file"),
    ("checkpoints", make_file, "expected a folder, in which a run keeps its checkpoints"),
    ("checkpoints/000004", make_file, "expected the folder of a checkpoint; remove it to use the one before"),
    ("checkpoints/000004", make_directory, "not a whole checkpoint.*remove it to use the one before"),
    *((f"checkpoints/000004/{name}", damage, "not a whole checkpoint.*remove it to use the one before")
      for name in ("memory.bin", "state.safetensors")
      for damage in (remove, empty, garble, nest, make_directory)),
    (".lock", make_directory, "Is a directory; expected a file"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "damage", "words"), DAMAGE, ids=[f"{damage.__name__} {name}" for name, damage, _ in DAMAGE]
)
def test_what_is_wrong_with_a_file_is_one_line(
    village: Village, folder: Path, name: str, damage: Callable[[Path], object], words: str
) -> None:
    damage(folder / name)
    named = Path(name).parent if name.count("/") > 1 else name  # of a checkpoint the whole folder is of no use
    check_refused(village, folder, f"{named}: {words}")


@pytest.mark.parametrize("name", ["events.jsonl", "transcript.bin", "journal.bin", "checkpoints"])
def test_what_is_of_another_run_is_refused(village: Village, other: Village, folder: Path, name: str) -> None:
    source, target = other.get_folder(0) / name, folder / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    check_refused(village, folder, f"{name}.*of another run")


@pytest.mark.parametrize("name", ["events.jsonl", "transcript.bin"])
def test_whoever_gives_up_a_record_goes_on_without_it(village: Village, folder: Path, name: str) -> None:
    """As the refusal says."""
    (folder / name).unlink()
    (folder / name).touch()
    start(village, folder)


# ---- The transcript


def test_a_transcript_cut_off_anywhere_keeps_its_whole_records(village: Village, folder: Path) -> None:
    path = folder / "transcript.bin"
    data, whole = path.read_bytes(), read_transcript(path)
    size = 8 + int.from_bytes(data[:8], "little")
    for end in [*range(size, size + 40), *range(size + 40, len(data), 97)]:
        path.write_bytes(data[:end])
        kept = read_transcript(path)
        assert 1 <= len(kept) < len(whole)
        assert kept == whole[: len(kept)]
    start(village, folder)
    assert data.startswith(path.read_bytes())
    assert read_transcript(path) == kept


def test_no_flipped_length_costs_what_follows(village: Village, folder: Path) -> None:
    path = folder / "transcript.bin"
    data, at = path.read_bytes(), 0
    while at < len(data):
        for bit in range(64):
            spoilt = bytearray(data)
            spoilt[at + bit // 8] ^= 1 << bit % 8
            path.write_bytes(spoilt)
            with pytest.raises(LocalError, match=rf"transcript\.bin: damaged at byte {at},"):
                read_transcript(path)
        check_refused(village, folder, f"damaged at byte {at},")
        at += 8 + int.from_bytes(data[at : at + 8], "little")


def test_zeros_that_a_power_cut_leaves_are_dropped(village: Village, folder: Path) -> None:
    path = folder / "transcript.bin"
    data = path.read_bytes()
    path.write_bytes(data + bytes(3 << 20))
    start(village, folder)
    assert path.read_bytes() == data
    path.write_bytes(data + bytes(3 << 20) + b"1")
    check_refused(village, folder, f"damaged at byte {len(data)},")


# ---- The manifest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("seed = 0", "seed = " + "[" * 20_000), "nested too deeply"),
        (("seed = 0", "seed = " + "{a = " * 10_000), "nested too deeply"),
        (("seed = 0", "seed = " + "1" * 5000), "not a TOML file"),
        (("seed = 0", "seed = {a = 1}"), r"\[run\] seed holds more than one value; expected a flat one"),
        (("seed = 0", "seed = [[1]]"), r"\[run\] seed holds more than one value"),
        (('name = "sgd"', "name = {a = {b = 1}}"), r"\[optimizer\] name holds more than one value"),
        (("options = {}", "options = {a = {b = 1}}"), r"\[task\] options holds more than one value"),
        (("options = {}", 'options = {a = "x\\u0000"}'), r"\[task\] options has a NUL in its text"),
        (('method = "none"', 'method = "a\\u0000b"'), r"\[run\] method has a NUL in its text; take it out"),
        (("threads = 1", "threads = 1000000000"), r"Expected `int` <= 1024 - at `\$.run.threads`"),
        (("threads = 1", "threads = 0"), r"Expected `int` >= 1 - at `\$.run.threads`"),
        ((f"steps = {STEPS}", f"steps = {10**25}"), r"\$.run.steps"),
        (("probation = 12", f"probation = {10**25}"), r"\$.network.probation"),
        (("newcomer_probation = 0", "newcomer_probation = -1"), r"\$.network.newcomer_probation"),
        (("delta = 1.0", "delta = 1e308"), r"\$.network.delta"),
        (("version = 1", ""), "not a manifest: expected a version"),
    ],
)
def test_a_manifest_that_cannot_be_is_one_line(
    village: Village, tmp_path: Path, change: tuple[str, str], words: str
) -> None:
    text = village.manifest_file.read_text()
    assert change[0] in text
    (tmp_path / "run.toml").write_text(text.replace(*change, 1))
    with pytest.raises(LocalError, match=words) as refusal:
        read_network_manifest(tmp_path / "run.toml")
    assert str(refusal.value).startswith(str(tmp_path / "run.toml"))
    assert "\n" not in str(refusal.value)


def test_a_folder_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="Is a directory; expected a file"):
        read_network_manifest(tmp_path)


# ---- A full disk


def test_a_file_that_a_full_disk_does_not_take_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "manifest.toml"
    path.write_text("before")

    def fill_up(place: Path) -> None:
        place.write_text("half of")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(WriteFailed, match=r"manifest\.toml: could not be written: No space left on device"):
        write_safely(path, fill_up)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("manifest.toml", "before")]


@pytest.mark.parametrize("name", ["events.jsonl", "transcript.bin"])
def test_a_record_that_a_full_disk_does_not_take_is_not_half_there(village: Village, folder: Path, name: str) -> None:
    """As it is left by a write that took a part: the peer goes on from what is whole."""
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole + whole[: len(whole) // 20])
    start(village, folder)
    assert (folder / name).read_bytes().startswith(whole)


def test_a_folder_that_cannot_be_made_is_named(village: Village, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "peer"):
        with pytest.raises((LocalError, OSError), match="file"):
            start(village, folder)
