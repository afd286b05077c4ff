"""Lies about the own gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from phalanx.attacks.base import Attack, Insider, Mail
from phalanx.core import messages as m
from phalanx.core.checking import cut
from phalanx.core.effects import ComputeReport, Effect, Sign, Story
from phalanx.core.merkle import compute_paths, hash_part
from phalanx.core.messages import Message, Signed
from phalanx.core.verification import WIRE_TYPES, encode_tensor, prepare_gradient

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
        dtype = WIRE_TYPES[config.wire]
        parts = cut(prepare_gradient(gradient, config.cap, dtype), len(roster))
        for place, data in enumerate(parts):
            if place != insider.index:
                parts[place] = encode_tensor(torch.full((len(data) // dtype.itemsize,), self.value, dtype=dtype))
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
