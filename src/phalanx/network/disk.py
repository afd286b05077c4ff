"""What a peer must not lose: it is here in memory, and ``journal.py`` writes it to a disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from phalanx.core.crypto import Domain, Signer
from phalanx.core.effects import Heard, KeepMessages, Sign
from phalanx.core.envelope import seal
from phalanx.core.errors import LocalError
from phalanx.core.messages import DOMAIN_OF_BODY, Message, Outcome, Signed
from phalanx.core.randomness import derive_seed
from phalanx.network.machine import Machine

JOURNAL_HEIGHTS = 4096
JOURNAL_VOTES = 4096

_Ballot: TypeAlias = tuple[int, int, bool]
"""Height, round and whether it is the second vote: in each a key votes once."""


@dataclass(slots=True)
class Disk:
    """What survives a crash."""

    secret: bytes
    machine: Machine | None
    journal: dict[int, Signed] = field(default_factory=dict)
    """The agreed messages of the last heights."""
    floor: int = 0
    """Below this height the journal has been cut: nothing is signed there any more."""
    votes: dict[_Ballot, Signed] = field(default_factory=dict)
    """The last votes of the slow path."""
    votes_cut: _Ballot = (-1, 0, False)
    """The latest ballot whose vote has been cut: up to it no vote is cast any more."""
    view: bytes | None = None
    heard: dict[tuple[int, Heard], tuple[Message, ...]] = field(default_factory=dict)
    """What others said since that view, by height and kind."""

    def keep(self, view: bytes, height: int) -> None:
        """Carry out :class:`Keep`."""
        self.view = view
        self.heard = {place: messages for place, messages in self.heard.items() if place[0] >= height}

    def keep_messages(self, effect: KeepMessages) -> None:
        """Carry out :class:`KeepMessages`."""
        self.heard[effect.height, effect.kind] = effect.messages

    @property
    def messages(self) -> list[Message]:
        """All that was heard."""
        return [message for messages in self.heard.values() for message in messages]

    def sign(self, signer: Signer, run: bytes, effect: Sign) -> Signed | None:
        """Carry out :class:`Sign`: never two agreed messages at one height, nor two votes in one ballot."""
        if type(effect.body) is Outcome:
            return self._vote(signer, run, effect, (effect.height, effect.body.round, effect.body.final))
        journal, height = self.journal, effect.height
        if DOMAIN_OF_BODY.get(type(effect.body)) is not Domain.AGREED:
            return _seal(signer, run, effect)
        if height in journal:
            said = journal[height]
            same = (said.step, said.attempt, said.phase) == (effect.step, effect.attempt, effect.phase)
            return said if same else None
        if height < self.floor:
            raise LocalError(f"height {height} is no longer in the journal: it may have been signed before")
        journal[height] = message = _seal(signer, run, effect)
        if len(journal) > JOURNAL_HEIGHTS:
            oldest = next(iter(journal))
            del journal[oldest]
            self.floor = max(self.floor, oldest + 1)
        return message

    def _vote(self, signer: Signer, run: bytes, effect: Sign, ballot: _Ballot) -> Signed:
        votes = self.votes
        if ballot in votes:
            return votes[ballot]
        if ballot <= self.votes_cut:
            raise LocalError(f"ballot {ballot} is no longer in the journal: the vote may have been cast before")
        votes[ballot] = message = _seal(signer, run, effect)
        if len(votes) > JOURNAL_VOTES:
            oldest = next(iter(votes))
            del votes[oldest]
            self.votes_cut = max(self.votes_cut, oldest)
        return message

    def draw_secret(self, height: int) -> tuple[bytes, bytes]:
        """A share of randomness and its salt."""
        place = height.to_bytes(8, "little")
        return derive_seed(self.secret, "share", place), derive_seed(self.secret, "salt", place)


def _seal(signer: Signer, run: bytes, effect: Sign) -> Signed:
    return seal(signer, run, effect.height, effect.step, effect.attempt, effect.phase, effect.previous, effect.body)
