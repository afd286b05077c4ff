"""The machinery of attacks: loading by name, when they act, what they change and what they leave alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from arena import assert_safe, run_arena
from torch import Tensor

from phalanx.attacks import ATTACKS, Attack, Insider, combine, load_attack
from phalanx.attacks.base import Combined
from phalanx.attacks.broadcast import Late, WrongRoot
from phalanx.attacks.gradients import WrongGradient
from phalanx.core.errors import LocalError

# ---- load_attack


def test_every_name_loads_and_takes_options() -> None:
    for name, make in ATTACKS.items():
        assert isinstance(load_attack(name), Attack)
        assert isinstance(make(start=1, probability=0.5), Attack), name


def test_options_in_the_text() -> None:
    attack = load_attack("wrong_gradient@10%0.5")
    assert (type(attack), attack.start, attack.probability) == (WrongGradient, 10, 0.5)
    both = load_attack("shielded_gradient@3")
    assert isinstance(both, Combined)
    assert {part.start for part in both.attacks} == {3}


OWN = """
from phalanx.attacks import Attack
class Mine(Attack):
    pass
instance = Mine(start=4)
def make():
    return Mine(start=5)
def broken():
    raise RuntimeError("no")
number = 3
"""


@pytest.mark.parametrize(("name", "start"), [("Mine", 0), ("instance", 4), ("make", 5), ("make@7", 7)])
def test_own_attack_from_a_file(tmp_path: Path, name: str, start: int) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    assert load_attack(f"{file}:{name}").start == start


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense", "attack 'nonsense' is unknown; expected one of none, sign_flip"),
        ("", "expected NAME or FILE.py:NAME"),
        ("honest@x", "expected NAME or FILE.py:NAME"),
        ("honest%2", "a probability is a number from 0 to 1"),
        ("honest%1.2.3", "a probability is a number from 0 to 1"),
        ("missing.py:x", "there is no file missing.py"),
        ("OWN:absent", "has no 'absent'; it has Attack, Mine, instance"),
        ("OWN:number", "a int; expected an Attack"),
        ("OWN:broken", "calling it without arguments failed"),
        ("BAD:x", "cannot be run"),
    ],
)
def test_complaints_say_what_was_expected(tmp_path: Path, text: str, complaint: str) -> None:
    for name, content in (("OWN", OWN), ("BAD", "import nothing_of_this_name")):
        (tmp_path / name).write_text(content)
        text = text.replace(f"{name}:", f"{tmp_path / name}:")
    with pytest.raises(LocalError) as error:
        load_attack(text)
    assert complaint in str(error.value)


# ---- When an attack acts


@dataclass(kw_only=True, eq=False)
class Watcher(Attack):
    """Remembers the steps whose gradient it saw, and leaves it as it is."""

    def on_gradient(self, insider: Insider, step: int, seed: bytes, gradient: Tensor) -> Tensor:
        assert seed == insider.seed
        insider.notes.setdefault("steps", []).append(step)
        return gradient


def get_steps(attack: Attack, **options: Any) -> list[int]:
    arena = run_arena(attack, **options)
    assert_safe(arena)
    found: list[int] = arena.insiders[arena.attackers[0]].notes.get("steps", [])
    return found


def test_own_gradients_only_and_once_a_step() -> None:
    steps = get_steps(Watcher(), seed=3)
    assert steps == sorted(set(steps))
    assert len(steps) >= 5


def test_start_and_stop() -> None:
    assert set(get_steps(Watcher(start=2, stop=5), seed=3)) <= {2, 3, 4}


def test_probability() -> None:
    assert get_steps(Watcher(probability=0.0)) == []
    some = get_steps(Watcher(probability=0.5), steps=12, seed=3)
    assert 0 < len(some) < 12


def test_the_honest_attack_changes_nothing() -> None:
    fair, same = run_arena(seed=6), run_arena(Attack(), Late(delay=0.0, stop=0), seed=6)
    assert same.ends
    assert all(fair.ends[key].digest == view.digest for key, view in same.ends.items())
    # Each run ends when its honest peers have: before that, message for message.
    fair, same = run_arena(seed=6, limit=9.0), run_arena(Attack(), Late(delay=0.0, stop=0), seed=6, limit=9.0)
    assert not fair.ends
    assert fair.world.deliveries == same.world.deliveries > 500


def test_a_seed_is_the_whole_run() -> None:
    one, two = (run_arena(ATTACKS["replay"](), ATTACKS["wrong_gradient"](), seed=8, steps=5) for _ in range(2))
    assert one.world.now == two.world.now
    assert one.ends == two.ends


def test_combined_attacks_both_act() -> None:
    attack = combine(Watcher(), WrongRoot(start=2))
    arena = run_arena(attack, seed=3)
    assert_safe(arena)
    assert arena.removed == set(arena.attackers)
    assert min(arena.insiders[arena.attackers[0]].notes["steps"]) < 2  # before the other begins


def test_a_vector_function_is_an_attack() -> None:
    arena = run_arena(WrongGradient(change=lambda gradient, random: torch.ones_like(gradient)), seed=2)
    assert_safe(arena)
    assert arena.banned_rules == [{"V4"}]
