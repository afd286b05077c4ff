"""A small causal transformer over bytes, its loss and metric, and how text is cut into rows.

Pre-norm, learned positions, a hidden layer four times as wide, no dropout. A row is a window of ``context + 1`` bytes:
each byte but the first is predicted from those before it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.core.errors import LocalError
from phalanx.training.task import Batch, Data

CONTEXT = 128
TEST_WINDOWS = 64
_BYTES = 256


class Transformer(nn.Module):
    """The logits of the next byte, at every place of a batch of byte sequences."""

    def __init__(self, context: int = CONTEXT, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)
        for table in (self.bytes, self.places, self.head):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.hidden_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden_in, self.hidden_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        hidden: Tensor = self.hidden_out(nn.functional.gelu(self.hidden_in(self.hidden_norm(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.attention_in(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(found.transpose(1, 2).reshape(rows, length, width))
        return out


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of the next byte, in nats."""
    (windows,) = batch
    tokens = windows.long()
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def mean_next_byte_loss(model: nn.Module, data: Data) -> float:
    """The same over all of the data: nats per byte."""
    chunks = list(data.chunks(TEST_WINDOWS))
    return sum(float(next_byte_loss(model, batch)) * len(batch[0]) for batch in chunks) / len(data)


def complement_bytes(batch: Batch) -> Batch:
    """Byte ``x`` becomes ``255 - x``."""
    return (255 - batch[0], *batch[1:])


def cut_windows(text: bytes, context: int, what: str) -> Tensor:
    """Windows of ``context + 1`` bytes, each starting with the last byte of the one before; the rest is left out."""
    count = (len(text) - 1) // context
    if count < 1:
        raise LocalError(f"{what}: {len(text)} bytes are too few; at least {context + 1} are needed")
    values = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return values[: count * context + 1].unfold(0, context + 1, context).contiguous()


def pick_windows(windows: Tensor, count: int = TEST_WINDOWS) -> Tensor:
    """``count`` windows, evenly spread, or all if there are fewer."""
    count = min(count, len(windows))
    return windows[torch.arange(count) * len(windows) // count]
