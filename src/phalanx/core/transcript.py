"""What the members said in one attempt, as agreed: the only thing that decisions rest on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.crypto import recall_digest
from phalanx.core.envelope import Letter
from phalanx.core.membership import Duties, View
from phalanx.core.messages import Phase

Values = dict[bytes, Letter]
"""One letter from every member."""


def compute_values_root(roster: Iterable[bytes], values: Mapping[bytes, Letter]) -> bytes:
    """The root of a phase: what the next phase's messages name."""
    return recall_digest("phase", *(values[key].digest for key in roster))


@dataclass(slots=True)
class Page:
    """The agreed messages of one height: the first of every sender, and a second that contradicts it."""

    letters: Values = field(default_factory=dict)
    seconds: Values = field(default_factory=dict)
    roots: set[bytes] = field(default_factory=set)
    """What the first letters name as the root before them."""
    root: bytes | None = None
    """The root that these should name, where I know it: of a sender's letters the one that does is taken."""
    times: dict[bytes, float] = field(default_factory=dict)
    """When each sender's first letter came."""
    settled: dict[bytes, bytes] = field(default_factory=dict)
    """Which letters a slow path has settled on: of a sender with more than two they may be neither of those held."""

    def add(self, letter: Letter) -> bool:
        """Take a letter; whether it is news."""
        sender = letter.message.sender
        first = self.letters.get(sender)
        if first is None:
            self.letters[sender] = letter
            self.roots.add(letter.message.previous)
            return True
        if self.settled and self.settled.get(sender) == letter.digest:
            self._replace(first, letter)
            return first.digest != letter.digest
        if first.message.previous != self.root == letter.message.previous:
            self._replace(first, letter)
            return True
        if first.digest != letter.digest and sender not in self.seconds:
            self.seconds[sender] = letter
            return True
        return False

    def get_all(self, sender: bytes) -> list[Letter]:
        return [page[sender] for page in (self.letters, self.seconds) if sender in page]

    def choose(self, sender: bytes, digest: bytes) -> bool:
        """Make the letter with this digest the sender's; whether it is here."""
        found = next((letter for letter in self.get_all(sender) if letter.digest == digest), None)
        if found is not None:
            self._replace(self.letters[sender], found)
        return found is not None

    def _replace(self, first: Letter, letter: Letter) -> None:
        if first.digest != letter.digest:
            sender = letter.message.sender
            self.letters[sender], self.seconds[sender] = letter, first
            self.roots = {x.message.previous for x in self.letters.values()}


@dataclass(slots=True)
class Transcript:
    """One attempt."""

    view: View
    duties: Duties
    phases: dict[Phase, Values] = field(default_factory=dict)
    heights: dict[int, Phase] = field(default_factory=dict)
    sealing: View | None = None
    """The view that SEAL or ABORT, once complete, leads to."""
    offences: dict[bytes, Any] = field(default_factory=dict)
    """Why that view bans whom it bans (``justice.Offence``)."""
    removals: dict[bytes, str] = field(default_factory=dict)
    """Why it removes whom it removes."""
    outcomes: dict[bytes, View] = field(default_factory=dict)
    """Views that a slow path of this attempt may lead to, by their digests."""
    served: dict[bytes, bytes] = field(default_factory=dict)
    """Probationers whose commit a majority has listed, and its digest (``justice.find_served``)."""
    settled: set[int] = field(default_factory=set)
    """Heights whose slow path ended without anybody going."""
    randomness: bytes | None = None
    heard: list[Values] = field(default_factory=list)
    """The votes of rounds that are over: another VOTE follows."""

    def get_votes(self, round_: int) -> Values:
        """What was voted in a round, as far as it is known."""
        return self.heard[round_] if round_ < len(self.heard) else self.phases.get(Phase.VOTE, {})

    def is_measured(self, *heights: int) -> bool:
        """Whether what these heights took says who was late: where a slow path went to its end, nobody knows."""
        return self.settled.isdisjoint(heights)

    def record(self, height: int, phase: Phase, values: Values) -> None:
        self.phases[phase] = values
        self.heights[height] = phase

    @property
    def reports(self) -> Values | None:
        return self.phases.get(Phase.REPORT_AGAIN, self.phases.get(Phase.REPORT))

    @property
    def is_reported(self) -> bool:
        """Whether the reports that count are here."""
        said = self.phases.get(Phase.REPORT)
        lacking = said is not None and any(getattr(x.body, "lacking", ()) for x in said.values())
        return Phase.REPORT_AGAIN in self.phases if lacking else said is not None

    @property
    def aggregates(self) -> Values | None:
        return self.phases.get(Phase.AGGREGATE_AGAIN, self.phases.get(Phase.AGGREGATE))
