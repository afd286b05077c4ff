"""What an attack is: a filter on the effects of an honest peer, and what colluders share.

The attacker runs the honest story. Whatever it asks of the world, and whatever the world answers, passes through
:meth:`Attack.on_effect`; the other hooks are the places where most attacks want to stand. An attack holds options only:
what it has to remember is in :class:`Insider` (one peer) or :class:`Plot` (all of them), so one attack serves many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec
from torch import Tensor

from phalanx.core import messages as m
from phalanx.core.config import Config
from phalanx.core.crypto import SIGNATURE_SIZE, Domain, Identity, Signer, compute_digest
from phalanx.core.effects import (
    Begin,
    Broadcast,
    ComputeAggregate,
    ComputeReport,
    Delivery,
    Effect,
    Finished,
    Note,
    Receive,
    Send,
    Sign,
    Story,
)
from phalanx.core.envelope import _content, seal
from phalanx.core.errors import LocalError
from phalanx.core.events import AttemptStarted
from phalanx.core.justice import get_accused
from phalanx.core.membership import View, compute_batch_seed, compute_duties, make_genesis
from phalanx.core.messages import MAX_CASES, Message, Phase, Signed
from phalanx.core.peer import compute_case_digest
from phalanx.core.verification import Projections

Mail: TypeAlias = tuple[tuple[bytes, ...], Message]
"""To whom, and what."""

_HEARD_HEIGHTS = 64


class Oracle(Protocol):
    """What an attacker computes beyond its own gradient: all of it public, so any attacker could."""

    def compute_gradient(self, step: int, seed: bytes) -> Tensor | None:
        """The honest gradient on a public batch of ``step``."""
        ...

    def compute_poisoned(self, step: int, seed: bytes) -> Tensor:
        """The gradient on the same batch with false labels."""
        ...

    def compute_earlier(self, step: int, seed: bytes, delay: int) -> Tensor:
        """The gradient on the same batch at the parameters of ``delay`` steps ago, or at the initial ones."""
        ...

    def find_deviation(self, step: int, direction: Tensor, gradient: Tensor) -> Tensor:
        """The most that fits along ``direction`` into a deviation from ``gradient`` that a checker measures as 1."""
        ...


def _make_stranger(number: int) -> Signer:
    return Identity(compute_digest("stranger", number.to_bytes(8, "little")))


@dataclass(slots=True)
class Plot:
    """What the attackers of one run share."""

    keys: set[bytes] = field(default_factory=set)
    random: Random = field(default_factory=lambda: Random(0))
    notes: dict[Any, Any] = field(default_factory=dict)
    signers: dict[bytes, Signer] = field(default_factory=dict)
    make_stranger: Callable[[int], Signer] = _make_stranger
    """Keys that are nobody's, by number: they cost nothing."""


