"""No pickle anywhere: nothing in ``src`` can turn bytes into code.

Walks the syntax tree of every module, and shows with planted samples that it would find what it looks for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent.parent / "src"
MODULES = sorted(SOURCE.rglob("*.py"))

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "copyreg"}
BANNED_BUILTINS = {"eval", "exec", "__import__"}
BANNED_CALLS = {
    *(f"builtins.{name}" for name in BANNED_BUILTINS),
    "torch.save",
    "torch.hub.load",
    "torch.jit.load",
    "torch.package",
    "torch.serialization.save",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.all_gather_object",
    "torch.distributed.gather_object",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
    "torch.distributed.recv_object_list",
}
# Allowed only with this argument, written out.
GUARDED_CALLS = {"torch.load": ("weights_only", True), "torch.serialization.load": ("weights_only", True)}
# Allowed unless this argument has another value.
DEFAULT_SAFE_CALLS = {"numpy.load": ("allow_pickle", False)}
# May import only what is written out.
IMPORTERS = {"importlib.import_module", "importlib.__import__"}


def find_violations(source: str) -> list[str]:
    tree = ast.parse(source)
    names = collect_imports(tree)
    return [f"line {line}: {what}" for line, what in sorted(set(walk(tree, names)))]


def collect_imports(tree: ast.AST) -> dict[str, str]:
    """What the module's names stand for: ``np`` for ``numpy``, ``load`` for ``torch.load``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.split(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def full_name(node: ast.AST, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute):
        owner = full_name(node.value, names)
        return owner and f"{owner}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else None


def walk(tree: ast.AST, names: dict[str, str]) -> Iterator[tuple[int, str]]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            yield from ((line, f"imports {alias.name}") for alias in node.names if is_banned_module(alias.name))
        elif isinstance(node, ast.ImportFrom):
            yield from ((line, f"imports {each}") for each in imported_from(node) if is_banned(each))
        elif isinstance(node, ast.Attribute | ast.Name):
            name = full_name(node, names)
            if name and (is_banned(name) or (name in GUARDED_CALLS | DEFAULT_SAFE_CALLS and id(node) not in called)):
                yield line, f"uses {name}"
        elif isinstance(node, ast.Call):
            yield from ((line, complaint) for complaint in check_call(node, full_name(node.func, names) or ""))


def imported_from(node: ast.ImportFrom) -> list[str]:
    return [f"{node.module or ''}.{alias.name}" for alias in node.names]


def is_banned_module(name: str) -> bool:
    return not BANNED_MODULES.isdisjoint(name.split("."))


def is_banned(name: str) -> bool:
    """A banned function, or anything whose name speaks of pickle."""
    speaks = any("pickle" in part.lower() for part in name.split("."))
    return name in BANNED_CALLS | BANNED_BUILTINS or is_banned_module(name) or speaks


def check_call(node: ast.Call, name: str) -> Iterator[str]:
    arguments = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in GUARDED_CALLS:
        argument, value = GUARDED_CALLS[name]
        if not is_literal(arguments.get(argument), value):
            yield f"calls {name} without {argument}={value}"
    if name in DEFAULT_SAFE_CALLS:
        argument, value = DEFAULT_SAFE_CALLS[name]
        hidden = None in arguments or len(node.args) > 2
        if hidden or (argument in arguments and not is_literal(arguments[argument], value)):
            yield f"calls {name} with another {argument} than {value}"
    if name in IMPORTERS and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield f"calls {name} with a name that is computed"
    elif name in IMPORTERS and is_banned_module(str(node.args[0].value)):  # type: ignore[attr-defined]
        yield f"imports {node.args[0].value}"  # type: ignore[attr-defined]


def is_literal(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def test_there_is_something_to_check() -> None:
    assert SOURCE / "phalanx" / "core" / "codec.py" in MODULES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_can_turn_bytes_into_code(path: Path) -> None:
    assert find_violations(path.read_text(encoding="utf-8")) == []


PLANTED = [
    "import pickle",
    "import pickle as json",
    "import os, pickle",
    "import cPickle",
    "import _pickle",
    "import dill",
    "import cloudpickle as cp",
    "import marshal",
    "import shelve",
    "import joblib",
    "import dill.session",
    "from pickle import loads",
    "from pickle import loads as parse",
    "from multiprocessing import reduction\nreduction.ForkingPickler",
    "from hivemind.utils.serializer import PickleSerializer",
    "from six.moves import cPickle",
    "def f():\n    import pickle",
    "try:\n    import pickle\nexcept ImportError:\n    pass",
    "__import__('pickle')",
    "__import__('pick' + 'le')",
    "import importlib\nimportlib.import_module('pickle')",
    "import importlib\nimportlib.import_module('pick' + 'le')",
    "from importlib import import_module as get\nget(name)",
    "import torch\ntorch.load(path)",
    "import torch\ntorch.load(path, weights_only=False)",
    "import torch\ntorch.load(path, weights_only=safe)",
    "import torch\ntorch.load(path, **options)",
    "import torch as t\nt.load(path)",
    "from torch import load\nload(path)",
    "from torch import load as get\nget(path, map_location='cpu')",
    "import torch\nget = torch.load",
    "import torch\ntorch.serialization.load(path)",
    "import torch\ntorch.save(state, path)",
    "from torch import save as put\nput(state, path)",
    "import torch\ntorch.jit.load(path)",
    "import torch\ntorch.hub.load('a/b', 'c')",
    "import torch.distributed as dist\ndist.broadcast_object_list(items)",
    "from torch import distributed\ndistributed.all_gather_object(items, item)",
    "import numpy as np\nnp.load(path, allow_pickle=True)",
    "import numpy as np\nnp.load(path, None, True)",
    "import numpy\nnumpy.load(path, allow_pickle=flag)",
    "from numpy import load\nload(path, allow_pickle=True)",
    "import numpy as np\nnp.load(path, **options)",
    "import numpy as np\nget = np.load",
    "import pandas as pd\npd.read_pickle(path)",
    "frame.to_pickle(path)",
    "eval(text)",
    "exec(text)",
    "run = eval",
    "import builtins\nbuiltins.exec(text)",
    "from builtins import eval as calculate\ncalculate(text)",
    "[eval(line) for line in lines]",
]


@pytest.mark.parametrize("source", PLANTED)
def test_what_is_planted_is_found(source: str) -> None:
    assert find_violations(source) != []


HARMLESS = [
    "model.eval()",
    "self.model.eval()",
    "import torch\ntorch.load(path, weights_only=True)",
    "import torch\ntorch.load(path, map_location='cpu', weights_only=True)",
    "import numpy as np\nnp.load(path)",
    "import numpy as np\nnp.load(path, allow_pickle=False)",
    "import numpy as np\nnp.load(path, 'r')",
    "import json\njson.load(file)",
    "import tomllib\ntomllib.load(file)",
    "from safetensors.torch import save\nsave(state)",
    "import importlib\nimportlib.import_module('hivemind')",
    "'''No pickle here.'''",
    "x = 'pickle'  # only text",
    "from . import codec",
    "cursor.execute(statement)",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_harmless_is_not_found(source: str) -> None:
    assert find_violations(source) == []
