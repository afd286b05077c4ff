"""The demo: one training run twice, side by side, unprotected and protected, while three of eight peers cheat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.core.clipping import centered_clip
from phalanx.events import Event, StepFinished
from phalanx.show.plots import plot_duel
from phalanx.show.progress import Duel
from phalanx.show.report import write_report
from phalanx.training.checkpoints import write_safely
from phalanx.training.simulate import Result, simulate

SETTINGS: dict[str, Any] = {
    "peers": 8,
    "byzantine": 3,
    "attack": "sign_flip",
    "start": 30,
    "steps": 150,
    "evaluate_every": 2,
}


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    unprotected: Result
    protected: Result
    picture: Path
    report: Path


def run_demo(out: Path, settings: dict[str, Any] | None = None) -> DemoResult:
    """Train ``digits`` both ways at once, show it, and write a picture and a report into ``out``."""
    chosen = SETTINGS if settings is None else settings
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)  # before the work: a folder that cannot be made is told at once
    try:
        bare, safe = _train_both(chosen)
    except BaseException:  # interrupted, too
        if is_new:
            with suppress(OSError):
                out.rmdir()
        raise
    picture, report = out / "demo.png", out / "report.html"
    write_safely(picture, lambda path: plot_duel(bare.events, safe.events, path))
    write_safely(report, lambda path: write_report(path, safe.events, unprotected=bare.events, command="phalanx demo"))
    return DemoResult(unprotected=bare, protected=safe, picture=picture, report=report)


def _train_both(settings: dict[str, Any]) -> tuple[Result, Result]:
    """The results without and with protection."""
    results: dict[str, Result] = {}
    errors: list[BaseException] = []
    pace = _Pace()
    with Duel("unprotected", "protected") as duel:
        tracks = {"mean": duel.unprotected.on_event, "phalanx": duel.protected.on_event}

        def is_over(step: int) -> bool:
            """One run failed, or was interrupted: the other one need not go on."""
            return bool(errors)

        def train(defense: str) -> None:
            try:
                follow = pace.follow(tracks[defense])
                results[defense] = simulate("digits", **settings, defense=defense, on_event=follow, stop=is_over)
            except BaseException as error:
                errors.append(error)
            finally:
                pace.leave()

        beside = threading.Thread(target=train, args=("mean",), daemon=True)
        beside.start()
        train("phalanx")
        beside.join()
    if errors:
        raise errors[0]
    return results["mean"], results["phalanx"]


class _Pace:
    """Keeps two runs at the same step, so that one can watch both."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)

    def follow(self, show: Callable[[Event], None]) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            show(event)
            if isinstance(event, StepFinished):
                try:
                    self._barrier.wait()
                except threading.BrokenBarrierError:  # the other run is over
                    return

        return on_event

    def leave(self) -> None:
        self._barrier.abort()


# ---- Clipping alone

_FEATURES, _ROWS_PER_BATCH = 200, 64
_RATE, _TAU = 0.25, 0.3
_CROWD, _ATTACKERS, _STEPS = 16, 7, 100


def compare_clipping(seed: int = 0) -> dict[str, float]:
    """How far a linear model ends from the truth if nobody cheats, and if seven of sixteen do: clipped, and averaged.

    Without the protocol, gradients clipped in one place: what CenteredClip does on its own.
    """
    truth = torch.randn(_FEATURES, generator=torch.Generator().manual_seed(seed))
    heaviest = 0.0

    def train(attackers: int, clipping: bool) -> float:
        nonlocal heaviest
        generator = torch.Generator().manual_seed(seed + 1)
        parameters = torch.zeros(_FEATURES)
        for _ in range(_STEPS):
            inputs = torch.randn(_CROWD, _ROWS_PER_BATCH, _FEATURES, generator=generator)
            noise = 0.1 * torch.randn(_CROWD, _ROWS_PER_BATCH, generator=generator)
            misfits = inputs @ (parameters - truth) - noise
            gradients = torch.einsum("prf,pr->pf", inputs, misfits) / _ROWS_PER_BATCH
            gradients[:attackers] *= -1000
            if clipping:
                clipped = centered_clip(gradients, _TAU)
                heaviest = max(heaviest, float(clipped.weights[:attackers].max()))
                parameters = parameters - _RATE * clipped.aggregate
            else:
                parameters = parameters - _RATE * gradients.mean(0)
        return float((parameters - truth).norm())

    errors = {
        "honest_error": train(0, False),
        "clipped_error": train(_ATTACKERS, True),
        "mean_error": train(_ATTACKERS, False),
    }
    return {**errors, "attacker_weight": heaviest}
