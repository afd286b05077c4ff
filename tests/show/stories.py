"""Made-up logs: what a run with a flat or a falling curve and a few bans would write."""

from __future__ import annotations

import math

from phalanx.events import Banned, Evaluated, Event, RunFinished, RunStarted, StepFinished

KEYS = [f"{index + 1:02x}" * 32 for index in range(64)]
DIGEST = "ab" * 32


def make_start(
    peers: int = 8, attackers: tuple[int, ...] = (1, 4, 6), steps: int = 100, **changes: object
) -> RunStarted:
    fields: dict = {
        "run": "5a" * 32,
        "task": "digits",
        "peers": peers,
        "byzantine": len(attackers),
        "attack": "sign_flip" if attackers else None,
        "start": 20 if attackers else None,
        "every": 1 if attackers else None,
        "defense": "phalanx",
        "steps": steps,
        "validators": 1,
        "seed": 7,
        "size": 1000,
        "metric_name": "accuracy",
        "higher_is_better": True,
        "keys": KEYS[:peers],
        "attackers": list(attackers),
        "software": {"phalanx": "0.1.0"},
    }
    return RunStarted(**(fields | changes))


def make_ban(peer: int, step: int, rule: str = "V4 gradient", **changes: object) -> Banned:
    fields: dict = {
        "step": step,
        "offence_step": step - 1,
        "peer": peer,
        "key": KEYS[peer],
        "rule": rule,
        "reason": "its gradient or report is not what its public batch gives when recomputed; convicted by vote",
        "evidence": [f"{peer:02x}" * 32, *(f"{n:02x}" * 32 for n in range(100, 110))],
        "accuser": 0,
        "exhibits": [f"COMMIT of step {step - 1} signed by peer {peer}"],
        "votes": 5,
        "voters": 7,
    }
    return Banned(**(fields | changes))


def make_run(
    started: RunStarted | None = None, bans: tuple[Banned, ...] | None = None, collapse: int | None = None
) -> list[Event]:
    """A run whose accuracy grows, and with ``collapse`` falls from that step on."""
    started = started or make_start()
    bans = (make_ban(4, 27), make_ban(1, 31), make_ban(6, 58, "V1 report")) if bans is None else bans
    events: list[Event] = [started, Evaluated(0, 0.1)]
    members, metric = started.peers, 0.1
    for step in range(started.steps):
        for ban in bans:
            if ban.step == step:
                members -= 1
                events.append(ban)
        hurt = collapse is not None and step >= collapse
        wave = 0.01 * math.sin(step)
        metric = 0.1 + 0.05 * abs(math.sin(step)) if hurt else 0.97 - 0.87 * math.exp(-step / 15) + wave * 0.3
        loss = (
            min(2.3 * math.exp((step - (collapse or 0)) / 3), 1e9) if hurt else 0.08 + 2.2 * math.exp(-step / 14) + wave
        )
        sent = int(2 * (members - 1) * started.size * started.number_bytes * 1.004)
        events.append(StepFinished(step, 0, members, loss, 0.5, sent, 1.25, DIGEST))
        if (step + 1) % 2 == 0:
            events.append(Evaluated(step + 1, metric))
    return [*events, RunFinished(started.steps, metric, DIGEST)]
