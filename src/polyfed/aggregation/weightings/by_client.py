"""Weights over clients by who they are: samples, and modalities."""

from __future__ import annotations

import math
from typing import ClassVar

from pydantic import Field

from polyfed.aggregation.weighting import Evidence, Weighting, log_count


class Mean(Weighting):
    """Every client counts alike: FedMD's consensus (Li & Wang 2019), and CreamFL's ablation without weights."""

    short_name: ClassVar[str] = "mean"

    def log_weights(self, evidence: Evidence) -> float:
        """0."""
        return 0.0


class Count(Weighting):
    """n_c, the private samples of a client, as FedAvg weighs models (McMahan et al. 2017): reamFL+Avg."""

    short_name: ClassVar[str] = "count"

    def log_weights(self, evidence: Evidence) -> float:
        return log_count(evidence.examples)


class IoT(Weighting):
    """a_c n_c, a_c being ``factor`` for clients of several modalities and 1 for others (Zhao et al., IoTDI 2022).

    FedIoT's weights of models, applied to clients' outputs on public samples: reamFL+IoT of the CreamFL paper.
    """

    short_name: ClassVar[str] = "iot"

    factor: float = Field(default=100.0, gt=0, description="FedIoT's alpha, for clients of several modalities")

    def log_weights(self, evidence: Evidence) -> float:
        return log_count(evidence.examples * (self.factor if evidence.modalities > 1 else 1.0))


class PairedOnly(Weighting):
    """Only clients that encode more than one modality count, all alike (FedAFD, CVPR 2026, supplement, Table 9:
    Aggr-MM)."""

    short_name: ClassVar[str] = "paired_only"

    def log_weights(self, evidence: Evidence) -> float:
        """0, or -inf for a client of one modality."""
        return 0.0 if evidence.modalities > 1 else -math.inf
