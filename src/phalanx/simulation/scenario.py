"""Runs drawn at random, one for each seed: who takes part, what goes wrong, who attacks; and how such a run ends.

First faults and attacks together; then the faults stop, the attackers go on, and progress must return. Every choice
comes from ``random.Random(seed)``, so a seed (and the options that were given) is the whole run.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from random import Random
from typing import Any, TextIO

import torch

from phalanx.attacks import ATTACKS, combine, load_attack
from phalanx.core.config import AutomaticTau, Tolerance
from phalanx.core.crypto import Domain
from phalanx.core.errors import LocalError
from phalanx.core.events import RunFinished
from phalanx.core.membership import View
from phalanx.core.messages import Phase
from phalanx.network.simulated import Links, Skew, StoryFailed
from phalanx.simulation.checkers import Checkers, Removals, Violation, can_go_on
from phalanx.simulation.swarm import Setup, Swarm
from phalanx.simulation.weather import Kind, Moment, Stalls, Weather, When

_SIZES = (4, 4, 4, 5, 5, 5, 7, 7, 7, 10, 16)
_MORE_ATTACKS = 0.3


@dataclass(frozen=True, slots=True)
class Fault:
    """In ``step``, this happens: crash, leave, join or split. ``delay`` and ``length``, in seconds: when, how long."""

    step: int
    delay: float
    kind: str
    peers: tuple[int, ...]
    length: float = 0.0
    lost: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    seed: int
    peers: int
    joiners: int
    settings: dict[str, Any]
    """Of the configuration."""
    attacks: dict[int, tuple[str, ...]]
    """Who attacks, and how: as ``load_attack`` understands it."""
    links: dict[str, Any]
    skews: dict[int, tuple[float, float]]
    faults: tuple[Fault, ...]
    weather: Stalls | None
    """Honest peers that are cut off or stand still for a while, in the first half of the run."""
    away: int
    """How many honest peers may be out at the same time."""
    compute_time: float
    rounding: float
    ideal: bool
    wire: bool
    options: str = ""
    """What to add to the seed to draw this scenario again."""

    @property
    def command(self) -> str:
        """How to see this run again."""
        return f"phalanx fuzz --seeds {self.seed}:{self.seed + 1}{self.options}"


def draw_scenario(seed: int, peers: int | None = None, steps: int | None = None, attack: str | None = None) -> Scenario:
    """The scenario of a seed. ``peers``, ``steps`` and ``attack`` overrule what would be drawn."""
    random = Random(seed)
    draw = random.random
    n = peers if peers is not None else random.choice(_SIZES)
    length = steps if steps is not None else random.choice((30, 30, 35, 40))
    if n < 2:
        raise LocalError(f"peers: {n} are too few; one validates and another computes, so at least 2")
    if length < 1:
        raise LocalError(f"steps: expected at least 1, got {length}")
    crashes, splits, leaves, joins = (draw() < 0.5 for _ in range(4))
    m, c, b = _draw_numbers(seed, random, n, crashes or leaves)
    fewer = draw() < 0.5
    attackers = b if not fewer else int(draw() * (b + 1))
    if attack is not None:
        attackers = max(attackers, min(b, 1))
    splits = splits and draw() < 0.4
    safe = 3 * b < n and draw() < 0.3
    minority = c if attackers else n // 2  # attackers and a split: no more are cut off than may be out
    splits = splits and minority > 0 and (safe or not attackers)
    settings = _draw_settings(seed, random, n, b, m, length, safe)
    joiners = random.choice((1, 1, 2)) if joins else 0
    chosen = random.sample(range(n), attackers)
    if joiners and attackers and draw() < 0.4:  # a Sybil takes the place of a founder
        chosen[0] = n
    plans = _draw_attacks(seed, length, attack)
    links = _draw_links(random, settings["delta"])
    compute_time = settings["gradient_time"] * 0.8 * draw()
    rough = 6.0 * links["high"] + 1.5 * compute_time  # a step takes about this long
    honest = [index for index in range(n) if index not in chosen]
    kinds = [kind for kind, on in (("crash", crashes and c > 0), ("leave", leaves and c > 0), ("split", splits)) if on]
    faults = _draw_faults(random, honest, kinds, length, rough, minority if splits else 0)
    faults += [Fault(int(0.5 * length * draw()), rough * draw(), "join", (n + number,)) for number in range(joiners)]
    options = "".join(
        f" --{option} {value}"
        for option, value in (("peers", peers), ("steps", steps), ("attack", attack))
        if value is not None
    )
    return Scenario(
        seed=seed,
        peers=n,
        joiners=joiners,
        settings=settings,
        attacks={index: next(plans) for index in sorted(chosen)},
        links=links,
        skews=_draw_skews(random, n + joiners),
        faults=tuple(sorted(faults, key=lambda fault: (fault.step, fault.delay))),
        weather=_draw_weather(seed, n),
        away=c,
        compute_time=compute_time,
        rounding=1e-6 if settings.get("tolerance") is not None else 0.0,
        ideal=draw() >= 0.05,
        wire=draw() < 0.1,
        options=options,
    )


def _draw_numbers(seed: int, random: Random, n: int, outages: bool) -> tuple[int, int, int]:
    """Validators, how many honest peers may be out, and how many Byzantine members there may be.

    Where attackers are a third or more, one that falls silent may halt the run: in most runs there are fewer.
    """
    m = 2 if n >= 5 and random.random() < 0.3 else 1
    c = 0
    if outages and n - 1 - m >= 1:
        c = 2 if n >= 7 and random.random() < 0.3 else 1
    b = max(0, (n - 1 - m - c) // (3 if Random(f"{seed} share").random() < 0.6 else 2))
    if random.random() < 0.3:
        b = int(random.random() * (b + 1))
    return m, c, b


def _draw_settings(seed: int, random: Random, n: int, b: int, m: int, steps: int, safe: bool) -> dict[str, Any]:
    draw = random.random
    tau: float | AutomaticTau = random.choice((0.5, 1.0, 4.0))
    if draw() < 0.4:
        multiple = min(2.0, 0.9 * (n - m - b) / max(b, 1))
        tau = AutomaticTau(multiple, 2.0, 0.01, 100.0)
    delta = random.choice((0.5, 1.0, 1.0, 2.0))
    return {
        "byzantine": b,
        "validators": m,
        "size": random.choice((64, 64, 100, 256)),
        "steps": steps,
        "wire": random.choice(("float32", "float32", "bfloat16", "float16")),
        "tau": tau,
        "projections": random.choice((1, 1, 2)),
        "delta": delta,
        "gradient_time": random.choice((0.0, 0.5, 1.0, 3.0)),
        "transfer_time": random.choice((0.0, 1.0)),
        "partition_safe": safe,
        # Honest gradients have a norm of about five: tight enough for V2 and V3 to see something, or as loose as usual.
        "cap": Random(seed ^ 0x5EED).choice((20.0, 20.0, 1000.0)),
        "delta_max": Random(seed ^ 0xD15C).choice((8.0, 1e6)),
        "tolerance": Tolerance(1e-4, 1e-2) if draw() < 0.3 else None,
        "probation": (term := random.choice((5, 6))),
        "newcomer_probation": term,  # a newcomer should live to be a member in a run this short
        "admissions": 2,
    }


def _draw_attacks(seed: int, steps: int, attack: str | None) -> Iterator[tuple[str, ...]]:
    """For one attacker after another, what it does; often all do the same.

    Each name has its own lot for each choice and the lowest wins: a new attack changes few of the old seeds.
    """
    random = Random(f"{seed} attacks")
    names = [name for name in ATTACKS if name != "honest"] or ["honest"]
    together = random.random() < 0.5

    def draw(number: int) -> tuple[str, ...]:
        if attack is not None:
            return (attack,)
        lots = sorted((Random(f"{seed} {number} {name}").random(), name) for name in names)
        count = 2 if random.random() < _MORE_ATTACKS else 1
        found = []
        for _, name in lots[:count]:
            start = int(random.random() * steps / 2) if random.random() < 0.7 else 0
            probability = random.choice((1.0, 1.0, 0.5, 0.2))
            found.append(f"{name}@{start}%{probability}")
        return tuple(found)

    shared = draw(0)
    for number in itertools.count(1):
        yield shared if together else draw(number)


def _draw_faults(
    random: Random, honest: list[int], kinds: list[str], steps: int, rough: float, minority: int
) -> list[Fault]:
    """All of them begin in the first half of the run; the second is for recovery."""
    draw = random.random
    faults = []
    for kind in kinds:
        for _ in range(1 if kind != "crash" else random.choice((1, 2, 4))):
            length = random.choice((0.2, 3.0, 12.0)) * rough * (0.5 + draw())
            step, delay = int(0.5 * steps * draw()), rough * draw()
            peers: tuple[int, ...] = (random.choice(honest),)
            if kind == "split":
                peers = tuple(sorted(random.sample(honest, min(1 + int(draw() * minority), len(honest) - 1))))
            if peers:
                faults.append(Fault(step, delay, kind, peers, length, random.choice((0.0, 0.5, 1.0))))
    return faults


def _draw_weather(seed: int, n: int) -> Stalls | None:
    """In a third of the runs honest peers hiccup. Splits and attackers do not wait for it, nor it for them."""
    random = Random(f"{seed} weather")
    if random.random() >= 1 / 3:
        return None
    longest = random.choice((5.0, 15.0, 60.0))
    moments: list[When] = [*Moment, *Phase]
    return Stalls(
        rate=random.choice((0.3, 1.0)) / n,
        lengths=(3.0, longest),
        when=tuple(random.sample(moments, random.choice((1, 3)))),
        kinds=(random.choice([*Kind]),),
        group=random.choice((1, 1, 2)),
        most=random.choice((1, 2, n)),
    )


def _draw_links(random: Random, delta: float) -> dict[str, Any]:
    draw = random.random
    limit = 0.9 * delta  # what is left is for clocks that run apart
    links: dict[str, Any] = {"delta": limit, "low": 0.02 * delta, "high": 0.05 * delta}
    if draw() < 0.5:
        links |= {"low": 0.0, "high": limit * (0.1 + 0.9 * draw())}
    if draw() < 0.5:
        links["loss"] = 0.3 * draw()
    if draw() < 0.5:
        links["duplicate"] = 0.3 * draw()
    links["fifo"] = draw() < 0.2
    return links


def _draw_skews(random: Random, count: int) -> dict[int, tuple[float, float]]:
    if random.random() < 0.5:
        return {}
    return {index: (100 + 1000 * random.random(), 1 + 1e-3 * (2 * random.random() - 1)) for index in range(count)}


# ---- Running


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    steps: int
    violations: tuple[Violation, ...]
    byzantine_banned: int
    byzantine_total: int
    honest_banned: int
    honest_eliminated: int
    seconds: float
    trace_digest: str
    command: str
    attack_failures: tuple[str, ...] = ()
    """Attackers whose own story broke."""


def make_swarm(scenario: Scenario, *, trace: bool = True, log: TextIO | None = None) -> Swarm:
    setup = Setup(
        founders=scenario.peers,
        joiners=scenario.joiners,
        settings=scenario.settings,
        attackers={index: combine(*map(load_attack, texts)) for index, texts in scenario.attacks.items()},
        skews={index: Skew(*skew) for index, skew in scenario.skews.items()},
        compute_time=scenario.compute_time,
        rounding=scenario.rounding,
        ideal=scenario.ideal,
        wire=scenario.wire,
    )
    return Swarm(setup, scenario.seed, Links(**scenario.links), trace=trace, log=log)


def run_scenario(scenario: Scenario, checkers: bool = True, *, trace: bool = True, log: TextIO | None = None) -> Result:
    """Run it to the end, or to the time by which it should have ended."""
    begun = time.perf_counter()
    swarm = make_swarm(scenario, trace=trace, log=log)
    watch = Checkers(swarm) if checkers else Checkers(swarm, ())
    director = _Director(scenario, swarm, watch)
    if scenario.weather is not None:
        Weather(swarm, scenario.weather, clears=scenario.settings["steps"] // 2)
    violations = watch.violations
    over = False
    try:
        swarm.run(compute_patience(scenario), lambda: director.done)
        over = director.is_over()
    except StoryFailed as failure:
        frames = traceback.extract_tb(failure.__cause__.__traceback__ if failure.__cause__ else None)
        where = f" in {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        watch.report("no story fails", watch.step, f"{failure}{where}")
    else:
        watch.finish()
        if checkers:
            check_progress(scenario, swarm, watch, over)
    banned = set(watch.latest.banned) if watch.latest is not None else set()
    eliminated = {key for checker in watch.checkers if isinstance(checker, Removals) for key in checker.eliminated}
    return Result(
        seed=scenario.seed,
        steps=watch.step,
        violations=tuple(violations),
        byzantine_banned=len(banned & swarm.byzantine),
        byzantine_total=len(swarm.byzantine),
        honest_banned=len(banned - swarm.byzantine),
        honest_eliminated=len(eliminated),
        seconds=time.perf_counter() - begun,
        trace_digest=swarm.world.trace_digest if trace else "",
        command=scenario.command,
        attack_failures=tuple(map(repr, swarm.failed.values())),
    )


def compute_patience(scenario: Scenario) -> float:
    """How long a run may take: attackers may use up every deadline, and every retry; faults last as long as they do."""
    settings = scenario.settings
    delta, work = settings["delta"], settings["gradient_time"] + settings["transfer_time"]
    usual = 60 * delta + 12 * work
    outages = sum(fault.delay + fault.length for fault in scenario.faults)
    if scenario.weather is not None:
        outages += settings["steps"] * (scenario.weather.lengths[1] * delta + _compute_retry(scenario))
    return float(
        settings["steps"] * usual + 4 * (scenario.peers + scenario.joiners) * _compute_retry(scenario) + outages
    )


def _compute_retry(scenario: Scenario) -> float:
    """How long an attempt may take that ends on the slow path."""
    settings = scenario.settings
    delta, work = settings["delta"], settings["gradient_time"] + settings["transfer_time"]
    return float((100 + 4 * settings["byzantine"]) * delta + 12 * work)


def check_progress(scenario: Scenario, swarm: Swarm, watch: Checkers, over: bool) -> None:
    """Liveness: once the faults are over, every honest peer that is up comes to the end, or attackers hold it up.

    They can where the honest peers are too few without them: then the run waits.
    """
    if over and watch.step >= scenario.settings["steps"]:
        return
    if watch.latest is not None and not can_go_on(swarm, watch.latest):
        return
    behind = []
    for key in swarm.honest:
        peer = swarm.get_peer(key)
        if swarm.is_up(key) and key not in swarm.finished and peer is not None:
            kind = "member" if peer.member else "follower"
            behind.append(f"{kind} {key[:4].hex()} at step {peer.view.step}.{peer.view.attempt} height {peer.level}")
    watch.report("progress", watch.step, f"at {swarm.world.now:.0f} s not at the end: {'; '.join(behind) or 'all'}")


class _Director:
    """Lets faults happen when their time comes, as far as the configuration allows for them."""

    def __init__(self, scenario: Scenario, swarm: Swarm, watch: Checkers) -> None:
        self.scenario, self.swarm, self.watch = scenario, swarm, watch
        self.founders = [key for key in swarm.keys[: scenario.peers] if key not in swarm.byzantine]
        self.pending = list(scenario.faults)
        self.done = False
        self.seen: tuple[int, ...] = ()
        self.interval = 5 * _compute_retry(scenario)
        swarm.world.at(self.interval, self.look)
        self.is_split = False
        self.restarting = 0
        """Those that are down and will come back, and splits that will heal."""
        swarm.observers.append(self)
        self.restarted: dict[bytes, float] = {}

    def is_over(self) -> bool:
        return not self.pending and not self.restarting and self.swarm.is_over()

    def look(self) -> None:
        """From time to time: end a run that is over, or that will never be."""
        seen = (len(self.watch.chain), len(self.swarm.finished), self.restarting, len(self.pending))
        self.done = self.is_over() or (seen == self.seen and not self.restarting)
        self.seen = seen
        self.swarm.world.at(self.swarm.world.now + self.interval, self.look)

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        pass

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        while self.pending and self.pending[0].step <= self.watch.step:
            fault = self.pending.pop(0)
            act: Callable[[Fault], None] = getattr(self, fault.kind)
            self.swarm.world.at(time + fault.delay, partial(act, fault))
        if isinstance(event, RunFinished):
            self.done = self.is_over()

    def count_out(self, more: tuple[bytes, ...]) -> int:
        """Honest founders that are down, out of the roster, leaving or only just back, and these."""
        view: View | None = self.watch.latest
        members = set(view.roster) if view is not None else set(self.founders)
        swarm, soon = self.swarm, self.swarm.world.now - 40 * self.swarm.config.delta
        return sum(
            key in more
            or key not in members
            or not swarm.is_up(key)
            or key in swarm.leaving
            or self.restarted.get(key, soon) > soon
            for key in self.founders
        )

    def crash(self, fault: Fault) -> None:
        swarm, key = self.swarm, self.swarm.keys[fault.peers[0]]
        if self.is_split or not swarm.is_up(key) or self.count_out((key,)) > self.scenario.away:
            return
        self.restarting += 1
        swarm.crash(key, fault.lost)
        swarm.world.at(swarm.world.now + fault.length, lambda: self.restart(key))

    def restart(self, key: bytes) -> None:
        self.restarting -= 1
        self.restarted[key] = self.swarm.world.now
        self.swarm.restart(key)

    def leave(self, fault: Fault) -> None:
        key = self.swarm.keys[fault.peers[0]]
        if not self.is_split and self.swarm.is_up(key) and self.count_out((key,)) <= self.scenario.away:
            self.swarm.leave(key)

    def join(self, fault: Fault) -> None:
        self.swarm.start(fault.peers[0])

    def split(self, fault: Fault) -> None:
        """Cut some honest peers off; attackers talk to both sides."""
        swarm = self.swarm
        few = {swarm.keys[index] for index in fault.peers}
        if self.is_split or (swarm.byzantine and self.count_out(tuple(few)) > self.scenario.away):
            return
        self.is_split = True
        self.restarting += 1
        swarm.partition(few | swarm.byzantine, set(swarm.keys) - few)

        def heal() -> None:
            self.is_split = False
            self.restarting -= 1
            swarm.heal()
            for key in self.founders:
                self.restarted[key] = swarm.world.now

        swarm.world.at(swarm.world.now + fault.length, heal)


# ---- Many seeds


def parse_seeds(text: str) -> range:
    """The seeds of ``A:B``, without B."""
    first, colon, last = text.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        raise LocalError(f"seeds: expected A:B with whole numbers, such as 0:100, got {text!r}")
    seeds = range(int(first), int(last))
    if not seeds:
        raise LocalError(f"seeds: {text} holds none; B is not included, so it must be above A")
    return seeds


def fuzz_seeds(
    seeds: Sequence[int],
    peers: int | None = None,
    steps: int | None = None,
    attack: str | None = None,
    jobs: int = 1,
    trace: str | None = None,
) -> Iterator[Result]:
    """Run the scenario of each seed, in ``jobs`` processes, in order. ``trace`` is for the last."""
    draw_scenario(seeds[0], peers, steps, attack)
    if attack is not None:
        load_attack(attack)
    if trace is not None:
        open(trace, "w").close()
    tasks = [(seed, peers, steps, attack, trace if seed == seeds[-1] else None) for seed in seeds]
    if jobs == 1 or len(tasks) == 1:
        yield from map(_run_task, tasks)
        return
    with get_context("spawn").Pool(min(jobs, len(tasks)), _prepare_worker) as pool:
        yield from pool.imap(_run_task, tasks)


def _prepare_worker() -> None:
    torch.set_num_threads(1)


def _run_task(task: tuple[int, int | None, int | None, str | None, str | None]) -> Result:
    return run_seed(*task)


def run_seed(
    seed: int, peers: int | None = None, steps: int | None = None, attack: str | None = None, trace: str | None = None
) -> Result:
    """Draw and run one seed; ``trace`` names a file that gets a line for each delivery and note."""
    scenario = draw_scenario(seed, peers, steps, attack)
    if trace is None:
        return run_scenario(scenario, trace=False)
    with open(trace, "w") as log:
        return run_scenario(scenario, log=log)
