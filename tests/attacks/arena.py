"""A small swarm with attackers in it, and what must hold whatever they do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from phalanx.attacks import Attack, Insider, Plot
from phalanx.core.config import Config
from phalanx.core.effects import Story
from phalanx.core.events import Banned, Halted, Removed, RunFinished
from phalanx.core.life import run_peer
from phalanx.core.membership import View
from phalanx.core.messages import Rule
from phalanx.network.disk import Disk
from phalanx.network.ideal import IdentityExaminer, make_signers
from phalanx.network.simulated import Links, World
from phalanx.simulation.machine import Bowl, compute_state_digest, make_start

SIZE = 64


@dataclass
class Arena:
    """The end of a run."""

    world: World
    attackers: tuple[bytes, ...]
    honest: tuple[bytes, ...]
    insiders: dict[bytes, Insider]
    ends: dict[bytes, View] = field(default_factory=dict)

    def get_events(self, kind: type) -> list[tuple[bytes, Any]]:
        """What honest peers told of one kind."""
        return [(key, event) for _, key, event in self.world.notes if key in self.honest and isinstance(event, kind)]

    @property
    def bans(self) -> dict[bytes, set[Rule]]:
        found: dict[bytes, set[Rule]] = {}
        for _, event in self.get_events(Banned):
            found.setdefault(event.key, set()).add(event.rule)
        return found

    @property
    def banned_rules(self) -> list[set[Rule]]:
        """Of each attacker: the rules it was banned for."""
        return [self.bans.get(key, set()) for key in self.attackers]

    @property
    def removed(self) -> set[bytes]:
        return {event.key for _, event in self.get_events(Removed)}

    def describe(self) -> str:
        names = {key: f"attacker {i}" for i, key in enumerate(self.attackers)}
        names |= {key: f"honest {i}" for i, key in enumerate(self.honest)}
        lines = {}
        for key, event in self.get_events(Banned):
            lines[f"{names[event.key]} banned {event.rule} step {event.step} at {event.at}: {event.reason}"] = key
        for key, event in self.get_events(Removed):
            lines[f"{names[event.key]} removed at {event.step}: {event.reason}"] = key
        return "\n".join(lines)


def run_arena(
    *attacks: Attack,
    members: int = 9,
    byzantine: int = 2,
    steps: int = 8,
    seed: int = 1,
    joiners: tuple[Attack | None, ...] = (),
    join_at: float = 5.0,
    links: Links | None = None,
    wire: bool = False,
    limit: float = 300.0,
    **options: Any,
) -> Arena:
    """Run a swarm: the first members have these attacks, the others are honest; so do joiners, None being honest.

    It ends when every honest peer has finished, or much too late.
    """
    signers, verify = make_signers(members + len(joiners), seed, True)
    config = Config(
        founders=tuple(signer.key for signer in signers[:members]),
        byzantine=byzantine,
        size=SIZE,
        steps=steps,
        delta=1.0,
        gradient_time=1.0,
        state=compute_state_digest(make_start(SIZE)),
        **options,
    ).check()
    examiner, plot = IdentityExaminer(verify), Plot(random=Random(seed))
    world = World(config.run, seed, links or Links(low=0.05, high=0.5), wire=wire, count=False, trace=False)
    insiders: dict[bytes, Insider] = {}
    roles = [*attacks, *(None for _ in range(members - len(attacks))), *joiners]

    def make_start_of(number: int) -> Callable[[Disk], Story]:
        signer, role = signers[number], roles[number]

        def start(disk: Disk) -> Story:
            story = run_peer(config, signer.key, examiner, disk.view, disk.messages)
            return role.wrap(story, insiders[signer.key]) if role is not None else story

        return start

    for number, role in enumerate(roles):
        if role is not None:
            insiders[signers[number].key] = Insider(signers[number], config, plot)

    def enter(number: int) -> None:
        signer = signers[number]
        world.add(signer.key, signer, Bowl(SIZE, 0.5), make_start_of(number))

    for number in range(members):
        enter(number)
    for number in range(members, members + len(joiners)):
        world.at(join_at, lambda number=number: enter(number))  # type: ignore[misc]
    honest = tuple(signers[number].key for number, role in enumerate(roles) if role is None)
    arena = Arena(world, tuple(insiders), honest, insiders)
    seen = 0

    def is_over() -> bool:
        nonlocal seen
        for _, key, event in world.notes[seen:]:
            if isinstance(event, RunFinished) and key in honest:
                arena.ends[key] = event.view
        seen = len(world.notes)
        return all(key in arena.ends for key in honest)

    world.run(until=limit, stop=is_over)
    return arena


def assert_safe(arena: Arena, removable: int = 0, halts: bool = False) -> None:
    """Every honest peer finished with one state, none is banned, and at most ``removable`` were removed."""
    text = arena.describe()
    names = {key: place for place, key in enumerate(arena.honest)}
    assert not set(arena.bans) & set(arena.honest), text
    assert len(arena.removed & set(arena.honest)) <= removable, text
    late = [names[key] for key in arena.honest if key not in arena.ends]
    assert not late, f"honest {late} did not finish\n{text}"
    assert len({(view.state, view.roster, view.banned, view.randomness) for view in arena.ends.values()}) == 1, text
    if not halts:
        assert not arena.get_events(Halted), text
