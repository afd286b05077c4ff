"""Four real peers with strangers at their doors: newcomers and former members come in, and nobody goes.

What it costs in time is measured by ``benchmarks/strangers.py``.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from crowd import Crowd, gather, wait_for

from phalanx import events
from phalanx.core.crypto import Identity
from phalanx.swarm import Attackers, Swarm

HOLD = Path(__file__).with_name("hold.py")
SETTINGS = {"byzantine": 1, "validators": 1, "threads": 1, "delta": 5.0, "probation": 5, "newcomer_probation": 5}
SETTINGS |= {"gradient_time": 20.0, "transfer_time": 10.0, "steps": 1_000_000}
QUESTIONS, MESSAGES = ["silent", "half", "drip", "deaf"], ["talk", "state", "chain"]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    swarm = Swarm(tmp_path_factory.mktemp("siege") / "swarm", 4, Attackers(), [], [], lambda event: None)
    with gather(swarm, "digits", SETTINGS) as crowd:
        yield crowd


@contextmanager
def besieged(crowd: Crowd, kinds: list[str], keys: int, hosts: int) -> Iterator[None]:
    founders = crowd.swarm.processes[:4]
    run = next(event.run for event in founders[0].told if isinstance(event, events.RunStarted))
    words = ["--address", *(process.address for process in founders), "--run", run, "--seconds", "600"]
    words += ["--keys", str(keys), "--hosts", str(hosts), "--kinds", *kinds]
    strangers = subprocess.Popen([sys.executable, str(HOLD), *words], stdout=subprocess.DEVNULL)
    try:
        yield
        assert strangers.poll() is None, "the strangers gave up"
    finally:
        strangers.terminate()
        strangers.wait()


def join(crowd: Crowd, folder: Path, number: int) -> None:
    """Join as the peer in this folder, for the time that it takes to be a member."""
    folder.mkdir(exist_ok=True)
    key = folder / "peer.key"
    if not key.exists():
        Identity.generate().save(key)
    name = Identity.load(key).key.hex()
    words = [sys.executable, "-m", "phalanx", "join", crowd.address, "--key", str(key), "--out", str(folder / "run")]
    output = folder / f"output-{number}.log"
    with open(output, "wb") as file:
        process = subprocess.Popen([*words, "--listen", "/ip4/127.0.0.1/tcp/0"], stdout=file, stderr=subprocess.STDOUT)

    def is_in() -> bool:
        return len([event for event in crowd.tell(events.Joined) if event.key == name]) >= number

    try:
        wait_for(lambda: is_in() or process.poll() is not None, "joining")
        assert is_in(), output.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kinds", "keys", "hosts"),
    [(QUESTIONS, 12, 1), (MESSAGES, 12, 1), ([*QUESTIONS, *MESSAGES, "reconnect"], 16, 4)],
    ids=["questions", "messages", "everything"],
)
def test_newcomers_and_former_members_come_in_while_strangers_besiege_all_peers(
    crowd: Crowd, tmp_path: Path, kinds: list[str], keys: int, hosts: int
) -> None:
    with besieged(crowd, kinds, keys, hosts):
        crowd.await_steps(5)
        join(crowd, tmp_path / "newcomer", 1)
        crowd.await_steps(2)
        join(crowd, tmp_path / "newcomer", 2)  # it left, and is a former member
    founders = {process.identity.key.hex() for process in crowd.swarm.processes[:4]}
    assert crowd.tell(events.Banned) == []
    assert [event for event in crowd.tell(events.Removed) if event.key in founders] == []
    assert all(process.is_up for process in crowd.swarm.processes[:4])
