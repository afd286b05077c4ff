"""What protection costs on a network: whole steps between processes on loopback, against what does not protect.

    python benchmarks/network.py [--peers 4] [--size 20000000] [--rounds 5] [--warmup 2] [--json]

Every peer is a process with one thread for arithmetic; all move a vector of ``size`` float32 numbers. Measured one
after the other, in one run, are

* **gloo**: ``all_reduce`` of torch.distributed over bare TCP: no encryption, nobody who may fail. The floor.
* **averager**: hivemind's ``DecentralizedAverager``, one tensor, a group of all peers. ``averager_s`` is the all-reduce
  alone: the group is formed before the clock starts. ``averager_step_s`` is all of ``step()``, matchmaking included.
* **butterfly**: the plain mean over this project's own transport. Part ``j`` goes to peer ``j``, who returns the mean.
* **protected**: steps of the real protocol: story, signatures, journal on disk, transport. Gradients cost nothing: they
  are pieces of one random vector that is made beforehand. The update is SGD with momentum.

A round of the first three lasts from the first peer that begins to the last that ends. ``critical_s`` is from the
moment at which all gradients are ready (the last peer enters the step) until every peer knows all aggregates, REVEAL is
complete and the update is applied. ``protected_s`` is the whole step, from one ``StepFinished`` to the next: after the
critical part the peers verify, which a real gradient would overlap with. ``verify_cpu_s`` is the processor time of that
per peer: everything after the update, and a validator's check before its COMMIT (``check_cpu_s``, of the validator
alone, who is waited for). ``stages`` tells when the last peer came to each point of the critical part.

``cpu_s`` is the processor time of a round, of all processes with their daemons (the averager's matchmaking included),
and ``daemon_cpu_s`` the daemons' share of it; ``critical_cpu_s`` is that of the critical part. On a machine with fewer
cores than peers these say more than the clock, and other work on it changes them less. ``bytes_per_peer`` is what a
peer gave to its streams in a protected step, framing included; ``simulated_bytes_per_peer`` is what the simulator
counts for the same step.

Figures are medians over the rounds; ``load`` is what else the machine had to do when it all began. With ``--json`` the
last line of the output is one JSON object. The exit status is 0 if every target is met, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is here, and for all processes that are started from this one

import numpy as np
import torch
from torch import Tensor

from phalanx.core.codec import encode_frame
from phalanx.core.config import KEPT_STEPS, Config
from phalanx.core.crypto import Identity
from phalanx.core.effects import Sign
from phalanx.core.envelope import Examiner
from phalanx.core.events import AttemptStarted, Banned, Removed, SlowPath, StepFinished
from phalanx.core.life import make_peer, run_made_peer, run_peer
from phalanx.core.messages import MAX_CHUNK, AggregateChunk, Message, PartChunk, Signed
from phalanx.network.ideal import IdentityExaminer, make_signers
from phalanx.network.journal import Journal
from phalanx.network.live import Driver, Inbox
from phalanx.network.simulated import USUAL, Links, World
from phalanx.network.transport import Transport
from phalanx.training.allocation import keep_freed_memory
from phalanx.training.optimizers import make_optimizer
from phalanx.training.solo import Solo

TARGETS = {"critical_over_averager": ("<", 1.0), "critical_over_butterfly": ("<=", 1.25)}
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = bytes(32)
WIDTH = 4
"""Bytes of a number."""
NORM, TAU = 4.0, 1.0
"""Of a gradient; and of what is left of a part in the aggregate: rows are clipped, as they are in a real run."""
PATIENCE = 600.0
INBOX = 1 << 27
_SHIFTS = 1 << 12
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Plan:
    peers: int
    size: int
    rounds: int
    warmup: int
    folder: Path

    @property
    def steps(self) -> range:
        """The protected steps that are timed. Until old ones are forgotten, each takes memory that no other used."""
        first = self.warmup + 2 * KEPT_STEPS
        return range(first, first + self.rounds)


# ---- Processes


class Seat:
    """A worker's place among the others."""

    def __init__(self, rank: int, plan: Plan, line: Connection) -> None:
        self.rank, self.plan, self._line = rank, plan, line

    def meet(self, value: Any = None) -> list[Any]:
        """Wait until everybody has come here; the result is what each of them brought."""
        self._line.send(("meet", value))
        found: list[Any] = self._line.recv()
        return found


