"""Weights by private samples and by number of modalities."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from polyfed.aggregation.weighting import Evidence, Weighting, log_count
from polyfed.core.effects import SEVERAL, SINGLE, Where


class IoT(Weighting):
    """a_c n_c, a_c being ``factor`` for clients of several modalities and 1 for others (Zhao et al., IoTDI 2022).

    FedIoT's weights of models, applied to clients' outputs on public samples: reamFL+IoT of the CreamFL paper.
    """

    factor: Annotated[float, Where(SINGLE) & Where(SEVERAL)] = Field(
        default=100.0, gt=0, description="FedIoT's alpha, for clients of several modalities"
    )

    def log_weights(self, evidence: Evidence) -> float:
        return log_count(evidence.examples * (self.factor if evidence.modalities > 1 else 1.0))
