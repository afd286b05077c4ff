"""What a peer must never forget, in one file: what it signed, what that rests on, its secret, the last view it kept.

A record is on the disk before what it says is sent. So a peer that was killed at any moment, and started again, signs
at every height what it signed there before, or nothing. Whoever loses this file must not go on with its key: it could
no longer know what it said.

Of the disk it is assumed that what it said is safe stays there, or comes back changed, but does not vanish from the end
of the file. A record at the end that is shorter than its length says was being written when the peer was killed, and
nobody acted upon it. Whatever else does not fit is damage, a length included: then the peer does not start. After a
write that failed nothing is signed any more, for memory then knows more than the disk; starting again is safe.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from phalanx.core.codec import decode_message, encode
from phalanx.core.crypto import Signer, compute_digest
from phalanx.core.effects import Heard, KeepMessages, Sign
from phalanx.core.errors import LocalError, WriteFailed
from phalanx.core.messages import Message, Outcome, Signed
from phalanx.network.disk import JOURNAL_HEIGHTS, JOURNAL_VOTES, Disk

_LENGTH = 4
_CHECK = 8
_HEADER = _LENGTH + 2 * _CHECK
"""Before each record: its length, and checks of the length and of the record that hold at this place of the file."""
_TIDY = 1 << 26
"""Bytes beyond which the file is written anew, without what has been cut."""


class _Opened(Struct, frozen=True, array_like=True, tag="opened"):
    """The first record: of which run, and the secret behind all shares of randomness."""

    run: bytes
    secret: bytes


class _Said(Struct, frozen=True, array_like=True, tag="said"):
    """An agreed message, or a vote of the slow path (``ballot``: round, and whether it is final)."""

    message: Signed
    ballot: tuple[int, bool] | None


class _Cut(Struct, frozen=True, array_like=True, tag="cut"):
    """Up to where nothing is signed any more."""

    floor: int
    votes: tuple[int, int, bool]


class _Kept(Struct, frozen=True, array_like=True, tag="kept"):
    view: bytes
    height: int


class _Heard(Struct, frozen=True, array_like=True, tag="heard"):
    """What others said, as it travels."""

    height: int
    kind: Heard
    messages: tuple[bytes, ...]


_Record: TypeAlias = _Opened | _Said | _Cut | _Kept | _Heard
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class Journal:
    """A peer's :class:`Disk` on a real one."""

    def __init__(self, path: Path, run: bytes, key: bytes | None = None) -> None:
        """Open the journal of a run, or begin one; :class:`LocalError` if it is another run's, in use or damaged.

        With ``key``, one that holds what another key signed is refused now rather than at the first signature.
        """
        self._path, self._run = path, run
        self._key: bytes | None = None
        """Whose messages are in it, if there are any."""
        self._whole = True
        """Whether the disk is known to hold all that memory holds."""
        self._tidied = 0
        """How long the file was when it was last written anew."""
        self._waiting = b""
        """Records that need not be on the disk before the next one that must be."""
        try:
            self._file = _open(path) if path.exists() else _write_anew(path, [_Opened(run, os.urandom(32))], False)
            try:
                self._disk = self._load()
                self._require_key(key)
            except BaseException:
                self._file.close()
                raise
        except OSError as error:
            raise LocalError(
                f"{path}: could not be opened: {error.strerror or error}; expected this peer's journal, a file that "
                "this user may read and write"
            ) from error

    @property
    def view(self) -> bytes | None:
        """The last one kept."""
        return self._disk.view

    @property
    def messages(self) -> list[Message]:
        """What others said since."""
        return self._disk.messages

    @property
    def is_new(self) -> bool:
        """Whether this peer has never signed anything in this run."""
        disk = self._disk
        return not disk.journal and not disk.votes and disk.view is None

    def sign(self, signer: Signer, run: bytes, effect: Sign) -> Signed | None:
        """Carry out :class:`Sign`; what is new is on the disk when this returns."""
        assert run == self._run, "a journal is one run's"
        self._require_whole()
        self._require_key(signer.key)
        self._key, disk = signer.key, self._disk
        ballot = (effect.body.round, effect.body.final) if isinstance(effect.body, Outcome) else None
        before = disk.votes.get((effect.height, *ballot)) if ballot is not None else disk.journal.get(effect.height)
        message = disk.sign(signer, run, effect)
        table = disk.votes.values() if ballot is not None else disk.journal.values()
        if (
            message is not None and message is not before and message is next(reversed(table), None)
        ):  # what is not agreed is kept nowhere
            self._append(_Said(message, ballot))
        return message

    def holds(self, message: Signed) -> bool:
        """Whether this peer knows that it signed this, or is past signing anything there."""
        return message.height < self._disk.floor or self._disk.journal.get(message.height) == message

    def draw_secret(self, height: int) -> tuple[bytes, bytes]:
        return self._disk.draw_secret(height)

    def keep(self, view: bytes, height: int) -> None:
        self._disk.keep(view, height)
        self._append(_Kept(view, height))

    def keep_messages(self, effect: KeepMessages) -> None:
        """Nothing rests on these before the next message is signed, so they reach the disk together with it."""
        self._disk.keep_messages(effect)
        heard = _make_heard(effect.height, effect.kind, effect.messages)
        self._waiting += _frame(heard, self._size + len(self._waiting))

    def close(self) -> None:
        waiting, self._waiting = self._waiting, b""
        if waiting and self._whole:
            with suppress(OSError):  # nothing rests on it
                _write(self._file, waiting)
                os.fdatasync(self._file.fileno())
        self._file.close()

    # ---- The file

    def _load(self) -> Disk:
        records, self._size = _read(self._path, self._file.readall())
        disk = self._restore(records)
        handle = self._file.fileno()
        if self._size < os.fstat(handle).st_size:
            os.ftruncate(handle, self._size)
        os.fsync(handle)  # what was read may have come from memory: the peer may have been killed before it was safe
        _sync_folder(self._path.parent)
        return disk

    def _restore(self, records: list[_Record]) -> Disk:
        first = records[0]
        if not isinstance(first, _Opened) or first.run != self._run:
            raise LocalError(f"{self._path}: the journal of another run; choose another folder for this one")
        disk = Disk(first.secret, None)
        for record in records[1:]:
            match record:
                case _Said(message, None):
                    disk.journal[message.height] = message
                    self._key = message.sender
                case _Said(message, (number, final)):
                    disk.votes[message.height, number, final] = message
                    self._key = message.sender
                case _Cut(floor, votes):
                    disk.floor, disk.votes_cut = floor, votes
                case _Kept(view, height):
                    disk.keep(view, height)
                case _Heard(height, kind, messages):
                    disk.keep_messages(KeepMessages(height, kind, tuple(map(decode_message, messages))))
        for height in list(disk.journal)[:-JOURNAL_HEIGHTS]:  # the file holds more than the disk's rules keep
            del disk.journal[height]
            disk.floor = max(disk.floor, height + 1)
        for ballot in list(disk.votes)[:-JOURNAL_VOTES]:
            del disk.votes[ballot]
            disk.votes_cut = max(disk.votes_cut, ballot)
        return disk

    def _require_key(self, key: bytes | None) -> None:
        if key is not None and self._key not in (None, key):
            raise LocalError(f"{self._path}: the journal of another key; choose another folder for this one")

    def _require_whole(self) -> None:
        if not self._whole:
            raise WriteFailed(f"{self._path}: could not be written before; make room and start this peer again")

    def _append(self, record: _Record) -> None:
        self._require_whole()
        self._whole = False
        frame = self._waiting + _frame(record, self._size + len(self._waiting))
        self._waiting = b""
        try:
            _write(self._file, frame)
            os.fdatasync(self._file.fileno())
            if self._size + len(frame) > max(_TIDY, 2 * self._tidied):
                self._tidy()
            else:
                self._size += len(frame)
        except OSError as error:
            with suppress(OSError):  # nobody has acted upon it, and it may look safe without being so
                os.ftruncate(self._file.fileno(), self._size)
            raise WriteFailed(f"{self._path}: could not be written: {error.strerror or error}") from error
        self._whole = True

    def _tidy(self) -> None:
        """Write what still counts to a new file, and put it in the place of the old one."""
        disk = self._disk
        records: list[_Record] = [_Opened(self._run, disk.secret), _Cut(disk.floor, disk.votes_cut)]
        records += [_Said(message, None) for message in disk.journal.values()]
        records += [_Said(message, ballot[1:]) for ballot, message in disk.votes.items()]
        records += [_Kept(disk.view, 0)] if disk.view is not None else []
        records += [_make_heard(*place, messages) for place, messages in disk.heard.items()]
        fresh = _write_anew(self._path, records, True)
        self._file.close()
        self._file = fresh
        self._size = self._tidied = os.fstat(fresh.fileno()).st_size


