"""The table of attacks in the README, in short: a smaller swarm, fewer steps, one seed (``experiments/attacks.py``)."""

from __future__ import annotations

import pytest
import torch

from phalanx.training.simulate import Result, simulate

SETTINGS = {"peers": 10, "steps": 120, "seed": 0, "evaluate_every": 40}
ATTACKED = {**SETTINGS, "byzantine": 4, "start": 30}


@pytest.fixture(scope="module")
def honest() -> Result:
    torch.set_num_threads(1)
    return simulate("digits", **SETTINGS)  # type: ignore[arg-type]


@pytest.mark.parametrize("attack", ["sign_flip", "label_flip", "delayed_20", "ipm_0.6", "alie"])
def test_attackers_are_banned_and_the_model_is_as_good(honest: Result, attack: str) -> None:
    result = simulate("digits", **ATTACKED, attack=attack)  # type: ignore[arg-type]
    assert (result.byzantine_banned, result.byzantine_active, result.honest_banned) == (4, 0, 0)
    assert result.final_metric is not None
    assert honest.final_metric is not None
    assert result.final_metric > honest.final_metric - 0.04


def test_without_protection_it_is_ruined() -> None:
    result = simulate("digits", **ATTACKED, attack="sign_flip", defense="mean")  # type: ignore[arg-type]
    assert result.final_metric is not None
    assert result.final_metric <= 0.2
