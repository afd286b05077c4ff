"""What others would use behind a trusted server, for comparison."""

from phalanx.baselines.aggregators import BASELINES, Baseline, get_baseline

__all__ = ["BASELINES", "Baseline", "get_baseline"]