def _make_heard(height: int, kind: Heard, messages: Iterable[Message]) -> _Heard:
    return _Heard(height, kind, tuple(map(encode, messages)))


def _write_anew(path: Path, records: Iterable[_Record], replaces: bool) -> FileIO:
    """A file with these records, for this process alone: it stands at ``path`` when it is whole, not before."""
    draft = path.with_name(f".{path.name}.new")
    file = _open(draft, os.O_CREAT)
    try:
        if path.exists() and not replaces:
            raise _make_busy(path)
        os.ftruncate(file.fileno(), 0)
        at = 0
        for record in records:
            frame = _frame(record, at)
            _write(file, frame)
            at += len(frame)
        os.fsync(file.fileno())
        draft.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        draft.unlink(missing_ok=True)
        file.close()
        raise
    file.seek(0)
    return file


def _open(path: Path, flags: int = 0) -> FileIO:
    """The file, for this process alone."""
    file = FileIO(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600), "r+")
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise LocalError(f"{path}: not a regular file; a journal is kept in one")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _make_busy(path) from None
        if not path.exists() or not os.path.samestat(status, os.stat(path)):  # who had it wrote it anew just now
            raise _make_busy(path)
        os.fchmod(file.fileno(), 0o600)  # there is a secret in it
    except BaseException:
        file.close()
        raise
    return file


