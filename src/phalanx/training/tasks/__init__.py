"""Tasks that come with Phalanx, and tasks from a user's file."""

from __future__ import annotations

import inspect
import random
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phalanx.core.errors import LocalError
from phalanx.training.task import Task
from phalanx.training.tasks import cifar10, digits, pysource, text

TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits.make_task,
    "pysource": pysource.make_task,
    "cifar10": cifar10.make_task,
    "text": text.make_task,
}
"""Each makes a task; its arguments are the task's options, all of them text."""

_NO_OPTIONS: Mapping[str, str] = {}


def load_task(spec: str, options: Mapping[str, str] = _NO_OPTIONS) -> Task:
    """The task that ``spec`` names: one of ours, or ``FILE.py:NAME``.

    What a file names is a Task, or a function that makes one; the function's arguments, if it has any, are its options.
    """
    found = _find(spec)
    if isinstance(found, Task):
        if options:
            raise LocalError(f"task {spec!r}: takes no options, got {', '.join(options)}")
        return found
    if not callable(found):
        raise LocalError(f"task {spec!r}: a {type(found).__name__}; expected a Task, or a function that makes one")
    _require_options(spec, found, options)
    if spec in TASKS:
        return TASKS[spec](**options)
    try:
        task = found(**options)
    except LocalError:
        raise
    except Exception as error:
        raise LocalError(f"task {spec!r}: calling it failed: {error!r}") from error
    if not isinstance(task, Task):
        raise LocalError(f"task {spec!r}: returned a {type(task).__name__}; expected a Task")
    return task


def _find(spec: str) -> Any:
    file, colon, name = spec.rpartition(":")
    if not colon:
        if spec not in TASKS:
            raise LocalError(f"task {spec!r}: not one of {', '.join(TASKS)}, and no FILE.py:NAME")
        return TASKS[spec]
    path = Path(file)
    if not path.is_file():
        raise LocalError(f"task {spec!r}: there is no file {file!r}; expected FILE.py:NAME")
    try:
        found = _run_file(path)
    except LocalError:
        raise
    except (Exception, SystemExit) as error:
        raise LocalError(f"task {spec!r}: {file} cannot be run: {error!r}") from error
    if name not in found:
        own = [key for key, value in found.items() if isinstance(value, Task)]
        raise LocalError(f"task {spec!r}: {file} has no {name!r}; it has {', '.join(own) or 'no tasks'}")
    return found[name]


def _run_file(path: Path) -> dict[str, Any]:
    """What a file defines. It finds its neighbours, and draws the same random numbers each time it is run."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            return runpy.run_path(str(path), run_name=path.stem)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        sys.path.remove(folder)


def _require_options(spec: str, make: Callable[..., Any], options: Mapping[str, str]) -> None:
    known = inspect.signature(make).parameters
    for name in options:
        if name not in known:
            raise LocalError(f"task {spec!r}: has no option {name!r}; it has {', '.join(known) or 'none'}")
    missing = [name for name, p in known.items() if p.default is p.empty and name not in options]
    if missing:
        words = " ".join(f"--option {name}=..." for name in missing)
        raise LocalError(f"task {spec!r}: needs the option {' and '.join(missing)}; give it with {words}")
