"""Clipping at work: a small swarm fits a linear model while some members send flipped, huge gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.core.clipping import centered_clip

PEERS = 16
ATTACKERS = 7
STEPS = 100
_FEATURES, _ROWS_PER_BATCH = 200, 64
_RATE, _TAU = 0.25, 0.3


@dataclass(frozen=True, slots=True)
class Curve:
    """The distance to the true parameters before each step and after the last, under one way of averaging."""

    name: str
    errors: list[float]


@dataclass(frozen=True, slots=True)
class DemoResult:
    honest: Curve
    clipped: Curve
    mean: Curve
    attacker_weight: float
    """The largest weight that the clipped mean gave to any attacker in any step (an equal share is 1/16)."""


def run_demo(seed: int = 0) -> DemoResult:
    """Train three times from one seed: nobody cheats, seven cheat and we clip, seven cheat and we average."""
    truth = torch.randn(_FEATURES, generator=torch.Generator().manual_seed(seed))
    heaviest = 0.0

    def clip(gradients: torch.Tensor) -> torch.Tensor:
        nonlocal heaviest
        result = centered_clip(gradients, _TAU)
        heaviest = max(heaviest, float(result.weights[:ATTACKERS].max()))
        return result.aggregate

    def train(name: str, attackers: int, clipping: bool) -> Curve:
        generator = torch.Generator().manual_seed(seed + 1)
        parameters = torch.zeros(_FEATURES)
        errors = []
        for _ in range(STEPS):
            errors.append(float((parameters - truth).norm()))
            inputs = torch.randn(PEERS, _ROWS_PER_BATCH, _FEATURES, generator=generator)
            noise = 0.1 * torch.randn(PEERS, _ROWS_PER_BATCH, generator=generator)
            misfits = inputs @ (parameters - truth) - noise
            gradients = torch.einsum("prf,pr->pf", inputs, misfits) / _ROWS_PER_BATCH
            gradients[:attackers] *= -1000
            parameters = parameters - _RATE * (clip(gradients) if clipping else gradients.mean(0))
        return Curve(name, [*errors, float((parameters - truth).norm())])

    return DemoResult(
        honest=train("nobody cheats, mean", 0, False),
        clipped=train(f"{ATTACKERS} of {PEERS} cheat, CenteredClip", ATTACKERS, True),
        mean=train(f"{ATTACKERS} of {PEERS} cheat, mean", ATTACKERS, False),
        attacker_weight=heaviest,
    )
