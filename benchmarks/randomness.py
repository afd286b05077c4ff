"""Gaussian vectors from a public seed against torch's own generator, on one core, measured in one run.

    python benchmarks/randomness.py [--json]

With ``--json`` the last line of the output is one JSON object. The exit status is 0 if the target is met, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from phalanx.core.randomness import gaussian_vector

SIZE = 20_000_000
REPEATS = 9
TARGET = 100.0  # million values a second


def measure_rate(call: Callable[[], object]) -> float:
    """Million values a second."""
    start = time.perf_counter()
    call()
    return SIZE / 1e6 / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seed, generator = bytes(range(32)), torch.Generator().manual_seed(0)
    pairs = [
        (
            measure_rate(lambda: gaussian_vector(seed, SIZE)),
            measure_rate(lambda: torch.randn(SIZE, generator=generator)),
        )
        for _ in range(REPEATS + 1)
    ][1:]
    ours, torchs = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    if arguments.json:
        print(json.dumps({"million_a_second": ours, "torch_million_a_second": torchs, "target": TARGET}))
    else:
        print(f"{ours:.0f} million values a second (target {TARGET:.0f}), torch.randn {torchs:.0f} million, one core")
    return 0 if ours >= TARGET else 1


if __name__ == "__main__":
    raise SystemExit(main())