def work(variant: str, rank: int, plan: Plan, line: Connection) -> None:
    """A worker's life."""
    os.dup2(2, 1)  # the one line on stdout is the parent's
    torch.set_num_threads(1)
    line.send(("result", VARIANTS[variant](Seat(rank, plan, line))))


def run_workers(variant: str, plan: Plan) -> list[Any]:
    """Run a variant in as many processes as there are peers; what each of them found."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(plan.peers)]
    workers = [
        context.Process(target=work, args=(variant, rank, plan, far), name=f"{variant} {rank}")
        for rank, (_, far) in enumerate(pairs)
    ]
    try:
        for worker in workers:
            worker.start()
        for _, far in pairs:
            far.close()
        results = _serve(workers, [near for near, _ in pairs])
        for worker in workers:
            worker.join(PATIENCE)
        return results
    finally:
        for worker in workers:
            _end(worker)


def _serve(workers: list[SpawnProcess], lines: list[Connection]) -> list[Any]:
    """Let the workers meet until each has a result."""
    while True:
        said: dict[int, tuple[str, Any]] = {}
        while len(said) < len(lines):
            silent = [rank for rank in range(len(lines)) if rank not in said]
            ready = wait([*(lines[rank] for rank in silent), *(workers[rank].sentinel for rank in silent)], PATIENCE)
            for rank in silent:
                try:
                    if lines[rank].poll():
                        said[rank] = lines[rank].recv()
                    elif not ready or workers[rank].sentinel in ready:
                        raise EOFError
                except EOFError:
                    raise RuntimeError(f"{workers[rank].name} has failed, or hangs") from None
        values = [said[rank][1] for rank in range(len(lines))]
        if {kind for kind, _ in said.values()} == {"result"}:
            return values
        for line in lines:
            line.send(values)


def _end(worker: SpawnProcess) -> None:
    """Leave nothing behind, whatever has happened."""
    if worker.pid is None:
        return
    for process in (*find_descendants(worker.pid), worker.pid) if worker.is_alive() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    worker.join()


def find_descendants(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *find_descendants(child)]
    return found


def read_cpu() -> tuple[float, float]:
    """Processor seconds of this process and all below it; and of the daemons among them."""
    total = daemons = 0.0
    for process in (os.getpid(), *find_descendants(os.getpid())):
        with contextlib.suppress(OSError):
            name, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
            fields = rest.split()
            spent = (int(fields[11]) + int(fields[12])) / _TICK
            total += spent
            daemons += spent if "p2pd" in name else 0.0
    return total, daemons


@dataclass(frozen=True)
class Lap:
    """One peer's part in a round, on the clock that all processes share."""

    begun: float
    ended: float
    cpu: float
    daemons: float
    waited: float = 0.0
    """Before the clock started."""


def time_rounds(seat: Seat, play: Callable[[int], float | None], prepare: Callable[[], object]) -> list[Lap]:
    """Rounds that all begin together; ``play`` returns when its own clock started, if that was later."""
    laps = []
    for number in range(seat.plan.warmup + seat.plan.rounds):
        prepare()
        seat.meet()
        spent, came = read_cpu(), time.monotonic()
        begun = play(number) or came
        ended = time.monotonic()
        seat.meet()
        cpu, daemons = (after - before for after, before in zip(read_cpu(), spent, strict=True))
        laps.append(Lap(begun, ended, cpu, daemons, begun - came))
    return laps[seat.plan.warmup :]


def make_vector(seed: int, size: int) -> Tensor:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return vector.mul_(NORM / math.sqrt(size))


def check_mean(seat: Seat, given: Tensor, found: Tensor) -> None:
    """Whoever is fast has to be right as well: a few numbers of each vector are compared."""
    places = torch.arange(50) * (len(given) - 1) // 49
    expected = torch.tensor(seat.meet(given[places].tolist())).mean(0)
    assert torch.allclose(found[places], expected, atol=1e-6), "not the mean"


# ---- Without protection


def run_gloo(seat: Seat) -> list[Lap]:
    import torch.distributed as dist

    plan = seat.plan
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{plan.folder}/gloo", rank=seat.rank, world_size=plan.peers)
    given = make_vector(seat.rank, plan.size)
    vector = given.clone()

    def play(number: int) -> None:
        dist.all_reduce(vector)
        vector.div_(plan.peers)

    laps = time_rounds(seat, play, lambda: vector.copy_(given))
    check_mean(seat, given, vector)
    dist.destroy_process_group()
    return laps


