"""Attacks on the agreed broadcast: two values, none, late, old or senseless ones, and on the slow path behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from random import Random

import msgspec

from phalanx.attacks.base import Attack, Insider, Mail, change_body, forge
from phalanx.core import messages as m
from phalanx.core.codec import encode
from phalanx.core.crypto import Domain, compute_digest
from phalanx.core.effects import Broadcast, Delivery, Effect, Note, Sign, Story
from phalanx.core.envelope import compute_message_digest, open_body, seal
from phalanx.core.events import SlowPath
from phalanx.core.messages import MAX_BODY, Message, Phase, Signed, Verdict

ALL_PHASES = frozenset(Phase)


def is_own(insider: Insider, message: Message, phases: Collection[Phase] = ALL_PHASES) -> bool:
    """Whether this is an agreed message of mine, of one of these phases."""
    return (
        isinstance(message, Signed)
        and message.domain is Domain.AGREED
        and message.sender == insider.key
        and message.phase in phases
    )


def vary(body: m.Body, random: Random) -> m.Body:
    """Something else that could be said in the same place."""
    other = random.randbytes(32)
    match body:
        case m.Commit():
            return msgspec.structs.replace(body, share=other)
        case m.Aggregate(missing=()):
            return msgspec.structs.replace(body, result=other)
        case m.Aggregate():
            return msgspec.structs.replace(body, result=other, missing=())
        case m.Reveal():
            return msgspec.structs.replace(body, share=other)
        case m.Report(sums=()):
            return msgspec.structs.replace(body, findings=() if body.findings else (_find_nothing(other),))
        case m.Report():
            return msgspec.structs.replace(body, sums=tuple(x + (x != 0) * random.random() for x in body.sums))
        case m.Confirm():
            return msgspec.structs.replace(body, state=other)
        case m.Vote(ballots=()):
            return msgspec.structs.replace(body, unopened=((0, 0),))
        case m.Vote():
            return msgspec.structs.replace(body, ballots=tuple(map(turn, body.ballots)))
        case m.Seal() | m.Abort():
            return msgspec.structs.replace(body, view=other)
        case m.Outcome():
            return msgspec.structs.replace(body, view=other)
    return body


def _find_nothing(key: bytes) -> m.Finding:
    return m.Finding(key, Verdict.INCONCLUSIVE)


def turn(ballot: m.Ballot) -> m.Ballot:
    """The opposite vote."""
    return m.Ballot(ballot.case, Verdict.INNOCENT if ballot.verdict is Verdict.GUILTY else Verdict.GUILTY)


# ---- Two values


@dataclass(kw_only=True, eq=False)
class Equivocate(Attack):
    """Two values in one slot: one to a half of the honest members, another to the rest.

    With ``late``, all get the first in time, and ``count`` honest members the second, ``late`` deltas after it.
    """

    phases: Collection[Phase] = ALL_PHASES
    late: float | None = None
    count: int = 1

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, Signed) or not is_own(insider, message, self.phases):
            return ((to, message),)
        second = insider.notes.get((self, message.height))
        if second is None:
            body = vary(open_body(message), insider.random)
            second = insider.notes[self, message.height] = insider.seal_again(message, body)
        honest = [key for key in to if key not in insider.plot.keys]
        if self.late is not None:
            insider.send_later(self.late * insider.config.delta, honest[: self.count], second)
            return ((to, message),)
        half = set(honest[len(honest) // 2 :])
        first, rest = [tuple(key for key in to if (key in half) is chosen) for chosen in (False, True)]
        return (first, message), (rest, second)


@dataclass(kw_only=True, eq=False)
class EquivocateToEach(Attack):
    """Another value in one slot for every honest member: no two of them start from the same pair."""

    phases: Collection[Phase] = ALL_PHASES

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not isinstance(message, Signed) or not is_own(insider, message, self.phases):
            yield to, message
            return
        yield tuple(key for key in to if key in insider.plot.keys), message
        for key in to:
            if key not in insider.plot.keys:
                place = (self, message.height, key)
                if place not in insider.notes:
                    body = vary(open_body(message), insider.random)
                    insider.notes[place] = insider.seal_again(message, body)
                yield (key,), insider.notes[place]


@dataclass(kw_only=True, eq=False)
class WrongRoot(Attack):
    """Names a root that nobody has, in some phases."""

    phases: Collection[Phase] = ALL_PHASES

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if type(sign.body) in m.BODY_OF_PHASE.values() and sign.phase in self.phases:
            return replace(sign, previous=insider.random.randbytes(32))
        return sign


# ---- Silence and lateness


@dataclass(kw_only=True, eq=False)
class Silent(Attack):
    """No message of these phases, to anybody."""

    phases: Collection[Phase] = ALL_PHASES

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return None if type(sign.body) in m.BODY_OF_PHASE.values() and sign.phase in self.phases else sign


@dataclass(kw_only=True, eq=False)
class SilentToSome(Attack):
    """Messages of these phases do not reach ``count`` honest members, from me at least."""

    phases: Collection[Phase] = ALL_PHASES
    count: int = 1

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if is_own(insider, message, self.phases):
            to = tuple(key for key in to if key not in insider.honest[: self.count])
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class Late(Attack):
    """Agreed messages held back by ``delay`` deltas: just before the deadline, or just after it."""

    delay: float = 2.8
    phases: Collection[Phase] = ALL_PHASES

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, Signed) and is_own(insider, message, self.phases):
            insider.withhold(message)
            insider.send_later(self.delay * insider.config.delta, to, message)
            return ()
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class PrematureTimeouts(Attack):
    """Claims, as soon as a phase starts, that all honest members (or ``count``) are missing."""

    count: int | None = None

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        yield to, message
        if isinstance(message, Signed) and is_own(insider, message):
            missing = tuple(sorted(insider.honest[: self.count]))
            if missing:
                yield to, insider.seal_again(message, m.Timeout(missing, 0, None))


# ---- Old messages, and senseless ones


@dataclass(kw_only=True, eq=False)
class Replay(Attack):
    """Says again what was said in earlier steps and attempts, by itself and by others; and in other runs."""

    each: int = 5

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        yield to, message
        if not isinstance(message, Signed) or not is_own(insider, message):
            return
        old = [x for (height, _), x in insider.heard.items() if height < message.height]
        for again in insider.random.sample(old, min(self.each, len(old))):
            yield to, again
            yield to, msgspec.structs.replace(again, run=insider.random.randbytes(32))
            # A signature of another place, on this one: of another's message it is a forgery.
            yield to, msgspec.structs.replace(again, step=message.step, attempt=message.attempt, height=message.height)
        strange = (insider.random.randbytes(32), message.height, message.step, message.attempt, message.phase)
        yield to, seal(insider.signer, *strange, message.previous, vary(open_body(message), insider.random))


@dataclass(kw_only=True, eq=False)
class Malformed(Attack):
    """A valid signature on what is no body of its phase.

    ``kind``: ``garbage`` bytes, a ``swapped`` body of another phase, one ``oversize``, indices out of ``range``, or
    labels of another ``step``.
    """

    kind: str = "garbage"
    phases: Collection[Phase] = ALL_PHASES

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        body, count = sign.body, len(insider.view.roster)
        if type(body) not in m.BODY_OF_PHASE.values() or sign.phase not in self.phases:
            return sign
        if self.kind == "garbage":
            return insider.seal_bytes(sign, insider.random.randbytes(40))
        if self.kind == "oversize":
            return insider.seal_bytes(sign, bytes(MAX_BODY + 1))
        if self.kind == "swapped":
            other = m.Seal(bytes(32)) if sign.phase is not Phase.SEAL else m.Reveal(bytes(32), bytes(32))
            return insider.seal_bytes(sign, encode(other))
        if self.kind == "step":
            return replace(sign, step=sign.step + 1)
        match body:
            case m.Aggregate():
                return change_body(sign, result=None, missing=(count,))
            case m.Report():
                return change_body(sign, sums=(), norms=(), lacking=(count,))
            case m.Vote():
                return change_body(sign, unopened=((count, count),))
        return sign


@dataclass(kw_only=True, eq=False)
class Flood(Attack):
    """Direct messages that mean nothing, at the start of every attempt: chunks, requests, alarms, gossip."""

    each: int = 20

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        random, view = insider.random, insider.view
        step, height = view.step, view.height
        for _ in range(self.each):
            key, digest = random.choice(view.roster), random.randbytes(32)
            place = random.randrange(2 * len(view.roster))
            attempt = random.randrange(3)
            noise: list[Message] = [
                m.PartChunk(step, attempt, key, place, (digest,), 40, 0, random.randbytes(40)),
                m.AggregateChunk(step, attempt, place, 40, 0, random.randbytes(40)),
                m.StateChunk(step, 40, 0, random.randbytes(40)),
                m.PullMessages(height + random.randrange(9), (digest,)),
                m.PullPart(step, attempt, key, place, 1 << 40),
                m.PullAggregate(step, attempt, place, 1 << 40),
                m.PullState(step + random.randrange(3), 1 << 40),
                m.PullProof(digest),
                m.PullChain(random.randrange(height + 9)),
                m.Gossip(height + random.randrange(9), random.randrange(3), (), ()),
                m.Alarm(height + random.randrange(9), random.randrange(3), ()),
                m.Certificate(tuple(insider.heard.values())[:5]),
                m.Chain((m.Link(random.randbytes(50), ()),)),
            ]
            yield from [Broadcast(insider.others, message) for message in noise]


# ---- The slow path


@dataclass(kw_only=True, eq=False)
class SlowPathAttack(Attack):
    """Something to do when a slow path opens."""

    def on_slow_path(self, insider: Insider, event: SlowPath) -> None:
        """A slow path opened, for me at least, now."""

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        if isinstance(effect, Note) and isinstance(effect.event, SlowPath):
            self.on_slow_path(insider, effect.event)
        return (yield from super().on_effect(insider, effect))


@dataclass(kw_only=True, eq=False)
class LateSecondValue(SlowPathAttack):
    """A second value, kept until the last moment of the last round in which the plot's signatures are enough.

    It goes to one honest member. Something else has to open a slow path, such as a colluder's silence.
    """

    after: float = 0.0
    """Deltas past that moment: then it is too late by so much."""

    def on_slow_path(self, insider: Insider, event: SlowPath) -> None:
        mine = insider.heard.get((event.height, insider.key))
        honest = insider.honest
        if mine is None or not honest:
            return
        second = insider.seal_again(mine, vary(open_body(mine), insider.random))
        item = compute_digest("item", compute_message_digest(second))
        place = (event.height, event.step, event.attempt, Phase.COMMIT, bytes(32))
        endorsements = tuple(
            seal(insider.plot.signers[key], insider.config.run, *place, m.Endorsement(0, item))
            for key in insider.friends
        )
        rounds = min(len(endorsements) + 1, insider.view.bound + 1)
        gossip = m.Gossip(event.height, 0, (m.Relay((second,), endorsements),), ())
        when = (2 * rounds - 0.6 + self.after) * insider.config.delta
        insider.send_later(when, honest[:1], gossip)


@dataclass(kw_only=True, eq=False)
class GarbageGossip(SlowPathAttack):
    """Items with endorsements that are forged, of other items, or of strangers."""

    each: int = 10

    def on_slow_path(self, insider: Insider, event: SlowPath) -> None:
        random, place = insider.random, (event.height, event.step, event.attempt, Phase.COMMIT, bytes(32))
        heard = [x for (height, _), x in insider.heard.items() if abs(height - event.height) < 3]
        for _ in range(self.each):
            signed = [random.choice(heard) for _ in range(random.randrange(1, 4))]
            changed = msgspec.structs.replace(signed[0], body=random.randbytes(20))
            mine = seal(insider.signer, insider.config.run, *place, m.Endorsement(0, random.randbytes(32)))
            stolen = msgspec.structs.replace(mine, sender=random.choice(insider.others))
            items = (
                m.Relay(tuple(signed), (mine, stolen)),
                m.Relay((changed,), (stolen,)),
                m.Relay((forge(insider.signer, changed),), (mine, mine)),
            )
            delay = random.random() * 2 * (insider.view.bound + 1) * insider.config.delta
            insider.send_later(delay, insider.others, m.Gossip(event.height, 0, items, ()))


@dataclass(kw_only=True, eq=False)
class LateEndorsements(Attack):
    """Whatever it passes on in a slow path goes out ``delay`` deltas late, and to one honest member only."""

    delay: float = 1.5

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Gossip):
            insider.send_later(self.delay * insider.config.delta, insider.honest[:1], message)
            return ()
        return ((to, message),)


def is_vote(insider: Insider, message: Message) -> bool:
    return isinstance(message, Signed) and message.domain is Domain.OUTCOME and message.sender == insider.key


@dataclass(kw_only=True, eq=False)
class VotesToSome(Attack):
    """Votes of the slow path go to ``count`` honest members only."""

    count: int = 1

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if is_vote(insider, message):
            to = insider.honest[: self.count]
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class TwoVotes(Attack):
    """Votes for one outcome to some, and for another to the rest."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if not is_vote(insider, message) or not isinstance(message, Signed):
            return ((to, message),)
        second = insider.seal_again(message, vary(open_body(message), insider.random))
        half = insider.honest[len(insider.honest) // 2 :]
        return (tuple(key for key in to if key not in half), message), (half, second)


@dataclass(kw_only=True, eq=False)
class WithheldCertificates(Attack):
    """Answers nobody: no certificates, no chain, no alarms passed on."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return () if isinstance(message, m.Certificate | m.Chain | m.Alarm) else ((to, message),)


@dataclass(kw_only=True, eq=False)
class Mute(Attack):
    """Sends nothing at all."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        return ()


@dataclass(kw_only=True, eq=False)
class Echo(Attack):
    """Sends every signed message that it hears back to all: others' words, again and again."""

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        if isinstance(delivery.message, Signed) and delivery.message.sender == delivery.sender:
            insider.send_later(0.0, insider.others, delivery.message)
        return delivery
