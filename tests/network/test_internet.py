"""Runs on lines as the internet has them, each peer in a network namespace of its own: slow, lossy, cut and healed.

The lines are those of ``relay.py``: 50 ms one way, one packet in a hundred lost, 100 Mbit/s. What is asserted is who is
in at the end and what everybody holds; never how long something took.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from namespaces import NotPermitted
from relay import Network

from phalanx import events
from phalanx.events import read_events
from phalanx.node import run_init
from phalanx.swarm import Attackers, Ground, Swarm, SwarmResult
from phalanx.training.recorder import EVENTS

PACED = Path(__file__).with_name("paced.py")
PEERS = 8
PATIENCE = 240.0
LONG = 300.0
"""Seconds after which something that should have happened never will: not a bound on how long it takes."""


@pytest.fixture
def net() -> Iterator[Network]:
    yield from open_network(PEERS)


@pytest.fixture
def pair() -> Iterator[Network]:
    yield from open_network(2)


def open_network(count: int) -> Iterator[Network]:
    try:
        network = Network(count, seed=1)
    except NotPermitted as error:
        pytest.skip(f"network namespaces are for root, or for who has CAP_SYS_ADMIN and CAP_NET_ADMIN: {error}")
    with network:
        yield network


@dataclass
class Split:
    """Cuts the network when everybody has finished a step, and heals it some time later."""

    net: Network
    groups: Sequence[Sequence[int]]
    at: int
    seconds: float
    settling: float = 2.0
    """Seconds for what had already arrived when the network was cut."""
    cut_at: float | None = None
    before: list[int] | None = None
    """The steps that peers had finished when the network was cut and what had arrived was worked off."""
    after: list[int] | None = None
    """The same just before it healed."""

    def watch(self, swarm: Swarm) -> bool:
        """Called all the time; as a wish to stop, which it never is."""
        now, steps = time.monotonic(), [process.step for process in swarm.processes]
        if self.cut_at is None:
            if count_members(swarm) == PEERS and min(steps) >= max(self.at, find_last_change(swarm) + 3):
                self.net.partition(self.groups)
                self.cut_at = now
        elif self.before is None:
            if now >= self.cut_at + self.settling:
                self.before = steps
        elif self.after is None and now >= self.cut_at + self.seconds:
            self.after = steps
            self.net.heal()
        return False


def count_members(swarm: Swarm) -> int:
    """A machine with too much to do removes honest peers for being late; they come back."""
    changes = {events.Joined: 1, events.Removed: -1, events.Left: -1}
    return PEERS + sum(changes.get(type(event), 0) for event in swarm.merged)


def find_last_change(swarm: Swarm) -> int:
    """The last step in which somebody came or went: until that is settled, fewer than all may be a majority."""
    changes = (events.Joined, events.Removed, events.Left)
    return max((event.step for event in swarm.merged if isinstance(event, changes)), default=0)


@dataclass
class Story:
    """A swarm that came to its end, and what became of it."""

    swarm: Swarm
    found: SwarmResult
    split: Split | None = None
    removed: list[events.Removed] = field(init=False)

    def __post_init__(self) -> None:
        self.removed = [event for event in self.swarm.merged if isinstance(event, events.Removed)]

    def check(self) -> None:
        """What holds however bad the network was."""
        assert self.found.finished
        assert self.found.result.honest_banned == 0
        for process in self.swarm.processes:
            assert process.finished is not None, f"peer {process.place} did not come to the end: {process.last_words}"
        assert self.found.digests_equal
        assert self.found.lost == []


def run_on(
    net: Network,
    out: Path,
    *,
    split: Split | None = None,
    patience: float = PATIENCE,
    **settings: object,
) -> Story:
    """The digits at a walking pace, with a peer in each of the network's namespaces."""
    ground = Ground(launch=net.popen, host=net.address)
    swarm = Swarm(out, PEERS, Attackers(), [], [], lambda event: None, ground=ground)
    common = {"validators": 1, "threads": 1, "probation": 5, "gradient_time": 5.0, "transfer_time": 2.0}
    run_init(out / "run.toml", f"{PACED}:make_task", swarm.founders, common | settings)
    watch: Callable[[], bool] = (lambda: split.watch(swarm)) if split is not None else lambda: False
    return Story(swarm, swarm.sum_up(swarm.run(patience, watch)), split)


@pytest.mark.long
def test_long_lossy_lines(net: Network, tmp_path: Path) -> None:
    story = run_on(net, tmp_path / "swarm", byzantine=2, steps=20, delta=3.0)
    story.check()
    assert story.removed == []
    assert story.found.result.steps == 20
    counts = net.counts
    assert counts.lost > 100, "the lines were better than they should have been"


