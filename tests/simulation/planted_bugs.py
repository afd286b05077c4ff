"""Bugs that a careless engineer could write, planted into the core from outside: what the checkers must be able to see.

A bug is a list of edits: in the source of one function, a snippet that occurs once is replaced. The function then runs
other code until the edits are taken back; nothing in ``src`` knows of it. With each bug stands the run that shows it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import msgspec
import torch

from phalanx.attacks import Attack, Insider, Mail
from phalanx.attacks.aggregation import FalseReport, ShiftedAggregate
from phalanx.attacks.base import change_body
from phalanx.attacks.broadcast import Late, LateSecondValue, is_own
from phalanx.attacks.gradients import WrongGradient, flip
from phalanx.attacks.justice import CopiedCommitment
from phalanx.core import messages as m
from phalanx.core.config import AutomaticTau, Tolerance
from phalanx.core.crypto import Domain
from phalanx.core.effects import Delivery, Effect, Receive, Sign, Story
from phalanx.core.envelope import open_body
from phalanx.core.events import SlowPath
from phalanx.core.membership import decode_view, draw_targets, encode_view
from phalanx.core.messages import Message, Phase, Signed
from phalanx.simulation.checkers import Checkers
from phalanx.simulation.scenario import Fault, Scenario, draw_scenario, run_scenario

# ---- Planting


@dataclass(frozen=True)
class Edit:
    """In the source of ``function``, ``old`` becomes ``new``."""

    function: str
    """Its name, after the class if it is a method; in whichever module of ours it is."""
    old: str
    new: str


@contextmanager
def planted(edits: Iterable[Edit]) -> Iterator[None]:
    """Run with these edits, then without them again."""
    sound: dict[FunctionType, CodeType] = {}
    caches = []
    try:
        for title in dict.fromkeys(edit.function for edit in edits):
            function = find_function(title)
            plain = inspect.unwrap(function)
            assert isinstance(plain, FunctionType)
            code = _compile(plain, [edit for edit in edits if edit.function == title])
            sound[plain], plain.__code__ = plain.__code__, code
            caches.append(getattr(function, "cache_clear", lambda: None))
        for clear in caches:
            clear()
        yield
    finally:
        for plain, code in sound.items():
            plain.__code__ = code
        for clear in caches:
            clear()


def find_function(full_name: str) -> Callable[..., Any]:
    first, *rest = full_name.split(".")
    found: dict[int, Any] = {}
    for module in [module for path, module in sys.modules.items() if path.startswith("phalanx.")]:
        value = vars(module).get(first)
        if value is not None and getattr(value, "__module__", None) == module.__name__:
            for attribute in rest:
                value = getattr(value, attribute, None)
            if callable(value):
                found[id(value)] = value
    if len(found) != 1:
        raise LookupError(f"expected one function {full_name}, found {len(found)}")
    return next(iter(found.values()))


def _compile(function: FunctionType, edits: Iterable[Edit]) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    where = f"{function.__module__}.{function.__qualname__}"
    for edit in edits:
        found = source.count(edit.old)
        if found != 1:
            raise LookupError(f"{where} has changed: expected once, found {found} times: {edit.old!r}")
        source = source.replace(edit.old, edit.new)
    whole = compile(source, f"<{where}, with a bug>", "exec")
    return next(x for x in whole.co_consts if isinstance(x, CodeType) and x.co_name == function.__name__)


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
            yield (
                tuple(key for key in to if key in half),
                msgspec.structs.replace(message, data=bytes(len(message.data))),
            )
            to = tuple(key for key in to if key not in half)
        yield to, message


@dataclass(kw_only=True, eq=False)
class OneFalseReport(FalseReport):
    """Lies about one aggregate of an honest member."""

    part: int | None = 1


@dataclass(kw_only=True, eq=False)
class SmallShift(ShiftedAggregate):
    """A shift that is large for V2, and small for a V2 that is too generous."""

    shift: float = 0.1


@dataclass(kw_only=True, eq=False)
class LargeShift(ShiftedAggregate):
    """A shift that V3 sees even where V2 must be generous."""

    shift: float = 3.0


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
class Slander(Attack):
    """Says that an honest member cost it a minute."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        if not isinstance(sign.body, m.Confirm):
            return sign
        late = tuple(60_000 if key == insider.honest[0] else 0 for key in insider.view.roster)
        return change_body(sign, timing=msgspec.structs.replace(sign.body.timing, late=late))


