"""The source of the Python standard library, byte by byte: a language model on text that every machine has.

The library differs between Python versions. Peers with another one have another ``Task.digest``.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from phalanx.core.crypto import compute_digest
from phalanx.core.errors import LocalError
from phalanx.training.files import read_file
from phalanx.training.task import Data, Task
from phalanx.training.tasks.transformer import (
    CONTEXT,
    Transformer,
    complement_bytes,
    cut_windows,
    mean_next_byte_loss,
    next_byte_loss,
    pick_windows,
)

_MOST_BYTES = 1 << 24  # of one file


def make_task() -> Task:
    train, test = load_source(Path(sysconfig.get_path("stdlib")))
    return Task(
        name="pysource",
        model=Transformer,
        train=train,
        test=test,
        loss=next_byte_loss,
        metric=mean_next_byte_loss,
        metric_name="loss",
        higher_is_better=False,
        batch=32,
        poison=complement_bytes,
        recipe={
            "optimizer": "adamw",
            "rate": 3e-3,
            "beta2": 0.98,
            "weight_decay": 0.01,
            "schedule": "cosine",
            "warmup": 150,
            "steps": 600,
        },
    )


def load_source(folder: Path) -> tuple[Data, Data]:
    """Windows of the ``*.py`` files right in ``folder``, in the order of their names; about every tenth file is for
    testing, by a hash of its name, and 64 windows of those are used."""
    kept: dict[bool, list[bytes]] = {True: [], False: []}
    for path in sorted(folder.glob("*.py")):
        try:
            text = read_file(path, _MOST_BYTES, "source:")
        except LocalError:
            continue
        kept[_is_for_testing(path.name)].append(text)
    if not kept[True] or not kept[False]:
        raise LocalError(f"task 'pysource': expected the sources of the Python standard library, *.py, in {folder}")
    train, test = (cut_windows(b"".join(kept[which]), CONTEXT, str(folder)) for which in (False, True))
    return Data((train,)), Data((pick_windows(test),))


def _is_for_testing(name: str) -> bool:
    return compute_digest("pysource split", name.encode())[0] < 26  # of 256
