"""Who comes later, goes, comes back, or is told in one line why it cannot: ``phalanx join`` as it is typed.

The swarm is of real processes on the loopback. Its task is a file that writes a mark wherever it is run, if the
environment asks for that; so it shows on whose machine it ran. What is asserted is what the peers say and write.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from crowd import LONG, Crowd, E, gather, wait_for

from phalanx import events
from phalanx.cli import main
from phalanx.core.crypto import Identity
from phalanx.events import read_events
from phalanx.node import run_init
from phalanx.swarm import Attackers, Swarm, run_swarm
from phalanx.training.checkpoints import find_latest
from phalanx.training.recorder import EVENTS

PACED, CHEAT = (Path(__file__).with_name(name) for name in ("paced.py", "cheat.py"))
SETTINGS = {"byzantine": 1, "validators": 1, "threads": 1, "delta": 3.0, "probation": 5, "newcomer_probation": 5}
SETTINGS |= {"gradient_time": 6.0, "transfer_time": 2.0}

TASK = '''
"""The digits at a walking pace; the environment may ask for a mark, for other data, or for a slow machine."""

import os
import time
from dataclasses import replace
from pathlib import Path

from phalanx.training.task import Data
from phalanx.training.tasks import digits

if "MARK" in os.environ:
    Path(os.environ["MARK"]).touch()


def make_task():
    task = digits.make_task()

    def loss(model, batch):
        time.sleep(float(os.environ.get("PAUSE", "0.3")))
        return task.loss(model, batch)

    train = Data(tuple(t.flip(0) for t in task.train.tensors)) if "OTHER" in os.environ else task.train
    return replace(task, loss=loss, train=train)
'''


# ---- Commands as they are typed


def start_command(words: Sequence[str], folder: Path, output: Path, **more: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(output, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "phalanx", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | more,
            start_new_session=True,
        )


def run_command(words: Sequence[str], folder: Path, **more: str) -> tuple[int, list[str]]:
    """A command to its end: its exit code, and the lines that it printed."""
    output = folder / "command.log"
    output.unlink(missing_ok=True)
    process = start_command(words, folder, output, **more)
    try:
        code = process.wait(LONG)
    finally:
        process.kill()
    return code, output.read_text().splitlines()


def make_key(folder: Path) -> Path:
    file = folder / "peer.key"
    folder.mkdir(parents=True, exist_ok=True)
    Identity.generate().save(file)
    return file


def check_refusal(code: int, lines: Sequence[str], *words: str) -> None:
    """One clear line at the end, exit code 2, and no traceback."""
    text = "\n".join(lines)
    assert code == 2, text
    assert "Traceback" not in text
    assert "Error" not in text
    assert lines, "nothing was said"
    assert lines[-1].startswith("phalanx: "), text
    for word in words:
        assert word in lines[-1], text


# ---- A swarm to join


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    out = tmp_path_factory.mktemp("crowd")
    task = out / "foreign.py"
    task.write_text(TASK)
    swarm = Swarm(out / "swarm", 4, Attackers(), [], [], lambda event: None)
    with gather(swarm, f"{task}:make_task", SETTINGS | {"steps": 5000}) as crowd:
        yield crowd


def find_trust(lines: Sequence[str]) -> str:
    """What a refused user is told to add."""
    found = re.search(r"--trust-task (\w+)$", lines[-1])
    assert found is not None, lines[-1]
    return found[1]


def assert_same_states(crowd: Crowd, told: Sequence[events.StepFinished]) -> None:
    states, mine = crowd.read_states(), {event.step: event.state for event in told}
    common = states.keys() & mine.keys()
    assert common
    assert all(states[step] == mine[step] for step in common)


def tell(folder: Path, kind: type[E]) -> list[E]:
    path = folder / EVENTS
    return [event for event in read_events(path) if isinstance(event, kind)] if path.exists() else []


@pytest.mark.long
def test_a_stranger_joins_leaves_and_comes_back(crowd: Crowd, tmp_path: Path) -> None:
    key, folder, output, mark = make_key(tmp_path), tmp_path / "run", tmp_path / "output.log", tmp_path / "mark"
    name = Identity.load(key).key.hex()
    join = ["join", crowd.address, "--key", str(key), "--out", str(folder), "--listen", "/ip4/127.0.0.1/tcp/0"]

    # The founders' code is shown, not run.
    code, lines = run_command(join, tmp_path, MARK=str(mark))
    check_refusal(code, lines, "not run", str(folder / "task.py"))
    assert not mark.exists()
    assert (folder / "task.py").read_text() == TASK

    # Another hash is no trust.
    code, lines = run_command([*join, "--trust-task", "ab" * 32], tmp_path, MARK=str(mark))
    check_refusal(code, lines, "not run")
    assert not mark.exists()

    # Who has read it becomes a member, with the state that the others hold.
    join += ["--trust-task", find_trust(lines)]
    process = start_command(join, tmp_path, output, MARK=str(mark))
    try:
        wait_for(lambda: bool(tell(folder, events.Joined)) or process.poll() is not None, "joining")
        assert process.poll() is None, output.read_text()
        assert mark.exists()
        crowd.await_steps(3)
        assert_same_states(crowd, tell(folder, events.StepFinished))

        # Ctrl-C: it says goodbye, and nobody waits for it.
        slow = len(crowd.tell(events.SlowPathOpened))
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 130, output.read_text()
        wait_for(lambda: any(e.key == name for e in crowd.tell(events.Left)), "the others hear the goodbye")
        crowd.await_steps(3)
        assert len(crowd.tell(events.SlowPathOpened)) == slow
        assert not any(e.key == name for e in crowd.tell(events.Removed))
        assert "Traceback" not in output.read_text()
        assert find_latest(folder) is not None, "no checkpoint"

        # The same command again: back through probation.
        before = len(tell(folder, events.Joined))
        process = start_command(join, tmp_path, output)
        wait_for(lambda: len(tell(folder, events.Joined)) > before or process.poll() is not None, "coming back")
        assert process.poll() is None, output.read_text()
        wait_for(lambda: "step " in output.read_text().rpartition("resumed at step")[2], "a sign of its second life")
        wait_for(lambda: len([e for e in crowd.tell(events.Joined) if e.key == name]) > 1, "the others see it come")
        times = [event.step for event in crowd.tell(events.Joined) if event.key == name]
        left = next(event.step for event in crowd.tell(events.Left) if event.key == name)
        assert len(times) == 2
        assert times[1] >= left + SETTINGS["probation"]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
    assert crowd.tell(events.Banned) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "words"),
    [({"OTHER": "1"}, ("data", "content hash")), ({"PAUSE": "7"}, ("gradient takes", "too slow"))],
    ids=["other data", "too slow"],
)
def test_who_cannot_take_part_is_told_why(
    crowd: Crowd, tmp_path: Path, environment: Mapping[str, str], words: Sequence[str]
) -> None:
    key = make_key(tmp_path)
    join = [
        "join",
        crowd.address,
        "--key",
        str(key),
        "--out",
        str(tmp_path / "run"),
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
    ]
    _, lines = run_command(join, tmp_path)
    code, lines = run_command([*join, "--trust-task", find_trust(lines)], tmp_path, **environment)
    check_refusal(code, lines, *words)
    assert crowd.tell(events.Banned) == []


@pytest.mark.long
def test_state_of_a_liar_is_noticed(tmp_path: Path) -> None:
    """The first whom a newcomer asks for the state is the member with the smallest key; here it lies."""
    swarm = Swarm(tmp_path / "swarm", 4, Attackers(), [], [(4, 2)], lambda event: None)
    liar = min(range(4), key=lambda place: swarm.processes[place].identity.key)
    swarm._extra[liar] = ["--attack", "wrong_state"]  # who has which key is known only now
    with gather(swarm, f"{PACED}:make_task", SETTINGS | {"steps": 5000}) as crowd:
        wait_for(lambda: bool(crowd.tell(events.Joined)), "joining")
        crowd.await_steps(3)
        told = [event for event in swarm.processes[4].told if isinstance(event, events.StepFinished)]
        assert_same_states(crowd, told)
        assert crowd.tell(events.Banned) == []


@pytest.mark.long
def test_all_leave_at_once_and_come_back(tmp_path: Path) -> None:
    """Ctrl-C for everybody in the same step: nobody is left to let the others go, and the run waits for them."""
    swarm = Swarm(tmp_path / "swarm", 4, Attackers(), [], [], lambda event: None)
    run_init(swarm.folder / "run.toml", f"{PACED}:make_task", swarm.founders, SETTINGS | {"steps": 30})
    swarm.run(LONG, lambda: min(process.step for process in swarm.processes) >= 4)  # it ends them with SIGTERM
    for process in swarm.processes:
        assert process.popen is not None
        assert process.popen.poll() == 130, process.last_words
        assert "go on with the same command" in process.last_words
    found = swarm.sum_up(swarm.run(LONG, lambda: False))
    assert found.finished
    assert found.digests_equal
    assert found.result.honest_banned == 0
    assert [process.step for process in swarm.processes] == [30] * 4


@pytest.mark.long
def test_a_stranger_that_cheats_on_probation_is_banned_and_nobody_else_notices(tmp_path: Path) -> None:
    """It was never a member, and nobody has a number for it; the founders go on, also from their folders."""
    swarm = Swarm(tmp_path / "swarm", 4, Attackers(), [], [], lambda event: None)
    key, log = make_key(tmp_path), tmp_path / "output.log"
    name = Identity.load(key).key.hex()
    with gather(swarm, "digits", SETTINGS | {"steps": 5000, "delta": 2.0}) as crowd, open(log, "wb") as output:
        words = ["join", crowd.address, "--key", str(key), "--out", str(tmp_path / "run")]
        words = [sys.executable, str(CHEAT), *words, "--listen", "/ip4/127.0.0.1/tcp/0"]
        cheat = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: len(crowd.tell(events.Banned)) > 0, "the ban of a stranger")
            assert {event.key for event in crowd.tell(events.Banned)} == {name}
            crowd.await_steps(3)
        finally:
            cheat.kill()
            cheat.wait()
    assert [process.popen.poll() for process in swarm.processes if process.popen is not None] == [130] * 4


@pytest.mark.long
def test_a_swarm_tells_each_peer_where_the_data_are_and_the_manifest_does_not(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_bytes(bytes(range(256)) * 200)
    options = {"data": str(data), "context": "16", "width": "8", "layers": "1", "heads": "1"}
    found = run_swarm(
        task="text",
        peers=3,
        byzantine=0,
        attackers=Attackers(),
        seed=0,
        out=tmp_path / "swarm",
        settings={"steps": 4, "delta": 3.0, "options": options},
        kills=[],
        joins=[],
        on_event=lambda event: None,
        should_stop=lambda: False,
    )
    assert found.finished
    assert found.digests_equal
    assert str(tmp_path) not in (tmp_path / "swarm" / "run.toml").read_text()


# ---- What needs no swarm


PEER_ID = Identity.generate().peer_id
DEAD = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER_ID}"


@pytest.mark.parametrize(
    ("address", "key", "words"),
    [
        (DEAD, "missing.key", ("missing.key",)),
        (DEAD, ".", ("not a regular file",)),
        ("nonsense", "peer.key", ("'nonsense'", "expected")),
        (DEAD[:-1], "peer.key", (PEER_ID[:-1], "expected")),
        (DEAD.replace("127", "999"), "peer.key", ("999.0.0.1", "expected")),
        (DEAD, "peer.key", (PEER_ID[-6:], "cannot be reached")),
    ],
    ids=["no key", "key is a folder", "no address", "no peer id", "no host", "nobody there"],
)
def test_typos_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    address: str,
    key: str,
    words: Sequence[str],
) -> None:
    make_key(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["phalanx", "join", address, "--key", key])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capfd.readouterr()
    lines = printed.err.splitlines()
    check_refusal(end.value.code, lines, *words)
    assert printed.out == ""
    assert lines[:-1] == ([f"phalanx: asking {address} for the manifest"] if len(lines) > 1 else [])
    assert [place.name for place in tmp_path.iterdir()] == ["peer.key"], "a refusal leaves nothing behind"