@dataclass(kw_only=True, eq=False)
class LateButOne(Late):
    """In time for all but one, who has to ask others; and it says that it misses somebody else."""

    delay: float = 3.3
    phases: Collection[Phase] = (Phase.REVEAL, Phase.CONFIRM)

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, Signed) and is_own(insider, message, self.phases):
            to = tuple(key for key in to if key != insider.honest[0])
            yield to, insider.seal_again(message, m.Timeout((insider.honest[1],), 0, None))
        yield from super().on_message(insider, to, message)


@dataclass(kw_only=True, eq=False)
class Copycat(CopiedCommitment):
    """Takes the time to hear what it copies: a commitment to a share, and then the share."""

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        kept: list[Delivery] = insider.notes.setdefault("kept", [])
        if isinstance(effect, Receive) and kept:
            return kept.pop(0)
        if isinstance(effect, Sign) and isinstance(effect.body, m.Commit | m.Reveal):
            until = insider.now + insider.config.delta
            while insider.now < until:
                kept.append((yield from self._receive(insider, Receive(until))))
        return (yield from super().on_effect(insider, effect))


@dataclass(kw_only=True, eq=False)
class TwoConfirms(Attack):
    """Two CONFIRMs that differ in who asks to join: nobody goes for either, but they have different roots."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, Signed) and is_own(insider, message, (Phase.CONFIRM,)):
            half = insider.honest[::2]
            body = msgspec.structs.replace(open_body(message), joins=(bytes(32),))
            yield tuple(key for key in to if key in half), insider.seal_again(message, body)
            to = tuple(key for key in to if key not in half)
        yield to, message


@dataclass(kw_only=True, eq=False)
class LateToHalf(LateSecondValue):
    """A second value that half of the honest members get at the last moment, or (``after``) past it."""

    def on_slow_path(self, insider: Insider, event: SlowPath) -> None:
        before = len(insider.outbox)
        super().on_slow_path(insider, event)
        half = insider.honest[::2]
        insider.outbox[before:] = [(when, (half, mail[1])) for when, mail in insider.outbox[before:]]


@dataclass(kw_only=True, eq=False)
class TooLateToHalf(LateToHalf):
    after: float = 2.0


@dataclass(kw_only=True, eq=False)
class NoTrials(Attack):
    """On probation, and idle."""

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        return None if isinstance(sign.body, m.Trial) else sign

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        trial = isinstance(message, Signed) and message.domain is Domain.TRIAL
        return () if trial else ((to, message),)


@dataclass(kw_only=True, eq=False)
class ForgedChain(Attack):
    """Shows those who ask a view of its own making, with its own signature under it."""

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> Iterable[Mail]:
        if isinstance(message, m.Chain):
            view = decode_view(message.links[-1].view)
            assert view is not None
            forged = msgspec.structs.replace(view, height=view.height + 1, randomness=bytes(32), bound=0)
            place = Sign(view.height, view.step, view.attempt, Phase.SEAL, bytes(32), m.Seal(forged.digest))
            message = m.Chain((m.Link(encode_view(forged), (insider.seal(place),)),))
        return ((to, message),)


# ---- Runs


@dataclass(frozen=True, kw_only=True)
class Run:
    """A seed's scenario, as ``phalanx fuzz`` draws it; or, with ``attackers``, quiet links and only these attackers."""

    seed: int = 0
    peers: int | None = None
    steps: int | None = None
    attack: str | None = None
    attackers: tuple[str, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    joiners: int = 0
    rounding: float = 0.0
    latency: tuple[float, float] = (0.05, 0.5)
    away: int = 0
    """How many honest peers may be out at the same time."""

    def make(self) -> Scenario:
        scenario = draw_scenario(self.seed, self.peers, self.steps, self.attack)
        if self.attackers is None:
            return scenario
        byzantine = sum(bool(text) for text in self.attackers)
        settings = {**scenario.settings, **QUIET, "byzantine": byzantine, **self.settings}
        attacks = {at: tuple(text.split("+")) for at, text in enumerate(self.attackers) if text}
        links = {"delta": 0.9, "low": self.latency[0], "high": self.latency[1]}
        return replace(
            scenario,
            settings=settings,
            attacks=attacks,
            links=links,
            skews={},
            faults=self.faults,
            away=self.away,
            wire=False,
            joiners=self.joiners,
            rounding=self.rounding,
            compute_time=0.5,
            ideal=True,
        )


QUIET: dict[str, Any] = {
    "validators": 1,
    "size": 64,
    "wire": "float32",
    "tau": 1.0,
    "projections": 1,
    "delta": 1.0,
    "gradient_time": 1.0,
    "transfer_time": 1.0,
    "partition_safe": False,
    "tolerance": None,
    "probation": 5,
}


class _Enough(Exception):  # noqa: N818
    """Something was found: there is no need to go on."""


def check_run(run: Run) -> str | None:
    """The first thing that a checker says of a run."""
    report, found = Checkers.report, []

    def stop(self: Checkers, rule: str, step: int, text: str) -> None:
        found.append(f"{rule}: {text}")
        raise _Enough

    Checkers.report = stop  # type: ignore[method-assign]
    try:
        result = run_scenario(run.make(), trace=False)
        assert not result.attack_failures, result.attack_failures
    except _Enough:
        pass
    finally:
        Checkers.report = report  # type: ignore[method-assign]
    return found[0] if found else None


@dataclass(frozen=True, kw_only=True)
class Bug:
    edits: tuple[Edit, ...]
    run: Run

    @property
    def runs(self) -> tuple[Run, ...]:
        """The first shows the bug; where that takes some chance, and the draws have changed, one of the next does."""
        return tuple(replace(self.run, seed=self.run.seed + more) for more in range(SEEDS))


SEEDS = 8


def find_violation(bug: Bug) -> tuple[str | None, list[Run]]:
    """What shows the bug, and the runs that it took."""
    tried = []
    with planted(bug.edits):
        for run in bug.runs:
            tried.append(run)
            found = check_run(run)
            if found is not None:
                return found, tried
    return None, tried


HERE = __file__
"""Where ``load_attack`` finds the attacks above."""

BUGS: dict[str, Bug] = {}


def bug(name: str, *edits: tuple[str, str, str], **run: Any) -> None:
    BUGS[name] = Bug(edits=tuple(Edit(*edit) for edit in edits), run=Run(**run))


# Agreed broadcast

bug(
    "slow path on bound timeouts",
    ("is_valid_alarm", "for x in late.values()) > view.bound for", "for x in late.values()) >= view.bound for"),
    ("_gather_timeouts", "len(timeouts) <= epoch.view.bound", "len(timeouts) < epoch.view.bound"),
    peers=5,
    steps=4,
    attackers=("premature_timeouts",),
)
bug(
    "timeouts that miss different members are added up",
    (
        "is_valid_alarm",
        "any(sum(misses(x, key) for x in late.values()) > view.bound for key in view.roster)",
        "len(late) > view.bound",
    ),
    ("_gather_timeouts", " and misses(x, missed)]", "]"),
    peers=4,
    steps=25,
    attackers=(f"{HERE}:LateButOne",),
    latency=(0.5, 0.55),
)
bug(
    "one round too few",
    ("_exchange_items", "end = start + max(2, view.bound + 1) * length", "end = start + view.bound * length"),
    peers=8,
    steps=3,
    attackers=(f"{HERE}:LateToHalf+votes_to_some", "silent_aggregate+votes_to_some"),
    latency=(0.5, 0.55),
)
bug(
    "one value of a slot is relayed",
    (
        "_Exchange.offer",
        "first.message.sender in roster and page.add(first)",
        "first.message.sender in roster and first.message.sender not in page.letters and page.add(first)",
    ),
    peers=5,
    steps=4,
    attackers=("equivocate_commit",),
)
bug(
    "endorsements are not counted",
    ("_accept", "< number:", "< 1:"),
    peers=8,
    steps=3,
    attackers=(f"{HERE}:TooLateToHalf+votes_to_some", "silent_aggregate+votes_to_some"),
    latency=(0.5, 0.55),
)
bug(
    "half is a quorum",
    ("compute_quorum", "else n // 2 + 1", "else n // 2"),
    peers=4,
    steps=6,
    attackers=(),
    settings={"byzantine": 0},
    away=2,
    faults=(Fault(1, 0.5, "split", (0, 1), 80.0),),
)
bug(
    "a differing root is ignored",
    ("_find_difference", "letter.message.previous != peer.root", "False"),
    peers=5,
    steps=4,
    attackers=("equivocate_commit",),
)
bug(
    "silence is banned",
    ("resolve", "banned = double |", "banned = {key for key in roster if key not in here.letters} | double |"),
    peers=5,
    steps=4,
    attackers=("silent_commit",),
)
bug(
    "equivocators are only removed",
    ("resolve", "banned = double | {key for key in roster if key in beyond.seconds}", "banned = set()"),
    peers=5,
    steps=4,
    attackers=("equivocate_commit",),
)
bug(
    "messages are not journaled",
    ("Disk.sign", "if height in journal:", "if False:"),
    ("Disk.sign", "if height < self.floor:", "if False:"),
    peers=5,
    steps=4,
    attackers=(),
    joiners=1,
    away=1,
    faults=(Fault(1, 0.5, "join", (5,)), Fault(1, 3.75, "crash", (0,), 0.1, 0.0)),
)
bug(
    "the share is drawn anew after a crash",
    (
        "Disk.draw_secret",
        'place = height.to_bytes(8, "little")',
        'place = (height + 1000 * len(self.journal)).to_bytes(8, "little")',
    ),
    peers=5,
    steps=3,
    attackers=(),
    away=1,
    faults=(Fault(1, 0.25, "crash", (0,), 0.1, 0.0),),
)
bug(
    "the step is final before it is settled",
    ("run_made_peer", "if not riding and view.step > before.step:", "if view.step > before.step:"),
    peers=5,
    steps=4,
    attackers=(f"{HERE}:TwoConfirms",),
)
bug(
    "bans and removals before SEAL",
    ("conclude", "yield from seal(peer, Phase.SEAL, m.Seal(view.digest), view)", "pass"),
    peers=5,
    steps=8,
    attack="equivocate_confirm",
)
bug(
    "a retry has the number of the attempt before",
    ("retry_step", "attempt=height", "attempt=view.attempt"),
    peers=5,
    steps=4,
    attackers=("silent_report",),
)
bug(
    "signatures do not cover the height",
    ("_content", "message.height", "0"),
    peers=5,
    steps=4,
    attackers=("replay",),
)
bug("signatures do not cover the run", ("_content", "message.run", 'b""'), peers=5, steps=2, attackers=())

# Randomness and duties

bug(
    "the share's owner is not in its commitment",
    ("compute_commitment", "place, owner, share", "place, share"),
    peers=5,
    steps=3,
    attackers=(f"{HERE}:Copycat",),
)
bug(
    "E2: shares are not checked",
    ("find_offenders", "if opened != commit.body.share:", "if False:"),
    peers=5,
    steps=4,
    attackers=("wrong_reveal",),
)
bug(
    "REVEAL before AGGREGATE is complete",
    (
        "run_attempt",
        "yield from scatter(peer, own)",
        "yield from scatter(peer, own)\n"
        "    place = (peer.level + 2, view.step, view.attempt, Phase.REVEAL, peer.root)\n"
        "    yield Broadcast(peer.others, (yield Sign(*place, m.Reveal(share, salt))))",
    ),
    peers=5,
    steps=2,
    attackers=(),
)
bug(
    "targets from randomness that is known at COMMIT",
    (
        "note_progress",
        "find_targets(config, view, transcript.randomness, attempts)",
        "find_targets(config, view, view.randomness, attempts)",
    ),
    peers=5,
    steps=6,
    attackers=(f"{HERE}:Foresight",),
)
bug(
    "targets that are known before the reports are signed",
    ("find_targets", "find_last(view, view.step - 1)", "find_last(view, view.step)"),
    peers=5,
    steps=6,
    attackers=("honest",),
)
bug(
    "a retry draws other targets",
    ("note_draw", "carried=_add_targets(view.carried, tuple(targets))", "carried=tuple(targets)"),
    peers=7,
    steps=6,
    attackers=("wrong_aggregate@1", "wrong_aggregate@2"),
)
bug(
    "duties from a seed that never changes",
    ("finish_step", "order=_draw_order(randomness, roster)", "order=_draw_order(config.seed, roster)"),
    peers=5,
    steps=20,
    attackers=("honest",),
)

# Parts, aggregates, reports

bug(
    "Merkle paths are not checked",
    (
        "Peer.get_part",
        "if not verify_path(root, len(transcript.view.roster), part, hash_part(data), path):",
        "if False:",
    ),
    peers=5,
    steps=3,
    attackers=(f"{HERE}:OtherParts",),
)
bug(
    "the hash of aggregates is not checked",
    ("Peer.has_aggregate", "if hash_part(data) != letter.body.result:", "if False:"),
    peers=5,
    steps=3,
    attackers=(f"{HERE}:OtherAggregates",),
)
bug(
    "parts that are no numbers are taken as they are",
    ("read_stack", "if not all(valid):", "if False:"),
    peers=5,
    steps=3,
    attackers=("nonfinite_parts",),
)
bug(
    "aggregates may be no numbers",
    (
        "decode_aggregates",
        "return _read_within(pieces, sizes, wire, [_longest_aggregate(cap, size, wire) for size in sizes])",
        "return [wire.decode(data, size) for data, size in zip(pieces, sizes, strict=True)]",
    ),
    peers=5,
    steps=3,
    attackers=("nonfinite_aggregate",),
)
bug(
    "an aggregate that bound members hold counts as sent",
    ("decide_aggregates", "<= view.bound", "< view.bound"),
    ("decide_reports", "count <= view.bound}", "count < view.bound}"),
    peers=7,
    steps=3,
    attackers=("withheld_aggregate", "withheld_aggregate"),
)
bug(
    "bound members can deny an opening",
    ("find_unopened", "if count > view.bound:", "if count >= view.bound:"),
    peers=7,
    steps=3,
    attackers=(f"{HERE}:Unopened", f"{HERE}:Unopened"),
)
bug(
    "indices of others are not checked",
    ("_fits", "return known and not body.unopened", "return not body.unopened"),
    peers=5,
    steps=3,
    attackers=("out_of_range",),
)
bug(
    "V1: nobody accuses",
    (
        "check_reports",
        "if not all(\n            is_same_report",
        "if False and not all(\n            is_same_report",
    ),
    peers=5,
    steps=3,
    attackers=("false_report",),
)
bug(
    "V1: corrections are not applied",
    (
        "_decide_sums",
        "column |= {key: fixed[place] for (key, at), fixed in decision.corrections.items() if at == part}",
        "pass",
    ),
    peers=5,
    steps=3,
    attackers=(f"{HERE}:OneFalseReport",),
)
bug(
    "V2: one sign only",
    ("_decide_sums", "if not abs(total) <= eps:", "if not total <= eps:"),
    peers=5,
    steps=3,
    attackers=("wrong_aggregate",),
)
bug(
    "V2: a bound a thousand times too large",
    ("sum_bound", "return _SIGMAS", "return 1000 * _SIGMAS"),
    peers=6,
    steps=6,
    seed=2,
    attackers=(f"{HERE}:SmallShift",),
    settings={"tau": 4.0},
)
bug(
    "V3: never",
    ("find_distant", "if 2 * sum(", "if False and 2 * sum("),
    peers=5,
    steps=3,
    seed=3,
    attackers=(f"{HERE}:LargeShift",),
    settings={"wire": "bfloat16", "delta_max": 8.0, "cap": 20.0},
)
bug(
    "V4: reports are not checked",
    (
        "check_commit",
        "return verdict, _find_wrong_reports(peer, transcript, target, parts, margin)",
        "return verdict, ()",
    ),
    peers=5,
    steps=3,
    seed=4,
    attackers=("covered_aggregate",),
)
bug(
    "V4: gradients are not checked",
    ("check_commit", "return Verdict.GUILTY, ()", "return Verdict.INNOCENT, ()"),
    peers=5,
    steps=3,
    seed=2,
    attackers=("wrong_gradient",),
)

# Justice

bug(
    "a majority of those who saw something",
    (
        "_tally",
        "2 * counts[verdict] > len(voters) and counts[verdict] > transcript.view.bound",
        "2 * counts[verdict] > counts[Verdict.GUILTY] + counts[Verdict.INNOCENT]",
    ),
    peers=7,
    steps=4,
    attackers=("false_accusation_gradient", "shielding_votes"),
    settings={"tolerance": Tolerance(1e-4, 1e-2)},
    rounding=1e-3,
)
bug(
    "whoever is accused is guilty",
    (
        "_decide_votes",
        "verdicts[case.digest, case.charge] = _find_verdict(config, transcript, case, cases)",
        "verdicts[case.digest, case.charge] = Verdict.GUILTY",
    ),
    peers=5,
    steps=3,
    attackers=("false_accusation_report",),
)
bug(
    "a false accusation has no price",
    ("_decide_votes", "if verdict is Verdict.INNOCENT:", "if False:"),
    peers=5,
    steps=3,
    attackers=("false_accusation_gradient",),
)
bug(
    "those who left are not drawn",
    (
        "find_targets",
        "for key in drawn)",
        "for key in drawn if key in view.roster)",
    ),
    peers=5,
    steps=30,
    attackers=("hit_and_leave",),
)
bug(
    "the last step is not checked",
    ("finish_step", "if step >= config.steps:", "if False:"),
    peers=7,
    steps=2,
    attackers=("wrong_gradient", "wrong_gradient"),
)
bug(
    "a ban does not lower the bound",
    ("change_members", "bound=min(config.byzantine, doubts)", "bound=view.bound"),
    peers=5,
    steps=3,
    attackers=("wrong_reveal",),
)
bug(
    "a removal lowers the bound",
    ("change_members", "fresh = [key for key in changes.banned", "fresh = [key for key in changes.out"),
    peers=9,
    steps=6,
    attackers=("silent", "honest"),
    away=1,
    faults=(Fault(1, 0.5, "crash", (5,), 60.0),),
)

# Membership

bug(
    "banned keys may come back",
    ("_advance_candidates", "taken = {*view.roster, *absent, *view.banned,", "taken = {*view.roster, *absent,"),
    (
        "Peer._take_join",
        "if key in self.joins or key in view.roster or key in view.banned:",
        "if key in self.joins or key in view.roster:",
    ),
    ("make_confirm", "here = {*view.roster, *absent, *view.banned,", "here = {*view.roster, *absent,"),
    ("key_may_ask", "peer.key not in view.banned and ", ""),
    ("Peer.receive", " and delivery.sender not in self.banned:", ":"),
    peers=5,
    steps=6,
    attackers=("wrong_reveal",),
)
bug(
    "one step of probation is enough",
    ("_advance_candidates", "if candidate.served >= candidate.term]", "if candidate.served >= 1]"),
    peers=5,
    steps=8,
    attackers=(),
    joiners=1,
    settings={"byzantine": 1},
    faults=(Fault(1, 0.5, "join", (5,)),),
)
bug(
    "steps of probation count that nobody saw",
    (
        "_advance_candidates",
        "served=c.served + (c.key in served) - (c.key in unshown)",
        "served=c.served + 1",
    ),
    peers=5,
    steps=9,
    attackers=("", "", "", "", "", f"{HERE}:NoTrials"),
    joiners=1,
    settings={"byzantine": 1},
    faults=(Fault(1, 0.5, "join", (5,)),),
)
bug(
    "probationers are not checked",
    ("_draw_trial_checks", "for number in range(count)", "for number in ()"),
    peers=5,
    steps=10,
    attackers=("", "", "", "", "", "wrong_gradient"),
    joiners=1,
    settings={"byzantine": 1},
    faults=(Fault(1, 0.5, "join", (5,)),),
)
bug(
    "one signature certifies a view",
    (
        "find_certificate",
        "if len(said) == len(before.roster) and naming >= max(len(before.roster) - before.bound, quorum):",
        "if naming >= 1:",
    ),
    peers=5,
    steps=8,
    attackers=(f"{HERE}:ForgedChain",),
    joiners=1,
    faults=(Fault(2, 0.5, "join", (5,)),),
)
bug(
    "a state is taken unseen",
    ("Bowl.adopt_state", "if state is None or compute_state_digest(state) != digest:", "if state is None:"),
    peers=5,
    steps=5,
    seed=1,
    attackers=("wrong_state",),
    joiners=1,
    faults=(Fault(2, 0.5, "join", (5,)),),
)
bug(
    "tau moves as fast as it likes",
    (
        "_move_tau",
        "tau = min(max(aim, view.tau / auto.step_factor), view.tau * auto.step_factor)",
        "tau = aim",
    ),
    peers=5,
    steps=3,
    attackers=("honest",),
    settings={"tau": AutomaticTau(2.0, 50.0, 0.01, 100.0)},
)

# The floor, and coming back

bug(
    "as many as may lie vouch for who was late",
    (
        "read_timings",
        "vouched.append(_get(sorted((late[place][key] for place in others), reverse=True), bound))",
        "vouched.append(_get(sorted((late[place][key] for place in others), reverse=True), bound - 1))",
    ),
    peers=7,
    steps=4,
    attackers=(f"{HERE}:Slander", f"{HERE}:Slander"),
)
bug(
    "the floor does not keep anybody",
    ("_choose_going", "if is_enough(config, view.attempts, members - {*group}, doubts):", "if True:"),
    peers=4,
    steps=12,
    attackers=("every_deadline",),
)
bug(
    "a slow path knows no floor",
    ("find_replacements", "if is_enough(config, checked, members | coming, doubts)", "if True"),
    ("_choose_going", "if is_enough(config, view.attempts, members - {*group}, doubts):", "if True:"),
    peers=4,
    steps=4,
    attackers=("silent_report",),
)
bug(
    "at the floor an attempt is repeated with the same members",
    ("find_replacements", "if is_enough(config, checked, members | coming, doubts)", "if True"),
    peers=4,
    steps=4,
    attackers=("silent_report",),
)
bug(
    "the floor forgets the validators",
    ("compute_floor", "floor = 2 * most + 1 + config.validators", "floor = 2 * most + 1"),
    peers=4,
    steps=4,
    attackers=("silent_commit",),
)
bug(
    "the floor is that of the roster",
    ("compute_floor", "most = min(config.byzantine, doubts)", "most = max(0, min(config.byzantine, doubts) - 1)"),
    peers=6,
    steps=6,
    attackers=("silent", "silent"),
)
bug(
    "the safe quorum has no floor of its own",
    ("compute_floor", "max(floor, 3 * most + 1)", "floor"),
    peers=7,
    steps=5,
    attackers=("silent", "honest"),
    settings={"partition_safe": True},
)

# Bugs that a unit test is quicker to see than a run: its file and name


@dataclass(frozen=True)
class UnitBug:
    edits: tuple[Edit, ...]
    unit: str


UNIT_BUGS: dict[str, UnitBug] = {}


def unit_bug(name: str, unit: str, *edits: tuple[str, str, str]) -> None:
    UNIT_BUGS[name] = UnitBug(tuple(Edit(*edit) for edit in edits), unit)


def find_unit(unit: str) -> Callable[[], None]:
    """A test in another file."""
    file, _, name = unit.partition("::")
    folder = str(Path(__file__).parents[1] / Path(file).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    test = getattr(importlib.import_module(Path(file).stem), name)
    assert callable(test)
    return test  # type: ignore[no-any-return]


MEMBERSHIP = "core/test_membership.py"
unit_bug(
    "kept attempts are nobody's concern",
    f"{MEMBERSHIP}::test_of_every_attempt_that_is_checked_enough_stay_to_judge_it",
    ("is_enough", "return all(", "return True or all("),
)
unit_bug(
    "absences are not counted",
    f"{MEMBERSHIP}::test_further_absences_last_longer_and_at_most_forty_steps",
    ("_suspend", "count = records[key].count + 1 if key in records else 1", "count = 1"),
)
unit_bug(
    "absences have no end",
    f"{MEMBERSHIP}::test_further_absences_last_longer_and_at_most_forty_steps",
    ("_suspend", "min(LONGEST_ABSENCE, 2**count)", "2**count"),
)
unit_bug(
    "absences are never forgiven",
    f"{MEMBERSHIP}::test_fifty_served_steps_forgive_one_absence",
    ("finish_step", "_let_in(config, _forgive(config, view), joins, step)", "_let_in(config, view, joins, step)"),
)
unit_bug(
    "a return before its time",
    f"{MEMBERSHIP}::test_further_absences_last_longer_and_at_most_forty_steps",
    ("_let_in", "if step >= x.ready and may_return", "if may_return"),
)
unit_bug(
    "as many sponsors as attackers bring a member back",
    "simulation/test_floor.py::test_attackers_cannot_bring_back_who_is_not_there",
    ("make_next", "if count > transcript.view.bound]", "if count >= transcript.view.bound]"),
)
unit_bug(
    "a majority of sponsors brings a member back",
    "simulation/test_floor.py::test_attackers_cannot_keep_out_who_is_there",
    ("make_next", "if count > transcript.view.bound]", "if count >= len(transcript.view.roster) - 1]"),
)
unit_bug(
    "strikes are never counted",
    f"{MEMBERSHIP}::test_strikes_and_complaints_go_with_their_owners",
    ("change_members", "strikes = _count(view.strikes, changes.late, changes.banned)", "strikes = view.strikes"),
)
unit_bug(
    "elimination takes several along",
    f"{MEMBERSHIP}::test_whoever_takes_one_along_takes_nobody_else",
    ("_decide_complaints", "and not pair & gone", ""),
)
unit_bug(
    "pairs are split",
    f"{MEMBERSHIP}::test_a_pair_goes_together_or_not_at_all",
    ("_choose_going", "for key in sorted(changes.removed - paired)", "for key in sorted(changes.removed)"),
)
unit_bug(
    "what is owed is forgotten",
    f"{MEMBERSHIP}::test_silence_stops_at_the_floor_and_what_is_owed_is_paid_when_the_margin_allows",
    ("_choose_going", "owed.append(group)", "pass"),
)
unit_bug(
    "what is owed is never paid",
    f"{MEMBERSHIP}::test_a_debt_is_paid_when_others_come_back",
    ("change_members", "or acquitted or view.owed)", "or acquitted)"),
)
unit_bug(
    "after a withheld share everybody is checked once",
    f"{MEMBERSHIP}::test_a_withheld_share_has_everybody_checked_twice",
    ("note_withheld_share", "carried=(*others, *everybody, *everybody)", "carried=(*others, *everybody)"),
)
unit_bug(
    "a withheld share has others drawn",
    "simulation/test_floor.py::test_a_withheld_share_of_the_first_seed",
    ("follow_resolution", "view = note_withheld_share(view)", "pass"),
)
unit_bug(
    "a retry draws the randomness again",
    f"{MEMBERSHIP}::test_randomness_that_was_revealed_is_not_drawn_again",
    ("note_draw", "drawn=view.drawn or randomness", "drawn=randomness"),
)
unit_bug(
    "a stranger comes in below the floor",
    f"{MEMBERSHIP}::test_a_stranger_that_raises_the_doubts_is_admitted_only_if_the_floor_holds_then",
    ("_choose_graduates", "if is_enough(", "if True or is_enough("),
)
unit_bug(
    "somebody is let in that does not show the state",
    f"{MEMBERSHIP}::test_a_run_that_waits_lets_in_who_shows_that_it_is_there",
    ("find_replacements", "if member.key in present]", "]"),
)
unit_bug(
    "two take turns for nothing",
    f"{MEMBERSHIP}::test_two_that_take_turns_pay_for_it_with_rounds",
    ("find_replacements", "if round_ >= 2 * (counts.get(member.key, 1) - 1)", ""),
)
unit_bug(
    "nobody waits for witnesses",
    f"{MEMBERSHIP}::test_witnesses_are_waited_for_and_then_given_up",
    ("find_replacements", "for coming in chosen[:2] if patient", "for coming in chosen[:2]"),
)
unit_bug(
    "an attempt that was given up is waited for all the same",
    f"{MEMBERSHIP}::test_witnesses_are_waited_for_and_then_given_up",
    ("is_enough", "record.given_up or ", ""),
)
unit_bug(
    "commits of dead attempts are forgotten",
    f"{MEMBERSHIP}::test_the_commit_of_an_attempt_that_died_of_its_senders_silence_is_checked",
    ("retry_step", "carried=_add_targets(view.carried, left)", "carried=view.carried"),
)
unit_bug(
    "silence lowers the doubts",
    f"{MEMBERSHIP}::test_silence_never_lowers_the_bound_however_long_it_lasts",
    ("change_members", "fresh = [key for key in changes.banned", "fresh = [key for key in changes.out"),
)
unit_bug(
    "a returnee votes on what it missed",
    "simulation/test_floor.py::test_who_comes_back_does_not_vote_on_what_it_missed",
    ("find_voters", "return set(view.roster) & set(record.roster)", "return set(view.roster)"),
)
unit_bug(
    "lateness in a slow path is not noted",
    "simulation/test_seals.py::test_lateness_at_confirm_counts_every_time",
    ("_note_late", "if key in letters}", "if key in ()}"),
)
unit_bug(
    "nobody comes back",
    f"{MEMBERSHIP}::test_the_first_absence_ends_at_the_next_boundary",
    ("_let_in", "if step >= x.ready and may_return", "if False and may_return"),
)
unit_bug(
    "a returnee checks what it missed",
    f"{MEMBERSHIP}::test_a_member_that_missed_an_attempt_does_not_check_it",
    ("_find_witnesses", "record.roster if record is not None", "view.roster if record is not None"),
)
unit_bug(
    "a returnee checks those on probation",
    f"{MEMBERSHIP}::test_a_member_that_is_just_back_checks_no_probationer_of_the_step_before",
    ("finish_step", "config.probation_checks, witnesses)", "config.probation_checks, roster)"),
)
