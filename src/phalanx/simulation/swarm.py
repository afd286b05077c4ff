"""A run in one process: founders and joiners, honest or not, put together in a simulated world.

Everything that an outside observer may want to know stands here: who is honest, who is up, and what each peer holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol, TextIO, TypeAlias

from phalanx.attacks import Attack, Insider, Plot
from phalanx.core.config import Config
from phalanx.core.crypto import Domain, Signer, compute_digest
from phalanx.core.effects import Story
from phalanx.core.events import Left, RunFinished
from phalanx.core.life import make_peer, run_made_peer
from phalanx.core.peer import Peer
from phalanx.network.disk import Disk
from phalanx.network.ideal import IdentityExaminer, make_signers, make_stranger
from phalanx.network.simulated import Links, Skew, StoryFailed, World
from phalanx.simulation.machine import Bowl, compute_state_digest, make_start

SignHook: TypeAlias = Callable[[bytes, Domain, bytes], None]


class Observer(Protocol):
    """Somebody outside who sees every event, and every signature of an honest peer."""

    def on_note(self, time: float, key: bytes, event: Any) -> None: ...

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None: ...


class _WatchedSigner:
    """Signs, and tells what it signed: nothing that an honest key ever signs escapes."""

    def __init__(self, signer: Signer, tell: SignHook) -> None:
        self._signer, self._tell, self.key = signer, tell, signer.key

    def sign(self, domain: Domain, payload: bytes) -> bytes:
        self._tell(self.key, domain, payload)
        return self._signer.sign(domain, payload)


@dataclass(kw_only=True)
class Setup:
    """What a swarm is made of. Peers are numbered: first the founders, then the joiners."""

    founders: int
    joiners: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the :class:`Config`, but for founders, seed and state."""
    attackers: Mapping[int, Attack] = field(default_factory=dict)
    skews: Mapping[int, Skew] = field(default_factory=dict)
    compute_time: float = 0.0
    """Seconds of virtual time that a gradient takes."""
    rounding: float = 0.0
    """How differently two platforms compute, relatively."""
    ideal: bool = True
    wire: bool = False


