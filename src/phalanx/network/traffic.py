"""What went over the links, counted by kind: the same in the simulator and on a network."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.crypto import Domain
from phalanx.core.messages import AggregateChunk, Message, PartChunk, Phase, Signed, StateChunk


@dataclass(slots=True)
class Count:
    """Messages of one kind. Their frames took ``payload + rest`` bytes; the payload is the data in chunks."""

    messages: int = 0
    payload: int = 0
    rest: int = 0


class Traffic(dict[str, Count]):
    """What peers sent, by kind: one for each receiver, whether or not it arrived. Repeats by the links do not count."""

    def add(self, kind: str, messages: int, size: int, payload: int) -> None:
        count = self.get(kind)
        if count is None:
            count = self[kind] = Count()
        count.messages += messages
        count.payload += messages * payload
        count.rest += messages * (size - payload)

    @property
    def total(self) -> Count:
        counts = self.values()
        return Count(sum(c.messages for c in counts), sum(c.payload for c in counts), sum(c.rest for c in counts))


_KIND_OF_PHASE = {phase: phase.name for phase in Phase}
_KIND_OF_DOMAIN = {domain: domain.value for domain in Domain}
CHUNKS = (PartChunk, AggregateChunk, StateChunk)


def name_kind(message: Message) -> str:
    """The kind under which traffic counts a message: ``COMMIT``, ``timeout``, ``partchunk``."""
    if type(message) is Signed:
        if message.domain == Domain.AGREED:
            return _KIND_OF_PHASE.get(message.phase, "agreed")
        return _KIND_OF_DOMAIN.get(message.domain, "signed")
    return type(message).__name__.lower()
