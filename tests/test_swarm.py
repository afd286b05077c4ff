"""``phalanx swarm`` without a network: peers that are scripts of events, and signals to those who end them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from phalanx import events
from phalanx.core.errors import LocalError
from phalanx.events import Event, EventLog
from phalanx.swarm import Attackers, Ground, Swarm, run_swarm
from phalanx.training.recorder import EVENTS

LONG = 60.0
"""Seconds after which something that should have happened never will: not a bound on how long it takes."""
PEERS, STEPS = 4, 10
DIGEST = "ab" * 32


class FakeProcess:
    """Up until a signal comes."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.code

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.code = 130 if number == signal.SIGTERM else -number


class Stage:
    """A swarm whose peers say what the test writes into their logs, one act of the test at each look."""

    def __init__(
        self,
        out: Path,
        kills: Sequence[tuple[int, int]] = (),
        joins: Sequence[tuple[int, int]] = (),
        peers: int = PEERS,
    ) -> None:
        self.told: list[Event] = []
        self.starts: list[int] = []
        self.fakes: dict[int, FakeProcess] = {}
        self._logs: dict[int, EventLog] = {}
        self.swarm = Swarm(out, peers, Attackers(), kills, joins, self.told.append, ground=Ground(launch=self._launch))

    def _launch(self, place: int, words: Sequence[str], **options: Any) -> Any:
        self.starts.append(place)
        self.fakes[place] = FakeProcess()
        if place not in self._logs:
            folder = self.swarm.processes[place].folder / "run"
            folder.mkdir()
            self._logs[place] = EventLog(folder / EVENTS)
            self._logs[place].add(self._announce())
        return self.fakes[place]

    def _announce(self) -> Event:
        return events.RunStarted(
            run=DIGEST,
            task="small",
            peers=PEERS,
            byzantine=0,
            attack=None,
            start=None,
            every=None,
            defense="phalanx",
            steps=STEPS,
            validators=1,
            seed=0,
            size=100,
            metric_name="accuracy",
            higher_is_better=True,
            keys=[process.identity.key.hex() for process in self.swarm.processes[:PEERS]],
            attackers=[],
            software={},
            clock="wall",
        )

    def say(self, place: int, *told: Event) -> None:
        for event in told:
            self._logs[place].add(event)

    def finish_step(self, step: int) -> None:
        """All that are up finish a step; the last one is the end."""
        for place, fake in self.fakes.items():
            if fake.code is None:
                self.say(place, events.StepFinished(step, 0, PEERS, 1.0, None, 8, 1.0, DIGEST))
                if step == STEPS - 1:
                    self.say(place, events.RunFinished(STEPS, 0.5, DIGEST))

    def halt(self, place: int, step: int, *silent: int, allowed: int = 0) -> None:
        """A peer halts; it counts the others by itself."""
        keys = [self.swarm.processes[other].identity.key.hex() for other in silent]
        self.say(place, events.Halted(step, [90 + other for other in silent], keys, allowed))

    def run(self, *acts: Callable[[], object], patience: float = LONG) -> bool:
        """The acts, one at a look; then nothing more happens, until the swarm ends it."""
        rest = iter(acts)

        def should_stop() -> bool:
            act = next(rest, None)
            return act is not None and act() == "stop"

        try:
            return self.swarm.run(patience, should_stop)
        finally:
            for log in self._logs.values():
                log.close()

    def steps(self, *which: int) -> list[Callable[[], object]]:
        return [lambda step=step: self.finish_step(step) for step in which]  # type: ignore[misc]

    def tell(self, *kinds: type) -> list[Event]:
        return [event for event in self.told if isinstance(event, kinds)]


# ---- Kills and joins


def test_kills_and_joins_happen_though_there_is_news_at_every_look(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(1, 2)], joins=[(1, 4)])
    seen: list[tuple[int | None, int]] = []

    def note() -> None:
        seen.append((stage.fakes[1].code, stage.starts.count(1)))

    def act(step: int) -> Callable[[], object]:
        return lambda: (note(), stage.finish_step(step))

    assert stage.run(*(act(step) for step in range(STEPS)))
    assert seen == [(None, 1)] * 2 + [(-9, 1)] * 2 + [(None, 2)] * 6
    found = stage.swarm.sum_up(True)
    assert (found.missed, found.reason, found.digests_equal) == ([], None, True)


