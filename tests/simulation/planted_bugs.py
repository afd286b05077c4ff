"""Bugs that a careless engineer could write, planted into the core from outside: what the checkers must be able to see.

A bug is a list of edits: in the source of one function, a snippet that occurs once is replaced. The function then runs
other code until the edits are taken back; nothing in ``src`` knows of it. With each bug stands the run that shows it.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any

import msgspec
import torch

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.aggregation import FalseComplaints, ShiftedAggregate
from phalanx.attacks.base import change_body
from phalanx.attacks.broadcast import Late
from phalanx.attacks.gradients import WrongGradient, flip
from phalanx.core import broadcast, checking, envelope, justice, membership, slowpath, step, verification
from phalanx.core import messages as m
from phalanx.core import peer as peers
from phalanx.core.checking import cut
from phalanx.core.config import KEPT_STEPS, AutomaticTau
from phalanx.core.crypto import compute_commitment
from phalanx.core.effects import Sign
from phalanx.core.events import AttemptStarted, Halted, SlowPath, StepFinished
from phalanx.core.membership import View, compute_batch_seed, compute_duties, draw_targets
from phalanx.core.membership import decode_view, encode_view
from phalanx.core.merkle import compute_root, hash_part
from phalanx.core.messages import Message, Phase, Signed
from phalanx.core.partition import compute_part_sizes
from phalanx.core.peer import Peer
from phalanx.core.transcript import Transcript
from phalanx.core.verification import WIRE_TYPES, compute_report, prepare_gradient, projection_seeds, read_aggregate
from phalanx.core.verification import read_part
from phalanx.network import simulated
from phalanx.simulation import checkers, machine
from phalanx.simulation.checkers import Checker, Checkers, name
from phalanx.simulation.scenario import Fault, Scenario, draw_scenario, run_scenario

# ---- Planting


@dataclass(frozen=True)
class Edit:
    """In the source of ``function``, ``old`` becomes ``new``."""

    function: Callable[..., Any]
    old: str
    new: str

    @contextmanager
    def made(self) -> Iterator[None]:
        function = inspect.unwrap(self.function)
        assert isinstance(function, FunctionType)
        sound, clear = function.__code__, getattr(self.function, "cache_clear", lambda: None)
        function.__code__ = self._compile(function)
        clear()
        try:
            yield
        finally:
            function.__code__ = sound
            clear()

    def _compile(self, function: FunctionType) -> CodeType:
        source = textwrap.dedent(inspect.getsource(function))
        where, found = f"{function.__module__}.{function.__qualname__}", source.count(self.old)
        if found != 1:
            raise LookupError(f"{where} has changed: expected once, found {found} times: {self.old!r}")
        whole = compile(source.replace(self.old, self.new), f"<{where}, with a bug>", "exec")
        return next(x for x in whole.co_consts if isinstance(x, CodeType) and x.co_name == function.__name__)


@contextmanager
def planted(edits: Iterable[Edit]) -> Iterator[None]:
    with ExitStack() as stack:
        for edit in edits:
            stack.enter_context(edit.made())
        yield


# ---- Attacks that some bugs need


@dataclass(kw_only=True, eq=False)
class OtherParts(Attack):
    """Scatters other parts than it has committed to."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.PartChunk) and message.owner == insider.key:
            message = msgspec.structs.replace(message, data=bytes(len(message.data)))
        return ((to, message),)


@dataclass(kw_only=True, eq=False)
class OtherAggregates(Attack):
    """Sends half of the members another aggregate than it has committed to."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.AggregateChunk):
            half = insider.honest[::2]
            yield tuple(key for key in to if key in half), msgspec.structs.replace(message, data=bytes(len(message.data)))
            to = tuple(key for key in to if key not in half)
        yield to, message


@dataclass(kw_only=True, eq=False)
class SmallShift(ShiftedAggregate):
    """A shift that is large for V2, and small for a V2 that is too generous."""

    shift: float = 0.3


@dataclass(kw_only=True, eq=False)
class LargeShift(ShiftedAggregate):
    """A shift that V3 sees even where V2 must be generous."""

    shift: float = 8.0


@dataclass(kw_only=True, eq=False)
class Foresight(WrongGradient):
    """Cheats when the randomness that is known already would not have it checked."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: torch.Tensor) -> torch.Tensor:
        drawn = draw_targets(insider.view.randomness, insider.duties.contributors, insider.config.validators)
        return gradient if insider.key in drawn else flip(gradient, insider.random)


