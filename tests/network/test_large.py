"""A run whose peers hold what past steps leave in files, as they do for large models: the benchmark in short."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_peers_with_shelves_pass_all_steps(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("phalanx_large", ROOT / "benchmarks" / "large.py")
    assert spec is not None
    assert spec.loader is not None
    large = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = large  # dataclasses look their module up
    spec.loader.exec_module(large)
    found = large.measure(1_000_000, 3, 3, tmp_path / "run", shelf=True)
    assert found["passed"]
    assert found["digests_equal"]
    assert found["removed"] == 0
    assert 0 < found["peak_pss_gb"] <= found["peak_rss_gb"]
    shelves = sorted((tmp_path / "run" / "swarm").glob("peer-*/run/shelf"))
    assert len(shelves) == 3
    assert not any(path for shelf in shelves for path in shelf.iterdir())