def run_averager(seat: Seat) -> list[Lap]:
    import hivemind
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    multiprocessing.set_start_method("fork", force=True)  # hivemind starts processes of its own, and needs that

    def start_dht(peers: Sequence[str]) -> Any:
        return hivemind.DHT(
            initial_peers=peers, host_maddrs=LOOPBACK, use_relay=False, use_auto_relay=False, start=True
        )

    plan, dht = seat.plan, None
    if seat.rank == 0:
        dht = start_dht(())
    places = seat.meet([str(place) for place in dht.get_visible_maddrs()] if dht is not None else None)[0]
    dht = dht or start_dht(places)
    given = make_vector(seat.rank, plan.size)
    vector = given.clone()
    averager = DecentralizedAverager(
        [vector],
        dht,
        prefix="benchmark",
        target_group_size=plan.peers,
        min_group_size=plan.peers,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        allow_state_sharing=False,
        start=True,
    )

    def restore() -> None:
        with averager.get_tensors() as (tensor,):
            tensor.copy_(given)

    def play(number: int) -> float:
        """Find a group, wait until everybody has, and let it average."""
        control = averager.step(wait=False, require_trigger=True, timeout=PATIENCE)
        while control.stage is not AveragingStage.AWAITING_TRIGGER:
            assert not control.done(), control.exception()
            time.sleep(0.002)
        seat.meet()
        begun = time.monotonic()
        control.allow_allreduce()
        group = control.result()
        assert len(group) == plan.peers, f"a group of {len(group)}"
        return begun

    try:
        laps = time_rounds(seat, play, restore)
        with averager.get_tensors() as (tensor,):
            check_mean(seat, given, tensor)
        seat.meet()
    finally:
        averager.shutdown()
        dht.shutdown()
    return laps


def start_transport(seat: Seat, run: bytes, deliver: Callable[[bytes, Message, int], bool | None]) -> Transport:
    """A transport that knows all others, and is known to them."""
    transport = Transport(key_file(seat.plan, seat.rank), run, deliver, listen=LOOPBACK)
    transport.start()
    others = [(key, places) for key, places in seat.meet((transport.key, transport.addresses)) if key != transport.key]
    transport.set_circle(frozenset(key for key, _ in others), frozenset())
    for _, places in others:
        transport.add_addresses(places)
    seat.meet()  # nobody is a stranger to anybody any more
    return transport


def key_file(plan: Plan, rank: int) -> Path:
    return plan.folder / f"key{rank}"


def run_butterfly(seat: Seat) -> list[Lap]:
    inbox: SimpleQueue[Message] = SimpleQueue()
    keep_freed_memory()
    transport = start_transport(seat, RUN, lambda sender, message, size: inbox.put(message))
    try:
        keys = seat.meet(transport.key)
        given = make_vector(seat.rank, seat.plan.size)
        mean = torch.empty_like(given)
        average = partial(average_plainly, transport, inbox, keys, seat.rank, given.numpy(), mean.numpy())
        laps = time_rounds(seat, average, lambda: mean.zero_())
        check_mean(seat, given, mean)
        return laps
    finally:
        transport.close()