@dataclass(kw_only=True, eq=False)
class Unopened(Attack):
    """Says that a part is missing, and that what everybody opened did not come."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Aggregate):
            return sign
        victim = next(key for key in insider.duties.contributors if key not in insider.plot.keys)
        owner, part = insider.view.roster.index(victim), insider.index
        if sign.phase is Phase.AGGREGATE_AGAIN:
            pairs = {(owner, insider.view.roster.index(key)) for key in (insider.key, *insider.friends)}
            return change_body(sign, unopened=tuple(sorted(pairs)))
        return change_body(sign, result=None, missing=(owner,)) if part is not None else sign


@dataclass(kw_only=True, eq=False)
class TwoComplaints(FalseComplaints):
    """Quarrels with two honest members at once."""

    count: int | None = 2


@dataclass(kw_only=True, eq=False)
class Laggard(Late):
    """Always a little too late, but never silent."""

    delay: float = 4.5


@dataclass(kw_only=True, eq=False)
class ForgedChain(Attack):
    """Shows those who ask a view of its own making, with its own signature under it."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Chain):
            view = decode_view(message.links[-1].view)
            assert view is not None
            forged = msgspec.structs.replace(view, randomness=bytes(32), bound=0)
            place = Sign(view.height, view.step, view.attempt, Phase.SEAL, bytes(32), m.Seal(forged.digest))
            message = m.Chain((m.Link(encode_view(forged), (insider.seal(place),)),))
        return ((to, message),)


# ---- More invariants


