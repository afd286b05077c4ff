"""The experiments and benchmarks in short: that they run, and that what they claim holds for a few seeds."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    name = f"phalanx_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def traffic() -> ModuleType:
    return load("benchmarks/traffic.py")


# ---- Conviction


def test_a_cheat_lasts_as_long_as_predicted() -> None:
    """The mean is within four standard errors of 1 / p."""
    conviction = load("experiments/conviction.py")
    n, b, m = conviction.SETTINGS[0]
    steps = [conviction.run_once((n, b, m, 1.0, False, seed)) for seed in range(10)]
    assert None not in steps
    error = stdev(steps) / math.sqrt(len(steps))
    assert abs(mean(steps) - conviction.predict(n, b, m, 1.0)) <= 4 * error


def test_a_run_that_goes_on_both_ways_comes_to_what_two_runs_come_to() -> None:
    rows = {}
    for way in ("--both", "--silent"):
        command = [sys.executable, ROOT / "experiments/conviction.py", "--runs", "3", "--only", "16,4,2", "--json", way]
        result = subprocess.run(command, capture_output=True, text=True)
        rows[way] = json.loads(result.stdout)["rows"]
    assert [row["silent"] for row in rows["--both"]] == [False, True]
    assert rows["--both"][1:] == rows["--silent"]


# ---- Sybils


@pytest.mark.parametrize("sharing", ["first", "members"])
def test_one_gradient_a_step_keeps_one_membership(sharing: str) -> None:
    sybils = load("experiments/sybils.py")
    result = sybils.run_once(sybils.Job(gradients=1, sharing=sharing, steps=40, probation=12, admissions=2, seed=0))
    assert result.steps == 40
    assert result.most <= 2
    assert result.honest_lost == 0


def test_sybils_that_compute_do_get_in() -> None:
    """Or the limit above would say nothing."""
    sybils = load("experiments/sybils.py")
    result = sybils.run_once(sybils.Job(gradients=2, sharing="members", steps=40, probation=5, admissions=2, seed=1))
    assert result.most == 2
    assert result.banned == 0


def test_rationed_sybils_stay_within_their_budget() -> None:
    sybils = load("experiments/sybils.py")
    row = sybils.summarize(1, "members", [sybils.Result(2, 1.0, 9, 0, 0), sybils.Result(3, 1.0, 8, 0, 0)])
    assert (row["most"], row["exceeded"], row["fewest_steps"]) == (3, 1, 8)


# ---- Honest peers


@pytest.mark.parametrize("tolerant", [False, True])
def test_honest_peers_have_nothing_to_fear(tolerant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = load("experiments/honest.py")
    monkeypatch.setattr(honest, "PEER_STEPS", 80)
    results = honest.run(400, tolerant, jobs=1, seed=7)
    assert honest.is_fine(results), results
    assert results["peer_steps"] >= 400


def test_rounding_that_is_not_tolerated_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the same peers without tolerance, and they ban one another: the experiment can fail."""
    honest = load("experiments/honest.py")
    monkeypatch.setattr(honest, "PEER_STEPS", 1)
    monkeypatch.setattr(honest, "TOLERANCE", None)
    monkeypatch.setattr(honest, "ROUNDING", 1e-2)  # more than any wire type rounds away
    results = honest.run(1, True, jobs=1, seed=4)
    assert results["Banned"]
    assert not honest.is_fine(results)


# ---- Traffic


def test_computed_chunks_are_those_that_are_sent(traffic: ModuleType) -> None:
    """Some parts longer than others, some in several chunks, and paths of two lengths."""
    for case in (traffic.Case(5, 1, 1_600_000), traffic.Case(6, 2, 1000), traffic.Case(4, 1, 4096 * 4 + 1, step=2)):
        measured = traffic.run_case(case)
        computed = traffic.compute_chunks(case, measured.validator)
        for kind in ("partchunk", "aggregatechunk"):
            assert measured.frames[kind] == computed.frames[kind]
            assert measured.numbers[kind] == computed.numbers[kind]


def test_agreed_messages_do_not_depend_on_the_size(traffic: ModuleType) -> None:
    found = [traffic.select_agreed(traffic.run_case(traffic.Case(16, 7, size)).frames) for size in (640, 12_800)]
    confirms = [frames.pop("CONFIRM") for frames in found]
    assert abs(confirms[1] - confirms[0]) < 0.01 * confirms[0], "it says how long things took"
    assert found[0] == found[1]
    assert {*found[0], "CONFIRM"} == {"COMMIT", "AGGREGATE", "REVEAL", "REPORT", "CONFIRM"}


def test_the_protocol_adds_little_to_a_butterfly(traffic: ModuleType) -> None:
    """At the size of a small ResNet, from a run of a thousandth of it."""
    measured = traffic.extend(traffic.SMALL, traffic.run_case(traffic.SMALL), traffic.FULL)
    overhead = sum(traffic.compute_overhead(traffic.FULL, measured).values())
    assert overhead < traffic.TARGETS["overhead_16"] * traffic.compute_butterfly(traffic.FULL)
    assert measured.frames.total() < traffic.compute_butterfly(traffic.FULL), "a validator scatters nothing"


def test_traffic_that_does_not_fit_is_not_extended(traffic: ModuleType) -> None:
    case = traffic.Case(4, 1, 64)
    measured = traffic.run_case(case)
    measured.frames["partchunk"] += 1
    with pytest.raises(ValueError, match="chunks"):
        traffic.extend(case, measured, traffic.Case(4, 1, 6400))


def test_tolerant_validators_fetch_the_bytes_of_their_targets(traffic: ModuleType) -> None:
    case = traffic.Case(5, 1, 1000, rounding=1e-6)
    measured = traffic.run_case(case)
    fetched = measured.numbers.total() - traffic.compute_chunks(case, measured.validator).numbers.total()
    assert 0.5 <= fetched / (traffic.WIDTH * case.size) <= 2


# ---- Speed


def test_the_benchmark_of_the_protocol_reports_what_it_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = load("benchmarks/protocol.py")
    monkeypatch.setattr(protocol, "STEPS", dict.fromkeys(protocol.STEPS, 1))
    monkeypatch.setattr(protocol, "WARM_UP", 1)
    results = protocol.run(turns=1)
    assert all(results[key] > 0 for key in protocol.TARGETS)
    assert all(results[f"{kind}_{count}"] > 0 for kind in ("ms", "cpu_ms") for count in protocol.BYZANTINE)


# ---- What cannot be


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("attacks.py --task nope", "task 'nope': not one of digits"),
        ("attacks.py --seeds 0", "--seeds: expected at least 1, got 0"),
        ("conviction.py --runs 0", "--runs: expected at least 2, got 0"),
        ("sybils.py --runs 0", "--runs: expected at least 1, got 0"),
        ("honest.py --peer-steps 0", "--peer-steps: expected at least 1, got 0"),
    ],
)
def test_an_experiment_that_cannot_be_is_one_line_and_exit_2(words: str, line: str) -> None:
    script, *options = words.split()
    command = [sys.executable, str(ROOT / "experiments" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ---- Attacks on training


def test_the_table_of_attacks_in_short() -> None:
    small = ROOT / "tests" / "training" / "small.py"
    options = f"--task {small}:task --steps 60 --start 5 --seeds 1 --attacks alie --margin 0.2 --json"
    command = [sys.executable, str(ROOT / "experiments" / "attacks.py"), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert set(rows) == {"honest", "alie", "sign_flip, mean"}
    assert rows["alie"]["honest_banned"] == 0
    assert rows["alie"]["metric"] > rows["sign_flip, mean"]["metric"]