def _make_busy(path: Path) -> LocalError:
    return LocalError(f"{path}: another process runs this peer; stop it first")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(file: FileIO, data: bytes) -> None:
    """All of it: a disk that is almost full takes a part, and complains only about the next."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _frame(record: _Record, at: int) -> bytes:
    data = _encoder.encode(record)
    length = len(data).to_bytes(_LENGTH, "big")
    return length + _compute_check("length", at, length) + _compute_check("record", at, data) + data


def _compute_check(what: str, at: int, data: bytes) -> bytes:
    return compute_digest(f"journal {what}", at.to_bytes(8, "big"), data)[:_CHECK]


def _read(path: Path, data: bytes) -> tuple[list[_Record], int]:
    """All whole records, and where they end. A last one that was cut off in the middle was never acted upon."""
    records: list[_Record] = []
    at = 0
    while at + _HEADER <= len(data):
        start = at + _HEADER
        length, check = data[at : at + _LENGTH], data[at + _LENGTH : start]
        end = start + int.from_bytes(length, "big")
        if check[:_CHECK] != _compute_check("length", at, length):
            raise _make_damaged(path, at)
        if end > len(data):
            break
        if check[_CHECK:] != _compute_check("record", at, data[start:end]):
            raise _make_damaged(path, at)
        try:
            records.append(_decoder.decode(data[start:end]))
        except msgspec.DecodeError:
            raise _make_damaged(path, at) from None
        at = end
    if not records:  # the first is written before the file has its name
        raise _make_damaged(path, 0)
    return records, at


def _make_damaged(path: Path, at: int) -> LocalError:
    return LocalError(f"{path}: damaged at byte {at}: this peer cannot know what it signed; take a new key")