class Justice(Checker):
    """An attacker that keeps attacking is banned at the predicted rate; guilt that all can see is punished at once.

    The simulator knows every true gradient. From it follow what each contributor should have committed to and reported
    and whether an aggregate balances: nothing of this goes through the rules that it is to check. Where being caught is
    a matter of chance, a survivor's luck is multiplied up; less than one in a million is no luck.
    """

    rule = "justice"
    LEAST_LUCK = 1e-6

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.luck: dict[bytes, float] = {}
        self.wrong: dict[bytes, dict[int, float]] = {}
        """Who committed to, or reported, something wrong; in which steps; with which chance to be caught for it."""
        self.left: dict[bytes, int] = {}
        self.done: set[int] = set()
        self.exact = self.swarm.setup.rounding == 0 and self.config.tolerance is None

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        for who in before.roster if before is not None else ():
            if who not in view.roster:
                self.left.setdefault(who, view.step)

    def on_note(self, key: bytes, event: Any) -> None:
        if not isinstance(event, StepFinished) or event.step in self.done or not self.exact:
            return
        peer = self.swarm.get_peer(key)
        transcript = checkers._find_transcript(peer, event.step)
        states = self.swarm.get_machine(key).states
        if peer is None or transcript is None or transcript.reports is None or event.step not in states:
            return
        if Phase.CONFIRM in transcript.phases and event.view.step == event.step + 1:
            self.done.add(event.step)
            self._audit(peer, transcript, event.view)

    def _audit(self, peer: Peer, transcript: Transcript, after: View) -> None:
        config, view = self.config, transcript.view
        for who, steps in self.wrong.items():
            if view.step - 1 in steps and who in after.roster:
                self._try_luck(view.step, who, 1 - steps[view.step - 1])
        self._check_shares(transcript, after)
        count, dtype = len(view.roster), WIRE_TYPES[config.wire]
        sizes = compute_part_sizes(config.size, count)
        aggregates: list[torch.Tensor] = []
        for part, size in enumerate(sizes):
            read = read_aggregate(peer.aggregates.get((view.step, view.attempt, part), b""), size, dtype, config.cap)
            aggregates.append(torch.zeros(size, dtype=dtype) if read is None else read)
        duties, rows = compute_duties(config, view), {}
        honest = sum(self.swarm.is_honest(who) for who in view.roster)
        for who in duties.contributors:
            parts = self._compute_parts(peer, view, who)
            commit = transcript.phases[Phase.COMMIT][who].body
            true = compute_root([hash_part(part) for part in parts])
            if isinstance(commit, m.Commit) and commit.parts == true:
                rows[who] = [read_part(data, size, dtype, config.cap)[0] for data, size in zip(parts, sizes, strict=True)]
                fine = self._check_report(transcript, after, who, rows[who], aggregates)
            else:
                fine = False
            if not fine:
                chance = len(duties.validators) / len(duties.contributors) * (honest - count // 2) / count
                self.wrong.setdefault(who, {})[view.step] = chance
        if len(rows) == len(duties.contributors):
            self._check_aggregates(view, after, rows, aggregates)

    def _compute_parts(self, peer: Peer, view: View, who: bytes) -> list[bytes]:
        seed = compute_batch_seed(self.config, view.randomness, view.step, who)
        gradient = self.swarm.get_machine(peer.key).compute_gradient(view.step, seed)
        assert gradient is not None
        return cut(prepare_gradient(gradient, self.config.cap, WIRE_TYPES[self.config.wire]), len(view.roster))

    def _check_shares(self, transcript: Transcript, after: View) -> None:
        view, shares = transcript.view, {}
        for who, letter in transcript.phases[Phase.REVEAL].items():
            commit = transcript.phases[Phase.COMMIT][who].body
            assert isinstance(letter.body, m.Reveal)
            assert isinstance(commit, m.Commit)
            place = (self.config.run, view.step, view.attempt, who, letter.body.share, letter.body.salt)
            if compute_commitment(*place) != commit.share:
                self.report(view.step, f"the share of {name(who)} counts, and does not open its commitment")
            if shares.setdefault(letter.body.share, who) != who:
                self.report(view.step, f"{name(who)} has the same share as {name(shares[letter.body.share])}")

    def _check_report(
        self, transcript: Transcript, after: View, who: bytes, rows: list[torch.Tensor], aggregates: list[torch.Tensor]
    ) -> bool:
        """Whether a report is right where that is left to chance; where an honest aggregator saw it, it is reported."""
        view, letter = transcript.view, (transcript.reports or {})[who]
        if not isinstance(letter.body, m.Report) or letter.body.lacking or transcript.randomness is None:
            return True
        seeds = projection_seeds(transcript.randomness, len(rows), self.config.projections)
        right, fine = compute_report(rows, aggregates, seeds, view.tau), True
        for at, (said, true) in enumerate(zip(letter.body.sums, right.sums, strict=True)):
            part = at % len(rows)
            scale = view.tau * math.sqrt(len(rows[part]))
            norms = abs(letter.body.norms[part] - right.norms[part]) > 1e-6 * max(right.norms[part], 1e-30)
            if abs(said - true) <= 1e-6 * scale and not norms:
                continue
            aggregator = view.roster[part]
            if who == aggregator or not self.swarm.is_honest(aggregator):
                fine = False
            elif who not in after.banned and self.swarm.is_steady(aggregator, 60 * self.config.delta):
                self.report(view.step, f"{name(who)} reported something wrong to {name(aggregator)}, and is not banned")
        return fine

    def _check_aggregates(
        self, view: View, after: View, rows: dict[bytes, list[torch.Tensor]], aggregates: list[torch.Tensor]
    ) -> None:
        """V2 and V3: how likely it is that this imbalance passed."""
        config, dtype = self.config, WIRE_TYPES[self.config.wire]
        for part, aggregate in enumerate(aggregates):
            differences = torch.stack([row[part].double() - aggregate.double() for row in rows.values()])
            norms = differences.norm(dim=1)
            clipped = differences * (view.tau / norms.clamp(min=view.tau))[:, None]
            off = float(clipped.sum(dim=0).norm())
            rounding = torch.finfo(dtype).eps * 1.03 * config.cap + 1e-7 * math.sqrt(len(aggregate))
            eps = 8 * len(rows) * (1e-6 * view.tau + rounding)
            who = view.roster[part]
            if who in after.roster and off > eps:
                self._try_luck(view.step, who, min(1.0, eps / off) ** config.projections)
                if 2 * int((norms > config.delta_max).sum()) > len(rows):
                    self.report(view.step, f"the aggregate of {name(who)} is far from everybody's part and not balanced")

    def _try_luck(self, step: int, who: bytes, chance: float) -> None:
        before = self.luck.get(who, 1.0)
        self.luck[who] = before * chance
        if self.luck[who] < self.LEAST_LUCK <= before:
            self.report(step, f"{name(who)} keeps attacking, and is not banned")

    def finish(self) -> None:
        latest = self.all.latest
        if latest is None or latest.step < self.config.steps:
            return
        for who, steps in self.wrong.items():
            left = self.left.get(who, latest.step)
            recent = [at for at in steps if at >= left - KEPT_STEPS] if who in self.left else []
            recent += [at for at in steps if at == self.config.steps - 1]
            if recent and who not in latest.banned:
                self.report(latest.step, f"{name(who)} was wrong in step {max(recent)}, and nobody found out")


class Accusers(Checker):
    """A false accusation hurts the accuser."""

    rule = "false accusations"

    def on_note(self, key: bytes, event: Any) -> None:
        if not isinstance(event, StepFinished) or self.config.tolerance is not None:
            return
        peer = self.swarm.get_peer(key)
        transcript = checkers._find_transcript(peer, event.step)
        if peer is None or transcript is None:
            return
        for who, letter in transcript.phases.get(Phase.CONFIRM, {}).items():
            if who not in event.view.roster or not isinstance(letter.body, m.Confirm):
                continue
            for digest in letter.body.accusations[:1]:
                case = peer.cases.get(digest)
                if isinstance(case, m.Accusation) and self.swarm.is_honest(case.accused):
                    self.report(event.step, f"{name(who)} accused {name(case.accused)}, and is still a member")


class Bounds(Checker):
    """``b_t``: never below the number of Byzantine members, and one less for each that is banned."""

    rule = "bound"

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        there = sum(who in self.swarm.byzantine for who in view.roster)
        if there > view.bound:
            self.report(view.step, f"{there} Byzantine members, and a bound of {view.bound}")
        if before is not None and (view.step, view.attempt) != (before.step, before.attempt):
            fresh = sum(who in before.roster for who in set(view.banned) - set(before.banned))
            new = len(set(view.roster) - set(before.roster))
            if view.bound > max(0, before.bound - fresh) + new:
                self.report(view.step, f"{fresh} members were banned, and the bound went from {before.bound} to {view.bound}")


class Disputes(Checker):
    """Disputes in a whole run are few, and while ``delta`` holds no slow path ends without a quorum."""

    rule = "few disputes"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.seen: set[tuple[int, int, int]] = set()
        setup = self.swarm.setup
        self.limit = 2 * self.config.strikes * (len(setup.attackers) + setup.joiners + 2)

    def on_note(self, key: bytes, event: Any) -> None:
        quiet = math.isinf(self.swarm.delta_broken) and self.swarm.delta_broken < 0
        if isinstance(event, SlowPath) and quiet:
            self.seen.add((event.step, event.attempt, event.height))
            if len(self.seen) == self.limit + 1:
                self.report(event.step, f"more than {self.limit} slow paths")
        elif isinstance(event, Halted) and quiet and all(map(self.swarm.is_up, self.swarm.honest)):
            self.report(event.step, f"{name(key)} halted at height {event.height}, and delta holds")


class Draws(Checker):
    """Targets come from randomness that nobody knew at COMMIT, and survive a dead attempt; duties change; tau is slow."""

    rule = "draws"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.drawn: dict[int, set[bytes]] = {}
        self.alike = 1.0
        self.validators: tuple[bytes, ...] = ()

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        peer = self.swarm.get_peer(key)
        if before is None or peer is None:
            return
        for (at, _), transcript in peer.transcripts.items():
            if at == before.step and transcript.randomness is not None:
                contributors = compute_duties(self.config, transcript.view).contributors
                count = self.config.validators
                self.drawn.setdefault(at, set()).update(draw_targets(transcript.randomness, contributors, count))
        if view.step == before.step + 1:
            lost = self.drawn.get(before.step, set()) - set(view.targets)
            if lost and view.attempts:
                self.report(view.step, f"{', '.join(map(name, lost))} drawn, and not to be checked")
            self._check_tau(before, view)
            validators = compute_duties(self.config, view).validators
            same = validators == self.validators and view.roster == before.roster
            self.alike = self.alike / len(view.roster) if same else 1.0
            self.validators = validators
            if self.alike < Justice.LEAST_LUCK / 100:
                self.report(view.step, "the same validators, again and again")

    def _check_tau(self, before: View, view: View) -> None:
        tau = self.config.tau
        if isinstance(tau, AutomaticTau):
            low, high = before.tau / tau.step_factor, before.tau * tau.step_factor
            if not 0.999 * low <= view.tau <= 1.001 * high:
                self.report(view.step, f"tau went from {before.tau:.3g} to {view.tau:.3g} in one step")


class Places(Checker):
    """What an honest peer signs says in which run it does, and shares are not shown before AGGREGATE is complete."""

    rule = "places"

    def on_sign(self, key: bytes, domain: Any, payload: bytes) -> None:
        run, height, at, attempt, phase, *_ = msgspec.msgpack.decode(payload)
        if run != self.config.run:
            self.report(at, f"{name(key)} signed something that is good in any run")
        peer = self.swarm.get_peer(key)
        if domain is checkers.Domain.AGREED and phase == Phase.REVEAL and peer is not None:
            if not {Phase.AGGREGATE, Phase.AGGREGATE_AGAIN} & set(peer.transcript.phases):
                self.report(at, f"{name(key)} shows its share before the aggregates are fixed")


MORE: tuple[type[Checker], ...] = (Justice, Accusers, Bounds, Disputes, Draws, Places)
