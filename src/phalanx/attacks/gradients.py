"""Lies about the own gradient.

The seven that the paper tries are at the end, under its names. They know what the paper's attackers know: where that is
all honest gradients, they recompute them from the public seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import NormalDist

import torch
from torch import Tensor

from phalanx.attacks.base import Attack, Insider, Mail
from phalanx.core import messages as m
from phalanx.core.checking import cut
from phalanx.core.crypto import compute_digest
from phalanx.core.effects import ComputeReport, Effect, Sign, Story
from phalanx.core.merkle import compute_paths, hash_part
from phalanx.core.messages import Message, Signed
from phalanx.core.partition import compute_part_sizes
from phalanx.core.randomness import gaussian_vector
from phalanx.core.verification import prepare_gradient
from phalanx.core.wire import WIRE_TYPES

Change = Callable[[Tensor, Random], Tensor]
"""From the true gradient to what is sent instead."""


def flip(gradient: Tensor, random: Random) -> Tensor:
    return -10 * gradient


def randomize(gradient: Tensor, random: Random) -> Tensor:
    noise = torch.tensor([random.gauss(0, 1) for _ in range(gradient.numel())])
    return noise * (float(gradient.norm()) / float(noise.norm()))


def zero(gradient: Tensor, random: Random) -> Tensor:
    return torch.zeros_like(gradient)


@dataclass(kw_only=True, eq=False)
class WrongGradient(Attack):
    """Another gradient than the public batch gives, used consistently."""

    change: Change = flip

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return self.change(gradient, insider.random)


@dataclass(kw_only=True, eq=False)
class StaleGradient(Attack):
    """The gradient of the first step, for ever: free of cost."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        kept: Tensor = insider.notes.setdefault("stale", gradient)
        return kept


@dataclass(kw_only=True, eq=False)
class Drift(Attack):
    """A gradient that grows a little every step, to pull an automatic ``tau`` along."""

    growth: float = 1.2

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return gradient * self.growth ** (step - self.start + 1)


@dataclass(kw_only=True, eq=False)
class NonFiniteParts(Attack):
    """Committed parts that hold no numbers, or numbers beyond the cap; the reports say what all make of them."""

    value: float = float("nan")
    made: str = field(default="nonfinite parts", init=False)

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        insider.notes[self.made, step] = gradient
        return gradient

    def on_body(self, insider: Insider, sign: Sign) -> Sign | Signed | None:
        gradient = insider.notes.get((self.made, sign.step))
        body = sign.body
        if gradient is None or not isinstance(body, m.Commit) or body.parts is None:
            return sign
        config, roster = insider.config, insider.view.roster
        wire = WIRE_TYPES[config.wire]
        parts = cut(prepare_gradient(gradient, config.cap, wire), len(roster), wire)
        for place, size in enumerate(compute_part_sizes(config.size, len(roster))):
            if place != insider.index:
                parts[place] = wire.encode(torch.full((size,), self.value, dtype=wire.dtype))
        root, paths = compute_paths([hash_part(part) for part in parts])
        insider.notes["parts", sign.step, sign.attempt] = parts, paths
        return Sign(
            sign.height,
            sign.step,
            sign.attempt,
            sign.phase,
            sign.previous,
            m.Commit(root, body.share, body.view),
        )

    def on_message(self, insider: Insider, to: tuple[bytes, ...], message: Message) -> list[Mail]:
        if isinstance(message, m.PartChunk) and message.owner == insider.key:
            made = insider.notes.get(("parts", message.step, message.attempt))
            if made is not None:
                data, path = made[0][message.part], made[1][message.part]
                place = (message.step, message.attempt, message.owner, message.part)
                return [(to, m.PartChunk(*place, path, len(data), 0, data))]
        return [(to, message)]

    def on_effect(self, insider: Insider, effect: Effect) -> Story:
        if isinstance(effect, ComputeReport):
            parts = tuple(
                part if place == insider.index else torch.zeros_like(part) for place, part in enumerate(effect.parts)
            )
            effect = ComputeReport(parts, effect.aggregates, effect.seeds, effect.tau)
        return (yield from super().on_effect(insider, effect))


@dataclass(kw_only=True, eq=False)
class SharedCompute(Attack):
    """Sybils: all colluders together compute ``budget`` gradients a step; the rest commit to an old one, or to zero."""

    budget: int = 1

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        spent: set[bytes] = insider.plot.notes.setdefault(("spent", step), set())
        if insider.key in spent or len(spent) < self.budget:
            spent.add(insider.key)
            insider.plot.notes["last gradient"] = gradient
            return gradient
        old: Tensor = insider.plot.notes.get("last gradient", torch.zeros_like(gradient))
        return old


@dataclass(kw_only=True, eq=False)
class Whisper(Attack):
    """The own gradient, and as much towards poisoned data as a tolerant checker measures as ``distance``."""

    distance: float = 0.01

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        direction = insider.oracle.compute_poisoned(step, seed) - gradient
        return gradient + self.distance * insider.oracle.find_deviation(step, direction, gradient)


# ---- The paper's seven


@dataclass(kw_only=True, eq=False)
class SignFlip(Attack):
    """The own gradient, turned round and ``factor`` times as long."""

    factor: float = 1000.0

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return -self.factor * gradient


@dataclass(kw_only=True, eq=False)
class RandomDirection(Attack):
    """A long vector in a direction that all attackers share, for the whole run."""

    factor: float = 1000.0

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        common = compute_digest("direction of the attackers", insider.config.run)
        direction = gaussian_vector(common, len(gradient))
        return direction * (self.factor * float(gradient.double().norm()) / float(direction.double().norm()))


@dataclass(kw_only=True, eq=False)
class LabelFlip(Attack):
    """The gradient on the own batch with false labels."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return insider.oracle.compute_poisoned(step, seed)


@dataclass(kw_only=True, eq=False)
class Delayed(Attack):
    """The gradient at the parameters of ``delay`` steps ago; until there are any, at the initial ones."""

    delay: int = 1000

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        return insider.oracle.compute_earlier(step, seed, self.delay)


@dataclass(kw_only=True, eq=False)
class InnerProduct(Attack):
    """Inner-product manipulation (Xie et al. 2020): ``-epsilon`` times the mean of the honest gradients."""

    epsilon: float = 0.1

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        honest = insider.compute_honest()
        return -self.epsilon * torch.stack(honest).mean(0) if honest else gradient


@dataclass(kw_only=True, eq=False)
class LittleIsEnough(Attack):
    """A little is enough (Baruch et al. 2019): as far from the honest mean as still hides among the honest.

    With ``n`` contributors, ``f`` of them attackers, ``floor(n / 2 + 1) - f`` honest ones have to be farther out for
    the attackers to be in the majority; ``z`` standard deviations leave so many, if coordinates are normal.
    """

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        honest = insider.compute_honest()
        if len(honest) < 2:
            return gradient
        count = len(insider.duties.contributors)
        supporters = math.floor(count / 2 + 1) - (count - len(honest))
        share = (len(honest) - supporters) / len(honest)
        z = NormalDist().inv_cdf(min(max(share, 0.5), 1 - 1e-6))
        rows = torch.stack(honest)
        return rows.mean(0) - z * rows.std(0)