def average_plainly(
    transport: Transport,
    inbox: SimpleQueue[Message],
    keys: list[bytes],
    me: int,
    given: np.ndarray,
    mean: np.ndarray,
    number: int,
) -> None:
    """The butterfly: everybody's part ``j`` to peer ``j``, and the mean of each part to everybody."""
    count = len(keys)
    others = [(me + ahead) % count for ahead in range(1, count)]
    edges = [len(given) * part // count for part in range(count + 1)]
    parts = [given[low:high] for low, high in itertools.pairwise(edges)]
    for at, piece, part in cut_in_turn(parts, others):
        size = WIDTH * len(parts[part])
        transport.send((keys[part],), PartChunk(number, 0, keys[me], part, (), size, at, piece))
    total, missing = parts[me].copy(), (count - 1) * WIDTH * len(parts[me])
    lacking = WIDTH * (len(given) - len(parts[me]))
    while missing or lacking:
        message = inbox.get(timeout=PATIENCE)
        assert isinstance(message, PartChunk | AggregateChunk), message
        assert message.step == number
        values, at = np.frombuffer(message.data, np.float32), message.offset // WIDTH
        if isinstance(message, AggregateChunk):
            start = edges[message.part] + at
            mean[start : start + len(values)] = values
            lacking -= len(message.data)
            continue
        total[at : at + len(values)] += values
        missing -= len(message.data)
        if not missing:
            total /= count
            mean[edges[me] : edges[me + 1]] = total
            for at, piece, _ in cut_in_turn([total], [0]):
                to = tuple(keys[part] for part in others)
                transport.send(to, AggregateChunk(number, 0, me, WIDTH * len(total), at, piece))


def cut_in_turn(parts: Sequence[np.ndarray], order: Sequence[int]) -> Iterator[tuple[int, Any, int]]:
    """The chunks of some parts: the first of each, then the second of each, so that nobody has to wait for its own."""
    views = {part: memoryview(parts[part]).cast("B") for part in order}
    for at in range(0, max(map(len, views.values()), default=0), MAX_CHUNK):
        for part in order:
            if piece := views[part][at : at + MAX_CHUNK]:
                yield at, piece, part


# ---- With protection


class FreeGradients:
    """Gradients that cost nothing: each seed stands for its own piece of one random vector."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.start = torch.zeros(size)
        self._stock = make_vector(-1, size + 16 * _SHIFTS)

    def compute_with_loss(self, parameters: Tensor, seed: bytes, *, poisoned: bool = False) -> tuple[Tensor, float]:
        shift = 16 * (int.from_bytes(seed[:2], "big") % _SHIFTS)
        return self._stock[shift : shift + self.size], 0.0


@dataclass(frozen=True)
class Mark:
    """A point of a step that a peer has come to."""

    step: int
    name: str
    time: float
    cpu: float
    """Seconds of this process, all threads together."""


@dataclass
class Story:
    """What a peer has to tell of its protected steps."""

    marks: list[Mark] = field(default_factory=list)
    checked: set[int] = field(default_factory=set)
    """Steps in which this peer was a validator."""
    totals: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """At the end of each step: processor seconds, those of the daemon, and bytes sent."""

    def mark(self, step: int, name: str) -> None:
        self.marks.append(Mark(step, name, time.monotonic(), time.process_time()))


class WatchedMachine(Solo):
    """Marks when its aggregate and its update are done."""

    story: Story
    step = 0

    def compute_aggregate(self, rows: Tensor, tau: float) -> Tensor:
        self.story.mark(self.step, "parts here")
        aggregate = super().compute_aggregate(rows, tau)
        self.story.mark(self.step, "clipped")
        return aggregate

    def apply(self, step: int, aggregate: Tensor) -> None:
        self.story.mark(step, "aggregates read")
        super().apply(step, aggregate)
        self.story.mark(step, "applied")


class WatchedJournal(Journal):
    """Marks when each phase is entered."""

    story: Story

    def sign(self, signer: Any, run: bytes, effect: Sign) -> Signed:
        message = super().sign(signer, run, effect)
        self.story.mark(effect.step, f"{effect.phase.name} signed")
        return message


def make_machine(size: int, steps: int) -> WatchedMachine:
    optimizer = make_optimizer({"name": "sgd", "rate": 0.01, "momentum": 0.9}, steps)
    return WatchedMachine(FreeGradients(size), optimizer)  # type: ignore[arg-type]


def make_config(founders: tuple[bytes, ...], size: int, state: bytes, steps: int) -> Config:
    return Config(
        founders=founders,
        byzantine=(len(founders) - 2) // 2,
        size=size,
        steps=steps,
        tau=TAU,
        cap=1e3,
        delta=60.0,  # whatever else runs here, nobody is late
        gradient_time=60.0,
        transfer_time=60.0,
        state=state,
    ).check()


def run_protected(seat: Seat) -> Story:
    plan, story, inbox = seat.plan, Story(), Inbox(INBOX)
    last = plan.steps[-1]
    machine = make_machine(plan.size, last + 3)
    machine.reserve_memory()
    identity = Identity.load(key_file(plan, seat.rank))
    config = make_config(tuple(seat.meet(identity.key)), plan.size, machine.start_digest, last + 3)
    journal = WatchedJournal(plan.folder / f"journal{seat.rank}", config.run)
    transport = start_transport(seat, config.run, inbox.put)
    machine.story = journal.story = story

    def finish() -> None:
        seat.meet()
        driver.stop()

    def hear(event: Any) -> None:
        assert not isinstance(event, Banned | Removed | SlowPath), event
        if isinstance(event, AttemptStarted):
            machine.step = event.view.step
            story.mark(event.view.step, "begun")
            if not peer.contributes:
                story.checked.add(event.view.step)
        elif isinstance(event, StepFinished):
            story.mark(event.step + 1, "COMMIT complete")
            total = transport.traffic.total
            story.totals[event.step] = (*read_cpu(), total.payload + total.rest)
            if event.step == last:  # others may still need what this peer has to say
                threading.Thread(target=finish).start()

    peer = make_peer(config, identity.key, Examiner())
    driver = Driver(config.run, identity, machine, journal, transport, hear, inbox)
    try:
        driver.run(run_made_peer(peer, returning=False))
        assert not transport.dropped, "messages were dropped"
    finally:
        transport.close()
        journal.close()
    return story


def simulate_bytes(plan: Plan) -> float:
    """What the simulator counts for one step: bytes of frames per peer."""
    signers, verify = make_signers(plan.peers, 1, ideal=True)
    machines = [Solo(FreeGradients(plan.size), make_machine(1, 10).optimizer) for _ in signers]  # type: ignore[arg-type]
    config = make_config(tuple(signer.key for signer in signers), plan.size, machines[0].start_digest, 10)
    sent: Counter[bytes] = Counter()
    before, after = {}, {}
    last: tuple[Message | None, int] = None, 0

    def route(now: float, sender: bytes, to: bytes, message: Message) -> float:
        nonlocal last
        if last[0] is not message:
            last = message, len(encode_frame(message))
        sent[sender] += last[1]
        return USUAL

    def hear(key: bytes, event: Any) -> None:
        if isinstance(event, StepFinished) and event.step < 2:
            (before, after)[event.step][key] = sent[key]

    links = Links(low=0.05, high=0.5, route=route)
    world = World(config.run, 1, links, count=True, trace=False, on_note=hear, keep_notes=False)
    examiner = IdentityExaminer(verify)
    for signer, machine in zip(signers, machines, strict=True):

        def start(disk, key=signer.key):  # type: ignore[no-untyped-def]
            return run_peer(config, key, examiner, disk.view)

        world.add(signer.key, signer, machine, start)
    world.run(stop=lambda: len(after) == plan.peers)
    total = world.traffic.total
    assert total.payload + total.rest == sent.total()
    return (sum(after.values()) - sum(before.values())) / plan.peers


VARIANTS: dict[str, Callable[[Seat], Any]] = {
    "gloo": run_gloo,
    "averager": run_averager,
    "butterfly": run_butterfly,
    "protected": run_protected,
}


# ---- Results


def sum_up_laps(laps: list[list[Lap]]) -> dict[str, float]:
    rounds = list(zip(*laps, strict=True))
    return {
        "seconds": statistics.median(max(x.ended for x in peers) - min(x.begun for x in peers) for peers in rounds),
        "waited": statistics.median(max(x.waited for x in peers) for peers in rounds),
        "cpu": statistics.median(sum(x.cpu for x in peers) for peers in rounds),
        "daemons": statistics.median(sum(x.daemons for x in peers) for peers in rounds),
    }


def sum_up_stories(plan: Plan, stories: list[Story]) -> dict[str, Any]:
    steps = plan.steps
    marks = [{(mark.step, mark.name): mark for mark in story.marks} for story in stories]

    def find_last(step: int, name: str) -> float:
        return max(peer[step, name].time for peer in marks if (step, name) in peer)

    def find_verification(step: int) -> float:
        spent = [peer[step + 1, "begun"].cpu - peer[step, "applied"].cpu for peer in marks]
        return sum(spent) / plan.peers + find_check(step) / plan.peers

    def find_check(step: int) -> float:
        return sum(
            peer[step, "COMMIT signed"].cpu - peer[step, "begun"].cpu
            for peer, story in zip(marks, stories, strict=True)
            if step in story.checked
        )

    def per_step(which: int) -> float:
        return (
            sum(story.totals[steps[-1]][which] - story.totals[steps[0] - 1][which] for story in stories) / plan.rounds
        )

    cpu, verify, check = per_step(0), statistics.median(map(find_verification, steps)), [*map(find_check, steps)]
    begun = {step: find_last(step, "begun") for step in steps}
    names = dict.fromkeys(mark.name for mark in stories[0].marks if mark.step in steps)
    ends = [find_last(step, "COMMIT complete") for step in range(steps[0] + 1, steps[-1] + 2)]
    starts = [find_last(step, "COMMIT complete") for step in steps]
    return {
        "critical_s": statistics.median(find_last(step, "applied") - begun[step] for step in steps),
        "protected_s": statistics.median(end - start for end, start in zip(ends, starts, strict=True)),
        "critical_cpu_s": cpu - plan.peers * verify + statistics.median(check),
        "verify_cpu_s": verify,
        "check_cpu_s": statistics.median(check),
        "stages": {name: statistics.median(find_last(step, name) - begun[step] for step in steps) for name in names},
        "begin_spread_s": statistics.median(begun[s] - min(peer[s, "begun"].time for peer in marks) for s in steps),
        "cpu": cpu,
        "daemons": per_step(1),
        "bytes_per_peer": per_step(2) / plan.peers,
    }


def run(plan: Plan) -> dict[str, Any]:
    """All variants, one after the other."""
    load = os.getloadavg()[0]
    for rank in range(plan.peers):
        Identity.generate().save(key_file(plan, rank))
    plain: dict[str, dict[str, float]] = {}
    for variant in ("gloo", "averager", "butterfly"):
        plain[variant] = sum_up_laps(run_workers(variant, plan))
        say(f"{variant}: {plain[variant]['seconds']:.3f} s")
    protected = sum_up_stories(plan, run_workers("protected", plan))
    say(f"protected: {protected['protected_s']:.3f} s, of which {protected['critical_s']:.3f} s are critical")
    simulated = simulate_bytes(plan)
    cpu, daemons = protected.pop("cpu"), protected.pop("daemons")
    averager, butterfly, critical = plain["averager"], plain["butterfly"]["seconds"], protected["critical_s"]
    return {
        "peers": plan.peers,
        "size": plan.size,
        "rounds": plan.rounds,
        "gloo_s": plain["gloo"]["seconds"],
        "averager_s": averager["seconds"],
        "averager_step_s": averager["seconds"] + averager["waited"],
        "butterfly_s": butterfly,
        **protected,
        "critical_over_averager": critical / averager["seconds"],
        "critical_over_butterfly": critical / butterfly,
        "cpu_s": {name: found["cpu"] for name, found in plain.items()} | {"protected": cpu},
        "daemon_cpu_s": {name: found["daemons"] for name, found in plain.items()} | {"protected": daemons},
        "simulated_bytes_per_peer": simulated,
        "bytes_ratio": protected["bytes_per_peer"] / simulated,
        "load": load,
        "torch": torch.__version__,
    }


def is_met(value: float, side: str, limit: float) -> bool:
    return value < limit if side == "<" else value <= limit


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def print_table(results: dict[str, Any], met: dict[str, bool]) -> None:
    for name in ("gloo_s", "averager_s", "averager_step_s", "butterfly_s", "critical_s", "protected_s"):
        print(f"{name:>26} {results[name]:10.3f}")
    for name, (side, limit) in TARGETS.items():
        print(f"{name:>26} {results[name]:10.3f}   target {side} {limit:g}   {'met' if met[name] else 'MISSED'}")
    for name in ("critical_cpu_s", "verify_cpu_s", "check_cpu_s"):
        print(f"{name:>26} {results[name]:10.3f}")
    for name, spent in results["cpu_s"].items():
        print(f"{f'cpu_s {name}':>26} {spent:10.3f}   daemons {results['daemon_cpu_s'][name]:.3f}")
    for name, moment in results["stages"].items():
        print(f"{name:>26} {moment:10.3f}")
    print(f"{'bytes_per_peer':>26} {results['bytes_per_peer']:,.0f}")
    print(f"{'simulated_bytes_per_peer':>26} {results['simulated_bytes_per_peer']:,.0f}")
    print(f"{'bytes_ratio':>26} {results['bytes_ratio']:10.6f}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--size", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as with Ctrl-C: leave no process behind
    with tempfile.TemporaryDirectory(prefix="phalanx-benchmark-") as folder:
        results = run(Plan(options.peers, options.size, options.rounds, options.warmup, Path(folder)))
    met = {name: is_met(results[name], *target) for name, target in TARGETS.items()}
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        print_table(results, met)
    if options.json:
        limits = {name: {"side": side, "limit": limit, "met": met[name]} for name, (side, limit) in TARGETS.items()}
        print(json.dumps(results | {"targets": limits}))
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
