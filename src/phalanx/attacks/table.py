"""All attacks by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.attacks import (
    aggregation,
    broadcast,
    framing,
    gradients,
    justice,
    membership,
    patience,
    slow_path,
    strangers,
)
from phalanx.attacks.base import Attack, combine
from phalanx.core import messages as m
from phalanx.core.messages import Phase, Rule


def _both(*makers: Callable[..., Attack]) -> Callable[..., Attack]:
    def make(**options: Any) -> Attack:
        return combine(*(maker(**options) for maker in makers))

    return make


def _sleeper(start: int = 5, **options: Any) -> Attack:
    return gradients.WrongGradient(start=start, **options)


def _hit_and_leave(start: int = 3, **options: Any) -> Attack:
    wrong = gradients.WrongGradient(start=start, stop=start + 1, **options)
    return combine(wrong, membership.Leave(start=start, stop=start + 1))


def _hit_and_vanish(start: int = 3, **options: Any) -> Attack:
    wrong = gradients.WrongGradient(start=start, stop=start + 1, **options)
    return combine(wrong, membership.Absent(start=start + 1, steps=3))


def _cover_and_leave(start: int = 3, stop: int | None = None, **options: Any) -> Attack:
    """Lies until ``stop``, for one step if that is not said; then goes."""
    end = start + 1 if stop is None else stop
    shift, cover = (lie(start=start, stop=end, **options) for lie in (aggregation.QuietShift, aggregation.Cover))
    return combine(shift, cover, membership.Leave(start=end, stop=end + 1))


def _leave_and_lie(start: int = 2, stop: int | None = None, **options: Any) -> Attack:
    lie = membership.TrialOfOtherStep(start=start, stop=stop, **options)
    return combine(membership.Leave(start=start, stop=start + 1, **options), lie)


def _shielded(lie: Callable[..., Attack]) -> Callable[..., Attack]:
    """A lie about gradients whose tellers cover for one another, as validators and as voters."""
    return _both(lie, justice.ShieldingVotes, justice.IdleValidator)


def _patient(*lies: Callable[..., Attack]) -> Callable[..., Attack]:
    """Lies of attackers that wait; they cover for one another, and keep honest peers that are out from coming back."""
    return _both(*lies, patience.PatientShield, patience.PatientIdle, patience.BlockReturns)


PAPER: dict[str, Callable[..., Attack]] = {
    "none": Attack,
    "sign_flip": _shielded(gradients.SignFlip),
    "random_direction": _shielded(gradients.RandomDirection),
    "label_flip": _shielded(gradients.LabelFlip),
    "delayed": _shielded(gradients.Delayed),
    "ipm_0.1": _shielded(partial(gradients.InnerProduct, epsilon=0.1)),
    "ipm_0.6": _shielded(partial(gradients.InnerProduct, epsilon=0.6)),
    "alie": _shielded(gradients.LittleIsEnough),
}
"""The attacks that the paper tries. Except for ``sign_flip`` and ``random_direction`` they need a task."""

FAMILIES: dict[str, Callable[[str], Callable[..., Attack]]] = {
    "ipm": lambda number: _shielded(partial(gradients.InnerProduct, epsilon=float(number))),
    "delayed": lambda number: _shielded(partial(gradients.Delayed, delay=int(number))),
    "whisper": lambda number: _shielded(partial(gradients.Whisper, distance=float(number))),
}
"""Attacks with a number behind their name: ``ipm_0.3``, ``delayed_100``, ``whisper_0.01``."""

ATTACKS: dict[str, Callable[..., Attack]] = {
    "honest": Attack,
    # gradients
    "wrong_gradient": gradients.WrongGradient,
    "random_gradient": partial(gradients.WrongGradient, change=gradients.randomize),
    "zero_gradient": partial(gradients.WrongGradient, change=gradients.zero),
    "stale_gradient": gradients.StaleGradient,
    "drift": gradients.Drift,
    "nonfinite_parts": gradients.NonFiniteParts,
    "huge_parts": partial(gradients.NonFiniteParts, value=1e30),
    "sleeper": _sleeper,
    "sybils": gradients.SharedCompute,
    # parts, aggregates, reports
    "wrong_aggregate": aggregation.ShiftedAggregate,
    "covered_aggregate": aggregation.CoveredAggregate,
    "aggregate_covered_by_colluder": partial(aggregation.CoveredAggregate, by_colluder=True),
    "false_report": aggregation.FalseReport,
    "false_norm": partial(aggregation.FalseReport, sums=0.0, norms=1.0),
    "framing": aggregation.Framing,
    "nonfinite_aggregate": aggregation.NonFiniteAggregate,
    "withheld_parts_from_one": partial(aggregation.WithheldParts, count=1),
    "withheld_parts": aggregation.WithheldParts,
    "withheld_parts_from_one_for_good": partial(aggregation.WithheldParts, count=1, opens=False),
    "withheld_parts_for_good": partial(aggregation.WithheldParts, opens=False),
    "wrong_openings": aggregation.WrongOpenings,
    "withheld_aggregate_from_one": partial(aggregation.WithheldAggregate, count=1),
    "withheld_aggregate_from_some": partial(aggregation.WithheldAggregate, count=3),
    "withheld_aggregate": aggregation.WithheldAggregate,
    "false_complaint": aggregation.FalseComplaints,
    "stubborn_complaint": partial(aggregation.FalseComplaints, stubborn=True),
    "complaint_spam": partial(aggregation.FalseComplaints, count=None),
    "deaf_to_parts": aggregation.Deaf,
    "deaf_to_aggregates": partial(aggregation.Deaf, kind=m.AggregateChunk),
    "cover_and_leave": _cover_and_leave,
    "hidden_part": aggregation.HiddenPart,
    "part_for_validators": aggregation.PartForValidators,
    "friends_missing": aggregation.FriendsMissing,
    # agreed broadcast
    "equivocate": broadcast.Equivocate,
    **{f"equivocate_{phase.name.lower()}": partial(broadcast.Equivocate, phases=(phase,)) for phase in Phase},
    "equivocate_to_each": broadcast.EquivocateToEach,
    **{
        f"equivocate_{phase.name.lower()}_to_each": partial(broadcast.EquivocateToEach, phases=(phase,))
        for phase in (Phase.COMMIT, Phase.REPORT, Phase.CONFIRM)
    },
    "equivocate_late": partial(broadcast.Equivocate, late=2.0),
    "wrong_root": broadcast.WrongRoot,
    "silent": broadcast.Mute,
    **{f"silent_{phase.name.lower()}": partial(broadcast.Silent, phases=(phase,)) for phase in Phase},
    "silent_to_one": broadcast.SilentToSome,
    "silent_to_most": partial(broadcast.SilentToSome, count=4),
    "late": broadcast.Late,
    "too_late": partial(broadcast.Late, delay=6.0),
    "premature_timeouts": broadcast.PrematureTimeouts,
    "replay": broadcast.Replay,
    "echo": broadcast.Echo,
    "malformed": broadcast.Malformed,
    "wrong_phase_body": partial(broadcast.Malformed, kind="swapped"),
    "oversize": partial(broadcast.Malformed, kind="oversize"),
    "out_of_range": partial(broadcast.Malformed, kind="range"),
    "wrong_labels": partial(broadcast.Malformed, kind="step"),
    "flood": broadcast.Flood,
    # slow path
    "late_second_value": broadcast.LateSecondValue,
    "too_late_second_value": partial(broadcast.LateSecondValue, after=1.5),
    "garbage_gossip": broadcast.GarbageGossip,
    "late_endorsements": broadcast.LateEndorsements,
    "votes_to_some": broadcast.VotesToSome,
    "two_votes": broadcast.TwoVotes,
    "withheld_certificates": broadcast.WithheldCertificates,
    "mixed_item": slow_path.MixedItem,
    "long_endorsements": slow_path.LongEndorsements,
    "long_bodies": partial(slow_path.LongBodies, votes=True),
    "late_reveal_for_one": slow_path.RevealForSome,
    # randomness and justice
    "withheld_reveal": partial(broadcast.Silent, phases=(Phase.REVEAL,)),
    "wrong_reveal": justice.WrongReveal,
    "copied_commitment": justice.CopiedCommitment,
    "rushed_reveal": justice.RushedReveal,
    "false_accusation_report": justice.FalseAccusation,
    "false_accusation_gradient": partial(justice.FalseAccusation, rule=Rule.GRADIENT),
    "false_accusation_malformed": partial(justice.FalseAccusation, rule=Rule.MALFORMED),
    "accusation_for_few": partial(justice.FalseAccusation, readers=1),
    "accusation_without_evidence": justice.EmptyAccusation,
    "accusation_spam": partial(justice.EmptyAccusation, count=64),
    "shielding_votes": justice.ShieldingVotes,
    "empty_votes": justice.EmptyVotes,
    "unreceived_votes": partial(justice.EmptyVotes, unreceived=True),
    "lying_validator": justice.LyingValidator,
    "idle_validator": justice.IdleValidator,
    "shielded_gradient": _both(gradients.WrongGradient, justice.ShieldingVotes, justice.LyingValidator),
    "unreceived_trials": justice.NothingReceived,
    "silent_on_charge": justice.SilentVote,
    # blame
    "edge_lie": framing.EdgeLie,
    "late_accusation": _both(framing.FalseReportOfLast, framing.LateAccuser),
    "report_for_one": framing.ReportForOne,
    "aggregate_for_one": framing.AggregateForOne,
    "half_shown_charge": framing.HalfShownCharge,
    "late_opening": framing.LateOpening,
    "late_denial": framing.LateDenial,
    "overridden_case": framing.Override,
    # strangers
    "free_proofs": partial(strangers.FreeProofs, keys=1000),
    "half_shown_proof": strangers.HalfShownProof,
    "first_in_line": strangers.FirstInLine,
    "friend_proofs": _both(strangers.ShiftWithFriend, strangers.FriendProofs),
    "slow_vote": strangers.SlowVote,
    "gives_up_friend": strangers.GivesUp,
    "gives_away_friend": strangers.GivesAway,
    # membership
    "leave": partial(membership.Leave, start=3),
    "hit_and_leave": _hit_and_leave,
    "hit_and_vanish": _hit_and_vanish,
    "absent": partial(membership.Absent, start=2),
    "silent_target": _both(gradients.WrongGradient, membership.SilentTarget),
    "long_leave": partial(membership.LongLeave, start=1),
    "return_for_newcomer": partial(membership.ReturnForNewcomer, start=1),
    "sacrifice": membership.Sacrifice,
    "one_by_one": membership.OneByOne,
    "trial_of_other_step": _leave_and_lie,
    "last_trial": _both(membership.LastTrial, membership.ShowsParts),
    "certificate_for_one": membership.CertificateForSome,
    "leave_by_certificate": _both(membership.Leave, membership.CertificateForSome),
    "wrong_seal": membership.WrongSeal,
    "wrong_state": membership.WrongState,
    "endless_state": partial(membership.WrongState, endless=True),
    "wrong_chain": membership.WrongChain,
    # bad weather
    "patient_takeover": _patient(partial(patience.PatientGradient, moment=patience.Moment.OUTNUMBERED)),
    "patient_gradient": _patient(patience.PatientGradient),
    "patient_aggregate": _patient(patience.PatientAggregate),
    "patient_floor": _patient(partial(patience.PatientGradient, moment=patience.Moment.AT_FLOOR)),
    "patient_redraw": _patient(
        partial(patience.PatientGradient, moment=patience.Moment.ALWAYS, some=True), patience.DrawAgain
    ),
    "patient_shares": _patient(partial(patience.PatientGradient, some=True), patience.KeepShare),
    "patient_silence": _both(partial(patience.SilentAtFloor, all_of_us=True), patience.BlockReturns),
    "patient_naming": _patient(
        partial(patience.PatientGradient, moment=patience.Moment.OUTNUMBERED), patience.NameOthers, patience.HurryOthers
    ),
    "patient_accusing": _both(patience.PatientGradient, patience.AccuseOthers, patience.BlockReturns),
    "patient_return": _patient(
        partial(patience.PatientGradient, moment=patience.Moment.OUTNUMBERED), patience.ReturnFirst
    ),
    "patient_all": _patient(
        partial(patience.PatientGradient, some=True),
        patience.DrawAgain,
        partial(patience.NameOthers, moment=patience.Moment.AT_FLOOR),
        patience.SilentAtFloor,
        patience.ReturnFirst,
    ),
}
"""What an attacker can be told to do. Every entry takes ``start``, ``stop`` and ``probability``."""
