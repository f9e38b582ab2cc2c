"""Clients of several modalities alone."""

from __future__ import annotations

import math

from polyfed.aggregation.weighting import Evidence, Weighting


class PairedOnly(Weighting):
    """Only clients that encode more than one modality count, all alike (FedAFD, CVPR 2026, supplement, Table 9:
    Aggr-MM)."""

    def log_weights(self, evidence: Evidence) -> float:
        """0, or -inf for a client of one modality."""
        return 0.0 if evidence.modalities > 1 else -math.inf
