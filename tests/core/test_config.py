"""Which numbers fit together, and that a refusal says what to change."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.config import AutomaticTau, Config, Tolerance
from phalanx.core.errors import LocalError
from phalanx.core.membership import compute_margin, make_genesis
from phalanx.core.messages import MAX_MEMBERS, MAX_PROJECTIONS


def make_keys(count: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(32, "big") for number in range(1, count + 1))


def make(members: int = 7, **fields: Any) -> Config:
    usual: dict[str, Any] = {"founders": make_keys(members), "byzantine": 2, "size": 4096, "steps": 10}
    return Config(**{**usual, **fields})


AUTO = AutomaticTau(multiple=1.5, start=1.0, floor=0.1, ceiling=10.0)


@pytest.mark.parametrize(
    "config",
    [
        make(),
        make(validators=2),
        make(4, byzantine=1),
        make(2, byzantine=0),
        make(3, byzantine=0, validators=1),
        make(16, byzantine=7),
        make(7, byzantine=2, partition_safe=True),
        make(10, byzantine=2, partition_safe=True),
        make(wire="bfloat16", cap=4.0),
        make(wire="float16", cap=4.0),
        make(wire="int8", cap=1.0),
        make(projections=MAX_PROJECTIONS),
        make(size=7),
        make(tau=AUTO),
        make(tau=msgspec.structs.replace(AUTO, floor=1.0, ceiling=1.0)),
        make(byzantine=0, tau=msgspec.structs.replace(AUTO, multiple=1e6)),
        make(tolerance=Tolerance(1e-6, 1e-3)),
        make(gradient_time=0.0, transfer_time=0.0),
        make(probation=1, probation_checks=5),
        make(MAX_MEMBERS, byzantine=127),
    ],
)
def test_valid_examples(config: Config) -> None:
    assert config.check() is config


REFUSALS: list[tuple[Config, str]] = [
    (make(MAX_MEMBERS + 1), f"{MAX_MEMBERS + 1} founders, but a roster holds at most {MAX_MEMBERS}"),
    (make(founders=(*make_keys(6), make_keys(1)[0])), "founders: a key is listed twice"),
    (make(byzantine=-1), "byzantine: expected a whole number from 0"),
    (make(validators=0), "validators: expected at least 1"),
    (make(5), "byzantine=2 leave room for validators = 0, not 1: lower byzantine to 1, or take 6 members"),
    (make(6, validators=2), "lower byzantine to 1, or take 7 members"),
    (make(validators=3), "= 2, not 3: lower byzantine to 1, or take 8 members"),
    (make(16, byzantine=7, validators=2), "= 1, not 2: lower byzantine to 6"),
    (make(16, byzantine=8), "= 0, not 1: lower byzantine to 7, or take 18 members"),
    (make(1, byzantine=0), "= 0, not 1: take 2 members"),
    (make(4, byzantine=0, validators=4), "= 3, not 4: lower validators to 3, or take 5 members"),
    (make(5, byzantine=1, validators=5), "= 2, not 5: lower validators to 2, or take 8 members"),
    (make(0, byzantine=0), "0 members"),
    (make(6, byzantine=2, partition_safe=True), 'quorum "partition-safe" .* lower byzantine to 1, or take 7 members'),
    (make(9, byzantine=3, partition_safe=True), 'quorum "partition-safe" .* lower byzantine to 2, or take 10 members'),
    (make(size=6), "size: a gradient of 6 coordinates cannot be cut into 7 parts"),
    (make(wire="int4"), "wire: 'int4' is not one of float32, bfloat16, float16, int8"),
    (make(projections=0), f"projections: expected 1 to {MAX_PROJECTIONS}"),
    (make(projections=MAX_PROJECTIONS + 1), f"projections: expected 1 to {MAX_PROJECTIONS}"),
    *((make(**{name: value}), f"{name}: expected a positive number")
      for name in ("cap", "delta_max", "delta", "tau") for value in (0.0, -1.0, math.inf, math.nan)),
    *((make(**{name: value}), f"{name}: expected a number from 0")
      for name in ("gradient_time", "transfer_time") for value in (-0.1, math.inf, math.nan)),
    (make(probation=4), "probation: probation steps times checks per step must be at least 5"),
    (make(probation_checks=0), "probation: "),
    (make(tau=msgspec.structs.replace(AUTO, floor=0.0)), "tau: expected floor <= start <= ceiling"),
    (make(tau=msgspec.structs.replace(AUTO, floor=2.0)), "tau: expected floor <= start <= ceiling"),
    (make(tau=msgspec.structs.replace(AUTO, ceiling=0.5)), "tau: expected floor <= start <= ceiling"),
    (make(tau=msgspec.structs.replace(AUTO, ceiling=math.inf)), "tau: expected floor <= start <= ceiling"),
    (make(tau=msgspec.structs.replace(AUTO, step_factor=1.0)), "tau: step_factor above 1"),
    (make(tau=msgspec.structs.replace(AUTO, memory=0)), "memory from 1"),
    (make(tau=msgspec.structs.replace(AUTO, multiple=0.0)), "tau: multiple 0.0"),
    (make(tau=msgspec.structs.replace(AUTO, multiple=2.0)), "tau: multiple 2.0 lets 2 attackers .* less than 2"),
    (make(tolerance=Tolerance(0.0, 1e-3)), "tolerance: expected 0 < lower < upper"),
    (make(tolerance=Tolerance(1e-3, 1e-3)), "tolerance: expected 0 < lower < upper"),
    (make(tolerance=Tolerance(1e-2, 1e-3)), "tolerance: expected 0 < lower < upper"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "complaint"), REFUSALS, ids=[complaint[:40] for _, complaint in REFUSALS])
def test_refusal_says_what_to_change(config: Config, complaint: str) -> None:
    with pytest.raises(LocalError, match=complaint):
        config.check()


@given(members=st.integers(1, 40), byzantine=st.integers(0, 20), validators=st.integers(1, 5))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_honest_contributors_are_a_majority_and_the_advice_helps(members: int, byzantine: int, validators: int) -> None:
    config = make(members, byzantine=byzantine, validators=validators)
    honest = members - byzantine - validators  # even if all of them are honest that check
    try:
        config.check()
    except LocalError as refusal:
        assert honest <= byzantine
        given = {"byzantine": byzantine, "validators": validators}
        advice = re.search(r"(?:lower (\w+) to (\d+), or )?take (\d+) members", str(refusal))
        assert advice is not None
        make(int(advice[3]), **given).check()
        if advice[1] is not None:
            assert int(advice[2]) < given[advice[1]]
            make(members, **{**given, advice[1]: int(advice[2])}).check()
        assert (advice[1] == "byzantine") == (members > validators)
    else:
        assert honest > byzantine


@given(st.integers(2, 40), st.integers(0, 20), st.integers(1, 5), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=300)
def test_who_is_let_found_a_run_stands_on_its_floor(members: int, byzantine: int, validators: int, safe: bool) -> None:
    """No configuration is taken that would wait from the first step on."""
    config = make(members, byzantine=byzantine, validators=validators, partition_safe=safe)
    try:
        config.check()
    except LocalError:
        return
    assert compute_margin(config, make_genesis(config)) >= 0


def test_nobody_is_asked_how_many_may_be_out() -> None:
    with pytest.raises(TypeError, match="outages"):
        make(outages=1)


# ---- The run's name

OTHERS: dict[str, Any] = {
    "founders": make_keys(8)[1:],
    "byzantine": 1,
    "validators": 2,
    "size": 4097,
    "steps": 11,
    "wire": "float16",
    "tau": 1.5,
    "cap": 2e3,
    "delta_max": 2e6,
    "projections": 2,
    "delta": 1.5,
    "gradient_time": 1.5,
    "transfer_time": 1.5,
    "partition_safe": True,
    "tolerance": Tolerance(1e-6, 1e-3),
    "strikes": 4,
    "complaints": 4,
    "complaint_window": 21,
    "probation": 13,
    "probation_checks": 2,
    "admissions": 3,
    "seed": b"s" * 32,
    "state": b"t" * 32,
}


@pytest.mark.parametrize("name", Config.__struct_fields__)
def test_run_changes_with_every_field(name: str) -> None:
    changed = msgspec.structs.replace(make(), **{name: make_other(name)})
    assert changed.check().run != make().run


def make_other(name: str) -> Any:
    """Another value that is allowed: for a field that is not listed here, a number that is one more."""
    return OTHERS[name] if name in OTHERS else getattr(make(), name) + 1


@pytest.mark.parametrize(
    "other",
    [
        make(founders=make_keys(7)[::-1]),
        make(tau=AUTO),
        *(
            make(tau=msgspec.structs.replace(AUTO, **{name: value}))
            for name, value in {
                "multiple": 1.25, "start": 1.25, "floor": 0.25, "ceiling": 11.0, "step_factor": 1.5, "memory": 9
            }.items()
        ),
        make(tolerance=Tolerance(1e-6, 2e-3)),
        make(tolerance=Tolerance(2e-6, 1e-3)),
    ],
)  # fmt: skip
def test_run_changes_with_what_is_inside_a_field(other: Config) -> None:
    names = {make().run, make(tau=AUTO).run, make(tolerance=Tolerance(1e-6, 1e-3)).run}
    assert other.check().run not in names - ({other.run} if other == make(tau=AUTO) else set())


def test_run_is_the_same_for_the_same_numbers() -> None:
    assert make().run == make().run
    assert len(make().run) == 32
