"""Bad weather: honest peers that are cut off or stand still for a while, alone and beside attackers that wait for it.

    python experiments/weather.py --takeover [--jobs 2] [--out weather.jsonl] [--json]
    python experiments/weather.py --honest [--jobs 2] [--out weather.jsonl] [--json]

``--takeover``: 300 runs in which honest peers stall for 3 to 60 delta for 1,000 steps, in every phase, one or several
at a time, under both quorums, beside ``b`` patient attackers (``phalanx.attacks.patience``). Then the weather clears.
It should show no honest ban, no roster that goes on with fewer than ``b_t + 1`` honest members, attackers that cheat
banned at the predicted odds ``m (n - b) / (n (n - 1))`` per step, no halt where ``n >= 3 b + 1 + m`` and few enough
honest members are out, and every honest peer a member again 50 steps after the weather cleared.

``--honest``: n = 16, b = 3, honest peers only, 1,000 steps: how many of the reachable peers are members, who is
excluded at the end, and seconds a step beside calm weather.

Each finished run is a line of ``--out``; runs that stand there already are not made again. ``--only TEXT`` takes the
runs whose name contains the text, ``--limit`` the first so many, ``--steps`` shortens all. A run that fails prints the
command that replays it. Exit 1 if anything is amiss.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch

from phalanx.attacks import load_attack
from phalanx.core.crypto import Domain
from phalanx.core.events import Banned, Removed, SlowPath, StepFinished
from phalanx.core.membership import View, compute_floor
from phalanx.core.messages import Phase
from phalanx.network.simulated import Links
from phalanx.simulation.swarm import Setup, Swarm
from phalanx.simulation.weather import Kind, LateMessages, Moment, Stalls, Weather, When

DELTA = 2.0
VALIDATORS = 1
PATIENCE = 400
"""Deltas without a step, in calm weather, after which a run is said to wait."""
RETURN = 50
"""Steps of calm weather after which every honest peer is a member again."""
ESCAPED = 1e-4
"""A cheat that was this lucky was not lucky."""


# ---- Watching


class Watch:
    """What is asked of a run, from outside; as little as possible, since runs are long."""

    def __init__(self, swarm: Swarm, weather: Weather) -> None:
        self.swarm, self.weather, self.config = swarm, weather, swarm.config
        self.honest = frozenset(key for key in swarm.keys if key not in swarm.byzantine)
        self.step, self.time = 0, 0.0
        self.view: View | None = None
        self.sizes: list[tuple[int, int]] = [(len(swarm.keys), len(self.honest))]
        """Members and honest members of each step."""
        self.thin: list[int] = []
        """Steps that the roster went on to with no more than ``b_t`` honest members."""
        self.margin = math.inf
        self.shares: list[float] = []
        """In each step of bad weather, the share of the reachable honest peers that are members."""
        self.banned: dict[bytes, Banned] = {}
        self.removed: set[tuple[bytes, int]] = set()
        self.slow_paths: set[int] = set()
        self.waits: set[int] = set()
        """Heights at which a steady member waited."""
        self.halts: list[tuple[int, int]] = []
        """The steps of those at which it should not have, and how many honest members were out."""
        self.cleared: tuple[int, float] | None = None
        """The first step in calm weather, and when it began."""
        self.returned: int | None = None
        """The step in which every honest peer was a member again."""
        swarm.observers.append(self)

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        pass

    def on_note(self, time: float, key: bytes, event: Any) -> None:
        kind = type(event)
        if kind is StepFinished:
            if event.step >= self.step:
                self._see(time, event.view)
        elif kind is Banned:
            self.banned.setdefault(event.key, event)
        elif kind is Removed:
            self.removed.add((event.key, event.step))
        elif kind is SlowPath:
            self.slow_paths.add(event.height)

    def list_out(self) -> list[bytes]:
        """Honest peers that are no members, or whose weather was bad until now."""
        members = self.view.roster if self.view is not None else self.swarm.keys
        grace = 40 * self.config.delta
        return [key for key in self.honest if key not in members or not self.swarm.is_steady(key, grace)]

    def _note_pause(self, time: float) -> None:
        """A run that stood still: attackers should not be able to have it wait while few honest members are out."""
        stalls = (stall.end for stall in self.weather.past[-100:] if stall.end < time)
        idle = time - max(self.time, *stalls, 0.0)
        b, delta, view = self.config.byzantine, self.config.delta, self.view
        longest = (b + 1) * (40 + 4 * b) * delta + 20 * self.config.gradient_time  # each attacker ends one attempt
        if view is None or idle <= longest:
            return
        most, out = min(b, view.doubts), len(self.list_out())
        if 0 <= len(self.swarm.keys) - len(view.banned) - most - compute_floor(self.config, view.doubts) >= out:
            self.halts.append((view.step, out))

    def _see(self, time: float, view: View) -> None:
        self._note_pause(time)
        self.step, self.time, self.view = view.step, time, view
        members = set(view.roster)
        honest = len(members & self.honest)
        self.sizes += [(len(members), honest)] * (view.step + 1 - len(self.sizes))
        self.margin = min(self.margin, len(members) - compute_floor(self.config, view.doubts))
        if honest <= min(self.config.byzantine, view.doubts):
            self.thin.append(view.step)
        reachable = [key for key in self.honest if not self.weather.is_out(key)]
        if not self.weather.is_clear and reachable:
            self.shares.append(len(members.intersection(reachable)) / len(reachable))
        if self.weather.is_clear and len(reachable) == len(self.honest):
            if self.cleared is None:
                self.cleared = view.step, time
            if self.returned is None and self.honest - self.banned.keys() <= members:
                self.returned = view.step

    def is_stuck(self) -> bool:
        """Whether the run waits, though nobody is cut off."""
        calm = max((stall.end for stall in self.weather.past[-100:]), default=0.0)
        return (
            self.swarm.world.now > max(self.time, calm) + PATIENCE * self.config.delta + 20 * self.config.gradient_time
        )

    def is_settled(self) -> bool:
        """Whether the weather cleared, and all came back or had the time to."""
        return self.cleared is not None and (self.returned is not None or self.step > self.cleared[0] + RETURN)


def make_swarm(
    n: int, b: int, steps: int, seed: int, compute: float, safe: bool = False, attack: str | None = None
) -> Swarm:
    settings = {
        "byzantine": b,
        "validators": VALIDATORS,
        "steps": steps,
        "size": 64,
        "delta": DELTA,
        "gradient_time": 5 * compute,
        "transfer_time": 1.0,
        "partition_safe": safe,
    }
    filters = {n - 1 - i: load_attack(attack) for i in range(b)} if attack is not None else {}
    setup = Setup(founders=n, settings=settings, compute_time=compute, attackers=filters)
    return Swarm(setup, seed, Links(delta=0.9 * DELTA, low=0.02, high=0.1))


# ---- Take-over


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the grid."""

    n: int
    b: int
    number: int
    attack: str
    when: str
    length: float
    """Of a stall, in deltas."""
    crowd: str
    """How many may be out at the same time: ``one``, ``few`` (as many as may be without a halt), ``many`` (more)."""
    kind: str
    safe: bool
    steps: int

    @property
    def name(self) -> str:
        quorum = "safe" if self.safe else "usual"
        place = f"{self.crowd} {self.kind} {self.length:g} at {self.when}"
        return f"takeover n={self.n} b={self.b} #{self.number} {self.attack} {place} {quorum} steps={self.steps}"

    @property
    def allowed(self) -> int:
        """Honest members that may be out while attackers cannot halt the run; below 0: they can in any weather."""
        return self.n - self.b - self.floor

    @property
    def floor(self) -> int:
        return max(2 * self.b + 1 + VALIDATORS, 3 * self.b + 1 if self.safe else 0)

    @property
    def most(self) -> int:
        """Peers that are out at the same time."""
        return {"one": 1, "few": max(2, self.allowed), "many": min(self.n - self.b, self.n - self.floor + 2)}[
            self.crowd
        ]


