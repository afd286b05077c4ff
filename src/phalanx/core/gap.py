"""Who is in the gap of tolerant mode too often (docs/PROTOCOL.md, section 9). Pure functions; the view holds the tally.

A gradient between the two thresholds convicts nobody. An honest one is hardly ever there, if the thresholds fit the
platforms; an attacker that stays there gets more in than one below. So a member that more distinct checkers have found
there than may be Byzantine, within a window, is suspended. One of those checkers is honest, so liars alone suspend
nobody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from phalanx.core.messages import Finding, Verdict

SUSPENDED = "its gradients are between the thresholds too often"

_SPELLS = 4
_MOST = 4096  # 300 KiB of a view


class Gap(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """In ``step``, ``checker`` reported a gradient of ``target`` between the thresholds."""

    step: int
    checker: bytes
    target: bytes


def find_gaps(
    step: int, findings: Mapping[bytes, Sequence[Finding]], drawn: Collection[tuple[bytes, bytes]]
) -> list[Gap]:
    """What REPORTs say of the gap, by checker; only of pairs of checker and target that were ``drawn``."""
    return sorted(
        Gap(step, checker, finding.target)
        for checker, said in findings.items()
        for finding in {finding.target: finding for finding in said}.values()
        if finding.verdict is Verdict.INCONCLUSIVE and (checker, finding.target) in drawn
    )


def compute_window(members: int, bound: int, validators: int) -> int:
    """Steps for which a finding counts: in so many, every member is checked ``4 (bound + 1)`` times on average."""
    return math.ceil(_SPELLS * (bound + 1) * members / validators)


def note_gaps(
    gaps: Iterable[Gap], fresh: Iterable[Gap], *, step: int, window: int, roster: Collection[bytes]
) -> tuple[Gap, ...]:
    """The tally before ``step``: the last finding of each pair of members within the window; of too many, the last."""
    last = {(gap.checker, gap.target): gap for gap in sorted((*gaps, *fresh))}
    kept = [gap for gap in last.values() if gap.step >= step - window and {gap.checker, gap.target} <= set(roster)]
    return tuple(sorted(kept)[-_MOST:])


def find_suspended(gaps: Iterable[Gap], bound: int) -> set[bytes]:
    """Members that more than ``bound`` distinct checkers found in the gap. Nobody, if they are more than ``bound``.

    Then it is not attackers: the thresholds do not fit some platform.
    """
    checkers: dict[bytes, set[bytes]] = {}
    for gap in gaps:
        if gap.checker != gap.target:
            checkers.setdefault(gap.target, set()).add(gap.checker)
    found = {target for target, named in checkers.items() if len(named) > bound}
    return found if len(found) <= bound else set()
