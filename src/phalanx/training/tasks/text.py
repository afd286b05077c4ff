"""Language models on text of one's own, byte by byte: one file, or a folder of ``*.txt``.

The last tenth of each file is for testing; of those windows 64, evenly spread, are used. ``model`` is ``bytes``, the
causal transformer of ``pysource``, or ``albert``, a masked language model in the shape of ALBERT: 15% of the bytes are
to be guessed, of which 80% are hidden, 10% replaced by another byte and 10% left as they are. Its weights are random,
nothing is downloaded. Sizes can be set with ``context``, ``width``, ``layers`` and ``heads``.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from phalanx.core.errors import LocalError
from phalanx.training.files import read_file
from phalanx.training.task import Batch, Data, Task
from phalanx.training.tasks.transformer import (
    CONTEXT,
    TEST_WINDOWS,
    Transformer,
    complement_bytes,
    cut_windows,
    mean_next_byte_loss,
    next_byte_loss,
    pick_windows,
)

_MASK = 256  # the token after the bytes
_IGNORED = -100
_MOST_BYTES = 1 << 30
"""Of all text together: it is held in memory."""
_VECTORS = 5
"""As long as the model that a peer holds in memory at once, at least."""
_RECIPE = {
    "optimizer": "adamw",
    "rate": 3e-3,
    "beta2": 0.98,
    "weight_decay": 0.01,
    "schedule": "cosine",
    "warmup": 50,
    "steps": 1000,
}


def make_task(
    data: str, model: str = "bytes", context: str = str(CONTEXT), width: str = "64", layers: str = "2", heads: str = "4"
) -> Task:
    if model not in ("bytes", "albert"):
        raise LocalError(f"task 'text': model {model!r} is unknown; expected bytes or albert")
    sizes = {"context": context, "width": width, "layers": layers, "heads": heads}
    numbers = {name: _read_size(name, value) for name, value in sizes.items()}
    if numbers["width"] % numbers["heads"]:
        raise LocalError(f"task 'text': width {width} cannot be divided among {heads} heads")
    _require_memory(**numbers)
    train, test = load_text(Path(data), numbers["context"])
    masked = model == "albert"
    if masked:
        _require_transformers()
        test = Data(hide_bytes(test.tensors, Generator().manual_seed(0)))
    return Task(
        name=f"text {model} {context} {width} {layers} {heads}",
        model=partial(make_albert if masked else Transformer, **numbers),
        train=train,
        test=test,
        loss=hidden_byte_loss if masked else next_byte_loss,
        metric=mean_hidden_byte_loss if masked else mean_next_byte_loss,
        metric_name="loss",
        higher_is_better=False,
        batch=8,
        augment=hide_bytes if masked else None,
        poison=complement_bytes,
        recipe=_RECIPE,
    )


def load_text(path: Path, context: int) -> tuple[Data, Data]:
    """Training and test windows. Windows do not reach from one file into the next."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise LocalError(f"data: expected *.txt files in the folder {path}; there are none")
    train, test, left = [], [], _MOST_BYTES
    for file in files:
        try:
            text = read_file(file, left, "data:")
        except LocalError as error:
            raise LocalError(f"{error}; expected a text file or a folder, {_MOST_BYTES:,} bytes in all") from None
        left -= len(text)
        border = len(text) - len(text) // 10
        train.append(cut_windows(text[:border], context, f"data: the first nine tenths of {file}"))
        test.append(cut_windows(text[border:], context, f"data: the last tenth of {file}"))
    return Data((torch.cat(train),)), Data((pick_windows(torch.cat(test)),))


def _read_size(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= 1 << 16):
        raise LocalError(f"task 'text': {name}: expected a whole number from 1 to 65536, got {value!r}")
    return int(value)


def _require_memory(context: int, width: int, layers: int, heads: int) -> None:
    """The sizes come with the manifest, from whoever founded the run: look before anything is taken."""
    parameters = 12 * width * width * layers + (2 * _MASK + context) * width
    needed, here = 4 * _VECTORS * parameters, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > here:
        raise LocalError(
            f"task 'text': a model of width {width} with {layers} layers needs {needed / 1e9:,.0f} GB of memory, and "
            f"this machine has {here / 1e9:,.0f}; take a smaller one"
        )


# ---- Masked language model


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise LocalError("task 'text': model albert needs another package: pip install -e '.[albert]'") from None


def make_albert(context: int, width: int, layers: int, heads: int) -> nn.Module:
    """ALBERT with random weights: all layers share theirs. Tokens are the bytes and a mask. No dropout."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=_MASK + 1,
        embedding_size=width,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=context + 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = AlbertForMaskedLM(config)  # type: ignore[no-untyped-call]
    return model


def hide_bytes(batch: Batch, generator: Generator) -> Batch:
    """The tokens to show, and the bytes to guess: -100 where there is nothing to guess."""
    tokens = batch[0].long()
    fate = torch.rand(tokens.shape, generator=generator)
    noise = torch.randint(_MASK, tokens.shape, generator=generator)
    shown = torch.where(fate < 0.12, _MASK, torch.where(fate < 0.135, noise, tokens))
    return shown, torch.where(fate < 0.15, tokens, _IGNORED)


def hidden_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of the bytes to guess, in nats."""
    shown, wanted = batch
    logits: Tensor = model(shown).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=_IGNORED)


@torch.no_grad()
def mean_hidden_byte_loss(model: nn.Module, data: Data) -> float:
    """The same over all of the data: nats per hidden byte."""
    total = hidden = 0.0
    for batch in data.chunks(TEST_WINDOWS):
        count = float((batch[1] != _IGNORED).sum())
        total += float(hidden_byte_loss(model, batch)) * count if count else 0.0
        hidden += count
    return total / hidden