class Insider:
    """One attacker: who it is, where the run stands, and what it remembers."""

    def __init__(
        self, signer: Signer, config: Config, plot: Plot, random: Random | None = None, oracle: Oracle | None = None
    ) -> None:
        self.key, self.signer, self.config, self.plot = signer.key, signer, config, plot
        self._oracle = oracle
        self._drawn = plot.random.random() if random is None else None
        self.random = Random(0) if random is None else random
        plot.keys.add(self.key)
        plot.signers[self.key] = signer
        self.now = 0.0
        self.notes: dict[Any, Any] = {}
        self.heard: dict[tuple[int, bytes], Signed] = {}
        """Agreed messages by height and sender, the own ones included."""
        self.cases: dict[bytes, bytes] = {}
        """Whom a case is about, by its digest."""
        self.outbox: list[tuple[float, Mail]] = []
        self.tickets: dict[int, tuple[int, bytes]] = {}
        """Gradients under way: step and seed."""
        self.enter(make_genesis(config))

    def enter(self, view: View) -> None:
        self.view = view
        self.duties = compute_duties(self.config, view)
        if self._drawn is not None:  # anew in each attempt: one that is resumed draws what it would have drawn
            self.random = Random(f"{self._drawn} {view.step} {view.attempt}")
        for place in [place for place in self.heard if place[0] < view.height - _HEARD_HEIGHTS]:
            del self.heard[place]

    @property
    def seed(self) -> bytes:
        """Of my public batch in this step."""
        return compute_batch_seed(self.config, self.view.randomness, self.view.step, self.key)

    @property
    def honest(self) -> tuple[bytes, ...]:
        """The members that are not in the plot, in the roster's order."""
        return tuple(key for key in self.view.roster if key not in self.plot.keys)

    @property
    def friends(self) -> tuple[bytes, ...]:
        """The other members in the plot."""
        return tuple(key for key in self.view.roster if key in self.plot.keys and key != self.key)

    @property
    def crew(self) -> tuple[bytes, ...]:
        """The contributors in the plot, in the roster's order."""
        return tuple(key for key in self.duties.contributors if key in self.plot.keys)

    @property
    def others(self) -> tuple[bytes, ...]:
        return tuple(key for key in self.view.roster if key != self.key)

    @property
    def index(self) -> int | None:
        """My place in the roster."""
        return self.view.roster.index(self.key) if self.key in self.view.roster else None

    @property
    def oracle(self) -> Oracle:
        if self._oracle is None:
            raise LocalError("this attack recomputes gradients of a task, and there is none here")
        return self._oracle

    def compute_honest(self) -> list[Tensor]:
        """The gradients of this step's honest contributors, recomputed from their public seeds."""
        view, found = self.view, []
        for key in self.duties.contributors:
            if key not in self.plot.keys:
                seed = compute_batch_seed(self.config, view.randomness, view.step, key)
                gradient = self.oracle.compute_gradient(view.step, seed)
                if gradient is not None:
                    found.append(gradient)
        return found

    def find(self, phase: Phase, sender: bytes) -> Signed | None:
        """The sender's message of a phase of this attempt, if it was heard."""
        for (height, key), message in reversed(self.heard.items()):
            place = (message.step, message.attempt, message.phase)
            if key == sender and height >= self.view.height and place == (self.view.step, self.view.attempt, phase):
                return message
        return None

    def send_later(self, delay: float, to: Iterable[bytes], message: Message) -> None:
        """Send this when ``delay`` seconds have passed."""
        self.outbox.append((self.now + delay, (tuple(to), message)))

    def withhold(self, message: Signed) -> None:
        """Keep this out of everything that is sent, until it is sent later."""
        self.notes.setdefault("withheld", set()).add(message)

    def release(self, message: Message) -> None:
        if isinstance(message, Signed):
            self.notes.get("withheld", set()).discard(message)

    def seal(self, sign: Sign, body: m.Body | None = None, previous: bytes | None = None) -> Signed:
        """Sign, past the journal: a second message where one was signed already."""
        return seal(
            self.signer,
            self.config.run,
            sign.height,
            sign.step,
            sign.attempt,
            sign.phase,
            sign.previous if previous is None else previous,
            sign.body if body is None else body,
        )

    def seal_again(self, message: Signed, body: m.Body) -> Signed:
        """Another body in the place of a message that is signed already."""
        place = (message.height, message.step, message.attempt, message.phase, message.previous)
        return seal(self.signer, self.config.run, *place, body)

    def seal_bytes(self, sign: Sign, data: bytes) -> Signed:
        """A valid signature on bytes that need not be a body at all."""
        return forge(
            self.signer,
            Signed(
                Domain.AGREED,
                self.config.run,
                sign.height,
                sign.step,
                sign.attempt,
                sign.phase,
                self.key,
                sign.previous,
                data,
                bytes(SIGNATURE_SIZE),
            ),
        )


def forge(signer: Signer, message: Signed) -> Signed:
    """The message with the signer's signature, whatever it says."""
    named = msgspec.structs.replace(message, sender=signer.key)
    return msgspec.structs.replace(named, signature=signer.sign(named.domain, _content(named)))