class Swarm:
    """Peers in a world, and what is known of them from outside."""

    def __init__(
        self,
        setup: Setup,
        seed: int,
        links: Links | None = None,
        *,
        trace: bool = False,
        log: TextIO | None = None,
        keep_events: bool = False,
        count: bool = False,
    ) -> None:
        self.setup, self.seed = setup, seed
        signers, verify = make_signers(setup.founders + setup.joiners, seed, setup.ideal)
        self.signers = signers
        self.keys = tuple(signer.key for signer in signers)
        self.config = make_config(setup, self.keys[: setup.founders], seed)
        self.examiner = IdentityExaminer(verify)
        self.byzantine = frozenset(self.keys[index] for index in setup.attackers)
        self.plot = Plot(random=Random(seed), make_stranger=partial(make_stranger, seed=seed, ideal=setup.ideal))
        self.insiders: dict[bytes, Insider] = {}
        self.observers: list[Observer] = []
        self.events: dict[bytes, list[tuple[float, Any]]] = {key: [] for key in self.keys}
        """What each peer noted, with ``keep_events``."""
        self.finished: set[bytes] = set()
        """Peers that have come to the end of the run."""
        self.leaving: set[bytes] = set()
        self.failed: dict[bytes, StoryFailed] = {}
        """Attackers whose own story broke: they are silent from then on."""
        self.delta_broken = -math.inf
        """When ``delta`` was last known not to hold."""
        self._unsteady: dict[bytes, float] = {}
        self._stories: dict[bytes, Story] = {}
        self._peers: dict[bytes, Peer] = {}
        self._keep_events = keep_events
        self.world = World(
            self.config.run,
            seed,
            links or Links(delta=0.9 * self.config.delta),
            wire=setup.wire,
            count=count,
            trace=trace,
            log=log,
            on_note=self._on_note,
            keep_notes=False,
        )
        for index in range(setup.founders):
            self.start(index)

    # ---- Peers

    def start(self, index: int) -> None:
        """Let a peer begin: founders do so at once, joiners when this is called."""
        signer = self.signers[index]
        key, setup = signer.key, self.setup
        attack = setup.attackers.get(index)
        if attack is not None:
            self.insiders[key] = Insider(signer, self.config, self.plot)
        else:
            signer = _WatchedSigner(signer, self._on_sign)
        machine = Bowl(self.config.size, setup.compute_time, setup.rounding, key)

        def begin(disk: Disk) -> Story:
            peer = make_peer(self.config, key, self.examiner, disk.view, disk.messages)
            peer.revived = bool(disk.journal)
            story = run_made_peer(peer, returning=disk.view is not None or key not in self.config.founders)
            self._stories[key], self._peers[key] = story, peer
            return story if attack is None else attack.wrap(story, self.insiders[key])

        self.world.add(key, signer, machine, begin, setup.skews.get(index))

    def crash(self, key: bytes, lost: float = 1.0) -> None:
        self._unsteady[key] = math.inf
        self.world.crash(key, lost)

    def restart(self, key: bytes) -> None:
        self._unsteady[key] = self.world.now
        self.finished.discard(key)
        self.world.restart(key)

    def disturb(self, key: bytes, until: float) -> None:
        """Say that ``delta`` does not hold for what this peer sends and receives, until then."""
        self._unsteady[key] = max(until, self._unsteady.get(key, until))

    def leave(self, key: bytes) -> None:
        """Have a peer announce that it leaves; it is stopped once it is out."""
        if self.is_up(key):
            self.world.ask_to_leave(key)
            self.leaving.add(key)

    def partition(self, *groups: set[bytes]) -> None:
        self.delta_broken = math.inf
        self.world.partition(groups)

    def heal(self) -> None:
        self.delta_broken = self.world.now
        self.world.heal()

    # ---- What is known of them

    @property
    def honest(self) -> tuple[bytes, ...]:
        """The honest peers that have begun, up or not."""
        return tuple(key for key in self._stories if key not in self.byzantine)

    def is_honest(self, key: bytes) -> bool:
        return key in self.events and key not in self.byzantine

    def is_up(self, key: bytes) -> bool:
        return key in self._stories and self.world.is_up(key)

    def is_steady(self, key: bytes, grace: float) -> bool:
        """Whether this peer was up, and ``delta`` held, for the last ``grace`` seconds."""
        since = self.world.now - grace
        alive = self.is_up(key) or key in self.finished
        return alive and self._unsteady.get(key, -math.inf) < since and self.delta_broken < since

    def get_peer(self, key: bytes) -> Peer | None:
        """The memory of a peer that has begun."""
        return self._peers.get(key)

    def get_machine(self, key: bytes) -> Bowl:
        machine = self.world.get_disk(key).machine
        assert isinstance(machine, Bowl)
        return machine

    # ---- Running

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let the world go on; an attacker whose story breaks is silent from then on, an honest one raises."""
        while True:
            try:
                return self.world.run(until, stop)
            except StoryFailed as failure:
                if failure.key not in self.byzantine:
                    raise
                self.failed[failure.key] = failure
                self.world.stop(failure.key)

    def is_over(self) -> bool:
        """Whether every honest peer that is up has come to the end."""
        return all(key in self.finished or not self.is_up(key) for key in self.honest)

    def _on_note(self, key: bytes, event: Any) -> None:
        now = self.world.now
        if self._keep_events:
            self.events[key].append((now, event))
        if isinstance(event, RunFinished):
            self.finished.add(key)
        elif isinstance(event, Left):
            self.world.at(now, lambda: self.world.stop(key))
        for observer in self.observers:
            observer.on_note(now, key, event)

    def _on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        for observer in self.observers:
            observer.on_sign(key, domain, payload)


def make_config(setup: Setup, founders: tuple[bytes, ...], seed: int) -> Config:
    settings = {"size": 64, **setup.settings}
    return Config(
        founders=founders,
        seed=compute_digest("seed of a simulation", str(seed).encode()),
        state=compute_state_digest(make_start(settings["size"])),
        **settings,
    ).check()
