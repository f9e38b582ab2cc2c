"""Equal weights."""

from __future__ import annotations

from polyfed.aggregation.weighting import Evidence, Weighting


class Mean(Weighting):
    """Every client counts alike: FedMD's consensus (Li & Wang 2019), and CreamFL's ablation without weights."""

    def log_weights(self, evidence: Evidence) -> float:
        """0."""
        return 0.0
