"""Weights by private samples."""

from __future__ import annotations

from polyfed.aggregation.weighting import Evidence, Weighting, log_count


class Count(Weighting):
    """n_c, the private samples of a client, as FedAvg weighs models (McMahan et al. 2017): reamFL+Avg."""

    def log_weights(self, evidence: Evidence) -> float:
        return log_count(evidence.examples)
