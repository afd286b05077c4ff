"""Byzantine peers: filters on the effects of an honest one. See ``base.py`` for what an attack is made of."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

from phalanx.attacks.base import Attack, Combined, Insider, Mail, Plot, combine
from phalanx.attacks.table import ATTACKS
from phalanx.core.errors import LocalError

__all__ = ["ATTACKS", "Attack", "Insider", "Mail", "Plot", "combine", "load_attack"]

_TEXT = re.compile(r"(?P<name>[^@%]+)(@(?P<start>\d+))?(%(?P<probability>[0-9.]+))?")
_EXPECTED = "expected NAME or FILE.py:NAME, then perhaps @STEP and %PROBABILITY"


def load_attack(text: str) -> Attack:
    """The attack that ``name[@start][%probability]`` names; the name is one of ours, or ``file.py:name``.

    What a file names is an Attack, a subclass, or a function without arguments that makes one.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise LocalError(f"attack {text!r}: {_EXPECTED}")
    options: dict[str, Any] = {}
    if match["start"] is not None:
        options["start"] = int(match["start"])
    if match["probability"] is not None:
        try:
            options["probability"] = float(match["probability"])
        except ValueError:
            options["probability"] = -1.0
        if not 0 <= options["probability"] <= 1:
            raise LocalError(f"attack {text!r}: a probability is a number from 0 to 1, not {match['probability']}")
    return _set(_find(match["name"]), options)


def _set(attack: Attack, options: dict[str, Any]) -> Attack:
    if isinstance(attack, Combined):
        return combine(*(_set(part, options) for part in attack.attacks))
    return dataclasses.replace(attack, **options) if options else attack


def _find(name: str) -> Attack:
    file, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in ATTACKS:
            raise LocalError(f"attack {name!r}: not one of {', '.join(ATTACKS)}, and no FILE.py:NAME")
        return ATTACKS[name]()
    path = Path(file)
    if not path.is_file():
        raise LocalError(f"attack {name!r}: there is no file {file}; {_EXPECTED}")
    try:
        found = runpy.run_path(str(path), run_name=path.stem)
    except Exception as error:
        raise LocalError(f"attack {name!r}: {file} cannot be run: {error!r}") from error
    if attribute not in found:
        own = [
            key
            for key, value in found.items()
            if isinstance(value, Attack) or (isinstance(value, type) and issubclass(value, Attack))
        ]
        raise LocalError(f"attack {name!r}: {file} has no {attribute!r}; it has {', '.join(own) or 'no attacks'}")
    value = found[attribute]
    if not isinstance(value, Attack) and callable(value):
        try:
            value = value()
        except Exception as error:
            raise LocalError(f"attack {name!r}: calling it without arguments failed: {error!r}") from error
    if not isinstance(value, Attack):
        raise LocalError(
            f"attack {name!r}: a {type(value).__name__}; expected an Attack, a subclass, or a function that makes one"
        )
    return value
