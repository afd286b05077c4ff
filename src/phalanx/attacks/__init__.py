"""Byzantine peers: filters on the effects of an honest one. See ``base.py`` for what an attack is made of."""

from __future__ import annotations

import dataclasses
import math
import re
import runpy
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from phalanx.attacks.base import Attack, Combined, Insider, Mail, Plot, combine
from phalanx.attacks.table import ATTACKS, FAMILIES, PAPER
from phalanx.core.errors import LocalError

__all__ = [
    "ATTACKS",
    "PAPER",
    "Attack",
    "Insider",
    "Mail",
    "Plot",
    "combine",
    "get_start",
    "list_parts",
    "load_attack",
    "set_options",
]

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
    return set_options(_find(match["name"]), **options)


def set_options(attack: Attack, **options: Any) -> Attack:
    """The same attack with another ``start``, ``every`` or ``probability``; who shields does so always.

    Everything in the attack moves along with ``start``: its end, and the parts that begin later.
    """
    shift = options.pop("start") - get_start(attack) if "start" in options else 0
    return _change(attack, shift, options)


def list_parts(attack: Attack) -> tuple[Attack, ...]:
    """What an attack is combined of; itself if it is not."""
    return attack.attacks if isinstance(attack, Combined) else (attack,)


def get_start(attack: Attack) -> int:
    """The step in which an attack begins."""
    return min(part.start for part in list_parts(attack))


def _change(attack: Attack, shift: int, options: dict[str, Any]) -> Attack:
    if isinstance(attack, Combined):
        return combine(*(_change(part, shift, options) for part in attack.attacks))
    if attack.steady:
        options = {name: value for name, value in options.items() if name != "every"}
    stop = attack.stop + shift if attack.stop is not None else None
    return dataclasses.replace(attack, start=attack.start + shift, stop=stop, **options)


def _make(name: str) -> Attack:
    """One of our own attacks."""
    make = PAPER.get(name) or ATTACKS.get(name)
    if make is not None:
        return make()
    family, _, number = name.rpartition("_")
    if family in FAMILIES:
        try:
            if not 0 < float(number) < math.inf:
                raise ValueError
            return FAMILIES[family](number)()
        except ValueError:
            raise LocalError(f"attack {name!r}: {number!r} is not a number that {family} takes") from None
    close = get_close_matches(name, [*PAPER, *ATTACKS], n=3, cutoff=0.7)
    hint = f"; did you mean {' or '.join(close)}" if close else ""
    raise LocalError(
        f"attack {name!r} is unknown{hint}; expected one of {', '.join(PAPER)}, one of the {len(ATTACKS)} attacks on "
        "the protocol in phalanx.attacks.ATTACKS, or FILE.py:NAME"
    )


def _find(name: str) -> Attack:
    file, colon, attribute = name.rpartition(":")
    if not colon:
        return _make(name)
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
