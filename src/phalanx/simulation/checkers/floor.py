"""How few members may go on, and that those who are there are let back in."""

from __future__ import annotations

from phalanx.core.config import Config
from phalanx.core.membership import FORGIVEN, View
from phalanx.simulation.checkers.base import Checker, Checkers, name
from phalanx.simulation.swarm import Swarm

_PATIENCE = 40
"""Deltas for which witnesses of an attempt that is still checked are waited for at least."""


def find_floor(config: Config, view: View) -> int:
    """The floor of docs/PROTOCOL.md, as an outsider computes it."""
    most = min(config.byzantine, view.doubts)
    return max(2 * most + 1 + config.validators, 3 * most + 1 if config.partition_safe else 0)


def can_go_on(swarm: Swarm, view: View) -> bool:
    """Whether the honest peers that are up could go on from this view if no attacker ever spoke again."""
    honest = {key for key in swarm.honest if swarm.is_up(key) or key in swarm.finished}
    members = honest.intersection(view.roster)
    quorum = (len(view.roster) + min(swarm.config.byzantine, view.doubts)) // 2 if swarm.config.partition_safe else 0
    if len(members) <= max(quorum, len(view.roster) // 2):
        return False
    able = members | honest.intersection(member.key for member in view.suspended)
    return len(able) >= find_floor(swarm.config, view)


class Floor(Checker):
    """Nothing but bans brings the members that go on below the floor, and honest ones are always more than ``b_t``."""

    rule = "floor"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.since: dict[bytes, float] = {}
        """When the first peer entered a view."""

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        most, members = min(self.config.byzantine, view.doubts), {*view.roster}
        now = self.swarm.world.now
        self.since.setdefault(view.digest, now)
        honest = sum(self.swarm.is_honest(who) for who in members)
        if honest <= most:
            self.report(view.step, f"{honest} honest members go on, where {most} may be Byzantine")
        if before is None:
            return
        gone = {*before.roster} - members - {*view.banned}
        waited = now - self.since.get(before.digest, now)
        if gone and len(members) < find_floor(self.config, view):
            names = ", ".join(map(name, sorted(gone)))
            self.report(
                view.step, f"{len(members)} members go on without {names}, below {find_floor(self.config, view)}"
            )
        came = members - {*before.roster}
        if came and len(members) < find_floor(self.config, view) and view.doubts > before.doubts:
            self.report(view.step, f"{len(came)} came, and {len(members)} members are fewer than the floor")
        for record in before.attempts if gone and waited < _PATIENCE * self.config.delta else ():
            there, needed = len(members.intersection(record.roster)), 2 * min(most, record.doubts) + 1
            if there < needed <= len({*before.roster}.intersection(record.roster) - {*view.banned}):
                self.report(view.step, f"{there} members are left to judge step {record.step}, fewer than {needed}")


class Returns(Checker):
    """A suspended peer that is up, honest and can be reached is a member again within fifty steps."""

    rule = "coming back"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.since: dict[bytes, int] = {}
        self.grace = 60 * self.config.delta + 12 * (self.config.gradient_time + self.config.transfer_time)

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        for member in view.suspended:
            steady = self.swarm.is_steady(member.key, self.grace) and member.key not in self.swarm.leaving
            if not self.swarm.is_honest(member.key) or not steady:
                self.since.pop(member.key, None)
                continue
            since = self.since.setdefault(member.key, view.step)
            if view.step - since > FORGIVEN:
                self.report(view.step, f"{name(member.key)} is there since step {since}, and still suspended")
                self.since[member.key] = view.step
        for who in view.roster:
            self.since.pop(who, None)
