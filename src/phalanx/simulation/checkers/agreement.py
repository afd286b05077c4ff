"""Honest members agree, and nobody honest ever signs twice."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.core import messages as m
from phalanx.core.codec import decode_body
from phalanx.core.crypto import Domain
from phalanx.core.events import (
    AttemptStarted,
    StepFinished,
)
from phalanx.core.membership import View, compute_quorum
from phalanx.simulation.checkers.base import Checker, Checkers, name


class Agreement(Checker):
    """Honest peers hold bit-identical state, roster, ban list and history: for each attempt there is one view."""

    rule = "agreement"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.views: dict[tuple[int, int], tuple[bytes, bytes, View]] = {}
        self.states: dict[int, tuple[bytes, bytes]] = {}

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, AttemptStarted):
            peer = self.swarm.get_peer(key)
            if peer is not None and peer.riding:
                return
        elif not isinstance(event, StepFinished):
            return
        view: View = event.view
        digest = view.digest
        other, first, held = self.views.setdefault((view.step, view.attempt), (key, digest, view))
        if first != digest:
            fields = [f for f in View.__struct_fields__ if getattr(view, f) != getattr(held, f)]
            place = f"attempt {view.attempt}"
            self.report(view.step, f"{name(other)} and {name(key)} start {place} from other {', '.join(fields)}")
        other, state = self.states.setdefault(view.step, (key, view.state))
        if state != view.state:
            self.report(view.step, f"{name(other)} and {name(key)} hold different states")


class OneSignature(Checker):
    """No honest peer signs two values in a slot, or two votes in one ballot, crashes included."""

    rule = "one signature"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.signed: dict[tuple[Any, ...], bytes] = {}

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        place: tuple[Any, ...]
        if domain is Domain.AGREED:
            _, height, step, *_ = msgspec.msgpack.decode(payload)
            place = (key, height)
        elif domain is Domain.OUTCOME:
            content = msgspec.msgpack.decode(payload)
            height, step, body = content[1], content[2], decode_body(content[7])
            assert isinstance(body, m.Outcome)
            place = (key, height, body.round, body.final)
        else:
            return
        if self.signed.setdefault(place, payload) != payload:
            self.report(step, f"{name(key)} signed twice at {place[1:]}")


class OneCertificate(Checker):
    """Never two certificates for one slot: no two outcomes of a slow path can both find a quorum."""

    rule = "one certificate"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.votes: dict[int, dict[bytes, set[bytes]]] = {}

    def on_sign(self, key: bytes, domain: Domain, payload: bytes) -> None:
        if domain is not Domain.OUTCOME:
            return
        content = msgspec.msgpack.decode(payload)
        height, step, body = content[1], content[2], decode_body(content[7])
        if not isinstance(body, m.Outcome) or not body.final:
            return
        outcome = msgspec.msgpack.encode(msgspec.structs.replace(body, round=0, final=False))
        outcomes = self.votes.setdefault(height, {})
        outcomes.setdefault(outcome, set()).add(key)
        view = self.all.latest
        if len(outcomes) > 1 and view is not None:
            byzantine = sum(member in self.swarm.byzantine for member in view.roster)
            likely = [who for who in outcomes.values() if len(who) + byzantine >= compute_quorum(self.config, view)]
            if len(likely) > 1:
                self.report(step, f"two outcomes at height {height} can find a quorum")