SIZES = {(8, 1): 75, (16, 3): 85, (16, 5): 60, (32, 8): 30, (16, 7): 50}
"""Members and attackers, and how many runs of each: 300."""
PATIENT = (
    "patient_takeover",
    "patient_gradient",
    "patient_aggregate",
    "patient_floor",
    "patient_redraw",
    "patient_shares",
    "patient_silence",
    "patient_naming",
    "patient_accusing",
    "patient_return",
    "patient_all",
)
MOMENTS: dict[str, tuple[When, ...]] = {
    **{moment.value: (moment,) for moment in (Moment.BOUNDARY, Moment.ANYTIME, Moment.SCATTER, Moment.GATHER)},
    **{phase.name.lower(): (phase,) for phase in (Phase.COMMIT, Phase.AGGREGATE, Phase.REVEAL, Phase.REPORT)},
    "confirm": (Phase.CONFIRM,),
    # These come only if something is amiss already, such as somebody that is cut off.
    **{phase.name.lower(): (phase, Moment.BOUNDARY) for phase in (Phase.AGGREGATE_AGAIN, Phase.VOTE, Phase.SEAL)},
    "slow path": (Moment.SLOW_PATH, Moment.BOUNDARY),
}
"""When stalls begin, by name."""
LENGTHS = (3.0, 5.0, 10.0, 15.0, 30.0, 60.0)
START = 50
"""The step from which attackers look for their moment."""
EVERY = 6
"""Steps between two stalls, on average, if few are out."""