@pytest.mark.long
@pytest.mark.parametrize(
    ("delta", "seconds", "goes_on"),
    [(1.0, 10.0, False), (1.0, 35.0, True), (5.0, 10.0, False)],
    ids=["within a slow path", "for long", "within deadlines"],
)
def test_a_minority_is_cut_off(net: Network, tmp_path: Path, delta: float, seconds: float, goes_on: bool) -> None:
    """Two of eight, until the others are in the middle of a slow path; until long after; or until before its time."""
    split = Split(net, [range(6), (6, 7)], at=4, seconds=seconds)
    story = run_on(net, tmp_path / "swarm", split=split, byzantine=1, steps=150, delta=delta)
    story.check()
    assert split.before is not None, "the network was never cut"
    assert split.after is not None, "the network never healed"
    assert split.after[6:] == split.before[6:], "a minority finished a step"
    if goes_on:
        assert min(split.after[:6]) > max(split.before), "the majority did not go on"


@pytest.mark.long
def test_halves_wait_for_each_other(net: Network, tmp_path: Path) -> None:
    """Four of eight are no strict majority: nobody goes on, and when they meet again all do."""
    split = Split(net, [range(4), range(4, 8)], at=4, seconds=40.0)
    story = run_on(net, tmp_path / "swarm", split=split, byzantine=1, steps=60, delta=1.0)
    assert split.before is not None, "the network was never cut"
    assert split.after == split.before, "somebody finished a step with half of the members"
    story.check()
    assert story.found.result.steps == 60


# ---- Two machines, and what their users type


@dataclass
class Machine:
    """A namespace and a folder that stand for somebody's machine."""

    net: Network
    place: int
    folder: Path

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as output:
            return self.net.popen(
                self.place,
                [sys.executable, "-m", "phalanx", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def read(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def run(self, name: str, *words: str) -> str:
        """A command to its end; what it printed."""
        process = self.start(name, *words)
        assert process.wait(LONG) == 0, self.read(name)
        return self.read(name)

    def read_steps(self, peer_id: str) -> dict[int, str]:
        """The states after each step, from a peer's own log."""
        path = self.folder / f"run-{peer_id[-6:]}" / EVENTS
        told = read_events(path) if path.exists() else []
        return {event.step: event.state for event in told if isinstance(event, events.StepFinished)}


def wait_for(happened: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LONG
    while not happened():
        assert time.monotonic() < end, f"{what}: not within {LONG:.0f} s"
        time.sleep(0.2)


@pytest.mark.long
def test_two_machines(pair: Network, tmp_path: Path) -> None:
    """docs/NETWORK.md: two founders on two machines, and a third peer that joins from one of them and leaves."""
    one, two = (Machine(pair, place, tmp_path / name) for place, name in enumerate(("one", "two")))
    for machine in (one, two):
        machine.folder.mkdir()
    first, second = (m.run("keygen", "keygen", "me.key").split()[0] for m in (one, two))
    task = ["--task", "digits", "--steps", "3000", "--newcomer-probation", "5", "--threads", "1"]
    one.run("init", "init", "run.toml", *task, "--founder", first, "--founder", second)
    shutil.copy(one.folder / "run.toml", two.folder / "run.toml")  # by mail

    founder = one.start("start", "start", "run.toml", "--key", "me.key")
    wait_for(lambda: "others reach this peer at" in one.read("start") or founder.poll() is not None, "an address")
    found = re.search(r"others reach this peer at (\S+)", one.read("start"))
    assert found is not None, one.read("start")
    address = found[1]
    assert address.startswith(f"/ip4/{pair.address(0)}/"), "the first address is of no use to another machine"
    other = two.start("start", "start", "run.toml", "--key", "me.key", "--peer", address)
    wait_for(lambda: len(two.read_steps(second)) > 2 or other.poll() is not None, "the first steps")

    third = two.run("third", "keygen", "third.key").split()[0]
    joiner = two.start("join", "join", address, "--key", "third.key")
    for machine, name in ((two, "join"), (one, "start"), (two, "start")):
        wait_for(lambda m=machine, n=name: "joined" in m.read(n) or joiner.poll() is not None, f"{name}: joining")
        assert joiner.poll() is None, two.read("join")
    step = max(one.read_steps(first))
    wait_for(lambda: max(two.read_steps(third), default=0) > step + 2, "steps with three members")
    logs = [one.read_steps(first), two.read_steps(second), two.read_steps(third)]
    common = set.intersection(*map(set, logs))
    assert common
    for number in common:
        assert len({states[number] for states in logs}) == 1

    # Everybody goes, one after another; the last one is alone.
    for process, name in ((joiner, "join"), (other, "start")):
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 130, two.read(name)
        assert "Traceback" not in two.read(name)
    founder.send_signal(signal.SIGINT)
    assert founder.wait(LONG) == 130, one.read("start")
    assert "Traceback" not in one.read("start")
