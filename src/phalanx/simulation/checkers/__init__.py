"""The invariants of docs/PROTOCOL.md, section 12, checked from outside while a swarm runs.

A checker sees what every honest peer notes and signs, and may look into its memory; it never changes anything. Views
reach the checkers in the order in which they are first certified: what all honest peers go on from.
"""

from __future__ import annotations

from phalanx.simulation.checkers.agreement import Agreement, OneCertificate, OneSignature
from phalanx.simulation.checkers.base import Checker, Checkers, Violation
from phalanx.simulation.checkers.draws import Draws, Endings, Places
from phalanx.simulation.checkers.evidence import Evidence, verify_ban
from phalanx.simulation.checkers.floor import Floor, Returns, can_go_on
from phalanx.simulation.checkers.punishment import Exile, Innocence, Probation, Removals
from phalanx.simulation.checkers.state import Aggregates, Memory, States
from phalanx.simulation.checkers.verdicts import Accusers, Bounds, Disputes, Justice

__all__ = [
    "ALL",
    "Accusers",
    "Aggregates",
    "Agreement",
    "Bounds",
    "Checker",
    "Checkers",
    "Disputes",
    "Draws",
    "Endings",
    "Evidence",
    "Exile",
    "Floor",
    "Innocence",
    "Justice",
    "Memory",
    "OneCertificate",
    "OneSignature",
    "Places",
    "Probation",
    "Removals",
    "Returns",
    "States",
    "Violation",
    "can_go_on",
    "verify_ban",
]

ALL: tuple[type[Checker], ...] = (
    Agreement,
    OneSignature,
    OneCertificate,
    Innocence,
    Removals,
    Evidence,
    Exile,
    Probation,
    States,
    Aggregates,
    Memory,
    Justice,
    Accusers,
    Bounds,
    Floor,
    Returns,
    Disputes,
    Draws,
    Endings,
    Places,
)
