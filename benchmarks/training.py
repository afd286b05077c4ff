"""What the protocol costs beside the gradients: ResNet-18, 16 peers, batch 8, on the CPU, with real cryptography.

    python benchmarks/training.py [--steps 3] [--peers 16] [--batch 8] [--json]

Every peer of the swarm does all of its own work, one after the other in this process: nothing is shared between them,
neither signatures that were checked, nor updates, nor hashes. Timed are whole steps after the first five; the time in
gradients is what ``Gradients.compute`` takes, validators' recomputation included, and the protocol's is all the rest.
Images are random: they take as long as real ones. Links cost nothing here; ``benchmarks/traffic.py`` counts bytes.

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if the target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.core.config import Config
from phalanx.core.envelope import Examiner
from phalanx.core.events import StepFinished
from phalanx.core.life import run_peer
from phalanx.network.ideal import make_signers
from phalanx.network.simulated import Links, World
from phalanx.training.allocation import keep_freed_memory
from phalanx.training.gradients import Gradients
from phalanx.training.machine import Trainer, Workshop
from phalanx.training.optimizers import make_optimizer
from phalanx.training.task import Data, Task, accuracy, classification_loss
from phalanx.training.tasks.cifar10 import ResNet18

TARGET = 0.25
WARM_UP = 5  # until then every step takes memory that no other has used, which costs more than the work in it
KINDS = ("compute_aggregate", "compute_report", "apply")


def make_task(batch: int) -> Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 32, 32, generator=generator)
    data = Data((images, torch.randint(0, 10, (64,), generator=generator)))
    return Task(
        name="random images",
        model=ResNet18,
        train=data,
        test=data,
        loss=classification_loss,
        metric=accuracy,
        batch=batch,
    )


class TimedGradients(Gradients):
    """Gradients that know how long they took."""

    seconds = 0.0
    count = 0

    def compute_with_loss(self, *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return super().compute_with_loss(*arguments, **options)
        finally:
            self.seconds += time.perf_counter() - begun
            self.count += 1


class PlainWorkshop(Workshop):
    """Computes everything each time it is asked; equal states are held once, or sixteen peers would not fit."""

    def compute(self, state: bytes, seed: bytes, *, poisoned: bool = False) -> tuple[Tensor, float]:
        return self.gradients.compute_with_loss(self.get(state).parameters, seed, poisoned=poisoned)

    def update(self, step: int, state: bytes, aggregate: Tensor) -> bytes:
        return self.add(self.optimizer.update(self.get(state), aggregate, step))


def watch(trainer: Trainer, spent: dict[str, float]) -> Trainer:
    """Add up what each kind of arithmetic takes."""
    for kind in KINDS:
        setattr(trainer, kind, partial(time_call, spent, kind, getattr(trainer, kind)))
    return trainer


def time_call(spent: dict[str, float], kind: str, method: Callable[..., Any], *arguments: Any) -> Any:
    begun = time.perf_counter()
    try:
        return method(*arguments)
    finally:
        spent[kind] += time.perf_counter() - begun


def run(steps: int, peers: int, batch: int) -> dict[str, Any]:
    gradients = TimedGradients(make_task(batch))
    optimizer = make_optimizer({"name": "sgd", "rate": 0.01, "momentum": 0.9, "nesterov": True}, 1000)
    signers, verify = make_signers(peers, 1, ideal=False)
    workshop = PlainWorkshop(gradients, optimizer)
    config = Config(
        founders=tuple(signer.key for signer in signers),
        byzantine=(peers - 2) // 2,
        size=gradients.size,
        steps=1000,
        tau=1.0,
        cap=1e3,
        state=workshop.start_digest,
    ).check()
    finished = 0

    def hear(key: bytes, event: Any) -> None:
        nonlocal finished
        if key == signers[0].key and isinstance(event, StepFinished):
            finished = event.step + 1
            workshop.forget({digest for trainer in trainers for digest in trainer.digests.values()})

    spent = dict.fromkeys(KINDS, 0.0)
    world = World(config.run, 1, Links(low=0.01, high=0.05), count=False, trace=False, on_note=hear, keep_notes=False)
    trainers = [Trainer(workshop, 0.5) for _ in signers]
    for signer, trainer in zip(signers, trainers, strict=True):

        def start(disk, key=signer.key):  # type: ignore[no-untyped-def]
            return run_peer(config, key, Examiner(verify), disk.view)

        world.add(signer.key, signer, watch(trainer, spent), start)
    world.run(stop=lambda: finished >= WARM_UP)
    gradients.seconds, gradients.count = 0.0, 0
    spent.update(dict.fromkeys(KINDS, 0.0))
    begun = time.perf_counter()
    world.run(stop=lambda: finished >= WARM_UP + steps)
    total = time.perf_counter() - begun
    protocol = total - gradients.seconds
    return {
        "peers": peers,
        "size": gradients.size,
        "protocol_share": protocol / total,
        "step_s": total / steps,
        "gradients_s": gradients.seconds / steps,
        "protocol_s": protocol / steps,
        "gradients_per_step": gradients.count / steps,
        **{f"{kind}_s": seconds / steps for kind, seconds in spent.items()},
        "threads": torch.get_num_threads(),
        "target": TARGET,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    keep_freed_memory()
    results = run(options.steps, options.peers, options.batch)
    if options.json:
        print(json.dumps(results))
    else:
        for name, value in results.items():
            print(f"{name:>20} {value:.3f}" if isinstance(value, float) else f"{name:>20} {value}")
    return 0 if results["protocol_share"] <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
