"""Numbers that a run is started with: settings of the optimizer, and scales measured on public batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from phalanx.core.config import Config
from phalanx.core.errors import LocalError
from phalanx.core.membership import compute_floor
from phalanx.core.partition import split_parts
from phalanx.core.randomness import derive_seed
from phalanx.training.gradients import Gradients
from phalanx.training.manifest import VERSION, ClippingSection, Plan, RunSection, TaskSection
from phalanx.training.optimizers import METHODS, make_optimizer
from phalanx.training.task import Task

_CAPS = {"float32": 100.0, "float16": 10.0}
_TIGHT_CAP = 3.0
_SAMPLES = 8  # gradients from which scales are measured
_LARGE = 1 << 24  # parameters from which on so many gradients do not fit into memory
_RANGE = 1e3  # by which an automatic tau may move from its start, up and down
# Of AdamW where platforms may differ. Its usual one, 1e-8, is no larger than what rounding leaves of a gradient that is
# zero, such as an attention's key biases have: there a check would compare noise with noise.
_TOLERANT_EPSILON = 1e-6
_RECIPE = ("steps", "tau", "optimizer")  # of a task's recipe; the rest are settings of the optimizer


def make_plan(
    gradients: Gradients,
    name: str,
    peers: int,
    seed: int,
    *,
    byzantine: int,
    validators: int,
    steps: int | None,
    options: Mapping[str, str] | None,
    optimizer: Mapping[str, Any] | None,
    method: str | None,
    clip: float | None,
    tau: float | str,
    wire: str,
    device: str,
    code: str | None = None,
    tolerant: bool = False,
) -> Plan:
    """What every manifest has, with scales as measured on public batches."""
    gradients.require_repeatable()
    task = gradients.task
    settings, steps = make_settings(task, optimizer or {}, method, steps, tolerant)
    length, scale = measure_scales(gradients, peers, seed)
    if method == "btard-clipped-sgd" and clip is None:
        raise LocalError("method btard-clipped-sgd: expected a length to which gradients are scaled (clip, --clip)")
    cap = clip if clip is not None else find_cap(length, wire)
    return Plan(
        version=VERSION,
        task=TaskSection(name=name, options=dict(options or {}), digest=task.digest, batch=task.batch, code=code),
        run=RunSection(
            peers=peers,
            byzantine=byzantine,
            validators=validators,
            steps=steps,
            seed=seed,
            wire=wire,
            device=device,
            threads=torch.get_num_threads(),
            method=method or "none",
        ),
        clipping=make_clipping(tau, peers, byzantine, validators, scale, cap),
        optimizer=settings,
    )


def find_floor(byzantine: int, validators: int, quorum: str = "majority") -> int:
    """The members below which a run waits, while nobody is banned (docs/PROTOCOL.md, section 4a)."""
    config = Config(
        founders=(),
        byzantine=byzantine,
        validators=validators,
        size=1,
        steps=1,
        partition_safe=quorum == "partition-safe",
    )
    return compute_floor(config, byzantine)


def make_settings(
    task: Task, changes: Mapping[str, Any], method: str | None, steps: int | None, tolerant: bool = False
) -> tuple[dict[str, Any], int]:
    """The optimizer's settings, and how many steps. ``tolerant``: whether platforms may differ."""
    recipe = dict(task.recipe)
    chosen = steps if steps is not None else recipe.get("steps", 400)
    if method is not None and method not in METHODS:
        raise LocalError(f"method {method!r} is unknown; expected one of {', '.join(METHODS)}")
    name = changes.get("name", METHODS[method].optimizer if method is not None else recipe.get("optimizer", "sgd"))
    own = {key: value for key, value in recipe.items() if key not in _RECIPE}
    if name != recipe.get("optimizer", "sgd"):  # what suits one optimizer does not suit another
        own = {key: own[key] for key in ("rate",) if key in own}
        own |= {"first_stage": max(1, chosen // 7)} if name == "restarted" else {}
    if own.get("warmup", 0) > chosen:
        own["warmup"] = chosen
    if tolerant and name == "adamw":
        own.setdefault("epsilon", _TOLERANT_EPSILON)
    settings = {"name": name, "rate": 0.1, **own, **changes}
    make_optimizer(settings, chosen)
    return settings, chosen


def find_cap(length: float, wire: str) -> float:
    """How long a gradient may be, from its usual length; a longer one is scaled to it.

    V2 forgives the rounding of the longest aggregate that there can be. The fewer bits a type has, the tighter this
    must be, or nobody notices a wrong aggregate.
    """
    return length * _CAPS.get(wire, _TIGHT_CAP)


def measure_scales(gradients: Gradients, peers: int, seed: int) -> tuple[float, float]:
    """How long gradients are before the first step, and how far their parts lie from their mean: public batches."""
    base = derive_seed(str(seed).encode(), "scales before a run")
    seeds = [derive_seed(base, "sample", place.to_bytes(8, "little")) for place in range(_SAMPLES)]
    if gradients.size < peers:
        raise LocalError(f"task {gradients.task.name!r}: {gradients.size} parameters cannot be cut into {peers} parts")
    if gradients.size >= _LARGE:
        lengths, parts = _measure_large(gradients, peers, seeds)
    else:
        rows = torch.stack([gradients.compute(gradients.start, seed) for seed in seeds]).double()
        parts = [[float(part.norm()) for part in split_parts(row, peers)] for row in rows - rows.mean(0)]
        lengths = [float(row.norm()) for row in rows]
    length = median(lengths)
    if not math.isfinite(length):
        raise LocalError(f"task {gradients.task.name!r}: the gradient at the initial parameters is not finite")
    scale = median(median(column) for column in zip(*parts, strict=True))
    return length or 1.0, scale or 1.0


def _measure_large(gradients: Gradients, peers: int, seeds: list[bytes]) -> tuple[list[float], list[list[float]]]:
    """The length of each gradient, and of the parts of what it differs by from their mean: each is computed twice, so
    that no two are held."""
    lengths, mean = [], torch.zeros(gradients.size)
    for seed in seeds:
        gradient = gradients.compute(gradients.start, seed)
        lengths.append(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)))
        mean += gradient.div_(len(seeds))
    parts = []
    for seed in seeds:
        rest = split_parts(gradients.compute(gradients.start, seed).sub_(mean), peers)
        parts.append([float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in rest])
    return lengths, parts


def make_clipping(
    tau: float | str, peers: int, byzantine: int, validators: int, scale: float, cap: float
) -> ClippingSection:
    if tau != "auto":
        try:
            return ClippingSection(tau=float(tau), cap=cap)
        except (TypeError, ValueError):
            raise LocalError(f"tau: expected 'auto' or a positive number, got {tau!r}") from None
    room = (peers - validators - byzantine) / byzantine if byzantine else 1.0
    multiple = max(min(1.0, 0.9 * room), 1e-6)
    start = multiple * scale
    return ClippingSection(multiple=multiple, start=start, floor=start / _RANGE, ceiling=start * _RANGE, cap=cap)