def test_who_halts_the_run_comes_back_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(1, 2)], joins=[(1, 8)])
    assert stage.run(
        *stage.steps(0, 1),
        lambda: stage.halt(0, 2, 1),
        lambda: stage.halt(3, 2, 1),
        lambda: None,
        lambda: stage.say(0, events.WentOn(2)),
        lambda: stage.say(3, events.WentOn(2)),
        *stage.steps(*range(2, STEPS)),
    )
    assert stage.starts == [0, 1, 2, 3, 1]
    assert "peer 1 comes back before step 8: without it the run stands still at step 2" in capsys.readouterr().err
    assert stage.tell(events.Halted, events.WentOn) == [
        events.Halted(2, [1], [stage.swarm.processes[1].identity.key.hex()], 0),
        events.WentOn(2),
    ]
    assert stage.swarm.sum_up(True).missed == []


def test_who_is_not_missed_comes_back_when_it_is_due(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(1, 1)], joins=[(1, 5)])
    key = stage.swarm.processes[1].identity.key.hex()
    acts = [
        *stage.steps(0),
        lambda: stage.halt(0, 1, 1, allowed=1),  # one that is allowed to be silent: this is not why
        lambda: stage.say(0, events.WentOn(1), events.Removed(1, 1, key, "silent")),
        lambda: stage.halt(0, 1, 2),  # it is out: this is not about it
        lambda: None,
        *stage.steps(1, 2, 3),
        lambda: stage.starts.append(-1),
        *stage.steps(*range(4, STEPS)),
    ]
    assert stage.run(*acts)
    assert stage.starts == [0, 1, 2, 3, -1, 1]


def test_a_member_that_fell_behind_does_not_halt_the_run(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm")
    stage.run(*stage.steps(0, 1, 2), lambda: stage.halt(3, 1, 0, 1, 2), lambda: None, lambda: "stop")
    assert stage.tell(events.Halted, events.WentOn) == []


def test_those_who_are_all_down_come_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", [(place, 2) for place in range(PEERS)], [(place, 5) for place in range(PEERS)])
    assert stage.run(*stage.steps(0, 1), lambda: None, lambda: None, *stage.steps(*range(2, STEPS)))
    assert sorted(stage.starts) == sorted([*range(PEERS)] * 2)


def test_without_a_word_from_anybody_those_who_are_down_come_back(tmp_path: Path) -> None:
    """Fewer are left than it takes to say that the others are silent."""
    stage = Stage(tmp_path / "swarm", [(place, 2) for place in (1, 2, 3)], [(1, 5)])
    assert not stage.run(*stage.steps(0, 1), patience=2.0)
    assert stage.starts == [0, 1, 2, 3, 1]
    reason = stage.swarm.sum_up(False).reason
    assert reason is not None
    assert reason.endswith("peers 2, 3 are down")


def test_what_did_not_happen_is_told_and_not_waited_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(1, 9), (2, 9)], joins=[(1, 9)])
    last = [lambda: (stage.finish_step(8), stage.finish_step(9))]
    assert stage.run(*stage.steps(*range(8)), *last)
    assert stage.starts == [0, 1, 2, 3]
    assert stage.swarm.sum_up(True).missed == ["--kill 1@9", "--kill 2@9", "--join 1@9"]


@pytest.mark.parametrize("option", ["kill", "join"])
def test_a_moment_after_the_end_is_refused(tmp_path: Path, option: str) -> None:
    moments: dict[str, list[tuple[int, int]]] = {"kills": [(1, 3)], "joins": [(4, 3)]}
    moments[f"{option}s"] = [(moments[f"{option}s"][0][0], 20)]
    with pytest.raises(LocalError, match=rf"^--{option} \d@20: the run has 20 steps; expected one from 0 to 19$"):
        run_swarm(
            task="digits",
            peers=4,
            byzantine=0,
            attackers=Attackers(),
            seed=0,
            out=tmp_path / "swarm",
            settings={"steps": 20},
            on_event=lambda event: None,
            should_stop=lambda: True,
            **moments,
        )
    assert not (tmp_path / "swarm").exists()


# ---- How it ends


