"""Attacks on the slow path by what is put into it: items that do not belong together, and long ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from phalanx.attacks.base import Attack, Insider, Mail, forge
from phalanx.attacks.broadcast import SlowPathAttack, is_own
from phalanx.core import messages as m
from phalanx.core.crypto import SIGNATURE_SIZE, Domain, compute_digest
from phalanx.core.effects import Broadcast, Delivery, Effect, Sign
from phalanx.core.envelope import compute_message_digest, open_body, seal
from phalanx.core.errors import Malformed
from phalanx.core.events import SlowPath
from phalanx.core.messages import MAX_BODY, Message, Phase, Signed


@dataclass(kw_only=True, eq=False)
class MixedItem(SlowPathAttack):
    """Opens a slow path by a wrong root, and puts in a vote and a timeout as one item, which may break who reads it."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return replace(sign, previous=bytes([5]) * 32) if isinstance(sign.body, m.Reveal) else sign

    def on_slow_path(self, insider: Insider, event: SlowPath) -> None:
        if not insider.honest:
            return
        place = (event.height, event.step, event.attempt, Phase.COMMIT, bytes(32))
        run, signer = insider.config.run, insider.signer
        vote = seal(signer, run, *place, m.Outcome(0, False, bytes(32), False, bytes(32)))
        other = seal(signer, run, *place, m.Timeout(insider.honest[:1], 0, None))
        item = compute_digest("item", compute_message_digest(vote), compute_message_digest(other))
        mine = seal(signer, run, *place, m.Endorsement(0, item))
        insider.notes["mixed"] = True
        insider.send_later(0.0, insider.honest, m.Gossip(event.height, 0, (m.Relay((vote, other), (mine,)),), ()))


@dataclass(kw_only=True, eq=False)
class LongEndorsements(Attack):
    """Gossip of many rounds, to fill one member's memory: ``each`` frames a round, with endorsements that are long."""

    rounds: int = 10
    each: int = 2
    count: int = 20
    """How many endorsements a frame has."""
    length: int = MAX_BODY
    """Of an endorsement's body, in bytes."""

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        if "long gossip" in insider.notes:
            return
        insider.notes["long gossip"] = True
        place = (insider.config.run, 0, 0, 0, Phase.COMMIT, insider.key, bytes(32))
        long = Signed(Domain.ENDORSEMENT, *place, bytes(self.length), bytes(SIGNATURE_SIZE))
        short = Signed(Domain.AGREED, *place, b"", bytes(SIGNATURE_SIZE))
        for number in range(self.rounds * self.each):
            relay = m.Relay((short,), (long,) * self.count)
            yield Broadcast(insider.honest[:1], m.Gossip(insider.view.height, 5 + number % self.rounds, (relay,), ()))


@dataclass(kw_only=True, eq=False)
class LongBodies(Attack):
    """Two bodies at each of two heights instead of REVEAL, all as long as may be, to keep others out; then silence."""

    votes: bool = False
    """Whether it then agrees with everybody's vote."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if (self, "spent") in insider.notes:
            return ()
        if not isinstance(message, Signed) or not is_own(insider, message, (Phase.REVEAL,)):
            return ((to, message),)
        insider.notes[self, "spent"] = insider.notes["spent"] = True
        self.spend(insider, message)
        return ()

    def spend(self, insider: Insider, message: Signed) -> None:
        """What goes out in the place of REVEAL."""
        for height, phase in ((message.height, Phase.REVEAL), (message.height + 1, Phase.REPORT)):
            for filling in (b"1", b"2"):
                long = msgspec.structs.replace(message, height=height, phase=phase, body=filling * MAX_BODY)
                insider.send_later(0.0, insider.honest, forge(insider.signer, long))
        if self.votes:
            plot = (insider.key, *(key for key in insider.view.roster if key in insider.plot.keys))
            timeout = insider.seal_again(message, m.Timeout(plot[-1:], 0, None))
            insider.send_later(3.9 * insider.config.delta, insider.honest, timeout)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        message = delivery.message
        if not self.votes or not isinstance(message, Signed) or message.domain is not Domain.OUTCOME:
            return delivery
        if message.sender == delivery.sender and message.sender in insider.honest:
            try:
                body = open_body(message)
            except Malformed:
                return delivery
            insider.send_later(0.0, (message.sender,), insider.seal_again(message, body))
        return delivery


@dataclass(kw_only=True, eq=False)
class RevealForSome(LongBodies):
    """Its REVEAL reaches ``count`` members, shortly before it is too late to pass it on; then silence."""

    count: int = 1

    def spend(self, insider: Insider, message: Signed) -> None:
        insider.send_later(3.8 * insider.config.delta, insider.honest[: self.count], message)