def change_body(sign: Sign, **fields: Any) -> Sign:
    """The same place, with other words in some fields of the body."""
    return replace(sign, body=msgspec.structs.replace(sign.body, **fields))


def accuse(sign: Sign, *cases: bytes) -> Sign:
    """A CONFIRM that names these cases as well, in the place of others if there is no more room."""
    assert isinstance(sign.body, m.Confirm)
    others = [case for case in sign.body.accusations if case not in cases][: MAX_CASES - len(cases)]
    return change_body(sign, accusations=(*others, *cases))


@dataclass(kw_only=True, eq=False)
class Attack:
    """Honest in everything; subclasses override a hook or two. Active from step ``start`` until before ``stop``.

    Of these steps it acts in each ``every``-th, there with ``probability``: drawn once, from the key and the step.
    """

    start: int = 0
    stop: int | None = None
    every: int = 1
    probability: float = 1.0
    steady: ClassVar[bool] = False
    """Whether it covers for others, and so does not follow ``every``."""

    # ---- Hooks

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        """My own gradient. What I recompute of others does not come here."""
        return gradient

    def on_aggregate(self, insider: Insider, effect: ComputeAggregate, result: Tensor) -> Tensor:
        """The aggregate of my part."""
        return result

    def on_report(self, insider: Insider, effect: ComputeReport, projections: Projections) -> Projections:
        """What I report of the aggregates."""
        return projections

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        """What is signed instead, or a message that is signed already; None: it is signed, and sent to nobody."""
        return sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        """What is sent to whom instead; more messages, fewer, or others."""
        return ((to, message),)

    def on_delivery(self, insider: Insider, delivery: Delivery) -> Delivery | None:
        """What I hear; None: I did not."""
        return delivery

    def each_attempt(self, insider: Insider) -> Iterable[Effect]:
        """Done at the start of every attempt. Results of these effects are not seen."""
        return ()

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        """Everything that the honest peer asks for. Returns what it gets; asks the world by yielding."""
        if type(effect) is Receive:
            return (yield from self._receive(insider, effect))
        if isinstance(effect, Sign):
            return (yield from self._sign(insider, effect))
        if isinstance(effect, Send | Broadcast):
            to = effect.to if isinstance(effect, Broadcast) else (effect.to,)
            for mail in _sort_out(insider, to, effect.message):
                yield from _post(self.on_message(insider, *mail))
            return None
        result = yield effect
        if isinstance(effect, ComputeAggregate):
            return self.on_aggregate(insider, effect, result)
        if isinstance(effect, ComputeReport):
            return self.on_report(insider, effect, result)
        if isinstance(effect, Note) and isinstance(effect.event, AttemptStarted):
            for extra in self.each_attempt(insider):
                _ = yield extra  # not "yield from": an iterable need not take results
        return result

    # ---- Machinery

    def wrap(self, story: Story, insider: Insider) -> Story:
        """The honest story as the attack changes it."""
        resume: Any = story.send
        value: Any = None
        while True:
            try:
                effect = resume(value)
            except StopIteration as end:
                return end.value
            _watch(insider, effect)
            filtered = self.on_effect if self.is_active(insider) else _be_honest
            try:
                value = yield from filtered(insider, effect)
                resume = story.send
                if isinstance(effect, Begin):
                    insider.tickets[value] = (effect.work.step, effect.work.seed)
            except Exception as error:  # the honest story hears of it where it asked
                value, resume = error, story.throw

    def is_active(self, insider: Insider) -> bool:
        """Whether the attack acts in the present step."""
        step = insider.view.step
        if step < self.start or (self.stop is not None and step >= self.stop) or (step - self.start) % self.every:
            return False
        if self.probability >= 1:
            return True
        name = type(self).__name__.encode()
        drawn = compute_digest("whether to attack", insider.config.run, insider.key, step.to_bytes(8, "little"), name)
        return int.from_bytes(drawn[:8], "little") < self.probability * 2.0**64

    def _sign(self, insider: Insider, effect: Sign) -> Story:
        changed = self.on_body(insider, effect)
        if isinstance(changed, Signed):
            message = changed
        else:
            message = yield effect if changed is None else changed
        if changed is None and message is not None:
            insider.withhold(message)
        return _hear(insider, message)

    def _receive(self, insider: Insider, effect: Receive) -> Story:
        while True:
            delivery = yield from _receive(insider, effect)
            work = delivery.message
            if isinstance(work, Finished) and insider.tickets.get(work.ticket, (0, b""))[1] == insider.seed:
                step, seed = insider.tickets[work.ticket]
                value = self.on_gradient(insider, step, seed, work.value)
                return Delivery(delivery.now, delivery.sender, Finished(work.ticket, value))
            heard = delivery if work is None else self.on_delivery(insider, delivery)
            if heard is not None:
                return heard