def test_an_interrupt_before_the_first_step_is_an_interrupt(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm")
    assert not stage.run(lambda: "stop")
    found = stage.swarm.sum_up(False)
    assert (found.finished, found.result.interrupted, found.result.steps) == (False, True, 0)
    assert (found.digests_equal, found.reason) == (None, "it was interrupted")
    assert found.result.metric_name == "accuracy"
    assert found.to_json().keys() >= {"final_metric", "digests_equal", "finished", "reason", "missed"}


def test_a_swarm_that_is_given_up_says_who_is_silent(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(1, 2)])
    assert not stage.run(*stage.steps(0, 1), lambda: None, lambda: stage.halt(0, 2, 1), patience=2.0)
    found = stage.swarm.sum_up(False)
    assert found.reason is not None
    assert "the run halts in step 2, since more members are silent (peer 1) than" in found.reason
    assert found.digests_equal is None
    assert not stage.tell(events.WentOn)


def test_a_run_whose_peers_all_died_has_not_finished(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(place, 2) for place in range(PEERS)])
    assert not stage.run(*stage.steps(0, 1))
    assert stage.swarm.sum_up(False).reason == "all honest peers have ended before that"


@pytest.mark.parametrize(("code", "words"), [(-9, "SIGKILL"), (-63, "signal 63"), (3, "exit code 3")])
def test_how_a_peer_ended_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, words: str) -> None:
    stage = Stage(tmp_path / "swarm")
    (stage.swarm.processes[1].folder / "output.log").write_text("step 1/10  loss 1\n")
    stage.run(*stage.steps(0), lambda: setattr(stage.fakes[1], "code", code), lambda: None, lambda: "stop")
    assert f"peer 1 ended early ({words}); its last line: step 1/10  loss 1\n" in capsys.readouterr().err


def test_a_log_is_heard_once_though_its_peer_comes_back(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "swarm", kills=[(1, 2)], joins=[(1, 4)])
    assert stage.run(*stage.steps(*range(STEPS)))
    assert [event.step for event in stage.swarm.processes[1].told if isinstance(event, events.StepFinished)] == [
        *(0, 1),
        *range(4, STEPS),
    ]


# ---- Signals: no process is left behind

SCRIPT = """
import os, signal, subprocess, sys
from pathlib import Path
from phalanx.run import listen_for_interrupts
from phalanx.swarm import Attackers, Ground, Swarm

CHILD = "import signal, sys, time; signal.signal(signal.SIGTERM, {how}); print('up', flush=True); time.sleep(600)"

def launch(place, words, **options):
    return subprocess.Popen([sys.executable, "-c", CHILD], **options)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests may have it ignored
with listen_for_interrupts("stopping") as is_interrupted:
    swarm = Swarm(Path(sys.argv[1]), 2, Attackers(), [], [], print, ground=Ground(launch=launch))
    def should_stop():
        if all("up" in process.last_words for process in swarm.processes):
            print(*(process.popen.pid for process in swarm.processes), flush=True)
        return is_interrupted()
    swarm.run(600.0, should_stop)
print("ended", flush=True)
"""


def start_script(out: Path, how: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A swarm of two children that do ``how`` with SIGTERM, and their process ids, when all are up."""
    words = [sys.executable, "-c", SCRIPT.replace("{how}", how), str(out)]
    script = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert script.stdout is not None
    return script, [int(word) for word in script.stdout.readline().split()]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes_in_good_order(tmp_path: Path, number: signal.Signals) -> None:
    script, children = start_script(tmp_path / "swarm", "signal.SIG_DFL")
    assert len(children) == 2
    script.send_signal(number)
    output, _ = script.communicate(timeout=LONG)
    assert script.returncode == 0
    assert output.endswith("ended\n")
    assert not any(map(is_alive, children))


def test_a_second_signal_kills_those_who_do_not_want_to_end(tmp_path: Path) -> None:
    script, children = start_script(tmp_path / "swarm", "signal.SIG_IGN")
    assert len(children) == 2
    end = time.monotonic() + LONG
    while script.poll() is None and time.monotonic() < end:  # again and again: none of them may break it off
        script.send_signal(signal.SIGINT)
        time.sleep(0.01)
    assert script.returncode is not None
    script.communicate()
    assert not any(map(is_alive, children))
