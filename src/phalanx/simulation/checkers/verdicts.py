"""What the members decide is what the rules say."""

from __future__ import annotations

import math
from typing import Any

import torch

from phalanx.core import messages as m
from phalanx.core.checking import cut
from phalanx.core.crypto import compute_commitment
from phalanx.core.events import (
    Halted,
    RunFinished,
    SlowPath,
    StepFinished,
)
from phalanx.core.membership import View, compute_batch_seed, compute_duties
from phalanx.core.merkle import compute_root, hash_part
from phalanx.core.messages import Phase, Verdict
from phalanx.core.partition import compute_part_sizes
from phalanx.core.peer import Peer
from phalanx.core.transcript import Transcript
from phalanx.core.verification import (
    compute_report,
    prepare_gradient,
    projection_seeds,
    read_aggregate,
    read_part,
)
from phalanx.core.wire import WIRE_TYPES, Piece
from phalanx.simulation.checkers.base import Checker, Checkers, name
from phalanx.simulation.checkers.floor import can_go_on
from phalanx.simulation.checkers.punishment import _find_transcript


class Justice(Checker):
    """An attacker that keeps attacking is banned at the predicted rate; guilt that all can see is punished at once.

    The simulator knows every true gradient. From it follow what each contributor should have committed to and reported
    and whether an aggregate balances: nothing of this goes through the rules that it is to check. Where being caught is
    a matter of chance, a survivor's luck is multiplied up; less than one in a million is no luck.
    """

    rule = "justice"
    LEAST_LUCK = 1e-6

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.luck: dict[bytes, float] = {}
        self.wrong: dict[bytes, dict[int, float]] = {}
        """Who committed to, or reported, something wrong; in which steps; with which chance to be caught for it."""
        self.trials: dict[bytes, set[int]] = {}
        self.covered: set[int] = set()
        """Parts of the step that somebody reports wrongly about."""
        self.done: set[int] = set()
        self.end: View | None = None
        self.exact = self.swarm.setup.rounding == 0 and self.config.tolerance is None

    def on_note(self, key: bytes, event: Any) -> None:
        if isinstance(event, RunFinished):
            self.end = event.view
        if not isinstance(event, StepFinished) or event.step in self.done or not self.exact:
            return
        peer = self.swarm.get_peer(key)
        transcript = _find_transcript(peer, event.step)
        states = self.swarm.get_machine(key).states
        if peer is None or transcript is None or transcript.reports is None or event.step not in states:
            return
        if Phase.CONFIRM in transcript.phases and event.view.step == event.step + 1:
            self.done.add(event.step)
            self._audit(peer, transcript, event.view)

    def _audit(self, peer: Peer, transcript: Transcript, after: View) -> None:
        config, view = self.config, transcript.view
        for who, steps in self.wrong.items():
            known = {*after.roster, *(member.key for member in after.suspended)}  # a draw reaches those that left
            if view.step - 1 in steps and who in known:
                self._try_luck(view.step, who, 1 - steps[view.step - 1])
        self._check_shares(transcript)
        count, wire = len(view.roster), WIRE_TYPES[config.wire]
        sizes = compute_part_sizes(config.size, count)
        aggregates: list[torch.Tensor] = []
        for part, size in enumerate(sizes):
            read = read_aggregate(peer.aggregates.get((view.step, view.attempt, part), b""), size, wire, config.cap)
            aggregates.append(torch.zeros(size, dtype=wire.dtype) if read is None else read)
        duties, rows = compute_duties(config, view), {}
        self.covered = set()
        honest = sum(self.swarm.is_honest(who) for who in view.roster)
        for who in duties.contributors:
            parts = self._compute_parts(peer, view, who)
            commit = transcript.phases[Phase.COMMIT][who].body
            true = compute_root([hash_part(part) for part in parts])
            if isinstance(commit, m.Commit) and commit.parts == true:
                rows[who] = [
                    read_part(data, size, wire, config.cap)[0] for data, size in zip(parts, sizes, strict=True)
                ]
                fine = self._check_report(transcript, after, who, rows[who], aggregates)
            else:
                fine = False
            if not fine:
                chance = len(duties.validators) / len(duties.contributors) * (honest - count // 2) / count
                self.wrong.setdefault(who, {})[view.step] = chance
        if len(rows) == len(duties.contributors):
            self._check_aggregates(view, after, rows, aggregates)
        self._check_trials(peer, view, after)

    def _check_trials(self, peer: Peer, view: View, after: View) -> None:
        """What a probationer is credited with was said by it; if it was wrong, it does not go on for long."""
        served = {candidate.key: candidate.served for candidate in after.candidates}
        for candidate in view.candidates:
            who = candidate.key
            if who in after.banned or (who not in served and who not in after.roster):
                continue
            if view.step - 1 in self.trials.get(who, ()):
                others = sum(other in self.swarm.byzantine for other in view.roster)
                self._try_luck(view.step, who, others / len(view.roster))
            if served.get(who, candidate.served + 1) > candidate.served:
                true = compute_root([hash_part(part) for part in self._compute_parts(peer, view, who)])
                roots = self._find_trials(view, who)
                if not roots:
                    self.report(view.step, f"{name(who)} is credited with a step that it did not serve")
                elif true not in roots:
                    self.trials.setdefault(who, set()).add(view.step)

    def _find_trials(self, view: View, who: bytes) -> set[bytes]:
        """What a probationer committed to, as far as honest peers know."""
        peers = [peer for key in self.swarm.honest if (peer := self.swarm.get_peer(key)) is not None]
        letters = [x for peer in peers for x in peer.trials.get(view.height, {}).get(who, {}).values()]
        return {letter.body.parts for letter in letters if isinstance(letter.body, m.Trial)}

    def _compute_parts(self, peer: Peer, view: View, who: bytes) -> list[Piece]:
        seed = compute_batch_seed(self.config, view.randomness, view.step, who)
        gradient = self.swarm.get_machine(peer.key).compute_gradient(view.step, seed)
        assert gradient is not None
        wire = WIRE_TYPES[self.config.wire]
        return cut(prepare_gradient(gradient, self.config.cap, wire), len(view.roster), wire)

    def _check_shares(self, transcript: Transcript) -> None:
        view = transcript.view
        shares: dict[bytes, bytes] = {}
        for who, letter in transcript.phases[Phase.REVEAL].items():
            commit = transcript.phases[Phase.COMMIT][who].body
            assert isinstance(letter.body, m.Reveal)
            assert isinstance(commit, m.Commit)
            place = (self.config.run, view.step, view.attempt, who, letter.body.share, letter.body.salt)
            if compute_commitment(*place) != commit.share:
                self.report(view.step, f"the share of {name(who)} counts, and does not open its commitment")
            if shares.setdefault(letter.body.share, who) != who:
                self.report(view.step, f"{name(who)} has the same share as {name(shares[letter.body.share])}")

    def _check_report(
        self, transcript: Transcript, after: View, who: bytes, rows: list[torch.Tensor], aggregates: list[torch.Tensor]
    ) -> bool:
        """Whether a report is right where that is left to chance; where an honest aggregator saw it, it is reported."""
        view, letter = transcript.view, (transcript.reports or {})[who]
        if not isinstance(letter.body, m.Report) or letter.body.lacking or transcript.randomness is None:
            return True
        seeds = projection_seeds(transcript.randomness, len(rows), self.config.projections)
        right, fine = compute_report(rows, aggregates, seeds, view.tau), True
        for at, (said, true) in enumerate(zip(letter.body.sums, right.sums, strict=True)):
            part = at % len(rows)
            scale = view.tau * math.sqrt(len(rows[part]))
            norms = abs(letter.body.norms[part] - right.norms[part]) > 1e-6 * max(right.norms[part], 1e-30)
            if abs(said - true) <= 1e-6 * scale and not norms:
                continue
            aggregator = view.roster[part]
            self.covered.add(part)
            if who == aggregator or not self.swarm.is_honest(aggregator):
                fine = False
            elif who not in after.banned and self.swarm.is_steady(aggregator, 60 * self.config.delta):
                self.report(view.step, f"{name(who)} reported something wrong to {name(aggregator)}, and is not banned")
        return fine

    def _check_aggregates(
        self, view: View, after: View, rows: dict[bytes, list[torch.Tensor]], aggregates: list[torch.Tensor]
    ) -> None:
        """V2 and V3: how likely it is that this imbalance passed."""
        config, wire = self.config, WIRE_TYPES[self.config.wire]
        for part, aggregate in enumerate(aggregates):
            differences = torch.stack([row[part].double() - aggregate.double() for row in rows.values()])
            norms = differences.norm(dim=1)
            clipped = differences * (view.tau / norms.clamp(min=view.tau))[:, None]
            off = float(clipped.sum(dim=0).norm())
            rounding = 2 * wire.roundoff * 1.03 * config.cap + 1e-7 * math.sqrt(len(aggregate))
            bound = len(rows) * (1e-6 * view.tau + rounding)
            who = view.roster[part]
            if who in after.roster and off > 2 * bound and part not in self.covered:
                self._try_luck(view.step, who, min(1.0, 8 * bound / off) ** config.projections)
                if 2 * int((norms > config.delta_max).sum()) > len(rows):
                    self.report(
                        view.step, f"the aggregate of {name(who)} is far from everybody's part and not balanced"
                    )

    def _try_luck(self, step: int, who: bytes, chance: float) -> None:
        before = self.luck.get(who, 1.0)
        self.luck[who] = before * chance
        if self.luck[who] < self.LEAST_LUCK <= before:
            self.report(step, f"{name(who)} keeps attacking, and is not banned")

    def finish(self) -> None:
        latest = self.end
        if latest is None:
            return
        for who, steps in self.wrong.items():
            recent = [at for at in steps if at >= self.config.steps - 2]  # for these nobody is drawn: all check
            if recent and who not in latest.banned:
                self.report(latest.step, f"{name(who)} was wrong in step {max(recent)}, and nobody found out")


class Accusers(Checker):
    """A false accusation hurts the accuser."""

    rule = "false accusations"

    def on_note(self, key: bytes, event: Any) -> None:
        if not isinstance(event, StepFinished) or self.config.tolerance is not None:
            return
        peer = self.swarm.get_peer(key)
        transcript = _find_transcript(peer, event.step)
        if peer is None or transcript is None:
            return
        for who, letter in transcript.phases.get(Phase.CONFIRM, {}).items():
            if who not in event.view.roster or not isinstance(letter.body, m.Confirm):
                continue
            for digest in letter.body.accusations[:1]:
                case = peer.cases.get(digest)
                if not isinstance(case, m.Accusation) or not self.swarm.is_honest(case.accused):
                    continue
                ballots = [
                    ballot.verdict
                    for votes in (*transcript.heard, transcript.phases.get(Phase.VOTE, {}))
                    for key, vote in votes.items()
                    if key != case.accused and isinstance(vote.body, m.Vote)
                    for ballot in vote.body.ballots
                    if ballot.case == digest
                ]  # evidence shown to a few at the last moment finds no majority: then nobody goes
                if 2 * ballots.count(Verdict.INNOCENT) > len(transcript.view.roster) - 1:
                    self.report(event.step, f"{name(who)} accused {name(case.accused)}, and is still a member")


class Bounds(Checker):
    """``b_t``: never below the number of Byzantine members; and of all who may be one less for each that is banned."""

    rule = "bound"

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        there = sum(who in self.swarm.byzantine for who in view.roster)
        if there > view.bound:
            self.report(view.step, f"{there} Byzantine members, and a bound of {view.bound}")
        if view.bound != min(self.swarm.config.byzantine, view.doubts):
            self.report(view.step, f"a bound of {view.bound}, where {view.doubts} may be Byzantine")
        if before is not None and (view.step, view.attempt) != (before.step, before.attempt):
            fresh = sum(who in before.roster for who in set(view.banned) - set(before.banned))
            known = {*before.roster, *(member.key for member in before.suspended)}
            new = len(set(view.roster) - known)
            if view.doubts > max(0, before.doubts - fresh) + new:
                self.report(
                    view.step, f"{fresh} members were banned, and doubts went from {before.doubts} to {view.doubts}"
                )


class Disputes(Checker):
    """Disputes in a whole run are few, and while ``delta`` holds no slow path ends without a quorum."""

    rule = "few disputes"

    def __init__(self, all_of_them: Checkers) -> None:
        super().__init__(all_of_them)
        self.seen: set[tuple[int, int, int]] = set()

    def on_view(self, key: bytes, before: View | None, view: View) -> None:
        quiet = all(self.swarm.is_steady(who, 60 * self.config.delta) for who in self.swarm.honest)
        again = before is not None and before.step == view.step and before.attempt < view.attempt
        replaced = before is not None and view.height == before.height + 2  # a slow path while it was being sealed
        same = before is not None and before.roster == view.roster
        if quiet and again and same and not replaced and view.step < self.config.steps:
            self.report(view.step, "an attempt failed, and nobody had to go")

    def on_note(self, key: bytes, event: Any) -> None:
        quiet = all(self.swarm.is_steady(who, 60 * self.config.delta) for who in self.swarm.honest)
        if isinstance(event, SlowPath) and quiet:
            self.seen.add((event.step, event.attempt, event.height))
            setup, latest = self.swarm.setup, self.all.latest
            removed = sum(record.count for record in latest.absences) if latest is not None else 0
            limit = 2 * self.config.strikes * (len(setup.attackers) + setup.joiners + removed + 2)
            if len(self.seen) > limit:
                self.report(event.step, f"{len(self.seen)} slow paths")
        elif isinstance(event, Halted) and quiet and self._can_go_on():
            self.report(event.step, f"{name(key)} halted at height {event.height}, and delta holds")

    def _can_go_on(self) -> bool:
        return self.all.latest is None or can_go_on(self.swarm, self.all.latest)
