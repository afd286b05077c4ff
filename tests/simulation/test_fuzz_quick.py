"""A selection of random runs, and that a seed is the whole run. ``phalanx fuzz`` runs as many as one likes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.attacks import ATTACKS
from phalanx.core.errors import LocalError
from phalanx.simulation import scenario as scenarios
from phalanx.simulation.scenario import draw_scenario, parse_seeds, run_scenario, run_seed

HERE = Path(__file__).parent
QUICK = (1, 7, 20, 32, 55, 60, 81, 97)

# Attacks that are younger than the seeds that failed. A new name wins some of the draws, and who draws something else
# no longer shows what went wrong: so those seeds are drawn as though these did not exist.
LATER = frozenset(
    {
        "every_deadline",
        "every_deadline_and_round",
        "half_deadlines",
        "deadlines_in_turns",
        "late_parts",
        "slow_commit",
        "too_slow_commit",
        "slow_to_one",
        "slow_parts_to_one",
        "slow_aggregates_to_one",
        "slow_letters_to_one",
        "slow_to_one_in_turns",
        "false_lacking",
        "quiet_complaints",
        "many_accusations",
        "cover_and_leave",
        "hidden_part",
        "part_for_validators",
        "friends_missing",
        "mixed_item",
        "long_endorsements",
        "long_bodies",
        "late_reveal_for_one",
        "unreceived_trials",
        "silent_on_charge",
        "edge_lie",
        "late_accusation",
        "report_for_one",
        "aggregate_for_one",
        "half_shown_charge",
        "late_opening",
        "late_denial",
        "overridden_case",
        "free_proofs",
        "half_shown_proof",
        "first_in_line",
        "friend_proofs",
        "slow_vote",
        "gives_up_friend",
        "gives_away_friend",
        "long_leave",
        "return_for_newcomer",
        "sacrifice",
        "one_by_one",
        "trial_of_other_step",
        "last_trial",
        "certificate_for_one",
        "leave_by_certificate",
        "patient_takeover",
        "patient_gradient",
        "patient_aggregate",
        "patient_floor",
        "patient_redraw",
        "patient_shares",
        "patient_silence",
        "patient_naming",
        "patient_accusing",
        "patient_return",
        "patient_all",
    }
)


def read_failed_seeds() -> list[tuple[int, dict[str, str]]]:
    found = []
    for line in (HERE / "failed_seeds.txt").read_text().splitlines():
        words = line.partition("#")[0].split()
        if words:
            names = [word.removeprefix("--") for word in words[1::2]]
            found.append((int(words[0]), dict(zip(names, words[2::2], strict=True))))
    return found


def check(seed: int, peers: int | None = None, steps: int | None = None, attack: str | None = None) -> None:
    result = run_seed(seed, peers, steps, attack)
    complaint = "\n".join(map(str, result.violations))
    assert not result.violations, f"{complaint}\nreplay: {result.command}"


@pytest.mark.parametrize("seed", QUICK)
def test_invariants_hold_in_a_random_run(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize(("seed", "options"), read_failed_seeds())
def test_a_seed_that_once_failed_does_not_fail_again(
    seed: int, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "ATTACKS", {name: make for name, make in ATTACKS.items() if name not in LATER})
    peers, steps = (int(options[name]) if name in options else None for name in ("peers", "steps"))
    check(seed, peers, steps, options.get("attack"))


def test_one_seed_is_one_run() -> None:
    scenario = draw_scenario(12, peers=5, steps=8)
    assert run_scenario(scenario).trace_digest == run_scenario(scenario).trace_digest
    other = draw_scenario(13, peers=5, steps=8)
    assert run_scenario(scenario).trace_digest != run_scenario(other).trace_digest


@pytest.mark.parametrize("attack", ["equivocate", "framing", "hit_and_vanish"])
def test_a_run_is_the_same_in_another_process(attack: str) -> None:
    """Whatever the order in which sets of keys are walked through there."""
    scenario = f"draw_scenario(12, 7, 6, {attack!r})"
    code = f"from phalanx.simulation.scenario import *; print(run_scenario({scenario}).trace_digest)"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_checkers_change_nothing() -> None:
    scenario = draw_scenario(12, peers=5, steps=8)
    assert run_scenario(scenario, checkers=False).trace_digest == run_scenario(scenario).trace_digest


def test_scenarios_stay_within_what_the_configuration_allows() -> None:
    full = 0
    for seed in range(300):
        scenario = draw_scenario(seed)
        settings = scenario.settings
        n, b, m, c = scenario.peers, settings["byzantine"], settings["validators"], scenario.away
        assert m + c <= n - 2 * b - 1
        assert len(scenario.attacks) <= b
        assert settings["steps"] >= 30
        assert scenario.links["delta"] <= 0.9 * settings["delta"]
        splits = [fault for fault in scenario.faults if fault.kind == "split"]
        assert not splits or not scenario.attacks or settings["partition_safe"]
        full += len(scenario.attacks) == (n - 1 - m - c) // 2
    assert full >= 100, "attackers should often be as many as may be"


@pytest.mark.parametrize("text", ["", "5", "5:5", "7:3", "a:b", "-1:3", "1:2:3", "1.0:2", ":", "²:9"])
def test_bad_ranges_of_seeds_are_refused(text: str) -> None:
    with pytest.raises(LocalError, match="seeds"):
        parse_seeds(text)


def test_a_violation_is_reported_with_the_command_that_replays_it(tmp_path: Path) -> None:
    """A swarm that is told to expect fewer attackers than there are does not hold, and says so."""
    scenario = draw_scenario(4, peers=5, steps=10, attack="silent")
    assert scenario.command == "phalanx fuzz --seeds 4:5 --peers 5 --steps 10 --attack silent"
    phalanx = Path(sys.executable).parent / "phalanx"
    file = tmp_path / "broken.py"
    file.write_text(
        "from phalanx.simulation import checkers\n"
        "from phalanx.attacks import Attack\n"
        "checkers.Memory._limits = lambda *_: {'pages': 0}\n"
        "mine = Attack()\n"
    )
    arguments = ["fuzz", "--seeds", "4:5", "--steps", "2", "--peers", "5", "--attack", f"{file}:mine", "--json"]
    result = subprocess.run([phalanx, *arguments], capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert f"replay: phalanx fuzz --seeds 4:5 --peers 5 --steps 2 --attack {file}:mine" in result.stderr
    assert "seed 4, step " in result.stderr
    assert "bounded memory" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["violations"] > 0