def draw_cells(steps: int) -> Iterator[Cell]:
    """The grid: every value of every dimension equally often for each size, in an order of its own."""
    for (n, b), count in SIZES.items():

        def deal(name: str, values: Sequence[Any], n: int = n, b: int = b, count: int = count) -> list[Any]:
            hand = [values[i % len(values)] for i in range(count)]
            Random(f"{n} {b} {name}").shuffle(hand)
            return hand

        hands = {
            "attack": deal("attack", PATIENT),
            "when": deal("when", [*MOMENTS, "boundary", "anytime"]),
            "length": deal("length", LENGTHS),
            "crowd": deal("crowd", ("one", "one", "few", "many")),
            "kind": deal("kind", [kind.value for kind in Kind]),
            "safe": deal("safe", (False, True) if 3 * b < n else (False,)),
        }
        for number in range(count):
            drawn = {name: hand[number] for name, hand in hands.items()}
            yield Cell(n=n, b=b, number=number, steps=steps, **drawn)


def run_cell(cell: Cell, limit: float) -> dict[str, Any]:
    """What happened in one run; at most ``limit`` seconds of processor time of it."""
    torch.set_num_threads(1)
    begun = time.process_time()
    seed = 1000 * cell.n + 10_000 * cell.b + cell.number
    # After the weather cleared, the last stalls still last for a while.
    tail = math.ceil(cell.length * DELTA) + 2 * RETURN
    swarm = make_swarm(cell.n, cell.b, cell.steps + tail, seed, 0.5, cell.safe, f"{cell.attack}@{START}")
    stalls = Stalls(
        rate=1 / EVERY / (cell.n - cell.b),
        lengths=(cell.length, cell.length),
        when=MOMENTS[cell.when],
        kinds=(Kind(cell.kind),),
        group=max(1, cell.most // 2),
        most=cell.most,
    )
    weather = Weather(swarm, stalls, clears=cell.steps)
    watch = Watch(swarm, weather)

    def is_enough() -> bool:
        taken = len(watch.thin) > RETURN
        late = time.process_time() - begun > limit
        return swarm.is_over() or watch.is_settled() or watch.is_stuck() or taken or late

    swarm.run(math.inf, every_so_often(is_enough))
    return {"cell": asdict(cell), "seed": seed, **judge(cell, watch)} | {"cpu": time.process_time() - begun}


def every_so_often(ask: Callable[[], bool]) -> Callable[[], bool]:
    """The same question, asked at one event of a hundred."""
    count = 0

    def answer() -> bool:
        nonlocal count
        count += 1
        return count % 100 == 0 and ask()

    return answer


def judge(cell: Cell, watch: Watch) -> dict[str, Any]:
    swarm = watch.swarm
    names = {key: index for index, key in enumerate(swarm.keys)}
    cheats: dict[bytes, set[int]] = swarm.plot.notes.get("cheats", {})
    hazard, lucky = 0.0, []
    for key, steps in cheats.items():
        luck = 1.0
        until = watch.banned[key].step if key in watch.banned else watch.step - 3  # later ones are not drawn yet
        for step in steps:
            members, honest = watch.sizes[min(step, len(watch.sizes) - 1)]
            if step <= until and members > VALIDATORS + 1:
                odds = VALIDATORS / (members - VALIDATORS) * honest / (members - 1)
                hazard += odds
                luck *= 1 - min(odds, 1.0)
        if key not in watch.banned and luck < ESCAPED:
            lucky.append(names[key])
    stuck = watch.is_stuck()
    back = None
    if watch.cleared is not None and not stuck:
        missing = watch.honest - watch.banned.keys() - set(watch.view.roster if watch.view else ())
        back = (watch.returned if watch.returned is not None else watch.step) - watch.cleared[0]
        back = back if watch.returned is not None or not missing else math.inf
    found = {
        "steps": watch.step,
        "stalls": len(watch.weather.past),
        "removed": len(watch.removed),
        "least_margin": watch.margin,
        "slow_paths": len(watch.slow_paths),
        "seconds": watch.time / max(1, watch.step),
        "waits": len(watch.waits),
        "stuck": stuck,
        "cheats": sum(map(len, cheats.values())),
        "cheaters": len(cheats),
        "hazard": hazard,
        "attackers_banned": len(watch.banned.keys() & swarm.byzantine),
        "cheaters_banned": sum(
            key in watch.banned and watch.banned[key].step in steps for key, steps in cheats.items()
        ),
        "kept_shares": swarm.plot.notes.get("kept shares", 0),
        "roster_end": watch.sizes[-1],
        "returned": back if back != math.inf else "never",
        "attack_failures": list(map(repr, swarm.failed.values())),
    }
    wrong = {
        "honest_banned": [(names[key], x.at, x.reason) for key, x in watch.banned.items() if key in watch.honest],
        "thin": watch.thin[:3],
        "unpunished": lucky,
        "halts": watch.halts[:3],
        "stuck": cell.allowed >= 0 and stuck,
        "not_back": back is not None and back > RETURN,
        "unfinished": not (stuck or watch.is_settled() or swarm.is_over() or watch.thin),
        "below_floor": watch.margin < 0,
    }
    return {**found, "wrong": {name: value for name, value in wrong.items() if value}}


def replay_takeover(cell: Cell) -> str:
    return f"python experiments/weather.py --takeover --steps {cell.steps} --only '{cell.name}' --out /dev/null"


def sum_up_takeover(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    wrong = Counter(name for row in rows for name in row["wrong"])
    hazard, banned = sum(row["hazard"] for row in rows), sum(row["cheaters_banned"] for row in rows)
    total: dict[str, Any] = {
        "runs": len(rows),
        "steps": sum(row["steps"] for row in rows),
        "stalls": sum(row["stalls"] for row in rows),
        "clean": sum(not row["wrong"] for row in rows),
        "wrong": dict(wrong),
        "cheaters": sum(row["cheaters"] for row in rows),
        "cheaters_banned": banned,
        "bans_expected": round(hazard, 1),
        "bans_off": round((banned - hazard) / math.sqrt(hazard), 2) if hazard else 0.0,
        "stuck": sum(row["stuck"] for row in rows),
        "slowest_return": max((row["returned"] for row in rows if isinstance(row["returned"], int)), default=None),
        "core_seconds": round(sum(row["cpu"] for row in rows)),
    }
    return total


def describe_takeover(rows: Sequence[dict[str, Any]]) -> None:
    """A table by size and by attack."""
    print(f"{'n, b':>8} {'attack':18} {'runs':>4} {'clean':>5} {'stuck':>5} {'cheats':>6} {'bans':>9}  amiss")
    groups: dict[tuple[int, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        cell = row["cell"]
        groups.setdefault((cell["n"], cell["b"], cell["attack"]), []).append(row)
    for (n, b, attack), some in sorted(groups.items()):
        total = sum_up_takeover(some)
        bans = f"{total['cheaters_banned']}/{total['bans_expected']:g}"
        cheats = sum(row["cheats"] for row in some)
        text = ", ".join(f"{name} {count}" for name, count in total["wrong"].items())
        counts = f"{len(some):>4} {total['clean']:>5} {total['stuck']:>5} {cheats:>6} {bans:>9}"
        print(f"{n:>4}, {b:>2} {attack:18} {counts}  {text}")


# ---- Honest peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sky:
    """One row of the table of honest peers."""

    weather: str
    """``calm``, ``late`` or a moment at which peers stall."""
    length: float
    compute: float
    kind: str
    seed: int
    steps: int

    @property
    def name(self) -> str:
        place = self.weather if self.weather in ("calm", "late") else f"{self.kind} {self.length:g} at {self.weather}"
        return f"honest {place} compute={self.compute:g} seed={self.seed} steps={self.steps}"


TARGETS = {0.5: 5.0, 2.0: 3.0, 20.0: 1.5}
"""Times calm weather, for stalls of 10 delta, by the seconds that a gradient takes."""
LATE_TARGET = 6.3
MEMBER_TARGET = 0.9


def draw_skies(steps: int, kind: Kind, seed: int) -> Iterator[Sky]:
    for compute in TARGETS:
        same = {"compute": compute, "kind": kind.value, "seed": seed, "steps": steps}
        yield Sky(weather="calm", length=0.0, **same)
        yield Sky(weather="late", length=0.0, **same)
        for moment in (Moment.BOUNDARY, Moment.ANYTIME):
            for length in (5.0, 10.0, 15.0):
                yield Sky(weather=moment.value, length=length, **same)


def run_sky(sky: Sky, limit: float) -> dict[str, Any]:
    torch.set_num_threads(1)
    begun = time.process_time()
    swarm = make_swarm(16, 3, sky.steps, sky.seed, sky.compute)
    fronts: list[Stalls | LateMessages] = []
    if sky.weather == "late":
        fronts = [LateMessages(share=0.02)]
    elif sky.weather != "calm":
        fronts = [Stalls(rate=0.01, lengths=(sky.length,) * 2, when=(Moment(sky.weather),), kinds=(Kind(sky.kind),))]
    weather = Weather(swarm, *fronts, clears=sky.steps - RETURN)
    watch = Watch(swarm, weather)
    last = 0.0

    def is_enough() -> bool:
        nonlocal last
        if not weather.is_clear:
            last = watch.time
        late = time.process_time() - begun > limit
        return swarm.is_over() or watch.is_stuck() or late

    swarm.run(math.inf, every_so_often(is_enough))
    members = set(watch.view.roster) if watch.view is not None else set()
    done = min(watch.step, sky.steps - RETURN)
    return {
        "sky": asdict(sky),
        "steps": watch.step,
        "finished": swarm.is_over() and watch.step >= sky.steps,
        "stalls": len(weather.past),
        "late_messages": weather.late_messages,
        "member_share": mean(watch.shares) if watch.shares else 1.0,
        "excluded": len(watch.honest - members),
        "banned": len(watch.banned),
        "removed": len(watch.removed),
        "least_margin": watch.margin,
        "slow_paths": len(watch.slow_paths),
        "waits": len(watch.waits),
        "seconds": last / max(1, done),
        "cpu": time.process_time() - begun,
    }


def judge_skies(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their ratio to calm weather, and what is amiss."""
    calm = {row["sky"]["compute"]: row["seconds"] for row in rows if row["sky"]["weather"] == "calm"}
    judged = []
    for row in rows:
        sky = row["sky"]
        ratio = row["seconds"] / calm[sky["compute"]] if calm.get(sky["compute"]) else None
        target = (
            TARGETS.get(sky["compute"]) if sky["length"] == 10 else LATE_TARGET if sky["weather"] == "late" else None
        )
        wrong = {
            "few members": row["member_share"] < MEMBER_TARGET,
            "excluded": row["excluded"] > 0,
            "banned": row["banned"] > 0,
            "unfinished": not row["finished"],
            "slow": ratio is not None and target is not None and ratio > target,
        }
        judged.append(
            row | {"ratio": ratio, "target": target, "wrong": [name for name, is_so in wrong.items() if is_so]}
        )
    return judged


def describe_honest(rows: Sequence[dict[str, Any]]) -> None:
    head = f"{'gradient':>8} {'weather':24} {'steps':>5} {'members':>7} {'excluded':>8} {'banned':>6} {'s/step':>7}"
    print(f"{head} {'x calm':>6} {'target':>6} {'slow paths':>10} {'margin':>6}  amiss")
    for row in judge_skies(rows):
        sky = row["sky"]
        place = sky["weather"] if not sky["length"] else f"{sky['kind']} {sky['length']:g} at {sky['weather']}"
        ratio = f"{row['ratio']:.2f}" if row["ratio"] is not None else "-"
        target = f"{row['target']:g}" if row["target"] is not None else "-"
        counts = (
            f"{row['member_share']:>7.1%} {row['excluded']:>8} {row['banned']:>6} {row['seconds']:>7.2f} {ratio:>6}"
        )
        rest = f"{target:>6} {row['slow_paths']:>10} {row['least_margin']:>6g}  {', '.join(row['wrong'])}"
        print(f"{sky['compute']:>6g} s {place:24} {row['steps']:>5} {counts} {rest}")


# ---- Both


def run_all(
    tasks: Sequence[Any], run: Callable[[Any, float], dict[str, Any]], path: Path, jobs: int, limit: float
) -> list[dict[str, Any]]:
    """Make the runs that are not in the file yet; all rows, in the order of the tasks."""
    rows: dict[str, dict[str, Any]] = {}
    if path.is_file():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["name"]] = row
    left = [task for task in tasks if task.name not in rows]
    with open(path, "a") as file:

        def keep(name: str, row: dict[str, Any]) -> None:
            rows[name] = row = {"name": name, **row}
            file.write(json.dumps(row) + "\n")
            file.flush()
            wrong = row.get("wrong")
            print(
                f"{name}: {row['steps']} steps, {row['cpu']:.0f} s{f', amiss: {wrong}' if wrong else ''}",
                file=sys.stderr,
            )

        if jobs == 1:
            for task in left:
                keep(task.name, run(task, limit))
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                running = {pool.submit(run, task, limit): task for task in left}
                for future in as_completed(running):
                    keep(running[future].name, future.result())
    return [rows[task.name] for task in tasks]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--takeover", action="store_true")
    which.add_argument("--honest", action="store_true")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1, help="of --honest")
    parser.add_argument("--kind", choices=[kind.value for kind in Kind], default=Kind.CUT.value, help="of --honest")
    parser.add_argument("--only", default="", help="runs whose name contains this text")
    parser.add_argument("--limit", type=int, help="the first so many runs")
    parser.add_argument("--seconds", type=float, default=1200.0, help="of processor time that one run may take")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("weather.jsonl"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name, least in {"steps": 2 * RETURN, "jobs": 1}.items():
        if getattr(options, name) < least:
            parser.exit(2, f"{parser.prog}: --{name}: expected at least {least}, got {getattr(options, name)}\n")
    tasks: list[Any] = list(draw_cells(options.steps))
    if options.honest:
        tasks = list(draw_skies(options.steps, Kind(options.kind), options.seed))
    tasks = [task for task in tasks if options.only in task.name][: options.limit]
    if not tasks:
        parser.exit(2, f"{parser.prog}: --only: no run's name contains {options.only!r}\n")
    run = run_cell if options.takeover else run_sky
    rows = run_all(tasks, run, options.out, options.jobs, options.seconds)
    if options.honest:
        rows = judge_skies(rows)
        amiss = [row["name"] for row in rows if row["wrong"]]
        summary = {"honest": {"runs": len(rows), "amiss": amiss, "rows": rows}}
        if not options.json:
            describe_honest(rows)
    else:
        amiss = [row["name"] for row in rows if row["wrong"]]
        summary = {"takeover": sum_up_takeover(rows)}
        if not options.json:
            describe_takeover(rows)
            print(summary["takeover"])
            for task, row in zip(tasks, rows, strict=True):
                if row["wrong"]:
                    print(f"{row['wrong']}\n  replay: {replay_takeover(task)}")
    if options.json:
        print(json.dumps(summary))
    return 1 if amiss else 0


if __name__ == "__main__":
    sys.exit(main())