@dataclass(kw_only=True, eq=False)
class Combined(Attack):
    """Several attacks at once; each with its own start, stop and probability."""

    attacks: tuple[Attack, ...] = ()

    def wrap(self, story: Story, insider: Insider) -> Story:
        for attack in self.attacks:
            story = attack.wrap(story, insider)
        return story


def combine(*attacks: Attack) -> Attack:
    """One attack of several: the first stands closest to the honest peer."""
    return Combined(attacks=attacks)


def _watch(insider: Insider, effect: Effect) -> None:
    if isinstance(effect, Note) and isinstance(effect.event, AttemptStarted):
        insider.enter(effect.event.view)


def _be_honest(insider: Insider, effect: Effect) -> Story:
    if type(effect) is Receive:
        return (yield from _receive(insider, effect))
    result = yield effect
    return _hear(insider, result) if isinstance(effect, Sign) else result


def _receive(insider: Insider, effect: Receive) -> Story:
    """Wait as the honest peer does, and send in between what was put off until now."""
    while True:
        wait = effect
        if insider.outbox:
            due = sorted((mail for mail in insider.outbox if mail[0] <= insider.now), key=lambda mail: mail[0])
            insider.outbox = [mail for mail in insider.outbox if mail[0] > insider.now]
            for _, mail in due:
                insider.release(mail[1])
            yield from _post(mail for _, mail in due)
            soonest = min((time for time, _ in insider.outbox), default=math.inf)
            wait = Receive(min(effect.until, soonest))
        delivery: Delivery = yield wait
        insider.now = delivery.now
        message = delivery.message
        if type(message) is Signed:
            _hear(insider, message)
        elif isinstance(message, m.Accusation | m.Equivocation | m.WrongReveal | m.WrongOpening | m.MalformedBody):
            note_case(insider, message)
        if message is not None or delivery.now >= effect.until:
            return delivery


def note_case(insider: Insider, case: m.Accusation | m.Proof) -> bytes:
    """Remember whom a case is about; its digest."""
    digest = compute_case_digest(case)
    insider.cases[digest] = get_accused(case)
    return digest


def _hear(insider: Insider, message: Signed | None) -> Signed | None:
    if message is not None and message.domain is Domain.AGREED:
        insider.heard.setdefault((message.height, message.sender), message)
    return message


def _sort_out(insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
    """Keep what is withheld out of everything that would carry it."""
    withheld: set[Signed] = insider.notes.get("withheld", set())
    if not withheld:
        yield to, message
    elif isinstance(message, m.Certificate):
        left = tuple(x for x in message.messages if x not in withheld)
        if left:
            yield to, m.Certificate(left)
    elif isinstance(message, m.Gossip):
        items = tuple(item for item in message.items if not withheld.intersection(item.messages))
        yield to, m.Gossip(message.height, message.round, items, ())
    elif not isinstance(message, Signed) or message not in withheld:
        yield to, message


def _post(mails: Iterable[Mail]) -> Story:
    for to, message in mails:
        if to:
            yield Broadcast(to, message)
