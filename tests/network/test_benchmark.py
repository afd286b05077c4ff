"""The benchmark of the network in short: that all its variants run, agree, and leave nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_network_benchmark_measures_all_variants(tmp_path: Path) -> None:
    script = ROOT / "benchmarks/network.py"
    options = ["--peers", "2", "--size", "327680", "--rounds", "1", "--warmup", "1", "--json"]
    done = subprocess.run(
        [sys.executable, str(script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode in (0, 1), done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    names = ("gloo_s", "averager_s", "averager_step_s", "butterfly_s", "critical_s", "protected_s", "verify_cpu_s")
    assert all(results[name] > 0 for name in names)
    assert results["critical_s"] < results["protected_s"]
    assert results["cpu_s"].keys() == results["daemon_cpu_s"].keys() == {"gloo", "averager", "butterfly", "protected"}
    assert 0.999 < results["bytes_ratio"] < 1.001, "the network sends what the simulator says"
    assert all(target["met"] in (True, False) for target in results["targets"].values())
    assert not list(tmp_path.iterdir()), "files are left behind"
